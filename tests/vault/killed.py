"""Programs that write vaults and are killed at a given time.

A process that has everything imported forks one child for each of them, so that hundreds of deaths
take seconds. To add a program, add a function to `PROGRAMS`: it says what is acknowledged.
"""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from offmarl import vault
from offmarl.vault.write import compaction
from offmarl.vault.write import writer as writer_module
from tests.vault.experience import SPEC, make, whole_episodes

RECORDS = 12


def say(*words: object) -> None:
    """Print a line with a single write, so that a kill cannot cut it."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def record(path: Path) -> None:
    is_new = not path.exists()
    with (
        vault.create(path, SPEC, rows=2, chunk_steps=16) if is_new else vault.resume(path) as writer
    ):
        for chunk in range(RECORDS):
            writer.append(*make(steps=7, seed=chunk), run="replay", chunk=chunk)
            if chunk % 3 == 2:
                writer.flush()
                say(chunk + 1)


def create_whole(path: Path) -> None:
    if not path.exists():
        with vault.create_whole(path, SPEC, rows=2, chunk_steps=16) as writer:
            for chunk in range(RECORDS):
                writer.append(*make(steps=7, seed=chunk), run="replay", chunk=chunk)
        say(RECORDS)


def share(path: Path) -> None:
    with vault.join(path, "replay", gather=15) as writer:
        for chunk in range(RECORDS):
            writer.append(*whole_episodes(steps=7, seed=chunk), chunk=chunk)
            say(writer.chunks())


def compact(path: Path) -> None:
    vault.compact(path)
    say(1)


def close(path: Path) -> None:
    """Reclaim unused space."""
    vault.resume(path).close()
    say(1)


def change(path: Path) -> None:
    """Map the source vault, by a function that changes rewards and views."""
    if not path.exists():
        names = ("reward", "state", "final.state")
        vault.map(
            path.parents[2] / "source.vlt",
            path,
            lambda steps: {name: steps[name] * 2 for name in names if name in steps},
        )
        say(1)


def unite(path: Path) -> None:
    """Concatenate the source vault with itself."""
    if not path.exists():
        vault.cat([path.parents[2] / "source.vlt"] * 2, path)
        say(1)


def divide(path: Path) -> None:
    """Split the source vault; the path is that of the first part."""
    if not path.exists():
        vault.split(path.parents[2] / "source.vlt", path.parent, fractions=(0.5, 0.5))
        say(1)


def export(path: Path) -> None:
    """Export the vault beside the path in the layout of the path's suffix."""
    source = vault.open_vault(path.with_name("source.vlt"))
    match path.suffix:
        case ".npz":
            vault.export_dataset(source, path, "numpy")
        case ".h5":
            vault.export_dataset(source, path, "pymarl")
        case ".zarr":
            vault.export_dataset(source, path, "zarr")
        case _:
            os.environ["MINARI_DATASETS_PATH"] = str(path.parent)
            vault.export_dataset(source, path.name, "minari")
    say(1)


PROGRAMS = {
    program.__name__: program
    for program in (record, create_whole, share, compact, close, change, unite, divide, export)
}


def deaths(events: int, count: int, longest: float) -> list[dict[str, Any]]:
    """Return instants as counts of events, and as many in seconds, which may be in TensorStore."""
    rng = random.Random(0)
    by_count = [{"event": 1 + number * (events - 1) // count} for number in range(count)]
    return [*by_count, *({"seconds": rng.uniform(0.001, longest)} for _ in range(count))]


class Death(NamedTuple):
    signal: int
    """0 where the program ended by itself."""
    acknowledged: int
    """The last number it said."""
    events: int
    """Calls and returns in `offmarl.vault`, where it ended by itself."""


class Victims:
    """The process that forks the children; used as a context manager."""

    def __enter__(self) -> "Victims":
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.vault.killed"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()

    def run(self, program: str, path: Path, *, event: int = 0, seconds: float = 0.0) -> Death:
        """Run a program, and kill it at its n-th event, or this many seconds after its start."""
        print(program, path, event, seconds, file=self._process.stdin, flush=True)
        counts = {"acknowledged": 0, "events": 0}
        while True:
            word, *rest = self._process.stdout.readline().split()
            match word:
                case "signal":
                    return Death(int(rest[0]), **counts)
                case "events":
                    counts["events"] = int(rest[0])
                case _:
                    counts["acknowledged"] = int(word)


def _fork(program: str, path: str, event: int, seconds: float) -> int:
    child = os.fork()
    if not child:
        _die(program, Path(path), event)
    if seconds:
        time.sleep(seconds)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status):
        raise RuntimeError(f"{program} failed")
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def _die(program: str, path: Path, event: int) -> None:
    events = 0

    def tick(frame, *_):
        nonlocal events
        if "offmarl/vault" in frame.f_code.co_filename:
            events += 1
            if events == event:
                os.kill(os.getpid(), signal.SIGKILL)

    status = 1
    try:
        sys.setprofile(tick)
        threading.setprofile(tick)
        PROGRAMS[program](path)
        sys.setprofile(None)
        say("events", events)
        status = 0
    finally:
        os._exit(status)


def import_writers() -> None:
    """Import modules once, which would take each child longer than its work."""
    for name in ("zarr", "zarr.codecs", "h5py", "minari", "minari.dataset.minari_storage"):
        with suppress(ImportError):
            import_module(name)


def main() -> None:
    writer_module._COMMIT_BYTES = writer_module._MOST_COMMIT_BYTES = 1  # more commits to die in
    compaction._LEAST_RECLAIMED = 1
    for line in sys.stdin:
        program, path, event, seconds = line.split()
        if program == "export":
            import_writers()
        say("signal", _fork(program, path, int(event), float(seconds)))


if __name__ == "__main__":
    main()
