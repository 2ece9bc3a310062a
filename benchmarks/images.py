"""Size and speed of vaults and exports of uint8 images, relative to their raw bytes.

    python benchmarks/images.py [--directory DIR] [--steps 4000]

Two agents see images of 64 x 64 x 3 bytes; episodes have 50 steps. The raw bytes are those of all
arrays of a vault, and of one final observation an episode. The reference of speed is the same data
as float32 vectors in the same run: how images had to be stored before leaves had types.
"""

import argparse
import dataclasses
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from offmarl import vault
from offmarl.testing import experience, image_spec
from offmarl.types import EnvSpec, FinalObservations, Transition, map_tree

SHAPE = (64, 64, 3)
SPEC = image_spec("", SHAPE)
FLAT = dataclasses.replace(SPEC, observation=None, observation_size=int(np.prod(SHAPE)))
CALL = 500


def parts(steps: int) -> list[tuple[Transition, FinalObservations]]:
    return [experience(SPEC, 1, CALL, seed, end_every=50.0) for seed in range(steps // CALL)]


def flat(part: tuple[Transition, FinalObservations]) -> tuple[Transition, FinalObservations]:
    """Return steps whose images are float32 vectors."""
    transition, finals = part

    def view(seen):
        images = seen.observation
        vectors = images.reshape(*images.shape[:-3], -1).astype(np.float32)
        return seen._replace(observation=vectors)

    return (
        transition._replace(view=view(transition.view)),
        finals._replace(view=view(finals.view)),
    )


def write(path: Path, spec: EnvSpec, data: list, codec: str = "raw") -> vault.Dataset:
    with vault.create(path, spec, rows=1, codec=codec) as writer:
        for part in data:
            writer.append(*part)
    return vault.open_vault(path)


def windows(found: vault.Dataset, count: int = 200) -> None:
    """Gather batches of 32 windows of 20 steps."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        starts = rng.integers(0, found.length - 20, 32)
        found.window_transitions(np.zeros(32, np.int64), starts, 20)


def timed(function: Callable[[], object]) -> tuple[float, object]:
    start = time.perf_counter()
    result = function()
    return time.perf_counter() - start, result


def disk(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, help="where to write; a temporary one by default")
    parser.add_argument("--steps", type=int, default=4000)
    options = parser.parse_args()
    data = parts(options.steps)
    with tempfile.TemporaryDirectory(dir=options.directory) as name:
        root = Path(name)
        wrote, images = timed(lambda: write(root / "images.vlt", SPEC, data))
        vectors = [flat(part) for part in data]
        wrote_flat, floats = timed(lambda: write(root / "floats.vlt", FLAT, vectors))
        finals = map_tree(lambda leaf: leaf.nbytes, images.finals)
        step = sum(leaf.step_bytes for leaf in images.leaves.values())
        raw = images.num_steps * step + finals.observation
        print(f"raw bytes: {raw / 1e6:.1f} MB, {images.num_steps} steps of {step} bytes")
        print(f"{'vault, raw codec':24} {disk(images.path) / raw:6.3f} x raw bytes")
        print(f"{'vault of float32':24} {disk(floats.path) / raw:6.3f} x raw bytes")
        for layout, suffix in (("numpy", ".npz"), ("zarr", ".zarr")):
            path = vault.export_dataset(images, root / f"out{suffix}", layout)
            print(f"{'export to ' + layout:24} {disk(Path(path)) / raw:6.3f} x raw bytes")
        read, _ = timed(lambda: windows(images))
        read_flat, _ = timed(lambda: windows(floats))
        for title, first, second in (
            ("write", wrote, wrote_flat),
            ("200 x 32 windows of 20", read, read_flat),
        ):
            print(f"{title:24} {first:6.2f} s, {second / first:5.2f} x faster than float32")


if __name__ == "__main__":
    main()
