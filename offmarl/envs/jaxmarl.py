"""Adapter for the environments of JaxMARL (Rutherford et al. 2024, arXiv 2311.10090).

The adapter calls ``step_env``, not ``step``: ``step`` resets inside and loses the final
observation. JaxMARL merges termination and truncation into one ``done``; the adapter separates
them. Most rewards are shared at least in part, so ``terminated`` and ``truncated`` have the same
value for all agents, and an agent that dies before the end is only not ``alive``.

Grids keep their shape and integers, and observations of several parts are dictionaries.

The environments differ in details, which `COMPAT` collects: they name the global state and the
legal actions differently, agents of some die, some take tuples of actions. The names and classes
are in ``catalogue.toml``. Checked against jaxmarl 0.2.0.
"""

# ruff: noqa: ARG001, ARG005 - the functions of `Compat` share their signatures

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from operator import attrgetter
from types import ModuleType, SimpleNamespace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray
from numpy.typing import NDArray

from offmarl._imports import import_optional, quiet
from offmarl.envs.base import MARKS, Scene, plain_scene, restart, transition
from offmarl.envs.catalogue import Option
from offmarl.envs.registry import release
from offmarl.envs.spaces import (
    Actions,
    ActionSpace,
    Box,
    flatten,
    pad,
    sizes_if_unequal,
    strengthen_types,
    trace_spec,
)
from offmarl.errors import OptionError
from offmarl.types import ArrayTree, Continuous, Discrete, EnvSpec, Timestep, View

_WARNINGS = (
    "scatter inputs have incompatible types",
    "OvercookedV2 is now released",
    "max_dist_to_goal",
    "MABrax is deprecated",
    "Brax System",
    "Accessing `",
)

_NOT_OPTIONS = {
    "auto_reset",  # the adapter resets
    "num_outer_steps",  # episodes of episodes: their boundaries could not be recorded
    "scenario",  # part of the name
    "layout",
    "num_allies",
    "num_enemies",
}

_SET_BY_MPE_SUBCLASSES = {"num_agents", "num_landmarks", "action_type", "dim_c", "dim_p"}
"""Arguments of MPE's base class that its subclasses set themselves."""


# ------------------------------------------------------------------ differences

State = Any
"""A state of a JaxMARL environment."""

Observations = Any
"""The observations of all agents as JaxMARL returns them: in most environments a dict by name."""


def _side(agent: str) -> str:
    """Return the side of an agent in MPE, by the names that its authors gave the agents."""
    return "adversaries" if agent.startswith(("adversary", "leadadversary", "eve")) else "agents"


def _by_name(env: Any, observations: Observations) -> Sequence[Any]:
    return [observations[agent] for agent in env.agents]


class Compat(NamedTuple):
    """How the adapter reads one kind of environment; functions take JaxMARL's environment first."""

    package: str
    """The package below ``jaxmarl.environments`` that defines the environments' classes."""
    time_limit: Callable[[Any], int]
    """Steps after which an episode is truncated if it has not ended before."""
    terminal: Callable[[Any, State, Any, State], Bool[Array, ""] | bool] = (
        lambda env, before, actions, after: False
    )
    """For the last step of an episode, ``(env, before, actions, after)``: True if the task ended,
    False if the time limit was reached. By default, it is always the limit."""
    reward: Literal["team", "individual"] = "individual"
    state: Callable[[Any, Observations, State], Float[Array, "S"]] | None = None
    """The global state, if JaxMARL has one."""
    legal: Callable[[Any, State], Any] | None = None
    """Legal actions by agent, if not all are legal."""
    alive: Callable[[Any, State], Bool[Array, "N"]] | None = None
    """Agents that still act, if some die."""
    agents: Callable[[Any], Sequence[Any]] = attrgetter("agents")
    """The agents that act; JaxMARL moves the others by rules of its own."""
    won: Callable[[Any, State], Bool[Array, ""]] | None = None
    """Whether the agents have won, if they can."""
    split: Callable[[Any, Observations], Sequence[Any]] = _by_name
    """Each agent's own observation, an array or a tree of arrays, if they are not by name."""
    team_of: Callable[[str], str] = lambda agent: ""
    """The name of an agent's team by the agent's name; the same for all if they are one team."""
    tuple_of_actions: bool = False
    """Whether ``step_env`` takes a tuple of actions, not a dict."""
    scene: Callable[[Any, State], Any] | None = None
    """What to draw of a state, if it can be drawn."""
    pictures: Callable[[Any, Sequence[Any]], list[NDArray[np.uint8]]] | None = None
    """Pictures of what ``scene`` returned, if it is not a `Scene`."""


