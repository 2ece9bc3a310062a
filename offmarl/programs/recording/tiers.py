"""Quality tiers: which policies play them, and their recording."""

import math
import re
from collections.abc import Mapping, Sequence
from shlex import quote
from typing import Any, NamedTuple, NoReturn

import numpy as np
from jaxtyping import Float

from offmarl import tracking, vault
from offmarl.envs.sides import Seat, TeamPolicy, compose, population
from offmarl.errors import NotLearnedError, OptionError, RunError, unknown_name
from offmarl.programs.cluster import on_first
from offmarl.programs.recording.record import (
    Recording,
    check_recipe,
    chunks_of,
    is_complete,
)
from offmarl.programs.recording.recorder import (
    CHOOSE,
    EVALUATE_AGAIN,
    EVALUATE_RANDOM,
    OnlineRecorder,
    Version,
    tier_key,
)
from offmarl.programs.recording.sides import describe_policies, players_of
from offmarl.programs.runs.training import more_to_come
from offmarl.statistics import mean_interval
from offmarl.teams import teams_of
from offmarl.terminal import bars, interval
from offmarl.terminal import number as cell
from offmarl.types import ArrayTree

FRACTIONS = {"poor": 0.25, "medium": 0.5, "good": 0.75}
"""Return of a tier's checkpoint, as a fraction of the way from random to expert."""

REPLAY_TIERS = ("replay", "medium-replay")
"""Training data: all of it, and its part up to the medium checkpoint."""

PLAYED_TIERS = ("random", *FRACTIONS, "expert")
"""Tiers that one policy plays."""

TIERS = (*PLAYED_TIERS, *REPLAY_TIERS)
"""``random`` is a uniform policy over legal actions, ``expert`` the best version. `REPLAY_TIERS`
are training data. `FRACTIONS` defines the others."""

VERSUS = "-vs-"
"""Divides the tiers of several teams, in their order, as in ``expert-vs-random``."""

_FINALISTS = 4
"""Number of best versions in training, from which a second evaluation chooses."""

_SMALL = 0.1
"""An expert is warned of if it is less than this share of the way from random to the best known."""

_NAME = re.compile(r"\w[\w.-]*")


class Tier(NamedTuple):
    """A tier to record."""

    name: str
    shares: Mapping[str, float]
    """For a mixture, how likely each of `PLAYED_TIERS` plays an episode, relative to the others;
    empty for the others of `TIERS`."""


def parse_tiers(text: str) -> list[Tier]:
    """Read tiers such as ``random,expert,mixed=medium:0.5+expert:0.5``.

    A mixture has a name of its own, and the shares of the tiers in it. Where several teams learn,
    ``expert-vs-random`` names the tier of each, in their order.
    """
    tiers: dict[str, Tier] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, mixes, mixture = part.partition("=")
        tier = Tier(name, _shares(name, mixture) if mixes else {})
        if not mixes and name not in TIERS and not set(name.split(VERSUS)) <= set(PLAYED_TIERS):
            raise unknown_name("tier", name, TIERS)
        if tiers.setdefault(name, tier) != tier:
            raise OptionError(f"two tiers have the name {name!r}: give each its own.")
    return list(tiers.values())


def _shares(name: str, text: str) -> dict[str, float]:
    parts = [part.strip().partition(":")[::2] for part in text.split("+")]
    for part, _ in parts:
        if part not in PLAYED_TIERS:
            raise unknown_name("tier to mix", part, PLAYED_TIERS)
    try:
        shares = {part: float(share) for part, share in parts}
    except ValueError:
        shares = {}
    are_shares = len(shares) == len(parts) and all(0 < x < math.inf for x in shares.values())
    if not _NAME.fullmatch(name) or name in TIERS or not are_shares:
        raise OptionError(
            f"{name}={text} is not a mixture: give it a name that no tier has, and a positive "
            "share of each of some tiers, as in mixed=medium:0.5+expert:0.5."
        )
    return shares


# ---------------------------------------------------------------------------------- ladder


