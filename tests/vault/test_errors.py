"""Invalid vaults and invalid input, and the error messages."""

import errno
import fcntl
import os
from dataclasses import replace

import numpy as np
import pytest

from offmarl import vault
from offmarl.errors import (
    ShapeError,
    VaultError,
    VaultExistsError,
    VaultFormatError,
    VaultFullError,
    VaultNotFoundError,
)
from offmarl.types import Continuous, FinalObservations
from offmarl.vault.format import layout
from offmarl.vault.format.layout import UNFINISHED
from offmarl.vault.storage.store import Directory, store_of
from offmarl.vault.write.chunks import ChunkBuffer

from .damage import change, put, remove, small_files
from .experience import SPEC, assert_same, concatenate, make, written


@pytest.fixture
def path(tmp_path):
    """A vault of two rows and ten steps."""
    return written(tmp_path / "v.vlt" / "a", make(), chunk_steps=4).path


def test_nothing_there(tmp_path, path):
    for attempt in (vault.open_vault, vault.resume):
        with pytest.raises(VaultNotFoundError, match=r"no vault at .*b\. Nearby: a"):
            attempt(path.with_name("b"))
    with pytest.raises(VaultNotFoundError, match="no directory"):
        list(vault.list_vaults(tmp_path / "nowhere"))


def test_not_a_vault(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").touch()
    with pytest.raises(VaultFormatError, match=r"directory of a run.*`offmarl report`"):
        vault.open_vault(tmp_path / "run")
    with pytest.raises(VaultFormatError, match="is not a vault"):
        vault.open_vault(tmp_path)


def test_several_vaults(tmp_path, path):
    vault.create(path.with_name("b"), SPEC, rows=1).close()
    with pytest.raises(VaultError, match="several vaults: add one of a, b"):
        vault.open_vault(tmp_path / "v.vlt")


def test_creating_over_something(tmp_path, path):
    with pytest.raises(VaultExistsError):
        vault.create(path, SPEC, rows=2)
    with pytest.raises(VaultExistsError):
        vault.create(path.parent, SPEC, rows=2)
    assert vault.open_vault(path).length == 10


def test_what_a_killed_commit_left_is_not_written_over(path):
    (path / UNFINISHED).write_bytes(bytes(5000))  # longer than any manifest
    vault.resume(path).close()
    assert not (path / UNFINISHED).exists()  # a stock program would write over it
    with vault.resume(path) as writer:
        (path / UNFINISHED).write_bytes(bytes(5000))
        writer.append(*make())
    assert vault.open_vault(path).length > 10
    assert vault.verify(path, deep=True).sound


def test_a_vault_that_is_moved_away_under_a_writer(path):
    writer = vault.resume(path)
    writer.append(*make(seed=1))
    target = path.with_name("b")
    path.rename(target)
    for _ in range(2):
        with pytest.raises(VaultNotFoundError, match=r"moved or removed .* Move it back"):
            writer.flush()
    assert not path.exists()
    target.rename(path)
    writer.close()
    assert vault.open_vault(path).length == 20
    with vault.resume(path) as writer:
        writer.append(*make(seed=2))
        path.rename(target)
        with pytest.raises(VaultNotFoundError):
            writer.close()
        vault.resume(target).close()
    assert vault.open_vault(target).length == 20


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks(path, tmp_path, monkeypatch, code):
    def flock(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", flock)
    fresh = tmp_path / "w.vlt"
    for attempt in (vault.resume, vault.compact, lambda _: vault.create(fresh, SPEC, rows=1)):
        with pytest.raises(VaultError, match=r"cannot be locked .* lacks flock"):
            attempt(path)
    assert not fresh.exists()
    assert vault.open_vault(path)[:].reward.shape[1] == 10, "what is there can be read"


def test_a_forked_process_keeps_no_lock(path):
    writer = vault.resume(path)
    forked = os.dup(writer._lock._file._fd)
    writer.close()
    vault.resume(path).close()
    os.close(forked)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"path": "v"}, "must be <name>.vlt"),
        ({"rows": 0}, "rows must be a whole number"),
        ({"rows": 10**9}, "at most 16777216 rows"),
        ({"chunk_steps": np.int64(0)}, "chunk_steps must be"),
        ({"chunk_steps": 10**9}, "choose fewer chunk_steps"),
        ({"provenance": {"x": {1}}}, "plain JSON"),
        ({"spec": replace(SPEC, num_agents=0)}, "num_agents must be a whole number of at least 1"),
        ({"spec": replace(SPEC, observation_size=-3)}, "observation_size must be"),
        ({"spec": replace(SPEC, state_size=-1)}, "state_size must be"),
        ({"spec": replace(SPEC, action=Continuous(0))}, "action_size must be"),
    ],
)
def test_creating_nonsense(tmp_path, monkeypatch, options, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(VaultError, match=message):
        vault.create(**{"path": "v.vlt", "spec": SPEC, "rows": 1} | options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"reward": np.zeros((2, 10, 3), np.float32)}, r"rewards: got float32 .*\(2, 10, 3\)"),
        ({"reward": np.zeros((2, 10, 2), complex)}, "rewards: got complex128"),
        ({"action": np.zeros((2, 10, 2))}, "actions: got float64 .* takes int32"),
        ({"action": np.zeros((3, 10, 2), np.int32)}, "actions: got int32"),
        ({"policy_id": np.zeros((2, 9), np.int32)}, "infos.policy_ids"),
        ({"last": np.ones((2, 10), bool)}, "`last` must be true exactly"),
    ],
)
def test_steps_that_do_not_fit(path, change, message):
    transition, finals = make()
    with vault.resume(path) as writer:
        with pytest.raises(ShapeError, match=message):
            writer.append(transition._replace(**change), finals)
        writer.append(transition, finals)
    dataset = vault.open_vault(path)
    assert_same(dataset.transitions(), concatenate([transition, transition]))
    assert len(dataset.finals.alive) == 2 * len(finals.row)


