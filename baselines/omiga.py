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
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl import cli, programs
from offmarl.config import Fraction, Positive, PositiveInt
from offmarl.distributions import select
from offmarl.losses import masked_mean, td_targets
from offmarl.networks import (
    AgentNetwork,
    Head,
    LinearMixer,
    PolicyConfig,
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
from offmarl.programs import (
    TD_ERRORS,
    DatasetStatistics,
    Hyperparameters,
    Program,
    Stage,
    Values,
)
from offmarl.teams import require_one_team
from offmarl.types import ArrayTree, Continuous, EnvSpec, Sequence, View

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(programs.LearnerArgs):
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
        config = programs.policy_config(args, "q")
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

    def __call__(
        self, params: ArrayTree, view: View, first: Bool[Array, "B T"], action: Array
    ) -> Float[Array, "B T N"]:
        """Return the values of the actions taken in windows; 0 for dead agents."""
        seen = view.observation
        if isinstance(self.spec.action, Continuous):
            q = unroll_batch(self.network, params, (seen, action), first).squeeze(-1)
        else:
            q = select(unroll_batch(self.network, params, seen, first), action)
        return q * view.alive


class Networks(NamedTuple):
    """The networks of the policies, of the values V_i and Q_i, and the mixer."""

    policy: AgentNetwork
    head: Head
    value: AgentNetwork
    action_values: ActionValues
    mixer: LinearMixer

    @classmethod
    def of(cls, spec: EnvSpec, args: Args) -> "Networks":
        """Build the networks for an environment."""
        config = policy_of(spec, args)
        encoder = observation_encoder(spec, args.hidden)
        return cls(
            policy=agent_network(config, spec),
            head=agent_head(config),
            value=make_network(programs.policy_config(args, "q"), spec, 1, encoder),
            action_values=ActionValues.of(spec, args),
            mixer=make_linear_mixer(spec, args.mixer_hidden),
        )

    def values(self, params: ArrayTree, batch: Sequence) -> Float[Array, "B slots N"]:
        """Return V_i of all slots."""
        return unroll_batch(self.value, params, batch.view.observation, batch.first)[..., 0]

    def joint_values(
        self, critic: Critic, view: View, first: Bool[Array, "B T"], action: Array
    ) -> Float[Array, "B T 1"]:
        """Return Q_tot of the actions taken in windows."""
        weights = linear_weights(self.mixer, critic.mixer, view)
        q = self.action_values(critic.agent, view, first, action)
        return mix_linearly(weights, q)[..., None]


def policy_of(spec: EnvSpec, args: Args) -> PolicyConfig:
    """Return the description of the policy's network."""
    return programs.policy_config(args, stochastic_head(spec, "soft_gaussian"))


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


def critic_loss(
    networks: Networks, critic: Critic, target: Target, batch: Sequence, hyper: Hyperparameters
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return the mean squared error of Q_tot, and metrics."""
    view_tm1, view_t = batch.view_tm1, batch.view_t
    q_tot = networks.joint_values(critic, view_tm1, batch.first[:, :-1], batch.action)[..., 0]
    weights_t = linear_weights(networks.mixer, target.critic.mixer, view_t)
    v_t = networks.values(target.value, batch)[:, 1:] * view_t.alive
    discount_t = hyper.gamma * (1 - batch.terminated.all(-1))
    y = td_targets(batch.reward.mean(-1), discount_t, mix_linearly(weights_t, v_t))
    known = batch.mask & batch.next_known
    error = jnp.where(known, q_tot - y, 0.0)
    metrics = {"q_tot": masked_mean(q_tot, batch.mask), TD_ERRORS: error}
    return masked_mean(error**2, known, batch.weight), metrics


def local_losses(
    networks: Networks, params: Params, target: Target, batch: Sequence, hyper: Hyperparameters
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the losses of the values V_i and of the actor."""
    view, first, alpha = batch.view_tm1, batch.first[:, :-1], hyper.value_temperature
    counts = batch.mask[..., None] & view.alive
    weight = linear_weights(networks.mixer, target.critic.mixer, view).w
    q = networks.action_values(target.critic.agent, view, first, batch.action)
    v = networks.values(params.value, batch)[:, :-1]
    z = exponents(weight, q, v, alpha)
    shift = jax.lax.stop_gradient(jnp.where(counts, z, _LEAST_SHIFT).max())
    shift = jnp.maximum(shift, _LEAST_SHIFT)
    value_losses = jnp.exp(z - shift) + jnp.exp(-shift) * weight * v / alpha
    outputs = unroll_batch(networks.policy, params.actor, view.observation, first)
    log_probs = networks.head(outputs, view.legal_actions).log_prob(batch.action)
    actor_losses = -jax.lax.stop_gradient(jnp.exp(z)) * log_probs
    return (
        masked_mean(value_losses, counts, batch.weight),
        masked_mean(actor_losses, counts, batch.weight),
    )


def loss(
    networks: Networks, params: Params, target: Target, batch: Sequence, hyper: Hyperparameters
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return the sum of all losses, and metrics.

    Each parameter is in one of the losses only, so the gradient of the sum is that of its own loss.
    """
    of_critic, metrics = critic_loss(networks, params.critic, target, batch, hyper)
    of_values, of_actor = local_losses(networks, params, target, batch, hyper)
    losses = {"critic_loss": of_critic, "value_loss": of_values, "policy_loss": of_actor}
    return of_critic + of_values + of_actor, metrics | losses


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, _dataset: DatasetStatistics) -> Program:
    """Build the program for one kind of data."""
    require_one_team(spec, "omiga")
    config, networks = policy_of(spec, args), Networks.of(spec, args)

    def init(key: PRNGKeyArray, hyper: Hyperparameters) -> State:
        actor_key, value_key, agent_key, mixer_key = jax.random.split(key, 4)
        carry, seen = networks.value.initial_carry(spec.num_agents), blank_view(spec).observation
        agent = networks.action_values.init(agent_key)
        params = Params(
            actor=init_policy(config, spec, actor_key),
            value=networks.value.init(value_key, carry, seen),
            critic=Critic(agent, init_mixer(networks.mixer, spec, mixer_key)),
        )
        optimiser = programs.make_optimiser(args, hyper, separately=True).init(params)
        target = Target(params.value, params.critic)
        return State(params, target, optimiser, jnp.zeros((), jnp.int32))

    def update(
        state: State, batch: Sequence, _key: PRNGKeyArray, hyper: Hyperparameters
    ) -> tuple[State, dict[str, Array]]:
        gradient, metrics = jax.grad(partial(loss, networks), has_aux=True)(
            state.params, state.target, batch, hyper
        )
        adam = programs.make_optimiser(args, hyper, state.updates, separately=True)
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
        values=Values(lambda state: state.params.critic, networks.joint_values),
    )


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> Path:
    """Train, evaluate and write the run; return its directory."""
    return programs.train(make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        main(cli.parse_script(Args, __doc__))
