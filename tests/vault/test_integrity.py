"""Damage is found, located and repaired; intact data is not reported."""

import json
import random
import shutil
from contextlib import suppress

import numpy as np
import pytest
import tensorstore as ts

import offmarl
from offmarl import vault
from offmarl.errors import OffmarlError, VaultFormatError, VaultLockedError, VaultNotFoundError
from offmarl.vault import commit, layout, tables
from offmarl.vault.drivers import Directory
from offmarl.vault.layout import METADATA
from offmarl.vault.store import Store

from . import damage
from .experience import assert_same, make, steps
from .test_stock import append_with_stock, open_stock, to_stock, write_stock

CODECS = ("raw", "zstd")


@pytest.fixture(scope="module", params=CODECS)
def recorded(request, tmp_path_factory):
    return damage.record(tmp_path_factory.mktemp("recorded") / "v.vlt" / "a", request.param)


@pytest.fixture
def path(recorded, tmp_path):
    return shutil.copytree(recorded, tmp_path / "v.vlt" / "a")


def place_of(path, key):
    """The file and offset of a value."""
    place = commit.current_tree(Directory(path)).values[key]
    return path / place.file, place.offset


def flip(path, key, offset=0):
    file, start = place_of(path, key)
    data = bytearray(file.read_bytes())
    data[start + offset] ^= 1
    file.write_bytes(data)


def overwrite(path, values):
    """Write keys as no program should."""
    Store.open(path).commit(values, fence={}).result()


def test_a_sound_vault(path):
    quick, deep = vault.verify(path), vault.verify(path, deep=True)
    assert quick.sound and deep.sound and quick.native
    assert (quick.length, quick.chunks, quick.read_bytes) == (52, 70, 0)
    assert deep.read_bytes > 0
    assert deep.unchecked == ()
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert vault.repair(path) == vault.Repair(path, (), 52, 52, ())
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_a_flipped_bit_is_traced_to_its_episodes(path):
    flip(path, "rewards./0.3.0", 20)
    assert vault.verify(path).sound  # nothing was read
    (fault,) = vault.verify(path, deep=True).faults
    assert (fault.leaf, fault.rows, fault.steps) == ("rewards", (0, 2), (24, 32))
    found = vault.open_vault(path).episodes
    hit = (found.start < 32) & (found.start + found.length > 24)
    assert fault.episodes == tuple(np.flatnonzero(hit))
    assert "rewards, rows 0 to 1, steps 24 to 31: it" in str(fault)
    with pytest.raises(OffmarlError, match=r"(?s)rewards|decod|zstd"):
        offmarl.open(path, checked=True).read(20, 40, leaves=["rewards"])


def test_a_lost_file_is_found_without_reading(path):
    place_of(path, "observations./0.2.0.0")[0].unlink()
    found = vault.verify(path)
    lost = [fault for fault in found.faults if fault.leaf == "observations"]
    assert lost[0].steps[0] <= 16 < lost[0].steps[1]
    assert "missing or truncated" in lost[0].what


def test_a_missing_chunk_is_no_zeros(path):
    store = Store.open(path)
    store._kv.write("infos.state./0.1.0", None).result()
    (fault,) = vault.verify(path).faults
    assert (fault.what, fault.leaf, fault.steps) == ("it is missing", "infos.state", (8, 16))
    found = vault.open_vault(path)
    with pytest.raises(VaultFormatError, match=r"has lost infos\.state\./0\.1\.0"):
        found.read(8, 9, leaves=["infos.state"])
    with pytest.raises(VaultFormatError, match="has lost infos"):
        found.windows(np.array([0]), np.array([6]), 4, leaves=["infos.state"])
    assert found.read(0, 8, leaves=["infos.state"])["infos.state"].any()


@pytest.mark.parametrize("records", [0, 1, 3])
def test_each_row_has_its_unfinished_episode(path, records):
    record = vault.open_vault(path).manifest.running[:1]
    overwrite(path, {layout.RUNNING_KEY: np.repeat(record, records).tobytes()})
    with pytest.raises(VaultFormatError, match="bytes for 2 rows"):
        vault.open_vault(path)


def test_what_is_sound_is_taken_out_of_a_damaged_vault(path):
    flip(path, "rewards./0.0.0", 20)
    flip(path, "observations./0.5.0.0", 20)
    with pytest.raises(VaultFormatError, match="damaged in its first steps"):
        vault.repair(path)
    others = path.parents[1]
    with pytest.raises(OffmarlError, match=r"rewards|observations"):
        vault.cat([path], others / "all.vlt")  # not as if it were sound
    taken = vault.slice(path, others / "sound.vlt", start=8, stop=32, by="steps").read()
    for name, array in vault.open_vault(path).read(8, 32).items():
        if name != "truncations":  # where episodes were cut off
            np.testing.assert_array_equal(taken[name].reshape(array.shape), array)
    assert vault.verify(others / "sound.vlt", deep=True).sound


