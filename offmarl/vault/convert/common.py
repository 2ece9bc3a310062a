"""What readers and writers of foreign formats share."""

import hashlib
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from os import PathLike
from pathlib import Path, PurePath
from typing import Any, NamedTuple, TypeVar

import numpy as np

from offmarl.errors import (
    MissingExtraError,
    ShapeError,
    VaultError,
    VaultNotFoundError,
)
from offmarl.types import EnvSpec, FinalObservations, Transition, View
from offmarl.vault import atomic
from offmarl.vault.creation import create_whole
from offmarl.vault.layout import Codec, NumpyArray
from offmarl.vault.progress import Progress
from offmarl.vault.system import errors_of

StrPath = str | PathLike[str]
Item = TypeVar("Item")

BLOCK_BYTES = 2**25
"""About how much of a foreign dataset is in memory at once."""


class Record(NamedTuple):
    """Some steps of one row, the final views in them, and where the recording cut them off."""

    steps: Transition
    finals: FinalObservations | None = None
    cut: NumpyArray | bool = False
    """``(1, T)``"""


def write_vault(
    path: StrPath,
    spec: EnvSpec,
    source: dict[str, Any],
    records: Iterable[Record],
    codec: Codec,
) -> PurePath:
    """Write records end to end to a vault of one row that appears whole or not at all."""
    about = {"source": source}
    with create_whole(
        path, spec, rows=1, provenance=about, codec=codec, on_invalid="keep"
    ) as writer:
        for record in records:
            writer.append(record.steps, record.finals, cut=record.cut)
    return writer.path


def counted(items: Iterable[Item], total: int, progress: Progress) -> Iterator[Item]:
    """Yield items, and tell of each."""
    with progress("convert", total) as advance:
        for item in items:
            yield item
            advance(1)


def require(module: str) -> Any:
    """Import a package that only some formats need; `MissingExtraError` where it is not there."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"this format needs {module}, which is not installed: run "
            "`pip install 'offmarl[convert]'`."
        ) from error


@contextmanager
def readable(what: object) -> Iterator[None]:
    """Turn what a damaged file raises into an error of ours."""
    try:
        yield
    except FileNotFoundError as error:
        raise VaultNotFoundError(f"there is no {error.filename or what} to convert.") from error
    except (
        zipfile.BadZipFile,
        zlib.error,
        EOFError,
        ValueError,
        OSError,
        RuntimeError,  # of HDF5's library; and documents nested too deep for the parser
    ) as error:
        raise VaultError(f"{what} is damaged, incomplete or of another format: {error}") from error


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield where to write what takes its place when the block ends; errors are ours."""
    with errors_of(path), atomic.whole(path) as beside:
        yield beside


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, or of the names and contents of those in a directory."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    total = hashlib.sha256()
    for below in sorted(path.rglob("*")):
        if below.is_file():
            total.update(f"{below.relative_to(path)}:{sha256(below)}\n".encode())
    return total.hexdigest()


def check_layout(source: object, layout: str, found: Iterable[str], needed: Iterable[str]) -> None:
    """Raise `VaultError` where arrays are missing that a layout has."""
    names = sorted(found)
    missing = [name for name in needed if name not in names]
    if missing:
        raise VaultError(
            f"{source} is not of {layout} layout: it has no {', '.join(missing)}, only "
            f"{', '.join(names) or 'nothing'}."
        )


def check_spec(found: EnvSpec, wanted: EnvSpec | None) -> EnvSpec:
    """Return the spec that was named, or else found; `ShapeError` where they contradict."""
    if wanted is None:
        return found
    if difference := found.difference(wanted):
        raise ShapeError(
            f"the data and {wanted.name or 'the environment'} differ in {difference}: name the "
            "environment that the data is from."
        )
    return wanted


def plain(array: NumpyArray, name: str) -> NumpyArray:
    """Return an array of numbers; `VaultError` where it holds Python objects."""
    if array.dtype.hasobject or array.dtype.kind not in "biuf":
        raise VaultError(f"the array {name!r} holds {array.dtype}, not numbers: it is not read.")
    return array


def blocks(steps: int, step_bytes: int) -> list[tuple[int, int]]:
    """Cut so many steps into intervals that fit in memory."""
    size = max(1, BLOCK_BYTES // max(step_bytes, 1))
    return [(start, min(steps, start + size)) for start in range(0, steps, size)]


def load_npy(path: Path) -> NumpyArray:
    """Map a ``.npy`` file into memory; never a pickle."""
    with readable(path):
        return plain(np.load(path, mmap_mode="r", allow_pickle=False), path.name)


def with_final(views: View, final: View) -> View:
    """Put an episode's final view behind the others, ``(T+1, ...)``."""
    joined: list[NumpyArray] = [
        np.concatenate([x, y[None]]) for x, y in zip(views, final, strict=True)
    ]
    return View(*joined)
