"""Resets and steps of the wrapped environments, without the adapters.

Written anew from what these packages return, so that it shares no mistake with the adapters.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from offmarl._arrays import is_key
from offmarl._compiling import QUICKLY
from offmarl._imports import quiet
from offmarl.envs.conformance import compile_programs
from offmarl.testing import EnvironmentConformance
from offmarl.types import Continuous, map_tree


class Outcome(NamedTuple):
    """What a wrapped environment returns for a reset or a step; None is not compared."""

    observations: list[Any]
    """Each agent's own observation, without padding: an array, or a dictionary of arrays."""
    legal_actions: Any = None
    state: Any = None
    reward: Any = None
    last: Any = None
    truncated: Any = None


class Wrapped(NamedTuple):
    """A wrapped environment, with which every step of the adapter is compared."""

    reset: Callable[[Any], Outcome]
    """``key -> outcome``"""
    step: Callable[[Any, Any, Any], tuple[Outcome, Any]]
    """``key, the adapter's state, action -> outcome, the environment's state``"""
    inner: Callable[[Any], Any]
    """``the adapter's state -> the environment's state``"""


class WrappedConformance(EnvironmentConformance):
    """Also compares every reset and step with those of the wrapped environment, if there is one."""

    def _check_every_step_equals_that_of_the_wrapped_environment(self, env, recording):
        wrapped, key = wrapped_by(env), jax.random.key(5)
        if wrapped is None:
            return
        _, first = compile_programs(env).reset(key)
        self._compare(first, jax.jit(wrapped.reset, compiler_options=QUICKLY)(key))
        steps = recording.steps
        expected, after = jax.device_get(take_steps(wrapped, steps))
        later = jax.tree.map(lambda x: x[:, 1:], wrapped.inner(steps.state))
        before = jax.tree.map(lambda x: x[:, :-1], after)
        same_episode = ~steps.timestep.last[:, :-1]
        for ours, theirs in zip(*map(jax.tree.leaves, (later, before)), strict=True):
            self._close(plain(ours)[same_episode], plain(theirs)[same_episode])
        self._compare(steps.timestep, expected)
        ours = steps.timestep
        self._close(ours.reward, expected.reward)
        if expected.last is None:  # built for one more step, so it never ends itself
            limit = env.spec.time_limit
            late = np.arange(ours.last.shape[1]) % limit == limit - 1
            chex.assert_trees_all_equal(ours.last, np.broadcast_to(late, ours.last.shape))
        else:
            chex.assert_trees_all_equal(ours.last, expected.last)
        if expected.truncated is not None:
            chex.assert_trees_all_equal(ours.truncated.all(-1), expected.truncated)

    def _close(self, ours, theirs):
        tolerance = self.tolerance
        chex.assert_trees_all_close(ours, theirs, rtol=tolerance, atol=tolerance / 10)

    def _compare(self, ours, theirs):
        lead = ours.last.ndim
        for i, expected in enumerate(theirs.observations):
            observation = map_tree(lambda x, i=i: x.take(i, axis=lead), ours.next_view.observation)
            unpadded = map_tree(lambda x, y: x[tuple(map(slice, y.shape))], observation, expected)
            self._close(unpadded, expected)
        if theirs.legal_actions is not None:
            chex.assert_trees_all_equal(ours.next_view.legal_actions, theirs.legal_actions)
        if theirs.state is not None:
            self._close(ours.next_view.state, theirs.state)


def take_steps(wrapped, steps):
    """Return the outcomes and states of recorded steps ``(E, T, ...)``, taken again."""

    def step(recorded):
        key, _ = jax.random.split(recorded.key)
        return wrapped.step(key, recorded.state, recorded.action)

    many = jax.vmap(lambda recorded: jax.lax.map(step, recorded))
    return jax.jit(many, compiler_options=QUICKLY)(steps)


def plain(leaf):
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)


