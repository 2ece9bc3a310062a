"""Adapter for the multi-agent environments of Jumanji (Bonnet et al. 2024, arXiv 2306.09884).

The matrix games of matrax have Jumanji's interface, too.

Except for two, Jumanji's environments do not say why an episode ends; the adapter derives the cause
from the state. Where Jumanji has one observation for all agents, the adapter gives each agent its
own perspective. Grids are images of booleans, with the channels last.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Num, PRNGKeyArray
from numpy.typing import NDArray

from offmarl._imports import import_optional
from offmarl.config import PositiveInt, Validated
from offmarl.envs.base import restart, transition
from offmarl.envs.registry import release
from offmarl.envs.spaces import flatten, strengthen_types, trace_spec
from offmarl.errors import OptionError
from offmarl.types import Continuous, Discrete, EnvSpec, Timestep, View

State = Any
"""A state of a Jumanji environment."""

_PIXELS = 420
"""Longer side of pictures."""

Observation = Any
"""The observation of all agents as a Jumanji environment returns it."""


class Wrapped(NamedTuple):
    """A Jumanji environment and how the adapter reads it."""

    env: Any
    time_limit: int
    terminal: Callable[[State], Bool[Array, ""]]
    """For the last state of an episode: True if it terminated, False if it was truncated."""
    observe: Callable[[Observation], Array]
    """The agents' observations, ``(N, ...)``."""
    state: Callable[[Observation], Array] | None = None
    """The global state; None if Jumanji has none: then the observations are vectors."""
    reward: Literal["team", "individual"] = "team"
    package: str = "jumanji"
    illegal_ends: bool = False
    """Whether an episode also terminates if an action is not in the mask of the state before."""


@dataclass(frozen=True, kw_only=True)
class Jumanji(Validated):
    """A Jumanji environment; the fields of the subclasses are their options."""

    name: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.spec

    @property
    def wrapped(self) -> Any:
        """The Jumanji environment."""
        return _wrap(self).env

    @property
    def spec(self) -> EnvSpec:
        """Sizes, name and limit."""
        return _spec(self)

    def reset(self, key: PRNGKeyArray) -> tuple[State, Timestep]:
        """Start an episode."""
        wrapped = _wrap(self)
        state, timestep = wrapped.env.reset(key)
        return strengthen_types(state), restart(_view(wrapped, timestep.observation))

    def step(self, key: PRNGKeyArray, state: State, action: Array) -> tuple[State, Timestep]:
        """Take one step; its randomness comes from the key in the state."""
        wrapped = _wrap(self)
        before, everyone = state, jnp.ones(action.shape[0], bool)
        state, timestep = wrapped.env.step(state, action.astype(wrapped.env.action_spec.dtype))
        over, terminal = everyone & timestep.last(), wrapped.terminal(state)
        if wrapped.illegal_ends:
            terminal |= ~before.action_mask[np.arange(len(action)), action].all()
        reward = jnp.broadcast_to(timestep.reward, everyone.shape).astype(jnp.float32)
        view = _view(wrapped, timestep.observation)
        return strengthen_types(state), transition(view, reward, over & terminal, over & ~terminal)

    @property
    def scene(self) -> Callable[[State], State]:
        """The state, which `pictures` draws; matrix games cannot be drawn."""
        if _wrap(self).package != "jumanji":
            raise AttributeError(f"{self.name} cannot be drawn")
        return lambda state: state

    def pictures(self, scenes: Sequence[State]) -> list[NDArray[np.uint8]]:
        """Return Jumanji's own pictures of states, ``(420, 420, 3)`` or of another shape."""
        from matplotlib.animation import AbstractMovieWriter

        images = []

        class Frames(AbstractMovieWriter):
            def setup(self, fig: Any, outfile: Any, dpi: float | None = None) -> None:
                super().setup(fig, outfile, _PIXELS / max(fig.get_size_inches()))

            def grab_frame(self, **options: Any) -> None:
                file = io.BytesIO()
                self.fig.savefig(file, format="rgba", dpi=self.dpi, **options)
                width, height = self.frame_size
                image = np.frombuffer(file.getvalue(), np.uint8).reshape(height, width, 4)
                images.append(image[..., :3])

            def finish(self) -> None:
                pass

        self.wrapped.animate(scenes).save("", writer=Frames())
        return images[: len(scenes) - len(images)] + images  # ways between states are one fewer

    def _build(self) -> Wrapped:
        raise NotImplementedError

    def _make(self, module: str, generator: str, start: str, other: str) -> Any:
        """Create an environment of Jumanji, by the name of the class.

        ``start`` names the options of its generator of initial states, ``other`` those of the
        environment.
        """
        of_generator, of_environment = (
            {name: getattr(self, name) for name in names.split()} for names in (start, other)
        )
        make_states = getattr(_environment(f"{module}.generator"), generator)
        make = getattr(_environment(module), type(self).__name__)
        return make(generator=make_states(**of_generator), **of_environment)


