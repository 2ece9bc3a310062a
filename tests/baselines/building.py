"""Programs and states of them that tests build without training."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from offmarl._compiling import QUICKLY
from offmarl.programs import DatasetStatistics, Program, hyperparameters, registry
from offmarl.programs.program import structure
from offmarl.types import EnvSpec, Sequence
from tests.rollouts import SPEC, zeros_like


def build(
    program: Any, spec: EnvSpec = SPEC, statistics: Any = None, **options: Any
) -> tuple[Program, Any]:
    """Return the program of a baseline, or of its name, and hyperparameters; both are small."""
    baseline = registry.load("baseline", program) if isinstance(program, str) else program
    args = baseline.Args(vault=Path(), **{"updates": 10, "hidden": 4} | options)
    instance = baseline.make(spec, structure(args), statistics or DatasetStatistics(None))
    return instance, hyperparameters(args)


def blank(program: Program, hyper: Any) -> Any:
    """Return a state of zeros, without compiling `init`."""
    return zeros_like(jax.eval_shape(program.init, jax.random.key(0), hyper))


THREE_WAYS = {
    "terminated": jnp.zeros((3, 2, 2), bool).at[1, 0].set(True),
    "truncated": jnp.zeros((3, 2, 2), bool).at[0, 1].set(True),
    "mask": jnp.array([[True, True], [True, False], [True, False]]),
    "next_known": jnp.array([[True, True], [True, True], [False, True]]),
}
"""Windows of two steps that end by a truncation, by a termination, and at what is not known."""


def metrics_of(program: Program, state: Any, batch: Sequence, hyper: Any) -> dict[str, Any]:
    """Return the metrics of an update of the last stage; no gradient is compiled."""

    def update(state: Any, batch: Sequence, hyper: Any) -> dict[str, Any]:
        _, metrics = program.stages[-1].update(state, batch, jax.random.key(1), hyper)
        return {name: value for name, value in metrics.items() if name != "grad_norm"}

    return jax.jit(update, compiler_options=QUICKLY)(state, batch, hyper)


def values_of(params: Any, values: list[float], layer: str = "head") -> Any:
    """Return agents whose network has these outputs, by its last layer, in every state."""
    params = jax.tree.map(jnp.zeros_like, params)
    params["params"][layer]["bias"] = jnp.array(values)
    return params


def weights_of(params: Any, weights: list[float], constant: float) -> Any:
    """Return a linear mixer with the same weights in all states."""
    params = jax.tree.map(jnp.zeros_like, params)
    params["params"]["weights"]["bias"] = jnp.array(weights)
    params["params"]["constant"]["bias"] = jnp.array([constant])
    return params


def spread_like(tree: Any, scale: float) -> Any:
    """Return a tree of random numbers of some standard deviation."""
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape) * scale, x.dtype), tree)


def repeated(program: Program, hyper: Any, batch: Sequence, updates: int) -> Any:
    """Return the state after updates with the same batch again and again, compiled whole."""

    @jax.jit
    def run(key: jax.Array) -> Any:
        def step(state: Any, key: jax.Array) -> Any:
            return program.stages[0].update(state, batch, key, hyper)[0], None

        keys = jax.random.split(key, updates)
        return jax.lax.scan(step, program.init(key, hyper), keys)[0]

    return run(jax.random.key(0))
