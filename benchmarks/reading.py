"""Speed of reading vaults, relative to stock flashbax, to NumPy arrays in memory, and to the disk.

    python benchmarks/reading.py [--size 8] [--directory DIR] [--only stock|large|checked]
        [--out benchmarks/results/vaults.json]

"checked" compares reads with and without comparison with checksums (with is the default).

The vaults have eight agents, one row, and 1360 bytes of observations, actions, rewards and ends per
step. Each measurement runs in a new process. `--size` is the size of the large vault in GB; it is
deleted afterwards. Linux only.
"""

import argparse
import contextlib
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from vault import SPEC, experience, open_stock, write_ours, write_stock

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Row, measured, write
from offmarl import vault

STEPS = 100_000
WINDOW = 20
BATCH = 256
BATCHES = 40
COLD_BATCHES = 8
ROUNDS = 11
DATA_LIMIT = 2 * 10**9
LEAVES = ["observations", "actions", "rewards", "terminals", "truncations"]
LEAVES += ["infos.state", "infos.legals"]  # what stock has too


def median(function: Callable[[], object], repeat: int, rounds: int = 5) -> float:
    """Return the seconds of a call: the median of some rounds."""
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(repeat):
            function()
        times.append((time.perf_counter() - start) / repeat)
    return float(np.median(times))


def peak() -> int:
    """Return the peak resident memory of this process in bytes, including mapped files."""
    (line,) = (x for x in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in x)
    return int(line.split()[1]) * 1024


# ------------------------------------------------------------------- one process a measurement


def ours(path: Path) -> dict[str, float]:
    dataset = vault.open_vault(path)
    starts = iter(np.random.default_rng(0).integers(0, STEPS - WINDOW, 100_000).tolist())

    def window() -> None:
        start = next(starts)
        dataset.read(start, start + WINDOW, leaves=LEAVES)

    before = peak()
    arrays = dataset.read(leaves=LEAVES)
    returned = sum(array.nbytes for array in arrays.values())
    grown = peak() - before
    del arrays
    return {
        "returned": returned,
        "peak": grown,
        "read": median(lambda: dataset.read(leaves=LEAVES), 1),
        "window": median(window, 500),
    }


def stock(path: Path) -> dict[str, float]:
    with contextlib.redirect_stdout(io.StringIO()):  # stock prints
        buffer = open_stock(path)
        before = peak()
        buffer.read()
        grown = peak() - before
        return {
            "peak": grown,
            "read": median(buffer.read, 1),
            "window": median(lambda: buffer.read(timesteps=WINDOW), 10),
        }


def starts_in(length: int, seed: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, length - WINDOW, BATCH) for _ in range(BATCHES)]


def warm(path: Path) -> dict[str, float]:
    """Measure random windows with a small heap limit, and the whole vault in the page cache."""
    resource.setrlimit(resource.RLIMIT_DATA, (DATA_LIMIT, DATA_LIMIT))
    dataset = vault.open_vault(path)
    start = time.perf_counter()
    row = np.zeros(BATCH, np.int64)
    dataset.windows(row, row, WINDOW, LEAVES)
    opened = time.perf_counter() - start
    batches = starts_in(dataset.length, 0)

    def draw() -> None:
        for starts in batches:
            dataset.windows(row, starts, WINDOW, LEAVES)

    draw()
    return {"open": opened, "window": median(draw, 1) / (BATCH * BATCHES)}


def memory(path: Path) -> dict[str, float]:
    """Measure the same from NumPy arrays of 2 GB, many times the size of the processor's cache."""
    dataset = vault.open_vault(path)
    arrays = {
        k: v[0] for k, v in dataset.read(0, min(dataset.length, 1_500_000), leaves=LEAVES).items()
    }
    batches = starts_in(len(arrays["rewards"]), 0)

    def gather() -> None:
        for starts in batches:
            index = starts[:, None] + np.arange(WINDOW)
            for array in arrays.values():
                array[index]

    def slices() -> None:
        for starts in batches:
            for array in arrays.values():
                np.stack([array[start : start + WINDOW] for start in starts.tolist()])

    windows = BATCH * BATCHES
    return {"gather": median(gather, 1) / windows, "slices": median(slices, 1) / windows}


def drop_cache(path: Path) -> None:
    for file in (path / "d").iterdir():
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def cold(path: Path) -> dict[str, float]:
    drop_cache(path)
    dataset = vault.open_vault(path)
    row = np.zeros(BATCH, np.int64)
    dataset.windows(row, row, WINDOW, LEAVES)
    batches = starts_in(dataset.length, 1)[:COLD_BATCHES]
    start = time.perf_counter()
    for starts in batches:
        dataset.windows(row, starts, WINDOW, LEAVES)
    return {"plain": (time.perf_counter() - start) / (BATCH * COLD_BATCHES)}


