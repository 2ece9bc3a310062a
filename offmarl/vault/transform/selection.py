"""What is taken of a vault: pieces of its episodes."""

from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from offmarl.errors import OptionError
from offmarl.vault.dataset import Vault

Unit = Literal["episodes", "steps"]


class Pieces(NamedTuple):
    """P stretches of episodes, in the order of `Vault.episodes` and not overlapping."""

    episode: Int[np.ndarray, "P"]
    start: Int[np.ndarray, "P"]
    """First step on the time axis."""
    stop: Int[np.ndarray, "P"]
    """The one after the last."""

    @property
    def length(self) -> Int[np.ndarray, "P"]:
        """Steps of each."""
        return self.stop - self.start

    @property
    def steps(self) -> int:
        """Steps in all."""
        return int(self.length.sum())

    @property
    def episodes(self) -> int:
        """Episodes that something is taken of."""
        return len(np.unique(self.episode))


def of_episodes(vault: Vault, chosen: Bool[np.ndarray, "M"] | Int[np.ndarray, "P"]) -> Pieces:
    """Take whole episodes: those of a mask, or of numbers in any order."""
    episode = np.sort(np.arange(len(vault.episodes.row))[chosen])
    start = vault.episodes.start[episode]
    return Pieces(episode, start, start + vault.episodes.length[episode])


def everything(vault: Vault) -> Pieces:
    """Take all episodes."""
    return of_episodes(vault, np.ones(len(vault.episodes.row), bool))


def in_order(vault: Vault, order: Int[np.ndarray, "K"], steps: int) -> Pieces:
    """Take episodes in some order until there are so many steps, the last one cut short."""
    total = np.cumsum(vault.episodes.length[order])
    last = int(np.searchsorted(total, steps))
    pieces = of_episodes(vault, order[: last + 1])
    stop = pieces.stop - np.where(pieces.episode == order[last], total[last] - steps, 0)
    return pieces._replace(stop=stop)


def of_time(vault: Vault, start: int, stop: int) -> Pieces:
    """Take an interval of every row's time, and of episodes what lies in it."""
    pieces = everything(vault)
    within = Pieces(pieces.episode, np.maximum(pieces.start, start), np.minimum(pieces.stop, stop))
    return Pieces(*(column[within.length > 0] for column in within))


def interval(start: int | None, stop: int | None, count: int) -> tuple[int, int]:
    """Return an interval by Python's rules for slices; `OptionError` where it is empty."""
    begin, end, _ = slice(start, stop).indices(count)
    if begin >= end:
        asked = f"{start or 0:,} to {count if stop is None else stop:,}"
        raise OptionError(
            f"empty range: {asked}. There are {count:,}, counted from 0; negative numbers count "
            "from the end."
        )
    return begin, end
