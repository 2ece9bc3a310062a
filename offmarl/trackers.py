"""Experiment trackers: copies of a run's metrics in TensorBoard, MLflow, W&B or trackio.

A run's JSON lines are always written (`offmarl.tracking`), and trackers are filled from them: at
each checkpoint they get the lines that are new. A run that is resumed continues the same tracked
run, whose id is in ``tracking.json``. No step is there twice, because its lines are cut at the
checkpoint, and a tracker skips the steps that it has or is written again from the first line.

A training never waits long for a tracker: each is used in a thread of its own, which is left behind
if it stands still.

A tracker of another kind is a subclass of `Tracker` in `KINDS`.
"""

import io
import json
import logging
import re
import shutil
import time
import uuid
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import groupby
from operator import itemgetter
from os import environ
from pathlib import Path
from typing import Any, ClassVar, NamedTuple
from urllib.parse import SplitResult, urlsplit

import numpy as np

from offmarl import tracking
from offmarl._ahead import call_briefly, unreachable
from offmarl._imports import import_optional
from offmarl.errors import MissingExtraError, OffmarlError, RunError, unknown_name
from offmarl.paths import expand_user

FILE = "tracking.json"
"""Holds the id of the tracked run."""

_SECONDS = 60.0
"""How long a training waits for a tracker that stands still."""
_SECONDS_TO_CONNECT = 5.0
"""How long a command waits for a server before its training."""
_THREAD = "offmarl-tracker"
_LIMITS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "4",
    "WANDB_INIT_TIMEOUT": "10",
    "WANDB_FINISH_TIMEOUT": "10",
}
"""Environment variables of trackers, whose defaults are minutes."""
_MOST_PARAMS, _MOST_LETTERS = 100, 6000
"""Arguments of a batch, and letters of a value, that MLflow takes."""


class Tracked(NamedTuple):
    """The run that a tracker is made for."""

    directory: Path
    name: str
    """For people, such as "mappo swarm/coverage-3"."""
    id: str
    """Unique, in hexadecimal digits."""
    config: dict[str, Any]
    """Arguments and origin of the run, without nesting."""
    parent: str | None = None
    """Id of the tracked run that it is a part of."""


