"""How those who do something long tell how far they are."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

Advance = Callable[[int], object]
"""Told how many more steps of each row are done."""

Progress = Callable[[str, int], AbstractContextManager[Advance]]
"""Shows how far something is: told what is done and how many steps it takes in all, and then how
many more are done. `offmarl.tracking.progress` is one."""


def silent(steps: int) -> None:
    """No-op callback."""


@contextmanager
def quiet(description: str, total: int) -> Iterator[Advance]:
    """Show nothing."""
    del description, total
    yield silent