def _max_steps(env: Any) -> int:
    return int(env.max_steps)


def _one_more(env: Any) -> int:
    """MPE and SMAX compare the limit with the steps before this one, so they take one more."""
    return int(env.max_steps) + 1


def _announced(env: Any, before: State, action: Any, after: State) -> Bool[Array, ""]:
    """Whether the prisoner in the room announced that all prisoners have been there."""
    spoken = jnp.stack([action[agent] for agent in env.agents])[before.agent_in_room]
    return spoken == env.game_actions["TELL"]


def _battle(state: State) -> State:
    """Return the state of the battle without that of the scripted enemies."""
    return getattr(state, "state", state)


def _one_side_is_dead(env: Any, before: State, action: Any, after: State) -> Bool[Array, ""]:
    alive = _battle(after).unit_alive
    return ~alive[: env.num_allies].any() | ~alive[env.num_allies :].any()


def _allies_alone(env: Any, state: State) -> Bool[Array, ""]:
    """Whether allies live and no enemy does: if all die at once, nobody wins."""
    alive = _battle(state).unit_alive
    return alive[: env.num_allies].any() & ~alive[env.num_allies :].any()


def _predators_and_prey(env: Any, observations: Observations, state: State) -> Float[Array, "S"]:
    """Concatenate what all agents would observe with unlimited sight."""
    views = env.get_world_state(state)
    return jnp.concatenate([views[agent] for agent in env.agents])


def _map_and_robots(env: Any, observations: Observations, state: State) -> Float[Array, "S"]:
    """Return JaxNav's world state without each agent's index and observation."""
    num_agents = len(env.agents)
    (size,) = observations[env.agents[0]].shape
    return env.get_world_state(state)[0, num_agents:-size]


def _robots_alive(env: Any, state: State) -> Bool[Array, "N"]:
    """Robots stop where they collide; with ``evaporating`` they also vanish at their goal."""
    vanished = state.term | state.goal_reached if env.evaporating else jnp.zeros_like(state.term)
    return ~(state.move_term | vanished)


def _points(env: Any, state: State) -> Scene:
    """Show MPE's agents, by team, and its landmarks as targets; the middle is at (2, 2) of 4."""
    places, count = state.p_pos + 2.0, len(env.agents)
    x, y = state.p_vel[:count].T
    sides = [_side(agent) for agent in env.agents]
    return plain_scene(
        4,
        places[:count],
        team=jnp.asarray([sorted(set(sides)).index(side) for side in sides]),
        heading=jnp.arctan2(y, x),
        marks=places[count:],
        mark=jnp.full(len(places) - count, MARKS.index("target")),
    )


def _units(env: Any, state: State) -> Scene:
    """Show the units of both armies of SMAX; those that died are crossed out."""
    battle = _battle(state)
    army = (jnp.arange(env.num_allies + env.num_enemies) >= env.num_allies).astype(jnp.int32)
    return plain_scene(
        int(env.map_width),
        battle.unit_positions,
        alive=battle.unit_alive,
        team=army,
        heading=jnp.pi * army,
    )


def _robots(env: Any, state: State) -> Scene:
    """Show JaxNav's robots, their goals, and the walls."""
    return plain_scene(
        max(state.map_data.shape),
        state.pos[:, :2],
        alive=_robots_alive(env, state),
        heading=state.theta.reshape(-1),
        marks=state.goal,
        mark=jnp.full(len(state.goal), MARKS.index("site")),
        cells=state.map_data.T.astype(jnp.float32),
    )


