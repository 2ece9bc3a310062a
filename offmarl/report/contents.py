"""A survey of a dataset's contents, in one pass and bounded memory, and what is unusual in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from offmarl.report.accumulators import (
    Actions,
    ContinuousActions,
    DiscreteActions,
    Distinct,
    entropy,
    hash_rows,
)
from offmarl.statistics import spread
from offmarl.teams import only_or_all
from offmarl.terminal import Progress, quiet
from offmarl.tracking import as_dicts
from offmarl.types import Discrete, EnvSpec, Transition, flatten_tree, map_tree
from offmarl.vault import Dataset, Episodes
from offmarl.vault.check import leaf_statistics
from offmarl.vault.check.digest import known_digest
from offmarl.vault.check.leaf_statistics import Statistics, StatisticsAccumulator
from offmarl.vault.format.column_statistics import Ranges
from offmarl.vault.format.compat import LIMIT_UNKNOWN, MEANINGS, recorded_quirks, sentences
from offmarl.vault.transform.lineage import sources_of

LENGTHS = (5, 10, 20, 50, 100)
"""Window lengths that `Survey.windows` is reported for."""

_STRETCHES = 60
"""Maximum number of points of the reward curve."""


class DataCoverage(NamedTuple):
    """How many different states and actions the data contains.

    Counts are exact up to a million distinct rows, and accurate to about a thousandth beyond.
    """

    pairs: int
    """Distinct pairs of the global state and the joint action."""
    states: int
    """Distinct global states."""
    local_pairs: int
    """Distinct pairs of an agent's observation and its action, over all agents."""
    local_steps: int
    """Steps of agents that were alive."""
    joint_actions: int
    """Distinct joint actions."""
    joint_entropy: float | None
    """Entropy of joint actions, in bits; None if there are too many to count exactly."""
    repeats: Int[np.ndarray, "R 2"]
    """Pairs of (number of occurrences, number of state-action pairs that occur so often)."""
    exact: bool
    """Whether all counts are exact."""


class Rewards(NamedTuple):
    """The rewards of a dataset."""

    ranges: Ranges
    """``(N,)``"""
    nonzero: Int[np.ndarray, "N"]
    """Steps at which the agent's reward is not zero."""
    nonzero_steps: int
    """Steps at which any agent's reward is not zero."""
    alike: bool
    """Whether all agents always have the same reward."""
    stretch: int
    """Steps of an episode that one point of the curve covers."""
    curve: Float[np.ndarray, "P"]
    """Mean reward, over agents too, by time since the episode's start."""


class WindowCounts(NamedTuple):
    """The windows of one length that training would draw from; see `offmarl.replay.sampling`."""

    length: int
    total: int
    """Windows that are equally likely: one starts at each step, and one at each episode's end."""
    padded: float
    """Fraction of their slots that hold no step, but the end of an episode."""
    short_episodes: int
    """Episodes shorter than the window."""
    crossing: float
    """Fraction of the windows that hold steps of more than one episode."""


