"""MAC-Flow: a flow of joint actions, distilled into one-step policies that maximise a value.

A velocity field v learns the data's joint actions by flow matching. Each agent's policy μ_i, which
sees its own observation and noise only, imitates the flow's action for the same noise, and
maximises a value that is the mean of values of single agents:

    flow    L = E |v(o, x_t, t) - (a - z)|²,   x_t = (1 - t) z + t a,  z ~ N(0, I),  t ~ U(0, 1);
    policy  L = α E |μ_i(o_i, z_i) - flow_i(o, z)|² - E Q_tot(o, μ(o, z)) / E |Q_tot|,
            flow(o, z): the field followed from z, t = 0 to 1, in Euler's steps;
    critic  L = E (Q_tot(o, a) - r - γ (1 - terminated) Q̄_tot(o', μ(o', z')))²,
            Q_tot = mean over agents of Q_i(o_i, a_i), for each of two critics.

The flow represents any correlation between the agents, but the policies draw their noise
independently: they keep its mean over the noise of the others, and the value chooses among the
modes. Discrete actions are one-hot vectors for the flow, which ends at the largest legal
entry; policies return logits, the distance is the cross-entropy, and the value is the mean of Q_i
over the softmax.

References: Lee, Lee and Zhang 2025 (arXiv 2511.05005), after Flow Q-Learning (Park et al. 2025,
arXiv 2502.02538). Defaults are those of DongsuLeeTech/mac-flow at 6245080 (agents/macflow.py), for
discrete actions too. Differences from that code:

- The flow is that of the joint action, as in the paper; theirs is one flow for each agent.
- Their code for discrete actions (agents/discrete_macflow.py at e47e324) has settings of its own: α
  3, γ 0.99, width 256, an LSTM, and values that are not divided by E |Q_tot|. Its critics learn the
  sum of the agents' values, and its policies act without noise when they are evaluated.
- The value of discrete actions has a gradient; theirs, of an argmax, has none.
- Critics have two hidden layers, without normalisation, and networks use ReLU.
- A step whose next view is unknown is left out of the critic's loss.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from offmarl import cli, programs
from offmarl.config import Fraction, Layers, NonNegative, PositiveInt
from offmarl.distributions import categorical
from offmarl.losses import masked_mean, td_targets
from offmarl.networks import (
    AgentNetwork,
    Critics,
    JointFlow,
    as_vectors,
    blank_view,
    chosen_action,
    init_one_step,
    integrate,
    make_critics,
    make_one_step_policy,
    observation_encoder,
    one_step_network,
    unroll_batch,
)
from offmarl.programs import TD_ERRORS, DatasetStatistics, Hyperparameters, Program, Values
from offmarl.programs.learning.learner import target_program
from offmarl.teams import require_one_team
from offmarl.types import ArrayTree, Continuous, EnvSpec, Sequence, View

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(programs.ValueArgs):
    """A flow of joint actions, distilled into one-step policies."""

    network: Literal["recurrent", "feedforward"] = "feedforward"
    """Policies with a memory (a GRU), or without. Flow and critics have none."""
    hidden: PositiveInt = 512
    """Width of the layers of flow and policies."""
    layers: Layers = 4
    """Number of the hidden layers of flow and policies."""
    critic_hidden: PositiveInt = 512
    """Width of the critics' layers."""
    gamma: Fraction = 0.995
    """Discount γ."""
    tau: Fraction = 0.005
    """Share of the target critics that an update replaces."""
    flow_steps: PositiveInt = 10
    """Steps from noise to the action of the flow."""
    distillation_weight: NonNegative = 1.0
    """α: the larger, the closer the policies stay to the data."""
    normalise_values: bool = True
    """Divide the policies' value by its mean magnitude, so that α does not depend on the rewards'
    scale."""


# ---------------------------------------------------------------------------------- state


class Params(NamedTuple):
    """Parameters of all networks."""

    flow: ArrayTree
    policy: ArrayTree
    critics: tuple[ArrayTree, ...]


