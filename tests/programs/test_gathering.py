"""Seeds that tasks train become one run, as if one process had trained them."""

import jax
import numpy as np
import pytest

from offmarl import tracking
from offmarl.checkpoint import Checkpoints
from offmarl.errors import RunError
from offmarl.launch import Share, join_work, run_share
from offmarl.programs import load_policy, registry
from offmarl.programs.gathering import SeedsWork

BC = registry.load("baseline", "bc")


@pytest.fixture
def args(random_data, tmp_path):
    def make(out, **options):
        given = {"updates": 6, "evaluate_every": 3, "length": 2, "batch_size": 4, "hidden": 8}
        given |= {"evaluate_episodes": 2, "final_episodes": 2, "seeds": 3, "seed": 4}
        data = random_data("probe/observation")
        return BC.Args(vault=data, out=tmp_path / out, **given | options)

    return make


@pytest.mark.nightly
@pytest.mark.parametrize("options", [{}, {"keep": "all"}])
def test_a_run_of_tasks_is_that_of_one_process(args, options, tmp_path):
    one = BC.main(args("one", batching="map", **options))
    work = SeedsWork(BC.main, args("tasks", **options), tmp_path / "tasks")
    for index in (1, 0):
        run_share(work, Share(index, 2))
    assert join_work(work) and not join_work(work)
    records = [tracking.read_run(run) for run in (one, work.path)]
    for record in records:
        record.pop("hardware")
    assert records[0] == records[1]
    rows = [tracking.read(run / tracking.METRICS_FILE) for run in (one, work.path)]
    timeless = [[{k: x for k, x in r.items() if k not in tracking.TIMES} for r in y] for y in rows]
    assert timeless[0] == timeless[1]
    name = tracking.MARL_EVAL_FILE
    assert (one / name).read_text() == (work.path / name).read_text()
    steps = [Checkpoints(run / tracking.CHECKPOINTS).steps() for run in (one, work.path)]
    assert steps[0][-1] == steps[1][-1] == 6 and {*steps[1]} <= {*steps[0]}
    for seed in (4, 6):
        params = [load_policy(run, seed).params for run in (one, work.path)]
        jax.tree.map(np.testing.assert_array_equal, *params)
    assert BC.main(args("tasks", **options)) == work.path  # complete


@pytest.mark.slow
def test_other_arguments_are_refused(args, tmp_path):
    SeedsWork(BC.main, args("run"), tmp_path / "run").check()
    with pytest.raises(RunError, match="started with arguments"):
        SeedsWork(BC.main, args("run", hidden=16), tmp_path / "run").check()
