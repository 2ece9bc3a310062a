"""Publishing vaults: shards, tables of episodes, a README, a card, and Croissant metadata."""

import hashlib
import os
import re
import shutil
import sys
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import date
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from filelock import FileLock
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import HfHubHTTPError

from offmarl import tracking
from offmarl.errors import CardError, HubError, OptionError
from offmarl.hub import cache, client
from offmarl.hub.card import (
    Card,
    File,
    TeamReturns,
    Uid,
    check,
    parse,
    to_toml,
)
from offmarl.hub.client import LARGEST
from offmarl.hub.licences import Licence, citation_of, in_words, licence_of
from offmarl.hub.packing import PackedFile, pack_vault
from offmarl.hub.pull import CARD
from offmarl.hub.readme import EPISODES, croissant, readme
from offmarl.statistics import spread
from offmarl.types import Discrete, EnvSpec
from offmarl.vault import Dataset
from offmarl.vault.dataset import open_source
from offmarl.vault.drivers import driver_of
from offmarl.vault.layout import EXTRAS, OBSERVATIONS, STATE, leaves, typed
from offmarl.vault.open import SUFFIX, place_of, refused_link

_EPOCH = (1980, 1, 1, 0, 0, 0)
_BLOCK = 2**20


class Pushed(NamedTuple):
    """The result of a push."""

    card: Card
    url: str
    commit: str
    sent: int
    """Bytes of all files, including those that the hub already had."""


def push(
    vaults: Sequence[str | os.PathLike[str]],
    repository: str,
    licence: str | None = None,
    name: str | None = None,
    summary: str = "",
    citation: str = "",
    private: bool = False,
    message: str = "Upload with offmarl",
    licence_link: str | None = None,
) -> Pushed:
    """Publish vaults of one environment as a dataset that `pull` downloads.

    Each vault is published as a zip archive; a large one as an index and shards, each of which is
    an archive of a vault of whole chunks. They are packed while they are sent, so nothing is copied
    on this disk; each is read once for its hash, and once to be sent. The bytes depend on the vault
    only, so that a repeated push sends what is missing. All files appear in one commit, which is
    refused if another commit was made meanwhile. Other vaults that the repository holds stay in its
    card.

    Beside them is a Parquet table of the episodes of each vault, which the hub's viewer shows, if
    PyArrow is installed (the extra "tables"). Statistics that the vaults do not have yet are
    computed and stored in them first, for `offmarl train` on data that is not downloaded.

    Parameters
    ----------
    vaults
        Paths of the vaults; ``<name>.vlt`` stands for all vaults in it.
    repository
        Name of the repository, such as "org/name"; it is created if it does not exist.
    licence
        SPDX identifier of the data's licence, or an expression of them, in any case; "other" with
        ``licence_link``; or "unknown". By default the licence that all sources of the data state.
        Your own recordings have none until you choose it.
    name
        ``source/environment/scenario``; by default the repository's owner and the environment.
    summary
        Summary in the card; by default where the data comes from.
    citation
        Citation in the card; by default what the sources of the data ask for.
    private
        Create a private repository.
    message
        Commit message.
    licence_link
        Address of the text of a licence that is "other".

    Raises
    ------
    HubError
        The hub refuses the commit, or does not hold what was sent; or another commit was made
        meanwhile.
    HubUnreachableError
        No hub answers.
    OptionError
        The repository's name is invalid; no licence was given and the sources state none; or the
        sources state another licence.
    UnknownNameError
        There is no such licence.
    CardError, VaultError
        The vaults do not belong together, or to those in the repository; or they cannot be read.
    """
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        raise OptionError(f"a repository is named org/name: got {repository!r}.")
    data = _open_all(vaults)
    terms = licence_of([*data.values()], licence, licence_link)
    endpoint = client.answering()[0]
    url = f"{endpoint}/datasets/{repository}"
    api = HfApi(endpoint=endpoint)
    with staging(repository), client.errors_of(repository):
        parent = repository_of(api, repository, private)
        digests = {uid: _prepared(one) for uid, one in data.items()}
        archives = {uid: _archives(one, digests[uid]) for uid, one in data.items()}
        files = {uid: tuple(map(_file_of, some)) for uid, some in archives.items()}
        card = _card(data, digests, files, repository, terms, name, summary, citation)
        has = partial(api.file_exists, repository, repo_type="dataset", revision=parent)
        if has(CARD):
            card = _with_others(card, repository, parent)
        others = [f"{EPISODES}/{uid}.parquet" for uid in card.uids if uid not in data]
        tables = episode_tables(data)
        texts = {
            CARD: _bounded(to_toml(card), repository),
            "README.md": readme(card, repository, [*filter(has, others), *tables]),
            "croissant.json": croissant(card, repository, url, str(date.today())),
        }
        operations = [one for some in archives.values() for one in some]
        operations += [
            CommitOperationAdd(path, content)
            for path, content in (
                *tables.items(),
                *((path, text.encode()) for path, text in texts.items()),
            )
        ]
        sent = sum(operation.upload_info.size for operation in operations)
        commit = commit_files(api, repository, operations, message, parent)
    return Pushed(card, url, commit, sent)