def disk(path: Path) -> dict[str, float]:
    """Measure reads of the sizes of windows, at random places of the same files."""
    dataset = vault.open_vault(path)
    sizes = [dataset.leaves[name].step_bytes * WINDOW for name in LEAVES]
    files = [file for file in (path / "d").iterdir() if file.stat().st_size > 2**20]
    opened = [os.open(file, os.O_RDONLY) for file in files]
    for descriptor in opened:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)
    lengths = np.array([file.stat().st_size for file in files])
    rng = np.random.default_rng(3)

    def places(windows: int) -> list[tuple[int, int, int]]:
        numbers = rng.choice(len(files), windows * len(sizes), p=lengths / lengths.sum())
        offsets = (rng.random(len(numbers)) * (lengths[numbers] - max(sizes))).astype(int)
        each = np.tile(sizes, windows)
        return [(opened[f], int(n), int(o)) for f, n, o in zip(numbers, each, offsets, strict=True)]

    def timed(read: Callable[[list[tuple[int, int, int]]], Any]) -> float:
        drop_cache(path)
        ranges = places(BATCH * COLD_BATCHES)
        start = time.perf_counter()
        read(ranges)
        return (time.perf_counter() - start) / (BATCH * COLD_BATCHES)

    with ThreadPoolExecutor(32) as pool:
        return {
            "one": timed(lambda wanted: [os.pread(*place) for place in wanted]),
            "many": timed(lambda wanted: list(pool.map(lambda p: os.pread(*p), wanted))),
        }


def checked(path: Path) -> dict[str, float]:
    """Measure reads with and without checksums in turns; all data is in the page cache."""
    by_name: dict[str, list[float]] = {}
    batches = starts_in(vault.open_vault(path).length, 4)
    row = np.zeros(BATCH, np.int64)

    def timed(name: str, function: Callable[[], object]) -> None:
        start = time.perf_counter()
        function()
        by_name.setdefault(name, []).append(time.perf_counter() - start)

    def opened_as(name: str) -> vault.Dataset:
        """Open the vault again and map its files, which is not part of the measurement."""
        opened = vault.open_vault(path, checked=name == "checked")
        opened.prepare_fork()
        return opened

    def sequential(opened: vault.Dataset) -> None:
        for start, stop in opened.blocks(LEAVES):
            opened.read(start, stop, leaves=LEAVES)

    def draw(opened: vault.Dataset) -> None:
        for starts in batches:
            opened.windows(row, starts, WINDOW, LEAVES)

    sequential(vault.open_vault(path, checked=False))
    for number in range(ROUNDS):
        order = ("plain", "checked") if number % 2 else ("checked", "plain")
        opened = {name: opened_as(name) for name in order}
        for name in order:
            timed(f"{name} sequential", partial(sequential, opened[name]))
        for name in order:
            draw(opened[name])
        for name in (*order, *order[::-1]):
            timed(f"{name} windows", partial(draw, opened[name]))
        for name in order:
            fresh = opened_as(name)
            timed(f"{name} first", partial(fresh.windows, row, batches[0], WINDOW, LEAVES))
            fresh, start = opened_as(name), batches[1][:1]
            timed(f"{name} single", partial(fresh.windows, row[:1], start, WINDOW, LEAVES))
    return {name: float(np.median(times)) for name, times in by_name.items()}


def replays(path: Path) -> dict[str, float]:
    """Measure the seconds of a batch of 32 windows, from the device and from the disk."""
    import jax

    import offmarl

    dataset, key = offmarl.open(path), jax.random.key(0)
    replay, sample = dataset.replay(32, WINDOW), jax.jit(lambda replay, key: replay.sample(key))
    steps = iter(range(10**6))
    with dataset.stream(32, WINDOW) as stream:
        return {
            "device": median(
                lambda: jax.block_until_ready(sample(replay, jax.random.fold_in(key, next(steps)))),
                100,
            ),
            "stream": median(lambda: jax.block_until_ready(next(stream)), 100),
        }


MEASUREMENTS = {f.__name__: f for f in (ours, stock, warm, memory, cold, disk, replays, checked)}


def measure(name: str, path: Path) -> dict[str, float]:
    command = [sys.executable, __file__, "--measure", name, "--path", str(path)]
    return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


# ------------------------------------------------------------------- the report


def write_large(path: Path, size: float) -> None:
    steps, step_bytes = 2**15, 1360
    data = experience(steps)
    with vault.create(path, SPEC, rows=1) as writer:
        while writer.length * step_bytes < size * 1e9:
            writer.append(data)


