"""Pulling datasets: find, download, check, unpack and install them completely, or not at all."""

import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from huggingface_hub import constants

from offmarl.errors import (
    HubChecksumError,
    HubError,
    HubUnreachableError,
    OptionError,
    UnknownNameError,
    unknown_name,
)
from offmarl.hub import cache, client, install
from offmarl.hub.cache import CachedDataset, DatasetName, parse
from offmarl.hub.card import Card, to_toml
from offmarl.hub.client import Remote
from offmarl.paths import local_output
from offmarl.vault.dataset import Dataset
from offmarl.vault.read.manifest import PUBLISHED, TIME_LIMIT
from offmarl.vault.read.open import SUFFIX


class Size(NamedTuple):
    """The size of a vault in bytes."""

    download: int
    """Bytes still to download."""
    unpacked: int
    """Bytes on disk afterwards."""


class PullPlan(NamedTuple):
    """What a pull would download."""

    card: Card
    commit: str
    sizes: dict[str, Size]
    """By uid."""
    free: int
    """Free bytes on the disk that it would be installed on."""


class Pulled(NamedTuple):
    """The result of a pull."""

    card: Card
    commit: str
    paths: dict[str, Path]
    """Paths of the requested vaults, by uid."""
    checks: dict[str, str]
    """How each vault was checked."""
    fetched: int
    """Bytes downloaded."""
    asked: bool = True
    """Whether the hub was asked; if not, its revision may mean a newer commit by now."""
    time_limit: int | None = None
    """Steps after which episodes were truncated, as requested or as the card says."""


def pull(
    name: str, out: str | os.PathLike[str] | None = None, time_limit: int | None = None
) -> Pulled:
    """Download a dataset, unless it is on this machine already; then no hub is needed.

    An interrupted pull continues where it stopped when the call is repeated. Of two simultaneous
    pulls the second waits, and uses what the first downloaded.

    Parameters
    ----------
    name
        ``NAME[/UID][@REVISION]``: all vaults of a dataset, or one, which is extracted from its
        archive without downloading the rest. NAME is in the catalogue, such as
        "og_marl/smac_v1/3m", or a repository that `push` wrote, such as "org/name".
    out
        Directory for ``<scenario>.vlt``; by default the cache.
    time_limit
        Steps after which episodes were truncated, for vaults that flag this as a termination; by
        default that of the card. It is recorded beside the vaults and used when they are opened.

    Raises
    ------
    UnknownNameError
        There is no such dataset or uid.
    OptionError
        The time limit is not positive.
    HubUnreachableError
        No hub answers, or offline mode is on, and the dataset is not complete on this machine.
    HubChecksumError
        The data received differs from what was published; nothing is installed.
    HubError, VaultError
        Any other failure, such as an unknown revision or a full disk.
    """
    target = parse(name)
    _check_limit(time_limit)
    try:
        source = _find(target)
    except HubUnreachableError:
        if dataset := cache.find_complete(target, out):
            entry, card = dataset
            if time_limit not in (None, entry.record.get(TIME_LIMIT)):
                entry.note({TIME_LIMIT: time_limit})
            return _result(entry, card, target, 0, asked=False)
        raise
    entry = _place_of(source, out)
    with install.disk_errors(entry.path), entry.locked():
        _claim(entry, source, time_limit)
        fetched = _install_missing(entry, source, target.uid)
        cache.remember(cache.root() / target.name, target.revision, source.commit)
        return _result(entry, source.card, target, fetched)


def _result(
    entry: CachedDataset, card: Card, target: DatasetName, fetched: int, asked: bool = True
) -> Pulled:
    paths = entry.uids if target.uid is None else {target.uid: entry.uids[target.uid]}
    checks = {uid: entry.record["uids"][uid]["check"] for uid in paths}
    limit = entry.record.get(TIME_LIMIT)
    return Pulled(card, entry.record["commit"], paths, checks, fetched, asked, limit)


def plan(name: str, out: str | os.PathLike[str] | None = None) -> PullPlan:
    """Return what `pull` would download; only the directory of an archive is read for it."""
    target = parse(name)
    source = _find(target)
    place = _place_of(source, out).path
    directory = next(path for path in (place, *place.parents) if path.is_dir())
    sizes = _sizes(source, target.uid)
    return PullPlan(source.card, source.commit, sizes, shutil.disk_usage(directory).free)


def _check_limit(time_limit: int | None) -> None:
    if time_limit is not None and time_limit < 1:
        raise OptionError(f"a time limit is a positive number of steps: got {time_limit}.")


def load_dataset(name: str, time_limit: int | None = None) -> Dataset:
    """Open a published dataset to learn from; pull it if it is not on this machine.

    Parameters
    ----------
    name
        ``NAME/UID[@REVISION]``, such as "og_marl/smac_v1/3m/Good"; UID may be left out if the
        dataset has only one vault.
    time_limit
        As for `pull`; by default the one recorded then, or else the one in the catalogue.

    Raises
    ------
    UnknownNameError, HubError, VaultError
        See `pull`.

    Examples
    --------
    >>> dataset = offmarl.load_dataset("og_marl/smac_v1/3m/Good")
    >>> replay = dataset.replay(batch=32, length=20)
    """
    target = parse(name)
    _check_limit(time_limit)
    cache.refuse_several(target)
    is_complete = cache.find_complete(target) is not None
    paths = cache.local_vaults(target) if is_complete else pull(name, time_limit=time_limit).paths
    cache.refuse_several(target)  # a card that has just arrived may list several
    (path,) = paths.values()
    return install.open_limited(path, time_limit)


