"""CFCQL: counterfactual conservative Q-learning, discrete.

QMIX with a conservative penalty for each agent on its own: all legal actions of one agent are
compared, while the other agents keep the data's actions. The more an agent's values deviate from
the data's behaviour, the larger is its part λ_i of the penalty:

    L = E[ ½ (Q_tot(s, a) - y)² ] + α E[ Σ_i λ_i logsumexp over legal a_i' of Q_tot(s, a_i', a_-i)
        - Q_tot(s, a) ],     y = TD(λ) of r + γ (1 - terminated) Q̄_tot(s', a'),
    λ_i = softmax over agents of τ KL(π_i ‖ π_b),     π_i = softmax over legal a_i' of
        Q_tot(s, a_i', a_-i),

with r the mean of the agents' rewards, and a' the data's next action. The view that a truncated
episode ended with has none: there each agent's value is the mean over the softmax of its values.
The behaviour policy π_b is cloned from the data before the values are learned. The episode
terminates where all agents do. Dead agents add nothing to Q_tot, and have no part of the penalty.

Reference: Shao et al. 2023 (arXiv 2309.12696). Defaults are those of the authors' code
(github.com/thu-rllab/CFCQL, commit 3441019): ``cql_qmix.yaml``, with the τ that its README gives
for the medium data of 5m_vs_6m. Others that it gives are 0, 0.1, 1 and 100. Its α are 0.1, 0.5, 5
and 50 beside SMAC's returns of at most 20, which is the unit of our rewards too. Ours, 0.5, had the
highest mean of 0.15, 0.5, 1.5 and 5 on data that no table uses (docs/comparison.md). Their targets
are those of double Q-learning, Q̄_tot(s', argmax_i Q_i), which grow by the penalty in each step;
``--settings reference`` has these, with α 50, batches of 128 and no scaled rewards. Their batches
hold whole episodes, their networks see the agent's last action, their targets of unfinished
episodes fall to zero, and they clone the behaviour from as many steps as they learn the values
from. Batches of 32 gave the same returns in as many updates of a quarter of the cost. Our mixer
starts with smaller weights; see `offmarl.networks.Mixer`.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl import cli, programs
from offmarl.config import Fraction, NonNegative, Positive, PositiveInt
from offmarl.distributions import categorical, mask_illegal, select
from offmarl.losses import cloning_loss, masked_mean, q_lambda_targets
from offmarl.networks import (
    AgentNetwork,
    MixedParams,
    MixedValues,
    agent_network,
    init_policy,
    make_policy,
    mix,
    mix_counterfactuals,
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
from offmarl.programs.learning.offline_q_learning import (
    ConservativeQArgs,
    MixedArgs,
    greedy_params,
    make_mixed_values,
    next_values,
)
from offmarl.teams import require_one_team
from offmarl.types import ArrayTree, EnvSpec, Sequence

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(MixedArgs, ConservativeQArgs):
    """Counterfactual conservative Q-learning."""

    learning_rate: Positive = 1e-3
    """Adam's step size at the first update, of the values and of the behaviour network."""
    max_grad_norm: Positive | None = 10.0
    """Largest global norm of the gradients; larger ones are scaled down to it."""
    td_lambda: Fraction = 0.6
    """λ of the targets: 0 for one step, 1 for the rewards of the rest of the window. The actions
    taken are not corrected for (Peng's Q(λ))."""
    cql_weight: NonNegative = 0.5
    """Weight α of the conservative penalty; 0 for none. The larger, the nearer is the policy to the
    data."""
    divergence_weight: NonNegative = 0.5
    """τ: how much more of the penalty the agents get that deviate most from the data; 0 gives all
    agents the same part."""
    behaviour_updates: PositiveInt | None = None
    """Updates of the behaviour network alone, before the values are learned; by default a tenth of
    --updates."""
    target_every: PositiveInt = 25
    """Updates between copies to the target networks."""


# ---------------------------------------------------------------------------------- state


