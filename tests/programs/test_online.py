"""MAPPO in the loop of all recorders: learning, tiers, and resuming after a kill."""

import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import envs, load_policy, tracking, vault
from offmarl.envs.classic import Xor
from offmarl.errors import (
    CheckpointError,
    NotLearnedError,
    OptionError,
    RunError,
    UnknownNameError,
)
from offmarl.programs import record_from_run
from offmarl.programs.program import Hyperparameters, Program, Stage
from offmarl.programs.recording import online
from offmarl.programs.runs import loop
from offmarl.programs.runs.loop import Schedule, collect, stage_starts
from offmarl.programs.runs.training import _Journal
from offmarl.replay import device
from recorders import mappo, vdn
from tests.rollouts import differ
from tests.runs import metrics_of, scores_of
from tests.vault.experience import make, written

from .learning import Dial, learn

ROOT = Path(__file__).parents[2]


def test_a_recording_without_a_complete_episode_is_noticed(tmp_path, notices):
    written(tmp_path / "v.vlt", (make(steps=5, end_every=1e9)[0], None))
    online.describe_vault(tmp_path / "v.vlt", "expert")
    assert len(notices) == 1
    assert "no episode of" in notices[0]


def test_a_recorder_may_begin_with_leaves_that_are_one_another():
    """Its state is donated, and no buffer may be donated twice."""
    constant = jnp.float32(5.0)

    def add_one(state, _batch, _key, _hyper):
        return {name: leaf + 1 for name, leaf in state.items()}, {}

    stages = (Stage(add_one, 1), Stage(add_one, 1))
    program = Program(lambda *_: None, stages, lambda _: None, lambda state: state)
    state = {"params": constant, "target": constant}
    schedule = Schedule(2, 2, 1, stage_starts(stages, 2))
    hypers, keys = [Hyperparameters()], [jax.random.key(0)]
    work = collect(program, [state], hypers, keys, schedule, 0, [None])
    states = [jax.tree.map(float, state) for _, (state,), _ in work]
    assert states == [{"params": 6.0, "target": 6.0}, {"params": 7.0, "target": 7.0}]
    assert constant == 5.0


def test_all_processes_make_the_updates_that_the_first_chooses(monkeypatch):
    """Whatever the others measure: with collective operations they would wait for one another."""
    monkeypatch.setattr(loop, "from_first", lambda _own: 4)
    program = Program(
        lambda *_: None,
        (Stage(lambda state, *_: (state + 1, {"state": state})),),
        lambda _: None,
        lambda state: state,
    )
    schedule, key = Schedule(12, 12, 1, (0,)), jax.random.key(0)
    work = collect(program, [jnp.zeros(())], [Hyperparameters()], [key], schedule, 0, [None])
    calls = [(done, metrics["state"][0, :2].tolist()) for done, _, metrics in work]
    assert calls == [(1, [0]), (5, [1, 2]), (9, [5, 6]), (11, [9, 10]), (12, [11])]


@pytest.mark.nightly
def test_mappo_turns_dials():
    """A value inside and one at the end of the range; doing nothing gets 0.25."""
    args = mappo.Args(num_envs=16, num_steps=16, total_steps=20_000, learning_rate=3e-3)
    greedy, sampled = learn(mappo, args, Dial())
    assert greedy > 0.97
    assert sampled > 0.9


@pytest.mark.nightly
def test_mappo_learns_to_cover():
    """Seeds 0 to 3 came to 17.9 or more; a uniform policy to 9.3."""
    assert learn(mappo, mappo.Args(total_steps=100_000, seed=1))[1] > 16


# ---------------------------------------------------------------------------------- the driver


def small(out, **changes):
    settings = {
        "env": "probe/observation",
        "tiers": "random,medium,expert,replay,medium-replay",
        "out": out,
        "steps": 400,
        "total_steps": 4_000,
        "num_envs": 8,
        "num_steps": 16,
        "evaluations": 10,
        "eval_episodes": 32,
        "learning_rate": 5e-4,
        "hidden": 16,
    }
    return mappo.Args(**settings | changes)


