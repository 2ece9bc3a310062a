"""A survey of a dataset's contents, computed in one pass and bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from offmarl.report.accumulators import (
    Actions,
    Distinct,
    actions_of,
    entropy,
    hash_rows,
)
from offmarl.terminal import Progress, quiet
from offmarl.types import EnvSpec, Transition, flatten_tree, map_tree
from offmarl.vault import Dataset, Episodes
from offmarl.vault.column_statistics import Ranges
from offmarl.vault.digest import known_digest
from offmarl.vault.leaf_statistics import Statistics, StatisticsAccumulator, keep, stored

LENGTHS = (5, 10, 20, 50, 100)
"""Window lengths that `Survey.windows` is reported for."""

_STRETCHES = 60
"""Maximum number of points of the reward curve."""


class Coverage(NamedTuple):
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


class Windows(NamedTuple):
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
    coverage: Coverage
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

    def windows(self, length: int) -> Windows:
        """Return the windows of ``length`` steps that training would draw from."""
        lengths = self.episodes.length
        count = int((lengths + 1).sum())
        # These begin at one of an episode's steps and stop before the next episode's first, or
        # begin at the slot that ends an episode and hold steps of the next one only.
        before_its_end = int(np.maximum(lengths - length + 2, 0).clip(max=lengths).sum())
        after_an_end = int((lengths >= length - 2).sum())
        single = min(before_its_end + after_an_end, count)
        return Windows(
            length,
            count,
            padded=len(lengths) / count if count else 0.0,
            short_episodes=int((lengths < length).sum()),
            crossing=1 - single / count if count else 0.0,
        )


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
    accumulator, leaves = StatsAccumulator(vault), stored(vault)
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
            keep(vault, leaves)
        assert leaves is not None
        return accumulator.survey(known_digest(vault, advance), leaves)


class StatsAccumulator:
    """Accumulates a `Survey` over the blocks of a vault."""

    def __init__(self, vault: Dataset):
        spec = vault.spec
        self._vault = vault
        self._actions = actions_of(spec)
        self._rewards = _RewardsAccumulator(vault)
        self._pairs, self._states, self._local, self._joint = (Distinct() for _ in range(4))
        self._alive = np.zeros(spec.num_agents, np.int64)
        self._log_probs = 0

    def add(self, begin: int, block: Transition) -> None:
        """Add a block of steps ``(B, T, ...)``."""
        self._rewards.add(begin, block.reward)
        steps = _flat(block)
        alive = steps.view.alive
        self._actions.add(steps)
        self._alive += alive.sum(0)
        self._log_probs += int((np.isfinite(steps.behaviour_log_prob) & alive).sum())
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
        return Survey(
            self._vault,
            digest,
            self._vault.episodes,
            _features(leaves, "observation", self._vault.spec.observation is None, (1,)),
            _features(leaves, "state", self._vault.spec.global_state is None, ()),
            self._actions,
            self._rewards.rewards(leaves["reward"].ranges),
            self._coverage(),
            self._alive,
            self._log_probs,
        )

    def _coverage(self) -> Coverage:
        often, many = np.unique(self._pairs.occurrences, return_counts=True)
        counted = (self._pairs, self._states, self._local, self._joint)
        return Coverage(
            self._pairs.count,
            self._states.count,
            self._local.count,
            self._local.total,
            self._joint.count,
            entropy(self._joint.occurrences) if self._joint.exact else None,
            np.stack([often, many * self._pairs.weight], 1),
            all(one.exact for one in counted),
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
        some = self._counts > 0
        return Rewards(
            ranges,
            self._nonzero,
            self._nonzero_steps,
            self._alike,
            self._stretch,
            self._sums[some] / self._counts[some],
        )


def _features(leaves: Statistics, field: str, vector: bool, lead: tuple[int, ...]) -> Ranges:
    """Return the statistics of the features of a vector, or of whole leaves ``(*lead, leaves)``."""
    if vector and field in leaves:
        return leaves[field].ranges
    found = [_pooled(x.ranges) for name, x in leaves.items() if name.partition(".")[0] == field]
    return Ranges(*(np.reshape([one[i] for one in found], (*lead, len(found))) for i in range(6)))


def _pooled(ranges: Ranges) -> tuple[float, ...]:
    """Return the statistics of all entries of a leaf together."""
    low, high, mean, std, count, not_finite = map(np.ravel, ranges)
    some = count > 0
    if not some.any():
        return (np.nan,) * 4 + (0, int(not_finite.sum()))
    weights = count[some] / count.sum()
    centre = (mean[some] * weights).sum()
    spread = (weights * (std[some] ** 2 + (mean[some] - centre) ** 2)).sum() ** 0.5
    ends = float(low[some].min()), float(high[some].max())
    return (*ends, float(centre), float(spread), int(count.sum()), int(not_finite.sum()))


def _of_agent(observation: Any, spec: EnvSpec, agent: int) -> Iterator[Any]:
    """Yield the leaves of one agent's observation."""
    leaves = spec.observation_leaves
    for path, array in flatten_tree(observation).items():
        agents = leaves[path].agents or range(spec.num_agents)
        if agent in agents:
            yield array[:, agents.index(agent)]


def _flat(block: Transition) -> Transition:
    """Return the steps of all rows, ``(n, ...)``."""
    count = block.last.size
    flat: Transition = map_tree(lambda leaf: leaf.reshape(count, *leaf.shape[2:]), block)
    return flat
