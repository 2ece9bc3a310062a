"""What JaxMARL's environments do each in their own way, as a table of pure functions.

JaxMARL has one ``done`` for the end of a task and for its time limit; some environments have a
global state, legal actions, or agents that die, each under another name; two return tuples. The
functions below take the wrapped environment first. Checked against jaxmarl 0.2.0.
"""

# ruff: noqa: ARG001, ARG005 - the functions of a table share their arguments

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

State = Any
"""A state of a JaxMARL environment."""

Observations = Any
"""What a JaxMARL environment returns for all agents: mostly a dict by name."""


def _never(env: Any, before: State, action: Any, after: State) -> Bool[Array, ""]:
    return jnp.zeros((), bool)


def _always(env: Any, before: State, action: Any, after: State) -> Bool[Array, ""]:
    return jnp.ones((), bool)


def _no_state(env: Any, observations: Observations, state: State) -> None:
    return None


def _all_legal(env: Any, state: State) -> None:
    return None


def _all_alive(env: Any, state: State) -> Bool[Array, "N"]:
    return jnp.ones(len(env.agents), bool)


def _by_name(env: Any, observations: Observations) -> Sequence[Any]:
    return [observations[agent] for agent in env.agents]


class Quirks(NamedTuple):
    """How one environment differs from the others."""

    time_limit: Callable[[Any], int]
    """Steps after which an episode is truncated, if it does not end before."""
    terminal: Callable[[Any, State, Any, State], Bool[Array, ""]] = _never
    """Of the last step of an episode, ``(env, before, actions, after)``: whether the task itself
    came to its end, rather than its time."""
    reward: Literal["team", "individual"] = "individual"
    state: Callable[[Any, Observations, State], Float[Array, "S"] | None] = _no_state
    """The global state; None where there is none of its own."""
    legal: Callable[[Any, State], Any] = _all_legal
    """Legal actions by agent; None where all are."""
    alive: Callable[[Any, State], Bool[Array, "N"]] = _all_alive
    split: Callable[[Any, Observations], Sequence[Any]] = _by_name
    """Each agent's own observation: an array, or a tree of them."""
    tuple_of_actions: bool = False
    """Actions are taken in a tuple rather than a dict."""


def _max_steps(env: Any) -> int:
    return int(env.max_steps)


def _one_more(env: Any) -> int:
    """MPE and SMAX compare the steps before the one taken with their limit: one more is taken."""
    return int(env.max_steps) + 1


def _told(env: Any, before: State, action: Any, after: State) -> Bool[Array, ""]:
    """Say whether the prisoner in the room told that all had been there."""
    spoken = jnp.stack([action[agent] for agent in env.agents])[before.agent_in_room]
    return spoken == env.game_actions["TELL"]


def _battle(state: State) -> State:
    """Return the state of the battle itself, without that of the scripted enemies."""
    return getattr(state, "state", state)


def _one_side_is_dead(env: Any, before: State, action: Any, after: State) -> Bool[Array, ""]:
    alive = _battle(after).unit_alive
    return ~alive[: env.num_allies].any() | ~alive[env.num_allies :].any()


def _units_alive(env: Any, state: State) -> Bool[Array, "N"]:
    return _battle(state).unit_alive[: len(env.agents)]


def _world_state(env: Any, observations: Observations, state: State) -> Float[Array, "S"]:
    return observations["world_state"]


def _legal(env: Any, state: State) -> Any:
    return env.get_avail_actions(state)


def _unmasked(env: Any, observations: Observations, state: State) -> Float[Array, "S"]:
    """Join what the predators and their prey would observe if nothing were out of sight."""
    views = env.get_world_state(state)
    return jnp.concatenate([views[agent] for agent in env.agents])


def _map_and_robots(env: Any, observations: Observations, state: State) -> Float[Array, "S"]:
    """Return what JaxNav's world state holds beside each agent's index and observation."""
    num_agents = len(env.agents)
    (size,) = observations[env.agents[0]].shape
    return env.get_world_state(state)[0, num_agents:-size]


def _robots_are_done(env: Any, before: State, action: Any, after: State) -> Bool[Array, ""]:
    return (after.goal_reached | after.move_term | before.done).all()


