"""Checkpoints of a run: arrays and JSON, never pickles, through orbax.

A run's checkpoint is a mapping of named pytrees, at least these two:

``policy``
    The parameters that the policy acts with. Each has a leading axis of seeds, also if a program
    trains a single seed. `offmarl.programs.load_policy` reads only this part.
``state``
    Everything that the program needs to resume with the same bits.
"""

import errno
import json
import logging
import os
import re
import shutil
import tempfile
import time
import warnings
from collections.abc import Container, Iterator, Mapping
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import google_crc32c
import jax
import jax.numpy as jnp
import msgspec
import numpy as np
from numpy.typing import NDArray

from offmarl._arrays import is_key
from offmarl.errors import CheckpointError, RunError
from offmarl.paths import local
from offmarl.types import ArrayTree

_ABOUT = "about"
"""Name of the JSON part of a checkpoint: ``info``, and a description and checksum of each array."""

_OWN_LEFTOVER = re.compile(r"\d+\.(deleted|orbax-checkpoint-tmp(-\d+)?)")
"""Directories that a killed process leaves: half deleted by offmarl, or half written by orbax."""

_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors of the operating system for a missing part of a checkpoint."""

_OS_ERROR = re.compile(r"(?:\[OS error |os_error_code=')(\d+)")
"""An operating system's error in the text of TensorStore's ValueError, by version."""


class _About(msgspec.Struct):
    """The JSON part, of which a pulled policy's may be forged."""

    info: dict[str, Any]
    leaves: dict[str, dict[str, str]]
    checksums: dict[str, dict[str, str]]


class Resumed(NamedTuple):
    """The checkpoint to resume from."""

    step: int
    tree: dict[str, ArrayTree]
    info: dict[str, Any]