class Survey(NamedTuple):
    """Everything that ``offmarl report`` shows of one vault."""

    vault: Dataset
    digest: str
    episodes: Episodes
    observations: Ranges
    """``(N, O)``, over steps at which the agent was alive; or ``(1, leaves)``, of all entries of
    each leaf, if observations are no vectors."""
    state: Ranges
    """``(S,)``, or ``(leaves,)``; empty without a state."""
    actions: Actions
    rewards: Rewards
    coverage: DataCoverage
    alive: Int[np.ndarray, "N"]
    """Steps at which each agent was alive."""
    log_probs: int
    """Number of actions of live agents whose log-probability is known."""

    @property
    def spec(self) -> EnvSpec:
        """The specification of the vault's environment."""
        return self.vault.spec

    @property
    def returns(self) -> Float[np.ndarray, "K"]:
        """Returns of the complete episodes with a finite return, mean over agents.

        `offmarl.errors.ShapeError` if agents are in several teams: see `team_returns`.
        """
        return self.episodes.complete_returns

    @property
    def team_returns(self) -> dict[str, Float[np.ndarray, "K"]]:
        """The returns of these episodes by team, mean over the agents of each."""
        return self.episodes.complete_team_returns

    @property
    def lengths(self) -> Int[np.ndarray, "C"]:
        """Lengths of the complete episodes, in steps."""
        return self.episodes.length[self.episodes.complete]

    @property
    def saco(self) -> float | None:
        """Joint state-action coverage: distinct pairs over steps; None if there are no steps.

        As in OG-MARL (Formanek et al., *Putting Data at the Centre of Offline Multi-Agent
        Reinforcement Learning*, 2024), after Schweighofer et al., *A Dataset Perspective on Offline
        Reinforcement Learning* (2022).
        """
        return self.coverage.pairs / self.vault.num_steps if self.vault.num_steps else None

    def windows(self, length: int) -> WindowCounts:
        """Return the windows of ``length`` steps that training would draw from."""
        lengths = self.episodes.length
        count = int((lengths + 1).sum())
        # These begin at one of an episode's steps and stop before the next episode's first, or
        # begin at the slot that ends an episode and hold steps of the next one only.
        before_its_end = int(np.maximum(lengths - length + 2, 0).clip(max=lengths).sum())
        after_an_end = int((lengths >= length - 2).sum())
        single = min(before_its_end + after_an_end, count)
        return WindowCounts(
            length,
            count,
            padded=len(lengths) / count if count else 0.0,
            short_episodes=int((lengths < length).sum()),
            crossing=1 - single / count if count else 0.0,
        )

    def data(self) -> dict[str, Any]:
        """Return everything for JSON."""
        return facts_of(self.vault) | {
            "digest": self.digest,
            "unverified": self.vault.unverified,
            "warnings": data_warnings(self),
            "rewards": as_dicts(self.rewards),
            "actions": {x: as_dicts(getattr(self.actions, x)) for x in self.actions.COUNTS},
            "observations": as_dicts(self.observations),
            "state": as_dicts(self.state),
            "alive": self.alive,
            "coverage": {"saco": self.saco, **as_dicts(self.coverage)},
            "windows": [as_dicts(self.windows(length)) for length in LENGTHS],
            "provenance": self.vault.provenance,
        }


def facts_of(vault: Dataset) -> dict[str, Any]:
    """Return what reports and commands say of a vault in JSON."""
    spec, episodes = vault.spec, vault.episodes
    returns = {team: spread(values) for team, values in episodes.complete_team_returns.items()}
    return {
        "path": vault.path,
        "env": spec.name,
        "spec": spec.to_json(),
        "native": vault.native,
        "quirks": vault.quirks,
        "rows": vault.rows,
        "steps": vault.num_steps,
        "bytes": vault.num_bytes,
        "episodes": len(episodes.row),
        "incomplete": episodes.incomplete,
        "episodes_without_return": episodes.without_return,
        "ends": dict(Counter(episodes.cause.tolist())),
        "return": only_or_all(returns),
        "length": spread(episodes.length[episodes.complete]),
    }


Surveys = Mapping[str, Survey]
"""Surveys of datasets, by the names shown for them."""


def survey(vault: Dataset, progress: Progress = quiet) -> Survey:
    """Compute the statistics of a vault.

    The vault is read a block at a time, twice unless its digest is known.

    Parameters
    ----------
    vault
        A vault of any program.
    progress
        Reports progress.

    Raises
    ------
    VaultError
        The vault cannot be read, or is damaged.
    """
    accumulator, leaves = StatsAccumulator(vault), leaf_statistics.stored_statistics(vault)
    fresh = StatisticsAccumulator(vault.spec, vault.num_steps) if leaves is None else None
    with progress(f"read {vault.uid}", 2 * vault.length) as advance:
        for begin, stop in vault.blocks():
            steps = vault.transitions(begin, stop)
            accumulator.add(begin, steps)
            if fresh:
                fresh.add(steps)
            advance(stop - begin)
        if fresh:
            leaves = fresh.statistics
            leaf_statistics.store_statistics(vault, leaves)
        assert leaves is not None
        return accumulator.survey(known_digest(vault, advance), leaves)


