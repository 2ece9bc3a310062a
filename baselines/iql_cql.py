"""IQL+CQL: independent recurrent Q-learning with a conservative penalty, discrete.

Each agent learns its own action values by double Q-learning, as if the others were a part of its
environment; the penalty pushes down the values of legal actions, and up those of the data's:

    L = E[ ½ (Q_i(a_i) - y_i)² ] + α E[ logsumexp over legal a of Q_i(a) - Q_i(a_i) ],
    y_i = r_i + γ (1 - terminated_i) Q̄_i(o_i', argmax over legal a of Q_i(o_i', a)),

with parameters shared by all agents. References: independent Q-learning, Tan 1993; CQL, Kumar et
al. 2020 (arXiv 2006.04779), with α and the network of OG-MARL (Formanek et al. 2023, arXiv
2302.00521).
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
from offmarl.config import Fraction, NonNegative, Positive, PositiveInt
from offmarl.distributions import mask_illegal, select
from offmarl.losses import double_q_values, masked_mean, td_targets
from offmarl.networks import (
    AgentId,
    PolicyConfig,
    QParams,
    agent_network,
    init_policy,
    make_policy,
    unroll_batch,
)
from offmarl.programs import TD_ERRORS, DatasetStatistics, Hyperparameters, Program, Stage
from offmarl.types import ArrayTree, EnvSpec, Sequence

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(programs.Args):
    """Independent Q-learning with a conservative penalty."""

    learning_rate: Positive = 3e-4
    """Adam's step size."""
    gamma: Fraction = 0.99
    """Discount γ."""
    cql_weight: NonNegative = 3.0
    """Weight α of the conservative penalty; 0 gives plain independent Q-learning."""
    target_every: PositiveInt = 200
    """Updates between copies to the target network."""
    hidden: PositiveInt = 64
    """Width of the agents' layers."""
    agent_id: AgentId = "onehot"
    """How the network distinguishes the agents. onehot: by their index, which ties it to their
    number; sinusoidal: by 16 sines and cosines of their place in the team; none: not at all."""


# ---------------------------------------------------------------------------------- state


class State(NamedTuple):
    """What learns."""

    params: ArrayTree
    target: ArrayTree
    optimiser: ArrayTree
    updates: Int[Array, ""]


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, _dataset: DatasetStatistics) -> Program:
    """Build the program for one kind of data."""
    config = PolicyConfig("recurrent", "q", args.hidden, args.agent_id)
    network = agent_network(config, spec)

    def init(key: PRNGKeyArray, _hyper: Hyperparameters) -> State:
        params = init_policy(config, spec, key).network
        return State(params, params, optax.adam(0.0).init(params), jnp.zeros((), jnp.int32))

    def loss(
        params: ArrayTree, target: ArrayTree, batch: Sequence, hyper: Hyperparameters
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        observation = batch.view.observation
        q = unroll_batch(network, params, observation, batch.first)
        q_target = unroll_batch(network, target, observation, batch.first)
        q_tm1 = select(q[:, :-1], batch.action)
        view_t = batch.view_t
        v_t = double_q_values(q_target[:, 1:], q[:, 1:], view_t.legal_actions) * view_t.alive
        target_tm1 = td_targets(batch.reward, hyper.gamma * (1 - batch.terminated), v_t)

        acts = batch.mask[..., None] & batch.view_tm1.alive
        known = acts & (batch.next_known[..., None] | batch.terminated)
        error = q_tm1 - target_tm1
        td_loss = masked_mean(0.5 * error**2, known, batch.weight)
        legal = mask_illegal(q[:, :-1], batch.view_tm1.legal_actions)
        gap = masked_mean(jax.nn.logsumexp(legal, axis=-1) - q_tm1, acts, batch.weight)
        metrics = {
            "td_loss": td_loss,
            "cql_loss": gap,
            "q": masked_mean(q_tm1, acts),
            TD_ERRORS: jnp.abs(error).max(-1, where=known, initial=0.0),
        }
        return td_loss + hyper.cql_weight * gap, metrics

    def update(
        state: State, batch: Sequence, _key: PRNGKeyArray, hyper: Hyperparameters
    ) -> tuple[State, dict[str, Array]]:
        gradient, metrics = jax.grad(loss, has_aux=True)(state.params, state.target, batch, hyper)
        step, optimiser = optax.adam(hyper.learning_rate).update(gradient, state.optimiser)
        params = optax.apply_updates(state.params, step)
        updates = state.updates + 1
        target = optax.periodic_update(params, state.target, updates, args.target_every)
        metrics["grad_norm"] = programs.grad_norm(gradient)
        return State(params, target, optimiser, updates), metrics

    def policy_params(state: State) -> QParams:
        return QParams(state.params, jnp.zeros_like(state.updates, jnp.float32))

    return Program(
        init,
        stages=(Stage(update),),
        policy=partial(make_policy, config, spec),
        policy_params=policy_params,
        td_errors=True,
    )


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> Path:
    """Train, evaluate and write the run; return its directory."""
    return programs.train(make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        main(cli.parse_script(Args, __doc__))
