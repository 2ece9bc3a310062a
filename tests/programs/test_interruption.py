"""Saving at intervals and on the signals that ask a program to stop, and what lines say of time."""

import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from offmarl import tracking
from offmarl.errors import OffmarlError, Stopped
from offmarl.programs.runs import training
from offmarl.programs.runs.training import Means, checkpoint_timer, more_to_come

SIGNALS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(autouse=True)
def handlers():
    """Python's own handlers, which a suite that runs in the background may not have."""
    defaults = (signal.default_int_handler, signal.SIG_DFL)
    before = [signal.signal(signum, how) for signum, how in zip(SIGNALS, defaults, strict=True)]
    yield defaults
    assert tuple(map(signal.getsignal, SIGNALS)) == defaults
    for signum, how in zip(SIGNALS, before, strict=True):
        signal.signal(signum, how)


def test_a_checkpoint_is_due_when_its_time_has_come(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(training.time, "monotonic", lambda: now[0])
    with checkpoint_timer(30.0, "update") as timer:
        now[0] += 1000  # reading the data takes its time
        timer.begin(0)
        timer.work_done()
        now[0] += 30
        assert not timer.is_due()
        now[0] += 1
        assert timer.is_due()
        timer.saved(5)
        assert not timer.is_due()


@pytest.mark.parametrize(("seconds", "asked"), [(0.01, 25), (10.0, 1999)])
def test_processes_ask_one_another_about_once_a_second_and_at_each_save(
    monkeypatch, seconds, asked
):
    """An exchange takes milliseconds, and blocks of updates may, too."""
    now, counts, of_another = [100.0], [0], [None]

    def agree(due, signum, calls=0):
        counts[0] += 1
        return due, signum or of_another[0], calls

    monkeypatch.setattr(training.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(training.jax, "process_count", lambda: 2)
    monkeypatch.setattr(training, "agree", agree)
    with pytest.raises(Stopped), checkpoint_timer(1e6, "update") as timer:
        timer.begin(0)
        for _ in range(2000):
            timer.work_done()
            assert not timer.is_due()
            now[0] += seconds
        assert counts[0] == asked
        timer.saved(5)
        of_another[0] = signal.SIGTERM
        timer.saved(6)


def test_a_signal_asks_jax_nothing_as_it_may_be_starting(monkeypatch):
    with pytest.raises(Stopped), checkpoint_timer(30.0, "update") as timer:
        monkeypatch.setattr(training.jax, "process_count", lambda: pytest.fail("it was asked"))
        timer.begin(0)
        timer.work_done()
        signal.raise_signal(signal.SIGINT)
        timer.saved(5)


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_saves_the_work_and_stops(signum):
    with pytest.raises(Stopped) as stopped, checkpoint_timer(30.0, "update") as timer:
        timer.begin(0)
        timer.work_done()
        signal.raise_signal(signum)
        assert timer.is_due()
        timer.saved(12_300)
    assert str(stopped.value) == "stopped at update 12,300: the same command resumes there."
    assert stopped.value.signum == signum
    assert isinstance(stopped.value, KeyboardInterrupt)
    assert not isinstance(stopped.value, OffmarlError)


@pytest.mark.parametrize(
    ("part", "begun", "says"),
    [
        ("", None, "before the first step of this command: the same command continues."),
        ("", 0, "before the first checkpoint: the same command starts again."),
        ("", 70, "at step 70: the same command resumes there."),
        ("a", 0, "before the first checkpoint of a: the same command starts again."),
        ("a", 70, "at step 70 of a: the same command resumes there."),
    ],
)
def test_without_work_to_save_a_signal_stops_at_once(part, begun, says):
    with pytest.raises(Stopped) as stopped, checkpoint_timer(30.0, "step", part) as timer:
        if begun is not None:
            timer.begin(begun)
        signal.raise_signal(signal.SIGTERM)
        pytest.fail("goes on")
    assert str(stopped.value) == f"stopped {says}"


@pytest.mark.parametrize("second", SIGNALS)
def test_a_second_signal_stops_at_once(second):
    with (
        pytest.raises(Stopped, match=r"at step 10: .* resumes there") as stopped,
        checkpoint_timer(30.0, "step") as timer,
    ):
        timer.begin(10)
        timer.work_done()
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(second)
        pytest.fail("goes on")
    assert stopped.value.signum == second


def test_a_signal_that_comes_as_the_work_ends_changes_nothing():
    with checkpoint_timer(30.0, "step") as timer:
        timer.begin(0)
        timer.work_done()
        signal.raise_signal(signal.SIGINT)


def test_a_signal_that_comes_as_the_work_ends_stops_the_work_after_it():
    with (
        pytest.raises(Stopped, match=r"^stopped: the same command continues\.$") as stopped,
        more_to_come(),
        more_to_come(False),  # of the part under way, which is itself followed by others
        checkpoint_timer(30.0, "step") as timer,
    ):
        timer.begin(0)
        timer.work_done()
        signal.raise_signal(signal.SIGTERM)
    assert stopped.value.signum == signal.SIGTERM
    test_a_signal_that_comes_as_the_work_ends_changes_nothing()


def test_handlers_of_the_application_stay():
    signals = []
    signal.signal(signal.SIGTERM, lambda *_: signals.append("application"))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as of what a shell starts in the background
    with checkpoint_timer(30.0, "step") as timer:
        timer.work_done()
        for signum in SIGNALS:
            signal.raise_signal(signum)
        assert not timer.is_due()
    assert signals == ["application"]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_other_threads_get_no_handlers(handlers):
    inside = []

    def work():
        with checkpoint_timer(30.0, "step") as timer:
            inside.extend(map(signal.getsignal, SIGNALS))
            timer.saved(1)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert tuple(inside) == handlers


# ---------------------------------------------------------------------------------- lines


def test_the_speed_is_that_of_the_work_and_the_time_that_of_the_run(monkeypatch):
    now, rows = [100.0], []
    monkeypatch.setattr(training.time, "monotonic", lambda: now[0])

    def work():
        for step in (14, 24):
            now[0] += 2
            yield step

    clock = training._Clock(elapsed=30.0, steps=4)
    for _ in clock.timed(work()):
        now[0] += 50  # evaluations and checkpoints
        rows.append(clock.times(14 + 10 * len(rows)))
    assert rows == [{tracking.WALL_TIME: t, tracking.SPEED: 5.0} for t in (82.0, 134.0)]


def test_each_update_of_a_call_has_its_line_and_its_time():
    lines = []
    journal = SimpleNamespace(
        _training=SimpleNamespace(unit=8),
        _schedule=SimpleNamespace(log_every=1),
        _write=lambda *line: lines.append(line),
    )
    times = {tracking.WALL_TIME: 100.0, tracking.SPEED: 4.0}
    clock = SimpleNamespace(times=lambda step: times if step == 80 else None)
    training._Journal._log(journal, 10, {"loss": np.array([[1, 2, 3], [4, 5, 6]])}, 3, clock)
    assert [step for step, *_ in lines] == [64, 72, 80]
    assert [row["loss"].tolist() for _, row, _ in lines] == [[1, 4], [2, 5], [3, 6]]
    assert [t for _, _, t in lines] == [times | {tracking.WALL_TIME: t} for t in (96, 98, 100)]


def test_means_are_those_of_a_block_however_it_is_divided():
    first = Means()
    first.add({"loss": np.array([[1.0, 2.0], [3.0, 4.0]])}, 2)
    resumed = Means(first.sums, first.count)
    resumed.add({"loss": np.array([[6.0], [5.0]])}, 1)
    assert resumed.take()["loss"].tolist() == [3.0, 4.0]
    assert (resumed.sums, resumed.count) == ({}, 0)
    assert (first.sums, first.count) == ({"loss": [3.0, 7.0]}, 2)
