"""Help, errors, exit codes and JSON of all commands, and commands that need no training."""

import csv
import errno
import io
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from offmarl import tracking
from offmarl.cli import verbs
from offmarl.cli.parse import parse, parse_script
from offmarl.cli.programs import _returns_report
from offmarl.cli.tasks import TaskOptions
from offmarl.errors import OffmarlError, OptionError, UnknownNameError, VaultError
from offmarl.programs import registry
from offmarl.report import estimate
from offmarl.terminal import interval
from tests.children import python
from tests.runs import write_run
from tests.vault.experience import whole_episodes, written


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(offmarl, arguments):
    outcome = offmarl(*arguments)
    assert outcome.code == 0
    for name, verb in verbs.VERBS.items():
        assert name in outcome.out and verbs.summary_of(name, verb) in outcome.out


def test_version(offmarl):
    assert offmarl("--version").out == "0.1.0\n"
    assert offmarl("--version", "--json").json == {"version": "0.1.0"}


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["envs"], ["ls"], *([x, "--help"] for x in ("train", "record", "tune", "demo"))],
)
def test_what_needs_no_jax_imports_none(arguments, tmp_path):
    imports_none("jax", arguments, tmp_path)


@pytest.mark.parametrize("command", ["pull", "push", "cache"])
def test_help_on_the_hub_needs_no_client_of_it(command, tmp_path):
    imports_none("huggingface_hub", [command, "--help"], tmp_path)


def imports_none(module, arguments, cwd):
    code = f"""if True:
        import sys
        from offmarl.cli import main
        try:
            main()
        except SystemExit as end:
            sys.exit(end.code or "{module}" in sys.modules)
    """
    python("-c", code, *arguments, cwd=cwd)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["tran"], "no command named 'tran': did you mean train or tune? See `offmarl --help`."),
        (["train", "bcc"], "no baseline named 'bcc': did you mean bc or cfcql?"),
        (["record", "mapo"], "no recorder named 'mapo': did you mean mappo"),
        (["train", "mine"], "no baseline named 'mine': for the file, give mine.py."),
    ],
)
def test_unknown_names_are_answered_with_the_nearest(offmarl, arguments, message, tmp_path):
    (tmp_path / "mine.py").touch()
    outcome = offmarl(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("error: ") and message in outcome.err
    assert outcome.err.count("\n") == 1


class JaxRuntimeError(RuntimeError):
    """The error of JAX, by its name."""


@pytest.fixture
def failing(offmarl, monkeypatch):
    """Run a command that raises an error: ``failing(ValueError("no"), "--json")``."""

    def run(error, *options):
        def fail():
            raise error

        monkeypatch.setattr("offmarl.cli.environments.envs", fail)
        return offmarl("envs", *options)

    return run


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (VaultError("the vault [/] is locked"), 1, "the vault [/] is locked"),
        (UnknownNameError("no such tier"), 2, "no such tier"),
        (OptionError("no such number"), 2, "no such number"),
        (OSError(5, "No", "vaults"), 1, "error: [Errno 5] No: 'vaults'\n"),  # without advice
        *(
            (OSError(number, "No", "a"), 1, f"[Errno {number}] No: 'a': choose a place that")
            for number in (1, 13, 30)  # a right is missing, or a disk is read-only
        ),
        (OSError(errno.EDQUOT, "No"), 1, "] No: free some space, and repeat the command.\n"),
        (MemoryError(), 1, "not enough memory (MemoryError): take smaller"),
        (RecursionError("x"), 1, "nested too deeply"),
        (MemoryError("Unable to allocate 3 TiB"), 1, "memory (Unable to allocate 3 TiB): take"),
        (JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory of 9 B.\nx"), 1, "memory of 9 B):"),
    ],
)
def test_mistakes_are_one_line_and_no_traceback(failing, error, code, words):
    outcome = failing(error)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (code, "", 1)
    assert words in outcome.err
    if isinstance(error, OffmarlError):
        described = {"type": type(error).__name__, "message": str(error)}
        assert failing(error, "--json").json == {"error": described}


