"""Starts work before its results are needed."""

import atexit
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future, InvalidStateError, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cache
from itertools import islice
from threading import Event, Thread, local
from typing import Any, TypeVar
from weakref import WeakSet

_Item = TypeVar("_Item")
_Work = TypeVar("_Work")

_LEAVE_SECONDS = 10.0
"""How long the end of the interpreter waits for threads whose work was abandoned."""
COMPILING = "offmarl-compile"
"""Name of threads in XLA, which cannot be interrupted, and aborts a process that ends below it."""
_threads: WeakSet[Thread] = WeakSet()
_leaving = Event()
_own = local()


def ahead(
    items: Iterable[_Item], start: Callable[[_Item], _Work], depth: int
) -> Iterator[tuple[_Item, _Work]]:
    """Yield each item with the handle of its work, which is started ``depth`` items ahead.

    The items may be infinite; see `end_if_abandoned`.
    """
    iterator = iter(items)
    waiting = deque((item, start(item)) for item in islice(iterator, depth))
    while waiting:
        end_if_abandoned()
        yield waiting.popleft()
        waiting.extend((item, start(item)) for item in islice(iterator, 1))


def in_thread(work: Callable[[], _Work], name: str, awaited: bool = True) -> "Future[_Work]":
    """Do work in a thread of its own, which keeps the process alive for a few seconds at most.

    Who cancels the future abandons the work: its result is dropped, and the thread ends at the next
    call of `end_if_abandoned`. The end of the interpreter waits for it, unless it is not awaited.
    """
    done: Future[_Work] = Future()

    def run() -> None:
        _own.future = done
        with suppress(InvalidStateError):  # it was cancelled
            try:
                result = work()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(result)

    thread = Thread(target=run, name=name, daemon=True)
    if awaited:
        _threads.add(thread)
    thread.start()
    return done


def in_pool(work: Callable[[], _Work]) -> "Future[_Work]":
    """Do short work, such as decoding, in one of a few threads that all share."""
    return _pool().submit(work)


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count() or 1, "offmarl-pool")


os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not survive a fork


def end_if_abandoned() -> None:
    """Raise `CancelledError` in a thread whose work nobody waits for; work calls it now and then.

    Nobody waits once the future of `in_thread` is cancelled, or the interpreter ends.
    """
    future: Future[Any] | None = getattr(_own, "future", None)
    if future is not None and (future.cancelled() or _leaving.is_set()):
        raise CancelledError


def call_briefly(work: Callable[[], _Work], name: str, seconds: float) -> _Work:
    """Return what work that may hang returns; `TimeoutError` after so many seconds."""
    done = in_thread(work, name, awaited=False)
    wait([done], seconds)
    if not done.done():
        raise TimeoutError(f"no answer in {seconds:g} s")
    return done.result()


def unreachable(url: str, seconds: float) -> str:
    """Return why a server cannot be reached; an empty text if it accepts connections.

    It is tried in a thread that is abandoned after a while, because the lookup of a host name can
    take long and cannot be interrupted. The first hop is the proxy, if one is set.
    """
    import socket  # starting needs none of these
    from urllib.parse import urlsplit
    from urllib.request import getproxies, proxy_bypass

    address = urlsplit(url)
    proxy = getproxies().get(address.scheme)
    if proxy and not proxy_bypass(address.hostname or ""):
        address = urlsplit(proxy if "://" in proxy else f"http://{proxy}")

    def attempt() -> None:
        port = address.port or {"http": 80}.get(address.scheme, 443)
        socket.create_connection((address.hostname or "", port), seconds).close()

    try:
        call_briefly(attempt, "offmarl-reach", seconds)
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return ""


@atexit.register
def _leave() -> None:
    """Let the threads end: one that comes back from TensorStore later aborts the process."""
    _leaving.set()
    end = time.monotonic() + _LEAVE_SECONDS
    for thread in [*_threads]:
        thread.join(None if thread.name == COMPILING else max(end - time.monotonic(), 0.0))


def depth_of(item_bytes: int) -> int:
    """Return how many items of this size fit in 64 MB, at least 2 and at most 1024."""
    return max(2, math.ceil(2**26 / max(item_bytes, 2**16)))
