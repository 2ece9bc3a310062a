"""What programs that learn action values offline share: arguments, networks, and errors of Q_tot.

A program derives its ``Args`` from `QLearningArgs`, or from `MixedArgs` if a mixer makes a value of
the team of the agents' values, and defines its own loss and update.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from offmarl.config import Fraction, PositiveInt
from offmarl.losses import td_targets
from offmarl.networks import MixedValues, QParams, agent_network, make_mixer
from offmarl.programs.learning.learner import LearnerArgs, policy_config
from offmarl.types import ArrayTree, EnvSpec, Sequence


@dataclass(frozen=True)
class QLearningArgs(LearnerArgs):
    """Arguments of programs that learn action values offline."""

    gamma: Fraction = 0.99
    """Discount γ."""
    target_every: PositiveInt = 200
    """Updates between copies to the target networks."""


@dataclass(frozen=True)
class MixedArgs(QLearningArgs):
    """Arguments of programs that mix the agents' action values."""

    mixer_hidden: PositiveInt = 64
    """Width of the mixer's hypernetworks."""
    mixer_embed: PositiveInt = 32
    """Width of the mixing function."""


def make_mixed_values(spec: EnvSpec, args: MixedArgs) -> MixedValues:
    """Build the agents' network of action values, and their mixer."""
    network = agent_network(policy_config(args, "q"), spec)
    return MixedValues(network, make_mixer(spec, args.mixer_embed, args.mixer_hidden))


def greedy_params(network: ArrayTree, updates: Array) -> QParams:
    """Return the parameters of a policy that takes the best actions by a network's values.

    ``updates`` has an entry for each seed, as the parameters then have.
    """
    return QParams(network, jnp.zeros_like(updates, jnp.float32))


class TeamErrors(NamedTuple):
    """Temporal-difference errors of a team's values."""

    error: Float[Array, "B T"]
    """0 where it is not known."""
    known: Bool[Array, "B T"]


def team_errors(
    batch: Sequence,
    q_tot_tm1: Float[Array, "B T"],
    v_tot_t: Float[Array, "B T"],
    gamma: Float[Array, ""] | float,
) -> TeamErrors:
    """Return the differences of Q_tot from its one-step targets.

    The reward is the mean of the agents', and nothing follows a step at which all terminate. Errors
    of steps whose next view is unknown are not known.
    """
    discount_t = gamma * (1 - batch.terminated.all(-1))
    target_tm1 = td_targets(batch.reward.mean(-1), discount_t, v_tot_t)
    known = batch.mask & batch.next_known
    return TeamErrors(jnp.where(known, q_tot_tm1 - target_tm1, 0.0), known)
