"""Datasets that were pulled to this machine: where they are kept, and how they are found by name.

They are in ``$HF_HOME/assets/offmarl/datasets/pulled``. A dataset is a directory
``NAME/COMMIT/SCENARIO.vlt`` with a vault for each uid, as OG-MARL and flashbax lay them out, and a
record of how it was checked. ``NAME/refs/REVISION`` holds the commit that a branch or tag meant
when it was last pulled.
"""

import errno
import hashlib
import os
import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from filelock import FileLock, Timeout

from offmarl import records, tracking
from offmarl.errors import (
    CardError,
    HubChecksumError,
    HubError,
    RunError,
    UnknownNameError,
    VaultError,
    VaultNotFoundError,
    unknown_name,
)
from offmarl.hub import card as cards
from offmarl.hub.card import Card
from offmarl.paths import local_output
from offmarl.vault.read.open import SUFFIX
from offmarl.vault.storage.store import store_of

PULLED = "pulled"
"""Directory of all pulled datasets, or of all pulled policies."""
ARRIVING = ".arriving"
"""Directory of incomplete data, in the directory of a dataset."""
_LOCK = ".lock"
_REFS = "refs"


class CachedDataset(NamedTuple):
    """A dataset on this machine, perhaps incomplete: a directory ``<scenario>.vlt``."""

    path: Path

    @property
    def name(self) -> str:
        """Its name and the beginning of its commit, such as "org/name@0123456789ab"."""
        commit, place = self.path.parents[:2]
        return f"{place.relative_to(self.root).as_posix()}@{commit.name[:12]}"

    @property
    def root(self) -> Path:
        """Directory of all pulled datasets."""
        return root()

    @property
    def uids(self) -> dict[str, Path]:
        """Paths of its vaults on this machine, by uid."""
        return {path.name: self.path / path.name for path in store_of(self.path).vaults()}

    @property
    def arriving(self) -> Path:
        """Directory of incomplete data."""
        return self.path / ARRIVING

    @property
    def record(self) -> dict[str, Any]:
        """What `pull` recorded: name, repository, commit, card, and the files of each uid."""
        try:
            return tracking.read_json(self.path, records.PULLED)
        except RunError:
            return {}

    @property
    def card(self) -> Card | None:
        """The card that `pull` recorded; None if there is none, or it is damaged."""
        text = self.record.get("card")
        with suppress(CardError):
            return cards.parse(text, str(self.path)) if isinstance(text, str) else None
        return None

    def note(self, facts: Mapping[str, Any]) -> None:
        """Update the record."""
        tracking.write_json(self.path / records.PULLED, {**self.record, **facts})

    @property
    def size(self) -> int:
        """Bytes on disk, incomplete data included."""
        files = (path for path in self.path.rglob("*") if path.is_file())
        return sum(path.stat().st_blocks * 512 for path in files)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the dataset for this process; wait while another process holds the lock.

        A dataset on a disk that cannot be written is used without a lock.
        """
        lock = FileLock(self.arriving / _LOCK)
        try:
            self.arriving.mkdir(parents=True, exist_ok=True)
            lock.acquire(timeout=0)
        except Timeout:
            with tracking.progress(f"waiting for another process to pull {self.path.stem}", 1):
                lock.acquire()
        except OSError as error:
            if not self.uids or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise
        try:
            yield
        finally:
            lock.release()


def root() -> Path:
    """Return the directory of all pulled datasets."""
    from offmarl.hub.client import assets_directory  # imports huggingface_hub

    return assets_directory("datasets", PULLED)


def entries() -> list[CachedDataset]:
    """Return the datasets on this machine, complete or not."""
    depths = "*/*/*/*", "*/*/*/*/*"
    paths = (path for depth in depths for path in root().glob(f"{depth}{SUFFIX}"))
    return sorted(CachedDataset(path) for path in paths if (path / records.PULLED).is_file())


def remember(place: Path, revision: str, commit: str) -> None:
    """Record, in a repository's directory, the commit that a revision means now, if possible."""
    with suppress(OSError):
        tracking.replace_file(_ref(place, revision), commit)


