"""Where a recording comes from, and whether the one on disk is the one asked for."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

import offmarl
from offmarl import envs, vault
from offmarl.errors import RunError
from offmarl.types import ArrayTree, EnvSpec


def fingerprint(tree: ArrayTree) -> str:
    """Return a SHA-256 of the names and contents of a tree's arrays."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)}{array.dtype}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def is_complete(path: Path, recipe: Mapping[str, Any]) -> bool:
    """Say whether a recording is there and whole.

    Parameters
    ----------
    path
        Of its vault.
    recipe
        A JSON object of all that decides what is recorded.

    Raises
    ------
    RunError
        The vault at the path was recorded by another recipe.
    """
    if not path.exists():
        return False
    provenance = vault.open_vault(path).provenance
    found = provenance.get("recipe", {})
    for name in sorted(found.keys() | recipe.keys()):
        if found.get(name) != recipe.get(name):
            raise RunError(
                f"{path} was begun with {name}={found.get(name)!r}, not {recipe.get(name)!r}: "
                "give the same arguments to go on with it, or another place for the new one."
            )
    return bool(provenance["complete"])


def open_for_recording(
    path: Path,
    spec: EnvSpec,
    rows: int,
    recipe: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> vault.Writer:
    """Create the vault of a recording, or go on with it.

    ``provenance`` is kept with the data, and so are the recipe (see `is_complete`) and the versions
    of the software. Where the environment is not one of offmarl, ``environment_source`` says where
    its code came from.
    """
    if path.exists():
        return vault.resume(path)
    about = dict(provenance) | {"recipe": dict(recipe), "software": _software(), "complete": False}
    if source := envs.source(spec.name):
        about["environment_source"] = source
    return vault.create(path, spec, rows=rows, provenance=about)


def _software() -> dict[str, str]:
    return {
        "offmarl": offmarl.__version__,
        "jax": jax.__version__,
        "platform": jax.default_backend(),
    }
