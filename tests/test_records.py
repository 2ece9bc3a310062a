"""Forged and damaged records: an immediate error in one line with the file and the field."""

import io
import json
import shutil
import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZIP_STORED, ZipFile

import numpy as np
import pytest

import offmarl
from offmarl import records, tracking
from offmarl.cli import policies
from offmarl.cli.programs import PolicyOptions
from offmarl.config import Validated, from_json
from offmarl.errors import OffmarlError, OptionError, RunError, ShapeError, VaultError
from offmarl.programs.runs import dataset
from offmarl.report import read_runs
from offmarl.report.pages import describe_run
from offmarl.types import ArraySpec, Discrete, EnvSpec
from offmarl.vault.format.layout import dump_json
from tests.runs import write_side

DEEP: Any = {"shape": [1]}
for _ in range(300):
    DEEP = {"a": DEEP}

FORGED: list[tuple[str, Any]] = [
    *((name, ...) for name in ("kind", "program", "args", "spec", "seeds", "file", "sha256")),
    *((f"spec.{name}", ...) for name in ("name", "num_agents", "action", "state_size")),
    *((name, 7) for name in ("kind", "program", "args", "spec", "seeds", "file", "vault")),
    *((name, []) for name in ("args", "spec", "seeds", "program", "opponents", "settings")),
    *((f"args.{name}", {}) for name in ("side", "opponents", "env", "hidden", "tiers", "num_envs")),
    ("args.num_envs", 0),
    ("args.hidden", "many"),
    ("args.gamma", 2),
    ("args.network", "none"),
    ("complete", "yes"),
    ("greedy", 3),
    ("kind", "other"),
    ("program", "no such program"),
    ("program", "a" * 100_000),
    ("seeds", [*range(1_000_000)]),
    *(("seeds", [wrong]) for wrong in (-1, 2**31, "0", 0.5, True, None)),
    *(("spec.num_agents", size) for size in (-1, 0, 10**9, 10**40, 2.5, "3", True)),
    *(("spec.observation_size", size) for size in (-1, 10**12, 10**40, 1.5, None)),
    ("spec.state_size", 10**12),
    *(("spec.action", one) for one in ({}, [], {"other": 3}, {"discrete": 10**9})),
    ("spec.action", {"discrete": 5, "continuous": 2}),
    ("spec.action", {"continuous": -1}),
    *((f"spec.{name}", [0]) for name in ("agents", "teams", "kinds", "observation_sizes")),
    ("spec.observation", {"a": {"shape": [10**4000, 10**4000]}}),
    ("args.layers", 10**9),
    ("spec.team_names", "ab"),
    ("spec.reward", "none"),
    ("spec.unknown", 1),
    *((f"spec.{name}", {"a": DEEP}) for name in ("observation", "global_state", "extras")),
    ("spec.observation", {"a": {"shape": [10**6, 10**6]}}),
    ("spec.observation", {"a": {"shape": ["x"]}}),
    ("spec.observation", {f"a{i}": {"shape": [1]} for i in range(1000)}),
    ("spec.global_state", {"a": {"shape": [2], "dtype": "object"}}),
    ("spec.extras", {"a": {"shape": [10**12]}}),
]
RAW = ["", "{", "[]", "3", '{"seeds": ', "[" * 100_000, '{"a":' * 100_000, "9" * 10_000, "\udcff"]


@pytest.fixture(scope="module")
def side(tmp_path_factory) -> Path:
    return write_side(tmp_path_factory.mktemp("forged") / "run")


def changed(record: dict[str, Any], place: str, value: Any) -> dict[str, Any]:
    """Return a record with another value of a field; ... leaves it out."""
    result = json.loads(json.dumps(record))
    *above, name = place.split(".")
    inside = result[above[0]] if above else result
    if value is ...:
        del inside[name]
    else:
        inside[name] = value
    return result