@pytest.mark.parametrize("error", [AssertionError(), RuntimeError("Unable to initialize backend")])
def test_a_command_without_a_device_says_so(failing, monkeypatch, error):
    """JAX raises these for a platform that is not there."""

    def no_devices():
        raise error

    monkeypatch.setattr("jax.devices", no_devices)
    outcome = failing(error)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
    assert outcome.err.startswith("error: JAX finds no device for JAX_PLATFORMS=cpu (")


@pytest.mark.parametrize("error", [ZeroDivisionError(), JaxRuntimeError("INTERNAL: a bug")])
def test_defects_are_not_hidden(failing, error):
    with pytest.raises(type(error)):
        failing(error)


@pytest.mark.parametrize("option", [(), ("--json",)])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_command_as_other_programs_end(signum, option):
    code = (
        "import signal, sys; sys.argv[0] = 'offmarl';"
        # What a shell starts in the background ignores the signal, and so does all it starts.
        "signal.signal(signal.SIGINT, signal.default_int_handler);"
        "from offmarl.cli import environments, main;"
        f"environments.envs = lambda: signal.raise_signal({int(signum)}); main()"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, "envs", *option], check=False, capture_output=True, text=True
    )
    message = "stopped: repeat the command to finish it."
    assert (process.returncode, process.stderr) == (-signum, f"{message}\n")
    error = {"error": {"type": "KeyboardInterrupt", "message": message}}
    assert (json.loads(process.stdout) if option else process.stdout) == (error if option else "")


@pytest.mark.parametrize("kind", ["recorder", "baseline"])
def test_programs_are_listed_with_their_first_line(offmarl, kind):
    summaries = offmarl(registry.VERBS[kind], "--json").json[f"{kind}s"]
    assert (
        summaries.keys()
        == registry.find(kind).keys()
        >= {"recorder": {"mappo"}, "baseline": {"bc"}}[kind]
    )
    assert all(summaries.values())


@pytest.mark.slow
def test_compare(offmarl, tmp_path):
    name, digest = "coverage-3/medium", {"vault_digest": "a" * 64}
    sampled, greedy = [[1, 2], [2, 3], [3, 4]], [[7, 7], [8, 8], [9, 9]]
    write_run(tmp_path / "bc", "bc", name, sampled, greedy, **digest)
    write_run(tmp_path / "maicq", "maicq", name, [[4, 4], [5, 5], [6, 6]], **digest)
    text = offmarl("compare", "bc", "maicq", "--html", "out/page.html", "--figure", "figure.png")
    assert text.code == 0
    page = (tmp_path / "out" / "page.html").read_text()
    assert "Comparison of runs" in page and (tmp_path / "figure.png").stat().st_size > 10_000
    for view in (text.out, page):
        assert name in view and "1.00 [1.00, 1.00]" in view
        assert all(f"{x}" in view for x in ("bc (greedy)", "bc (sampled)", "maicq (greedy)"))
        assert "Returns in swarm/coverage-3 are normalised: 0 is random play (9.256)" in view
    data = offmarl("compare", "bc", "maicq", "--json").json
    rows = data["datasets"][name]
    assert {label: row["iqm"]["value"] for label, row in rows.items()} == {
        "bc (greedy)": 8.0,
        "maicq (greedy)": 5.0,
        "bc (sampled)": 2.5,
    }
    assert (rows["bc (sampled)"]["algorithm"], rows["bc (sampled)"]["acting"]) == ("bc", "sampled")
    assert data["data"][name]["digest"] == "a" * 64


