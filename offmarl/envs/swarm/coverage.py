"""Coverage: drones with short sight survey an area (or a volume).

A map of unit cells covers the arena. It holds the staleness of each cell: 0 while a drone's camera
covers it, then growing up to 1. The team's reward is the staleness it removes, so it must spread
out and return.
"""

import itertools
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, PRNGKeyArray

from offmarl.config import Positive
from offmarl.envs.swarm.env import Advanced, GrowingArena
from offmarl.envs.swarm.observations import Blocks, SwarmState, sense_map, watched_cells

_PATCH = {2: 5, 3: 3}
_REWARD_SCALE = 10.0


class CoverageTask(NamedTuple):
    """The map of the arena."""

    staleness: Float[Array, "*G"]


@dataclass(frozen=True, kw_only=True)
class Coverage(GrowingArena):
    """N drones survey a square (cubic) arena whose size grows with N.

    A drone's camera covers the four (eight) cells nearest to it.

    The team's reward is ten times the staleness removed in the step, averaged over all cells: one
    episode's return is at most ``10 (1 + time_limit / recovery_time)`` (30 by default), for any N.
    (SMAC's returns have this scale, and the temperatures and weights of offline methods are tuned
    for them.) Episodes are always truncated.

    In addition to the common parts, an agent observes ``map``: the staleness around it, 34 numbers,
    see `offmarl.envs.swarm.observations.sense_map`; its axes are those of the arena, also for
    unicycles. It broadcasts the mean staleness of the cells in its sight. The global state includes
    the whole map.

    Metrics: ``staleness``, the mean over all cells.

    Parameters
    ----------
    recovery_time
        Steps in which the staleness of a cell out of sight grows from 0 to 1.
    """

    recovery_time: Positive = 25.0

    def metrics(self, state: SwarmState) -> dict[str, Float[Array, ""]]:
        """Return the mean staleness."""
        return {"staleness": state.task.staleness.mean()}

    def _begin(self, key: PRNGKeyArray, state: SwarmState) -> CoverageTask:
        return CoverageTask((~watched_cells(state.drones.position, self.side)).astype(jnp.float32))

    def _advance(self, key: PRNGKeyArray, before: SwarmState, moved: SwarmState) -> Advanced:
        aged = jnp.minimum(before.task.staleness + 1 / self.recovery_time, 1.0)
        staleness = jnp.where(watched_cells(moved.drones.position, self.side), 0.0, aged)
        reward = jnp.full(self.num_agents, _REWARD_SCALE * (aged - staleness).mean())
        return moved._replace(task=CoverageTask(staleness)), reward, jnp.zeros((), bool)

    def _look(self, state: SwarmState) -> Float[Array, "N F"]:
        return sense_map(state.task.staleness, state.drones.position, _PATCH[self.dims])

    def _sense(self, measured: SwarmState) -> Blocks:
        return {"map": self._look(measured)}

    def _status(self, state: SwarmState) -> Float[Array, "N 1"]:
        sharp = _PATCH[self.dims] ** self.dims
        return self._look(state)[:, :sharp].mean(-1, keepdims=True)

    def _summary(self, state: SwarmState) -> Float[Array, "S"]:
        return state.task.staleness.ravel()

    def _cells(self, state: SwarmState) -> Float[Array, "*G"]:
        return state.task.staleness

    def _steer(self, see: Blocks) -> Float[Array, "N D"]:
        """Move towards the nearest stale cells; cells nearer to another drone count little."""
        size, dims = _PATCH[self.dims], self.dims
        sharp, blurred = _grid(size, dims), _grid(3, dims) * size
        cells = np.concatenate([sharp, blurred])
        weight = np.concatenate([np.ones(len(sharp)), np.full(len(blurred), size**dims / 4)])
        inner = np.concatenate([np.ones(len(sharp), bool), (blurred != 0).any(-1)])
        position = (see["own"][:, None, :dims] + 1) * self.side / 2
        cells = cells + jnp.floor(position) + 0.5 - position  # relative to the drone
        offsets = self._to_arena(see["own"], self._offsets(see["neighbours"]))
        known = see["neighbours"][..., -1:] > 0
        distance = jnp.abs(offsets[:, :, None] - cells[:, None]).sum(-1)
        taken = (known & (distance < jnp.abs(cells).sum(-1)[:, None])).any(1)
        worth = see["map"] * inner * weight * jnp.where(taken, 0.1, 1.0)
        velocity = self._to_arena(see["own"], see["own"][:, None, dims : 2 * dims])
        ahead = 0.5 * velocity + _moves(dims)
        off = jnp.abs(ahead[:, :, None] - cells[:, None]).max(-1)
        score = (worth[:, None] * jnp.exp(-1.2 * jnp.maximum(off - 0.5, 0.0))).sum(-1)
        target = (see["own"][:, None, :dims] + 1) * self.side / 2 + _moves(dims)
        score = jnp.where(((target >= 0) & (target <= self.side)).all(-1), score, -1.0)
        best = jnp.asarray(_moves(dims))[score.argmax(-1)]
        return self._from_arena(see["own"], best[:, None])[:, 0]


def _grid(size: int, dims: int) -> Float[np.ndarray, "C D"]:
    """Return offsets of the cells of a block around its centre, the last axis fastest."""
    axis = np.arange(size, dtype=np.float32) - size // 2
    return np.array(list(itertools.product(axis, repeat=dims)))


def _moves(dims: int) -> Float[np.ndarray, "A D"]:
    axes = np.eye(dims, dtype=np.float32)
    return np.concatenate([axes, -axes])
