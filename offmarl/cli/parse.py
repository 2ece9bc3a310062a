"""Options from function parameters and dataclass fields, the same way everywhere."""

from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def parse(target: Callable[..., T], command: str, description: str, arguments: list[str]) -> T:
    """Call a function, or build a dataclass, with arguments from the command line.

    Ends the process with exit code 0 after ``--help``, and 2 where the arguments are not right.

    Parameters
    ----------
    target
        What to call; its parameters become the options.
    command
        The words before the arguments, such as "ls" or "train bc".
    description
        Printed by ``--help``.
    arguments
        As they were typed.
    """
    import tyro

    return tyro.cli(
        target,
        prog=f"offmarl {command}",
        description=description,
        args=arguments,
        config=(tyro.conf.DisallowNone,),
    )
