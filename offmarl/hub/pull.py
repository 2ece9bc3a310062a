"""Pulling datasets: found, fetched, checked, unpacked and put in their place, or not at all."""

import errno
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from offmarl.errors import (
    HubChecksumError,
    HubError,
    HubUnreachableError,
    OptionError,
    UnknownNameError,
    unknown_name,
)
from offmarl.hub import arrive, cache, catalogue, client
from offmarl.hub.cache import Entry
from offmarl.hub.catalogue import Card, to_toml
from offmarl.hub.client import Remote
from offmarl.hub.lookup import Target, kept, parse, pulled
from offmarl.hub.small import small_file
from offmarl.paths import local
from offmarl.vault.dataset import Dataset
from offmarl.vault.open import SUFFIX, open_vault
from offmarl.vault.published import PUBLISHED, TIME_LIMIT

CARD = "offmarl.toml"
"""The card in a repository that `push` filled."""


class Size(NamedTuple):
    """What a vault takes, in bytes."""

    download: int
    """Still to come over the wire."""
    unpacked: int
    """On the disk afterwards."""


class Plan(NamedTuple):
    """What a pull would bring."""

    card: Card
    commit: str
    sizes: dict[str, Size]
    """By uid."""
    free: int
    """Bytes free on the disk it would go to."""


class Pulled(NamedTuple):
    """What a pull brought."""

    card: Card
    commit: str
    paths: dict[str, Path]
    """The vaults asked for, by uid."""
    checks: dict[str, str]
    """What each was checked by."""
    fetched: int
    """Bytes that came over the wire."""
    asked: bool = True
    """Whether the hub was asked; if not, its revision may mean a newer commit by now."""
    time_limit: int | None = None
    """Steps after which episodes were cut off: what was asked for, or else what the card says."""


def pull(
    name: str, out: str | os.PathLike[str] | None = None, time_limit: int | None = None
) -> Pulled:
    """Bring a dataset here, unless it is; then no hub is needed.

    An interrupted pull goes on where it was when the same is asked for again; of two at once the
    second waits, and uses what the first brought.

    Parameters
    ----------
    name
        ``NAME[/UID][@REVISION]``: all vaults of a dataset, or one, which is taken out of its
        archive without fetching the rest. NAME is of the catalogue, such as "og_marl/smac_v1/3m",
        or a repository that `push` filled, such as "org/name".
    out
        Directory to put ``<scenario>.vlt`` in; by default one of `offmarl.hub.cache`.
    time_limit
        Steps after which episodes were cut off, in vaults that flag this as a termination; that of
        the card by default. It is noted beside the vaults, and whatever opens them uses it.

    Raises
    ------
    UnknownNameError
        There is no such dataset or uid.
    OptionError
        The time limit is not positive.
    HubUnreachableError
        No hub answers, or offline mode is on, and not all of it is here; it says what is.
    HubChecksumError
        What arrived is not what was published; nothing is put in place.
    HubError, VaultError
        Anything else that stands in the way: no such revision, no room, no zip archive.
    """
    target = parse(name)
    _check_limit(time_limit)
    try:
        with _telling_what_is_here():
            source = _find(target)
    except HubUnreachableError:
        if here := kept(target, out):
            entry, card = here
            if time_limit is not None:
                entry.note({TIME_LIMIT: time_limit})
            return _pulled(entry, card, target, 0, asked=False)
        raise
    with _opened(source, out) as entry:
        _note(entry, source, time_limit)
        fetched = _bring(entry, source, target.uid)
        return _pulled(entry, source.card, target, fetched, source.asked)


def _pulled(entry: Entry, card: Card, target: Target, fetched: int, asked: bool = True) -> Pulled:
    paths = entry.uids if target.uid is None else {target.uid: entry.uids[target.uid]}
    checks = {uid: entry.record["uids"][uid]["check"] for uid in paths}
    limit = entry.record.get(TIME_LIMIT)
    return Pulled(card, entry.record["commit"], paths, checks, fetched, asked, limit)


