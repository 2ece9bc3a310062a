"""Evaluation of policies: returns of whole episodes, and agreement with recorded episodes."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from offmarl._mesh import DATA, by_shards, spec
from offmarl.config import PositiveInt, check_rules
from offmarl.envs.base import Environment, EnvState
from offmarl.envs.sides import others_of, with_others
from offmarl.errors import OptionError, ShapeError
from offmarl.replay.device import bytes_of, require_room
from offmarl.teams import by_team, teams_of
from offmarl.types import ArrayTree, EnvSpec, Policy, Sequence, View, empty_view, remember


class Evaluation(NamedTuple):
    """The episodes of an evaluation."""

    team_returns: Float[Array, "episodes teams"]
    """Undiscounted sum of rewards, averaged over the agents of each team, in the order of
    `offmarl.teams.teams_of`; for a team reward, the team's return."""
    lengths: Int[Array, "episodes"]
    """Steps taken."""
    ended: Bool[Array, "episodes"]
    """Whether the episode ended within the time limit of the spec: see `returns_by_team`."""
    won: Bool[Array, "episodes"] | None = None
    """Whether the agents won, where the environment tells it."""

    @property
    def returns(self) -> Float[Array, "*b episodes"]:
        """The returns of the only team.

        Raises
        ------
        ShapeError
            There are several teams; or, outside of jit, episodes have not ended at the time limit.
        """
        if self.team_returns.shape[-1] > 1:
            raise ShapeError(
                f"the episodes of {self.team_returns.shape[-1]} teams have no single return: use "
                "Evaluation.team_returns."
            )
        if not isinstance(self.ended, jax.core.Tracer):
            require_ended(self.ended)
        return self.team_returns[..., 0]


def returns_by_team(
    spec: EnvSpec, evaluation: Evaluation
) -> Float[np.ndarray, "*b episodes teams"]:
    """Return an evaluation's `team_returns`, outside of jit.

    Raises
    ------
    ShapeError
        Episodes have not ended at the time limit of the spec, so their returns are not whole.
    """
    require_ended(evaluation.ended, spec.name, spec.time_limit)
    return np.asarray(evaluation.team_returns)


def require_ended(
    ended: ArrayTree, name: str = "the environment", limit: int | str | None = "all"
) -> None:
    """Raise `ShapeError` unless all episodes ended within the time limit of a spec."""
    going = ~np.asarray(ended)
    if going.any():
        raise ShapeError(
            f"{going.sum():,} of {going.size:,} episodes of {name} have not ended after {limit} "
            "steps, the time_limit of its spec: state the real limit there, and let the "
            "environment set truncated in the step that reaches it."
        )


class _Episode(NamedTuple):
    env_state: EnvState
    view: View
    carry: ArrayTree
    over: Array
    scores: Array
    length: Array


def require_time_limit(spec: EnvSpec) -> int:
    """Return the most steps of an episode.

    Raises
    ------
    ShapeError
        The environment has no time limit, so that an episode has no largest length.
    """
    if spec.time_limit is None:
        raise ShapeError(
            f"{spec.name} has no time limit, so its episodes cannot be played side by side: give "
            "its spec a time_limit."
        )
    return spec.time_limit


def require_room_for(spec: EnvSpec, num_episodes: int) -> None:
    """Raise `OptionError` if no memory holds so many episodes side by side."""
    keys = 2 * 8 * require_time_limit(spec)
    num_bytes = num_episodes * (bytes_of(empty_view(spec)) + keys)
    require_room(num_bytes, f"{num_episodes:,} episodes side by side")


