"""Quality tiers: which policies play them, and their recording."""

import math
import re
import zlib
from collections.abc import Mapping, Sequence
from shlex import quote
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from offmarl import tracking, vault
from offmarl.envs.sides import Seat, compose
from offmarl.errors import NotLearnedError, OptionError, RunError, unknown_name
from offmarl.networks import PolicyConfig, make_policy
from offmarl.programs.cluster import on_first
from offmarl.programs.record import (
    HINTS,
    Player,
    check_recipe,
    chunks_of,
    is_complete,
    record_players,
)
from offmarl.programs.recorder import (
    EVALUATE_AGAIN,
    EVALUATE_RANDOM,
    RECORD,
    Recorder,
    Version,
)
from offmarl.programs.run import more_to_come
from offmarl.statistics import mean_interval
from offmarl.teams import teams_of
from offmarl.terminal import interval, plot
from offmarl.types import ArrayTree, Policy

FRACTIONS = {"poor": 0.25, "medium": 0.5, "good": 0.75}
"""Return of a tier's checkpoint, as a fraction of the way from random to expert."""

REPLAY_TIERS = ("replay", "medium-replay")
"""Training data: all of it, and its part up to the medium checkpoint."""

PLAYED_TIERS = ("random", *FRACTIONS, "expert")
"""Tiers that one policy plays."""

TIERS = (*PLAYED_TIERS, *REPLAY_TIERS)
"""``random`` is a uniform policy over legal actions, ``expert`` the best checkpoint. `REPLAY_TIERS`
are training data. `FRACTIONS` defines the others."""

VERSUS = "-vs-"
"""Divides the tiers of several teams, in their order, as in ``expert-vs-random``."""

_NAME = re.compile(r"\w[\w.-]*")


class Tier(NamedTuple):
    """A tier to record."""

    name: str
    shares: Mapping[str, float]
    """For a mixture, the share of the environments that each of `PLAYED_TIERS` plays in; empty for
    the others of `TIERS`."""

    @property
    def needs_ladder(self) -> bool:
        """Whether it depends on how good the policy became."""
        played = set(self.shares) or set(self.name.split(VERSUS))
        return not played <= {"random", "replay"}


def parse_tiers(text: str) -> list[Tier]:
    """Read tiers, separated by commas.

    Parameters
    ----------
    text
        Such as ``random,expert,mixed=medium:0.5+expert:0.5``: a mixture has a name of its own, and
        the shares of the tiers in it. Where several teams learn, ``expert-vs-random`` names the
        tier of each, in their order.

    Raises
    ------
    UnknownNameError
        There is no such tier.
    OptionError
        A mixture is written in another way, or two tiers have one name.
    """
    tiers: dict[str, Tier] = {}
    for part in (part.strip() for part in text.split(",")):
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


def best(returns: Sequence[float]) -> int:
    """Return the index of the best checkpoint, the first one if several are equal."""
    return max(range(len(returns)), key=returns.__getitem__)


# ---------------------------------------------------------------------------------- ladder


