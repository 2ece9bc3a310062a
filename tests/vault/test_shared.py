"""Several writers of one vault."""

import random
import subprocess
import sys
import time
from subprocess import PIPE

import numpy as np
import pytest

from offmarl import vault
from offmarl.errors import (
    ShapeError,
    VaultConflictError,
    VaultError,
    VaultFullError,
    VaultLockedError,
)
from offmarl.vault.storage import commit
from offmarl.vault.storage.store import Directory
from offmarl.vault.write import compaction
from tests.children import is_silent

from .experience import SPEC, assert_same, concatenate, make, whole_episodes
from .experience import steps as cut
from .joined import episode
from .test_stock import open_stock


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "v.vlt" / "a"
    vault.create(path, SPEC, rows=1, chunk_steps=256).close()
    return path


def run_together(path, seconds, kill=False):
    """Run four processes at once; return the episodes that each of them reports as durable.

    The one that is killed has no end of its own, and is seen to write before.
    """
    command = [sys.executable, "-m", "tests.vault.joined", str(path)]
    times = [str(600 if kill and name == 2 else seconds) for name in range(4)]
    processes = [
        subprocess.Popen([*command, str(name), time], stdout=PIPE, stderr=PIPE, text=True)
        for name, time in enumerate(times)
    ]
    before = [""] * 4
    if kill:
        before[2] = processes[2].stdout.readline()
        time.sleep(seconds * random.Random(0).uniform(0.2, 0.9))
        processes[2].kill()
    outputs = [process.communicate() for process in processes]
    counts = [(line + printed).split() for line, (printed, _) in zip(before, outputs, strict=True)]
    is_silent("".join(errors for _, errors in outputs))
    assert [process.returncode == 0 for process in processes] == [True, True, not kill, True]
    return [int(lines[-1]) for lines in counts]


def check_all_there(path, acknowledged):
    dataset = vault.open_vault(path)
    steps = dataset.transitions()
    by_writer = [[] for _ in acknowledged]
    assert not (dataset.episodes.cause == "open").any()
    assert dataset.episodes.length.sum() == dataset.length
    for start, length, final in zip(
        dataset.episodes.start, dataset.episodes.length, dataset.episodes.final, strict=True
    ):
        writer, number = int(steps.action[0, start, 0]), int(steps.policy_id[0, start, 0])
        expected, finals = episode(writer, number)
        assert_same(cut(steps, int(start), int(start + length)), expected)
        assert dataset.finals.state[final] == pytest.approx(finals.view.state[0])
        by_writer[writer].append(number)
    for numbers, count in zip(by_writer, acknowledged, strict=True):
        assert numbers == list(range(len(numbers)))  # each exactly once, in order
        assert len(numbers) >= count > 0
    return dataset


@pytest.mark.parametrize(
    ("seconds", "kill"),
    [
        pytest.param(1.5, True, marks=pytest.mark.slow),
        *(pytest.param(30, kill, marks=pytest.mark.nightly) for kill in (False, True)),
    ],
)
def test_four_writers(path, seconds, kill):
    """One of them may be killed."""
    dataset, stock = check_all_there(path, run_together(path, seconds, kill)), open_stock(path)
    assert stock.vault_index == dataset.length
    theirs, ours = stock.read().experience, dataset.read()
    for name in ("observations", "rewards"):
        np.testing.assert_array_equal(theirs[name], ours[name])


def test_who_joins_again_skips_what_is_there(path):
    for count in (3, 6):
        with vault.join(path, "me") as writer:
            for number in range(count):
                writer.append(*episode(0, number), chunk=number)
        assert writer.chunks() == count
    check_all_there(path, [6])
    with vault.join(path, "me") as writer, pytest.raises(VaultError, match="does not follow"):
        writer.append(*episode(0, 8), chunk=8)


def test_exclusive_writers_and_others_keep_each_other_out(path):
    with vault.join(path, "me", timeout=0.05) as shared:
        shared.append(*episode(0, 0))
        with vault.resume(path) as writer:  # gathering does not take the lock
            writer.append(*make(rows=1, steps=5, end_every=1e9))
            with pytest.raises(VaultLockedError):
                shared.flush()
            assert shared.chunks() == 0
    episodes = vault.open_vault(path).episodes
    assert episodes.cause.tolist() == ["open", "terminated"]


def test_two_of_one_name(path):
    with vault.join(path, "me") as first:
        second = vault.join(path, "me")
        first.append(*episode(0, 0))
        first.flush()
        second.append(*episode(1, 0))
        with pytest.raises(VaultConflictError):
            second.close()
    assert len(vault.open_vault(path).episodes.row) == 1


def test_a_commit_that_failed_is_tried_again(path, monkeypatch):
    writer = vault.join(path, "me")
    parts = [episode(0, number) for number in range(3)]
    for part in parts:
        writer.append(*part)

    def full(self):
        flush(self)
        raise VaultFullError("nobody knows that it is there")

    flush = vault.Writer.flush
    monkeypatch.setattr(vault.Writer, "flush", full)
    with pytest.raises(VaultFullError):
        writer.flush()
    assert writer.chunks() == 0
    monkeypatch.undo()
    writer.append(*episode(0, 3))
    writer.close()
    check_all_there(path, [4])


def test_rows_of_whole_episodes(tmp_path):
    path = tmp_path / "v.vlt" / "a"
    vault.create(path, SPEC, rows=2, chunk_steps=8).close()
    parts = [whole_episodes(steps=7, seed=seed) for seed in range(4)]
    with vault.join(path, "me") as writer:
        with pytest.raises(ShapeError, match="whole episodes"):
            writer.append(*make(steps=7, end_every=1e9))
        with pytest.raises(ShapeError, match="takes"):
            writer.append(*episode(0, 0))
        for part in parts:
            writer.append(*part)
            for array in part[0][1:-1]:
                if array.flags.writeable:
                    array[:] = 0  # what was appended is copied
    with pytest.raises(VaultError, match="closed"):
        writer.append(*parts[0])
    expected = [whole_episodes(steps=7, seed=seed)[0] for seed in range(4)]
    assert_same(vault.open_vault(path).transitions(), concatenate(expected))


def test_the_last_writer_to_close_reclaims_unused_space(tmp_path, monkeypatch):
    monkeypatch.setattr(compaction, "_LEAST_RECLAIMED", 1)
    path = tmp_path / "v.vlt" / "a"
    vault.create(path, SPEC, rows=2, chunk_steps=64).close()
    with vault.join(path, "a", gather=1) as first, vault.join(path, "b", gather=1) as second:
        for seed in range(10):
            first.append(*whole_episodes(steps=7, seed=seed))
            second.append(*whole_episodes(steps=7, seed=seed))
    sizes = sum(file.stat().st_size for file in (path / "d").iterdir())
    assert sizes <= 1.2 * commit.live_bytes(Directory(path))
    assert vault.verify(path, deep=True).sound
    assert vault.open_vault(path).length == 140
