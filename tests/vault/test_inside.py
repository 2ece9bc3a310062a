"""Forged vaults that name files outside themselves, and links that lead there."""

import errno
import os
import shutil
from pathlib import Path

import pytest
import tensorstore as ts

from offmarl import vault
from offmarl.errors import OffmarlError, VaultError, VaultExistsError, VaultFormatError
from offmarl.vault.format.layout import DATA, LOCK, MANIFEST, METADATA, OWN_PREFIX
from offmarl.vault.storage import commit
from offmarl.vault.storage.commit import Contents
from offmarl.vault.storage.files import open_file
from offmarl.vault.storage.store import Directory

from .experience import SPEC, recorded

STEPS = 64


def record(path: Path, seed: int = 0) -> Path:
    return recorded(path, steps=STEPS, seed=seed, chunk_steps=8).path


def forge(source: Path, target: Path, prefix: str = "d/") -> Path:
    """Copy a vault, with an index that has the chunks in a file of another prefix than ``d/``.

    Returns
    -------
    Where that file is, with the bytes that the index means: they would pass for the vault's own.
    """
    location = Directory(source)
    contents = Contents(location, commit.current_tree(location))
    values = {key: contents.start(key)() for key in contents.tree.values}
    chunks = {k for k in values if k[-1].isdigit() and not k.startswith((OWN_PREFIX, "vault_i"))}
    context = ts.Context()  # what TensorStore keeps in memory may have any name
    spec = {"driver": "ocdbt", "base": "memory://", "config": commit.config_of(location)}
    for keys, start in ((values.keys() - chunks, "d/"), (chunks, prefix)):
        store = ts.KvStore.open({**spec, "value_data_prefix": start}, context=context).result()
        with ts.Transaction(atomic=True) as transaction:
            for key in keys:
                store.with_transaction(transaction)[key] = values[key]
    memory = ts.KvStore.open("memory://", context=context).result()
    for name in memory.list().result():
        file = Path(os.path.normpath(target / name.decode()))
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(memory[name])
    (target / METADATA).write_bytes((source / METADATA).read_bytes())
    place = commit.ValueLocation(*_place_of(memory, chunks))
    return Path(os.path.normpath(target / place.file))


