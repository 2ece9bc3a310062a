"""Shares of work, without processes."""

import shutil
import threading
import time

import pytest
from filelock import FileLock
from hypothesis import given
from hypothesis import strategies as st

from offmarl.errors import OptionError, RunError
from offmarl.launch import Share, join_work, make_once, run_share
from tests.launch.toy import Squares, Tolerant


@given(blocks=st.integers(0, 200), tasks=st.integers(1, 50))
def test_the_blocks_of_all_tasks_are_a_partition(blocks, tasks):
    shares = [Share(index, tasks).blocks(blocks) for index in range(tasks)]
    assert sorted(block for share in shares for block in share) == list(range(blocks))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("text", ["", "1", "/", "4/4", "-1/4", "1/0", "a/4", "1/4/2"])
def test_a_share_is_an_index_and_a_number(text):
    assert Share.read("3/4") == (3, 4)
    with pytest.raises(OptionError, match="I from 0 to N-1"):
        Share.read(text)


@pytest.mark.parametrize("tasks", [1, 3, 16])
def test_the_result_does_not_depend_on_the_number_of_tasks(tasks, tmp_path):
    for index in reversed(range(tasks)):
        run_share(Squares(tmp_path / "out", 11), Share(index, tasks))
    work = Squares(tmp_path / "out", 11)
    assert join_work(work) and not join_work(work)
    assert work.path.read_text().split() == [str(block**2) for block in range(11)]
    assert not (work.directory / "blocks").exists()


def test_only_what_is_missing_is_run(tmp_path):
    work = Squares(tmp_path / "out", 10)
    assert run_share(work, Share(1, 2)) == 5
    assert run_share(work, Share(1, 2)) == 0
    assert work.missing() == [0, 2, 4, 6, 8]
    assert run_share(work, Share(0, 1)) == 5  # by another number of tasks


def test_a_block_that_others_need_fails_once(tmp_path):
    work, reports = Tolerant(tmp_path / "out", 5, "fail:0"), []
    work.need = 0
    with pytest.raises(OptionError, match="cannot be run"):
        run_share(work, Share(1, 2), lambda *report: reports.append(report))  # blocks 1 and 3
    assert (work.directory / "deaths").read_text() == "x"
    assert reports[-1] == (0, 2)  # what failed is not done


def test_a_bug_is_told_before_what_a_user_can_mend(tmp_path, monkeypatch, capsys):
    work = Tolerant(tmp_path / "out", 4)
    errors = {0: OptionError("mend it"), 2: RuntimeError("a bug")}

    def run(block, real=work.run):
        if block in errors:
            raise errors[block]
        real(block)

    monkeypatch.setattr(work, "run", run)
    with pytest.raises(RuntimeError, match="a bug"):
        run_share(work, Share(0, 1))
    assert work.missing() == [0, 2] and "RuntimeError: a bug" in capsys.readouterr().err


def test_a_join_names_the_blocks_that_are_missing(tmp_path):
    work = Squares(tmp_path / "out", 4)
    run_share(work, Share(0, 2))
    with pytest.raises(RunError, match=r"2 of the 4 blocks of .*out are missing \(1, 3\)"):
        join_work(work)


@pytest.mark.parametrize(("lock", "doing"), [("join", "joined the blocks"), ("0", "run block 0")])
def test_a_process_that_does_not_end_is_named(lock, doing, tmp_path, monkeypatch):
    work = Squares(tmp_path / "out", 1)
    if lock == "join":
        run_share(work, Share(0, 1))
    monkeypatch.setattr("offmarl.launch.work.WAIT_SECONDS", 0.1)
    (work.directory / "locks").mkdir(parents=True, exist_ok=True)
    with (
        FileLock(work.directory / "locks" / f"{lock}.lock", is_singleton=False),
        pytest.raises(RunError, match=f"another process has {doing} for longer"),
    ):
        run_share(work, Share(0, 1))
        join_work(work)


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def refuse(_lock):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(FileLock, "acquire", refuse)
    with pytest.raises(RunError, match=r"job\.json\.lock cannot be locked .*No locks available"):
        run_share(Squares(tmp_path / "out", 1), Share(0, 1))


def test_other_work_at_the_path_is_refused(tmp_path):
    run_share(Squares(tmp_path / "out", 4), Share(0, 2))
    with pytest.raises(RunError, match="were started with count=4, not 5: give the same arguments"):
        run_share(Squares(tmp_path / "out", 5), Share(0, 2))


def test_locks_that_a_process_removes_when_it_ends_are_made_again(tmp_path, monkeypatch):
    work, acquire, calls = Squares(tmp_path / "out", 1), FileLock.acquire, []

    def removed(lock, *args, **kwargs):
        calls.append(lock)
        if len(calls) == 2:  # of block 0
            shutil.rmtree(work.directory / "locks")
        return acquire(lock, *args, **kwargs)

    monkeypatch.setattr(FileLock, "acquire", removed)
    assert run_share(work, Share(0, 1)) == 1


def test_a_block_of_a_result_that_another_process_has_just_joined_is_not_run_again(tmp_path):
    first, second = Squares(tmp_path / "out", 2), Squares(tmp_path / "out", 2)
    missing = second.missing()
    run_share(first, Share(0, 1))
    join_work(first)
    second.missing = lambda: missing  # as it was before
    assert run_share(second, Share(0, 1)) == 0
    assert not join_work(second)


def test_a_file_is_made_once(tmp_path):
    calls, results = [], []

    def make():
        calls.append(1)
        time.sleep(0.05)
        return {"number": len(calls)}

    threads = [
        threading.Thread(target=lambda: results.append(make_once(tmp_path / "a" / "b.json", make)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [{"number": 1}] * 4
