"""The program contract: stages, hyperparameters, seeds, policies, files of users."""

import dataclasses
import hashlib
import json
import os
import shutil
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import offmarl
from offmarl import envs, programs, tracking
from offmarl._lock import hold_lock
from offmarl.checkpoint import Checkpoints
from offmarl.errors import OptionError, RunError, UnknownNameError
from offmarl.programs import offline, registry
from offmarl.programs.program import OnlineArgs, Program, Stage, shaping_values, structure
from offmarl.programs.runs import loop
from offmarl.programs.runs.compiling import (
    compile_ahead,
    keep_compiled_programs,
    use_cores,
)
from offmarl.programs.runs.continuing import start_of_baseline
from offmarl.programs.runs.loop import Schedule, online_schedule, stage_starts
from offmarl.programs.runs.run import LOCK
from offmarl.programs.runs.sharding import SeedLayout, map_seeds
from offmarl.replay import Windows
from tests.children import python
from tests.programs import two_stage
from tests.runs import metrics_of, scores_of

ENV = "probe/observation"
SOURCE = Path(two_stage.__file__)


def arguments(data, out, module=two_stage, **changes):
    options = {
        "updates": 17,
        "eval_every": 5,
        "eval_episodes": 4,
        "final_episodes": 8,
        "batch_size": 4,
        "length": 2,
        "seeds": 2,
    }
    return module.Args(vault=data, out=out, **options | changes)


@pytest.fixture(scope="module")
def trained(random_data, tmp_path_factory):
    return two_stage.main(arguments(random_data(ENV), tmp_path_factory.mktemp("run") / "toy"))


def stopped(args, monkeypatch, updates=6):
    """Stop a run after some updates; of six, the last checkpoint follows an evaluation."""
    count, update = [0], loop._update

    def stopping(*inputs):
        count[0] += 1
        if count[0] > updates:
            raise KeyboardInterrupt
        return update(*inputs)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "_update", stopping)
        patch.setattr(loop, "SECONDS_AT_ONCE", 0.0)  # one update a call
        two_stage.main(args)
    return args.out


def weights(run, seed=0):
    return offmarl.load_policy(run, seed).params


@pytest.mark.slow
def test_windows_are_what_arguments_and_program_ask_for(random_data, tmp_path, monkeypatch):
    requests = []

    def refuse(source, kind, windows, *rest):
        requests.append(windows)
        raise OptionError("enough")

    monkeypatch.setattr(offline, "open_batches", refuse)
    monkeypatch.setattr(programs, "Program", partial(Program, return_to_go=0.5))
    with pytest.raises(OptionError, match="enough"):
        two_stage.main(arguments(random_data(ENV), tmp_path / "run", burn_in=3))
    assert requests == [Windows(4, 2, burn_in=3, return_to_go=0.5)]


# ---------------------------------------------------------------------------------- stages


def test_stages_follow_one_another_and_lines_end_with_them(trained):
    rows = tracking.read(trained / tracking.METRICS_FILE)
    lines = [(row["step"], row["stage"]) for row in rows if "stage" in row and row["seed"] == 0]
    assert lines == [(1, 0), (5, 0), (7, 0), (10, 1), (15, 1), (17, 1)]
    evaluated = [row["step"] for row in rows if tracking.RETURN in row and row["seed"] == 0]
    assert evaluated == [0, 5, 10, 15, 17]
    tree, _ = Checkpoints(trained / "checkpoints").restore(
        {
            "state": jax.eval_shape(
                lambda: two_stage.State(
                    jnp.zeros((2, 4, 2)), jnp.zeros((2, 4, 2)), jnp.zeros((2, 2), jnp.int32)
                )
            )
        }
    )
    state = tree["state"]
    assert state.updates.tolist() == [[7, 10]] * 2
    assert (state.anchor != state.weights).any()


