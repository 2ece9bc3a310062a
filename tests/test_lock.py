"""Locks of directories that are written: their holders, and takeovers."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from offmarl._lock import FileLock, _age, hold_lock, take_over_locks
from offmarl.errors import RunError

HOLD = """
import sys, time
from pathlib import Path
from offmarl._lock import hold_lock
with hold_lock(Path(sys.argv[1]), Path("result")):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def lock(tmp_path):
    return tmp_path / "run" / "run.lock"


@pytest.fixture
def holder(lock):
    """A process that holds the lock."""
    child = subprocess.Popen([sys.executable, "-c", HOLD, lock], stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "held\n"
    yield child
    child.kill()
    child.communicate()


def forge(lock, **changes):
    lock.parent.mkdir(exist_ok=True)
    lock.write_text(json.dumps({"host": "elsewhere", "process": 7, "since": 0.0} | changes))


def test_only_one_writes_and_the_others_learn_who(lock, holder):
    message = rf"^result is being written by process {holder.pid} on {socket.gethostname()}, for "
    with pytest.raises(RunError, match=message), hold_lock(lock, Path("result"), take_over=True):
        pass
    assert json.loads(lock.read_text())["process"] == holder.pid


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_dead_process_of_this_machine_is_taken_over(lock, holder, signum):
    holder.send_signal(signum)
    holder.wait()
    with hold_lock(lock, Path("result")):
        assert json.loads(lock.read_text())["process"] == os.getpid()
    assert not lock.exists()


def test_a_lock_ends_with_its_block_and_nothing_stays(lock):
    with pytest.raises(KeyError), hold_lock(lock, lock.parent):
        with pytest.raises(RunError, match=f"process {os.getpid()}"), hold_lock(lock, lock.parent):
            pass
        raise KeyError
    assert list(lock.parent.iterdir()) == []


def test_a_process_of_another_machine_is_taken_over_by_a_person(lock):
    forge(lock)
    os.utime(lock, (0, 0))
    metrics = lock.with_name("metrics.jsonl")
    metrics.touch()
    os.utime(metrics, (3600 * 5, 3600 * 5))
    message = r"process 7 on elsewhere, which has shown no sign of life for \d+ days.* --take-over"
    with pytest.raises(RunError, match=message), hold_lock(lock, lock.parent):
        pass
    assert json.loads(lock.read_text())["host"] == "elsewhere"
    with hold_lock(lock, lock.parent, take_over=True):
        assert json.loads(lock.read_text())["host"] == socket.gethostname()
    assert not lock.exists()


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-5, "0 s"),
        (119, "119 s"),
        (120, "2 min"),
        (7199, "120 min"),
        (7200, "2 h"),
        (2e5, "2 days"),
    ],
)
def test_ages_are_in_units_of_which_there_are_two(seconds, text, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: 10.0**6)
    assert _age(10.0**6 - seconds) == text


def test_a_task_takes_over_by_itself(lock):
    forge(lock)
    with take_over_locks(), hold_lock(lock, lock.parent):
        pass


def test_the_age_of_a_file_is_that_of_the_files_of_its_name(tmp_path):
    lock, file = tmp_path / ".t.toml.tasks" / "launch.lock", tmp_path / "t.toml"
    forge(lock)
    os.utime(lock, (0, 0))
    (tmp_path / "other.db").touch()
    with pytest.raises(RunError, match=r"for \d{3,} days"), hold_lock(lock, file):
        pass
    (tmp_path / "t.db").touch()
    with pytest.raises(RunError, match=r"for \d s"), hold_lock(lock, file):
        pass


def test_a_lock_that_was_taken_over_stays(lock):
    with hold_lock(lock, lock.parent):
        forge(lock)
    assert json.loads(lock.read_text())["host"] == "elsewhere"


@pytest.mark.parametrize(
    "text", ["", "\0" * 64, "{", "[]", '{"host": 1}', '{"host": "elsewhere", "process": "7"}']
)
def test_a_text_that_names_nobody_is_that_of_no_lock(lock, text):
    lock.parent.mkdir()
    lock.write_text(text)
    with hold_lock(lock, lock.parent):
        pass


def test_while_a_lock_is_removed_the_next_one_is_taken(lock, monkeypatch):
    """A process may have opened the file that the holder removes."""
    acquire, removed = FileLock.acquire, []

    def late(self, timeout=0.0):
        if not removed:
            lock.unlink()
            removed.append(lock)
        return acquire(self, timeout)

    monkeypatch.setattr(FileLock, "acquire", late)
    with hold_lock(lock, lock.parent):
        assert json.loads(lock.read_text())["process"] == os.getpid()


def test_without_flock_a_live_process_is_respected(lock, holder, monkeypatch):
    def missing(self, timeout=0.0):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(FileLock, "acquire", missing)
    with pytest.raises(RunError, match=f"process {holder.pid}"), hold_lock(lock, lock.parent):
        pass
    holder.kill()
    holder.wait()
    with hold_lock(lock, lock.parent):
        pass


@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
def test_a_lock_is_a_file(lock, tmp_path, kind):
    lock.parent.mkdir()
    other = tmp_path / "precious"
    other.write_text("text")
    {"link": lambda: lock.symlink_to(other), "pipe": lambda: os.mkfifo(lock)}.get(
        kind, lock.mkdir
    )()
    with pytest.raises(RunError, match="cannot be written to"), hold_lock(lock, lock.parent):
        pass
    assert other.read_text() == "text"
