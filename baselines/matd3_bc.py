"""MATD3+BC: TD3 with behaviour cloning for each agent, of continuous actions.

Deterministic policies π_i maximise the smaller of two critics, near the data's actions:

    critics   L = Σ_k E[ ½ (Q_k,i(s, a) - y_i)² ],
              y_i = r_i + γ (1 - terminated_i) min_k Q̄_k,i(s', ã'),
    policies  L = -λ E[ min_k Q_k,i(s, π_i) ] + E[ (π_i - a_i)² ],
              λ = α / E[ |min_k Q_k,i(s, π_i)| ],

where ã' are the target policies' actions with clipped noise. No gradient flows through λ: otherwise
the first term would be the constant ±α wherever all values have one sign, and the method pure
cloning. The squared difference is the mean over the entries of the actions that an agent has.

TD3+BC: Fujimoto and Gu 2021 (arXiv 2106.06860; github.com/sfujim/TD3_BC, commit 8791ad7). Networks
and sizes are those of OG-MARL's ``iddpg_bc`` (Formanek et al. 2023, arXiv 2302.00521;
github.com/instadeepai/og-marl, commit f4eb8f0): the critic of an agent sees the state and the
agent's own action. Differences from it: λ is detached, target actions have noise and policies are
updated every second time, as in TD3, and squared actions have no weight of their own. Unlike
TD3+BC, policies maximise the smaller critic, as ``iddpg_bc`` does. ``--critic joint`` gives the
critics the actions of all agents, where π_i takes the place of one agent's action in the data.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from offmarl import cli, programs
from offmarl.config import NonNegative, Positive, PositiveInt
from offmarl.losses import masked_mean
from offmarl.networks import CriticInput
from offmarl.programs import DatasetStatistics, Hyperparameters, Program
from offmarl.programs.learning.offline_actor_critic import (
    ActorCriticArgs,
    Networks,
    actor_critic_program,
    critic_loss,
    data_action,
    make_networks,
    usable_entries,
)
from offmarl.types import ArrayTree, EnvSpec, Sequence

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(ActorCriticArgs):
    """TD3 with behaviour cloning for each agent."""

    alpha: Positive = 2.5
    """Weight α of the values beside the imitation of the data, in multiples of their mean size."""
    critic: CriticInput = "state"
    """What the critic of an agent sees beside the agent's observation and action. observation:
    nothing; state: the global state; joint: the global state and the actions of all agents."""
    target_noise: NonNegative = 0.2
    """Standard deviation of the noise on target actions, which lie in [-1, 1]."""
    delay: PositiveInt = 2
    """Updates of the critics for each update of policies and target networks."""


# ---------------------------------------------------------------------------------- losses


def actor_loss(
    networks: Networks,
    hyper: Hyperparameters,
    actor: ArrayTree,
    critics: tuple[ArrayTree, ...],
    batch: Sequence,
    _key: PRNGKeyArray,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return -λ min Q(s, π) + (π - a)²."""
    pi, q = networks.own_values(actor, critics, batch)
    view = batch.view_tm1
    mask = batch.mask[..., None] & view.alive
    size = jax.lax.stop_gradient(masked_mean(jnp.abs(q), mask))
    value = masked_mean(q, mask, batch.weight) / jnp.maximum(size, 1e-6)
    entries = mask[..., None] & usable_entries(view)
    imitation = masked_mean((pi - data_action(batch)) ** 2, entries, batch.weight)
    loss = imitation - hyper.alpha * value
    return loss, {"policy_loss": loss, "imitation_loss": imitation}


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, _dataset: DatasetStatistics) -> Program:
    """Build the program for one kind of data."""
    networks = make_networks(spec, args, "matd3_bc", args.critic)
    critics = partial(critic_loss, networks)
    return actor_critic_program(networks, args, critics, partial(actor_loss, networks))


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> Path:
    """Train, evaluate and write the run; return its directory."""
    return programs.train(make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        main(cli.parse_script(Args, __doc__))