@pytest.mark.parametrize("calls", [2, 8, 12])
def test_stopped_in_any_stage_it_goes_on_to_the_same_bits(
    trained, random_data, tmp_path, monkeypatch, calls
):
    args = arguments(random_data(ENV), tmp_path / "toy", checkpoint_seconds=0.0)
    stopped(args, monkeypatch, calls)
    assert Checkpoints(args.out / "checkpoints").latest() == calls
    two_stage.main(args)
    assert metrics_of(args.out) == metrics_of(trained)
    assert scores_of(args.out) == scores_of(trained)
    np.testing.assert_array_equal(weights(args.out, 1), weights(trained, 1))


@pytest.mark.parametrize(
    ("lengths", "starts"),
    [
        *(((None,), (0,)), ((4, None), (0, 4)), ((None, 2, 3), (0, 4, 6)), ((4, 5), (0, 4))),
        *((lengths, None) for lengths in ((9, None), (None, None), (3, 3), (5, 5))),
    ],
)
def test_where_stages_start_if_they_add_up(lengths, starts):
    stages = tuple(Stage(lambda *_: None, length) for length in lengths)
    with pytest.raises(OptionError, match="--updates 9") if starts is None else nullcontext():
        assert stage_starts(stages, 9, "--updates 9") == starts


def test_a_recorder_whose_stages_do_not_add_up_is_refused():
    stages = Stage(lambda *_: None, 9), Stage(lambda *_: None)
    program = Program(lambda *_: None, stages, lambda _: None, lambda state: state, num_steps=2)
    args = OnlineArgs(total_steps=40, num_envs=4, evaluations=2)
    with pytest.raises(OptionError, match="--total-steps 40 is 5 updates, and the program has 9"):
        online_schedule(program, args)
    schedule = online_schedule(program, dataclasses.replace(args, total_steps=160))
    assert schedule == Schedule(20, 10, 1, (0, 9))


def test_a_prime_interval_is_logged_in_blocks_and_a_remainder():
    schedule = Schedule(updates=2_500, eval_every=1_009, log_every=500, starts=(0, 600))
    lines, done = [], 0
    while done < schedule.updates:
        done = schedule.next_log(done)
        lines.append(done)
    assert lines == [1, 500, 600, 1000, 1009, 1509, 2009, 2018, 2500]
    assert [step for step in lines if schedule.is_evaluation(step)] == [1009, 2018, 2500]
    # From anywhere within a block its end is the same.
    assert [schedule.next_log(step) for step in (501, 601, 1008, 2018)] == [600, 1000, 1009, 2500]


# ---------------------------------------------------------------------------------- numbers


def test_another_hyperparameter_compiles_nothing_anew(trained, random_data, tmp_path):
    traced = len(two_stage.TRACED)
    assert traced > 0
    args = arguments(random_data(ENV), tmp_path / "other", learning_rate=0.2)
    other = two_stage.main(args)
    assert len(two_stage.TRACED) == traced
    assert not np.allclose(weights(other), weights(trained))


def test_a_hyperparameter_is_an_array_of_its_name():
    hyper = programs.hyperparameters(two_stage.Args(vault=Path("x"), learning_rate=0.5))
    assert hyper.learning_rate == 0.5
    with pytest.raises(AttributeError, match=r"no hyperparameter 'gamma': .*learning_rate"):
        _ = hyper.gamma


@pytest.mark.parametrize(
    ("use", "what"),
    [
        (lambda rate: rate * 2, "mul"),
        (lambda rate: 2 - rate, "rsub"),
        (lambda rate: rate == 0, "eq"),
        (lambda rate: rate in {0.0, 1.0}, "hash"),
        (lambda rate: f"{rate}", "format"),
        (str, "str"),
    ],
)
def test_make_must_not_use_what_does_not_shape_the_program(use, what):
    args = structure(two_stage.Args(vault=Path("x"), learning_rate=0.5))
    assert args.pretrain == 7
    with pytest.raises(TypeError, match=rf"make uses args.learning_rate \({what}\), .* `hyper."):
        use(args.learning_rate)
    with pytest.raises(TypeError, match=rf"args.seed \({what}\), which is for the loop only"):
        use(args.seed)
    assert "learning_rate=<learning_rate: a hyperparameter" in repr(args)


