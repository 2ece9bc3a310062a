"""What every swarm task is: options, and the frame of reset and step that tasks fill in."""

import functools
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl.envs.base import require_positive, restart, transition
from offmarl.envs.swarm import bodies as drones
from offmarl.envs.swarm.bodies import Bodies, Kind, Traits
from offmarl.envs.swarm.neighbours import Neighbours, find_neighbours, find_points
from offmarl.envs.scene import Scene
from offmarl.envs.swarm.sensing import describe
from offmarl.errors import OptionError
from offmarl.types import ArrayTree, Continuous, Discrete, EnvSpec, Policy, Timestep, View

_WIND = 0.25
_NOISE = 0.1
_SPEED_SPREAD = 0.25
_RANDOMISABLE = ("wind", "noise", "speed")
_NUM_OBSTACLES_SEEN = 2
_GAP = 1.0
"""Room to pass between any two obstacles."""
_MOST_OBSTACLES = 0.25
"""So that each fits into a cell of its own with room to pass."""


class Weather(NamedTuple):
    """What the world is like in an episode."""

    wind: Float[Array, "D"]
    """Its velocity, in cells a step."""
    noise: Float[Array, ""]
    """Standard deviation of the drones' errors about position (cells) and velocity (cells/step)."""


class SwarmState(NamedTuple):
    """All that a task depends on. P counts all drones: the agents, then scripted ones."""

    bodies: Bodies
    """``(P, ...)``"""
    alive: Bool[Array, "P"]
    traits: Traits
    """``(P,)``"""
    weather: Weather
    obstacles: Float[Array, "M D"] | None
    """Their centres."""
    message: Float[Array, "N C"] | None
    """What each agent broadcasts."""
    task: ArrayTree
    """The task's own."""
    time: Int[Array, ""]


Blocks = dict[str, Float[Array, "N ..."]]
"""The parts of the observations by name."""


