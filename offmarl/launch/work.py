"""Work in blocks, and the shares of it that tasks run."""

import json
import shutil
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from filelock import FileLock, Timeout

from offmarl import records, tracking
from offmarl._lock import alone
from offmarl.errors import OffmarlError, OptionError, RunError

_DONE = "done"
_IDENTITY = "job.json"

WAIT_SECONDS = 600.0
"""How long a task waits for another process that runs the same block."""

Report = Callable[[int, int, int | None], None]
"""Called with the number of a share's blocks that are done, their total, and the block that is run
next, if there is one."""


class Share(NamedTuple):
    """The blocks of one task: ``number``, ``number + of``, ``number + 2 * of`` and so on."""

    number: int
    of: int

    def blocks(self, count: int) -> range:
        """Return the share's blocks among ``count``."""
        return range(self.number, count, self.of)

    @classmethod
    def read(cls, text: str) -> "Share":
        """Read I/N, as the option ``--task`` has it; I counts from 0.

        Raises
        ------
        OptionError
            The text has another form, or I is not below N.
        """
        index, slash, of = text.partition("/")
        if not (slash and index.isdecimal() and of.isdecimal() and int(index) < int(of)):
            raise OptionError(
                f"--task must be I/N with I from 0 to N-1, such as 0/16 and 15/16: got {text!r}."
            )
        return cls(int(index), int(of))


