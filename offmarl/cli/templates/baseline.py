"""MyBaseline: behaviour cloning, to replace with an algorithm of your own.

Replace the arguments, the state, the loss and this text. Then train on any dataset::

    offmarl train my_baseline.py --vault vaults/swarm/coverage-3.vlt/medium

Test it first on the probe environments, whose optimal returns are known: see `offmarl envs probe/`.
"""

from dataclasses import dataclass
from functools import partial
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
    make_policy,
    stochastic_head,
)
from offmarl.programs import DatasetStatistics, Hyperparameters, Program, Stage
from offmarl.types import ArrayTree, EnvSpec, Sequence


@dataclass(frozen=True)
class Args(programs.Args):
    """Arguments; each field is an option of the command line, with its docstring as help."""

    learning_rate: Positive = 1e-3
    """Step size of Adam."""
    hidden: PositiveInt = 64
    """Width of the policy's layers."""


class State(NamedTuple):
    """What an update changes: arrays only, since checkpoints save it."""

    params: ArrayTree
    optimiser: ArrayTree


def make(spec: EnvSpec, args: Args, _dataset: DatasetStatistics) -> Program:
    """Build the program for one dataset: pure functions of one seed."""
    config = PolicyConfig("recurrent", stochastic_head(spec), args.hidden)
    network, head = agent_network(config, spec), agent_head(config)

    def init(key: PRNGKeyArray, hyper: Hyperparameters) -> State:
        params = init_policy(config, spec, key)
        return State(params, optax.adam(hyper.learning_rate).init(params))

    def loss(params: ArrayTree, batch: Sequence) -> Float[Array, ""]:
        view = batch.view_tm1  # (B, T, ...): the views in which the actions were taken
        outputs = jax.vmap(lambda o: network.apply(params, o, method="unroll"))(view.observation)
        log_prob = head(outputs, view.legal_actions).log_prob(batch.action)
        return -masked_mean(log_prob, batch.mask[..., None] & view.alive, batch.weight)

    def update(
        state: State, batch: Sequence, _key: PRNGKeyArray, hyper: Hyperparameters
    ) -> tuple[State, dict[str, Array]]:
        value, gradient = jax.value_and_grad(loss)(state.params, batch)
        step, optimiser = optax.adam(hyper.learning_rate).update(gradient, state.optimiser)
        return State(optax.apply_updates(state.params, step), optimiser), {"loss": value}

    return Program(
        init,
        stages=(Stage(update),),
        policy=partial(make_policy, config, spec),
        policy_params=lambda state: state.params,
    )


def main(args: Args) -> Path:
    """Train, evaluate and write the run; return its directory."""
    return programs.train(make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        main(cli.parse_script(Args, __doc__))
