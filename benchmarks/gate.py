"""What the gate for foreign data costs: CPU time beside that of another checkout of offmarl.

    git worktree add ../before d6e64ec
    python benchmarks/gate.py --checkout ../before

Both checkouts do the same work in turns, each in processes of its own, and the least CPU time of
each is compared.
"""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

ROOT = Path(__file__).parents[1]
AGENTS, SIZE, ACTIONS, LENGTH = 8, 48, 9, 100


@dataclass(frozen=True)
class Args:
    """Settings."""

    checkout: Path | None = None
    """Root of the checkout to compare with."""
    rounds: int = 5
    """Processes of each checkout."""
    child: bool = False
    """Do the work once, and print its times."""


def columns(steps: int) -> dict[str, Any]:
    """Return columns for `offmarl.from_arrays`, and what follows each step."""
    rng = np.random.default_rng(0)
    seen = rng.normal(size=(steps, AGENTS, SIZE)).astype(np.float32)
    ends = np.arange(steps) % LENGTH == LENGTH - 1
    legal = np.ones((steps, AGENTS, ACTIONS), bool)
    led_to = np.roll(seen, -1, 0)
    led_to[ends] = 9.0
    return {
        "observations": seen,
        "actions": rng.integers(0, ACTIONS, (steps, AGENTS)),
        "rewards": rng.normal(size=(steps, AGENTS)).astype(np.float32),
        "truncations": ends,
        "legal_actions": legal,
        "next_observations": led_to,
        "next_legal_actions": legal,
    }


def pymarl(path: Path, episodes: int) -> Path:
    """Write episode batches in PyMARL's layout."""
    rng, lead = np.random.default_rng(0), (episodes, LENGTH + 1)
    at_end = np.broadcast_to(np.arange(LENGTH + 1)[None, :, None] == LENGTH - 1, (*lead, 1))
    np.savez(
        path,
        obs=rng.normal(size=(*lead, AGENTS, SIZE)).astype(np.float32),
        state=rng.normal(size=(*lead, 100)).astype(np.float32),
        actions=rng.integers(0, ACTIONS, (*lead, AGENTS, 1)),
        avail_actions=np.ones((*lead, AGENTS, ACTIONS), np.int32),
        reward=rng.normal(size=(*lead, 1)).astype(np.float32),
        terminated=np.ascontiguousarray(at_end, np.uint8),
        filled=np.ones((*lead, 1), np.int64),
    )
    return path


def works(directory: Path) -> dict[str, Callable[[Path], object]]:
    """Return what is timed, by name; each takes the path of a new vault."""
    import offmarl
    from offmarl import vault
    from offmarl.testing import experience
    from offmarl.types import Discrete, EnvSpec

    sys.path.insert(0, str(ROOT))
    from tests.programs.pettingzoo import Duel

    spec = EnvSpec("", AGENTS, SIZE, AGENTS * SIZE, Discrete(ACTIONS))
    steps, finals = experience(spec, 64, 1000, end_every=LENGTH)
    steps.view.legal_actions[...] = True
    arrays, file = columns(40_000), pymarl(directory / "a.npz", 400)
    without = {name: x for name, x in arrays.items() if not name.startswith("next")}

    def append(path: Path) -> None:
        with vault.create(path, spec, rows=64) as writer:
            writer.append(steps, finals)

    def record(path: Path) -> None:
        with offmarl.record(Duel(), path) as recorder:
            for _ in range(300):
                recorder.reset()
                while recorder.env.agents:
                    acts = {"knight": 0, "squire": 10}
                    recorder.step({agent: acts[agent] for agent in recorder.env.agents})

    return {
        "append": append,
        "from_arrays": lambda path: offmarl.from_arrays(path, **without),
        "from_arrays with next observations": lambda path: offmarl.from_arrays(path, **arrays),
        "convert --from pymarl": lambda path: vault.import_dataset(file, path),
        "record an environment that takes no time": record,
    }


def child() -> None:
    """Print the least CPU time of three of each work."""
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    ) as place:
        for name, work in works(Path(place)).items():
            times = []
            for number in range(3):
                path = Path(place) / f"{number}.vlt"
                begin = time.process_time()
                work(path)
                times.append(time.process_time() - begin)
                shutil.rmtree(path)
            print(f"{name}\t{min(times):.4f}")


def measured(checkout: Path) -> dict[str, float]:
    """Run a child on a checkout, and return its times."""
    env = os.environ | {"PYTHONPATH": str(checkout.resolve()), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, str(Path(__file__).resolve()), "--child"]
    lines = subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout
    return {name: float(x) for name, x in (line.split("\t") for line in lines.splitlines())}


def main() -> None:
    """Print the CPU times of both checkouts, and their ratios."""
    args = tyro.cli(Args, description=__doc__)
    if args.child:
        child()
        return
    places = [ROOT, *([args.checkout] if args.checkout else [])]
    times_by_place: list[list[dict[str, float]]] = [[] for _ in places]
    for _ in range(args.rounds):
        for place, times in zip(places, times_by_place, strict=True):
            times.append(measured(place))
    for name in times_by_place[0][0]:
        least = [min(times_by_name[name] for times_by_name in times) for times in times_by_place]
        ratio = f", ratio {least[0] / least[1]:.2f}" if len(least) > 1 else ""
        print(f"{name}: {', '.join(f'{x:.3f}' for x in least)} s{ratio}")


if __name__ == "__main__":
    main()