def _open_all(paths: Sequence[str | os.PathLike[str]]) -> dict[str, Dataset]:
    """Open vaults, by uid; `CardError` if there are none or their environments differ."""
    places = [place for path in paths for place in _expand(place_of(path).directory)]
    if not places:
        raise CardError("no vaults to push: give the path of at least one vault.")
    found = {(one := open_source(place)).uid: one for place in places}
    if len(found) < len(places):
        raise CardError(f"two vaults have the same uid: {', '.join(map(str, places))}.")
    first, *others = found.values()
    for other in others:
        if difference := other.spec.difference(first.spec):
            raise CardError(
                f"{other.path} and {first.path} do not belong to one dataset, because they differ "
                f"in {difference}: push them to separate repositories."
            )
    return found


def _expand(path: Path) -> list[Path]:
    """Return the vaults of a path; `VaultFormatError` if one is a link in a dataset."""
    is_dataset = path.name.endswith(SUFFIX)
    linked = driver_of(path).links() if is_dataset else []
    if path.is_symlink() and path.parent.name.endswith(SUFFIX):
        linked = [path]
    if linked:
        raise refused_link(linked[0])
    inside = driver_of(path).vaults() if is_dataset else []
    return [path / one.name for one in inside] or [path]


def _prepared(one: Dataset) -> str:
    """Compute the statistics that a vault lacks, if it can store them; return its digest."""
    if one.native and one.store.driver.is_writable:
        one.statistics(tracking.progress)
    return one.digest()


def _archives(one: Dataset, digest: str) -> list[CommitOperationAdd]:
    """Return the archives of a vault, which are read once here, for their hashes."""
    files = {packed.path: PackedFile(packed.members) for packed in pack_vault(one, digest)}
    total = sum(file.hashed for file in files.values())
    with tracking.progress(f"pack {one.uid}", total, unit="bytes") as advance:
        for file in files.values():
            file.advance = advance
        # `PackedFile` is a `BinaryIO` in all but its declared base class.
        return [CommitOperationAdd(path, cast("BinaryIO", file)) for path, file in files.items()]


def _file_of(operation: CommitOperationAdd) -> File:
    info = operation.upload_info
    return File(operation.path_in_repo, info.size, info.sha256.hex())


def episode_tables(data: Mapping[str, Dataset]) -> dict[str, bytes]:
    """Return Parquet tables of the episodes of vaults, by path; none without PyArrow."""
    if not find_spec("pyarrow"):
        return {}
    import pyarrow
    from pyarrow import parquet

    found = {}
    for uid, one in data.items():
        buffer = pyarrow.BufferOutputStream()
        parquet.write_table(one.episodes.to_arrow(), buffer, compression="zstd")
        found[f"{EPISODES}/{uid}.parquet"] = buffer.getvalue().to_pybytes()
    return found