READERS = [
    offmarl.load_policy,
    lambda run: policies.load(run, PolicyOptions(), [0], []),
    lambda run: read_runs([run]),
    lambda run: [*describe_run(run).sections()],
]


@pytest.mark.parametrize(("field", "value"), FORGED, ids=lambda x: f"{x!r:.30}")
def test_a_forged_record_is_refused_at_once_with_file_and_field(side, tmp_path, field, value):
    run = tmp_path / "run"
    run.mkdir()
    (run / tracking.CHECKPOINTS).symlink_to(side / tracking.CHECKPOINTS)
    record = changed(tracking.read_run(side), field, value)
    (run / tracking.RUN_FILE).write_text(json.dumps(record))
    messages = []
    for reader in READERS:
        start = time.monotonic()
        try:
            reader(run)
        except OffmarlError as error:
            messages.append(str(error))
        assert time.monotonic() - start < 10  # a second, and room for a busy machine
    assert messages and all(len(line.splitlines()) == 1 and len(line) < 1000 for line in messages)
    if field not in ("program", "file") or value is ...:
        assert any(str(run) in line for line in messages)
        assert any(field.rpartition(".")[2] in line for line in messages)


@pytest.mark.parametrize("text", RAW, ids=lambda x: f"{x!r:.20}")
def test_what_is_no_record_is_refused(tmp_path, text):
    (tmp_path / tracking.RUN_FILE).write_text(text, errors="surrogateescape")
    with pytest.raises(RunError, match=r"run\.json (is damaged|holds no JSON object)"):
        tracking.read_run(tmp_path)


def test_texts_of_a_record_name_its_file_and_field():
    data = records.mark_names({"a": ["x:y:z", 1], "b": {"c": "d"}, "e": None}, "run.json")
    assert data == {"a": ["x:y:z", 1], "b": {"c": "d"}, "e": None}
    assert data["b"]["c"].where == "run.json (b.c)"
    name = data["a"][0]
    for parts, expected in (
        (name.partition(":"), ("x", ":", "y:z")),
        (name.rpartition(":"), ("x:y", ":", "z")),
    ):
        assert parts == expected
        assert {parts[0].where, parts[2].where} == {"run.json (a)"}


@pytest.mark.parametrize(
    ("numbers", "large"),
    [
        *((fine, False) for fine in ((2**20, 2**10), (0, 0.5, "9" * 30, True, None), ())),
        *((much, True) for much in ((2**20 + 1,), (-(2**20) - 1,), (2**20, 2**10, 2))),
    ],
)
def test_names_that_ask_for_much_memory(numbers, large):
    records.refuse_large("the user's", numbers)
    with pytest.raises(OptionError, match="--env") if large else nullcontext():
        records.refuse_large(records.RecordedName("a record's"), numbers)


@pytest.mark.parametrize(("dots", "deep"), [(200, False), (201, True)])
def test_dots_of_a_card_are_counted_by_part_of_a_line(dots, deep):
    line = "a" + ".a" * dots
    content = f"{line}= 1\nb = '{'.' * dots}'\n"
    if deep:
        with pytest.raises(OptionError, match="nested too deeply"):
            records.parse_toml(content, "card", OptionError)
    else:
        assert records.parse_toml(content, "card", OptionError)["b"] == "." * dots


def test_real_sizes_are_read():
    spec = EnvSpec("swarm/coverage-1000", 1000, 4000, 112_000, Discrete(5), 100)
    images = {"image": ArraySpec((4, 84, 84, 3), "uint8"), "position": ArraySpec((2,))}
    for example in (spec, replace(spec, num_agents=50, observation=images)):
        assert EnvSpec.from_json(json.loads(json.dumps(example.to_json()))) == example


