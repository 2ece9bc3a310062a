"""ComaDICE: factorised stationary distribution correction with the soft χ² divergence, discrete.

The joint values Q_tot and ν_tot are weighted sums of the agents' values, with weights w_i(s) ≥ 0
and a constant b(s) in common. How much more often than the data the best policy near it takes a
step is a function of the joint advantage, and each agent imitates the data with that weight:

    advantage A = Q̄_tot(s, a) - ν_tot(s) = Σ_i w̄_i(s) (Q̄_i(o_i, a_i) - ν_i(o_i)),
    values    L = E[ ν_tot(s) + α f*(A / α) ],
    critic    L = E[ (Q_tot(s, a) - y)² ],   y = r + γ (1 - terminated) ν̄_tot(s'),
    actor     L = -E[ min(ω, 2) log π_i(a_i | o_i) ],   ω = (f')⁻¹(A / α),

where f is the soft χ² divergence: (f')⁻¹(x) = x + 1 and f*(x) = ½ x² + x for positive x,
(f')⁻¹(x) = e^x and f*(x) = e^x - 1 for negative x. At the minimum the mean of ω over the data's
actions is 1 in every state, and where they are all alike ν_tot = Q_tot. The reward r is the mean of
the agents'. Dead agents add nothing to the joint values, and learn nothing.

Reference: Bui et al. 2024 (arXiv 2410.01954), with the defaults of the authors' code
(github.com/vietbt/ComaDICE, commit eef0f74, discrete actions). We differ from it where it leaves
the paper. The paper's advantage is the joint one; the code gives each agent one of its own,
w_i (Q_i - ν_i), and adds the weights that follow. The paper's loss starts from the values of first
states, whose gradient reaches later states through y; since y is a target, they would grow without
bound, which the code avoids by a gradient that is not that of f*: zero where Q_tot = ν_tot. We keep
f* and take the values of all of the data's states, the semi-gradient form of Sikchi et al. 2023
(arXiv 2302.08560). It normalises ω by itself, so that the code's two multipliers have no use. For
SMAC the code replaces rewards by returns-to-go; we do not.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl import cli, programs
from offmarl.config import Fraction, Positive, PositiveInt
from offmarl.distributions import select
from offmarl.losses import (
    cross_entropy,
    masked_mean,
    soft_chi_square_conjugate,
    soft_chi_square_ratio,
    td_targets,
)
from offmarl.networks import (
    AgentNetwork,
    LinearMixer,
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
    unroll_batch,
)
from offmarl.programs import (
    TD_ERRORS,
    DatasetStatistics,
    Hyperparameters,
    LearnerArgs,
    Program,
    Stage,
    Values,
)
from offmarl.teams import require_one_team
from offmarl.types import ArrayTree, EnvSpec, Sequence, View

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(LearnerArgs):
    """Factorised stationary distribution correction."""

    learning_rate: Positive = 1e-4
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
    """α, in the unit of returns: at smaller values, the policy follows the best of the data more
    closely."""
    weight_max: Positive = 2.0
    """Largest weight ω of a step in the actor's loss."""
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


class Networks(NamedTuple):
    """The networks of the policies, of the values ν_i and Q_i, and the mixer."""

    policy: AgentNetwork
    value: AgentNetwork
    action_values: AgentNetwork
    mixer: LinearMixer

    @classmethod
    def of(cls, spec: EnvSpec, args: Args) -> "Networks":
        """Build the networks for an environment."""
        config, encoder = programs.policy_config(args, "q"), observation_encoder(spec, args.hidden)
        return cls(
            policy=agent_network(programs.policy_config(args, "softmax"), spec),
            value=make_network(config, spec, 1, encoder),
            action_values=agent_network(config, spec),
            mixer=make_linear_mixer(spec, args.mixer_hidden),
        )

    def taken_values(
        self, params: ArrayTree, view: View, first: Bool[Array, "B T"], action: Array
    ) -> Float[Array, "B T N"]:
        """Return Q_i of the actions taken in windows; 0 for dead agents."""
        q = unroll_batch(self.action_values, params, view.observation, first)
        return select(q, action) * view.alive

    def joint_values(
        self, critic: Critic, view: View, first: Bool[Array, "B T"], action: Array
    ) -> Float[Array, "B T 1"]:
        """Return Q_tot of the actions taken in windows."""
        weights = linear_weights(self.mixer, critic.mixer, view)
        q = self.taken_values(critic.agent, view, first, action)
        return mix_linearly(weights, q)[..., None]

    def values(self, params: ArrayTree, batch: Sequence) -> Float[Array, "B slots N"]:
        """Return ν_i of all slots; 0 for dead agents."""
        nu = unroll_batch(self.value, params, batch.view.observation, batch.first)[..., 0]
        return nu * batch.view.alive