def test_final_views_that_do_not_fit(path):
    transition, finals = make()
    row, time = np.argwhere(~transition.last)[0]
    misplaced = finals._replace(row=np.full_like(finals.row, row), time=np.full_like(time, time))
    wrong = [
        (misplaced._replace(time=np.full_like(finals.time, time)), "where no episode ends"),
        (FinalObservations(finals.row * 0 + 7, finals.time, finals.view), "where no episode ends"),
        (finals._replace(row=finals.row[:-1]), "one of each for every view"),
        (finals._replace(view=finals.view._replace(state=finals.view.state[:, 1:])), "state"),
    ]
    with vault.resume(path) as writer:
        for views, message in wrong:
            with pytest.raises(ShapeError, match=message):
                writer.append(transition, views)
        with pytest.raises(ShapeError, match="marked as cut"):
            writer.append(make(end_every=1e9)[0], cut=True)
    assert vault.open_vault(path).length == 10


def test_a_closed_writer(path):
    writer = vault.resume(path)
    writer.close()
    writer.close()
    with pytest.raises(VaultError, match="is closed"):
        writer.append(*make())
    with pytest.raises(VaultError, match="is closed"):
        writer.flush()


def test_a_newer_format(path):
    change(path, layout.SCHEMA_KEY, version=99)
    with pytest.raises(VaultFormatError, match="install a newer offmarl"):
        vault.open_vault(path)


def test_lost_files_and_keys(path):
    remove(path, *store_of(path).keys(layout.FINALS_PREFIX))
    with pytest.raises(VaultError):
        _ = vault.open_vault(path).finals
    for file in (path / "d").iterdir():
        file.unlink()
    with pytest.raises(VaultError):
        vault.open_vault(path)


