"""Datasets: vaults that one can learn from."""

import os

from offmarl.replay.device import Replay, load
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


def open_dataset(path: str | os.PathLike[str]) -> Dataset:
    """Open a vault to learn from.

    Parameters
    ----------
    path
        ``<directory>/<name>.vlt/<uid>``, or ``<directory>/<name>.vlt`` where it holds one uid.

    Raises
    ------
    VaultNotFoundError, VaultFormatError
        There is nothing there, or it is no vault.
    """
    return Dataset(locate(path))