SHORTENED = ("jaxmarl/coin_game", "jaxmarl/storm", "jaxmarl/storm_2p", "jaxmarl/storm_np")
"""Those that reset themselves in ``step_env``, and are built for a step more than we take."""

WARNINGS = ("scatter inputs have incompatible types", "max_dist_to_goal", "Brax System")


def wrapped_by(env):
    """Return the environment inside of ours; None where ours is the only one."""
    kinds = {"jaxmarl": jaxmarl, "jumanji": jumanji, "matrax": matrax, "pgx": pgx}
    kind = env.spec.name.partition("/")[0]
    return kinds[kind](env) if kind in kinds else None


def vector(*parts):
    return jnp.concatenate([jnp.ravel(part).astype(jnp.float32) for part in parts])


def jaxmarl(env):
    raw, name = env.wrapped, env.name.partition(":")[0]
    agents = raw.adversaries if "facmac" in name else raw.agents  # its prey moves by itself

    def seen(observations, state, **of_a_step):
        return Outcome(
            observations_of_jaxmarl(agents, observations),
            legal_in_jaxmarl(name, raw, state),
            observations.get("world_state") if isinstance(observations, dict) else None,
            **of_a_step,
        )

    def reset(key):
        with quiet(*WARNINGS):
            return seen(*raw.reset(key))

    def step(key, state, action):
        actions = [action[i] for i in range(len(agents))]
        if isinstance(env.spec.action, Continuous):
            spaces = [raw.action_space(agent) for agent in agents]
            actions = [stretched(space, part) for space, part in zip(spaces, actions, strict=True)]
        by_agent = {agent: jnp.ones(5) for agent in raw.agents[len(agents) :]}  # has no effect
        by_agent |= dict(zip(agents, actions, strict=True))
        with quiet(*WARNINGS):
            observations, after, rewards, dones, _ = raw.step_env(
                key, state.inner, tuple(actions) if name == "jaxmarl/storm_2p" else by_agent
            )
        reward = jnp.stack([rewards[agent] for agent in agents]).astype(jnp.float32)
        last = None if name in SHORTENED else dones["__all__"]
        return seen(observations, after, reward=reward, last=last), after

    return Wrapped(reset, step, lambda state: state.inner)


def stretched(space, action):
    part = action[: space.shape[0]]
    return space.low + (part + 1) / 2 * (space.high - space.low)


def observations_of_jaxmarl(agents, view):
    if isinstance(view, dict) and "inventory" in view:  # storm
        grids, inventory = view["observations"], view["inventory"]
        return [{"grid": grids[agent], "inventory": inventory[:, agent]} for agent in agents]
    if isinstance(view, dict):
        return [view[agent] for agent in agents]
    if isinstance(view[0], dict):  # storm_2p
        return [{"grid": x["observation"], "inventory": x["inventory"]} for x in view]
    return list(view)


def legal_in_jaxmarl(name, raw, state):
    if not hasattr(raw.action_space(raw.agents[0]), "n"):
        return None  # continuous actions have no mask
    if "smax" in name:
        legal = raw.get_avail_actions(state)
    elif "hanabi" in name:
        legal = raw.get_legal_moves(state)
    else:
        return None
    most = max(raw.action_space(agent).n for agent in raw.agents)
    padded = [jnp.pad(legal[agent], (0, most - len(legal[agent]))) for agent in raw.agents]
    return jnp.stack(padded).astype(bool)


def jumanji(env):
    raw, name = env.wrapped, env.name.partition(":")[0]
    num_agents = env.spec.num_agents

    def seen(timestep, **of_a_step):
        observation = timestep.observation
        observations = OBSERVE[name](observation, num_agents)
        return Outcome(observations, getattr(observation, "action_mask", None), **of_a_step)

    def step(key, state, action):
        after, timestep = raw.step(state, action.astype(raw.action_spec.dtype))
        reward = jnp.broadcast_to(timestep.reward, (num_agents,)).astype(jnp.float32)
        last, truncated = timestep.last(), None
        if name == "jumanji/lbf":  # one of two that tell truncation from termination
            truncated = last & (timestep.discount == 1).all()
        return seen(timestep, reward=reward, last=last, truncated=truncated), after

    return Wrapped(lambda key: seen(raw.reset(key)[1]), step, lambda state: state)


