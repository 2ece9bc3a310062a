"""What replay reads, where training windows may start, and which of them make a batch."""

from collections.abc import Iterator
from functools import cached_property, partial
from pathlib import PurePath
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
from jaxtyping import Array, Int, Key, PRNGKeyArray, UInt32
from numpy.typing import NDArray

from offmarl.errors import OptionError, ShapeError
from offmarl.types import EnvSpec, Transition, View

Chosen = NDArray[np.int64] | None
"""Numbers of the episodes that windows are drawn from, in order; None for all."""


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
    """What windows are drawn from; `offmarl.vault.Dataset` is one.

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

    def blocks(self) -> Iterator[tuple[int, int]]:
        """Cut time into intervals that fit in memory."""

    def transitions(self, start: int, stop: int) -> Transition:
        """Read an interval of time, ``(rows, T, ...)``."""

    def window_transitions(self, rows: Any, starts: Any, length: int) -> Transition:
        """Gather windows, ``(W, length, ...)``: the steps from each start on."""

    def prefetch(self, rows: Any, starts: Any, length: int) -> None:
        """Start to read windows that `window_transitions` will be asked for; may do nothing."""

    def final_views(self, numbers: Any) -> View:
        """Read final views, ``(len(numbers), ...)``."""


def window_starts(
    offsets: NDArray[np.int64], lengths: NDArray[np.int64], window: int
) -> NDArray[np.int64]:
    """List every index at which a window may start without crossing an episode's end.

    An episode shorter than the window has one start, its first step: the rest of that window is
    to be masked out.

    Parameters
    ----------
    offsets, lengths
        First index and number of steps of each episode, ``(M,)``.
    window
        Steps in a window.

    Returns
    -------
    Start indices, episode by episode. Each window of the data is listed once, so drawing from
    them uniformly draws windows uniformly.
    """
    counts = _counts(lengths, window)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    within = np.arange(counts.sum()) - first
    return np.repeat(offsets, counts) + within


def _counts(lengths: NDArray[np.int64], window: int) -> NDArray[np.int64]:
    """Return how many windows may start in each episode."""
    return np.where(lengths > 0, np.maximum(lengths - window, 0) + 1, 0)


class WindowTable:
    """The windows of a dataset in packed order, in which one more row follows each episode.

    It takes memory by the episode, where `window_starts` takes it by the step.

    Parameters
    ----------
    source
        What to draw from.
    batch_size, length
        Windows in a batch, and steps in a window.
    episodes
        Numbers of the episodes that windows are of, in order; all of them by default.

    Raises
    ------
    ShapeError
        Where there is no step to draw, or a size is not positive.
    OptionError
        Where there are no episodes of such numbers.
    """

    def __init__(self, source: Source, batch_size: int, length: int, episodes: Chosen = None):
        if batch_size < 1 or length < 1:
            raise ShapeError(
                f"batches of {batch_size} windows of {length} steps cannot be drawn: both must be "
                "at least 1."
            )
        if source.rows * source.length == 0:
            raise ShapeError(f"{source.path} holds no steps yet: record into it first.")
        self.length = length
        self.lengths = source.episodes.length
        self.offsets = np.cumsum(self.lengths + 1) - (self.lengths + 1)
        self._chosen = np.arange(len(self.lengths)) if episodes is None else episodes
        count = len(self.lengths)
        if not len(self._chosen) or self._chosen.min() < 0 or self._chosen.max() >= count:
            raise OptionError(
                f"{source.path} has episodes 0 to {count - 1}: choose some of these to draw from."
            )

    @property
    def num_rows(self) -> int:
        """Packed rows: the steps, one for every episode's end, and a window's worth of padding."""
        return int((self.lengths + 1).sum()) + self.length

    @property
    def num_windows(self) -> int:
        """How many windows there are."""
        return int(self._ends[-1])

    @property
    def beginnings(self) -> NDArray[np.int64]:
        """The packed rows at which the episodes begin that are drawn from."""
        return self.offsets[self._chosen]

    def all_starts(self) -> NDArray[np.int64]:
        """Return the packed rows at which any window starts."""
        return window_starts(self.beginnings, self.lengths[self._chosen], self.length)

    def starts(self, windows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the packed rows at which windows start: some of `all_starts`."""
        place = np.searchsorted(self._ends, windows, side="right")
        episode = self._chosen[place]
        before = self._ends[place] - _counts(self.lengths[episode], self.length)
        return self.offsets[episode] + windows - before

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        """The number of windows in each episode that is drawn from and all such before it."""
        return np.cumsum(_counts(self.lengths[self._chosen], self.length))


def draw(key: PRNGKeyArray, batch_size: int, num_windows: int) -> Int[Array, "B"]:
    """Draw windows uniformly, with replacement: the same whatever kind of replay asks."""
    return jax.random.randint(key, (batch_size,), 0, num_windows)


def draw_on_host(
    keys: Key[Array, "*b"], batch_size: int, num_windows: int
) -> Int[np.ndarray, "*b B"]:
    """Draw for many keys, without waiting for what the accelerator is busy with.

    There may be more windows than `draw` can tell apart, which knows 32 bits.
    """
    flat = on_host(keys).ravel()
    if num_windows < 2**31:
        found = np.asarray(_draws(flat, batch_size, num_windows)).astype(np.int64)
    else:
        words = np.asarray(_words(flat, batch_size)).astype(np.uint64)
        found = ((words[..., 0] << 32 | words[..., 1]) % num_windows).astype(np.int64)
    return found.reshape(*keys.shape, batch_size)


@partial(jax.jit, static_argnums=(1, 2))
def _draws(keys: Key[Array, "n"], batch_size: int, num_windows: int) -> Int[Array, "n B"]:
    return jax.vmap(lambda key: draw(key, batch_size, num_windows))(keys)


@partial(jax.jit, static_argnums=1)
def _words(keys: Key[Array, "n"], batch_size: int) -> UInt32[Array, "n B 2"]:
    return jax.vmap(lambda key: jax.random.bits(key, (batch_size, 2)))(keys)


def on_host(keys: Key[Array, "*b"]) -> Key[Array, "*b"]:
    """Put keys where drawing waits for nothing; nowhere else where JAX knows no processor."""
    try:
        processor = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return keys
    return jax.device_put(keys, processor)
