"""Datasets: vaults that one can learn from."""

import os

import numpy as np
from numpy.typing import NDArray

from offmarl.errors import OptionError
from offmarl.replay.device import Replay, load
from offmarl.replay.stream import MEMORY, Stream, WindowSource
from offmarl.replay.windows import Chosen
from offmarl.types import Sequence
from offmarl.vault import Vault
from offmarl.vault.open import locate
from offmarl.vault.transform.selection import shuffled


class Dataset(Vault):
    """A vault, and the replays that can be drawn from it."""

    def replay(self, batch: int = 32, length: int = 20, episodes: Chosen = None) -> Replay:
        """Put the data on the device and return a replay to sample from under jit.

        Parameters
        ----------
        batch
            Windows a batch.
        length
            Steps a window.
        episodes
            Numbers of the episodes to draw from, as `episodes` counts them; all by default.

        Examples
        --------
        >>> replay = offmarl.open("vaults/swarm/coverage-3.vlt/expert").replay(256, 20)
        >>> batch = jax.jit(lambda replay, key: replay.sample(key))(replay, jax.random.key(0))
        """
        return load(self, batch, length, episodes)

    def stream(
        self,
        batch: int = 32,
        length: int = 20,
        *,
        seed: int = 0,
        start: int = 0,
        memory: int = MEMORY,
        episodes: Chosen = None,
    ) -> Stream:
        """Return an endless iterator over batches of data that is too large for the device.

        They are those that `replay` would give, gathered from the vault's files ahead of time.

        Parameters
        ----------
        batch
            Windows a batch.
        length
            Steps a window.
        seed, start
            What the batches follow from, and the number of the first: `Stream.state` returns both.
        memory
            Bytes that batches may take at a time, on the host and on the device each; the table of
            episodes comes on top.
        episodes
            Numbers of the episodes to draw from; all by default.

        Examples
        --------
        >>> with offmarl.open("vaults/swarm/coverage-3.vlt/expert").stream(256, 20) as stream:
        ...     for batch in stream:
        ...         state = update(state, batch)

        Raises
        ------
        ShapeError
            The vault holds no step, or a size is not positive.
        OptionError
            There is no room for a few batches.
        """
        return Stream(self, batch, length, seed, start, memory, episodes)

    def hold_out(self, fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Divide the episodes into those to learn from and those to judge by.

        The same episodes for the same data and fraction, whoever asks: those that
        `offmarl.vault.split` would deal out, and one at the least.

        Parameters
        ----------
        fraction
            Of the episodes to hold out, above 0 and below 1.

        Returns
        -------
        tuple
            The numbers of both, in order.

        Raises
        ------
        OptionError
            There is no such fraction, or nothing would be left to learn from.

        Examples
        --------
        >>> rest, held_out = dataset.hold_out(0.1)
        >>> replay, test = dataset.replay(256, 20, rest), dataset.whole_episodes(held_out)
        """
        count = len(self.episodes.length)
        kept = min(round((1 - fraction) * count), count - 1) if 0 < fraction < 1 else 0
        if kept < 1:
            raise OptionError(
                f"a fraction of {fraction:g} of the {count} episodes of {self.path} cannot be held "
                "out: give one above 0 and below 1 that leaves an episode to learn from."
            )
        order = shuffled(count, seed=0)
        return np.sort(order[:kept]), np.sort(order[kept:])

    def whole_episodes(self, episodes: NDArray[np.int64]) -> Sequence:
        """Put some episodes on the device, as windows so long that each holds one.

        Parameters
        ----------
        episodes
            Their numbers.

        Returns
        -------
        Sequence
            ``(M, T, ...)``, T being the length of the longest.

        Raises
        ------
        ShapeError
            The vault holds no step.
        OptionError
            There are no episodes of such numbers.
        """
        longest = int(self.episodes.length.take(episodes, mode="clip").max(initial=1))
        return WindowSource(self, 1, longest, episodes).beginnings()


def open_dataset(
    path: str | os.PathLike[str], *, checked: bool = True, time_limit: int | None = None
) -> Dataset:
    """Open a vault to learn from.

    Parameters
    ----------
    path, checked, time_limit
        As for `offmarl.vault.open_vault`.

    Raises
    ------
    VaultNotFoundError, VaultFormatError
        There is nothing there, or it is no vault.
    """
    return Dataset(locate(path), checked, time_limit)