def test_ten_thousand_seeds_are_read(tmp_path, side):
    record = changed(tracking.read_run(side), "seeds", [*range(10_000)])
    (tmp_path / tracking.RUN_FILE).write_text(json.dumps(record))
    assert len(tracking.read_run(tmp_path)["seeds"]) == 10_000


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_agents", 10**9, "num_agents: Expected int <= 65536"),
        ("observation_size", 2**28, "a step takes .* for observation"),
        ("action", {"discrete": 1, "continuous": 1}, "action: Expected object of length <= 1"),
        ("kinds", ["a"], "kinds has not one entry for each of 3 agents"),
    ],
)
def test_specs_of_impossible_sizes_are_refused(field, value, message):
    data = EnvSpec("", 3, 2, 2, Discrete(2)).to_json() | {field: value}
    with pytest.raises(ShapeError, match=message):
        EnvSpec.from_json(data)


def test_arguments_are_read_by_their_types():
    @dataclass(frozen=True)
    class Args(Validated):
        vault: str
        limit: float = float("inf")
        sizes: tuple[int, ...] = (1,)
        place: Path | None = None
        by_seed: dict[int, str] = field(default_factory=dict)

    values = {"vault": "a", "limit": None, "sizes": [2, 3], "place": "b", "by_seed": {"1": "x"}}
    assert from_json(Args, values) == Args("a", sizes=(2, 3), place=Path("b"), by_seed={1: "x"})
    for wrong, name in (({"vault": 3}, "vault"), ({}, "vault"), ({"sizes": ["x"]}, "sizes")):
        with pytest.raises(OptionError, match=name):
            from_json(Args, wrong)


def test_a_file_of_settings_is_read_in_time(tmp_path):
    """The parser takes quadratic time and memory for dotted keys."""
    file = tmp_path / "settings.toml"
    file.write_text("a" + ".a" * 50_000 + " = 1\n")
    with pytest.raises(OptionError, match="nested too deeply"):
        records.user_toml(file, "settings.toml", "missing")


def test_a_record_without_the_number_of_environments(side, tmp_path):
    shutil.copytree(side, tmp_path / "run")
    record = changed(tracking.read_run(side), "args", {"gamma": 0.9})
    (tmp_path / "run" / tracking.RUN_FILE).write_text(json.dumps(record))
    with pytest.raises(RunError, match=r"keeps no policy|has no checkpoint"):
        offmarl.load_policy(tmp_path / "run", step=5)


def test_documents_that_are_nested_too_deeply_are_not_written():
    deep: Any = []
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(VaultError, match="must be plain JSON values"):
        dump_json(deep)


HEADERS = [
    "{'descr': (",
    "{[]: 1}",
    "{1: 2, 'a': 3}",
    "{'descr': (), 'fortran_order': False, 'shape': (3,)}",
    f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({2**70},)}}",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (True,)}",
    "  x\n y",
]
"""Of forged arrays, for which NumPy raises errors of many types."""


def npy(header):
    return b"\x93NUMPY\1\0" + len(header).to_bytes(2, "little") + header.encode() + bytes(64)


def zipped(header):
    """Return a dataset.npz with a forged array."""
    archive = io.BytesIO()
    with ZipFile(archive, "w") as file:
        file.writestr("returns.npy", npy(header))
    return archive.getvalue()


def packed(how, times=1):
    """Return a dataset.npz whose directory names its array several times."""
    array, archive = io.BytesIO(), io.BytesIO()
    np.save(array, np.zeros(10_000))
    with ZipFile(archive, "w", how) as file:
        file.writestr("returns.npy", array.getvalue())
        file.filelist *= times
    return archive.getvalue()


INFLATING = [packed(ZIP_DEFLATED), packed(ZIP_STORED, times=9)]


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"[1]", *INFLATING, *map(zipped, HEADERS)])
def test_damaged_statistics_are_refused(tmp_path, content):
    (tmp_path / dataset.STATISTICS_FILE).write_bytes(content)
    with pytest.raises(RunError, match="is damaged"):
        dataset.read(tmp_path / dataset.STATISTICS_FILE)
