"""Train a learner of your own on a dataset: a linear policy, by behaviour cloning.

offmarl record mappo --env swarm/coverage-3 --tiers expert --out vaults
python examples/own_learner.py vaults/swarm/coverage-3.vlt/expert
"""

import sys

import jax
import jax.numpy as jnp
import optax

import offmarl


def loss(params, batch):
    view = batch.view_tm1
    logits = view.observation @ params["kernel"] + params["bias"]
    logits = jnp.where(view.legal_actions, logits, -1e9)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.action)
    mask = batch.mask[..., None] & view.alive
    return (losses * mask).sum() / mask.sum()


def main(path: str) -> None:
    dataset = offmarl.open(path)
    replay = dataset.replay(batch=256, length=10)
    sizes = (dataset.spec.observation_size, dataset.spec.num_actions)
    params = {"kernel": jnp.zeros(sizes), "bias": jnp.zeros(sizes[1])}
    adam = optax.adam(1e-2)

    @jax.jit
    def train(params, replay, key):
        def update(state, key):
            params, optimiser = state
            value, gradient = jax.value_and_grad(loss)(params, replay.sample(key))
            step, optimiser = adam.update(gradient, optimiser)
            return (optax.apply_updates(params, step), optimiser), value

        keys = jax.random.split(key, 500)
        (params, _), losses = jax.lax.scan(update, (params, adam.init(params)), keys)
        return params, losses

    _, losses = train(params, replay, jax.random.key(0))
    print(f"cross-entropy: {losses[0]:.3f} at first, {losses[-1]:.3f} after {len(losses)} updates")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
