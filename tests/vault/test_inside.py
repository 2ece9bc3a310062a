"""Forged vaults that name files outside themselves, and links that lead there."""

import os
import shutil
import struct
import zipfile
from pathlib import Path

import google_crc32c
import numpy as np
import pytest

from offmarl import vault
from offmarl.errors import OffmarlError, VaultFormatError
from offmarl.vault.integrity.compaction import copy
from offmarl.vault.storage import tree
from offmarl.vault.storage.contents import Contents
from offmarl.vault.storage.inside import open_file
from offmarl.vault.storage.location import Location
from offmarl.vault.storage.seal import OWN_PREFIX
from offmarl.vault.storage.store import DATA, LOCK, MANIFEST, METADATA, Store

from .experience import SPEC, make

NODE = bytes.fromhex("0cdb20de")
STEPS = 64


def record(path: Path, seed: int = 0) -> Path:
    with vault.create(path, SPEC, rows=2, chunk_steps=8) as writer:
        writer.append(*make(rows=2, steps=STEPS, seed=seed))
    return path


def plain(source: Path, target: Path) -> str:
    """Copy a vault so that its index can be edited, and return the name of the chunks' file."""
    target.mkdir(parents=True)
    location = Location(source)
    contents = Contents(location, tree.current(location))
    store = Store(target, tree.config_of(location) | {"compression": None})
    keys = contents.tree.values
    small = {key for key in keys if key.startswith(OWN_PREFIX) or not key[-1].isdigit()}
    copy(contents, small | {"vault_index/0"}, store)
    before = {file.name for file in (target / DATA).iterdir()}
    copy(contents, keys.keys() - small - {"vault_index/0"}, store)
    (target / METADATA).write_bytes((source / METADATA).read_bytes())
    (after,) = {file.name for file in (target / DATA).iterdir()} - before
    return f"{DATA}/{after}"


def sealed(data: bytes) -> bytes:
    """Return a node or manifest with the right checksum at its end."""
    return data[:-4] + struct.pack("<I", google_crc32c.value(data[:-4]))


def rename(path: Path, old: str, new: str) -> None:
    """Have the nodes in a vault's data files name another file than they do."""
    assert len(old) == len(new)
    for file in (path / DATA).iterdir():
        data = bytearray(file.read_bytes())
        place = data.find(NODE)
        while place >= 0:
            stop = place + int.from_bytes(data[place + 4 : place + 12], "little")
            data[place:stop] = sealed(bytes(data[place:stop]).replace(old.encode(), new.encode()))
            place = data.find(NODE, stop)
        file.write_bytes(data)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A vault, and the same with an index that can be edited."""
    root = tmp_path_factory.mktemp("made")
    source = record(root / "v.vlt" / "a")
    return root / "w.vlt" / "a", plain(source, root / "w.vlt" / "a"), vault.open_vault(source)


USES = {
    "read": lambda p: vault.open_vault(p, checked=False).read(),
    "windows": lambda p: vault.open_vault(p, checked=False).windows([0], [0], 5),
    "episode": lambda p: vault.open_vault(p).episode(0),
    "digest": lambda p: vault.open_vault(p).digest(),
    "compact": vault.compact,
    "repair": vault.repair,
    "salvage": lambda p: vault.salvage(p, p.parents[1] / "salvaged.vlt"),
}


def names_outside(root: Path, size: int) -> list[str]:
    """Names, as long as that of a data file, of the file ``secret`` in a directory."""
    found = ["../../", f"{root}/", "d/../../../", "d/./../../../"]
    return [f"{name}{'s' * (size - len(name))}" for name in found]


@pytest.mark.parametrize("kind", range(4))
def test_an_index_that_names_a_file_outside(made, tmp_path, kind):
    source, chunks, original = made
    place = Path("/tmp") if kind == 1 else tmp_path  # an absolute name must be short
    name = names_outside(place, len(chunks))[kind]
    path = shutil.copytree(source, tmp_path / "w.vlt" / "a")
    np.testing.assert_array_equal(
        vault.open_vault(path).read()["rewards"], original.read()["rewards"]
    )
    secret = Path(os.path.normpath(path / name))
    try:
        shutil.copy(path / chunks, secret)  # bytes that would pass for the vault's own
        rename(path, chunks, name)
        before = sorted(p.name for p in (path / DATA).iterdir())
        for what, use in USES.items():
            with pytest.raises(OffmarlError):
                use(path)
                pytest.fail(what)
        for deep in (False, True):
            found = vault.verify(path, deep=deep)
            assert any("is not the name of a file inside" in str(one) for one in found.faults)
        assert before == sorted(p.name for p in (path / DATA).iterdir())
        with zipfile.ZipFile(tmp_path / "w.zip", "w") as archive:
            for file in path.rglob("*"):
                archive.write(file, file.relative_to(tmp_path))
        zipped = tmp_path / "w.zip" / "w.vlt" / "a"
        for what in ("read", "windows", "digest"):
            with pytest.raises(OffmarlError):
                USES[what](zipped)
        assert not vault.verify(zipped).sound
    finally:
        secret.unlink()


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
    kept = target.read_bytes() if target.is_file() else sorted(p.name for p in target.iterdir())
    (path / ".rebuilt").mkdir()  # what is there would have files of `d` deleted
    uses = {**USES, "resume": vault.resume, "join": lambda p: vault.join(p, "run")}
    for name, use in uses.items():
        with pytest.raises(VaultFormatError):
            use(path)
            pytest.fail(name)
    found = vault.verify(path) if what not in (METADATA, MANIFEST) or change is into_link else None
    assert found is None or not found.sound
    assert kept == (
        target.read_bytes() if target.is_file() else sorted(p.name for p in target.iterdir())
    )


def test_a_link_to_a_vault_is_no_link_in_it(made, tmp_path):
    source, _, original = made
    (tmp_path / "other.vlt").symlink_to(source.parent)
    assert vault.open_vault(tmp_path / "other.vlt").digest() == original.digest()


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
