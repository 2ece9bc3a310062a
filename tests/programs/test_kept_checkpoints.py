"""Which checkpoints a run keeps, and what other runs start from."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest

import offmarl
from baselines import bc
from offmarl import tracking
from offmarl.checkpoint import Checkpoints
from offmarl.errors import OptionError, RunError
from offmarl.programs.runs.trained import TrainedRun
from tests.programs.test_continuing import built, same

ENV = "probe/two-step"


def arguments(data: Path, out: Path, **changes: Any) -> bc.Args:
    options: dict[str, Any] = {"updates": 12, "eval_every": 3, "schedule": "constant"}
    sizes = {"eval_episodes": 4, "final_episodes": 8, "batch_size": 4, "length": 2, "hidden": 4}
    return bc.Args(vault=data, out=out, seeds=2, **options | sizes | changes)


def steps(run: Path) -> list[int]:
    return Checkpoints(run / tracking.CHECKPOINTS).steps()


def policy(run: Path, seed: int = 0, step: Any = None) -> Any:
    return offmarl.load_policy(run, seed, step=step).params


# ---------------------------------------------------------------------------------- checkpoints


@pytest.fixture(scope="module")
def kept(random_data, tmp_path_factory):
    out = tmp_path_factory.mktemp("kept")
    args = arguments(random_data(ENV), out / "all", learning_rate=0.1, checkpoint_seconds=0.0)
    return args, bc.main(replace(args, keep="all"))


@pytest.mark.slow
def test_a_checkpoint_of_each_evaluation_is_the_policy_of_a_shorter_run(kept, tmp_path):
    args, run = kept
    assert {3, 6, 9, 12} <= {*steps(run)} and len(steps(run)) <= 5  # and one before the last
    short = bc.main(replace(args, out=tmp_path / "short", updates=6))
    for seed in (0, 1):
        same(policy(run, seed, step=6), policy(short, seed))
    assert (jax.tree.leaves(policy(run))[0] != jax.tree.leaves(policy(run, step=6))[0]).any()
    same(policy(run, step="last"), policy(run, step=12))
    for text in ("6", "first"):
        with pytest.raises(OptionError, match=f"step is '{text}': give the number"):
            policy(run, step=text)
    with pytest.raises(RunError, match=r"no checkpoint of step 5, but of \[3, 6"):
        policy(run, step=5)


@pytest.mark.slow
def test_the_best_checkpoint_of_each_seed_is_kept(kept, tmp_path):
    args, full = kept
    run = bc.main(replace(args, out=tmp_path / "best", keep="best"))
    best = [TrainedRun.open(run).best_step(seed) for seed in (0, 1)]
    assert {*best, 12} <= {*steps(run)} and len({*steps(run)} - {*best, 12}) <= 1
    for seed in (0, 1):
        same(policy(run, seed, step="best"), policy(full, seed, step=best[seed]))


def test_the_best_step_is_that_of_the_highest_mean_after_the_start(tmp_path):
    path = tmp_path / tracking.METRICS_FILE
    for step, values in ((0, [9.0]), (5, [1.0, 2.0]), (10, [3.0, 0.0]), (15, [1.5, 1.5])):
        tracking.append(path, {"seed": 0, "step": step, tracking.RETURN: values})
    tracking.append(path, {"seed": 1, "step": 5, tracking.AGREEMENT: [0.1]})
    tracking.append(path, {"seed": 1, "step": 10, tracking.AGREEMENT: [0.2]})
    run = TrainedRun(tmp_path, {}, built)
    assert (run.best_step(0), run.best_step(1)) == (5, 10)
    with pytest.raises(RunError, match="no evaluation of seed 2"):
        run.best_step(2)


# ---------------------------------------------------------------------------------- starting


@pytest.mark.slow
def test_a_baseline_starts_from_a_run_and_goes_on_where_it_ended(kept, tmp_path):
    args, run = kept
    again = replace(args, out=tmp_path / "again", init=run, learning_rate=1e-12, updates=3)
    bc.main(again)
    record = tracking.read_run(tmp_path / "again")
    assert record["init"]["run"] == "all" and record["init"]["program"] == "bc"
    for seed in (0, 1):
        params = policy(tmp_path / "again", seed)
        chex.assert_trees_all_close(params, policy(run, seed), atol=1e-9)


@pytest.mark.slow
def test_a_run_that_normalises_otherwise_is_refused(kept, tmp_path):
    args, run = kept
    with pytest.raises(OptionError, match=r"normalised nothing, and .* normalised observation"):
        bc.main(replace(args, out=tmp_path / "new", init=run, normalise=("observation",)))


@pytest.mark.slow
def test_the_statistics_of_the_first_run_stay_those_of_its_networks(
    random_data, kept, tmp_path, monkeypatch
):
    args, _ = kept
    first = bc.main(replace(args, out=tmp_path / "one", normalise=("observation",), updates=3))
    data = offmarl.open(args.vault)
    other = offmarl.vault.filter(data.path, "index < 9", tmp_path / "other.vlt")
    new = replace(args, vault=other.path, out=tmp_path / "two", normalise=("observation",))
    second = bc.main(replace(new, updates=3, init=first))
    moments = [np.load(run / "dataset.npz")["observation_moments"] for run in (first, second)]
    np.testing.assert_array_equal(*moments)
