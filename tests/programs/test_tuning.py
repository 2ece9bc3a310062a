"""The search of settings: ranges, trials, files, and what a kill leaves."""

import shutil
import signal
import subprocess
import sys
import tomllib
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from offmarl import programs, tracking
from offmarl.config import Fraction, NonNegative, Positive, PositiveInt
from offmarl.errors import OptionError, RunError, Stopped, UnknownNameError
from offmarl.launch import Share, join_work, run_share
from offmarl.programs import registry, tuning
from offmarl.programs.runs.run import report, watch_runs
from offmarl.programs.tuning import Choices, Range, SearchSpace, TrialsWork, tune
from tests.programs import bandit, two_stage

pytest.importorskip("optuna")

ENV = "probe/one-step"


@dataclass(frozen=True)
class Args(programs.OnlineArgs):
    rate: Positive = 1e-3
    gamma: Fraction = 0.99
    tau: Fraction = 0.2
    entropy: NonNegative = 0.01
    weight: NonNegative = 0.0
    whole: Fraction = 1.0
    hidden: PositiveInt = 64
    epochs: PositiveInt = 1
    capacity: PositiveInt = 1000
    every: PositiveInt | None = None
    greedy: bool = False


def test_ranges_follow_from_types_and_values():
    ranges = tuning.derive_space(Args())
    assert ranges == {
        "rate": Range(1e-4, 1e-2, log=True),
        "gamma": Range(pytest.approx(0.9), pytest.approx(0.999), log=True, complement=True),
        "tau": Range(pytest.approx(0.02), 1.0, log=True),
        "entropy": Range(1e-3, 0.1, log=True),
        "hidden": Choices((32, 64, 128)),
        "epochs": Choices((1, 2)),
    }
    assert tuning.choose_ranges(ranges, ["tau"]) == {"tau": ranges["tau"]}
    with pytest.raises(UnknownNameError, match="did you mean entropy"):
        tuning.choose_ranges(ranges, ["entrop"])


class Recorded:
    """Returns the lower end of each range."""

    def __init__(self):
        self.drawn = {}

    def suggest_float(self, name, low, high, log=False):
        self.drawn[name] = (low, high, log)
        return low

    suggest_int = suggest_float

    def suggest_categorical(self, name, options):
        return options[0]


def test_numbers_close_to_one_are_drawn_by_their_difference_to_it():
    trial = Recorded()
    assert Range(0.9, 0.999, True, complement=True).suggest(trial, "gamma") == pytest.approx(0.999)
    assert trial.drawn == {"1-gamma": (pytest.approx(1e-3), pytest.approx(0.1), True)}
    assert Choices(((1, 2), (3,))).suggest(trial, "layers") == (1, 2)


def test_a_file_may_give_the_ranges(tmp_path):
    file = tmp_path / "ranges.toml"
    file.write_text(
        "[search]\nrate = {low = 1e-5, high = 1, log = true}\nhidden = [8, 16]\n"
        "epochs = {low = 1, high = 4}\ngreedy = [true, false]\n"
    )
    assert tuning.read_space(file, Args) == {
        "rate": Range(1e-5, 1.0, True),
        "hidden": Choices((8, 16)),
        "epochs": Range(1, 4),
        "greedy": Choices((True, False)),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[toy]\nrate = 1", r"no table \[search\]"),
        ("[search]\nrat = [1]", "no argument named 'rat': did you mean rate"),
        ("[search]\nrate = 1", "rate must be a list of values"),
        ("[search]\nrate = {low = 1}", "rate must be a list of values"),
        ("[search]\nrate = {low = 2, high = 1}", "low must be at most high"),
        ("[search]\nrate = {low = -1, high = 1}", "rate must be above 0"),
        ("[search]\nentropy = {low = 0, high = 1, log = true}", "with log above 0"),
        ("[search]\nhidden = ['x']", "hidden cannot be 'x'"),
        ("[search]\ngreedy = {low = false, high = true}", "greedy is not a number"),
    ],
)
def test_mistakes_in_ranges_are_named(tmp_path, text, message):
    file = tmp_path / "ranges.toml"
    file.write_text(text)
    with pytest.raises(OptionError, match=message) as raised:
        tuning.read_space(file, Args)
    assert str(file) in str(raised.value)


SPACE = {"rate": Range(0.01, 3.0, log=True)}


