"""Files and folders of arrays: ``.npz``, HDF5, and folders of ``.npy``, read a slice at a time.

A foreign dataset could make a reader copy other files of this machine into a vault that may be
published, a private key for instance: an HDF5 file can take bytes from other files (external
storage), objects (external links) and slices (virtual datasets), and a folder can hold links. Such
datasets are refused, and pickles are never read.
"""

import hashlib
import io
import os
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile, TemporaryDirectory
from typing import Any, BinaryIO

import numpy as np

from offmarl._imports import import_optional
from offmarl.errors import OffmarlError, VaultError, VaultNotFoundError
from offmarl.vault.format.layout import Leaf, NumpyArray
from offmarl.vault.storage import files
from offmarl.vault.storage.files import errors_of

StrPath = str | os.PathLike[str]

HDF5 = (".h5", ".hdf5")
"""Suffixes of HDF5 files."""

HEADER_BYTES = 2_000
"""Largest header of a .npy file: longer ones could nest deeper than Python parses."""
_MOST_DEFLATED = 1040
"""More than the bytes that one compressed byte can stand for."""
_UNPACKED_BYTES = 2**20
"""Bytes that are unpacked at once."""
_IN_WORDS = (zipfile.BadZipFile, zlib.error, EOFError, ValueError, OSError, RuntimeError)
"""Errors whose text says what is wrong with a file."""
_KINDS = {
    b"\x80": "a pickle of Python objects, which is never read: save its arrays with np.savez",
    b"version https://git-lfs": "a pointer of Git LFS: run `git lfs pull` where it is from",
}
"""Words for files by how they begin."""


def require(module: str) -> Any:
    """Import a package that only some layouts need."""
    return import_optional(module, "convert")


@contextmanager
def readable(file: object) -> Iterator[None]:
    """Turn the errors of reading a damaged file into `VaultError`; libraries raise any for one."""
    try:
        yield
    except (OffmarlError, MemoryError):
        raise
    except FileNotFoundError as error:
        raise VaultNotFoundError(f"there is no {error.filename or file} to convert.") from error
    except Exception as error:
        reason = _reason(file, error) if isinstance(error, _IN_WORDS) else f"{error!r:.200}"
        raise VaultError(f"{file} is damaged, incomplete or of another format: {reason}") from error


def _reason(file: object, error: Exception) -> str:
    """Return why reading failed, and a file's kind, without NumPy's advice on pickles."""
    kind = _kind_of(file) if isinstance(file, Path) and file.is_file() else ""
    reason = str(error).partition("\nTo allow loading")[0]  # without NumPy's advice
    if "pickle" in reason or "Python objects" in reason:
        reason = "it holds Python objects, which are not read"
    return f"it is {kind} ({reason})" if kind else reason


def _kind_of(path: Path) -> str:
    with path.open("rb") as file:
        begin = file.read(64)
    if kinds := [words for sign, words in _KINDS.items() if begin.startswith(sign)]:
        return kinds[0]
    text = begin.decode(errors="replace").partition("\n")[0]
    if not text.isprintable() or "\ufffd" in text:
        return ""
    return f"text that begins with {text!r}" if begin else "empty"


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


# ---------------------------------------------------------------------------------- reading


@contextmanager
def open_arrays(
    source: Path, layout: str, select: Callable[[set[str]], Iterable[str]]
) -> Iterator[dict[str, Any]]:
    """Open the arrays of a file or folder whose names ``select`` returns, given all names.

    The arrays have a shape and a type, and can be sliced along their first axis. Those of an
    ``.npz`` file are unpacked to a temporary directory, which compares them with their checksums.
    """
    with ExitStack() as stack:
        names, open_array = _opened(source, stack)
        selection = list(select(names))
        check_layout(source, layout, names, selection)
        with readable(source):
            arrays = {name: require_numbers(open_array(name), name) for name in selection}
        yield arrays


def _opened(source: Path, stack: ExitStack) -> tuple[set[str], Callable[[str], Any]]:
    if source.is_dir():
        check_links_stay_inside(source)
        paths = {path.stem: path for path in source.glob("*.npy")}
        return {*paths}, lambda name: _mapped(paths[name], paths[name])
    if source.suffix in HDF5:
        datasets = open_hdf5(source, stack)
        return {*datasets}, datasets.__getitem__
    with readable(source):
        archive = stack.enter_context(zipfile.ZipFile(source))
    names = {name.removesuffix(".npy") for name in archive.namelist() if name.endswith(".npy")}
    with errors_of(Path("the temporary directory")):
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="offmarl-")))

    def open_zipped(name: str) -> NumpyArray:
        with errors_of(folder), NamedTemporaryFile(dir=folder, delete=False) as copy:
            copy.writelines(_unpacked(archive, f"{name}.npy", source))
        return _mapped(Path(copy.name), source)

    return names, open_zipped


def _unpacked(archive: zipfile.ZipFile, name: str, source: Path) -> Iterator[bytes]:
    """Yield the content of a file in an archive, which may not be larger than it can hold."""
    with readable(source):
        info, most = archive.getinfo(name), _MOST_DEFLATED * source.stat().st_size
        if info.file_size > most:
            raise ValueError(f"{name} has not the size that it says, {info.file_size:,} bytes")
        with archive.open(info) as file:
            while data := file.read(_UNPACKED_BYTES):
                yield data