def report_stock(root: Path) -> list[Row]:
    data = experience(STEPS)
    write_ours(root / "ours.vlt" / "r", data, 50_000, flush=False)
    with contextlib.redirect_stdout(io.StringIO()):
        write_stock(root / "stock.vlt" / "r", data, 50_000)
    mine, theirs = (
        measure("ours", root / "ours.vlt" / "r"),
        measure("stock", root / "stock.vlt" / "r"),
    )
    print(f"against stock, {STEPS:,} steps     offmarl      stock  stock/offmarl")
    for name, unit, title in (
        ("read", 1e3, "read all, ms"),
        ("window", 1e3, f"window of {WINDOW}, ms"),
        ("peak", 1e-6, "peak of read all, MB"),
    ):
        ratio = theirs[name] / mine[name]
        print(f"{title:24} {mine[name] * unit:14.3f} {theirs[name] * unit:10.2f} {ratio:10.1f}x")
    print(f"offmarl's peak over the bytes returned: {mine['peak'] / mine['returned']:.2f}")
    took = measure("replays", root / "ours.vlt" / "r")
    print(f"batch of 32 windows, ms: device {1e3 * took['device']:.2f}, stream", end=" ")
    print(f"{1e3 * took['stream']:.2f}")
    read, window = (theirs[name] / mine[name] for name in ("read", "window"))
    return [
        measured(
            __file__,
            f"read of {STEPS:,} steps, a window of {WINDOW} steps",
            f"{read:.1f}, {window:.0f} times as fast",
            peer="stock flashbax",
        )
    ]


def report_large(path: Path, size: float) -> None:
    write_large(path, size)
    cached, array = measure("warm", path), measure("memory", path)
    fast = min(array.values())
    print(f"\nwindows of {WINDOW} of {size:g} GB, batches of {BATCH}, microseconds a window")
    print(f"mapped, RLIMIT_DATA 2 GB, warm   {1e6 * cached['window']:10.1f}")
    print(f"NumPy in memory, index arrays    {1e6 * array['gather']:10.1f}")
    print(f"NumPy in memory, slices          {1e6 * array['slices']:10.1f}")
    print(f"mapped / the faster of these     {cached['window'] / fast:10.2f}")
    print(f"making the map took              {1e3 * cached['open']:10.0f} ms")
    away, raw = measure("cold", path), measure("disk", path)
    print(f"mapped, cold                     {1e6 * away['plain']:10.1f}")
    print(f"the disk, one read at a time     {1e6 * raw['one']:10.1f}")
    print(f"the disk, 32 at a time           {1e6 * raw['many']:10.1f}")


def report_checked(path: Path, size: float) -> list[Row]:
    write_large(path, size)
    took = measure("checked", path)
    print(f"\nreads of {size:g} GB compared with checksums, and not, page cache warm")
    print(f"{'':38} checked    plain   ratio")
    for name, title, unit in (
        ("sequential", "first sequential read, ms", 1e3),
        ("windows", f"{BATCHES} batches of {BATCH} windows, warm, ms", 1e3),
        ("first", f"first batch of {BATCH} windows, ms", 1e3),
        ("single", "first single window, ms", 1e3),
    ):
        mine, plain = took[f"checked {name}"], took[f"plain {name}"]
        print(f"{title:36} {mine * unit:9.2f} {plain * unit:8.2f} {mine / plain:7.2f}")
    ratio = {
        name: took[f"checked {name}"] / took[f"plain {name}"]
        for name in ("sequential", "windows", "first", "single")
    }
    return [
        measured(
            __file__,
            f"first sequential read of {size:g} GB, checked beside unchecked",
            f"{1e3 * took['checked sequential']:.0f} ms",
            peer=f"unchecked {1e3 * took['plain sequential']:.0f} ms",
            ratio=f"{ratio['sequential']:.2f}",
            aim="1.3",
            met=ratio["sequential"] <= 1.3,
        ),
        measured(
            __file__,
            f"{BATCHES} batches of {BATCH} windows, warm, checked over unchecked",
            f"{ratio['windows']:.2f}",
        ),
        measured(
            __file__,
            f"first batch of {BATCH} windows, first window, checked over unchecked",
            f"{ratio['first']:.1f}; {ratio['single']:.1f}",
        ),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, help="where to write; a temporary one by default")
    parser.add_argument("--size", type=float, default=8, help="of the large vault, in GB")
    parser.add_argument("--measure", choices=MEASUREMENTS, help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="file of results that takes the rows")
    parser.add_argument("--only", choices=("stock", "large", "checked"), help="of the reports")
    args = parser.parse_args()
    if args.measure:
        print(json.dumps(MEASUREMENTS[args.measure](args.path)))
        return
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        path = Path(name) / "large.vlt" / "main"
        if args.only in (None, "stock"):
            rows += report_stock(Path(name))
        if args.only in (None, "large"):
            report_large(path, args.size)
        if args.only in (None, "checked"):
            rows += report_checked(path.with_name("checked"), min(args.size, 1.0))
    if args.out:
        write(args.out, rows)


if __name__ == "__main__":
    main()
