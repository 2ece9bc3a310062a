"""A kill at any time leaves the old or the new state, and loses nothing acknowledged."""

import shutil
import signal

import pytest

from offmarl import vault

from .experience import SPEC, assert_same, concatenate, make, steps, whole_episodes, written
from .killed import PROGRAMS, deaths

TRANSFORMS = ("change", "unite", "divide")
WRITERS = ("record", "create_whole", "share", *TRANSFORMS)


def begin(program, directory):
    """Return the path of a vault that the program has still to write to."""
    directory.mkdir()
    path = directory / "v.vlt" / ("train" if program == "divide" else "a")
    if program == "share":
        vault.create(path, SPEC, rows=2, chunk_steps=16).close()
    source = directory.parent / "source.vlt"
    if program in TRANSFORMS and not source.exists():
        written(source, make(steps=70), chunk_steps=16)
    return path


def die_and_run_again(victims, program, directory, reference, **when):
    path = begin(program, directory)
    death = victims.run(program, path, **when)
    if not path.exists():
        assert death.acknowledged == 0
        assert list(vault.list_vaults(directory)) == []
    else:
        check(program, path, death.acknowledged, reference)
    PROGRAMS[program](path)
    assert vault.open_vault(path).digest() == reference.digest()
    shutil.rmtree(directory)
    return death


def check(program, path, acknowledged, reference):
    dataset = vault.open_vault(path)
    if program in TRANSFORMS:
        assert dataset.digest() == reference.digest()
        parts = [entry.name for entry in path.parent.iterdir()]
        assert program != "divide" or sorted(parts) == ["train", "validation"]
        return
    chunks, remainder = divmod(dataset.length, 7)
    assert remainder == 0
    assert chunks >= acknowledged
    generate = whole_episodes if program == "share" else make
    if chunks:
        parts = [generate(steps=7, seed=chunk)[0] for chunk in range(chunks)]
        assert_same(dataset.transitions(), concatenate(parts))


@pytest.mark.slow
@pytest.mark.parametrize("count", [3, pytest.param(34, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("program", WRITERS)
def test_killed_at_any_instant_and_run_again(victims, tmp_path, program, count):
    path = begin(program, tmp_path / "whole")
    events = victims.run(program, path).events
    reference = vault.open_vault(path)
    for number, when in enumerate(deaths(events, count, 0.15)):
        died = die_and_run_again(victims, program, tmp_path / f"{number}", reference, **when)
        assert died.signal == signal.SIGKILL or "seconds" in when


def test_what_a_killed_creation_left_is_cleared(tmp_path):
    path = tmp_path / "v.vlt" / "a"
    PROGRAMS["record"](path)
    shutil.copytree(path, tmp_path / "v.vlt" / ".b.new")
    (tmp_path / "v.vlt" / ".b.new" / "d" / "rest").write_text("")
    written(tmp_path / "v.vlt" / "b", make())
    assert_same(vault.open_vault(tmp_path / "v.vlt" / "b").transitions(), steps(make()[0], 0, 10))
    assert sorted(p.name for p in (tmp_path / "v.vlt").iterdir()) == ["a", "b"]