def commit_of(place: Path, revision: str) -> str:
    """Return the commit that a revision meant when it was last pulled, or the revision."""
    with suppress(FileNotFoundError):
        return _ref(place, revision).read_text().strip()
    return revision


def _ref(place: Path, revision: str) -> Path:
    return place / _REFS / quote(revision, safe="")


def remove(dataset: CachedDataset) -> int:
    """Remove a dataset, and return the bytes freed."""
    freed = dataset.size
    commit, name = dataset.path.parents[:2]
    shutil.rmtree(commit)
    refs = name / _REFS
    for ref in refs.glob("*"):
        if ref.read_text().strip() == commit.name:
            ref.unlink()
    for directory in (refs, name, *name.parents):
        if directory == dataset.root:
            break
        with suppress(OSError):  # it is not empty
            directory.rmdir()
    return freed


def verify(dataset: CachedDataset, uid: str | None = None) -> int:
    """Compare every file with what `pull` recorded, and return the number of files."""
    files = [
        (dataset.path / name / file, checksum)
        for name, facts in dataset.record.get("uids", {}).items()
        if uid in (None, name)
        for file, (_, checksum) in facts["files"].items()
    ]
    if not files:
        raise HubError(
            f"{dataset.path} was not pulled completely: pull it again, after "
            "`offmarl cache rm` if that fails."
        )
    damaged = [path for path, checksum in files if not _is_intact(path, checksum)]
    if damaged:
        names = ", ".join(str(path.relative_to(dataset.path)) for path in damaged[:3])
        raise HubChecksumError(
            f"{len(damaged)} of {len(files)} files of {dataset.path} differ from what was "
            f"published ({names}): remove the dataset with `offmarl cache rm` and pull it again."
        )
    return len(files)


def _is_intact(path: Path, checksum: int | str) -> bool:
    """Whether a file has this SHA-256, or CRC-32 if it is from an archive."""
    with suppress(OSError), path.open("rb") as file:
        if isinstance(checksum, str):
            return hashlib.file_digest(file, "sha256").hexdigest() == checksum
        crc = 0
        while block := file.read(2**20):
            crc = zlib.crc32(block, crc)
        return crc == checksum
    return False


# ------------------------------------------------------------------------------------ names


class DatasetName(NamedTuple):
    """The parts of a name such as "og_marl/smac_v1/3m/Good@main"."""

    name: str
    """Name of a dataset in the catalogue, or of a repository on the hub."""
    uid: str | None
    """One of its vaults; None for all."""
    explicit: str | None
    """The revision in the name: a branch, tag or commit."""

    @property
    def card(self) -> Card | None:
        """The dataset's card in the catalogue, if it has one."""
        return cards.load(self.name) if self.name in cards.names() else None

    @property
    def revision(self) -> str:
        """The revision in the name, or the one that the card names."""
        return self.explicit or (self.card.hub.revision if self.card and self.card.hub else "main")

    @property
    def commit(self) -> str:
        """The commit that the revision meant when it was last pulled, or the revision."""
        return commit_of(root() / self.name, self.revision)


def parse(name: str) -> DatasetName:
    """Parse ``NAME[/UID][@REVISION]``; `UnknownNameError` if no dataset can have that name."""
    path, _, revision = name.partition("@")
    parts = path.strip("/").split("/")
    catalogue = cards.names()
    in_catalogue = _is_source(parts[0])
    length = 3 if in_catalogue else 2
    target = "/".join(parts[:length])
    unknown = len(parts) not in (length, length + 1) or (in_catalogue and target not in catalogue)
    if name and not in_catalogue and (unknown or SUFFIX in name) and Path(name).exists():
        raise UnknownNameError(
            f"{name} is a path, not the name of a dataset: `offmarl.open` and commands open it."
        )
    if unknown:
        raise unknown_name("dataset", path, catalogue, see="offmarl ls --remote")
    return DatasetName(target, parts[length] if len(parts) > length else None, revision or None)