class Tracker:
    """A tracker of one run; ``target`` is the user's text after ``NAME=``."""

    module: ClassVar[str]
    """Name of the module that it imports; its package may be missing."""
    last = -1
    """The last step that it has; -1 if none."""

    def __init__(self, run: Tracked, target: str):
        raise NotImplementedError

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Add the numbers of a step; steps increase."""
        raise NotImplementedError

    def keep(self, file: Path) -> None:
        """Store a file, or the files of a directory; only MLflow does."""

    def flush(self) -> None:
        """Make what was added durable; not needed where each step is stored at once."""

    def close(self) -> None:
        """End the connection; the tracked run can be continued."""


_part: ContextVar[Mapping[str, str]] = ContextVar("part", default={})  # noqa: B039 - never changed


@contextmanager
def as_part(number: int, parent: str) -> Iterator[None]:
    """Make the run in the block part ``number`` of a tracked run."""
    about = {"id": f"{parent}-{number}", "parent": parent, "name": f"trial {number}"}
    token = _part.set(about)
    try:
        yield
    finally:
        _part.reset(token)


# ---------------------------------------------------------------------------------- a run


class Trackers:
    """All trackers of a run, filled from its JSON lines; a context manager that closes them.

    ``names`` are such as "tensorboard" or "mlflow=sqlite:///runs.db", ``record`` is the content of
    ``run.json``. The JSON lines in the directory end at the checkpoint that the run continues from.
    `RunError` for one that cannot be opened; `check_trackers` has checked the names.
    """

    def __init__(self, names: Iterable[str], directory: Path, record: Mapping[str, Any]):
        self._path, self._offset = directory / tracking.METRICS_FILE, 0
        self._single = len(record["seeds"]) == 1
        self._open: dict[str, Tracker] = {}
        for text in names:
            with _opening(text), _quiet():
                import_module(KINDS[text.partition("=")[0]].module)  # takes a while
                make = partial(_tracker_of, text, facts_of_run(directory, record))
                self._open[text] = call_briefly(make, _THREAD, _SECONDS)
        self.sync()

    def sync(self) -> None:
        """Give the trackers the steps that are new.

        One that fails is closed with a warning: the run does not depend on it.
        """
        steps = list(self._new_steps()) if self._open else []
        for text, tracker in list(self._open.items()):
            try:
                with _quiet():
                    call_briefly(partial(_fill, tracker, steps), _THREAD, _SECONDS)
            except Exception as error:  # of any kind: trackers are foreign packages
                del self._open[text]
                warnings.warn(
                    f"the tracker {text} failed ({error}): the run continues without it, and its "
                    f"metrics are in {self._path}.",
                    stacklevel=2,
                )

    def __enter__(self) -> "Trackers":
        return self

    def __exit__(self, *_: object) -> None:
        """Close the trackers; a part of a search may have been ended early, and goes on no more."""
        if _part.get():
            self.sync()
        for tracker in self._open.values():
            with suppress(Exception), _quiet():  # the metrics are in the JSON lines
                call_briefly(tracker.close, _THREAD, _SECONDS)
        self._open.clear()

    def _new_steps(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yield the steps of the lines since the last call, with the numbers of all seeds."""
        if not self._path.exists():
            return
        with self._path.open("rb") as file:
            file.seek(self._offset)
            content = file.read().rpartition(b"\n")[0]
        self._offset += len(content) + 1 if content else 0
        rows = [json.loads(line) for line in content.splitlines()]
        rows.sort(key=itemgetter("step"))  # stable: the seeds' lines stay in order
        for step, same in groupby(rows, key=itemgetter("step")):
            yield step, dict(_scalars(same, self._single))


def check_trackers(names: Iterable[str]) -> None:
    """Raise an error if a tracker cannot be used.

    `UnknownNameError` if there is none of that name, `MissingExtraError` if its package is not
    installed, and `RunError` if its server does not answer.
    """
    for name, value in _LIMITS.items():
        environ.setdefault(name, value)
    for text in names:
        name = text.partition("=")[0]
        if name not in KINDS:
            raise unknown_name("tracker", name, KINDS)
        if find_spec(KINDS[name].module) is None:
            raise MissingExtraError(
                f"{KINDS[name].module} is not installed: run `pip install 'offmarl[{name}]'`, or "
                f"leave out --track {text}."
            )
        with _opening(text):
            url = _server(text)
            if url.scheme in ("http", "https") and (
                reason := unreachable(url.geturl(), _SECONDS_TO_CONNECT)
            ):
                raise OSError(reason)


@contextmanager
def _opening(text: str) -> Iterator[None]:
    """Raise `RunError` for what a tracker raises that cannot be opened."""
    try:
        yield
    except OffmarlError:
        raise
    except Exception as error:
        raise RunError(
            f"the tracker {text} cannot be opened ({error}): correct its target, start its server, "
            "or leave it out."
        ) from error


def give_run(
    names: Iterable[str],
    run: Tracked,
    steps: Sequence[tuple[int, Mapping[str, float]]] = (),
    files: Sequence[Path] = (),
    is_required: bool = False,
) -> None:
    """Give trackers the numbers and files of a run, at once.

    One that fails is an error if it is required, and else a line: the run has ended. One for which
    there is nothing stays closed, because some delete what they have of a run when it is opened.
    """

    def fill(text: str) -> None:
        tracker = _tracker_of(text, run)
        _fill(tracker, steps)
        for file in files:
            tracker.keep(file)
        tracker.close()

    for text in names:
        keeps_files = KINDS[text.partition("=")[0]].keep is not Tracker.keep
        if not steps and files and not keeps_files:
            continue
        try:
            with _opening(text), _quiet():
                call_briefly(partial(fill, text), _THREAD, _SECONDS)
        except RunError as error:
            if is_required:
                raise
            tracking.notice(f"warning: {error}")


