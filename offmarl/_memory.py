"""When the process frees memory: Python's garbage collector, and the heap of the C library.

To trace a program makes millions of objects, few of them garbage. With Python's threshold, 700
objects, collecting takes a tenth of the time before the first update, so that a command collects
rarely while it starts. Afterwards cycles of objects may hold large arrays, which must not wait long
to be freed.

glibc keeps what each thread has freed, for later use by the same thread. A process that streams
data and compiles programs frees much memory in many threads, and needs little of it again. The
functions of the heap do nothing where the C library is another one.
"""

import ctypes
import gc
from contextlib import suppress
from functools import cache

_before: list[tuple[int, int, int]] = []


def collect_rarely() -> None:
    """Collect garbage rarely, until `collect_as_before` is called."""
    if not _before:
        _before.append(gc.get_threshold())
        gc.set_threshold(50_000, 20, 50)


def collect_as_before() -> None:
    """Undo `collect_rarely`, if it was called."""
    while _before:
        gc.set_threshold(*_before.pop())


_MMAP_THRESHOLD = -3
"""Number of glibc's option for the size from which a block is returned once it is freed."""


@cache
def return_blocks_from(size: int) -> None:
    """Return blocks of this many bytes or more to the system whenever they are freed."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, size)


def return_free() -> None:
    """Return to the system what is free now, which takes some milliseconds."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