def content(out):
    """Return the results that two runs of one seed must share."""
    vaults = {path.name: vault.open_vault(path).digest() for path, _ in vault.list_vaults(out)}
    run = next(out.rglob("run.json")).parent
    params = load_policy(run).params
    metrics = metrics_of(run)
    return vaults, [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(params)], metrics


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    return out, mappo.main(small(out))


@pytest.mark.slow
def test_several_updates_in_a_call_have_the_bits_of_single_ones(tmp_path, monkeypatch):
    """Of the data, the parameters and the metrics; the buffer wraps, and evaluations divide it."""
    options = {"tiers": "replay", "total_steps": 2000, "num_envs": 4, "num_steps": 5, "updates": 1}
    options |= {"capacity": 64, "evaluations": 3, "network": "feedforward", "length": 3}
    args = vdn.Args(env="probe/observation", eval_episodes=2, hidden=4, **options)
    yielded, contents = [], []
    for seconds in (0.0, 1e3):
        monkeypatch.setattr(loop, "COLLECTING_SECONDS", seconds)
        monkeypatch.setattr(
            online,
            "collect",
            lambda *inputs: (yielded.append(block[0]) or block for block in collect(*inputs)),
        )
        out = tmp_path / str(seconds)
        vdn.main(replace(args, out=out))
        contents.append(content(out))
    assert yielded[:100] == list(range(1, 101))
    counts = np.diff([0, *yielded[100:]]).tolist()
    assert counts == [1, 2, 4, 8, 8, 8, 2, 1, 8, 8, 8, 8, 2, 8, 8, 8, 8]
    assert contents[0] == contents[1]


def test_more_updates_than_are_counted_are_refused(tmp_path):
    with pytest.raises(OptionError, match=r"total_steps / .* must be at most 2,147,483,647, not"):
        vdn.main(vdn.Args(env="classic/bridge", out=tmp_path, total_steps=10**20))


