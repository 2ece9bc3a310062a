"""Damages vaults as disks and networks might, forges them, and compares their content."""

import json
import random
import resource
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from offmarl import vault
from offmarl.types import EnvSpec
from offmarl.vault.format import layout, tables
from offmarl.vault.format.layout import LOCK, METADATA
from offmarl.vault.storage import commit
from offmarl.vault.storage.store import Directory, store_of

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


def put(path: Path, values: Mapping[str, bytes | bytearray | dict[str, Any]]) -> None:
    """Write values directly to the store, and dictionaries as JSON."""
    encoded = {k: layout.dump_json(v) if isinstance(v, dict) else v for k, v in values.items()}
    store_of(path).commit(encoded, fence={}).result()


def change(path: Path, key: str, **fields: Any) -> None:
    """Change fields of a JSON object in the store."""
    put(path, {key: store_of(path).get_json(key) | fields})


def remove(path: Path, *keys: str | bytes) -> None:
    """Remove keys from the store."""
    for key in keys:
        store_of(path)._kv.write(key, None).result()


def change_episode(path: Path, field: str, value: Any, number: int = 0) -> None:
    """Change a field of an episode of the first table."""
    key = layout.episodes_key(0)
    records = np.frombuffer(store_of(path).get(key), tables.dtype(2, 2)).copy()
    records[field][number] = value
    put(path, {key: records.tobytes()})


def change_metadata(path: Path, function: Callable[[Any], object]) -> None:
    """Let a function change the content of metadata.json."""
    metadata = json.loads((path / METADATA).read_text())
    function(metadata)
    (path / METADATA).write_text(json.dumps(metadata))


def make_foreign(path: Path) -> None:
    """Remove offmarl's own keys, so that metadata.json is the only description."""
    remove(path, *store_of(path).keys(layout.OWN_PREFIX))


def documents(path: Path) -> dict[str, dict[str, Any]]:
    """Return the descriptions of all arrays but the index, by key."""
    keys = [key for key in store_of(path).keys("") if key.endswith(".zarray")]
    return {k: store_of(path).get_json(k) for k in keys if not k.startswith(layout.INDEX_PREFIX)}


def flip(path: Path, key: str, offset: int = 0) -> None:
    """Flip a bit of a stored value, in its data file."""
    place = commit.current_tree(Directory(path)).values[key]
    data = bytearray((path / place.file).read_bytes())
    data[place.offset + offset] ^= 1
    (path / place.file).write_bytes(data)


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
