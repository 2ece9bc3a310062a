"""Samples of episodes: drawn at random, by their returns, or the best."""

import numpy as np
from jaxtyping import Float, Int

from offmarl.config import check_seed
from offmarl.errors import OptionError
from offmarl.vault.layout import NumpyArray
from offmarl.vault.transform.selection import Pieces, Pool

Order = Int[np.ndarray, "K"]
"""Episode numbers in the order in which they are drawn: every prefix is a sample."""

_STRATA = 10


def best_first(returns: Float[np.ndarray, "M"]) -> Order:
    """Return all episode numbers by decreasing return; ties keep their order."""
    return np.argsort(-returns, kind="stable")


def matched(returns: Float[np.ndarray, "M"], like: Float[np.ndarray, "L"], seed: int) -> Order:
    """Order episodes so that every prefix has returns distributed as ``like``.

    The deciles of ``like`` bound ten strata, fewer where deciles are equal. Every prefix takes
    random episodes from each stratum in proportion to the share of ``like`` there, to within one
    episode.
    """
    deciles = np.quantile(like, np.linspace(0, 1, _STRATA + 1))
    edges = np.unique(deciles)
    # The lowest return is a stratum of its own only if a tenth of all have it.
    first = int(deciles[0] < deciles[1])
    stratum, wanted = (np.maximum(np.searchsorted(edges, x), first) for x in (returns, like))
    share = np.bincount(wanted, minlength=len(edges)) / len(like)
    inside = (returns >= edges[0]) & (returns <= edges[-1])
    due: NumpyArray = np.full(len(returns), np.inf)
    most = np.inf
    rng = np.random.default_rng(check_seed(seed))
    for one in np.flatnonzero(share).tolist():
        members = np.flatnonzero((stratum == one) & inside)
        if not len(members):
            raise _cannot_match(edges[max(one - 1, 0)], edges[one])
        # Episodes of a stratum are placed at even distances, which are shorter for larger shares.
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
    steps: int | None, episodes: int | None, top: float | None, matches: bool, like: bool
) -> None:
    """Refuse contradictory sizes of a sample; see `offmarl.vault.sample`."""
    amounts = [amount for amount in (steps, episodes, top) if amount is not None]
    if len(amounts) > 1:
        raise OptionError("give only one of --steps, --episodes and --top.")
    if top is not None and (matches or like):
        raise OptionError("--top selects by return, so the returns of others cannot be matched.")
    if not amounts and not like:
        raise OptionError("give --steps, --episodes or --top (in Python: steps, episodes or top).")
    if any(amount <= 0 for amount in amounts) or (top is not None and top > 1):
        raise OptionError(
            f"a sample has at least one step or episode, and the top fraction is in (0, 1]: got "
            f"{amounts[0]}."
        )


def take_first(pool: Pool, order: Order, steps: int | None, episodes: int | None) -> list[Pieces]:
    """Take the first of ordered episodes: so many steps or episodes; all if both are None."""
    available = int(pool.length[order].sum())
    for wanted, unit, count in ((steps, "steps", available), (episodes, "episodes", len(order))):
        if wanted is not None and wanted > count:
            raise OptionError(
                f"{wanted:,} {unit} were requested, and {pool.path} has {count:,} to choose from."
            )
    if steps is not None:
        return _first_steps(pool, order, steps)
    return pool.whole(order[:episodes])


def _first_steps(pool: Pool, order: Order, steps: int) -> list[Pieces]:
    """Take episodes in the given order up to a number of steps; the last one is cut short."""
    total = np.cumsum(pool.length[order])
    last = int(np.searchsorted(total, steps))
    found = pool.whole(order[: last + 1])
    shortened = pool.divide(order[last : last + 1])
    return [
        pieces._replace(
            stop=pieces.stop - np.where(np.isin(pieces.episode, cut), total[last] - steps, 0)
        )
        for pieces, cut in zip(found, shortened, strict=True)
    ]