def test_a_capacity_that_does_not_fit_is_an_error_that_names_one_that_does(tmp_path, monkeypatch):
    """Nothing is trained, and nothing is left behind."""
    monkeypatch.setattr(device, "free_bytes", lambda: 2 * 10**8)
    args = vdn.Args(env="swarm/coverage-3", out=tmp_path, hidden=4, capacity=10**6)
    with pytest.raises(
        OptionError, match=r"need at least .* GB .* such as --capacity \d+"
    ) as error:
        vdn.main(args)
    assert not list(tmp_path.iterdir())
    most = int(str(error.value).split()[-1].rstrip("."))
    monkeypatch.setattr(online, "collect", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        vdn.main(replace(args, capacity=most))
    with pytest.raises(OptionError, match=f"such as --capacity {most}"):
        vdn.main(replace(args, capacity=most + 1, out=tmp_path / "more"))


@pytest.mark.slow
def test_tiers_are_recorded_with_what_they_come_from(recorded):
    out, report = recorded
    directory = out / "probe" / "observation.vlt"
    tiers = {
        path.name.removeprefix("mappo-0-"): vault.open_vault(path)
        for path in sorted(directory.iterdir())
    }
    assert sorted(tiers) == ["expert", "medium", "medium-replay", "random", "replay"]
    assert tiers["expert"].num_steps == 400
    assert tiers["replay"].num_steps == 4096  # 32 iterations of 128 steps
    means = {name: data.episodes.returns.mean() for name, data in tiers.items()}
    assert means["random"] < means["medium"] < means["expert"]
    assert [row["mean_return"] for row in report.data["vaults"]] == [
        pytest.approx(means[row["tier"]]) for row in report.data["vaults"]
    ]
    ids = tiers["replay"].transitions().policy_id[..., 0]
    np.testing.assert_array_equal(ids, np.tile(np.repeat(np.arange(32), 16), (8, 1)))
    versions = tiers["replay"].provenance["policies"]
    assert [version["policy_id"] for version in versions] == [0, 4, 8, 12, 16, 20, 24, 28, 32]
    expert = tiers["expert"].provenance["policies"][0]
    assert expert["training_steps"] in [version["training_steps"] for version in versions]
    assert tiers["random"].provenance["policies"][0]["policy_id"] == 0


@pytest.mark.slow
def test_medium_replay_is_the_training_data_up_to_the_medium_policy(recorded):
    out, _ = recorded
    names = ("medium", "medium-replay", "replay")
    tiers = [vault.open_vault(out / f"probe/observation.vlt/mappo-0-{name}") for name in names]
    medium, (_, data, replay) = tiers[0].provenance["policies"][0]["training_steps"], tiers
    transitions = replay.transitions(0, medium // 8)
    assert data.num_steps == medium < replay.num_steps
    np.testing.assert_array_equal(
        data.transitions().view.observation[0],
        transitions.view.observation.reshape(medium, *transitions.view.observation.shape[2:]),
    )
    assert data.provenance["tier"] == "medium-replay"
    assert data.provenance["policies"][-1]["training_steps"] == medium


@pytest.mark.slow
def test_the_policies_of_all_evaluations_can_be_loaded_by_their_steps(recorded, tmp_path):
    out, _ = recorded
    run = out / "probe" / "observation.run" / "mappo-0"
    rows = [row for row in tracking.read(run / tracking.METRICS_FILE) if tracking.RETURN in row]
    best = max(rows, key=lambda row: np.mean(row[tracking.RETURN]))["step"]
    params = [load_policy(run, step=step).params for step in (best, "best", 512, None)]
    chex.assert_trees_all_equal(params[0], params[1])
    assert differ(params[2], params[3])
    with pytest.raises(RunError, match=r"no checkpoint of step 500, but of \[0, 512, "):
        load_policy(run, step=500)
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns(tracking.POLICIES))
    with pytest.raises(RunError, match="keeps no policy but its last"):
        load_policy(tmp_path / "run", step="best")


@pytest.mark.slow
def test_updates_are_logged_and_evaluations_kept_for_comparison(recorded):
    out, _ = recorded
    run = out / "probe" / "observation.run" / "mappo-0"
    rows = tracking.read(run / tracking.METRICS_FILE)
    updates = [row["step"] for row in rows if tracking.RETURN not in row]
    assert updates == list(range(128, 4097, 128)) and tracking.read_run(run)["complete"]
    scores = json.loads((run / tracking.MARL_EVAL_FILE).read_text())
    algorithms = scores["probe"]["observation"]
    assert set(algorithms) == {"mappo (sampled)", "mappo (greedy)"}
    ((greedy,), (steps,)) = (algorithms[f"mappo ({x})"].values() for x in ("greedy", "sampled"))
    assert np.mean(greedy["absolute_metrics"][tracking.RETURN]) > 0.9
    last = steps.pop("absolute_metrics")[tracking.RETURN]
    assert [step["step_count"] for step in steps.values()] == list(range(0, 4097, 512))
    assert steps["step_7"][tracking.RETURN] == last and len(last) == 32
    versions = vault.open_vault(out / "probe/observation.vlt/mappo-0-replay").provenance["policies"]
    assert versions[-1]["return"] == pytest.approx(np.mean(last))


@pytest.mark.slow
def test_the_same_command_again_changes_nothing(recorded):
    out, report = recorded
    before = {file: file.stat().st_mtime_ns for file in out.rglob("*") if file.is_file()}
    again = mappo.main(small(out))
    assert {file: file.stat().st_mtime_ns for file in out.rglob("*") if file.is_file()} == before
    assert again.data["vaults"] == report.data["vaults"]
    assert "nothing was changed" in again.data["outcome"]


@pytest.mark.slow
def test_seeds_side_by_side_have_the_bits_of_single_runs(recorded, tmp_path):
    out, _ = recorded
    args = small(tmp_path, tiers="random,expert,replay", seeds=2, evaluations=10)
    report = mappo.main(args)
    assert [(row["seed"], row["tier"]) for row in report.data["vaults"]] == [
        (seed, tier) for seed in (0, 1) for tier in ("random", "expert", "replay")
    ]
    for tier in ("random", "expert", "replay"):
        name = f"probe/observation.vlt/mappo-0-{tier}"
        assert vault.open_vault(out / name).digest() == vault.open_vault(tmp_path / name).digest()
    run = tmp_path / "probe" / "observation.run" / "mappo-0-to-1"
    alone = load_policy(out / "probe" / "observation.run" / "mappo-0").params
    chex.assert_trees_all_equal(load_policy(run, 0).params, alone)
    assert not np.array_equal(*(jax.tree.leaves(load_policy(run, s).params)[0] for s in (0, 1)))
    metrics = tracking.read(run / tracking.METRICS_FILE)
    assert {record["seed"] for record in metrics} == {0, 1}


@pytest.mark.slow
def test_stopped_between_checkpoints_with_damaged_metrics_it_is_the_run_that_never_stopped(
    recorded, tmp_path, monkeypatch
):
    args, saves, save = small(tmp_path, tiers="replay", checkpoint_seconds=0.0), [], _Journal._save

    def dying(self, done, states):
        if len(saves) == 5:
            raise SystemExit
        saves.append(save(self, done, states))

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(_Journal, "_save", dying)
        mappo.main(args)
    path = next(tmp_path.rglob(tracking.METRICS_FILE))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join((*lines[:2], b'{"seed": 0, "st\n', *lines[3:])))
    with pytest.warns(UserWarning, match="is damaged from line 3 on"):
        mappo.main(args)
    name = "probe/observation.vlt/mappo-0-replay"
    resumed, whole = (vault.open_vault(out / name).digest() for out in (tmp_path, recorded[0]))
    assert resumed == whole
    reference = next(recorded[0].rglob(tracking.METRICS_FILE)).parent
    assert scores_of(path.parent) == scores_of(reference)