@contextmanager
def staging(repository: str) -> Iterator[Path]:
    """Provide an empty directory beside the cache; only one push to a repository at a time."""
    directory = cache.root().parent / "pushing" / repository.replace("/", "--")
    directory.mkdir(parents=True, exist_ok=True)
    with FileLock(directory / ".lock"):
        try:
            yield directory
        finally:
            shutil.rmtree(directory)


def repository_of(api: HfApi, repository: str, private: bool, kind: client.Kind = "dataset") -> str:
    """Create the repository if it does not exist, and return its newest commit."""
    api.create_repo(repository, repo_type=kind, private=private, exist_ok=True)
    return api.repo_info(repository, repo_type=kind).sha or ""


def pack(files: Sequence[tuple[Path, str]], archive: Path) -> None:
    """Pack files, each with its name inside, into an archive whose bytes depend on them only."""
    total = sum(file.stat().st_size for file, _ in files)
    packing = tracking.progress(f"pack {archive.stem}", total, unit="bytes")
    with packing as advance, zipfile.ZipFile(archive, "w") as packed:
        for file, inside in files:
            member = zipfile.ZipInfo(inside, _EPOCH)
            with file.open("rb") as source, packed.open(member, "w", force_zip64=True) as target:
                shutil.copyfileobj(source, target, _BLOCK)
            advance(member.file_size)


def file_of(path: Path, directory: Path) -> File:
    """Describe a file that is published from a directory."""
    return File(path.relative_to(directory).as_posix(), path.stat().st_size, sha256_of(path))


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _card(
    data: dict[str, Dataset],
    digests: dict[str, str],
    files: dict[str, tuple[File, ...]],
    repository: str,
    licence: Licence,
    name: str | None,
    summary: str,
    citation: str,
) -> Card:
    first = next(iter(data.values()))
    owner, _, called = repository.rpartition("/")
    environment = first.spec.name if first.spec.name.count("/") == 1 else f"unknown/{called}"
    kind = "discrete" if isinstance(first.spec.action, Discrete) else "continuous"
    time_limit, quirks = _time_limit(data)
    origins = " ".join(dict.fromkeys(map(in_words, data.values())))
    return check(
        Card(
            name=name or f"{owner}/{environment}",
            summary=summary or origins,
            num_agents=first.spec.num_agents,
            citation=citation or citation_of([*data.values()]),
            licence=licence,
            uids={uid: _describe(one, digests[uid], files[uid]) for uid, one in data.items()},
            action={kind: first.spec.action_size},
            observation_size=first.spec.observation_size,
            state_size=first.spec.state_size,
            leaves=_leaves(first.spec),
            time_limit=time_limit,
            quirks=quirks,
        ),
        f"the card of {repository}",
    )


def _with_others(card: Card, repository: str, commit: str) -> Card:
    """Add the vaults that a repository holds; `CardError` if one card cannot describe them all."""
    where = f"{CARD} of {repository}"
    old = parse(client.read_text_file(client.find(repository, CARD, commit), where), where)
    kept = {uid: one for uid, one in old.uids.items() if uid not in card.uids}
    if not kept:
        return card
    for name, now in vars(card).items():
        before = getattr(old, name)
        if name not in ("uids", "summary", "citation", "quirks") and now != before:
            raise CardError(
                f"{repository} holds {', '.join(kept)} with another {name} ({before}) "
                f"than what is pushed ({now}), but a card has one: give the same, or push to "
                "another repository."
            )
    return replace(
        card,
        uids={**kept, **card.uids},
        summary=_both(old.summary, card.summary),
        citation=_both(old.citation, card.citation),
        quirks=tuple(dict.fromkeys((*old.quirks, *card.quirks))),
    )


def _both(old: str, new: str) -> str:
    return old if new in old else f"{old}\n\n{new}".strip()


def _time_limit(data: dict[str, Dataset]) -> tuple[int | None, tuple[str, ...]]:
    """Return the time limit of all vaults, or a sentence on how their limits differ.

    Vaults of offmarl store their own limit. Others have only that of the card, which holds one:
    `CardError` if their limits differ.
    """
    limits = {uid: one.spec.time_limit for uid, one in data.items()}
    if len(set(limits.values())) == 1:
        return next(iter(limits.values())), ()
    listed = ", ".join(f"{uid} {limit or 'unknown'}" for uid, limit in limits.items())
    if not all(one.native for one in data.values()):
        raise CardError(
            f"these vaults have different time limits ({listed}), but a card holds only one: push "
            "them to separate repositories."
        )
    return None, (f"The time limits of the uids differ: {listed}.",)


