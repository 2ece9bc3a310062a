"""The arrays of checkpoints: what orbax can write of a tree, their names, types and checksums."""

import json
from typing import Any

import google_crc32c
import jax
import numpy as np
from numpy.typing import NDArray

from offmarl.types import ArrayTree


def _is_key(leaf: Any) -> bool:
    return jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def leaf_types(tree: ArrayTree) -> dict[str, str]:
    """Name each leaf of a tree, with its type and shape."""
    return {
        jax.tree_util.keystr(path): f"{leaf.dtype}{list(leaf.shape)}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def checksums(tree: ArrayTree) -> dict[str, str]:
    """Return the CRC32C of each array on the host: of its type and shape, and of its bytes."""

    def checksum(array: NDArray[Any]) -> str:
        crc = google_crc32c.value(f"{array.dtype}{list(array.shape)}".encode())
        return f"{google_crc32c.extend(crc, np.asarray(array).tobytes()):08x}"

    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): checksum(leaf) for path, leaf in leaves}


def sealed(about: dict[str, Any]) -> dict[str, Any]:
    """Return a JSON object with its own checksum, of its canonical text."""
    about = json.loads(json.dumps(about))  # keys become text, tuples lists
    text = json.dumps(about, sort_keys=True, separators=(",", ":"))
    return {**about, "crc32c": f"{google_crc32c.value(text.encode()):08x}"}


def is_intact(about: dict[str, Any]) -> bool:
    rest = {key: value for key, value in about.items() if key != "crc32c"}
    return bool(sealed(rest)["crc32c"] == about.get("crc32c"))


def without_keys(tree: ArrayTree) -> ArrayTree:
    """Return what orbax can write: the data of keys, and None for arrays without entries."""

    def plain(leaf: Any) -> Any:
        if _is_key(leaf):
            return jax.random.key_data(leaf)
        return None if np.size(leaf) == 0 else leaf

    return jax.tree.map(plain, tree)


def with_keys(like: ArrayTree, tree: ArrayTree) -> ArrayTree:
    """Undo `without_keys`, for a tree of the structure of ``like``."""

    def wrap(expected: Any, leaf: NDArray[Any] | None) -> jax.Array:
        if leaf is None:
            return jax.device_put(np.empty(expected.shape, expected.dtype))
        array = jax.device_put(leaf)
        return jax.random.wrap_key_data(array) if _is_key(expected) else array

    return jax.tree.map(wrap, like, tree)


def abstract(tree: ArrayTree) -> ArrayTree:
    """Describe the arrays to read, as `without_keys` makes them."""

    def describe(leaf: Any) -> Any:
        if _is_key(leaf):
            leaf = jax.eval_shape(jax.random.key_data, leaf)
        if not leaf.size:
            return None
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)  # type: ignore[no-untyped-call]

    return jax.tree.map(describe, tree)