class State(NamedTuple):
    """Parameters and states that an update changes."""

    params: MixedParams
    target: MixedParams
    behaviour: ArrayTree
    optimiser: ArrayTree
    behaviour_optimiser: ArrayTree
    updates: Int[Array, ""]
    """Updates of the behaviour network, and then of the values."""


# ---------------------------------------------------------------------------------- penalty

_LEAST_PROBABILITY = 1e-5
"""Added to probabilities whose logarithm is taken, as in the authors' code."""


def penalty_shares(
    q_own: Float[Array, "*b N A"],
    behaviour_logits: Float[Array, "*b N A"],
    legal_actions: Bool[Array, "*b N A"],
    alive: Bool[Array, "*b N"],
    divergence_weight: Float[Array, ""] | float,
) -> Float[Array, "*b N"]:
    """Return each agent's part λ_i of the penalty; those of a state sum to one.

    Parameters
    ----------
    q_own
        Q_tot with each agent's action replaced by each of its actions.
    behaviour_logits
        Logits of the behaviour policy.
    legal_actions, alive
        Dead agents have no part.
    divergence_weight
        τ.
    """
    probs = jax.nn.softmax(categorical(q_own, legal_actions).logits)
    cloned = jax.nn.softmax(categorical(behaviour_logits, legal_actions).logits)
    ratio = jnp.log(probs + _LEAST_PROBABILITY) - jnp.log(cloned + _LEAST_PROBABILITY)
    divergence = jnp.where(legal_actions, probs * ratio, 0.0).sum(-1)
    shares = jax.nn.softmax(mask_illegal(divergence_weight * divergence, alive)) * alive
    return jax.lax.stop_gradient(shares)


# ---------------------------------------------------------------------------------- losses


class Networks(NamedTuple):
    """The networks of the values and of the behaviour policy."""

    values: MixedValues
    behaviour: AgentNetwork

    def behaviour_logits(self, params: ArrayTree, batch: Sequence) -> Float[Array, "B T N A"]:
        """Return the logits of the behaviour policy."""
        first = batch.first[:, :-1]
        return unroll_batch(self.behaviour, params, batch.view_tm1.observation, first)


def behaviour_loss(networks: Networks, params: ArrayTree, batch: Sequence) -> Float[Array, ""]:
    """Return the mean of -log π_b(a_i | o_i)."""
    return cloning_loss(networks.behaviour_logits(params, batch), batch)