class Ladder:
    """The evaluated versions of a training seed's policy, and which of them play the tiers.

    The best of many noisy estimates is too high. A version is therefore proposed by its evaluation
    in training, chosen by a second one, and described by a third, each on other seeds.
    """

    def __init__(self, run: OnlineRecorder, versions: Sequence[Version]):
        self._run, self._versions = run, versions
        self._chosen: dict[str, Version] = {}
        self._played: dict[tuple[int, ...], Float[np.ndarray, "episodes"]] = {}
        self._accepted = ["random"]

    def returns(self, tier: str) -> Float[np.ndarray, "episodes"]:
        """Return the returns by which a tier is described."""
        if tier == "random":
            return self._play(EVALUATE_RANDOM)
        return self._play(EVALUATE_AGAIN, self.version(tier))

    def _trial(self, version: Version) -> float:
        """Return the mean return by which a version is chosen."""
        return float(self._play(CHOOSE, version).mean())

    def _play(self, purpose: int, version: Version | None = None) -> Float[np.ndarray, "episodes"]:
        """Return the returns of a version, or of uniform legal actions, on seeds of a purpose."""
        parts = (purpose,) if version is None else (purpose, version.iteration)
        if parts not in self._played:
            run = self._run
            params = run.uniform() if version is None else run.load(version)
            self._played[parts] = run.returns_again(params, run.key(*parts))
        return self._played[parts]

    def version(self, tier: str) -> Version:
        """Return the version that plays a tier; `check` refuses one that is not good enough."""
        if tier not in self._chosen:
            if tier == "expert":
                finalists = sorted(self._versions, key=lambda version: -version.mean)[:_FINALISTS]
                self._chosen[tier] = max(finalists, key=self._trial)
            else:
                self._chosen[tier] = self._nearest(*self._band(tier))
        return self._chosen[tier]

    def _band(self, tier: str) -> tuple[float, float]:
        """Return the return that a tier should have, and half the way to the next tier's."""
        random, expert = (float(self.returns(name).mean()) for name in ("random", "expert"))
        return random + FRACTIONS[tier] * (expert - random), (expert - random) / 8

    def _nearest(self, target: float, width: float) -> Version:
        trained = [version for version in self._versions if version.iteration] or self._versions
        near = sorted(trained, key=lambda version: abs(version.mean - target))
        proposed = (version for version in near if abs(version.mean - target) <= 2 * width)
        accepted = (version for version in proposed if abs(self._trial(version) - target) <= width)
        return next(accepted, near[0])

    def player(self, tier: str) -> tuple[ArrayTree, dict[str, Any]]:
        """Return the parameters of a tier's policy, and what the provenance says of it."""
        estimate = mean_interval(self.returns(tier))
        about = {
            "return": estimate.value,
            "return_interval": None if estimate.low is None else [estimate.low, estimate.high],
            "evaluation_episodes": len(self.returns(tier)),
        }
        if tier == "random":
            return self._run.uniform(), about
        if (share := self._share(tier)) is not None:
            about["share_of_best_known"] = share
        version = self.version(tier)
        return self._run.load(version), self._run.about(version) | about

    def _share(self, tier: str) -> float | None:
        """Return how far a tier is from random to the environment's best known return."""
        random, best = self.returns("random").mean(), getattr(self._run.env, "optimal_return", None)
        if self._run.team is not None or best is None or best <= random:
            return None
        return float((self.returns(tier).mean() - random) / (best - random))

    def check(self, tier: str) -> None:
        """Raise `NotLearnedError` if a tier is not what its name says, or too close to another.

        The others are random, expert, and the tiers that were checked before.
        """
        if tier in self._accepted:
            return
        if tier in FRACTIONS:
            self.check("expert")
            target, width = self._band(tier)
            if abs(self._trial(self.version(tier)) - target) > width:
                low, high = (cell(x) for x in (target - width, target + width))
                self._refuse(
                    tier,
                    f"none of its {len(self._versions)} evaluated versions returns from "
                    f"{low} to {high}, {self._stated('random')}, and {self._stated('expert')}",
                )
        for other in self._accepted:
            low, high = sorted((tier, other), key=PLAYED_TIERS.index)
            if not _is_above(self.returns(high), self.returns(low)):
                self._refuse(
                    tier,
                    f"{self._stated(high)} and {self._stated(low)}, on fresh seeds, where the "
                    "intervals must not overlap",
                )
        self._accepted.append(tier)
        if tier == "expert" and (share := self._share(tier)) is not None and share < _SMALL:
            tracking.notice(
                f"warning: the expert of {self._run.name} with seed {self._run.seed} is only "
                f"{share:.1%} of the way from random to the best known return of "
                f"{self._run.env.spec.name}: train longer, or with other settings."
            )

    def _stated(self, tier: str) -> str:
        return f"{tier} returns {interval(*mean_interval(self.returns(tier)))}"

    def _refuse(self, tier: str, why: str) -> NoReturn:
        run = self._run
        means = [version.mean for version in self._versions]
        lacks = "did not learn" if tier == "expert" else f"has no {tier} of"
        side = "" if run.team is None else f" as {run.team.name}"
        raise NotLearnedError(
            f"{run.name} with seed {run.seed} {lacks} {run.env.spec.name}{side}: {why}.\n\n"
            f"Returns in order: {bars(means)} ({min(means):.4g} to {max(means):.4g})\n\n"
            "Train in another directory (--out): longer (--total-steps), with other settings "
            "(--learning-rate and others; `offmarl tune` finds some), with more versions to choose "
            "from (--evaluations, and smaller updates: --num-envs, --num-steps), or on more "
            f"episodes (--eval-episodes) for narrower intervals. The run is kept in "
            f"{run.directory}, and tiers that are not named here are recorded; record further ones "
            "with "
            f"`offmarl record --from-run {quote(str(run.directory))} --tiers TIERS`."
        )


