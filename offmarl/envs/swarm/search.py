"""Search: drones find wandering targets and stay with them.

Drones of enough strength next to a target hold it. Scouts see far and are fast, but holding a
target takes two scouts or one lifter.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl.config import Positive
from offmarl.envs.base import MARKS
from offmarl.envs.swarm.dynamics import length_of
from offmarl.envs.swarm.env import Advanced, GrowingArena
from offmarl.envs.swarm.neighbours import Points, reduce_within
from offmarl.envs.swarm.observations import Blocks, SwarmState

_HOLD_RANGE = 1.5
_HOLD_STRENGTH = 2.0
_TARGET_SPEED = 0.4
_TARGET_TURN = 0.3
"""Standard deviation of the change of a target's velocity per step, as a fraction of speed."""
_TARGETS_SEEN = 3
_FIND_REWARD = 5.0
_HOLD_REWARD = 20.0


class SearchTask(NamedTuple):
    """The targets."""

    position: Float[Array, "M D"]
    velocity: Float[Array, "M D"]
    found: Bool[Array, "M"]
    """Whether any drone has seen it."""
    strength: Float[Array, "M"]
    """Total strength of the drones next to it."""


@dataclass(frozen=True, kw_only=True)
class Search(GrowingArena):
    """N drones, alternately scouts and lifters, look for targets and hold them.

    There is one target for every two drones, rounded up. A target moves 0.4 cells a step, turns at
    random, and turns back at walls. It is found when a drone first sees it; with ``opaque``, only
    the 3 nearest ones that a drone sees count. It is held in a step if the drones within 1.5 cells
    of it have a total strength of 2: one lifter or standard drone, or two scouts. A drone counts
    for every target that it is next to.

    The team's reward is 5 times the fraction of targets found in the step, and ``20 / time_limit``
    times the fraction held: one episode's return is at most 25 for any N. Episodes are always
    truncated.

    In addition to the common parts, an agent observes the 3 nearest ``targets`` in sight (each:
    relative position, relative velocity, strength next to it over the strength needed, 1). It
    broadcasts the relative position (in cells over 10) of the nearest target it sees, whether it
    needs more strength, and whether there is one. The global state holds the targets' positions,
    velocities, strengths, and whether found.

    Metrics: ``found`` and ``held``, fractions of the targets.
    """

    cells_per_agent: Positive = 64.0
    heterogeneous: bool = True

    @property
    def num_targets(self) -> int:
        """Number of targets: M."""
        return -(-self.num_agents // 2)

    def metrics(self, state: SwarmState) -> dict[str, Float[Array, ""]]:
        """Return the fractions of targets found so far and held now."""
        held = state.task.strength >= _HOLD_STRENGTH
        return {
            "found": state.task.found.mean(dtype=jnp.float32),
            "held": held.mean(dtype=jnp.float32),
        }

    def _begin(self, key: PRNGKeyArray, state: SwarmState) -> SearchTask:
        place_key, course_key = jax.random.split(key)
        shape = (self.num_targets, self.dims)
        position = jax.random.uniform(place_key, shape, maxval=self.side)
        velocity = _TARGET_SPEED * _unit(jax.random.normal(course_key, shape))
        none = jnp.zeros(self.num_targets, bool)
        return self._watch(state, SearchTask(position, velocity, none, jnp.zeros(none.shape)))

    def _advance(self, key: PRNGKeyArray, before: SwarmState, moved: SwarmState) -> Advanced:
        old = before.task
        noise = _TARGET_TURN * jax.random.normal(key, old.velocity.shape)
        velocity = _TARGET_SPEED * _unit(old.velocity / _TARGET_SPEED + noise)
        moved_to = old.position + velocity
        position = jnp.clip(moved_to, 0.0, self.side)
        velocity = jnp.where(position == moved_to, velocity, -velocity)
        task = self._watch(moved, old._replace(position=position, velocity=velocity))
        find_rate = (task.found & ~old.found).mean(dtype=jnp.float32)
        hold_rate = (task.strength >= _HOLD_STRENGTH).mean(dtype=jnp.float32)
        reward = _FIND_REWARD * find_rate + _HOLD_REWARD / self.time_limit * hold_rate
        return moved._replace(task=task), jnp.full(self.num_agents, reward), jnp.zeros((), bool)

    def _watch(self, state: SwarmState, task: SearchTask) -> SearchTask:
        """Update which targets are found, and the strength of the drones next to each."""
        params = state.params
        watchers = Points(state.drones.position, state.alive, (params.sight, params.strength))
        none = jnp.zeros(self.num_targets, bool), jnp.zeros(self.num_targets)
        reach = max(self._farthest_sight, _HOLD_RANGE)
        seen, strength = reduce_within(_watch, none, task.position, watchers, reach, self.side)
        if self.opaque:
            near = self._spot(state, slice(self.num_agents), task.position, _TARGETS_SEEN)
            sees = jnp.isfinite(near.distance)
            seen = none[0].at[near.which].max(sees)
        return task._replace(found=task.found | seen, strength=strength)

    def _sense(self, measured: SwarmState) -> Blocks:
        task = measured.task
        features = jnp.concatenate([task.velocity, task.strength[:, None] / _HOLD_STRENGTH], -1)
        targets = self._sense_points(measured, task.position, _TARGETS_SEEN, features)
        dims, drones = self.dims, measured.drones
        velocity = drones.velocity[:, None] * targets[..., -1:]
        relative = self._in_frame(drones.heading, targets[..., dims : 2 * dims] - velocity)
        return {"targets": targets.at[..., dims : 2 * dims].set(relative)}

    def _status(self, state: SwarmState) -> Float[Array, "N C"]:
        position = state.drones.position
        targets = state.task.position
        near = self._spot(state, slice(self.num_agents), targets, 1)
        index = near.which[:, 0]
        lacks = state.task.strength[index] < _HOLD_STRENGTH
        offset = (targets[index] - position) / 10
        message = jnp.concatenate([offset, lacks[:, None], jnp.ones((len(position), 1))], -1)
        return jnp.where(jnp.isfinite(near.distance), message, 0.0)

    def _summary(self, state: SwarmState) -> Float[Array, "S"]:
        task = state.task
        position = 2 * task.position / self.side - 1
        flags = jnp.stack([task.found, task.strength / _HOLD_STRENGTH], -1)
        return jnp.concatenate([position, task.velocity, flags], -1).ravel()

    def _marks(self, state: SwarmState) -> tuple[Float[Array, "Q D"], Int[Array, "Q"]]:
        held = state.task.strength >= _HOLD_STRENGTH
        return state.task.position, jnp.where(
            held, MARKS.index("held target"), MARKS.index("target")
        )

    def _steer(self, see: Blocks) -> Float[Array, "N D"]:
        """Go to the nearest target that needs this drone; patrol if there is none."""
        offset = self._offsets(see["targets"])
        strength, known = see["targets"][..., -2], see["targets"][..., -1] > 0
        distance = length_of(offset)
        share = jnp.asarray([kind.strength / _HOLD_STRENGTH for kind in self._kinds])[:, None]
        without = strength - jnp.where(distance <= _HOLD_RANGE, share, 0.0)
        wanted = known & (without < 1.0)
        nearest = jnp.where(wanted, distance, jnp.inf).argmin(-1)
        chase = jnp.take_along_axis(offset, nearest[:, None, None], 1)[:, 0]
        return jnp.where(wanted.any(-1, keepdims=True), chase, self._patrol(see))

    def _patrol(self, see: Blocks) -> Float[Array, "N D"]:
        """Circle around the centre of the arena, halfway to the walls."""
        position = see["own"][:, : self.dims]
        radius = length_of(position[:, :2], keepdims=True)
        outward = position[:, :2] / jnp.maximum(radius, 1e-3)
        around = jnp.stack([-outward[:, 1], outward[:, 0]], -1)
        flat = around + 3 * (0.55 - radius) * outward
        desired = jnp.concatenate([flat, -position[:, 2:]], -1)
        return self._from_arena(see["own"], desired[:, None])[:, 0]


def _watch(
    so_far: tuple[Bool[Array, "M"], Float[Array, "M"]],
    squared: Float[Array, "C M"],
    sight: Float[Array, "C M"],
    strength: Float[Array, "C M"],
) -> tuple[Bool[Array, "M"], Float[Array, "M"]]:
    """Add the drones that see each target, and the strength of those next to it."""
    seen = (squared <= jnp.square(sight)).any(0)
    near = jnp.where(squared <= _HOLD_RANGE**2, strength, 0.0).sum(0)
    return so_far[0] | seen, so_far[1] + near


def _unit(vector: Float[Array, "M D"]) -> Float[Array, "M D"]:
    return vector / jnp.maximum(length_of(vector, keepdims=True), 1e-6)
