"""Trackers: their record of a run, also after it was killed and resumed."""

import json
import signal
import struct
import subprocess
import sys
import threading
import time
from importlib import import_module
from pathlib import Path
from unittest.mock import MagicMock
from urllib.request import urlopen

import pytest

from offmarl import trackers, tracking
from offmarl.errors import MissingExtraError, RunError, UnknownNameError
from offmarl.trackers import KINDS, Trackers
from tests.web import Handler, WebServer

RECORD = {
    "program": "toy",
    "args": {"learning_rate": 0.1, "layers": [4, 4], "env": None},
    "spec": {"name": "probe/one-step"},
    "vault": None,
    "seeds": [0, 1],
}

HEAVY = {"mlflow", "wandb", "trackio"}


def lines(*steps):
    return [
        {"seed": seed, "step": step, "loss": step + seed / 2, "returns": [1.0, seed], "none": None}
        for step in steps
        for seed in (0, 1)
    ]


def wanted(*steps):
    """The numbers that a tracker must hold, by name."""
    return {
        f"seed_{seed}/{name}": dict(points)
        for seed in (0, 1)
        for name, points in {
            "loss": [(step, step + seed / 2) for step in steps],
            "returns": [(step, (1.0 + seed) / 2) for step in steps],
        }.items()
    }


def opened(directory, *names, record=RECORD):
    return Trackers(names, directory, record)


# ---------------------------------------------------------------------------------- readers


def points_of_tensorboard(directory):
    proto = import_module("tensorboardX.proto.event_pb2")
    points = []
    for path in directory.rglob("events.*"):
        data = path.read_bytes()
        while data:
            (size,) = struct.unpack("<Q", data[:8])
            event = proto.Event.FromString(data[12 : 12 + size])
            data = data[16 + size :]
            points += [(x.tag, event.step, x.simple_value) for x in event.summary.value]
    return [point for point in points if not point[0].startswith("run")]


def points_of_mlflow(uri):
    client = import_module("mlflow").MlflowClient(tracking_uri=uri)
    (run,) = client.search_runs([client.get_experiment_by_name("offmarl").experiment_id])
    assert run.data.params["layers"] == "[4, 4]" and run.info.status == "FINISHED"
    return [
        (name, x.step, x.value)
        for name in run.data.metrics
        for x in client.get_metric_history(run.info.run_id, name)
    ]


def points_of_wandb(directory):
    proto = import_module("wandb.proto.wandb_internal_pb2")
    (path,) = directory.rglob("run-*.wandb")
    points = []
    for record in map(proto.Record.FromString, _log_records(path.read_bytes()[7:], 7)):
        items = {item.key or item.nested_key[0]: item.value_json for item in record.history.item}
        step = record.history.step.num
        points += [(k, step, json.loads(x)) for k, x in items.items() if not k.startswith("_")]
    return points


def _log_records(data, offset):
    """Yield the records of a log in LevelDB's format: blocks of 32 kB, headers of 7 bytes."""
    part = b""
    while data:
        room = 32768 - offset % 32768
        if room < 7:
            data, offset = data[room:], offset + room
            continue
        _, size, kind = struct.unpack("<IHB", data[:7])
        part += data[7 : 7 + size]
        data, offset = data[7 + size :], offset + 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield part
            part = b""


def points_of_trackio(_):
    storage = import_module("trackio.sqlite_storage").SQLiteStorage
    api = import_module("trackio").Api()
    (run,) = api.runs("offmarl")
    return [
        (name, log["step"], value)
        for log in storage.get_logs("offmarl", run.name, run_id=run.id)
        for name, value in log.items()
        if name.startswith("seed_")
    ]


# ---------------------------------------------------------------------------------- tests