def test_the_values_that_shape_a_program_are_those_that_make_may_use():
    args = two_stage.Args(vault=Path("x"), learning_rate=0.5, pretrain=3, batch_size=4, updates=9)
    shared = {
        "batch_size": 4,
        "updates": 9,
        "length": 20,
        "burn_in": 0,
        "normalise": (),
        "blind": False,
    }
    assert dict(shaping_values(args)) == {"pretrain": 3, **shared}


# ---------------------------------------------------------------------------------- seeds


@pytest.mark.slow
def test_how_seeds_are_computed_is_kept_with_the_run(trained, random_data, tmp_path):
    assert tracking.read_run(trained)["seeds_at_once"] == 1  # on a CPU
    args = arguments(random_data(ENV), tmp_path / "toy", batching="vmap")
    run = two_stage.main(args)
    assert tracking.read_run(run)["seeds_at_once"] == 2
    np.testing.assert_allclose(weights(run, 1), weights(trained, 1), atol=1e-5)
    assert two_stage.main(dataclasses.replace(args, batching="map")) == run


def test_the_parameters_of_a_policy_are_a_function_of_one_seed(random_data, tmp_path):
    def make(spec, args, dataset):
        def policy_params(state):
            return state.weights / state.updates.sum()

        return two_stage.make(spec, args, dataset)._replace(policy_params=policy_params)

    run = programs.train(make, arguments(random_data(ENV), tmp_path / "toy", seeds=3))
    shape = jax.ShapeDtypeStruct((3, 4, 2), jnp.float32)
    state = two_stage.State(shape, shape, jax.ShapeDtypeStruct((3, 2), jnp.int32))
    tree, _ = Checkpoints(run / "checkpoints").restore({"state": state, "policy": shape})
    np.testing.assert_array_equal(tree["policy"], tree["state"].weights / 17)


@pytest.mark.parametrize("at_once", [1, 2, 3, 5])
def test_every_layout_maps_all_seeds(at_once):
    result = jax.jit(
        lambda x: map_seeds(SeedLayout(at_once), lambda x, shared: x * shared, (x,), 2.0)
    )(jnp.arange(5.0))
    np.testing.assert_array_equal(result, 2 * np.arange(5.0))


SPREAD = """
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
import jax
from tests.programs.test_program import arguments, two_stage
assert len(jax.devices()) == 2
from offmarl.programs.runs.sharding import layout_of
assert layout_of(3, "auto") == (1, 2, 1)
for replay in ("device", "stream"):
    out = Path(sys.argv[2]) / replay
    two_stage.main(arguments(Path(sys.argv[1]), out, replay=replay, seeds=3))
"""


@pytest.mark.nightly
def test_seeds_are_spread_over_devices_with_the_same_bits(trained, random_data, tmp_path):
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "2"}
    python("-c", SPREAD, random_data(ENV), tmp_path, env=environment)
    third = two_stage.main(arguments(random_data(ENV), tmp_path / "third", seeds=1, seed=2))
    alone = {0: trained, 1: trained, 2: third}
    for replay in ("device", "stream"):
        for seed, run in alone.items():
            np.testing.assert_array_equal(weights(tmp_path / replay, seed), weights(run, seed))
            assert metrics(tmp_path / replay, seed) == metrics(run, seed)


def metrics(run, seed):
    return [row for row in metrics_of(run) if row["seed"] == seed]


@pytest.mark.parametrize(
    ("seeds", "batching", "flags", "chosen", "wanted"),
    [
        (3, "auto", "", -1, 3),
        (10, "map", "", -1, 4),
        (10, "vmap", "", -1, None),
        (10, "auto", "--xla_force_host_platform_device_count=2", -1, None),
        (10, "auto", "", 2, None),
    ],
)
def test_the_cpu_is_split_into_a_device_for_each_seed(
    seeds, batching, flags, chosen, wanted, monkeypatch
):
    updates = {}
    monkeypatch.setenv("XLA_FLAGS", flags)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(
        jax, "config", SimpleNamespace(jax_num_cpu_devices=chosen, update=updates.setdefault)
    )
    use_cores(seeds, batching)
    assert updates == ({} if wanted is None else {"jax_num_cpu_devices": wanted})


