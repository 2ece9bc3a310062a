"""Policies learned offline beside linear sums of values, for omiga and comadice.

The team's values are weighted sums of the agents' values,

    Q_tot = Σ_i w_i(s) Q_i(o_i, a_i) + b(s),     V_tot = Σ_i w_i(s) V_i(o_i) + b(s),

with weights w_i(s) ≥ 0 and a constant b(s) in common. Arguments, networks, the loss of Q_tot and
the rest of the program are here. A program defines the losses of its values and of its policies.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import jax
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from offmarl.config import Fraction, Positive, PositiveInt
from offmarl.distributions import select
from offmarl.losses import masked_mean
from offmarl.networks import (
    SMALL,
    ActionEncoder,
    AgentNetwork,
    Head,
    LinearMixer,
    MixedParams,
    PolicyConfig,
    agent_head,
    agent_network,
    as_vectors,
    init_mixer,
    init_network,
    init_one_step,
    init_policy,
    make_linear_mixer,
    make_network,
    make_policy,
    mix_linearly,
    mixing_weights,
    observation_encoder,
    unroll_batch,
)
from offmarl.programs.learning.learner import ValueArgs, policy_config, target_program
from offmarl.programs.learning.offline_q_learning import team_errors
from offmarl.programs.program import TD_ERRORS, Hyperparameters, Program, Values
from offmarl.types import ArrayTree, Continuous, EnvSpec, Sequence, View

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class FactoredArgs(ValueArgs):
    """Arguments of policies learned beside linear sums of values."""

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
    value_temperature: Positive = 0.1
    """α: at smaller values, values and policy follow the best of the data more closely."""
    tau: Fraction = 0.005
    """How far an update brings the target networks to the networks; 1 copies them."""
    mixer_hidden: PositiveInt = 64
    """Width of the mixer's hidden layer."""


# ---------------------------------------------------------------------------------- state


class Params(NamedTuple):
    """Parameters of all networks."""

    actor: ArrayTree
    value: ArrayTree
    critic: MixedParams


class Target(NamedTuple):
    """Parameters of the target networks."""

    value: ArrayTree
    critic: MixedParams


# ---------------------------------------------------------------------------------- networks


class ActionValues(NamedTuple):
    """The network of the agents' action values Q_i.

    For discrete actions it has an output for each of them; a continuous action is an input.
    """

    network: AgentNetwork
    spec: EnvSpec

    @classmethod
    def of(cls, spec: EnvSpec, args: FactoredArgs) -> "ActionValues":
        """Build the network for an environment."""
        config = policy_config(args, "q")
        if not isinstance(spec.action, Continuous):
            return cls(agent_network(config, spec), spec)
        encoder = ActionEncoder(observation_encoder(spec, args.hidden))
        return cls(make_network(config, spec, 1, encoder, output_scale=SMALL), spec)

    def init(self, key: PRNGKeyArray) -> ArrayTree:
        """Draw the parameters."""
        draw = init_one_step if isinstance(self.spec.action, Continuous) else init_network
        return draw(self.network, self.spec, key)

    def __call__(
        self, params: ArrayTree, view: View, first: Bool[Array, "B T"], action: Array
    ) -> Float[Array, "B T N"]:
        """Return the values of the actions taken in windows; 0 for dead agents."""
        observation = view.observation
        if isinstance(self.spec.action, Continuous):
            action = as_vectors(self.spec, action, view.legal_actions)
            q = unroll_batch(self.network, params, (observation, action), first).squeeze(-1)
        else:
            q = select(unroll_batch(self.network, params, observation, first), action)
        return q * view.alive


