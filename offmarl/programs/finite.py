"""Whether what programs learn is finite: asked after each block of updates, and of what is loaded.

The returns of a policy of NaN are finite: the largest of values that are NaN is the first of them.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path
from jaxtyping import Array, Bool, Float

from offmarl.errors import NotFiniteError
from offmarl.programs.cluster import gathered
from offmarl.types import ArrayTree
from offmarl.vault import Dataset, Mixture
from offmarl.vault.compat import IMPOSSIBLE_ACTIONS, MEANINGS, sentences


def require_finite(tree: ArrayTree, what: str) -> None:
    """Raise `NotFiniteError` if an array of what was loaded is not finite."""
    for name, leaf in _floats(tree):
        if not np.isfinite(np.asarray(leaf)).all():
            raise NotFiniteError(
                f"{what} is not finite ({name or 'its only array'}), so it is no result: train "
                "again with other settings, such as a lower learning rate, and another --out."
            )


def faults(
    done: int,
    seeds: Sequence[int],
    metrics: Mapping[str, Float[np.ndarray, "seeds n"]],
    learned: ArrayTree,
    axes: int = 1,
) -> dict[int, str]:
    """Return what is not finite after ``done`` updates, by seed: a metric of the last n, an array.

    ``learned`` has ``axes`` axes of seeds: 1, or 0 for that of a single seed.
    """
    named = [*_floats(learned)]
    bad = ~np.asarray(gathered(_are_finite(axes, [leaf for _, leaf in named]))) if named else None
    arrays = np.zeros((0, len(seeds))) if bad is None else bad.reshape(len(named), -1)
    wrong = {name: ~np.isfinite(values) for name, values in metrics.items()}
    if not arrays.any() and not any(x.any() for x in wrong.values()):
        return {}
    found = {}
    for place, seed in enumerate(seeds):
        words = []
        at_first = [(x[place].argmax(), name) for name, x in wrong.items() if x[place].any()]
        for at, name in sorted(at_first)[:1]:
            update = done - metrics[name].shape[1] + at + 1
            words.append(f"{name} is {metrics[name][place, at]} at update {update:,}")
        if own := [name for (name, _), x in zip(named, arrays, strict=True) if x[place]]:
            words.append(f"{own[0]} ({len(own)} of {len(named)} arrays) after update {done:,}")
        if words:
            found[seed] = ", ".join(words)
    return found


def error(found: Mapping[int, str], left: str = "") -> NotFiniteError:
    """Return the error for `faults`; ``left`` says what there is, from `left_behind`."""
    seeds: dict[str, list[str]] = {}
    for seed, fault in found.items():
        seeds.setdefault(fault, []).append(str(seed))
    named = "; ".join(f"seed {', '.join(own)}: {fault}" for fault, own in seeds.items())
    return NotFiniteError(
        f"training is not finite ({named}).{left} Repeating the command would end here again: "
        "give other settings, such as a lower learning rate, and another --out."
    )


def left_behind(directory: Path, last: int | None, data: str) -> str:
    """Say what a run has kept, ``last`` the update of its last checkpoint, and of its data."""
    kept = "has saved nothing" if last is None else f"keeps its checkpoint of update {last:,}"
    return f" It stops for all seeds, and {directory} {kept}. {data}"


def about(dataset: Dataset | Mixture) -> str:
    """Return what is known of values in a dataset that are not finite, which no batch has."""
    found = []
    for one in dataset.sources if isinstance(dataset, Mixture) else (dataset,):
        kept, steps = one.sound_episodes, one.episodes.length.sum()
        left = 0 if kept is None else steps - kept.length.sum()
        known = (
            [f"{left:,} of {steps:,} steps are not finite or follow such a step"] if left else []
        )
        known += [text.rstrip(".") for text in sentences(one.provenance.get("faults"))]
        known += [MEANINGS[quirk] for quirk in one.quirks if quirk == IMPOSSIBLE_ACTIONS]
        found += [f"In {one.path}, {', and '.join(known)}." for _ in known[:1]]
    return " ".join(found) or "No step of the data is known to be at fault."


def _floats(tree: ArrayTree) -> list[tuple[str, Any]]:
    """Return the arrays of floats in a tree, with their paths."""
    return [
        (keystr(path, simple=True, separator="/"), leaf)
        for path, leaf in tree_leaves_with_path(tree)
        if jnp.issubdtype(leaf.dtype, jnp.floating)
    ]


@partial(jax.jit, static_argnums=0)
def _are_finite(axes: int, leaves: list[Array]) -> Bool[Array, "leaves *seeds"]:
    found = [jnp.isfinite(leaf).all(tuple(range(axes, leaf.ndim))) for leaf in leaves]
    return jnp.stack(found)
