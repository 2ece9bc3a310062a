"""Exports appear whole or not at all: after kills, full disks, and two at once."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from offmarl import vault
from offmarl.errors import VaultExistsError, VaultFullError, VaultLockedError
from offmarl.vault.storage import files

from .experience import SPEC, whole_episodes, written
from .killed import PROGRAMS, deaths

NAMES = {".npz": "data.npz", ".h5": "data.h5", ".zarr": "data.zarr", "": "data-v0"}
LAYOUTS = {".npz": "numpy", ".h5": "pymarl", ".zarr": "zarr", "": "minari"}
NEEDS = {".h5": "h5py", "": "minari"}


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source.vlt"
    return written(path, whole_episodes(steps=40), chunk_steps=16)


def steps_in(path: Path, out: Path) -> int:
    """Import what was exported, and return its steps."""
    place = path.name if not path.suffix else path
    return vault.import_dataset(place, out, LAYOUTS[path.suffix]).num_steps


def remove(path: Path) -> None:
    if path.is_dir():
        files.clear_directory(path)
        path.rmdir()
    else:
        path.unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("suffix", "count"),
    [
        (".npz", 2),
        (".zarr", 2),
        *(pytest.param(suffix, 8, marks=pytest.mark.nightly) for suffix in NAMES),
    ],
)
def test_killed_at_any_instant(victims, source, tmp_path, monkeypatch, suffix, count):
    pytest.importorskip(NEEDS.get(suffix, "numpy"))
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    path = tmp_path / NAMES[suffix]
    events = victims.run("export", path).events
    assert steps_in(path, tmp_path / "whole.vlt") == source.num_steps
    unfinished = 0
    for number, when in enumerate(deaths(events, count, 0.2)):
        remove(path)
        death = victims.run("export", path, **when)
        if not path.exists():
            assert not death.acknowledged
            unfinished += 1
            PROGRAMS["export"](path)
            assert not list(tmp_path.glob(".*.part"))
        assert steps_in(path, tmp_path / f"{number}.vlt") == source.num_steps
    assert unfinished


@pytest.mark.parametrize("layout", ["numpy", "pymarl", "zarr"])
@pytest.mark.parametrize("room", [2**15, 2**19])
def test_a_full_disk(small_disk, tmp_path, layout, room):
    """There is no crash, as there would be with a mapped file, and no file is left."""
    wide = dataclasses.replace(SPEC, observation_size=600)
    with vault.create(tmp_path / "a.vlt", wide, rows=1) as writer:
        writer.append(*whole_episodes(wide, rows=1, steps=400))
    (small_disk / "ballast").write_bytes(bytes(2**20 - room))
    with pytest.raises(VaultFullError):
        vault.export_dataset(writer.path, small_disk / "a.npz", layout)
    assert [file.name for file in small_disk.iterdir()] == ["ballast"]


_EXPORTER = """
import resource, sys
from offmarl import vault
from offmarl.errors import VaultFullError

source, out, layout, size = sys.argv[1:]
for limit in (0, 1, *(int(size) * part // 8 for part in range(8)), int(size) - 1):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        vault.export_dataset(vault.open_vault(source), out, layout)
    except VaultFullError:
        print("full")
"""


@pytest.mark.parametrize("suffix", [".h5", ""])
def test_a_write_of_hdf5_that_fails_does_not_end_the_process(source, tmp_path, suffix, monkeypatch):
    """From its first byte to its last; the HDF5 library would crash, at the latest at the exit."""
    pytest.importorskip(NEEDS[suffix])
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    out = tmp_path / NAMES[suffix] if suffix else NAMES[suffix]
    target = vault.export_dataset(source, out, LAYOUTS[suffix])
    size = max(path.stat().st_size for path in (target, *target.rglob("*")))
    remove(target)
    done = subprocess.run(
        [sys.executable, "-c", _EXPORTER, source.path, out, LAYOUTS[suffix], str(size)],
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "full\n" * 11, "")
    assert not list(tmp_path.glob(f"*{NAMES[suffix]}*"))


@pytest.mark.slow
def test_two_at_once_and_what_is_there(source, tmp_path):
    path = tmp_path / "a.npz"
    with files.workspace(tmp_path / ".a.npz.part"), pytest.raises(VaultLockedError):
        vault.export_dataset(source, path, "numpy")
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(VaultExistsError):
        vault.export_dataset(source, path, "numpy")
