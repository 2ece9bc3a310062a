"""Updates a second of recurrent baselines on one core, and what each optimisation brings.

    taskset -c 0 python benchmarks/updates.py [--programs maicq qmix_cql] [--rounds 9]

The shape is that of SMAX 8m: 8 agents, observations of 205 numbers, a state of 192, 32 windows of
20 steps, sampled and learned from in the training loop. Each way adds one change to the one above:

plain      the GRU is differentiated by JAX, window by window under `jax.vmap`, and linear layers
           are products over all leading axes
matrices   linear layers are products of two matrices
gradient   the GRU has a gradient of its own, over windows and agents as one axis
scheduler  XLA orders the operations for one core: offmarl as it is

The ways take turns in one process. The times are those of its CPU, so other processes disturb them
less; give the process one core, as above.
"""

import os
import sys

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.windows import SMAX, make, random_replay
from offmarl._compiling import in_order
from offmarl.networks import gru, linear, torsos
from offmarl.programs import registry
from offmarl.programs.runs import loop
from offmarl.programs.runs.compiling import keep_compiled_programs
from offmarl.programs.runs.sharding import SeedLayout

WAYS = "plain", "matrices", "gradient", "scheduler"


@dataclass(frozen=True)
class Args:
    programs: tuple[str, ...] = ("maicq", "qmix_cql")
    """Baselines."""
    rounds: int = 9
    """Measurements of each way, in turn."""
    updates: int = 5
    """Updates of a measurement."""


def unroll_plain(*args: Any) -> Any:
    return gru._unroll(*args).memory


def unroll_windows(network: Any, params: Any, observation: Any, first: Any) -> Any:
    unroll = partial(network.apply, params, method="unroll")
    return jax.vmap(unroll)(observation, first)[0]


@contextmanager
def way_of(way: str, program: str) -> Iterator[None]:
    """Undo the optimisations that a way does not have yet, while the block traces."""
    module = registry.load("baseline", program)
    with ExitStack() as stack:
        if way in ("plain", "matrices"):
            stack.enter_context(patch.object(torsos, "unroll_gru", unroll_plain))
            stack.enter_context(patch.object(module, "unroll_batch", unroll_windows))
        if way == "plain":
            stack.enter_context(patch.object(linear, "product", jnp.matmul))
        yield


def updates(name: str, way: str, count: int, replay: Any) -> Callable[[], Any]:
    """Compile some updates of a program in one of the ways; return what makes them."""
    program, hyper = make(name, SMAX)
    hyper, keys = jax.tree.map(lambda leaf: leaf[None], hyper), jax.random.split(jax.random.key(1))
    state = loop.start(program, keys[:1], hyper)
    options: Any = in_order() if way == WAYS[-1] else None
    update = jax.jit(
        loop._update_all, static_argnums=(0, 1, 2), donate_argnums=3, compiler_options=options
    )
    learned, done = loop.Learned(state, None), 0

    def run() -> Any:
        nonlocal learned, done
        place, rest = (done, 0, count), (keys[:1], hyper, np.ones(1, bool))
        learned, metrics = update(program, 0, SeedLayout(1), learned, rest, place, replay, None)
        done += count
        return jax.block_until_ready(metrics)

    with way_of(way, name):
        run()
    return run


def main(args: Args) -> None:
    keep_compiled_programs()
    replay, _ = random_replay(SMAX, 20_000, 32)
    for name in args.programs:
        runs = {way: updates(name, way, args.updates, replay) for way in WAYS}
        took: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(args.rounds):
            for way, run in runs.items():
                begun = time.process_time()
                run()
                took[way].append((time.process_time() - begun) / args.updates)
        plain = np.array(took["plain"])
        for way, seconds in took.items():
            print(
                f"{name:10} {way:10} {1e3 * np.median(seconds):6.1f} ms an update, "
                f"{1 / np.median(seconds):5.1f} updates/s, {np.median(plain / seconds):.2f} x plain"
            )


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
