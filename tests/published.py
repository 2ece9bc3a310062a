"""Data in the layout of the published AlberDICE files, generated from the rules of their games.

The files themselves carry no licence, so the repository does not hold them. What is generated has
the same arrays, quirks and counts, so a test of a count or a mean holds on both.
"""

from pathlib import Path

import jax
import numpy as np

from offmarl import envs

SLOTS = 51
XOR_STEPS = {
    "xor_02": {(0, 1): 5000},
    "xor_00_02_20": {(0, 0): 1671, (0, 1): 1651, (1, 0): 1678},
    "xor_random": {(0, 0): 1271, (0, 1): 1281, (1, 0): 1210, (1, 1): 1238},
}
"""How many of the 100 x 50 steps take each joint action."""

BRIDGE_WAYS = (
    ([3, 3, 2, 3, 0, 0, 0, 0], [3, 1, 2, 4, 4, 4, 1, 4], 80),
    ([3, 3, 3, 2, 0, 0, 0, 0], [3, 2, 1, 4, 4, 4, 1, 4], 79),
    ([3, 3, 2, 3, 3, 3, 0, 0], [3, 3, 4, 4, 4, 4, 1, 4], 100),
    ([4, 1, 2, 3, 3, 3, 2, 3], [4, 4, 4, 1, 0, 0, 0, 0], 81),
    ([4, 2, 1, 3, 3, 3, 2, 3], [4, 4, 1, 4, 0, 0, 0, 0], 87),
    ([4, 4, 3, 3, 3, 3, 2, 3], [4, 4, 1, 4, 0, 0, 0, 0], 73),
)
"""The actions of both agents over eight steps, and how many of the 500 episodes take them."""


def write_published(directory: Path) -> Path:
    """Write all four files below a directory, as ``alberdice/NAME.npz``; return the directory."""
    (directory / "alberdice").mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name, steps in XOR_STEPS.items():
        joint = np.repeat(list(steps), list(steps.values()), axis=0)
        actions = rng.permutation(joint).reshape(100, 50, 2)
        np.savez(directory / "alberdice" / name, **episode_batch("classic/xor", actions))
    ways = [np.stack(way[:2], axis=-1) for way in BRIDGE_WAYS]
    actions = np.repeat(ways, [way[2] for way in BRIDGE_WAYS], axis=0)
    batch = episode_batch("classic/bridge", rng.permutation(actions))
    np.savez(directory / "alberdice" / "bridge_optimal", **batch)
    return directory


def episode_batch(name, actions):
    """Play actions ``(E, T, N)``, all T steps of every episode, and return PyMARL's arrays."""
    env = envs.make(name)

    def play(actions):
        def step(state, action):
            state, timestep = env.step(jax.random.key(0), state, action)
            return state, timestep

        state, first = env.reset(jax.random.key(0))
        return first, jax.lax.scan(step, state, actions)[1]

    first, steps = jax.device_get(jax.jit(jax.vmap(play))(actions))
    views = jax.tree.map(lambda a, b: np.concatenate([a[:, None], b], 1), first.view, steps.view)
    episodes, length = actions.shape[:2]

    def slots(array, dtype):
        padded = np.zeros((episodes, SLOTS, *array.shape[2:]), dtype)
        padded[:, : array.shape[1]] = array
        return padded

    return {
        "obs": slots(views.observation, np.float32),
        "state": slots(views.state, np.float32),
        "actions": slots(actions[..., None], np.int64),
        "avail_actions": slots(views.legal_actions, np.int32),
        "reward": slots(steps.reward[..., :1], np.float32),
        "terminated": slots(steps.last[..., None], np.uint8),
        "filled": slots(np.ones((episodes, length + 1, 1)), np.int64),
    }