class Checkpoints:
    """The checkpoints in one directory, numbered by step; ``keep`` of the newest, by default all.

    Saves are atomic and complete when `save` returns: a kill during a save leaves the earlier
    checkpoints intact. Trees may hold typed PRNG keys, NamedTuples, optax states and empty nodes.
    Each array is stored with the CRC32C of its type, shape and bytes, which is compared when it is
    read. The first save makes the directory; other files in it are not touched.
    """

    def __init__(self, directory: str | Path, keep: int | None = None):
        self._directory = local(directory)
        self._keep = keep
        self.kept: Container[int] = ()
        """Numbers of older checkpoints that are kept, too."""

    def save(self, step: int, tree: Mapping[str, ArrayTree], info: Mapping[str, Any]) -> None:
        """Write named pytrees of arrays, each of which can be restored alone, and a JSON object.

        The step is larger than all earlier ones. Of several processes only the first one writes.
        After an `OSError`, such as that of a full disk, the earlier checkpoints are intact.
        `RunError` if another file has the name.
        """
        from orbax.checkpoint import args

        if jax.process_index():
            return
        path = self._directory / str(step)
        if path.exists() or path.is_symlink():
            raise RunError(f"{path} has the name of a new checkpoint: move or rename it.")
        host = {name: jax.device_get(_without_keys(part)) for name, part in tree.items()}
        parts = {
            name: args.StandardSave(_wrap(part))
            for name, part in host.items()
            if jax.tree.leaves(part)  # orbax rejects empty trees
        }
        about = _sealed(
            {
                "info": dict(info),
                "leaves": {name: _leaf_types(part) for name, part in tree.items()},
                "checksums": {name: _checksums(part) for name, part in host.items()},
            }
        )
        self._directory.mkdir(parents=True, exist_ok=True)
        self._remove_leftovers()  # otherwise orbax warns about its own
        try:
            saved = args.Composite(**parts, **{_ABOUT: args.JsonSave(about)})
            self._checkpointer.save(path, saved)
        except ValueError as error:  # TensorStore's, of a full disk
            self._remove_what_failed(path)
            raise _of_system(error, path) or error from error
        self.remove_old()

    def steps(self) -> list[int]:
        """Return the numbers of all complete checkpoints, in order."""
        if not self._directory.is_dir():
            return []
        return sorted(int(path.name) for path in self._directory.iterdir() if _is_whole(path))

    def latest(self) -> int | None:
        """Return the number of the newest checkpoint, or None."""
        return max(self.steps(), default=None)

    def restore(
        self, like: Mapping[str, ArrayTree], step: int | None = None, partly: bool = False
    ) -> tuple[dict[str, ArrayTree], dict[str, Any]]:
        """Read parts of a checkpoint, by default of the newest, and return them with the info.

        ``like`` has the expected shapes; ``partly``, with None in place of subtrees that are not
        read. `CheckpointError` if it is damaged; `RunError` if it does not exist, does not match
        ``like``, or cannot be read for a reason that may not be damage; `OSError` if the operating
        system cannot read it now.
        """
        step = self.latest() if step is None else step
        if step is None or step not in self.steps():
            raise RunError(
                f"{self._directory} has no checkpoint{'' if step is None else f' {step}'}: "
                "give the directory of a run that has saved one."
            )
        about = self._read_about(step)
        for name, part in like.items():
            expected, saved = _leaf_types(part), about.leaves.get(name, {})
            saved = {leaf: saved[leaf] for leaf in expected if leaf in saved} if partly else saved
            self._check(step, name, expected, saved)
        return self._restore(step, like, about.checksums), about.info

    def resume(self, like: Mapping[str, ArrayTree]) -> Resumed | None:
        """Read the newest intact checkpoint; None if there is none.

        A damaged checkpoint is renamed to ``<step>.damaged``, with a warning. The run then repeats
        the work since the checkpoint before it and ends with the same result. A checkpoint is
        renamed only if two reads find the same damage, and not if the operating system or a library
        fails: that is raised, as by `restore`.
        """
        for step in reversed(self.steps()):
            try:
                return Resumed(step, *self.restore(like, step))
            except CheckpointError as error:
                first = error.reason
            try:
                return Resumed(step, *self.restore(like, step))
            except CheckpointError as error:
                if error.reason != first:
                    raise self._unreadable(step, f"{first}, and then {error.reason}") from error
            self._set_aside(step, first)
        return None

    def remove_old(self) -> None:
        """Delete the checkpoints beyond `keep`, each atomically."""
        if self._keep is not None:
            for step in self.steps()[: -self._keep]:
                path = self._directory / str(step)
                if step not in self.kept:
                    path.rename(path.with_name(f"{step}.deleted"))
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Delete checkpoints that a killed process wrote or deleted only in part."""
        for path in self._directory.iterdir():
            if _OWN_LEFTOVER.fullmatch(path.name) and _is_directory(path):
                shutil.rmtree(path)

    def _remove_what_failed(self, path: Path) -> None:
        """Delete what a failed save wrote; its threads may still write for a short while."""
        partial = path.with_name(f"{path.name}.orbax-checkpoint-tmp")
        for _ in range(100):
            shutil.rmtree(partial, ignore_errors=True)
            time.sleep(0.02)
            if not partial.exists():
                return

    def _set_aside(self, step: int, reason: str) -> None:
        """Rename a checkpoint to the first free name of ``<step>.damaged``, ``.damaged.2`` ..."""
        path = self._directory / str(step)
        names = (f"{step}.damaged{f'.{n}' if n > 1 else ''}" for n in count(1))
        free = (aside for name in names if not os.path.lexists(aside := path.with_name(name)))
        aside = path.rename(next(free))
        before = self.latest()
        on = "starts from the beginning" if before is None else f"resumes from checkpoint {before}"
        warnings.warn(
            f"checkpoint {path} is damaged ({reason}): it was renamed to {aside.name}, and the run "
            f"{on}.",
            stacklevel=3,
        )

    def _restore(
        self, step: int, like: Mapping[str, ArrayTree], sums: Mapping[str, Mapping[str, str]]
    ) -> dict[str, ArrayTree]:
        """Read parts of a checkpoint, and compare their checksums."""
        path = self._directory / str(step)
        parts = {name: _abstract(part) for name, part in like.items()}
        try:
            trees = {name: _read(path / name, part) for name, part in parts.items()}
        except Exception as error:  # TensorStore raises errors of any type for damaged files
            if _is_of_system(error) and isinstance(error, OSError | MemoryError | ImportError):
                raise
            if _is_of_system(error) or not self._can_save_and_read(parts):
                raise self._unreadable(step, _in_words(error)) from error
            raise self._damaged(step, _in_words(error)) from None
        for name, part in trees.items():
            for leaf, checksum in _checksums(part).items():
                if checksum != sums.get(name, {}).get(leaf):
                    raise self._damaged(step, f"the checksum of {name}{leaf} is wrong")
        return {name: _with_keys(part, trees[name]) for name, part in like.items()}

    @staticmethod
    def _can_save_and_read(parts: Mapping[str, Any]) -> bool:
        """Whether a small checkpoint of the same structure can be saved and read.

        If it can, the files are damaged. The libraries' errors are the same for damage and for
        missing or incompatible libraries.
        """

        def small(leaf: jax.ShapeDtypeStruct) -> NDArray[Any]:
            return np.zeros([min(size, 1) for size in leaf.shape], leaf.dtype)

        trees = {name: jax.tree.map(small, part) for name, part in parts.items()}
        try:
            with tempfile.TemporaryDirectory() as directory:
                Checkpoints(directory).save(0, trees, {})
                for name, tree in trees.items():
                    _read(Path(directory) / "0" / name, tree)
        except Exception:
            return False
        return True

    def _read_about(self, step: int) -> _About:
        try:
            text = (self._directory / str(step) / _ABOUT / "metadata").read_bytes()
            about: Any = json.loads(text)
            if not isinstance(about, dict) or _sealed(about) != about:
                raise self._damaged(step, "the checksum of its JSON part is wrong")
            return msgspec.convert(about, _About)
        except (ValueError, RecursionError, *_MISSING) as error:
            raise self._damaged(step, _in_words(error)) from None

    def _damaged(self, step: int, reason: str) -> CheckpointError:
        return CheckpointError(self._directory / str(step), reason)

    def _unreadable(self, step: int, reason: str) -> RunError:
        return RunError(
            f"checkpoint {self._directory / str(step)} cannot be read ({reason}). It may be intact "
            "and was not changed: repeat the command, and if that fails too, check the disk, and "
            "the installation with `offmarl doctor`."
        )

    def _check(self, step: int, name: str, expected: dict[str, Any], saved: dict[str, Any]) -> None:
        different = [
            f"{name}{leaf} is {saved.get(leaf, 'absent')}, not {expected.get(leaf, 'absent')}"
            for leaf in sorted(expected.keys() | saved.keys())
            if expected.get(leaf) != saved.get(leaf)
        ]
        if different:
            raise RunError(
                f"checkpoint {step} in {self._directory} does not fit this program "
                f"({different[0]}): give the arguments it was written with."
            )

    @cached_property
    def _checkpointer(self) -> Any:
        import orbax.checkpoint as ocp

        # For good, because the threads of a save go on after it has failed.
        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(_is_news)
        options = ocp.options.MultiprocessingOptions(  # otherwise it waits for other processes
            primary_host=0, active_processes={0}, barrier_sync_key_prefix="offmarl"
        )
        composite = ocp.CompositeOptions(multiprocessing_options=options)
        handler = ocp.CompositeCheckpointHandler(composite_options=composite)
        return ocp.Checkpointer(handler, multiprocessing_options=options)


def _read(directory: Path, part: ArrayTree) -> ArrayTree:
    """Read the arrays of a part that orbax wrote, one by one, and no others.

    Orbax would read arrays of any size that a file declares; here each is compared with what is
    expected before memory is allocated for it.
    """
    import tensorstore

    store = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{directory}/"}}

    def read(path: Any, leaf: Any) -> NDArray[Any]:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        spec = {"driver": "zarr", "kvstore": {**store, "path": f"{name}/"}}
        array = tensorstore.open(spec, read=True).result()
        chunk = array.chunk_layout.read_chunk.shape or ()
        same = (array.shape, array.dtype.numpy_dtype) == (leaf.shape, leaf.dtype)
        if not same or any(length > size for length, size in zip(chunk, leaf.shape, strict=True)):
            raise ValueError(f"{name} is stored with another type, shape or chunks")
        return array.read().result()

    return jax.tree_util.tree_map_with_path(read, _wrap(part))["tree"]


def _in_words(error: BaseException) -> str:
    text = re.split(r"\n|: Error| \[tensorstore_spec", str(error))[0]
    return f"{type(error).__name__}: {text}"


def _is_of_system(error: BaseException) -> bool:
    """Whether memory, descriptors or a library are missing, and the files may be intact."""
    return any(
        isinstance(cause, MemoryError | ImportError)
        or (isinstance(cause, OSError) and not isinstance(cause, _MISSING))
        or any(int(number) != errno.ENOENT for number in _OS_ERROR.findall(str(cause)))
        for cause in _chain(error)
    )


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a log record is about anything but an error that orbax also raises."""
    _, error, _ = record.exc_info or (None, None, None)
    text = str(record.msg)
    late = "was never retrieved" in text and re.search("orbax|OCDBT", f"{text} {error}")
    return not late and "_SignalingThread" not in text


