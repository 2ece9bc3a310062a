"""ComaDICE: factorised stationary distribution correction with the soft χ² divergence, discrete.

The joint values Q_tot and ν_tot are weighted sums of the agents' values, with weights w_i(s) ≥ 0
and a constant b(s) in common. How much more often than the data the best policy near it takes a
step is a function of the joint advantage, and each agent imitates the data with that weight:

    advantage A = Q̄_tot(s, a) - ν_tot(s) = Σ_i w̄_i(s) (Q̄_i(o_i, a_i) - ν_i(o_i)),
    values    L = E[ ν_tot(s) + α f*(A / α) ],
    critic    L = E[ (Q_tot(s, a) - y)² ],   y = r + γ (1 - terminated) ν̄_tot(s'),
    actor     L = -E[ min(ω, 2) log π_i(a_i | o_i) ],   ω = (f')⁻¹(A / α),

where f is the soft χ² divergence: (f')⁻¹(x) = x + 1 and f*(x) = ½ x² + x for positive x,
(f')⁻¹(x) = e^x and f*(x) = e^x - 1 for negative x. At the minimum the mean of ω over the data's
actions is 1 in every state, and where they are all alike ν_tot = Q_tot. The reward r is the mean of
the agents'. Dead agents add nothing to the joint values, and learn nothing.

Reference: Bui et al. 2024 (arXiv 2410.01954), with the defaults of the authors' code
(github.com/vietbt/ComaDICE, commit eef0f74, discrete actions). We differ from it where it leaves
the paper. The paper's advantage is the joint one; the code gives each agent one of its own,
w_i (Q_i - ν_i), and adds the weights that follow. The paper's loss starts from the values of first
states, whose gradient reaches later states through y; since y is a target, they would grow without
bound, which the code avoids by a gradient that is not that of f*: zero where Q_tot = ν_tot. We keep
f* and take the values of all of the data's states, the semi-gradient form of Sikchi et al. 2023
(arXiv 2302.08560). It normalises ω by itself, so that the code's two multipliers have no use. For
SMAC the code replaces rewards by returns-to-go, beside α 10; we do not, so that our α is
smaller. Its step size is 1e-4, beside more updates. ``--settings reference`` has α 10, this step
size and the data's own unit.
"""

from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from offmarl import cli, programs
from offmarl.config import Positive
from offmarl.losses import (
    cross_entropy,
    masked_mean,
    soft_chi_square_conjugate,
    soft_chi_square_ratio,
)
from offmarl.networks import mix_linearly, mixing_weights, unroll_batch
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
    """Factorised stationary distribution correction."""

    weight_max: Positive = 2.0
    """Largest weight ω of a step in the actor's loss."""


# ---------------------------------------------------------------------------------- losses


def local_losses(
    networks: Networks, params: Params, target: Target, batch: Sequence, hyper: Hyperparameters
) -> dict[str, Float[Array, ""]]:
    """Return the losses of the values and of the actor, and the mean weight ω."""
    view, first, alpha = batch.view_tm1, batch.first[:, :-1], hyper.value_temperature
    weights = mixing_weights(networks.mixer, target.critic.mixer, view)
    q = networks.action_values(target.critic.agent, view, first, batch.action)
    nu = networks.values(params.value, batch)[:, :-1]
    x = (weights.w * (q - nu)).sum(-1) / alpha
    value_losses = mix_linearly(weights, nu) + alpha * soft_chi_square_conjugate(x)

    omega = jax.lax.stop_gradient(jnp.minimum(soft_chi_square_ratio(x), hyper.weight_max))
    logits = unroll_batch(networks.policy, params.actor, view.observation, first)
    losses = jax.vmap(cross_entropy)(logits, batch.action, view.legal_actions)
    counts = batch.mask[..., None] & view.alive
    return {
        "value_loss": masked_mean(value_losses, batch.mask, batch.weight),
        "policy_loss": masked_mean(omega[..., None] * losses, counts, batch.weight),
        "ratio": masked_mean(omega, batch.mask),
    }


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, _dataset: DatasetStatistics) -> Program:
    """Build the program for one kind of data."""
    require_one_team(spec, "comadice")
    networks = Networks.of(spec, args)
    return factored_program(networks, args, local_losses)


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> Path:
    """Train, evaluate and write the run; return its directory."""
    return programs.train(make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        main(cli.parse_script(Args, __doc__))
