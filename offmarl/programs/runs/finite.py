"""Checks that learned arrays are finite: after each block of updates, and when they are loaded.

Returns do not show it: the argmax of values that are NaN is the first action.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path
from jaxtyping import Array, Bool, Float

from offmarl._compiling import jit_rarely_run
from offmarl.errors import NotFiniteError
from offmarl.programs.cluster import gather_all
from offmarl.types import ArrayTree

_ADVICE = "other settings, such as a lower learning rate, and another --out."


def require_finite(tree: ArrayTree, what: str) -> None:
    """Raise `NotFiniteError` if an array of a loaded tree is not finite."""
    if names := infinities([tree]):
        raise NotFiniteError(f"{what} is not finite ({names[0]}): train again with {_ADVICE}")


def faults(
    done: int,
    seeds: Sequence[int],
    metrics: Mapping[str, Float[np.ndarray, "seeds n"]],
    learned: ArrayTree,
    axes: int = 1,
    by_design: Collection[str] = (),
) -> dict[int, str]:
    """Return which metrics of the last n of ``done`` updates, and arrays, are not finite, by seed.

    ``learned`` has ``axes`` axes of seeds: 1, or 0 for that of a single seed. Arrays that were not
    finite before an update (`infinities`) are ``by_design``, such as the best value so far.
    """
    arrays = [(name, leaf) for name, leaf in _floats(learned) if name not in by_design]
    bad = np.zeros((len(arrays), len(seeds)), bool)
    if arrays and not np.asarray(gather_all(_are_finite(axes, [leaf for _, leaf in arrays]))).all():
        leaves = [np.asarray(gather_all(leaf)) for _, leaf in arrays]
        rows = [~np.isfinite(leaf if axes else leaf[None]) for leaf in leaves]
        bad = np.stack([row.reshape(len(row), -1).any(1) for row in rows])
    by_seed: dict[int, str] = {}
    for place, seed in enumerate(seeds):
        wrong = {name: ~np.isfinite(values[place]) for name, values in metrics.items()}
        words = []
        for at, name in sorted((x.argmax(), name) for name, x in wrong.items() if x.any())[:1]:
            update = done - len(wrong[name]) + at + 1
            words.append(f"{name} is {metrics[name][place, at]} at update {update:,}")
        if names := [name for (name, _), x in zip(arrays, bad, strict=True) if x[place]]:
            words.append(f"{names[0]} ({len(names)} of {len(arrays)} arrays) after update {done:,}")
        if words:
            by_seed[seed] = ", ".join(words)
    return by_seed


def infinities(trees: Sequence[ArrayTree]) -> list[str]:
    """Return the names of arrays that are not finite in one of some trees."""
    arrays = (pair for tree in trees for pair in _floats(tree))
    return [name for name, leaf in arrays if not np.isfinite(np.asarray(leaf)).all()]


def not_finite_error(
    by_seed: Mapping[int, str], directory: Path, last: int | None
) -> NotFiniteError:
    """Return the error for `faults`, with what the run has kept: ``last`` is a checkpoint."""
    seeds: dict[str, list[str]] = {}
    for seed, fault in by_seed.items():
        seeds.setdefault(fault, []).append(str(seed))
    reasons = "; ".join(f"seed {', '.join(numbers)}: {fault}" for fault, numbers in seeds.items())
    saved = "has saved nothing" if last is None else f"keeps its checkpoint of update {last:,}"
    return NotFiniteError(
        f"training is not finite ({reasons}). It stops for all seeds, and {directory} {saved}. "
        f"It would end here again: give {_ADVICE}"
    )


def _floats(tree: ArrayTree) -> list[tuple[str, Any]]:
    """Return the arrays of floats in a tree, with their paths."""
    return [
        (keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in tree_leaves_with_path(tree)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]


@jit_rarely_run(static_argnums=0)
def _are_finite(axes: int, leaves: list[Array]) -> Bool[Array, "*seeds"]:
    # One joined array compiles in a quarter of the time of a reduction for each.
    flat = [jnp.isfinite(leaf).reshape(*leaf.shape[:axes], -1) for leaf in leaves]
    return jnp.concatenate(flat, axis=-1).all(-1)
