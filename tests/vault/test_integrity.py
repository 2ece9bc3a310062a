"""Damage is found and located; intact data is not reported."""

import random
from contextlib import suppress

import numpy as np
import pytest
import tensorstore as ts

import offmarl
from offmarl import vault
from offmarl.errors import OffmarlError, VaultFormatError
from offmarl.teams import Team
from offmarl.types import map_tree
from offmarl.vault.format import layout, tables
from offmarl.vault.format.faults import merge_faults, with_episodes
from offmarl.vault.format.layout import METADATA
from offmarl.vault.storage import commit
from offmarl.vault.storage.store import Directory
from tests.specs import typed_spec

from . import damage
from .damage import change, change_episode, flip, make_foreign, put, remove
from .experience import SPEC, assert_same, make
from .test_stock import append_with_stock, open_stock, to_stock, write_stock

CODECS = ("raw", "zstd")


@pytest.fixture(scope="module", params=CODECS)
def recorded(request, tmp_path_factory):
    return damage.record(tmp_path_factory.mktemp("recorded") / "v.vlt" / "a", request.param)


def place_of(path, key):
    """The file and offset of a value."""
    place = commit.current_tree(Directory(path)).values[key]
    return path / place.file, place.offset


def test_a_sound_vault(path):
    quick, deep = vault.verify(path), vault.verify(path, deep=True)
    assert quick.sound and deep.sound and quick.native
    assert (quick.length, quick.chunks, quick.read_bytes) == (52, 70, 0)
    assert deep.read_bytes > 0
    assert deep.unchecked == ()


def test_a_flipped_bit_is_traced_to_its_episodes(path):
    flip(path, "rewards./0.3.0", 20)
    assert vault.verify(path).sound  # nothing was read
    (fault,) = vault.verify(path, deep=True).faults
    assert (fault.leaf, fault.rows, fault.steps) == ("rewards", (0, 2), (24, 32))
    episodes = vault.open_vault(path).episodes
    hit = (episodes.start < 32) & (episodes.start + episodes.length > 24)
    assert fault.episodes == tuple(np.flatnonzero(hit))
    assert "rewards, rows 0 to 1, steps 24 to 31: it" in str(fault)
    with pytest.raises(OffmarlError, match=r"(?s)rewards|decod|zstd"):
        offmarl.open(path, checked=True).read(20, 40, leaves=["rewards"])


@pytest.mark.parametrize(
    ("episodes", "message"),
    [
        ((), ""),
        ((3,), " (episode 3)"),
        (tuple(range(3, 901)), " (episodes 3 to 900)"),
        ((3, *range(5, 12)), " (8 episodes: 3, 5, 6, 7, 8, 9, 10, 11)"),
        ((3, *range(5, 13)), " (9 episodes: 3, 5, 6, 7, 8, 9, 10, 11, ...)"),
    ],
)
def test_the_episodes_of_a_fault(episodes, message):
    fault = vault.Fault("it is lost", None, "rewards", (0, 1), (8, 16), episodes)
    assert str(fault) == f"rewards, rows 0, steps 8 to 15: it is lost{message}"


def test_equal_faults_of_consecutive_steps_are_one():
    def lost(leaf, first, stop, rows=(0, 2), what="it is lost"):
        return vault.Fault(what, f"{leaf}./0.{first}", leaf, rows, (first, stop))

    other = [vault.Fault("no head", "head"), vault.Fault("no head", "head")]
    kept = [lost("a", 0, 8), lost("a", 25, 32), lost("a", 0, 8, (2, 4)), lost("b", 8, 16)]
    faults = [*kept, lost("a", 16, 24), lost("a", 8, 16), *other, lost("a", 9, 20)]
    faults.append(lost("a", 24, 25, what="it is wrong"))
    assert merge_faults(faults) == [
        *other,
        lost("a", 0, 24),
        *kept[1:3],
        lost("a", 24, 25, what="it is wrong"),
        lost("b", 8, 16),
    ]