@pytest.fixture
def place(tmp_path, monkeypatch):
    for name in ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "points"),
    [
        pytest.param(
            name,
            globals()[f"points_of_{name}"],
            marks=[pytest.mark.nightly] if name in HEAVY else [],
            id=name,
        )
        for name in KINDS
    ],
)
def test_a_resumed_run_continues_its_tracked_run_without_duplicates(place, name, points):
    pytest.importorskip(KINDS[name].module, exc_type=ImportError)
    run = place / "run"
    run.mkdir()
    target = f"sqlite:///{place}/mlflow.db" if name == "mlflow" else ""
    text = f"{name}={target}" if target else name
    path = run / tracking.METRICS_FILE
    first = opened(run, text)
    tracking.append(path, *lines(10, 20))
    first.sync()
    tracking.append(path, *lines(30))
    first.sync()
    if name in HEAVY:  # a killed process leaves what it has sent; these have sent all by now
        first.__exit__()
    tracking.cut(path, 20)  # the checkpoint that the run continues from
    with opened(run, text) as second:
        tracking.append(path, *lines(30, 40))
        second.sync()
    trackers.give_run([text], trackers.facts_of_run(run, RECORD), files=[path])  # the run has ended
    result, deadline = points(target or place), time.monotonic() + 10
    while not result and time.monotonic() < deadline:  # W&B's own process is still writing
        time.sleep(0.2)
        result = points(target or place)
    assert len(result) == len({point[:2] for point in result})
    by_name = {}
    for tag, step, value in result:
        by_name.setdefault(tag, {})[step] = value
    assert by_name == wanted(10, 20, 30, 40)


@pytest.mark.nightly
def test_mlflow_has_every_argument_of_any_length(place):
    client = pytest.importorskip("mlflow").MlflowClient(tracking_uri=f"sqlite:///{place}/m.db")
    args = {f"number_{n}": n for n in range(230)} | {"none": None, "long": "x" * 7000}
    with opened(place, f"mlflow=sqlite:///{place}/m.db", record={**RECORD, "args": args}):
        pass
    (run,) = client.search_runs([client.get_experiment_by_name("offmarl").experiment_id])
    assert args.keys() <= run.data.params.keys() and len(run.data.params["long"]) == 6000
    file = Path(client.download_artifacts(run.info.run_id, "arguments.json", str(place)))
    assert json.loads(file.read_text())["long"] == args["long"]


def test_a_trial_whose_search_was_deleted_has_no_parent(place, monkeypatch):
    """MLflow finds no run with the id of the search."""
    mlflow = MagicMock()
    client = mlflow.MlflowClient.return_value
    client.search_runs.return_value = []
    monkeypatch.setattr(trackers, "import_optional", lambda *_: mlflow)
    with trackers.as_part(3, "a" * 32):
        KINDS["mlflow"](trackers.facts_of_run(place, RECORD), "sqlite:///m.db")
    assert client.create_run.call_args.kwargs["tags"].keys() == {"offmarl_id", "directory"}


def test_names_of_a_single_seed_have_no_prefix(place):
    pytest.importorskip("tensorboardX")
    path = place / tracking.METRICS_FILE
    tracking.append(path, {"seed": 3, "step": 5, "loss": 2.0}, {"seed": 3, "step": 5, "back": [4]})
    target = place / "boards"
    with opened(place, f"tensorboard={target}", record={**RECORD, "seeds": [3]}):
        pass
    assert points_of_tensorboard(target) == [("loss", 5, 2.0), ("back", 5, 4.0)]


@pytest.mark.parametrize("identity", ["{}/kept", "../kept", "*", "", "a' or '1'='1"])
def test_an_id_that_offmarl_did_not_make_names_nothing(place, monkeypatch, identity):
    monkeypatch.setitem(KINDS, "tensorboard", _Broken)
    (place / "kept").mkdir()
    tracking.write_json(place / trackers.FILE, {"id": identity.format(place)})
    with pytest.raises(RunError, match=r"which offmarl did not make: delete tracking\.json there"):
        opened(place, f"tensorboard={place}/boards")
    assert (place / "kept").is_dir()


def test_trackers_that_do_not_exist_or_are_not_installed_are_named(place, monkeypatch):
    with pytest.raises(UnknownNameError, match="no tracker named 'tensorbord': did you mean tens"):
        trackers.check_trackers(["tensorbord"])
    monkeypatch.setattr(KINDS["wandb"], "module", "offmarl_absent")
    with pytest.raises(MissingExtraError, match=r"pip install 'offmarl\[wandb\]'"):
        trackers.check_trackers(["wandb=project"])


class _Broken(trackers.Tracker):
    module = "json"

    def __init__(self, _run, target):
        if target:
            raise OSError("no such place")

    def log(self, step, scalars):
        raise OSError("disk full")