def _tracker_of(text: str, run: Tracked) -> Tracker:
    """Return the tracker of a run; `RunError` for a strange id, because it names directories."""
    if not re.fullmatch(r"[0-9a-f]{32}(-\d+)?", run.id):
        raise RunError(
            f"the tracked run of {run.directory} has the id {run.id!r:.80}, which offmarl did not "
            f"make: delete {FILE} there if you do not know it, or leave out --track."
        )
    name, _, target = text.partition("=")
    return KINDS[name](run, target)


def _fill(tracker: Tracker, steps: Iterable[tuple[int, Mapping[str, float]]]) -> None:
    """Give a tracker the steps that it does not have."""
    for step, scalars in steps:
        if step > tracker.last:
            tracker.log(step, scalars)
    tracker.flush()


def _server(text: str) -> SplitResult:
    """Return the address that a tracker sends to; one without a host for files."""
    name, _, target = text.partition("=")
    if name == "mlflow":
        target = target or environ.get("MLFLOW_TRACKING_URI", "")
    elif name == "wandb":
        is_online = environ.get("WANDB_MODE") == "online"
        target = environ.get("WANDB_BASE_URL", "https://api.wandb.ai") if is_online else ""
    return urlsplit(target)


def facts_of_run(directory: Path, record: Mapping[str, Any]) -> Tracked:
    """Describe a run for trackers, from its ``run.json``."""
    about: Mapping[str, Any] = _part.get()
    with suppress(RunError):  # there is no such file, or it is damaged
        about = about or {"id": tracking.read_json(directory, FILE).get("id")}
    if not isinstance(about.get("id"), str):
        tracking.write_json(directory / FILE, about := {"id": uuid.uuid4().hex})
    origin = {key: record[key] for key in ("program", "vault", "vault_digest") if key in record}
    name = " ".join(filter(None, (record["program"], record["spec"]["name"], directory.name)))
    config = flatten_facts({**record["args"], **origin})
    return Tracked(directory, about.get("name", name), about["id"], config, about.get("parent"))