def test_neither_manifest_nor_metadata(path):
    whole = vault.open_vault(path).digest()
    (path / METADATA).unlink()
    assert [fault.key for fault in vault.verify(path, deep=True).faults] == [METADATA]
    (path / "manifest.ocdbt").unlink()
    assert vault.repair(path).length == 52
    assert vault.open_vault(path).digest() == whole
    shutil.rmtree(path / "d")
    with pytest.raises(VaultFormatError, match="nothing is left"):
        vault.repair(path)


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        (layout.HEAD_KEY, {"length": 51}, "have gaps or overlaps"),
        (layout.HEAD_KEY, {"episodes": 3}, "are not in the episode table"),
        (layout.HEAD_KEY, {"finals": 3}, "final views are not those"),
        (layout.HEAD_KEY, {"length": -1}, "head is damaged"),
        (layout.SCHEMA_KEY, {"chunk_rows": 1}, "is not what the vault's schema says"),
    ],
)
def test_keys_that_contradict_one_another(path, key, change, message):
    store = Store.open(path)
    overwrite(path, {key: layout.dump_json(store.get_json(key) | change)})
    faults = vault.verify(path).faults
    assert any(message in str(fault) for fault in faults), faults


def test_an_episode_table_that_lies(path):
    key = layout.episodes_key(0)
    store = Store.open(path)
    records = np.frombuffer(store.get(key), tables.dtype(2)).copy()
    records["returns"][1] += 1
    overwrite(path, {key: records.tobytes()})
    assert vault.verify(path).sound
    (fault,) = vault.verify(path, deep=True).faults
    assert "the steps differ in its returns" in fault.what
    before = vault.open_vault(path)
    kept, returns = before.transitions(), before.episodes.returns
    repaired = vault.repair(path)
    assert (repaired.length, repaired.dropped) == (52, ())
    with pytest.raises(OffmarlError, match="open it again"):
        before.finals  # noqa: B018
    found = vault.open_vault(path)
    assert_same(found.transitions(), kept)
    assert found.manifest.head.runs == before.manifest.head.runs
    assert abs(found.episodes.returns - returns).sum() == pytest.approx(2)


def test_repair_keeps_the_longest_prefix(path):
    whole = vault.open_vault(path)
    first = whole.transitions(0, 24)
    expected = whole.episodes
    flip(path, "observations./0.3.0.0", 5)
    planned = vault.repair(path, dry_run=True)
    assert not vault.verify(path, deep=True).sound
    done = vault.repair(path)
    assert done == planned
    assert (done.length_before, done.length) == (52, 24)
    assert done.dropped[0] == "steps 24 to 51 of every row"
    assert vault.verify(path, deep=True).sound
    found = vault.open_vault(path)
    assert_same(found.transitions(), first)
    ended = expected.start + expected.length <= 24
    ours = found.episodes.cause != "open"
    np.testing.assert_array_equal(found.episodes.returns[ours], expected.returns[ended])
    np.testing.assert_array_equal(found.episodes.cause[ours], expected.cause[ended])
    assert (found.episodes.final[ours] >= 0).all()
    assert found.provenance["recorder"] == "x" * 200
    assert found.provenance["repaired"]["dropped"] == list(done.dropped[1:])
    with vault.resume(path) as writer:
        writer.append(*make(steps=5))
    assert vault.verify(path, deep=True).sound


@pytest.mark.parametrize("content", [None, "", "{", '{"version": 1.2}', "[" * 100_000])
def test_metadata_is_made_again_from_the_schema(path, content):
    before = damage.content(path)
    metadata = (path / METADATA).read_bytes()
    (path / METADATA).unlink()
    if content is not None:
        (path / METADATA).write_text(content)
    assert {fault.key for fault in vault.verify(path).faults} == {METADATA}
    vault.repair(path)
    assert (path / METADATA).read_bytes() == metadata
    assert damage.content(path).digest == before.digest
    assert open_stock(path).vault_index == 52


def test_the_schema_is_made_again_from_metadata(path):
    before = vault.open_vault(path)
    digest = before.digest()
    flip(path, layout.SCHEMA_KEY)
    with pytest.raises(VaultFormatError, match="checksum of offmarl/schema is wrong"):
        vault.open_vault(path)
    vault.repair(path)
    found = vault.open_vault(path)
    assert found.digest() == digest
    assert found.manifest.schema == before.manifest.schema
    assert found.manifest.head.runs == before.manifest.head.runs


def test_without_a_manifest_the_last_commit_is_found(path):
    before = damage.content(path)
    (path / "manifest.ocdbt").unlink()
    (fault,) = vault.verify(path).faults
    assert "manifest cannot be read" in str(fault)
    done = vault.repair(path)
    assert (done.length_before, done.length) == (None, 52)
    assert damage.content(path).digest == before.digest


def test_a_damaged_tree_leads_to_the_commit_before(path):
    *_, last = ts.ocdbt.dump(Directory(path).files).result()["versions"]
    _, _, file, offset, _ = last["root"]["location"].split(":")
    data = bytearray((path / file).read_bytes())
    data[int(offset) + 50] ^= 4
    (path / file).write_bytes(data)
    whole = make(steps=damage.STEPS)[0]
    assert "part of the tree cannot be read" in vault.verify(path).faults[0].what
    assert vault.repair(path).length == 39
    assert_same(vault.open_vault(path)[: damage.STEPS], whole)


