"""What a repair keeps in addition to steps, what it reports as dropped, and killed repairs."""

import json

import numpy as np
import pytest

from offmarl import vault
from offmarl.errors import OffmarlError, VaultFormatError
from offmarl.vault import layout, repairing
from offmarl.vault.compaction import REBUILT
from offmarl.vault.layout import METADATA
from offmarl.vault.store import Store

from . import damage
from .experience import assert_same, make
from .test_integrity import flip, overwrite
from .test_stock import append_with_stock, open_stock

# ------------------------------------------------------------------ runs


def test_a_repair_that_shortens_forgets_which_records_are_there(path):
    """They may be among those that were dropped, and a recording must not skip them."""
    before = vault.open_vault(path).manifest.head
    assert before.runs == {"run 0": 2, "run 1": 2}
    flip(path, "rewards./0.6.0", 3)
    done = vault.repair(path)
    assert done.length == 48
    assert "a recording cannot continue from here" in " ".join(done.dropped)
    head = vault.open_vault(path).manifest.head
    assert (head.runs, head.run) == ({}, None)
    with vault.resume(path) as writer:
        assert writer.chunks("run 1") == 0
        writer.append(*make(steps=4), run="run 1", chunk=0)
    found = vault.open_vault(path)
    assert (found.length, found.manifest.head.runs) == (52, {"run 1": 1})


def test_a_repair_that_keeps_all_steps_keeps_the_runs(path):
    flip(path, layout.PROVENANCE_KEY)
    done = vault.repair(path)
    assert (done.length, done.dropped) == (52, ("the provenance",))
    found = vault.open_vault(path)
    assert found.manifest.head.runs == {"run 0": 2, "run 1": 2}
    assert found.manifest.head.run == "run 1"
    assert found.provenance == {
        "repaired": {"by": f"offmarl {vault_version()}", "dropped": ["the provenance"]}
    }
    with vault.resume(path) as writer:
        assert writer.chunks("run 1") == 2


def vault_version():
    from offmarl import __version__

    return __version__


# ------------------------------------------------------------------ what is dropped


def test_open_episodes_are_counted_where_steps_are_dropped(path):
    table = vault.open_vault(path).episodes
    flip(path, "observations./0.3.0.0", 5)
    done = vault.repair(path)
    running = (table.start < 24) & (table.start + table.length > 24)
    assert f"the ends of {running.sum()} episodes, which are open now" in done.dropped
    assert (vault.open_vault(path).episodes.cause == "open").sum() == running.sum()


def test_lost_final_views_are_counted_and_the_others_numbered_anew(path):
    whole = vault.open_vault(path)
    episodes, finals = whole.episodes, whole.finals
    store = Store.open(path)
    keys = sorted(store.keys(layout.FINALS_PREFIX))
    counts = [len(store.get(key)) for key in keys]
    lost = round(counts[1] / sum(counts) * whole.manifest.head.finals)
    first = int(keys[1].removeprefix(layout.FINALS_PREFIX))
    flip(path, keys[1])
    done = vault.repair(path)
    assert (done.length, done.dropped) == (52, (f"{lost} final views",))
    found = vault.open_vault(path)
    assert found.manifest.head.finals == whole.manifest.head.finals - lost
    kept = 0
    for number, final in enumerate(episodes.final):
        mine = found.episodes.final[number]
        if final < 0 or first <= final < first + lost:
            assert mine == -1
            continue
        kept += 1
        np.testing.assert_array_equal(
            found.final_views(np.array([mine])).state[0], finals.state[final]
        )
    assert kept == found.manifest.head.finals
    assert vault.verify(path, deep=True).sound


@pytest.mark.parametrize("key", [layout.HEAD_KEY, layout.episodes_key(0)])
def test_what_only_the_steps_tell_of_is_said(path, key):
    before = vault.open_vault(path).episodes
    flip(path, key, 1)
    done = vault.repair(path)
    assert done.length == 52
    assert any("known only from their steps" in line for line in done.dropped)
    head_lost = key == layout.HEAD_KEY
    assert any("cannot continue from here" in line for line in done.dropped) == head_lost
    found = vault.open_vault(path)
    np.testing.assert_array_equal(found.episodes.row, before.row)
    assert (found.manifest.head.runs == {}) == head_lost


def test_the_total_return_is_that_of_the_kept_episodes(path):
    whole = vault.open_vault(path).episodes
    flip(path, "rewards./0.3.0", 3)
    vault.repair(path)
    ended = (whole.start + whole.length <= 24) & (whole.cause != "open")
    head = vault.open_vault(path).manifest.head
    assert head.episodes == ended.sum()
    assert head.total_return == pytest.approx(whole.returns[ended].mean(1).sum())