class StatsAccumulator:
    """Accumulates a `Survey` over the blocks of a vault."""

    def __init__(self, vault: Dataset):
        spec = vault.spec
        self._vault = vault
        discrete = isinstance(spec.action, Discrete)
        self._actions: Actions = (DiscreteActions if discrete else ContinuousActions)(spec)
        self._rewards = _RewardsAccumulator(vault)
        self._pairs, self._states, self._local, self._joint = (Distinct() for _ in range(4))

    def add(self, begin: int, block: Transition) -> None:
        """Add a block of steps ``(B, T, ...)``."""
        self._rewards.add(begin, block.reward)
        count = block.last.size
        steps: Transition = map_tree(lambda leaf: leaf.reshape(count, *leaf.shape[2:]), block)
        self._actions.add(steps)
        self._cover(steps)

    def _cover(self, steps: Transition) -> None:
        spec, view = self._vault.spec, steps.view
        # Without a state, all observations together tell situations apart.
        state = [*flatten_tree(view.state if spec.state_size else view.observation).values()]
        self._pairs.add(hash_rows(*state, steps.action))
        self._states.add(hash_rows(*state))
        self._joint.add(hash_rows(steps.action))
        for agent in range(view.alive.shape[1]):
            alive = view.alive[:, agent]
            parts = (*_of_agent(view.observation, spec, agent), steps.action[:, agent])
            self._local.add(hash_rows(*(np.asarray(part)[alive] for part in parts)))

    def survey(self, digest: str, leaves: Statistics) -> Survey:
        """Return the survey of everything added, with the vault's digest and statistics."""
        if isinstance(self._actions, ContinuousActions):
            self._actions.ranges = leaves["action"].ranges
        return Survey(
            self._vault,
            digest,
            self._vault.episodes,
            _features(leaves, "observation", self._vault.spec.observation is None, (1,)),
            _features(leaves, "state", self._vault.spec.global_state is None, ()),
            self._actions,
            self._rewards.rewards(leaves["reward"].ranges),
            self._coverage(),
            self._actions.steps,
            int(leaves["behaviour_log_prob"].count.sum()),
        )

    def _coverage(self) -> DataCoverage:
        occurrences, counts = np.unique(self._pairs.occurrences, return_counts=True)
        counters = (self._pairs, self._states, self._local, self._joint)
        return DataCoverage(
            self._pairs.count,
            self._states.count,
            self._local.count,
            self._local.total,
            self._joint.count,
            entropy(self._joint.occurrences) if self._joint.exact else None,
            np.stack([occurrences, counts * self._pairs.weight], 1),
            all(counter.exact for counter in counters),
        )