def _place_of(memory: ts.KvStore, chunks: set[str]) -> tuple[str, int, int]:
    """Return the place that an index gives the largest chunk."""
    root = ts.ocdbt.dump(memory).result()["versions"][-1]["root"]["location"]
    entries = ts.ocdbt.dump(memory, root).result()["entries"]
    places = [
        entry["indirect_value"].split(":")
        for entry in entries
        if "indirect_value" in entry and entry["key"].decode() in chunks
    ]
    return next((base + file, int(start), int(size)) for _, base, file, start, size in places)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A vault of which forged copies are made."""
    root = tmp_path_factory.mktemp("made")
    source = record(root / "v.vlt" / "a")
    chunks = forge(source, root / "w.vlt" / "a")
    return root / "w.vlt" / "a", chunks.relative_to(root / "w.vlt" / "a"), vault.open_vault(source)


USES = {
    "read": lambda p: vault.open_vault(p, checked=False).read(),
    "windows": lambda p: vault.open_vault(p, checked=False).windows([0], [0], 5),
    "episode": lambda p: vault.open_vault(p).episode(0),
    "digest": lambda p: vault.open_vault(p).digest(),
    "compact": vault.compact,
    "salvage": lambda p: vault.salvage(p, p.parents[1] / "salvaged.vlt"),
}


@pytest.mark.parametrize("prefix", ["../../s", "/", "d/../../../s", "d/./x/../../../../s"])
def test_an_index_that_names_a_file_outside(made, tmp_path, prefix):
    source, _, original = made
    path = tmp_path / "w.vlt" / "a"
    secret = forge(source, path, f"{tmp_path}/s" if prefix == "/" else prefix)
    assert secret.parent == tmp_path
    assert secret.is_file()
    before = {file: file.read_bytes() for file in (path / DATA).iterdir()}
    for name, use in USES.items():
        with pytest.raises(OffmarlError):
            use(path)
            pytest.fail(name)
    for deep in (False, True):
        report = vault.verify(path, deep=deep)
        assert any("is not the name of a file inside" in str(fault) for fault in report.faults)
    assert before == {file: file.read_bytes() for file in (path / DATA).iterdir()}
    assert secret.is_file()
    shutil.make_archive(str(tmp_path / "w"), "zip", tmp_path, "w.vlt")
    zipped = tmp_path / "w.zip" / "w.vlt" / "a"
    for name in ("read", "windows", "digest"):
        with pytest.raises(OffmarlError):
            USES[name](zipped)
    assert not vault.verify(zipped).sound
    assert vault.open_vault(source).digest() == original.digest()


def into_link(path: Path, target: Path) -> None:
    path.rename(target)
    path.symlink_to(target)


def into_pipe(path: Path, target: Path) -> None:
    path.rename(target)
    os.mkfifo(path)


@pytest.mark.parametrize("change", [into_link, into_pipe])
@pytest.mark.parametrize("what", [METADATA, MANIFEST, DATA, "chunks", LOCK])
def test_links_and_pipes_in_a_vault(made, tmp_path, change, what):
    source, chunks, _ = made
    path = shutil.copytree(source, tmp_path / "w.vlt" / "a")
    (path / LOCK).touch()
    target = tmp_path / "outside"
    change(path / (chunks if what == "chunks" else what), target)
    before = target.read_bytes() if target.is_file() else sorted(p.name for p in target.iterdir())
    (path / ".rebuilt").mkdir()  # what is there would have files of `d` deleted
    uses = {**USES, "resume": vault.resume, "join": lambda p: vault.join(p, "run")}
    for name, use in uses.items():
        with pytest.raises(VaultFormatError):
            use(path)
            pytest.fail(name)
    report = vault.verify(path) if what not in (METADATA, MANIFEST) or change is into_link else None
    assert report is None or not report.sound
    assert before == (
        target.read_bytes() if target.is_file() else sorted(p.name for p in target.iterdir())
    )


def test_a_directory_that_cannot_be_listed(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    (tmp_path / "a.vlt").mkdir()
    monkeypatch.setattr(Directory, "links", refuse)
    with pytest.raises(VaultError, match="cannot be read or written"):
        list(vault.list_vaults(tmp_path))


def test_a_link_in_place_of_a_vault_is_not_followed(made, tmp_path):
    """Links are followed only on request: a dataset may come from anyone."""
    source, _, original = made
    link = tmp_path / "got.vlt" / "expert"
    link.parent.mkdir()
    link.symlink_to(source)
    uses = {**USES, "open": vault.open_vault, "verify": vault.verify, "resume": vault.resume}
    for name, use in uses.items():
        with pytest.raises(VaultFormatError, match="is a symbolic link to"):
            use(link.parent)
            pytest.fail(name)
    for root in (tmp_path, link.parent):
        ((path, summary),) = vault.list_vaults(root)
        assert path == link and summary.steps is None
        assert "is a symbolic link to" in summary.error
    ((_, summary),) = vault.list_vaults(link)
    assert summary.error is None
    assert vault.open_vault(link).digest() == original.digest()
    with pytest.raises(VaultExistsError):
        vault.create(link.parent, SPEC, rows=1)
    record(link.parent / "mine")
    assert vault.open_vault(link.parent).uid == "mine"


def test_a_directory_that_may_not_be_listed(tmp_path, monkeypatch):
    path = record(tmp_path / "v.vlt" / "a")
    scandir = os.scandir

    def refused(directory):
        if str(directory).endswith(f"/{DATA}"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), directory)
        return scandir(directory)

    monkeypatch.setattr(os, "scandir", refused)
    for use in (vault.open_vault, vault.resume):
        with pytest.raises(VaultError, match=r"a/d cannot be read: Permission denied"):
            use(path)


@pytest.mark.parametrize(
    "name", ["../x", "/x", "a/../x", "", "a//x", "./x", "a\\x", "x\0", "a/./x"]
)
def test_names_that_are_refused(tmp_path, name):
    with pytest.raises(ValueError, match="not the name of a file inside"):
        open_file(tmp_path, name)


def test_links_are_refused_where_files_are_opened(tmp_path):
    """Also one that is made after the directory was looked through."""
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "x").write_text("inside")
    os.close(open_file(tmp_path, "d/x"))
    (tmp_path / "d" / "y").symlink_to(tmp_path / "d" / "x")
    (tmp_path / "e").symlink_to(tmp_path / "d")
    os.mkfifo(tmp_path / "pipe")
    for name in ("d/y", "e/x"):
        with pytest.raises(OSError):
            open_file(tmp_path, name)
    for name in ("d", "pipe"):
        with pytest.raises(ValueError, match="not a regular file"):
            open_file(tmp_path, name)
