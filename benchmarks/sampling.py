"""What mixtures, weights and priorities cost beside uniform sampling, as ratios in one run.

    python benchmarks/sampling.py [--only sampling|updates] [--steps 1000000]
        [--out benchmarks/results/sampling.json]

"sampling" times batches of windows of 20 under jit, from data of 1360 bytes a step in episodes of 8
and of 50 steps. "updates" times whole updates of QMIX+CQL at the SMAX 8m shape (8 agents, O 205,
S 192, B 32, T 20) in the training loop, with and without prioritised replay.
"""

import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.results import Row, measured, write
from benchmarks.windows import (
    BYTES_1360,
    SMAX,
    calls,
    in_turn,
    keeping_last,
    make,
    random_replay,
)
from offmarl.programs.runs.loop import Learned, _update
from offmarl.programs.runs.sharding import SeedLayout
from offmarl.replay.priorities import Prioritised
from offmarl.replay.starts import Uniform, segments


@dataclass(frozen=True)
class Args:
    only: Literal["sampling", "updates"] | None = None
    """Which of the parts; all by default."""
    steps: int = 1_000_000
    """Steps that batches are sampled from."""
    draws: int = 50
    """Batches of a measurement."""
    rounds: int = 7
    """Measurements of each way, in turn."""
    out: Path | None = None
    """File of results that takes the rows."""


def report_sampling(args: Args) -> Row:
    looped = []
    for batch in (32, 256):
        uniform, _ = random_replay(BYTES_1360, args.steps, batch)
        count = uniform.num_slots
        half, rng = count // 2, np.random.default_rng(0)
        mixture = segments(
            np.array([0, half + 20]), np.array([half, half - 20]), np.array([0.7, 0.3]), count
        )
        weighted = segments(np.arange(count), np.ones(count, int), rng.random(count) ** 4, count)
        factors = jnp.asarray(rng.random(count + 20), jnp.float32)
        ways = {
            "uniform": uniform,
            "mixture": replace(uniform, starts=jax.device_put(mixture)),
            "weights": replace(uniform, starts=jax.device_put(weighted), factors=factors),
        }
        for measure, wrap in (("one a call", calls), ("in a loop", keeping_last)):
            run = wrap(lambda way, key: way.sample(key), args.draws)
            runs = {name: partial(run, way, jax.random.key(1)) for name, way in ways.items()}
            took = in_turn(runs, args.rounds, args.draws)
            each = ", ".join(
                f"{name} {micro:.0f} ({micro / took['uniform']:.2f})"
                for name, micro in took.items()
            )
            print(f"{batch} windows {measure}, us (against uniform): {each}")
        looped.append([took[way] / took["uniform"] for way in ("mixture", "weights")])
    return measured(
        __file__,
        "mixture, weights over uniform sampling in a loop, 32 and 256 windows",
        "; ".join(f"{mixture:.2f}, {weights:.2f}" for mixture, weights in looped),
        aim="1.1",
        met=max(map(max, looped)) <= 1.1,
    )


def report_updates(args: Args) -> Row:
    program, hyper = make("qmix_cql", SMAX)
    replay, _ = random_replay(SMAX, 20_000, 32)
    prioritised = Prioritised(Uniform(replay.num_slots), 0.6, 0.4, 100, replay.num_slots, 32)
    single = jax.tree.map(lambda leaf: leaf[None], hyper)
    state = jax.jit(program.init)(jax.random.key(0), hyper)
    keys = jax.random.split(jax.random.key(1), 1)

    def run(draws: Any) -> Any:
        begun = None if draws is None else jax.jit(lambda d: d.begin(keys[:0]))(draws)
        holder = [jax.tree.map(lambda leaf: jnp.array(leaf)[None], Learned(state, begun))]

        def go() -> Any:
            holder[0], metrics = _update(
                program.stages[0],
                SeedLayout(1),
                holder[0],
                (keys, single, np.ones(1, bool)),
                (0, 0, 10),
                replay,
                draws,
            )
            return metrics

        return go

    took = in_turn({"uniform": run(None), "prioritised": run(prioritised)}, args.rounds, 10)
    ratio = took["prioritised"] / took["uniform"]
    each = ", ".join(f"{name} {micro / 1e3:.1f} ms" for name, micro in took.items())
    print(f"QMIX+CQL update, SMAX 8m: {each}; prioritised / uniform {ratio:.3f}")
    return measured(
        __file__,
        "update of QMIX+CQL, SMAX 8m, with and without prioritised replay",
        f"{took['prioritised'] / 1e3:.1f}, {took['uniform'] / 1e3:.1f} ms",
        ratio=f"{ratio:.2f}",
    )


def main(args: Args) -> None:
    rows = []
    if args.only != "updates":
        rows.append(report_sampling(args))
    if args.only != "sampling":
        rows.append(report_updates(args))
    if args.out:
        write(args.out, rows)


if __name__ == "__main__":
    main(tyro.cli(Args))
