"""Directories of runs with chosen returns or policies, as training writes them."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from offmarl import tracking
from offmarl.checkpoint import Checkpoints
from offmarl.networks import PolicyConfig, init_policy
from offmarl.programs import hyperparameters, registry
from offmarl.programs.recording.sides import keep_opponents, learning_environment, opponents_of
from offmarl.programs.registry import origin_of
from offmarl.programs.runs import run as runs
from offmarl.report import Comparison, DatasetResult, compare
from offmarl.types import ArrayTree, Discrete, EnvSpec
from tests import plain


def write_run(
    directory: Path,
    program: str,
    vault: str | None,
    returns: Sequence,
    greedy_returns: Sequence | None = None,
    *,
    env: str = "swarm/coverage-3",
    sampled_returns: Sequence | None = None,
    metric: str = tracking.RETURN,
    **record: Any,
) -> Path:
    """Write a finished run with the final returns given, ``(seeds, episodes)``.

    A run with ``greedy_returns`` is one of a policy that draws its actions, as
    ``greedy=False`` is; ``sampled_returns`` are those of one that could. ``record`` is added to
    what ``run.json`` says. ``metric`` is that of ``returns``.
    """
    seeds = list(range(len(returns)))
    run = runs.open_run(
        directory,
        {
            "offmarl": "0.1.0",
            "kind": "baseline",
            "program": program,
            "file": None,
            "sha256": None,
            "args": {"learning_rate": 3e-4, "vault": vault},
            "spec": EnvSpec(env, 3, 58, 112, Discrete(5)).to_json(),
            "greedy": greedy_returns is None,
            "vault": vault,
            "seeds": seeds,
        }
        | record,
    )
    evaluated = {
        metric: returns,
        tracking.GREEDY_RETURN: greedy_returns,
        tracking.SAMPLED_RETURN: sampled_returns,
    }
    for name, by_seed in evaluated.items():
        for seed, values in zip(seeds, by_seed or (), strict=bool(by_seed)):
            tracking.append(run.metrics, {"seed": seed, "step": 10, name: list(map(float, values))})
    run.write_marl_eval(env)
    run.finish()
    return directory


def write_policy(
    directory: Path,
    config: PolicyConfig,
    spec: EnvSpec,
    seeds: list[int],
    later: Mapping[int, float] = {},
    **record: object,
) -> ArrayTree:
    """Write a run with policies fresh from their seeds; return their parameters, ``(seeds, ...)``.

    ``later`` are the steps of further checkpoints, and what multiplies the parameters there.
    ``record`` is added to what ``run.json`` says.
    """
    directory.mkdir(parents=True)
    keys = jax.vmap(jax.random.key)(jnp.array(seeds))
    params = jax.jit(jax.vmap(lambda key: init_policy(config, spec, key)))(keys)
    origin = origin_of(plain.make)
    run = {
        "kind": "baseline",
        **origin._asdict(),
        "program": "test",
        "args": {"vault": "data.vlt", **asdict(config)},
        "spec": spec.to_json(),
        "seeds": seeds,
    }
    tracking.write_json(directory / tracking.RUN_FILE, run | record)
    checkpoints = Checkpoints(directory / tracking.CHECKPOINTS)
    for step, factor in {1: 1.0, **later}.items():
        policy = jax.tree.map(lambda leaf, factor=factor: factor * leaf, params)
        checkpoints.save(step, {"policy": policy, "state": jnp.zeros(2)}, {})
    return params


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """Return a run's JSON lines without the times, which differ between equal runs."""
    return [
        {name: value for name, value in row.items() if name not in tracking.TIMES}
        for row in tracking.read(run / tracking.METRICS_FILE)
    ]


def scores_of(run: Path) -> str:
    """Return a run's ``marl_eval.json`` without the times, which differ between equal runs."""
    text = (run / tracking.MARL_EVAL_FILE).read_text()
    return re.sub(r'\s*"(elapsed_time|steps_per_second)": [^,]*,', "", text)


def compared(scores: Any, *options: Any, **of_each: Any) -> Comparison:
    """Compare scores by dataset and entry; ``of_each`` are further fields of their results."""
    results = {
        name: {entry: DatasetResult(values, **of_each) for entry, values in entries.items()}
        for name, entries in scores.items()
    }
    return compare(results, *options)


SIDE_ENV = "swarm/pursuit-2-1:evaders=learned,time_limit=3"


def write_side(
    directory: Path,
    env: str = SIDE_ENV,
    side: str = "pursuers",
    opponents: tuple[str, ...] = ("random",),
) -> Path:
    """Write the finished run of a recorder of one side, with a policy fresh from its seed.

    It is what is published in full: everything that a run can name is in its record.
    """
    program = registry.load("recorder", "mappo")
    args = program.Args(env=env, side=side, opponents=opponents, hidden=4, num_envs=2)
    game = learning_environment(args)
    built = program.make(game.spec, args, game)
    init = jax.jit(lambda key: built.policy_params(built.init(key, hyperparameters(args))))
    record = {"offmarl": "0.1.0", "kind": "recorder", **origin_of(program.make)._asdict()}
    record["program"] = record.pop("name")
    record |= {"args": {**asdict(args), "out": None}, "spec": game.spec.to_json(), "greedy": False}
    record |= {"vault": None, "seeds": [0], "complete": True} | opponents_of(game)
    directory.mkdir(parents=True)
    tracking.write_json(directory / tracking.RUN_FILE, record)
    checkpoints = Checkpoints(directory / tracking.CHECKPOINTS)
    policy = jax.device_get(init(jax.random.key(0)))
    checkpoints.save(1, {"policy": jax.tree.map(lambda leaf: leaf[None], policy)}, {})
    keep_opponents(game, directory)
    return directory


def least_record(**changes):
    """The least content of ``run.json``, with changes."""
    spec = EnvSpec("", 1, 2, 2, Discrete(2)).to_json()
    record = {"kind": "baseline", "program": "bc", "args": {}, "spec": spec, "seeds": [0]}
    return record | {"file": None, "sha256": None} | changes
