"""Publishing vaults: their own files, an index of each, tables of episodes, and the card."""

import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, RepoCard
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils.tqdm import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)

from offmarl import tracking
from offmarl.errors import CardError, HubError, VaultConflictError, VaultError
from offmarl.hub import client
from offmarl.hub.card import (
    CARD,
    Card,
    File,
    TeamReturns,
    Uid,
    check,
    index_of,
    parse,
    to_toml,
)
from offmarl.hub.client import LARGEST
from offmarl.hub.index import build_index
from offmarl.hub.licences import Licence, citation_of, in_words, licence_of
from offmarl.hub.readme import EPISODES, README, croissant, readme
from offmarl.statistics import spread
from offmarl.types import Discrete, EnvSpec
from offmarl.vault import Dataset
from offmarl.vault.dataset import open_vault
from offmarl.vault.format.layout import (
    DATA,
    EXTRAS,
    MANIFEST,
    METADATA,
    OBSERVATIONS,
    STATE,
    has_typed_leaves,
    leaves,
)
from offmarl.vault.read.open import SUFFIX, place_of, refused_link
from offmarl.vault.storage.commit import Contents, live_bytes, live_files
from offmarl.vault.storage.files import errors_of
from offmarl.vault.storage.store import Directory, store_of
from offmarl.vault.write.compaction import compact

_LEAST_UNUSED = 2**20
_MOST_UNUSED = 1 / 6
"""A vault with more unused bytes than these is compacted before it is published."""
_MANY_FILES = 64
_SMALL_FILE = 2**22
"""A vault of more files than these, of fewer bytes on average, is compacted, too."""


CardT = TypeVar("CardT")


@dataclass(frozen=True)
class Pushed(Generic[CardT]):
    """The result of a push of a dataset, or of a policy, whose card is a dictionary."""

    card: CardT
    url: str
    commit: str
    sent: int
    """Bytes of all files, including those that the hub already had."""