def _mapped(path: Path, source: Path) -> NumpyArray:
    with readable(source):
        return np.lib.format.open_memmap(path, mode="r", max_header_size=HEADER_BYTES)


def open_hdf5(source: Path, stack: ExitStack) -> dict[str, Any]:
    """Return the datasets of an HDF5 file that refers to no other file."""
    h5py = require("h5py")
    if not source.is_file():
        raise VaultNotFoundError(f"there is no file {source} to convert.")
    with readable(source):
        file = stack.enter_context(h5py.File(source, "r"))
        _check_hdf5(file, source)
        return {name: item for name, item in file.items() if isinstance(item, h5py.Dataset)}


def check_layout(
    source: object, layout: str, names: Iterable[str], required: Iterable[str]
) -> None:
    """Raise `VaultError` if arrays of a layout are missing."""
    names = sorted(names)
    if missing := [name for name in required if name not in names]:
        raise VaultError(
            f"{source} is not of {layout} layout: it has no {', '.join(missing)}, only "
            f"{', '.join(names) or 'nothing'}."
        )


def require_numbers(array: Any, name: str) -> Any:
    """Return an array of numbers; `VaultError` if it holds Python objects or text."""
    if array.shape is None or array.dtype.kind not in "biuf":
        content = "Python objects" if array.dtype.hasobject else array.dtype
        content = "nothing" if array.shape is None else content
        raise VaultError(f"the array {name!r} holds {content}, not numbers: it was not read.")
    return array


def _check_hdf5(file: Any, source: Path) -> None:
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
            item = h5py.h5o.open(group, name)
            if (address := _address(item)) in seen:
                continue
            seen.add(address)
            if isinstance(item, h5py.h5g.GroupID):
                pending.append((item, below))
            elif isinstance(item, h5py.h5d.DatasetID):
                _check_dataset(item, f"{below} in {source}", source.stat().st_size)


def _address(item: Any) -> int:
    return int(require("h5py").h5o.get_info(item).addr)


def _check_dataset(dataset: Any, name: str, file_bytes: int) -> None:
    created = dataset.get_create_plist()
    entries, most = dataset.get_space().get_select_npoints(), _MOST_DEFLATED * file_bytes
    if entries * dataset.get_type().get_size() > most:  # what was not written is read as zeros
        raise ValueError(f"the dataset {name} has not the size that it says, {entries:,} entries")
    if created.get_layout() == require("h5py").h5d.VIRTUAL:
        raise _refused(f"the dataset {name} is virtual: it shows parts of other files")
    if created.get_external_count():
        raise _refused(f"the dataset {name} has external storage: its bytes are in other files")


def check_links_stay_inside(directory: Path) -> None:
    """Raise `VaultError` if a directory has links out of it, or anything but files."""
    root = directory.resolve()
    tree = os.walk(directory)
    entries = (Path(folder, name) for folder, below, names in tree for name in (*below, *names))
    for path in entries:
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            raise _refused(f"{path} is a link that leads out of {directory}")
        if path.exists() and stat.S_IFMT(path.stat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
            raise _refused(f"{path} is neither a file nor a directory")


def _refused(reason: str) -> VaultError:
    return VaultError(
        f"{reason}. Nothing was converted: it could copy any file of this machine into the vault. "
        "If you trust it, make a copy that holds the data itself."
    )


# ---------------------------------------------------------------------------------- writing


Append = Callable[[NumpyArray], object]
"""Writes the next entries of an array's first axis."""


@contextmanager
def written_whole(path: Path) -> Iterator[Path]:
    """Yield a temporary path that replaces ``path`` when the block ends without an error."""
    with errors_of(path), files.built_whole(path) as part:
        yield part


def plain_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type to write: float32 for bfloat16, which NumPy's files cannot hold."""
    return np.dtype(np.float32) if dtype.name == "bfloat16" else dtype


class SteadyFile(io.FileIO):
    """A file for the HDF5 library, which crashes if a write fails: here it seems to succeed.

    Later writes are dropped. `check`, and the end of a block, raise the error.
    """

    _error: OSError | None = None

    def write(self, data: Any, /) -> int:
        """Write all bytes, unless a write has failed."""
        view = memoryview(data)
        try:
            while view and not self._error:
                view = view[super().write(view) :]
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


def _to_npy(file: BinaryIO, column: Leaf) -> Append:
    """Append to a ``.npy`` file. A full disk raises here; a memory map would crash."""
    dtype, shape = column
    descr = np.lib.format.dtype_to_descr(dtype)
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return lambda values: file.write(np.asarray(values, dtype).tobytes())


@contextmanager
def npz(
    path: Path, columns: Mapping[str, Leaf], compression: int = zipfile.ZIP_STORED
) -> Iterator[dict[str, Append]]:
    """Write an ``.npz`` file whose arrays are filled side by side, in temporary files.

    ``columns`` have the type and the shape of each.
    """
    part = path.with_name(f"{path.name}.arrays")
    part.mkdir()
    paths = {name: part / f"{name}.npy" for name in columns}
    with ExitStack() as stack:
        streams = {name: stack.enter_context(file.open("wb")) for name, file in paths.items()}
        yield {name: _to_npy(streams[name], column) for name, column in columns.items()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for file in paths.values():
            archive.write(file, file.name)
            file.unlink()  # the disk never holds everything twice
