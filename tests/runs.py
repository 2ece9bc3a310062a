"""Directories of runs, as training would leave them, with returns or policies of one's choice."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from offmarl import tracking
from offmarl.checkpoint import Checkpoints
from offmarl.networks import PolicyConfig, init_policy
from offmarl.types import ArrayTree, Discrete, EnvSpec


def write_run(directory: Path, program: str, vault: str | None, returns: Sequence) -> Path:
    """Write a finished run with the final returns given, ``(seeds, episodes)``."""
    directory.mkdir(parents=True)
    seeds = list(range(len(returns)))
    run = {
        "offmarl": "0.1.0",
        "kind": "baseline",
        "program": program,
        "args": {"learning_rate": 3e-4},
        "spec": EnvSpec("swarm/coverage-3", 3, 58, 112, Discrete(5)).to_json(),
        "policy": asdict(PolicyConfig("feedforward")),
        "vault": vault,
        "seeds": seeds,
        "complete": True,
    }
    final = np.asarray(returns, float)
    evaluations = tracking.marl_eval(
        "swarm", "coverage-3", program, seeds, [], {tracking.RETURN: final}
    )
    tracking.write_json(directory / tracking.RUN_FILE, run)
    tracking.write_json(directory / tracking.MARL_EVAL_FILE, evaluations)
    return directory


def write_policy(
    directory: Path, config: PolicyConfig, spec: EnvSpec, seeds: list[int], **record: object
) -> ArrayTree:
    """Write a run with policies fresh from their seeds; return their parameters, ``(seeds, ...)``.

    ``record`` is added to what ``run.json`` says.
    """
    directory.mkdir(parents=True)
    keys = jax.vmap(jax.random.key)(jnp.array(seeds))
    params = jax.jit(jax.vmap(lambda key: init_policy(config, spec, key)))(keys)
    run = {"program": "test", "spec": spec.to_json(), "policy": asdict(config), "seeds": seeds}
    tracking.write_json(directory / tracking.RUN_FILE, run | record)
    checkpoints = Checkpoints(directory / tracking.CHECKPOINTS)
    checkpoints.save(1, {"policy": params, "state": jnp.zeros(2)}, {})
    checkpoints.close()
    return params
