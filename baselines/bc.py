"""BC: behaviour cloning, of discrete or continuous actions.

One policy, shared by all agents, is fitted to the data's actions by maximum likelihood:

    L = -E[ log π(a_i | o_i, history) ]   over agents, steps and episodes of the data.

Each agent is cloned on its own, so the clone of data with several joint modes is their independent
mixture. With a constant step size, a clone follows the frequencies of the last
batches; ``--schedule linear`` lets it settle on those of the whole data.

A policy of continuous actions is a Gaussian that is clipped to their range, because controllers
often act at its ends. A tanh-squashed Gaussian has no probability there: data at an end pull its
mean to the largest number that is told apart from it. ``--mse`` fits no likelihood but

    L = E[ (tanh μ(o_i, history) - a_i)² ]   over entries of the actions, too.

Reference: Pomerleau 1991. Defaults are those of ``discrete_bc.yaml`` of OG-MARL
(github.com/instadeepai/og-marl, commit f4eb8f0; Formanek et al. 2023, arXiv 2302.00521), which has
recurrent networks only.
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
from offmarl.errors import OptionError
from offmarl.losses import masked_mean
from offmarl.networks import (
    agent_head,
    agent_network,
    init_policy,
    make_policy,
    squash,
    stochastic_head,
    unroll_batch,
)
from offmarl.programs import DatasetStatistics, Hyperparameters, Program, Stage
from offmarl.types import ArrayTree, Continuous, EnvSpec, Sequence

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(programs.LearnerArgs):
    """Behaviour cloning."""

    tanh: bool = False
    """Use a tanh-squashed Gaussian for continuous actions instead of a clipped one. It gives no
    probability to the ends of the range, where controllers often act."""
    mse: bool = False
    """Fit continuous actions by the squared error of a tanh-squashed mean instead of a likelihood.
    The clone is then deterministic."""


# ---------------------------------------------------------------------------------- state


class State(NamedTuple):
    """Parameters and states that an update changes."""

    params: ArrayTree
    optimiser: ArrayTree
    updates: Int[Array, ""]


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, _dataset: DatasetStatistics) -> Program:
    """Build the program for one kind of data."""
    if (args.mse or args.tanh) and not isinstance(spec.action, Continuous):
        raise OptionError(
            f"--mse and --tanh are for continuous actions, and {spec.name} has discrete ones: "
            "leave them out."
        )
    if args.mse and args.tanh:
        raise OptionError(
            "--mse fits no Gaussian, so it has no use for --tanh: leave one of them out."
        )
    head_name = stochastic_head(spec, "tanh_gaussian" if args.tanh else "gaussian")
    config = programs.policy_config(args, "deterministic" if args.mse else head_name)
    network, head = agent_network(config, spec), agent_head(config)

    def init(key: PRNGKeyArray, hyper: Hyperparameters) -> State:
        params = init_policy(config, spec, key)
        optimiser = programs.make_optimiser(args, hyper).init(params)
        return State(params, optimiser, jnp.zeros((), jnp.int32))

    def loss(params: ArrayTree, batch: Sequence) -> Float[Array, ""]:
        view = batch.view_tm1
        weights = params.network if args.mse else params
        outputs = unroll_batch(network, weights, view.observation, batch.first[:, :-1])
        mask = batch.mask[..., None] & view.alive
        if args.mse:
            errors = (squash(outputs, view.legal_actions) - batch.action) ** 2
            return masked_mean(errors, mask[..., None] & view.legal_actions, batch.weight)
        losses = -head(outputs, view.legal_actions).log_prob(batch.action)
        return masked_mean(losses, mask, batch.weight)

    def update(
        state: State, batch: Sequence, _key: PRNGKeyArray, hyper: Hyperparameters
    ) -> tuple[State, dict[str, Array]]:
        value, gradient = jax.value_and_grad(loss)(state.params, batch)
        adam = programs.make_optimiser(args, hyper, state.updates)
        step, optimiser = adam.update(gradient, state.optimiser)
        params = optax.apply_updates(state.params, step)
        metrics = {"policy_loss": value, "grad_norm": programs.grad_norm(gradient)}
        return State(params, optimiser, state.updates + 1), metrics

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
