"""Damages vaults as disks and networks might, and compares their content."""

import random
import resource
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from offmarl import vault
from offmarl.types import EnvSpec
from offmarl.vault.format.layout import LOCK

from .experience import SPEC, make

STEPS, COMMITS, CHUNK_STEPS = 13, 4, 8


class Content(NamedTuple):
    """Everything that a vault records."""

    digest: str
    facts: tuple[object, ...]


def record(path: Path, codec: str = "raw", spec: EnvSpec = SPEC) -> Path:
    """A small vault of several commits, two runs, final views and provenance."""
    options = {"chunk_steps": CHUNK_STEPS, "codec": codec, "provenance": {"recorder": "x" * 200}}
    with vault.create(path, spec, rows=2, **options) as writer:
        for commit in range(COMMITS):
            writer.append(*make(spec, steps=STEPS, seed=commit), run=f"run {commit // 2}")
            writer.flush()
    return path


def content(path: Path) -> Content:
    dataset = vault.open_vault(path)
    manifest = dataset.manifest
    facts = (dataset.spec, dataset.rows, dataset.length, dataset.provenance, dataset.unverified)
    tables = manifest and (manifest.schema, manifest.head, manifest.running.tobytes())
    return Content(dataset.digest(), (*facts, repr(dataset.episodes), tables))


def damages(path: Path, count: int, seed: int = 0) -> Iterator[str]:
    """Damage a vault's files one at a time, in many ways; each damage is repaired afterwards."""
    rng = random.Random(seed)
    files = [f for f in path.rglob("*") if f.is_file() and f.name != LOCK]
    files.sort(key=lambda f: (f.stat().st_size, f.read_bytes()))  # their names are random
    backup = path.with_name(f"{path.name}.kept")
    shutil.copytree(path, backup)
    for number in range(count):
        file = files[number % len(files)]
        change = damage(file, ("flip", "flip", "flip", "cut", "delete")[rng.randrange(5)], rng)
        yield f"{number}: {file.relative_to(path)} {change}"
        shutil.rmtree(path)
        shutil.copytree(backup, path)
    shutil.rmtree(backup)


def damage(file: Path, kind: str, rng: random.Random) -> str:
    data = bytearray(file.read_bytes())
    if kind == "delete":
        file.unlink()
        return "deleted"
    if kind == "cut":
        size = rng.randrange(len(data))
        file.write_bytes(data[:size])
        return f"cut to {size}"
    bit = rng.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)
    return f"bit {bit} flipped"


@contextmanager
def small_files(size: int) -> Iterator[None]:
    """Let this process write no file beyond a size, as on a full disk.

    Python would also cut short the bytecode of modules that are imported meanwhile.
    """
    writes_none, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
        sys.dont_write_bytecode = writes_none
