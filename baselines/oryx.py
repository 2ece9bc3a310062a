"""Oryx: sequential implicit constraint Q-learning, whose agents act in turn, with retention.

One encoder-decoder of retention layers chooses the agents' actions one after another, each given
the observations of all agents, the actions of those before it in the step, a_<i, and the history τ.
Its two heads are a policy π_i(a_i | τ, a_<i) and action values Q_i(τ, a_<i, a_i), which are learned
from the data's actions only:

    critic  L = E[ ½ (Q_i(τ, a_<i, a_i) - y_i)² ],   y_i = r_i + γ w(τ', a') Q̄_i(τ', a'_<i, a'_i),
            w = B softmax over the batch of Q̄_i / α_v;
    policy  L = -E[ w_i log π_i(a_i | τ, a_<i) ],    w_i = B softmax over the batch of A_i / α_π,
            A_i = Q_i(τ, a_<i, a_i) - E_{a ~ π_i} Q_i(τ, a_<i, a).

The agents' order is drawn anew for each update; they act in the order of their numbers. A data set
of several joint modes is cloned as it is, and the greedy policy keeps to one of them. Acting is
central: it needs the observations of all agents. Dead agents stay in the sequence, because a policy
does not see who is alive, but nothing is learned from their steps.

References: Formanek et al. 2025 (arXiv 2505.22151), with the architecture of Sable (Mahjoub et al.
2024, arXiv 2410.01706). Defaults are those of instadeepai/og-marl at f4eb8f0
(baselines/jax_systems, discrete_oryx and cont_oryx); retention was also read in instadeepai/Mava at
73c4611. Differences from og-marl:

- A continuous critic sees the agent's own action; theirs sees that of the agent before it, so no
  advantage depends on the action. Their baseline is the target network's value, ours the mean value
  of actions of the policy.
- Each agent draws its action with a key of its own.
- The gated layers are initialised randomly. Theirs are zero in all three matrices, and so is their
  gradient.
- Heads are normalised one by one, not in four parts each.
- Actions are marked by the agent that took them.
- Observations are not scaled to unit size. There is no encoding of time, which theirs has for
  continuous actions only.
- The view that a truncated episode ended with has the mean value of the target network's policy,
  given action 0 of the agents before.
- The critic's loss is divided by the variance of its targets. It grows with the square of the
  rewards' scale, and the policy's does not: where returns are about 1, the gradients of the policy
  outweigh those of the critic in the network that they share, and the values are not learned. The
  variance is counted in multiples of 25, that of values between 0 and 20 as in the reference's
  data, for which the loss thus stays the same. ``--no-normalise-values`` leaves this out.
- Rewards are scaled to returns of at most 20, those of the reference's StarCraft data, so that α_v
  and α_π mean the same on all data.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl import cli, programs
from offmarl.config import Fraction, Layers, Positive, PositiveInt
from offmarl.distributions import categorical, select
from offmarl.errors import OptionError
from offmarl.losses import bootstrap_discounts, masked_mean, softmax_weights, td_targets
from offmarl.networks import (
    AgentSequence,
    Decoded,
    Head,
    PolicyConfig,
    agent_head,
    as_vectors,
    init_agent_sequence,
    make_agent_sequence,
    make_sequence_policy,
    stochastic_head,
)
from offmarl.programs import TD_ERRORS, DatasetStatistics, Hyperparameters, Program, Values
from offmarl.programs.learning.learner import next_in_window, require_next_action, target_program
from offmarl.teams import require_one_team
from offmarl.types import ArrayTree, Continuous, EnvSpec, Sequence, View

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(programs.ValueArgs):
    """Sequential implicit constraint Q-learning with retention."""

    batch_size: PositiveInt = 64
    """Windows in a batch."""
    max_grad_norm: Positive | None = 10.0
    """Largest global norm of the gradients; larger ones are scaled down to it."""
    network: Literal["recurrent", "feedforward"] = "recurrent"
    """The network remembers the steps before (recurrent), or not (feedforward)."""
    hidden: PositiveInt = 128
    """Width of the network's layers."""
    layers: Layers | None = None
    """Blocks of the encoder, and of the decoder; by default 1."""
    heads: PositiveInt = 4
    """Heads of each retention layer; a divisor of --hidden."""
    tau: Fraction = 0.005
    """Share of the target network that an update replaces."""
    value_temperature: Positive | None = None
    """α_v: the smaller, the more the targets follow the best of the batch. By default 1,000 for
    discrete actions, and 10,000 for continuous ones."""
    policy_temperature: Positive | None = None
    """α_π: the smaller, the more the policy follows the best of the data. By default 0.1 for
    discrete actions, and 1 for continuous ones."""
    critic_weight: Positive | None = None
    """Weight of the critic's loss. By default 1 for discrete actions, and 0.5 for continuous
    ones."""
    normalise_values: bool = True
    """Divide the critic's loss by the variance of its targets, in multiples of 25, that of the
    reference's data, so that the network which actor and critic share learns the values at any
    scale of rewards."""
    baseline_samples: PositiveInt = 10
    """Actions of the policy whose mean value is the baseline, where actions are continuous."""
    tanh: bool = False
    """Use a tanh-squashed Gaussian for continuous actions instead of a clipped one. It gives no
    probability to the ends of the range, where controllers often act."""