def _kitchen(env: Any, states: Sequence[Any]) -> list[NDArray[np.uint8]]:
    module: Any = import_optional("jaxmarl.viz.overcooked_visualizer", "envs")
    visualizer, images = module.OvercookedVisualizer(), list[NDArray[np.uint8]]()
    visualizer.window = SimpleNamespace(show_img=images.append)  # keeps what it would show
    for state in states:
        visualizer.render(env.agent_view_size, state, highlight=False)
    return images


def _longest_game(env: Any) -> int:
    """Return an upper bound of the turns in a game of Hanabi.

    Every play or discard takes a card off the deck, until a last round. Every hint costs a token;
    a discard or a finished colour returns one.
    """
    cards = env.deck_size - env.num_agents * env.hand_size + env.num_agents
    return int(2 * cards + env.max_info_tokens)


def inner_steps(env: Any) -> int:
    """Subtract the step that the adapter adds: at their own limit these environments reset."""
    return int(env.num_inner_steps) - 1


def _with_inventory(env: Any, observations: Observations) -> Sequence[Any]:
    grids, inventory = observations["observations"], observations["inventory"]
    return [_grid(grids[agent], inventory[:, agent]) for agent in env.agents]


def _grid(grid: Array, inventory: Array) -> dict[str, Array]:
    return {"grid": _whole_numbers(grid), "inventory": inventory}


def _whole_numbers(grid: Float[Array, "height width channels"]) -> Array:
    """Undo JaxMARL's promotion of one-hot cells, counted by int8, to float32."""
    return grid.astype(jnp.int8)


_SMAX = Compat(
    "smax",
    _one_more,
    _one_side_is_dead,
    "team",
    state=lambda env, observations, state: observations["world_state"],
    legal=lambda env, state: env.get_avail_actions(state),
    alive=lambda env, state: _battle(state).unit_alive[: len(env.agents)],
    won=_allies_alone,
    scene=_units,
)
_MPE = Compat("mpe", _one_more, scene=_points)

