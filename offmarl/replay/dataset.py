"""Datasets: vaults that one can learn from."""

import os

from offmarl.replay.device import Replay, load
from offmarl.replay.stream import MEMORY, Stream
from offmarl.vault import Vault
from offmarl.vault.listing import locate


class Dataset(Vault):
    """A vault, and the replays that can be drawn from it."""

    def replay(self, batch: int = 32, length: int = 20) -> Replay:
        """Put the data on the device and return a replay to sample from under jit.

        Parameters
        ----------
        batch
            Windows a batch.
        length
            Steps a window.

        Examples
        --------
        >>> replay = offmarl.open("vaults/swarm/coverage-3.vlt/expert").replay(256, 20)
        >>> batch = jax.jit(lambda replay, key: replay.sample(key))(replay, jax.random.key(0))
        """
        return load(self, batch, length)

    def stream(
        self,
        batch: int = 32,
        length: int = 20,
        *,
        seed: int = 0,
        start: int = 0,
        memory: int = MEMORY,
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
        return Stream(self, batch, length, seed, start, memory)


def open_dataset(
    path: str | os.PathLike[str], *, checked: bool = False, time_limit: int | None = None
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
