"""``offmarl tune``: its options, its file, and that programs take it."""

import tomllib
from types import SimpleNamespace

import pytest

from offmarl.cli.tune import _about_default
from offmarl.programs.registry import find, load
from tests.programs import bandit

pytest.importorskip("optuna")

BANDIT = bandit.__file__
SMALL = ["--env", "probe/one-step", "--total-steps", "32", "--num-envs", "4", "--evaluations", "2"]
SMALL += ["--eval-episodes", "4"]


@pytest.mark.slow
def test_a_file_is_written_that_programs_take(offmarl, tmp_path):
    command = ["tune", BANDIT, *SMALL, "--seeds", "1", "--only", "rate", "--out", "b.toml"]
    outcome = offmarl.succeeds(*command, "--trials", "2")
    assert "b.toml: the best of 2 trials" in outcome.out
    settings = tomllib.loads((tmp_path / "b.toml").read_text())["bandit"]
    assert "Next: offmarl record " in outcome.out
    assert "data:image/svg" in (tmp_path / "b.html").read_text()
    result = offmarl(*command, "--trials", "3", "--json").json
    assert [row["trial"] for row in result["trials"]] == [1, 2, 3]
    assert result["ranges"] == {"rate": "0.01 to 1, log"}
    settings = tomllib.loads((tmp_path / "b.toml").read_text())["bandit"]
    assert settings == {"num_envs": 4, "rate": result["best"]["rate"]}
    out = ["--total-steps", "32", "--eval-episodes", "4", "--steps", "8", "--tiers", "random"]
    offmarl.succeeds("record", BANDIT, "--env", "probe/one-step", "--settings", "b.toml", *out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "no recorder named 'nothing'"),
        (["--vault", "x", "bc"], "give the name of a baseline before its options"),
        (["nothing", "--vault", "x"], "no baseline named 'nothing'"),
        ([BANDIT, "--only", "rat"], "no argument with a range named 'rat': did you mean rate"),
        (
            [BANDIT, "--search", "absent.toml"],
            "there is no file absent.toml: give the path",
        ),
        ([BANDIT, "--tiers", "random"], "--tiers"),
        ([BANDIT, "--init", "run"], "start from nothing: leave out init"),
        ([BANDIT, "--prefill", "vault"], "start from nothing: leave out prefill"),
        (["random"], "random has no settings to search"),
        (["psro"], "psro has no settings to search"),
        ([BANDIT, "--trials", "0"], "trials must be at least 1, not 0"),
    ],
)
def test_mistakes_are_named(offmarl, arguments, message):
    offmarl.refuses(message, "tune", *arguments)


BEST = "The best of many scores is too high: runs with the settings have other seeds. "


@pytest.mark.parametrize(
    ("default", "text"),
    [
        (0, BEST),  # the search never tried them
        (1, f"{BEST}The default settings scored 0.5000."),
        (2, "No trial beat the default settings."),
        (3, f"{BEST}The default settings scored nothing: they could not be run."),
    ],
)
def test_it_is_said_whether_the_search_beat_the_default_settings(default, text):
    trials = [{"score": score} for score in (0.5, 2.0, None)]
    assert _about_default(SimpleNamespace(trials=trials, default=default, score=2.0)) == text


def test_help_lists_the_options_of_the_search_and_of_the_program(offmarl):
    out = offmarl("tune", "mappo", "--help").out
    options = "--trials --seeds --only --search --settings --json --gamma --pruner"
    assert {*options.split()} <= {word.strip(",") for word in out.split()}
    assert "--tiers" not in out
    everything = offmarl("tune", "--help", "--json").json
    for kind in ("recorder", "baseline"):
        programs = [name for name in find(kind) if hasattr(load(kind, name).Args, "for_env")]
        assert [*everything[f"{kind}s"]] == programs