def test_a_tracker_that_fails_does_not_end_the_run(place, monkeypatch):
    monkeypatch.setitem(KINDS, "broken", _Broken)
    with pytest.raises(RunError, match="broken=here cannot be opened"):
        opened(place, "broken=here")
    with opened(place, "broken") as tracker:
        tracking.append(place / tracking.METRICS_FILE, *lines(1))
        with pytest.warns(UserWarning, match=r"broken failed \(disk full\): the run continues"):
            tracker.sync()
        tracker.sync()


class _Slow(Handler):
    def do_GET(self):
        hangs, ends = self.server.of
        if hangs.is_set():
            ends.wait(60)
        self.answer(200)


@pytest.fixture
def server():
    with WebServer(_Slow, (threading.Event(), threading.Event())) as server:
        yield server
        server.of[1].set()


class _Remote(trackers.Tracker):
    """Sends each step to a server, with a timeout that no test reaches."""

    module = "json"

    def __init__(self, _run, target):
        self._url = target
        self._ask()

    def _ask(self):
        with urlopen(self._url, timeout=600) as answer:
            answer.read()

    def log(self, step, scalars):
        self._ask()

    def close(self):
        self._ask()


@pytest.fixture
def remote(monkeypatch):
    monkeypatch.setitem(KINDS, "remote", _Remote)
    monkeypatch.setattr(trackers, "_SECONDS", 1.0)


GONE = "http://127.0.0.1:9"


@pytest.mark.parametrize(
    ("text", "settings"),
    [
        (f"remote={GONE}", {}),
        ("remote=http://offmarl.invalid:80", {}),
        ("remote=http://127.0.0.1:99999", {}),
        (f"mlflow={GONE}", {}),
        ("mlflow", {"MLFLOW_TRACKING_URI": GONE}),
        ("wandb=project", {"WANDB_MODE": "online", "WANDB_BASE_URL": GONE}),
    ],
)
def test_a_server_that_is_not_there_is_found_before_a_training(
    remote, place, monkeypatch, text, settings
):
    for kind in ("mlflow", "wandb"):
        monkeypatch.setattr(KINDS[kind], "module", "json")
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunError, match=f"{text} cannot be opened.* start its server"):
        trackers.check_trackers([text])
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:///runs.db")
    trackers.check_trackers([text.partition("=")[0]])  # which is asked for files


def test_a_server_that_never_answers_is_an_error_soon(remote, server, place):
    server.of[0].set()
    start = time.monotonic()
    with pytest.raises(RunError, match="no answer in"):
        opened(place, f"remote={server.url}")
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("when", ["training", "closing"])
def test_a_server_that_stops_answering_does_not_delay_the_run(remote, server, place, when):
    start, path = time.monotonic(), place / tracking.METRICS_FILE
    with opened(place, f"remote={server.url}") as tracker:
        tracking.append(path, *lines(1))
        tracker.sync()
        server.of[0].set()
        if when == "training":
            tracking.append(path, *lines(2))
            with pytest.warns(UserWarning, match=r"no answer in .* s\): the run continues"):
                tracker.sync()
            tracking.append(path, *lines(3))
            tracker.sync()
    assert time.monotonic() - start < 30


KILLED = """
import os, signal, sys
from pathlib import Path
from offmarl import trackers
from tests.programs import two_stage
sync, calls = trackers.Trackers.sync, []
def dying(self):
    sync(self)
    calls.append(1)
    if len(calls) == 4:
        os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[3] == "kill":
    trackers.Trackers.sync = dying
two_stage.main(two_stage.Args(
    vault=sys.argv[1], out=Path(sys.argv[2]), updates=17, eval_every=2, eval_episodes=2,
    final_episodes=2, batch_size=4, length=2, checkpoint_seconds=0.0, track=("tensorboard",),
))
"""


@pytest.mark.nightly
def test_a_killed_run_continues_its_tracked_run(random_data, tmp_path):
    pytest.importorskip("tensorboardX")
    run = tmp_path / "run"
    command = [sys.executable, "-c", KILLED, str(random_data("probe/observation")), str(run)]
    for how, code in (("kill", -signal.SIGKILL), ("finish", 0)):
        process = subprocess.run([*command, how], check=False)
        assert process.returncode == code
    points = points_of_tensorboard(run / "tensorboard")
    expected = [
        (name, row["step"])
        for row in tracking.read(run / tracking.METRICS_FILE)
        for name in row
        if name not in ("seed", "step")
    ]
    assert sorted(point[:2] for point in points) == sorted(expected)
