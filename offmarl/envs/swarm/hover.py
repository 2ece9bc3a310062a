"""Hover: quadrotors fly to goals of their own and stay there, without collisions."""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl.config import Positive
from offmarl.envs.base import MARKS, ActionKind
from offmarl.envs.swarm import dynamics
from offmarl.envs.swarm.dynamics import length_of, steer_around
from offmarl.envs.swarm.env import Advanced, GrowingArena
from offmarl.envs.swarm.observations import Blocks, SwarmState
from offmarl.envs.swarm.options import Collisions, Dims, Dynamics

_NEAR = 0.5
_SLOW = 0.25
_GOAL_GAP = 2.0
_GOAL_SPACE = 0.75
"""Distance between a goal and the surface of an obstacle."""
_HOVER_REWARD = 20.0
_PROGRESS_REWARD = 5.0
_COLLISION_PENALTY = 10.0


class HoverTask(NamedTuple):
    """The goals, and how many drones hover at theirs."""

    goal: Float[Array, "N D"]
    hovers: Bool[Array, "N"]


@dataclass(frozen=True, kw_only=True)
class Hover(GrowingArena):
    """N drones, by default quadrotors that collide elastically, fly to goals and hover there.

    Each drone has a goal of its own, outside of obstacles; where there is room, it is 2 cells from
    other goals and 0.75 from the surface of the nearest obstacle. The drone hovers if it is within
    0.5 cells of its goal and slower than 0.25 cells per step.

    The team's reward is ``20 / time_limit`` times the fraction of drones that hover, plus 5 times
    the decrease of the mean distance to the goals over the arena's side, minus ``10 / time_limit``
    times the fraction of drones that collided with another: one episode's return is below 25 for
    any N. Episodes are always truncated.

    In addition to the common parts, an agent observes its ``goal``: the way to it in cells, shorter
    than 1 (the direction from there on), and the distance over the arena's side. It broadcasts
    whether it hovers. The global state holds the goals, and who hovers.

    Metrics: ``hovers``, ``collided`` and ``distance`` (from the goal, in cells): means over the
    drones.
    """

    cells_per_agent: Positive = 128.0
    dims: Dims = 3
    dynamics: Dynamics = "quadrotor"
    action: ActionKind = "continuous"
    collisions: Collisions = "elastic"

    def metrics(self, state: SwarmState) -> dict[str, Float[Array, ""]]:
        """Return means over the drones: hovers, collided, distance from the goal."""
        return {
            "hovers": state.task.hovers.mean(dtype=jnp.float32),
            "collided": self._collided(state),
            "distance": length_of(state.task.goal - state.drones.position).mean(),
        }

    def _collided(self, state: SwarmState) -> Float[Array, ""]:
        """Return the fraction of drones that collided in the last step."""
        return jnp.zeros(()) if state.collided is None else state.collided.mean(dtype=jnp.float32)

    def _begin(self, key: PRNGKeyArray, state: SwarmState) -> HoverTask:
        goal = dynamics.scatter(key, self.num_agents, self.side, self.dims, _GOAL_GAP)
        if state.obstacles is not None:
            points, radius = dynamics.at_rest(goal), dynamics.OBSTACLE_RADIUS + _GOAL_SPACE
            goal = dynamics.keep_out(points, state.obstacles, self.side, radius).position
        return HoverTask(goal, self._hovers(state, goal))

    def _hovers(self, state: SwarmState, goal: Float[Array, "N D"]) -> Bool[Array, "N"]:
        near = length_of(goal - state.drones.position) <= _NEAR
        return near & (length_of(state.drones.velocity) <= _SLOW)

    def _advance(self, key: PRNGKeyArray, before: SwarmState, moved: SwarmState) -> Advanced:
        goal = before.task.goal
        old, new = (length_of(goal - state.drones.position).mean() for state in (before, moved))
        hovers = self._hovers(moved, goal)
        score = _HOVER_REWARD * hovers.mean(dtype=jnp.float32)
        score -= _COLLISION_PENALTY * self._collided(moved)
        reward = score / self.time_limit + _PROGRESS_REWARD * (old - new) / self.side
        after = moved._replace(task=HoverTask(goal, hovers))
        return after, jnp.full(self.num_agents, reward), jnp.zeros((), bool)

    def _sense(self, measured: SwarmState) -> Blocks:
        return {"goal": self._sense_way(measured, measured.task.goal)}

    def _status(self, state: SwarmState) -> Float[Array, "N 1"]:
        return state.task.hovers[:, None].astype(jnp.float32)

    def _summary(self, state: SwarmState) -> Float[Array, "S"]:
        goal = 2 * state.task.goal / self.side - 1
        return jnp.concatenate([goal, state.task.hovers[:, None]], -1).ravel()

    def _marks(self, state: SwarmState) -> tuple[Float[Array, "Q D"], Int[Array, "Q"]]:
        return state.task.goal, jnp.full(self.num_agents, MARKS.index("site"))

    def _steer(self, see: Blocks) -> Float[Array, "N D"]:
        """Fly to the goal, slower when near, away from near drones and around obstacles."""
        goal, dims = see["goal"], self.dims
        distance = goal[:, dims:] * self.side
        direction = goal[:, :dims] / jnp.maximum(jnp.minimum(distance, 1.0), 1e-6)
        desired = direction * jnp.minimum(0.3 * distance, 1.0)
        offset, known = self._offsets(see["neighbours"]), see["neighbours"][..., -1:] > 0
        gap = jnp.maximum(length_of(offset, keepdims=True), 0.1)
        apart = jnp.where(known & (gap < 1.5), -offset / gap**2, 0.0).sum(1)
        desired = desired + 0.5 * apart
        if "obstacles" in see:
            obstacles = see["obstacles"]
            aside = steer_around(self._offsets(obstacles), obstacles[..., -1:], desired)
            desired = desired + aside * jnp.minimum(distance, 1.0)
        return desired