@dataclass(frozen=True, kw_only=True)
class SwarmTask(ABC):
    """Options that all swarm tasks have, and what they share.

    Every agent observes its ``own`` position (from -1 to 1 along each axis of the arena) and
    velocity, its heading (cosine, sine; unicycles), kind (heterogeneous teams) and team (where
    there are two); then what the task says; then the 2 nearest ``obstacles`` in sight (where there
    are any; each: relative position, 1); then its nearest ``neighbours`` (each: relative position
    and velocity, kind, whether of the own team, message, 1). Relative positions are in units of the
    observer's range of sight, and things out of sight are zeros. Unicycles see all this in their
    own frame, whose first axis is straight ahead. The size does not depend on N; `read` takes an
    observation apart. Drones fly past one another freely where the task does not say otherwise.

    Parameters
    ----------
    num_agents
        N, the (first) number in the name.
    name
        What the spec calls it.
    time_limit
        Steps of an episode.
    dims
        2 or 3.
    dynamics
        "velocity", "acceleration" or "unicycle": see `offmarl.envs.swarm.bodies`.
    action
        "discrete": a motion each. "continuous": the command itself, D numbers in [-1, 1].
    sensing_range
        How far a standard drone sees, in cells.
    num_neighbours
        How many neighbours an agent can observe.
    comm
        What agents broadcast, to be observed by their neighbours in the next view. "none". "status":
        what the task says. "learned": a message chosen along with the action, one of ``comm_size``
        symbols (A = motions x symbols, ``action = motion * comm_size + symbol``) or, with continuous
        actions, that many numbers.
    comm_size
        Of a learned message.
    comm_range
        How far messages carry, in cells; hearing a drone also tells where it is.
    comm_dropout
        Probability that a message is lost, for each step and receiver.
    randomise
        What is drawn anew for each episode: "none", "all", or some of "wind" (any direction, up to
        0.25 cells a step), "noise" (standard deviation up to 0.1 in what drones know of positions
        and velocities, their own and others'), "speed" (top speeds, within 25%), joined by "+".
    obstacles
        Fraction of the arena that obstacles cover: discs (balls) of radius 1 that drones slide
        along.
    heterogeneous
        Make every other drone, from the first, a scout (20% faster, more agile and far-sighted,
        half as strong) and the others lifters (20% slower, less agile and short-sighted).
    """

    num_agents: int
    name: str = ""
    time_limit: int = 50
    dims: int = 2
    dynamics: str = "velocity"
    action: str = "discrete"
    sensing_range: float = 5.0
    num_neighbours: int = 4
    comm: str = "none"
    comm_size: int = 4
    comm_range: float = 5.0
    comm_dropout: float = 0.0
    randomise: str = "none"
    obstacles: float = 0.0
    heterogeneous: bool = False

    def __post_init__(self) -> None:
        require_positive(
            num_agents=self.num_agents,
            time_limit=self.time_limit,
            sensing_range=self.sensing_range,
            num_neighbours=self.num_neighbours,
            comm_size=self.comm_size,
            comm_range=self.comm_range,
        )
        require_one_of("dims", self.dims, (2, 3))
        require_one_of("dynamics", self.dynamics, get_args(drones.Dynamics))
        require_one_of("action", self.action, ("discrete", "continuous"))
        require_one_of("comm", self.comm, ("none", "status", "learned"))
        _require_within("comm_dropout", self.comm_dropout, 1.0)
        _require_within("obstacles", self.obstacles, _MOST_OBSTACLES)
        for part in self._randomised:
            require_one_of("randomise", part, ("none", "all", *_RANDOMISABLE))

    # ------------------------------------------------------------------ what a task says

    @property
    @abstractmethod
    def side(self) -> int:
        """Cells along one side of the arena: G."""

    @abstractmethod
    def _begin(self, key: PRNGKeyArray, state: SwarmState) -> ArrayTree:
        """Return the task's own state at the start."""

    @abstractmethod
    def _advance(
        self, key: PRNGKeyArray, before: SwarmState, moved: SwarmState, hit: Bool[Array, "P"]
    ) -> tuple[SwarmState, Float[Array, "N"], Bool[Array, ""]]:
        """Return the state after a step, the agents' rewards, and whether the task is done.

        In ``moved`` the drones have moved; ``hit`` tells which flew into an obstacle.
        """

    @abstractmethod
    def _sense(self, seen: SwarmState) -> Blocks:
        """Return the task's parts of the observations, from what the drones can measure."""

    @abstractmethod
    def _status(self, state: SwarmState) -> Float[Array, "N C"]:
        """Return what agents broadcast with ``comm="status"``."""

    @abstractmethod
    def _summary(self, state: SwarmState) -> Float[Array, "S"]:
        """Return the task's part of the global state."""

    @abstractmethod
    def _steer(self, see: Blocks) -> Float[Array, "N D"]:
        """Return the velocities the scripted controller wants, in units of the top speed."""

    @abstractmethod
    def metrics(self, state: SwarmState) -> dict[str, Float[Array, ""]]:
        """Return how the task stands, by name; see the class for what each means."""

    def _spawn(self, key: PRNGKeyArray) -> Bodies:
        return drones.spawn(key, self._num_bodies, self.side, self.dims)

    def _drive_scripted(self, state: SwarmState) -> Float[Array, "Q D"]:  # noqa: ARG002
        """Return the commands of the drones that are no agents."""
        return jnp.zeros((0, self.dims))

    def _marks(self, state: SwarmState) -> tuple[Float[Array, "Q D"], Int[Array, "Q"]]:  # noqa: ARG002
        return jnp.zeros((0, self.dims)), jnp.zeros(0, jnp.int32)

    def _cells(self, state: SwarmState) -> Float[Array, "*G"]:  # noqa: ARG002
        return jnp.zeros((0,) * self.dims)

    @property
    def _num_bodies(self) -> int:
        return self.num_agents

    @property
    def _num_acting(self) -> int:
        return self.num_agents

    @property
    def _teams(self) -> tuple[int, ...]:
        """Team of each drone."""
        return (0,) * self._num_bodies

    @property
    def _kinds(self) -> tuple[Kind, ...]:
        if not self.heterogeneous:
            return (drones.STANDARD,) * self._num_bodies
        return tuple((drones.SCOUT, drones.LIFTER)[i % 2] for i in range(self._num_bodies))

    # ------------------------------------------------------------------ the environment

    @property
    def spec(self) -> EnvSpec:
        """Sizes, name and limit, teams where there are several, kinds where they differ."""
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
            reward="individual" if several else "team",
            teams=teams if several else None,
            kinds=kinds if len(set(kinds)) > 1 else None,
        )

    def reset(self, key: PRNGKeyArray) -> tuple[SwarmState, Timestep]:
        """Start an episode."""
        spawn_key, world_key, task_key, view_key = jax.random.split(key, 4)
        weather, traits, obstacles = self._draw_world(world_key)
        bodies = self._spawn(spawn_key)
        if obstacles is not None:
            bodies, _ = drones.keep_out(bodies, obstacles, self.side)
        state = SwarmState(
            bodies=bodies,
            alive=jnp.ones(self._num_bodies, bool),
            traits=traits,
            weather=weather,
            obstacles=obstacles,
            message=None,
            task=(),
            time=jnp.zeros((), jnp.int32),
        )
        state = state._replace(task=self._begin(task_key, state))
        state = self._broadcast(state, jnp.zeros((self._num_acting, self.comm_size)))
        return state, restart(self._view(view_key, state))

    def step(
        self, key: PRNGKeyArray, state: SwarmState, action: Array
    ) -> tuple[SwarmState, Timestep]:
        """Move the drones, and let the task go on."""
        task_key, view_key = jax.random.split(key)
        command, message = self._decode(action)
        moved, hit = self._fly(state, command)
        after, reward, done = self._advance(task_key, state, moved, hit)
        after = self._broadcast(after, message)
        terminated = done | ~after.alive[: self._num_acting]
        return after, transition(
            self._view(view_key, after),
            reward=reward,
            terminated=terminated,
            truncated=~terminated & (after.time >= self.time_limit),
        )

    def scripted(self) -> Policy:
        """Return the scripted controller: it sees what the agents see, and has no parameters."""

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
        """Take observations apart, by name: ``own`` and others flat, lists of things ``(K, F)``."""
        shapes, _ = _shapes(self)
        ends = np.cumsum([np.prod(shape, dtype=int) for shape in shapes.values()])
        parts = jnp.split(observation, ends[:-1], axis=-1)
        return {
            name: part.reshape(*observation.shape[:-1], *shape)
            for (name, shape), part in zip(shapes.items(), parts, strict=True)
        }

    def scene(self, state: SwarmState) -> Scene:
        """Return what there is to draw."""
        marks, mark = self._marks(state)
        x, y = state.bodies.velocity[:, 0], state.bodies.velocity[:, 1]
        turning = self.dynamics == "unicycle"
        return Scene(
            side=self.side,
            drones=state.bodies.position,
            alive=state.alive,
            team=jnp.asarray(self._teams, jnp.int32),
            kind=jnp.asarray([drones.KINDS.index(kind) for kind in self._kinds], jnp.int32),
            velocity=state.bodies.velocity,
            heading=state.bodies.heading if turning else jnp.arctan2(y, x),
            links=self._links(state),
            obstacles=jnp.zeros((0, self.dims)) if state.obstacles is None else state.obstacles,
            marks=marks,
            mark=mark,
            cells=self._cells(state),
        )

    # ------------------------------------------------------------------ world

    @property
    def _randomised(self) -> tuple[str, ...]:
        return _RANDOMISABLE if self.randomise == "all" else tuple(self.randomise.split("+"))

    @property
    def _num_obstacles(self) -> int:
        size = {2: np.pi, 3: 4 / 3 * np.pi}[self.dims] * drones.OBSTACLE_RADIUS**self.dims
        return round(self.obstacles * self.side**self.dims / size)

    def _draw_world(self, key: PRNGKeyArray) -> tuple[Weather, Traits, Float[Array, "M D"] | None]:
        wind_key, noise_key, speed_key, obstacle_key = jax.random.split(key, 4)
        wind, noise = jnp.zeros(self.dims), jnp.zeros(())
        traits = drones.traits_of(self._kinds, self.sensing_range)
        if "wind" in self._randomised:
            direction_key, strength_key = jax.random.split(wind_key)
            direction = jax.random.normal(direction_key, (self.dims,))
            direction = direction / jnp.maximum(jnp.linalg.norm(direction), 1e-6)
            wind = direction * jax.random.uniform(strength_key, maxval=_WIND)
        if "noise" in self._randomised:
            noise = jax.random.uniform(noise_key, maxval=_NOISE)
        if "speed" in self._randomised:
            low, high = 1 - _SPEED_SPREAD, 1 + _SPEED_SPREAD
            factor = jax.random.uniform(speed_key, (self._num_bodies,), minval=low, maxval=high)
            traits = traits._replace(top_speed=factor * traits.top_speed)
        obstacles = None
        if self._num_obstacles:
            gap = 2 * drones.OBSTACLE_RADIUS + _GAP
            obstacles = drones.scatter(obstacle_key, self._num_obstacles, self.side, self.dims, gap)
        return Weather(wind, noise), traits, obstacles

    def _fly(
        self, state: SwarmState, command: Float[Array, "N D"]
    ) -> tuple[SwarmState, Bool[Array, "P"]]:
        """Move all that live; also tell which flew into an obstacle."""
        command = jnp.concatenate([command, self._drive_scripted(state)])
        wind = state.weather.wind
        bodies = drones.move(state.bodies, command, state.traits, wind, self.side, self.dynamics)
        hit = jnp.zeros(self._num_bodies, bool)
        if state.obstacles is not None:
            bodies, hit = drones.keep_out(bodies, state.obstacles, self.side)
        bodies = jax.tree.map(
            lambda new, old: jnp.where(state.alive.reshape(-1, *(1,) * (new.ndim - 1)), new, old),
            bodies,
            state.bodies,
        )
        return state._replace(bodies=bodies, time=state.time + 1), hit & state.alive

    # ------------------------------------------------------------------ actions

    @property
    def _motions(self) -> Float[np.ndarray, "A D"]:
        return drones.motions(self.dynamics, self.dims)

    @property
    def _action_space(self) -> Discrete | Continuous:
        learned = self.comm == "learned"
        if self.action == "discrete":
            return Discrete(len(self._motions) * (self.comm_size if learned else 1))
        return Continuous(self.dims + (self.comm_size if learned else 0))

    def _decode(self, action: Array) -> tuple[Float[Array, "N D"], Float[Array, "N C"]]:
        """Return command and message."""
        silent = jnp.zeros((self._num_acting, self.comm_size))
        if self.action == "continuous":
            action = jnp.clip(action, -1.0, 1.0)
            command, message = action[:, : self.dims], action[:, self.dims :]
            return command, message if self.comm == "learned" else silent
        if self.comm != "learned":
            return jnp.asarray(self._motions)[action], silent
        motion, symbol = jnp.divmod(action, self.comm_size)
        return jnp.asarray(self._motions)[motion], jax.nn.one_hot(symbol, self.comm_size)

    def _encode(
        self, wish: Float[Array, "N D"], own: Float[Array, "N F"], legal_actions: Bool[Array, "N A"]
    ) -> Array:
        """Return the actions that come nearest to the velocities wished for, and no message."""
        velocity = own[:, self.dims : 2 * self.dims]
        command = drones.command_towards(wish, velocity, self.dynamics)
        if self.action == "continuous":
            silent = jnp.zeros((len(own), legal_actions.shape[-1] - self.dims))
            return jnp.concatenate([command, silent], -1)
        every = self.comm_size if self.comm == "learned" else 1
        error = jnp.square(command[:, None] - self._motions).sum(-1)
        motion = jnp.where(legal_actions[:, ::every], error, jnp.inf).argmin(-1)
        return (motion * every).astype(jnp.int32)

    def _legal_actions(self, state: SwarmState) -> Bool[Array, "N A"]:
        """Forbid velocities that lead out of the arena; who is dead can do nothing."""
        agents = self._num_acting
        alive = state.alive[:agents, None]
        if isinstance(self._action_space, Continuous):
            return jnp.broadcast_to(alive, (agents, self._action_space.size))
        legal = jnp.ones((agents, len(self._motions)), bool)
        if self.dynamics == "velocity":
            steps = state.traits.top_speed[:agents, None, None] * self._motions
            legal = drones.stays_inside(state.bodies.position[:agents], steps, self.side)
        legal = legal & (alive | ~self._motions.any(-1))
        return jnp.repeat(legal, self.comm_size, axis=-1) if self.comm == "learned" else legal

    # ------------------------------------------------------------------ views

    def _broadcast(self, state: SwarmState, message: Float[Array, "N C"]) -> SwarmState:
        if self.comm == "none":
            return state
        message = self._status(state) if self.comm == "status" else message
        alive = state.alive[: self._num_acting, None]
        return state._replace(message=jnp.where(alive, message, 0.0))

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
        """Return the parts of the observations, ``(N, ...)`` each."""
        noise_key, loss_key = jax.random.split(key)
        seen = self._measure(noise_key, state)
        blocks = {"own": self._sense_self(seen), **self._sense(seen)}
        if state.obstacles is not None:
            blocks["obstacles"] = self._sense_points(seen, state.obstacles, _NUM_OBSTACLES_SEEN)
        return {**blocks, "neighbours": self._sense_neighbours(loss_key, seen)}

    def _measure(self, key: PRNGKeyArray, state: SwarmState) -> SwarmState:
        """Return the state with drones where they are thought to be."""
        if "noise" not in self._randomised:
            return state
        error = state.weather.noise * jax.random.normal(key, (2, *state.bodies.position.shape))
        position = jnp.clip(state.bodies.position + error[0], 0.0, self.side)
        velocity = state.bodies.velocity + error[1]
        return state._replace(bodies=Bodies(position, velocity, state.bodies.heading))

    def _sense_self(self, seen: SwarmState) -> Float[Array, "N F"]:
        position, velocity, heading = (part[: self._num_acting] for part in seen.bodies)
        parts = [2 * position / self.side - 1, self._in_frame(heading, velocity[:, None])[:, 0]]
        if self.dynamics == "unicycle":
            parts += [jnp.cos(heading)[:, None], jnp.sin(heading)[:, None]]
        parts += [labels[: self._num_acting, None] for labels in self._labels]
        return jnp.concatenate(parts, -1)

    @property
    def _labels(self) -> list[Float[np.ndarray, "P"]]:
        """What tells drones apart, as numbers: the kind, and the team."""
        labels = []
        if self.heterogeneous:
            labels.append(np.array([kind == drones.LIFTER for kind in self._kinds], np.float32))
        if len(set(self._teams[: self._num_acting])) > 1:
            labels.append(np.array(self._teams, np.float32))
        return labels

    def _near(self, seen: SwarmState) -> Neighbours:
        agents = self._num_acting
        farthest = self.sensing_range * max(kind.sight for kind in self._kinds[:agents])
        return find_neighbours(
            seen.bodies.position[:agents],
            seen.alive[:agents],
            self.num_neighbours,
            farthest if self.comm == "none" else max(farthest, self.comm_range),
            self.side,
        )

    def _sense_neighbours(self, key: PRNGKeyArray, seen: SwarmState) -> Float[Array, "N K F"]:
        agents = self._num_acting
        near = self._near(seen)
        position, velocity, heading = (part[:agents] for part in seen.bodies)
        features = [self._in_frame(heading, velocity[near.index] - velocity[:, None])]
        features += [jnp.asarray(labels)[near.index][..., None] for labels in self._labels]
        sight = seen.traits.sight[:agents]
        known = near.distance <= sight[:, None]
        if seen.message is not None:
            arrives = jax.random.bernoulli(key, 1 - self.comm_dropout, known.shape)
            heard = arrives & (near.distance <= self.comm_range)
            features.append(jnp.where(heard[..., None], seen.message[near.index], 0.0))
            known = known | heard
        offset = self._in_frame(heading, position[near.index] - position[:, None])
        return describe(known, offset / sight[:, None, None], jnp.concatenate(features, -1))

    def _sense_points(
        self,
        seen: SwarmState,
        points: Float[Array, "M D"],
        count: int,
        features: Float[Array, "M F"] | None = None,
        there: Bool[Array, "M"] | None = None,
    ) -> Float[Array, "N K _"]:
        """Describe the nearest points in sight of each agent: relative position, features, 1."""
        position, _, heading = (part[: self._num_acting] for part in seen.bodies)
        sight = seen.traits.sight[: self._num_acting]
        there = jnp.ones(len(points), bool) if there is None else there
        near = find_points(position, points, count, there)
        offset = self._in_frame(heading, points[near.index] - position[:, None])
        features = jnp.zeros((len(points), 0)) if features is None else features
        known = near.distance <= sight[:, None]
        return describe(known, offset / sight[:, None, None], features[near.index])

    def _in_frame(
        self, heading: Float[Array, "N"], vectors: Float[Array, "N K D"]
    ) -> Float[Array, "N K D"]:
        return drones.to_frame(heading, vectors) if self.dynamics == "unicycle" else vectors

    def _from_arena(
        self, own: Float[Array, "N F"], vectors: Float[Array, "N K D"]
    ) -> Float[Array, "N K D"]:
        """Turn vectors along the arena's axes into the frame that ``own`` was observed in."""
        return self._in_frame(self._heading(own), vectors)

    def _to_arena(
        self, own: Float[Array, "N F"], vectors: Float[Array, "N K D"]
    ) -> Float[Array, "N K D"]:
        """Turn vectors in the frame that ``own`` was observed in back to the arena's axes."""
        return self._in_frame(-self._heading(own), vectors)

    def _heading(self, own: Float[Array, "N F"]) -> Float[Array, "N"]:
        if self.dynamics != "unicycle":
            return jnp.zeros(len(own))
        return jnp.arctan2(own[:, 2 * self.dims + 1], own[:, 2 * self.dims])

    def _links(self, state: SwarmState) -> Int[Array, "N K"]:
        near = self._near(state)
        count = 0 if self.comm == "none" else self.num_neighbours
        return jnp.where(near.distance <= self.comm_range, near.index, -1)[:, :count]

    def _global_state(self, state: SwarmState) -> Float[Array, "S"]:
        """Join positions, velocities and all that is not constant."""
        position, velocity, heading = state.bodies
        motion = [2 * position / self.side - 1, velocity]
        if self.dynamics == "unicycle":
            motion += [jnp.cos(heading)[:, None], jnp.sin(heading)[:, None]]
        parts = [jnp.concatenate(motion, -1), self._summary(state)]
        if "wind" in self._randomised:
            parts.append(state.weather.wind)
        if "speed" in self._randomised:
            parts.append(state.traits.top_speed)
        if self.comm == "learned" and state.message is not None:
            parts.append(state.message)
        if state.obstacles is not None:
            parts.append(2 * state.obstacles / self.side - 1)
        return jnp.concatenate([part.ravel() for part in parts])