# ---------------------------------------------------------------------------------- losses


def critic_loss(
    networks: Networks, critic: Critic, target: Target, batch: Sequence, hyper: Hyperparameters
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return the mean squared error of Q_tot, and metrics."""
    view_tm1, view_t = batch.view_tm1, batch.view_t
    q_tot = networks.joint_values(critic, view_tm1, batch.first[:, :-1], batch.action)[..., 0]
    weights_t = linear_weights(networks.mixer, target.critic.mixer, view_t)
    nu_tot_t = mix_linearly(weights_t, networks.values(target.value, batch)[:, 1:])
    discount_t = hyper.gamma * (1 - batch.terminated.all(-1))
    y = td_targets(batch.reward.mean(-1), discount_t, nu_tot_t)
    known = batch.mask & batch.next_known
    error = jnp.where(known, q_tot - y, 0.0)
    metrics = {"q_tot": masked_mean(q_tot, batch.mask), TD_ERRORS: error}
    return masked_mean(error**2, known, batch.weight), metrics


def local_losses(
    networks: Networks, params: Params, target: Target, batch: Sequence, hyper: Hyperparameters
) -> dict[str, Float[Array, ""]]:
    """Return the losses of the values and of the actor, and the mean weight ω."""
    view, first, alpha = batch.view_tm1, batch.first[:, :-1], hyper.value_temperature
    weights = linear_weights(networks.mixer, target.critic.mixer, view)
    q = networks.taken_values(target.critic.agent, view, first, batch.action)
    nu = networks.values(params.value, batch)[:, :-1]
    x = (weights.w * (q - nu)).sum(-1) / alpha
    value_losses = mix_linearly(weights, nu) + alpha * soft_chi_square_conjugate(x)

    omega = jax.lax.stop_gradient(jnp.minimum(soft_chi_square_ratio(x), hyper.weight_max))
    logits = unroll_batch(networks.policy, params.actor, view.observation, first)
    losses = jax.vmap(cross_entropy)(logits, batch.action, view.legal_actions)
    counts = batch.mask[..., None] & view.alive
    return {
        "value_loss": masked_mean(value_losses, batch.mask, batch.weight),
        "policy_loss": masked_mean(omega[..., None] * losses, counts, batch.weight),
        "ratio": masked_mean(omega, batch.mask),
    }


def loss(
    networks: Networks, params: Params, target: Target, batch: Sequence, hyper: Hyperparameters
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return the sum of all losses, and metrics.

    Each parameter is in one of the losses only, so the gradient of the sum is that of its own loss.
    """
    of_critic, metrics = critic_loss(networks, params.critic, target, batch, hyper)
    local = local_losses(networks, params, target, batch, hyper)
    total = of_critic + local["value_loss"] + local["policy_loss"]
    return total, metrics | local | {"critic_loss": of_critic}


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, _dataset: DatasetStatistics) -> Program:
    """Build the program for one kind of data."""
    require_one_team(spec, "comadice")
    networks, config = Networks.of(spec, args), programs.policy_config(args, "softmax")

    def init(key: PRNGKeyArray, hyper: Hyperparameters) -> State:
        actor_key, value_key, agent_key, mixer_key = jax.random.split(key, 4)
        carry, seen = networks.value.initial_carry(spec.num_agents), blank_view(spec).observation
        params = Params(
            actor=init_policy(config, spec, actor_key),
            value=networks.value.init(value_key, carry, seen),
            critic=Critic(
                networks.action_values.init(agent_key, carry, seen),
                init_mixer(networks.mixer, spec, mixer_key),
            ),
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
