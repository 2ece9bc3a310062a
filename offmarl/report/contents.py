"""What a dataset holds, gone through once, in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from offmarl.report.actions import Actions, actions_over
from offmarl.report.counting import Distinct, entropy, hash_rows
from offmarl.report.ranges import Ranges, RangesOver
from offmarl.types import EnvSpec, Transition, View
from offmarl.vault import Dataset, Episodes
from offmarl.vault.digest import digest
from offmarl.vault.progress import Progress, quiet

LENGTHS = (5, 10, 20, 50, 100)
"""Lengths of windows that are looked at."""

_STRETCHES = 60
"""Parts that the time of an episode is divided into, at most."""


class Coverage(NamedTuple):
    """How much of what can be seen and done is in the data.

    Counts are exact up to a million distinct ones, and within about a thousandth beyond.
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
    """Of joint actions, in bits; None where there are too many of them to tell."""
    repeats: Int[np.ndarray, "R 2"]
    """How often a pair occurs, and how many (state, joint action) pairs occur so often."""
    exact: bool
    """Whether all of these were counted, not estimated."""


class Rewards(NamedTuple):
    """What was paid."""

    ranges: Ranges
    """``(N,)``"""
    nonzero: Int[np.ndarray, "N"]
    """Steps with a reward other than zero."""
    nonzero_steps: int
    """Those with one for any agent."""
    alike: bool
    """Whether all agents always got the same."""
    stretch: int
    """Steps of an episode's time that a point of the curve stands for."""
    curve: Float[np.ndarray, "P"]
    """Mean reward, over agents too, of the steps that far from their episode's start."""


class Windows(NamedTuple):
    """What training on windows of one length would draw from."""

    length: int
    total: int
    """Windows that start anywhere in an episode; one of each episode that is shorter."""
    padded: float
    """Share of their steps that are only there to fill up."""
    short_episodes: int
    crossing: float
    """Share of the windows of a flat time axis that would cross the end of an episode."""


class Survey(NamedTuple):
    """Everything ``offmarl report`` shows of one vault."""

    vault: Dataset
    digest: str
    episodes: Episodes
    observations: Ranges
    """``(N, O)``, while the agent was alive."""
    state: Ranges
    """``(S,)``"""
    actions: Actions
    rewards: Rewards
    coverage: Coverage
    alive: Int[np.ndarray, "N"]
    """Steps at which each agent was alive."""
    log_probs: int
    """Actions of agents that were alive whose log-probability is known."""

    @property
    def spec(self) -> EnvSpec:
        """The environment's sizes."""
        return self.vault.spec

    @property
    def returns(self) -> Float[np.ndarray, "K"]:
        """Returns of the complete episodes that have one, the mean over agents."""
        return self.episodes.complete_returns

    @property
    def lengths(self) -> Int[np.ndarray, "C"]:
        """Steps of the complete episodes."""
        return self.episodes.length[self.episodes.complete]

    @property
    def saco(self) -> float | None:
        """Joint state-action coverage: distinct pairs among all; None without any.

        As OG-MARL has it (Formanek et al., *Putting Data at the Centre of Offline Multi-Agent
        Reinforcement Learning*, 2024), after Schweighofer et al., *A Dataset Perspective on Offline
        Reinforcement Learning* (2022).
        """
        return self.coverage.pairs / self.vault.num_steps if self.vault.num_steps else None

    def windows(self, length: int) -> Windows:
        """Return what windows of some steps there are to draw."""
        lengths = self.episodes.length
        count = int((np.maximum(lengths - length, 0) + 1).sum())
        missing = int(np.maximum(length - lengths, 0).sum())
        flat = self.vault.rows * max(self.vault.length - length + 1, 0)
        inside = int(np.maximum(lengths - length + 1, 0).sum())
        return Windows(
            length,
            count,
            padded=missing / (count * length) if count else 0.0,
            short_episodes=int((lengths < length).sum()),
            crossing=1 - inside / flat if flat else 0.0,
        )


