"""Compaction removes unused bytes only, and a kill during it loses nothing."""

import errno
import shutil
import signal
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import numpy as np
import pytest
import tensorstore as ts

from offmarl import vault
from offmarl.errors import VaultConflictError, VaultError, VaultFormatError, VaultLockedError
from offmarl.terminal import silent
from offmarl.vault.storage import commit
from offmarl.vault.storage.store import Directory
from offmarl.vault.write import compaction

from . import damage
from .damage import flip
from .experience import SPEC, assert_same, concatenate, make, written
from .killed import PROGRAMS, deaths
from .test_stock import (
    append_with_stock,
    assert_stock_reads_and_samples,
    open_stock,
    to_stock,
    write_stock,
)

CODECS = ("raw", "zstd")
WIDE = replace(SPEC, observation_size=40)


@pytest.fixture(params=CODECS)
def path(request, tmp_path):
    return damage.record(tmp_path / "v.vlt" / "a", request.param)


def test_the_same_content_in_less_room(path, monkeypatch):
    monkeypatch.setattr(compaction, "_BATCH_BYTES", 2**13)
    before = damage.content(path)
    done = vault.compact(path)
    files = [file for file in path.rglob("*") if file.is_file()]
    store = [file for file in files if file.parent.name == "d" or file.name == "manifest.ocdbt"]
    assert done.bytes_after == sum(file.stat().st_size for file in store) < done.bytes_before
    assert done.files_after == len(store)
    assert damage.content(path) == before
    assert vault.verify(path, deep=True).sound
    again = vault.compact(path)
    assert again.bytes_after == pytest.approx(again.bytes_before, rel=0.05)
    with vault.resume(path) as writer:
        with pytest.raises(VaultLockedError):
            vault.compact(path)
        writer.append(*make(steps=30, seed=9))
    assert vault.open_vault(path).length == 82


def test_many_small_commits(tmp_path, monkeypatch):
    monkeypatch.setattr(compaction, "_LEAST_RECLAIMED", 2**30)
    path = tmp_path / "v.vlt" / "a"
    with vault.create(path, SPEC, rows=2, chunk_steps=64) as writer:
        for seed in range(100):
            writer.append(*make(steps=3, seed=seed))
            writer.flush()
    done = vault.compact(path)
    assert done.bytes_after < done.bytes_before / 5
    values = commit.current_tree(Directory(path)).values
    places = [values[f"observations./0.{number}.0.0"] for number in range(5)]
    assert len({place.file for place in places}) == 1
    assert places == sorted(places)


@pytest.mark.slow
@pytest.mark.parametrize("compression", [None, {"id": "zstd", "level": 3}])
def test_stock_vaults_are_compacted(tmp_path, compression):
    path = tmp_path / "s.vlt" / "Good"
    write_stock(path, to_stock(make(rows=2, steps=20)[0]), compression)
    for seed in range(3):
        append_with_stock(open_stock(path), make(rows=2, steps=5, seed=seed)[0])
    before = vault.open_vault(path).transitions()
    done = vault.compact(path)
    assert done.bytes_after < done.bytes_before
    assert_same(vault.open_vault(path).transitions(), before)
    append_with_stock(open_stock(path), make(rows=2, steps=5)[0])
    assert vault.open_vault(path).length == 40


def test_a_damaged_vault_is_not_compacted(path):
    refused = 0
    for change in damage.damages(path, 6, seed=5):
        if not vault.verify(path).sound:
            with pytest.raises(VaultError):
                vault.compact(path)
            assert not (path / compaction.REBUILT).exists(), change
            refused += 1
    assert refused


def test_a_checksum_that_was_wrong_stays_wrong(path):
    flip(path, "observations./0.2.0.0", 9)
    vault.compact(path)
    (fault,) = vault.verify(path, deep=True).faults
    assert (fault.leaf, fault.steps) == ("observations", (16, 24))


# ------------------------------------------------------------------ space reclaimed on close


@pytest.fixture
def reclaiming(monkeypatch):
    monkeypatch.setattr(compaction, "_LEAST_RECLAIMED", 1)


def size_of(path):
    return sum(file.stat().st_size for file in (path / "d").iterdir())


@pytest.mark.parametrize("codec", CODECS)
def test_tails_that_were_replaced_take_no_room_after_close(tmp_path, reclaiming, codec):
    path = tmp_path / "v.vlt" / "a"
    reference = tmp_path / "whole.vlt" / "a"
    records = [make(spec=WIDE, steps=100, seed=seed) for seed in range(20)]
    written(reference, *records, spec=WIDE, chunk_steps=128, codec=codec)
    with vault.create(path, WIDE, rows=2, chunk_steps=128, codec=codec) as writer:
        for record in records:
            writer.append(*record)
            writer.flush()
        before = size_of(path)
    assert before > 1.4 * size_of(path)
    assert size_of(path) < 1.1 * size_of(reference)
    assert vault.verify(path, deep=True).sound
    assert vault.open_vault(path).digest() == vault.open_vault(reference).digest()


def test_sessions_reclaim_what_earlier_ones_left(tmp_path, reclaiming):
    path = tmp_path / "v.vlt" / "a"
    vault.create(path, WIDE, rows=2, chunk_steps=128).close()
    for seed in range(6):
        with vault.resume(path) as writer:
            writer.append(*make(spec=WIDE, steps=30, seed=seed))
    steps = [make(spec=WIDE, steps=30, seed=seed)[0] for seed in range(6)]
    assert_same(vault.open_vault(path).transitions(), concatenate(steps))
    live = commit.live_bytes(Directory(path))
    assert size_of(path) <= 1.2 * live


