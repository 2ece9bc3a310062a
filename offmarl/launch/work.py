"""Work in blocks, and the shares of it that tasks run."""

import json
import shutil
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from filelock import FileLock, Timeout

from offmarl import tracking
from offmarl._lock import take_over_locks
from offmarl.errors import OffmarlError, OptionError, RunError
from offmarl.paths import hide_all_credentials

_DONE = "done"
_IDENTITY = "job.json"

WAIT_SECONDS = 600.0
"""How long a task waits for another process that runs the same block."""

Report = Callable[[int, int], None]
"""Called with the number of a share's blocks that are done, and their total."""


class Share(NamedTuple):
    """The blocks of one task: ``number``, ``number + of``, ``number + 2 * of`` and so on."""

    number: int
    of: int

    def blocks(self, count: int) -> range:
        """Return the share's blocks among ``count``."""
        return range(self.number, count, self.of)

    @classmethod
    def read(cls, text: str) -> "Share":
        """Read I/N, as the option ``--task`` has it; I counts from 0."""
        index, slash, of = text.partition("/")
        if not (slash and index.isdecimal() and of.isdecimal() and int(index) < int(of)):
            raise OptionError(
                f"--task must be I/N with I from 0 to N-1, such as 0/16 and 15/16: got {text!r}."
            )
        return cls(int(index), int(of))


def launch_lock(path: Path) -> Path:
    """Return the lock that a launch of tasks holds whose result is at a path."""
    return path.parent / f".{path.name}.tasks" / "launch.lock"


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
    num_blocks
        Number of blocks; the same for every number of tasks.

    Attributes
    ----------
    goes_on
        Whether the other blocks are run after one that has failed, and are a result without it.
        Each block of such work is a task of its own.
    hints
        What to do about a fact of the identity that differs from that of earlier tasks, by the
        fact's name.
    """

    goes_on = False
    hints: ClassVar[Mapping[str, str]] = {}

    def __init__(
        self, name: str, path: Path, identity: Mapping[str, Any], num_blocks: int = 1
    ) -> None:
        self.name, self.path, self.num_blocks = name, path, num_blocks
        self.identity: dict[str, Any] = hide_all_credentials(tracking.plain(identity))

    @property
    def directory(self) -> Path:
        """Directory of everything but the result: blocks, logs and locks."""
        return self.lock.parent

    @property
    def lock(self) -> Path:
        """The lock of the process that launches the tasks, or runs the blocks by itself."""
        return launch_lock(self.path)

    def lock_of(self, name: str) -> Path:
        """Return the lock of a block, or of the join."""
        return self.directory / "locks" / f"{name}.lock"

    def label(self, block: int) -> str:
        """Return the name of a block in messages."""
        return f"block {block}"

    def result(self, block: int) -> str:
        """Describe the result of a block for messages; empty without a description."""
        del block
        return ""

    def needs(self, block: int) -> Sequence[int]:
        """Return the blocks that must be complete before a block is run; they precede it."""
        del block
        return ()

    @abstractmethod
    def run(self, block: int) -> None:
        """Run a block, or continue it."""

    def is_complete(self) -> bool:
        """Whether the result exists; `RunError` if other work has its result at the path."""
        return not self.missing()

    def join(self) -> None:  # noqa: B027 - by default the blocks are the result
        """Make the result from all blocks, in their order."""

    def tasks(self, count: int | None) -> int:
        """Return the number of tasks that run the blocks; ``count`` is the user's choice."""
        most = max(self.num_blocks, 1)
        return most if self.goes_on else min(count or 1, most)

    def plan(self, tasks: int | None) -> dict[str, Any]:
        """Return the sizes of the work, for a person to read before it is run."""
        return {"path": self.path, "blocks": self.num_blocks, "tasks": self.tasks(tasks)}

    def notes(self, tasks: int) -> list[str]:
        """Return remarks for the user before this number of tasks is launched."""
        count = self.num_blocks
        if count >= tasks:
            return []
        blocks, run = ("1 block", "runs") if count == 1 else (f"{count} blocks", "run")
        return [f"{self.name} has {blocks}, so that only {count} of {tasks} tasks {run}."]

    def is_done(self, block: int) -> bool:
        """Whether a block is complete."""
        return (self.directory / _DONE / str(block)).exists()

    def is_ready(self, block: int) -> bool:
        """Whether all blocks are complete that a block needs."""
        return all(map(self.is_done, self.needs(block)))

    def finish(self, block: int) -> None:
        """Record that a block is complete."""
        (self.directory / _DONE).mkdir(parents=True, exist_ok=True)
        (self.directory / _DONE / str(block)).touch()

    def missing(self) -> list[int]:
        """Return the blocks that are not complete."""
        return [block for block in range(self.num_blocks) if not self.is_done(block)]

    def check(self) -> None:
        """Record what the blocks depend on; `RunError` if earlier tasks recorded something else."""
        recorded = make_once(self.directory / _IDENTITY, lambda: self.identity)
        for name in sorted(recorded.keys() | self.identity.keys()):
            before, now = recorded.get(name), self.identity.get(name)
            if before != now:
                hint = self.hints.get(name)
                how = f"other {hint}" if hint else f"{name}={before!r}, not {now!r}"
                raise RunError(
                    f"the tasks of {self.path} were started with {how}: give the same arguments to "
                    f"continue them, choose another path, or remove {self.directory}."
                )

    def forget(self) -> None:
        """Forget what earlier tasks recorded."""
        (self.directory / _IDENTITY).unlink(missing_ok=True)

    def clean(self) -> None:
        """Remove the blocks once they are joined; the logs stay."""
        for name in ("blocks.vlt", "copied.vlt", "blocks", _DONE, "locks"):
            shutil.rmtree(self.directory / name, ignore_errors=True)


