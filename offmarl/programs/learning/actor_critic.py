"""Updates of policies by action-value critics, which recorders and offline programs share.

A program gives its losses to `learn`, which updates the critics, and less often the policies and
the target networks. `td_loss` is the loss of critics that value each agent's own reward.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl.losses import (
    bootstrap_discounts,
    has_value,
    masked_mean,
    reward_ends,
    squared_errors,
    td_targets,
)
from offmarl.programs.learning.learner import grad_norm
from offmarl.programs.program import TD_ERRORS
from offmarl.types import ArrayTree, EnvSpec, Sequence


class ActorCritics(NamedTuple):
    """Parameters of the policies and of the critics."""

    actor: ArrayTree
    critics: tuple[ArrayTree, ...]


class Learner(NamedTuple):
    """Parameters and states that an update changes."""

    params: Any
    """`ActorCritics`, or the parameters of a program with a `learn` of its own."""
    target: Any
    optimiser: Any
    """State of the optimiser; for `learn` those of the critics and of the policies."""


Metrics = dict[str, Array]


def init_learner(params: ActorCritics, optimiser: optax.GradientTransformation) -> Learner:
    """Return the state of learning at the start."""
    states = optimiser.init({"critics": params.critics}), optimiser.init({"actor": params.actor})
    return Learner(params, params, states)


def learn(
    of_critics: Callable[..., tuple[Float[Array, ""], Metrics]],
    of_actor: Callable[..., tuple[Float[Array, ""], Metrics]],
    optimiser: optax.GradientTransformation,
    tau: Float[Array, ""] | float,
    delay: int,
    learner: Learner,
    batch: Sequence,
    key: PRNGKeyArray,
    step: Int[Array, ""] | int,
) -> tuple[Learner, Metrics]:
    """Update the critics, and after every ``delay`` updates the policies and the target networks.

    Gradients are those by the first argument of ``of_critics(critics, params, target, batch, key)``
    and ``of_actor(actor, critics, batch, key)``. Updates have the numbers ``step``, from 1. Target
    networks move by the fraction ``tau`` to the learned ones. The metrics of the policies are
    multiplied by ``delay`` or are 0: their mean over many updates is that over the updates of the
    policies.
    """
    critic_key, actor_key = jax.random.split(key)
    params, target, (critic_state, actor_state) = learner
    grads, metrics = jax.grad(of_critics, has_aux=True)(
        params.critics, params, target, batch, critic_key
    )
    changes, critic_state = optimiser.update({"critics": grads}, critic_state)
    params = params._replace(critics=optax.apply_updates(params.critics, changes["critics"]))
    metrics["grad_norm"] = grad_norm(grads)

    def update_actor(learner: Learner) -> tuple[Learner, Metrics]:
        params, target, (critic_state, actor_state) = learner
        grads, actor_metrics = jax.grad(of_actor, has_aux=True)(
            params.actor, params.critics, batch, actor_key
        )
        changes, actor_state = optimiser.update({"actor": grads}, actor_state)
        params = params._replace(actor=optax.apply_updates(params.actor, changes["actor"]))
        target = optax.incremental_update(params, target, tau)
        return Learner(params, target, (critic_state, actor_state)), actor_metrics

    learner = Learner(params, target, (critic_state, actor_state))
    if delay == 1:
        learner, actor_metrics = update_actor(learner)
    else:
        zeros = jax.tree.map(jnp.zeros_like, jax.eval_shape(update_actor, learner)[1])
        learner, actor_metrics = jax.lax.cond(
            step % delay == 0, update_actor, lambda learner: (learner, zeros), learner
        )
        actor_metrics = jax.tree.map(lambda x: x * delay, actor_metrics)
    return learner, metrics | actor_metrics


def td_loss(
    spec: EnvSpec,
    batch: Sequence,
    q_tm1: Float[Array, "K B T N"],
    v_t: Float[Array, "B T N"],
    gamma: Float[Array, ""] | float,
    reward_scale: Float[Array, ""] | float = 1.0,
) -> tuple[Float[Array, ""], Metrics]:
    """Return ½ (Q_i - r_i - discount_i V_i)², summed over the critics.

    A truncated step bootstraps from the view that it led to; steps that led to an unknown view do
    not count. Where the reward continues after an agent's death, the values of dead agents are
    learned too, and bootstrapped from.
    """
    shared = spec.reward == "team"
    discount_t = bootstrap_discounts(gamma, batch.terminated, shared)
    target_tm1 = td_targets(reward_scale * batch.reward, discount_t, v_t)
    counts = valued_steps(spec, batch)
    known = counts & (batch.next_known[..., None] | reward_ends(batch.terminated, shared))
    loss = squared_errors(q_tm1, target_tm1, known, batch.weight)
    errors = jnp.where(known, jnp.abs(q_tm1 - target_tm1), 0.0).max((0, -1))
    return loss, {"q": masked_mean(q_tm1[0], counts), TD_ERRORS: errors}


def valued_steps(spec: EnvSpec, batch: Sequence) -> Bool[Array, "B T N"]:
    """Return the steps of agents whose values are learned; see `offmarl.losses.has_value`."""
    ends = batch.terminated, batch.truncated
    return batch.mask[..., None] & has_value(batch.view_tm1.alive, *ends, spec.reward == "team")