# ---------------------------------------------------------------------------------- losses


class Model(NamedTuple):
    """The networks."""

    spec: EnvSpec
    flow: JointFlow
    policy: AgentNetwork
    critics: Critics
    flow_steps: int

    @property
    def continuous(self) -> bool:
        """Whether actions are continuous."""
        return isinstance(self.spec.action, Continuous)


def team_value(
    model: Model, params: tuple[ArrayTree, ...], view: View, action: Float[Array, "*b N A"]
) -> Float[Array, "K *b"]:
    """Return Q_tot of each critic for actions as vectors; discrete ones may be probabilities."""
    if model.continuous:
        action = as_vectors(model.spec, action, view.legal_actions)
        values = model.critics.values(params, view, action).squeeze(-1)
    else:
        values = (model.critics.values(params, view, action, jnp.zeros_like(action)) * action).sum(
            -1
        )
    return (values * view.alive).mean(-1)


def flow_loss(
    model: Model, params: ArrayTree, batch: Sequence, key: PRNGKeyArray
) -> Float[Array, ""]:
    """Return the loss of flow matching, from noise to the data's joint actions."""
    view, action = batch.view_tm1, as_vectors(model.spec, batch.action)
    noise_key, time_key = jax.random.split(key)
    z = jax.random.normal(noise_key, action.shape)
    time = jax.random.uniform(time_key, batch.mask.shape)
    t = time[..., None, None]
    x_t = (1 - t) * z + t * action
    entries = _entries(model, view)
    velocity = model.flow.apply(
        params, view.observation, view.alive, jnp.where(entries, x_t, 0.0), time
    )
    error = (velocity - (action - z)) ** 2
    return masked_mean(error, batch.mask[..., None, None] & entries, batch.weight)


def flow_actions(
    model: Model, params: ArrayTree, view: View, noise: Float[Array, "*b N A"]
) -> Array:
    """Return the joint actions that the flow makes of noise."""
    entries = _entries(model, view)

    def velocity(action: Array, time: Array) -> Array:
        inputs = view.observation, view.alive, jnp.where(entries, action, 0.0), time
        return model.flow.apply(params, *inputs)

    outputs = integrate(velocity, noise, model.flow_steps)
    return chosen_action(model.spec, outputs, view.legal_actions)


def policy_losses(
    model: Model, params: Params, outputs: Array, noise: Array, batch: Sequence
) -> tuple[Float[Array, ""], Float[Array, "B T"]]:
    """Return the distance of the policies' outputs from the flow, and their value Q_tot."""
    view = batch.view_tm1
    flow_action = jax.lax.stop_gradient(flow_actions(model, params.flow, view, noise))
    acts = batch.mask[..., None] & view.alive
    if model.continuous:
        action = chosen_action(model.spec, outputs, view.legal_actions)
        error = (outputs - flow_action) ** 2
        distance = masked_mean(error, acts[..., None] & view.legal_actions, batch.weight)
    else:
        distribution = categorical(outputs, view.legal_actions)
        action = jax.nn.softmax(distribution.logits)
        distance = masked_mean(-distribution.log_prob(flow_action), acts, batch.weight)
    critics = jax.lax.stop_gradient(params.critics)
    return distance, team_value(model, critics, view, action).mean(0)


def critic_loss(
    model: Model,
    params: Params,
    target: tuple[ArrayTree, ...],
    outputs_t: Array,
    batch: Sequence,
    hyper: Hyperparameters,
) -> tuple[Float[Array, ""], Float[Array, "B T"]]:
    """Return the critics' loss and their largest errors; ``outputs_t`` are of the next views."""
    view, view_t = batch.view_tm1, batch.view_t
    action_t = chosen_action(model.spec, outputs_t, view_t.legal_actions)
    value_t = team_value(model, target, view_t, as_vectors(model.spec, action_t)).mean(0)
    terminated = batch.terminated.all(-1)
    targets = td_targets(batch.reward.mean(-1), hyper.gamma * (1 - terminated), value_t)
    q = team_value(model, params.critics, view, as_vectors(model.spec, batch.action))
    known = batch.mask & (batch.next_known | terminated)
    error = jnp.where(known, q - targets, 0.0)
    of_critics = jax.vmap(lambda error: masked_mean(error**2, known, batch.weight))(error)
    return of_critics.mean(), jnp.abs(error).max(0)