def arguments(**changes):
    small = {"total_steps": 48, "num_envs": 4, "evaluations": 3, "eval_episodes": 16}
    return bandit.Args(**{"env": ENV} | small | changes)


def test_trials_have_other_seeds_than_runs(tmp_path, monkeypatch):
    """The best of many scores is luck in part, which the same seeds would repeat."""
    seeds = []
    monkeypatch.setattr(bandit, "main", lambda args: seeds.append(args.seed))
    with suppress(IndexError):  # nothing was evaluated
        tune(bandit, arguments(seed=3), SPACE, tmp_path / "t.toml", SearchSpace(trials=1, seeds=2))
    assert seeds == [1_000_003]


@pytest.mark.slow
def test_a_search_finds_the_rate_and_writes_settings(tmp_path):
    file = tmp_path / "tuned.toml"
    result = tune(bandit, arguments(), SPACE, file, SearchSpace(trials=8, seeds=2))
    assert len(result.trials) == 8 and result.score == max(
        row["score"] for row in result.trials if row["score"] is not None
    )
    assert all((row["score"] is None) == (row["state"] != "complete") for row in result.trials)
    assert tomllib.loads(file.read_text()) == {"bandit": {"num_envs": 4, **result.best}}
    assert f"# env: {ENV}" in file.read_text()
    args = bandit.Args.for_env(ENV, settings=file)
    assert (args.rate, args.num_envs, args.total_steps) == (result.best["rate"], 4, 300_000)
    rates = [row["rate"] for row in result.trials]
    assert result.best["rate"] > sorted(rates)[len(rates) // 2]  # a higher rate learns faster
    assert tune(bandit, arguments(), SPACE, file, SearchSpace(trials=8, seeds=2)) == result
    with pytest.raises(RunError, match="was started with seeds 2, not 3"):
        tune(bandit, arguments(), SPACE, file, SearchSpace(trials=8, seeds=3))
    with pytest.raises(RunError, match="was started with num_envs 4, not 8: give the same"):
        tune(bandit, arguments(num_envs=8), SPACE, file, SearchSpace(trials=8, seeds=2))


@pytest.mark.parametrize(
    ("name", "changes", "search", "message"),
    [
        ("tuned", {}, {}, r"give one that ends in \.toml"),
        ("tuned.journal", {}, {}, r"give one that ends in \.toml"),
        ("directory.toml", {}, {}, r"give one that ends in \.toml"),
        ("mine.toml", {}, {}, "has no trials beside it to continue"),
        ("t.toml", {"env": "swarm/absent"}, {}, "swarm/absent"),
        ("t.toml", {"env": "swarm/pursuit-2-1:evaders=learned"}, {}, "has 2 teams"),
        ("t.toml", {"init": Path("run")}, {}, "from nothing: leave out init, and give --init"),
        ("t.toml", {"prefill": Path("run")}, {}, "leave out prefill, and give --prefill"),
        ("t.toml", {}, {"track": ("wandb",)}, "searches are tracked by mlflow alone"),
    ],
)
def test_what_no_trial_can_do_is_found_before_the_first(tmp_path, name, changes, search, message):
    (tmp_path / "directory.toml").mkdir()
    (tmp_path / "mine.toml").write_text("of the user")
    with pytest.raises((OptionError, UnknownNameError), match=message):
        tune(bandit, arguments(**changes), SPACE, tmp_path / name, SearchSpace(**search))
    assert {path.name for path in tmp_path.iterdir()} == {"directory.toml", "mine.toml"}
    assert (tmp_path / "mine.toml").read_text() == "of the user"


def test_a_score_for_each_team_is_none_of_the_whole():
    scores = {tracking.RETURN + "_red": np.ones(2), tracking.RETURN + "_blue": np.ones(2)}
    with watch_runs(lambda *_: None), pytest.raises(OptionError, match="one for each team"):
        report(1, scores)


@pytest.mark.slow
def test_the_file_has_what_was_given_or_read_even_if_it_is_a_default(tmp_path):
    """Otherwise the package's file would override the values of the trials."""
    mine = tmp_path / "mine.toml"
    mine.write_text("[bandit]\nnum_steps = 2\nwidth = 8\n")
    sizes = {"total_steps": 16, "num_envs": 4, "evaluations": 1, "eval_episodes": 4}
    args = bandit.Args.for_env(ENV, settings=mine, width=4, updates=1, **sizes)
    file = tmp_path / "t.toml"
    result = tune(bandit, args, SPACE, file, SearchSpace(trials=1, seeds=1))
    fixed = {"num_envs": 4, "num_steps": 2, "width": 4, "updates": 1}
    assert tomllib.loads(file.read_text()) == {"bandit": {**fixed, **result.best}}


@pytest.mark.slow
def test_searches_with_neighbouring_seeds_share_no_proposals(tmp_path):
    args = arguments(total_steps=8, evaluations=1, eval_episodes=1)
    searches = [SearchSpace(trials=3, seeds=1, search_seed=seed, pruner="none") for seed in (0, 1)]
    rates = [
        {row["rate"] for row in tune(bandit, args, SPACE, tmp_path / f"{n}.toml", search).trials}
        for n, search in enumerate(searches)
    ]
    assert rates[0] & rates[1] == {args.rate}  # the default, with which every search begins
    assert len(rates[0] | rates[1]) == 5


@pytest.mark.slow
def test_values_that_do_not_fit_are_failed_trials(tmp_path):
    space = {"width": Choices((13, 14))}
    file = tmp_path / "what? it's 100%.toml"
    result = tune(bandit, arguments(), space, file, SearchSpace(trials=5, seeds=1))
    assert file.with_suffix(".journal").is_file() and not (tmp_path / "what").exists()
    states = {row["width"]: row["state"] for row in result.trials}
    assert states == {4: "complete", 13: "fail", 14: "complete"}
    with pytest.raises(OptionError, match="no trial was completed: 13 is not possible"):
        args = replace(arguments(), width=13)
        tune(bandit, args, {"width": Choices((13,))}, tmp_path / "b.toml", SearchSpace(trials=1))


@pytest.mark.slow
@pytest.mark.parametrize("how", [{}, {"pruner": "hyperband", "sampler": "random"}], ids=str)
def test_a_stopped_search_continues_to_the_same_trials(tmp_path, monkeypatch, how):
    search = SearchSpace(trials=4, seeds=1, **how)
    expected = tune(bandit, arguments(), SPACE, tmp_path / "whole.toml", search)
    calls, learn = [], bandit.main

    def stopping(*args):
        calls.append(1)
        try:
            learn(*args)
        finally:
            if len(calls) == 3:  # the trial has reported its evaluations, and has not ended
                raise KeyboardInterrupt

    monkeypatch.setattr(bandit, "main", stopping)
    again = tmp_path / "again.toml"
    with pytest.raises(Stopped, match="stopped after 2 trials"):
        tune(bandit, arguments(), SPACE, again, search)
    result = tune(bandit, arguments(), SPACE, again, search)
    assert (result.trials, result.best) == (expected.trials, expected.best)


@pytest.mark.slow
def test_a_search_killed_between_any_two_writes_continues_to_the_same_trials(tmp_path):
    file, search = tmp_path / "whole.toml", SearchSpace(trials=3, seeds=1)
    space = {"rate": Range(0.01, 1.0, log=True), "updates": Choices((1, 2, 4))}
    expected = tune(bandit, arguments(), space, file, search)
    lines = file.with_suffix(".journal").read_bytes().splitlines(keepends=True)
    (third,) = (x for x, line in enumerate(lines) if b'"block": 2' in line or b'"block":2' in line)
    for end in range(third, len(lines)):
        again = tmp_path / str(end) / "again.toml"
        again.parent.mkdir()
        again.with_suffix(".journal").write_bytes(b"".join(lines[:end]))
        assert tune(bandit, arguments(), space, again, search).trials == expected.trials


@pytest.mark.nightly
def test_mlflow_has_a_parent_run_and_a_nested_run_for_each_trial(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.chdir(tmp_path)
    uri = f"sqlite:///{tmp_path}/runs.db"
    search = SearchSpace(trials=3, seeds=1, track=(f"mlflow={uri}",))
    result = tune(bandit, arguments(), SPACE, tmp_path / "t.toml", search)
    client = mlflow.MlflowClient(tracking_uri=uri)
    runs = client.search_runs([client.get_experiment_by_name("offmarl").experiment_id])
    (parent,) = (run for run in runs if "mlflow.parentRunId" not in run.data.tags)
    nested = [run for run in runs if run is not parent]
    assert {run.info.run_name for run in nested} == {f"trial {n}" for n in range(3)}
    assert {run.data.tags["mlflow.parentRunId"] for run in nested} == {parent.info.run_id}
    assert all(run.info.status == "FINISHED" and run.data.metrics for run in runs)
    scores = client.get_metric_history(parent.info.run_id, "score")
    assert max(entry.value for entry in scores) == result.score
    paths = {entry.path for entry in client.list_artifacts(parent.info.run_id)}
    assert {"t.toml", "history.svg"} <= paths
    (first,) = (run for run in nested if run.info.run_name == "trial 0")
    directory = client.download_artifacts(first.info.run_id, "", str(tmp_path))
    assert programs.load_policy(directory, program=bandit.__file__).spec.name == ENV


@pytest.mark.slow
def test_baselines_are_tuned_by_their_evaluation(random_data, tmp_path):
    args = two_stage.Args(
        vault=random_data("probe/observation"),
        updates=10,
        eval_every=5,
        eval_episodes=2,
        final_episodes=2,
        batch_size=4,
        length=2,
    )
    space = tuning.choose_ranges(tuning.derive_space(args), ["learning_rate"])
    result = tune(two_stage, args, space, tmp_path / "t.toml", SearchSpace(trials=2, seeds=2))
    assert [row["state"] for row in result.trials] == ["complete"] * 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.journal", "t.toml"]


RANGES = {
    "a number": ("rate", Range(0.01, 1.0, log=True)),
    "close to one": ("rate", Range(0.05, 0.995, log=True, complement=True)),
    "choices by their text": ("width", Choices((None, 4))),
    "outside": ("rate", Range(0.5, 1.0)),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", RANGES)
def test_the_first_trial_is_the_default(tmp_path, kind):
    name, space = RANGES[kind]
    args, file = arguments(total_steps=8, evaluations=1, eval_episodes=1), tmp_path / "t.toml"
    alone = tune(bandit, args, {name: space}, file, SearchSpace(trials=1, seeds=1))
    assert alone.default == 1 and alone.best == {name: getattr(args, name)}
    result = tune(bandit, args, {name: space}, file, SearchSpace(trials=3, seeds=1))
    assert result.default == 1 and result.trials[0] == alone.trials[0]


@pytest.mark.slow
def test_the_default_is_the_best_where_no_trial_beats_it(tmp_path):
    space = {"updates": Range(1, 2)}  # which changes nothing
    result = tune(bandit, arguments(), space, tmp_path / "t.toml", SearchSpace(trials=3, seeds=1))
    assert [row["score"] for row in result.trials] == [result.score] * 3
    assert result.best == {"updates": arguments().updates}


@pytest.mark.parametrize("line", [b'\x00\x00{"', b"{", b"[1]", b'{"op_code": 99}'])
def test_a_damaged_journal_is_named(tmp_path, line):
    file = tmp_path / "t.toml"
    work = TrialsWork(bandit, arguments(), SPACE, file, SearchSpace(trials=2, seeds=1))
    work.check()
    journal = file.with_suffix(".journal")
    first, *rest = journal.read_bytes().splitlines()
    journal.write_bytes(b"\n".join([first, line, *rest, b""]))
    for call in (work.tuned, lambda: tune(bandit, arguments(), SPACE, file, SearchSpace(seeds=1))):
        with pytest.raises(RunError, match=f"the trials in {journal} cannot be used"):
            call()


def test_a_line_that_a_full_disk_cut_is_left_out(tmp_path):
    work = TrialsWork(
        bandit, arguments(), SPACE, tmp_path / "new" / "t.toml", SearchSpace(trials=2)
    )
    assert work.missing() == [0, 1] and not work.is_complete()  # before there is a directory
    work.check()
    journal = tmp_path / "new" / "t.journal"
    whole = journal.read_bytes()
    journal.write_bytes(whole + b'{"op_')
    assert work.missing() == [0, 1] and journal.read_bytes().startswith(whole)
    assert journal.read_bytes().endswith(b"\n")
    journal.write_bytes(whole[:5])
    assert work.missing() == [0, 1] and journal.read_bytes() != whole[:5]
    journal.write_bytes(b"notes of the user")
    with pytest.raises(RunError, match="cannot be used"):
        work.missing()
    assert journal.read_bytes().startswith(b"notes of the user")


KILLED = """
import os, signal, sys
from pathlib import Path
from offmarl.programs import tuning
from tests.programs import test_tuning as here, bandit
learn, calls = bandit.main, []
def dying(*given):
    calls.append(1)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    learn(*given)
bandit.main = dying
tuning.tune(bandit, here.arguments(), here.SPACE, sys.argv[1], here.SearchSpace(trials=3, seeds=1))
"""


@pytest.mark.nightly
def test_a_killed_search_loses_the_running_trial_only(tmp_path):
    file = tmp_path / "t.toml"
    process = subprocess.run([sys.executable, "-c", KILLED, str(file)], check=False)
    assert process.returncode == -signal.SIGKILL
    result = tune(bandit, arguments(), SPACE, file, SearchSpace(trials=3, seeds=1))
    expected = tune(bandit, arguments(), SPACE, tmp_path / "w.toml", SearchSpace(trials=3, seeds=1))
    assert result.trials == expected.trials


@pytest.mark.slow
def test_tasks_add_trials_to_one_search(tmp_path):
    args = arguments(total_steps=8, evaluations=1, eval_episodes=1)
    file = tmp_path / "tuned.toml"
    tune(bandit, args, SPACE, file, SearchSpace(trials=1, seeds=1))

    def work(trials):
        return TrialsWork(bandit, args, SPACE, file, SearchSpace(trials=trials, seeds=1))

    assert run_share(work(5), Share(1, 2)) == 2  # of 1 and 3; trial 0 is from before
    assert work(5).missing() == [2, 4]
    assert run_share(work(5), Share(0, 2)) == 2
    assert work(5).is_complete() and not join_work(work(5))
    file.unlink()
    assert join_work(work(5))
    result = work(5).tuned()
    assert result.default == 1
    assert len({row["rate"] for row in result.trials}) == len(result.trials) == 5
    assert tomllib.loads(file.read_text())["bandit"]["rate"] == result.best["rate"]
    assert run_share(work(6), Share(0, 1)) == 1
    with pytest.raises(RunError, match="was started with seeds 1, not 2"):
        TrialsWork(bandit, args, SPACE, file, SearchSpace(trials=6, seeds=2)).check()


@pytest.mark.parametrize(
    "field", ["vault_digest", "environment_source.sha256", "offmarl", "sha256", "weight_source"]
)
def test_a_search_is_continued_with_what_its_scores_were_made_from(
    field, tmp_path, random_data, monkeypatch
):
    file, search = tmp_path / "tuned.toml", SearchSpace(trials=1, seeds=1)
    source, data, module = tmp_path / "chase.py", tmp_path / "data.vlt", bandit
    source.write_text(
        "import offmarl\n\n\ndef chase():\n    return offmarl.envs.make('probe/one-step')\n"
    )
    space, args = SPACE, replace(arguments(), env=f"{source}:chase")
    if field in ("vault_digest", "sha256", "weight_source"):
        shutil.copy(two_stage.__file__, tmp_path / "mine.py")
        shutil.copytree(random_data("probe/observation").parent, data)
        module = registry.load("baseline", str(tmp_path / "mine.py"))
        args = module.Args(vault=data / "random", env="none", updates=17, batch_size=4, length=2)
        space = {"learning_rate": SPACE["rate"]}
    if field == "weight_source":
        code = "import numpy as np\n\n\ndef weigh(data):\n    return np.ones(data.num_steps)\n"
        (tmp_path / "weights.py").write_text(code)
        args = replace(args, weight=f"{tmp_path / 'weights.py'}:weigh")
    tune(module, args, space, file, search)
    if field == "vault_digest":
        shutil.rmtree(data)
        shutil.copytree(random_data("probe/two-step").parent, data)
    elif field == "offmarl":
        monkeypatch.setattr("offmarl.programs.runs.identity.__version__", "9.9")
    elif field == "weight_source":
        (tmp_path / "weights.py").write_text(code + "# changed\n")
    elif field == "sha256":
        with (tmp_path / "mine.py").open("a") as text:
            text.write("# changed\n")
        module = registry.load("baseline", str(tmp_path / "mine.py"))
        args = module.Args(**vars(args))
    else:
        source.write_text(source.read_text() + "# changed\n")
    more = module, args, space, file, replace(search, trials=2)
    for go_on in (lambda: tune(*more), lambda: run_share(TrialsWork(*more), Share(0, 1))):
        with pytest.raises(RunError, match=f"was started with {field} '"):
            go_on()