@functools.cache
def _shapes(task: SwarmTask) -> tuple[dict[str, tuple[int, ...]], Any]:
    """Return the shapes of one agent's parts of the observation, and the shapes of a view."""
    names: list[str] = []  # a dictionary that passes through JAX would lose its order

    def first(key: PRNGKeyArray) -> tuple[list[Array], View]:
        state, timestep = task.reset(key)
        blocks = task._blocks(key, state)
        names.extend(blocks)
        return list(blocks.values()), timestep.view

    parts, view = jax.eval_shape(first, jax.random.key(0))
    return {name: part.shape[1:] for name, part in zip(names, parts, strict=True)}, view


def arena_side(num_agents: int, cells_per_agent: float, dims: int) -> int:
    """Return the side of an arena in which drones have so many cells each, in whole cells."""
    return max(2, round((num_agents * cells_per_agent) ** (1 / dims)))


def require_one_of(option: str, value: object, known: tuple[object, ...]) -> None:
    """Raise `OptionError` for an option that has none of the values it can have."""
    if value not in known:
        choices = ", ".join(map(str, known))
        raise OptionError(f"{option} must be one of {choices}, not {value!r}.")


def _require_within(option: str, value: float, most: float) -> None:
    if not 0 <= value <= most:
        raise OptionError(f"{option} must be from 0 to {most}, not {value}.")