@lru_cache(maxsize=256)
def _wrap(env: Jumanji) -> Wrapped:
    """Create the Jumanji environment once: JAX compiles once for the same object."""
    try:
        with jax.ensure_compile_time_eval():
            wrapped = env._build()
            _ = wrapped.env.action_spec  # computed once, and not while something is traced
        return wrapped
    except (AssertionError, ValueError, TypeError) as error:
        raise OptionError(f"Jumanji cannot create {env.name}: {error}") from error


@lru_cache(maxsize=256)
def _spec(env: Jumanji) -> EnvSpec:
    wrapped = _wrap(env)
    discrete = jnp.issubdtype(wrapped.env.action_spec.dtype, jnp.integer)
    return trace_spec(
        env,
        Discrete if discrete else Continuous,
        time_limit=wrapped.time_limit,
        reward=wrapped.reward,
        state="concatenated" if wrapped.state is None else "native",
        package=release(wrapped.package),
    )


def _view(wrapped: Wrapped, observation: Observation) -> View:
    observations = wrapped.observe(observation)
    mask = getattr(observation, "action_mask", None)
    spec = wrapped.env.action_spec
    choices = np.asarray(spec.num_values)[:1].tolist() if hasattr(spec, "num_values") else []
    everything = jnp.ones((*spec.shape, *choices), bool)
    return View(
        observation=observations,
        state=observations.ravel() if wrapped.state is None else wrapped.state(observation),
        legal_actions=everything if mask is None else mask,
        alive=jnp.ones(observations.shape[0], bool),
    )


def _agents_view(observation: Observation) -> Float[Array, "N O"]:
    return observation.agents_view.astype(jnp.float32)


@dataclass(frozen=True, kw_only=True)
class RobotWarehouse(Jumanji):
    """Robots bring requested shelves to the goals (Papoudakis et al. 2021); 1 for each shelf.

    Unlike in the original, a collision of two robots ends the episode.
    """

    num_agents: PositiveInt = 4
    shelf_rows: PositiveInt = 2
    shelf_columns: PositiveInt = 3
    column_height: PositiveInt = 8
    sensor_range: PositiveInt = 1
    request_queue_size: PositiveInt = 8
    time_limit: PositiveInt = 500

    def _build(self) -> Wrapped:
        is_collision = _environment("routing.robot_warehouse.utils").is_collision
        start = "shelf_rows shelf_columns column_height num_agents sensor_range request_queue_size"
        env = self._make("routing.robot_warehouse", "RandomGenerator", start, "time_limit")

        def collided(state: State) -> Bool[Array, ""]:
            who = jnp.arange(self.num_agents)
            return jax.vmap(is_collision, in_axes=(None, 0, 0))(state.grid, state.agents, who).any()

        return Wrapped(env, self.time_limit, collided, _agents_view)


@dataclass(frozen=True, kw_only=True)
class LevelBasedForaging(Jumanji):
    """Foragers collect food that may need several of them (Albrecht and Ramamoorthy 2013).

    The reward for a piece of food is shared by level among the agents that helped; all shares add
    up to 1.
    """

    grid_size: PositiveInt = 8
    num_agents: PositiveInt = 2
    num_food: PositiveInt = 2
    fov: PositiveInt = 8
    max_agent_level: PositiveInt = 2
    force_coop: bool = True
    normalize_reward: bool = True
    penalty: float = 0.0
    time_limit: PositiveInt = 100

    @property
    def optimal_return(self) -> float | None:
        """The return of eating all food; None unless rewards are normalised by its levels."""
        return 1 / self.num_agents if self.normalize_reward else None

    def _build(self) -> Wrapped:
        start = "grid_size num_agents num_food fov max_agent_level force_coop"
        other = "time_limit normalize_reward penalty"
        env = self._make("routing.lbf", "RandomGenerator", start, other)
        return Wrapped(
            env,
            self.time_limit,
            lambda state: state.food_items.eaten.all(),
            _agents_view,
            reward="individual",
        )


