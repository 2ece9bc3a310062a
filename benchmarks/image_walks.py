"""Environments of images from end to end: record, clone, export, and read with stock flashbax.

    pip install 'offmarl[envs,pettingzoo]' pygame
    python benchmarks/image_walks.py --directory walks

Two environments: JaxMARL's Overcooked, recorded from MAPPO with shaped rewards, and PettingZoo's
Cooperative Pong, recorded from a program that follows the ball, with every eighth pixel of the
screen. For each: returns of the behaviour policy, of its clone and of random play, and sizes over
the raw bytes. A directory that holds the recordings already is used again.
"""

import argparse
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from flashbax.vault import Vault
from gymnasium import spaces
from pettingzoo.utils import BaseParallelWrapper

import offmarl
from offmarl import vault

warnings.filterwarnings("ignore", message=".*render method.*")

OVERCOOKED = "jaxmarl/overcooked/cramped_room"
LEARN = (
    "--total-steps 200000 --shaped-rewards 0.5 --num-steps 128 --num-envs 16 --learning-rate 5e-4 "
    "--schedule linear"
)
CLONE = "--network feedforward --batch-size 128 --length 1 --updates 1500 --learning-rate 1e-3"
STRIDE = 8
"""Every eighth pixel in both directions."""


class Small(BaseParallelWrapper):
    """Leaves out most pixels of an environment's images."""

    def observation_space(self, agent: str) -> spaces.Space:
        """Return the space of the smaller images."""
        box = self.env.observation_space(agent)
        return spaces.Box(0, 255, box.low[::STRIDE, ::STRIDE].shape, np.uint8)

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        """Begin an episode."""
        views, infos = self.env.reset(seed=seed, options=options)
        return {agent: small(view) for agent, view in views.items()}, infos

    def step(self, actions: dict) -> tuple[dict, ...]:
        """Take a step."""
        views, *rest = self.env.step(actions)
        return {agent: small(view) for agent, view in views.items()}, *rest

    def state(self) -> np.ndarray:
        """Return the smaller image of the whole screen."""
        return small(self.env.state())


