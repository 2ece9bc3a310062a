"""VDN: the sum of the agents' values as the team's value, learned off-policy from replay.

Agents share a network of action values, recurrent or feed-forward. The joint value is their sum
(Sunehag et al. 2017, arXiv 1706.05296), learned by double Q-learning (van Hasselt et al. 2015,
arXiv 1509.06461) from the mean of the agents' rewards, with ε-greedy exploration:

    L = E[ ½ (Σ_i Q_i(o_i, a_i) - y)² ],     y = r + γ (1 - terminated) Σ_i Q̄_i(o'_i, argmax Q_i).

TD(λ) targets are an option. The replay is the buffer that is recorded.
"""

from dataclasses import dataclass
from functools import partial

from jaxtyping import Array, Float
from rich.console import Console

from offmarl import cli, envs, programs
from offmarl.distributions import select
from offmarl.losses import masked_mean
from offmarl.networks import AgentNetwork, unroll_batch
from offmarl.programs import TD_ERRORS, Hyperparameters, Program
from offmarl.programs.learning.q_learning import (
    AgentParams,
    QArgs,
    agents_program,
    bootstrap,
    next_values,
)
from offmarl.teams import require_one_team
from offmarl.types import EnvSpec, Sequence

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(QArgs):
    """Arguments of VDN."""


# ---------------------------------------------------------------------------------- losses


def loss(
    network: AgentNetwork,
    params: AgentParams,
    target: AgentParams,
    hyper: Hyperparameters,
    batch: Sequence,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return the mean of ½ (Σ_i Q_i - y)² over the valid steps, where y is the double-Q target."""
    observation, first = batch.view.observation, batch.first
    q = unroll_batch(network, params.agent, observation, first)
    q_target = unroll_batch(network, target.agent, observation, first)
    q_tot_t = next_values(q[:, 1:], q_target[:, 1:], batch).sum(-1)
    terminated = batch.terminated.all(-1)
    y = bootstrap(hyper, batch, batch.reward.mean(-1), terminated, q_tot_t)

    q_tot_tm1 = (select(q[:, :-1], batch.action) * batch.view_tm1.alive).sum(-1)
    error = q_tot_tm1 - y
    value = masked_mean(0.5 * error**2, batch.mask, batch.weight)
    metrics = {"td_loss": value, "q_tot": masked_mean(q_tot_tm1, batch.mask)}
    return value, metrics | {TD_ERRORS: error}


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, env: envs.Environment) -> Program:
    """Build the program for an environment, given without autoreset."""
    require_one_team(spec, "vdn", "recorder")
    return agents_program(spec, args, env, lambda network: partial(loss, network))


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> "programs.Recorded":
    """Train VDN, and record the requested tiers."""
    return programs.record_online(make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        Console().print(main(cli.parse_script(Args, __doc__)).view)