class Work(ABC):
    """Work in blocks, whose result is at a path.

    A block is a pure function of the work's identity and of its number, and writes files of its
    own. It may be run again, after a kill at any instant or beside another process.

    Parameters
    ----------
    name
        A short description, such as "record random-0".
    path
        Where the result will be.
    identity
        A JSON object of what the blocks depend on.

    Attributes
    ----------
    goes_on
        Whether the other blocks are run after one that has failed, and are a result without it.
    hints
        What to do about a fact of the identity that differs from that of earlier tasks, by the
        fact's name.
    """

    goes_on = False
    hints: ClassVar[Mapping[str, str]] = {}

    def __init__(self, name: str, path: Path, identity: Mapping[str, Any]):
        self.name, self.path = name, path
        self.identity: dict[str, Any] = tracking.plain(identity)

    @property
    def directory(self) -> Path:
        """Directory of everything but the result: blocks, logs and locks."""
        return self.path.parent / f".{self.path.name}.tasks"

    @property
    @abstractmethod
    def num_blocks(self) -> int:
        """Number of blocks; the same for every number of tasks."""

    @property
    def default_tasks(self) -> int:
        """Number of tasks if none is asked for."""
        return 1

    def label(self, block: int) -> str:
        """Return the name of a block in messages."""
        return f"block {block}"

    def needs(self, block: int) -> Sequence[int]:
        """Return the blocks that must be complete before a block is run; they precede it."""
        del block
        return ()

    @abstractmethod
    def run(self, block: int) -> None:
        """Run a block, or continue it."""

    @abstractmethod
    def is_complete(self) -> bool:
        """Whether the result exists.

        Raises
        ------
        RunError
            Other work has its result at the path.
        """

    @abstractmethod
    def join(self) -> None:
        """Make the result from all blocks, in their order."""

    def plan(self, tasks: int) -> dict[str, Any]:
        """Return the sizes of the work, for a person to read before it is run."""
        count = self.num_blocks
        return {"path": self.path, "blocks": count, "tasks": min(tasks, max(count, 1))}

    def notes(self, tasks: int) -> list[str]:
        """Return what a person should know before so many tasks are launched."""
        count = self.num_blocks
        if count >= tasks:
            return []
        blocks, run = ("1 block", "runs") if count == 1 else (f"{count} blocks", "run")
        return [f"{self.name} has {blocks}, so that only {count} of {tasks} tasks {run}."]

    def is_done(self, block: int) -> bool:
        """Whether a block is complete."""
        return (self.directory / _DONE / str(block)).exists()

    def finish(self, block: int) -> None:
        """Record that a block is complete."""
        (self.directory / _DONE).mkdir(parents=True, exist_ok=True)
        (self.directory / _DONE / str(block)).touch()

    def missing(self) -> list[int]:
        """Return the blocks that are not complete."""
        try:
            done = {path.name for path in (self.directory / _DONE).iterdir()}
        except FileNotFoundError:
            done = set()
        return [block for block in range(self.num_blocks) if str(block) not in done]

    def check(self) -> None:
        """Record what the blocks depend on, or compare it with what earlier tasks recorded.

        Raises
        ------
        RunError
            The directory has blocks of other work.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        path = self.directory / _IDENTITY
        with FileLock(f"{path}.lock"):
            if not path.exists():
                tracking.write_json(path, self.identity)
        found = records.parse(path.read_bytes(), str(path), RunError)
        for name in sorted(found.keys() | self.identity.keys()):
            theirs, ours = found.get(name), self.identity.get(name)
            if theirs != ours:
                hint = f" ({self.hints[name]})" if name in self.hints else ""
                raise RunError(
                    f"the tasks of {self.path} were started with {name}={theirs!r}, not {ours!r}"
                    f"{hint}: give the same arguments to continue them, choose another path, or "
                    f"remove {self.directory}."
                )

    def clean(self) -> None:
        """Remove the blocks once they are joined; the logs stay."""
        for name in ("blocks.vlt", "copied.vlt", "blocks", _DONE, "locks"):
            shutil.rmtree(self.directory / name, ignore_errors=True)


def run_share(
    work: Work, share: Share, report: Report | None = None, skip: Collection[int] = ()
) -> int:
    """Run the blocks of a share that are missing; return how many this call ran.

    A block that needs others waits until they are complete, after the blocks that can run at once.

    Parameters
    ----------
    work
        The work.
    share
        Which of its blocks.
    report
        Is called before each block, and at the end.
    skip
        Blocks to leave out.

    Raises
    ------
    RunError
        The directory has blocks of other work, or another process runs a block and does not end.
    """
    work.check()
    mine, missing = share.blocks(work.num_blocks), set(work.missing())
    left, ran = [block for block in mine if block in missing and block not in skip], 0
    report, failed = report or _no_report, dict[int, Exception]()
    done = len(mine) - len(missing.intersection(mine))
    while left:
        block = next((one for one in left if is_ready(work, one)), left[0])
        report(done, len(mine), block)
        left.remove(block)
        if block in failed:  # another block needed it
            continue
        try:
            ran += _run_with_needs(work, block, failed)
            done += 1
        except Exception as error:
            failed[block] = error
            if not work.goes_on:
                raise
            _note_failure(work.label(block), error)
    report(done, len(mine), None)
    if failed:
        bugs = (error for error in failed.values() if not isinstance(error, OffmarlError))
        raise next(bugs, next(iter(failed.values())))
    return ran


def is_ready(work: Work, block: int) -> bool:
    """Whether all blocks are complete that a block needs."""
    return all(work.is_done(need) for need in work.needs(block))


def _run_with_needs(work: Work, block: int, failed: dict[int, Exception]) -> bool:
    """Run a block after those that it needs; False if it is done.

    `RunError` if a needed block fails, and is added to ``failed``, or is among them already.
    """
    for need in work.needs(block):
        if need not in failed:
            try:
                _run_block(work, need, -1)  # its process may take any time
            except Exception as error:
                failed[need] = error
                if not work.goes_on:
                    raise
                _note_failure(work.label(need), error)
        if need in failed:
            raise RunError(f"it needs {work.label(need)}, which failed: {failed[need]}")
    return _run_block(work, block)


def _note_failure(name: str, error: Exception) -> None:
    if not isinstance(error, OffmarlError):
        traceback.print_exception(error)
    tracking.notice(f"{name} failed: {error}")


def _run_block(work: Work, block: int, wait_seconds: float | None = None) -> bool:
    """Run a block; False if it is done, perhaps by a process that ran it just now."""
    if work.is_done(block):
        return False
    with _locked(work, block, wait_seconds), alone():
        if work.is_done(block):
            return False
        work.run(block)
        work.finish(block)
    return True


def _no_report(done: int, total: int, block: int | None) -> None:
    """No-op `Report`."""


def join_work(work: Work) -> bool:
    """Join the blocks; False if the result was complete before.

    Raises
    ------
    RunError
        Blocks are missing.
    """
    if work.is_complete():
        work.clean()
        return False
    if missing := work.missing():
        first = ", ".join(map(str, missing[:8])) + (", ..." if len(missing) > 8 else "")
        raise RunError(
            f"{len(missing)} of the {work.num_blocks} blocks of {work.path} are missing ({first}): "
            "run the tasks that have not ended, and join them then."
        )
    work.check()
    with _locked(work, "join"):
        if not work.is_complete():
            work.join()
    work.clean()
    return True


def _locked(work: Work, name: int | str, wait_seconds: float | None = None) -> FileLock:
    """Return the lock of a block, which its process holds; it is released when that process dies.

    Entering it raises `RunError` if another process holds it for long: by default `WAIT_SECONDS`;
    if the time is negative, it waits without a limit.
    """
    path = work.directory / "locks" / f"{name}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    wait_seconds = WAIT_SECONDS if wait_seconds is None else wait_seconds
    return _Patient(path, timeout=wait_seconds, is_singleton=False)


def _in_words(lock: Path) -> str:
    """Return what a process does that holds a lock of `_locked`."""
    return "joined the blocks" if lock.stem == "join" else f"run block {lock.stem}"


class _Patient(FileLock):
    """A file lock whose timeout is an error that a user can understand."""

    def acquire(self, *args: Any, **options: Any) -> Any:
        """Wait for the lock."""
        try:
            return super().acquire(*args, **options)
        except Timeout:
            raise RunError(
                f"another process has {_in_words(Path(self.lock_file))} for longer than "
                f"{self.timeout:.0f} s: wait for it to end, or stop it."
            ) from None


def once(path: Path, make: Callable[[], Any]) -> Any:
    """Return the content of a JSON file, which the first of several processes makes.

    Parameters
    ----------
    path
        The file. Processes that come later wait for it.
    make
        Returns the content.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock"):
            if not path.exists():
                tracking.write_json(path, make())
    return json.loads(path.read_text())
