"""Batches a second from a vault on disk, on a second pass, beside a gather of tensors in memory.

    python benchmarks/streams.py [--steps 500000] [--directory DIR] [--episode 50]

Each step has 1360 bytes of observations, states, actions, rewards, ends and legal actions. Streams
also carry next views, masks and log-probabilities. The first pass, in which each chunk is compared
with its checksum, is not measured. The gather indexes torch tensors that hold the same leaves.
Run it on one core with ``taskset -c 0``.
"""

import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch
import tyro
from vault import SPEC, experience

import offmarl
from offmarl import vault
from offmarl.types import Transition

WINDOW = 20


@dataclass(frozen=True)
class Args:
    steps: int = 500_000
    """Steps of the vault."""
    episode: int = 50
    """Steps of an episode."""
    directory: Path | None = None
    """Where to write; a temporary one by default."""
    seconds: float = 2.0
    """Time of each measurement."""
    rounds: int = 3
    """Measurements of each way, in turn."""


def write(path: Path, args: Args) -> Any:
    steps = 2**14 // args.episode * args.episode
    made: Transition = experience(steps)
    last = np.arange(steps)[None] % args.episode == args.episode - 1
    ends = np.repeat(last[..., None], SPEC.num_agents, -1)
    made = made._replace(last=last, terminated=ends)
    with vault.create(path, SPEC, rows=1) as writer:
        while writer.length < args.steps:
            writer.append(made)
    return offmarl.open(path)


def streamed(dataset: Any, batch: int, to: Any) -> Iterator[Any]:
    with dataset.stream(batch, WINDOW, to=to) as stream:
        for arrays in stream:
            yield jax.block_until_ready(arrays) if to == "jax" else arrays


def gathered(tensors: list[torch.Tensor], batch: int) -> Iterator[Any]:
    rng = np.random.default_rng(0)
    while True:
        starts = torch.from_numpy(rng.integers(0, len(tensors[0]) - WINDOW, batch))
        index = starts[:, None] + torch.arange(WINDOW)
        yield [tensor[index] for tensor in tensors]


def rate(batches: Iterator[Any], seconds: float) -> float:
    """Return the batches a second."""
    for _ in itertools.islice(batches, 50):
        pass
    count, start = 0, time.perf_counter()
    while time.perf_counter() - start < seconds:
        next(batches)
        count += 1
    return count / (time.perf_counter() - start)


def report(dataset: Any, tensors: list[torch.Tensor], batch: int, args: Args) -> None:
    ways: dict[str, Callable[[], Iterator[Any]]] = {
        "jax": lambda: streamed(dataset, batch, "jax"),
        "numpy": lambda: streamed(dataset, batch, "numpy"),
        "torch": lambda: streamed(dataset, batch, "torch"),
        "tensors in memory": lambda: gathered(tensors, batch),
    }
    by_way: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.rounds):
        for name, way in ways.items():
            with closing(way()) as batches:
                by_way[name].append(rate(batches, args.seconds))
    rates = {name: float(np.median(some)) for name, some in by_way.items()}
    each = ", ".join(f"{name} {value:,.0f}" for name, value in rates.items())
    ratio = rates["jax"] / rates["tensors in memory"]
    print(f"batches of {batch} a second: {each}; jax / tensors {ratio:.2f}")


def main(args: Args) -> None:
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        dataset = write(Path(name) / "s.vlt", args)
        leaves = ["observations", "infos.state", "actions", "rewards", "terminals"]
        leaves += ["truncations", "infos.legals"]
        tensors = [torch.from_numpy(x[0].copy()) for x in dataset.read(leaves=leaves).values()]
        for batch in (256, 32):  # the first pass
            for _ in itertools.islice(streamed(dataset, batch, "numpy"), args.steps // batch // 5):
                pass
        for batch in (256, 32):
            report(dataset, tensors, batch, args)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