@pytest.mark.slow
def test_a_finished_run_records_further_tiers_without_training(recorded, tmp_path):
    out = tmp_path / "copy"
    shutil.copytree(recorded[0], out)
    run = out / "probe" / "observation.run" / "mappo-0"
    report = record_from_run(run, "mixed=random:1+expert:3", steps=800)
    (row,) = report.data["vaults"]
    assert (row["tier"], row["steps"]) == ("mixed", 800)
    mixed = vault.open_vault(out / "probe/observation.vlt/mappo-0-mixed")
    ids = mixed.episodes.policy_id.reshape(len(mixed.episodes.row), -1)
    assert (ids == ids[:, :1]).all() and ids.mean() == pytest.approx(0.75, abs=0.1)
    random, expert = mixed.provenance["policies"]
    assert (random["tier"], random["policy_id"], expert["tier"]) == ("random", 0, "expert")
    returns = mixed.episodes.episode_returns
    assert returns[ids[:, 0] == 0].mean() < 0.7 < returns[ids[:, 0] == 1].mean()
    assert mixed.provenance["recorded"]["return"] == pytest.approx(returns.mean())
    low, high = mixed.provenance["recorded"]["return_interval"]
    assert low < returns.mean() < high
    assert (mixed.provenance["training_seed"], mixed.provenance["run"]) == (0, "mappo-0")
    with pytest.raises(RunError, match="started with other --steps or --num-envs: give the same"):
        record_from_run(run, "mixed=random:1+expert:3", steps=400)
    shutil.rmtree(out / "probe/observation.vlt/mappo-0-replay")
    assert record_from_run(run, "medium-replay").data["vaults"][0]["tier"] == "medium-replay"
    with pytest.raises(RunError, match="kept no training data"):
        record_from_run(run, "replay")
    run = run.rename(tmp_path / "moved")
    with pytest.raises(OptionError, match=r"moved was moved: give --out"):
        record_from_run(run, "good")


@pytest.mark.slow
def test_a_vault_of_another_recording_is_found_before_the_training(recorded, tmp_path):
    out, name = tmp_path / "copy", Path("probe") / "observation.vlt" / "mappo-0-medium"
    shutil.copytree(recorded[0] / name, out / name)
    with pytest.raises(RunError, match=r"medium was started with training\.learning_rate=0\.0005"):
        mappo.main(small(out, learning_rate=1e-3))
    assert [path.name for path in out.rglob("*-0*")] == ["mappo-0-medium"]