def survey(vault: Dataset, progress: Progress = quiet) -> Survey:
    """Go through a vault and return what it holds.

    Read twice, a block at a time: for the statistics, and for the digest.

    Parameters
    ----------
    vault
        Of any program.
    progress
        Shows how far it is.

    Raises
    ------
    VaultError
        The vault cannot be read, or is damaged.
    """
    gathered = _Gathered(vault)
    with progress(f"read {vault.uid}", 2 * vault.length) as advance:
        for begin, stop in vault.blocks():
            gathered.add(begin, vault.transitions(begin, stop))
            advance(stop - begin)
        return gathered.survey(digest(vault, advance))


class _Gathered:
    """What is known of the blocks so far."""

    def __init__(self, vault: Dataset):
        spec = vault.spec
        self._vault = vault
        self._observations = RangesOver(spec.num_agents, spec.observation_size)
        self._state = RangesOver(spec.state_size)
        self._actions = actions_over(spec)
        self._rewards = _RewardsOver(vault)
        self._pairs, self._states, self._local, self._joint = (Distinct() for _ in range(4))
        self._alive = np.zeros(spec.num_agents, np.int64)
        self._log_probs = 0

    def add(self, begin: int, block: Transition) -> None:
        """Add a block of steps ``(B, T, ...)``."""
        self._rewards.add(begin, block.reward)
        steps = _flat(block)
        alive = steps.view.alive
        self._observations.add(steps.view.observation, alive[..., None])
        self._state.add(steps.view.state)
        self._actions.add(steps)
        self._alive += alive.sum(0)
        self._log_probs += int((np.isfinite(steps.behaviour_log_prob) & alive).sum())
        self._cover(steps)

    def _cover(self, steps: Transition) -> None:
        self._pairs.add(hash_rows(steps.view.state, steps.action))
        self._states.add(hash_rows(steps.view.state))
        self._joint.add(hash_rows(steps.action))
        for agent in range(steps.view.alive.shape[1]):
            alive = steps.view.alive[:, agent]
            seen, done = steps.view.observation[:, agent], np.asarray(steps.action)[:, agent]
            self._local.add(hash_rows(seen[alive], done[alive]))

    def survey(self, digest: str) -> Survey:
        """Return all of it."""
        return Survey(
            self._vault,
            digest,
            self._vault.episodes,
            self._observations.ranges,
            self._state.ranges,
            self._actions.actions,
            self._rewards.rewards,
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


class _RewardsOver:
    """Gathers `Rewards` over the blocks of a vault."""

    def __init__(self, vault: Dataset):
        agents = vault.spec.num_agents
        self._length, self._rows = vault.length, np.arange(vault.rows)[:, None]
        self._starts = vault.episodes.row * vault.length + vault.episodes.start
        longest = int(vault.episodes.length.max(initial=1))
        self._stretch = -(-longest // _STRETCHES)
        points = -(-longest // self._stretch)
        self._sums, self._counts = np.zeros(points), np.zeros(points)
        self._ranges = RangesOver(agents)
        self._nonzero, self._nonzero_steps, self._alike = np.zeros(agents, np.int64), 0, True

    def add(self, begin: int, reward: Any) -> None:
        """Add the rewards of a block, ``(B, T, N)``."""
        self._ranges.add(reward.reshape(-1, reward.shape[-1]))
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

    @property
    def rewards(self) -> Rewards:
        """What was gathered so far."""
        there = self._counts > 0
        return Rewards(
            self._ranges.ranges,
            self._nonzero,
            self._nonzero_steps,
            self._alike,
            self._stretch,
            self._sums[there] / self._counts[there],
        )


def _flat(block: Transition) -> Transition:
    """Return the steps of all rows, ``(n, ...)``."""

    def flatten(record: Any) -> Iterator[Any]:
        for leaf in record:
            yield View(*flatten(leaf)) if isinstance(leaf, View) else _joined(leaf)

    return Transition(*flatten(block))


def _joined(leaf: Any) -> Any:
    return leaf.reshape(-1, *leaf.shape[2:])