@pytest.mark.parametrize(
    ("rows", "steps", "hit"),
    [
        ((0, 1), (4, 6), (0, 1)),
        ((0, 2), (5, 9), (1, 2, 3)),
        ((1, 2), (0, 5), (3,)),
        ((2, 4), (0, 9), ()),
    ],
)
def test_the_episodes_that_a_fault_touches(rows, steps, hit):
    """Row 0 has episodes of the steps 0 to 4, 5 to 6 and 7 to 9, and row 1 one of all steps."""
    table = tables.none_running(4, tables.dtype(2, 2))
    for name, column in (("row", (0, 0, 0, 1)), ("start", (0, 5, 7, 0)), ("length", (5, 2, 3, 10))):
        table[name] = column
    episodes = tables.to_episodes(table, (Team("all", (0, 1)),))
    fault = vault.Fault("it is lost", None, "rewards", rows, steps)
    assert with_episodes(fault, episodes).episodes == hit


def test_a_lost_file_is_found_without_reading(path):
    place_of(path, "observations./0.2.0.0")[0].unlink()
    report = vault.verify(path)
    lost = [fault for fault in report.faults if fault.leaf == "observations"]
    assert lost[0].steps[0] <= 16 < lost[0].steps[1]
    assert "missing or truncated" in lost[0].what


def test_a_vault_without_its_first_file_is_named(path):
    place_of(path, layout.HEAD_KEY)[0].unlink()
    with pytest.raises(VaultFormatError, match=f"{path} is damaged: .* data file .*is missing"):
        vault.open_vault(path)
    assert all(str(fault).count(fault.key) == 1 for fault in vault.verify(path).faults if fault.key)


def test_a_missing_chunk_is_no_zeros(path):
    remove(path, "infos.state./0.1.0")
    (fault,) = vault.verify(path).faults
    assert (fault.what, fault.leaf, fault.steps) == ("it is missing", "infos.state", (8, 16))
    dataset = vault.open_vault(path)
    with pytest.raises(VaultFormatError, match=r"has lost infos\.state\./0\.1\.0"):
        dataset.read(8, 9, leaves=["infos.state"])
    with pytest.raises(VaultFormatError, match="has lost infos"):
        dataset.windows(np.array([0]), np.array([6]), 4, leaves=["infos.state"])
    assert dataset.read(0, 8, leaves=["infos.state"])["infos.state"].any()


@pytest.mark.parametrize("records", [0, 1, 3])
def test_each_row_has_its_unfinished_episode(path, records):
    record = vault.open_vault(path).manifest.running[:1]
    put(path, {layout.RUNNING_KEY: np.repeat(record, records).tobytes()})
    with pytest.raises(VaultFormatError, match="bytes for 2 rows"):
        vault.open_vault(path)


@pytest.mark.filterwarnings("ignore:Episodes without their beginning")
def test_what_is_sound_is_taken_out_of_a_damaged_vault(path):
    flip(path, "rewards./0.0.0", 20)
    flip(path, "observations./0.5.0.0", 20)
    folder = path.parents[1]
    with pytest.raises(OffmarlError, match=r"rewards|observations"):
        vault.cat([path], folder / "all.vlt")  # not as if it were sound
    arrays = vault.slice(path, folder / "sound.vlt", start=8, stop=32, by="steps").read()
    for name, array in vault.open_vault(path).read(8, 32).items():
        if name != "truncations":  # where episodes were cut off
            np.testing.assert_array_equal(arrays[name].reshape(array.shape), array)
    assert vault.verify(folder / "sound.vlt", deep=True).sound


def test_neither_manifest_nor_metadata(path):
    (path / METADATA).unlink()
    assert [fault.key for fault in vault.verify(path, deep=True).faults] == [METADATA]
    with pytest.raises(
        VaultFormatError, match=r"is damaged: it lacks metadata\.json\. `offmarl verify"
    ):
        vault.open_vault(path)
    (path / "manifest.ocdbt").unlink()
    (fault,) = vault.verify(path).faults
    assert "manifest cannot be read" in str(fault)
    with pytest.raises(VaultFormatError, match="copy the vault again"):
        vault.salvage(path, path.parents[1] / "kept.vlt")