def loss(
    model: Model,
    normalise_values: bool,
    params: Params,
    target: tuple[ArrayTree, ...],
    batch: Sequence,
    key: PRNGKeyArray,
    hyper: Hyperparameters,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return the sum of all losses, each of which has parameters of its own, and metrics."""
    flow_key, noise_key = jax.random.split(key)
    noise = jax.random.normal(noise_key, (*batch.view.alive.shape, model.spec.action_size))
    inputs = batch.view.observation, noise
    outputs = unroll_batch(model.policy, params.policy, inputs, batch.first)
    flow = flow_loss(model, params.flow, batch, flow_key)
    distance, value = policy_losses(model, params, outputs[:, :-1], noise[:, :-1], batch)
    critic, errors = critic_loss(
        model, params, target, jax.lax.stop_gradient(outputs[:, 1:]), batch, hyper
    )
    scale: Array | float = 1.0
    if normalise_values:
        magnitude = masked_mean(jnp.abs(value), batch.mask)
        scale = jax.lax.stop_gradient(1 / jnp.maximum(magnitude, 1e-6))
    policy = hyper.distillation_weight * distance
    policy -= scale * masked_mean(value, batch.mask, batch.weight)
    metrics = {
        "flow_loss": flow,
        "distillation_loss": distance,
        "policy_loss": policy,
        "critic_loss": critic,
        "q_tot": masked_mean(value, batch.mask),
        TD_ERRORS: errors,
    }
    return flow + policy + critic, metrics


def _entries(model: Model, view: View) -> Bool[Array, "*b N A"]:
    """Return the entries of joint actions that the flow transports."""
    return view.alive[..., None] & (view.legal_actions | (not model.continuous))


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, _dataset: DatasetStatistics) -> Program:
    """Build the program for one kind of data."""
    require_one_team(spec, "mac_flow")
    model = make_model(spec, args)

    def init(key: PRNGKeyArray) -> Params:
        flow_key, policy_key, critic_key = jax.random.split(key, 3)
        view = blank_view(spec)
        action = jnp.zeros((spec.num_agents, spec.action_size))
        inputs = view.observation, view.alive, action, jnp.zeros(())
        return Params(
            model.flow.init(flow_key, *inputs),
            init_one_step(model.policy, spec, policy_key),
            model.critics.init(critic_key, spec),
        )

    def values(
        params: tuple[ArrayTree, ...], view: View, _first: Bool[Array, "B T"], action: Array
    ) -> Float[Array, "B T 1"]:
        return team_value(model, params, view, as_vectors(spec, action)).mean(0)[..., None]

    return target_program(
        args,
        init,
        partial(loss, model, args.normalise_values),
        targets=lambda params: params.critics,
        policy=partial(make_one_step_policy, model.policy, spec),
        policy_params=lambda state: state.params.policy,
        values=Values(lambda state: state.params.critics, values),
    )


def make_model(spec: EnvSpec, args: Args) -> Model:
    """Build the networks for one kind of data."""
    encoder = observation_encoder(spec, args.hidden)
    flow = JointFlow(spec.num_agents, spec.action_size, args.hidden, args.layers, encoder)
    policy = one_step_network(programs.policy_config(args, "deterministic"), spec)
    critics = make_critics(
        spec,
        outputs=1 if isinstance(spec.action, Continuous) else spec.num_actions,
        hidden=args.critic_hidden,
        count=2,
        sees="observation",
        agent_id=args.agent_id,
    )
    return Model(spec, flow, policy, critics, args.flow_steps)


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> Path:
    """Train, evaluate and write the run; return its directory."""
    return programs.train(make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        main(cli.parse_script(Args, __doc__))
