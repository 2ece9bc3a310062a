"""Functions that readers and writers of foreign layouts share.

A foreign dataset could make a reader copy other files of this machine into a vault that may be
published, a private key for instance: an HDF5 file can take bytes from other files (external
storage), objects (external links) and slices (virtual datasets), and a folder can hold links. Such
datasets are refused.
"""

import hashlib
import io
import os
import stat
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

import numpy as np

from offmarl.errors import MissingExtraError, ShapeError, VaultError, VaultNotFoundError
from offmarl.terminal import Progress
from offmarl.types import EnvSpec, View, map_tree
from offmarl.vault import files
from offmarl.vault.compat import FAULTS, sentences
from offmarl.vault.convert.admission import Record, Tally
from offmarl.vault.convert.kinds import reason_of
from offmarl.vault.files import errors_of
from offmarl.vault.layout import NumpyArray
from offmarl.vault.writer import Writer

StrPath = str | os.PathLike[str]
Item = TypeVar("Item")

HDF5 = (".h5", ".hdf5")
"""Suffixes of HDF5 files."""

BLOCK_BYTES = 2**25
"""Approximate size of the part of a foreign dataset that is in memory at once."""


class Imported(NamedTuple):
    """An open foreign dataset, as its reader presents it."""

    spec: EnvSpec
    origin: dict[str, Any]
    """Where it comes from, for the provenance."""
    records: Iterable[Record]
    """The data, which goes end to end into one row."""
    total: int
    """The number of records."""
    digest: str | None = None
    """The digest that the vault must have, if the dataset records it."""


# ---------------------------------------------------------------------------------- reading


def require(module: str) -> Any:
    """Import a package that only some layouts need; `MissingExtraError` if it is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        raise MissingExtraError(
            f"this format needs {module}, which is not installed: run "
            "`pip install 'offmarl[convert]'`."
        ) from error


@contextmanager
def readable(what: object) -> Iterator[None]:
    """Turn the errors of reading a damaged file into `VaultError`."""
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
        RuntimeError,  # of the HDF5 library, and of JSON that is nested too deep
    ) as error:
        reason = reason_of(what, error)
        raise VaultError(f"{what} is damaged, incomplete or of another format: {reason}") from error


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, or of the names and contents of a directory's files."""
    if path.is_file():
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    total = hashlib.sha256()
    for below in sorted(path.rglob("*")):
        if below.is_file():
            total.update(f"{below.relative_to(path)}:{sha256(below)}\n".encode())
    return total.hexdigest()


def check_layout(source: object, layout: str, found: Iterable[str], needed: Iterable[str]) -> None:
    """Raise `VaultError` if arrays of a layout are missing."""
    names = sorted(found)
    missing = [name for name in needed if name not in names]
    if missing:
        raise VaultError(
            f"{source} is not of {layout} layout: it has no {', '.join(missing)}, only "
            f"{', '.join(names) or 'nothing'}."
        )


def check_spec(found: EnvSpec, wanted: EnvSpec | None) -> EnvSpec:
    """Return the wanted spec, or else the found one; `ShapeError` if they contradict."""
    if wanted is None:
        return found
    if difference := found.difference(wanted):
        raise ShapeError(
            f"the data and {wanted.name or 'the environment'} differ in {difference}: name the "
            "environment that the data is from."
        )
    return wanted


def plain(array: NumpyArray, name: str) -> NumpyArray:
    """Return an array of numbers; `VaultError` if it holds Python objects or text."""
    if array.dtype.hasobject or array.dtype.kind not in "biuf":
        raise VaultError(f"the array {name!r} holds {array.dtype}, not numbers: it was not read.")
    return array