def test_compare_writes_tables_to_files_and_to_standard_output(offmarl, tmp_path):
    write_run(tmp_path / "bc", "bc", "a/b", [[1, 3], [3, 3]])
    write_run(tmp_path / "maicq", "maicq", "a/b", [[4, 4], [6, 6]])
    printed = offmarl("compare", "bc", "maicq", "--latex", "out/t.tex", "--csv", "-")
    assert printed.code == 0
    (bc, maicq) = csv.DictReader(printed.out.splitlines())
    assert (bc["iqm"], bc["bold"], bc["difference"]) == ("2.5", "0", "")
    assert (maicq["iqm"], maicq["bold"], maicq["difference"]) == ("5.0", "1", "2.5")
    latex = (tmp_path / "out" / "t.tex").read_text()
    assert "% Episode return: a/b\n" in latex and "maicq (greedy) & 2 & \\textbf{5.000} & " in latex
    assert "% Minus bc, in pairs" in latex and "maicq (greedy) & +2.500 \\\\\n" in latex
    outcome = offmarl("compare", "bc", "maicq", "--markdown", "t.md")
    assert "wrote t.md" in outcome.out and "| +2.500 |" in (tmp_path / "t.md").read_text()
    assert "--latex" in offmarl("compare", "bc", "--latex", ".").err


@pytest.mark.parametrize(
    ("seeds", "note"),
    [
        (1, None),
        (2, "{}: {} (intervals need at least 3 seeds)"),
        (4, "{} [95% interval]: {} (below 5 seeds it covers less often than 95%)"),
        (5, "{} [95% interval]: {}"),
    ],
)
@pytest.mark.parametrize("teams", [["red"], ["red", "blue"]])
def test_the_returns_of_a_run_are_summed_up(seeds, note, teams):
    by_seed = {seed: np.array([seed, seed + 2.0]) for seed in range(seeds)}
    report = _returns_report("title", {}, dict.fromkeys(teams, by_seed))
    _, *notes = report.text.renderables
    iqm = interval(*estimate(np.arange(1.0, seeds + 1)))
    names = [f"IQM of {team} over seeds" for team in teams] if teams[1:] else ["IQM over seeds"]
    assert notes == ([note.format(name, iqm) for name in names] if note else [])
    assert [row["mean"] for row in report.data["seeds"]] == [*range(1, seeds + 1)] * len(teams)


def test_the_best_checkpoint_by_agreement_takes_no_environment(offmarl, tmp_path):
    run = write_run(tmp_path / "bc", "bc", "a/x", [[0.5, 0.6]] * 3, metric=tracking.AGREEMENT)
    for seed in range(3):
        row = {"seed": seed, "step": 5, tracking.AGREEMENT: [0.4, 0.5]}
        tracking.append(run / tracking.METRICS_FILE, row)
    (note,) = (x for x in offmarl("compare", "bc", "--json").json["notes"] if "Best" in x)
    assert "environment" not in note
    assert "Agreement with held-out actions: a/x" in offmarl("compare", "bc").out