def small(view: np.ndarray) -> np.ndarray:
    """Return every eighth pixel, each the brightest of its block: the ball is small."""
    rows, columns = (size // STRIDE * STRIDE for size in view.shape[:2])
    blocks = view[:rows, :columns].reshape(rows // STRIDE, STRIDE, columns // STRIDE, STRIDE, -1)
    return blocks.max((1, 3))


def pong() -> Small:
    """Make Cooperative Pong. Without a render mode, it observes blank screens."""
    from pettingzoo.butterfly import cooperative_pong_v6

    env = cooperative_pong_v6.parallel_env(max_cycles=200, render_mode="rgb_array")
    return Small(env)


def follow(env: Any) -> Callable[[dict], dict]:
    """Return a policy that moves both paddles towards the ball, with some random actions."""
    rng = np.random.default_rng(0)

    def act(_observations: dict) -> dict:
        game = env.unwrapped.env
        actions = {}
        for agent, paddle in zip(env.possible_agents, (game.p0, game.p1), strict=True):
            gap = game.ball._rect.centery - paddle.rects[0].centery  # not public
            best = 0 if abs(gap) < 4 else (1 if gap < 0 else 2)
            actions[agent] = int(rng.integers(3)) if rng.random() < 0.1 else best
        return actions

    return act


def play(env: Any, act: Callable[..., dict], episodes: int, recorder: Any = None) -> list[float]:
    """Return the team's return of each episode."""
    played, returns = recorder or env, []
    for episode in range(episodes):
        observations, _ = played.reset(seed=episode)
        total = 0.0
        while env.agents:
            observations, rewards, *_ = played.step(act(observations))
            total += float(np.mean(list(rewards.values())))
        returns.append(total)
    return returns


def run(command: str) -> None:
    """Run a command of offmarl."""
    subprocess.run([sys.executable, "-m", "offmarl", *command.split()], check=True)


def disk(path: Path) -> int:
    """Return the size of the files in a directory."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def sizes(path: Path) -> None:
    """Print sizes of a vault and its export over the raw bytes, and compare what stock reads."""
    dataset = vault.open_vault(path)
    step = sum(leaf.step_bytes for leaf in dataset.leaves.values())
    final = sum(np.asarray(leaf).nbytes for leaf in _leaves(dataset.finals.observation))
    raw = dataset.num_steps * step + final
    exported = Path(vault.export_dataset(dataset, path.parent / f"{path.name}.zarr", "zarr"))
    numbers = {"vault": disk(path), "zarr export": disk(exported)}
    shown = ", ".join(f"{name} {size / raw:.3f}" for name, size in numbers.items())
    print(f"  {dataset.num_steps} steps, raw {raw / 1e6:.1f} MB; over raw: {shown}", flush=True)
    back = path.parent / "imported.vlt" / "back"
    assert vault.import_dataset(exported, back, "zarr").digest() == dataset.digest()
    for place in (path, back):
        names = {"vault_name": place.parent.name, "vault_uid": place.name}
        stock = Vault(**names, rel_dir=str(place.parents[1].absolute()))
        seen = np.asarray(stock.read().experience["observations"])
        ours = vault.open_vault(place).read(leaves=["observations"])["observations"]
        print(f"  stock flashbax reads {seen.dtype} {seen.shape}, equal: {(seen == ours).all()}")


def _leaves(tree: Any) -> list[Any]:
    return list(tree.values()) if isinstance(tree, dict) else [tree]


def overcooked(directory: Path) -> None:
    """Record, clone and export Overcooked."""
    out = directory / "overcooked"
    tiers = "--tiers random,expert --steps 20000 --eval-episodes 32 --evaluations 10"
    run(f"record mappo --env {OVERCOOKED} {LEARN} {tiers} --out {out}")
    expert = out / f"{OVERCOOKED}.vlt" / "mappo-0-expert"
    run(f"train bc --vault {expert} --updates 2000 --eval-every 2000 --out {out}/bc")
    for name in ("mappo-0-random", "mappo-0-expert"):
        print(
            f"{OVERCOOKED}, {name}: {vault.open_vault(expert.parent / name).episodes.mean_return}"
        )
    sizes(expert)


def cooperative_pong(directory: Path) -> None:
    """Record, clone and export Cooperative Pong."""
    path, env = directory / "pong.vlt", pong()
    rng = np.random.default_rng(1)
    if not path.exists():
        with offmarl.record(env, path) as recorder:
            play(env, follow(env), 60, recorder)
    behaviour = vault.open_vault(path).episodes.mean_return
    random = play(env, lambda _: {a: int(rng.integers(3)) for a in env.agents}, 30)
    run(f"train bc --vault {path} {CLONE} --out {directory}/pong-bc")
    policy = offmarl.envs.PettingZooPolicy(offmarl.load_policy(directory / "pong-bc"), env)

    def act(observations: dict) -> dict:
        return policy(observations, {agent: {} for agent in observations})

    cloned = []
    for episode in range(30):
        policy.reset()
        cloned += play(_Seeded(env, 1000 + episode), act, 1)
    print(f"cooperative_pong: behaviour {behaviour}, clone {np.mean(cloned):.2f} ({len(cloned)})")
    print(f"  random {np.mean(random):.2f}")
    sizes(Path(vault.open_vault(path).path))


class _Seeded(BaseParallelWrapper):
    """Begins every episode with one seed."""

    def __init__(self, env: Any, seed: int):
        super().__init__(env)
        self._seed = seed

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple[dict, dict]:
        """Begin the episode of the seed."""
        del seed
        return self.env.reset(seed=self._seed, options=options)


def main() -> None:
    """Walk through both environments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--only", choices=["overcooked", "pong"])
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    if options.only != "overcooked":
        cooperative_pong(options.directory)
    if options.only != "pong":
        overcooked(options.directory)


if __name__ == "__main__":
    main()
