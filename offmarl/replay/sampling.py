"""Sources of replay, the order of their episodes, and the windows of a batch.

Each episode of L steps takes L+1 slots: one for each step, and one for the view that the episode
ended with. The slots of all episodes form a ring. A window of T steps is T+1 slots on end, the
last of which only gives the next view of the slot before it. Windows start at every slot of the
ring with the same probability. So each step is equally likely in each of a window's first T
slots, wherever in its episode it is, and however long the episode.
"""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from offmarl.errors import OptionError, ShapeError
from offmarl.types import EnvSpec, View

Chosen = NDArray[np.int64] | None
"""Numbers of the episodes that windows are drawn from, in order; None for all."""


def numbers_of(episodes: Any, count: int, path: PurePath) -> NDArray[np.int64]:
    """Return the numbers of episodes, from numbers or from a mask of all ``count`` of them.

    `OptionError` if these are not numbers of episodes of ``path``, or one is named twice;
    `ShapeError` if it has none.
    """
    array = np.asarray(episodes if hasattr(episodes, "__array__") else [*episodes])
    is_mask = array.dtype == bool
    if array.size and (array.shape != (count,) if is_mask else array.dtype.kind not in "iu"):
        raise OptionError(
            f"episodes cannot be chosen by values of type {array.dtype} and shape {array.shape}: "
            f"give a truth for each of the {count} episodes, or their numbers."
        )
    array = np.flatnonzero(array) if is_mask else array
    if not count:
        raise ShapeError(f"{path} holds no steps yet: record into it first.")
    if not array.size or array.ndim != 1 or array.min() < 0 or array.max() >= count:
        raise OptionError(f"{path} has episodes 0 to {count - 1}: choose some of these.")
    if len(np.unique(array)) < len(array):
        raise OptionError("an episode is named twice: name each once.")
    return array.astype(np.int64)


@runtime_checkable
class EpisodeTable(Protocol):
    """Where each of M episodes is; `offmarl.vault.Episodes` is one."""

    row: NDArray[np.int64]
    start: NDArray[np.int64]
    """Index of the first step on the time axis of the row."""
    length: NDArray[np.int64]
    final: NDArray[np.int64]
    """Index into the final views, or -1."""


@runtime_checkable
class Source(Protocol):
    """A source of windows; `offmarl.vault.Dataset` is one.

    Steps are in ``rows`` rows of ``length`` steps; in each row the episodes follow one another
    without gaps.

    Attributes
    ----------
    path
        For messages.
    spec
        Sizes of the data.
    """

    path: PurePath
    rows: int
    length: int

    @property
    def spec(self) -> EnvSpec:
        """Sizes of the data."""

    @property
    def episodes(self) -> Any:
        """The `EpisodeTable`, by row and start."""

    @property
    def chunk_shape(self) -> tuple[int, int]:
        """Rows and steps that are stored together."""

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Cut time into intervals that fit in memory."""

    def rewards(self, start: int, stop: int) -> NDArray[np.float32]:
        """Read the rewards of an interval of time, ``(rows, T, N)``."""

    def window_fields(
        self, rows: Any, starts: Any, length: int, index: Any, out: Mapping[str, Any], at: Any
    ) -> None:
        """Gather W windows, ``(W, length, ...)``, and write some of their steps to arrays."""

    def final_views(self, numbers: Any) -> View:
        """Read final views, ``(len(numbers), ...)``."""

    def prepare_fork(self) -> None:
        """Let processes that are forked from this one read the source; may do nothing."""


@dataclass(frozen=True)
class Windows:
    """The shape of batches, and the fields of their windows.

    Parameters
    ----------
    batch_size
        B, windows in a batch.
    length
        Steps in a window that count in losses.
    burn_in
        Steps before these that only fill a recurrent memory: ``mask`` is false there.
    return_to_go
        Discount of the returns-to-go that batches carry: 1 for plain sums. None leaves them out.
    extras
        Names of the extra columns that batches carry; all by default.

    Raises
    ------
    ShapeError
        A size is too small.
    OptionError
        The discount is not in [0, 1].
    """

    batch_size: int = 32
    length: int = 20
    burn_in: int = 0
    return_to_go: float | None = None
    extras: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Check the sizes."""
        if self.batch_size < 1 or self.length < 1 or self.burn_in < 0:
            burn_in = f" after {self.burn_in} of burn-in" if self.burn_in else ""
            raise ShapeError(
                f"batches of {self.batch_size} windows of {self.length} steps{burn_in} cannot be "
                "drawn: windows and steps must be at least 1, and burn-in at least 0."
            )
        if self.return_to_go is not None and not 0 <= self.return_to_go <= 1:
            raise OptionError(
                f"a return-to-go cannot be discounted by {self.return_to_go:g}: give a discount "
                "from 0 to 1, where 1 is the plain sum of rewards."
            )

    @property
    def steps(self) -> int:
        """T: all steps of a window, burn-in included."""
        return self.burn_in + self.length

    @property
    def slots(self) -> int:
        """T+1: its views."""
        return self.steps + 1


