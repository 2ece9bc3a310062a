"""Which checkpoints a run keeps, when its seeds stop early, and what other runs start from."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import offmarl
from baselines import bc, maicq
from offmarl import tracking
from offmarl.checkpoint import Checkpoints
from offmarl.errors import OptionError, RunError
from offmarl.programs.runs.continuing import carry_over, learned
from offmarl.programs.runs.evaluate import Evaluator
from offmarl.programs.runs.stopping import Stopping, best_step
from tests.programs.test_continuing import built, same
from tests.runs import metrics_of

ENV = "probe/two-step"
PATIENT = {"stop_on": "return", "patience": 2}


def arguments(data: Path, out: Path, **changes: Any) -> bc.Args:
    options: dict[str, Any] = {"updates": 12, "eval_every": 3, "schedule": "constant"}
    sizes = {"eval_episodes": 4, "final_episodes": 8, "batch_size": 4, "length": 2, "hidden": 4}
    return bc.Args(vault=data, out=out, seeds=2, **options | sizes | changes)


def steps(run: Path) -> list[int]:
    return Checkpoints(run / tracking.CHECKPOINTS).steps()


def policy(run: Path, seed: int = 0, step: Any = None) -> Any:
    return offmarl.load_policy(run, seed, step=step).params


# ---------------------------------------------------------------------------------- stopping


def stopping(seeds: int, start: int = 0) -> Stopping:
    args = bc.Args(vault="x", seeds=seeds, **PATIENT)
    return Stopping(args, Evaluator(None, object(), None, None, 32, 320, 20), start)


RETURNS = [[1.0, 1.0], [2.0, 0.5], [2.0, 0.9], [1.5, 5.0], [9.0, 5.0], [0.0, 5.0]]


def returns(step: int) -> dict[str, np.ndarray]:
    """Two episodes of each seed, whose mean is that of `RETURNS`."""
    return {tracking.RETURN: np.array(RETURNS[step])[:, None] + np.array([-1.0, 1.0])}


def test_a_seed_stops_after_two_evaluations_without_a_better_one():
    found = stopping(2)
    for step in range(4):
        assert len(found.steps) < 2
        found.observe(10 * step + 10, returns(step), jnp.array([step, -step]))
    # The first equals its best at 30 and is below it at 40; the second stopped before its rise.
    assert found.steps == {0: 40, 1: 30}
    np.testing.assert_array_equal(found.apply(jnp.array([7, 7, 7])), [3, -2, 7])


def test_evaluations_before_the_last_stage_do_not_count():
    found = stopping(1, start=30)
    for step in (10, 20, 30):  # the values are not learned yet
        found.observe(step, {tracking.RETURN: np.ones((1, 2))}, jnp.zeros(1))
    for step in (40, 50):
        found.observe(step, {tracking.RETURN: np.zeros((1, 2))}, jnp.zeros(1))
        assert not found.steps
    found.observe(60, {tracking.RETURN: np.zeros((1, 2))}, jnp.zeros(1))
    assert found.steps == {0: 60}


def test_a_resumed_run_knows_which_seeds_have_stopped():
    before, found = stopping(2), stopping(2)
    for step in range(3):
        before.observe(10 * step + 10, returns(step), jnp.array([step, -step]))
    found.resume(json.loads(json.dumps(before.info)), before.apply(jnp.array([5, 5])))
    assert found.steps == {1: 30}
    found.observe(40, returns(3), jnp.array([6, 6]))
    assert found.steps == {0: 40, 1: 30}
    np.testing.assert_array_equal(found.apply(jnp.array([7, 7])), [6, -2])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"patience": 3}, "--patience needs --stop-on"),
        ({"stop_on": "agreement"}, "--stop-on agreement needs held-out episodes"),
        ({"stop_on": "return", "env": "none"}, "--stop-on return needs an environment"),
    ],
)
def test_what_cannot_be_stopped_on_is_refused(random_data, tmp_path, options, message):
    with pytest.raises(OptionError, match=message):
        bc.main(arguments(random_data(ENV), tmp_path / "run", **options))


@pytest.fixture(scope="module")
def early(random_data, tmp_path_factory):
    """A run whose policy does not change, so that no evaluation is better than the first."""
    out = tmp_path_factory.mktemp("early") / "run"
    args = arguments(random_data(ENV), out, updates=30, learning_rate=1e-9, held_out=0.2)
    args = replace(args, stop_on="agreement", patience=2, keep="all")
    return args, bc.main(args)


@pytest.mark.slow
def test_a_run_that_is_killed_after_all_seeds_have_stopped_is_only_finished(early, tmp_path):
    args, run = early
    again = tmp_path / "again"
    shutil.copytree(run, again)
    record = json.loads((again / tracking.RUN_FILE).read_text())
    del record["stopped"]
    (again / tracking.RUN_FILE).write_text(json.dumps(record | {"complete": False}))
    bc.main(replace(args, out=again))
    assert metrics_of(again) == metrics_of(run)
    assert tracking.read_run(again)["stopped"] == tracking.read_run(run)["stopped"]


@pytest.mark.slow
def test_a_run_ends_when_all_seeds_have_stopped(early):
    args, run = early
    record, rows = tracking.read_run(run), tracking.read(run / tracking.METRICS_FILE)
    assert record["complete"] and record["stopped"] == {"0": 9, "1": 9}
    episodes = [len(row[tracking.RETURN]) for row in rows if tracking.RETURN in row]
    assert episodes == [4] * 6 + [8] * 2  # the last evaluation is the result's
    assert steps(run) == [3, 6, 9]
    before = metrics_of(run)
    bc.main(args)
    assert metrics_of(run) == before


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
    args, every = kept
    run = bc.main(replace(args, out=tmp_path / "best", keep="best"))
    best = {best_step(run, seed) for seed in (0, 1)}
    assert best | {12} <= {*steps(run)} and len({*steps(run)} - best - {12}) <= 1
    for seed in (0, 1):
        same(policy(run, seed, step="best"), policy(every, seed, step=best_step(run, seed)))


def test_the_best_step_is_that_of_the_highest_mean_after_the_start(tmp_path):
    path = tmp_path / tracking.METRICS_FILE
    for step, values in ((0, [9.0]), (5, [1.0, 2.0]), (10, [3.0, 0.0]), (15, [1.5])):
        tracking.append(path, {"seed": 0, "step": step, tracking.RETURN: values})
    tracking.append(path, {"seed": 1, "step": 5, tracking.AGREEMENT: [0.1]})
    tracking.append(path, {"seed": 1, "step": 10, tracking.AGREEMENT: [0.2]})
    assert (best_step(tmp_path, 0), best_step(tmp_path, 1)) == (5, 10)
    with pytest.raises(RunError, match="no evaluation of seed 2"):
        best_step(tmp_path, 2)


# ---------------------------------------------------------------------------------- starting


@pytest.mark.slow
def test_a_baseline_starts_from_a_run_and_goes_on_where_it_ended(kept, tmp_path):
    args, run = kept
    again = replace(args, out=tmp_path / "again", init=run, learning_rate=1e-12, updates=3)
    bc.main(again)
    record = tracking.read_run(tmp_path / "again")
    assert record["init"]["run"] == "all" and record["init"]["program"] == "bc"
    for seed in (0, 1):
        found = policy(tmp_path / "again", seed)
        chex.assert_trees_all_close(found, policy(run, seed), atol=1e-9)


def numbered(program, **options):
    """Return a program and a state of which every learned leaf has values of its own."""
    made, state = built(program, **options)
    numbers = iter(range(1, 1000))
    parts = jax.tree.map(lambda leaf: jnp.full_like(leaf, next(numbers)), learned(state))
    return made, state._replace(**parts)


@pytest.mark.slow
def test_the_same_program_continues_with_everything_but_its_count():
    (source, run), (program, fresh) = numbered(maicq), built(maicq)
    run = run._replace(updates=jnp.int32(77))
    state = carry_over(source, run, program, fresh, "run")
    same(state._replace(updates=run.updates), run)
    assert state.updates == 0


@pytest.mark.slow
def test_the_actor_of_another_program_continues_from_a_clone():
    (source, run), (program, fresh) = numbered(bc), built(maicq)
    state = carry_over(source, run, program, fresh, "run")
    same(state.actor, run.params)
    same(state.critic, fresh.critic)


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
    stored = [np.load(run / "dataset.npz")["observation_moments"] for run in (first, second)]
    np.testing.assert_array_equal(*stored)