@dataclass(frozen=True, kw_only=True)
class SearchAndRescue(Jumanji):
    """Searchers with a cone of sight fly over an area and find moving targets.

    Observation: the view, own position, and the fraction of targets not yet found. The reward for
    finding a target decreases with time; agents that find it together share it.
    """

    num_searchers: PositiveInt = 2
    num_targets: PositiveInt = 40
    num_vision: PositiveInt = 128
    searcher_vision_range: float = 0.4
    target_vision_range: float = 0.1
    view_angle: float = 0.4
    target_contact_range: float = 0.02
    time_limit: PositiveInt = 400

    def _build(self) -> Wrapped:
        module = _environment("swarms.search_and_rescue")
        generator = _environment("swarms.search_and_rescue.generator").RandomGenerator
        see = _environment("swarms.search_and_rescue.observations").AgentAndTargetObservationFn
        starts = generator(num_targets=self.num_targets, num_searchers=self.num_searchers)
        env = module.SearchAndRescue(
            target_contact_range=self.target_contact_range,
            time_limit=self.time_limit,
            generator=starts,
            observation=see(
                num_vision=self.num_vision,
                searcher_vision_range=self.searcher_vision_range,
                target_vision_range=self.target_vision_range,
                view_angle=self.view_angle,
                agent_radius=self.target_contact_range,
                env_size=starts.env_size,
            ),
        )

        def observe(observation: Observation) -> Float[Array, "N O"]:
            view = observation.searcher_views.reshape(self.num_searchers, -1)
            remaining = jnp.full((self.num_searchers, 1), observation.targets_remaining)
            return jnp.concatenate([view, observation.positions, remaining], axis=-1)

        return Wrapped(
            env,
            self.time_limit,
            lambda state: state.targets.found.all(),
            observe,
            reward="individual",
        )


def _image(channels: Bool[Array, "*b C height width"]) -> Bool[Array, "*b height width C"]:
    return jnp.moveaxis(channels, -3, -1)


@dataclass(frozen=True, kw_only=True)
class Connector(Jumanji):
    """Agents draw paths to their targets without crossing each other's.

    Observation: the grid in six channels: own path, head and target, then those of the others.
    State: the grid, with a channel for each kind of cell of each agent.
    """

    grid_size: PositiveInt = 10
    num_agents: PositiveInt = 10
    time_limit: PositiveInt = 50

    def _build(self) -> Wrapped:
        if self.grid_size**2 < 2 * self.num_agents:
            raise OptionError(
                f"the ends of {self.num_agents} paths have no room on {self.grid_size} x "
                f"{self.grid_size} cells: choose fewer agents, or a larger grid."
            )
        start = "grid_size num_agents"
        env = self._make("routing.connector", "RandomWalkGenerator", start, "time_limit")

        def own_cells(grid: Num[Array, "height width"]) -> Bool[Array, "N 3 height width"]:
            values = 1 + jnp.arange(3 * self.num_agents).reshape(self.num_agents, 3, 1, 1)
            return grid == values

        def observe(observation: Observation) -> Array:
            grid, cells = observation.grid, own_cells(observation.grid)
            of_kind = (grid > 0) & ((grid - 1) % 3 == jnp.arange(3).reshape(3, 1, 1))
            return _image(jnp.concatenate([cells, of_kind & ~cells], axis=1))

        def everything(observation: Observation) -> Array:
            return _image(own_cells(observation.grid).reshape(-1, *observation.grid.shape))

        def connected_or_blocked(state: State) -> Bool[Array, ""]:
            connected = (state.agents.position == state.agents.target).all(-1)
            blocked = ~state.action_mask[:, 1:].any(-1)
            return (connected | blocked).all()

        return Wrapped(
            env,
            self.time_limit,
            connected_or_blocked,
            observe,
            state=everything,
            reward="individual",
        )


