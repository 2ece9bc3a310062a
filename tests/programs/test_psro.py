"""Populations of responses: self-play, fictitious self-play and PSRO."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

import offmarl
from offmarl import settings, tracking, vault
from offmarl.cli import tasks
from offmarl.errors import OptionError, RunError, UnknownNameError
from offmarl.launch import launch
from offmarl.paths import remember_paths
from offmarl.programs import record_from_run
from offmarl.programs.recording.recorder import run_directory
from offmarl.programs.runs import evaluate, loop
from recorders import ippo, psro
from recorders.psro import Args, main, work
from tests.rollouts import differ
from tests.runs import write_run

SMALL = Args(
    env="classic/rps:rock=2",
    oracle_option=("num_steps=4", "hidden=4", "layers=1", "minibatches=1", "epochs=1"),
    iterations=3,
    response_steps=64,
    num_envs=4,
    episodes=32,
    steps=64,
)


def traced_once_for(monkeypatch, module, name, times, **how):
    """Check that a compiled function is traced this many times, and not again."""
    traced = chex.assert_max_traces(getattr(module, name).__wrapped__, n=times)
    monkeypatch.setattr(module, name, jax.jit(traced, **how))


def content(args):
    """Return the bytes that a command wrote: members, payoffs, strategies and matches."""
    population = work(args)
    run = population.path
    params = [
        offmarl.load_policy(run, seed, step=number).params
        for seed in population.seeds
        for number in range(args.iterations + 1)
    ]
    digests = [vault.open_vault(path).digest() for path in population.vaults.values()]
    return json.loads((run / "population.json").read_text()), digests, jax.device_get(params)


def test_blocks_need_those_before_them_of_their_seed(tmp_path):
    population = work(replace(SMALL, seeds=2, out=tmp_path))
    assert population.num_blocks == 2 * (4 * 2 + 4 * 4 + 1)
    for block, part in enumerate(population.parts):
        needs = population.needs(block)
        assert all(other < block and population.parts[other].seed == part.seed for other in needs)
    assert len(population.needs(population.num_blocks - 1)) == population.num_blocks // 2 - 1
    assert population.label(0) == "response 0-0 of seed 0"


@pytest.mark.slow
def test_a_population_is_compiled_once_and_its_members_are_those_of_any_run(tmp_path, monkeypatch):
    args = replace(SMALL, out=tmp_path)
    traced_once_for(monkeypatch, loop, "learn_steps", 2, static_argnums=(0, 1, 2), donate_argnums=3)
    traced_once_for(monkeypatch, evaluate, "play_against", 1, static_argnums=(0, 1, 2, 3))
    data = main(args).data
    run = Path(data["run"])
    assert run == tmp_path / "classic/rps:rock=2.run/psro-ippo-nash-0"
    population = json.loads((run / "population.json").read_text())
    (of_seed,) = population["seeds"].values()
    returns = np.array(of_seed["returns"])
    assert returns.shape == (2, 4, 4) and population["episodes"] == 32
    np.testing.assert_allclose(returns[0], -returns[1])
    for size, strategies in enumerate(of_seed["strategies"], start=1):
        np.testing.assert_allclose(np.sum(strategies, axis=1), 1)
        assert np.shape(strategies) == (2, size)
    assert offmarl.load_policy(run, step=3).spec.num_agents == 2
    last, untrained = (offmarl.load_policy(run, step=step).params for step in (3, 0))
    chex.assert_trees_all_equal(last, offmarl.load_policy(run).params)
    assert differ(last, untrained)
    matches = vault.open_vault(data["vaults"][0]["path"])
    assert {*np.unique(matches.episodes.policy_id)} <= {*range(8)}
    (mixture,) = data["mixtures"].values()
    assert mixture["first"].startswith(f"{run}@0/") and {*mixture} == {"first", "second"}
    assert main(args).data["outcome"].startswith("complete already")
    monkeypatch.chdir(tmp_path)
    remember_paths([])
    assert main(replace(args, out=Path())).data["run"] == str(run.relative_to(tmp_path))  # as typed
    with pytest.raises(RunError, match=r"with args.episodes 32, not 16: choose another"):
        main(replace(args, episodes=16))
    with pytest.raises(RunError, match="no versions to choose tiers from"):
        record_from_run(run, "medium")
    with pytest.raises(RunError, match="keeps policies alone"):
        ippo.main(ippo.Args(env=args.env, init=run, out=tmp_path / "init"))
    digest, record = matches.digest(), (run / "run.json").read_text()
    shutil.rmtree(matches.path)
    monkeypatch.setattr(psro, "collect", None)  # nothing is learned again
    assert main(args).data["outcome"] == "recorded"
    assert vault.open_vault(matches.path).digest() == digest
    assert (run / "run.json").read_text() == record
    with pytest.raises(RunError, match="started with other --steps or --num-envs"):
        main(replace(args, steps=128))
    (run / "population.json").write_text("{}")
    with pytest.raises(RunError, match=r"population.json is damaged: remove"):
        main(args)


@pytest.mark.slow
def test_one_task_and_two_make_the_same_bits(tmp_path):
    args = replace(SMALL, meta="alpha-rank", iterations=1, out=tmp_path / "whole")
    main(args)
    shared = replace(args, out=tmp_path / "shared")
    for block in range(4):
        work(shared).run(block)  # killed before the block was noted
    flags = tyro_arguments(shared)
    launch(work(shared), f"{tasks.__name__}:work_of", ("record", "", "psro", *flags), 2, workers=2)
    expected, result = content(args), content(shared)
    assert expected[:2] == result[:2]
    chex.assert_trees_all_equal(expected[2], result[2])


def tyro_arguments(args):
    """Arguments of the command that gives these values."""
    for name, value in vars(args).items():
        several = isinstance(value, tuple)
        yield from (f"--{name.replace('_', '-')}", *map(str, value if several else [value]))


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"env": "classic/xor"}, OptionError, "has one team, .* give --side .* such as agent_0"),
        ({"oracle": "random"}, OptionError, "--oracle random learns no response"),
        ({"oracle": "psro"}, OptionError, "--oracle psro learns no response"),
        ({"oracle": "mine.py"}, UnknownNameError, "mine.py"),
        ({"oracle_option": ("hidden",)}, OptionError, "hidden is not KEY=VALUE"),
        ({"oracle_option": ("seeds=3",)}, OptionError, "seeds cannot be set"),
        ({"oracle_option": ("hiden=3",)}, OptionError, "did you mean hidden"),
        ({"oracle_option": ("hidden=few",)}, OptionError, "hidden cannot be 'few'"),
    ],
)
def test_what_cannot_be_a_population_is_refused_in_one_line(tmp_path, wrong, error, message):
    with pytest.raises(error, match=message) as refused:
        work(replace(SMALL, out=tmp_path, **wrong))
    assert "\n" not in str(refused.value)
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_sides_of_one_team_have_no_nash_equilibrium_of_opponents(tmp_path):
    args = replace(SMALL, env="classic/xor", side="agent_0", out=tmp_path, iterations=1)
    with pytest.raises(OptionError, match=r"classic/xor is not a zero-sum game .* give --meta cce"):
        work(args)
    data = main(replace(args, meta="cce", episodes=1)).data
    assert data["outcome"] == "recorded"
    (table,) = json.loads((Path(data["run"]) / "population.json").read_text())["seeds"].values()
    assert table["standard_errors"] == [[[None] * 2] * 2] * 2  # of one episode they are unknown


UNFAIR = """
from dataclasses import dataclass
from offmarl.envs.classic import RockPaperScissors

