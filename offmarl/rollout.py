"""Rollouts: a policy in many environments at once, as one scan."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray

from offmarl._mesh import DATA, by_shards, shards, spec
from offmarl.envs.base import Environment, EnvState, extras_of
from offmarl.types import ArrayTree, Policy, Transition, View, remember

_barrier: Any = jax.lax.optimization_barrier  # untyped


class RolloutState(NamedTuple):
    """State of E environments between two rollouts."""

    env_state: EnvState
    """``(E, ...)``"""
    view: View
    """The current views, ``(E, ...)``."""
    carry: ArrayTree
    """The policy's carry in the running episodes, ``(E, ...)``."""


def init_rollout(
    env: Environment, policy: Policy, key: PRNGKeyArray, num_envs: int
) -> RolloutState:
    """Start an episode in each of ``num_envs`` environments."""
    env_state, timestep = jax.vmap(env.reset)(jax.random.split(key, num_envs))
    return RolloutState(env_state, timestep.view, _initial_carry(policy, num_envs))


def rollout(
    env: Environment,
    policy: Policy,
    params: ArrayTree,
    state: RolloutState,
    key: PRNGKeyArray,
    num_steps: int,
    policy_id: Int[Array, ""] | Int[Array, "N"] | int = -1,
    groups: int = 0,
) -> tuple[RolloutState, Transition, View]:
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
        Id of the policy to record, for all agents or for each. A new value does not recompile.
    groups
        Number of groups of environments, which a device computes one after the other. The last bits
        of floating-point numbers may depend on how many environments are compiled together. With
        the same number of groups, they are the same on any number of devices that divides it. By
        default each device computes all of its environments together.

    Returns
    -------
    tuple
        The state after the steps; the transitions ``(T, E, ...)``; and the views after the
        actions, ``(T, E, ...)``, which at the end of an episode are its final views.
    """
    state, transitions, next_views, _ = rollout_shaped(
        env, policy, params, state, key, num_steps, policy_id, groups
    )
    return state, transitions, next_views


def rollout_shaped(
    env: Environment,
    policy: Policy,
    params: ArrayTree,
    state: RolloutState,
    key: PRNGKeyArray,
    num_steps: int,
    policy_id: Int[Array, ""] | Int[Array, "N"] | int = -1,
    groups: int = 0,
) -> tuple[RolloutState, Transition, View, Float[Array, "T E N"] | None]:
    """Do what `rollout` does, and also return the steps' shaped rewards.

    They are None for an environment that has none (`offmarl.envs.has_shaping`). The rewards of the
    transitions do not contain them.
    """
    num_envs = state.view.alive.shape[0]
    keys = jax.random.split(key, (num_steps, 2, num_envs))
    per_step = spec(None, DATA)
    play = by_shards(
        partial(_play_groups, env, policy, groups and max(groups // shards(num_envs), 1)),
        num_envs,
        in_specs=(spec(), spec(DATA), spec(None, None, DATA), spec()),
        out_specs=(spec(DATA), per_step, per_step, per_step),
    )
    return play(params, state, keys, jnp.asarray(policy_id, jnp.int32))


def _play_groups(
    env: Environment, policy: Policy, groups: int, params: ArrayTree, *rest: Any
) -> tuple[RolloutState, Transition, View, Float[Array, "T E N"] | None]:
    """Do what `_play` does, one group of environments after the other."""
    if not groups:
        return _play(env, policy, params, *rest)
    state, keys, policy_id = rest
    before = _into_groups(state, groups), _into_groups(keys, groups, axis=2)

    def play(own: tuple[RolloutState, Array]) -> ArrayTree:
        state, keys = own
        return _play(env, policy, params, state, keys, policy_id)

    def play_group(group: Array, after: ArrayTree) -> ArrayTree:
        played = play(jax.tree.map(lambda leaf: leaf[group], before))
        put = partial(jax.lax.dynamic_update_index_in_dim, index=group, axis=0)
        return jax.tree.map(put, after, played)

    blank = jax.tree.map(_blank, jax.eval_shape(lambda: jax.lax.map(play, before)))
    # The compiler must not see how often the loop runs: it would compile a loop of one group, and
    # so the numbers in it, in another way.
    count = _barrier(jnp.int32(groups))
    state, *played = jax.lax.fori_loop(0, count, play_group, blank)
    transitions, next_views, shaping = _out_of_groups(played, axis=1)
    return _out_of_groups(state), transitions, next_views, shaping


def _blank(like: Any) -> Array:
    if jnp.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), like.shape)
    return jnp.zeros(like.shape, like.dtype)


def _into_groups(tree: ArrayTree, groups: int, axis: int = 0) -> ArrayTree:
    """Divide an axis into groups, along a new first axis."""

    def divide(leaf: Array) -> Array:
        size = leaf.shape[axis] // groups
        shape = *leaf.shape[:axis], groups, size, *leaf.shape[axis + 1 :]
        return jnp.moveaxis(leaf.reshape(shape), axis, 0)

    return jax.tree.map(divide, tree)


def _out_of_groups(tree: ArrayTree, axis: int = 0) -> ArrayTree:
    """Undo `_into_groups`."""
    return jax.tree.map(
        lambda leaf: jax.lax.collapse(jnp.moveaxis(leaf, 0, axis), axis, axis + 2), tree
    )


def _play(
    env: Environment,
    policy: Policy,
    params: ArrayTree,
    state: RolloutState,
    keys: Key[Array, "num_steps 2 num_envs"],
    policy_id: Int[Array, "*agents"],
) -> tuple[RolloutState, Transition, View, Float[Array, "T E N"] | None]:
    """Take a step for each of ``keys``; see `rollout_shaped`."""
    num_envs = state.view.alive.shape[0]
    fresh_carry = _initial_carry(policy, num_envs)
    policy_ids = jnp.broadcast_to(policy_id, (num_envs, *policy_id.shape))

    def step(
        state: RolloutState, keys: Key[Array, "2 num_envs"]
    ) -> tuple[RolloutState, tuple[Transition, View, Array | None]]:
        action, log_prob, carry = jax.vmap(policy.act, in_axes=(None, 0, 0, 0, 0))(
            params, state.carry, state.view.observation, state.view.legal_actions, keys[0]
        )
        extras = _extras(env, keys[1], state.env_state)
        env_state, timestep = jax.vmap(env.step)(keys[1], state.env_state, action)
        extras = {**(extras or {}), **(timestep.extras or {})} or None
        transition = Transition(
            view=state.view,
            action=action,
            reward=timestep.reward,
            terminated=timestep.terminated,
            truncated=timestep.truncated,
            last=timestep.last,
            behaviour_log_prob=log_prob,
            policy_id=policy_ids,
            extras=extras,
        )
        carry = jax.vmap(partial(remember, policy))(
            carry, timestep.reward, timestep.terminated | timestep.truncated
        )
        carry = jax.tree.map(
            lambda fresh, old: jnp.where(_align(timestep.last, old), fresh, old),
            fresh_carry,
            carry,
        )
        state = RolloutState(env_state, timestep.view, carry)
        return state, (transition, timestep.next_view, timestep.shaping)

    state, (transitions, next_views, shaping) = jax.lax.scan(step, state, keys)
    return state, transitions, next_views, shaping


def _extras(
    env: Environment, keys: Key[Array, "num_envs"], states: EnvState
) -> dict[str, Array] | None:
    """Return the extras of the steps that are taken next, ``(E, ...)``."""
    return jax.vmap(partial(extras_of, env))(keys, states) if env.spec.extras else None


def _initial_carry(policy: Policy, num_envs: int) -> ArrayTree:
    return jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (num_envs, *leaf.shape)), policy.initial_carry()
    )


def _align(mask: Array, leaf: Array) -> Array:
    """Give a mask over environments the rank of a leaf."""
    return mask.reshape(mask.shape + (1,) * (leaf.ndim - mask.ndim))