# ---------------------------------------------------------------------------------- losses


class Model(NamedTuple):
    """The network, and the arguments of its losses."""

    spec: EnvSpec
    network: AgentSequence
    head: Head
    baseline_samples: int
    normalise_values: bool
    value_temperature: float
    policy_temperature: float
    critic_weight: float


def decode(
    model: Model,
    params: ArrayTree,
    view: View,
    first: Bool[Array, "B T"],
    action: Array,
    order: Int[Array, "N"],
) -> Decoded:
    """Return the network's outputs in windows whose agents have acted in this order."""
    vector = as_vectors(model.spec, action, view.legal_actions)
    decoded: Decoded = model.network.apply(params, view.observation, vector, first, order)
    return decoded


def data_values(
    model: Model, params: ArrayTree, decoded: Decoded, view: View, action: Array
) -> Float[Array, "B T N"]:
    """Return the values of the actions of the data."""
    if model.network.continuous:
        vector = as_vectors(model.spec, action, view.legal_actions)
        return model.network.apply(params, decoded.features, vector, method="value")
    return select(model.network.apply(params, decoded.features, method="values"), action)


def mean_values(
    model: Model, params: ArrayTree, decoded: Decoded, view: View, key: PRNGKeyArray
) -> Float[Array, "B T N"]:
    """Return the mean value of the policy's own actions, given those of the agents before."""
    if not model.network.continuous:
        values = model.network.apply(params, decoded.features, method="values")
        return categorical(decoded.policy, view.legal_actions).mean_of(values)
    sample = model.head(decoded.policy, view.legal_actions).sample
    actions = jax.vmap(sample)(jax.random.split(key, model.baseline_samples))
    value = partial(model.network.apply, params, decoded.features, method="value")
    return jax.vmap(value)(actions).mean(0)


def critic_targets(
    model: Model,
    target: ArrayTree,
    batch: Sequence,
    order: Array,
    key: PRNGKeyArray,
    hyper: Hyperparameters,
) -> tuple[Float[Array, "B T N"], Bool[Array, "B T N"]]:
    """Return the targets of the values of the data's actions, and where they are known."""
    acts = batch.mask[..., None] & batch.view_tm1.alive
    inputs = batch.view_tm1, batch.first[:, :-1], batch.action
    decoded = decode(model, target, *inputs, order)
    values = data_values(model, target, decoded, batch.view_tm1, batch.action)
    weighted = values * softmax_weights(values, acts, model.value_temperature, batch.weight)
    # The data have no action in the view that a truncated episode ended with.
    of_policy = mean_values(model, target, decoded, batch.view_tm1, key)
    of_slots = jnp.where(batch.mask[..., None], weighted, of_policy)
    lives = batch.view_t.alive
    next_slots, next_policy = (
        jnp.pad(x[:, 1:], ((0, 0), (0, 1), (0, 0))) for x in (of_slots, of_policy)
    )
    v_t = jnp.where(lives, next_slots, 0.0)
    # Rewards may go on after an agent's death, as the others expect; see `has_value`.
    of_team = v_t.sum(-1, keepdims=True) / jnp.maximum(lives.sum(-1, keepdims=True), 1)
    v_t = jnp.where(lives, v_t, of_team)
    if model.spec.reward != "team":
        v_t = jnp.where(batch.acts_t & ~lives, next_policy, v_t)
    discount = bootstrap_discounts(hyper.gamma, batch.terminated, model.spec.reward == "team")
    known = acts & (next_in_window(batch)[..., None] | (discount == 0))
    return td_targets(batch.reward, discount, v_t), known


