"""IQL: independent Q-learning with shared parameters, learned off-policy from replay.

Each agent learns the values of its own actions from its own rewards, as if the others were part of
the environment (Tan 1993; Tampuu et al. 2017, arXiv 1511.08779). The agents share one network,
recurrent or feed-forward, learned by double Q-learning (van Hasselt et al. 2015, arXiv 1509.06461)
with ε-greedy exploration:

    L = E[ ½ (Q_i(o_i, a_i) - y_i)² ],     y_i = r_i + γ (1 - terminated_i) Q̄_i(o'_i, argmax Q_i).

If the agents share a team's reward, it continues after an agent's own death, and only the end of
the episode terminates. The values of dead agents that have not terminated are learned and used,
too.

TD(λ) targets are an option. Agents may be of several teams. The replay is the buffer that is
recorded.
"""

from dataclasses import dataclass
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float
from rich.console import Console

from offmarl import cli, envs, programs
from offmarl.distributions import select
from offmarl.losses import masked_mean, reward_ends
from offmarl.networks import AgentNetwork, unroll_batch
from offmarl.programs import TD_ERRORS, Hyperparameters, Program
from offmarl.programs.learning.actor_critic import valued_steps
from offmarl.programs.learning.q_learning import (
    AgentParams,
    QArgs,
    agents_program,
    bootstrap,
    next_values,
)
from offmarl.types import EnvSpec, Sequence

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(QArgs):
    """Arguments of IQL."""


# ---------------------------------------------------------------------------------- losses


def loss(
    network: AgentNetwork,
    spec: EnvSpec,
    params: AgentParams,
    target: AgentParams,
    hyper: Hyperparameters,
    batch: Sequence,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return the mean of ½ (Q_i - y_i)² over the valid steps of agents.

    Those of dead agents count while their reward continues; see `offmarl.losses.has_value`.
    """
    observation, first, shared_reward = batch.view.observation, batch.first, spec.reward == "team"
    q = unroll_batch(network, params.agent, observation, first)
    q_target = unroll_batch(network, target.agent, observation, first)
    v_t = next_values(q[:, 1:], q_target[:, 1:], batch, of_dead=True)
    terminated = reward_ends(batch.terminated, shared_reward)
    # The steps of an agent that was truncated alone are no continuation of what it did.
    follows = shared_reward | ~batch.truncated
    y = bootstrap(hyper, batch, batch.reward, terminated, v_t, follows)

    q_tm1 = select(q[:, :-1], batch.action)
    counts = valued_steps(spec, batch)
    error = jnp.where(counts, q_tm1 - y, 0.0)
    value = masked_mean(0.5 * error**2, counts, batch.weight)
    metrics = {"td_loss": value, "q": masked_mean(q_tm1, counts)}
    return value, metrics | {TD_ERRORS: jnp.abs(error).max(-1)}


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, env: envs.Environment) -> Program:
    """Build the program for an environment, given without autoreset."""
    return agents_program(spec, args, env, lambda network: partial(loss, network, spec))


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> "programs.Recorded":
    """Train IQL, and record the requested tiers."""
    return programs.record_online(make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        Console().print(main(cli.parse_script(Args, __doc__)).view)
