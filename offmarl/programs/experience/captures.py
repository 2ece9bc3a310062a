"""Checkpoints of programs that collect their own steps: each step of a buffer is written once.

The buffer of an off-policy program may take gigabytes, so checkpoints do not hold it. Each save
adds one file with the steps since the save before, beside the checkpoints::

    checkpoints/4096/...            a checkpoint without the buffer
    checkpoints/buffer/0/4096-512.npz   the last 512 time steps before it, of the first buffer

A file is complete and durable before its checkpoint is written, and it is removed when the buffer
of the oldest checkpoint no longer holds its steps. A buffer that is filled anew by each update is
not stored at all.
"""

import itertools
import shutil
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int
from numpy.typing import NDArray

from offmarl.checkpoint import Checkpoints, Resumed
from offmarl.errors import CheckpointError
from offmarl.programs.cluster import arrays_from_first, gather_all, is_first, on_first
from offmarl.programs.experience.buffer import Capture, copy_finals
from offmarl.types import ArrayTree
from offmarl.vault.storage.files import publish

BUFFERS = "buffer"
"""Directory of the steps, among the checkpoints."""

_NEXT = "next_view"
_STORED = "stored"
"""Name of the mask of the steps whose next view is stored: ends of episodes, and the last step."""

_DAMAGE = (zipfile.BadZipFile, KeyError, ValueError, EOFError, FileNotFoundError)


class CaptureCheckpoints(Checkpoints):
    """Checkpoints of trees that hold a `Capture` anywhere; see the module.

    One process saves to a directory at a time. Before it saves, it restores the checkpoint that it
    goes on from, if there is one. ``last`` is the last checkpoint of a finished run, whose buffers
    `remove_buffers` has deleted: it is restored with blank ones.
    """

    def __init__(self, directory: str | Path, keep: int | None = None, last: int | None = None):
        super().__init__(directory, keep)
        self._last = last
        self._saved: tuple[int, list[int]] | None = None
        """The last checkpoint, saved or restored, and the time steps added to its buffers."""

    def save(self, step: int, tree: Mapping[str, ArrayTree], info: Mapping[str, Any]) -> None:
        """Write the steps since the last checkpoint, then a checkpoint; see `Checkpoints.save`."""
        captures = _sampled(tree)
        before, totals = self._saved or (-1, [0] * len(captures))
        added = [
            min(int(capture.total) - total, int(capture.filled))
            for capture, total in zip(captures, totals, strict=True)
        ]
        self._saved = step, [int(capture.total) for capture in captures]
        newest = [_arrays(*pair) for pair in zip(captures, added, strict=True)]
        small = gather_all(_replace(_without_steps, tree))
        if not is_first():
            return
        for number, (count, arrays) in enumerate(zip(added, newest, strict=True)):
            files = self._files(number)
            files.remove(lambda file: file.number > before)  # of updates that were lost
            if count:
                files.write(step, count, arrays)
        super().save(step, small, info)
        for number, capture in enumerate(captures):
            self._files(number).remove_unused(self.steps()[0], capture.capacity)

    def resume(self, like: Mapping[str, ArrayTree]) -> Resumed | None:
        """Read the newest intact checkpoint of the first process; see `Checkpoints.resume`."""
        if jax.process_count() == 1:
            return super().resume(like)
        checkpoints: list[Resumed] = []

        def read() -> list[Any]:
            checkpoints.extend(x for x in [super(CaptureCheckpoints, self).resume(like)] if x)
            return [[x.step, x.info] for x in checkpoints]

        for step, info in on_first(read):
            tree = arrays_from_first(checkpoints[0].tree if checkpoints else dict(like))
            self._saved = step, [int(capture.total) for capture in _sampled(tree)]
            return Resumed(step, tree, info)
        return None

    def restore(
        self, like: Mapping[str, ArrayTree], step: int | None = None, partly: bool = False
    ) -> tuple[dict[str, ArrayTree], dict[str, Any]]:
        """Read a checkpoint, and fill its buffers; see `Checkpoints.restore`."""
        step = self.latest() if step is None else step
        numbers = itertools.count()
        tree, info = super().restore(_replace(_without_steps, like), step, partly)
        assert step is not None

        def with_steps(template: Capture, capture: Capture) -> Capture:
            if template.is_sampled and step != self._last:
                return self._files(next(numbers)).fill(step, template, capture)
            return _blank(template, capture)

        tree = _replace(with_steps, like, tree)
        self._saved = step, [int(capture.total) for capture in _sampled(tree)]
        return tree, info

    def _files(self, number: int) -> "_Files":
        return _Files(self._directory, number)


