"""Observations and global state of the swarm tasks."""

import functools
import itertools
from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl.envs.swarm import dynamics
from offmarl.envs.swarm.dynamics import Disturbance, DroneParams, DroneState
from offmarl.envs.swarm.neighbours import Neighbours, find_neighbours, find_points
from offmarl.envs.swarm.options import SwarmOptions
from offmarl.types import ArrayTree, Continuous, View

_NUM_OBSTACLES_SEEN = 2


class SwarmState(NamedTuple):
    """The state of a task. P counts all drones: first the agents, then scripted drones."""

    drones: DroneState
    """``(P, ...)``"""
    alive: Bool[Array, "P"]
    params: DroneParams
    """``(P,)``"""
    disturbance: Disturbance
    obstacles: Float[Array, "M D"] | None
    """Centres of the obstacles."""
    message: Float[Array, "N C"] | None
    """Broadcast of each agent."""
    task: ArrayTree
    """The state of the task itself."""
    time: Int[Array, ""]


Blocks = dict[str, Float[Array, "N ..."]]
"""Parts of the observations by name."""


@dataclass(frozen=True, kw_only=True)
class SwarmObservations(SwarmOptions):
    """Builds views from states."""

    @abstractmethod
    def _sense(self, seen: SwarmState) -> Blocks:
        """Return the task's parts of the observations; ``seen`` is the state as measured."""

    @abstractmethod
    def _summary(self, state: SwarmState) -> Float[Array, "S"]:
        """Return the task's part of the global state."""

    def _view(self, key: PRNGKeyArray, state: SwarmState) -> View:
        alive = state.alive[: self._num_acting]
        blocks = self._blocks(key, state)
        flat = jnp.concatenate([part.reshape(len(alive), -1) for part in blocks.values()], -1)
        return View(
            observation=jnp.where(alive[:, None], flat, 0.0),
            state=self._global_state(state),
            legal_actions=self._legal_actions(state),
            alive=alive,
        )

    def _blocks(self, key: PRNGKeyArray, state: SwarmState) -> Blocks:
        """Return all parts of the observations, ``(N, ...)`` each."""
        noise_key, loss_key = jax.random.split(key)
        seen = self._measure(noise_key, state)
        blocks = {"own": self._sense_self(seen), **self._sense(seen)}
        if state.obstacles is not None:
            blocks["obstacles"] = self._sense_points(seen, state.obstacles, _NUM_OBSTACLES_SEEN)
        return {**blocks, "neighbours": self._sense_neighbours(loss_key, seen)}

    def _measure(self, key: PRNGKeyArray, state: SwarmState) -> SwarmState:
        """Return the state with measured positions and velocities: true values plus noise."""
        if "noise" not in self._randomised:
            return state
        error = state.disturbance.noise * jax.random.normal(key, (2, *state.drones.position.shape))
        position = jnp.clip(state.drones.position + error[0], 0.0, self.side)
        velocity = state.drones.velocity + error[1]
        return state._replace(drones=DroneState(position, velocity, state.drones.heading))

    def _sense_self(self, seen: SwarmState) -> Float[Array, "N F"]:
        position, velocity, heading = (part[: self._num_acting] for part in seen.drones)
        parts = [2 * position / self.side - 1, self._in_frame(heading, velocity[:, None])[:, 0]]
        if self.dynamics == "unicycle":
            parts += [jnp.cos(heading)[:, None], jnp.sin(heading)[:, None]]
        parts += [jnp.asarray(labels[: self._num_acting, None]) for labels in self._labels]
        return jnp.concatenate(parts, -1)

    def _near(self, seen: SwarmState) -> Neighbours:
        agents = self._num_acting
        farthest = self.sensing_range * max(kind.sight for kind in self._kinds[:agents])
        return find_neighbours(
            seen.drones.position[:agents],
            seen.alive[:agents],
            self.num_neighbours,
            farthest if self.comm == "none" else max(farthest, self.comm_range),
            self.side,
        )

    def _sense_neighbours(self, key: PRNGKeyArray, seen: SwarmState) -> Float[Array, "N K F"]:
        agents = self._num_acting
        near = self._near(seen)
        position, velocity, heading = (part[:agents] for part in seen.drones)
        features = [self._in_frame(heading, velocity[near.which] - velocity[:, None])]
        features += [jnp.asarray(labels)[near.which][..., None] for labels in self._labels]
        sight = seen.params.sight[:agents]
        known = near.distance <= sight[:, None]
        if seen.message is not None:
            arrives = jax.random.bernoulli(key, 1 - self.comm_dropout, known.shape)
            heard = arrives & (near.distance <= self.comm_range)
            features.append(jnp.where(heard[..., None], seen.message[near.which], 0.0))
            known = known | heard
        offset = self._in_frame(heading, position[near.which] - position[:, None])
        return describe(known, offset / sight[:, None, None], jnp.concatenate(features, -1))

    def _sense_points(
        self,
        seen: SwarmState,
        points: Float[Array, "M D"],
        count: int,
        features: Float[Array, "M F"] | None = None,
    ) -> Float[Array, "N K _"]:
        """Describe the nearest points in sight of each agent: relative position, features and 1."""
        position, _, heading = (part[: self._num_acting] for part in seen.drones)
        sight = seen.params.sight[: self._num_acting]
        near = find_points(position, points, count, self._farthest_sight, self.side)
        offset = self._in_frame(heading, points[near.which] - position[:, None])
        features = jnp.zeros((len(points), 0)) if features is None else features
        known = near.distance <= sight[:, None]
        return describe(known, offset / sight[:, None, None], features[near.which])

    def _in_frame(
        self, heading: Float[Array, "N"], vectors: Float[Array, "N K D"]
    ) -> Float[Array, "N K D"]:
        return dynamics.to_frame(heading, vectors) if self.dynamics == "unicycle" else vectors

    def _offsets(self, objects: Float[Array, "N K F"]) -> Float[Array, "N K D"]:
        """Return the positions of observed objects relative to the observer, in cells."""
        sight = [kind.sight * self.sensing_range for kind in self._kinds[: self._num_acting]]
        return objects[..., : self.dims] * jnp.asarray(sight)[:, None, None]

    def _from_arena(
        self, own: Float[Array, "N F"], vectors: Float[Array, "N K D"]
    ) -> Float[Array, "N K D"]:
        """Rotate vectors along the arena's axes into the frame of the observation ``own``."""
        return self._in_frame(self._heading(own), vectors)

    def _to_arena(
        self, own: Float[Array, "N F"], vectors: Float[Array, "N K D"]
    ) -> Float[Array, "N K D"]:
        """Rotate vectors in the frame of the observation ``own`` back to the arena's axes."""
        return self._in_frame(-self._heading(own), vectors)

    def _heading(self, own: Float[Array, "N F"]) -> Float[Array, "N"]:
        if self.dynamics != "unicycle":
            return jnp.zeros(len(own))
        return jnp.arctan2(own[:, 2 * self.dims + 1], own[:, 2 * self.dims])

    def _links(self, state: SwarmState) -> Int[Array, "N K"]:
        near = self._near(state)
        count = 0 if self.comm == "none" else self.num_neighbours
        return jnp.where(near.distance <= self.comm_range, near.which, -1)[:, :count]

    def _global_state(self, state: SwarmState) -> Float[Array, "S"]:
        """Concatenate positions, velocities and everything else that is not constant."""
        position, velocity, heading = state.drones
        motion = [2 * position / self.side - 1, velocity]
        if self.dynamics == "unicycle":
            motion += [jnp.cos(heading)[:, None], jnp.sin(heading)[:, None]]
        parts = [jnp.concatenate(motion, -1), self._summary(state)]
        if "wind" in self._randomised:
            parts.append(state.disturbance.wind)
        if "speed" in self._randomised:
            parts.append(state.params.top_speed)
        if self.comm == "learned" and state.message is not None:
            parts.append(state.message)
        if state.obstacles is not None:
            parts.append(2 * state.obstacles / self.side - 1)
        return jnp.concatenate([part.ravel() for part in parts])

    def _legal_actions(self, state: SwarmState) -> Bool[Array, "N A"]:
        """Exclude velocities that leave the arena; dead agents can only rest."""
        agents = self._num_acting
        alive = state.alive[:agents, None]
        if isinstance(self._action_space, Continuous):
            return jnp.broadcast_to(alive, (agents, self._action_space.size))
        legal = jnp.ones((agents, len(self._motions)), bool)
        if self.dynamics == "velocity":
            steps = state.params.top_speed[:agents, None, None] * self._motions
            legal = dynamics.stays_inside(state.drones.position[:agents], steps, self.side)
        legal = legal & (alive | ~self._motions.any(-1))
        return jnp.repeat(legal, self.comm_size, axis=-1) if self.comm == "learned" else legal