COMPAT = {
    "mpe": _MPE,
    "mpe_team": _MPE._replace(reward="team"),
    "mpe_rivals": _MPE._replace(team_of=_side),
    "mpe_facmac": _MPE._replace(
        reward="team",
        state=_predators_and_prey,
        agents=attrgetter("adversaries"),
        split=lambda env, observations: [observations[agent] for agent in env.adversaries],
    ),
    "smax": _SMAX,
    "smax_self_play": _SMAX._replace(
        reward="individual",
        won=None,
        team_of=lambda agent: "allies" if agent.startswith("ally") else "enemies",
    ),
    "overcooked": Compat(
        "overcooked",
        _max_steps,
        reward="team",
        scene=lambda env, state: state,
        pictures=_kitchen,
    ),
    "overcooked_v2": Compat("overcooked_v2", _max_steps, reward="team"),
    "jaxnav": Compat(
        "jaxnav",
        _max_steps,
        lambda env, before, action, after: (
            after.goal_reached | after.move_term | before.done
        ).all(),
        state=_map_and_robots,
        alive=_robots_alive,
        scene=_robots,
    ),
    "hanabi": Compat(
        "hanabi",
        _longest_game,
        lambda env, before, action, after: True,
        "team",
        legal=lambda env, state: env.get_legal_moves(state),
    ),
    "switch_riddle": Compat("switch_riddle", _max_steps, _announced, "team"),
    "coin_game": Compat("coin_game", inner_steps),
    "storm": Compat("storm", inner_steps, split=_with_inventory),
    "storm_2p": Compat(
        "storm",
        inner_steps,
        split=lambda env, pair: [_grid(x["observation"], x["inventory"]) for x in pair],
        tuple_of_actions=True,
    ),
    "storm_np": Compat(
        "storm", inner_steps, split=lambda env, observations: [*map(_whole_numbers, observations)]
    ),
    "mabrax": Compat(
        "mabrax",
        lambda env: -(-int(env.episode_length) // env.action_repeat),
        lambda env, before, action, after: after.info["truncation"] == 0,
        "team",
        state=lambda env, observations, state: state.obs,
    ),
}
"""The differences by kind of environment; ``catalogue.toml`` names each one's kind."""


# ------------------------------------------------------------------ the adapter


class JaxMarlState(NamedTuple):
    """The wrapped environment's state and the number of steps taken."""

    inner: Any
    time: Int[Array, ""]


@dataclass(frozen=True)
class JaxMarl:
    """A JaxMARL environment; create it by name with `offmarl.envs.make`."""

    name: str
    env_class: str
    compat: str
    """Key of its entry in the table of differences."""
    arguments: tuple[tuple[str, Option], ...] = ()

    @classmethod
    def options(cls, env_class: str, compat: str) -> dict[str, Option]:
        """Return the arguments of the class that fit into a name, with their defaults.

        An ``agent_view_size`` of 0 stands for None: the cooks see the whole kitchen.
        """
        wrapped_class = _load_class(env_class, compat)
        arguments, passes_on = _arguments(wrapped_class)
        if env_class == "HeuristicEnemySMAX":
            arguments |= _arguments(_load_class("SMAX", compat))[0]
        elif compat == "mabrax":
            arguments |= _arguments(wrapped_class.__mro__[1])[0]
        elif passes_on:
            base = _arguments(_load_class("SimpleMPE", compat))[0]
            base = {k: v for k, v in base.items() if k not in _SET_BY_MPE_SUBCLASSES}
            arguments = base | arguments
        if env_class == "OvercookedV2":
            arguments["agent_view_size"] = 0
        kinds = (bool, int, float, str)
        return {k: v for k, v in arguments.items() if type(v) in kinds and k not in _NOT_OPTIONS}

    @classmethod
    def build(cls, name: str, env_class: str, compat: str, **arguments: Option) -> "JaxMarl":
        """Create an environment, and check that JaxMARL accepts the arguments."""
        env = cls(name, env_class, compat, tuple(sorted(arguments.items())))
        _ = env.spec
        return env

    @property
    def wrapped(self) -> Any:
        """The JaxMARL environment."""
        return _wrap(self).env

    @property
    def spec(self) -> EnvSpec:
        """Sizes, names and limits."""
        return _spec(self)

    @property
    def scene(self) -> Callable[[JaxMarlState], Any]:
        """What to draw of a state, if the environment can be drawn."""
        if (scene := COMPAT[self.compat].scene) is None:
            raise AttributeError(f"{self.name} cannot be drawn")
        return lambda state: scene(self.wrapped, state.inner)

    @property
    def pictures(self) -> Callable[[Sequence[Any]], list[NDArray[np.uint8]]]:
        """Pictures of an episode, if JaxMARL draws them."""
        if (pictures := COMPAT[self.compat].pictures) is None:
            raise AttributeError(f"{self.name} does not draw by itself")
        return partial(pictures, self.wrapped)

    def reset(self, key: PRNGKeyArray) -> tuple[JaxMarlState, Timestep]:
        """Start an episode."""
        wrapped = _wrap(self)
        with quiet(*_WARNINGS):
            return self.begin(*wrapped.env.reset(key))

    def begin(self, observations: Observations, inner: State) -> tuple[JaxMarlState, Timestep]:
        """Start an episode in a state of the wrapped environment, given what is observed there."""
        view = _view(_wrap(self), observations, inner)
        return JaxMarlState(strengthen_types(inner), jnp.zeros((), jnp.int32)), restart(view)

    def step(
        self, key: PRNGKeyArray, state: JaxMarlState, action: Array
    ) -> tuple[JaxMarlState, Timestep]:
        """Take one step with JaxMARL's ``step_env``."""
        wrapped = _wrap(self)
        env, compat = wrapped.env, wrapped.compat
        actions = wrapped.actions.split(action)
        by_agent = dict(zip(wrapped.agents, actions, strict=True))
        others = (agent for agent in env.agents if agent not in by_agent)
        by_agent |= {agent: jnp.zeros(env.action_space(agent).shape) for agent in others}
        joint_action = tuple(actions) if compat.tuple_of_actions else by_agent
        with quiet(*_WARNINGS):
            observations, inner, rewards, dones, info = env.step_env(key, state.inner, joint_action)
            view = _view(wrapped, observations, inner)
            ended = jnp.asarray(compat.terminal(env, state.inner, by_agent, inner))
        time = state.time + 1
        over = dones["__all__"] | (time >= compat.time_limit(env))
        everyone = jnp.ones(len(wrapped.agents), bool)
        timestep = transition(
            view,
            _by_agent(wrapped.agents, rewards),
            terminated=everyone & over & ended,
            truncated=everyone & over & ~ended,
            shaping=_by_agent(wrapped.agents, info["shaped_reward"])
            if "shaped_reward" in info
            else None,
            won=compat.won and compat.won(env, inner),
        )
        return JaxMarlState(strengthen_types(inner), time), timestep


def _by_agent(agents: Sequence[Any], numbers: Any) -> Float[Array, "N"]:
    return jnp.stack([jnp.asarray(numbers[agent], jnp.float32) for agent in agents])


class _Wrapped(NamedTuple):
    env: Any
    compat: Compat
    agents: Sequence[Any]
    actions: Actions


@lru_cache(maxsize=256)
def _wrap(env: JaxMarl) -> _Wrapped:
    """Create the JaxMARL environment once: JAX compiles once for the same object."""
    with quiet(*_WARNINGS), jax.ensure_compile_time_eval():
        inner = _construct(env)
    agents = COMPAT[env.compat].agents(inner)
    actions = Actions(tuple(_action_space(inner, agent) for agent in agents))
    return _Wrapped(inner, COMPAT[env.compat], agents, actions)


@lru_cache(maxsize=256)
def _spec(env: JaxMarl) -> EnvSpec:
    wrapped = _wrap(env)
    inner, compat = wrapped.env, wrapped.compat
    with quiet(*_WARNINGS):
        observations, _ = jax.eval_shape(inner.reset, jax.random.key(0))
    sizes = _sizes(jax.eval_shape(partial(compat.split, inner), observations))
    sides = [compat.team_of(str(agent)) for agent in wrapped.agents]
    teams = list(dict.fromkeys(sides))
    names = [agent if isinstance(agent, str) else f"agent_{agent}" for agent in wrapped.agents]
    return trace_spec(
        env,
        Discrete if wrapped.actions.discrete else Continuous,
        time_limit=compat.time_limit(inner),
        reward=compat.reward,
        state="concatenated" if compat.state is None else "native",
        agents=tuple(names),
        observation_sizes=sizes_if_unequal(sizes),
        action_sizes=sizes_if_unequal(wrapped.actions.sizes),
        teams=tuple(map(teams.index, sides)) if len(teams) > 1 else None,
        team_names=tuple(teams) if len(teams) > 1 else None,
        package=release("jaxmarl"),
    )


def _view(wrapped: _Wrapped, observations: Observations, inner: Any) -> View:
    env, compat = wrapped.env, wrapped.compat
    observation, concatenated = _observe(wrapped, observations)
    state = compat.state and compat.state(env, observations, inner)
    legal = jnp.asarray(wrapped.actions.mask)
    if compat.legal and wrapped.actions.discrete:
        masks = compat.legal(env, inner)
        legal = pad([masks[agent] for agent in wrapped.agents], legal.shape[1]).astype(bool)
    return View(
        observation=observation,
        state=concatenated if state is None else state.astype(jnp.float32),
        legal_actions=legal,
        alive=compat.alive(env, inner) if compat.alive else jnp.ones(len(legal), bool),
    )


def _sizes(trees: Sequence[Any]) -> list[int]:
    """Return the number of entries of each agent's observation."""
    return [sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in trees]


def _observe(wrapped: _Wrapped, observations: Observations) -> tuple[ArrayTree, ArrayTree]:
    """Return the padded observations, and the state if JaxMARL has none.

    That state is all vectors concatenated without padding; observations of other shapes would only
    be stored twice, so there is no state then.
    """
    trees = wrapped.compat.split(wrapped.env, observations)
    sizes = _sizes(trees)
    if len(set(sizes)) > 1:
        vectors = [flatten(tree) for tree in trees]
        return pad(vectors, max(sizes)), jnp.concatenate(vectors)
    # Stack before flattening: JaxMARL sliced these out of one array, and XLA undoes the slicing
    # only in this order.
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)
    if any(leaf.ndim > 2 for leaf in jax.tree.leaves(stacked)):
        return stacked, jnp.zeros(0)
    observation = jax.vmap(flatten)(stacked)
    return observation, observation.ravel()


