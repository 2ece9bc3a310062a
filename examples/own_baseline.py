# %% [markdown]
# # A baseline of your own
#
# A baseline is one file with `Args`, `make` and `main`. `offmarl train` takes the path of the file
# in place of a name, and does the rest: sampling, seeds, evaluation, checkpoints, resuming, and
# loading the policy again.
#
# This page writes *reward-weighted cloning*: behaviour cloning in which steps with higher rewards
# have larger weights,
#
#     L = -E[ w log π(a_i | o_i) ],   w = exp(r / temperature), scaled to a mean of 1.
#
# Save it as `own_baseline.py`, or generate a template with `offmarl new baseline NAME`.

# %%
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from offmarl import cli, programs
from offmarl.config import Positive, PositiveInt
from offmarl.losses import masked_mean
from offmarl.networks import PolicyConfig, agent_head, agent_network, init_policy, make_policy
from offmarl.types import ArrayTree

# %% [markdown]
# ## Arguments
#
# `programs.Args` has the arguments that all baselines share: the vault, the seeds, the number of
# updates and so on. Add your own as fields, each with a line of help. Their types determine which
# values are valid.


# %%
@dataclass(frozen=True)
class Args(programs.Args):
    """Reward-weighted behaviour cloning."""

    learning_rate: Positive = 1e-3
    """Adam's step size."""
    temperature: Positive = 1.0
    """Lower values give more weight to the steps with the highest rewards."""
    hidden: PositiveInt = 64
    """Width of the policy's layers."""


# %% [markdown]
# ## The program
#
# `make` gets the sizes of the data, the arguments, and statistics of the dataset, and returns pure
# functions of one seed. These get numbers such as the learning rate in `hyper`, as arrays.


# %%
class State(NamedTuple):
    params: ArrayTree
    optimiser: ArrayTree


def make(spec, args: Args, dataset) -> programs.Program:
    config = PolicyConfig("feedforward", "softmax", args.hidden)
    network, head = agent_network(config, spec), agent_head(config)

    def init(key, hyper):
        params = init_policy(config, spec, key)
        return State(params, optax.adam(hyper.learning_rate).init(params))

    def loss(params, batch, hyper):
        view = batch.view_tm1
        outputs, _ = network.apply(params, (), view.observation)
        log_prob = head(outputs, view.legal_actions).log_prob(batch.action)
        mask = batch.mask[..., None] & view.alive
        weight = jnp.exp(batch.reward / hyper.temperature)
        return -masked_mean(weight * log_prob, mask) / masked_mean(weight, mask)

    def update(state, batch, key, hyper):
        value, gradient = jax.value_and_grad(loss)(state.params, batch, hyper)
        adam = optax.adam(hyper.learning_rate)
        step, optimiser = adam.update(gradient, state.optimiser)
        return State(optax.apply_updates(state.params, step), optimiser), {"policy_loss": value}

    return programs.Program(
        init,
        stages=(programs.Stage(update),),
        policy=partial(make_policy, config, spec),
        policy_params=lambda state: state.params,
    )


# %% [markdown]
# ## Run it
#
# ```bash
# offmarl record mappo --env classic/bridge --tiers random --total-steps 20000
# offmarl train own_baseline.py --vault vaults/classic/bridge.vlt/mappo-0-random --seeds 3
# offmarl train bc --vault vaults/classic/bridge.vlt/mappo-0-random --seeds 3
# offmarl compare runs/classic/bridge/mappo-0-random/*
# ```
#
# `offmarl train own_baseline.py --help` lists the arguments. Evaluating a run or loading its policy
# runs the code of this file, so both ask for it: `offmarl evaluate RUN --program own_baseline.py`,
# `offmarl.load_policy(run, program="own_baseline.py")`. `main` lets the file run as a script,
# too.


# %%
def main(args: Args) -> Path:
    return programs.train(make, args)


if __name__ == "__main__" and "__file__" in globals():  # not in a notebook
    with cli.exit_codes():
        main(cli.parse_script(Args, __doc__))