@dataclass(frozen=True, kw_only=True)
class Unfair(RockPaperScissors):
    def step(self, key, state, action):
        state, timestep = super().step(key, state, action)
        return state, timestep._replace(reward=timestep.reward.at[0].mul(2))
"""


@pytest.mark.slow
def test_nash_is_refused_before_anything_is_learned(tmp_path, monkeypatch):
    monkeypatch.setattr(psro, "collect", None)
    (tmp_path / "unfair.py").write_text(UNFAIR)
    args = replace(SMALL, env=f"{tmp_path / 'unfair.py'}:Unfair", out=tmp_path)
    with pytest.raises(OptionError, match=r"is not a zero-sum game"):
        main(args)


def test_the_oracle_has_the_package_s_settings_and_the_run_records_them(tmp_path, monkeypatch):
    packaged = '[ippo]\nlearning_rate = 0.002\nschedule = "linear"\nhidden = 8\nnum_envs = 2\n'
    (tmp_path / "classic.toml").write_text(packaged)
    with monkeypatch.context() as patch:
        patch.setattr(settings, "__file__", str(tmp_path / "__init__.py"))
        args = work(replace(SMALL, out=tmp_path)).args
    oracle = psro.oracle_of(args)[1]
    assert (oracle.learning_rate, oracle.schedule) == (0.002, "linear")
    assert (oracle.hidden, oracle.num_envs) == (4, 4)  # given
    assert work(args).args == args
    # A run that has begun keeps them, even if the package's files change.
    place = run_directory(args, f"psro-{SMALL.oracle}-{SMALL.meta}")
    run = write_run(place, "psro", None, [[1.0]])
    record = tracking.read_run(run)
    record["args"]["oracle_option"] = list(args.oracle_option)
    tracking.write_json(run / tracking.RUN_FILE, record)
    assert work(replace(SMALL, out=tmp_path)).args.oracle_option == args.oracle_option
