from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from offmarl import envs, tracking
from offmarl.errors import NotLearnedError, OptionError, UnknownNameError
from offmarl.networks import PolicyConfig, make_policy
from offmarl.programs.recorder import RECORD, TRAIN, Recorder, Version
from offmarl.programs.tiers import FRACTIONS, Ladder, Tier, best, parse_tiers, rows_of


def test_the_best_is_the_first_of_equals():
    assert best([1.0, 4.0, 4.0, 2.0]) == 1


def test_names_are_read_once_each():
    assert parse_tiers("random, expert,random") == [Tier("random", {}), Tier("expert", {})]


def test_a_tier_that_does_not_exist_is_named_with_the_nearest():
    with pytest.raises(UnknownNameError, match="no tier named 'meduim': did you mean medium"):
        parse_tiers("random,meduim")


def test_a_tier_written_twice_is_one_and_two_of_one_name_are_refused():
    mixed = "mixed=medium:1+expert:1"
    assert parse_tiers(f"{mixed}, {mixed}") == [Tier("mixed", {"medium": 1.0, "expert": 1.0})]
    with pytest.raises(OptionError, match="two tiers have the name 'mixed': give each its own"):
        parse_tiers(f"random,{mixed},mixed=medium:1+expert:2")


@pytest.mark.parametrize("text", ["expert-vs-random", "random-vs-poor-vs-medium-vs-good-vs-expert"])
def test_tiers_of_several_teams_are_played_tiers(text):
    assert parse_tiers(text) == [Tier(text, {})]
    with pytest.raises(UnknownNameError, match="no tier named"):
        parse_tiers(f"{text}-vs-replay")


def test_a_mixture_has_a_name_and_shares():
    assert parse_tiers("mixed=medium:0.5+expert:1.5") == [
        Tier("mixed", {"medium": 0.5, "expert": 1.5})
    ]


@pytest.mark.parametrize(
    "text",
    [
        "expert=medium:1",  # the name of a tier
        "a b=medium:1",
        "mixed=medium",
        "mixed=medium:0+expert:1",
        "mixed=medium:-1+expert:1",
        "mixed=medium:x",
        "mixed=medium:nan+expert:1",
        "mixed=medium:inf+expert:1",
        "mixed=expert:0.5+expert:0.2",
        "mixed=medium:1,mixed=expert:1",
    ],
)
def test_mixtures_that_cannot_be(text):
    with pytest.raises(
        OptionError, match=r"mixed=medium:0\.5\+expert:0\.5|two tiers have the name"
    ):
        parse_tiers(text)


def test_training_data_cannot_be_mixed():
    with pytest.raises(UnknownNameError, match="no tier to mix named 'replay'"):
        parse_tiers("mixed=replay:1+expert:1")


@pytest.mark.parametrize(
    ("text", "needs"),
    [("random", False), ("replay", False), ("a=random:1", False), ("medium-replay", True)]
    + [(tier, True) for tier in (*FRACTIONS, "expert", "a=random:1+good:1")],
)
def test_tiers_that_need_a_policy_that_learned(text, needs):
    (tier,) = parse_tiers(text)
    assert tier.needs_ladder == needs


def test_environments_are_divided_by_shares():
    assert rows_of({"a": 1, "b": 1, "c": 1}, 8) == {"a": 3, "b": 2, "c": 3}
    assert rows_of({"a": 0.5, "b": 0.25, "c": 0.25}, 8) == {"a": 4, "b": 2, "c": 2}
    with pytest.raises(OptionError, match=r"b has a share of 0\.01 in 1\.01, which is less"):
        rows_of({"a": 1, "b": 0.01}, 8)


# ---------------------------------------------------------------------------------- the ladder


class Numbered(Recorder):
    """A recorder whose policies are the numbers of their versions; ``source`` has the returns."""

    def returns_again(self, policy, params, key):
        return np.asarray(self.source[params])

    def load(self, version):
        return version.iteration


def make_recorder(returns, seed=0):
    return Numbered(
        origin=SimpleNamespace(name="learner"),
        args=SimpleNamespace(num_envs=10, side=None, out=Path("vaults"), env="probe/observation"),
        env=SimpleNamespace(spec=envs.make("probe/observation").spec),
        program=SimpleNamespace(num_steps=10),
        policy=make_policy(PolicyConfig("random"), envs.make("probe/observation").spec),
        directory="runs/r",
        seed=seed,
        source=returns,
    )


