from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from offmarl import envs
from offmarl.errors import NotLearnedError, OptionError, UnknownNameError
from offmarl.networks import PolicyConfig, make_policy
from offmarl.programs.recording.recorder import RECORD, TRAIN, OnlineRecorder, Version
from offmarl.programs.recording.tiers import PLAYED_TIERS, Ladder, Tier, parse_tiers

MIXED = "mixed=medium:1+expert:1"
ALL = "random-vs-poor-vs-medium-vs-good-vs-expert"


@pytest.mark.parametrize(
    ("text", "tiers"),
    [
        ("random, expert,random", {"random": {}, "expert": {}}),
        (f"{MIXED}, {MIXED}", {"mixed": {"medium": 1.0, "expert": 1.0}}),
        ("expert-vs-random", {"expert-vs-random": {}}),
        (ALL, {ALL: {}}),
    ],
)
def test_each_tier_is_read_once(text, tiers):
    assert parse_tiers(text) == [Tier(*pair) for pair in tiers.items()]


@pytest.mark.parametrize(
    ("text", "error", "message"),
    [
        ("random,meduim", UnknownNameError, "no tier named 'meduim': did you mean medium"),
        (f"{ALL}-vs-replay", UnknownNameError, "no tier named"),
        ("mixed=replay:1+expert:1", UnknownNameError, "no tier to mix named 'replay'"),
        (f"random,{MIXED},mixed=medium:1+expert:2", OptionError, "two tiers have the name 'mixed'"),
    ],
)
def test_tiers_that_cannot_be(text, error, message):
    with pytest.raises(error, match=message):
        parse_tiers(text)


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
    ],
)
def test_mixtures_that_cannot_be(text):
    with pytest.raises(OptionError, match=r"as in mixed=medium:0\.5\+expert:0\.5"):
        parse_tiers(text)


# ---------------------------------------------------------------------------------- the ladder


class Numbered(OnlineRecorder):
    """A recorder whose policies are the numbers of their versions.

    ``source`` has the true mean of each, () for random, and the noise of an episode.
    """

    def returns_again(self, params, key):
        means, noise = self.source
        return np.random.default_rng(key).normal(means[params], noise, 4 * EPISODES)

    def key(self, *parts):
        return (self.seed, *parts)

    def load(self, version):
        return version.iteration

    def uniform(self):
        return ()


EPISODES = 64


def make_recorder(source=None, seed=0, env="probe/observation"):
    env = envs.make(env)
    return Numbered(
        origin=SimpleNamespace(name="learner"),
        args=SimpleNamespace(num_envs=10, side=None, out=Path("vaults"), env=env.spec.name),
        env=env,
        program=SimpleNamespace(num_steps=10),
        policy=make_policy(PolicyConfig("random"), env.spec),
        directory="runs/r",
        seed=seed,
        source=source,
    )


def make_ladder(returns, random=0.0, noise=0.0, seed=0, trained=None, env="probe/observation"):
    """A ladder of versions with true mean returns, evaluated in training with the same noise."""
    run = make_recorder((dict(enumerate(returns)) | {(): random}, noise), seed, env)
    rng = np.random.default_rng(seed)
    means = trained or [rng.normal(mean, noise / EPISODES**0.5) for mean in returns]
    return Ladder(run, [Version(number, (mean,)) for number, mean in enumerate(means)])


RETURNS = [0.5, 2.9, 3.1, 2.0, 5.2, 7.7, 9.6, 9.0]


@pytest.mark.parametrize(
    ("tier", "version"), [("poor", 2), ("medium", 4), ("good", 5), ("expert", 6)]
)
def test_a_tier_is_the_version_nearest_to_its_part_of_the_way(tier, version):
    ladder = make_ladder([*RETURNS[:2], 2.7, *RETURNS[3:]], random=0.4)
    ladder.check(tier)
    assert ladder.version(tier).iteration == version


@pytest.mark.parametrize("medium", [-11.0, -14.0, -9.0])
def test_returns_may_be_negative(medium):
    ladder = make_ladder([-22.0, medium, -1.0], random=-22.0)
    ladder.check("medium")
    assert ladder.version("medium").iteration == 1


@pytest.mark.parametrize("medium", [0.3, 0.8, 0.997])
def test_a_medium_version_has_bounds_on_both_sides(medium):
    ladder = make_ladder([0.0, medium, medium, 1.0])
    ladder.check("expert")
    with pytest.raises(NotLearnedError, match=r"no medium of .* none of its 4 .* 0\.3750 to 0\.6"):
        ladder.check("medium")