# ---------------------------------------------------------------------------------- policies


def test_a_policy_is_loaded_without_its_dataset(trained, random_data):
    statistics = programs.DatasetStatistics(offmarl.open(random_data(ENV)))
    moments = statistics.observation_moments()
    observations = offmarl.open(random_data(ENV)).transitions().view.observation.reshape(-1, 3)
    np.testing.assert_allclose(moments.mean, observations.mean(0), atol=1e-6)
    table = offmarl.open(random_data(ENV)).episodes
    best = table.returns[table.episode_returns.argmax()]
    np.testing.assert_array_equal(statistics.best_returns(), best)
    np.testing.assert_allclose(moments.std, np.float64(observations).std(0).clip(1e-3), rtol=1e-5)
    with np.load(trained / "dataset.npz") as arrays:
        assert set(arrays) == {"observation_moments", "best"}
        np.testing.assert_array_equal(arrays["observation_moments"][0], moments.mean)
    policy = offmarl.load_policy(trained)
    action, carry = policy(np.eye(3, dtype=np.float32)[:2])
    assert action.shape == (2,) and not policy.stochastic
    assert policy.after_step(carry, np.ones(2), np.zeros(2, bool)).tolist() == [1, 1]


@pytest.mark.slow
def test_returns_are_those_of_the_episodes(random_data):
    dataset = offmarl.open(random_data("probe/two-step"))
    statistics = programs.DatasetStatistics(dataset, episodes=np.array([3, 5]))
    np.testing.assert_array_equal(statistics.returns(), dataset.episodes.episode_returns[[3, 5]])
    with pytest.raises(RunError, match="this run has no returns of its dataset"):
        programs.DatasetStatistics(None).returns()


def test_arrays_of_the_same_bytes_are_not_always_equal():
    """Programs made from unequal arrays must not share a compiled function."""

    def identity(array):
        statistics = programs.DatasetStatistics(None, {"table": array})
        statistics.array("table", len)
        return statistics.identity()

    arrays = [np.zeros(shape, dtype) for shape in ((2, 3), (3, 2)) for dtype in ("f4", "i4")]
    assert len({identity(array) for array in [*arrays, np.zeros((2, 3), "f4")]}) == len(arrays)


@pytest.mark.parametrize("where", ["init", "update", "policy"])
def test_statistics_are_taken_in_make_alone(where, random_data, tmp_path):
    """A compiled function would use the statistics of the dataset that it was compiled for."""

    def make(spec, args, dataset):
        program = two_stage.make(spec, args, dataset)

        def late(function):
            def called(*inputs):
                dataset.observation_moments()
                return function(*inputs)

            return called

        if where == "update":
            stages = tuple(stage._replace(update=late(stage.update)) for stage in program.stages)
            return program._replace(stages=stages)
        return program._replace(**{where: late(getattr(program, where))})

    with pytest.raises(RuntimeError, match=r"reads observation_moments .* read it in make"):
        programs.train(make, arguments(random_data(ENV), tmp_path / "run"))


# ---------------------------------------------------------------------------------- files


@pytest.fixture
def outside(tmp_path):
    """A program outside the checkout, in a directory with a space in its name."""
    path = tmp_path / "my programs" / "mine.py"
    path.parent.mkdir()
    shutil.copy(SOURCE, path)
    return path