def _is_above(high: Float[np.ndarray, "episodes"], low: Float[np.ndarray, "episodes"]) -> bool:
    """Whether the interval of a mean is above that of another."""
    upper, lower = mean_interval(high), mean_interval(low)
    return (upper.value if upper.low is None else upper.low) > (
        lower.value if lower.high is None else lower.high
    )


# ---------------------------------------------------------------------------------- recording


def check_vaults(run: OnlineRecorder, tiers: Sequence[Tier]) -> None:
    """Raise an error if a tier is impossible, or its vault holds another recording.

    Called before training, which does not change what is compared.
    """
    several = len(teams_of(run.env.spec)) > 1
    for tier in tiers:
        if several and tier.name not in REPLAY_TIERS:
            _skills(run, tier)
        elif VERSUS in tier.name:
            raise OptionError(f"{tier.name} is for several teams that learn at once.")
        _provenance(run, tier)


def are_complete(run: OnlineRecorder, tiers: Sequence[Tier]) -> bool:
    """Whether all tiers of a training seed are recorded."""
    return all(_provenance(run, tier).get("complete") for tier in tiers)


def _provenance(run: OnlineRecorder, tier: Tier) -> dict[str, Any]:
    """Return the provenance of a tier's vault, if it exists and is of this recording."""
    recipe = _recipe(run, tier)
    if tier.name not in REPLAY_TIERS:
        recipe["chunks"] = list(chunks_of(run.args.steps, run.args.num_envs))
    return check_recipe(run.vault(tier.name), recipe, partly=True)


def _recipe(run: OnlineRecorder, tier: Tier) -> dict[str, Any]:
    """Return what determines a tier's data and is known before training."""
    if tier.name == "replay":
        return run.recipe
    shares = {"shares": dict(tier.shares)} if tier.shares else {}
    return {"tier": tier.name, "training": run.recipe, **shares}


def record_ladders(
    run: OnlineRecorder, versions: Sequence[Version], tiers: Sequence[Tier]
) -> list[str]:
    """Record all tiers of a training seed but replay, which the training has recorded.

    Returns why `Ladder.check` refused some.
    """
    needs = [tier for tier in tiers if tier.name in REPLAY_TIERS]
    if not are_complete(run, needs) and not on_first(run.vault("replay").exists):
        raise RunError(
            f"{run.directory} kept no training data: they are kept while a run trains with replay "
            "or medium-replay among its --tiers. Train again in another directory (--out)."
        )
    ladders = [
        Ladder(recorder, [version.of_team(number) for version in versions])
        for number, recorder in enumerate(run.by_team())
    ]
    refused: dict[str, None] = {}
    for tier in tiers:
        try:
            for ladder, names in zip(ladders, _names(run, tier), strict=True):
                for name in names:
                    ladder.check(name)
        except NotLearnedError as error:
            refused[str(error)] = None
            continue
        with more_to_come(tier != tiers[-1]):
            if tier.name not in REPLAY_TIERS:
                _record_played(run, ladders, tier)
            elif tier.name != "replay":
                medium = max(ladder.version("medium").iteration for ladder in ladders)
                _cut_replay(run, tier, medium)
    return [*refused]


