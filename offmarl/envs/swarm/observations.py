"""Observations and global state of the swarm tasks."""

import functools
import itertools
from abc import abstractmethod
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl.envs.swarm import dynamics, quadrotor, randomisation
from offmarl.envs.swarm.dynamics import Disturbance, DroneParams, DroneState
from offmarl.envs.swarm.neighbours import (
    Neighbours,
    can_see,
    find_neighbours,
    find_points,
    keep_nearest,
)
from offmarl.envs.swarm.options import SwarmOptions
from offmarl.types import ArrayTree, Continuous, View

_NUM_OBSTACLES_SEEN = 2
_SPARE = 4
"""Things in range that are checked beyond those observed, because obstacles may hide some."""
_SAFE = ("own", "time")
"""Parts of the observations that do not come from sensors that fail."""
_FAILURE = 1000  # `jax.random.fold_in` with a small number gives the keys of `split`


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
    pending: Float[Array, "Q P C"] | None = None
    """The latest commands of the drones, newest first; None without delays."""
    collided: Bool[Array, "P"] | None = None
    """Drones that collided in the last step; None if drones pass through each other."""


Blocks = dict[str, Float[Array, "N ..."]]
"""Parts of the observations by name."""


@dataclass(frozen=True, kw_only=True)
class SwarmObservations(SwarmOptions):
    """Builds views from states."""

    @abstractmethod
    def _sense(self, measured: SwarmState) -> Blocks:
        """Return the task's parts of the observations; ``measured`` has sensor noise."""

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
        measured = self._measure(noise_key, state)
        blocks = {"own": self._sense_self(measured), **self._sense(measured)}
        if state.obstacles is not None:
            blocks["obstacles"] = self._sense_points(measured, state.obstacles, _NUM_OBSTACLES_SEEN)
        blocks["neighbours"] = self._sense_neighbours(loss_key, measured)
        return self._lose(jax.random.fold_in(key, _FAILURE), state, blocks)

    def _lose(self, key: PRNGKeyArray, state: SwarmState, blocks: Blocks) -> Blocks:
        """Blank what the agents whose sensors fail would observe."""
        if state.params.dropout is None:
            return blocks
        works = ~jax.random.bernoulli(key, state.params.dropout[: self._num_acting])
        return {
            name: part
            if name in _SAFE
            else jnp.where(works.reshape(-1, *(1,) * (part.ndim - 1)), part, 0.0)
            for name, part in blocks.items()
        }

    def _measure(self, key: PRNGKeyArray, state: SwarmState) -> SwarmState:
        """Return the state with measured positions and velocities: true values plus noise."""
        if "noise" not in self._randomised:
            return state
        error = state.disturbance.noise * jax.random.normal(key, (2, *state.drones.position.shape))
        position = jnp.clip(state.drones.position + error[0], 0.0, self.side)
        velocity = state.drones.velocity + error[1]
        return state._replace(drones=state.drones._replace(position=position, velocity=velocity))

    def _sense_self(self, measured: SwarmState) -> Float[Array, "N F"]:
        drones = dynamics.take_drones(measured.drones, slice(self._num_acting))
        velocity = self._in_frame(drones.heading, drones.velocity[:, None])[:, 0]
        parts = [2 * drones.position / self.side - 1, velocity]
        if self.dynamics == "unicycle":
            parts += [jnp.cos(drones.heading)[:, None], jnp.sin(drones.heading)[:, None]]
        if drones.attitude is not None and drones.spin is not None:
            rotation = quadrotor.to_matrix(drones.attitude)
            parts += [rotation.reshape(len(rotation), 9), drones.spin]
        parts += [jnp.asarray(labels[: self._num_acting, None]) for labels in self._labels]
        return jnp.concatenate(parts, -1)

    def _near(self, state: SwarmState) -> tuple[Neighbours, Bool[Array, "N K"]]:
        """Return the nearest agents in sight or earshot, and which of them are not hidden."""
        agents = self._num_acting
        position = state.drones.position[:agents]
        farthest = self.sensing_range * max(kind.sight for kind in self._kinds[:agents])
        near = find_neighbours(
            position,
            state.alive[:agents],
            self.num_neighbours + (_SPARE if self.opaque else 0),
            farthest if self.comm == "none" else max(farthest, self.comm_range),
            self.side,
        )
        visible = self._visible(state, position, position[near.which], farthest)
        if not self.opaque:
            return near, visible
        if self.comm == "none":
            near = keep_nearest(near, visible, self.num_neighbours)
            return near, jnp.isfinite(near.distance)
        near = keep_nearest(near, visible | (near.distance <= self.comm_range), self.num_neighbours)
        return near, self._visible(state, position, position[near.which], farthest)

    def _visible(
        self,
        state: SwarmState,
        position: Float[Array, "N D"],
        targets: Float[Array, "N K D"],
        reach: float,
    ) -> Bool[Array, "N K"]:
        """Return which targets of each drone are not behind an obstacle."""
        if not self.opaque or state.obstacles is None:
            return jnp.ones(targets.shape[:-1], bool)
        radius = dynamics.OBSTACLE_RADIUS
        return can_see(position, targets, state.obstacles, radius, reach, self.side)

    def _spot(
        self,
        state: SwarmState,
        observers: slice,
        points: Float[Array, "M D"],
        count: int,
        mask: Bool[Array, "M"] | None = None,
    ) -> Neighbours:
        """Find the nearest points that some drones see; distances of others are infinite."""
        position, reach = state.drones.position[observers], self._farthest_sight
        more = _SPARE if self.opaque else 0
        near = find_points(position, points, count + more, reach, self.side, mask)
        sees = near.distance <= state.params.sight[observers, None]
        if not self.opaque:
            return near._replace(distance=jnp.where(sees, near.distance, jnp.inf))
        visible = self._visible(state, position, points[near.which], reach)
        return keep_nearest(near, sees & visible, count)

    def _sense_neighbours(self, key: PRNGKeyArray, measured: SwarmState) -> Float[Array, "N K F"]:
        agents = self._num_acting
        near, visible = self._near(measured)
        position, velocity, heading = (part[:agents] for part in measured.drones[:3])
        features = [self._in_frame(heading, velocity[near.which] - velocity[:, None])]
        features += [jnp.asarray(labels)[near.which][..., None] for labels in self._labels]
        sight = measured.params.sight[:agents]
        known = visible & (near.distance <= sight[:, None])
        if measured.message is not None:
            arrives = jax.random.bernoulli(key, 1 - self.comm_dropout, known.shape)
            heard = arrives & (near.distance <= self.comm_range)
            features.append(jnp.where(heard[..., None], measured.message[near.which], 0.0))
            known = known | heard
        offset = self._in_frame(heading, position[near.which] - position[:, None])
        return describe(known, offset / sight[:, None, None], jnp.concatenate(features, -1))

    def _sense_points(
        self,
        measured: SwarmState,
        points: Float[Array, "M D"],
        count: int,
        features: Float[Array, "M F"] | None = None,
    ) -> Float[Array, "N K _"]:
        """Describe the nearest points in sight of each agent: relative position, features and 1."""
        position, _, heading = (part[: self._num_acting] for part in measured.drones[:3])
        sight = measured.params.sight[: self._num_acting]
        near = self._spot(measured, slice(self._num_acting), points, count)
        offset = self._in_frame(heading, points[near.which] - position[:, None])
        features = jnp.zeros((len(points), 0)) if features is None else features
        known = jnp.isfinite(near.distance)
        return describe(known, offset / sight[:, None, None], features[near.which])

    def _sense_way(self, measured: SwarmState, place: Float[Array, "*n D"]) -> Float[Array, "N F"]:
        """Describe the way to a place: in cells, shorter than 1, and its length over the side."""
        way = place - measured.drones.position
        distance = dynamics.length_of(way)[:, None]
        direction = way / jnp.maximum(distance, 1.0)
        direction = self._in_frame(measured.drones.heading, direction[:, None])[:, 0]
        return jnp.concatenate([direction, distance / self.side], -1)

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
        near, _ = self._near(state)
        count = 0 if self.comm == "none" else self.num_neighbours
        return jnp.where(near.distance <= self.comm_range, near.which, -1)[:, :count]

    def _global_state(self, state: SwarmState) -> Float[Array, "S"]:
        """Concatenate positions, velocities and everything else that is not constant."""
        position, velocity, heading, *posture = state.drones
        motion = [2 * position / self.side - 1, velocity]
        if self.dynamics == "unicycle":
            motion += [jnp.cos(heading)[:, None], jnp.sin(heading)[:, None]]
        motion += [part for part in posture if part is not None]
        parts = [jnp.concatenate(motion, -1), self._summary(state)]
        params = state.params
        drawn = {
            "wind": state.disturbance.wind,
            "speed": params.top_speed,
            "mass": params.mass,
            "drag": params.drag,
            "thrust": params.thrust,
            "delay": None if params.delay is None else params.delay / randomisation.MOST_DELAY,
            "dropout": params.dropout,
        }
        drawn = {name: part for name, part in drawn.items() if name in self._randomised}
        parts += [part for part in (*drawn.values(), state.pending) if part is not None]
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
    cell = jnp.minimum(position.astype(jnp.int32), cells.shape[0] - 1)
    sharp = _cut(padded, cell + size, size)
    coarse = (slice(None), *(slice(None, None, size),) * dims)
    blurred = _cut(_blur(padded, size), cell, 2 * size + 1)[coarse]
    return jnp.concatenate([sharp.reshape(len(cell), -1), blurred.reshape(len(cell), -1)], -1)


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


def watched_cells(position: Float[Array, "N D"], side: int) -> Bool[Array, "*G"]:
    """Return which cells a camera covers: the 2**D cells with centres nearest to each drone."""
    dims = position.shape[1]
    corner = jnp.floor(position - 0.5).astype(jnp.int32)
    camera = jnp.asarray(list(itertools.product((0, 1), repeat=dims)))
    cell = corner[:, None] + camera[None] + 1  # inside a border of one cell around the arena
    bordered = jnp.zeros((side + 2,) * dims, bool)
    at = tuple(cell[..., axis] for axis in range(dims))
    return bordered.at[at].set(True)[(slice(1, -1),) * dims]