class Networks(NamedTuple):
    """The networks of the policies, of the values V_i and Q_i, and the mixer."""

    spec: EnvSpec
    config: PolicyConfig
    """The description of the policies."""
    policy: AgentNetwork
    head: Head
    value: AgentNetwork
    action_values: ActionValues
    mixer: LinearMixer

    @classmethod
    def of(cls, spec: EnvSpec, args: FactoredArgs, head: str = "softmax") -> "Networks":
        """Build the networks for an environment; ``head`` is that of the policies."""
        config = policy_config(args, head)
        encoder = observation_encoder(spec, args.hidden)
        return cls(
            spec,
            config,
            policy=agent_network(config, spec),
            head=agent_head(config),
            value=make_network(policy_config(args, "q"), spec, 1, encoder, output_scale=SMALL),
            action_values=ActionValues.of(spec, args),
            mixer=make_linear_mixer(spec, args.mixer_hidden),
        )

    def init(self, key: PRNGKeyArray) -> Params:
        """Draw the parameters of all networks."""
        actor_key, value_key, agent_key, mixer_key = jax.random.split(key, 4)
        return Params(
            actor=init_policy(self.config, self.spec, actor_key),
            value=init_network(self.value, self.spec, value_key),
            critic=MixedParams(
                self.action_values.init(agent_key), init_mixer(self.mixer, self.spec, mixer_key)
            ),
        )

    def values(self, params: ArrayTree, batch: Sequence) -> Float[Array, "B slots N"]:
        """Return V_i of all slots; 0 for dead agents."""
        v = unroll_batch(self.value, params, batch.view.observation, batch.first)[..., 0]
        return v * batch.view.alive

    def joint_values(
        self, critic: MixedParams, view: View, first: Bool[Array, "B T"], action: Array
    ) -> Float[Array, "B T 1"]:
        """Return Q_tot of the actions taken in windows."""
        weights = mixing_weights(self.mixer, critic.mixer, view)
        q = self.action_values(critic.agent, view, first, action)
        return mix_linearly(weights, q)[..., None]


# ---------------------------------------------------------------------------------- critic


def critic_loss(
    networks: Networks, critic: MixedParams, target: Target, batch: Sequence, hyper: Hyperparameters
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return the mean squared error of Q_tot, and metrics."""
    view = batch.view_tm1
    q_tot = networks.joint_values(critic, view, batch.first[:, :-1], batch.action)[..., 0]
    weights_t = mixing_weights(networks.mixer, target.critic.mixer, batch.view_t)
    v_tot_t = mix_linearly(weights_t, networks.values(target.value, batch)[:, 1:])
    error, known = team_errors(batch, q_tot, v_tot_t, hyper.gamma)
    metrics = {"q_tot": masked_mean(q_tot, batch.mask), TD_ERRORS: error}
    return masked_mean(error**2, known, batch.weight), metrics


def total_loss(
    local_losses: Callable[..., dict[str, Float[Array, ""]]],
    networks: Networks,
    params: Params,
    target: Target,
    batch: Sequence,
    _key: PRNGKeyArray,
    hyper: Hyperparameters,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return the sum of all losses, and metrics.

    Each parameter is in one of the losses only, so the gradient of the sum is that of its own loss.
    """
    of_critic, metrics = critic_loss(networks, params.critic, target, batch, hyper)
    local = local_losses(networks, params, target, batch, hyper)
    total = of_critic + local["value_loss"] + local["policy_loss"]
    return total, metrics | local | {"critic_loss": of_critic}


# ---------------------------------------------------------------------------------- program


def factored_program(
    networks: Networks, args: FactoredArgs, local_losses: Callable[..., dict[str, Float[Array, ""]]]
) -> Program:
    """Build a program that descends `critic_loss` and the local losses of its networks.

    ``local_losses(networks, params, target, batch, hyper)`` returns ``value_loss``, of the values,
    ``policy_loss``, of the actor, and other metrics.
    """
    return target_program(
        args,
        networks.init,
        partial(total_loss, local_losses, networks),
        targets=lambda params: Target(params.value, params.critic),
        separately=True,
        policy=partial(make_policy, networks.config, networks.spec),
        policy_params=lambda state: state.params.actor,
        values=Values(lambda state: state.params.critic, networks.joint_values),
    )
