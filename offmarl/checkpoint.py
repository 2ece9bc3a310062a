"""Checkpoints of a run: arrays and JSON, never pickles, through orbax.

A run's checkpoint is a mapping of named pytrees, at least these two:

``policy``
    The parameters the policy acts with, each with a leading axis of seeds (of length one where
    a program trains a single seed). `offmarl.evaluation.load_policy` reads this and nothing else.
``state``
    Whatever the program needs to go on with the same bits.
"""

import shutil
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from offmarl.errors import RunError
from offmarl.types import ArrayTree


class Checkpoints:
    """The checkpoints in one directory, numbered by step.

    Saves are atomic and have ended when `save` returns: killed in the middle, what was there
    before is still there. Typed PRNG keys, NamedTuples, optax states and empty nodes are welcome.

    Parameters
    ----------
    directory
        Made by the first save.
    keep
        How many of the newest checkpoints to keep; all of them by default.
    """

    def __init__(self, directory: str | Path, keep: int | None = None):
        self._directory = Path(directory).absolute()
        self._keep = keep

    def save(self, step: int, tree: Mapping[str, ArrayTree], info: Mapping[str, Any]) -> None:
        """Write a checkpoint.

        Parameters
        ----------
        step
            Its number; larger than any before.
        tree
            Named pytrees of arrays. Each can be restored without the others.
        info
            A JSON object.
        """
        from orbax.checkpoint import args

        parts = {
            name: args.StandardSave(_wrap(_without_keys(part)))
            for name, part in tree.items()
            if jax.tree.leaves(part)  # orbax knows no empty trees
        }
        about = {"info": dict(info), "leaves": {name: _leaves(part) for name, part in tree.items()}}
        self._directory.mkdir(parents=True, exist_ok=True)
        self._checkpointer.save(
            self._directory / str(step), args.Composite(**parts, about=args.JsonSave(about))
        )
        self._tidy()

    def steps(self) -> list[int]:
        """Return the numbers of all whole checkpoints, in order."""
        if not self._directory.is_dir():
            return []
        return sorted(int(path.name) for path in self._directory.iterdir() if path.name.isdigit())

    def latest(self) -> int | None:
        """Return the number of the newest checkpoint, None where there is none."""
        return max(self.steps(), default=None)

    def restore(
        self, like: Mapping[str, ArrayTree], step: int | None = None
    ) -> tuple[dict[str, ArrayTree], dict[str, Any]]:
        """Read a checkpoint.

        Parameters
        ----------
        like
            The parts wanted, as arrays or `jax.ShapeDtypeStruct` of the shapes to expect.
        step
            Its number; the newest by default.

        Returns
        -------
        tuple
            The tree, with the structure of ``like``, and the info.

        Raises
        ------
        RunError
            There is no such checkpoint, or it holds something other than ``like``.
        """
        from orbax.checkpoint import args

        step = self.latest() if step is None else step
        if step is None or step not in self.steps():
            raise RunError(
                f"{self._directory} has no checkpoint{'' if step is None else f' {step}'}: "
                "give the directory of a run that has saved one."
            )
        about = self._restore(step, about=args.JsonRestore())["about"]
        for name, part in like.items():
            self._check(step, name, _leaves(part), about["leaves"].get(name, {}))
        parts = {name: part for name, part in like.items() if jax.tree.leaves(part)}
        found = self._restore(
            step,
            **{name: args.StandardRestore(_wrap(_abstract(part))) for name, part in parts.items()},
        )
        tree = {name: _with_keys(part, *found[name].values()) for name, part in parts.items()}
        return dict(like) | tree, about["info"]

    def close(self) -> None:
        """Let go of what saving and restoring needed."""
        self._checkpointer.close()

    def _tidy(self) -> None:
        """Delete old checkpoints, each as a whole, and what a killed process left half done."""
        if self._keep is not None:
            for step in self.steps()[: -self._keep]:
                path = self._directory / str(step)
                path.rename(path.with_name(f"{step}.deleted"))
        for path in self._directory.glob("*.*"):
            shutil.rmtree(path)

    def _restore(self, step: int, **parts: Any) -> Any:
        from orbax.checkpoint import args

        path = self._directory / str(step)
        return self._checkpointer.restore(path, args.Composite(**parts)) if parts else {}

    def _check(self, step: int, name: str, wanted: dict[str, Any], found: dict[str, Any]) -> None:
        different = [
            f"{name}{leaf} is {found.get(leaf, 'absent')}, not {wanted.get(leaf, 'absent')}"
            for leaf in sorted(wanted.keys() | found.keys())
            if wanted.get(leaf) != found.get(leaf)
        ]
        if different:
            raise RunError(
                f"checkpoint {step} in {self._directory} does not fit this program "
                f"({different[0]}): give the arguments it was written with."
            )

    @cached_property
    def _checkpointer(self) -> Any:
        import orbax.checkpoint as ocp

        return ocp.Checkpointer(ocp.CompositeCheckpointHandler())


def _wrap(part: ArrayTree) -> dict[str, ArrayTree]:
    """Make a container of what may be a single array, which orbax would not take."""
    return {"tree": part}


def _is_key(leaf: Any) -> bool:
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _leaves(tree: ArrayTree) -> dict[str, str]:
    """Name each leaf of a tree, with its type and shape."""
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def _without_keys(tree: ArrayTree) -> ArrayTree:
    return jax.tree.map(lambda leaf: jax.random.key_data(leaf) if _is_key(leaf) else leaf, tree)


def _with_keys(like: ArrayTree, tree: ArrayTree) -> ArrayTree:
    def wrap(expected: Any, leaf: NDArray[Any]) -> jax.Array:
        array = jax.device_put(leaf)
        return jax.random.wrap_key_data(array) if _is_key(expected) else array

    return jax.tree.map(wrap, like, tree)


def _abstract(tree: ArrayTree) -> ArrayTree:
    """Describe the arrays to restore.

    By NumPy's arrays: orbax would tie JAX's to a device, and a program that gets some arrays that
    are and some that are not is compiled once more.
    """
    described = jax.eval_shape(_without_keys, tree)
    return jax.tree.map(lambda leaf: np.empty(leaf.shape, leaf.dtype), described)