def blocks(steps: int, step_bytes: int) -> list[tuple[int, int]]:
    """Divide steps into intervals that fit in memory."""
    size = max(1, BLOCK_BYTES // max(step_bytes, 1))
    return [(start, min(steps, start + size)) for start in range(0, steps, size)]


def load_npy(path: Path) -> NumpyArray:
    """Map a ``.npy`` file into memory; pickles are refused."""
    with readable(path):
        return plain(np.lib.format.open_memmap(path, mode="r"), path.name)


@contextmanager
def open_datasets(source: Path) -> Iterator[dict[str, Any]]:
    """Open an HDF5 file that refers to no other file."""
    h5py = require("h5py")
    if not source.is_file():
        raise VaultNotFoundError(f"there is no file {source} to convert.")
    with ExitStack() as stack:
        with readable(source):
            file = stack.enter_context(h5py.File(source, "r"))
            check_hdf5(file, source)
            found = {name: item for name, item in file.items() if isinstance(item, h5py.Dataset)}
        yield found


def check_hdf5(file: Any, source: Path) -> None:
    """Raise `VaultError` if anything in an open ``h5py.File`` refers to another file.

    Every object is visited once, by its hard links; no other link is followed. Soft links name an
    object of the same file, which has a hard link too.
    """
    h5py = require("h5py")
    links = {h5py.h5l.TYPE_HARD, h5py.h5l.TYPE_SOFT}
    pending, seen = [(file.id, "")], {_address(file.id)}
    while pending:
        group, path = pending.pop()
        for name in group:
            below = f"{path}/{name.decode(errors='replace')}"
            kind = group.links.get_info(name).type
            if kind not in links:
                raise _refused(f"{below} in {source} is an external link")
            if kind == h5py.h5l.TYPE_SOFT:
                continue
            found = h5py.h5o.open(group, name)
            if (address := _address(found)) in seen:
                continue
            seen.add(address)
            if isinstance(found, h5py.h5g.GroupID):
                pending.append((found, below))
            elif isinstance(found, h5py.h5d.DatasetID):
                _check_dataset(found, f"{below} in {source}")


def _address(found: Any) -> int:
    return int(require("h5py").h5o.get_info(found).addr)


def _check_dataset(found: Any, name: str) -> None:
    created = found.get_create_plist()
    if created.get_layout() == require("h5py").h5d.VIRTUAL:
        raise _refused(f"the dataset {name} is virtual: it shows parts of other files")
    if created.get_external_count():
        raise _refused(f"the dataset {name} has external storage: its bytes are in other files")


def check_links_stay_inside(directory: Path) -> None:
    """Raise `VaultError` if a directory has links out of it, or anything but files."""
    root = directory.resolve()
    for path in _below(directory):
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            raise _refused(f"{path} is a link that leads out of {directory}")
        if path.exists() and stat.S_IFMT(path.stat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
            raise _refused(f"{path} is neither a file nor a directory")


def _below(directory: Path) -> Iterator[Path]:
    for parent, below, names in os.walk(directory):
        yield from (Path(parent, name) for name in (*below, *names))


def _refused(reason: str) -> VaultError:
    return VaultError(
        f"{reason}. Nothing was converted: it could copy any file of this machine into the vault. "
        "If you trust it, make a copy that holds the data itself."
    )


# ---------------------------------------------------------------------------------- writing


class Column(NamedTuple):
    """Shape and type of an array to write."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


Append = Callable[[NumpyArray], object]
"""Writes the next entries of an array's first axis."""


def write(writer: Writer, records: Iterable[Record], tally: Tally) -> None:
    """Append records, and note the faults in the provenance."""
    for record in records:
        writer.append(record.steps, record.finals, cut=record.cut)
    if faults := {name: tally[name] for name in FAULTS if tally[name]}:
        writer.annotate({"faults": faults})
    for sentence in sentences(faults):
        warnings.warn(sentence, stacklevel=4)


def counted(items: Iterable[Item], total: int, progress: Progress) -> Iterator[Item]:
    """Yield items, and report the progress after each."""
    with progress("convert", total) as advance:
        for item in items:
            yield item
            advance(1)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces ``path`` when the block ends without an error."""
    with errors_of(path), files.whole(path) as part:
        yield part


def plain_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type to write: float32 for bfloat16, which NumPy's files cannot hold."""
    return np.dtype(np.float32) if dtype.name == "bfloat16" else dtype


class SteadyFile(io.FileIO):
    """A file for the HDF5 library, which crashes if a write fails: here it seems to succeed.

    What follows the failure is dropped. `check`, and the end of a block, raise the error.
    """

    _error: OSError | None = None

    def write(self, data: Any, /) -> int:
        """Write all bytes, unless a write has failed."""
        rest = memoryview(data)
        try:
            while rest and not self._error:
                rest = rest[super().write(rest) :]
        except OSError as error:
            self._error = error
        return len(data)

    def truncate(self, size: int | None = None, /) -> int:
        """Set the size, unless a write has failed."""
        return 0 if self._error else super().truncate(size)

    def check(self) -> None:
        """Raise the error of the write that failed."""
        if self._error:
            raise self._error

    def __exit__(self, *_: object) -> None:
        self.close()
        self.check()


def to_slices(array: Any, file: SteadyFile | None = None) -> Append:
    """Append to an array of h5py or zarr, the first in a file whose writes are checked."""
    done = 0

    def append(values: NumpyArray) -> None:
        nonlocal done
        start, done = done, done + len(values)
        array[start:done] = values
        if file:
            file.check()

    return append


def _to_npy(file: BinaryIO, column: Column) -> Append:
    """Append to a ``.npy`` file. A full disk raises here; a memory map would crash."""
    shape, dtype = column
    descr = np.lib.format.dtype_to_descr(dtype)
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return lambda values: file.write(np.asarray(values, dtype).tobytes())


@contextmanager
def npz(
    path: Path, columns: Mapping[str, Column], compression: int = zipfile.ZIP_STORED
) -> Iterator[dict[str, Append]]:
    """Write an ``.npz`` file whose arrays are filled side by side, in temporary files."""
    part = path.with_name(f"{path.name}.arrays")
    part.mkdir()
    files = {name: part / f"{name}.npy" for name in columns}
    with ExitStack() as stack:
        opened = {name: stack.enter_context(file.open("wb")) for name, file in files.items()}
        yield {name: _to_npy(opened[name], column) for name, column in columns.items()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for file in files.values():
            archive.write(file, file.name)
            file.unlink()  # the disk never holds everything twice


def with_final(views: View, final: View) -> View:
    """Append an episode's final view to the others, ``(T+1, ...)``."""
    joined: View = map_tree(lambda x, y: np.concatenate([x, y[None]]), views, final)
    return joined