@pytest.mark.parametrize("offset", [0, 16], ids=["within", "behind"])
def test_a_tail_of_other_bytes(path, offset):
    """A damaged tail is not written again. What a dying stock program left behind it is ignored.

    The tail has two of four steps of two agents and two rows.
    """
    tail = bytearray(store_of(path).get("rewards./0.2.0"))
    assert tail[16:32] == bytes(16)
    tail[offset] ^= 1
    put(path, {"rewards./0.2.0": tail})
    if not offset:
        with pytest.raises(VaultFormatError, match="damaged"):
            vault.resume(path)
        return
    with vault.resume(path) as writer:
        writer.append(*make())
    assert_same(vault.open_vault(path).transitions(), concatenate([make()[0]] * 2))


def test_an_interrupt_while_committing(path, monkeypatch):
    """Ctrl-C stops the program after the commit, and the writer knows of the commit."""

    class Interrupted:
        def __init__(self, done):
            self.done = done

        def result(self):
            raise KeyboardInterrupt

        def exception(self):
            return self.done.exception()

    commit = Directory.commit
    with vault.resume(path) as writer:
        monkeypatch.setattr(Directory, "commit", lambda *args: Interrupted(commit(*args)))
        writer.append(*make())
        with pytest.raises(KeyboardInterrupt):
            writer.flush()
        monkeypatch.undo()
        assert writer.length == 20
        writer.append(*make())
    assert vault.open_vault(path).length == 30


def test_an_append_that_was_interrupted_is_left_out(path, monkeypatch):
    def interrupted(self, arrays, real=ChunkBuffer.put):
        real(self, {name: array[:, :3] for name, array in arrays.items()})
        raise KeyboardInterrupt

    writer = vault.resume(path)
    writer.append(*make(seed=1))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ChunkBuffer, "put", interrupted)
        writer.append(*make(seed=2))
    with pytest.raises(VaultError, match="was interrupted: close the writer"):
        writer.append(*make(seed=2))
    writer.close()
    with vault.resume(path) as writer:
        writer.append(*make(seed=2))
    steps = [make(seed=seed)[0] for seed in range(3)]
    assert_same(vault.open_vault(path).transitions(), concatenate(steps))


def test_past_what_stock_can_count(tmp_path):
    """A vault cannot be filled that far in a test, so its head is set instead."""
    path = tmp_path / "v.vlt" / "a"
    with vault.create(path, SPEC, rows=2, chunk_steps=16) as writer:
        writer.annotate({"x": 1})
    before = 2**31 - 16
    head = layout.Head(length=before)._asdict()
    put(path, {layout.HEAD_KEY: head, layout.INDEX_KEY: layout.encode_index(before)})
    parts = [make(seed=seed) for seed in range(3)]
    with vault.resume(path) as writer:
        for part in parts:
            writer.append(*part)
    with pytest.raises(VaultFormatError, match="lost data, or its length is damaged or forged"):
        vault.open_vault(path).read(before)
    dataset = vault.open_vault(path, checked=False)
    assert dataset.length == before + 30
    assert dataset.unverified == ()
    assert_same(dataset[before:], concatenate([part[0] for part in parts]))
    assert layout.decode_index(store_of(path).get(layout.INDEX_KEY)) == 2**31 - 1
    with vault.resume(path) as writer:
        writer.append(*parts[0])
    assert vault.open_vault(path).length == before + 40


def test_who_does_not_wait_is_told_by_the_next_call(tmp_path, eager):
    path = tmp_path / "v.vlt" / "a"
    writer = vault.create(path, SPEC, rows=2, chunk_steps=64)
    parts = [make(steps=64, seed=chunk) for chunk in range(5)]
    writer.append(*parts[0], run="r")
    writer.append(*parts[1], run="r")
    assert writer.length >= 64  # the first is settled before the second begins
    writer.flush()
    with small_files(4096):
        writer.append(*parts[2], run="r")
        with pytest.raises(VaultFullError):
            writer.append(*parts[3], run="r")
    steps = [transition for transition, _ in parts]
    assert_same(vault.open_vault(path).transitions(), concatenate(steps[:2]))
    writer.append(*parts[4], run="r")
    writer.close()
    assert_same(vault.open_vault(path).transitions(), concatenate(steps))