def chosen(tier, returns, random, expert):
    """Return the version of a tier; on fresh seeds, only the best has another return."""
    again = {number: [value] * 2 for number, value in enumerate(returns)}
    again |= {(): [random] * 2, best(returns): [expert] * 2}
    versions = [Version(number, [value] * 2) for number, value in enumerate(returns)]
    return Ladder(make_recorder(again), versions).version(tier).iteration


RETURNS = [1.0, 2.9, 3.1, 2.0, 5.2, 7.7, 9.6, 9.0]


@pytest.mark.parametrize(("tier", "index"), [("poor", 1), ("medium", 4), ("good", 5)])
def test_a_tier_is_the_first_checkpoint_so_far_on_the_way(tier, index):
    """From random 0.5 to expert 9.5 the thresholds are 2.75, 5 and 7.25."""
    assert chosen(tier, RETURNS, 0.5, 9.5) == index


def test_the_thresholds_themselves_count():
    assert chosen("medium", [1.0, 2.0, 3.0], 0.0, 4.0) == 1


def test_returns_may_be_negative():
    assert chosen("medium", [-22.0, -12.0, -11.0, -1.3], -22.0, -1.2) == 2


def test_where_none_reaches_the_best_stands_in():
    assert chosen("good", [1.0, 3.0, 2.0], 0.0, 40.0) == 1


def test_tiers_that_one_version_plays_are_warned_of(monkeypatch):
    said = []
    monkeypatch.setattr(tracking, "notice", said.append)
    versions = [Version(i, [float(x)] * 2) for i, x in enumerate([0, 4, 10])]
    returns = {(): [0.0, 0.0], 1: [4.0, 4.0], 2: [10.0, 10.0]}
    ladder = Ladder(make_recorder(returns), versions)
    ladder.warn(["poor", "medium", "expert"])
    assert len(said) == 1 and "one version of the policy plays medium and expert" in said[0]
    ladder.warn(["poor", "expert"])
    assert len(said) == 1


def test_a_tier_is_described_by_its_evaluation_on_fresh_seeds():
    """The first evaluation of version 2 was lucky; on fresh seeds version 3 is first half-way."""
    versions = [Version(i, [float(x)] * 2) for i, x in enumerate([0, 2, 6, 6, 10])]
    returns = {(): [0.0, 0.0, 0.0], 2: [3.0, 4.0, 5.0], 3: [5.0, 6.0, 7.0], 4: [9.0, 9.0, 9.0]}
    ladder = Ladder(make_recorder(returns), versions)
    assert ladder.version("medium").iteration == 3
    assert ladder.version("expert").iteration == 4
    _, params, about = ladder.player("medium")
    assert (params, about["return"], about["evaluation_episodes"]) == (3, 6.0, 3)
    half = 4.302652729911275 / np.sqrt(3)  # the t quantile at 2 degrees of freedom
    np.testing.assert_allclose(about["return_interval"], [6 - half, 6 + half])


def test_an_expert_that_is_not_above_random_is_refused_with_its_curve():
    versions = [Version(i, [float(x)] * 2) for i, x in enumerate([0, 1, 2])]
    run = make_recorder({(): [0.5, 1.5, 1.0], 2: [1.0, 2.0, 1.5]})
    with pytest.raises(NotLearnedError) as refused:
        Ladder(run, versions).check()
    message = str(refused.value)
    assert "learner with seed 0 did not learn probe/observation" in message
    assert "--total-steps" in message and "record --from-run runs/r --tiers random" in message
    curve = message.split("\n\n")[1].splitlines()
    assert curve[0].lstrip().startswith("2.000 |") and curve[0].endswith("*")
    assert curve[-1].split() == ["0", "200"]
    Ladder(make_recorder({(): [0.5, 1.5, 1.0], 2: [8.0, 9.0, 8.5]}), versions).check()


def test_neighbouring_seeds_and_purposes_share_no_keys():
    keys = [
        make_recorder({}, seed).key(purpose, *parts)
        for seed in range(4)
        for purpose in (TRAIN, RECORD)
        for parts in [(), (0,), (1,), (2,)]
    ]
    found = {tuple(jax.random.key_data(key).tolist()) for key in keys}
    assert len(found) == len(keys)
