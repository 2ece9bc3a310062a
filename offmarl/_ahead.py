"""Work that is started before its results are needed."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import TypeVar

_Item = TypeVar("_Item")
_Work = TypeVar("_Work")


def ahead(
    items: Iterable[_Item], start: Callable[[_Item], _Work], depth: int
) -> Iterator[tuple[_Item, _Work]]:
    """Yield each item with the work that was started on it, in order.

    Parameters
    ----------
    items
        May be endless.
    start
        Starts the work on an item, such as a read, and returns what its result comes from.
    depth
        Items whose work is under way, or waits to be used, when the caller takes one.
    """
    rest = iter(items)
    waiting = deque((item, start(item)) for item in islice(rest, depth))
    while waiting:
        yield waiting.popleft()
        waiting.extend((item, start(item)) for item in islice(rest, 1))


def depth_of(item_bytes: int, memory: int = 2**26) -> int:
    """Return how many items to work on at once, at least 2, so that they fit in memory."""
    return max(2, math.ceil(memory / max(item_bytes, 2**16)))