def describe(
    known: Bool[Array, "N K"], offset: Float[Array, "N K D"], features: Float[Array, "N K F"]
) -> Float[Array, "N K D+F+1"]:
    """Describe objects around each drone: offset, features and 1; zeros for unknown objects."""
    described = jnp.concatenate([offset, features, jnp.ones((*known.shape, 1))], -1)
    return jnp.where(known[..., None], described, 0.0)


def sense_map(
    cells: Float[Array, "*G"], position: Float[Array, "N D"], size: int
) -> Float[Array, "N F"]:
    """Read a map around each drone: single cells nearby, block means further out.

    F = size**D + 3**D: the block of ``size`` cells a side around the drone's own (``size`` is odd),
    then the means of the 3**D blocks of that size around it. Outside the map, values are 0.
    """
    dims = position.shape[1]
    padded = jnp.pad(cells, size + size // 2)
    own = jnp.minimum(position.astype(jnp.int32), cells.shape[0] - 1)
    sharp = _cut(padded, own + size, size)
    coarse = (slice(None), *(slice(None, None, size),) * dims)
    blurred = _cut(_blur(padded, size), own, 2 * size + 1)[coarse]
    return jnp.concatenate([sharp.reshape(len(own), -1), blurred.reshape(len(own), -1)], -1)


def _cut(cells: Float[Array, "*P"], corner: Int[Array, "N D"], size: int) -> Array:
    """Cut a block of ``size`` cells a side for each drone: ``(N, size, ...)``."""
    shape = (size,) * cells.ndim
    return jax.vmap(lambda at: jax.lax.dynamic_slice(cells, at, shape))(corner)


def _blur(cells: Float[Array, "*P"], size: int) -> Float[Array, "*Q"]:
    """Take the mean of every block of ``size`` cells a side; Q = P - size + 1."""
    length = cells.shape[0] - size + 1
    for axis in range(cells.ndim):
        shifted = [jax.lax.slice_in_dim(cells, i, i + length, axis=axis) for i in range(size)]
        cells = functools.reduce(jnp.add, shifted)
    return cells / size**cells.ndim


def watched(position: Float[Array, "N D"], side: int) -> Bool[Array, "*G"]:
    """Return which cells a camera covers: the 2**D cells with centres nearest to each drone."""
    dims = position.shape[1]
    corner = jnp.floor(position - 0.5).astype(jnp.int32)
    camera = jnp.asarray(list(itertools.product((0, 1), repeat=dims)))
    cell = corner[:, None] + camera[None] + 1  # inside a border of one cell around the arena
    bordered = jnp.zeros((side + 2,) * dims, bool)
    at = tuple(cell[..., axis] for axis in range(dims))
    return bordered.at[at].set(True)[(slice(1, -1),) * dims]