def evaluate(
    env: Environment,
    policy: Policy,
    params: ArrayTree,
    key: PRNGKeyArray,
    num_episodes: int,
    others: ArrayTree | None = None,
) -> Evaluation:
    """Play whole episodes side by side; jit it, and vmap it over keys or parameters.

    Parameters
    ----------
    env
        An environment with a time limit, with or without autoreset.
    policy, params
        The policy and its parameters.
    key
        Random key of the episodes.
    num_episodes
        Number of episodes; static.
    others
        The parameters of the policies that act for others in one side of an environment, if they
        are not the environment's own: see `offmarl.envs.sides.Side.others`.

    Raises
    ------
    OptionError
        ``num_episodes`` is not positive, or no memory holds so many.
    ShapeError
        The environment has no time limit, so that an episode has no largest length.
    """
    check_rules("num_episodes", PositiveInt, num_episodes)
    require_room_for(env.spec, num_episodes)
    time_limit, teams = require_time_limit(env.spec), teams_of(env.spec)

    def play(others: ArrayTree, params: ArrayTree, key: PRNGKeyArray) -> Evaluation:
        reset_key, key = jax.random.split(key)
        env_state, timestep = env.reset(reset_key)
        episode = _Episode(
            env_state,
            timestep.view,
            policy.initial_carry(),
            over=jnp.zeros((), bool),
            scores=jnp.zeros(len(teams)),
            length=jnp.zeros((), jnp.int32),
        )
        keys = jax.random.split(key, (time_limit, 2))
        episode, won = jax.lax.scan(partial(step, with_others(env, others), params), episode, keys)
        won = None if won is None else won.any()
        return Evaluation(episode.scores, episode.length, episode.over, won)

    def step(
        env: Environment, params: ArrayTree, episode: _Episode, keys: Key[Array, "2"]
    ) -> tuple[_Episode, Bool[Array, ""] | None]:
        view = episode.view
        action, _, carry = policy.act(
            params, episode.carry, view.observation, view.legal_actions, keys[0]
        )
        env_state, timestep = env.step(keys[1], episode.env_state, action)
        done = timestep.terminated | timestep.truncated
        carry = remember(policy, carry, timestep.reward, done)
        earned = jnp.stack(by_team(timestep.reward, teams))
        return _Episode(
            env_state,
            timestep.view,
            carry,
            over=episode.over | timestep.last,
            scores=episode.scores + jnp.where(episode.over, 0, earned),
            length=episode.length + ~episode.over,
        ), None if timestep.won is None else timestep.won & ~episode.over

    play_all = by_shards(
        jax.vmap(play, in_axes=(None, None, 0)),
        num_episodes,
        (spec(), spec(), spec(DATA)),
        spec(DATA),
    )
    others = others_of(env) if others is None else others
    return play_all(others, params, jax.random.split(key, num_episodes))


def agreement(policy: Policy, params: ArrayTree, episodes: Sequence) -> Float[Array, "episodes"]:
    """Return how often a policy chooses the actions of recorded episodes.

    The policy observes the recorded episodes from the first step on. This needs no environment.
    Agreement does not measure return: a good policy may disagree with poor data.

    Parameters
    ----------
    policy, params
        A greedy policy.
    episodes
        Whole episodes, ``(M, T, ...)``; their mask marks the steps that exist.

    Returns
    -------
    For each episode the fraction of equal actions among the choices; for continuous actions, 1
    minus half the mean absolute difference of the entries that an agent has.
    """

    def step(
        carry: ArrayTree, observation: ArrayTree, legal_actions: Array, recorded: Array
    ) -> tuple[Array, ArrayTree]:
        view = observation, legal_actions
        action, _, after = policy.act(params, carry, *view, jax.random.key(0))
        if policy.log_prob is not None:  # the carry follows the recorded action
            _, after = policy.log_prob(params, carry, *view, recorded)
        return _agreement(action, recorded, legal_actions), after

    return _means(policy, step, episodes, episodes.choices)


def log_likelihood(
    policy: Policy, params: ArrayTree, episodes: Sequence
) -> Float[Array, "episodes"]:
    """Return how likely the actions of recorded episodes are under a policy.

    Parameters
    ----------
    policy, params
        A policy that has a ``log_prob``.
    episodes
        Whole episodes, ``(M, T, ...)``; their mask marks the steps that exist.

    Returns
    -------
    For each episode the mean log-probability, in nats, of the actions of live agents; for
    continuous actions, the log-density of all entries.

    Raises
    ------
    OptionError
        The policy has no likelihood.
    """
    if policy.log_prob is None:
        raise OptionError("this policy has no log_prob, so the likelihood of actions is unknown.")
    counted = episodes.mask[..., None] & episodes.view_tm1.alive
    return _means(policy, partial(policy.log_prob, params), episodes, counted)


def _means(
    policy: Policy,
    step: Callable[..., tuple[Array, ArrayTree]],
    episodes: Sequence,
    counted: Bool[Array, "episodes T N"],
) -> Float[Array, "episodes"]:
    """Scan over each episode, and return the means over what counts in it.

    ``step(carry, observation, legal_actions, action)`` returns values of the agents, and the carry.
    """

    def of_step(carry: ArrayTree, data: tuple[Any, ...]) -> tuple[ArrayTree, Array]:
        *outcome, inputs = data
        values, carry = step(carry, *inputs)
        return remember(policy, carry, *outcome), values

    def of_episode(episode: Sequence, counted: Bool[Array, "T N"]) -> Float[Array, ""]:
        view, done = episode.view_tm1, episode.terminated | episode.truncated
        inputs = view.observation, view.legal_actions, episode.action
        data = episode.reward, done, inputs
        _, values = jax.lax.scan(of_step, policy.initial_carry(), data)
        return jnp.where(counted, values, 0).sum() / counted.sum()

    return jax.vmap(of_episode)(episodes, counted)


def _agreement(action: Array, recorded: Array, legal_actions: Bool[Array, "N A"]) -> Array:
    if jnp.issubdtype(action.dtype, jnp.integer):
        return action == recorded
    # Entries that an agent lacks would always agree.
    difference = jnp.where(legal_actions, jnp.abs(action - recorded), 0.0).sum(-1)
    return 1 - difference / jnp.maximum(legal_actions.sum(-1), 1) / 2
