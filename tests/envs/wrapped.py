"""Resets and steps of the wrapped environments, without the adapters.

Written anew from what these packages return, so that it shares no mistake with the adapters.
"""

import warnings

import jax
import jax.numpy as jnp

from offmarl._imports import quiet
from offmarl.envs.conformance import Reference, Seen
from offmarl.types import Continuous

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

    def seen(observations, state, **of_a_step):
        return Seen(
            observations_of_jaxmarl(raw, observations),
            legal_in_jaxmarl(name, raw, state),
            observations.get("world_state") if isinstance(observations, dict) else None,
            **of_a_step,
        )

    def reset(key):
        with quiet(*WARNINGS):
            return seen(*raw.reset(key))

    def step(key, state, action):
        given = [action[i] for i in range(len(raw.agents))]
        if isinstance(env.spec.action, Continuous):
            spaces = [raw.action_space(agent) for agent in raw.agents]
            given = [stretched(space, own) for space, own in zip(spaces, given, strict=True)]
        by_agent = dict(zip(raw.agents, given, strict=True))
        with quiet(*WARNINGS):
            observations, after, rewards, dones, _ = raw.step_env(
                key, state.inner, tuple(given) if name == "jaxmarl/storm_2p" else by_agent
            )
        reward = jnp.stack([rewards[agent] for agent in raw.agents]).astype(jnp.float32)
        last = None if name in SHORTENED else dones["__all__"]
        return seen(observations, after, reward=reward, last=last), after

    return Reference(reset, step, lambda state: state.inner)


def stretched(space, action):
    own = action[: space.shape[0]]
    return space.low + (own + 1) / 2 * (space.high - space.low)


def observations_of_jaxmarl(raw, seen):
    if isinstance(seen, dict) and "inventory" in seen:  # storm
        grids, inventory = seen["observations"], seen["inventory"]
        return [{"grid": grids[agent], "inventory": inventory[:, agent]} for agent in raw.agents]
    if isinstance(seen, dict):
        return [seen[agent] for agent in raw.agents]
    if isinstance(seen[0], dict):  # storm_2p
        return [{"grid": each["observation"], "inventory": each["inventory"]} for each in seen]
    return list(seen)


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
        each = OBSERVE[name](observation, num_agents)
        return Seen(each, getattr(observation, "action_mask", None), **of_a_step)

    def step(key, state, action):
        after, timestep = raw.step(state, action.astype(raw.action_spec.dtype))
        reward = jnp.broadcast_to(timestep.reward, (num_agents,)).astype(jnp.float32)
        last, truncated = timestep.last(), None
        if name == "jumanji/lbf":  # one of two that tell truncation from termination
            truncated = last & (timestep.discount == 1).all()
        return seen(timestep, reward=reward, last=last, truncated=truncated), after

    return Reference(lambda key: seen(raw.reset(key)[1]), step, lambda state: state)


def view_of_jumanji(seen, num_agents):
    return [vector(seen.agents_view[i]) for i in range(num_agents)]


def view_of_a_searcher(seen, num_agents):
    return [
        vector(seen.searcher_views[i], seen.positions[i], seen.targets_remaining)
        for i in range(num_agents)
    ]


def view_of_a_connector(seen, num_agents):
    from jumanji.environments.routing.connector.utils import get_path, get_position, get_target

    kinds = get_path, get_position, get_target
    agents = range(num_agents)
    own = [[seen.grid == kind(i) for kind in kinds] for i in agents]
    others = [
        [sum(own[j][k].astype(int) for j in agents if j != i) for k in range(3)] for i in agents
    ]
    return [jnp.stack([*own[i], *others[i]], axis=-1).astype(bool) for i in agents]


def view_of_a_cleaner(seen, num_agents):
    from jumanji.environments.routing.cleaner.constants import DIRTY, WALL

    agents = range(num_agents)
    empty = jnp.zeros_like(seen.grid, jnp.float32)
    here = [empty.at[tuple(seen.agents_locations[i])].set(1) for i in agents]
    others = [sum(here[j] for j in agents if j != i) > 0 for i in agents]
    maze = [seen.grid == DIRTY, seen.grid == WALL]
    return [jnp.stack([*maze, here[i], others[i]], axis=-1).astype(bool) for i in agents]


def view_of_a_vehicle(seen, num_agents):
    fleet, nodes = seen.vehicles, jax.tree.leaves((seen.nodes, seen.windows, seen.coeffs))
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
        return Seen([vector(each) for each in timestep.observation.agent_obs], **of_a_step)

    def step(key, state, action):
        after, timestep = raw.step(state, action)
        reward, last = timestep.reward.astype(jnp.float32), timestep.last()
        return seen(timestep, reward=reward, last=last, truncated=last), after

    return Reference(lambda key: seen(raw.reset(key)[1]), step, lambda state: state)


def pgx(env):
    raw = env.wrapped

    def of_seat(state, player):
        """What pgx shows a player, and what it may do: only the last if it is not its turn."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            seen = raw.observe(state, player)
        seen = seen.astype(jnp.float32) if seen.ndim == 1 else seen
        waits = (player != state.current_player) | state.terminated
        return seen, jnp.append(jnp.where(waits, False, state.legal_action_mask), waits)

    def seen(state, first, **of_a_step):
        each, legal = zip(of_seat(state, first), of_seat(state, 1 - first), strict=True)
        return Seen([*each], jnp.stack(legal), **of_a_step)

    def reset(key):
        state = raw.init(key)
        return seen(state, state.current_player)

    def step(key, state, action):
        first, inner = state.first, state.inner
        after = raw.step(inner, jnp.where(inner.current_player == first, action[0], action[1]))
        reward = jnp.where(first == 0, after.rewards, after.rewards[::-1])
        over = after.terminated
        return seen(after, first, reward=reward, last=over, truncated=over & False), after

    return Reference(reset, step, lambda state: state.inner)
