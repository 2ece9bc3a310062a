"""Arrays that are written from their beginning to their end, larger than memory."""

import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from offmarl.vault.layout import NumpyArray


class Column(NamedTuple):
    """The shape and type of an array to write."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]


Append = Callable[[NumpyArray], object]
"""Writes the next entries of the first axis."""


def to_slices(array: Any) -> Append:
    """Append to an array of a library that writes slices, as h5py and zarr do."""
    done = 0

    def append(values: NumpyArray) -> None:
        nonlocal done
        start, done = done, done + len(values)
        array[start:done] = values

    return append


def _to_npy(file: BinaryIO, column: Column) -> Append:
    """Append to a ``.npy`` file. A full disk is an error here; a memory map would crash."""
    shape, dtype = column
    descr = np.lib.format.dtype_to_descr(dtype)
    header = {"descr": descr, "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(file, header)
    return lambda values: file.write(np.asarray(values, dtype).tobytes())


@contextmanager
def npz(
    path: Path, columns: Mapping[str, Column], compression: int = zipfile.ZIP_STORED
) -> Iterator[dict[str, Append]]:
    """Write an ``.npz`` file whose arrays are filled side by side, on disk until all are there.

    Parameters
    ----------
    path
        The file, in a directory where others may be beside it meanwhile.
    columns
        Of each array, all of whose entries must be appended.
    compression
        As ``zipfile`` has it.
    """
    beside = path.with_name(f"{path.name}.arrays")
    beside.mkdir()
    files = {name: beside / f"{name}.npy" for name in columns}
    with ExitStack() as stack:
        opened = {name: stack.enter_context(file.open("wb")) for name, file in files.items()}
        yield {name: _to_npy(opened[name], column) for name, column in columns.items()}
    with zipfile.ZipFile(path, "w", compression) as archive:
        for file in files.values():
            archive.write(file, file.name)
            file.unlink()  # so that the disk never holds all of it twice