def _of_system(error: ValueError, path: Path) -> OSError | None:
    """Return the error of the operating system that an error of TensorStore is about, if any."""
    for cause in _chain(error):
        for number in map(int, _OS_ERROR.findall(str(cause))):
            return OSError(number, os.strerror(number), str(path))
    return None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error, its cause, and so on."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _wrap(part: ArrayTree) -> dict[str, ArrayTree]:
    """Put a tree into a container, because orbax rejects a single array."""
    return {"tree": part}


def _is_directory(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_whole(path: Path) -> bool:
    """Whether a path is a complete checkpoint, and not another file of the user."""
    number = path.name.isascii() and path.name.isdigit() and path.name == str(int(path.name))
    return number and _is_directory(path) and (path / _ABOUT).is_dir()


# ---------------------------------------------------------------------------------- arrays


def _leaf_types(tree: ArrayTree) -> dict[str, str]:
    """Name each leaf of a tree, with its type and shape."""
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _checksums(tree: ArrayTree) -> dict[str, str]:
    """Return the CRC32C of each array on the host: of its type and shape, and of its bytes."""

    def checksum(array: NDArray[Any]) -> str:
        crc = google_crc32c.value(f"{array.dtype}{list(array.shape)}".encode())
        return f"{google_crc32c.extend(crc, array.tobytes()):08x}"

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): checksum(leaf) for path, leaf in leaves}