def remove_buffers(directory: Path) -> None:
    """Delete the buffers beside the checkpoints in a directory, and all checkpoints but the newest.

    A finished run needs only its newest checkpoint. The others could not be read without the
    buffers, and a run that lost its newest would take them for damaged.
    """
    if (directory / BUFFERS).is_dir():
        Checkpoints(directory, keep=1).remove_old()
        shutil.rmtree(directory / BUFFERS, ignore_errors=True)


# ---------------------------------------------------------------------------------- trees


def _is_capture(node: Any) -> bool:
    return isinstance(node, Capture)


def _sampled(tree: ArrayTree) -> list[Capture]:
    leaves = jax.tree.leaves(tree, is_leaf=_is_capture)
    return [leaf for leaf in leaves if _is_capture(leaf) and leaf.is_sampled]


def _replace(function: Callable[..., Capture], *trees: ArrayTree) -> dict[str, ArrayTree]:
    """Apply a function to every capture, in order; other leaves are those of the last tree."""

    def replace(*leaves: Any) -> Any:
        return function(*leaves) if _is_capture(leaves[-1]) else leaves[-1]

    replaced: dict[str, ArrayTree] = jax.tree.map(replace, *trees, is_leaf=_is_capture)
    return replaced


def _without_steps(capture: Capture) -> Capture:
    empty: Any = ()
    buffer = capture.buffer.replace(experience=empty)
    return capture._replace(buffer=buffer, next_views=empty, prior=None)


def _blank(like: Capture, capture: Capture) -> Capture:
    """Return a buffer without steps, which the next update replaces if there is one."""
    blank = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
    buffer = capture.buffer.replace(experience=blank.buffer.experience)
    return capture._replace(buffer=buffer, next_views=blank.next_views)


# ---------------------------------------------------------------------------------- files


class _File(NamedTuple):
    path: Path
    number: int
    """Number of the checkpoint that it was written for."""
    size: int
    """Number of time steps."""