def _action_space(env: Any, agent: Any) -> ActionSpace:
    space = env.action_space(agent)
    if hasattr(space, "n"):
        return Discrete(int(space.n))
    low, high = (np.broadcast_to(bound, space.shape).ravel() for bound in (space.low, space.high))
    return Box(tuple(low.tolist()), tuple(high.tolist()))


# ------------------------------------------------------------------ options and construction


def _arguments(cls: Any) -> tuple[dict[str, Any], bool]:
    """Return a class's arguments with defaults, and whether it passes others to its base."""
    parameters = inspect.signature(cls).parameters.values()
    passes_on = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return {parameter.name: parameter.default for parameter in parameters}, passes_on


def _load_class(env_class: str, compat: str) -> Any:
    if compat == "mabrax":
        import_optional("brax", "mabrax")
    return getattr(_package(compat), env_class)


def _package(compat: str) -> ModuleType:
    """Import the environments of one kind.

    JaxMARL imports all of its environments at once, some of which take seconds.
    """
    name = f"jaxmarl.environments.{COMPAT[compat].package}"
    return import_optional(name, "envs", parents_on_use=True)


def _construct(env: JaxMarl) -> Any:
    """Create the JaxMARL environment; `OptionError` if JaxMARL rejects the arguments."""
    arguments = dict(env.arguments)
    try:
        with _no_mujoco_log() if env.compat == "mabrax" else nullcontext():
            return _load_class(env.env_class, env.compat)(**_convert(env, arguments))
    except (TypeError, ValueError, AssertionError, LookupError, NotImplementedError) as error:
        options = ", ".join(f"{name}={value}" for name, value in arguments.items())
        raise OptionError(
            f"JaxMARL cannot create {env.env_class} with {options}: {error}"
        ) from error


def _convert(env: JaxMarl, arguments: Mapping[str, Option]) -> dict[str, Any]:
    """Return the arguments for the class: objects where a name holds only a word."""
    values: dict[str, Any] = dict(arguments)
    if "SMAX" in env.env_class:
        values["scenario"] = _package(env.compat).map_name_to_scenario(values["scenario"])
    if env.env_class == "Overcooked":
        values["layout"] = _package(env.compat).overcooked_layouts[values["layout"]]
    if COMPAT[env.compat].time_limit is inner_steps:
        default = env.options(env.env_class, env.compat)["num_inner_steps"]
        values["num_inner_steps"] = 1 + values.get("num_inner_steps", default)
    if env.compat == "mabrax":
        values["auto_reset"] = False
    return values


@contextmanager
def _no_mujoco_log() -> Iterator[None]:
    """Keep MuJoCo from writing warnings to a file in the working directory.

    They concern JaxMARL's own body descriptions, which users cannot change.
    """
    mujoco = import_optional("mujoco", "mabrax")
    before = mujoco.get_mju_user_warning()
    mujoco.set_mju_user_warning(lambda _: None)
    try:
        yield
    finally:
        mujoco.set_mju_user_warning(before)
