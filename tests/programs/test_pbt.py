"""Population based training of the seeds of a recorder."""

import json
from dataclasses import replace

import chex
import jax
import numpy as np
import pytest

from offmarl import load_policy, tracking, vault
from offmarl.errors import OptionError, RunError, UnknownNameError
from offmarl.programs import record_from_run
from offmarl.programs.program import hyperparameters
from offmarl.programs.recording import online
from offmarl.programs.recording.pbt import PopulationTraining
from offmarl.programs.recording.recorder import Version
from offmarl.programs.recording.tiers import Ladder
from offmarl.programs.runs import loop
from offmarl.report.pages import describe_run
from recorders import ippo, maddpg, masac, vdn
from tests.programs import bandit
from tests.runs import write_run

from .learning import begun

PBT = ("learning_rate=1e-4,1e-3", "gamma=0.99")


def args_of(tmp_path, **options):
    defaults = {"env": "probe/match", "tiers": "replay", "out": tmp_path, "num_envs": 4}
    defaults |= {"num_steps": 8, "total_steps": 320, "evaluations": 5, "eval_episodes": 8}
    return ippo.Args(**defaults | {"hidden": 8, "seeds": 5, "pbt": PBT} | options)


def returns_of(means):
    return np.array(means)[:, None] + np.array([-1.0, 1.0])


def test_the_worst_copies_the_best_and_perturbs_its_hyperparameters():
    population = PopulationTraining(
        ippo.Args(seed=3, seeds=5, pbt=("learning_rate=1e-4,1e-3", "gamma=.9"))
    )
    copies, log = population.replace(7, returns_of([1, 0, 5, 3, 2]), last=False)
    assert copies == {1: 2}
    assert log["pbt_parent"].tolist() == [3, 5, 5, 6, 7]
    before, after = log["pbt_learning_rate"], log["pbt_learning_rate_next"]
    np.testing.assert_allclose(before, [1e-4, 1e-3, 1e-4, 1e-3, 1e-4])
    assert min(abs(after[1] / 1e-4 - factor) for factor in (0.8, 1.2)) < 1e-6
    np.testing.assert_array_equal(np.delete(after, 1), np.delete(before, 1))
    gamma = log["pbt_gamma_next"][1]  # the difference to 1 is multiplied
    assert min(abs(gamma - value) for value in (0.92, 0.88)) < 1e-6
    assert [float(member.learning_rate) for member in population.members] == after.tolist()
    assert {float(member.clip) for member in population.members} == {np.float32(0.2)}


@pytest.mark.parametrize(("means", "last"), [([1, 0, 5, 3, 2], True), ([2, 2, 2, 2, 2], False)])
def test_nobody_is_replaced_at_the_end_or_by_an_equal(means, last):
    population = PopulationTraining(ippo.Args(seeds=5, pbt=PBT))
    copies, log = population.replace(7, returns_of(means), last)
    assert copies == {}
    assert log["pbt_parent"].tolist() == [0, 1, 2, 3, 4]


def test_a_fifth_is_replaced_and_draws_follow_from_seed_and_step():
    args = ippo.Args(seeds=20, pbt=("learning_rate=1e-3",))
    fitness = returns_of(np.arange(20))
    results = [PopulationTraining(args).replace(done, fitness, False) for done in (1, 1, 2)]
    assert {*results[0][0]} == {0, 1, 2, 3}
    assert {*results[0][0].values()} <= {16, 17, 18, 19}
    chex.assert_trees_all_equal(results[0][1], results[1][1])
    assert (
        results[0][1]["pbt_learning_rate_next"].tolist()
        != results[2][1]["pbt_learning_rate_next"].tolist()
    )


@pytest.mark.parametrize(
    ("pbt", "says"),
    [
        ("hidden=32,64", "no numeric hyperparameter named .hidden."),
        ("num-envs=32", "no numeric hyperparameter named"),
        ("learning_rate=-1e-4,1e-3", "learning_rate must be above 0 and finite, not -0.0001"),
        ("learning_rate=0", "must be above 0"),
        ("learning_rate=nan", "must be above 0"),
        ("entropy=0,0.01", "no factor changes 0"),
        ("gamma=1", "no factor changes 1"),
        ("gamma=1.5", "gamma must be from 0 to 1"),
        ("learning_rate", "give numbers"),
        ("learning_rate=fast", "give numbers"),
        ("learning_rate=" + ",".join(["1e-3"] * 6), "give --seeds 6 or more"),
        ("learning_rat=1", "did you mean learning_rate"),
        ("gamma=0.9 gamma=0.8", "names a hyperparameter twice"),
    ],
)
def test_what_cannot_change_is_refused_in_one_line(pbt, says, tmp_path):
    with pytest.raises((OptionError, UnknownNameError), match=says) as caught:
        ippo.main(args_of(tmp_path, pbt=pbt.split(" ")))
    assert "\n" not in str(caught.value)
    assert not [*tmp_path.rglob("run.json")]


def test_what_counts_at_the_start_alone_is_refused():
    with pytest.raises(OptionError, match=r"temperature=0.1: temperature counts at the start"):
        PopulationTraining(masac.Args(seeds=4, pbt=("temperature=0.1",)))


