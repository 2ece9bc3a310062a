"""Training: arguments, seeds, resuming, and the files of a run."""

import dataclasses
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import chex
import jax
import numpy as np
import pytest

import offmarl
from offmarl import _compiling, tracking, vault
from offmarl.checkpoint import Checkpoints
from offmarl.errors import OptionError, RunError, ShapeError, Stopped, UnknownNameError
from offmarl.programs import registry
from offmarl.programs.offline import run_directory
from offmarl.programs.runs import loop
from offmarl.programs.runs.run import Run
from offmarl.types import Continuous, EnvSpec
from offmarl.vault import open_vault
from tests.children import python, run, stopped
from tests.runs import metrics_of, scores_of

bc = registry.load("baseline", "bc")

ENV = "probe/observation"
ROOT = Path(__file__).parents[2]


@pytest.fixture
def args(random_data: Callable[[str], Path], tmp_path: Path) -> bc.Args:
    return settings(random_data(ENV), tmp_path / "run")


def settings(data: Path, out: Path) -> bc.Args:
    return bc.Args(
        vault=data,
        out=out,
        seeds=2,
        updates=40,
        eval_every=10,
        eval_episodes=4,
        final_episodes=8,
        batch_size=4,
        length=2,
        hidden=8,
    )


def content(run: Path) -> dict[str, Any]:
    record = (run / tracking.RUN_FILE).read_text()
    return {"scores": scores_of(run), "record": record, "metrics": metrics_of(run)}


def same_run(run: Path, other: Path) -> None:
    assert content(run) == content(other)
    for seed in (0, 1):
        chex.assert_trees_all_equal(params(run, seed), params(other, seed))


