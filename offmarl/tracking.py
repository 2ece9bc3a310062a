"""Files of a run for people and programs, and progress displays.

A run's directory holds ``run.json`` (what was run), ``metrics.jsonl`` (one JSON object per line)
and ``marl_eval.json`` (evaluations, in the layout of Gorsane et al., 2022). `offmarl.checkpoint`
writes ``checkpoints/``.
"""

import hashlib
import json
import math
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from importlib.util import find_spec
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.table import Column
from rich.text import Text

from offmarl import records
from offmarl.errors import RunError, ShapeError
from offmarl.terminal import one_line, silent
from offmarl.types import EnvSpec

RUN_FILE = "run.json"
METRICS_FILE = "metrics.jsonl"
MARL_EVAL_FILE = "marl_eval.json"
PARTNERS_FILE = "partners.json"
CHECKPOINTS = "checkpoints"
POLICIES = "policies"
OPPONENTS = "opponents"

Acting = Literal["greedy", "sampled"]
"""How a policy acts: with its best actions, or with sampled ones."""

RETURN = "episode_return"
"""Name of the main metric: returns of the policy."""

GREEDY_RETURN = "greedy_episode_return"
"""Returns with the best actions, of a policy that otherwise samples its actions."""

SAMPLED_RETURN = "sampled_episode_return"
"""Returns with sampled actions, of a policy that otherwise takes its best actions."""

OTHER_RETURN: dict[Acting, str] = {"greedy": GREEDY_RETURN, "sampled": SAMPLED_RETURN}
"""Names of the returns of the other way to act than the program's."""

WON, GREEDY_WON = "episode_won", "greedy_episode_won"
"""Whether the episodes of `RETURN` and `GREEDY_RETURN` were won, where environments tell it."""

AGREEMENT = "action_agreement"
"""How far a policy agrees with the actions of held-out episodes, from 0 to 1."""

WALL_TIME = "wall_time"
"""Seconds since the run began, without the time between a stop and its resumption."""

SPEED = "steps_per_second"
"""Steps per second of the training alone: updates of a baseline, environment steps of a recorder.
"""

TIMES = (WALL_TIME, SPEED)
"""Metrics that differ between two runs of the same seed."""

LOG_LIKELIHOOD = "action_log_likelihood"
"""Mean log-probability (density), in nats, of an agent's action in held-out episodes."""

PARENT = "pbt_parent"
"""Seed of a population from which a seed went on after an evaluation."""

EVALUATED = (RETURN, *OTHER_RETURN.values(), AGREEMENT, LOG_LIKELIHOOD)
"""Metrics of evaluations, one list for each seed; the first existing one is the main metric. Where
there are several teams, each has its own returns: see `offmarl.teams.names_by_team`."""


# ---------------------------------------------------------------------------------- files


def to_json(data: Any, indent: int | None = None) -> str:
    """Return data as JSON: arrays as lists, and numbers that JSON lacks (NaN, infinities) as null.

    Accepts what `json.dumps` does, and arrays, array scalars and paths anywhere within.
    """
    return json.dumps(plain(data), indent=indent, allow_nan=False)


def write_json(path: Path, data: Any) -> None:
    """Replace a file by data as JSON, atomically: a reader sees the old file or the new one."""
    replace_file(path, to_json(data, indent=2) + "\n")


def read_run(directory: Path) -> dict[str, Any]:
    """Return the content of ``run.json`` in a run's directory; `RunError` if that fails."""
    data, file = read_json(directory, RUN_FILE), str(directory / RUN_FILE)
    with _way_out(directory):
        records.as_type(data, records.RunRecord, file, RunError)
        try:
            EnvSpec.from_json(data["spec"])
            return dict(records.mark_names(data, file))
        except (ShapeError, RecursionError) as error:
            raise RunError(f"{file} is not valid: {error}") from None


@contextmanager
def _way_out(directory: Path) -> Iterator[None]:
    """Say what to do about a file in a run's directory that is damaged."""
    try:
        yield
    except RunError as error:
        having = "with its" if (directory / CHECKPOINTS).is_dir() else "which has no"
        raise RunError(
            f"{str(error).removesuffix('.')}: restore it from a copy, or remove {directory}, "
            f"{having} checkpoints, and run its command again."
        ) from None


def is_run(path: Path) -> bool:
    """Whether a path is the directory of a run, or a packed run; see `read_json`."""
    return (path / RUN_FILE).is_file() or (path.suffix == ".json" and path.is_file())