def test_a_file_outside_is_as_good_as_one_inside(outside, random_data, tmp_path, monkeypatch):
    monkeypatch.chdir(outside.parent)
    for name in ("./mine.py", "../my programs/mine.py", str(outside)):
        module = registry.load("baseline", name)
        assert module.make.__code__.co_filename == str(outside)
    run = module.main(arguments(random_data(ENV), tmp_path / "run", module, updates=9))
    record = json.loads((run / tracking.RUN_FILE).read_text())
    assert (record["program"], record["file"]) == ("mine", str(outside))
    assert offmarl.load_policy(run).name == "mine"  # this process ran the program
    moved = outside.rename(tmp_path / "mine.py")
    module = registry.load("baseline", str(moved))
    assert module.main(arguments(random_data(ENV), run, module, updates=9)) == run
    moved.write_text(moved.read_text() + "# edited")
    module = registry.load("baseline", str(moved))
    with pytest.raises(RunError, match=rf"the content of {moved} was another \(sha256"):
        module.main(arguments(random_data(ENV), run, module, updates=9))


@pytest.mark.slow
def test_a_file_runs_only_if_the_user_names_it(outside, random_data, tmp_path, monkeypatch):
    module = registry.load("baseline", str(outside))
    run = module.main(arguments(random_data(ENV), tmp_path / "run", module, updates=9, seeds=1))
    monkeypatch.setattr(registry, "_ran", {})  # as in another process
    ran = tmp_path / "ran"
    text = outside.read_text()
    with pytest.raises(RunError, match=rf'give it yourself: load_policy\(..., program="{outside}"'):
        offmarl.load_policy(run)
    assert offmarl.load_policy(run, program=outside).name == "mine"
    target = outside.rename(tmp_path / "moved.py")
    assert offmarl.load_policy(run, program=str(target)).name == "mine"
    outside.write_text(f"open({str(ran)!r}, 'w').close()\n{text}")
    with pytest.raises(RunError, match=r"is not the program that trained .*, with other content"):
        offmarl.load_policy(run, program=outside)
    with pytest.raises(OptionError, match=r"there is no file .*gone.py"):
        offmarl.load_policy(run, program="gone.py")
    assert not ran.exists()


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"program": "{file}"}, UnknownNameError, "baseline"),
        ({"program": "evil", "kind": "{kind}"}, RunError, "run.json is not valid: kind"),
        (
            {"file": "{file}", "sha256": "{sha256}"},
            RunError,
            "does not run code because a run's rec",
        ),
    ],
)
def test_a_downloaded_record_imports_no_file(trained, tmp_path, change, error, message):
    run, file = tmp_path / "run", tmp_path / "evils" / "evil.py"
    file.parent.mkdir()
    file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    fields = {"file": file, "kind": tmp_path / "evil", "sha256": sha256}
    shutil.copytree(trained, run)
    record = json.loads((run / tracking.RUN_FILE).read_text()) | {"file": None, "sha256": None}
    record |= {key: value.format(**fields) for key, value in change.items()}
    (run / tracking.RUN_FILE).write_text(json.dumps(record))
    with pytest.raises(error, match=message):
        offmarl.load_policy(run)
    assert not (tmp_path / "ran").exists()


def test_a_program_of_offmarl_needs_no_file(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "run")
    record = json.loads((trained / tracking.RUN_FILE).read_text())
    record |= {"program": "bc", "file": None, "sha256": None}
    (tmp_path / "run" / tracking.RUN_FILE).write_text(json.dumps(record))
    with pytest.raises(OptionError, match=r"own baseline bc, not by mine\.py: do not"):
        offmarl.load_policy(tmp_path / "run", program="mine.py")


def test_files_that_are_no_programs_are_refused(outside):
    outside.write_text("Args = make = None")
    with pytest.raises(OptionError, match=r"mine.py is not a program: it has no main"):
        registry.load("baseline", str(outside))
    with pytest.raises(OptionError, match=r"there is no file .*gone.py"):
        registry.load("recorder", str(outside.with_name("gone.py")))
    outside.with_name("text.txt").write_text("")
    with pytest.raises(OptionError, match=r"its name must end in \.py"):
        registry.load("recorder", str(outside.with_name("text.txt")))