class Ladder:
    """The evaluated versions of a training seed's policy, and which of them play the tiers.

    Versions were evaluated during training. Those that play a tier are evaluated again on fresh
    seeds, and by these returns a tier is chosen and described: the best of many noisy estimates is
    too high.

    Parameters
    ----------
    run
        The recorder.
    versions
        The versions, in the order of training.
    """

    def __init__(self, run: Recorder, versions: Sequence[Version]):
        self._run = run
        self._versions = versions
        self._again: dict[int, Float[np.ndarray, "episodes"]] = {}
        self._uniform: Policy = make_policy(PolicyConfig("random"), run.env.spec)
        self._top = versions[best([version.mean for version in versions])]

    @property
    def random(self) -> Float[np.ndarray, "episodes"]:
        """Returns of uniform legal actions."""
        if -1 not in self._again:
            key = self._run.key(EVALUATE_RANDOM)
            self._again[-1] = self._run.returns_again(self._uniform, (), key)
        return self._again[-1]

    def again(self, version: Version) -> Float[np.ndarray, "episodes"]:
        """Return a version's returns on fresh seeds."""
        number = version.iteration
        if number not in self._again:
            params, key = self._run.load(version), self._run.key(EVALUATE_AGAIN, number)
            self._again[number] = self._run.returns_again(self._run.policy, params, key)
        return self._again[number]

    def version(self, tier: str) -> Version:
        """Return the version that plays a tier."""
        if tier == "expert":
            return self._top
        random, expert = self.random.mean(), self.again(self._top).mean()
        threshold = random + FRACTIONS[tier] * (expert - random)
        # The first evaluation proposes, and the second, on other seeds, decides.
        reached = (one for one in self._versions if one.mean >= threshold)
        return next((one for one in reached if self.again(one).mean() >= threshold), self._top)

    def player(self, tier: str) -> tuple[Policy, ArrayTree, dict[str, Any]]:
        """Return the policy of a tier, its parameters, and what the provenance says of it."""
        if tier == "random":
            return self._uniform, (), _evaluated(self.random)
        version = self.version(tier)
        about = self._run.about(version) | _evaluated(self.again(version))
        return self._run.policy, self._run.load(version), about

    def warn(self, tiers: Sequence[str]) -> None:
        """Print which tiers one version plays, so that their data are alike."""
        played: dict[int, list[str]] = {}
        for tier in tiers:
            played.setdefault(self.version(tier).iteration, []).append(tier)
        for names in played.values():
            if len(names) > 1:
                tracking.notice(
                    f"warning: one version of the policy plays {' and '.join(names)}, because no "
                    "other was evaluated at their returns. More --evaluations tell them apart."
                )

    def check(self) -> None:
        """Raise `NotLearnedError` if the expert is not better than uniform legal actions."""
        random, expert = mean_interval(self.random), mean_interval(self.again(self._top))
        low = expert.mean if expert.low is None else expert.low
        high = random.mean if random.high is None else random.high
        if low > high:
            return
        run = self._run
        replay = run.vault("replay")
        kept = f" Its training data is in {replay}." if replay.exists() else ""
        steps = [version.iteration * run.iteration_steps for version in self._versions]
        curve = plot(steps, [version.mean for version in self._versions], random.mean)
        raise NotLearnedError(
            f"{run.name} with seed {run.seed} did not learn {run.env.spec.name}, so it has no "
            f"tiers: its best policy returns {interval(*expert)} and uniform legal actions return "
            f"{interval(*random)}, on fresh seeds, where the intervals must not overlap.\n\n"
            f"{curve}\n\n"
            "Train longer (--total-steps), or with other settings (--learning-rate and others; "
            "`offmarl tune` finds some), or evaluate on more episodes (--eval-episodes) if the "
            f"curve rises. The run is kept in {run.directory}; record what it has with "
            f"`offmarl record --from-run {quote(str(run.directory))} --tiers random`.{kept}"
        )


def _evaluated(returns: Float[np.ndarray, "episodes"]) -> dict[str, Any]:
    found = mean_interval(returns)
    return {
        "return": found.mean,
        "return_interval": None if found.low is None else [found.low, found.high],
        "evaluation_episodes": len(returns),
    }


# ---------------------------------------------------------------------------------- recording


def rows_of(shares: Mapping[str, float], num_envs: int) -> dict[str, int]:
    """Divide environments by shares, which need not add up to 1.

    Raises
    ------
    OptionError
        A share is less than one environment.
    """
    total = sum(shares.values())
    ends = np.round(np.cumsum([*shares.values()]) / total * num_envs).astype(int)
    rows = dict(zip(shares, np.diff(ends, prepend=0).tolist(), strict=True))
    if none := [name for name, count in rows.items() if count == 0]:
        raise OptionError(
            f"{none[0]} has a share of {shares[none[0]]:g} in {total:g}, which is less than one of "
            f"{num_envs} environments: give more --num-envs, or a larger share."
        )
    return rows


def check_vaults(run: Recorder, tiers: Sequence[Tier]) -> None:
    """Raise an error if the vault of a tier exists and is of another recording.

    Called before training, which does not change what is compared.

    Raises
    ------
    RunError
        Such a vault exists.
    OptionError
        A mixture has more policies than there are environments.
    """
    several = len(teams_of(run.env.spec)) > 1
    for tier in tiers:
        if several and tier.name not in REPLAY_TIERS:
            _skills(run, tier)
        elif VERSUS in tier.name:
            raise OptionError(f"{tier.name} is for several teams that learn at once.")
        if tier.shares:
            rows_of(tier.shares, run.args.num_envs)
        _provenance(run, tier)


def are_complete(run: Recorder, tiers: Sequence[Tier]) -> bool:
    """Whether all tiers of a training seed are recorded."""
    return all(_provenance(run, tier).get("complete") for tier in tiers)


def _provenance(run: Recorder, tier: Tier) -> dict[str, Any]:
    """Return the provenance of a tier's vault, if it exists and is of this recording."""
    recipe = _recipe(run, tier)
    if tier.name not in REPLAY_TIERS:
        recipe["chunks"] = list(chunks_of(run.args.steps, run.args.num_envs))
    hints = HINTS | {"chunks": "--steps decides it"}
    return check_recipe(run.vault(tier.name), recipe, partly=True, hints=hints)


