"""Makes the C library return memory that the process has freed.

glibc keeps what each thread has freed, for later use by the same thread. A process that streams
data and compiles programs frees much memory in many threads, and needs little of it again. These
functions do nothing where the C library is another one.
"""

import ctypes
from contextlib import suppress
from functools import cache

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