def _bounded(text: str, repository: str) -> str:
    """Return a card's text; `CardError` if it is larger than `pull` reads."""
    if len(text.encode()) > LARGEST:
        raise CardError(
            f"the card of {repository} would exceed {LARGEST:,} bytes, the most that a pull "
            "reads: push fewer vaults together."
        )
    return text


def _describe(one: Dataset, digest: str, files: tuple[File, ...]) -> Uid:
    episodes = one.episodes
    teams = {
        team: {f"return_{name}": value for name, value in spread(returns).items()}
        for team, returns in episodes.complete_team_returns.items()
        if len(returns)
    }
    known: dict[str, Any] = next(iter(teams.values()), {})
    if len(episodes.teams) > 1:
        known = {"teams": {team: TeamReturns(**values) for team, values in teams.items()}}
    return Uid(
        one.num_steps,
        len(episodes.row),
        incomplete=episodes.incomplete or None,
        digest=digest,
        origin=in_words(one),
        files=files,
        **known,
    )


def commit_files(
    api: HfApi,
    repository: str,
    operations: Sequence[CommitOperationAdd],
    message: str,
    parent: str,
    kind: client.Kind = "dataset",
) -> str:
    """Upload what the hub does not have, and commit everything or nothing.

    `HubError` if the commit would not hold, or does not hold, what was sent.
    """
    probes = [CommitOperationAdd(one.path_in_repo, b"") for one in operations]
    api.preupload_lfs_files(repository, probes, repo_type=kind)  # nothing to send: it only asks
    if ignored := [one.path_in_repo for one in probes if one._should_ignore]:
        raise HubError(
            f"the .gitignore of {repository} leaves out {len(ignored)} of {len(probes)} files, "
            f"such as {ignored[0]}, so nothing was committed: remove its lines about them, and "
            "repeat the command."
        )
    try:
        # Written to a file, the client's progress bars would fill it.
        with client.bars(shown=sys.stderr.isatty() and not tracking.is_quiet()):
            done = api.create_commit(
                repository,
                operations,
                commit_message=message,
                repo_type=kind,
                parent_commit=parent or None,
            )
    except HfHubHTTPError as error:
        if error.response.status_code != 412:
            raise
        raise HubError(
            f"someone else pushed to {repository} meanwhile, so nothing was committed: look at "
            "the change, and repeat the command."
        ) from error
    except ValueError as error:  # the hub checks the metadata of the README first
        raise CardError(f"the hub does not accept the card of {repository}: {error}") from error
    except RuntimeError as error:  # the client raises this for any failure in its threads
        raise HubError(
            f"the upload to {repository} failed ({error.__cause__ or error}): nothing was "
            "committed. Repeat the command, which sends what is missing."
        ) from error
    found: Any = api.repo_info(repository, repo_type=kind, revision=done.oid, files_metadata=True)
    there = {one.rfilename: (one.size, one.lfs and one.lfs.sha256) for one in found.siblings or ()}
    for one in operations:
        size, sha256 = there.get(one.path_in_repo, (-1, None))
        sent = one.upload_info
        if size not in (None, sent.size) or sha256 not in (None, sent.sha256.hex()):
            raise HubError(
                f"{repository} does not hold {one.path_in_repo} as it was sent (commit {found.sha})"
                ": the hub, or a proxy on the way, left it out or changed it. Repeat the command."
            )
    return done.oid


def _leaves(spec: EnvSpec) -> dict[str, str] | None:
    """Describe the arrays of observations, states and extras; None if they are plain vectors."""
    if not typed(spec):
        return None
    trees = (OBSERVATIONS, STATE, EXTRAS)
    found = leaves(spec).items()
    return {name: f"{leaf.dtype} {leaf.shape}" for name, leaf in found if name.startswith(trees)}