_REFERENCE_VARIANCE = 25.0
"""Variance of values between 0 and 20, the returns of the reference's StarCraft data."""

_LEAST_SHARE = 0.1
"""Least variance of targets that are almost alike, in multiples of their mean square."""


def value_scale(
    targets: Float[Array, "B T N"], known: Bool[Array, "B T N"], weight: Array | None = None
) -> Float[Array, ""]:
    """Return the variance of known targets, in multiples of that of the reference's data."""
    if weight is not None:  # of the data that the weighted loss stands for
        weight = weight / jnp.maximum(masked_mean(jnp.ones_like(targets), known, weight), 1e-6)
    mean, square = (masked_mean(x, known, weight) for x in (targets, targets**2))
    least = jnp.minimum(_LEAST_SHARE * square, _REFERENCE_VARIANCE)
    variance = jnp.maximum(square - mean**2, least)
    return jnp.where(square > 0, variance / _REFERENCE_VARIANCE, 1.0)


def loss(
    model: Model,
    params: ArrayTree,
    target: ArrayTree,
    batch: Sequence,
    key: PRNGKeyArray,
    hyper: Hyperparameters,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return the loss of policy and critic, and metrics."""
    order_key, target_key, key = jax.random.split(key, 3)
    order = jax.random.permutation(order_key, model.spec.num_agents)
    view = batch.view_tm1
    acts = batch.mask[..., None] & view.alive
    decoded = decode(model, params, view, batch.first[:, :-1], batch.action, order)
    q = data_values(model, params, decoded, view, batch.action)

    targets, known = critic_targets(model, target, batch, order, target_key, hyper)
    error = jnp.where(known, q - targets, 0.0)
    critic_loss = masked_mean(0.5 * error**2, known, batch.weight)

    advantage = q - mean_values(model, params, decoded, view, key)
    imitate = softmax_weights(advantage, acts, model.policy_temperature, batch.weight)
    log_prob = model.head(decoded.policy, view.legal_actions).log_prob(batch.action)
    policy_loss = masked_mean(-imitate * log_prob, acts, batch.weight)
    metrics = {
        "policy_loss": policy_loss,
        "critic_loss": critic_loss,
        "q": masked_mean(q, acts),
        TD_ERRORS: jnp.abs(error).max(-1),
    }
    scale = value_scale(targets, known, batch.weight) if model.normalise_values else 1.0
    return policy_loss + model.critic_weight * critic_loss / scale, metrics


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, _dataset: DatasetStatistics) -> Program:
    """Build the program for one kind of data."""
    require_one_team(spec, "oryx")
    model = make_model(spec, args)

    def values(
        params: ArrayTree, view: View, first: Bool[Array, "B T"], action: Array
    ) -> Float[Array, "B T N"]:
        order = jnp.arange(spec.num_agents)
        decoded = decode(model, params, view, first, action, order)
        return data_values(model, params, decoded, view, action)

    return target_program(
        args,
        partial(init_agent_sequence, model.network, spec),
        partial(loss, model),
        policy=partial(make_sequence_policy, model.network, model.head, spec),
        policy_params=lambda state: state.params,
        values=Values(lambda state: state.params, values),
    )


def make_model(spec: EnvSpec, args: Args) -> Model:
    """Build the network for one kind of data, and resolve the defaults that depend on it."""
    if args.hidden % args.heads:
        raise OptionError(f"--hidden {args.hidden} must be a multiple of --heads {args.heads}.")
    defaults = (1e4, 1.0, 0.5) if isinstance(spec.action, Continuous) else (1e3, 0.1, 1.0)
    options = args.value_temperature, args.policy_temperature, args.critic_weight
    network = make_agent_sequence(
        spec,
        hidden=args.hidden,
        heads=args.heads,
        blocks=args.layers or 1,
        agent_id=args.agent_id,
        decay=0.5 if args.network == "recurrent" else 0.0,
    )
    head_name = stochastic_head(spec, "tanh_gaussian" if args.tanh else "gaussian")
    head = agent_head(PolicyConfig(args.network, head_name))
    values = [default if x is None else x for x, default in zip(options, defaults, strict=True)]
    return Model(spec, network, head, args.baseline_samples, args.normalise_values, *values)


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> Path:
    """Train, evaluate and write the run; return its directory."""
    require_next_action(args.length)
    return programs.train(make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        main(cli.parse_script(Args, __doc__))
