"""Speed of copying a vault with `offmarl.vault.cat`, against stock flashbax and a file copy.

    python benchmarks/transforms.py [--directory DIR] [--steps N] [--rounds N]

The steps are those of `benchmarks/vault.py`. Stock flashbax reads the whole vault and writes it to
another one, a thousand steps per call. offmarl reads it twice, once for the digest in the lineage,
and syncs.
"""

import argparse
import contextlib
import io
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import flashbax
import jax.numpy as jnp
from flashbax.vault import Vault as StockVault
from vault import SPEC, cut, experience

from offmarl import vault

PART = 1_000


def main(directory: Path, steps: int, rounds: int) -> None:
    source = directory / "source.vlt" / "main"
    with vault.create(source, SPEC, rows=1) as writer:
        part = experience(10_000)
        for start in range(0, steps, 10_000):
            writer.append(cut(part, 0, min(10_000, steps - start)))
    size = vault.open_vault(source).num_bytes or 0
    ways: dict[str, Callable[[Path], object]] = {
        "cat": lambda path: vault.cat([source], path),
        "filter, half": lambda path: vault.filter(source, "index % 2 == 0", path),
        "recode to zstd": lambda path: vault.recode(source, path, codec="zstd"),
        "digest alone": lambda _: vault.open_vault(source).digest(),
        "stock": lambda path: copy_with_stock(source, path),
        "cp and sync": lambda path: copy_files(source, path),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds):
        for name, way in ways.items():
            path = directory / f"{number}-{name.split()[0]}.vlt" / "main"
            begin = time.perf_counter()
            way(path)
            seconds[name].append(time.perf_counter() - begin)
            shutil.rmtree(path.parent, ignore_errors=True)
    stock = median(seconds["stock"])
    for name, times in seconds.items():
        middle = median(times)
        rate, ratio = size / middle / 1e6, stock / middle
        print(f"{name:15} {middle:7.2f} s  {rate:7.0f} MB/s  {ratio:6.1f}x stock")


def copy_with_stock(source: Path, path: Path) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        read = StockVault("source.vlt", rel_dir=str(source.parents[1]), vault_uid="main").read()
        tree = read.experience
        example = {name: tree[name] for name in tree}
        stock = StockVault(
            path.parent.name, example, rel_dir=str(path.parents[1]), vault_uid=path.name
        )
        length = tree["rewards"].shape[1]
        state = flashbax.buffers.trajectory_buffer.TrajectoryBufferState(
            experience=tree, current_index=jnp.array(0), is_full=jnp.array(True)
        )
        for start in range(0, length, PART):
            stock.write(state, source_interval=(start, min(start + PART, length)))


def copy_files(source: Path, path: Path) -> None:
    shutil.copytree(source, path)
    for file in path.rglob("*"):
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as place:
        main(Path(place), given.steps, given.rounds)