def flatten_facts(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return facts with what is neither a text nor a number as JSON."""
    return {x: y if isinstance(y, str | int | float) else json.dumps(y) for x, y in facts.items()}


def _scalars(records: Iterable[Mapping[str, Any]], single: bool) -> Iterator[tuple[str, float]]:
    """Yield the numbers of records by name; those with a value for each episode as their mean."""
    for record in records:
        prefix = "" if single else f"seed_{record['seed']}/"
        for name, value in record.items():
            values = value if isinstance(value, list) else [value]
            if name not in ("seed", "step") and values and None not in values:
                yield f"{prefix}{name}", float(np.mean(values))


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide the warnings and messages of foreign packages."""
    with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for name in ("mlflow", "alembic", "wandb"):
            logging.getLogger(name).setLevel(logging.ERROR)
        yield


# ---------------------------------------------------------------------------------- the kinds


class _TensorBoard(Tracker):
    """Event files in the run's directory, or in a directory of the user's."""

    module = "tensorboardX"

    def __init__(self, run: Tracked, target: str):
        board = import_optional("tensorboardX", "tensorboard")
        directory = expand_user(target) / run.id if target else run.directory / "tensorboard"
        shutil.rmtree(directory, ignore_errors=True)  # it is written again from the first line
        self._writer = board.SummaryWriter(logdir=str(directory))
        self._writer.add_text("run", f"{run.name}\n\n    {json.dumps(run.config)}", 0)

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _MLflow(Tracker):
    """A run of a tracking server or of a database, which keeps it when offmarl's run is resumed."""

    module = "mlflow"

    def __init__(self, run: Tracked, target: str):
        mlflow = import_optional("mlflow", "mlflow")
        self._entities = mlflow.entities
        uri = target or environ.get("MLFLOW_TRACKING_URI") or "sqlite:///mlflow.db"
        self._client = mlflow.MlflowClient(tracking_uri=uri)
        name = environ.get("MLFLOW_EXPERIMENT_NAME") or "offmarl"
        experiment = self._client.get_experiment_by_name(name)
        self._experiment = (
            experiment.experiment_id if experiment else self._client.create_experiment(name)
        )
        runs = self._runs_of(run.id)
        if not runs:
            tags = {"offmarl_id": run.id, "directory": str(run.directory)}
            for parent in self._runs_of(run.parent) if run.parent else ():  # it may be deleted
                tags["mlflow.parentRunId"] = parent.info.run_id
            runs = [self._client.create_run(self._experiment, tags=tags, run_name=run.name)]
            self._describe(runs[0].info.run_id, run.config)
        self._id = runs[0].info.run_id
        self._client.update_run(self._id, status="RUNNING")
        histories = (self._client.get_metric_history(self._id, key) for key in runs[0].data.metrics)
        self.last = max((entry.step for history in histories for entry in history), default=-1)

    def _runs_of(self, identity: str) -> Any:
        return self._client.search_runs([self._experiment], f"tags.offmarl_id = '{identity}'")

    def _describe(self, run: str, config: Mapping[str, Any]) -> None:
        """Store arguments in batches as large as servers take; long ones as a file, too."""
        texts = {name: str(value) for name, value in config.items()}
        params = [self._entities.Param(name, x[:_MOST_LETTERS]) for name, x in texts.items()]
        for first in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(run, params=params[first : first + _MOST_PARAMS])
        if any(len(text) > _MOST_LETTERS for text in texts.values()):
            self._client.log_dict(run, dict(config), "arguments.json")

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        now, metric = int(time.time() * 1000), self._entities.Metric
        entries = [metric(name, value, now, step) for name, value in scalars.items()]
        self._client.log_batch(self._id, metrics=entries)  # all of the step or nothing of it

    def keep(self, file: Path) -> None:
        if file.is_dir():
            self._client.log_artifacts(self._id, str(file), file.name)
        else:
            self._client.log_artifact(self._id, str(file))

    def close(self) -> None:
        self._client.set_terminated(self._id)


class _WandB(Tracker):
    """A run of Weights & Biases, offline unless ``WANDB_MODE`` says otherwise."""

    module = "wandb"

    def __init__(self, run: Tracked, target: str):
        wandb = import_optional("wandb", "wandb")
        mode = environ.get("WANDB_MODE") or "offline"
        if mode == "offline":  # it is written again from the first line
            for earlier in (run.directory / "wandb").glob(f"offline-run-*-{run.id}"):
                shutil.rmtree(earlier)
        self._run = wandb.init(
            project=target or environ.get("WANDB_PROJECT") or "offmarl",
            id=run.id,
            name=run.name,
            config=run.config,
            dir=str(run.directory),
            mode=mode,
            resume="allow",
            settings=wandb.Settings(silent=True, console="off", disable_git=True),
        )
        self.last = self._run.step - 1  # step is the next one

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


class _Trackio(Tracker):
    """A run in trackio's local database."""

    module = "trackio"

    def __init__(self, run: Tracked, target: str):
        trackio = import_optional("trackio", "trackio")
        project = target or "offmarl"
        name = f"{run.name} {run.id[:8]}"
        with suppress(ValueError):  # there is no such project yet
            for earlier in trackio.Api().runs(project):
                if earlier.name == name:  # it is written again from the first line
                    earlier.delete()
        self._run = trackio.init(
            project=project,
            name=name,
            config=run.config,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


KINDS: dict[str, type[Tracker]] = {
    "tensorboard": _TensorBoard,
    "mlflow": _MLflow,
    "wandb": _WandB,
    "trackio": _Trackio,
}
"""The kinds of trackers by name, which are also the names of their extras."""