@dataclass(frozen=True, kw_only=True)
class Cleaner(Jumanji):
    """Agents clean the tiles of a maze; an illegal move ends the episode.

    Observation: the grid in four channels: dirt, walls, the agent, the others. State: dirt, walls,
    and a channel for each agent.
    """

    num_rows: PositiveInt = 10
    num_cols: PositiveInt = 10
    num_agents: PositiveInt = 3
    penalty_per_timestep: float = 0.5
    time_limit: PositiveInt = 100

    def _build(self) -> Wrapped:
        constants = _environment("routing.cleaner.constants")
        start, other = "num_rows num_cols num_agents", "time_limit penalty_per_timestep"
        env = self._make("routing.cleaner", "RandomGenerator", start, other)

        def channels(observation: Observation) -> tuple[Array, Array]:
            grid, (rows, columns) = observation.grid, observation.agents_locations.T
            maze = jnp.stack([grid == constants.DIRTY, grid == constants.WALL])
            empty = jnp.zeros((self.num_agents, *grid.shape), bool)
            return maze, empty.at[np.arange(self.num_agents), rows, columns].set(True)

        def observe(observation: Observation) -> Array:
            maze, agents = channels(observation)
            teammates = agents.sum(0) > agents
            shared = jnp.broadcast_to(maze, (self.num_agents, *maze.shape))
            occupancy = jnp.stack([agents, teammates], axis=1)
            return _image(jnp.concatenate([shared, occupancy], axis=1))

        return Wrapped(
            env,
            self.time_limit,
            lambda state: ~(state.grid == constants.DIRTY).any(),
            observe,
            state=lambda observation: _image(jnp.concatenate(channels(observation))),
            illegal_ends=True,
        )


@dataclass(frozen=True, kw_only=True)
class MultiCvrp(Jumanji):
    """Vehicles of limited capacity serve customers within time windows.

    Observation: own position, clock and load, those of the others, and all customers. An action is
    the next customer; 0 is the depot. An episode is truncated, with Jumanji's penalty, after twice
    as many steps as there are customers.
    """

    num_customers: PositiveInt = 20
    num_vehicles: PositiveInt = 2

    def _build(self) -> Wrapped:
        module = _environment("routing.multi_cvrp")
        generator = _environment("routing.multi_cvrp.generator").UniformRandomGenerator
        env = module.MultiCVRP(generator(self.num_customers, self.num_vehicles))

        def vehicles(observation: Observation) -> Float[Array, "N features"]:
            status = jnp.stack([observation.vehicles.local_times, observation.vehicles.capacities])
            return jnp.concatenate([observation.vehicles.coordinates, status.T], axis=-1)

        def customers(observation: Observation) -> Float[Array, "features"]:
            return flatten((observation.nodes, observation.windows, observation.coeffs))

        def observe(observation: Observation) -> Float[Array, "N O"]:
            rows, who = vehicles(observation), np.arange(self.num_vehicles)
            own_first = rows[(who[:, None] + who) % self.num_vehicles]
            shared = customers(observation)
            return jax.vmap(lambda row: jnp.concatenate([row.ravel(), shared]))(own_first)

        def served(state: State) -> Bool[Array, ""]:
            return (state.nodes.demands.sum() == 0) & (state.vehicles.positions == 0).all()

        return Wrapped(
            env,
            2 * self.num_customers,
            served,
            observe,
            state=lambda observation: flatten((vehicles(observation), customers(observation))),
        )


@dataclass(frozen=True, kw_only=True)
class Matrax(Jumanji):
    """A matrix game of matrax for two agents, repeated ``time_limit`` times; always truncated.

    Parameters
    ----------
    game
        The kind of game.
    number
        The number of the game; for penalty games the penalty.
    keep_state
        Observe the actions of all agents in the previous round (-1 before the first), not zeros.
    """

    game: str = "climbing"
    number: int = 0
    keep_state: bool = False
    time_limit: PositiveInt = 500

    def _build(self) -> Wrapped:
        matrax = import_optional("matrax", "envs")
        payoff = matrax.climbing_game
        if self.game != "climbing":
            games = getattr(matrax, f"{self.game.replace('-', '_')}_games")
            if str(self.number) not in games:
                raise OptionError(
                    f"there is no {self.game} game {self.number} in matrax: its numbers are "
                    f"{', '.join(games)}."
                )
            payoff = games[str(self.number)]
        payoff = np.asarray(payoff)
        return Wrapped(
            matrax.MatrixGame(payoff, self.keep_state, self.time_limit),
            self.time_limit,
            lambda _state: jnp.zeros((), bool),
            lambda observation: observation.agent_obs.astype(jnp.float32),
            reward="team" if (payoff[0] == payoff[1]).all() else "individual",
            package="matrax",
        )


def _environment(module: str) -> Any:
    return import_optional(f"jumanji.environments.{module}", "envs", parents_on_use=True)
