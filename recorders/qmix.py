"""QMIX: monotonic value factorisation, learned off-policy from replay.

Agents share a network of action values, recurrent or feed-forward. A mixing network, which is
monotonic in each value and depends on the global state, combines them to Q_tot (Rashid et al. 2018,
arXiv 1803.11485). Q_tot is learned by double Q-learning (van Hasselt et al. 2015, arXiv 1509.06461)
from the mean of the agents' rewards, with ε-greedy exploration:

    L = E[ ½ (Q_tot(s, a) - y)² ],     y = r + γ (1 - terminated) Q̄_tot(s', argmax Q_i).

TD(λ) targets are an option. The replay is the buffer that is recorded.
"""

from dataclasses import dataclass
from functools import partial

import jax
from jaxtyping import Array, Float, PRNGKeyArray
from rich.console import Console

from offmarl import cli, envs, programs
from offmarl.config import PositiveInt
from offmarl.distributions import select
from offmarl.losses import masked_mean
from offmarl.networks import (
    CentralInput,
    MixedParams,
    MixedValues,
    make_mixer,
    mix,
)
from offmarl.programs import TD_ERRORS, Hyperparameters, Program
from offmarl.programs.learning.q_learning import (
    QArgs,
    bootstrap,
    next_values,
    q_program,
)
from offmarl.teams import require_one_team
from offmarl.types import EnvSpec, Sequence

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(QArgs):
    """Arguments of QMIX."""

    mixer_hidden: PositiveInt = 64
    """Width of the mixer's hypernetworks."""
    mixer_embed: PositiveInt = 32
    """Width of the mixing function."""
    mixer: CentralInput = "state"
    """What the mixer sees. state: the global state; pooled: the observations of all agents, by
    attention, with as many parameters for any number of agents."""


# ---------------------------------------------------------------------------------- losses


def loss(
    networks: MixedValues,
    params: MixedParams,
    target: MixedParams,
    hyper: Hyperparameters,
    batch: Sequence,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return the mean of ½ (Q_tot - y)² over the valid steps, where y is the double-Q target."""
    (q_tm1, weights_tm1), (q_t, _) = networks.of_all_actions(params, batch)
    _, (q_target_t, weights_t) = networks.of_all_actions(target, batch)
    q_tot_t = mix(weights_t, next_values(q_t, q_target_t, batch))
    terminated = batch.terminated.all(-1)
    y = bootstrap(hyper, batch, batch.reward.mean(-1), terminated, q_tot_t)

    q_tot_tm1 = mix(weights_tm1, select(q_tm1, batch.action) * batch.view_tm1.alive)
    error = q_tot_tm1 - y
    value = masked_mean(0.5 * error**2, batch.mask, batch.weight)
    metrics = {"td_loss": value, "q_tot": masked_mean(q_tot_tm1, batch.mask)}
    return value, metrics | {TD_ERRORS: error}


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, env: envs.Environment) -> Program:
    """Build the program for an environment, given without autoreset."""
    require_one_team(spec, "qmix", "recorder")
    config = programs.policy_config(args, "q")
    mixer = make_mixer(spec, args.mixer_embed, args.mixer_hidden, args.mixer)
    networks = MixedValues.make(config, spec, mixer)

    def init_params(key: PRNGKeyArray) -> MixedParams:
        return networks.init(spec, *jax.random.split(key))

    return q_program(spec, args, env, init_params, partial(loss, networks))


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> "programs.Recorded":
    """Train QMIX, and record the requested tiers."""
    return programs.record_online(make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        Console().print(main(cli.parse_script(Args, __doc__)).view)
