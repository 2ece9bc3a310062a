"""Options from function parameters and dataclass fields, the same way everywhere."""

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

from offmarl.paths import expanded

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

    with _constructors():
        return tyro.cli(
            documented(target),
            prog=f"offmarl {command}",
            description=description,
            args=arguments,
            config=conventions(),
        )


def _constructors() -> Any:
    """Return how values are made of text: ``~`` is expanded, which shells leave in --out=~/runs."""
    from tyro.constructors import (
        ConstructorRegistry,
        PrimitiveConstructorSpec,
        PrimitiveTypeInfo,
    )

    registry = ConstructorRegistry()

    @registry.primitive_rule
    def path_rule(kind: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Path] | None:
        if kind.type is not Path:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="PATH",
            instance_from_str=lambda texts: expanded(texts[0]),
            is_instance=lambda value: isinstance(value, Path),
            str_from_instance=lambda path: [str(path)],
        )

    return registry


def conventions() -> tuple[Any, ...]:
    """Return how options are made: no value that means none, and a flag says one thing only."""
    from tyro.conf import DisallowNone, FlagCreatePairsOff

    return DisallowNone, FlagCreatePairsOff


def documented(target: Callable[..., T]) -> Callable[..., T]:
    """Return a function as tyro's help shows it best; a dataclass is returned as it is.

    The text of a parameter is in one piece, since tyro would keep its line breaks and add others,
    and defaults that are nothing at all are not mentioned.
    """
    from tyro.conf import arg

    if isinstance(target, type):
        return target

    @functools.wraps(target)
    def shown(*args: Any, **options: Any) -> T:
        return target(*args, **options)

    del shown.__wrapped__  # tyro would look at that instead
    shown.__signature__ = inspect.signature(target)  # type: ignore[attr-defined]
    shown.__doc__ = re.sub(
        r"(?m)^    .+(?:\n    .+)+",
        lambda block: "    " + " ".join(block[0].split()),
        inspect.getdoc(target) or "",
    )
    hints = get_type_hints(target, include_extras=True)
    for name, parameter in inspect.signature(target).parameters.items():
        if parameter.default is False or parameter.default in (None, "", ()):
            hints[name] = Annotated[hints[name], arg(help_behavior_hint="")]
    shown.__annotations__ = hints
    return shown