def _names(run: OnlineRecorder, tier: Tier) -> list[list[str]]:
    """Return the `PLAYED_TIERS` of each team that a tier depends on."""
    teams = len(run.by_team())
    if tier.name in REPLAY_TIERS:
        return [["medium"] if tier.name == "medium-replay" else []] * teams
    return [[name] for name in _skills(run, tier)] if teams > 1 else [[*tier.shares] or [tier.name]]


def _record_played(run: OnlineRecorder, ladders: Sequence[Ladder], tier: Tier) -> None:
    """Record a tier that one policy plays, a mixture draws, or each of several teams plays."""
    spec, everyone = run.env.spec, tuple(range(run.env.spec.num_agents))
    teams, members, about = teams_of(spec), list[TeamPolicy](), list[dict[str, Any]]()
    for team, ladder, names in zip(teams, ladders, _names(run, tier), strict=True):
        for name in names:
            params, entry = ladder.player(name)
            members.append(TeamPolicy(run.policy, params, everyone, name))
            side = {"team": team.name} if len(teams) > 1 else {}
            named = {"tier": name} if side or tier.shares else {}
            about.append(entry | side | named | {"policy_id": len(about)})
    if len(teams) > 1:
        seats = [Seat(team.agents, run.policy, everyone) for team in teams]
        policy, params = compose(spec, seats), tuple(member.params for member in members)
    else:
        mixture = population(spec, members, [*tier.shares.values()] or None)
        policy, params = mixture.policy, mixture.params
    opponents = describe_policies(players_of(run.env), len(about))
    Recording(
        run.env,
        policy,
        params,
        run.vault(tier.name),
        run.args.steps,
        run.args.num_envs,
        run.seed,
        lambda: run.provenance(tier.name) | {"policies": [*about, *opponents]},
        run.args.checkpoint_seconds,
        run.args.devices,
        tier_key(run.seed, tier.name),
        _recipe(run, tier),
        len(about),
    ).record()


def _skills(run: OnlineRecorder, tier: Tier) -> list[str]:
    """Return the tier that each team plays."""
    teams, skills = teams_of(run.env.spec), tier.name.split(VERSUS)
    if tier.shares:
        raise OptionError(
            f"{tier.name} mixes policies, and {len(teams)} teams learn: record one side with "
            "--side, or join vaults with `offmarl cat`."
        )
    if len(skills) == 1:
        return skills * len(teams)
    if len(skills) != len(teams):
        raise OptionError(
            f"{tier.name} names {len(skills)} tiers, and there are {len(teams)} teams "
            f"({', '.join(team.name for team in teams)}): name one for each, in this order."
        )
    return skills


def _cut_replay(run: OnlineRecorder, tier: Tier, until: int) -> None:
    """Extract the training data before a number of iterations."""
    recipe = _recipe(run, tier) | {"iterations": until}
    if is_complete(run.vault(tier.name), recipe):
        return
    on_first(lambda: _slice_replay(run, tier, until, recipe))


def _slice_replay(run: OnlineRecorder, tier: Tier, until: int, recipe: Mapping[str, Any]) -> None:
    # The ids of opponents follow those of all versions.
    later = range(until + 1, run.iterations + 1)
    policies = vault.open_vault(run.vault("replay")).provenance["policies"]
    acted = [entry for entry in policies if entry["policy_id"] not in later]
    about = {"recipe": recipe, "complete": True, "policies": acted, "origins": []}
    vault.slice(
        run.vault("replay"),
        run.vault(tier.name),
        stop=until * run.program.num_steps,
        by="steps",
        provenance=run.provenance(tier.name) | about,
        progress=tracking.progress,
    )
