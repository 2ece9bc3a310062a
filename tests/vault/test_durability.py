"""The order in which files become durable, appear at their path, and are complete."""

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from offmarl import vault
from offmarl._lock import FileLock
from offmarl.errors import VaultExistsError, VaultLockedError
from offmarl.vault.format import layout
from offmarl.vault.format.layout import METADATA
from offmarl.vault.storage import commit, files
from offmarl.vault.storage.files import WriterLock
from offmarl.vault.storage.store import Directory, store_of
from offmarl.vault.write import writer as writer_module

from .experience import SPEC, assert_same, concatenate, make


@pytest.fixture
def events(monkeypatch):
    """The synced inodes and the renames with their paths, in order."""
    noted = []
    fsync, rename, replace = os.fsync, Path.rename, Path.replace

    def synced(descriptor):
        noted.append(("sync", os.fstat(descriptor).st_ino))
        fsync(descriptor)

    def renamed(self, target):
        noted.append(("rename", str(target)))
        return rename(self, target)

    def replaced(self, target):
        noted.append(("rename", str(target)))
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    monkeypatch.setattr(Path, "replace", replaced)
    return noted


def assert_durable(events, path):
    """Check that all was synced before its rename, and the directory after it."""
    assert path.exists()
    place = events.index(("rename", str(path)))
    below = [path, *path.rglob("*")] if path.is_dir() else [path]
    for part in below:
        if part.name != "writer.lock":
            assert ("sync", part.stat().st_ino) in events[:place], part
    assert ("sync", path.parent.stat().st_ino) in events[place + 1 :]


@pytest.mark.parametrize("create", [vault.create, vault.create_whole])
def test_a_new_vault_is_durable_before_it_is_there(events, tmp_path, create):
    path = tmp_path / "data" / "a.vlt" / "b"
    with create(path, SPEC, rows=2) as writer:
        assert path.exists() == (create is vault.create)
        if not path.exists():
            writer.append(*make())
    assert_durable(events, path)
    # The directories made for it are durable too: the names of each are in the one above.
    for directory in (tmp_path, tmp_path / "data", tmp_path / "data" / "a.vlt"):
        assert ("sync", directory.stat().st_ino) in events
    assert [entry.name for entry in path.parent.iterdir()] == ["b"]


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_what_is_staged_is_durable_before_it_is_there(events, tmp_path, kind):
    place = tmp_path / "out"
    with files.built_whole(place) as beside:
        if kind == "file":
            beside.write_text("content")
        else:
            (beside / "inner").mkdir(parents=True)
            (beside / "inner" / "file").write_text("content")
        assert not place.exists()
    assert_durable(events, place)
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


def test_what_fails_in_staging_leaves_nothing(tmp_path):
    def fail():
        with files.built_whole(tmp_path / "out") as beside:
            beside.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_what_came_to_the_place_meanwhile_stays(tmp_path):
    def run():
        with files.built_whole(tmp_path / "out") as beside:
            beside.write_text("mine")
            (tmp_path / "out").write_text("theirs")

    with pytest.raises(VaultExistsError):
        run()
    assert (tmp_path / "out").read_text() == "theirs"
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("there", ["file", "directory", "dangling link"])
def test_a_place_that_is_taken_is_refused_at_once(tmp_path, there):
    place = tmp_path / "out"
    if there == "file":
        place.write_text("")
    elif there == "directory":
        place.mkdir()
    else:
        place.symlink_to(tmp_path / "nowhere")
    with pytest.raises(VaultExistsError):
        files.refuse_existing(place)
    with pytest.raises(VaultExistsError), files.built_whole(place):
        pytest.fail("it was begun")


def test_a_workspace_is_cleared_and_nobody_elses(tmp_path):
    directory = tmp_path / "beside"
    (directory / "old").mkdir(parents=True)
    (directory / "old" / "file").write_text("")
    with files.workspace(directory) as fresh:
        assert [entry.name for entry in fresh.iterdir()] == ["writer.lock"]
        with pytest.raises(VaultLockedError), files.workspace(directory):
            pytest.fail("two build there")
        assert directory.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_workspace_goes_although_its_writers_are_still_at_it(tmp_path, monkeypatch):
    """zarr does not wait for the other writes of a call that has failed."""
    directory, waited, again = tmp_path / "beside", [], [True, True]

    def settle(seconds):
        waited.append(seconds)
        (directory / "late").touch()

    def remove(path, real=shutil.rmtree, **options):
        real(path, **options)
        if again and again.pop():
            path.mkdir()

    monkeypatch.setattr(files, "time", SimpleNamespace(sleep=settle))
    monkeypatch.setattr(shutil, "rmtree", remove)
    with pytest.raises(OSError, match="full"), files.workspace(directory):
        raise OSError("full")
    assert waited == [0.1] and not again
    assert list(tmp_path.iterdir()) == []


