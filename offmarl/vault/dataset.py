"""A dataset: a vault of any program, read as experience or sampled for learning."""

import os
from typing import TYPE_CHECKING

from offmarl.terminal import Progress, quiet
from offmarl.vault.read.open import locate
from offmarl.vault.read.reader import Reader
from offmarl.vault.transform.episode_set import EpisodeSet

if TYPE_CHECKING:  # what only verbs need is imported when they are called
    from offmarl.vault.check.leaf_statistics import Statistics


class Dataset(Reader, EpisodeSet):
    """A vault as it was when it was opened; `open_vault` returns one.

    It reads any interval, window or episode; `replay` and `stream` sample from it. The verbs of
    `offmarl.vault`, such as `offmarl.vault.filter`, take datasets and return them.

    ``len(dataset)`` is the number of episodes, iteration reads one episode after the other, and
    ``dataset[-1]`` is the last. A slice selects steps of time from all rows: ``dataset[:100]``.

    Attributes
    ----------
    path
        Its directory; one in an archive or at a URL is written in the same way.
    manifest
        The keys of offmarl; None in a vault of another program.
    leaves
        Disk name to the data type and the shape of a single step.
    rows, length
        The first two axes of every array: environments, and time steps of each.
    provenance
        Where the data comes from; JSON. For a dataset that was pulled, also its publication.
    unverified
        Intervals of steps, ``((start, stop), ...)``, that a stock program appended.
    time_limit
        The limit that a foreign vault was opened with, else that of `offmarl pull`, else None.
    """

    def statistics(self, progress: Progress = quiet) -> "Statistics":
        """Return the count, moments, range and quantiles of every leaf, entry by entry.

        They are computed in one pass over the data, and then stored in the vault, if offmarl wrote
        it and it can be written. Later calls return the stored ones until steps are appended.
        Observations, actions, legal actions and log-probabilities of dead agents are left out, and
        so are entries that an agent does not have.

        Parameters
        ----------
        progress
            Shows the progress.

        Returns
        -------
        Mapping
            Column, such as "observation" or "reward", to
            `offmarl.vault.check.leaf_statistics.LeafStatistics`.

        Examples
        --------
        >>> dataset.statistics()["reward"].mean
        """
        from offmarl.vault.check.leaf_statistics import statistics

        return statistics(self, progress)

    def digest(self) -> str:
        """Return the SHA-256 of the content, or the published one; see `vault.check.digest`."""
        from offmarl.vault.check.digest import digest

        return self.store.digest or digest(self)

    def known_digest(self) -> str:
        """Return the digest, without reading the data again if this user computed it before.

        See `offmarl.vault.check.digest.known_digest`.
        """
        from offmarl.vault.check.digest import known_digest

        return known_digest(self)


def open_vault(
    path: str | os.PathLike[str], *, checked: bool = True, time_limit: int | None = None
) -> Dataset:
    """Open a vault for reading, as it is now.

    Parameters
    ----------
    path
        ``<directory>/<name>.vlt/<uid>``, or ``<directory>/<name>.vlt`` if it holds one uid. The
        directory may be a zip archive (``3m.zip/3m.vlt/Good``), a bucket (``s3://...``,
        ``gs://...``), a web address (also of an archive), a dataset on the hub that is read without
        a download (``hf://org/name/uid``), or a URL of a registered driver (see
        `offmarl.vault.register_driver`). Or the name of a pulled dataset, such as
        ``og_marl/smac_v1/3m/Good``; an existing path of that name takes precedence.
    checked
        Whether to compare every chunk of an uncompressed vault of offmarl with its checksum before
        it is first used. Without it, damage goes unnoticed. Compressed chunks are always compared.
        Vaults of other programs have no checksums that offmarl could compare; `Dataset.unchecked`
        lists the data that is read without.
    time_limit
        For vaults of other programs, many of which flag the time limit as a termination: the limit
        in steps. Episodes of this length are then truncated instead. By default the limit that
        `offmarl pull` recorded with the vault, if any.

    Raises
    ------
    VaultNotFoundError
        Nothing exists at the path.
    VaultFormatError
        The data at the path is not a vault, or is damaged.
    """
    return Dataset(locate(path), checked, time_limit)
