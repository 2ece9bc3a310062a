"""The command that every command names at its end."""

from pathlib import Path

import numpy as np
import pytest

from offmarl.cli.following import _NEXT, next_commands
from offmarl.cli.verbs import VERBS
from offmarl.paths import remember_paths
from tests.runs import write_run


def test_every_command_names_the_next_one():
    assert set(VERBS) - set(_NEXT) == {"new", "completion"}  # see the comment there


@pytest.mark.parametrize(
    ("arguments", "data", "text"),
    [
        ("record mappo", {"run": "r", "vaults": [{"path": "a b"}]}, "offmarl show 'a b'"),
        ("record mappo", {"run": "r", "vaults": []}, "offmarl report r"),
        (
            "show a",
            {"steps": 9, "path": Path("a.vlt/r")},
            "offmarl train bc --vault a.vlt/r --seeds 5 --updates 1000",
        ),
        (
            "show a",
            {"steps": 9, "path": Path("a"), "env": "my.py:F"},
            "offmarl train bc --vault a --seeds 5 --updates 1000 --env none",
        ),
        ("exploitability r", {"run": "r", "env": "x"}, "offmarl report r"),
        ("train bc", {"run": Path("r"), "seeds": [1]}, "offmarl compare r --html report.html"),
        ("train bc", {"run": Path("r")}, "offmarl report r"),
        (  # not `compare`, which refuses some sets of cells
            "benchmark six",
            {"out": Path("a b"), "written": ["a b/page.html"]},
            "open 'a b'/page.html in a browser",
        ),
        ("verify a", {"path": "a", "faults": []}, "offmarl show a"),
        ("verify a", {"path": "a", "faults": [1], "length": 9}, "offmarl salvage a -o intact.vlt"),
        ("verify a", {"path": "a", "faults": [1], "length": 0}, ""),  # salvage would find nothing
        (
            "ls",
            {"vaults": [{"path": "a", "error": "x"}, {"path": "b", "error": ""}]},
            "offmarl show b",
        ),
        ("ope r --env my.py:F", {"run": "r"}, "offmarl evaluate r --env my.py:F"),
        ("evaluate r --env my.py:F", {"run": "r"}, "offmarl report r"),
        ("verify a/b", {"verified": {"a/b@0": 4}}, "offmarl ls a/b"),  # it may have several uids
        ("verify --deep a", {"verified": {"a@0": 4}}, "offmarl ls a"),
        ("report --env swarm/flock-8 a", {"vaults": {"a": {}}}, ""),
        (
            "report a --env swarm/flock-8",
            {"vaults": {"a": {}}},
            "offmarl report a --html page.html",
        ),
        ("pull x/y", {"name": "x/y", "paths": {"Good": Path("/d/Good")}}, "offmarl show /d/Good"),
        ("pull --dry-run x/y/a@b", {"name": "x/y", "sizes": {"a": 1}}, "offmarl pull x/y/a@b"),
        ("ls --remote a", {"datasets": [{"name": "a/b/c", "hub": None}]}, ""),
        (
            "ls --remote",
            {"datasets": [{"name": "a/b/c", "hub": None}, {"name": "d/e/f", "hub": {"path": "g"}}]},
            "offmarl pull d/e/f --dry-run",
        ),
        ("push a.vlt --to me/it", {"url": "https://x", "card": {}}, "offmarl pull me/it"),
        ("cache ls", {"root": "c", "datasets": {}, "streamed": 0}, "offmarl ls --remote"),
        ("tune bc --vault a b", {"file": "f"}, "offmarl train bc --vault a --settings f"),
        (
            "tune bc --vault a --env e.py:f",
            {"file": "f"},
            "offmarl train bc --vault a --env e.py:f --settings f",
        ),
        ("tune ippo --env e", {"file": "f"}, "offmarl record ippo --env e --settings f"),
        ("tune --help", {"recorders": {"ippo": "learns"}}, ""),
        (
            "envs a/mine.py:Mine",
            {"spec": {"name": "mine.py:Mine"}},
            "offmarl record mappo --env a/mine.py:Mine --tiers random,medium,expert",
        ),
        ("ls", {"vaults": []}, ""),
        ("record mappo --dry-run", {"path": "r", "blocks": 3}, ""),  # a plan
        ("train --help", {"baselines": {"bc": "clones"}}, ""),
        ("compare r --latex -", {"run": "r"}, ""),  # a table for a file
        ("compare r --csv=-", {"run": "r"}, ""),
        ("", {"commands": {}}, ""),
    ],
)
def test_the_next_command_has_the_path_or_name(arguments, data, text):
    assert next_commands(arguments.split(), data) == text


def test_a_run_among_the_arguments_is_recorded_next(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "r", "bc", "a/x", [[1]])
    expected = "offmarl record --policy r --steps 50000 --out vaults"
    assert next_commands(["compare", "none", "r"], {"datasets": {"a": 1}}) == expected
    expected = "offmarl evaluate r"
    assert next_commands(["cross-play", "r@0"], {"policies": ["r@0"]}) == expected
    write_run(tmp_path / "own", "bc", "a/x", [[1]], args={"env": "mine.py:Games.make"})
    assert next_commands(["compare", "own"], {"datasets": {"a": 1}}) == ""  # the record names code
    write_run(tmp_path / "rps", "bc", "a/x", [[1]], args={"env": "classic/rps:rock=2"})
    assert "--policy rps" in next_commands(["compare", "rps"], {"datasets": {"a": 1}})


def test_paths_are_as_the_arguments_write_them(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    remember_paths(["ls", "../data"])
    command = next_commands(["show"], {"steps": 1, "path": tmp_path.parent / "data" / "a.vlt"})
    assert command == "offmarl train bc --vault ../data/a.vlt --seeds 5 --updates 1000"
    remember_paths([])


def test_the_next_command_is_not_in_json(offmarl):
    assert offmarl("envs", "probe/").out.endswith("\nNext: offmarl envs swarm/coverage-3\n")
    assert "environments" in offmarl("envs", "probe/", "--json").json


@pytest.mark.parametrize(
    ("arguments", "data"),
    [
        (["compare", "x" * 300], {"datasets": {"a": 1}}),  # too long for a path
        (["ls"], {"vaults": [{"error": "damaged"}]}),
        (["show", "a.vlt"], {"steps": 0, "path": "a.vlt"}),
        (["split", "a.vlt"], {"vaults": [{"path": "a.vlt/train"}]}),
        (["push", "a.vlt", "--to"], {"url": "https://x"}),
        (["demo"], {"page": "demo/demo.html"}),
        (["compare"], {"run": np.zeros(2)}),
    ],
)
def test_a_successful_command_never_fails_for_what_follows(arguments, data):
    assert next_commands(arguments, data) == ""


def test_values_are_not_templates():
    command = next_commands(["show"], {"steps": 1, "path": "{given.__class__} $(x)"})
    assert command == "offmarl train bc --vault '{given.__class__} $(x)' --seeds 5 --updates 1000"
