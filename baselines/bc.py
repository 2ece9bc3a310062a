"""BC: behaviour cloning, recurrent, of discrete or continuous actions.

One recurrent policy, shared by all agents, is fitted to the data's actions by maximum likelihood:

    L = -E[ log π(a_i | o_i, history) ]   over agents, steps and episodes of the data.

Each agent is cloned on its own, so a data set of several joint modes comes out as their
independent mixture. Reference: Pomerleau 1991; the setting of OG-MARL (Formanek et al. 2023,
arXiv 2302.00521).
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from offmarl import cli, programs
from offmarl.config import Positive, PositiveInt
from offmarl.losses import masked_mean
from offmarl.networks import (
    AgentId,
    PolicyConfig,
    agent_head,
    agent_network,
    init_policy,
    make_policy,
    stochastic_head,
    unroll_batch,
)
from offmarl.programs import DatasetStatistics, Hyperparameters, Program, Stage
from offmarl.types import ArrayTree, EnvSpec, Sequence

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(programs.Args):
    """Behaviour cloning."""

    learning_rate: Positive = 1e-3
    """Adam's step size."""
    anneal: bool = True
    """Decrease the step size to zero over the run, so that the clone settles on the frequencies of
    the data rather than on those of the last batches."""
    tanh: bool = False
    """Use a tanh-squashed Gaussian for continuous actions instead of a clipped one. It gives no
    probability to the ends of the range, where controllers often act."""
    greedy: bool = False
    """Evaluate the clone by its best actions instead of sampled ones."""
    hidden: PositiveInt = 64
    """Width of the policy's layers."""
    agent_id: AgentId = "onehot"
    """How the network distinguishes the agents. onehot: by their index, which ties it to their
    number; sinusoidal: by 16 sines and cosines of their place in the team; none: not at all."""


# ---------------------------------------------------------------------------------- state


class State(NamedTuple):
    """What learns."""

    params: ArrayTree
    optimiser: ArrayTree
    updates: Int[Array, ""]


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, _dataset: DatasetStatistics) -> Program:
    """Build the program for one kind of data."""
    head_name = stochastic_head(spec, "tanh_gaussian" if args.tanh else "gaussian")
    config = PolicyConfig("recurrent", head_name, args.hidden, args.agent_id)
    network, head = agent_network(config, spec), agent_head(config)
    total = args.updates or 1

    def init(key: PRNGKeyArray, _hyper: Hyperparameters) -> State:
        params = init_policy(config, spec, key)
        return State(params, optax.adam(0.0).init(params), jnp.zeros((), jnp.int32))

    def loss(params: ArrayTree, batch: Sequence) -> Float[Array, ""]:
        view = batch.view_tm1
        outputs = unroll_batch(network, params, view.observation, batch.first[:, :-1])
        losses = -head(outputs, view.legal_actions).log_prob(batch.action)
        return masked_mean(losses, batch.mask[..., None] & view.alive, batch.weight)

    def update(
        state: State, batch: Sequence, _key: PRNGKeyArray, hyper: Hyperparameters
    ) -> tuple[State, dict[str, Array]]:
        value, gradient = jax.value_and_grad(loss)(state.params, batch)
        left = jnp.maximum(1 - state.updates / total, 0) if args.anneal else 1.0
        adam = optax.adam(hyper.learning_rate * left)
        step, optimiser = adam.update(gradient, state.optimiser)
        params = optax.apply_updates(state.params, step)
        metrics = {"policy_loss": value, "grad_norm": programs.grad_norm(gradient)}
        return State(params, optimiser, state.updates + 1), metrics

    return Program(
        init,
        stages=(Stage(update),),
        policy=partial(make_policy, config, spec),
        policy_params=lambda state: state.params,
        greedy=args.greedy,
    )


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> Path:
    """Train, evaluate and write the run; return its directory."""
    return programs.train(make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        main(cli.parse_script(Args, __doc__))
