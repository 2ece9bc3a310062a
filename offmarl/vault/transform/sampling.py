"""Which episodes a sample is of: at random, the best, or with a given distribution of returns."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from offmarl.errors import OptionError
from offmarl.vault.dataset import Vault
from offmarl.vault.layout import NumpyArray
from offmarl.vault.transform import selection

Order = Int[np.ndarray, "K"]
"""Numbers of episodes, in the order in which they would be taken: a prefix is a sample."""

SPLITS = {2: ("train", "validation"), 3: ("train", "validation", "test")}
"""The parts that a vault is split into."""

_STRATA = 10


def at_random(count: int, seed: int) -> Order:
    """Return all episodes in random order."""
    return np.random.default_rng(seed).permutation(count)


def returns_of(vault: Vault) -> Float[np.ndarray, "K"]:
    """Return the returns of a vault's complete episodes; `OptionError` where there are none."""
    returns = vault.episodes.complete_returns
    if not len(returns):
        raise OptionError(
            f"{vault.path} has no complete episode, one that the environment ended, to go by the "
            "returns of: sample by --steps or --episodes."
        )
    return returns


def best_first(returns: Float[np.ndarray, "M"]) -> Order:
    """Return all episodes by return, the highest first; of equals, the first."""
    return np.argsort(-returns, kind="stable")


def matched(returns: Float[np.ndarray, "M"], like: Float[np.ndarray, "L"], seed: int) -> Order:
    """Return episodes in an order whose prefixes have returns distributed as others'.

    The deciles of ``like`` bound ten strata, fewer where deciles are equal. Within each, episodes
    come in random order; every prefix takes from each stratum in proportion to the share of
    ``like`` there, to within one episode.

    Parameters
    ----------
    returns
        Of the episodes to choose from.
    like
        The returns whose distribution is wanted.
    seed
        Decides everything random.

    Returns
    -------
    Order
        No more episodes than can be matched: it ends where a stratum has no further ones.

    Raises
    ------
    OptionError
        Nothing can be matched, since a stratum is empty.
    """
    deciles = np.quantile(like, np.linspace(0, 1, _STRATA + 1))
    edges = np.unique(deciles)
    # The lowest return is a stratum of its own only where a tenth of all have it.
    first = int(deciles[0] < deciles[1])
    stratum, wanted = (np.maximum(np.searchsorted(edges, x), first) for x in (returns, like))
    share = np.bincount(wanted, minlength=len(edges)) / len(like)
    inside = (returns >= edges[0]) & (returns <= edges[-1])
    due: NumpyArray = np.full(len(returns), np.inf)
    most = np.inf
    rng = np.random.default_rng(seed)
    for one in np.flatnonzero(share).tolist():
        members = np.flatnonzero((stratum == one) & inside)
        if not len(members):
            raise _cannot_match(edges[max(one - 1, 0)], edges[one])
        # Each stratum's episodes fall due at even distances, the shorter the larger its share.
        moments = np.arange(len(members)) + rng.random(len(members))
        due[rng.permutation(members)] = moments / share[one]
        most = min(most, len(members) / share[one])
    order = np.argsort(due, kind="stable")
    return order[due[order] <= most]


def _cannot_match(low: float, high: float) -> OptionError:
    return OptionError(
        f"the distribution of returns cannot be matched: there is no episode with a return from "
        f"{low:.6g} to {high:.6g}. Sample from data that covers these returns."
    )


def check_amount(
    steps: int | None, episodes: int | None, top: float | None, match_returns: object
) -> None:
    """Refuse samples that make no sense; see `offmarl.vault.sample`."""
    amounts = [amount for amount in (steps, episodes, top) if amount is not None]
    if len(amounts) > 1 or (top is not None and match_returns):
        raise OptionError(
            "a sample is of some number of steps, or of episodes, or the top of all: ask for one "
            "of them. The top has returns of its own, so they cannot be matched."
        )
    if not amounts and isinstance(match_returns, bool):
        raise OptionError("give --steps, --episodes or --top (in Python: steps, episodes or top).")
    if any(amount <= 0 for amount in amounts) or (top is not None and top > 1):
        raise OptionError(
            f"a sample has at least one step or episode, and the top fraction is in (0, 1]: got "
            f"{amounts[0]}."
        )


def check_fractions(fractions: Sequence[float]) -> None:
    """Refuse fractions that a vault cannot be split by."""
    if len(fractions) not in SPLITS or min(fractions) <= 0 or abs(sum(fractions) - 1) > 1e-6:
        raise OptionError(
            f"fractions are two (train, validation) or three (and test), above 0, and sum to 1: "
            f"got {' '.join(f'{fraction:g}' for fraction in fractions) or 'none'}."
        )


def take_first(
    vault: Vault, order: Order, steps: int | None, episodes: int | None
) -> selection.Pieces:
    """Take so many of ordered episodes; all, if nobody says how many."""
    there = int(vault.episodes.length[order].sum())
    for wanted, unit, count in ((steps, "steps", there), (episodes, "episodes", len(order))):
        if wanted is not None and wanted > count:
            raise OptionError(
                f"{wanted:,} {unit} were asked for, and {vault.path} has {count:,} to choose from."
            )
    if steps is not None:
        return selection.in_order(vault, order, steps)
    return selection.of_episodes(vault, order[:episodes])