def test_a_vault_is_never_emptied(path):
    flip(path, "rewards./0.0.0", 3)
    before = sorted(path.rglob("*"))
    with pytest.raises(VaultFormatError, match="nothing was changed"):
        vault.repair(path)
    assert sorted(path.rglob("*")) == before


def test_a_stock_tail_is_unchecked_and_kept(path):
    ours = vault.open_vault(path).transitions()
    append_with_stock(open_stock(path), make(steps=9, seed=9)[0])
    found = vault.verify(path, deep=True)
    assert found.sound
    assert found.unchecked == (
        "steps 48 to 60: a stock program appended to them, without checksums.",
    )
    flip(path, layout.SCHEMA_KEY)
    assert vault.repair(path).length == 61
    found = vault.open_vault(path)
    assert_same(found[:52], ours)
    assert found.unverified == ((52, 61),)
    with vault.resume(path) as writer:
        assert writer.length == 61
    assert vault.verify(path, deep=True).unchecked == ()


def test_places_without_a_vault(tmp_path, path):
    with pytest.raises(VaultNotFoundError):
        vault.verify(tmp_path / "nothing")
    with pytest.raises(VaultFormatError, match="not a vault"):
        vault.verify(tmp_path)
    with vault.resume(path), pytest.raises(VaultLockedError):
        vault.repair(path)


@pytest.fixture
def foreign(path):
    """What is left where our own keys are taken away: a vault as others write them."""
    Store.open(path)._kv.delete_range(ts.KvStore.KeyRange("offmarl/", "offmarl0")).result()
    metadata = json.loads((path / METADATA).read_text())
    (path / METADATA).write_text(json.dumps({**metadata, "offmarl": "no more"}))
    return path


def test_a_vault_that_others_wrote(foreign):
    whole = vault.open_vault(foreign).transitions()
    found = vault.verify(foreign, deep=True)
    assert found.sound
    assert not found.native
    assert (found.length, found.chunks) == (52, 70)
    assert f"{METADATA}: programs other than offmarl keep no digest of it." in found.unchecked
    place_of(foreign, "observations./0.5.0.0")[0].unlink()
    faults = vault.verify(foreign).faults
    begin = min(fault.steps[0] for fault in faults if fault.steps)
    assert {fault.leaf for fault in faults} >= {"observations", "infos.legals"}
    assert vault.repair(foreign).length == begin > 0
    assert_same(vault.open_vault(foreign).transitions(), steps(whole, 0, begin))
    append_with_stock(open_stock(foreign), make(rows=2, steps=4)[0])
    assert vault.open_vault(foreign).length == begin + 4
    (foreign / METADATA).unlink()
    with pytest.raises(VaultFormatError, match=r"lost metadata\.json"):
        vault.repair(foreign)


def test_codecs_without_a_checksum_are_named(tmp_path):
    path = tmp_path / "s.vlt" / "Good"
    write_stock(path, to_stock(make(rows=1, steps=20)[0]), {"id": "blosc"})
    assert "rewards: blosc compression keeps no checksum of its content." in (
        vault.verify(path).unchecked
    )


def campaign(path, count, seed):
    """Damage a vault again and again; return how often it was found, without effect, repaired."""
    before = damage.content(path)
    whole = vault.open_vault(shutil.copytree(path, path.with_name("whole")))
    steps = whole.transitions()
    outcomes = {"harmless": 0, "all": 0, "part": 0, "nothing": 0}
    for what in damage.damages(path, count, seed):
        assert_read_or_refused(path, steps)
        found = vault.verify(path, deep=True)
        if found.sound:
            assert damage.content(path) == before, what
            outcomes["harmless"] += 1
            continue
        try:
            done = vault.repair(path)
        except VaultFormatError as error:
            assert "nothing was changed" in str(error), what
            assert any(fault.steps and fault.steps[0] == 0 for fault in found.faults), what
            outcomes["nothing"] += 1
            continue
        assert vault.verify(path, deep=True).sound, what
        assert damage.assert_prefix(path, whole, done.dropped) == done.length, what
        outcomes["all" if done.length == whole.length else "part"] += 1
    shutil.rmtree(path.with_name("whole"))
    return outcomes


def assert_read_or_refused(path, expected):
    """Reads that are checked return what was written, or nothing."""
    with suppress(OffmarlError):
        assert_same(vault.open_vault(path, checked=True).transitions(), expected)


def test_any_damage(path):
    assert sum(campaign(path, 5, seed=0).values()) == 5


@pytest.mark.nightly
@pytest.mark.parametrize("state", ["recorded", "compacted", "repaired"])
def test_any_damage_500_times(path, state):
    if state == "compacted":
        vault.compact(path)
    elif state == "repaired":
        flip(path, "observations./0.5.0.0", 5)
        vault.repair(path)
    outcomes = campaign(path, 84, seed=random.Random(state).randrange(1000))
    print(state, outcomes)
    assert outcomes["all"] and outcomes["harmless"] + outcomes["part"]
