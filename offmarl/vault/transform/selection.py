"""Selections of episodes and steps of vaults: by number, by time, or as a sample."""

from collections.abc import Sequence
from functools import cached_property
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from offmarl.config import check_seed
from offmarl.errors import OptionError
from offmarl.vault.format.layout import NumpyArray
from offmarl.vault.format.tables import Episodes
from offmarl.vault.read.reader import Reader

Unit = Literal["episodes", "steps"]

Order = Int[np.ndarray, "K"]
"""Episode numbers in the order in which they are drawn: every prefix is a sample."""

_STRATA = 10


class Pieces(NamedTuple):
    """P intervals within episodes, in the order of `Dataset.episodes`, without overlap."""

    episode: Int[np.ndarray, "P"]
    start: Int[np.ndarray, "P"]
    """First step on the time axis."""
    stop: Int[np.ndarray, "P"]
    """One past the last step."""

    @property
    def length(self) -> Int[np.ndarray, "P"]:
        """Steps of each piece."""
        return self.stop - self.start

    @property
    def steps(self) -> int:
        """Steps of all pieces."""
        return int(self.length.sum())

    @property
    def episodes(self) -> int:
        """Episodes with at least one piece."""
        return len(np.unique(self.episode))


def whole_episodes(
    vault: Reader, episodes: Bool[np.ndarray, "M"] | Int[np.ndarray, "P"] | slice = slice(None)
) -> Pieces:
    """Take whole episodes, given by a mask or by numbers in any order; all by default."""
    episode = np.sort(np.arange(len(vault.episodes.row))[episodes])
    start = vault.episodes.start[episode]
    return Pieces(episode, start, start + vault.episodes.length[episode])


def time_interval(vault: Reader, start: int, stop: int) -> Pieces:
    """Take a range of time steps of every row; episodes are cut at its ends."""
    pieces = whole_episodes(vault)
    within = Pieces(pieces.episode, np.maximum(pieces.start, start), np.minimum(pieces.stop, stop))
    return Pieces(*(column[within.length > 0] for column in within))


def interval(start: int | None, stop: int | None, count: int) -> tuple[int, int]:
    """Resolve an interval by Python's rules for slices; `OptionError` if it is empty."""
    begin, end, _ = slice(start, stop).indices(count)
    if begin >= end:
        span = f"{start or 0:,} to {count if stop is None else stop:,}"
        raise OptionError(
            f"empty range: {span}. There are {count:,}, counted from 0; negative numbers count "
            "from the end."
        )
    return begin, end


class Pool:
    """The M episodes of several vaults, numbered one vault after the other."""

    def __init__(self, vaults: Sequence[Reader]):
        self.vaults = list(vaults)
        self.path = ", ".join(str(vault.path) for vault in vaults)
        self.length: Int[np.ndarray, "M"] = np.concatenate([x.episodes.length for x in vaults])
        """Steps of each episode."""

    @cached_property
    def _episodes(self) -> Episodes:
        return Episodes.joined([vault.episodes for vault in self.vaults])

    @property
    def scored(self) -> Int[np.ndarray, "K"]:
        """The episodes that have a return and that the environment ended."""
        return np.flatnonzero(self._episodes.scored)

    @property
    def returns(self) -> Float[np.ndarray, "K"]:
        """Returns of the scored episodes; `OptionError` if there are none."""
        returns = self._episodes.complete_returns
        if not len(returns):
            raise OptionError(
                f"{self.path} has no complete episode (one that the environment ended), so there "
                "are no returns to sample by: use --steps or --episodes."
            )
        return returns

    def take(self, steps: Int[np.ndarray, "M"]) -> list[Pieces]:
        """Take so many of the first steps of each episode; return the pieces of each vault."""
        counts = [len(vault.episodes.row) for vault in self.vaults]
        pieces = []
        for vault, length in zip(self.vaults, np.split(steps, np.cumsum(counts)[:-1]), strict=True):
            episode = np.flatnonzero(length)
            start = vault.episodes.start[episode]
            pieces.append(Pieces(episode, start, start + length[episode]))
        return pieces


# ---------------------------------------------------------------------------------- samples


def match_returns(
    returns: Float[np.ndarray, "M"], like: Float[np.ndarray, "L"], seed: int
) -> Order:
    """Order episodes so that every prefix has returns distributed as ``like``.

    The deciles of ``like`` bound ten strata, fewer where deciles are equal. Every prefix takes
    random episodes from each stratum in proportion to the share of ``like`` there, to within one
    episode.
    """
    deciles = np.quantile(like, np.linspace(0, 1, _STRATA + 1))
    edges = np.unique(deciles)
    # The lowest return is a stratum of its own only if a tenth of all have it.
    first = int(deciles[0] < deciles[1])
    stratum, like_stratum = (np.maximum(np.searchsorted(edges, x), first) for x in (returns, like))
    share = np.bincount(like_stratum, minlength=len(edges)) / len(like)
    inside = (returns >= edges[0]) & (returns <= edges[-1])
    due: NumpyArray = np.full(len(returns), np.inf)
    most = np.inf
    rng = np.random.default_rng(check_seed(seed))
    for index in np.flatnonzero(share).tolist():
        members = np.flatnonzero((stratum == index) & inside)
        if not len(members):
            raise OptionError(
                "the distribution of returns cannot be matched: there is no episode with a return "
                f"from {edges[max(index - 1, 0)]:.6g} to {edges[index]:.6g}. Sample from data that "
                "covers these returns."
            )
        # Episodes of a stratum are placed at even distances, which are shorter for larger shares.
        moments = np.arange(len(members)) + rng.random(len(members))
        due[rng.permutation(members)] = moments / share[index]
        most = min(most, len(members) / share[index])
    order = np.argsort(due, kind="stable")
    return order[due[order] <= most]


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
    """Take the first of ordered episodes, up to a number of steps or episodes; None for all."""
    available = int(pool.length[order].sum())
    for amount, unit, count in ((steps, "steps", available), (episodes, "episodes", len(order))):
        if amount is not None and amount > count:
            raise OptionError(
                f"{amount:,} {unit} were requested, and {pool.path} has {count:,} to choose from."
            )
    order = order[:episodes]
    through = np.cumsum(pool.length[order])  # the last one is cut short
    taken = np.zeros_like(pool.length)
    taken[order] = np.diff(through if steps is None else np.minimum(through, steps), prepend=0)
    return pool.take(taken)