def _recipe(run: Recorder, tier: Tier) -> dict[str, Any]:
    """Return what determines a tier's data and is known before training."""
    if tier.name == "replay":
        return run.recipe
    shares = {"shares": dict(tier.shares)} if tier.shares else {}
    return {"tier": tier.name, "training": run.recipe, **shares}


def record_tiers(run: Recorder, versions: Sequence[Version], tiers: Sequence[Tier]) -> None:
    """Record all tiers of a training seed but replay, which the training has recorded.

    Raises
    ------
    NotLearnedError
        The expert of a team is not better than uniform legal actions, and a tier depends on it.
    RunError
        A tier is made of training data that was not kept.
    """
    ladders = [
        Ladder(one, [version.of_team(number) for version in versions])
        for number, one in enumerate(run.by_team())
    ]
    for number, ladder in enumerate(ladders):
        if any(_needs_ladder(run, tier, number) for tier in tiers):
            ladder.check()
            ladder.warn([x.name for x in tiers if x.name in (*FRACTIONS, "expert")])
    for tier in tiers:
        with more_to_come(tier != tiers[-1]):
            if tier.name not in REPLAY_TIERS:
                _record_played(run, ladders, tier)
            elif tier.name != "replay":
                medium = max(ladder.version("medium").iteration for ladder in ladders)
                _cut_replay(run, tier, medium, versions)


def _needs_ladder(run: Recorder, tier: Tier, team: int) -> bool:
    """Whether a tier depends on how good the policy of a team became."""
    if VERSUS in tier.name:
        return _skills(run, tier)[team] != "random"
    return tier.needs_ladder


def _record_played(run: Recorder, ladders: Sequence[Ladder], tier: Tier) -> None:
    if len(ladders) > 1:
        _record_teams(run, ladders, tier)
        return
    (ladder,) = ladders
    rows = rows_of(tier.shares or {tier.name: 1.0}, run.args.num_envs)
    players, about = [], []
    for number, (name, count) in enumerate(rows.items()):
        policy, params, one = ladder.player(name)
        players.append(Player(policy, params, count))
        about.append(one | ({"tier": name} if tier.shares else {}) | {"policy_id": number})
    _record(run, tier, players, about)


def _record_teams(run: Recorder, ladders: Sequence[Ladder], tier: Tier) -> None:
    """Record a tier that each of several teams plays with its own skill."""
    teams, everyone = teams_of(run.env.spec), tuple(range(run.env.spec.num_agents))
    seats, params, about, ids = [], [], [], [0] * len(everyone)
    for number, (team, name, ladder) in enumerate(
        zip(teams, _skills(run, tier), ladders, strict=True)
    ):
        policy, own, one = ladder.player(name)
        seats.append(Seat(team.agents, policy, everyone))
        params.append(own)
        about.append(one | {"team": team.name, "tier": name, "policy_id": number})
        for agent in team.agents:
            ids[agent] = number
    joint = Player(compose(run.env.spec, seats), tuple(params), run.args.num_envs)
    _record(run, tier, [joint], about, ids)


def _record(
    run: Recorder,
    tier: Tier,
    players: Sequence[Player],
    about: Sequence[Mapping[str, Any]],
    agent_ids: Sequence[int] | None = None,
) -> None:
    """Write the vault of a tier; ``about`` describes its policies."""
    record_players(
        run.env,
        players,
        run.vault(tier.name),
        run.args.steps,
        run.key(RECORD, zlib.crc32(tier.name.encode())),
        _recipe(run, tier),
        run.provenance(tier.name) | {"policies": list(about)},
        run.args.checkpoint_seconds,
        agent_ids,
        run.args.devices,
    )


def _skills(run: Recorder, tier: Tier) -> list[str]:
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


def _cut_replay(run: Recorder, tier: Tier, until: int, versions: Sequence[Version]) -> None:
    """Extract the training data before a number of iterations."""
    recipe = _recipe(run, tier) | {"iterations": until}
    if is_complete(run.vault(tier.name), recipe):
        return
    on_first(lambda: _slice_replay(run, tier, until, versions, recipe))


def _slice_replay(
    run: Recorder, tier: Tier, until: int, versions: Sequence[Version], recipe: Mapping[str, Any]
) -> None:
    if not run.vault("replay").exists():
        raise RunError(
            f"{run.directory} kept no training data, which {tier.name} is part of: train again in "
            "another directory (--out) with --tiers replay or medium-replay."
        )
    trained = [run.about(one) for one in versions if one.iteration <= until]
    about = {"recipe": recipe, "complete": True, "policies": trained, "origins": []}
    vault.slice(
        run.vault("replay"),
        run.vault(tier.name),
        stop=until * run.program.num_steps,
        by="steps",
        provenance=run.provenance(tier.name) | about,
        progress=tracking.progress,
    )
