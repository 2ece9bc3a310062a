"""Where pulled datasets are kept: ``$HF_HOME/assets/offmarl/datasets/pulled``.

There a dataset is a directory ``NAME/COMMIT/SCENARIO.vlt`` with a vault for each uid, as OG-MARL
and flashbax have them, and a record of what was checked; ``NAME/refs/REVISION`` says which commit
a branch or tag meant when it was last asked for.
"""

import shutil
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

from filelock import FileLock, Timeout
from huggingface_hub import cached_assets_path, constants

from offmarl import tracking
from offmarl.errors import HubChecksumError, HubError, RunError
from offmarl.vault.drivers import driver_of
from offmarl.vault.open import SUFFIX
from offmarl.vault.published import RECORD

ARRIVING = ".arriving"
"""Directory, in that of a dataset, for what is not complete."""
_LOCK = ".lock"
_REFS = "refs"


class Entry(NamedTuple):
    """A dataset, as far as it is here: the directory ``<scenario>.vlt``."""

    path: Path

    @property
    def uids(self) -> dict[str, Path]:
        """Its vaults that are here."""
        return {path.name: self.path / path.name for path in driver_of(self.path).vaults()}

    @property
    def arriving(self) -> Path:
        """Directory of what is not complete."""
        return self.path / ARRIVING

    @property
    def record(self) -> dict[str, Any]:
        """What was noted when it was pulled: name, repository, commit, and the files of uids."""
        try:
            return tracking.read_json(self.path, RECORD)
        except RunError:
            return {}

    def note(self, facts: Mapping[str, Any]) -> None:
        """Replace some of the facts in the record."""
        tracking.write_json(self.path / RECORD, {**self.record, **facts})

    @property
    def size(self) -> int:
        """Bytes it takes on the disk, those that are arriving included."""
        files = (path for path in self.path.rglob("*") if path.is_file())
        return sum(path.stat().st_blocks * 512 for path in files)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the dataset for this process alone; wait while another one does."""
        self.arriving.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.arriving / _LOCK)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            with tracking.progress(f"waiting for another process to pull {self.path.stem}", 1):
                lock.acquire()
        try:
            yield
        finally:
            lock.release()


def root() -> Path:
    """Return the directory of all pulled datasets."""
    assets = constants.HF_ASSETS_CACHE
    return Path(
        cached_assets_path("offmarl", namespace="datasets", subfolder="pulled", assets_dir=assets)
    )


def entry(name: str, commit: str, scenario: str) -> Entry:
    """Return where a dataset is kept at a commit; it need not be there."""
    return Entry(root() / name / commit / f"{scenario}{SUFFIX}")


def entries(commit: Path | None = None) -> list[Entry]:
    """Return the datasets that are here or began to arrive: all, or those of a commit."""
    depths = ("*",) if commit else ("*/*/*/*", "*/*/*/*/*")
    found = (path for depth in depths for path in (commit or root()).glob(f"{depth}{SUFFIX}"))
    return sorted(Entry(path) for path in found if (path / RECORD).is_file())


def remember(name: str, revision: str, commit: str) -> None:
    """Note which commit a revision means now."""
    file = _ref(name, revision)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(commit)


def recall(name: str, revision: str) -> str:
    """Return the commit that a revision meant when it was last asked for, or the revision."""
    with suppress(FileNotFoundError):
        return _ref(name, revision).read_text().strip()
    return revision


def _ref(name: str, revision: str) -> Path:
    return root() / name / _REFS / quote(revision, safe="")


def remove(one: Entry) -> int:
    """Remove a dataset, and return the bytes that this frees."""
    freed = one.size
    commit, name = one.path.parents[:2]
    shutil.rmtree(commit)
    refs = name / _REFS
    for ref in refs.glob("*"):
        if ref.read_text().strip() == commit.name:
            ref.unlink()
    for directory in (refs, name, *name.parents):
        if directory == root():
            break
        with suppress(OSError):  # others are still there
            directory.rmdir()
    return freed


def verify(one: Entry, uid: str | None = None) -> int:
    """Compare every file with the CRC-32 that its archive gave, and return how many there are.

    Of one vault only where a uid is given.

    Raises
    ------
    HubChecksumError
        Some are missing or different; it names them.
    """
    files = [
        (path, size, crc)
        for name, facts in one.record.get("uids", {}).items()
        if uid in (None, name)
        for path, size, crc in ((one.path / name / file, *f) for file, f in facts["files"].items())
    ]
    if not files:
        raise HubError(f"{one.path} was not pulled as a whole: pull it again.")
    damaged = [path for path, size, crc in files if not _is_intact(path, size, crc)]
    if damaged:
        names = ", ".join(str(path.relative_to(one.path)) for path in damaged[:3])
        raise HubChecksumError(
            f"{len(damaged)} of {len(files)} files of {one.path} are not as they were published "
            f"({names}): remove it with `offmarl cache rm` and pull it again."
        )
    return len(files)


def _is_intact(path: Path, size: int, crc: int) -> bool:
    found = 0
    try:
        if path.stat().st_size != size:
            return False
        with path.open("rb") as file:
            while block := file.read(2**20):
                found = zlib.crc32(block, found)
    except OSError:
        return False
    return found == crc
