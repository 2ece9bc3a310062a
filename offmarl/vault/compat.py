"""Deviations of published vaults, reported by name and corrected on reading."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from offmarl.types import Transition
from offmarl.vault import tables
from offmarl.vault.layout import Leaf, NumpyArray
from offmarl.vault.tables import Table

LIMIT_UNKNOWN = "time limit unknown"

MEANINGS = {
    "several rows": "episodes lie in several rows, each on its own time axis",
    "state per agent": "each agent has a state of its own: they are concatenated",
    "action axis": "actions have one more axis, of length one: it is dropped",
    "no legal actions": "legal actions are unknown: all actions count as legal",
    "no state": "there is no global state: all observations are used as the state",
    "no terminals": "terminations are unknown: no episode terminates",
    "no truncations": "truncations are unknown",
    "padded observations": "observations are padded with -inf, which is read as 0",
    "time limit terminal": "the time limit is flagged as termination and read as truncation",
    LIMIT_UNKNOWN: "all episodes of the greatest length are flagged as terminated: if that "
    "is a time limit, open the vault with it",
    "not finite": "some observations, states or rewards are NaN or infinite and are kept "
    "unchanged; episodes without a finite return are excluded from mean returns",
    "impossible actions": "some actions are outside the action space and are kept unchanged",
    "flags other than 0 and 1": "some flags are neither 0 nor 1 and count as 1",
    "impossible log-probabilities": "some log-probabilities are infinite or above 0 and are "
    "kept unchanged",
    "negative policies": "some policy ids are below -1, which means unknown",
}
"""All quirks, and how they are handled."""

_ABSENT = {
    "infos.legals": "no legal actions",
    "infos.state": "no state",
    "terminals": "no terminals",
    "truncations": "no truncations",
}


def of_shapes(leaves: Mapping[str, Leaf], rows: int) -> list[str]:
    """Return the quirks that the names and shapes of a foreign vault's arrays tell."""
    state, actions = leaves.get("infos.state"), leaves["actions"]
    found = {
        "several rows": rows > 1,
        "state per agent": state is not None and len(state.shape) > 1,
        "action axis": actions.dtype.kind in "biu" and len(actions.shape) > 1,
    }
    absent = [quirk for name, quirk in _ABSENT.items() if name not in leaves]
    return [quirk for quirk, there in found.items() if there] + absent


def recorded(provenance: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the quirks that a vault of offmarl notes of itself: what an import has kept."""
    noted = provenance.get("quirks")
    return tuple(quirk for quirk in MEANINGS if isinstance(noted, list) and quirk in noted)


def is_padded(observations: NumpyArray) -> bool:
    """Whether observations are padded with minus infinity."""
    return bool(np.isneginf(observations).any())


def of_returns(episodes: Table) -> list[str]:
    """Return the quirks that the returns of an episode table tell."""
    return [] if np.isfinite(episodes["returns"]).all() else ["not finite"]


def of_ends(episodes: Table, time_limit: int | None) -> list[str]:
    """Return the quirks of how episodes end, as an episode table of what is on disk tells them."""
    if time_limit is not None:
        return ["time limit terminal"] if by_limit(episodes, time_limit).any() else []
    ended = episodes[episodes["cause"] != tables.OPEN]
    longest = ended["cause"][ended["length"] == ended["length"].max(initial=0)]
    alike = len(longest) > 1 and (longest == tables.TERMINATED).all()
    return [LIMIT_UNKNOWN] if alike else []


def by_limit(ended: Table, time_limit: int | None) -> NumpyArray:
    """Return which episodes of a table a time limit ended although they are flagged terminated."""
    if time_limit is None:
        return np.zeros(len(ended), bool)
    return (ended["cause"] == tables.TERMINATED) & (ended["length"] >= time_limit)


def normalise(steps: Transition, limits: NumpyArray) -> Transition:
    """Put right what is padded, and how episodes end.

    Parameters
    ----------
    steps
        Records ``(*b, ...)`` of a foreign vault.
    limits
        ``(*b,)``, the steps at which a time limit is flagged as termination.
    """
    limit = limits[..., None] & steps.terminated
    return steps._replace(
        view=steps.view._replace(
            observation=_unpad(steps.view.observation), state=_unpad(steps.view.state)
        ),
        terminated=steps.terminated & ~limit,
        truncated=steps.truncated | limit,
    )


def _unpad(values: NumpyArray) -> NumpyArray:
    padding = np.isneginf(values)
    return np.where(padding, np.float32(0), values) if padding.any() else values
