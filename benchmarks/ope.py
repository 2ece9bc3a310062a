"""How often the intervals of off-policy evaluation cover the truth, on the probe environments.

    python benchmarks/ope.py [--repeats 200] [--episodes 200]

A uniform policy records episodes of each probe environment. Each repeat takes some of them, and
asks whether the 95% interval of weighted importance sampling contains the value of another policy,
which is known: each agent takes action 1 with probability 0.7.
"""

import argparse
import tempfile
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from offmarl import envs, vault
from offmarl.networks import PolicyConfig, make_policy
from offmarl.ope import Ratios, bootstrap, weighted_importance_sampling
from offmarl.ope.history import Histories, joint_behaviour
from offmarl.programs import record_policy

CHANCE, GAMMA = 0.7, 0.9
TRUTH = {
    "probe/one-step": CHANCE,
    "probe/two-step": 0.5 * (1 - CHANCE) + GAMMA * CHANCE,
    "probe/observation": 0.5,
    "probe/match": CHANCE**2 + 0.5 * (1 - CHANCE) ** 2,
    "probe/memory": 0.5 * GAMMA**2,
}
"""The discounted value of the evaluated policy: cues are 1 in half of the episodes."""


def episodes_of(name: str, count: int, directory: Path) -> tuple[np.ndarray, ...]:
    """Record episodes, and return their ratios' logarithms, rewards and masks."""
    env = envs.make(name)
    policy = make_policy(PolicyConfig("random"), env.spec)
    path = directory / f"{name.partition('/')[2]}.vlt"
    record_policy(env, policy, (), path, steps=count * env.length, num_envs=500)
    data = vault.open_vault(path)
    numbers = np.flatnonzero(data.episodes.complete)[:count]
    found = []
    for part, block in Histories(data, numbers).blocks():
        size = part.stop - part.start
        log_prob = jnp.log(jnp.where(block.action == 1, CHANCE, 1 - CHANCE)).sum(-1)
        arrays = (log_prob, joint_behaviour(block), block.reward.mean(-1), block.mask)
        found.append([np.asarray(x)[:size] for x in arrays])
    return tuple(np.concatenate(x) for x in zip(*found, strict=True))


@jax.jit
def value(arrays: tuple[jax.Array, ...], counts: jax.Array) -> jax.Array:
    log_prob, behaviour, reward, mask = arrays
    return weighted_importance_sampling(
        Ratios.of(log_prob, behaviour, mask), jnp.where(mask, reward, 0), GAMMA, counts
    )


def coverage(name: str, repeats: int, episodes: int, directory: Path) -> tuple[float, float]:
    """Return how often the interval covers the truth, and its mean width."""
    arrays = episodes_of(name, repeats * episodes, directory)
    draw, covered, width = np.random.default_rng(0), 0, 0.0
    for start in range(0, repeats * episodes, episodes):
        chosen = tuple(x[start : start + episodes] for x in arrays)
        _, low, high = bootstrap(partial(value, chosen), episodes, draw, 1000)
        covered += low <= TRUTH[name] <= high
        width += high - low
    return covered / repeats, width / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--episodes", type=int, default=200)
    args = parser.parse_args()
    print("| environment | truth | covered | mean width |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as directory:
        for name, truth in TRUTH.items():
            share, width = coverage(name, args.repeats, args.episodes, Path(directory))
            print(f"| {name} | {truth:.4g} | {share:.1%} | {width:.3g} |", flush=True)


if __name__ == "__main__":
    main()
