"""MAICQ: multi-agent implicit constraint Q-learning, discrete.

Values are computed only for the data's actions. A softmax over the batch gives more weight to the
good ones, both in the critic's targets and in the agents' policies:

    critic  L = E[ (Q_tot(s, a) - y)² ],   y = TD(λ) of r + γ w(s', a') Q̄_tot(s', a'),
            w = B softmax over the batch of Q̄_tot / α_v;
    actor   L = -E[ k_i(s) w_i log π_i(a_i | o_i) ],
            w_i = B softmax over the batch of (Q_i(a_i) - Σ_a π_i(a) Q_i(a)) / α_π,

with k_i(s) the agent's share of the mixing weights and r the mean of the agents' rewards. The view
that a truncated episode ended with has no action in the data: there Q̄_tot mixes the policy's mean
values, Σ_a π_i(a) Q̄_i(a). The last step of a window has no target unless the episode terminates.

Reference: Yang et al. 2021 (arXiv 2106.03400). Defaults are those of ``maicq.yaml`` of OG-MARL
(github.com/instadeepai/og-marl, commit f4eb8f0; Formanek et al. 2023, arXiv 2302.00521), which has
recurrent networks and one-step targets, λ = 0. The authors' code (github.com/YiqinYang/ICQ, commit
5a4da85) names λ = 0.8 and computes with 0.75. Both have α_π 0.1 and α_v 1,000 beside SMAC's returns
of at most 20, which is the unit of our rewards too. Unlike OG-MARL, but like the authors, actor and
critic have optimisers of their own and the policy gradient does not reach the mixer. Our mixer
starts with smaller weights; see `offmarl.networks.Mixer`.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from offmarl import cli, programs
from offmarl.config import Fraction, Positive
from offmarl.distributions import Categorical, categorical, select
from offmarl.losses import masked_mean, q_lambda_targets, softmax_weights
from offmarl.networks import (
    MixedParams,
    MixerWeights,
    agent_network,
    init_policy,
    make_policy,
    mix,
    mixing_coefficients,
    mixing_weights,
    unroll_batch,
)
from offmarl.programs import (
    TD_ERRORS,
    DatasetStatistics,
    Hyperparameters,
    Program,
    Stage,
    Values,
)
from offmarl.programs.learning.learner import next_in_window, require_next_action
from offmarl.programs.learning.offline_q_learning import MixedArgs, make_mixed_values
from offmarl.teams import require_one_team
from offmarl.types import ArrayTree, EnvSpec, Sequence

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(MixedArgs):
    """Multi-agent implicit constraint Q-learning."""

    td_lambda: Fraction = 0.0
    """λ of the critic's targets: 0 for one-step targets, 0.8 as the authors published."""
    policy_temperature: Positive = 0.1
    """α_π: at smaller values the policy follows the best of the data more closely."""
    value_temperature: Positive = 1000.0
    """α_v: at smaller values the targets follow the best of the batch more closely."""


# ---------------------------------------------------------------------------------- state