# ---------------------------------------------------------------------------------- finding


class _Source(NamedTuple):
    """The source of a dataset: one archive of all uids, or the files of each uid."""

    name: str
    card: Card
    repository: str
    commit: str
    archive: Remote | None
    published: str | None
    """The archive's SHA-256 in the card, if it is of this revision."""


def _find(target: DatasetName) -> _Source:
    """Find a dataset on the hub; `UnknownNameError` or `HubError` if that fails."""
    if (card := target.card) is None:
        try:
            commit, card = client.find_card(target.name, target.revision)
        except HubUnreachableError:
            raise
        except HubError as error:
            raise UnknownNameError(
                f"{target.name} is neither in the catalogue (`offmarl ls --remote`) nor a dataset "
                f"that `offmarl push` published (a policy is pulled with --policy): {error}"
            ) from error
        _check_uid(target.uid, card)
        return _Source(target.name, card, target.name, commit, None, None)
    if card.uids:  # otherwise only the archive lists them
        _check_uid(target.uid, card)
    return _find_archive(card, target.revision)


def _check_uid(uid: str | None, card: Card) -> None:
    if uid is not None and uid not in card.uids:
        raise unknown_name("uid", uid, card.uids)


def _find_archive(card: Card, revision: str) -> _Source:
    """Find the archive of a dataset of the catalogue; its hash in the card must be the hub's."""
    if card.hub is None or card.hub.path is None:
        raise HubError(cache.explain_unpublished(card))
    archive = client.find(card.hub.repository, card.hub.path, revision)
    published = card.hub.sha256 if revision == card.hub.revision else None
    if published and archive.sha256 not in (None, published):
        pinned = revision == archive.commit
        advice = "" if pinned else f" To pull it nevertheless: {card.name}@{archive.commit}."
        raise HubChecksumError(
            f"{card.hub.path} of {card.hub.repository} has SHA-256 {archive.sha256} at {revision}, "
            f"but its card says {published}: it was replaced, or the hub at {constants.ENDPOINT} "
            f"cannot be trusted.{advice}"
        )
    return _Source(card.name, card, card.hub.repository, archive.commit, archive, published)


# ---------------------------------------------------------------------------------- installing


def _place_of(source: _Source, out: str | os.PathLike[str] | None) -> CachedDataset:
    """Return the place of a dataset, which need not exist."""
    directory = cache.root() / source.name / source.commit if out is None else local_output(out)
    return CachedDataset(directory / f"{source.card.scenario}{SUFFIX}")


def _claim(entry: CachedDataset, source: _Source, time_limit: int | None) -> None:
    """Record which dataset the directory is for, and the facts of its card that vaults lack.

    `HubError` if it holds another one.
    """
    about = {"name": source.name, "repository": source.repository, "commit": source.commit}
    card, record = source.card, entry.record
    if not record and entry.uids:
        raise HubError(f"{entry.path} holds vaults that were not pulled: give another --out.")
    if record and {key: record.get(key) for key in about} != about:
        raise HubError(
            f"{entry.path} holds {record.get('name')} at commit {record.get('commit')}, not "
            f"{source.name} at {source.commit}: give another --out."
        )
    published = {
        "dataset": card.name,
        "repository": source.repository,
        "commit": source.commit,
        "licence": card.licence.data,
        "licence_link": card.licence.link,
        "citation": card.citation.strip(),
    }
    limits = (time_limit, record.get(TIME_LIMIT), card.time_limit)
    facts = about | {
        "card": to_toml(card),  # so that the dataset can be used without the hub
        TIME_LIMIT: next((limit for limit in limits if limit is not None), None),
        PUBLISHED: {k: v for k, v in published.items() if v},
    }
    if any(record.get(name) != fact for name, fact in facts.items()):
        entry.note(facts)


def _install_missing(entry: CachedDataset, source: _Source, uid: str | None) -> int:
    """Install the vaults that are missing, and return the bytes downloaded."""
    installed = set(entry.record.get("uids", {})) & set(entry.uids)
    if source.archive is None:
        uids = [uid] if uid else list(source.card.uids)
        origin = source.repository, source.commit
        return sum(
            install.install_files(entry, source.card, name, *origin)
            for name in uids
            if name not in installed
        )
    if uid in installed or (uid is None and entry.record.get("whole")):
        return 0
    fetched = install.install_archive(entry, source.card, source.archive, uid, source.published)
    if uid is None:
        entry.note({"whole": True})
    return fetched


def _sizes(source: _Source, uid: str | None) -> dict[str, Size]:
    card = source.card
    if source.archive is None:
        files = {name: card.files_of(name)[0].values() for name in ([uid] if uid else card.uids)}
        totals = {name: sum(file.size for file in entries) for name, entries in files.items()}
        return {name: Size(total, total) for name, total in totals.items()}
    with (
        TemporaryDirectory() as scratch,
        install.open_archive(Path(scratch), source.archive, card.name) as archive,
    ):
        by_uid = {name: files.values() for name, files in archive.of(uid).items()}
    return {
        name: Size(sum(x.compress_size for x in members), sum(x.file_size for x in members))
        for name, members in by_uid.items()
    }
