"""Policies of a team: an id for each agent."""

import numpy as np
import pytest

from offmarl import vault
from offmarl.cli import data, output
from offmarl.errors import ExpressionError, OptionError, VaultError
from offmarl.vault.format import layout
from offmarl.vault.storage.store import store_of
from offmarl.vault.transform import lineage

from .experience import SPEC, assert_same, make, steps, written


def mixed(transition, agent=1, start=4):
    """Give one agent other policies from a step on."""
    ids = transition.policy_id.copy()
    ids[:, start:, agent] += 1
    return transition._replace(policy_id=ids)


def test_new_vaults_have_an_id_for_each_agent(tmp_path):
    path = tmp_path / "a.vlt" / "a"
    dataset = written(path, (mixed(make(steps=20)[0]), make(steps=20)[1]), chunk_steps=16)
    assert dataset.leaves[layout.POLICY_IDS].shape == (2,)
    assert_same(dataset[:], mixed(make(steps=20)[0]))
    assert vault.verify(path, deep=True).sound
    assert store_of(path).get_json(layout.SCHEMA_KEY)["version"] == 5


def test_the_digest_tells_mixed_teams_apart(tmp_path):
    def digest(name, transition, block):
        path = tmp_path / name
        with vault.create(path, SPEC, rows=2, chunk_steps=block) as writer:
            for start in range(0, 20, block):
                writer.append(steps(transition, start, start + block), run="r")
        return vault.open_vault(path).digest()

    transition, _ = make(steps=20)
    digests = [
        digest("a.vlt", transition, 20),
        digest("b.vlt", mixed(transition), 20),
        digest("c.vlt", mixed(transition, start=5), 20),
        digest("d.vlt", mixed(transition, agent=0), 20),
    ]
    assert len(set(digests)) == 4
    assert digest("e.vlt", mixed(transition), 4) == digests[1]


def test_duplicates_are_found_whoever_took_the_actions(tmp_path):
    transition, finals = make(rows=1, steps=20, end_every=2.0)
    with vault.create(tmp_path / "a.vlt", SPEC, rows=1) as writer:
        writer.append(transition, finals)
        writer.append(mixed(transition, start=0), finals, run="again")
    dataset = vault.dedup(tmp_path / "a.vlt", tmp_path / "b.vlt")
    episodes = int(transition.last.sum())
    assert len(dataset.episodes.row) == episodes + (not transition.last[0, -1])


def pairs(path):
    """Write 40 episodes of two steps, in which each pair of 5 policies plays at least once."""
    transition, _ = make(steps=40)
    last = np.arange(40) % 2 == 1
    ends = np.broadcast_to(last[:, None], transition.terminated.shape)
    episode = np.arange(40) // 2 + np.array([0, 20])[:, None]
    ids = np.stack([episode % 5, 5 + episode // 5 % 5], -1).astype(np.int32)
    names = {"policies": [{"policy_id": policy, "name": f"run@{policy}"} for policy in range(10)]}
    with vault.create(path, SPEC, rows=2, provenance=names) as writer:
        transition = transition._replace(policy_id=ids, last=ends[..., 0])
        writer.append(transition._replace(terminated=ends, truncated=np.zeros_like(ends)))
    return vault.open_vault(path)


def test_the_policy_of_each_agent_is_a_column(tmp_path):
    dataset = pairs(tmp_path / "a.vlt")
    ids = dataset.episodes.policy_ids
    assert len(ids) == 40 and len(np.unique(ids, axis=0)) == 25
    assert dataset.policy_ids == tuple(range(10))
    for by in ("episodes", "steps"):
        text = "policy_agent_1 == 7 and policy_agent_0 in ('run@1', 'run@2') and policy != 2"
        subset = vault.filter(dataset.path, text, tmp_path / f"{by}.vlt", by=by)
        expected = ids[(ids[:, 1] == 7) & (ids[:, 0] == 1)]
        np.testing.assert_array_equal(subset.episodes.policy_ids, expected)
    with pytest.raises(ExpressionError, match=r"policy_cats of its .* policy_agent_1"):
        vault.filter(dataset.path, "policy_cats == 1", tmp_path / "none.vlt")
    with pytest.raises(ExpressionError, match=r"has policy_agent_1 from 5 to 9 \(run@5, .*run@9\)"):
        vault.filter(dataset.path, "policy_agent_1 == 'other'", tmp_path / "none.vlt")
    shares = dataset.step_probabilities(1, weights="policy_agent_1").drawn
    np.testing.assert_allclose(shares, ids[:, 1].repeat(2) / ids[:, 1].repeat(2).sum(), rtol=1e-6)


def test_partners_are_held_out(tmp_path):
    dataset = pairs(tmp_path / "a.vlt")
    views = dataset.split(fractions=(0.6, 0.4), by="policy_agent_1")
    parts = vault.split(dataset.path, tmp_path / "b.vlt", fractions=(0.6, 0.4), by="policy_agent_1")
    partners = {name: {*part.episodes.policy_ids[:, 1].tolist()} for name, part in parts.items()}
    assert {name: len(ids) for name, ids in partners.items()} == {"train": 3, "validation": 2}
    assert not partners["train"] & partners["validation"]
    for name, view in views.items():
        np.testing.assert_array_equal(view.episodes.policy_ids, parts[name].episodes.policy_ids)
    with pytest.raises(OptionError, match="'policy_cats' has no policies: give one of policy, po"):
        dataset.split(by="policy_cats")
    with pytest.raises(OptionError, match=r"has 5 policies, to be split 0.99 : 0.01"):
        dataset.split(validation=0.01, by="policy")


def test_show_has_the_returns_of_those_that_played_together(tmp_path, capsys):
    transition, finals = make(steps=40)
    names = {"policies": [{"policy_id": 2, "name": "[red]two"}, {"policy_id": "x"}, 3]}
    dataset = written(tmp_path / "a.vlt", (mixed(transition, start=20), finals), provenance=names)
    episodes, result = dataset.episodes, data.show(str(tmp_path / "a.vlt"))
    together = np.unique(episodes.policy_ids[episodes.scored], axis=0)
    assert len(together) > 1
    for pairing, policies in zip(result.data["pairings"], together, strict=True):
        of = episodes.scored & (episodes.policy_ids == policies).all(1)
        assert pairing["policies"] == policies.tolist() and pairing["episodes"] == of.sum()
        np.testing.assert_allclose(
            pairing["return"], episodes.team_returns[of, 0].mean(), rtol=1e-6
        )
    output.show(result, as_json=False)
    assert "policies that played together" in (text := capsys.readouterr().out)
    assert "1 + [red]two" in text
    names = {"policies": [{"policy_id": policy, "name": f"run@{policy}"} for policy in range(9)]}
    written(tmp_path / "c.vlt", (mixed(transition, start=20), finals), provenance=names)
    output.show(data.show(str(tmp_path / "c.vlt")), as_json=False)
    assert "policies of run that played together" in (text := capsys.readouterr().out)
    assert "@1 + @2" in text and "run@1" not in text
    written(tmp_path / "b.vlt", make(steps=20))
    assert data.show(str(tmp_path / "b.vlt")).data["pairings"] == []


def test_more_ids_than_a_vault_can_hold():
    origins = [lineage.Origin(x, f"{x}.vlt", None, "t", None, 0, 2**31 - 1, False) for x in "ab"]
    with pytest.raises(VaultError, match=r"the policies of a\.vlt, b\.vlt have 4,294,967,294 ids"):
        lineage.merge(lineage.Named(origin, []) for origin in origins)