def targets(
    networks: Networks,
    args: Args,
    q_t: Array,
    target: MixedParams,
    batch: Sequence,
    hyper: Hyperparameters,
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Return the TD(λ) targets y, and where they are known.

    ``q_t`` are the values by which greedy next actions are chosen.
    """
    _, (q_target_t, weights_t) = networks.values.of_all_actions(target, batch)
    v_t, next_known = next_values(args, batch, q_target_t, q_t)
    discount_t = hyper.gamma * (1 - batch.terminated.all(-1))
    known = batch.mask & next_known
    # The next slot holds the next step of the episode, whose own target is known.
    goes_on = jnp.pad(known[:, 1:], ((0, 0), (0, 1)))
    y = jax.vmap(q_lambda_targets, in_axes=(0, 0, 0, 0, None))(
        batch.reward.mean(-1),
        discount_t,
        mix(weights_t, v_t * batch.view_t.alive),
        goes_on,
        hyper.td_lambda,
    )
    return y, known


def loss(
    networks: Networks,
    args: Args,
    params: MixedParams,
    target: MixedParams,
    behaviour: ArrayTree,
    batch: Sequence,
    hyper: Hyperparameters,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return the loss of the values, and metrics."""
    view, legal = batch.view_tm1, batch.view_tm1.legal_actions
    (q_tm1, weights_tm1), (q_t, _) = networks.values.of_all_actions(params, batch)
    q_tm1 = q_tm1 * view.alive[..., None]
    q_data = select(q_tm1, batch.action)
    q_tot = mix(weights_tm1, q_data)
    target_tot, known = targets(networks, args, q_t, target, batch, hyper)
    error = jnp.where(known, q_tot - target_tot, 0.0)
    td_loss = masked_mean(0.5 * error**2, known, batch.weight)

    q_own = mix_counterfactuals(weights_tm1, q_data, q_tm1)
    logits = networks.behaviour_logits(behaviour, batch)
    shares = penalty_shares(q_own, logits, legal, view.alive, hyper.divergence_weight)
    soft_maximum = jax.nn.logsumexp(mask_illegal(q_own, legal), axis=-1)
    gap = (shares * soft_maximum).sum(-1) - q_tot
    gap = masked_mean(jnp.where(view.alive.any(-1), gap, 0.0), batch.mask, batch.weight)
    metrics = {
        "td_loss": td_loss,
        "cql_loss": gap,
        "q_tot": masked_mean(q_tot, batch.mask),
        "largest_share": masked_mean(shares.max(-1), batch.mask),
        TD_ERRORS: error,
    }
    return td_loss + hyper.cql_weight * gap, metrics


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, _dataset: DatasetStatistics) -> Program:
    """Build the program for one kind of data."""
    require_one_team(spec, "cfcql")
    config = programs.policy_config(args, "q")
    behaviour_config = programs.policy_config(args, "softmax")
    networks = Networks(make_mixed_values(spec, args), agent_network(behaviour_config, spec))
    updates = args.updates or 1
    cloning = args.behaviour_updates or max(updates // 10, 1)

    def init(key: PRNGKeyArray, hyper: Hyperparameters) -> State:
        agent_key, behaviour_key, mixer_key = jax.random.split(key, 3)
        params = networks.values.init(spec, agent_key, mixer_key)
        behaviour = init_policy(behaviour_config, spec, behaviour_key)
        adam, zero = programs.make_optimiser(args, hyper), jnp.zeros((), jnp.int32)
        return State(params, params, behaviour, adam.init(params), adam.init(behaviour), zero)

    def clone(
        state: State, batch: Sequence, _key: PRNGKeyArray, hyper: Hyperparameters
    ) -> tuple[State, dict[str, Array]]:
        value, gradient = jax.value_and_grad(partial(behaviour_loss, networks))(
            state.behaviour, batch
        )
        adam = programs.make_optimiser(args, hyper, state.updates, updates=cloning)
        step, optimiser = adam.update(gradient, state.behaviour_optimiser)
        state = state._replace(
            behaviour=optax.apply_updates(state.behaviour, step),
            behaviour_optimiser=optimiser,
            updates=state.updates + 1,
        )
        return state, {"behaviour_loss": value, "grad_norm": programs.grad_norm(gradient)}

    def update(
        state: State, batch: Sequence, _key: PRNGKeyArray, hyper: Hyperparameters
    ) -> tuple[State, dict[str, Array]]:
        gradient, metrics = jax.grad(partial(loss, networks, args), has_aux=True)(
            state.params, state.target, state.behaviour, batch, hyper
        )
        remaining, done = max(updates - cloning, 1), state.updates - cloning
        adam = programs.make_optimiser(args, hyper, done, updates=remaining)
        step, optimiser = adam.update(gradient, state.optimiser)
        params = optax.apply_updates(state.params, step)
        target = optax.periodic_update(params, state.target, done + 1, args.target_every)
        metrics["grad_norm"] = programs.grad_norm(gradient)
        return state._replace(
            params=params, target=target, optimiser=optimiser, updates=state.updates + 1
        ), metrics

    return Program(
        init,
        stages=(Stage(clone, cloning), Stage(update)),
        policy=partial(make_policy, config, spec),
        policy_params=lambda state: greedy_params(state.params.agent),
        td_errors=True,
        values=Values(lambda state: state.params, networks.values.of_joint_actions),
    )


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> Path:
    """Train, evaluate and write the run; return its directory."""
    return programs.train(make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        main(cli.parse_script(Args, __doc__))