def test_a_lock_that_was_removed_with_its_directory_is_taken_anew(tmp_path, monkeypatch):
    """A writer has opened the file, and before it locks it another has a directory of its own."""
    acquire, others = FileLock.acquire, []
    place = tmp_path / "a"
    place.mkdir()

    def late(self, timeout=0.0):
        if not others:
            shutil.rmtree(place)
            place.mkdir()
            others.append(FileLock(place / "writer.lock"))
            assert acquire(others[0])
        return acquire(self, timeout)

    monkeypatch.setattr(FileLock, "acquire", late)
    with pytest.raises(VaultLockedError):
        WriterLock(place)
    others[0].release()
    lock = WriterLock(place)
    assert not acquire(FileLock(place / "writer.lock"))
    lock.release()


def test_clearing_keeps_the_lock(tmp_path):
    lock = WriterLock(tmp_path)
    (tmp_path / "file").write_text("")
    files.clear_directory(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["writer.lock"]
    with pytest.raises(VaultLockedError, match=f"process {os.getpid()} on "):
        WriterLock(tmp_path)
    lock.release()
    WriterLock(tmp_path).release()


def test_metadata_is_written_last(monkeypatch, tmp_path):
    """Where files cannot be renamed, as in an object store, the metadata makes files a vault."""
    write, noted = Directory.write, []

    def written(self, name, content):
        head = store_of(self.path).get(layout.HEAD_KEY)
        noted.append((name, head is not None))
        write(self, name, content)

    monkeypatch.setattr(Directory, "write", written)
    vault.create(tmp_path / "a.vlt" / "b", SPEC, rows=2).close()
    assert noted == [(METADATA, True)]


def test_a_failed_creation_leaves_nothing_and_frees_the_place(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(Directory, "write", lambda *_: (_ for _ in ()).throw(KeyError()))
        with pytest.raises(KeyError):
            vault.create(tmp_path / "a.vlt" / "b", SPEC, rows=2)
    assert list(tmp_path.iterdir()) == []
    vault.create(tmp_path / "a.vlt" / "b", SPEC, rows=2).close()


@pytest.mark.parametrize("end", [vault.Writer.discard, vault.Writer.release])
def test_a_writer_waits_for_the_commit_under_way(eager, tmp_path, end):
    writer = vault.create(tmp_path / "a.vlt", SPEC, rows=2, chunk_steps=16)
    writer.append(*make(steps=16))
    end(writer)
    assert writer._under_way.done.done()
    assert vault.open_vault(tmp_path / "a.vlt").length == 16


def test_an_empty_vault_is_removed_before_others_may_write_to_it(monkeypatch, tmp_path):
    def remove(*arguments, real=shutil.rmtree, **options):
        with pytest.raises(VaultLockedError):
            vault.resume(tmp_path / "a.vlt")
        real(*arguments, **options)

    writer = vault.create(tmp_path / "a.vlt", SPEC, rows=2)
    monkeypatch.setattr(writer_module.shutil, "rmtree", remove)
    writer.discard()
    assert not (tmp_path / "a.vlt").exists()


def test_when_full_chunks_are_committed(tmp_path, monkeypatch):
    """Once they take enough memory, which grows with the vault, or have waited for some seconds."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(writer_module, "time", clock)
    path = tmp_path / "a.vlt"
    with vault.create(path, SPEC, rows=2, chunk_steps=16) as writer:

        def staged_after(steps):
            writer._settle()
            writer.append(*make(steps=steps))
            return sum(key.startswith("rewards") for key in writer._buffer.staged)

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


def test_tensorstore_syncs_the_files_that_it_writes(tmp_path):
    """The data, then the manifest that refers to it."""
    assert Directory(tmp_path).context["file_io_sync"].to_json() is True