class State(NamedTuple):
    """Parameters and states that an update changes."""

    actor: ArrayTree
    critic: MixedParams
    target: MixedParams
    actor_optimiser: ArrayTree
    critic_optimiser: ArrayTree
    updates: Int[Array, ""]


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, _dataset: DatasetStatistics) -> Program:
    """Build the program for one kind of data."""
    require_one_team(spec, "maicq")
    config = programs.policy_config(args, "softmax")
    policy, values = agent_network(config, spec), make_mixed_values(spec, args)

    def init(key: PRNGKeyArray, hyper: Hyperparameters) -> State:
        adam = programs.make_optimiser(args, hyper)
        actor_key, values_key, mixer_key = jax.random.split(key, 3)
        actor = init_policy(config, spec, actor_key)
        critic = values.init(spec, values_key, mixer_key)
        updates = jnp.zeros((), jnp.int32)
        return State(actor, critic, critic, adam.init(actor), adam.init(critic), updates)

    def data_values(critic: MixedParams, batch: Sequence) -> tuple[Array, Array, MixerWeights]:
        """Q_i of all actions, Q_tot of the data's, and the mixing weights, each ``(B, T, ...)``."""
        view = batch.view_tm1
        q = unroll_batch(values.agent, critic.agent, view.observation, batch.first[:, :-1])
        weights = mixing_weights(values.mixer, critic.mixer, view)
        q_tot = mix(weights, select(q, batch.action) * view.alive)
        return q, q_tot, weights

    def distribution(actor: ArrayTree, batch: Sequence) -> Categorical:
        view = batch.view_tm1
        logits = unroll_batch(policy, actor, view.observation, batch.first[:, :-1])
        return categorical(logits, view.legal_actions)

    def critic_loss(
        critic: MixedParams,
        target: MixedParams,
        pi: Categorical,
        batch: Sequence,
        hyper: Hyperparameters,
    ) -> tuple[Float[Array, ""], tuple[Array, Array, MixerWeights, Array]]:
        q, q_tot, weights = data_values(critic, batch)
        q_target, of_data, of_team = data_values(target, batch)
        temperature, weight = hyper.value_temperature, batch.weight
        weighted = of_data * softmax_weights(of_data, batch.mask, temperature, weight)
        # The data have no action in the view that a truncated episode ended with.
        of_policy = mix(of_team, pi.mean_of(q_target) * batch.view_tm1.alive)
        values_of_slots = jnp.where(batch.mask, weighted, of_policy)
        discount = hyper.gamma * (1 - batch.terminated.all(-1))
        known = batch.mask & next_in_window(batch)
        v_t, goes_on = (jnp.pad(x[:, 1:], ((0, 0), (0, 1))) for x in (values_of_slots, known))
        targets = jax.vmap(q_lambda_targets, in_axes=(0, 0, 0, 0, None))(
            batch.reward.mean(-1), discount, v_t, goes_on, hyper.td_lambda
        )
        error = jnp.where(known, q_tot - targets, 0.0)
        value = masked_mean(error**2, known, batch.weight)
        return value, (q, q_tot, weights, error)

    def actor_loss(
        pi: Categorical, q: Array, weights: MixerWeights, batch: Sequence, hyper: Hyperparameters
    ) -> Float[Array, ""]:
        mask = batch.mask[..., None] & batch.view_tm1.alive
        log_loss = -pi.log_prob(batch.action)
        advantage = select(q, batch.action) - pi.mean_of(q)
        imitate = softmax_weights(advantage, mask, hyper.policy_temperature, batch.weight)
        return masked_mean(mixing_coefficients(weights) * imitate * log_loss, mask, batch.weight)

    def update(
        state: State, batch: Sequence, _key: PRNGKeyArray, hyper: Hyperparameters
    ) -> tuple[State, dict[str, Array]]:
        adam = programs.make_optimiser(args, hyper, state.updates)
        # Both losses need the policy's outputs, and one of them its gradient.
        pi, pull_back = jax.vjp(lambda actor: distribution(actor, batch), state.actor)
        (value_loss, (q, q_tot, weights, error)), critic_gradient = jax.value_and_grad(
            critic_loss, has_aux=True
        )(state.critic, state.target, pi, batch, hyper)
        policy_loss, pi_gradient = jax.value_and_grad(actor_loss)(pi, q, weights, batch, hyper)
        (actor_gradient,) = pull_back(pi_gradient)
        actor_step, actor_optimiser = adam.update(actor_gradient, state.actor_optimiser)
        critic_step, critic_optimiser = adam.update(critic_gradient, state.critic_optimiser)
        critic = optax.apply_updates(state.critic, critic_step)
        updates = state.updates + 1
        metrics = {
            "policy_loss": policy_loss,
            "critic_loss": value_loss,
            "q_tot": masked_mean(q_tot, batch.mask),
            "grad_norm": programs.grad_norm((actor_gradient, critic_gradient)),
            TD_ERRORS: error,
        }
        return State(
            actor=optax.apply_updates(state.actor, actor_step),
            critic=critic,
            target=optax.periodic_update(critic, state.target, updates, args.target_every),
            actor_optimiser=actor_optimiser,
            critic_optimiser=critic_optimiser,
            updates=updates,
        ), metrics

    return Program(
        init,
        stages=(Stage(update),),
        policy=partial(make_policy, config, spec),
        policy_params=lambda state: state.actor,
        td_errors=True,
        values=Values(lambda state: state.critic, values.of_joint_actions),
    )


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> Path:
    """Train, evaluate and write the run; return its directory."""
    require_next_action(args.length)
    return programs.train(make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        main(cli.parse_script(Args, __doc__))
