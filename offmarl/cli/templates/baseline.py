"""MyBaseline: behaviour cloning by a feed-forward network, to start from.

Replace the loss with your own. `offmarl.programs.program` describes programs. Train it on any
dataset, and compare it with other baselines::

    offmarl train my_baseline.py --vault VAULT
    offmarl compare runs/*/*/*/my_baseline runs/*/*/*/bc
    offmarl evaluate RUN --program my_baseline.py
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

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(programs.Args):
    """Arguments of MyBaseline; the texts below are the help of its options."""

    learning_rate: Positive = 1e-3
    """Adam's step size. A float is a hyperparameter: update receives it as an array."""
    hidden: PositiveInt = 64
    """Width of the policy's layers. Other arguments shape the program: make receives them."""


# ---------------------------------------------------------------------------------- state


class State(NamedTuple):
    """The state of training: any pytree of arrays."""

    params: ArrayTree
    optimiser: ArrayTree


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, _dataset: DatasetStatistics) -> Program:
    """Build the program for one dataset, which can give moments, returns and first views."""
    config = PolicyConfig("feedforward", stochastic_head(spec), args.hidden)
    network, head = agent_network(config, spec), agent_head(config)

    def init(key: PRNGKeyArray, _hyper: Hyperparameters) -> State:
        params = init_policy(config, spec, key)
        return State(params, optax.adam(0.0).init(params))

    def loss(params: ArrayTree, batch: Sequence) -> Float[Array, ""]:
        view = batch.view_tm1
        outputs, _ = network.apply(params, (), view.observation)
        losses = -head(outputs, view.legal_actions).log_prob(batch.action)
        return masked_mean(losses, batch.mask[..., None] & view.alive, batch.weight)

    def update(
        state: State, batch: Sequence, _key: PRNGKeyArray, hyper: Hyperparameters
    ) -> tuple[State, dict[str, Array]]:
        value, gradient = jax.value_and_grad(loss)(state.params, batch)
        step, optimiser = optax.adam(hyper.learning_rate).update(gradient, state.optimiser)
        metrics = {"loss": value, "grad_norm": programs.grad_norm(gradient)}
        return State(optax.apply_updates(state.params, step), optimiser), metrics

    return Program(
        init,
        stages=(Stage(update),),
        policy=partial(make_policy, config, spec),
        policy_params=lambda state: state.params,
    )


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> Path:
    """Train, evaluate and write the run; return its directory."""
    return programs.train(make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        main(cli.parse_script(Args, __doc__))