class _RewardsAccumulator:
    """Accumulates `Rewards` over the blocks of a vault."""

    def __init__(self, vault: Dataset):
        agents = vault.spec.num_agents
        self._length, self._rows = vault.length, np.arange(vault.rows)[:, None]
        self._starts = vault.episodes.row * vault.length + vault.episodes.start
        longest = int(vault.episodes.length.max(initial=1))
        self._stretch = -(-longest // _STRETCHES)
        points = -(-longest // self._stretch)
        self._sums, self._counts = np.zeros(points), np.zeros(points)
        self._nonzero, self._nonzero_steps, self._alike = np.zeros(agents, np.int64), 0, True

    def add(self, begin: int, reward: Any) -> None:
        """Add the rewards of a block, ``(B, T, N)``."""
        paid = reward != 0
        self._nonzero += paid.sum((0, 1))
        self._nonzero_steps += int(paid.any(-1).sum())
        self._alike = self._alike and bool((reward == reward[..., :1]).all())
        time = self._rows * self._length + begin + np.arange(reward.shape[1])
        episode = np.searchsorted(self._starts, time, side="right") - 1
        point = ((time - self._starts[episode]) // self._stretch).ravel()
        size = len(self._sums)
        self._sums += np.bincount(point, reward.mean(-1, dtype=float).ravel(), size)
        self._counts += np.bincount(point, minlength=size)

    def rewards(self, ranges: Ranges) -> Rewards:
        """Return the statistics of everything added so far; ``ranges`` are those of the vault."""
        mask = self._counts > 0
        return Rewards(
            ranges,
            self._nonzero,
            self._nonzero_steps,
            self._alike,
            self._stretch,
            self._sums[mask] / self._counts[mask],
        )


def _features(leaves: Statistics, field: str, vector: bool, lead: tuple[int, ...]) -> Ranges:
    """Return the statistics of the features of a vector, or of whole leaves ``(*lead, leaves)``."""
    if vector and field in leaves:
        return leaves[field].ranges
    pooled = [x.ranges.pooled() for name, x in leaves.items() if name.partition(".")[0] == field]
    return Ranges(
        *(np.reshape([values[i] for values in pooled], (*lead, len(pooled))) for i in range(6))
    )


def _of_agent(observation: Any, spec: EnvSpec, agent: int) -> Iterator[Any]:
    """Yield the leaves of one agent's observation."""
    leaves = spec.observation_leaves
    for path, array in flatten_tree(observation).items():
        agents = leaves[path].agents or range(spec.num_agents)
        if agent in agents:
            yield array[:, agents.index(agent)]


# -------------------------------------------------------------------------------- warnings

_MOST_GROUPS = 6
"""Groups of agents that are listed; the rest are counted."""


def data_warnings(contents: Survey) -> list[str]:
    """Return a sentence for each unusual or unknown property of a dataset."""
    if not contents.vault.num_steps:
        return ["The vault holds no steps."]
    return [
        *_of_recording(contents),
        *_of_episodes(contents),
        *_of_rewards(contents),
        *_of_actions(contents),
        *_of_views(contents),
        *_of_coverage(contents),
    ]


def warnings_by_dataset(surveys: Surveys) -> list[tuple[str, str]]:
    """Return the warnings of several datasets, each with the datasets that it applies to.

    The first item of a pair is empty if there is one dataset only.
    """
    about: dict[str, list[str]] = {}
    for name, contents in surveys.items():
        for text in data_warnings(contents):
            about.setdefault(text, []).append(name)
    several = len(surveys) > 1
    return [
        ("all" if len(names) == len(surveys) else ", ".join(names), text) if several else ("", text)
        for text, names in about.items()
    ]


def _of_recording(contents: Survey) -> Iterator[str]:
    vault = contents.vault
    if not vault.native:
        yield "Another program wrote the vault, without checksums to verify it against."
    for start, stop in vault.unverified:
        yield (
            f"Steps {start:,} to {stop:,} were appended by another program, without checksums or "
            "final observations."
        )
    if vault.provenance.get("complete") is False:
        yield "The recording was stopped before it was complete."
    for quirk in vault.quirks:
        yield f"{_sentence(quirk)}: {MEANINGS[quirk]}."
    yield from sentences(vault.provenance.get("faults"))
    if vault.spec.time_limit is None and _limit_was_unknown(vault.provenance):
        yield (
            f"{_sentence(LIMIT_UNKNOWN)}: the longest episodes of the source data are all "
            "flagged as terminated; if this is a time limit, make the vault again with "
            "--time-limit."
        )


def _limit_was_unknown(provenance: Any) -> bool:
    """Whether a vault was made from data that needs a time limit and was read without one."""
    return any(
        LIMIT_UNKNOWN in recorded_quirks(x) or _limit_was_unknown(x.get("provenance"))
        for x in sources_of(provenance)
    )


def _of_episodes(contents: Survey) -> Iterator[str]:
    episodes = contents.episodes
    for cause, words in (
        ("cut", "were cut off, by the end of the recording or before a fault"),
        ("open", "continue beyond the end of the data"),
    ):
        count = int((episodes.cause == cause).sum())
        if count == len(episodes.cause):
            yield f"All episodes {words}. No episode is complete, so no return is reported."
        elif count:
            yield (
                f"{count:,} of {len(episodes.cause):,} episodes {words}; the returns exclude them."
            )
    unknown = int((episodes.truncated & (episodes.final < 0)).sum())
    if unknown:
        yield (
            f"{unknown:,} truncated episodes have no final observation, so their last step cannot "
            "be bootstrapped."
        )
    if resets := _ends_that_begin(contents.vault):
        yield (
            f"{resets:,} episodes end with the observation that the next one begins with: the "
            "environment may have reset in its own step."
        )
    if episodes.without_return:
        yield (
            f"{episodes.without_return:,} complete episodes have no finite return; the returns "
            "exclude them."
        )
    for team, returns in contents.team_returns.items():
        if len(returns) > 1 and np.ptp(returns) == 0:
            of = f" of {team}" if len(contents.team_returns) > 1 else ""
            yield f"All episodes have the same return{of}, {returns[0]:.4g}."


def _ends_that_begin(vault: Dataset) -> int:
    """Return how many final observations, of up to a thousand, are the next episode's first."""
    table = vault.episodes
    follows = (table.final[:-1] >= 0) & (table.row[:-1] == table.row[1:])
    ids = np.flatnonzero(follows)[:1000]
    if vault.is_remote or not len(ids):
        return 0
    last = table.start[ids] + table.length[ids] - 1
    views = (
        vault.final_views(table.final[ids]),
        vault.window_transitions(table.row[ids + 1], table.start[ids + 1], 1).view,
        vault.window_transitions(table.row[ids], last, 1).view,
    )
    final, begin, before = (
        np.concatenate(
            [np.reshape(leaf, (len(ids), -1)) for leaf in flatten_tree(view.observation).values()],
            axis=1,
        )
        for view in views
    )
    return int(((final == begin).all(1) & (final != before).any(1)).sum())


def _of_rewards(contents: Survey) -> Iterator[str]:
    rewards = contents.rewards
    if rewards.ranges.not_finite.any():
        yield f"Rewards that are not finite: {int(rewards.ranges.not_finite.sum()):,}."
    if not rewards.nonzero_steps:
        yield "All rewards are zero."
    elif rewards.nonzero_steps < 0.05 * contents.vault.num_steps:
        share = rewards.nonzero_steps / contents.vault.num_steps
        yield f"Rewards are sparse: {share:.2%} of the steps have one."


def _of_actions(contents: Survey) -> Iterator[str]:
    actions, alive = contents.actions, max(int(contents.alive.sum()), 1)
    if isinstance(actions, ContinuousActions):
        if actions.ranges.not_finite.any():
            count = int(actions.ranges.not_finite.sum())
            yield f"Values of actions that are not finite: {count:,}."
        if (np.fmax(actions.ranges.high, -actions.ranges.low) > 1).any():
            low, high = np.nanmin(actions.ranges.low), np.nanmax(actions.ranges.high)
            yield f"Values of actions are not all in [-1, 1]: from {low:.4g} to {high:.4g}."
        share = actions.at_bounds.sum() / max(int(actions.ranges.finite.sum()), 1)
        if share > 0.1:
            yield f"{share:.1%} of the values of actions are at a bound or beyond."
        return
    if illegal := int(actions.illegal.sum()):
        yield f"Illegal actions taken: {illegal:,} ({illegal / alive:.2%})."
    never = (actions.legal > 0) & (actions.taken == 0)
    if never.any():
        yield f"Legal actions that were never taken: {_columns(never)}."


def _of_views(contents: Survey) -> Iterator[str]:
    observations, spec = contents.observations, contents.spec
    paths = [*spec.observation_leaves] if spec.observation else None
    states = [*spec.state_leaves] if spec.global_state else None
    used = np.ones(observations.low.shape, bool)
    if spec.is_vector and spec.observation_sizes is not None:
        used = np.arange(spec.observation_size) < np.array(spec.observation_sizes)[:, None]
    bad = observations.not_finite > 0
    if bad.any():
        count = int(observations.not_finite.sum())
        yield f"Observed values that are not finite: {count:,}, in features {_columns(bad, paths)}."
    if (constant := observations.constant & used).any():
        yield f"Constant features of the observation: {_columns(constant, paths)}."
    if contents.state.not_finite.any():
        bad = contents.state.not_finite > 0
        yield f"The state is not always finite, in features {_runs(bad, states)}."
    if (constant := contents.state.constant).any():
        yield f"Constant features of the state: {_runs(constant, states)}."


def _of_coverage(contents: Survey) -> Iterator[str]:
    if contents.coverage.states > 0.9 * contents.vault.num_steps > 90:
        yield (
            "Few states occur twice, so coverage, which compares states bit by bit, says little."
        )


def _columns(mask: Bool[np.ndarray, "N C"], names: Sequence[str] | None = None) -> str:
    """List columns, by agent if agents differ: "2, 4-7 (agent 0), 3 (agents 1-3)"."""
    groups: dict[str, list[int]] = {}
    for agent, columns in enumerate(mask):
        if columns.any():
            groups.setdefault(_runs(columns, names), []).append(agent)
    if len(groups) == 1 and len(next(iter(groups.values()))) == len(mask):
        return next(iter(groups))
    texts = [f"{columns} ({_agents(agents, len(mask))})" for columns, agents in groups.items()]
    excess = len(texts) - _MOST_GROUPS
    return ", ".join(texts[:_MOST_GROUPS]) + (f", and {excess} more groups" if excess > 0 else "")


def _agents(agents: Iterable[int], count: int) -> str:
    mask = np.isin(np.arange(count), list(agents))
    return f"agent{'s' if mask.sum() > 1 else ''} {_runs(mask)}"


def _runs(mask: Bool[np.ndarray, "n"], names: Sequence[str] | None = None) -> str:
    """List the indices that are true as ranges: "2, 4-7"; or the names of leaves."""
    if names:
        return ", ".join(name or "all" for name, flag in zip(names, mask, strict=True) if flag)
    edges = np.diff(mask.astype(np.int8), prepend=0, append=0)
    spans = zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1) - 1, strict=True)
    return ", ".join(f"{a}" if a == b else f"{a}-{b}" for a, b in spans)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]
