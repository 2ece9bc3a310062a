"""The least time of programs on an accelerator, from their arithmetic and the bytes they move.

    python benchmarks/forecast.py [--device "NVIDIA H100 80GB HBM3"]

Operations and bytes are counted in the traced program, whose loops count as often as they run
(XLA's own analysis counts the body of a loop once). Bytes are those that no fusion can save:
operands and results of products, gathers, scatters and sorts, and what a loop carries from step to
step. All other operations count as arithmetic, and are taken to be fused. A program that takes much
longer than the least time is bound by the launches of its kernels.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import windows
from offmarl import envs
from offmarl.networks import PolicyConfig, make_policy
from offmarl.replay import Replay
from offmarl.rollout import init_rollout, rollout

_PEAKS = {
    "H100": (495e12, 3.35e12),
    "H200": (495e12, 4.8e12),
    "A100": (156e12, 2.04e12),
}
"""Operations/s of products of float32 by tensor cores (TF32, dense), and bytes/s of the memory, by
NVIDIA's data sheets of the SXM modules."""

_MOVING = ("dot_general", "conv_general_dilated", "gather", "scatter", "sort", "cum")
_MOVING += ("dynamic_slice", "dynamic_update_slice")


class Cost(NamedTuple):
    """What a program does."""

    operations: float
    bytes: float

    def least_seconds(self, flops: float, bandwidth: float) -> float:
        """Return the time that neither peak allows to be shorter."""
        return max(self.operations / flops, self.bytes / bandwidth)


def peaks(device: str) -> tuple[float, float] | tuple[None, None]:
    """Return a device's operations/s and bytes/s; None where they are unknown."""
    return next((peak for name, peak in _PEAKS.items() if name in device), (None, None))


def cost_of(function: Callable[..., Any], *args: Any) -> Cost:
    """Count what a function does, without running it."""
    return _cost(jax.make_jaxpr(function)(*args).jaxpr)


def _cost(jaxpr: Any) -> Cost:
    costs = [_cost_of_equation(equation) for equation in jaxpr.eqns]
    return Cost(sum(x.operations for x in costs), sum(x.bytes for x in costs))


def _cost_of_equation(equation: Any) -> Cost:
    name, params = equation.primitive.name, equation.params
    inner = [
        getattr(one, "jaxpr", one)
        for value in params.values()
        for one in (value if isinstance(value, list | tuple) else [value])
        if hasattr(one, "eqns") or hasattr(getattr(one, "jaxpr", None), "eqns")
    ]
    if name == "cond":
        return max(map(_cost, inner), key=lambda cost: cost.operations)
    if inner:
        each = [_cost(one) for one in inner]
        once = Cost(sum(x.operations for x in each), sum(x.bytes for x in each))
        if name != "scan":
            return once
        pairs = zip(equation.outvars, inner[0].outvars, strict=True)  # the others are stacked
        carried = sum(_bytes(one) for one, own in pairs if one.aval.shape == own.aval.shape)
        length = params["length"]
        return Cost(length * once.operations, length * (once.bytes + 2 * carried))
    size = sum(prod(one.aval.shape) for one in equation.outvars)
    if name == "dot_general":
        ((contracted, _), _) = params["dimension_numbers"]
        size *= 2 * prod(equation.invars[0].aval.shape[axis] for axis in contracted)
    moves = name.startswith(_MOVING)
    moved = sum(map(_bytes, equation.outvars))
    if not name.startswith(("gather", "dynamic_slice")):  # these read what they return
        moved += sum(map(_bytes, equation.invars))
    else:
        moved *= 2
    return Cost(size, moved if moves else 0)


def _bytes(variable: Any) -> int:
    shape, dtype = variable.aval.shape, variable.aval.dtype
    return prod(shape) * (
        4 if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) else dtype.itemsize
    )


# ---------------------------------------------------------------------------------- programs


@dataclass(frozen=True)
class Args:
    device: str = "H100"
    """The device to forecast for."""


def of_rollout(name: str, num_envs: int, steps: int) -> Cost:
    """Return the cost of a rollout with random legal actions."""
    env = envs.make(name)
    auto, policy = envs.autoreset(env), make_policy(PolicyConfig("random"), env.spec)
    key = jax.random.key(0)
    state = jax.eval_shape(lambda key: init_rollout(auto, policy, key, num_envs), key)
    return cost_of(partial(rollout, auto, policy, (), num_steps=steps), state, key)


def of_update(name: str) -> Cost:
    """Return the cost of an update of a baseline at the shape of SMAX 8m, with its batch."""
    program, hyper = windows.make(name, windows.SMAX)
    replay, _ = windows.random_replay(windows.SMAX, 2_000, 32)
    state = jax.eval_shape(program.init, jax.random.key(0), hyper)

    def update(state: Any, key: Any) -> Any:
        return program.stages[0].update(state, replay.sample(key), key, hyper)

    return cost_of(update, state, jax.random.key(0))


def of_batch(batch: int) -> Cost:
    """Return the cost of a batch of windows of 1,360 bytes a step, read once and written once."""
    replay, _ = windows.random_replay(windows.BYTES_1360, 2_000, batch)
    made = jax.eval_shape(Replay.sample, replay, jax.random.key(0))
    return Cost(0, 2 * sum(jnp.dtype(x.dtype).itemsize * x.size for x in jax.tree.leaves(made)))


def main(args: Args) -> None:
    """Print a table."""
    flops, bandwidth = peaks(args.device)
    if flops is None or bandwidth is None:
        sys.exit(f"the peaks of {args.device} are unknown: give one of {', '.join(_PEAKS)}")
    programs: dict[str, Callable[[], Cost]] = {
        f"rollout of {name}, {count:,} environments, 32 steps": partial(of_rollout, name, count, 32)
        for name, count in (
            ("swarm/coverage-10", 1024),
            ("swarm/coverage-100", 1024),
            ("swarm/coverage-1000", 64),
        )
    }
    programs |= {
        f"update of {name}, SMAX 8m": partial(of_update, name)
        for name in ("bc", "maicq", "qmix_cql", "oryx")
    }
    programs |= {f"{n} windows of 20 steps": partial(of_batch, n) for n in (32, 4096)}
    print(f"| program | operations | bytes | least time on {args.device} | bound by |")
    print("|---|---:|---:|---:|---|")
    for name, count in programs.items():
        cost = count()
        least = cost.least_seconds(flops, bandwidth)
        bound = "arithmetic" if cost.operations / flops >= least else "memory"
        counts = f"{cost.operations:.3g} | {cost.bytes:.3g}"
        print(f"| {name} | {counts} | {1e6 * least:,.1f} µs | {bound} |")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
