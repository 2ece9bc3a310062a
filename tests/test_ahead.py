"""Starting work before its results are needed."""

import socket
import threading
import time
from itertools import count

import pytest

from offmarl._ahead import ahead, depth_of, in_thread, unreachable
from tests.children import python


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_so_many_are_started_when_one_is_taken(depth):
    started = []
    work = ahead(count(), lambda item: started.append(item) or -item, depth)
    assert started == []
    for number in range(3):
        assert next(work) == (number, -number)
        assert started == list(range(number + depth))


@pytest.mark.parametrize("items", [0, 1, 2, 7])
def test_all_items_in_order(items):
    assert list(ahead(range(items), str, 3)) == [(item, str(item)) for item in range(items)]


def test_an_error_of_the_start_leaves_what_came_before():
    work = ahead([4, 2, 0, 1], lambda item: 8 // item, 2)
    assert next(work) == (4, 2)
    with pytest.raises(ZeroDivisionError):
        next(work)


@pytest.mark.parametrize(
    ("item_bytes", "depth"), [(0, 1024), (2**16 + 1, 1024), (2**24, 4), (2**24 + 1, 4), (2**30, 2)]
)
def test_items_fit_in_memory(item_bytes, depth):
    assert depth_of(item_bytes) == depth


ABANDONED = """
import time
from offmarl._ahead import in_thread
in_thread(lambda: (time.sleep(0.5), print("ended")), "slow").cancel()
"""


def test_the_interpreter_waits_for_abandoned_work() -> None:
    """A thread that returned from TensorStore after the interpreter's end aborted the process."""
    assert python("-c", ABANDONED) == "ended\n"


def test_abandoned_work_ends_at_its_next_item():
    done, started, go_on = [], threading.Event(), threading.Event()

    def work():
        for item, _ in ahead(count(), str, 2):
            done.append(item)
            started.set()
            go_on.wait()

    future = in_thread(work, "endless")
    started.wait()
    assert future.cancel()
    go_on.set()
    end = time.monotonic() + 10
    while any(thread.name == "endless" for thread in threading.enumerate()):
        assert time.monotonic() < end
    assert done == [0]


AT_THE_END = """
import time
from itertools import count
from offmarl._ahead import ahead, in_thread
work = lambda: [time.sleep(0.1) for _ in ahead(count(), str, 2)]
in_thread(work, "endless")
"""


def test_work_that_reads_on_ends_with_the_interpreter() -> None:
    start = time.monotonic()
    python("-c", AT_THE_END)
    assert time.monotonic() - start < 8  # it waits for 10 s at most


@pytest.mark.parametrize("scheme", ["http://", ""])
def test_a_server_is_reached_by_a_proxy(monkeypatch, scheme):
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as proxy:
        monkeypatch.setenv("https_proxy", f"{scheme}127.0.0.1:{proxy.getsockname()[1]}")
        assert unreachable("https://server.invalid", 5.0) == ""
    assert unreachable("https://server.invalid", 5.0) == "Connection refused"
