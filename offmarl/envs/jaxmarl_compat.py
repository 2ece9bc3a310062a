"""The differences between the environments of JaxMARL, as `offmarl.envs.jaxmarl` reads them.

They name the global state and the legal actions differently, agents of some die, some take tuples
of actions.
"""

# ruff: noqa: ARG001, ARG005 - the functions of `Compat` share their signatures

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

State = Any
"""A state of a JaxMARL environment."""

Observations = Any
"""The observations of all agents as JaxMARL returns them: in most environments a dict by name."""


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


def _one_team(agent: str) -> str:
    return ""


def _side(agent: str) -> str:
    """Return the side of an agent in MPE, by the names that its authors gave the agents."""
    return "adversaries" if agent.startswith(("adversary", "leadadversary", "eve")) else "agents"


def _army(agent: str) -> str:
    return "allies" if agent.startswith("ally") else "enemies"


class Compat(NamedTuple):
    """How the adapter reads one kind of environment; functions take JaxMARL's environment first."""

    package: str
    """The package below ``jaxmarl.environments`` that defines the environments' classes."""
    time_limit: Callable[[Any], int]
    """Steps after which an episode is truncated if it has not ended before."""
    terminal: Callable[[Any, State, Any, State], Bool[Array, ""]] = _never
    """For the last step of an episode, ``(env, before, actions, after)``: True if the task ended,
    False if the time limit was reached."""
    reward: Literal["team", "individual"] = "individual"
    state: Callable[[Any, Observations, State], Float[Array, "S"] | None] = _no_state
    """The global state; None if JaxMARL has none."""
    legal: Callable[[Any, State], Any] = _all_legal
    """Legal actions by agent; None if all are legal."""
    alive: Callable[[Any, State], Bool[Array, "N"]] = _all_alive
    split: Callable[[Any, Observations], Sequence[Any]] = _by_name
    """Each agent's own observation: an array or a tree of arrays."""
    team_of: Callable[[str], str] = _one_team
    """The name of an agent's team by the agent's name; the same for all if they are one team."""
    tuple_of_actions: bool = False
    """Whether ``step_env`` takes a tuple of actions, not a dict."""


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


def _units_alive(env: Any, state: State) -> Bool[Array, "N"]:
    return _battle(state).unit_alive[: len(env.agents)]


def _predators_and_prey(env: Any, observations: Observations, state: State) -> Float[Array, "S"]:
    """Concatenate what all agents would observe with unlimited sight."""
    views = env.get_world_state(state)
    return jnp.concatenate([views[agent] for agent in env.agents])


def _map_and_robots(env: Any, observations: Observations, state: State) -> Float[Array, "S"]:
    """Return JaxNav's world state without each agent's index and observation."""
    num_agents = len(env.agents)
    (size,) = observations[env.agents[0]].shape
    return env.get_world_state(state)[0, num_agents:-size]


def _robots_are_done(env: Any, before: State, action: Any, after: State) -> Bool[Array, ""]:
    return (after.goal_reached | after.move_term | before.done).all()


def _robots_alive(env: Any, state: State) -> Bool[Array, "N"]:
    """Robots stop where they collide; with ``evaporating`` they also vanish at their goal."""
    vanished = state.term | state.goal_reached if env.evaporating else jnp.zeros_like(state.term)
    return ~(state.move_term | vanished)


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


def _pair_with_inventory(env: Any, observations: Observations) -> Sequence[Any]:
    return [_grid(each["observation"], each["inventory"]) for each in observations]


def _grids(env: Any, observations: Observations) -> Sequence[Any]:
    return [_whole_numbers(grid) for grid in observations]


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
    alive=_units_alive,
)

COMPAT = {
    "mpe": Compat("mpe", _one_more),
    "mpe_team": Compat("mpe", _one_more, reward="team"),
    "mpe_rivals": Compat("mpe", _one_more, team_of=_side),
    "mpe_facmac": Compat("mpe", _one_more, state=_predators_and_prey, team_of=_side),
    "smax": _SMAX,
    "smax_self_play": _SMAX._replace(reward="individual", team_of=_army),
    "overcooked": Compat("overcooked", _max_steps, reward="team"),
    "overcooked_v2": Compat("overcooked_v2", _max_steps, reward="team"),
    "jaxnav": Compat(
        "jaxnav", _max_steps, _robots_are_done, state=_map_and_robots, alive=_robots_alive
    ),
    "hanabi": Compat(
        "hanabi",
        _longest_game,
        _always,
        "team",
        legal=lambda env, state: env.get_legal_moves(state),
    ),
    "switch_riddle": Compat("switch_riddle", _max_steps, _announced, "team"),
    "coin_game": Compat("coin_game", inner_steps),
    "storm": Compat("storm", inner_steps, split=_with_inventory),
    "storm_2p": Compat("storm", inner_steps, split=_pair_with_inventory, tuple_of_actions=True),
    "storm_np": Compat("storm", inner_steps, split=_grids),
    "mabrax": Compat(
        "mabrax",
        lambda env: int(env.episode_length),
        lambda env, before, action, after: after.info["truncation"] == 0,
        "team",
        state=lambda env, observations, state: state.obs,
    ),
}
"""The differences by kind of environment; `offmarl.envs.catalogue` names each one's kind."""