def plan(name: str, out: str | os.PathLike[str] | None = None) -> Plan:
    """Return what `pull` would bring, of whose archive no more than the directory is fetched."""
    target = parse(name)
    with _telling_what_is_here():
        source = _find(target)
    known = _place_of(source, out).path.exists()
    with _opened(source, out) as entry:
        sizes = _sizes(entry, source, target.uid)
        free = shutil.disk_usage(entry.path).free
    if not known:  # a question leaves nothing behind
        cache.remove(entry) if out is None else shutil.rmtree(entry.path)
    return Plan(source.card, source.commit, sizes, free)


def _check_limit(time_limit: int | None) -> None:
    if time_limit is not None and time_limit < 1:
        raise OptionError(f"a time limit is a positive number of steps, not {time_limit}.")


def _note(entry: Entry, source: "_Source", time_limit: int | None) -> None:
    """Note beside the vaults what their card says and they do not."""
    card, known = source.card, entry.record.get(TIME_LIMIT)
    limit = next((one for one in (time_limit, known, card.time_limit) if one is not None), None)
    published = {
        "dataset": card.name,
        "repository": source.repository,
        "commit": source.commit,
        "licence": card.licence.data,
        "licence_link": card.licence.link,
        "citation": card.citation.strip(),
    }
    facts = {TIME_LIMIT: limit, PUBLISHED: {k: v for k, v in published.items() if v}}
    if any(entry.record.get(name) != fact for name, fact in facts.items()):
        entry.note(facts)


def load_dataset(name: str, time_limit: int | None = None) -> Dataset:
    """Open a published dataset to learn from; it is pulled if it is not here.

    Parameters
    ----------
    name
        ``NAME/UID[@REVISION]``, such as "og_marl/smac_v1/3m/Good"; UID may be left out where there
        is only one.
    time_limit
        As for `pull`; by default the one that was noted then, or else the catalogue's.

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
    known = target.card
    if target.uid is None and known:
        _only_one(target.name, known.uids)
    paths = pulled(target) or pull(name, time_limit=time_limit).paths
    found = open_vault(paths[_only_one(target.name, paths)])
    limit = time_limit or found.time_limit or (known.time_limit if known else None)
    return arrive.open_limited(found.path, limit)


def _only_one(name: str, uids: Collection[str]) -> str:
    """Return the uid of a dataset that has one; `UnknownNameError` where it has several."""
    if len(uids) > 1:
        raise UnknownNameError(f"{name} has several vaults: add one of {', '.join(uids)} to it.")
    return next(iter(uids), "")


# ---------------------------------------------------------------------------------- finding


class _Source(NamedTuple):
    """Where a dataset comes from: one archive of all uids, or shards of each."""

    name: str
    card: Card
    repository: str
    commit: str
    archive: Remote | None
    published: str | None
    """The archive's SHA-256 that the card promises for this revision."""
    asked: bool = True
    """Whether the hub was asked."""


def _find(target: Target) -> _Source:
    """Ask the hub for what is wanted; `UnknownNameError` or `HubError` where it is not there."""
    if target.name not in catalogue.names():
        return _find_pushed(target)
    card = catalogue.load(target.name)
    if card.hub is None or card.hub.path is None:
        how = f" Record it: {card.recipe.command}" if card.recipe else ""
        raise HubError(f"{card.name} is not published.{how}")
    if target.uid is not None and card.uids and target.uid not in card.uids:
        raise unknown_name("uid", target.uid, card.uids)
    revision = target.revision or card.hub.revision
    archive = client.find(card.hub.repository, card.hub.path, revision)
    published = card.hub.sha256 if revision == card.hub.revision else None
    if published and archive.sha256 not in (None, published):
        pinned = revision == archive.commit
        advice = "" if pinned else f" To take it as it is: {card.name}@{archive.commit}."
        raise HubChecksumError(
            f"{card.hub.path} of {card.hub.repository} has another SHA-256 at {revision} than its "
            f"card says ({archive.sha256}, not {published}): it was replaced, or the mirror is not "
            f"to be trusted.{advice}"
        )
    cache.remember(target.name, revision, archive.commit)
    return _Source(target.name, card, card.hub.repository, archive.commit, archive, published)


