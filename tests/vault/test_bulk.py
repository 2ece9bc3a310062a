"""Blocks of values in data files that offmarl writes itself, and TensorStore reads."""

import errno
import mmap
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import tensorstore as ts

from offmarl import vault
from offmarl.errors import VaultConflictError, VaultFullError
from offmarl.vault.storage import bulk, commit
from offmarl.vault.storage import store as store_module
from offmarl.vault.storage.bulk import PageBlock, allocate, write_blocks
from offmarl.vault.storage.store import Directory, store_of
from offmarl.vault.write import writer as writer_module

from . import damage
from .experience import SPEC, assert_same, concatenate, make, written
from .test_stock import append_with_stock, assert_stock_reads_and_samples, open_stock


def block(values):
    size = sum(map(len, values.values()))
    memory, places = allocate(size), {}
    for key, value in values.items():
        places[key] = memory.tell(), len(value)
        memory.write(value)
    return PageBlock(memory, places)


def read_all(directory, file):
    """Return the values of a store of which only this file exists."""
    (directory / "manifest.ocdbt").write_bytes(file.manifest)
    spec = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{directory}/"}}
    store = ts.KvStore.open(spec).result()
    return {key.decode(): store[key] for key in store.list().result()}


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "d").mkdir()
    return tmp_path


VALUES = {
    "a": b"1",
    "a./0.0": bytes(range(256)) * 40,
    "a./0.0.0": b"2" * 5000,
    "a./0.1": b"",
    "b" * 200: b"3" * 4096,
    "observations./10.1000.0": b"4" * 70_000,
}


def test_tensorstore_reads_what_was_written(directory):
    rewards = {f"rewards./0.{number}": bytes([number % 256]) * number for number in range(400)}
    file = write_blocks(directory, [block(VALUES), block(rewards)])
    assert read_all(directory, file) == VALUES | rewards
    ((name, size),) = commit.current_tree(Directory(directory)).live_bytes.items()
    assert name == file.name
    assert size <= (directory / name).stat().st_size < size + 3 * mmap.PAGESIZE


@pytest.mark.parametrize("refused", ["open", "write"])
def test_file_systems_without_direct_writes(directory, monkeypatch, refused):
    write = os.write

    def buffered_only(descriptor, data):
        if bulk._is_direct(descriptor):
            raise OSError(errno.EINVAL, "Invalid argument")
        return write(descriptor, data[:3000])  # writes may also be incomplete

    if refused == "open":
        monkeypatch.setattr(bulk, "_DIRECT", 0)
    monkeypatch.setattr(os, "write", buffered_only)
    assert read_all(directory, write_blocks(directory, [block(VALUES)])) == VALUES