def test_compare_takes_references_and_says_where_there_are_none(offmarl, tmp_path):
    write_run(tmp_path / "bc", "bc", "3m/Good", [[1], [2]], env="smac_v1/3m")
    outcome = offmarl("compare", "bc", "--json")
    assert outcome.json["datasets"]["3m/Good"]["bc (greedy)"]["normalised"] is None
    raw, few, warning = outcome.json["notes"]
    assert "The reference returns of smac_v1/3m are unknown" in raw
    assert "--references smac_v1/3m RANDOM EXPERT" in raw
    assert "Intervals need at least 3 seeds" in few
    assert "some runs have 2 seeds" in warning
    data = offmarl("compare", "bc", "--references", "smac_v1/3m", -1, 4, "--json").json
    row = data["datasets"]["3m/Good"]["bc (greedy)"]
    assert row["normalised"] == {"value": 0.5, "low": None, "high": None}
    assert row["iqm"] == {"value": 1.5, "low": None, "high": None}
    assert data["data"]["3m/Good"]["references"] == {"random": -1.0, "expert": 4.0}
    text = offmarl("compare", "bc").out
    assert "1.500" in text and "[" not in text
    offmarl.refuses("did you mean smac_v1/3m", "compare", "bc", "--references", "smac_v1/3n", -1, 4)
    offmarl.refuses("cannot be normalised", "compare", "bc", "--references", "smac_v1/3m", 1, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ope", "run", "--vault", "x", "--eval-episodes", 3], "leave out --eval-episodes."),
        (["envs", "swarm", "--picture", "x.gif"], "swarm lists several environments: leave out"),
        (["envs", "--picture", "x.gif"], "all lists several environments: leave out --picture."),
        (
            ["convert", "a.vlt", "b", "--to", "pymarl", "--on-invalid", "keep", "--citation", "x"],
            "--to writes a vault in another layout: leave out --on-invalid, --citation.",
        ),
        (["report", "run", "--time-limit", 3], "leave out --time-limit."),
        (["report", "run", "--env", "x", "--html", "x.html"], "leave out --env."),
        (["ope", "--vault", "x"], "runs must be at least one (give the path of each)."),
        (["compare", "run", "--program", "x.py"], "leave out --program."),
        (["envs", "probe/observation", "--seconds", "nan"], "--seconds must be at least 0 and"),
        (["evaluate", "run", "--checkpoint", "x"], "--checkpoint: expected INT|{last,best}, got ["),
        (["compare", "run", "--references", "a", 1], "[ENV RANDOM EXPERT ...], got ['a', '1']."),
        (
            ["split", "x", "-o", "y", "--fractions", "a"],
            "expected FRACTION FRACTION [FRACTION], got ['a'].",
        ),
        (
            ["evaluate", "run", "--eval-episodes", 0],
            "error: --eval-episodes must be at least 1, not 0.\n",
        ),
        (["exploitability", "random", "--env", "x", "--eval-episodes", 0], "eval_episodes must be"),
        (["pull", ""], "no dataset named ''"),
        (["record", "--list"], "give the name of a recorder before its options"),
        (["record", "--policy", "random", "--act", "x"], "See `offmarl record --policy random --"),
        (["compare"], "no runs to compare: give the directory of at least one run."),
        (["report"], "vaults must be at least one (give the path of each)."),
    ],
)
def test_an_option_without_a_use_and_a_command_without_paths_are_refused(
    offmarl, tmp_path, arguments, message
):
    write_run(tmp_path / "run", "bc", "a/b", [[1, 2]])
    offmarl.refuses(message, *arguments)


@pytest.mark.parametrize(
    ("env", "named"),
    [
        ("", "is of an unknown environment: give one"),
        ("another/place", "is of the environment 'another/place', which is not"),
    ],
)
def test_a_run_of_no_installed_environment_is_played_with_env(offmarl, tmp_path, env, named):
    write_run(tmp_path / "run", "bc", "a/b", [[1, 2]], env=env)
    refused = offmarl("evaluate", "run")
    assert refused.code == 2 and named in refused.err
    assert "--env" in refused.err and refused.err.count("\n") == 1


def of_marl_eval(*algorithms, environment="smax", task="3m", metric="mean_episode_return"):
    """Results of three seeds, as other projects write them."""
    runs = {
        f"seed_{seed}": {
            "step_0": {"step_count": 0, metric: [0.0]},
            "absolute_metrics": {metric: [seed, seed + 2.0]},
        }
        for seed in range(3)
    }
    return {environment: {task: dict.fromkeys(algorithms, runs)}}


def test_compare_takes_results_of_other_projects(offmarl, tmp_path):
    write_run(tmp_path / "bc", "bc", "coverage-3/medium", [[1, 2]] * 3)
    files = {
        "mava.json": of_marl_eval("ff_ippo", "mat"),
        "same.json": of_marl_eval("qmix", environment="swarm", task="coverage-3/medium")
        | of_marl_eval("mappo", environment="vmas", metric="return"),
    }
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    result = offmarl("compare", "bc", *files, "--json").json
    rows = result["datasets"]
    assert {name: [*entries] for name, entries in rows.items()} == {
        "coverage-3/medium": ["bc (greedy)", "qmix (same.json)"],
        "smax/3m (marl-eval)": ["ff_ippo (mava.json)", "mat (mava.json)"],
        "vmas/3m (marl-eval)": ["mappo (same.json)"],
    }
    ippo = rows["smax/3m (marl-eval)"]["ff_ippo (mava.json)"]
    assert (ippo["runs"], ippo["mean"], ippo["acting"]) == (3, 2.0, None)
    assert all(row["normalised"] is None for methods in rows.values() for row in methods.values())
    assert result["probability_of_improvement"] == {}
    assert any("do not say how their policies acted" in note for note in result["notes"])
    alone = offmarl("compare", "mava.json", "--references", "smax/3m", 0, 4, "--json").json
    ippo = alone["datasets"]["smax/3m (marl-eval)"]["ff_ippo (mava.json)"]
    assert ippo["normalised"]["value"] == 0.5
    assert "mat (mava.json)" in alone["probability_of_improvement"]["ff_ippo (mava.json)"]
    write_run(tmp_path / "unplayed", "bc", "x", [[1]], metric=tracking.AGREEMENT)
    unlike = offmarl("compare", "unplayed", "mava.json")
    assert unlike.code == 1 and "mava.json holds returns, and the runs have none" in unlike.err