def refuse_benchmark(path: Path) -> None:
    """Raise `RunError` if a path is the directory of a benchmark, and not that of one run."""
    if (path / "cells").is_dir():
        raise RunError(
            f"{path} is the directory of a benchmark: its runs are in {path / 'runs'}, and "
            f"`offmarl compare {path}` compares its runs."
        ) from None


_PATHS = ("vault", "validation", "init", "weight")
"""Arguments that name vaults, runs and code by their paths."""

_SEED = r"@(?:\*|\d+)(?:/(?:\*|\d+|best|last))?(?:/(?:sampled|greedy))?"
_ENDS = rf"(?:{_SEED}(?::[^/+:]+)?|:[^/+:]+)(?=\+|$)|$"
_MEMBER = re.compile(rf"(^[^/=]*=|\+|^)(.+?)({_ENDS})", re.DOTALL)
"""RUN@SEED/STEP:WEIGHT or FILE:FUNCTION, one of the names of opponents that are joined by +, after
SIDE=. A plus after anything else does not divide: it may be in the name of a directory."""


def publishable(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the record of a run with the ends of paths, which say nothing of this machine."""
    args, more = record["args"], dict[str, Any]()
    short = {name: path_end(args[name]) for name in _PATHS if args.get(name) is not None}
    if names := args.get("opponents"):
        members = map(_MEMBER.findall, names)
        short["opponents"] = ["".join(a + path_end(b) + c for a, b, c in x) for x in members]
    if record.get("file"):
        more["file"] = PurePath(record["file"]).name
    if "opponents" in record:
        more["opponents"] = _policies_end(record["opponents"])
    return {**record, "args": {**args, **short}, **more}


def _policies_end(about: Any) -> Any:
    """Return what a record says of opponents, whose policies may be code, with ends of paths."""
    if isinstance(about, list | tuple):
        return [*map(_policies_end, about)]
    if not isinstance(about, Mapping):
        return about
    return {k: path_end(v) if k == "policy" else _policies_end(v) for k, v in about.items()}


def path_end(value: Any) -> Any:
    """Return the last two parts of a path, or of each path in a list; anything else as it is."""
    if isinstance(value, list | tuple):
        return [path_end(entry) for entry in value]
    return "/".join(PurePath(value).parts[-2:]) if isinstance(value, str) else value


def read_run_if_any(directory: Path) -> dict[str, Any]:
    """Return the content of ``run.json``, as `read_run`; empty if there is no such run."""
    try:
        return read_run(directory)
    except RunError:
        return {}


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """Return the content of a JSON file in a run's directory; `RunError` if that fails.

    The directory may be a packed run: one JSON file with the run's files by name; see
    `offmarl.benchmark`.
    """
    try:
        if directory.is_file():
            return _packed(directory, name)
        content = (directory / name).read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        if name != RUN_FILE and (directory / RUN_FILE).is_file():
            raise RunError(
                f"the run in {directory} is not finished: repeat its command to finish it."
            ) from None
        refuse_benchmark(directory)
        raise RunError(
            f"{directory} is not the directory of a run: it has no {name}. Give a directory that "
            "`offmarl train` or `offmarl record` wrote."
        ) from None
    with _way_out(directory):
        return records.parse(content, str(directory / name), RunError)


def _packed(path: Path, name: str) -> dict[str, Any]:
    """Return a file of a packed run, with the label that a benchmark's plan gave to the run.

    If the run lacks the file, the error is that of a file that is not there.
    """
    document = {}
    with suppress(RunError):
        document = records.parse(path.read_bytes(), str(path), RunError)
    content = document.get(name)
    if not isinstance(content, dict):
        raise FileNotFoundError(name)
    labelled = name == RUN_FILE and "baseline" in document
    return {"label": document["baseline"], **content} if labelled else content


def holds(directory: Path, name: str) -> bool:
    """Whether a run's directory, or a packed run, holds a file."""
    if directory.is_file():
        return name in records.parse(directory.read_bytes(), str(directory), RunError)
    return (directory / name).exists()


def acting_of(run: Mapping[str, Any]) -> Acting:
    """Return how the policies of a run act, from its ``run.json``."""
    return "greedy" if run.get("greedy", True) else "sampled"


def other_acting(run: Mapping[str, Any]) -> Acting:
    """Return the other way to act than that of the policies of a run."""
    return "sampled" if acting_of(run) == "greedy" else "greedy"


def labelled(algorithm: str, *details: str | None) -> str:
    """Return an algorithm's name with details, such as "bc (greedy)"."""
    text = ", ".join(filter(None, details))
    return f"{algorithm} ({text})" if text else algorithm


class _Place(msgspec.Struct):
    """The fields of every line of metrics."""

    seed: records.Seed
    step: records.Count
    wall_time: float = 0.0


_Number = (
    Annotated[int, msgspec.Meta(ge=-(2**62), le=2**62)]
    | Annotated[float, msgspec.Meta(ge=-1e100, le=1e100)]
)
"""Larger ones fit no array, or overflow when they are drawn."""
_Line = dict[str, _Number | list[_Number | None] | None]


def append(path: Path, *records: Mapping[str, Any]) -> None:
    """Append records to a file of JSON lines. Each has an integer ``seed`` and ``step``."""
    lines = "".join(to_json(record) + "\n" for record in records)
    with path.open("a") as file:
        file.write(lines)


def read(path: Path) -> list[dict[str, Any]]:
    """Return the metrics in a file of JSON lines, without a line that a crash cut off.

    If a line is damaged, the records before it, with a warning. The file may be in a packed run;
    see `read_json`.
    """
    if path.parent.is_file():
        document = records.parse(path.parent.read_bytes(), str(path.parent), RunError)
        rows = document.get(path.name)
        lines = [to_json(row).encode() for row in rows] if isinstance(rows, list) else []
    else:
        lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    metrics: list[dict[str, Any]] = []
    for line in lines:
        try:
            row: dict[str, Any] = msgspec.json.decode(line, type=_Line)
            msgspec.convert(row, _Place)
        except ValueError:
            message = f"{path} is damaged from line {len(metrics) + 1} on"
            warnings.warn(f"{message}: that line and what follows are left out.", stacklevel=1)
            break
        metrics.append(row)
    return metrics


def cut(path: Path, step: int) -> None:
    """Remove the records after ``step``, so that a run that resumes there does not repeat them."""
    if path.exists():
        rows = [record for record in read(path) if record["step"] <= step]
        replace_file(path, "".join(to_json(record) + "\n" for record in rows))


def last(path: Path, metric: str) -> float:
    """Return the last value of a metric in a file of JSON lines; 0 if there is none."""
    return next((float(record[metric]) for record in reversed(read(path)) if metric in record), 0.0)


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace a file, atomically, and make its directories.

    `OSError` if it cannot be written, and stays as it was.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        # The name is missing for a full disk, and that of the partial file tells users nothing.
        raise type(error)(error.errno, error.strerror, str(path)) from error


def write_output(path: Path, content: str | bytes) -> None:
    """Write a file that the user named, through links; a device or a pipe stays what it is.

    Other files are replaced, atomically. `OSError` if it cannot be written.
    """
    raw = content.encode() if isinstance(content, str) else content
    if _is_standard_output(path):  # as /dev/stdout
        sys.stdout.flush()
        with open(1, "wb", closefd=False) as output:
            output.write(raw)
    elif path.exists() and not path.is_file():
        path.write_bytes(raw)
    else:
        replace_file(Path(os.path.realpath(path)) if path.is_symlink() else path, raw)


def _is_standard_output(path: Path) -> bool:
    with suppress(OSError):  # it is closed, or there is no such file
        return os.path.samestat(path.stat(), os.fstat(1))
    return False


def plain(value: Any) -> Any:
    """Return data converted to JSON and back; see `to_json`."""
    match value:
        case None | bool() | int() | str():  # other formats than JSON know no `RecordedName`
            return str(value) if isinstance(value, str) else value
        case float():
            return value if math.isfinite(value) else None
        case Mapping():
            return {str(key): plain(entry) for key, entry in value.items()}
        case list() | tuple():
            return [plain(entry) for entry in value]
        case os.PathLike():
            return str(value)
        case _:
            return plain(value.tolist())


def checksum(content: Any) -> str:
    """Return a short checksum of something that is plain JSON, by which names differ."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]


def as_dicts(record: Any) -> Any:
    """Return named tuples, and those in them, as dictionaries."""
    if hasattr(record, "_asdict"):
        return {name: as_dicts(x) for name, x in record._asdict().items()}
    return [as_dicts(x) for x in record] if isinstance(record, list | tuple) else record


# ---------------------------------------------------------------------------------- progress


Advance = Callable[..., None]
"""Advances a progress display by a number of steps, with a note such as "return 3.21".

The note replaces the last one.
"""


class _Console(Console):
    """Standard error, as progress uses it."""

    def on_broken_pipe(self) -> None:
        """Be quiet, since nobody reads it."""
        self.quiet = True

    def say(self, text: str) -> None:
        """Print a line; none where there is no room for it."""
        with suppress(OSError):
            self.print(text, highlight=False, markup=False, soft_wrap=True)


_console = _Console(stderr=True, emoji=False)
_SECONDS_BETWEEN_LINES = 10.0


@contextmanager
def progress(
    description: str,
    total: int,
    completed: int = 0,
    unit: Literal["steps", "bytes"] = "steps",
    note: str = "",
) -> Iterator[Advance]:
    """Show progress on standard error while the block runs; ``completed`` steps were done before.

    A terminal shows a bar in its last line, and so does a notebook with ipywidgets: with the rate
    of the last seconds and the remaining time. Other outputs get a line every few seconds. ``note``
    is shown until the first step is done. ``OFFMARL_QUIET=1`` in the environment turns it off.
    """
    description = one_line(description)
    if is_quiet():
        yield silent
    elif _console.is_terminal or (_console.is_jupyter and find_spec("ipywidgets")):
        with _bar(unit) as bar:
            task = bar.add_task(description, total=total, completed=completed, note=note)
            yield lambda steps=1, note="": bar.update(task, advance=steps, note=note)
    else:
        lines = _Lines(description, total, completed, unit, bool(note))
        if note:
            lines.show(note)
        yield lines


def notice(text: str) -> None:
    """Print a line on standard error, as progress is shown."""
    if not is_quiet():
        _console.say(one_line(text))


def console() -> Console:
    """Return the console of progress displays, which is standard error."""
    return _console


def is_quiet() -> bool:
    """Whether progress is turned off."""
    return os.environ.get("OFFMARL_QUIET") == "1"


def _bar(unit: str) -> Progress:
    counts: tuple[ProgressColumn, ...] = (DownloadColumn(), TransferSpeedColumn())
    if unit == "steps":
        counts = (TextColumn("{task.completed:,}/{task.total:,}"), _RateColumn())
    return Progress(
        _Shortened(table_column=Column()),
        BarColumn(bar_width=None),
        *counts,
        TimeRemainingColumn(compact=True),
        TextColumn("{task.fields[note]}", style="dim", markup=False),
        console=_console,
        speed_estimate_period=_SECONDS_BETWEEN_LINES,
        transient=True,
        expand=True,
    )


class _Shortened(ProgressColumn):
    """The description, which gives way to the numbers on a narrow terminal."""

    def render(self, task: Task) -> Text:
        return Text(task.description, no_wrap=True, overflow="ellipsis")


class _RateColumn(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(_rate(task.speed) if task.speed else "")


class _Lines:
    """Progress without a terminal: a line every few seconds, and one at the end."""

    def __init__(self, description: str, total: int, completed: int, unit: str, compiles: bool):
        self._description = description
        self._unit = "B" if unit == "bytes" else ""
        self._total = total
        self._completed = completed
        self._printed = time.monotonic(), completed
        self._compiles = compiles

    def __call__(self, steps: int = 1, note: str = "") -> None:
        self._completed += steps
        (before, done), now = self._printed, time.monotonic()
        todo, compiled, self._compiles = self._total - self._completed, self._compiles, False
        due = todo <= 0 or now - before >= _SECONDS_BETWEEN_LINES
        if due or compiled:
            self._printed = now, self._completed
        if due:
            rate = (self._completed - done) / max(now - before, 1e-9)
            counts = f"{self._completed:,}/{self._total:,} {self._unit}".rstrip()
            time_left = f"{timedelta(seconds=round(todo / rate))} left" if todo > 0 < rate else ""
            # The first steps take as long as their compilation, and tell nothing of others.
            speed = ("", "") if compiled and todo > 0 else (_rate(rate, self._unit), time_left)
            self.show(counts, *speed, note)

    def show(self, *parts: str) -> None:
        """Print a line."""
        _console.say(f"{self._description}: {', '.join(part for part in parts if part)}")


def _rate(speed: float, unit: str = "") -> str:
    for size, name in ((1e6, "M"), (1e3, "k")):
        if speed >= size:
            return f"{speed / size:.1f}{name}{unit}/s"
    if speed >= 100:
        return f"{speed:.0f}{unit}/s"
    if 0 < speed < 0.5 and not unit:
        return f"{1 / speed:.0f} s each"
    return f"{speed:.1f}{unit}/s"