@pytest.mark.slow
def test_the_contract_in_the_documentation_is_a_program(random_data, tmp_path):
    from offmarl.programs import program

    example = program.__doc__.partition("complete baseline::\n")[2].partition("\n`offmarl train")[0]
    file = tmp_path / "majority.py"
    file.write_text("\n".join(line[4:] for line in example.splitlines()))
    majority = registry.load("baseline", str(file))
    run = majority.main(arguments(random_data(ENV), tmp_path / "run", majority, updates=5))
    counts = offmarl.load_policy(run).params
    assert counts.shape == (2, 2) and counts.sum() > 10
    # A state without names is what another run starts from, and is not that of longer training.
    again = arguments(random_data(ENV), tmp_path / "more", majority, updates=6)
    runs = run, majority.main(again)
    starts = [
        start_of_baseline(dataclasses.replace(again, init=x), envs.make(ENV).spec) for x in runs
    ]
    assert starts[0].source["init"]["state"] != starts[1].source["init"]["state"]


# ---------------------------------------------------------------------------------- compilation


@pytest.fixture
def no_cache(monkeypatch, tmp_path):
    names = (
        "jax_compilation_cache_dir",
        "jax_persistent_cache_min_compile_time_secs",
        "jax_compilation_cache_max_size",
    )
    before = {name: getattr(jax.config, name) for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    yield tmp_path / "offmarl" / "compiled"
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.parametrize("by", ["default", "switch", "choice"])
def test_compiled_programs_are_kept_unless_the_user_chose_otherwise(no_cache, monkeypatch, by):
    if by == "switch":
        monkeypatch.setenv("OFFMARL_COMPILATION_CACHE", "off")
    elif by == "choice":
        jax.config.update("jax_compilation_cache_dir", "elsewhere")
    keep_compiled_programs()
    expected = {"default": str(no_cache), "switch": None, "choice": "elsewhere"}[by]
    assert jax.config.jax_compilation_cache_dir == expected
    assert no_cache.is_dir() == (by == "default")
    assert (jax.config.jax_compilation_cache_max_size == 2**31) == (by == "default")


def test_what_was_compiled_ahead_is_not_compiled_again():
    @partial(jax.jit, static_argnums=0, donate_argnums=1)
    @chex.assert_max_traces(n=1)
    def scaled(factor, x):
        return factor * x

    x = jnp.arange(3.0)
    compile_ahead(scaled, 2, x).result()
    np.testing.assert_array_equal(scaled(2, x), [0, 2, 4])


# ---------------------------------------------------------------------------------- the directory


def files(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_a_run_that_another_process_writes_is_left_alone(random_data, tmp_path, monkeypatch):
    args = arguments(random_data(ENV), tmp_path / "toy", checkpoint_seconds=0.0)
    run = stopped(args, monkeypatch)
    before = files(run)
    with hold_lock(run / LOCK, run), pytest.raises(RunError, match="is being written by process"):
        two_stage.main(args)
    assert files(run) == before
    two_stage.main(dataclasses.replace(args, take_over=True))
    assert not (run / LOCK).exists()
    assert "take_over" not in (run / tracking.RUN_FILE).read_text()


def test_a_finished_run_is_complete_although_it_is_locked(trained, random_data):
    args = arguments(random_data(ENV), trained)
    with hold_lock(trained / LOCK, trained):
        assert two_stage.main(args) == trained


@pytest.mark.parametrize("kept", ["checkpoints", "metrics.jsonl", "marl_eval.json"])
def test_a_directory_without_its_record_is_refused(trained, random_data, tmp_path, kept):
    run = tmp_path / "toy"
    run.mkdir()
    (shutil.copytree if kept == "checkpoints" else shutil.copy)(trained / kept, run / kept)
    before = files(run)
    with pytest.raises(RunError, match=rf"holds {kept} of a run and no run.json.*restore it"):
        two_stage.main(arguments(random_data(ENV), run))
    assert files(run) == before


@pytest.mark.parametrize("content", [b"", b"\0" * 64, b'{"kind": "base', b"[]", b"{}"])
def test_a_damaged_record_is_refused_with_a_way_out(trained, random_data, tmp_path, content):
    run = shutil.copytree(trained, tmp_path / "toy")
    (run / tracking.RUN_FILE).write_bytes(content)
    message = rf"run\.json .*: restore it from a copy, or remove {run}, with its checkpoints, and"
    with pytest.raises(RunError, match=message):
        two_stage.main(arguments(random_data(ENV), run))


DAMAGE = {
    "zeros in the middle": lambda lines: [*lines[:2], b"\0" * 64 + b"\n", *lines[3:]],
    "half a line": lambda lines: [*lines[:3], lines[3][:9] + b"\n", *lines[4:]],
    "no step": lambda lines: [*lines[:1], b'{"seed": 0}\n', *lines[1:]],
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_metrics_are_cut_and_training_goes_on(
    trained, random_data, tmp_path, monkeypatch, damage
):
    args = arguments(random_data(ENV), tmp_path / "toy", checkpoint_seconds=0.0)
    path = stopped(args, monkeypatch) / tracking.METRICS_FILE
    path.write_bytes(b"".join(damage(path.read_bytes().splitlines(keepends=True))))
    with pytest.warns(UserWarning, match=r"metrics\.jsonl is damaged from line \d+ on"):
        two_stage.main(args)
    np.testing.assert_array_equal(weights(args.out, 1), weights(trained, 1))
    assert tracking.read(path)[-1]["step"] == 17


def test_an_evaluation_that_was_lost_is_repeated(trained, random_data, tmp_path):
    run = shutil.copytree(trained, tmp_path / "toy")
    record = json.loads((run / tracking.RUN_FILE).read_text())
    tracking.write_json(run / tracking.RUN_FILE, record | {"complete": False})
    path = run / tracking.METRICS_FILE
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + b"\0" * 64 + b"\n")
    with pytest.warns(UserWarning, match="is damaged"):
        two_stage.main(arguments(random_data(ENV), run))
    assert scores_of(run) == scores_of(trained)
    rows = [(row["seed"], row["step"]) for row in tracking.read(path) if tracking.RETURN in row]
    assert len(rows) == len(set(rows))


@pytest.mark.parametrize("setting", ["rbg", "whole", "wide"])
def test_training_does_not_depend_on_settings_of_jax_and_keeps_them(
    trained, random_data, tmp_path, setting
):
    ambient = {
        "rbg": (jax.default_prng_impl, "rbg"),
        "whole": (jax.threefry_partitionable, False),
        "wide": (jax.enable_x64, True),
    }
    choose, value = ambient[setting]
    with choose(value):
        run = two_stage.main(arguments(random_data(ENV), tmp_path / "run"))
        assert choose.value == value
    assert metrics(run, 0) == metrics(trained, 0)
    assert tracking.read_run(run)["numerics"] == tracking.read_run(trained)["numerics"]


@pytest.mark.parametrize(
    ("begun", "advice"),
    [
        ({"threads": 1000}, "set PJRT_NPROC=1000 to go on"),
        ({"threads": 9, "devices": 2}, "set JAX_NUM_CPU_DEVICES=2 PJRT_NPROC=9 to go on"),
        ({"devices": 2}, "set JAX_NUM_CPU_DEVICES=2 to go on"),
        ({"xla_flags": "--xla_cpu_enable_fast_math=true"}, "XLA_FLAGS='--xla_cpu_enable_fast"),
        ({"jax_default_matmul_precision": "bfloat16"}, "JAX_DEFAULT_MATMUL_PRECISION=bfloat16"),
    ],
)
def test_an_unfinished_run_is_continued_with_settings_that_give_its_bits(
    trained, random_data, tmp_path, begun, advice
):
    run = shutil.copytree(trained, tmp_path / "run")
    record = tracking.read_run(run)
    changed = record | {"numerics": record["numerics"] | begun}
    tracking.write_json(run / "run.json", changed)
    two_stage.main(arguments(random_data(ENV), run))  # it is finished
    tracking.write_json(run / "run.json", changed | {"complete": False})
    with pytest.raises(RunError, match=advice):
        two_stage.main(arguments(random_data(ENV), run))