def test_two_files_of_one_name_stay_apart(offmarl, tmp_path):
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "x.json").write_text(json.dumps(of_marl_eval("qmix")))
    rows = offmarl("compare", "a/x.json", "b/x.json", "--json").json["datasets"]
    assert [*rows["smax/3m (marl-eval)"]] == ["qmix (a/x.json)", "qmix (b/x.json)"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "is damaged"),
        ("[" * 100_000, "is damaged"),
        ("[]", "holds no JSON object"),
        ("{}", "not of marl-eval's layout"),
        ('{"a": {"b": 3}}', "a: b is not of marl-eval's layout"),
        ('{"a": {"b\\nforged": 3}}', r"a: b\nforged is not"),
        ('{"a": {"b": {"c": {"s": {"absolute_metrics": 3}}}}}', "a: b: c: s is not valid"),
        ('{"a": {"b\\nforged": {"c": {"s": {}}}}}', r"a: b\nforged: c: s has no finite"),
        ('{"a": {"b": {"c": {"s": {"step_0": {}}}}}}', "a: b: c: s has no finite returns"),
        ('{"a": {"b": {"c": {"s": {"absolute_metrics": {"loss": [1]}}}}}}', "among loss"),
        *(
            (
                '{"a": {"b": {"c": {"s": {"absolute_metrics": {"return": [%s]}}}}}}' % value,  # noqa: UP031
                "no finite returns",
            )
            for value in ("", "null", "NaN", "true", '"1"', "[1]", "1" + "0" * 400)
        ),
    ],
)
def test_a_file_that_is_no_marl_eval_is_named(offmarl, tmp_path, text, words):
    (tmp_path / "other.json").write_text(text)
    outcome = offmarl("compare", "other.json")
    assert outcome.code == 1 and outcome.err.count("\n") == 1
    assert "other.json" in outcome.err and words in outcome.err


def test_a_run_that_is_given_twice_counts_once(offmarl, tmp_path):
    write_run(tmp_path / "bc", "bc", "coverage-3/medium", [[1, 2]])
    (tmp_path / "link").symlink_to("bc")
    paths = "bc", "bc/", "link", tmp_path / "x" / ".." / "bc"
    (tmp_path / "x").mkdir()
    rows = offmarl("compare", *paths, "--json").json["datasets"]["coverage-3/medium"]
    assert [*rows] == ["bc (greedy)"]


def without_evaluation(run, complete):
    (run / "marl_eval.json").unlink()
    record = json.loads((run / "run.json").read_text())
    (run / "run.json").write_text(json.dumps(record | {"complete": complete}))


def test_compare_says_what_was_not_evaluated(offmarl, tmp_path):
    without_evaluation(write_run(tmp_path / "bc", "bc", "coverage-3/medium", [[1, 2]]), True)
    offmarl.refuses("bc was trained without an evaluation", "compare", "bc", code=1)
    assert "missing is not the directory of a run" in offmarl("compare", "missing").err
    write_run(tmp_path / "agreeing", "bc", "a/x", [[0.5]], metric=tracking.AGREEMENT)
    write_run(tmp_path / "played", "bc", "a/x", [[1.0]])
    offmarl.refuses("cannot be compared", "compare", "agreeing", "played", code=1)


