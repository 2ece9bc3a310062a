"""Help, errors, exit codes, JSON: what all commands share, and those that need no training."""

import json
import signal
import subprocess
import sys

import pytest

from offmarl import cli
from offmarl.cli import programs
from offmarl.errors import OffmarlError, UnknownNameError, VaultError
from tests.runs import write_run


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(offmarl, arguments):
    outcome = offmarl(*arguments)
    assert outcome.code == 0
    for name, verb in cli.VERBS.items():
        assert name in outcome.out and verb.summary in outcome.out


@pytest.mark.parametrize("verb", list(cli.VERBS))
def test_every_command_has_help(offmarl, verb):
    outcome = offmarl(verb, "--help")
    assert outcome.code == 0 and "offmarl" in outcome.out and outcome.err == ""


def test_version(offmarl):
    assert offmarl("--version").out == "0.1.0\n"
    assert offmarl("--version", "--json").json == {"version": "0.1.0"}


@pytest.mark.parametrize(
    "arguments", [["--help"], ["envs"], ["train", "--help"], ["record", "--help"], ["ls"]]
)
def test_what_needs_no_jax_imports_none(arguments, tmp_path):
    code = "import sys; from offmarl.cli import main; main(); sys.exit('jax' in sys.modules)"
    command = [sys.executable, "-c", code, *arguments]
    subprocess.run(command, check=True, capture_output=True, cwd=tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tran"], "no command named 'tran': did you mean train? See `offmarl --help`."),
        (["train", "bcc"], "no baseline named 'bcc': did you mean bc?"),
        (["record", "mapo"], "no recorder named 'mapo': did you mean mappo?"),
    ],
)
def test_unknown_names_are_answered_with_the_nearest(offmarl, arguments, message):
    outcome = offmarl(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("error: ") and message in outcome.err
    assert outcome.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["evaluate"], ["ls", "--depth", "3"]])
def test_wrong_options_are_refused(offmarl, arguments):
    assert offmarl(*arguments).code == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (VaultError("the vault [/] is locked"), 1),
        (UnknownNameError("no such tier"), 2),
        (PermissionError(13, "Permission denied", "vaults"), 1),
    ],
)
def test_mistakes_are_one_line_and_no_traceback(offmarl, monkeypatch, error, code):
    def fail():
        raise error

    monkeypatch.setattr("offmarl.cli.environments.envs", fail)
    outcome = offmarl("envs")
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (code, "", 1)
    assert str(error) in outcome.err
    if isinstance(error, OffmarlError):
        described = {"type": type(error).__name__, "message": str(error)}
        assert offmarl("envs", "--json").json == {"error": described}


def test_ctrl_c_ends_as_other_programs_do():
    code = (
        "import signal, sys; sys.argv = ['offmarl', 'envs'];"
        # What a shell starts in the background ignores the signal, and so does all it starts.
        "signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from offmarl.cli import environments, main;"
        "environments.envs = lambda: signal.raise_signal(signal.SIGINT); main()"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )
    assert ended.returncode == -signal.SIGINT
    assert ended.stderr == "stopped. The same command goes on from here.\n"


def test_defects_are_not_hidden(offmarl, monkeypatch):
    monkeypatch.setattr("offmarl.cli.environments.envs", lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        offmarl("envs")


def test_envs(offmarl):
    assert "swarm/coverage-N" in offmarl("envs").out
    assert "classic/bridge" in offmarl("envs", "--json").json["environments"]


@pytest.mark.parametrize("kind", ["recorder", "baseline"])
def test_programs_are_listed_with_their_first_line(offmarl, kind):
    listed = offmarl(programs.VERBS[kind], "--json").json[f"{kind}s"]
    assert (
        listed.keys()
        == programs.find(kind).keys()
        >= {"recorder": {"mappo"}, "baseline": {"bc"}}[kind]
    )
    assert all(listed.values())


def test_a_program_says_what_its_options_are(offmarl):
    outcome = offmarl("train", "bc", "--help")
    assert outcome.code == 0
    assert "--vault PATH" in outcome.out and "behaviour cloning" in outcome.out.lower()


def test_compare(offmarl, tmp_path):
    write_run(tmp_path / "bc", "bc", "coverage-3/medium", [[1, 2], [2, 3], [3, 4]])
    write_run(tmp_path / "maicq", "maicq", "coverage-3/medium", [[4, 4], [5, 5], [6, 6]])
    text = offmarl("compare", "bc", "maicq", "--html", "out/page.html", "--figure", "figure.png")
    assert text.code == 0
    assert "coverage-3/medium" in text.out and "1.00 [1.00, 1.00]" in text.out
    assert "Comparison of runs" in (tmp_path / "out" / "page.html").read_text()
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    data = offmarl("compare", "bc", "maicq", "--json").json
    assert data["datasets"]["coverage-3/medium"]["maicq"]["iqm"]["value"] == 5.0
    assert data["probability_of_improvement"]["bc"]["maicq"]["value"] == 0.0


@pytest.mark.parametrize(
    ("runs", "message"), [([], "nothing to compare"), (["missing"], "missing is not the directory")]
)
def test_compare_says_what_is_wrong(offmarl, runs, message):
    outcome = offmarl("compare", *runs)
    assert outcome.code == 1 and message in outcome.err


def test_compare_says_what_was_not_evaluated(offmarl, tmp_path):
    write_run(tmp_path / "bc", "bc", "coverage-3/medium", [[1, 2]])
    (tmp_path / "bc" / "marl_eval.json").unlink()
    record = json.loads((tmp_path / "bc" / "run.json").read_text())
    (tmp_path / "bc" / "run.json").write_text(json.dumps(record | {"complete": True}))
    outcome = offmarl("compare", "bc")
    assert outcome.code == 1 and "bc was trained without being evaluated" in outcome.err