@pytest.mark.parametrize(
    ("key", "fields", "message"),
    [
        (layout.HEAD_KEY, {"length": 51}, "have gaps or overlaps"),
        (layout.HEAD_KEY, {"episodes": 3}, "are not in the episode table"),
        (layout.HEAD_KEY, {"finals": 3}, "final views are not those"),
        (layout.HEAD_KEY, {"length": -1}, "head is damaged"),
        (layout.SCHEMA_KEY, {"chunk_rows": 1}, "is not what the vault's schema says"),
    ],
)
def test_keys_that_contradict_one_another(path, key, fields, message):
    change(path, key, **fields)
    faults = vault.verify(path).faults
    assert any(message in str(fault) for fault in faults), faults


def test_an_episode_table_that_lies(path):
    change_episode(path, "returns", 1e6, number=1)
    assert vault.verify(path).sound
    (fault,) = vault.verify(path, deep=True).faults
    assert "the steps differ in its returns" in fault.what


def assert_all_salvaged(path, digest):
    done = vault.salvage(path, path.parents[1] / "kept.vlt")
    assert not done.lost and not done.unknown_steps
    dataset = vault.open_vault(done.path)
    assert (dataset.digest() == digest) == (dataset.episodes.cause != "cut").all()
    assert vault.verify(done.path, deep=True).sound


@pytest.mark.parametrize("content", [None, "", "{", '{"version": 1.2}', "[" * 100_000])
def test_metadata_is_in_the_schema(path, content):
    digest = vault.open_vault(path).digest()
    (path / METADATA).unlink()
    if content is not None:
        (path / METADATA).write_text(content)
    assert {fault.key for fault in vault.verify(path).faults} == {METADATA}
    assert_all_salvaged(path, digest)


def test_the_schema_is_in_metadata(path):
    digest = vault.open_vault(path).digest()
    flip(path, layout.SCHEMA_KEY)
    with pytest.raises(VaultFormatError, match="checksum of offmarl/schema is wrong"):
        vault.open_vault(path)
    assert_all_salvaged(path, digest)


def test_a_damaged_tree_is_said(path):
    *_, last = ts.ocdbt.dump(Directory(path).files).result()["versions"]
    _, _, file, offset, _ = last["root"]["location"].split(":")
    data = bytearray((path / file).read_bytes())
    data[int(offset) + 50] ^= 4
    (path / file).write_bytes(data)
    assert "part of the tree cannot be read" in vault.verify(path).faults[0].what
    with pytest.raises(VaultFormatError, match="copy the vault again"):
        vault.salvage(path, path.parents[1] / "kept.vlt")


def test_a_stock_tail_is_unchecked_and_kept(path):
    ours = vault.open_vault(path).transitions()
    append_with_stock(open_stock(path), make(steps=9, seed=9)[0])
    report = vault.verify(path, deep=True)
    assert report.sound
    assert report.unchecked == (
        "steps 48 to 60: a stock program appended to them, without checksums.",
    )
    dataset = vault.open_vault(path)
    assert_same(dataset[:52], ours)
    assert dataset.unverified == ((52, 61),)
    with vault.resume(path) as writer:
        assert writer.length == 61
    assert vault.verify(path, deep=True).unchecked == ()


@pytest.fixture
def foreign(path):
    """A vault without offmarl's own keys, as other programs write it."""
    make_foreign(path)
    return path