def _is_source(name: str) -> bool:
    """Whether the names of datasets in the catalogue begin with this."""
    return any(dataset.startswith(f"{name}/") for dataset in cards.names())


def local_vaults(target: DatasetName) -> dict[str, Path]:
    """Return the local vaults of a target, by uid."""
    dataset = _entry_of(target)
    vaults = dataset.uids if dataset else {}
    return {uid: path for uid, path in vaults.items() if target.uid in (None, uid)}


def find(name: str, one: bool = False) -> Path | None:
    """Return the path of a pulled dataset: a vault, or the directory of several.

    Returns None if the text is not a dataset's name, and so is a path that does not exist.
    """
    try:
        target = parse(name)
    except UnknownNameError as error:
        source = name.partition("/")[0]
        if not _is_source(source) or Path(source).exists():
            return None
        raise VaultNotFoundError(f"the path {name} does not exist, and {error}") from error
    if paths := local_vaults(target):
        if one:
            refuse_several(target)
        # Without a uid, an incomplete dataset whose card lists none may have others.
        if target.uid or not one or find_complete(target):
            return paths[target.uid] if target.uid else next(iter(paths.values())).parent
    elif target.card is None:
        return None
    raise VaultNotFoundError(_not_pulled(name, target))


def refuse_several(target: DatasetName) -> None:
    """Raise `VaultError` if a name has no uid and its dataset has several, pulled or not."""
    dataset, vaults = _entry_of(target), local_vaults(target)
    card = target.card or (dataset and dataset.card)
    uids = card.uids if card and len(vaults) < 2 else vaults
    if target.uid is None and len(uids) > 1:
        choices = ", ".join(uids)
        raise VaultError(f"{target.name} has several vaults: add one of {choices} to the name.")


def _not_pulled(name: str, target: DatasetName) -> str:
    card = target.card
    if card and target.uid and card.uids and target.uid not in card.uids:
        return str(unknown_name("uid", target.uid, card.uids))
    if card and (card.hub is None or card.hub.path is None):
        return explain_unpublished(card)
    return (
        f"{name} is not on this machine: run `offmarl pull {name}` first. `offmarl cache ls` lists "
        "other datasets and commits."
    )


def explain_unpublished(card: Card) -> str:
    """Say that a dataset of the catalogue is not published, and how it is recorded."""
    how = f": record it with `{card.recipe.command}`" if card.recipe else ""
    return f"{card.name} is in the catalogue, but not published{how}."


def find_complete(
    target: DatasetName, out: str | os.PathLike[str] | None = None
) -> tuple[CachedDataset, Card] | None:
    """Return a target's dataset on this machine and its card; None if it is not complete.

    ``out`` is as for `offmarl.hub.pull`.
    """
    if (dataset := _entry_of(target, out)) is None:
        return None
    card, vaults = target.card or dataset.card, dataset.uids
    is_whole = dataset.record.get("whole") or (
        card and card.uids and card.uids.keys() <= vaults.keys()
    )
    return (dataset, card) if card and (target.uid in vaults if target.uid else is_whole) else None


def _entry_of(
    target: DatasetName, out: str | os.PathLike[str] | None = None
) -> CachedDataset | None:
    """Return a dataset at its commit, in the cache or in ``out``; None if it is not there."""
    commit = target.commit
    directory = root() / target.name / commit if out is None else local_output(out)
    places = map(CachedDataset, sorted(directory.glob(f"*{SUFFIX}")))
    identity = target.name, commit
    for place in places:
        record = place.record
        if (record.get("name"), record.get("commit")) == identity:
            return place
    return None