def test_compare_leaves_out_what_is_not_finished(offmarl, tmp_path):
    for name in ("bc", "maicq"):
        write_run(tmp_path / name, name, "coverage-3/medium", [[1, 2]])
    without_evaluation(tmp_path / "maicq", False)
    outcome = offmarl("compare", "bc", "maicq", "--json").json
    assert outcome["unfinished"] == ["maicq"]
    assert [*outcome["datasets"]["coverage-3/medium"]] == ["bc (greedy)"]
    assert "maicq is not finished, and left out" in outcome["notes"][-1]
    offmarl.refuses("is not finished", "compare", "maicq", code=1)


def test_a_value_of_the_wrong_type_is_named_without_the_rules_of_its_option(offmarl):
    outcome = offmarl("train", "bc", "--vault", "data", "--updates", "3.5")
    assert outcome.code == 2 and "3.5" in outcome.err
    assert "Rule" not in outcome.err and "Annotated" not in outcome.err


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["show"], "Missing from offmarl show: VAULT. See `offmarl show --help`."),
        (
            ["show", "--stats", "a.vlt"],
            "Missing value for argument 'path', or an unknown option. See `offmarl show --help`.",
        ),
        (
            ["train", "bc", "--vaul", "x"],
            "Missing from offmarl train bc: --vault PATH[=SHARE]; Unrecognized options: --vaul x. "
            "See `offmarl train bc --help`.",
        ),
        (
            ["sample", "a.vlt", "-o", "b.vlt", "--seed", "one"],
            "Error parsing --seed: a whole number is needed, such as 100000 or 1e5: got one. See "
            "`offmarl sample --help`.",
        ),
    ],
)
@pytest.mark.parametrize("width", [60, 200])
def test_json_holds_the_reason_of_a_usage_error(offmarl, monkeypatch, arguments, reason, width):
    monkeypatch.setenv("COLUMNS", str(width))
    outcome = offmarl(*arguments)
    assert (outcome.code, outcome.err) == (2, f"error: {reason}\n")
    refused = offmarl(*arguments, "--json")
    assert (refused.code, refused.err) == (2, "")
    assert refused.json == {"error": {"type": "OptionError", "message": reason}}


def test_json_offers_the_values_of_an_option(offmarl):
    refused = offmarl("recode", "a.vlt", "-o", "b.vlt", "--codec", "gzip", "--json")
    message = refused.json["error"]["message"]
    assert "'gzip'" in message and "'raw'" in message and "None" not in message


