"""MADDPG+CQL: critics of joint actions with a conservative penalty, of continuous actions.

Deterministic policies π_i maximise the smaller of two critics of the state and the actions of all
agents; the penalty pushes down the values of joint actions that are drawn at random or near the
policies', and up those of the data:

    critics   L = Σ_k E[ ½ (Q_k,i(s, a) - y_i)² ] + c Σ_k E[ log Σ_j exp(Q_k,i(s, a_j) - log μ(a_j))
                  - Q_k,i(s, a) ],     y_i = r_i + γ (1 - terminated_i) min_k Q̄_k,i(s', π̄(s')),
    policies  L = -E[ min_k Q_k,i(s, π_i, a_-i) ] + w E[ π_i² ],

where the joint actions a_j are uniform, or near those of π in s or s', and μ is the density that
each was drawn from. The noise is Gaussian, truncated to the range of the actions. Every critic has
a penalty of its own values.

MADDPG: Lowe et al. 2017 (arXiv 1706.02275); CQL: Kumar et al. 2020 (arXiv 2006.04779). Defaults are
those of OG-MARL's ``maddpg_cql`` (Formanek et al. 2023, arXiv 2302.00521;
github.com/instadeepai/og-marl, commit f4eb8f0). Differences from it: μ is the density of the joint
action, the product over the agents, where OG-MARL takes that of one agent's; the noise is truncated
to the range of the actions, where OG-MARL clips the actions and keeps the density of the noise; the
losses of the two critics are added, not averaged; c is smaller, in the unit of scaled rewards,
where OG-MARL has 5 in that of the data (``--settings reference``); critics also see the observation
of their agent; and policies learn from the critics after their update.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from jaxtyping import Array, Float, PRNGKeyArray

from offmarl import cli, programs
from offmarl.losses import masked_mean
from offmarl.programs import DatasetStatistics, Hyperparameters, Program
from offmarl.programs.learning.offline_actor_critic import (
    ConservativeArgs,
    Networks,
    actor_critic_program,
    conservative_critic_loss,
    make_networks,
    usable_entries,
)
from offmarl.types import ArrayTree, EnvSpec, Sequence

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(ConservativeArgs):
    """Critics of joint actions with a conservative penalty."""


# ---------------------------------------------------------------------------------- losses


def actor_loss(
    networks: Networks,
    hyper: Hyperparameters,
    actor: ArrayTree,
    critics: tuple[ArrayTree, ...],
    batch: Sequence,
    _key: PRNGKeyArray,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return -min Q(s, π) + w π²."""
    pi, q = networks.own_values(actor, critics, batch)
    view = batch.view_tm1
    mask = batch.mask[..., None] & view.alive
    squares = masked_mean(pi**2, mask[..., None] & usable_entries(view), batch.weight)
    loss = hyper.regularise * squares - masked_mean(q, mask, batch.weight)
    return loss, {"policy_loss": loss}


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, _dataset: DatasetStatistics) -> Program:
    """Build the program for one kind of data."""
    networks = make_networks(spec, args, "maddpg_cql", "joint")
    critics = partial(conservative_critic_loss, networks, args)
    return actor_critic_program(networks, args, critics, partial(actor_loss, networks))


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> Path:
    """Train, evaluate and write the run; return its directory."""
    return programs.train(make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        main(cli.parse_script(Args, __doc__))
