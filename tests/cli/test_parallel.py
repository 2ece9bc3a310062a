"""Policies are played in environments of PettingZoo's parallel API that the user names."""

import multiprocessing
from pathlib import Path
from typing import Any

import chex
import pytest

from offmarl import envs
from offmarl.checkpoint import Checkpoints
from offmarl.envs.translator import Translator
from offmarl.networks import PolicyConfig
from offmarl.programs import load_policy
from offmarl.programs.recording import python as recording
from offmarl.programs.runs import parallel
from offmarl.programs.runs.parallel import ParallelEnvironment
from offmarl.tracking import CHECKPOINTS, RETURN, RUN_FILE, read, read_run, write_json
from tests import plain
from tests.programs.pettingzoo import Duel
from tests.runs import write_policy

ENV = "classic/bridge"


@pytest.fixture
def evaluate(offmarl: Any, tmp_path: Any) -> Any:
    """Evaluate a run of two seeds."""
    lines = (
        "from offmarl.envs import to_pettingzoo",
        f"def make():\n    return to_pettingzoo({ENV!r})",
    )
    (tmp_path / "mine.py").write_text("\n\n".join(lines))
    write_policy(tmp_path / "run", PolicyConfig("recurrent", hidden=8), envs.make(ENV).spec, [3, 4])

    def run(*options: Any) -> Any:
        program = "--program", plain.__file__
        return offmarl("evaluate", "run", *program, "--eval-episodes", 3, "--json", *options)

    return run


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
def test_returns_are_those_of_the_same_environment_in_jax(evaluate: Any) -> None:
    ours = evaluate("--render", "episode.png").json
    theirs = evaluate("--env", "mine.py:make").json
    assert Path("episode.png").stat().st_size > 5_000
    assert ours.pop("env") == ENV
    assert theirs.pop("env") == "mine.py:make"
    for first, second in zip(ours["seeds"], theirs["seeds"], strict=True):
        assert first == pytest.approx(second)  # the bridge draws nothing, nor do the policies


@pytest.mark.slow
def test_sampled_returns_do_not_depend_on_the_number_of_processes(evaluate: Any) -> None:
    options = ("--env", "mine.py:make", "--act", "sample", "--seed", 7)
    first, second = (evaluate(*options, "--jobs", jobs).json for jobs in (1, 2))
    assert first == second
    assert first["acting"] == "sampled"


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("env", [ENV, "mine.py:make"])
def test_ope_shows_the_returns_in_an_environment(
    evaluate: Any, offmarl: Any, random_data: Any, env: str
) -> None:
    options = ("--program", plain.__file__, "--eval-episodes", 3, "--env", env, "--json")
    act = ("--methods", "wis", "--act", "greedy")
    result = offmarl("ope", "run", "--vault", random_data(ENV), *act, *options).json
    assert result["env"] == env
    returns = [row["true_return"] for row in result["policies"].values()]
    assert returns == pytest.approx([row["mean"] for row in evaluate("--env", env).json["seeds"]])


@pytest.mark.slow
def test_what_such_environments_lack_is_said(evaluate: Any) -> None:
    refused = evaluate("--env", "mine.py:make", "--render", "episode.gif")
    assert refused.code == 2
    assert "is a PettingZoo environment: leave out --render" in refused.json["error"]["message"]
    assert evaluate("--env", "mine.py:make", "--jobs", 0).code == 2


def test_such_an_environment_is_not_recorded_by_a_command(evaluate: Any, offmarl: Any) -> None:
    options = ("--program", plain.__file__, "--env", "mine.py:make", "--steps", 8)
    refused = offmarl("record", "--policy", "run", *options)
    assert refused.code == 2
    assert "mine.py:make is a PettingZoo environment: use offmarl.record_ep" in refused.err


def test_a_run_in_code_of_the_users_names_it(evaluate: Any, tmp_path: Path) -> None:
    record = read_run(tmp_path / "run")
    record["spec"]["name"] = "mine"
    record["args"]["env"] = "mine.py:make"
    write_json(tmp_path / "run" / RUN_FILE, record)
    assert "does not run code that data names" in evaluate().json["error"]["message"]
    assert evaluate("--env", "mine").json["error"]["message"].startswith("no environment named")


def all_have_ended() -> bool:
    """Return whether no process of an environment runs; a killed one may still be ending."""
    for child in multiprocessing.active_children():
        child.join(20)
    return not multiprocessing.active_children()


FAULTY = """
import os
from tests.programs.pettingzoo import Duel


class Raises(Duel):
    def step(self, actions):
        raise ZeroDivisionError("no fuel")


class Dies(Duel):
    def step(self, actions):
        os._exit(3)


class Lonely(Duel):
    def __init__(self):
        super().__init__()
        self.possible_agents = self.possible_agents[:1]


class Swapped(Duel):
    def __init__(self):
        super().__init__()
        self.possible_agents = self.possible_agents[::-1]


class Expires(Duel):
    def reset(self, seed=None, options=None):
        if os.path.exists("armed"):
            with open("armed", "a") as file:
                file.write(".")
            if os.path.getsize("armed") > 80:  # in the third evaluation
                os.remove("armed")
                raise OSError("no licence")
        return super().reset(seed, options)


class Refused(Duel):
    def __init__(self):
        raise OSError("no licence")
"""

HELPED = """
import multiprocessing
import subprocess
import time
from pathlib import Path
from tests.programs.pettingzoo import Duel


class Helped(Duel):
    def __init__(self):
        super().__init__()
        startup = multiprocessing.get_context("spawn")
        helper = startup.Process(target=time.sleep, args=(1000,))
        helper.start()
        self.helpers = helper, subprocess.Popen(["sleep", "1000"])

    def close(self):
        for helper in self.helpers:
            helper.terminate()
        self.helpers[0].join()
        self.helpers[1].wait()
        Path(__file__).with_name("ended").touch()
"""


