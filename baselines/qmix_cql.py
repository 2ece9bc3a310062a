"""QMIX+CQL: monotonic value factorisation with a conservative penalty, discrete.

The agents' action values are mixed into Q_tot, monotonic in each of them, and learned by double
Q-learning. The penalty decreases the joint values of legal joint actions drawn at random, and
increases those of the data's:

    L = E[ ½ (Q_tot(s, a) - y)² ] + α E[ logsumexp over {K random legal joint actions, a} of
        Q_tot(s, ·) - Q_tot(s, a) ],     y = r + γ (1 - terminated) Q̄_tot(s', argmax_i Q_i),

with r the mean of the agents' rewards. The episode terminates where all agents do. Dead agents add
nothing to Q_tot.

References: QMIX, Rashid et al. 2018 (arXiv 1803.11485); CQL, Kumar et al. 2020 (arXiv
2006.04779). Defaults are those of ``qmix_cql.yaml`` of OG-MARL (github.com/instadeepai/og-marl,
commit f4eb8f0; Formanek et al. 2023, arXiv 2302.00521), which has recurrent networks only. There,
illegal actions are drawn too. Our mixer starts with smaller weights; see
`offmarl.networks.Mixer`.
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
from offmarl.config import Fraction, NonNegative, PositiveInt
from offmarl.distributions import select
from offmarl.losses import (
    conservative_gap,
    double_q_values,
    masked_mean,
    sample_legal_actions,
    td_targets,
)
from offmarl.networks import (
    MixerWeights,
    QParams,
    agent_network,
    init_mixer,
    init_policy,
    joint_action_values,
    make_mixer,
    make_policy,
    mix,
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
from offmarl.teams import require_one_team
from offmarl.types import ArrayTree, EnvSpec, Sequence

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(programs.LearnerArgs):
    """QMIX with conservative Q-learning."""

    gamma: Fraction = 0.99
    """Discount γ."""
    cql_weight: NonNegative = 3.0
    """Weight α of the conservative penalty; 0 gives plain offline QMIX."""
    cql_samples: PositiveInt = 20
    """Random legal joint actions K in the penalty."""
    target_every: PositiveInt = 200
    """Updates between copies to the target networks."""
    mixer_hidden: PositiveInt = 64
    """Width of the mixer's hypernetworks."""
    mixer_embed: PositiveInt = 32
    """Width of the mixing function."""


# ---------------------------------------------------------------------------------- state


class Params(NamedTuple):
    """The agents' shared network and the mixer."""

    agent: ArrayTree
    mixer: ArrayTree


class State(NamedTuple):
    """What learns."""

    params: Params
    target: Params
    optimiser: ArrayTree
    updates: Int[Array, ""]


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, _dataset: DatasetStatistics) -> Program:
    """Build the program for one kind of data."""
    require_one_team(spec, "qmix_cql")
    config = programs.policy_config(args, "q")
    network = agent_network(config, spec)
    mixer = make_mixer(spec, args.mixer_embed, args.mixer_hidden)

    def init(key: PRNGKeyArray, hyper: Hyperparameters) -> State:
        agent_key, mixer_key = jax.random.split(key)
        params = Params(
            init_policy(config, spec, agent_key).network,
            init_mixer(mixer, spec, mixer_key),
        )
        optimiser = programs.make_optimiser(args, hyper).init(params)
        return State(params, params, optimiser, jnp.zeros((), jnp.int32))

    def values(params: Params, batch: Sequence) -> tuple[Array, MixerWeights]:
        q = unroll_batch(network, params.agent, batch.view.observation, batch.first)
        return q, mixing_weights(mixer, params.mixer, batch.view)

    def loss(
        params: Params,
        target: Params,
        batch: Sequence,
        key: PRNGKeyArray,
        hyper: Hyperparameters,
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        q, weights = values(params, batch)
        q_target, weights_target = values(target, batch)
        view_tm1, view_t = batch.view_tm1, batch.view_t
        q_tm1, weights_tm1 = _before(q), _before(weights)

        v_t = double_q_values(_after(q_target), _after(q), view_t.legal_actions) * view_t.alive
        q_tot_t = mix(_after(weights_target), v_t)
        discount_t = hyper.gamma * (1 - batch.terminated.all(-1))
        target_tm1 = td_targets(batch.reward.mean(-1), discount_t, q_tot_t)
        q_tot_tm1 = mix(weights_tm1, select(q_tm1, batch.action) * view_tm1.alive)
        known = batch.mask & batch.next_known
        error = jnp.where(known, q_tot_tm1 - target_tm1, 0.0)
        td_loss = masked_mean(0.5 * error**2, known, batch.weight)

        others = sample_legal_actions(key, view_tm1.legal_actions, args.cql_samples)
        q_others = jax.vmap(lambda a: select(q_tm1, a) * view_tm1.alive)(others)
        q_tot_others = jax.vmap(mix, in_axes=(None, 0))(weights_tm1, q_others)
        gap = masked_mean(conservative_gap(q_tot_others, q_tot_tm1), batch.mask, batch.weight)
        metrics = {
            "td_loss": td_loss,
            "cql_loss": gap,
            "q_tot": masked_mean(q_tot_tm1, batch.mask),
            TD_ERRORS: error,
        }
        return td_loss + hyper.cql_weight * gap, metrics

    def update(
        state: State, batch: Sequence, key: PRNGKeyArray, hyper: Hyperparameters
    ) -> tuple[State, dict[str, Array]]:
        gradient, metrics = jax.grad(loss, has_aux=True)(
            state.params, state.target, batch, key, hyper
        )
        adam = programs.make_optimiser(args, hyper, state.updates)
        step, optimiser = adam.update(gradient, state.optimiser)
        params = optax.apply_updates(state.params, step)
        updates = state.updates + 1
        target = optax.periodic_update(params, state.target, updates, args.target_every)
        metrics["grad_norm"] = programs.grad_norm(gradient)
        return State(params, target, optimiser, updates), metrics

    def policy_params(state: State) -> QParams:
        return QParams(state.params.agent, jnp.zeros_like(state.updates, jnp.float32))

    return Program(
        init,
        stages=(Stage(update),),
        policy=partial(make_policy, config, spec),
        policy_params=policy_params,
        td_errors=True,
        values=Values(lambda state: state.params, partial(joint_action_values, network, mixer)),
    )


def _before(tree: ArrayTree) -> ArrayTree:
    """Drop the last of the window's T+1 slots."""
    return jax.tree.map(lambda x: x[:, :-1], tree)


def _after(tree: ArrayTree) -> ArrayTree:
    """Drop the first of the window's T+1 slots."""
    return jax.tree.map(lambda x: x[:, 1:], tree)


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> Path:
    """Train, evaluate and write the run; return its directory."""
    return programs.train(make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        main(cli.parse_script(Args, __doc__))
