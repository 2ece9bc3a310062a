"""Arguments, networks and errors of Q_tot that programs share which learn action values offline.

A program derives its ``Args`` from `QLearningArgs`, or from `MixedArgs` if a mixer combines the
agents' values to a value of the team, and defines its own loss and update.
"""

from dataclasses import dataclass
from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from offmarl.config import NonNegative, PositiveInt
from offmarl.distributions import categorical, select
from offmarl.losses import double_q_values, td_targets
from offmarl.networks import MixedValues, QParams, make_mixer
from offmarl.programs.learning.learner import (
    ValueArgs,
    next_in_window,
    policy_config,
    require_next_action,
)
from offmarl.types import ArrayTree, EnvSpec, Sequence


@dataclass(frozen=True)
class QLearningArgs(ValueArgs):
    """Arguments of programs that learn action values offline."""

    target_every: PositiveInt = 200
    """Updates between copies to the target networks."""


@dataclass(frozen=True)
class ConservativeQArgs(QLearningArgs):
    """Arguments of programs that learn conservative action values offline."""

    cql_weight: NonNegative = 0.3
    """Weight α of the conservative penalty; 0 for none. The larger, the nearer is the policy to the
    data."""
    bootstrap: Literal["data", "greedy"] = "data"
    """Action of the next step in targets: the data's, or as published the one of the largest value.
    The penalty raises the largest values above those of the data's actions, whatever the rewards
    are, and targets of greedy actions add this in each step."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bootstrap == "data":
            require_next_action(self.length, ", or --bootstrap greedy")


@dataclass(frozen=True)
class MixedArgs(QLearningArgs):
    """Arguments of programs that mix the agents' action values."""

    mixer_hidden: PositiveInt = 64
    """Width of the mixer's hypernetworks."""
    mixer_embed: PositiveInt = 32
    """Width of the mixing function."""


def make_mixed_values(spec: EnvSpec, args: MixedArgs) -> MixedValues:
    """Build the agents' network of action values, and their mixer."""
    mixer = make_mixer(spec, args.mixer_embed, args.mixer_hidden)
    return MixedValues.make(policy_config(args, "q"), spec, mixer)


def next_values(
    args: ConservativeQArgs,
    batch: Sequence,
    q_target_t: Float[Array, "B T N A"],
    q_t: Float[Array, "B T N A"],
) -> tuple[Float[Array, "B T N"], Bool[Array, "B T"]]:
    """Return the target network's values of the next actions that ``--bootstrap`` asks for.

    The second result marks the steps whose target is known. A truncated episode has no action in
    its last view, and illegal actions do not count: the value there is the mean over the softmax of
    each agent's values, which the conservative penalty of `iql_cql` draws to the data's policy.
    """
    if args.bootstrap == "greedy":
        v_t = double_q_values(q_target_t, q_t, batch.view_t.legal_actions)
        return v_t, batch.next_known
    action_t, acts_t = (jnp.roll(x, -1, axis=1) for x in (batch.action, batch.mask))
    of_ends = categorical(q_target_t, batch.view_t.legal_actions).mean_of(q_target_t)
    acts_t = acts_t[..., None] & ~batch.truncated  # nor has an agent that was truncated alone
    v_t = jnp.where(acts_t, select(q_target_t, action_t), of_ends)
    return v_t, next_in_window(batch)


def greedy_params(network: ArrayTree) -> QParams:
    """Return the parameters of a policy that takes the best actions by a network's values."""
    return QParams(network, jnp.zeros(()))


def team_errors(
    batch: Sequence,
    q_tot_tm1: Float[Array, "B T"],
    v_tot_t: Float[Array, "B T"],
    gamma: Float[Array, ""] | float,
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Return the differences of Q_tot from its one-step targets, and where they are known.

    The reward is the mean of the agents', and nothing follows a step at which all terminate. Errors
    of steps whose next view is unknown are 0.
    """
    discount_t = gamma * (1 - batch.terminated.all(-1))
    target_tm1 = td_targets(batch.reward.mean(-1), discount_t, v_tot_t)
    known = batch.mask & batch.next_known
    return jnp.where(known, q_tot_tm1 - target_tm1, 0.0), known