@pytest.mark.slow
@pytest.mark.parametrize(("program", "name"), [(vdn, "epsilon"), (maddpg, "noise")])
def test_the_policy_explores_by_the_hyperparameter_of_now(program, name):
    sizes = {"num_envs": 2, "num_steps": 4, "updates": 1, "batch_size": 2, "capacity": 8}
    args = program.Args(**sizes, hidden=4, env="probe/match")
    instance, state, _ = begun(program, args)
    other = hyperparameters(args, {name: 0.25})
    state, _ = jax.jit(instance.stages[0].update)(state, None, jax.random.key(1), other)
    assert getattr(instance.policy_params(state), name) == 0.25


def test_what_cannot_be_a_population_is_refused(tmp_path):
    with pytest.raises(OptionError, match="give --seeds 4 or more"):
        ippo.main(args_of(tmp_path, seeds=3))
    with pytest.raises(OptionError, match="give --side"):
        ippo.main(args_of(tmp_path, env="swarm/pursuit-2-1:evaders=learned"))
    sizes = {"env": "probe/match", "seeds": 4, "num_envs": 2, "total_steps": 8, "tiers": ""}
    with pytest.raises(OptionError, match="params and optimiser, which this program's state lacks"):
        bandit.main(bandit.Args(out=tmp_path, pbt=("rate=0.1,0.2",), **sizes))
    assert not [*tmp_path.rglob("run.json")]


def test_a_lineage_of_seeds_in_any_order(tmp_path):
    run = write_run(tmp_path / "run", "ippo", None, [[1.0], [2.0]])
    tracking.write_json(run / tracking.RUN_FILE, tracking.read_run(run) | {"seeds": [5, 3]})
    rows = [{"seed": seed, "step": 5, tracking.PARENT: 5} for seed in (5, 3)]
    (run / tracking.METRICS_FILE).write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    facts = json.dumps(describe_run(run).facts().rows)
    assert "1 replacements; the last come from seeds 5" in facts
    rows = [row | {"step": 6, tracking.PARENT: 7} for row in rows]
    tracking.append(run / tracking.METRICS_FILE, *rows)
    with pytest.raises(RunError, match="pbt_parent names no seed"):
        describe_run(run).facts()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Arguments of a population that was trained without a break."""
    args, compiled = args_of(tmp_path_factory.mktemp("whole")), loop.learn_steps._cache_size()
    ippo.main(args)
    # For the first state and for those that updates return: replacements compile nothing.
    assert loop.learn_steps._cache_size() <= compiled + 2
    return args


@pytest.mark.slow
def test_a_killed_population_has_the_same_lineage_and_the_same_bits(whole, tmp_path, monkeypatch):
    killed = replace(whole, out=tmp_path / "killed", checkpoint_seconds=0)
    evaluate, calls = online._Training.observe, []

    def die(self, done, states, returns):
        calls.append(done)
        if len(calls) == 4:
            raise KeyboardInterrupt  # after a checkpoint of replaced members
        return evaluate(self, done, states, returns)

    with monkeypatch.context() as patch:
        patch.setattr(online._Training, "observe", die)
        with pytest.raises(KeyboardInterrupt):
            ippo.main(killed)
    ippo.main(killed)

    runs = [args.out / "probe/match.run/ippo-0-to-4" for args in (whole, killed)]
    logs = [
        [row for row in tracking.read(run / "metrics.jsonl") if "wall_time" not in row]
        for run in runs
    ]
    assert logs[0] == logs[1]
    replaced = [row for row in logs[0] if row.get("pbt_parent", row["seed"]) != row["seed"]]
    assert 0 < len(replaced) <= 4  # one of five at each of the evaluations but the last
    for row in replaced:
        (winner,) = (
            x for x in logs[0] if (x["seed"], x["step"]) == (row["pbt_parent"], row["step"])
        )
        ratio = row["pbt_learning_rate_next"] / winner["pbt_learning_rate"]
        assert min(abs(ratio - 0.8), abs(ratio - 1.2)) < 1e-6
    for seed in range(5):
        policies = [load_policy(run, seed).params for run in runs]
        chex.assert_trees_all_equal(*policies)
        vaults = [
            vault.open_vault(args.out / f"probe/match.vlt/ippo-{seed}-replay")
            for args in (whole, killed)
        ]
        assert vaults[0].digest() == vaults[1].digest()
    assert f"{len(replaced)} replacements" in json.dumps(describe_run(runs[0]).facts().rows)


@pytest.mark.slow
def test_data_say_which_policy_acted_in_a_replaced_member(whole, monkeypatch):
    rows = [
        row
        for row in tracking.read(whole.out / "probe/match.run/ippo-0-to-4/metrics.jsonl")
        if "pbt_parent" in row
    ]
    row = next(row for row in rows if row["pbt_parent"] != row["seed"])
    (winner,) = (x for x in rows if (x["seed"], x["step"]) == (row["pbt_parent"], row["step"]))
    monkeypatch.setattr(Ladder, "check", lambda *_: None)  # whether or not medium is good enough
    monkeypatch.setattr(Ladder, "version", lambda *_: Version(8, ()))
    record_from_run(whole.out / "probe/match.run/ippo-0-to-4", "medium-replay")
    for tier, last in (("replay", 10), ("medium-replay", 8)):
        path = whole.out / f"probe/match.vlt/ippo-{row['seed']}-{tier}"
        policies = vault.open_vault(path).provenance["policies"]
        assert policies[-1]["policy_id"] == last
        (acted,) = (x for x in policies if x.get("training_steps") == row["step"])
        assert acted["return"] == pytest.approx(np.mean(winner["episode_return"]))
    with pytest.raises(RunError, match="population"):  # data of a seed depend on the others
        ippo.main(replace(whole, seeds=6))