COMMANDS = [
    *([name] for name in verbs.VERBS),
    *([registry.VERBS[kind], name] for kind in registry.VERBS for name in registry.find(kind)),
    ["record", "--policy"],
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_help_lists_json_and_describes_each_flag_as_it_is_named(offmarl, command):
    code, out, err = offmarl(*command, "--help")
    assert (code, err) == (0, "") and "--json" in out and "offmarl" in out
    # A flag that is on by default is shown with its positive form, which its text describes.
    negated = [word.strip(",") for word in out.split() if word.startswith("--no-")]
    assert all(f"{flag.replace('--no-', '--')}, {flag}" in out for flag in negated)


def test_flags_that_are_on_can_be_turned_off_and_on(monkeypatch):
    qmix = registry.load("recorder", "qmix")
    off, on = ["--no-share-parameters"], ["--share-parameters"]
    for flags, shared in (off, False), (on, True), ([], True):
        monkeypatch.setattr(sys, "argv", ["qmix.py", *flags])
        assert parse_script(qmix.Args, qmix.__doc__).share_parameters is shared


@dataclass(frozen=True)
class Sweep:
    """Settings of a script that trains nothing."""

    seeds: tuple[int, ...] = (0, 1)


def test_seeds_of_other_scripts_are_their_own(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["sweep.py", "--seeds", "3", "4"])
    assert parse_script(Sweep, "A sweep.") == Sweep((3, 4))


@pytest.mark.parametrize("kind", registry.VERBS)
def test_every_program_parses_its_options_as_the_command_line_does(kind):
    for path in registry.find(kind).values():
        text = path.read_text()
        assert "parse_script(Args, __doc__)" in text and "tyro" not in text


def test_a_script_has_the_help_of_the_command(offmarl, monkeypatch, capsys):
    bc = registry.load("baseline", "bc")
    monkeypatch.setattr(sys, "argv", ["bc.py", "--help"])
    with pytest.raises(SystemExit):
        parse_script(bc.Args, bc.__doc__)
    script = capsys.readouterr().out.split()
    command = offmarl("train", "bc", "--help").out.split()
    options = [[word for word in text if word.startswith("--")] for text in (script, command)]
    extra = {"--json", *(f"--{name.replace('_', '-')}" for name in TaskOptions.__annotations__)}
    assert options[0] == [word for word in options[1] if word.strip(",") not in extra]
    assert {"--vault", "--schedule"} <= {*script} and "None)" not in script


ON_FILES = [
    "verify FILE",
    "salvage FILE -o o.vlt",
    "compact FILE",
    "show FILE",
    "ls FILE",
    "report FILE",
    "evaluate FILE",
    "compare FILE",
    "cat FILE -o o.vlt",
    "recode FILE -o o.vlt",
    "convert FILE out --to numpy",
    "train bc --vault FILE",
    "push FILE --to org/name --licence MIT",
]


@pytest.mark.parametrize(
    ("command", "name"),
    [
        *((command, "data.npz") for command in ON_FILES),
        *((command, "data.zip") for command in ON_FILES[:2]),
    ],
)
def test_an_ordinary_file_is_no_vault_and_no_run(offmarl, tmp_path, command, name):
    (tmp_path / name).write_bytes(b"something else")
    outcome = offmarl(*command.replace("FILE", name).split())
    assert outcome.code == 1 and outcome.err.count("\n") == 1
    assert name in outcome.err and "Errno" not in outcome.err
    reasons = ("is a file, and a vault is", "not a zip archive", "not the directory of a", "no dir")
    assert any(words in outcome.err for words in reasons)


@pytest.mark.parametrize(("name", "verb"), verbs.VERBS.items(), ids=verbs.VERBS)
def test_the_summary_of_a_verb_is_the_first_line_of_its_docstring(name, verb):
    first, *_ = verbs.function_of(name, verb).__doc__.splitlines()
    assert verbs.summary_of(name, verb) + "." == first


def test_help_is_in_whole_sentences_and_without_defaults_that_are_none(offmarl, capsys):
    def verb(name: str = "") -> None:
        """Do it.

        Parameters
        ----------
        name
            What to look at, which is told
            in several lines.
        """

    with pytest.raises(SystemExit):
        parse(verb, "verb", "", ["--help"])
    assert "What to look at, which is told in several lines." in capsys.readouterr().out
    out = offmarl("ls", "--help").out
    assert "[DIRECTORY]" in out and "--no-remote" not in out and "None" not in out
    assert "(default: 0)" in offmarl("split", "--help").out
    assert "--training-seed" in offmarl("record", "--policy", "--help").out


def test_help_keeps_lists_and_fits_the_terminal(offmarl, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = offmarl("record", "psro", "--help").out.splitlines()
    assert "- `last`: the newest member. This is self-play in turns;" in lines
    programs = offmarl("record", "--help").out.splitlines()
    for line in [*lines, *programs[:6], *programs[-3:]]:
        assert len(line) <= 80
    assert "`offmarl tune NAME --help`" in offmarl("tune", "--help").out


@pytest.mark.parametrize("arguments", [["--help"], ["show", "--help"], ["ls", "--remote"]])
def test_a_closed_pipe_ends_a_command_quietly(arguments, tmp_path):
    """As in `offmarl --help | head -1`, whose reader is gone before all is written."""
    command = [sys.executable, "-m", "offmarl", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == -signal.SIGPIPE


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
@pytest.mark.parametrize(
    "arguments",
    [["envs"], ["show", "a.vlt"], ["ls"], ["compare", "run"], ["train", "bc", "--help"]],
)
def test_an_encoding_that_lacks_characters(offmarl, monkeypatch, tmp_path, encoding, arguments):
    written(tmp_path / "a.vlt", whole_episodes(steps=40))
    write_run(tmp_path / "run", "\u03c0", "data", [[1.0, 2.0]] * 3)
    for option in () if "--help" in arguments else ((), ("--json",)):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", stream)
        assert offmarl(*arguments, *option)[::2] == (0, "")
        text = stream.buffer.getvalue().decode(encoding)
        assert json.loads(text) if option else text


@pytest.mark.parametrize(
    "arguments", [["envs"], ["envs", "--json"], ["show", "none"], ["nonsense"]]
)
@pytest.mark.parametrize("closed", [{"stdout"}, {"stderr"}, {"stdin", "stdout", "stderr"}])
def test_streams_that_were_closed(offmarl, monkeypatch, arguments, closed):
    """As by `>&-`, and by programs that start others without any."""
    expected = offmarl(*arguments)
    for name in closed:
        monkeypatch.setattr(sys, name, None)
    result = offmarl(*arguments)
    assert result.code == expected.code
    assert result.out == ("" if "stdout" in closed else expected.out)
    assert result.err == ("" if "stderr" in closed else expected.err)


@pytest.mark.parametrize("option", [(), ("--json",)])
def test_a_standard_output_that_is_full(tmp_path, option):
    command = [sys.executable, "-m", "offmarl", "ls", "--remote", *option]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command, check=False, stdout=full, stderr=subprocess.PIPE, cwd=tmp_path, text=True
        )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("error: [Errno 28] No space left on device: free some space")


def test_doctor_says_that_the_chosen_devices_are_missing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "offmarl", "doctor", "--json"],
        env={**os.environ, "JAX_PLATFORMS": "nonsense"},
        check=True,
        capture_output=True,
        cwd=tmp_path,
    )
    assert "no device for JAX_PLATFORMS=nonsense" in json.loads(done.stdout)["devices"][0]


