"""Reset, step and scripted controller of all swarm tasks; the tasks add their rules."""

import functools
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl.config import Positive
from offmarl.envs.base import Scene, restart, transition
from offmarl.envs.swarm import dynamics, quadrotor
from offmarl.envs.swarm.collisions import RESTITUTION, collide
from offmarl.envs.swarm.dynamics import Disturbance, DroneParams, DroneState
from offmarl.envs.swarm.observations import Blocks, SwarmObservations, SwarmState
from offmarl.envs.swarm.options import GAP
from offmarl.envs.swarm.randomisation import MOST_DELAY, draw_disturbance, draw_params
from offmarl.types import ArrayTree, EnvSpec, Policy, Timestep, View

Advanced = tuple[SwarmState, Float[Array, "N"], Bool[Array, ""]]
"""The state after a step, the agents' rewards, and whether the task is done."""


@dataclass(frozen=True, kw_only=True)
class SwarmEnv(SwarmObservations):
    """An environment of the suite without the rules of a task."""

    @abstractmethod
    def _begin(self, key: PRNGKeyArray, state: SwarmState) -> ArrayTree:
        """Return the initial state of the task."""

    @abstractmethod
    def _advance(self, key: PRNGKeyArray, before: SwarmState, moved: SwarmState) -> Advanced:
        """Advance the task; ``moved`` is the state before the step with the drones moved."""

    @abstractmethod
    def _status(self, state: SwarmState) -> Float[Array, "N C"]:
        """Return the broadcasts for ``comm="status"``."""

    @abstractmethod
    def _steer(self, see: Blocks) -> Float[Array, "N D"]:
        """Return the velocities of the scripted controller, in units of the top speed."""

    @abstractmethod
    def metrics(self, state: SwarmState) -> dict[str, Float[Array, ""]]:
        """Return metrics of the state by name; the task's class describes them."""

    def _spawn(self, key: PRNGKeyArray) -> DroneState:
        """Place the drones, uniformly at random."""
        shape = (self._num_drones, self.dims)
        return dynamics.at_rest(jax.random.uniform(key, shape, maxval=self.side))

    def _drive_scripted(self, state: SwarmState) -> Float[Array, "Q C"]:
        """Return the commands of the drones that are not agents."""
        return jnp.zeros((0, self._command_size))

    def _marks(self, state: SwarmState) -> tuple[Float[Array, "Q D"], Int[Array, "Q"]]:
        return jnp.zeros((0, self.dims)), jnp.zeros(0, jnp.int32)

    def _cells(self, state: SwarmState) -> Float[Array, "*G"]:
        return jnp.zeros((0,) * self.dims)

    @property
    def spec(self) -> EnvSpec:
        """Sizes, name and limit; teams if there are several, kinds if they differ."""
        _, view = _shapes(self)
        teams = self._teams[: self._num_acting]
        several = len(set(teams)) > 1
        kinds = tuple(kind.name for kind in self._kinds[: self._num_acting])
        return EnvSpec(
            self.name,
            self._num_acting,
            observation_size=view.observation.shape[-1],
            state_size=view.state.shape[-1],
            action=self._action_space,
            time_limit=self.time_limit,
            reward=self._reward,
            teams=teams if several else None,
            team_names=self._team_names if several else None,
            kinds=kinds if len(set(kinds)) > 1 else None,
        )

    def reset(self, key: PRNGKeyArray) -> tuple[SwarmState, Timestep]:
        """Start an episode."""
        spawn_key, world_key, task_key, view_key = jax.random.split(key, 4)
        disturbance, params, obstacles = self._draw_world(world_key)
        drones = self._spawn(spawn_key)
        if self.dynamics == "quadrotor":
            drones = quadrotor.hover_at(drones)
        if obstacles is not None:
            drones = dynamics.keep_out(drones, obstacles, self.side)
        queue = jnp.zeros((MOST_DELAY, self._num_drones, self._command_size))
        state = SwarmState(
            drones=drones,
            alive=jnp.ones(self._num_drones, bool),
            params=params,
            disturbance=disturbance,
            obstacles=obstacles,
            message=None,
            task=(),
            time=jnp.zeros((), jnp.int32),
            pending=None if params.delay is None else queue,
            collided=None if self.collisions == "none" else jnp.zeros(self._num_drones, bool),
        )
        state = state._replace(task=self._begin(task_key, state))
        state = self._broadcast(state, jnp.zeros((self._num_acting, self.comm_size)))
        return state, restart(self._view(view_key, state))

    def step(
        self, key: PRNGKeyArray, state: SwarmState, action: Array
    ) -> tuple[SwarmState, Timestep]:
        """Move the drones and advance the task."""
        task_key, view_key = jax.random.split(key)
        command, message = self._decode(action)
        moved = self._fly(state, command)
        after, reward, done = self._advance(task_key, state, moved)
        after = self._broadcast(after, message)
        terminated = done | ~after.alive[: self._num_acting]
        return after, transition(
            self._view(view_key, after),
            reward=reward,
            terminated=terminated,
            truncated=~terminated & (after.time >= self.time_limit),
        )

    def scripted(self) -> Policy:
        """Return the scripted controller; it acts on the observations and has no parameters."""

        def act(
            _params: ArrayTree,
            carry: ArrayTree,
            observation: Float[Array, "N O"],
            legal_actions: Bool[Array, "N A"],
            _key: PRNGKeyArray,
        ) -> tuple[Array, Float[Array, "N"], ArrayTree]:
            see = self.read(observation)
            action = self._encode(self._steer(see), see["own"], legal_actions)
            return action, jnp.zeros(self._num_acting), carry

        return Policy(lambda: (), act)

    def read(self, observation: Float[Array, "*b O"]) -> dict[str, Float[Array, "..."]]:
        """Split observations into parts by name: vectors, and lists of objects ``(K, F)``."""
        shapes, _ = _shapes(self)
        ends = np.cumsum([np.prod(shape, dtype=int) for shape in shapes.values()])
        parts = jnp.split(observation, ends[:-1], axis=-1)
        return {
            name: part.reshape(*observation.shape[:-1], *shape)
            for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }

    def scene(self, state: SwarmState) -> Scene:
        """Return the positions to draw."""
        marks, mark = self._marks(state)
        x, y = state.drones.velocity[:, 0], state.drones.velocity[:, 1]
        turning = self.dynamics in ("unicycle", "quadrotor")
        return Scene(
            side=self.side,
            drones=state.drones.position,
            alive=state.alive,
            team=jnp.asarray(self._teams, jnp.int32),
            kind=jnp.asarray([dynamics.KINDS.index(kind) for kind in self._kinds], jnp.int32),
            heading=state.drones.heading if turning else jnp.arctan2(y, x),
            links=self._links(state),
            obstacles=jnp.zeros((0, self.dims)) if state.obstacles is None else state.obstacles,
            marks=marks,
            mark=mark,
            cells=self._cells(state),
            attitude=state.drones.attitude,
        )

    def _draw_world(
        self, key: PRNGKeyArray
    ) -> tuple[Disturbance, DroneParams, Float[Array, "M D"] | None]:
        wind_key, noise_key, speed_key, obstacle_key = jax.random.split(key, 4)
        parts = self._randomised
        disturbance = draw_disturbance(wind_key, noise_key, parts, self.dims)
        params = dynamics.params_of(self._kinds, self.sensing_range)
        if self.dynamics == "quadrotor":
            params = params._replace(thrust=params.mass, drag=params.mass)
        params = draw_params(key, speed_key, parts, params)
        obstacles = None
        if self._num_obstacles:
            gap = 2 * dynamics.OBSTACLE_RADIUS + GAP
            obstacles = dynamics.scatter(
                obstacle_key, self._num_obstacles, self.side, self.dims, gap
            )
        return disturbance, params, obstacles

    def _fly(self, state: SwarmState, command: Float[Array, "N C"]) -> SwarmState:
        """Move all live drones."""
        command = jnp.concatenate([command, self._drive_scripted(state)])
        state, command = self._wait(state, command)
        wind, params = state.disturbance.wind, state.params
        if self.dynamics == "quadrotor":
            drones = quadrotor.fly(state.drones, command, params, wind, self.control)
        else:
            drones = dynamics.fly(state.drones, command, params, wind, self.dynamics)
        drones, state = self._collide(state, drones)
        drones = dynamics.keep_inside(drones, self.side)
        if state.obstacles is not None:
            drones = dynamics.keep_out(drones, state.obstacles, self.side)
        drones = jax.tree.map(
            lambda new, old: jnp.where(state.alive.reshape(-1, *(1,) * (new.ndim - 1)), new, old),
            drones,
            state.drones,
        )
        return state._replace(drones=drones, time=state.time + 1)

    def _wait(
        self, state: SwarmState, command: Float[Array, "P C"]
    ) -> tuple[SwarmState, Float[Array, "P C"]]:
        """Queue the commands, and return those that take effect now."""
        delay = state.params.delay
        if delay is None or state.pending is None:
            return state, command
        queue = jnp.concatenate([command[None], state.pending])
        due = jnp.take_along_axis(queue, delay[None, :, None], 0)[0]
        return state._replace(pending=queue[:-1]), due

    def _collide(self, state: SwarmState, flown: DroneState) -> tuple[DroneState, SwarmState]:
        if self.collisions == "none":
            return flown, state
        flown, collided = collide(
            state.drones,
            flown,
            state.params.mass,
            state.alive,
            RESTITUTION[self.collisions],
            self._fastest,
            self.side,
        )
        return flown, state._replace(collided=collided & state.alive)

    def _decode(self, action: Array) -> tuple[Float[Array, "N C"], Float[Array, "N M"]]:
        """Return the commands and messages of the actions."""
        silent = jnp.zeros((self._num_acting, self.comm_size))
        if self.action == "continuous":
            action, size = jnp.clip(action, -1.0, 1.0), self._command_size
            command, message = action[:, :size], action[:, size:]
            return command, message if self.comm == "learned" else silent
        if self.comm != "learned":
            return jnp.asarray(self._motions)[action], silent
        motion, symbol = jnp.divmod(action, self.comm_size)
        return jnp.asarray(self._motions)[motion], jax.nn.one_hot(symbol, self.comm_size)

    def _encode(
        self,
        desired: Float[Array, "N D"],
        own: Float[Array, "N F"],
        legal_actions: Bool[Array, "N A"],
    ) -> Array:
        """Return the actions closest to the desired velocities, without a message."""
        velocity = own[:, self.dims : 2 * self.dims]
        top_speed = jnp.asarray([[kind.top_speed] for kind in self._kinds[: self._num_acting]])
        if self.dynamics == "quadrotor":
            rotation, spin = own[:, 6:15].reshape(-1, 3, 3), own[:, 15:18]
            command = quadrotor.command_towards(
                top_speed * desired, velocity, rotation, spin, top_speed, self.control
            )
        else:
            command = dynamics.command_towards(desired, velocity / top_speed, self.dynamics)
        if self.action == "continuous":
            silent = jnp.zeros((len(own), legal_actions.shape[-1] - self._command_size))
            return jnp.concatenate([command, silent], -1)
        stride = self.comm_size if self.comm == "learned" else 1
        error = jnp.square(command[:, None] - self._motions).sum(-1)
        motion = jnp.where(legal_actions[:, ::stride], error, jnp.inf).argmin(-1)
        return (motion * stride).astype(jnp.int32)

    def _broadcast(self, state: SwarmState, message: Float[Array, "N C"]) -> SwarmState:
        if self.comm == "none":
            return state
        message = self._status(state) if self.comm == "status" else message
        alive = state.alive[: self._num_acting, None]
        return state._replace(message=jnp.where(alive, message, 0.0))


@dataclass(frozen=True, kw_only=True)
class GrowingArena(SwarmEnv):
    """A task in an arena that grows with N.

    Parameters
    ----------
    cells_per_agent
        The area (volume) of the arena over N; its side is rounded to whole cells.
    """

    cells_per_agent: Positive = 32.0

    @property
    def side(self) -> int:
        """Cells along one side of the arena: G."""
        return max(2, round((self.num_agents * self.cells_per_agent) ** (1 / self.dims)))


@functools.cache
def _shapes(task: SwarmEnv) -> tuple[dict[str, tuple[int, ...]], Any]:
    """Return the shapes of the parts of one agent's observation, and those of a view."""
    names: list[str] = []  # JAX sorts the keys of a dictionary

    def first(key: PRNGKeyArray) -> tuple[list[Array], View]:
        state, timestep = task.reset(key)
        blocks = task._blocks(key, state)
        names.extend(blocks)
        return list(blocks.values()), timestep.view

    parts, view = jax.eval_shape(first, jax.random.key(0))
    return {name: part.shape[1:] for name, part in zip(names, parts, strict=True)}, view
