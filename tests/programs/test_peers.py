"""What the processes of a run know of one another, with a dictionary as the service."""

import threading

import jax
import pytest

from offmarl.errors import OptionError
from offmarl.programs import peers
from offmarl.programs.peers import Peers


class Service:
    """Stands for the client of JAX's coordination service; all processes share one."""

    def __init__(self):
        self.values, self.hangs = {}, False

    def key_value_set(self, key, value, allow_overwrite=False):
        if key in self.values and not allow_overwrite:
            raise jax.errors.JaxRuntimeError("ALREADY_EXISTS")
        self.values[key] = value

    def blocking_key_value_get(self, key, timeout_in_ms):
        if self.hangs or key not in self.values:
            threading.Event().wait(timeout_in_ms / 1000)
            raise jax.errors.JaxRuntimeError("DEADLINE_EXCEEDED")
        return self.values[key]

    def key_value_dir_get(self, key):
        return [(name, value) for name, value in self.values.items() if name.startswith(key)]


@pytest.fixture
def start(monkeypatch):
    """Start the peers of a process: ``start(0)``; returns them and the reasons for their end."""
    for name in ("_BEAT_SECONDS", "_HEARD_SECONDS"):
        monkeypatch.setattr(peers, name, 0.01)
    monkeypatch.setattr(peers, "_SILENT_SECONDS", 0.1)
    service, started = Service(), []

    def start(own, facts=None):
        reasons, ended = [], threading.Event()

        def end(reason):
            reasons.append(reason)
            found.leave()
            ended.set()

        found = Peers(service, own, 2, patience=0.2, end=end)
        found.start()
        started.append(found)
        if facts is not None:
            found.compare(facts)
        found.service, found.reasons, found.ended = service, reasons, ended
        return found

    yield start
    for one in started:
        one.leave()


def test_a_process_that_fails_tells_the_others_why(start):
    first, second = start(0), start(1)
    first.advice = "Start all again."
    second.tell("ValueError: a bug")
    assert first.ended.wait(10)
    assert first.reasons == ["process 1 of 2 ended: ValueError: a bug. Start all again."]
    assert not second.reasons  # its main thread ends it


def test_process_0_ends_all_if_another_one_hangs(start):
    first, second = start(0), start(1)
    first.service.values["offmarl/alive/1"] = "7"
    second.leave()
    assert first.ended.wait(10)
    assert first.reasons == ["process 1 of 2 has not answered for 0.2 s."]
    third = start(1)
    assert third.ended.wait(10) and third.reasons == first.reasons


def test_the_others_end_if_process_0_hangs(start):
    second = start(1)
    second.service.hangs = True
    assert second.ended.wait(10)
    assert second.reasons == ["process 0 of 2 has not answered for 0.2 s."]


def test_a_process_that_is_done_is_not_lost(start, monkeypatch):
    first, second = start(0), start(1)

    def refuse(thread):
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)  # as Python 3.12 does at exit
    second._finish()
    assert not first.ended.wait(0.5)
    assert second.service.values["offmarl/alive/1"] == "done"


def test_a_failed_exchange_names_the_process_that_is_silent(start):
    first, second = start(0), start(1)
    first.leave()
    assert second.explain() == "process 0 was lost"


def test_a_failed_exchange_gives_the_reason_of_the_other_process(start):
    first, second = start(0), start(1)
    second.leave()
    first.tell("the disk is full")
    assert second.explain() == "process 0 of 2 ended: the disk is full"


def test_processes_are_started_with_the_same_command(start):
    first = start(0, {"--seed": 0, "--steps": 8})
    with pytest.raises(OptionError, match="--seed is 1 in process 1 and 0 in process 0: give all"):
        start(1, {"--seed": 1, "--steps": 8})
    assert first.ended.wait(10) and "--seed is 1 in process 1" in first.reasons[0]
    with pytest.raises(OptionError, match="two processes have --process 0: give each a number"):
        start(0, {"--seed": 0, "--steps": 8})
