"""Policies of a team: an id for each agent, and older vaults with one id."""

import json

import numpy as np
import pytest

from offmarl import vault
from offmarl.errors import InvalidValueError, ShapeError
from offmarl.vault import layout
from offmarl.vault.layout import METADATA
from offmarl.vault.store import Store

from .experience import SPEC, assert_same, concatenate, make, steps, unpack_version_2
from .test_stock import append_with_stock, assert_stock_reads_and_samples, open_stock, to_stock

OLD_DIGEST = "bbf5cd969d2e9abbf0e04ba0a995c6ddf1426ea0d58274e5899daa0b03b02f45"


@pytest.fixture
def old(tmp_path):
    return unpack_version_2(tmp_path)


def mixed(transition, agent=1, start=4):
    """Give one agent other policies, from a step on."""
    ids = transition.policy_id.copy()
    ids[:, start:, agent] += 1
    return transition._replace(policy_id=ids)


def test_new_vaults_have_an_id_for_each_agent(tmp_path):
    path = tmp_path / "a.vlt" / "a"
    with vault.create(path, SPEC, rows=2, chunk_steps=16) as writer:
        writer.append(mixed(make(steps=20)[0]), make(steps=20)[1])
    found = vault.open_vault(path)
    assert found.leaves[layout.POLICY_IDS].shape == (2,)
    assert_same(found[:], mixed(make(steps=20)[0]))
    assert vault.verify(path, deep=True).sound
    assert Store.open(path).get_json(layout.SCHEMA_KEY)["version"] == 3
    assert_stock_reads_and_samples(path, mixed(make(steps=20)[0]))


def test_one_id_stands_for_all_agents(tmp_path):
    transition, finals = make()
    with vault.create(tmp_path / "a.vlt", SPEC, rows=2) as writer:
        writer.append(transition._replace(policy_id=transition.policy_id[..., 0]), finals)
    assert_same(vault.open_vault(tmp_path / "a.vlt")[:], transition)


def test_an_old_vault_reads_as_a_new_one(old, tmp_path):
    found, (transition, finals) = vault.open_vault(old), make(steps=20)
    assert found.leaves[layout.POLICY_IDS].shape == ()
    assert found.read(leaves=[layout.POLICY_IDS])[layout.POLICY_IDS].shape == (2, 20)
    assert_same(found[:], transition)
    windows = found.window_transitions(np.array([1, 0]), np.array([3, 9]), 4)
    np.testing.assert_array_equal(windows.policy_id[0], transition.policy_id[1, 3:7])
    assert found.digest() == OLD_DIGEST
    assert vault.verify(old, deep=True).sound
    with vault.create(tmp_path / "new.vlt", SPEC, rows=2) as writer:
        writer.append(transition, finals)
    assert vault.open_vault(tmp_path / "new.vlt").digest() == OLD_DIGEST


def test_appending_to_an_old_vault_keeps_its_form(old, tmp_path):
    parts = [make(steps=20), make(steps=30, seed=1)]
    with vault.resume(old) as writer:
        assert writer.chunks("me") == 1
        writer.append(*parts[0], run="me", chunk=0)  # is there
        with pytest.raises(ShapeError, match="keeps one for all of them: record to another"):
            writer.append(mixed(parts[1][0]), parts[1][1], run="me")
        nonsense = parts[1][0]._replace(policy_id=parts[1][0].policy_id - 3)
        with pytest.raises(InvalidValueError, match="the policy id in row 0, step 2"):
            writer.append(nonsense, parts[1][1], run="me")
        writer.append(*parts[1], run="me", chunk=1)
    store = Store.open(old)
    assert store.get_json(layout.SCHEMA_KEY)["version"] == 2
    assert json.loads((old / METADATA).read_text())["offmarl"]["version"] == 2
    assert vault.verify(old, deep=True).sound
    whole = concatenate([part[0] for part in parts])
    found = vault.open_vault(old, checked=True)
    assert_same(found[:], whole)
    with vault.create(tmp_path / "new.vlt", SPEC, rows=2) as writer:
        for part in parts:
            writer.append(*part, run="me")
    assert vault.open_vault(tmp_path / "new.vlt").digest() == found.digest()

    old_form = whole._replace(policy_id=whole.policy_id[..., 0])
    assert_stock_reads_and_samples(old, old_form)
    append_with_stock(
        open_stock(old), make(steps=8)[0]._replace(policy_id=np.zeros((2, 8), np.int32))
    )
    with vault.resume(old) as writer:
        assert writer.length == 58
    assert (vault.open_vault(old)[50:].policy_id == -1).all()