@pytest.fixture
def train(offmarl: Any, tmp_path: Any, duel: Any) -> Any:
    """Train a clone of two seeds on random episodes of the duel."""
    (tmp_path / "mine.py").write_text(FAULTY)
    sizes = {"--updates": 20, "--hidden": 4, "--batch-size": 4, "--length": 2, "--seeds": 2}

    flags = [item for pair in sizes.items() for item in pair]

    def run(env: str, *options: Any, out: str = "run") -> Any:
        words = ("--vault", duel, "--env", env, "--out", out, "--json")
        return offmarl("train", "bc", *words, *flags, *options)

    run.sizes = flags  # type: ignore[attr-defined]
    return run


@pytest.fixture(scope="module")
def duel(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("duel") / "duel.vlt"
    recording.record_episodes(Duel, path, 8)
    return path


@pytest.fixture
def one_process(monkeypatch: Any) -> None:
    """Copies of an environment step in one process, which starts sooner than several."""
    monkeypatch.setattr(parallel, "_MOST_PROCESSES", 1)


@pytest.mark.slow
def test_training_evaluates_greedy_and_sampled_actions_in_it(train: Any, offmarl: Any) -> None:
    outcome = train("mine.py:Duel", "--keep", "all")
    assert outcome.code == 0, outcome.err
    assert outcome.json["seeds"][0].keys() > {"greedy_mean", "sampled_mean"}
    assert all_have_ended()
    rows = [row for row in read(Path("run/metrics.jsonl")) if RETURN in row]
    assert [row["step"] for row in rows if row["seed"] == 1] == [0, 4, 8, 12, 16, 20]
    assert {len(row[RETURN]) for row in rows} == {8, 32}  # fewer than in JAX
    record = read_run(Path("run"))
    assert record["environment_source"]["factory"] == "Duel"
    assert record["args"]["eval_every"] == 4
    assert "mine.py:Duel" in offmarl("compare", "run", "--json").out

    for same in ("mine.py:Duel", "mine.py:Swapped"):  # agents are told apart by their names
        scores = offmarl("evaluate", "run", "--env", same, "--jobs", 1, "--json").json
        for first, second in zip(scores["seeds"], outcome.json["seeds"], strict=True):
            assert first["mean"] == second["greedy_mean"]  # the duel draws nothing


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
def test_settings_are_searched_in_it(train: Any, offmarl: Any, duel: Any) -> None:
    pytest.importorskip("optuna")
    options = ("--vault", duel, "--env", "mine.py:Duel", *train.sizes)
    outcome = offmarl("tune", "bc", *options, "--trials", 1, "--only", "learning_rate", "--json")
    assert outcome.code == 0, outcome.err
    assert [trial["state"] for trial in outcome.json["trials"]] == ["complete"]
    assert all_have_ended()


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
def test_evaluations_in_it_do_not_change_what_is_learned(train: Any) -> None:
    sizes = ("--final-episodes", 2, "--eval-episodes", 2)
    assert train("mine.py:Duel", *sizes, out="often").code == 0
    assert train("mine.py:Duel", *sizes, "--eval-every", 20, out="once").code == 0
    assert train("none", *sizes, "--held-out", 0, out="never").code == 0
    policies = [load_policy(run, 1).params for run in ("often", "once", "never")]
    chex.assert_trees_all_equal(*policies)
    often, once = ([*read(Path(run) / "metrics.jsonl")] for run in ("often", "once"))
    last = [[row for row in rows if RETURN in row][-2:] for rows in (often, once)]
    assert last[0] == last[1]


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
def test_a_training_that_it_ended_goes_on_to_the_same_policies_and_returns(train: Any) -> None:
    assert train("mine.py:Expires", out="whole").code == 0
    Path("armed").touch()
    refused = train("mine.py:Expires", "--checkpoint-seconds", 0, out="ended")
    assert "mine.py:Expires failed: OSError: no licence" in refused.json["error"]["message"]
    assert not read_run(Path("ended")).get("complete")
    assert 4 <= Checkpoints(Path("ended") / CHECKPOINTS).latest() < 8
    assert train("mine.py:Expires", out="ended").code == 0
    for seed in (0, 1):
        params = [load_policy(run, seed).params for run in ("whole", "ended")]
        chex.assert_trees_all_equal(*params)
    logged = [
        [(row["step"], row["seed"], row[RETURN]) for row in rows if RETURN in row]
        for rows in (read(Path(run) / "metrics.jsonl") for run in ("whole", "ended"))
    ]
    assert logged[0] == logged[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("Raises", "mine.py:Raises failed: ZeroDivisionError: no fuel (mine.py, line 8)"),
        ("Dies", "mine.py:Dies has ended with exit code 3"),
        ("Lonely", "differ in num_agents (2, not 1)"),
        ("Refused", "mine.py:Refused cannot be created: OSError: no licence"),
        ("Missing", "mine.py has no Missing"),
    ],
)
def test_a_faulty_environment_is_an_error_of_one_line(
    train: Any, factory: str, message: str
) -> None:
    refused = train(f"mine.py:{factory}")
    assert refused.code in (1, 2)
    error = refused.json["error"]["message"]
    assert message in error
    assert "\n" not in error


@pytest.mark.slow
def test_an_environment_starts_and_ends_processes_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(HELPED)
    copies = ParallelEnvironment(f"{tmp_path / 'mine.py'}:Helped", Translator(Duel()).spec, "", 1)
    copies.close()
    assert (tmp_path / "ended").exists()