def run_share(work: Work, share: Share, report: Report = lambda *_: None) -> int:
    """Run the blocks of a share that are missing; return how many this call ran.

    Blocks that can run at once come first; another one runs the blocks that it needs, or waits for
    the processes that run them. `RunError` if the directory has blocks of other work, or another
    process runs a block and does not end.
    """
    work.check()
    blocks, missing = share.blocks(work.num_blocks), set(work.missing())
    pending, failed = [block for block in blocks if block in missing], dict[int, Exception]()
    ran, done = 0, len(blocks) - len(pending)
    while pending:
        block = next(filter(work.is_ready, pending), pending[0])
        pending.remove(block)
        report(done, len(blocks))
        try:
            for need in work.needs(block):
                _run_block(work, need, failed, -1)  # its process may take any time
            ran += _run_block(work, block, failed, WAIT_SECONDS)
            done += 1
        except Exception as error:
            if not work.goes_on:
                raise
            if block not in failed:  # a block that it needs has failed
                tracking.notice(f"{work.label(block)} failed: {error}")
    report(done, len(blocks))
    if failed:
        bugs = (error for error in failed.values() if not isinstance(error, OffmarlError))
        raise next(bugs, next(iter(failed.values())))
    return ran


def _run_block(work: Work, block: int, failed: dict[int, Exception], wait_seconds: float) -> bool:
    """Run a block; False if it is done, perhaps by a process that ran it just now."""
    if block in failed:
        raise failed[block]
    try:
        with (
            _locked(work.lock_of(str(block)), f"run block {block}", wait_seconds),
            take_over_locks(),
        ):
            # A join removes the marks of blocks.
            if work.is_done(block) or (not work.goes_on and work.is_complete()):
                return False
            work.run(block)
            work.finish(block)
    except Exception as error:
        failed[block] = error
        if work.goes_on:
            if not isinstance(error, OffmarlError):
                traceback.print_exception(error)
            tracking.notice(f"{work.label(block)} failed: {error}")
        raise
    return True


def join_work(work: Work) -> bool:
    """Join the blocks, or raise `RunError` for missing ones; False if that was done before."""
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
    with _locked(work.lock_of("join"), "joined the blocks", WAIT_SECONDS):
        if not work.is_complete():
            work.join()
    work.clean()
    return True


@contextmanager
def _locked(path: Path, doing: str, wait_seconds: float = -1) -> Iterator[None]:
    """Hold a lock, which is released if the process dies; a negative time waits without a limit."""
    lock: Any = None
    try:
        while lock is None:
            path.parent.mkdir(parents=True, exist_ok=True)
            with suppress(FileNotFoundError):  # a process that ended has just removed the directory
                lock = FileLock(path, timeout=wait_seconds).acquire()
    except Timeout:
        raise RunError(
            f"another process has {doing} for longer than {wait_seconds:.0f} s: wait for it to "
            "end, or stop it."
        ) from None
    except (OSError, NotImplementedError) as error:
        raise RunError(
            f"{path} cannot be locked ({error}), as tasks need: choose another path for the result."
        ) from error
    with lock:
        yield


def make_once(path: Path, make: Callable[[], Any]) -> Any:
    """Return the content of a JSON file, which the first of several processes makes."""
    if not path.exists():
        with _locked(path.with_name(f"{path.name}.lock"), f"made {path.name}"):
            if not path.exists():
                tracking.write_json(path, make())
    try:
        return json.loads(path.read_text())
    except ValueError:
        raise RunError(
            f"{path} is damaged: remove {path.parent}, and repeat the command."
        ) from None
