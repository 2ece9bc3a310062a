"""OMAR: conservative values for each agent, and policies led by a search over actions, continuous.

Each agent has two conservative critics. Besides climbing their values, its policy imitates the best
action â that a search without gradients finds, which gets it out of local optima:

    critics   L = Σ_k E[ ½ (Q_k,i(o, a) - y_i)² ] + α Σ_k E[ log Σ_j exp(Q_k,i(o, a_j) - log μ(a_j))
                  - Q_k,i(o, a) ],     y_i = r_i + γ (1 - terminated_i) min_k Q̄_k,i(o', π̄_i(o')),
    policies  L = c E[ (π_i - â_i)² ] - (1 - c) E[ min_k Q_k,i(o, π_i) ] + w E[ π_i² ],

where the actions a_j are uniform, or near those of π_i in o or o', and μ is the density that each
was drawn from. The noise is Gaussian, truncated to the range of the actions. The search draws
samples from N(m, σ²), at first N(0, 2²), sets m to their mean weighted by the softmax of their
values and σ to their root mean square distance from it, and repeats; â is the best of the last
samples and π_i.

OMAR: Pan et al. 2022 (arXiv 2111.11188; github.com/ling-pan/OMAR, commit 0e52ad6). Sizes, and the
weight c = 0.7, are those of OG-MARL's ``omar`` (Formanek et al. 2023, arXiv 2302.00521;
github.com/instadeepai/og-marl, commit f4eb8f0), where the critic of an agent sees the state and the
agent's own action. Differences from it: m and σ are those of the paper, not those of the ten best
samples so far; the losses of the two critics are added, not averaged, so that 20 clips gradients as
its 10 does; α is smaller, in the unit of scaled rewards, where it has 5 in that of the data
(``--settings reference``); the noise of π_i is truncated to the range of the actions, where both
clip the actions and keep the density of the noise; and policies learn from the critics after their
update. The authors use other weights for each dataset. Their setting for the MPE tasks is
``--no-scale-rewards --network feedforward --critic observation --no-share-parameters
--critic-hidden 64 --learning-rate 0.01 --gamma 0.95 --batch-size 1024 --length 1 --max-grad-norm
0.5``, with c = 1, and on simple_spread their α from 0.5 to 5, which is ``--cql-weight`` from 0.25
to 2.5 because their squared errors have no factor ½.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from offmarl import cli, programs
from offmarl.config import Fraction, Positive, PositiveInt
from offmarl.losses import masked_mean
from offmarl.networks import CriticInput
from offmarl.programs import DatasetStatistics, Hyperparameters, Program
from offmarl.programs.learning.offline_actor_critic import (
    ConservativeArgs,
    Networks,
    actor_critic_program,
    conservative_critic_loss,
    data_action,
    make_networks,
    usable_entries,
)
from offmarl.types import ArrayTree, EnvSpec, Sequence

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(ConservativeArgs):
    """Conservative values for each agent, and policies led by a search over actions."""

    max_grad_norm: Positive | None = 20.0
    """Largest global norm of the gradients of critics, and of those of policies; larger ones are
    scaled down to it."""
    critic: CriticInput = "state"
    """What the critic of an agent sees beside the agent's observation and action. observation:
    nothing; state: the global state; joint: the global state and the actions of all agents."""
    search_weight: Fraction = 0.7
    """Weight c of the imitation of the actions that the search finds; 1 - c is that of the values.
    """
    search_rounds: PositiveInt = 3
    """Rounds of the search."""
    search_samples: PositiveInt = 10
    """Samples of each agent's actions in a round."""
    search_std: Positive = 2.0
    """Standard deviation of the samples of the first round, which are clipped to [-1, 1]."""


# ---------------------------------------------------------------------------------- losses


def search(
    key: PRNGKeyArray,
    values: Callable[[Float[Array, "K *b N A"]], Float[Array, "K *b N"]],
    entries: Bool[Array, "*b N A"],
    rounds: int,
    samples: int,
    std: Float[Array, ""] | float,
) -> tuple[Float[Array, "*b N A"], Float[Array, "*b N"]]:
    """Return the best action of each agent in the last round of a search, and its value.

    Parameters
    ----------
    key
        Random key.
    values
        Returns the values of K actions of every agent.
    entries
        Entries of the actions that have an effect; the others stay 0.
    rounds, samples
        Rounds, and samples K in each.
    std
        Standard deviation in the first round.
    """
    mean, spread = jnp.zeros(entries.shape), jnp.broadcast_to(std, entries.shape)
    for round_key in jax.random.split(key, rounds):
        noise = jax.random.normal(round_key, (samples, *entries.shape))
        actions = jnp.where(entries, jnp.clip(mean + spread * noise, -1.0, 1.0), 0.0)
        q = values(actions)
        weights = jax.nn.softmax(q, axis=0)[..., None]
        mean = (weights * actions).sum(0)
        spread = jnp.sqrt(((actions - mean) ** 2).mean(0))
    best = q.argmax(0)[None, ..., None]
    return jnp.take_along_axis(actions, best, axis=0)[0], q.max(0)


def actor_loss(
    networks: Networks,
    args: Args,
    hyper: Hyperparameters,
    actor: ArrayTree,
    critics: tuple[ArrayTree, ...],
    batch: Sequence,
    key: PRNGKeyArray,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return c (π - â)² - (1 - c) min Q(o, π) + w π²."""
    view, action = batch.view_tm1, data_action(batch)
    pi, q = networks.own_values(actor, critics, batch)

    def values(actions: Float[Array, "K B T N A"]) -> Float[Array, "K B T N"]:
        return networks.values(critics, view, action, actions).min(0)

    sizes = args.search_rounds, args.search_samples
    best, q_best = search(key, values, usable_entries(view), *sizes, hyper.search_std)
    a_hat = jax.lax.stop_gradient(jnp.where((q_best > q)[..., None], best, pi))
    mask = batch.mask[..., None] & view.alive
    entries = mask[..., None] & usable_entries(view)
    imitation = masked_mean((pi - a_hat) ** 2, entries, batch.weight)
    weight = hyper.search_weight
    loss = weight * imitation - (1 - weight) * masked_mean(q, mask, batch.weight)
    loss = loss + hyper.regularise * masked_mean(pi**2, entries, batch.weight)
    return loss, {"policy_loss": loss, "found_better": masked_mean(1.0 * (q_best > q), mask)}


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, _dataset: DatasetStatistics) -> Program:
    """Build the program for one kind of data."""
    networks = make_networks(spec, args, "omar", args.critic)
    critics = partial(conservative_critic_loss, networks, args)
    return actor_critic_program(networks, args, critics, partial(actor_loss, networks, args))


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> Path:
    """Train, evaluate and write the run; return its directory."""
    return programs.train(make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        main(cli.parse_script(Args, __doc__))