def test_a_vault_that_others_wrote(foreign):
    transitions = vault.open_vault(foreign).transitions()
    report = vault.verify(foreign, deep=True)
    assert report.sound
    assert not report.native
    assert (report.length, report.chunks) == (52, 70)
    assert f"{METADATA}: programs other than offmarl keep no digest of it." in report.unchecked
    place_of(foreign, "observations./0.5.0.0")[0].unlink()
    faults = vault.verify(foreign).faults
    begin = min(fault.steps[0] for fault in faults if fault.steps)
    assert {fault.leaf for fault in faults} >= {"observations", "infos.legals"}
    assert begin > 0
    result = vault.salvage(foreign, foreign.parents[1] / "kept.vlt")
    assert result.steps == 2 * begin and result.unknown_steps == 2 * (52 - begin)
    first = vault.open_vault(result.path)[0].transition  # that of row 0
    np.testing.assert_array_equal(first.reward, transitions.reward[0, : len(first.reward)])


def test_codecs_without_a_checksum_are_named(tmp_path):
    path = tmp_path / "s.vlt" / "Good"
    write_stock(path, to_stock(make(rows=1, steps=20)[0]), {"id": "blosc"})
    assert "rewards: blosc compression keeps no checksum of its content." in (
        vault.verify(path).unchecked
    )


def campaign(path, count, seed):
    """Damage a vault in many ways; return how many damages are found, and how many are harmless.

    Checked reads return what was written, or nothing.
    """
    before = damage.content(path)
    transitions = map_tree(np.copy, vault.open_vault(path).transitions())
    outcomes = {"harmless": 0, "found": 0}
    for kind in damage.damages(path, count, seed):
        with suppress(OffmarlError):
            assert_same(vault.open_vault(path, checked=True).transitions(), transitions)
        report = vault.verify(path, deep=True)
        if report.sound:
            assert damage.content(path) == before, kind
        outcomes["harmless" if report.sound else "found"] += 1
    return outcomes


@pytest.mark.parametrize(("codec", "spec"), [("raw", SPEC), ("zstd", typed_spec("test/typed"))])
def test_any_damage(tmp_path, codec, spec):
    path = damage.record(tmp_path / "v.vlt" / "a", codec, spec)
    assert campaign(path, 6, seed=0)["found"]  # the sixth file is the manifest


@pytest.mark.nightly
@pytest.mark.parametrize("state", ["recorded", "compacted"])
def test_any_damage_often(path, state):
    if state == "compacted":
        vault.compact(path)
    outcomes = campaign(path, 125, seed=random.Random(state).randrange(1000))
    assert outcomes["found"] and (outcomes["harmless"] or state == "compacted")


# ------------------------------------------------------------------ documents of arrays


TYPES = [{"dtype": "<i4"}, {"dtype": ">f4"}, {"order": "F"}]
"""As wide as a float32, so that sizes agree."""


@pytest.mark.parametrize("fields", [*TYPES, {"chunks": [2, 4, 4]}, {"fill_value": 1.0}], ids=str)
def test_a_document_of_an_array_that_lies_misleads_nobody(path, fields):
    digest = vault.open_vault(path).digest()
    change(path, "rewards./.zarray", **fields)
    (fault,) = vault.verify(path).faults
    assert "rewards./.zarray: it is not what the vault's schema says" in str(fault)
    assert vault.open_vault(path).digest() == digest  # offmarl reads by the schema
    assert_all_salvaged(path, digest)


@pytest.mark.parametrize("fields", TYPES, ids=str)
def test_arrays_of_other_writers_are_not_mapped_with_another_type(foreign, fields):
    """Without offmarl's keys, the document of the array alone decides its type."""
    values = vault.open_vault(foreign).read(leaves=["rewards"])["rewards"].copy()
    change(foreign, "rewards./.zarray", **fields)
    try:
        data = vault.open_vault(foreign).windows([0, 1], [0, 30], 9, leaves=["rewards"])["rewards"]
    except OffmarlError:
        return
    # TensorStore read it as the document says: other numbers, of the document's type.
    expected = np.stack([values[0, :9], values[1, 30:39]])
    assert data.dtype == np.dtype(fields.get("dtype", "<f4")) or not np.array_equal(data, expected)
