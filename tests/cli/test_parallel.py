"""Policies are played in environments of PettingZoo's parallel API that the user names."""

from typing import Any

import pytest

from offmarl import envs
from offmarl.networks import PolicyConfig
from tests import plain
from tests.runs import write_policy

pytest.importorskip("pettingzoo", reason="needs pip install 'offmarl[pettingzoo]'")

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
def test_returns_are_those_of_the_same_environment_in_jax(evaluate: Any) -> None:
    ours, theirs = evaluate().json, evaluate("--env", "mine.py:make").json
    assert ours.pop("env") == ENV
    assert theirs.pop("env") == "mine.py:make"
    for one, other in zip(ours["seeds"], theirs["seeds"], strict=True):
        assert one == pytest.approx(other)  # the bridge draws nothing, nor do the policies


@pytest.mark.slow
def test_sampled_returns_do_not_depend_on_the_number_of_processes(evaluate: Any) -> None:
    options = ("--env", "mine.py:make", "--act", "sample", "--seed", 7)
    one, two = (evaluate(*options, "--jobs", jobs).json for jobs in (1, 2))
    assert one == two
    assert one["acting"] == "sampled"


@pytest.mark.slow
def test_what_such_environments_lack_is_said(evaluate: Any) -> None:
    refused = evaluate("--env", "mine.py:make", "--render", "episode.gif")
    assert refused.code == 2
    assert "is a PettingZoo environment: leave out --render" in refused.json["error"]["message"]
    assert evaluate("--env", "mine.py:make", "--jobs", 0).code == 2