class _Files:
    """The files of one buffer."""

    def __init__(self, checkpoints: Path, number: int):
        self._checkpoints = checkpoints
        self._directory = checkpoints / BUFFERS / str(number)

    def __iter__(self) -> Iterator[_File]:
        """Iterate over the files, the newest first."""
        paths = self._directory.glob("*-*.npz")
        files = [_File(path, *map(int, path.stem.split("-"))) for path in paths]
        return iter(sorted(files, key=lambda file: file.number, reverse=True))

    def write(self, step: int, count: int, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Write the newest time steps of a buffer, from `_arrays`, for a checkpoint."""
        self._directory.mkdir(parents=True, exist_ok=True)
        part = self._directory / "part.npz"
        with part.open("wb") as file:
            np.savez(file, allow_pickle=False, **arrays)
        publish(part, self._directory / f"{step}-{count}.npz")

    def remove(self, predicate: Callable[[_File], bool]) -> None:
        """Delete the files for which a predicate holds."""
        for file in self:
            if predicate(file):
                file.path.unlink()

    def remove_unused(self, oldest: int, capacity: int) -> None:
        """Delete the files whose steps the buffer of the oldest checkpoint no longer holds."""
        paths = {file.path for file in self._up_to(oldest, capacity)}
        self.remove(lambda file: file.number <= oldest and file.path not in paths)

    def _up_to(self, step: int, count: int) -> list[_File]:
        """Return the files with the last ``count`` time steps before a checkpoint, in order."""
        files: list[_File] = []
        for file in self:
            if file.number <= step and sum(newer.size for newer in files) < count:
                files.append(file)
        return files[::-1]

    def fill(self, step: int, like: Capture, capture: Capture) -> Capture:
        """Return the capture of a checkpoint with its steps, which are read from the files."""
        count = int(capture.filled)
        files = self._up_to(step, count)
        if sum(file.size for file in files) < count:
            raise self._damaged(step, f"{self._directory} lacks a part of the buffer's steps")
        place = (int(capture.buffer.current_index) - 1 - np.arange(count)[::-1]) % like.capacity
        try:
            experience, next_views = _read([file.path for file in files], like, place)
        except _DAMAGE as error:
            raise self._damaged(
                step, f"{self._directory}: {type(error).__name__}: {error}"
            ) from None
        buffer = capture.buffer.replace(experience=experience)
        return capture._replace(buffer=buffer, next_views=next_views)

    def _damaged(self, step: int, reason: str) -> CheckpointError:
        return CheckpointError(self._checkpoints / str(step), reason)


def _arrays(capture: Capture, count: int) -> dict[str, NDArray[Any]]:
    """Return the newest time steps by name, with the next views that are not the view after."""
    if not count:
        return {}
    start = (int(capture.buffer.current_index) - count) % capture.capacity
    newest = jax.tree.map(lambda leaf: _newest(leaf, start, count), capture.buffer.experience)
    stored = newest.transition.last.copy()
    stored[:, -1] = True
    finals = _named(copy_finals(capture, stored, start).view)
    views = {_NEXT + name: np.asarray(leaf)[: stored.sum()] for name, leaf in finals.items()}
    return _named(newest) | {_STORED: stored} | views


def _named(tree: ArrayTree) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def _newest(leaf: Array, start: int, count: int) -> NDArray[Any]:
    """Copy ``count`` time steps of a ring to the host.

    The pieces are powers of two long, so that few programs are compiled.
    """
    pieces = []
    while count:
        size = 1 << (min(count, leaf.shape[1] - start).bit_length() - 1)
        pieces.append(np.asarray(gather_all(_slice(leaf, start, size))))
        start, count = (start + size) % leaf.shape[1], count - size
    return np.concatenate(pieces, axis=1)


@partial(jax.jit, static_argnums=2)
def _slice(leaf: Array, start: Int[Array, ""] | int, size: int) -> Array:
    return jax.lax.dynamic_slice_in_dim(leaf, start, size, axis=1)


def _read(paths: Sequence[Path], like: Capture, place: NDArray[np.int64]) -> tuple[Any, Any]:
    """Read the steps of a buffer into the indices ``place``, one array after another."""
    files = [np.load(path, allow_pickle=False) for path in paths]

    def ring(path: Any, spec: Any) -> Array:
        array, end = np.zeros(spec.shape, spec.dtype), len(place)
        for file in reversed(files):
            steps = file[jax.tree_util.keystr(path)].view(spec.dtype)[:, -end:]
            array[:, place[end - steps.shape[1] : end]] = steps
            end -= steps.shape[1]
        if end:
            raise ValueError(f"{end} steps are missing")
        return jnp.asarray(array)

    def finals(path: Any, spec: Any) -> Array:
        array = np.zeros(spec.shape, spec.dtype)
        for file in files:
            row, time = np.nonzero(file[_STORED])
            last, ends = file[".transition.last"], file[".ends"]
            ended, newest = last[row, time], time == last.shape[1] - 1
            row, number = row[ended], ends[row, time][ended] % like.num_finals
            views = file[_NEXT + jax.tree_util.keystr(path)].view(spec.dtype)
            array[row, number], array[:, -1] = views[ended], views[newest]
        return jnp.asarray(array)

    try:
        return (
            jax.tree_util.tree_map_with_path(ring, like.buffer.experience),
            jax.tree_util.tree_map_with_path(finals, like.next_views),
        )
    finally:
        for file in files:
            file.close()