@pytest.mark.parametrize("change", ["compact", "repair", "recode", "numpy"])
def test_an_old_vault_goes_through_everything(old, tmp_path, change):
    if change == "compact":
        vault.compact(old)
        assert vault.open_vault(old).leaves[layout.POLICY_IDS].shape == ()
        made = vault.open_vault(old)
    elif change == "repair":
        Store.open(old).commit({layout.RUNNING_KEY: b"nonsense"}, fence={}).result()
        vault.repair(old)
        made = vault.open_vault(old)
        assert made.leaves[layout.POLICY_IDS].shape == ()
    elif change == "recode":
        made = vault.recode(old, tmp_path / "new.vlt", codec="zstd")
        assert made.leaves[layout.POLICY_IDS].shape == (2,)
    else:
        file = vault.export_dataset(vault.open_vault(old), tmp_path / "a.npz", "numpy")
        made = vault.import_dataset(file, tmp_path / "new.vlt", "numpy")
    assert (made.digest() == OLD_DIGEST) is (change != "numpy")  # of several that run on, one can
    assert vault.verify(made.path, deep=True).sound


def test_old_and_new_are_joined(old, tmp_path):
    with vault.create(tmp_path / "new.vlt", SPEC, rows=2) as writer:
        writer.append(mixed(make(steps=30, seed=1)[0]), make(steps=30, seed=1)[1])
    made = vault.cat([old, tmp_path / "new.vlt"], tmp_path / "both.vlt")
    old_ids = make(steps=20)[0].policy_id.reshape(40, 2)
    new_ids = mixed(make(steps=30, seed=1)[0]).policy_id.reshape(60, 2)
    np.testing.assert_array_equal(made[:].policy_id[0], np.concatenate([old_ids, new_ids + 3]))
    first = vault.filter(made, "policy >= 3", tmp_path / "later.vlt")
    np.testing.assert_array_equal(first[:].policy_id[0], new_ids)


def test_the_digest_tells_mixed_teams_apart(tmp_path):
    def digest(name, transition, block):
        path = tmp_path / name
        with vault.create(path, SPEC, rows=2, chunk_steps=block) as writer:
            for start in range(0, 20, block):
                writer.append(steps(transition, start, start + block), run="r")
        return vault.open_vault(path).digest()

    transition, _ = make(steps=20)
    found = [
        digest("a.vlt", transition, 20),
        digest("b.vlt", mixed(transition), 20),
        digest("c.vlt", mixed(transition, start=5), 20),
        digest("d.vlt", mixed(transition, agent=0), 20),
    ]
    assert len(set(found)) == 4
    assert digest("e.vlt", mixed(transition), 4) == found[1]


def test_duplicates_are_found_whoever_took_the_actions(tmp_path):
    transition, finals = make(rows=1, steps=20, end_every=2.0)
    with vault.create(tmp_path / "a.vlt", SPEC, rows=1) as writer:
        writer.append(transition, finals)
        writer.append(mixed(transition, start=0), finals, run="again")
    made = vault.dedup(tmp_path / "a.vlt", tmp_path / "b.vlt")
    ended = int(transition.last.sum())
    assert len(made.episodes.row) == ended + (not transition.last[0, -1])


def og_marl_returns(experience):
    """OG-MARL's return analysis: one agent of every leaf, and sums up to the terminals."""
    import jax

    one = jax.tree.map(lambda leaf: leaf[0, :, 0, ...], experience)
    terminals = np.asarray(experience["terminals"])[0].all(-1)
    ends = np.flatnonzero(terminals)
    rewards = np.asarray(one["rewards"], np.float64)
    return [part.sum() for part in np.split(rewards, ends + 1)[:-1]]


def test_the_return_analysis_of_og_marl_takes_our_vaults(tmp_path, old):
    path = tmp_path / "a.vlt" / "a"
    transition, finals = make(steps=50)
    transition = transition._replace(
        terminated=transition.terminated | transition.truncated,
        truncated=np.zeros_like(transition.truncated),
    )
    with vault.create(path, SPEC, rows=2) as writer:
        writer.append(transition, finals)
    episodes = vault.open_vault(path).episodes
    mine = (episodes.row == 0) & episodes.complete
    returns = og_marl_returns(open_stock(path).read().experience)
    np.testing.assert_allclose(returns, episodes.returns[mine, 0], rtol=1e-6)
    with pytest.raises(IndexError):  # what this is about
        og_marl_returns(open_stock(old).read().experience)


def test_stock_appends_to_the_new_form(tmp_path):
    path = tmp_path / "a.vlt" / "a"
    ours, theirs = make(steps=20), make(steps=8, seed=1)
    with vault.create(path, SPEC, rows=2, chunk_steps=16) as writer:
        writer.append(*ours)
    append_with_stock(open_stock(path), theirs[0])
    assert to_stock(theirs[0])["infos"]["policy_ids"].shape == (2, 8, 2)
    np.testing.assert_array_equal(vault.open_vault(path)[20:].policy_id, theirs[0].policy_id)
