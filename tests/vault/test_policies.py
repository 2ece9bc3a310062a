"""Policies of a team: an id for each agent."""

import numpy as np
import pytest

from offmarl import vault
from offmarl.vault.format import layout
from offmarl.vault.storage.store import Store

from .experience import SPEC, assert_same, make, steps, written
from .test_stock import open_stock

DIGEST = "c9e57bf6ecea30134205bba573a8a5f2d10e8d520f583cf15ef7314622241fa0"
"""Of ``make(steps=20)``, as every version of the format has it."""


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


def test_the_digest_of_a_content_stays(tmp_path):
    written(tmp_path / "a.vlt", make(steps=20))
    assert vault.open_vault(tmp_path / "a.vlt").digest() == DIGEST


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


def test_the_return_analysis_of_og_marl_takes_our_vaults(tmp_path):
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


@pytest.mark.parametrize("wrong", [{"first": "a"}, {"num_policies": None}, {"digest": 1}])
def test_an_origin_that_is_none_is_not_believed(tmp_path, wrong):
    origin = {"digest": "x", "vault": "v", "program": None, "tier": "t", "seed": None}
    origin |= {"first": 0, "num_policies": 1, "unknown": False}
    found = []
    for name, told in (("a", {}), ("b", {"origins": [origin | wrong]})):
        written(tmp_path / f"{name}.vlt", make(steps=20), provenance=told)
        found.append(vault.cat([tmp_path / f"{name}.vlt"], tmp_path / f"{name}{name}.vlt"))
    assert found[0].digest() == found[1].digest()