def sound_episodes(source: Any) -> EpisodeTable:
    """Return a source's episodes up to their first steps that are not finite, to draw windows from.

    Warns of steps that no batch has.
    """
    shortened = getattr(source, "sound_episodes", None)
    table: EpisodeTable = source.episodes if shortened is None else shortened
    illegal = getattr(source, "illegal_steps", None)
    counts = {
        "that are not finite or come after such a step": int(
            (source.episodes.length - table.length).sum()
        ),
        "whose actions the mask forbids": 0 if illegal is None else int(illegal.sum()),
    }
    for kind, count in counts.items():
        if count:
            warnings.warn(f"{source.path}: batches leave out {count:,} steps {kind}.", stacklevel=1)
    return table


def are_whole(source: Any) -> NDArray[np.bool_]:
    """Return which episodes of a source or a mixture, ``(M,)``, are in batches as a whole."""
    masks = []
    for vault in getattr(source, "sources", (source,)):
        shortened = getattr(vault, "sound_episodes", None)
        illegal = getattr(vault, "illegal_steps", None)
        is_whole = np.ones(len(vault.episodes.length), bool)
        if shortened is not None:
            is_whole &= shortened.length == vault.episodes.length
        masks.append(is_whole if illegal is None else is_whole & (illegal == 0))
    return np.concatenate(masks)


class SlotTable:
    """The ring of slots: episodes laid end to end, each with one slot more than it has steps.

    It takes memory by the episode. ``recorded`` are all episodes of the ``source``, and
    ``episodes`` the numbers of those in the ring, in order; all of them by default. `ShapeError` if
    there is no step to draw.
    """

    def __init__(self, source: Source, recorded: EpisodeTable, episodes: Chosen = None):
        self.source, self.recorded, count = source, recorded, len(recorded.length)
        numbers = numbers_of(np.arange(count) if episodes is None else episodes, count, source.path)
        self.episodes = numbers = numbers[recorded.length[numbers] > 0]
        """``(K,)`` their numbers."""
        if not len(numbers):
            raise ShapeError(f"{source.path} holds no step to draw: none of these is finite.")
        self.lengths = recorded.length[numbers]
        """``(K,)`` steps of each."""
        self.offsets = np.cumsum(self.lengths + 1) - (self.lengths + 1)
        """``(K,)`` first slot of each."""

    @property
    def num_slots(self) -> int:
        """Slots of the ring: the steps, and one for every episode's end."""
        return int(self.offsets[-1] + self.lengths[-1] + 1)

    @property
    def is_step(self) -> NDArray[np.bool_]:
        """``(num_slots,)`` whether a slot is a step; the others are the ends of episodes."""
        mask = np.ones(self.num_slots, bool)
        mask[self.offsets + self.lengths] = False
        return mask

    def locate(self, slots: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the episode of each slot, as an index of `episodes`, and the steps before it.

        Slots past the ring's end are those at its beginning.
        """
        slots = slots % self.num_slots
        index = np.searchsorted(self.offsets, slots, side="right") - 1
        return index, slots - self.offsets[index]


def returns_to_go(
    source: Source, table: EpisodeTable, discount: float
) -> Float[np.ndarray, "rows length N"]:
    """Return the returns-to-go: the discounted rewards of each step and the rest of its episode.

    Takes four bytes for each step and agent.
    """
    returns = np.empty((source.rows, source.length, source.spec.num_agents), np.float32)
    for start, stop in source.blocks():
        returns[:, start:stop] = source.rewards(start, stop)
    add_following(returns, (table.row, table.start, table.length), discount)
    return returns


def add_following(
    returns: Float[np.ndarray, "rows length N"], episodes: tuple[Any, Any, Any], discount: float
) -> None:
    """Add to the reward of each step those that follow; ``episodes`` are rows, starts and lengths.

    The sums take the place of the rewards.
    """
    longest_first = np.argsort(-episodes[2], kind="stable")
    row, start, length = (column[longest_first] for column in episodes)
    last = start + length - 1
    follows = np.zeros((len(length), returns.shape[-1]))
    for back in range(int(length.max())):
        longer = slice(np.searchsorted(-length, -back, side="left"))  # those longer than `back`
        index = row[longer], last[longer] - back
        follows[longer] = returns[index] + discount * follows[longer]
        returns[index] = follows[longer]
