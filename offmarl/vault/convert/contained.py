"""Refusing foreign datasets that would have other files of this machine read in their place.

An HDF5 file can name other files to take bytes from (external storage), objects from (external
links) and slices from (virtual datasets); a folder can hold links. A reader that follows them
copies what they name, a private key for instance, into a vault that may be published.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from offmarl.errors import VaultError, VaultNotFoundError
from offmarl.vault.convert.common import readable, require

HDF5 = (".h5", ".hdf5")
"""How the names of HDF5 files end."""


def open_datasets(source: Path, stack: ExitStack) -> dict[str, Any]:
    """Open an HDF5 file that refers to no other, and return its datasets.

    Parameters
    ----------
    source
        The file.
    stack
        Closes it.

    Returns
    -------
    dict
        The ``h5py.Dataset`` objects of the root group, by name.

    Raises
    ------
    VaultNotFoundError
        There is no such file.
    VaultError
        It is not an HDF5 file, or something in it refers to another file.
    """
    h5py = require("h5py")
    if not source.is_file():
        raise VaultNotFoundError(f"there is no file {source} to convert.")
    with readable(source):
        file = stack.enter_context(h5py.File(source, "r"))
        check_hdf5(file, source)
        return {name: item for name, item in file.items() if isinstance(item, h5py.Dataset)}


def check_hdf5(file: Any, source: Path) -> None:
    """Raise `VaultError` where anything in an open ``h5py.File`` refers to another file.

    Every object is visited once, by its hard links, and no other link is followed. Soft links
    name an object of the same file, which has a hard link too.
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
    """Raise `VaultError` where a directory holds links out of it, or anything but files."""
    root = directory.resolve()
    for path in _below(directory):
        if path.is_symlink() and not path.resolve().is_relative_to(root):
            raise _refused(f"{path} is a link that leads out of {directory}")
        if path.exists() and stat.S_IFMT(path.stat().st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
            raise _refused(f"{path} is neither a file nor a directory")


def _below(directory: Path) -> Iterator[Path]:
    for parent, directories, files in os.walk(directory):
        yield from (Path(parent, name) for name in (*directories, *files))


def _refused(reason: str) -> VaultError:
    return VaultError(
        f"{reason}. Nothing was converted: it could copy any file of this machine into the vault. "
        "If you trust it, make a copy that holds the data itself."
    )
