"""What agents did: which actions, which were legal, and how far they depend on one another."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from offmarl.report.counting import entropy
from offmarl.report.ranges import Ranges, RangesOver
from offmarl.types import Discrete, EnvSpec, Transition

BINS = 40
"""Of the histograms of continuous actions, from -1 to 1; what lies outside is in the outermost."""

_MOST_PAIRED = 128
"""Actions of all agents together up to which pairs of them are counted: it costs their square."""
_ROWS = 2**13


class DiscreteActions(NamedTuple):
    """How often agents that were alive took, and might have taken, each action."""

    taken: Int[np.ndarray, "N A"]
    legal: Int[np.ndarray, "N A"]
    """Steps at which the action was legal."""
    steps: Int[np.ndarray, "N"]
    """Steps at which the agent was alive."""
    illegal: Int[np.ndarray, "N"]
    """Actions taken that were not legal, or that there are not at all."""
    together: Int[np.ndarray, "N A N A"] | None
    """How often two agents, both alive, took an action each; None where there are too many."""

    @property
    def entropy(self) -> Float[np.ndarray, "N"]:
        """Of each agent's actions, in bits."""
        return np.array([entropy(counts) for counts in self.taken])

    @property
    def information(self) -> Float[np.ndarray, "N N"] | None:
        """Mutual information of two agents' actions, in bits; 0 on the diagonal."""
        if self.together is None:
            return None
        agents = range(len(self.taken))
        return np.array([[self._information(i, j) for j in agents] for i in agents])

    def _information(self, first: int, second: int) -> float:
        if self.together is None or first == second:
            return 0.0
        pairs = self.together[first, :, second]
        return max(0.0, entropy(pairs.sum(1)) + entropy(pairs.sum(0)) - entropy(pairs))


class ContinuousActions(NamedTuple):
    """What values the actions of agents that were alive had, dimension by dimension."""

    ranges: Ranges
    """``(N, A)``"""
    histogram: Int[np.ndarray, "N A bins"]
    steps: Int[np.ndarray, "N"]
    """Steps at which the agent was alive."""
    legal: Int[np.ndarray, "N A"]
    """Steps at which it might use the dimension."""
    at_bounds: Int[np.ndarray, "N A"]
    """Values that are 1 or -1, or beyond."""


Actions = DiscreteActions | ContinuousActions


class DiscreteActionsOver:
    """Gathers `DiscreteActions` over parts of the data."""

    def __init__(self, spec: EnvSpec):
        self._shape = (spec.num_agents, spec.num_actions)
        self._taken, self._legal = np.zeros(self._shape, np.int64), np.zeros(self._shape, np.int64)
        self._steps = np.zeros(spec.num_agents, np.int64)
        self._illegal = np.zeros(spec.num_agents, np.int64)
        size = spec.num_agents * spec.num_actions
        # The last place is for whoever does nothing.
        pairs = np.zeros((size + 1, size + 1), np.int64)
        self._together = pairs if size <= _MOST_PAIRED else None

    def add(self, steps: Transition) -> None:
        """Add steps ``(n, ...)``."""
        action = np.asarray(steps.action).reshape(-1, self._shape[0])
        for begin in range(0, len(action), _ROWS):
            piece = slice(begin, begin + _ROWS)
            view = steps.view
            self._add(action[piece], view.alive[piece], view.legal_actions[piece])

    def _add(self, action: Any, alive: Any, legal: Any) -> None:
        agents, actions = self._shape
        known = (action >= 0) & (action < actions)
        safe = np.where(known, action, 0)
        allowed = known & np.take_along_axis(legal, safe[..., None], -1)[..., 0]
        took = alive & known
        size = agents * actions
        place = np.where(took, np.arange(agents) * actions + safe, size)
        counts = np.bincount(place.ravel(), minlength=size + 1)[:size]
        self._taken += counts.reshape(self._shape)
        self._legal += (legal & alive[..., None]).sum(0)
        self._steps += alive.sum(0)
        self._illegal += (alive & ~allowed).sum(0)
        if self._together is not None:
            for agent in range(agents):
                pairs = place[:, agent, None] * (size + 1) + place
                counts = np.bincount(pairs.ravel(), minlength=(size + 1) ** 2)
                self._together += counts.reshape(size + 1, size + 1)

    @property
    def actions(self) -> DiscreteActions:
        """What was gathered so far."""
        together = None
        if self._together is not None:
            together = self._together[:-1, :-1].reshape(2 * self._shape)
        return DiscreteActions(self._taken, self._legal, self._steps, self._illegal, together)


class ContinuousActionsOver:
    """Gathers `ContinuousActions` over parts of the data."""

    def __init__(self, spec: EnvSpec):
        self._shape = (spec.num_agents, spec.action_size)
        self._ranges = RangesOver(*self._shape)
        self._histogram = np.zeros((*self._shape, BINS), np.int64)
        self._steps = np.zeros(spec.num_agents, np.int64)
        self._legal, self._bounds = (np.zeros(self._shape, np.int64) for _ in range(2))

    def add(self, steps: Transition) -> None:
        """Add steps ``(n, ...)``."""
        action = np.asarray(steps.action).reshape(-1, *self._shape)
        alive = steps.view.alive
        usable = alive[..., None] & steps.view.legal_actions
        self._ranges.add(action, alive[..., None])
        self._steps += alive.sum(0)
        self._legal += usable.sum(0)
        for begin in range(0, len(action), _ROWS):
            piece = slice(begin, begin + _ROWS)
            self._count(action[piece], alive[piece, :, None] & np.isfinite(action[piece]))

    def _count(self, action: Any, there: Any) -> None:
        bins = np.floor((np.where(there, action, 0) + 1) * (BINS / 2))
        bins = np.clip(bins, 0, BINS - 1).astype(np.int64)
        columns = np.arange(self._bounds.size).reshape(self._shape)
        place = (columns * BINS + bins)[there]
        counts = np.bincount(place, minlength=self._histogram.size)
        self._histogram += counts.reshape(self._histogram.shape)
        self._bounds += (there & (np.abs(action) >= 1)).sum(0)

    @property
    def actions(self) -> ContinuousActions:
        """What was gathered so far."""
        ranges = self._ranges.ranges
        return ContinuousActions(ranges, self._histogram, self._steps, self._legal, self._bounds)


def actions_over(spec: EnvSpec) -> DiscreteActionsOver | ContinuousActionsOver:
    """Return what gathers statistics of an environment's actions."""
    if isinstance(spec.action, Discrete):
        return DiscreteActionsOver(spec)
    return ContinuousActionsOver(spec)