@pytest.mark.slow
def test_training_under_the_guards_of_jax(tmp_path):
    """They are for users' own code: offmarl and its libraries do not obey them."""
    written(tmp_path / "a.vlt", whole_episodes(steps=40))
    guards = {
        "JAX_TRANSFER_GUARD": "disallow",
        "JAX_NUMPY_RANK_PROMOTION": "raise",
        "JAX_NUMPY_DTYPE_PROMOTION": "strict",
        "JAX_ENABLE_X64": "1",
        "JAX_DEFAULT_PRNG_IMPL": "rbg",
        "JAX_THREEFRY_PARTITIONABLE": "0",
        "JAX_DEBUG_NANS": "1",
    }
    sizes = ["--updates", "2", "--batch-size", "2", "--length", "5", "--env", "none"]
    done = subprocess.run(
        [sys.executable, "-m", "offmarl", "train", "bc", "--vault", "a.vlt", *sizes],
        env={**os.environ, **guards},
        check=False,
        capture_output=True,
        cwd=tmp_path,
        text=True,
    )
    assert done.returncode == 0
    lines = done.stderr.splitlines()
    assert len(lines) == 6 and all("has no effect" in line for line in lines)


SECRET = "https://me:pass/w@rd@example.org/data"


@pytest.mark.parametrize(
    "arguments",
    [
        ["evaluate", SECRET],
        ["compare", SECRET],
        ["push", SECRET, "--to", "org/name"],
        ["evaluate", "run", SECRET],
        ["report", f"--html={SECRET}/page.html"],
        ["demo", "--seeds", SECRET],
        ["nonsense", SECRET],
        ["show", SECRET, "--time-limit", "x"],
    ],
)
@pytest.mark.parametrize("form", [[], ["--json"]])
def test_credentials_are_never_shown(offmarl, arguments, form):
    outcome = offmarl(*arguments, *form)
    assert outcome.code != 0
    for secret in ("pass/", "w@rd", "rd@", "me:"):
        assert secret not in outcome.out + outcome.err
