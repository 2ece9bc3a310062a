"""Rollouts: a policy in many environments at once, as one scan."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray

from offmarl._mesh import DATA, by_shards, spec
from offmarl.envs.base import Environment, EnvState, extras_of
from offmarl.envs.sides import others_of, with_others
from offmarl.types import ArrayTree, Policy, Transition, View, remember


class RolloutState(NamedTuple):
    """State of E environments between two rollouts."""

    env_state: EnvState
    """``(E, ...)``"""
    view: View
    """The current views, ``(E, ...)``."""
    carry: ArrayTree
    """The policy's carry in the running episodes, ``(E, ...)``."""
    others: ArrayTree = ()
    """The parameters of the policies that act for other agents (`offmarl.envs.sides.Side.others`),
    the same in all environments."""


def init_rollout(
    env: Environment, policy: Policy, key: PRNGKeyArray, num_envs: int
) -> RolloutState:
    """Start an episode in each of ``num_envs`` environments."""
    env_state, timestep = jax.vmap(env.reset)(jax.random.split(key, num_envs))
    carry = _initial_carry(policy, num_envs)
    return RolloutState(env_state, timestep.view, carry, others_of(env))


def meet_others(env: Environment, state: ArrayTree) -> ArrayTree:
    """Return a program's state whose rollouts have the parameters of an environment's others."""

    def of_node(node: ArrayTree) -> ArrayTree:
        is_rollout = isinstance(node, RolloutState)
        return node._replace(others=others_of(env)) if is_rollout else node

    return jax.tree.map(of_node, state, is_leaf=lambda node: isinstance(node, RolloutState))


def rollout(
    env: Environment,
    policy: Policy,
    params: ArrayTree,
    state: RolloutState,
    key: PRNGKeyArray,
    num_steps: int,
    policy_id: Int[Array, ""] | Int[Array, "N"] | int = -1,
    among: tuple[Int[Array, ""] | int, int] | None = None,
) -> tuple[RolloutState, Transition, View, Float[Array, "T E N"] | None]:
    """Take ``num_steps`` in each environment.

    Parameters
    ----------
    env
        An autoresetting environment.
    policy, params
        The policy and its parameters.
    state
        The state that `init_rollout` or the previous rollout returned.
    key
        Random key, a new one for each rollout; every environment and step has its own key from it.
    num_steps
        T; static.
    policy_id
        Id of the policy to record, for all agents or for each; of several policies
        (`Policy.number`) that of the first. A new value does not recompile.
    among
        If these environments are a part of several: the number of the first, and how many there
        are in all. Their random keys are the same in any division.

    Returns
    -------
    tuple
        The state after the steps; the transitions ``(T, E, ...)``; the views after the actions,
        ``(T, E, ...)``, which at the end of an episode are its final views; and the steps' shaped
        rewards, which those of the transitions do not contain. They are None for an environment
        that has none (`offmarl.envs.has_shaping`).
    """
    num_envs = state.view.alive.shape[0]
    first, total = among or (0, num_envs)
    keys = jax.random.split(key, (num_steps, 2, total))
    if among is not None:
        keys = jax.lax.dynamic_slice_in_dim(keys, first, num_envs, axis=2)
    per_step, per_env = spec(None, DATA), RolloutState(spec(DATA), spec(DATA), spec(DATA), spec())
    play = by_shards(
        partial(_play, env, policy),
        num_envs,
        in_specs=(spec(), per_env, spec(None, None, DATA), spec()),
        out_specs=(per_env, per_step, per_step, per_step),
    )
    return play(params, state, keys, jnp.asarray(policy_id, jnp.int32))


def _play(
    env: Environment,
    policy: Policy,
    params: ArrayTree,
    state: RolloutState,
    keys: Key[Array, "num_steps 2 num_envs"],
    policy_id: Int[Array, "*agents"],
) -> tuple[RolloutState, Transition, View, Float[Array, "T E N"] | None]:
    """Take a step for each of ``keys``; see `rollout`."""
    num_envs, others = state.view.alive.shape[0], state.others
    env, fresh_carry = with_others(env, others), _initial_carry(policy, num_envs)
    policy_ids = jnp.broadcast_to(policy_id, (num_envs, *policy_id.shape))
    if policy.number is not None:
        policy_ids = policy_ids.reshape(num_envs, -1)

    def step(
        state: RolloutState, keys: Key[Array, "2 num_envs"]
    ) -> tuple[RolloutState, tuple[Transition, View, Array | None]]:
        action, log_prob, carry = jax.vmap(policy.act, in_axes=(None, 0, 0, 0, 0))(
            params, state.carry, state.view.observation, state.view.legal_actions, keys[0]
        )
        number = None
        if policy.number is not None:
            number = jax.vmap(policy.number, axis_size=num_envs)(carry)
        extras = jax.vmap(partial(extras_of, env))(keys[1], state.env_state)
        env_state, timestep = jax.vmap(env.step)(keys[1], state.env_state, action)
        extras = {**extras, **(timestep.extras or {})}
        transition = Transition(
            view=state.view,
            action=action,
            reward=timestep.reward,
            terminated=timestep.terminated,
            truncated=timestep.truncated,
            last=timestep.last,
            behaviour_log_prob=log_prob,
            policy_id=policy_ids if number is None else policy_ids + number,
            extras=extras or None,
        )
        carry = jax.vmap(partial(remember, policy))(
            carry, timestep.reward, timestep.terminated | timestep.truncated
        )
        carry = jax.tree.map(
            lambda fresh, old: jax.vmap(jnp.where)(timestep.last, fresh, old),
            fresh_carry,
            carry,
        )
        state = RolloutState(env_state, timestep.view, carry)
        return state, (transition, timestep.next_view, timestep.shaping)

    state, (transitions, next_views, shaping) = jax.lax.scan(step, state._replace(others=()), keys)
    transitions = transitions._replace(view=env.spec.shared(transitions.view))
    return state._replace(others=others), transitions, env.spec.shared(next_views), shaping


def _initial_carry(policy: Policy, num_envs: int) -> ArrayTree:
    return jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (num_envs, *leaf.shape)), policy.initial_carry()
    )
