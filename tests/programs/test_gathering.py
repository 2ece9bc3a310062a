"""Seeds that tasks train become one run, as if one process had trained them."""

import shutil
from dataclasses import replace

import chex
import pytest

from offmarl import envs, tracking
from offmarl.checkpoint import Checkpoints
from offmarl.errors import RunError
from offmarl.launch import Share, join_work, run_share
from offmarl.networks import PolicyConfig, make_policy
from offmarl.programs import load_policy, record_policy, registry
from offmarl.programs.runs.gathering import SeedsWork
from tests.runs import scores_of

BC = registry.load("baseline", "bc")


@pytest.fixture
def args(random_data, tmp_path):
    def make(out, **options):
        defaults = {"updates": 6, "eval_every": 3, "length": 2, "batch_size": 4, "hidden": 8}
        defaults |= {"eval_episodes": 2, "final_episodes": 2, "seeds": 3, "seed": 4}
        data = random_data("probe/observation")
        return BC.Args(vault=data, out=tmp_path / out, **defaults | options)

    return make


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{}, {"keep": "all"}, {"keep": "best"}])
def test_a_run_of_tasks_is_that_of_one_process(args, options, tmp_path):
    single = BC.main(args("one", batching="map", **options))
    work = SeedsWork(BC.main, args("tasks", **options), tmp_path / "tasks")
    for index in (1, 0):
        run_share(work, Share(index, 2))
    assert join_work(work) and not join_work(work)
    records = [tracking.read_run(run) for run in (single, work.path)]
    for record in records:
        record.pop("hardware")
    assert records[0] == records[1]
    rows = [tracking.read(run / tracking.METRICS_FILE) for run in (single, work.path)]
    timeless = [[{k: x for k, x in r.items() if k not in tracking.TIMES} for r in y] for y in rows]
    assert timeless[0] == timeless[1]
    assert scores_of(single) == scores_of(work.path)
    steps = [Checkpoints(run / tracking.CHECKPOINTS).steps() for run in (single, work.path)]
    assert steps[0][-1] == steps[1][-1] == 6 and {*steps[1]} <= {*steps[0]}
    for seed in (4, 5, 6):
        for step in (None, "best") if "keep" in options else (None,):
            params = [load_policy(run, seed, step=step).params for run in (single, work.path)]
            chex.assert_trees_all_equal(*params)
    assert BC.main(args("tasks", **options)) == work.path  # complete


@pytest.mark.slow
def test_seeds_of_other_data_are_not_joined(args, random_data, tmp_path):
    data, first = tmp_path / "data.vlt", random_data("probe/observation").parent
    second = tmp_path / "second.vlt" / "random"
    env = envs.make("probe/observation")
    policy = make_policy(PolicyConfig("random"), env.spec)
    record_policy(env, policy, (), second, steps=512, num_envs=16)
    data.symlink_to(first)
    unplayed = args("run", seeds=2, env="none", held_out=0.0)
    work = SeedsWork(BC.main, replace(unplayed, vault=data), tmp_path / "run")
    run_share(work, Share(0, 2))
    data.unlink()
    data.symlink_to(second.parent)
    run_share(work, Share(1, 2))
    with pytest.raises(RunError, match="seed-4 was trained with vault_digest"):
        join_work(work)
    shutil.rmtree(work.directory / "blocks" / "seed-4")  # as the message says
    run_share(work, Share(0, 2))
    checkpoints = work.directory / "blocks" / "seed-5" / tracking.CHECKPOINTS
    moved = checkpoints.rename(tmp_path / "moved")
    with pytest.raises(RunError, match=r"the run in .*seed-5 is not finished: run its task again"):
        join_work(work)
    moved.rename(checkpoints)
    assert join_work(work)


@pytest.mark.slow
def test_other_arguments_are_refused(args, tmp_path):
    SeedsWork(BC.main, args("run"), tmp_path / "run").check()
    with pytest.raises(RunError, match="started with arguments"):
        SeedsWork(BC.main, args("run", hidden=16), tmp_path / "run").check()