@pytest.mark.slow
def test_an_expert_that_did_not_learn_is_no_expert(tmp_path):
    args = small(tmp_path, tiers="expert,mixed=random:1+medium:1,random", learning_rate=1e-9)
    for _ in range(2):
        with pytest.raises(NotLearnedError) as refused:
            mappo.main(args)
        assert str(refused.value).count("mappo with seed 0 did not learn probe/observation") == 1
    run = tmp_path / "probe" / "observation.run" / "mappo-0"
    assert tracking.read_run(run)["complete"] and load_policy(run).name == "mappo"
    vaults = tmp_path / "probe" / "observation.vlt"
    assert [path.name for path in vaults.iterdir()] == ["mappo-0-random"]
    assert record_from_run(run, "random").data["vaults"][0]["steps"] == 400
    with pytest.raises(RunError, match="kept no training data"):
        mappo.main(replace(args, tiers="replay"))


@dataclass(frozen=True, kw_only=True)
class Lottery(Xor):
    """A round of XOR, which is won by different actions."""

    def step(self, key, state, action):
        state, timestep = super().step(key, state, action)
        return state, timestep._replace(won=timestep.reward[0] > 0)


def test_evaluations_log_how_often_the_agents_win(tmp_path, monkeypatch):
    monkeypatch.setattr(envs, "make", lambda _: Lottery(name="lottery", time_limit=1))
    sizes = {"num_envs": 2, "num_steps": 4, "updates": 1, "hidden": 4, "eval_episodes": 8}
    args = vdn.Args(
        env="lottery", tiers="", out=tmp_path, total_steps=8, evaluations=1, seeds=2, **sizes
    )
    vdn.main(args)
    rows = [row for row in metrics_of(tmp_path / "lottery.run/vdn-0-to-1") if "episode_won" in row]
    assert {(row["seed"], row["step"]) for row in rows} == {(0, 0), (1, 0), (0, 8), (1, 8)}
    for row in rows:
        for way in ("", "greedy_"):
            returns = np.array(row[f"{way}episode_return"])
            np.testing.assert_array_equal(row[f"{way}episode_won"], returns == 1)
    assert 0 < np.mean([row["episode_won"] for row in rows]) < 1


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"tiers": "exprt"}, UnknownNameError, "did you mean expert"),
        ({"env": "probe/mach"}, UnknownNameError, "probe/match"),
        ({"num_envs": 0}, OptionError, "num_envs must be at least 1, not 0"),
        ({"minibatches": 129}, OptionError, "128 windows .* cannot be divided into 129"),
    ],
)
def test_arguments_that_cannot_be_leave_nothing_behind(tmp_path, change, error, message):
    with pytest.raises(error, match=message):
        mappo.main(small(tmp_path, **change))
    assert not list(tmp_path.iterdir())


@pytest.mark.nightly
def test_damaged_checkpoints_are_made_anew_as_the_errors_advise(recorded, tmp_path):
    out = tmp_path / "copy"
    shutil.copytree(recorded[0], out)
    run = out / "probe" / "observation.run" / "mappo-0"
    shutil.rmtree(run / "checkpoints" / "32")  # of a finished run
    mappo.main(small(out))
    assert content(out) == content(recorded[0])
    for version in (run / "policies").iterdir():
        (version / "about" / "metadata").write_text("{}")
    (run / "checkpoints" / "32" / "about" / "metadata").write_text("{}")
    shutil.rmtree(out / "probe" / "observation.vlt" / "mappo-0-medium")
    record = tracking.read_run(run)
    tracking.write_json(run / tracking.RUN_FILE, {**record, "complete": False})
    with (
        pytest.warns(UserWarning, match="renamed to 32.damaged, and the run starts from the begin"),
        pytest.raises(CheckpointError, match=r"policies/\d+ is damaged .* delete .*mappo-0 and"),
    ):
        mappo.main(small(out))
    shutil.rmtree(run)
    mappo.main(small(out))
    assert content(out) == content(recorded[0])