def _find_pushed(target: Target) -> _Source:
    revision = target.revision or "main"
    try:
        commit, text, asked = small_file(target.name, CARD, revision)
    except HubUnreachableError:
        raise
    except HubError as error:
        raise UnknownNameError(
            f"{target.name} is neither in the catalogue (`offmarl ls --remote`) nor a dataset that "
            f"`offmarl push` published: {error}"
        ) from error
    card = catalogue.parse(text, f"{CARD} of {target.name}")
    if target.uid is not None and target.uid not in card.uids:
        raise unknown_name("uid", target.uid, card.uids)
    cache.remember(target.name, revision, commit)
    return _Source(target.name, card, target.name, commit, None, None, asked)


# ---------------------------------------------------------------------------------- bringing


def _place_of(source: _Source, out: str | os.PathLike[str] | None) -> Entry:
    if out is None:
        return cache.entry(source.name, source.commit, source.card.scenario)
    return Entry(local(out) / f"{source.card.scenario}{SUFFIX}")


@contextmanager
def _opened(source: _Source, out: str | os.PathLike[str] | None) -> Iterator[Entry]:
    """Hold the place that a dataset goes to; what stands in the way there is told."""
    entry = _place_of(source, out)
    try:
        with entry.locked():
            _claim(entry, source)
            yield entry
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise HubError(f"{entry.path} cannot be written: {error}.") from error
        raise HubError(
            f"there is no room left on the disk of {entry.path}: nothing was put in place. Make "
            "room and repeat the command, which goes on from here."
        ) from error


def _claim(entry: Entry, source: _Source) -> None:
    """Note what the place is for, unless it is for something else."""
    about = {"name": source.name, "repository": source.repository, "commit": source.commit}
    found = entry.record
    if not found and entry.uids:
        raise HubError(f"{entry.path} holds vaults that were not pulled: give another --out.")
    if found and {key: found.get(key) for key in about} != about:
        raise HubError(
            f"{entry.path} holds {found.get('name')} at commit {found.get('commit')}, not "
            f"{source.name} at {source.commit}: give another --out."
        )
    card = to_toml(source.card)  # what is here can then be used without asking the hub
    if found.get("card") != card:
        entry.note(about | {"card": card})


def _bring(entry: Entry, source: _Source, uid: str | None) -> int:
    """Fetch, check and place what is not here, and return the bytes fetched."""
    here = set(entry.record.get("uids", {})) & set(entry.uids)
    if source.archive is None:
        wanted = [uid] if uid else list(source.card.uids)
        return sum(
            arrive.bring_shards(entry, source.card, one, _shards(source, one))
            for one in wanted
            if one not in here
        )
    if uid in here or (uid is None and entry.record.get("whole")):
        return 0
    fetched = arrive.bring_archive(entry, source.card, source.archive, uid, source.published)
    if uid is None:
        entry.note({"whole": True})
    return fetched


def _shards(source: _Source, uid: str) -> list[Remote]:
    files = source.card.uids[uid].files
    if not files:
        raise HubError(f"the card of {source.name} names no files of {uid}: push it again.")
    return [client.find(source.repository, file.path, source.commit) for file in files]


def _sizes(entry: Entry, source: _Source, uid: str | None) -> dict[str, Size]:
    if source.archive is None:
        uids = [uid] if uid else list(source.card.uids)
        totals = {one: sum(file.size for file in source.card.uids[one].files) for one in uids}
        return {one: Size(total, total) for one, total in totals.items()}
    sizes = {}
    with arrive.peek(entry, source.archive, source.card.name) as (download, found):
        for one in found.roots if uid is None else [uid]:
            members = found.of(one).values()
            coming = sum(download.missing(*span) for span in found.intervals(members))
            sizes[one] = Size(coming, sum(member.file_size for member in members))
    return sizes


@contextmanager
def _telling_what_is_here() -> Iterator[None]:
    """Add to the error of a hub out of reach what can be used without one."""
    try:
        yield
    except HubUnreachableError as error:
        here = [
            f"{entry.record['name']}/{uid}@{entry.record['commit'][:12]}"
            for entry in cache.entries()
            for uid in entry.uids
        ]
        listed = f"here already: {', '.join(here)}" if here else "nothing was pulled before"
        raise HubUnreachableError(f"{error} {listed[0].upper()}{listed[1:]}.") from error
