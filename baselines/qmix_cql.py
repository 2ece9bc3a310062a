"""QMIX+CQL: monotonic value factorisation with a conservative penalty, discrete.

The agents' action values are mixed into Q_tot, monotonic in each of them. The penalty decreases the
joint values of legal joint actions drawn at random, and increases those of the data's:

    L = E[ ½ (Q_tot(s, a) - y)² ] + α E[ logsumexp over {K random legal joint actions, a} of
        Q_tot(s, ·) - Q_tot(s, a) ],     y = r + γ (1 - terminated) Q̄_tot(s', a'),

with r the mean of the agents' rewards, and a' the data's next action. The view that a truncated
episode ended with has none: there each agent's value is the mean over the softmax of its values.
The episode terminates where all agents do. Dead agents add nothing to Q_tot.

References: QMIX, Rashid et al. 2018 (arXiv 1803.11485); CQL, Kumar et al. 2020 (arXiv
2006.04779). Defaults are those of ``qmix_cql.yaml`` of OG-MARL (github.com/instadeepai/og-marl,
commit f4eb8f0; Formanek et al. 2023, arXiv 2302.00521), which has recurrent networks only. There,
illegal actions are drawn too, α is 3 beside SMAC's returns of at most 20, which is the unit of our
rewards too, and targets are those of double Q-learning, Q̄_tot(s', argmax_i Q_i), which grow by the
penalty in each step; ``--settings reference`` has both, without scaled rewards. Our mixer starts
with smaller weights; see `offmarl.networks.Mixer`.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
from jaxtyping import Array, Float, PRNGKeyArray

from offmarl import cli, programs
from offmarl.config import PositiveInt
from offmarl.distributions import select, select_each
from offmarl.losses import conservative_gap, masked_mean, sample_legal_actions
from offmarl.networks import MixedParams, make_policy, mix, mix_each
from offmarl.programs import TD_ERRORS, DatasetStatistics, Hyperparameters, Program, Values
from offmarl.programs.learning.learner import target_program
from offmarl.programs.learning.offline_q_learning import (
    ConservativeQArgs,
    MixedArgs,
    greedy_params,
    make_mixed_values,
    next_values,
    team_errors,
)
from offmarl.teams import require_one_team
from offmarl.types import EnvSpec, Sequence

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(MixedArgs, ConservativeQArgs):
    """QMIX with conservative Q-learning."""

    cql_samples: PositiveInt = 20
    """Random legal joint actions K in the penalty."""


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, _dataset: DatasetStatistics) -> Program:
    """Build the program for one kind of data."""
    require_one_team(spec, "qmix_cql")
    config, networks = programs.policy_config(args, "q"), make_mixed_values(spec, args)

    def init(key: PRNGKeyArray) -> MixedParams:
        return networks.init(spec, *jax.random.split(key))

    def loss(
        params: MixedParams,
        target: MixedParams,
        batch: Sequence,
        key: PRNGKeyArray,
        hyper: Hyperparameters,
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        (q_tm1, weights_tm1), (q_t, _) = networks.of_all_actions(params, batch)
        _, (q_target_t, weights_t) = networks.of_all_actions(target, batch)
        view_tm1 = batch.view_tm1
        v_t, known = next_values(args, batch, q_target_t, q_t)
        q_tot_t = mix(weights_t, v_t * batch.view_t.alive)
        q_tot_tm1 = mix(weights_tm1, select(q_tm1, batch.action) * view_tm1.alive)
        batch = batch._replace(next_known=known)
        error, known = team_errors(batch, q_tot_tm1, q_tot_t, hyper.gamma)
        td_loss = masked_mean(0.5 * error**2, known, batch.weight)

        samples = sample_legal_actions(key, view_tm1.legal_actions, args.cql_samples)
        q_samples = select_each(q_tm1, samples) * view_tm1.alive[..., None]
        q_tot_samples = mix_each(weights_tm1, q_samples)
        gap = masked_mean(conservative_gap(q_tot_samples, q_tot_tm1), batch.mask, batch.weight)
        metrics = {
            "td_loss": td_loss,
            "cql_loss": gap,
            "q_tot": masked_mean(q_tot_tm1, batch.mask),
            TD_ERRORS: error,
        }
        return td_loss + hyper.cql_weight * gap, metrics

    return target_program(
        args,
        init,
        loss,
        policy=partial(make_policy, config, spec),
        policy_params=lambda state: greedy_params(state.params.agent),
        values=Values(lambda state: state.params, networks.of_joint_actions),
    )


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> Path:
    """Train, evaluate and write the run; return its directory."""
    return programs.train(make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        main(cli.parse_script(Args, __doc__))