def test_a_file_that_cannot_be_written_is_removed(directory, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fdatasync", fail)
    with pytest.raises(OSError, match="Input/output"):
        write_blocks(directory, [block(VALUES)])
    assert not list((directory / "d").iterdir())


# ---------------------------------------------------------------------------------- writers


@pytest.fixture
def always_bulk(monkeypatch, eager):
    monkeypatch.setattr(store_module, "_BULK_BYTES", 1)


def fill(path):
    return written(path, *(make(steps=30, seed=seed) for seed in range(5)), chunk_steps=16)


def test_the_same_vault_as_through_tensorstore(tmp_path, always_bulk, monkeypatch):
    dataset = fill(tmp_path / "a.vlt" / "a")
    files = len(commit.current_tree(Directory(dataset.path)).files)
    monkeypatch.undo()
    other = fill(tmp_path / "b.vlt" / "a")
    assert dataset.digest() == other.digest()
    assert files > len(commit.current_tree(Directory(other.path)).files)
    assert vault.verify(dataset.path, deep=True).sound
    vault.compact(dataset.path)
    assert dataset.digest() == vault.open_vault(dataset.path).digest() == other.digest()


@pytest.mark.slow
def test_stock_reads_and_appends(tmp_path, always_bulk):
    dataset = fill(tmp_path / "a.vlt" / "a")
    assert_stock_reads_and_samples(dataset.path, dataset.transitions())
    append_with_stock(open_stock(dataset.path), make(steps=11, seed=5)[0])
    assert vault.open_vault(dataset.path).unverified == ((150, 161),)


def test_when_full_chunks_are_committed(tmp_path, monkeypatch):
    """Once they take enough memory, which grows with the vault, or have waited for some seconds."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(writer_module, "time", clock)
    path = tmp_path / "a.vlt"
    with vault.create(path, SPEC, rows=2, chunk_steps=16) as writer:

        def staged_after(steps):
            writer._settle()
            writer.append(*make(steps=steps))
            return len(writer._buffer.staged)

        assert staged_after(16) == 1
        size = writer._buffer.staged_bytes
        monkeypatch.setattr(writer_module, "_COMMIT_BYTES", 3 * size)
        assert [staged_after(16) for _ in range(4)] == [2, 0, 1, 2]
        clock.now = 5.0
        assert staged_after(4) == 2
        clock.now = 5.1
        assert staged_after(4) == 0
        clock.now = 20.0
        assert staged_after(4) == 0 and writer._committed_at == 5.1  # no chunk was full
        clock.now = 5.2
        monkeypatch.setattr(writer_module, "_COMMIT_PARTS", 1)
        monkeypatch.setattr(writer_module, "_MOST_COMMIT_BYTES", 4 * size)
        assert [staged_after(steps) for steps in (4, 16, 16, 16)] == [1, 2, 3, 0]
    assert vault.open_vault(path).length == 9 * 16


def test_a_file_is_durable_before_the_vault_refers_to_it(tmp_path, always_bulk, monkeypatch):
    path = tmp_path / "a.vlt" / "a"
    synced, sync = [], os.fdatasync

    def noted(descriptor):
        sync(descriptor)
        name = f"d/{Path(f'/proc/self/fd/{descriptor}').readlink().name}"
        synced.append((name, name in commit.live_files(Directory(path))))

    monkeypatch.setattr(os, "fdatasync", noted)
    fill(path)
    assert len(synced) >= 5
    assert not any(is_live for _, is_live in synced)
    assert {name for name, _ in synced} <= commit.current_tree(Directory(path)).files


def test_a_full_disk_loses_nothing(tmp_path, always_bulk):
    path = tmp_path / "a.vlt" / "a"
    parts = [make(steps=32, seed=seed) for seed in range(3)]
    writer = vault.create(path, SPEC, rows=2, chunk_steps=16)
    writer.append(*parts[0])
    writer.flush()
    files = set((path / "d").iterdir())
    with damage.small_files(4096):
        writer.append(*parts[1])
        for _ in range(2):
            with pytest.raises(VaultFullError):
                writer.flush()
    assert set((path / "d").iterdir()) == files
    writer.append(*parts[2])
    writer.close()
    assert_same(vault.open_vault(path).transitions(), concatenate([part[0] for part in parts]))


def test_a_conflict_leaves_the_vault_as_it_is(tmp_path, always_bulk):
    path = tmp_path / "a.vlt" / "a"
    store = store_of(fill(path).path)
    before = store.get("offmarl/head")
    with pytest.raises(VaultConflictError):
        store.commit({}, {"offmarl/head": b"other"}, [block(VALUES)]).result()
    assert store.get("offmarl/head") == before
    assert store.get("a./0.0") is None


def test_an_annotation_alone_does_not_write_the_tail_again(tmp_path):
    path = tmp_path / "a.vlt" / "a"
    with vault.create(path, SPEC, rows=2, chunk_steps=64) as writer:
        writer.append(*make(steps=30))
        writer.flush()
        place = commit.current_tree(Directory(path)).values["observations./0.0.0.0"]
        writer.annotate({"complete": True})
    dataset = vault.open_vault(path)
    assert dataset.provenance["complete"]
    assert commit.current_tree(Directory(path)).values["observations./0.0.0.0"] == place
    with vault.resume(path) as writer:
        writer.append(*make(steps=30, seed=1))
    steps = [make(steps=30, seed=seed)[0] for seed in range(2)]
    assert_same(vault.open_vault(path).transitions(), concatenate(steps))
