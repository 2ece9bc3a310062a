"""Batches for any learner: streams and data loaders, beside gathers from memory and Grain.

    python benchmarks/learners.py [--steps 200000] [--seconds 1.0]

Batches of windows of 20 steps, of 1360 bytes a step, in batches a second, each way in turn:

gather numpy, torch    of all leaves, from arrays in memory, by index: the fastest there is
grain memory           Grain over single windows that are cut from arrays in memory
grain window_items     Grain over offmarl's windows by number
stream numpy, ...      `Dataset.stream(to=...)`, two threads
loader 0, 2, ...       PyTorch's DataLoader over `torch_batches`; workers are forked
windows 2              DataLoader over `torch_windows`, shuffled by PyTorch

Reads of the vault are checked. Ratios are to the gather of NumPy arrays in the same round.
"""

import itertools
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import grain
import numpy as np
import torch
import tyro
from torch.utils.data import DataLoader

import offmarl
from offmarl import testing, vault
from offmarl.types import Discrete, EnvSpec, flatten_tree, map_tree
from offmarl.vault import Dataset

LENGTH = 20
SPEC = EnvSpec("1360 bytes", 8, 35, 20, Discrete(5))

Batches = Iterator[Any]


@dataclass(frozen=True)
class Args:
    steps: int = 200_000
    """Steps of the data."""
    seconds: float = 1.0
    """Time of a measurement."""
    rounds: int = 5
    """Measurements of each way, in turn."""
    batch: tuple[int, ...] = (32, 256)
    """Windows in a batch."""


class Arrays(NamedTuple):
    """All leaves of a vault in memory, and how many steps windows may start at."""

    leaves: dict[str, Any]
    starts: int


def in_memory(dataset: Dataset) -> Arrays:
    """Read all leaves of a vault of one row, ``(T, ...)`` each."""
    steps = map_tree(lambda leaf: np.ascontiguousarray(leaf[0]), dataset.transitions())
    leaves = {
        f"{field}.{name}": leaf
        for field, value in (steps.view._asdict() | steps._asdict()).items()
        if field != "view" and value is not None
        for name, leaf in flatten_tree(value).items()
    }
    return Arrays(leaves, dataset.length - LENGTH)


def gather(arrays: Arrays, batch: int, xp: Any) -> Batches:
    """Gather windows by index from arrays of NumPy or torch."""
    rng = np.random.default_rng(0)
    asarray = torch.from_numpy if xp is torch else np.asarray
    leaves = {name: asarray(leaf) for name, leaf in arrays.leaves.items()}
    inside = np.arange(LENGTH + 1)
    while True:
        index = asarray(rng.integers(0, arrays.starts, batch)[:, None] + inside)
        yield {name: leaf[index] for name, leaf in leaves.items()}


class MemoryWindows:
    """Single windows of arrays in memory, as a source for Grain."""

    def __init__(self, arrays: Arrays):
        self._arrays = arrays

    def __len__(self) -> int:
        return self._arrays.starts

    def __getitem__(self, start: int) -> dict[str, Any]:
        leaves = self._arrays.leaves.items()
        return {name: leaf[start : start + LENGTH + 1] for name, leaf in leaves}


def with_grain(source: Any, batch: int) -> Batches:
    pipeline = grain.MapDataset.source(source).shuffle(seed=0).repeat().batch(batch)
    return iter(pipeline.to_iter_dataset(grain.ReadOptions(num_threads=2, prefetch_buffer_size=16)))


def ways(dataset: Dataset, arrays: Arrays, batch: int, stack: ExitStack) -> dict[str, Any]:
    """Return what makes each way's batches, by name."""

    def stream(to: Any) -> Batches:
        return stack.enter_context(dataset.stream(batch, LENGTH, to=to))

    def load(workers: int, data: Any, **options: Any) -> Batches:
        if workers:
            options |= {"multiprocessing_context": "fork"}
        return itertools.chain.from_iterable(
            itertools.repeat(DataLoader(data, num_workers=workers, **options))
        )

    batches = dataset.torch_batches(batch, LENGTH)
    windows = dataset.torch_windows(LENGTH)
    return {
        "gather numpy": lambda: gather(arrays, batch, np),
        "gather torch": lambda: gather(arrays, batch, torch),
        "grain memory": lambda: with_grain(MemoryWindows(arrays), batch),
        "grain window_items": lambda: with_grain(dataset.window_items(LENGTH), batch),
        "loader 0": lambda: load(0, batches, batch_size=None),
        "loader 2": lambda: load(2, batches, batch_size=None),
        "windows 2": lambda: load(2, windows, batch_size=batch, shuffle=True, drop_last=True),
        "stream numpy": lambda: stream("numpy"),
        "stream torch": lambda: stream("torch"),
        "stream jax": lambda: stream("jax"),  # last: JAX's threads start with it
    }


def rate(batches: Batches, seconds: float) -> float:
    """Return how many batches a second there are, of those taken in some time."""
    begin, count = time.perf_counter(), 0
    while (elapsed := time.perf_counter() - begin) < seconds:
        next(batches)
        count += 1
    return count / elapsed


def measure(dataset: Dataset, arrays: Arrays, batch: int, args: Args) -> dict[str, list[float]]:
    """Measure each way alone: what gathers ahead would slow the others down."""
    times: dict[str, list[float]] = {}
    for _ in range(args.rounds):
        for name in ways(dataset, arrays, batch, ExitStack()):
            with ExitStack() as stack:
                batches = ways(dataset, arrays, batch, stack)[name]()
                rate(batches, args.seconds / 2)  # warm: workers start, chunks are compared
                times.setdefault(name, []).append(rate(batches, args.seconds))
                del batches
    return times


def main(args: Args) -> None:
    warnings.filterwarnings("ignore", ".*fork")
    torch.set_num_threads(1)  # as in workers: more of them wait for each other
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "data.vlt")
        with vault.create(path, SPEC, rows=1) as writer:
            for seed in range(-(-args.steps // 10_000)):
                writer.append(*testing.experience(SPEC, 1, 10_000, seed, 100.0))
        dataset = offmarl.open(path)
        arrays = in_memory(dataset)
        size = sum(leaf.nbytes for leaf in arrays.leaves.values())
        print(
            f"{dataset.num_steps:,} steps, {size / dataset.num_steps:,.0f} bytes a step in memory"
        )
        for batch in args.batch:
            times = measure(dataset, arrays, batch, args)
            print(f"\n{f'batches of {batch}':<20}{'a second':>10}{'of numpy':>10}{'of grain':>10}")
            for name, rates in times.items():
                pairs = zip(rates, times["gather numpy"], times["grain memory"], strict=True)
                of_numpy, of_grain = zip(*((x / y, x / z) for x, y, z in pairs), strict=True)
                print(
                    f"{name:<20}{median(rates):>10,.0f}{median(of_numpy):>10.2f}"
                    f"{median(of_grain):>10.2f}"
                )


if __name__ == "__main__":
    main(tyro.cli(Args))