def view_of_jumanji(view, num_agents):
    return [vector(view.agents_view[i]) for i in range(num_agents)]


def view_of_a_searcher(view, num_agents):
    return [
        vector(view.searcher_views[i], view.positions[i], view.targets_remaining)
        for i in range(num_agents)
    ]


def view_of_a_connector(view, num_agents):
    from jumanji.environments.routing.connector.utils import get_path, get_position, get_target

    kinds = get_path, get_position, get_target
    agents = range(num_agents)
    planes = [[view.grid == kind(i) for kind in kinds] for i in agents]
    other_planes = [
        [sum(planes[j][k].astype(int) for j in agents if j != i) for k in range(3)] for i in agents
    ]
    return [jnp.stack([*planes[i], *other_planes[i]], axis=-1).astype(bool) for i in agents]


def view_of_a_cleaner(view, num_agents):
    from jumanji.environments.routing.cleaner.constants import DIRTY, WALL

    agents = range(num_agents)
    empty = jnp.zeros_like(view.grid, jnp.float32)
    places = [empty.at[tuple(view.agents_locations[i])].set(1) for i in agents]
    other_places = [sum(places[j] for j in agents if j != i) > 0 for i in agents]
    maze = [view.grid == DIRTY, view.grid == WALL]
    return [jnp.stack([*maze, places[i], other_places[i]], axis=-1).astype(bool) for i in agents]


def view_of_a_vehicle(view, num_agents):
    fleet, nodes = view.vehicles, jax.tree.leaves((view.nodes, view.windows, view.coeffs))
    rows = [
        vector(fleet.coordinates[i], fleet.local_times[i], fleet.capacities[i])
        for i in range(num_agents)
    ]
    return [vector(*rows[i:], *rows[:i], *nodes) for i in range(num_agents)]


OBSERVE = {
    "jumanji/robot_warehouse": view_of_jumanji,
    "jumanji/lbf": view_of_jumanji,
    "jumanji/search_and_rescue": view_of_a_searcher,
    "jumanji/connector": view_of_a_connector,
    "jumanji/cleaner": view_of_a_cleaner,
    "jumanji/multi_cvrp": view_of_a_vehicle,
}


def matrax(env):
    raw = env.wrapped

    def seen(timestep, **of_a_step):
        return Outcome([vector(x) for x in timestep.observation.agent_obs], **of_a_step)

    def step(key, state, action):
        after, timestep = raw.step(state, action)
        reward, last = timestep.reward.astype(jnp.float32), timestep.last()
        return seen(timestep, reward=reward, last=last, truncated=last), after

    return Wrapped(lambda key: seen(raw.reset(key)[1]), step, lambda state: state)


def pgx(env):
    raw = env.wrapped

    def of_seat(state, player):
        """What pgx shows a player, and what it may do: only the last if it is not its turn."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            view = raw.observe(state, player)
        view = view.astype(jnp.float32) if view.ndim == 1 else view
        waits = (player != state.current_player) | state.terminated
        return view, jnp.append(jnp.where(waits, False, state.legal_action_mask), waits)

    def seen(state, first, **of_a_step):
        observations, legal = zip(of_seat(state, first), of_seat(state, 1 - first), strict=True)
        return Outcome([*observations], jnp.stack(legal), **of_a_step)

    def reset(key):
        state = raw.init(key)
        return seen(state, state.current_player)

    def step(key, state, action):
        first, inner = state.first, state.inner
        after = raw.step(inner, jnp.where(inner.current_player == first, action[0], action[1]))
        reward = jnp.where(first == 0, after.rewards, after.rewards[::-1])
        over = after.terminated
        return seen(after, first, reward=reward, last=over, truncated=over & False), after

    return Wrapped(reset, step, lambda state: state.inner)
