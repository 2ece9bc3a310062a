# %% [markdown]
# # Published data with a learner of your own
#
# This page trains a linear policy by behaviour cloning on a dataset, with nothing but JAX and
# Optax. Replace the loss with your own.
#
# offmarl provides the batches; the learner is your own code. The first two axes of every array of a
# batch are the windows and their steps.

# %%
import sys

import jax
import jax.numpy as jnp
import optax

import offmarl
from offmarl.vault import Dataset

# %% [markdown]
# ## Open a dataset
#
# Save this page as `published_data.py`. A published dataset is downloaded the first time it is
# opened by its name:
#
# ```bash
# python published_data.py og_marl/smac_v1/3m/Good
# ```
#
# The path of a vault works too. This needs no network:
#
# ```bash
# offmarl record mappo --env swarm/coverage-3 --tiers random,medium,expert,replay \
#     --total-steps 160000 --steps 20000 --out vaults
# python published_data.py vaults/swarm/coverage-3.vlt/mappo-0-expert
# ```


# %%
def open_data(name: str) -> Dataset:
    """Open a vault by its path, or a published dataset by its name."""
    return offmarl.load_dataset(name) if name.startswith("og_marl/") else offmarl.open(name)


# %% [markdown]
# ## The loss
#
# A window can hold steps of several episodes. Between two episodes lies a slot without an action,
# so `batch.mask` marks the steps that count, and `alive` marks the agents that take part.


# %%
def loss(params, batch):
    view = batch.view_tm1
    logits = view.observation @ params["kernel"] + params["bias"]
    logits = jnp.where(view.legal_actions, logits, -1e9)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.action)
    mask = batch.mask[..., None] & view.alive
    return (losses * mask).sum() / mask.sum()


# %% [markdown]
# ## The update
#
# The replay is on the device and is an argument of the compiled function. Sampling and updating
# are one program: nothing is copied from the host.


# %%
def train(dataset: Dataset, updates: int = 500):
    replay = dataset.replay(batch=256, length=10)
    sizes = (dataset.spec.observation_size, dataset.spec.num_actions)
    params = {"kernel": jnp.zeros(sizes), "bias": jnp.zeros(sizes[1])}
    adam = optax.adam(1e-2)

    @jax.jit
    def run(params, replay, key):
        def update(state, key):
            params, optimiser = state
            value, gradient = jax.value_and_grad(loss)(params, replay.sample(key))
            step, optimiser = adam.update(gradient, optimiser)
            return (optax.apply_updates(params, step), optimiser), value

        keys = jax.random.split(key, updates)
        (params, _), losses = jax.lax.scan(update, (params, adam.init(params)), keys)
        return params, losses

    return run(params, replay, jax.random.key(0))


# %% [markdown]
# ## Run it


# %%
def main(name: str) -> None:
    _, losses = train(open_data(name))
    print(f"cross-entropy: {losses[0]:.3f} at first, {losses[-1]:.3f} after {len(losses)} updates")


if __name__ == "__main__":
    is_file = "__file__" in globals()  # not a notebook, whose arguments are not ours
    main(sys.argv[1] if is_file and sys.argv[1:] else "og_marl/smac_v1/3m/Good")