class _Vault(NamedTuple):
    """A vault to publish."""

    dataset: Dataset
    digest: str
    manifest: bytes
    """The content of its manifest: that of the commit that was read."""
    listing: bytes
    """Its index."""
    files: list[Path]
    """Its data files."""


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
) -> Pushed[Card]:
    """Publish vaults of one environment as a dataset that `pull` downloads.

    The files of each vault are published as they are, so that a download of the repository holds
    vaults that stock flashbax opens. A vault with much unused space or very many files is compacted
    first. Beside it is an index for streams: where each value is in the files, and its checksum. A
    repeated push sends what is missing. All files appear in one commit, which is refused if another
    commit was made meanwhile, and which removes files that the new card does not list any more.
    Other vaults that the repository holds stay in its card.

    There is also a Parquet table of the episodes of each vault, which the hub's viewer shows, if
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
    client.check_name(repository)
    data = _open_all(vaults)
    terms = licence_of([*data.values()], licence, licence_link)
    with client.errors_of(repository):
        place = open_repository(repository, private, "dataset")
        old = None
        if CARD in place.files:
            _, old = client.find_card(repository, place.commit)
        by_uid = {uid: _read(dataset) for uid, dataset in data.items()}
        data = {uid: vault.dataset for uid, vault in by_uid.items()}
        card = _card(by_uid, repository, terms, name, summary, citation)
        added = {uid: _added(vault, card.place_of(uid)) for uid, vault in by_uid.items()}
        uids = {uid: replace(entry, files=files_of(added[uid])) for uid, entry in card.uids.items()}
        card = replace(card, uids=uids)
        if old:
            card = _with_others(card, old, repository)
        others = {f"{EPISODES}/{uid}.parquet" for uid in card.uids if uid not in data} & place.files
        tables = episode_tables(data)
        texts = {
            CARD: to_toml(check(card, f"the card of {repository}")),
            README: readme(card, repository, [*sorted(others), *tables]),
            "croissant.json": croissant(card, repository, place.url, str(date.today())),
        }
        if len(texts[CARD].encode()) > LARGEST:
            raise CardError(
                f"the card of {repository} would exceed {LARGEST:,} bytes, the most that a pull "
                "reads: push fewer vaults together."
            )
        parse(texts[CARD], f"the card of {repository}")  # so that what is published can be pulled
        contents = tables | {path: text.encode() for path, text in texts.items()}
        operations = [operation for files in added.values() for operation in files]
        operations += [CommitOperationAdd(path, content) for path, content in contents.items()]
        sent = sum(operation.upload_info.size for operation in operations)
        obsolete = _paths(old) - _paths(card) if old else set()
        commit = commit_files(place, operations, message, obsolete)
    return Pushed(card, place.url, commit, sent)


def _paths(card: Card) -> set[str]:
    """Return the paths of all files that a card lists."""
    return {file.path for vault in card.uids.values() for file in vault.files}


def _open_all(paths: Sequence[str | os.PathLike[str]]) -> dict[str, Dataset]:
    """Open vaults, by uid; `CardError` if there are none or their environments differ."""
    places = [place for path in paths for place in _expand(place_of(path).directory)]
    if not places:
        raise CardError("no vaults to push: give the path of at least one vault.")
    datasets = {(dataset := open_vault(place)).uid: dataset for place in places}
    if len(datasets) < len(places):
        raise CardError(f"two vaults have the same uid: {', '.join(map(str, places))}.")
    first, *others = datasets.values()
    for other in others:
        if difference := other.spec.difference(first.spec):
            raise CardError(
                f"{other.path} and {first.path} do not belong to one dataset, because they differ "
                f"in {difference}: push them to separate repositories."
            )
    return datasets


def _expand(path: Path) -> list[Path]:
    """Return the vaults of a path; `VaultFormatError` if one is a link in a dataset."""
    if path.is_symlink() and path.parent.name.endswith(SUFFIX):
        raise refused_link(path)
    if not path.name.endswith(SUFFIX):
        return [path]
    for link in store_of(path).links():
        raise refused_link(link)
    return [path / vault.name for vault in store_of(path).vaults()] or [path]


def _read(dataset: Dataset) -> _Vault:
    """Read a vault once for its digest, and once for its index."""
    store, path = dataset.store, dataset.path
    assert isinstance(store, Directory)
    with errors_of(path):
        if dataset.native:
            dataset.statistics(tracking.progress)  # stored in the vault if possible
        if _is_untidy(store):
            with suppress(VaultError):  # it is locked, or there is no room: publish it as it is
                compact(path)
        manifest = (store.directory / MANIFEST).read_bytes()
        dataset = open_vault(path)
        digest = dataset.digest()
        contents = Contents.of(dataset.store)
        listing = build_index(contents, dataset.uid)
        files = [store.directory / name for name in sorted(live_files(store))]
        if (store.directory / MANIFEST).read_bytes() != manifest:
            raise VaultConflictError(
                f"{path} was written to while it was read: push it when its writer is done."
            )
    return _Vault(dataset, digest, manifest, listing, [file for file in files if file.is_file()])


def _is_untidy(store: Directory) -> bool:
    """Whether a vault has much unused space, or very many small files."""
    sizes = [file.stat().st_size for file in (store.directory / DATA).iterdir()]
    total = sum(sizes)
    unused = total - live_bytes(store)
    wasteful = unused > max(_LEAST_UNUSED, _MOST_UNUSED * total)
    return wasteful or (len(sizes) > _MANY_FILES and total < _SMALL_FILE * len(sizes))


def _added(vault: _Vault, place: str) -> list[CommitOperationAdd]:
    """Return the files of a vault, at their paths in the repository."""
    metadata = vault.dataset.path / METADATA
    return [
        CommitOperationAdd(f"{place}/{METADATA}", str(metadata)),
        CommitOperationAdd(f"{place}/{MANIFEST}", vault.manifest),
        *(CommitOperationAdd(f"{place}/{DATA}/{file.name}", str(file)) for file in vault.files),
        CommitOperationAdd(index_of(vault.dataset.uid), vault.listing),
    ]


def files_of(added: Sequence[CommitOperationAdd]) -> tuple[File, ...]:
    """Return the files of a commit, as a card lists them."""
    return tuple(
        File(x.path_in_repo, x.upload_info.size, x.upload_info.sha256.hex()) for x in added
    )


def episode_tables(data: Mapping[str, Dataset]) -> dict[str, bytes]:
    """Return Parquet tables of the episodes of vaults, by path; none without PyArrow."""
    if not find_spec("pyarrow"):
        return {}
    import pyarrow
    from pyarrow import parquet

    tables = {}
    for uid, dataset in data.items():
        buffer = pyarrow.BufferOutputStream()
        parquet.write_table(dataset.episodes.to_arrow(), buffer, compression="zstd")
        tables[f"{EPISODES}/{uid}.parquet"] = buffer.getvalue().to_pybytes()
    return tables


class Repository(NamedTuple):
    """A repository to push to, as it was when it was opened."""

    api: HfApi
    name: str
    kind: client.Kind
    url: str
    commit: str
    files: set[str]
    """Paths of all files in it."""


def open_repository(name: str, private: bool, kind: client.Kind) -> Repository:
    """Return a repository, which is created if it does not exist."""
    client.reach()
    api, place = HfApi(), f"datasets/{name}" if kind == "dataset" else name
    api.create_repo(name, repo_type=kind, private=private, exist_ok=True)
    info: Any = api.repo_info(name, repo_type=kind)
    files = {sibling.rfilename for sibling in info.siblings or ()}
    return Repository(api, name, kind, f"{api.endpoint}/{place}", info.sha or "", files)


def _card(
    vaults: Mapping[str, _Vault],
    repository: str,
    licence: Licence,
    name: str | None,
    summary: str,
    citation: str,
) -> Card:
    """Return the card of vaults, without their files."""
    data = {uid: vault.dataset for uid, vault in vaults.items()}
    first = next(iter(data.values()))
    owner, _, project = repository.rpartition("/")
    environment = first.spec.name if first.spec.name.count("/") == 1 else f"unknown/{project}"
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
            uids={uid: _describe(vault.dataset, vault.digest) for uid, vault in vaults.items()},
            action={kind: first.spec.action_size},
            observation_size=first.spec.observation_size,
            state_size=first.spec.state_size,
            leaves=_leaves(first.spec),
            time_limit=time_limit,
            quirks=quirks,
        ),
        f"the card of {repository}",
    )


def _with_others(card: Card, old: Card, repository: str) -> Card:
    """Add the vaults that a repository holds; `CardError` if one card cannot describe them all."""
    others = {uid: vault for uid, vault in old.uids.items() if uid not in card.uids}
    if not others:
        return card
    for name, now in vars(card).items():
        before = getattr(old, name)
        if name not in ("uids", "summary", "citation", "quirks") and now != before:
            raise CardError(
                f"{repository} holds {', '.join(others)} with another {name} ({before}) "
                f"than what is pushed ({now}), but a card has one: give the same, or push to "
                "another repository."
            )
    return replace(
        card,
        uids={**others, **card.uids},
        summary=_joined(old.summary, card.summary),
        citation=_joined(old.citation, card.citation),
        quirks=tuple(dict.fromkeys((*old.quirks, *card.quirks))),
    )


def _joined(old: str, new: str) -> str:
    return old if new in old else f"{old}\n\n{new}".strip()


def _time_limit(data: dict[str, Dataset]) -> tuple[int | None, tuple[str, ...]]:
    """Return the time limit of all vaults, or a sentence on how their limits differ.

    Vaults of offmarl store their own limit. Others have only that of the card, which holds one:
    `CardError` if their limits differ.
    """
    limits = {uid: dataset.spec.time_limit for uid, dataset in data.items()}
    if len(set(limits.values())) == 1:
        return next(iter(limits.values())), ()
    by_uid = ", ".join(f"{uid} {limit or 'unknown'}" for uid, limit in limits.items())
    if not all(dataset.native for dataset in data.values()):
        raise CardError(
            f"these vaults have different time limits ({by_uid}), but a card holds only one: push "
            "them to separate repositories."
        )
    return None, (f"The time limits of the uids differ: {by_uid}.",)


def _describe(dataset: Dataset, digest: str) -> Uid:
    episodes = dataset.episodes
    teams = {
        team: {f"return_{name}": value for name, value in spread(returns).items()}
        for team, returns in episodes.complete_team_returns.items()
        if len(returns)
    }
    statistics: dict[str, Any] = next(iter(teams.values()), {})
    if len(episodes.teams) > 1:
        statistics = {"teams": {team: TeamReturns(**values) for team, values in teams.items()}}
    return Uid(
        dataset.num_steps,
        len(episodes.row),
        incomplete=episodes.incomplete or None,
        digest=digest,
        origin=in_words(dataset),
        **statistics,
    )


def commit_files(
    place: Repository,
    operations: Sequence[CommitOperationAdd],
    message: str,
    remove: Collection[str],
) -> str:
    """Upload what the hub does not have, and commit everything or nothing.

    `HubError` if another commit was made meanwhile, or the new one lacks what was sent.
    """
    api, repository, kind = place.api, place.name, place.kind
    page: Any = next(x.path_or_fileobj for x in operations if x.path_in_repo == README)
    try:
        RepoCard(page.decode()).validate(kind)  # before the files are uploaded
        # The client's progress bars would fill a log file.
        with _bars(shown=sys.stderr.isatty() and not tracking.is_quiet()):
            # An empty .gitignore in place of the repository's, which would leave files out.
            api.preupload_lfs_files(
                repository,
                operations,
                repo_type=kind,
                free_memory=False,
                gitignore_content="# empty",
            )
            done = api.create_commit(
                repository,
                [*operations, *map(CommitOperationDelete, sorted(remove))],
                commit_message=message,
                repo_type=kind,
                parent_commit=place.commit or None,
            )
    except HfHubHTTPError as error:
        if error.response.status_code != 412:
            raise
        raise HubError(
            f"someone else pushed to {repository} meanwhile, so nothing was committed: look at "
            "the change, and repeat the command."
        ) from error
    except ValueError as error:  # the hub checks the metadata of the README
        raise CardError(f"the hub does not accept the card of {repository}: {error}") from error
    except RuntimeError as error:  # the client raises this for any failure in its threads
        raise HubError(
            f"the upload to {repository} failed ({error.__cause__ or error}): nothing was "
            "committed. Repeat the command, which sends what is missing."
        ) from error
    info: Any = api.repo_info(repository, repo_type=kind, revision=done.oid, files_metadata=True)
    files = {x.rfilename: (x.size, x.lfs and x.lfs.sha256) for x in info.siblings or ()}
    for operation in operations:
        size, sha256 = files.get(operation.path_in_repo, (-1, None))
        sent = operation.upload_info
        if size not in (None, sent.size) or sha256 not in (None, sent.sha256.hex()):
            raise HubError(
                f"{repository} does not hold {operation.path_in_repo} as it was sent (commit "
                f"{info.sha}): the hub, or a proxy, left it out or changed it. Repeat the command."
            )
    return done.oid


@contextmanager
def _bars(shown: bool) -> Iterator[None]:
    """Show or hide the client's own progress bars in a block."""
    before = are_progress_bars_disabled()
    if not shown:
        disable_progress_bars()
    try:
        yield
    finally:
        if not before:
            enable_progress_bars()


def _leaves(spec: EnvSpec) -> dict[str, str] | None:
    """Describe the arrays of observations, states and extras; None if they are plain vectors."""
    if not has_typed_leaves(spec):
        return None
    trees = (OBSERVATIONS, STATE, EXTRAS)
    arrays = leaves(spec).items()
    return {name: f"{leaf.dtype} {leaf.shape}" for name, leaf in arrays if name.startswith(trees)}