@pytest.fixture(scope="module")
def whole(random_data: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never stopped."""
    return bc.main(settings(random_data(ENV), tmp_path_factory.mktemp("whole") / "run"))


def params(run: Path, seed: int) -> list[np.ndarray]:
    return jax.tree.leaves(offmarl.load_policy(run, seed).params)


def test_what_a_run_leaves_behind(args: bc.Args, whole: Path) -> None:
    run = whole
    record = json.loads((run / tracking.RUN_FILE).read_text())
    assert record["program"] == "bc"
    assert record["vault_digest"] == vault.open_vault(args.vault).digest()
    assert record["complete"] is True
    rows = tracking.read(run / tracking.METRICS_FILE)
    evaluations = [row for row in rows if tracking.RETURN in row]
    assert [(row["step"], row["seed"]) for row in evaluations] == [
        (step, seed) for step in (0, 10, 20, 30, 40) for seed in (0, 1)
    ]
    assert [len(row[tracking.RETURN]) for row in evaluations] == [4] * 8 + [8] * 2
    sampled = {row["step"] for row in rows if tracking.SAMPLED_RETURN in row}
    assert sampled == {0, 10, 20, 30, 40}
    losses = [row["step"] for row in rows if "policy_loss" in row]
    assert losses == [step for step in (1, 10, 20, 30, 40) for _ in (0, 1)]
    scores = json.loads((run / tracking.MARL_EVAL_FILE).read_text())
    algorithms = scores["probe"]["observation/random"]
    runs, other = algorithms["bc (greedy)"], algorithms["bc (sampled)"]
    assert set(algorithms) == {"bc (sampled)", "bc (greedy)"}
    *_, last = [row for row in rows if tracking.SAMPLED_RETURN in row and row["seed"] == 1]
    times = [step.get("elapsed_time") for step in [*runs["seed_0"].values()][:-1]]
    assert times == sorted(times) and times[0] > 0 and runs["seed_1"]["step_1"]["steps_per_second"]
    assert other["seed_1"]["absolute_metrics"] == {tracking.RETURN: last[tracking.SAMPLED_RETURN]}
    assert runs["seed_1"]["absolute_metrics"][tracking.RETURN] == evaluations[-1][tracking.RETURN]


@pytest.mark.parametrize(
    ("env", "data", "environment", "task"),
    [
        ("probe/match", "data/main", "probe", "match/main"),
        ("xor", None, "xor", "xor"),
        ("", "data/main", "unknown", "data/main"),
    ],
)
def test_scores_are_written_as_other_tools_read_them(
    tmp_path: Path, env: str, data: str | None, environment: str, task: str
) -> None:
    def at(seed: int, step: int) -> dict[str, list[int]]:
        names = tracking.SAMPLED_RETURN, tracking.AGREEMENT, tracking.RETURN
        return {name: [100 * seed + 10 * step + i] for i, name in enumerate(names)}

    run = Run(tmp_path, {"program": "bc", "seeds": [3, 4], "vault": data}, complete=True)
    lines = [{"seed": s, "step": step} | at(s, step) for step in (0, 8) for s in (3, 4)]
    first = {"seed": 3, "step": 1, tracking.WALL_TIME: 5.0, tracking.SPEED: 2.0}
    later = {"seed": 3, "step": 9, tracking.WALL_TIME: 7.0, tracking.SPEED: 3.0}
    tracking.append(run.metrics, first, *lines, later, later | at(3, 9))  # 4 has lost its line
    run.write_marl_eval(env)

    def runs(name: str) -> dict[str, Any]:
        times = {3: {"elapsed_time": 5.0, "steps_per_second": 2.0}, 4: {}}
        names = {tracking.RETURN: name, tracking.AGREEMENT: tracking.AGREEMENT}
        of = {
            (s, k): {label: at(s, k)[x] for label, x in names.items()}
            for s in (3, 4)
            for k in (0, 8)
        }
        return {
            f"seed_{s}": {
                "step_0": {"step_count": 0, **times[s], **of[s, 0]},
                "step_1": {"step_count": 8, **times[s], **of[s, 8]},
                "absolute_metrics": of[s, 8],
            }
            for s in (3, 4)
        }

    ways = {"bc (greedy)": tracking.RETURN, "bc (sampled)": tracking.SAMPLED_RETURN}
    written = json.loads((tmp_path / tracking.MARL_EVAL_FILE).read_text())
    assert written == {environment: {task: {way: runs(name) for way, name in ways.items()}}}


@pytest.mark.parametrize(
    ("replay", "calls", "signum", "says"),
    [
        ("device", 1, signal.SIGINT, "before the first checkpoint: the same .* starts again"),
        ("device", 13, signal.SIGTERM, "at update 13: the same command resumes there"),
        pytest.param(
            *("stream", 13, signal.SIGINT, "at update 13: the same command resumes there"),
            marks=[pytest.mark.bits, pytest.mark.nightly],
        ),
    ],
)
def test_a_stopped_run_goes_on_to_the_same_bits(
    args: bc.Args,
    whole: Path,
    monkeypatch: pytest.MonkeyPatch,
    replay: str,
    calls: int,
    signum: int,
    says: str,
) -> None:
    """Stopped in its first update; and after an evaluation, within a block and a streamed piece."""
    stopped = dataclasses.replace(args, replay=replay, memory=1e-4)
    update, offsets = loop._update, []

    def interrupted(*arguments: Any) -> object:
        offsets.append(arguments[4][1])
        if len(offsets) == calls:
            signal.raise_signal(signum)
        return update(*arguments)

    # As of a process in the foreground, whatever started the tests.
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_DFL)
    with monkeypatch.context() as patch, pytest.raises(Stopped, match=says):
        patch.setattr(loop, "_update", interrupted)
        patch.setattr(loop, "SECONDS_AT_ONCE", 0.0)  # one update a call
        bc.main(stopped)
    assert Checkpoints(stopped.out / "checkpoints").latest() == (13 if calls == 13 else None)
    assert calls == 1 or offsets[-1] > 0, "in the middle of a piece"
    assert not json.loads((stopped.out / tracking.RUN_FILE).read_text())["complete"]
    bc.main(stopped)
    same_run(stopped.out, whole)


@pytest.mark.parametrize(
    ("size", "seconds", "wanted"),
    [(1, 0.1, 2), (5, 0.1, 10), (8, 0.1, 10), (8, 0.25, 4), (3, 9, 1)],
)
def test_a_call_takes_about_a_second_and_at_most_twice_the_updates_of_the_last(
    size: int, seconds: float, wanted: int
) -> None:
    assert loop.next_size(size, seconds, 1.0) == wanted
    assert loop.next_size(size, 0.0, 1.0) == 2 * size


BIT_IDENTITY = (
    "programs/test_loop.py::test_a_stopped_run_goes_on_to_the_same_bits",
    "programs/test_loop.py::test_a_stream_trains_to_the_bits_of_the_device",
    "programs/test_loop.py::test_a_checkpoint_that_was_deleted_is_made_anew",
    "programs/test_record_policy.py::test_a_signal_saves_and_the_same_call_goes_on",
    "programs/test_record_policy.py::"
    "test_stopped_and_called_again_it_is_the_recording_that_never_stopped",
)


@pytest.mark.nightly
def test_optimised_code_goes_on_to_the_same_bits() -> None:
    """The tests of this that every run has, on the code that users run."""
    tests = [str(ROOT / "tests" / test) for test in BIT_IDENTITY]
    ours = ("PYTEST_", "JAX_DISABLE_MOST_OPTIMIZATIONS")
    environment = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    python(
        *("-m", "pytest", "-n", "0", "-p", "no:cacheprovider", *tests),
        env=environment | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"},
        cwd=ROOT,
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("swarm/coverage-8:time_limit=20", "swarm/coverage-8:time_limit=20"),
        ("../../../evil", "evil"),
        ("a/../b/./.hidden//..", "a/b/hidden"),
        ("~/x\\y\x1b[2J", "x-y-[2J"),
        ("", "probe-observation"),
        ("../.. ", None),
    ],
)
def test_a_name_in_the_data_never_leads_elsewhere(
    name: str, expected: str | None, args: bc.Args
) -> None:
    dataset = open_vault(args.vault)
    vars(dataset)["spec"] = dataclasses.replace(dataset.spec, name=name)
    args = dataclasses.replace(args, out=None)
    if expected is None:
        with pytest.raises(OptionError, match=r"'../.. ' in the data cannot be a path: give --out"):
            run_directory(bc.make, args, dataset)
    else:
        assert run_directory(bc.make, args, dataset) == Path("runs") / expected / "random" / "bc"


def test_runs_on_vaults_of_transforms_have_directories_of_their_own(args: bc.Args, tmp_path: Path):
    vault.sample(args.vault, tmp_path / "few.vlt", episodes=2, seed=0)
    few = dataclasses.replace(args, out=None, vault=tmp_path / "few.vlt")
    assert run_directory(bc.make, few).parts[-2:] == ("few", "bc")


def test_the_share_of_one_vault_is_a_number_above_0(args: bc.Args):
    for share in ("0", "-1", "nan"):
        wrong = dataclasses.replace(args, vault=(f"{args.vault}={share}",))
        with pytest.raises(OptionError, match=f"has the share {share}, and there is no other"):
            run_directory(bc.make, dataclasses.replace(wrong, out=None))


def test_a_checkpoint_that_was_deleted_is_made_anew(
    args: bc.Args, whole: Path, tmp_path: Path
) -> None:
    """As the error of a damaged one advises, also where it is the last of a finished run."""
    run = shutil.copytree(whole, args.out)
    shutil.rmtree(run / "checkpoints" / "40")
    bc.main(args)
    same_run(run, whole)
    shutil.rmtree(run / "checkpoints" / "40" / "about")  # no whole one, though in its place
    with pytest.raises(RunError, match="40 has the name of a new checkpoint: move or rename it"):
        bc.main(args)
    (run / "checkpoints" / "40").rename(tmp_path / "moved")
    bc.main(args)
    same_run(run, whole)


@pytest.mark.slow
@pytest.mark.bits
def test_a_stream_trains_to_the_bits_of_the_device(
    args: bc.Args, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = dataclasses.replace(args, env="none")
    device = bc.main(args)
    streamed = dataclasses.replace(
        args, out=tmp_path / "streamed", replay="stream", memory=1e-4, checkpoint_seconds=0
    )
    save, count = Checkpoints.save, [0]

    def stop_after_the_second(self: Checkpoints, *record: object) -> None:
        save(self, *record)
        count[0] += 1
        if count[0] == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Checkpoints, "save", stop_after_the_second)
        bc.main(streamed)
    bc.main(dataclasses.replace(streamed, memory=2e-4, checkpoint_seconds=30))
    same_run(streamed.out, device)


def test_a_finished_run_is_left_alone_and_no_other_one_takes_its_place(
    args: bc.Args, whole: Path
) -> None:
    args = dataclasses.replace(args, out=whole)
    before = {path: path.stat().st_mtime_ns for path in whole.rglob("*")}
    bc.main(args)
    with pytest.raises(RunError, match=r"args.hidden 8, not 16: choose another directory"):
        bc.main(dataclasses.replace(args, hidden=16))
    with pytest.raises(RunError, match=r"args.updates 40, not 80"):  # another interval follows
        bc.main(dataclasses.replace(args, updates=80, eval_every=None))
    assert {path: path.stat().st_mtime_ns for path in whole.rglob("*")} == before


def test_a_run_on_data_that_has_changed_is_refused(
    args: bc.Args, whole: Path, tmp_path: Path
) -> None:
    path = shutil.copytree(args.vault, tmp_path / "probe-observation.vlt" / "random")
    args = dataclasses.replace(args, vault=str(path), out=shutil.copytree(whole, args.out))
    bc.main(args)
    steps = vault.open_vault(path).transitions(0, 3)
    with vault.resume(path) as writer:
        writer.append(steps)
    with pytest.raises(RunError, match=r"the content of probe-observation/random was another"):
        bc.main(args)


@pytest.mark.slow
def test_without_an_environment_episodes_are_held_out(args: bc.Args, tmp_path: Path) -> None:
    args = dataclasses.replace(args, env="none", final_episodes=10_000)
    run = bc.main(args)
    record = tracking.read_run(run)
    assert record["args"]["held_out"] == 0.1 and "held_out" in record["resolved"]
    final = evaluated(run)
    assert set(final[0]) == {tracking.AGREEMENT, tracking.LOG_LIKELIHOOD}
    # The same episodes as `split` deals out, and nothing else is learnt from.
    parts = vault.split(args.vault, tmp_path / "parts.vlt", fractions=(0.9, 0.1))
    split = {"vault": parts["train"].path, "validation": parts["validation"].path}
    apart = bc.main(dataclasses.replace(args, **split, out=tmp_path / "apart"))
    for seed in (0, 1):
        chex.assert_trees_all_equal(params(run, seed), params(apart, seed))
        for name, values in final[seed].items():
            np.testing.assert_allclose(np.sort(values), np.sort(evaluated(apart)[seed][name]))
    # A probe's episode is one step of two agents, each of whom saw one of two things.
    held_out = parts["validation"].transitions()
    policy = offmarl.load_policy(run, seed=1, greedy=True)
    pairs = zip(held_out.view.observation[0], held_out.action[0], strict=True)
    agreed = [(policy(observation)[0] == done).mean() for observation, done in pairs]
    np.testing.assert_allclose(np.mean(final[1][tracking.AGREEMENT]), np.mean(agreed), rtol=1e-5)
    copied = shutil.copytree(tmp_path / "parts.vlt", tmp_path / "copied" / "parts.vlt")
    elsewhere = {"vault": copied / "train", "validation": copied / "validation"}
    assert bc.main(dataclasses.replace(args, **elsewhere, out=apart)) == apart


def test_episodes_of_the_training_data_are_not_held_out(args: bc.Args) -> None:
    with pytest.raises(OptionError, match="is data that the policy is trained on"):
        bc.main(dataclasses.replace(args, env="none", validation=args.vault))


def evaluated(run: Path) -> list[dict]:
    """What each seed's last policy was judged by."""
    document = json.loads((run / tracking.MARL_EVAL_FILE).read_text())
    (tasks,) = document.values()
    (algorithms,) = tasks.values()
    return [seed["absolute_metrics"] for seed in algorithms["bc"].values()]


@pytest.mark.nightly
def test_values_tell_no_likelihood(args: bc.Args) -> None:
    qmix_cql = registry.load("baseline", "qmix_cql")
    names = {field.name for field in dataclasses.fields(qmix_cql.Args)}
    shared = {name: value for name, value in vars(args).items() if name in names}
    run = qmix_cql.main(qmix_cql.Args(**shared | {"held_out": 0.25, "updates": 10}))
    rows = [row for row in tracking.read(run / tracking.METRICS_FILE) if tracking.RETURN in row]
    assert all(len(row[tracking.AGREEMENT]) == args.final_episodes for row in rows)
    assert all(tracking.LOG_LIKELIHOOD not in row for row in rows)


@pytest.mark.slow
def test_an_only_episode_is_learnt_from_and_nothing_judges(args: bc.Args, tmp_path: Path) -> None:
    vault.sample(args.vault, tmp_path / "one.vlt", episodes=1)
    run = bc.main(dataclasses.replace(args, vault=tmp_path / "one.vlt", env="none"))
    assert not (run / tracking.MARL_EVAL_FILE).exists()
    assert Checkpoints(run / "checkpoints").latest() == 40


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"updates": 0}, OptionError, "updates must be at least 1, not 0"),
        (
            {"env": "classic/bridge"},
            ShapeError,
            r"bridge differ in observation",
        ),
        ({"env": "probe/observatoin"}, UnknownNameError, "did you mean probe/observation"),
        ({"learning_rate": float("nan")}, OptionError, "above 0 and finite, not nan"),
        ({"held_out": 2.0}, OptionError, "held_out must be from 0 to 1, not 2.0"),
        ({"held_out": 1.0}, OptionError, "a fraction of 1 of the 2048 episodes .* cannot be held"),
        ({"held_out": 0.1, "validation": Path("x")}, OptionError, "or --held-out, not both"),
        ({"replay": "stream", "memory": 1e-6}, OptionError, "too few to stream: a batch for each"),
        ({"seeds": 10**9}, OptionError, "seeds must be at most 10,000"),
        ({"updates": 10**20}, OptionError, "updates must be at most 2,147,483,647, not 1000000"),
        ({"layers": 129}, OptionError, "layers must be at most 128, not 129"),
        ({"batch_size": 10**12}, OptionError, r"batches of 1,000,.* at least .* GB of memory"),
        ({"hidden": 10**9}, OptionError, "networks of all seeds need at least"),
        ({"final_episodes": 10**12}, OptionError, "1,000,000,000,000 episodes side by side need"),
    ],
)
def test_settings_that_cannot_be(
    args: bc.Args, change: dict, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        bc.main(dataclasses.replace(args, **change))
    assert not (args.out and args.out.exists())


@pytest.mark.parametrize("name", ["maicq", "qmix_cql"])
def test_continuous_data_is_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    baseline = registry.load("baseline", name)
    spec = EnvSpec("reach", 2, 3, 2, Continuous(2))
    vault.create(tmp_path / "reach.vlt", spec, rows=1).close()
    args = baseline.Args(vault=tmp_path / "reach.vlt", out=tmp_path / "run", env="none")
    with pytest.raises(ShapeError, match="reach has continuous actions"):
        baseline.main(args)
    assert not args.out.exists()


COMMAND = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
from offmarl.cli import main
main()
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("replay", "program", "signum"),
    [
        ("device", ["-c", COMMAND, "train", "bc"], signal.SIGINT),
        ("stream", [str(ROOT / "baselines" / "bc.py")], signal.SIGTERM),
    ],
)
def test_kill_9_or_a_signal_and_the_same_command_again(
    args: bc.Args, tmp_path: Path, replay: str, program: list[str], signum: int
) -> None:
    options = {"seeds": 2, "updates": 4000, "eval-every": 400, "final-episodes": 8}
    options |= {"replay": replay, "checkpoint-seconds": 0}
    small = ["--hidden=8", "--batch-size=4", "--length=2", "--eval-episodes=4"]
    flags = [*(f"--{name}={value}" for name, value in options.items()), *small]
    reference, killed = tmp_path / "whole", tmp_path / "killed"

    def command(program: list[str], out: Path) -> list[str]:
        return [sys.executable, *program, "--vault", str(args.vault), "--out", str(out), *flags]

    def stop(program: list[str], signum: int) -> tuple[int, str]:
        """Send a signal once there is a checkpoint more than before; return what was said."""
        checkpoints = Checkpoints(killed / "checkpoints")
        before = checkpoints.latest() or 0
        arguments, new = command(program, killed), lambda: (checkpoints.latest() or 0) > before
        output = stopped(arguments, new, signum)
        return checkpoints.latest(), output

    run(command(program, reference))
    killed_at, _ = stop(program, signal.SIGKILL)
    stopped_at, output = stop(program, signum)
    assert 0 < killed_at < stopped_at < 4000
    assert output == f"stopped at update {stopped_at:,}: the same command resumes there.\n"
    run(command(program, killed))
    same_run(killed, reference)


def test_an_option_that_xla_does_not_have_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    in_order = _compiling.in_order.__wrapped__
    assert in_order() == {"xla_cpu_enable_concurrency_optimized_scheduler": False}
    monkeypatch.setattr(_compiling, "_IN_ORDER", {"xla_cpu_has_no_such_option": False})
    assert in_order() is None
