"""OMIGA: implicit global-to-local value regularisation, of discrete or continuous actions.

Q_tot and V_tot are weighted sums of the agents' values, with weights w_i(s) ≥ 0 and a constant
b(s) in common. So a constraint that keeps the joint policy near the data becomes one for each
agent, and all values are learned from the data's actions only:

    values   L = E[ e^{z_i} + w̄_i(s) V_i(o_i) / α ],   z_i = w̄_i(s) (Q̄_i(o_i, a_i) - V_i(o_i)) / α,
    critic   L = E[ (Σ_i w_i(s) Q_i(o_i, a_i) + b(s) - y)² ],
             y = r + γ (1 - terminated) (Σ_i w̄_i(s') V̄_i(o_i') + b̄(s')),
    actor    L = -E[ e^{z_i} log π_i(a_i | o_i) ],

where z_i is clipped to ±10, and r is the mean of the agents' rewards. The loss of the values is
multiplied by e^{-m}, with m the largest z of the batch but at least -1. The episode terminates
where all agents do. Dead agents add nothing to Q_tot and V_tot, and learn nothing.

Reference: Wang et al. 2023 (arXiv 2307.11620). Defaults are those of the authors' code
(github.com/ZhengYinan-AIR/OMIGA: commit 39851c0 for continuous actions, commit b0c3d13 of the
branch SMAC for discrete ones), which has feed-forward networks only; recurrent ones need a
larger ``--length``. There, α is 10; for SMAC each reward is replaced by its return-to-go, so that
values are about 270. Beside our returns of at most 20 the same share of α is 0.7, and smaller ones
earned more. ``--settings reference`` has α 10 and the data's own unit. There, discrete policies are
learned without regard to which actions are legal, an episode's last step has no next view, and the
means of continuous actions are clipped to ±9 before tanh.
"""

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from offmarl import cli, programs
from offmarl.losses import masked_mean
from offmarl.networks import mixing_weights, stochastic_head, unroll_batch
from offmarl.programs import DatasetStatistics, Hyperparameters, Program
from offmarl.programs.learning.factored_actor_critic import (
    FactoredArgs,
    Networks,
    Params,
    Target,
    factored_program,
)
from offmarl.teams import require_one_team
from offmarl.types import EnvSpec, Sequence

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(FactoredArgs):
    """Implicit global-to-local value regularisation."""


# ---------------------------------------------------------------------------------- losses

_LARGEST_EXPONENT = 10.0
_LEAST_SHIFT = -1.0


def exponents(
    weight: Float[Array, "*b"],
    q: Float[Array, "*b"],
    v: Float[Array, "*b"],
    temperature: Float[Array, ""] | float,
) -> Float[Array, "*b"]:
    """Return z = w (Q - V) / α, clipped to ±10."""
    return jnp.clip(weight * (q - v) / temperature, -_LARGEST_EXPONENT, _LARGEST_EXPONENT)


def local_losses(
    networks: Networks, params: Params, target: Target, batch: Sequence, hyper: Hyperparameters
) -> dict[str, Float[Array, ""]]:
    """Return the losses of the values V_i and of the actor."""
    view, first, alpha = batch.view_tm1, batch.first[:, :-1], hyper.value_temperature
    counts = batch.mask[..., None] & view.alive
    weight = mixing_weights(networks.mixer, target.critic.mixer, view).w
    q = networks.action_values(target.critic.agent, view, first, batch.action)
    v = networks.values(params.value, batch)[:, :-1]
    z = exponents(weight, q, v, alpha)
    shift = jax.lax.stop_gradient(z.max(where=counts, initial=_LEAST_SHIFT))
    value_losses = jnp.exp(z - shift) + jnp.exp(-shift) * weight * v / alpha
    outputs = unroll_batch(networks.policy, params.actor, view.observation, first)
    log_probs = networks.head(outputs, view.legal_actions).log_prob(batch.action)
    actor_losses = -jax.lax.stop_gradient(jnp.exp(z)) * log_probs
    return {
        "value_loss": masked_mean(value_losses, counts, batch.weight),
        "policy_loss": masked_mean(actor_losses, counts, batch.weight),
    }


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, _dataset: DatasetStatistics) -> Program:
    """Build the program for one kind of data."""
    require_one_team(spec, "omiga")
    networks = Networks.of(spec, args, stochastic_head(spec, "soft_gaussian"))
    return factored_program(networks, args, local_losses)


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> Path:
    """Train, evaluate and write the run; return its directory."""
    return programs.train(make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        main(cli.parse_script(Args, __doc__))
