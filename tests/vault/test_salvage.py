"""Salvaging the intact episodes of a damaged vault."""

from contextlib import suppress
from shutil import copytree

import numpy as np
import pytest

from offmarl import vault
from offmarl.errors import OffmarlError, VaultError, VaultExistsError, VaultFormatError
from offmarl.vault.format import layout
from offmarl.vault.storage.store import store_of

from . import damage
from .damage import flip
from .experience import SPEC, make, written
from .test_integrity import place_of, recorded

__all__ = ["recorded"]  # a fixture


def check(done: vault.Salvage, first: vault.Dataset) -> None:
    """Check that the salvaged episodes have the original's order, and all others are reported."""
    data, table = vault.open_vault(done.path), first.episodes
    assert vault.verify(done.path, deep=True).sound
    lost = {(row, start) for row, start, _ in done.lost}
    episodes = iter(
        first.episode(number)
        for number, place in enumerate(zip(table.row, table.start, strict=True))
        if place not in lost
    )
    for number, episode in enumerate(data):
        # Of episodes whose table is gone too nothing is known: the original has them in between.
        original = next(x for x in episodes if done.unknown_steps == 0 or same(episode, x))
        assert same(episode, original)
        if original.final and data.episodes.cause[number] != "cut":
            np.testing.assert_array_equal(episode.final.observation, original.final.observation)
    assert done.episodes == len(data.episodes.row)
    assert data.num_steps == done.steps
    assert done.steps + sum(n for *_, n in done.lost) + done.unknown_steps == first.num_steps


def same(a, b) -> bool:
    views = [(a.transition.view.observation, b.transition.view.observation)]
    fields = [*views, (a.transition.reward, b.transition.reward)]
    return all(np.array_equal(x, y) for x, y in fields)


def test_damage_at_the_beginning_and_in_the_middle(path, tmp_path):
    original = vault.open_vault(copytree(path, tmp_path / "kept.vlt" / "a"))
    table = original.episodes
    ends = table.start + table.length
    hit = (table.start < 8) | ((table.start < 48) & (ends > 40))
    flip(path, "rewards./0.0.0", 20)
    flip(path, "observations./0.5.0.0", 20)
    done = vault.salvage(path, tmp_path / "out.vlt")
    expected = zip(table.row[hit], table.start[hit], table.length[hit], strict=True)
    assert list(done.lost) == list(expected)
    assert done.unknown_steps == 0
    check(done, original)
    lineage = vault.open_vault(done.path).provenance["lineage"]
    assert lineage["operation"] == "salvage"
    assert lineage["arguments"]["lost"] == [list(episode) for episode in done.lost]
    assert not vault.verify(path, deep=True).sound  # and left as it was


def test_rows_on_both_sides_of_a_damaged_one(tmp_path):
    transition, finals = make(rows=3, steps=40)
    path = tmp_path / "v.vlt" / "a"
    written(path, (transition, finals), chunk_steps=2048)
    original = vault.open_vault(copytree(path, tmp_path / "kept.vlt" / "a"))
    store_of(path)._kv.write("rewards./1.0.0", None).result()
    done = vault.salvage(path, tmp_path / "out.vlt")
    assert {row for row, *_ in done.lost} == {1}
    assert done.steps == 80
    check(done, original)


def test_a_lost_data_file_takes_tables_and_views_with_it(path, tmp_path):
    original = vault.open_vault(copytree(path, tmp_path / "kept.vlt" / "a"))
    file, _ = place_of(path, "observations./0.1.0.0")
    file.unlink()
    done = vault.salvage(path, tmp_path / "out.vlt")
    assert done.steps
    check(done, original)


def test_a_damaged_block_of_final_views(path, tmp_path):
    original = vault.open_vault(copytree(path, tmp_path / "kept.vlt" / "a"))
    flip(path, layout.finals_key(0), 3)
    done = vault.salvage(path, tmp_path / "out.vlt")
    check(done, original)
    flip(path, layout.RUNNING_KEY, 3)  # the unfinished episodes are unknown, too
    assert vault.salvage(path, tmp_path / "less.vlt").unknown_steps > 0
    first = original.episodes.final[np.argsort(original.episodes.final)]
    assert 0 < len(done.lost) < len(first)


def test_nothing_wrong_and_nothing_left(path, tmp_path):
    done = vault.salvage(path, tmp_path / "whole.vlt")
    assert (done.faults, done.lost, done.unknown_steps) == ((), (), 0)
    check(done, vault.open_vault(path))
    with pytest.raises(VaultExistsError):
        vault.salvage(path, tmp_path / "whole.vlt")
    for chunk in range(7):
        flip(path, f"observations./0.{chunk}.0.0", 20)
    with pytest.raises(VaultError, match=r"no steps of .* are left"):
        vault.salvage(path, tmp_path / "none.vlt")
    assert not (tmp_path / "none.vlt").exists()


def test_where_nothing_tells_of_episodes(path, tmp_path):
    flip(path, layout.HEAD_KEY, 3)
    with pytest.raises(VaultFormatError, match=r"head is wrong.* copy the vault again"):
        vault.salvage(path, tmp_path / "out.vlt")


@pytest.mark.parametrize("count", [12, pytest.param(100, marks=pytest.mark.nightly)])
def test_any_damage(path, tmp_path, count):
    original = vault.open_vault(copytree(path, tmp_path / "kept.vlt" / "a"))
    salvaged = 0
    for number, _ in enumerate(damage.damages(path, count, seed=7)):
        out = tmp_path / f"{number}.vlt"
        with suppress(OffmarlError):  # where what a vault says of itself is damaged
            check(vault.salvage(path, out), original)
            salvaged += 1
    assert salvaged > count / 3


def test_policies_that_changed_are_told_apart(tmp_path):
    """The ids of the salvaged episodes are known although others cannot be read."""
    path = tmp_path / "a.vlt"
    with vault.create(path, SPEC, rows=2, chunk_steps=16) as writer:
        for policy in range(4):
            steps, finals = make(steps=16, seed=policy, end_every=3.0)
            ids = np.full_like(steps.policy_id, 3 - policy)
            writer.append(steps._replace(policy_id=ids), finals)
    before = vault.open_vault(path)
    flip(path / "main", "infos.policy_ids./0.0.0", 3)  # the highest
    done = vault.salvage(path, tmp_path / "out.vlt")
    dataset = vault.open_vault(done.path)
    place = list(zip(before.episodes.row, before.episodes.start, strict=True))
    lost = [place.index((row, start)) for row, start, _ in done.lost]
    policy_ids = np.delete(before.episodes.policy_id, lost)
    np.testing.assert_array_equal(dataset.episodes.policy_id, policy_ids)
