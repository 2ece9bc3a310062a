"""IQL+CQL: independent Q-learning with a conservative penalty, discrete.

Each agent learns its own action values, as if the others were a part of its environment. The
penalty decreases the values of legal actions, and increases those of the data's:

    L = E[ ½ (Q_i(a_i) - y_i)² ] + α E[ logsumexp over legal a of Q_i(a) - Q_i(a_i) ],
    y_i = r_i + γ (1 - terminated_i) Q̄_i(o_i', a_i'),

with a_i' the data's next action, and parameters shared by all agents. The view that a truncated
episode ended with has none: there the value is the mean over the softmax of the values. If the
agents share a team's reward, it continues after an agent's own death, and only the end of the
episode terminates. An agent with a reward of its own may also die and not terminate. While their
reward continues, the values of dead agents are learned and used too. Nothing depends on the actions
that the data has for dead agents: their value is that of action 0, and they have no penalty.

References: independent Q-learning, Tan 1993; CQL, Kumar et al. 2020 (arXiv 2006.04779). Defaults
are those of ``iql_cql.yaml`` of OG-MARL (github.com/instadeepai/og-marl, commit f4eb8f0; Formanek
et al. 2023, arXiv 2302.00521), which has recurrent networks only. There, an agent's return ends
with its own death, and the penalty counts illegal actions too. There, α is 3 beside SMAC's returns
of at most 20, which is the unit of our rewards too, and targets are those of double Q-learning,
Q̄_i(o_i', argmax over legal a of Q_i(o_i', a)), which grow by the penalty in each
step; ``--settings reference`` has both, without scaled rewards.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl import cli, programs
from offmarl.distributions import mask_illegal, select
from offmarl.losses import bootstrap_discounts, masked_mean, td_targets
from offmarl.networks import agent_network, init_policy, make_policy, unroll_batch
from offmarl.programs import TD_ERRORS, DatasetStatistics, Hyperparameters, Program, Values
from offmarl.programs.learning.actor_critic import valued_steps
from offmarl.programs.learning.learner import target_program
from offmarl.programs.learning.offline_q_learning import (
    ConservativeQArgs,
    greedy_params,
    next_values,
)
from offmarl.types import ArrayTree, EnvSpec, Sequence, View

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(ConservativeQArgs):
    """Independent Q-learning with a conservative penalty."""


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, _dataset: DatasetStatistics) -> Program:
    """Build the program for one kind of data."""
    config = programs.policy_config(args, "q")
    network, shares_reward = agent_network(config, spec), spec.reward == "team"

    def init(key: PRNGKeyArray) -> ArrayTree:
        return init_policy(config, spec, key).network

    def loss(
        params: ArrayTree,
        target: ArrayTree,
        batch: Sequence,
        _key: PRNGKeyArray,
        hyper: Hyperparameters,
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        observation, view_tm1 = batch.view.observation, batch.view_tm1
        q = unroll_batch(network, params, observation, batch.first)
        q_target = unroll_batch(network, target, observation, batch.first)
        q_tm1 = select(q[:, :-1], jnp.where(view_tm1.alive, batch.action, 0))
        of_living, next_known = next_values(args, batch, q_target[:, 1:], q[:, 1:])
        v_t = jnp.where(batch.acts_t, of_living, q_target[:, 1:, :, 0])
        discount_t = bootstrap_discounts(hyper.gamma, batch.terminated, shares_reward)
        target_tm1 = td_targets(batch.reward, discount_t, v_t)

        acts = batch.mask[..., None] & view_tm1.alive
        known = valued_steps(spec, batch) & (next_known[..., None] | (discount_t == 0))
        error = jnp.where(known, q_tm1 - target_tm1, 0.0)
        td_loss = masked_mean(0.5 * error**2, known, batch.weight)
        legal = mask_illegal(q[:, :-1], view_tm1.legal_actions)
        gap = masked_mean(jax.nn.logsumexp(legal, axis=-1) - q_tm1, acts, batch.weight)
        metrics = {
            "td_loss": td_loss,
            "cql_loss": gap,
            "q": masked_mean(q_tm1, acts),
            TD_ERRORS: jnp.abs(error).max(-1),
        }
        return td_loss + hyper.cql_weight * gap, metrics

    def q_taken(
        params: ArrayTree, view: View, first: Bool[Array, "B T"], action: Int[Array, "B T N"]
    ) -> Float[Array, "B T N"]:
        # A dead agent is trained as if it took action 0.
        action = jnp.where(view.alive, action, 0)
        return select(unroll_batch(network, params, view.observation, first), action)

    return target_program(
        args,
        init,
        loss,
        policy=partial(make_policy, config, spec),
        policy_params=lambda state: greedy_params(state.params),
        values=Values(lambda state: state.params, q_taken),
    )


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> Path:
    """Train, evaluate and write the run; return its directory."""
    return programs.train(make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        main(cli.parse_script(Args, __doc__))