def _sealed(about: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object with its own checksum, of its canonical text."""
    about = json.loads(json.dumps(about))  # keys become text, tuples lists
    about.pop("crc32c", None)
    text = json.dumps(about, sort_keys=True, separators=(",", ":"))
    return {**about, "crc32c": f"{google_crc32c.value(text.encode()):08x}"}


def _without_keys(tree: ArrayTree) -> ArrayTree:
    """Return what orbax can write: the data of keys, and None for arrays without entries."""

    def plain(leaf: Any) -> Any:
        if is_key(leaf):
            return jax.random.key_data(leaf)
        return None if np.size(leaf) == 0 else leaf

    return jax.tree.map(plain, tree)


def _with_keys(like: ArrayTree, tree: ArrayTree) -> ArrayTree:
    """Undo `_without_keys`, for a tree of the structure of ``like``."""

    def wrap(expected: Any, leaf: NDArray[Any] | None) -> Any:
        leaf = np.empty(expected.shape, expected.dtype) if leaf is None else leaf
        array = jax.device_put(leaf)
        if is_key(expected):
            impl = jax.random.key_impl(jnp.empty((), expected.dtype))
            return jax.random.wrap_key_data(array, impl=impl)
        return array if array.dtype == leaf.dtype else leaf  # JAX has narrowed 64 bits

    return jax.tree.map(wrap, like, tree)


def _abstract(tree: ArrayTree) -> ArrayTree:
    """Describe the arrays to read, as `_without_keys` makes them."""

    def describe(leaf: Any) -> Any:
        if is_key(leaf):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        if not leaf.size:
            return None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)  # type: ignore[no-untyped-call]

    return jax.tree.map(describe, tree)