def test_unverified_steps_are_cut_with_the_rest(path):
    append_with_stock(open_stock(path), make(steps=20, seed=9)[0])
    with vault.resume(path):
        pass
    assert vault.open_vault(path).unverified == ((52, 72),)
    with vault.resume(path) as writer:
        writer.append(*make(steps=24, seed=8))
    flip(path, "observations./0.9.0.0", 5)
    assert vault.repair(path).length == 72
    assert vault.open_vault(path).unverified == ((52, 72),)
    flip(path, "observations./0.8.0.0", 5)
    assert vault.repair(path).length == 64
    assert vault.open_vault(path).unverified == ((52, 64),)
    flip(path, "observations./0.6.0.0", 5)
    assert vault.repair(path).length == 48
    assert vault.open_vault(path).unverified == ()


def test_long_tables_are_written_in_blocks(path, monkeypatch):
    before = damage.content(path)
    monkeypatch.setattr(repairing, "_BLOCK_RECORDS", 5)
    flip(path, layout.PROVENANCE_KEY)
    vault.repair(path)
    keys = Store.open(path).keys(layout.EPISODES_PREFIX)
    first = [int(key.removeprefix(layout.EPISODES_PREFIX)) for key in keys]
    assert first == list(range(0, vault.open_vault(path).manifest.head.episodes, 5))
    assert damage.content(path).digest == before.digest


def test_a_dry_run_says_the_same_and_changes_nothing(path):
    flip(path, "observations./0.3.0.0", 5)
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    planned = vault.repair(path, dry_run=True)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before
    assert vault.repair(path) == planned


# ------------------------------------------------------------------ killed rebuildings


def test_a_killed_rebuild_with_a_lost_manifest_loses_no_data(path):
    """Nobody knows then which data files count, so none may be tidied away."""
    before = damage.content(path)
    (path / REBUILT / "d").mkdir(parents=True)
    (path / REBUILT / "d" / "half").write_bytes(b"half")
    (path / "d" / "moved already").write_bytes(b"of the new store")
    (path / "manifest.ocdbt").unlink()
    assert vault.repair(path).length == 52
    assert not (path / REBUILT).exists()
    assert damage.content(path).digest == before.digest


def test_a_killed_rebuild_is_tidied_up(path):
    before = damage.content(path)
    names = {file.name for file in (path / "d").iterdir()}
    (path / REBUILT / "d").mkdir(parents=True)
    (path / "d" / "moved already").write_bytes(b"of the new store")
    with vault.resume(path):
        pass
    assert not (path / REBUILT).exists()
    assert "moved already" not in {file.name for file in (path / "d").iterdir()} <= names
    assert damage.content(path).digest == before.digest


# ------------------------------------------------------------------ documents of arrays


def change_document(path, name, **changes):
    key = f"{name}./.zarray"
    document = json.loads(Store.open(path).get(key)) | changes
    overwrite(path, {key: layout.dump_json(document)})


CHANGES = [
    {"dtype": "<i4"},  # as wide as a float32, so that sizes agree
    {"dtype": ">f4"},
    {"order": "F"},
    {"chunks": [2, 4, 4]},
    {"fill_value": 1.0},
]


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_a_document_of_an_array_that_lies_is_refused(path, change):
    change_document(path, "rewards", **change)
    found = vault.open_vault(path)
    for read in (lambda: found.read(0, 8), lambda: found.windows([0], [0], 5)):
        with pytest.raises(VaultFormatError, match=r"rewards\./\.zarray is not what"):
            read()
    vault.repair(path)
    assert vault.verify(path, deep=True).sound


@pytest.mark.parametrize("change", [{"dtype": "<i4"}, {"dtype": ">f4"}, {"order": "F"}], ids=str)
def test_arrays_of_others_are_not_mapped_as_what_they_are_not(path, change):
    """Without our own keys nothing tells which document is right, but no bits change type."""
    store = Store.open(path)
    for key in store.keys("offmarl/"):
        store._kv.write(key, None).result()
    metadata = json.loads((path / METADATA).read_text())
    (path / METADATA).write_text(json.dumps({**metadata, "offmarl": "no more"}))
    whole = vault.open_vault(path).read(leaves=["rewards"])["rewards"].copy()
    change_document(path, "rewards", **change)
    try:
        read = vault.open_vault(path).windows([0, 1], [0, 30], 9, leaves=["rewards"])["rewards"]
    except OffmarlError:
        return
    # TensorStore read it as the document says: other numbers, of that very type.
    expected = np.stack([whole[0, :9], whole[1, 30:39]])
    assert read.dtype == np.dtype(change.get("dtype", "<f4")) or not np.array_equal(read, expected)


def test_nothing_is_left_to_repair_from(path):
    (path / "manifest.ocdbt").unlink()
    for file in (path / "d").iterdir():
        file.unlink()
    before = sorted(path.rglob("*"))
    with pytest.raises(VaultFormatError, match="nothing is left of"):
        vault.repair(path)
    assert sorted(path.rglob("*")) == before


def test_the_commit_that_most_is_left_of_is_chosen(path):
    """Without the manifest every node may be a root: the last whole one holds the most steps."""
    whole = vault.open_vault(path).transitions()
    (path / "manifest.ocdbt").unlink()
    (path / METADATA).unlink()
    assert vault.repair(path).length == 52
    assert_same(vault.open_vault(path).transitions(), whole)
    assert (path / METADATA).exists()