def test_a_lucky_evaluation_in_training_chooses_no_tier():
    trained = [0.0, 0.5, 0.6, 1.2, 1.0, 0.2]
    ladder = make_ladder([0.0, 0.1, 0.5, 0.4, 1.0, 0.0], trained=trained)
    assert ladder.version("expert").iteration == 4
    assert ladder.version("medium").iteration == 2


def test_an_untrained_policy_may_be_the_best():
    ladder = make_ladder([1.0, 0.5, 0.1], random=0.0)
    ladder.check("medium")
    assert [ladder.version(tier).iteration for tier in ("expert", "medium")] == [0, 1]


def test_tiers_that_are_alike_are_refused():
    """The intervals of 256 episodes end 0.18 away from the mean."""
    means = [0.0, 0.25, 0.5, 0.75, 1.0]
    ladder = make_ladder(means, noise=1.5, seed=1, trained=means)
    ladder.check("expert")
    with pytest.raises(NotLearnedError, match="on fresh seeds, where the intervals must not over"):
        ladder.check("good")
    sharp = make_ladder(means, noise=0.3)
    for tier in PLAYED_TIERS:
        sharp.check(tier)


TRUTH = [*np.linspace(0, 1, 14), 0.9, 1.0, 0.7, 0.85, 0.95, 0.6]


@pytest.mark.parametrize(("noise", "least"), [(0.3, 198), (1.0, 170), (2.0, 5)])
def test_tiers_of_noisy_evaluations_have_the_order_of_their_names(noise, least):
    """Their returns are not those by which they were chosen: these are biased upwards."""
    errors, accepted = {"medium": [], "expert": []}, 0
    for seed in range(200):
        ladder = make_ladder(TRUTH, noise=noise, seed=seed)
        for tier, deviations in errors.items():
            reported = ladder.player(tier)[1]["return"]
            deviations.append(reported - TRUTH[ladder.version(tier).iteration])
        try:
            ladder.check("medium")
        except NotLearnedError:
            continue
        accepted += 1
        medium, expert = (TRUTH[ladder.version(tier).iteration] for tier in errors)
        assert 0.0 < medium < expert
    assert accepted >= least
    for deviations in errors.values():
        assert abs(np.mean(deviations)) < 3 * noise / (4 * EPISODES * len(deviations)) ** 0.5


def test_a_tier_is_described_by_its_evaluation_on_fresh_seeds():
    ladder = make_ladder([0.0, 6.0, 12.0], noise=1.0)
    params, about = ladder.player("medium")
    assert (params, about["policy_id"], about["evaluation_episodes"]) == (1, 1, 256)
    low, high = about["return_interval"]
    assert low < about["return"] < high < low + 0.5
    assert about["return"] != ladder._trial(ladder.version("medium"))


@pytest.mark.parametrize(("expert", "said"), [(0.53, "only 6.0% of the way"), (0.6, "")])
def test_an_expert_far_below_the_best_known_return_is_named_so(notices, expert, said):
    ladder = make_ladder([0.5, expert], random=0.5)
    ladder.check("expert")
    assert said in "".join(notices) and len(notices) == bool(said)
    share = ladder.player("expert")[1]["share_of_best_known"]
    assert share == pytest.approx((expert - 0.5) / 0.5)
    assert "share_of_best_known" not in ladder.player("random")[1]


def test_an_expert_that_is_not_above_random_is_refused_with_its_curve():
    ladder = make_ladder([0.0, 1.0, 2.0], random=2.0)
    with pytest.raises(NotLearnedError) as refused:
        ladder.check("expert")
    message = str(refused.value)
    assert "learner with seed 0 did not learn probe/observation" in message
    assert "--total-steps" in message and "record --from-run runs/r --tiers TIERS" in message
    assert "\n\nReturns in order: ▁▅█ (0 to 2)\n\n" in message
    with pytest.raises(NotLearnedError, match="did not learn probe/observation"):
        ladder.check("poor")
    ladder.check("random")


def test_a_team_that_did_not_learn_is_named():
    run = make_recorder(({0: 1.0, 1: 1.0, (): 1.0}, 0.0), env="classic/rps")
    for team in run.by_team():
        with pytest.raises(NotLearnedError, match=f"rps as {team.team.name}: "):
            Ladder(team, [Version(0, (1.0,)), Version(1, (1.0,))]).check("expert")


def test_neighbouring_seeds_and_purposes_share_no_keys():
    keys = [
        OnlineRecorder.key(make_recorder(seed=seed), purpose, *parts)
        for seed in range(4)
        for purpose in (TRAIN, RECORD)
        for parts in [(), (0,), (1,), (2,)]
    ]
    unique = {tuple(jax.random.key_data(key).tolist()) for key in keys}
    assert len(unique) == len(keys)
