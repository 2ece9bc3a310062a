"""Flock: drones fly to a beacon together, through obstacles and wind."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl.config import Positive, PositiveInt
from offmarl.envs.base import MARKS
from offmarl.envs.swarm import dynamics
from offmarl.envs.swarm.dynamics import DroneState, length_of, steer_around
from offmarl.envs.swarm.env import Advanced, SwarmEnv
from offmarl.envs.swarm.neighbours import find_neighbours, find_points
from offmarl.envs.swarm.observations import Blocks, SwarmState
from offmarl.envs.swarm.options import Obstacles, Range

_MATES = 2
_TOGETHER = 3.0
_TOO_CLOSE = 0.5
_TOUCH = 0.01
_PROGRESS_REWARD = 25.0
_COLLISION_PENALTY = 12.5
_SPACING = 1.5


class FlockTask(NamedTuple):
    """The flock's beacon and how well it stays together."""

    beacon: Float[Array, "D"]
    together: Float[Array, ""]
    """Mean togetherness of the drones."""
    collided: Float[Array, ""]
    """Fraction of the drones that collided."""


@dataclass(frozen=True, kw_only=True)
class Flock(SwarmEnv):
    """N drones start in a bunch on one side of the arena and fly to a beacon on the other.

    Obstacles lie between, and by default there is wind. A drone's progress is the decrease of its
    distance to the beacon in the step, at most 1; within the arrival distance of the beacon it
    is 1. Its togetherness is 0, a half or 1: the fraction of 2 others (N - 1 if that is less) that
    are within 3 cells. It collides if it flies into an obstacle or comes within 0.5 cells of
    another drone. (If drones collide with each other, which `collisions` sets, these collisions
    count, and nearness does not.)

    The team's reward is the mean over the drones of ``25 / time_limit`` times progress times
    togetherness, minus ``12.5 / time_limit`` for a collision: one episode's return is at most 25
    for any N. Episodes are always truncated.

    In addition to the common parts, an agent observes the ``beacon``: the way to it in cells,
    shorter than 1, and the distance over the arena's side. It broadcasts whether it is in touch
    with an obstacle. The global state holds the beacon's position.

    Metrics: ``together``, ``collided`` and ``distance``: means over the drones; the last is from
    the beacon, over the way from start to beacon.

    Parameters
    ----------
    journey
        Cells between the middle of the bunch and the beacon.
    """

    journey: Positive = 40.0
    time_limit: PositiveInt = 60
    sensing_range: Range = 4.0
    comm_range: Range = 4.0
    randomise: str = "wind"
    obstacles: Obstacles = 0.08

    @property
    def side(self) -> int:
        """Cells along one side of the arena: the journey and space for the bunch at both ends."""
        return round(self.journey + 4 * self._radius)

    @property
    def _radius(self) -> float:
        """Half the side of the square (cube) in which the flock starts."""
        return _SPACING / 2 * self.num_agents ** (1 / self.dims)

    def metrics(self, state: SwarmState) -> dict[str, Float[Array, ""]]:
        """Return means over the drones: together, collided, distance from the beacon."""
        distance = length_of(state.task.beacon - state.drones.position).mean() / self.journey
        return {
            "together": state.task.together,
            "collided": state.task.collided,
            "distance": distance,
        }

    def _spawn(self, key: PRNGKeyArray) -> DroneState:
        """Place the drones in a bunch, uniformly at random."""
        bunch_key, course_key = jax.random.split(key)
        bunch = jax.random.uniform(
            bunch_key, (self.num_agents, self.dims), minval=-self._radius, maxval=self._radius
        )
        direction = jax.random.normal(course_key, (self.dims,))
        course = self.journey / 2 * direction / jnp.maximum(length_of(direction), 1e-6)
        return dynamics.at_rest(self.side / 2 - course + bunch)

    def _begin(self, key: PRNGKeyArray, state: SwarmState) -> FlockTask:
        beacon = self.side - state.drones.position.mean(0)  # opposite of the bunch
        together, _ = self._company(state)
        return FlockTask(beacon, together.mean(), jnp.zeros(()))

    def _company(self, state: SwarmState) -> tuple[Float[Array, "N"], Bool[Array, "N"]]:
        """Return each drone's togetherness, and whether it is too close to another."""
        mates = min(_MATES, self.num_agents - 1)
        if not mates:
            return jnp.ones(1), jnp.zeros(1, bool)
        near = find_neighbours(state.drones.position, state.alive, mates, _TOGETHER, self.side)
        together = (near.distance <= _TOGETHER).mean(-1, dtype=jnp.float32)
        return together, near.distance[:, 0] < _TOO_CLOSE

    def _advance(self, key: PRNGKeyArray, before: SwarmState, moved: SwarmState) -> Advanced:
        beacon = before.task.beacon
        distance = length_of(beacon - moved.drones.position)
        gained = jnp.clip(length_of(beacon - before.drones.position) - distance, -1.0, 1.0)
        progress = jnp.where(distance <= self._arrival, 1.0, gained)
        together, close = self._company(moved)
        close = close if moved.collided is None else moved.collided
        collided = (self._touching(moved) | close).astype(jnp.float32)
        score = _PROGRESS_REWARD * progress * together - _COLLISION_PENALTY * collided
        reward = jnp.full(self.num_agents, score.mean() / self.time_limit)
        task = FlockTask(beacon, together.mean(), collided.mean())
        return moved._replace(task=task), reward, jnp.zeros((), bool)

    @property
    def _arrival(self) -> float:
        """Distance from the beacon that leaves space for all drones."""
        return 2.0 + self._radius

    def _sense(self, measured: SwarmState) -> Blocks:
        return {"beacon": self._sense_way(measured, measured.task.beacon)}

    def _touching(self, state: SwarmState) -> Bool[Array, "N"]:
        """Return which drones touch an obstacle, as after flying into one."""
        if state.obstacles is None:
            return jnp.zeros(self.num_agents, bool)
        reach = dynamics.OBSTACLE_RADIUS + _TOUCH
        near = find_points(state.drones.position, state.obstacles, 1, reach, self.side)
        return jnp.isfinite(near.distance[:, 0])

    def _status(self, state: SwarmState) -> Float[Array, "N 1"]:
        return self._touching(state)[:, None].astype(jnp.float32)

    def _summary(self, state: SwarmState) -> Float[Array, "S"]:
        return 2 * state.task.beacon / self.side - 1

    def _marks(self, state: SwarmState) -> tuple[Float[Array, "Q D"], Int[Array, "Q"]]:
        return state.task.beacon[None], jnp.full(1, MARKS.index("beacon"))

    def _steer(self, see: Blocks) -> Float[Array, "N D"]:
        """Fly to the beacon, around obstacles, neither too near to the others nor too far."""
        offset, known = self._offsets(see["neighbours"]), see["neighbours"][..., -1:] > 0
        distance = jnp.maximum(length_of(offset, keepdims=True), 0.1)
        apart = jnp.where(known & (distance < 1.2), -offset / distance**2, 0.0).sum(1)
        mean = offset.sum(1) / jnp.maximum(known.sum(1), 1)
        straggling = jnp.maximum(length_of(mean, keepdims=True) - 1.5, 0.0)
        desired = see["beacon"][:, : self.dims] + 0.6 * apart + 0.6 * straggling * mean
        if "obstacles" in see:
            obstacles = see["obstacles"]
            desired = desired + steer_around(self._offsets(obstacles), obstacles[..., -1:], desired)
        return 2 * desired
