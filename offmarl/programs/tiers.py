"""Quality tiers: which versions of a policy they are, and their recording."""

from collections.abc import Mapping, Sequence
from typing import Any

from offmarl import tracking, vault
from offmarl.errors import unknown_name
from offmarl.networks import PolicyConfig, make_policy
from offmarl.programs.record import is_complete, record_policy
from offmarl.programs.recorder import EVALUATE_EXPERT, EVALUATE_RANDOM, Recorder, Version
from offmarl.programs.run import more_to_come
from offmarl.types import ArrayTree, Policy

FRACTIONS = {"poor": 0.25, "medium": 0.5, "good": 0.75}
"""Return of a tier's checkpoint, as a fraction of the way from random to expert."""

REPLAY_TIERS = ("replay", "medium-replay")
"""Training data: all of it, and its part up to the medium checkpoint."""

TIERS = ("random", *FRACTIONS, "expert", *REPLAY_TIERS)
"""``random`` is a uniform policy over legal actions, ``expert`` the best checkpoint. `REPLAY_TIERS`
are training data. `FRACTIONS` defines the others."""


def parse_tiers(text: str) -> list[str]:
    """Read names of tiers, separated by commas; `UnknownNameError` for one that is not a tier."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in TIERS:
            raise unknown_name("tier", name, TIERS)
    return list(dict.fromkeys(names))


def first_to_reach(fraction: float, returns: Sequence[float], random: float, expert: float) -> int:
    """Return the index of the first checkpoint that has come a fraction of the way to the expert.

    Parameters
    ----------
    fraction
        Fraction of the way from random to expert.
    returns
        Mean return of each checkpoint, in the order of training.
    random, expert
        Mean returns of the random policy and of the best checkpoint. The best checkpoint is
        evaluated again, because the best of many noisy estimates is too high. If no checkpoint
        reaches the threshold, the best one is taken.
    """
    threshold = random + fraction * (expert - random)
    reached = (index for index, value in enumerate(returns) if value >= threshold)
    return next(reached, best(returns))


def best(returns: Sequence[float]) -> int:
    """Return the index of the best checkpoint, the first one if several are equal."""
    return max(range(len(returns)), key=returns.__getitem__)


# ---------------------------------------------------------------------------------- recording


def record_tiers(run: Recorder, versions: Sequence[Version], tiers: Sequence[str]) -> None:
    """Record all tiers but replay, which the training has recorded."""
    play = run.returns
    uniform = make_policy(PolicyConfig("random"), run.env.spec)
    random = float(play(uniform, (), run.key(EVALUATE_RANDOM)).mean())
    means = [version.mean for version in versions]
    top = versions[best(means)]
    expert = float(play(run.policy, run.load(top), run.key(EVALUATE_EXPERT)).mean())

    def reached(tier: str) -> Version:
        return versions[first_to_reach(FRACTIONS[tier], means, random, expert)]

    def record(tier: str) -> None:
        if tier == "random":
            _record_tier(run, tier, uniform, (), {"return": random})
        elif tier == "expert":
            about = run.about(top) | {"return": expert}
            _record_tier(run, tier, run.policy, run.load(top), about)
        elif tier == "medium-replay":
            _cut_replay(run, tier, reached("medium"), versions)
        else:
            version = reached(tier)
            _record_tier(run, tier, run.policy, run.load(version), run.about(version))

    for tier in tiers:
        with more_to_come(tier != tiers[-1]):
            record(tier)


def _cut_replay(run: Recorder, tier: str, until: Version, versions: Sequence[Version]) -> None:
    """Extract the training data up to a version of the policy."""
    recipe = {**run.recipe, "iterations": until.iteration}
    if is_complete(run.vault(tier), recipe):
        return
    trained = [run.about(one) for one in versions if one.iteration <= until.iteration]
    about = {"recipe": recipe, "complete": True, "policies": trained, "origins": []}
    vault.slice(
        run.vault("replay"),
        run.vault(tier),
        stop=until.iteration * run.program.num_steps,
        by="steps",
        provenance=run.provenance(tier) | about,
        progress=tracking.progress,
    )


def _record_tier(
    run: Recorder, tier: str, policy: Policy, params: ArrayTree, about: Mapping[str, Any]
) -> None:
    record_policy(
        run.env,
        policy,
        params,
        run.vault(tier),
        run.args.steps,
        run.args.num_envs,
        seed=run.args.seed + TIERS.index(tier),
        provenance=run.provenance(tier) | {"policies": [{**about, "policy_id": 0}]},
        checkpoint_seconds=run.args.checkpoint_seconds,
    )
