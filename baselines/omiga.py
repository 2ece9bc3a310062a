"""OMIGA: implicit global-to-local value regularisation, of discrete or continuous actions.

Q_tot and V_tot are weighted sums of the agents' values, with weights w_i(s) ≥ 0 and a constant
b(s) in common. So a constraint that keeps the joint policy near the data becomes one for each
agent, and all values are learned from the data's actions only:

    values   L = E[ e^{z_i} + w̄_i(s) V_i(o_i) / α ],   z_i = w̄_i(s) (Q̄_i(o_i, a_i) - V_i(o_i)) / α,
    critic   L = E[ (Σ_i w_i(s) Q_i(o_i, a_i) + b(s) - y)² ],
             y = r + γ (1 - terminated) (Σ_i w̄_i(s') V̄_i(o_i') + b̄(s')),
    actor    L = -E[ e^{z_i} log π_i(a_i | o_i) ],

where z_i is clipped to ±10, and r is the mean of the agents' rewards. The loss of the values is
multiplied by e^{-m}, with m the largest z of the batch but at least -1. The episode terminates
where all agents do. Dead agents add nothing to Q_tot and V_tot, and learn nothing.

Reference: Wang et al. 2023 (arXiv 2307.11620). Defaults are those of the authors' code
(github.com/ZhengYinan-AIR/OMIGA: commit 39851c0 for continuous actions, commit b0c3d13 of the
branch SMAC for discrete ones), which has feed-forward networks only; recurrent ones need a larger
``--length``. There, discrete policies are learned without regard to which actions are legal, an
episode's last step has no next view, and the means of continuous actions are clipped to ±9 before
tanh.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from offmarl import cli, programs
from offmarl.config import Fraction, Positive, PositiveInt
from offmarl.distributions import select
from offmarl.losses import masked_mean, td_targets
from offmarl.networks import (
    AgentNetwork,
    agent_head,
    agent_network,
    blank_view,
    init_mixer,
    init_policy,
    linear_weights,
    make_linear_mixer,
    make_network,
    make_policy,
    mix_linearly,
    observation_encoder,
    stochastic_head,
    unroll_batch,
)
from offmarl.programs import TD_ERRORS, DatasetStatistics, Hyperparameters, Program, Stage
from offmarl.programs.learner import LearnerArgs, make_optimiser, policy_config
from offmarl.teams import require_one_team
from offmarl.types import ArrayTree, Continuous, EnvSpec, Sequence

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(LearnerArgs):
    """Implicit global-to-local value regularisation."""

    learning_rate: Positive = 5e-4
    """Adam's step size at the first update, of actor, values and critic."""
    max_grad_norm: Positive | None = 1.0
    """Largest norm of the gradients of the actor, the values and the critic, each on its own;
    larger ones are scaled down to it."""
    network: Literal["recurrent", "feedforward"] = "feedforward"
    """Networks of the agents: with a memory (a GRU), or without."""
    hidden: PositiveInt = 256
    """Width of the agents' layers, in policies and values."""
    batch_size: PositiveInt = 128
    """Windows in a batch."""
    length: PositiveInt = 1
    """Steps in a window."""
    gamma: Fraction = 0.99
    """Discount γ."""
    value_temperature: Positive = 10.0
    """α: at smaller values, values and policy follow the best of the data more closely."""
    tau: Fraction = 0.005
    """How far an update brings the target networks to the networks; 1 copies them."""
    mixer_hidden: PositiveInt = 64
    """Width of the mixer's hidden layer."""


# ---------------------------------------------------------------------------------- state


class Critic(NamedTuple):
    """The agents' shared action values and the mixer."""

    agent: ArrayTree
    mixer: ArrayTree


class Params(NamedTuple):
    """Parameters of all networks."""

    actor: ArrayTree
    value: ArrayTree
    critic: Critic


class Target(NamedTuple):
    """Parameters of the target networks."""

    value: ArrayTree
    critic: Critic


class State(NamedTuple):
    """What learns."""

    params: Params
    target: Target
    optimiser: ArrayTree
    updates: Int[Array, ""]


# ---------------------------------------------------------------------------------- networks


class _Concatenated(nn.Module):
    """Encodes an observation and a continuous action of each agent as one vector."""

    observation: nn.Module | None

    @nn.compact
    def __call__(self, inputs: tuple[ArrayTree, Float[Array, "*b N A"]]) -> Float[Array, "*b N _"]:
        seen, action = inputs
        seen = seen if self.observation is None else self.observation(seen)
        return jnp.concatenate([seen, action], axis=-1)


class ActionValues(NamedTuple):
    """The network of the agents' action values Q_i.

    For discrete actions it has an output for each of them; a continuous action is an input.
    """

    network: AgentNetwork
    spec: EnvSpec

    @classmethod
    def of(cls, spec: EnvSpec, args: Args) -> "ActionValues":
        """Build the network for an environment."""
        config = policy_config(args, "q")
        if not isinstance(spec.action, Continuous):
            return cls(agent_network(config, spec), spec)
        encoder = _Concatenated(observation_encoder(spec, args.hidden))
        return cls(make_network(config, spec, 1, encoder), spec)

    def init(self, key: PRNGKeyArray) -> ArrayTree:
        """Draw the parameters."""
        seen = blank_view(self.spec).observation
        if isinstance(self.spec.action, Continuous):
            seen = seen, jnp.zeros((self.spec.num_agents, self.spec.action_size))
        return self.network.init(key, self.network.initial_carry(self.spec.num_agents), seen)

    def __call__(self, params: ArrayTree, batch: Sequence) -> Float[Array, "B T N"]:
        """Return the values of the data's actions."""
        seen, first = batch.view_tm1.observation, batch.first[:, :-1]
        if isinstance(self.spec.action, Continuous):
            inputs = seen, batch.action
            return unroll_batch(self.network, params, inputs, first).squeeze(-1)
        return select(unroll_batch(self.network, params, seen, first), batch.action)


