"""Files that `offmarl new` writes work: an environment is recorded, a baseline trains."""

import sys
import warnings
from pathlib import Path

import pytest

from offmarl import envs, vault
from offmarl.networks import PolicyConfig, make_policy
from offmarl.programs import registry
from offmarl.programs.recording.record import record_policy
from offmarl.testing import EnvironmentConformance

TRAIN = ("--updates", 4, "--eval-every", 2, "--eval-episodes", 2, "--final-episodes", 3)


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])


@pytest.mark.slow
class TestEnvironment(EnvironmentConformance):
    @pytest.fixture
    def env(self, offmarl, tmp_path):
        outcome = offmarl("new", "env", "meeting", "--out", "some where", "--json")
        assert outcome.json["path"] == str(tmp_path / "some where" / "meeting.py")
        return envs.make("some where/meeting.py:Meeting")


@pytest.fixture
def file(offmarl, tmp_path, monkeypatch):
    """Name an environment in a file beside the working directory."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert offmarl("new", "env", "line_game", "--out", "../code").code == 0
    return "../code/line_game.py:LineGame"


@pytest.mark.slow
def test_an_environment_from_a_file_is_recorded_and_trained_on(offmarl, file):
    env = envs.make(f"{file}:time_limit=9")
    path = Path("line_game.vlt/random")
    record_policy(env, make_policy(PolicyConfig("random"), env.spec), (), path, 100, num_envs=2)
    data = vault.open_vault(path)
    assert data.spec.name == "line_game.py:LineGame:time_limit=9"
    source = data.provenance["environment_source"]
    assert source["factory"] == "LineGame" and "file" not in source  # which is not the reader's

    offmarl.refuses("path/to/file.py:FACTORY", "train", "bc", "--vault", path, *TRAIN)
    trained = offmarl.succeeds("train", "bc", "--vault", path, "--env", file, *TRAIN, "--json")
    offmarl.refuses("does not run code that data names", "evaluate", trained.json["run"])


def test_the_commands_it_prints_can_be_pasted(offmarl):
    data = offmarl("new", "baseline", "my_clone", "--out", "../some where", "--json").json
    assert data["commands"][-1] == "offmarl train '../some where/my_clone.py' --vault VAULT"


@pytest.mark.nightly
def test_every_command_takes_an_environment_from_a_file(offmarl, file):
    recorded = offmarl(
        *("record", "mappo", "--env", f"{file}:time_limit=9", "--tiers", "random", "--json"),
        *("--steps", 400, "--total-steps", 800, "--num-envs", 4, "--num-steps", 50),
        *("--evaluations", 2, "--eval-episodes", 4),
    )
    assert recorded.code == 0, recorded.err
    path = "vaults/line_game.py:LineGame:time_limit=9.vlt/mappo-0-random"
    trained = offmarl("train", "bc", "--vault", path, "--env", file, *TRAIN, "--json")
    run = trained.json["run"]
    outcome = offmarl("evaluate", run, "--env", file, "--eval-episodes", 2, "--json")
    assert outcome.json["env"] == "line_game.py:LineGame"
    again = ("record", "--policy", run, "--env", file, "--steps", 40, "--num-envs", 2, "--json")
    assert "line_game.py:LineGame.vlt" in offmarl(*again).json["vaults"][0]["path"]


def test_nothing_is_overwritten(offmarl, tmp_path):
    (tmp_path / "mine.py").write_text("precious")
    offmarl.refuses("exists and is not overwritten", "new", "env", "mine")
    assert (tmp_path / "mine.py").read_text() == "precious"


NEEDED = "choose another name, such as my_"
"""Of names that the file needs itself."""


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("env", "my-env", "letters, digits and _"),
        ("env", "2d", "letters, digits and _"),
        ("env", "../up", "--out names the file's directory"),
        ("env", "class", "cannot name a Python module"),
        ("env", "json", "already has a module named json"),
        *(("env", name, NEEDED) for name in ("state", "env_spec", "float", "none", "true")),
        *(("baseline", name, NEEDED) for name in ("args", "program", "none")),
    ],
)
def test_names_that_are_refused(offmarl, tmp_path, kind, name, message):
    offmarl.refuses(message, "new", kind, name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["env", "baseline"])
def test_the_names_of_the_templates_may_be_kept(offmarl, kind):
    assert offmarl("new", kind, f"my_{kind}", "--out", "new").code == 0


@pytest.mark.slow
def test_a_baseline_from_a_file_is_trained(offmarl, random_data, monkeypatch):
    assert offmarl("new", "baseline", "cautious", "--out", "some where").code == 0
    helped = offmarl("train", "some where/cautious.py", "--help")
    assert helped.code == 0 and "Adam's step size" in helped.out
    data = random_data("probe/observation")
    trained = offmarl.succeeds("train", "some where/cautious.py", "--vault", data, *TRAIN, "--json")
    run = trained.json["run"]
    assert Path(run).name == "cautious"
    evaluate = ("evaluate", run, "--eval-episodes", 2, "--json")
    assert offmarl(*evaluate).code == 0  # this process ran the program
    monkeypatch.setattr(registry, "_ran", {})
    refused = offmarl(*evaluate)
    assert refused.code == 1 and "--program" in refused.json["error"]["message"]
    assert "--init and --opponents take only runs of offmarl's" in refused.json["error"]["message"]
    program = ("--program", "some where/cautious.py")
    assert offmarl(*evaluate, *program).code == 0
    compare = ("compare", run, "--html", "page.html")
    with warnings.catch_warnings(action="always"):
        compared = offmarl(*compare)
    assert compared.code == 0
    assert f"warning: the page shows no episode of {run}: " in compared.err
    assert "--program" in compared.err
    assert "<h2>Episodes" in Path("page.html").read_text()
    assert offmarl(*compare, *program).code == 0  # without a warning: probes cannot be drawn
    offmarl.refuses("there is no file", *compare, "--program", "cautios.py")
    record = ("record", "--policy", run, "--steps", 40, "--num-envs", 2, "--json")
    assert offmarl(*record).code == 1
    assert offmarl(*record, *program).json["vaults"][0]["steps"] == 40