@pytest.mark.parametrize(
    "limits",
    [{}, {"_LEAST_RECLAIMED": 1, "_MOST_MOVED": 1}, {"_LEAST_RECLAIMED": 1, "_MOST_UNUSED": 0.99}],
    ids=["little is unused", "much is to be moved", "a small part is unused"],
)
def test_vaults_of_which_little_is_gained_are_left_alone(path, monkeypatch, limits):
    for name, value in limits.items():
        monkeypatch.setattr(compaction, name, value)
    files = sorted(file.name for file in (path / "d").iterdir())
    vault.resume(path).close()
    assert sorted(file.name for file in (path / "d").iterdir()) == files


RECLAIM = [vault.compact, lambda path: vault.resume(path).close()]


@pytest.mark.parametrize("reclaim", RECLAIM)
def test_readers_read_on_after_space_is_reclaimed(path, monkeypatch, reclaim):
    mapped, not_read_yet = vault.open_vault(path), vault.open_vault(path)
    stock = open_stock(path)
    first = mapped[:20]
    transitions = vault.open_vault(path).transitions()
    monkeypatch.setattr(compaction, "_LEAST_RECLAIMED", 1)
    size = size_of(path)
    reclaim(path)
    assert size_of(path) < size
    assert_same(not_read_yet.transitions(), transitions)
    assert_same(concatenate([first, mapped[20:]]), transitions)
    np.testing.assert_array_equal(stock.read().experience["rewards"], transitions.reward)
    assert_stock_reads_and_samples(path, transitions)
    append_with_stock(open_stock(path), make(steps=11, seed=5)[0])
    assert vault.open_vault(path).unverified == ((52, 63),)


def test_a_vault_that_is_compacted_while_it_is_verified_is_sound(path):
    calls = iter([True])

    @contextmanager
    def progress(description, total):
        if next(calls, False):
            vault.compact(path)
        yield silent

    assert vault.verify(path, deep=True, progress=progress).faults == ()


@pytest.mark.parametrize("reclaim", RECLAIM)
def test_what_a_stock_program_writes_meanwhile_is_kept(path, reclaiming, monkeypatch, reclaim):
    transitions = vault.open_vault(path).transitions()

    def meanwhile(*arguments, real=compaction.copy):
        real(*arguments)
        append_with_stock(open_stock(path), make(steps=4)[0])

    monkeypatch.setattr(compaction, "copy", meanwhile)
    is_told = reclaim is vault.compact
    with pytest.raises(VaultConflictError) if is_told else nullcontext():
        reclaim(path)
    assert not (path / compaction.REBUILT).exists()
    dataset = vault.open_vault(path)
    assert dataset.unverified == ((52, 56),)
    assert_same(dataset[:52], transitions)


@pytest.mark.parametrize("reclaim", RECLAIM)
def test_data_that_a_stock_program_has_not_committed_yet_is_kept(
    path, reclaiming, monkeypatch, reclaim
):
    def meanwhile(*arguments, real=compaction.copy):
        real(*arguments)
        (path / "d" / "theirs").write_bytes(b"a chunk")

    monkeypatch.setattr(compaction, "copy", meanwhile)
    size = size_of(path)
    reclaim(path)
    assert (path / "d" / "theirs").exists() and size_of(path) < size


def test_a_full_disk_does_not_fail_a_close(path, reclaiming, monkeypatch):
    before = damage.content(path)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(compaction, "copy", full)
    vault.resume(path).close()
    assert damage.content(path) == before
    assert not (path / compaction.REBUILT).exists()
    vault.resume(path).close()


def state_of(path):
    """Return the state of a vault: its content and its faults."""
    try:
        content = damage.content(path)
    except VaultFormatError as error:
        content = str(error)
    return content, vault.verify(path, deep=True).faults


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, pytest.param(30, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("program", ["compact", "close"])
def test_killed_at_any_instant(victims, tmp_path, program, count):
    path = damage.record(tmp_path / "v.vlt" / "a")
    old = shutil.copytree(path, path.with_name("old"))
    before = state_of(path)
    events = victims.run(program, path).events
    after = state_of(path)
    for when in deaths(events, count, 0.08):
        shutil.rmtree(path)
        shutil.copytree(old, path)
        died = victims.run(program, path, **when)
        is_done = state_of(path) == after
        assert is_done or state_of(path) == before, when
        assert not died.acknowledged or is_done
        assert died.signal == signal.SIGKILL or "seconds" in when
        PROGRAMS[program](path)
        assert state_of(path) == after
        live = commit.live_files(Directory(path))
        assert {f"d/{file.name}" for file in (path / "d").iterdir()} == live
        assert not (path / compaction.REBUILT).exists()


def test_nothing_is_deleted_where_a_part_of_the_tree_cannot_be_read(path, monkeypatch):
    vault.compact(path)  # and no earlier commit has the same files
    before, files = damage.content(path), {*(path / "d").iterdir()}
    (path / compaction.REBUILT).mkdir()
    dump, locations = ts.ocdbt.dump, []

    def fail_once(store, *location):
        locations.extend(location)
        if location and len(locations) == 1:
            raise OSError(errno.EMFILE, "too many open files")
        return dump(store, *location)

    monkeypatch.setattr(ts.ocdbt, "dump", fail_once)
    vault.resume(path).close()
    assert locations
    assert {*(path / "d").iterdir()} >= files
    (path / compaction.REBUILT).mkdir()  # now it can be read, and what a killed one left is deleted
    (path / "d" / "moved").write_bytes(b"of no use")
    vault.resume(path).close()
    assert not (path / "d" / "moved").exists() and not (path / compaction.REBUILT).exists()
    assert damage.content(path) == before