def _robots_alive(env: Any, state: State) -> Bool[Array, "N"]:
    """Robots stop where they collide; where they may "evaporate" they also vanish at their goal."""
    vanished = state.term | state.goal_reached if env.evaporating else jnp.zeros_like(state.term)
    return ~(state.move_term | vanished)


def _longest_game(env: Any) -> int:
    """Bound the turns of a game of Hanabi.

    Every play or discard takes a card off the deck, until a last round; every hint costs a token,
    and a discard or a finished colour gives one back.
    """
    cards = env.deck_size - env.num_agents * env.hand_size + env.num_agents
    return int(2 * cards + env.max_info_tokens)


def _hanabi_legal(env: Any, state: State) -> Any:
    return env.get_legal_moves(state)


def _inner_steps(env: Any) -> int:
    """Take back the step more that these are built for: at their own limit they reset."""
    return int(env.num_inner_steps) - 1


def _with_inventory(env: Any, observations: Observations) -> Sequence[Any]:
    grids, inventory = observations["observations"], observations["inventory"]
    return [(grids[agent], inventory[:, agent]) for agent in env.agents]


def _tuple(env: Any, observations: Observations) -> Sequence[Any]:
    return [(each["observation"], each["inventory"]) for each in observations]


def _episode_length(env: Any) -> int:
    return int(env.episode_length)


def _brax_terminal(env: Any, before: State, action: Any, after: State) -> Bool[Array, ""]:
    return after.info["truncation"] == 0


def _brax_state(env: Any, observations: Observations, state: State) -> Float[Array, "S"]:
    return state.obs


_PARTICLES = Quirks(_one_more)
_SMAX = Quirks(_one_more, _one_side_is_dead, "team", _world_state, _legal, _units_alive)
_OVERCOOKED = Quirks(_max_steps, reward="team")
_SHORTENED = Quirks(_inner_steps)
_MABRAX = Quirks(_episode_length, _brax_terminal, "team", _brax_state)

_QUIRKS = {
    "MPE_simple_v3": _PARTICLES,
    "MPE_simple_spread_v3": _PARTICLES,
    "MPE_simple_tag_v3": _PARTICLES,
    "MPE_simple_adversary_v3": _PARTICLES,
    "MPE_simple_push_v3": _PARTICLES,
    "MPE_simple_crypto_v3": _PARTICLES,
    "MPE_simple_speaker_listener_v4": _PARTICLES._replace(reward="team"),
    "MPE_simple_reference_v3": _PARTICLES,
    "MPE_simple_world_comm_v3": _PARTICLES,
    "MPE_simple_facmac_v1": _PARTICLES._replace(state=_unmasked),
    "MPE_simple_facmac_3a_v1": _PARTICLES._replace(state=_unmasked),
    "MPE_simple_facmac_6a_v1": _PARTICLES._replace(state=_unmasked),
    "MPE_simple_facmac_9a_v1": _PARTICLES._replace(state=_unmasked),
    "HeuristicEnemySMAX": _SMAX,
    "SMAX": _SMAX._replace(reward="individual"),
    "overcooked": _OVERCOOKED,
    "overcooked_v2": _OVERCOOKED,
    "jaxnav": Quirks(_max_steps, _robots_are_done, state=_map_and_robots, alive=_robots_alive),
    "hanabi": Quirks(_longest_game, _always, "team", legal=_hanabi_legal),
    "switch_riddle": Quirks(_max_steps, _told, "team"),
    "coin_game": _SHORTENED,
    "storm": _SHORTENED._replace(split=_with_inventory),
    "storm_2p": _SHORTENED._replace(split=_tuple, tuple_of_actions=True),
    "storm_np": _SHORTENED._replace(split=lambda env, observations: list(observations)),
    "ant_4x2": _MABRAX,
    "halfcheetah_6x1": _MABRAX,
    "hopper_3x1": _MABRAX,
    "humanoid_9|8": _MABRAX,
    "walker2d_2x3": _MABRAX,
}


def quirks_of(env_id: str) -> Quirks:
    """Return how the environment that JaxMARL knows by a name differs from the others."""
    return _QUIRKS[env_id]
