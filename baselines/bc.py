"""BC: behaviour cloning, recurrent, of discrete or continuous actions.

One recurrent policy, shared by all agents, is fitted to the data's actions by maximum likelihood:

    L = -E[ log π(a_i | o_i, history) ]   over agents, steps and episodes of the data.

Each agent is cloned on its own, so a data set of several joint modes comes out as their
independent mixture. Reference: Pomerleau 1991; the setting of OG-MARL (Formanek et al. 2023,
arXiv 2302.00521).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import optax
from jaxtyping import Array, Float, PRNGKeyArray

from offmarl import cli, programs
from offmarl.config import Positive, PositiveInt
from offmarl.losses import masked_mean
from offmarl.networks import (
    PolicyConfig,
    agent_head,
    agent_network,
    init_policy,
    stochastic_head,
)
from offmarl.types import ArrayTree, EnvSpec, Sequence

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(programs.Args):
    """Behaviour cloning."""

    learning_rate: Positive = 1e-3
    """Adam's step size."""
    anneal: bool = True
    """Let the step size fall to zero over the run, so that the clone settles on the frequencies of
    the data rather than on those of the last batches."""
    greedy: bool = False
    """Evaluate the clone's best actions only, rather than act as randomly as the data does."""
    hidden: PositiveInt = 64
    """Width of the policy's layers."""
    agent_id: bool = True
    """Tell the policy which agent it acts for."""


# ---------------------------------------------------------------------------------- state


class State(NamedTuple):
    """What learns."""

    params: ArrayTree
    optimiser: ArrayTree


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args) -> programs.Program:
    """Build the program for one kind of data."""
    config = PolicyConfig("recurrent", stochastic_head(spec), args.hidden, args.agent_id)
    network, head = agent_network(config, spec), agent_head(config)
    end = 0.0 if args.anneal else args.learning_rate
    adam = optax.adam(optax.linear_schedule(args.learning_rate, end, args.updates))

    def init(key: PRNGKeyArray) -> State:
        params = init_policy(config, spec, key)
        return State(params, adam.init(params))

    def loss(params: ArrayTree, batch: Sequence) -> Float[Array, ""]:
        view = batch.view_tm1
        outputs = jax.vmap(lambda o: network.apply(params, o, method="unroll"))(view.observation)
        losses = -head(outputs, view.legal_actions).log_prob(batch.action)
        return masked_mean(losses, batch.mask[..., None] & view.alive)

    def update(state: State, batch: Sequence, _key: PRNGKeyArray) -> tuple[State, dict[str, Array]]:
        value, gradient = jax.value_and_grad(loss)(state.params, batch)
        step, optimiser = adam.update(gradient, state.optimiser)
        return State(optax.apply_updates(state.params, step), optimiser), {"policy_loss": value}

    return programs.Program(config, init, update, lambda state: state.params, args.greedy)


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> Path:
    """Train, evaluate and write the run; return its directory."""
    return programs.train("bc", make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        main(cli.parse_script(Args, __doc__))
