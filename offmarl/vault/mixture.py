"""Mixtures: several vaults that are drawn from with fixed shares, without copying them."""

import hashlib
import os
from collections.abc import Iterable, Mapping
from functools import cached_property
from numbers import Real
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int
from numpy.typing import NDArray

from offmarl.errors import OptionError
from offmarl.replay.sampling import Chosen
from offmarl.types import EnvSpec, Episode
from offmarl.vault.dataset import Dataset, open_vault
from offmarl.vault.format import layout, tables
from offmarl.vault.read import bounds
from offmarl.vault.read.reader import common_spec
from offmarl.vault.transform.episode_set import EpisodeSet

VaultLike = str | os.PathLike[str] | Dataset

_LONGEST_UID = 60


class MixturePart(NamedTuple):
    """Some episodes of one vault of a mixture."""

    dataset: Dataset
    episodes: NDArray[np.int64]
    """Their numbers in the vault."""
    share: float
    """Share of the vault's steps in batches."""


class Mixture(EpisodeSet):
    """Several vaults, each with a share of the batches; `mix` returns one.

    `replay` and `stream` sample from it, and each window lies in one of the vaults. Its `episodes`
    are those of all vaults, one vault after the other.

    Attributes
    ----------
    sources
        The vaults.
    shares
        The share of each in the steps of batches; they add up to 1.
    by_steps
        Whether no shares were given: then each step that is drawn from is equally likely, and those
        of the vaults follow.
    path
        The vaults' paths, for messages.
    """

    def __init__(self, sources: tuple[Dataset, ...], shares: tuple[float, ...], by_steps: bool):
        self.sources, self.shares, self.by_steps = sources, shares, by_steps
        self.path = PurePath(" + ".join(str(source.path) for source in sources))

    def __repr__(self) -> str:
        """Describe the mixture without reading any data."""
        parts = (f"{x:.3g} of {s.path}" for x, s in zip(self.shares, self.sources, strict=True))
        return f"<Mixture: {', '.join(parts)}>"

    @cached_property
    def spec(self) -> EnvSpec:
        """The environment's sizes."""
        return common_spec(self.sources)

    @cached_property
    def episodes(self) -> tables.Episodes:
        """Every episode of all vaults, by vault, row and start.

        ``row``, ``start`` and ``final`` count within the episode's vault.
        """
        return tables.Episodes.joined([source.episodes for source in self.sources])

    @property
    def first_episodes(self) -> Int[np.ndarray, "vaults"]:
        """Number of the first episode of each vault."""
        counts = np.array([len(source) for source in self.sources])
        return np.cumsum(counts) - counts

    @property
    def native(self) -> bool:
        """Whether offmarl wrote all vaults."""
        return all(source.native for source in self.sources)

    @property
    def time_limit(self) -> int | None:
        """The limit that the vaults were opened with."""
        return next((x.time_limit for x in self.sources if x.time_limit is not None), None)

    @property
    def num_steps(self) -> int:
        """Recorded transitions in all vaults."""
        return sum(source.num_steps for source in self.sources)

    @property
    def name(self) -> str:
        """The names of the datasets."""
        return "+".join(dict.fromkeys(source.name for source in self.sources))

    @property
    def uid(self) -> str:
        """The names of the vaults, or a short one if these are long."""
        uid = "+".join(source.uid for source in self.sources)
        return uid if len(uid) <= _LONGEST_UID else f"mix-{self.known_digest()[:8]}"

    def episode(self, number: int) -> Episode:
        """Read one episode; see `Dataset.episode`."""
        bounds.check_episode(number, len(self), self.path)
        number = range(len(self))[number]
        vault = int(np.searchsorted(self.first_episodes, number, side="right")) - 1
        return self.sources[vault].episode(number - int(self.first_episodes[vault]))

    def hold_out(self, fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Divide the episodes of each vault; see `Dataset.hold_out`."""
        divided = [source.hold_out(fraction) for source in self.sources]
        numbers = (
            np.concatenate([x + n for x, n in zip(part, self.first_episodes, strict=True)])
            for part in zip(*divided, strict=True)
        )
        train, held_out = numbers
        return train, held_out

    def parts(self, episodes: Chosen = None) -> "list[MixturePart]":
        """Return some episodes (all by default) by vault, with the vault's share of the steps.

        Vaults without such episodes are left out.
        """
        numbers = np.arange(len(self)) if episodes is None else np.asarray(episodes, np.int64)
        parts = []
        for vault, first, share in zip(self.sources, self.first_episodes, self.shares, strict=True):
            selected = numbers[(numbers >= first) & (numbers < first + len(vault))] - first
            if len(selected):
                steps = float(vault.episodes.length[selected].sum())
                parts.append(MixturePart(vault, selected, steps if self.by_steps else share))
        total = sum(part.share for part in parts)
        return [part._replace(share=part.share / total) for part in parts]

    def digest(self) -> str:
        """Return the SHA-256 of the vaults' digests and shares."""
        return self._of_all([source.digest() for source in self.sources])

    def known_digest(self) -> str:
        """Return the digest, from digests of the vaults that this user computed before."""
        return self._of_all([source.known_digest() for source in self.sources])

    def _of_all(self, digests: list[str]) -> str:
        shares = [None if self.by_steps else share for share in self.shares]
        parts = [*zip(digests, shares, strict=True)]
        return hashlib.sha256(layout.dump_json(["step", parts])).hexdigest()


def mix(
    vaults: Mapping[VaultLike, float] | Iterable[VaultLike],
    *,
    time_limit: int | None = None,
) -> Mixture:
    """Mix vaults, without copying them.

    Parameters
    ----------
    vaults
        Datasets, or the paths or names of vaults, and the share of each; shares are divided by
        their sum. Each is that of the vault's steps in batches. Without shares, each step of all
        vaults is equally likely.
    time_limit
        As for `open_vault`, for the vaults that are given by path.

    Raises
    ------
    OptionError
        A share is negative or not finite, or all are 0; or a vault is named twice.
    ShapeError
        Two vaults differ in a shape or a type, or in their environment, its settings or release.
    VaultError
        A vault cannot be opened.

    Examples
    --------
    >>> mixed = offmarl.mix({"coverage.vlt/expert": 0.7, "coverage.vlt/random": 0.3})
    >>> replay = mixed.replay(256, 20)
    """
    if isinstance(vaults, str | os.PathLike):
        raise OptionError(f"{vaults} is one path: give several vaults, as a list or with shares.")
    datasets = [
        vault if isinstance(vault, Dataset) else open_vault(vault, time_limit=time_limit)
        for vault in vaults
    ]
    explicit = [*vaults.values()] if isinstance(vaults, Mapping) else None
    by_steps = explicit is None
    shares = _checked_shares(datasets, explicit or [x.num_steps for x in datasets])
    common_spec(datasets)
    pairs = [
        (dataset, float(x)) for dataset, x in zip(datasets, shares / shares.sum(), strict=True) if x
    ]
    return Mixture(tuple(dataset for dataset, _ in pairs), tuple(x for _, x in pairs), by_steps)


def _checked_shares(vaults: list[Dataset], shares: list[Any]) -> NDArray[np.float64]:
    for dataset, share in zip(vaults, shares, strict=True):
        is_number = isinstance(share, Real) and not isinstance(share, bool)
        if not is_number or not 0 <= share < np.inf:
            raise OptionError(
                f"{dataset.path} cannot have a share of {share}: give a finite number of at least "
                "0."
            )
    if not sum(shares) > 0:
        names = ", ".join(str(dataset.path) for dataset in vaults) or "no vaults were given"
        raise OptionError(f"all shares of the mixture are 0 ({names}): give one above 0.")
    paths = [dataset.path for dataset in vaults]
    if twice := [path for path in paths if paths.count(path) > 1]:
        raise OptionError(
            f"{twice[0]} is in the mixture twice: name it once, with its whole share."
        )
    return np.array(shares, np.float64)