# ---------------------------------------------------------------------------------- losses

_LARGEST_EXPONENT = 10.0
_LEAST_SHIFT = -1.0


def exponents(
    weight: Float[Array, "*b"],
    q: Float[Array, "*b"],
    v: Float[Array, "*b"],
    temperature: Float[Array, ""] | float,
) -> Float[Array, "*b"]:
    """Return z = w (Q - V) / α, clipped to ±10."""
    return jnp.clip(weight * (q - v) / temperature, -_LARGEST_EXPONENT, _LARGEST_EXPONENT)


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, _dataset: DatasetStatistics) -> Program:
    """Build the program for one kind of data."""
    require_one_team(spec, "omiga")
    config = policy_config(args, stochastic_head(spec, "soft_gaussian"))
    policy, head = agent_network(config, spec), agent_head(config)
    encoder = observation_encoder(spec, args.hidden)
    value_network = make_network(policy_config(args, "q"), spec, 1, encoder)
    action_values = ActionValues.of(spec, args)
    mixer = make_linear_mixer(spec, args.mixer_hidden)

    def init(key: PRNGKeyArray, hyper: Hyperparameters) -> State:
        actor_key, value_key, agent_key, mixer_key = jax.random.split(key, 4)
        carry = value_network.initial_carry(spec.num_agents)
        params = Params(
            actor=init_policy(config, spec, actor_key),
            value=value_network.init(value_key, carry, blank_view(spec).observation),
            critic=Critic(action_values.init(agent_key), init_mixer(mixer, spec, mixer_key)),
        )
        optimiser = make_optimiser(args, hyper, separately=True).init(params)
        zero = jnp.zeros((), jnp.int32)
        return State(params, Target(params.value, params.critic), optimiser, zero)

    def values(params: ArrayTree, batch: Sequence) -> Float[Array, "B slots N"]:
        return unroll_batch(value_network, params, batch.view.observation, batch.first)[..., 0]

    def critic_loss(
        critic: Critic, target: Target, batch: Sequence, hyper: Hyperparameters
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        view_tm1, view_t = batch.view_tm1, batch.view_t
        weights = linear_weights(mixer, critic.mixer, view_tm1)
        q_tot = mix_linearly(weights, action_values(critic.agent, batch) * view_tm1.alive)
        weights_t = linear_weights(mixer, target.critic.mixer, view_t)
        v_tot = mix_linearly(weights_t, values(target.value, batch)[:, 1:] * view_t.alive)
        discount_t = hyper.gamma * (1 - batch.terminated.all(-1))
        known = batch.mask & batch.next_known
        error = q_tot - td_targets(batch.reward.mean(-1), discount_t, v_tot)
        error = jnp.where(known, error, 0.0)
        metrics = {"q_tot": masked_mean(q_tot, batch.mask), TD_ERRORS: error}
        return masked_mean(error**2, known, batch.weight), metrics

    def local_losses(
        params: Params, target: Target, batch: Sequence, hyper: Hyperparameters
    ) -> tuple[Float[Array, ""], Float[Array, ""]]:
        """Return the losses of the values and of the actor."""
        view, first = batch.view_tm1, batch.first[:, :-1]
        acts, alpha = batch.mask[..., None] & view.alive, hyper.value_temperature
        weight = linear_weights(mixer, target.critic.mixer, view).w
        v = values(params.value, batch)[:, :-1]
        z = exponents(weight, action_values(target.critic.agent, batch), v, alpha)
        shift = jax.lax.stop_gradient(jnp.where(acts, z, _LEAST_SHIFT).max())
        shift = jnp.maximum(shift, _LEAST_SHIFT)
        value_losses = jnp.exp(z - shift) + jnp.exp(-shift) * weight * v / alpha
        outputs = unroll_batch(policy, params.actor, view.observation, first)
        log_probs = head(outputs, view.legal_actions).log_prob(batch.action)
        actor_losses = -jax.lax.stop_gradient(jnp.exp(z)) * log_probs
        return (
            masked_mean(value_losses, acts, batch.weight),
            masked_mean(actor_losses, acts, batch.weight),
        )

    def loss(
        params: Params, target: Target, batch: Sequence, hyper: Hyperparameters
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        # No parameter is in two of the losses, so the gradient of the sum is that of each.
        of_critic, metrics = critic_loss(params.critic, target, batch, hyper)
        of_values, of_actor = local_losses(params, target, batch, hyper)
        losses = {"critic_loss": of_critic, "value_loss": of_values, "policy_loss": of_actor}
        return of_critic + of_values + of_actor, metrics | losses

    def update(
        state: State, batch: Sequence, _key: PRNGKeyArray, hyper: Hyperparameters
    ) -> tuple[State, dict[str, Array]]:
        gradient, metrics = jax.grad(loss, has_aux=True)(state.params, state.target, batch, hyper)
        adam = make_optimiser(args, hyper, state.updates, separately=True)
        step, optimiser = adam.update(gradient, state.optimiser)
        params = optax.apply_updates(state.params, step)
        newest = Target(params.value, params.critic)
        target = optax.incremental_update(newest, state.target, hyper.tau)
        metrics["grad_norm"] = programs.grad_norm(gradient)
        return State(params, target, optimiser, state.updates + 1), metrics

    return Program(
        init,
        stages=(Stage(update),),
        policy=partial(make_policy, config, spec),
        policy_params=lambda state: state.params.actor,
        td_errors=True,
    )


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> Path:
    """Train, evaluate and write the run; return its directory."""
    return programs.train(make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        main(cli.parse_script(Args, __doc__))
