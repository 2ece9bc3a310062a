"""What sampling and seeds cost: ratios in one run.

Sampling: batches of windows drawn under jit from a dataset on the device, ours against a flashbax
trajectory buffer that holds the same leaves. Ours also has the exact next view at each step, also
at the end of an episode, which the buffer's windows do not have.

Seeds: ten seeds side by side in one program against ten runs one after the other, each with its
own compilation, as a user would start them.
"""

import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import flashbax
import jax
import numpy as np
import tyro

import offmarl
from offmarl import envs
from offmarl.networks import PolicyConfig, make_policy
from offmarl.programs import record_policy, registry


@dataclass(frozen=True)
class Args:
    env: str = "swarm/coverage-3"
    """Environment."""
    steps: int = 500_000
    """Steps of the dataset that is sampled from."""
    length: int = 20
    """Steps a window."""
    draws: int = 200
    """Batches a measurement."""
    rounds: int = 5
    """Measurements of each side, in turn."""
    program: str = "bc"
    """Baseline whose seeds are compared."""
    updates: int = 200
    """Updates of each run."""
    seeds: int = 10
    """Seeds."""


def record(args: Args, directory: Path, steps: int) -> Path:
    env = envs.make(args.env)
    path = directory / "bench.vlt" / str(steps)
    record_policy(env, make_policy(PolicyConfig("random"), env.spec), (), path, steps, 64)
    return path


def draw(sample: Callable, count: int) -> Callable:
    """Draw many batches in one program, keeping something of each so that none is skipped."""

    @jax.jit
    def run(data, key):
        def step(total, key):
            batch = sample(data, key)
            return total + sum(leaf.sum() for leaf in jax.tree.leaves(batch)), None

        return jax.lax.scan(step, 0.0, jax.random.split(key, count))[0]

    return run


def seconds(run: Callable, *args: object) -> float:
    start = time.perf_counter()
    jax.block_until_ready(run(*args))
    return time.perf_counter() - start


def compare_sampling(args: Args, path: Path) -> None:
    dataset = offmarl.open(path)
    leaves = dataset.transitions()._asdict()
    leaves |= leaves.pop("view")._asdict()
    flat = {name: np.asarray(leaf).reshape(1, -1, *leaf.shape[2:]) for name, leaf in leaves.items()}
    for batch in (32, 256):
        replay = dataset.replay(batch, args.length)
        buffer = flashbax.make_trajectory_buffer(
            add_batch_size=1,
            max_length_time_axis=flat["last"].shape[1],
            min_length_time_axis=args.length,
            sample_batch_size=batch,
            sample_sequence_length=args.length,
            period=1,
        )
        state = buffer.init({name: leaf[0, 0] for name, leaf in flat.items()})
        state = jax.jit(buffer.add, donate_argnums=0)(state, flat)
        ours = draw(lambda replay, key: replay.sample(key), args.draws)
        theirs = draw(lambda state, key, b=buffer: b.sample(state, key).experience, args.draws)
        key = jax.random.key(0)
        seconds(ours, replay, key), seconds(theirs, state, key)
        rounds = [
            (seconds(theirs, state, key), seconds(ours, replay, key)) for _ in range(args.rounds)
        ]
        ratio = median(t / o for t, o in rounds)
        micro = [median(side) / args.draws * 1e6 for side in zip(*rounds, strict=True)]
        print(
            f"sample {batch:4d} windows: flashbax {micro[0]:7.0f} us, "
            f"offmarl {micro[1]:7.0f} us, flashbax / offmarl {ratio:.2f}"
        )


def compare_seeds(args: Args, path: Path, directory: Path) -> None:
    program = registry.load("baseline", args.program)

    def train(seed: int, seeds: int) -> float:
        options = program.Args(
            vault=path,
            out=directory / f"{seed}-{seeds}",
            env="none",
            held_out=0.0,
            seed=seed,
            seeds=seeds,
            updates=args.updates,
            eval_every=args.updates,
        )
        start = time.perf_counter()
        program.main(options)
        return time.perf_counter() - start

    together = train(0, args.seeds)
    apart = sum(train(seed, 1) for seed in range(args.seeds))
    print(
        f"{args.program}, {args.seeds} seeds of {args.updates} updates, compilation included: "
        f"together {together:.1f} s, one by one {apart:.1f} s, ratio {together / apart:.2f}"
    )


def main(args: Args) -> None:
    directory = Path(tempfile.mkdtemp())
    try:
        compare_sampling(args, record(args, directory, args.steps))
        compare_seeds(args, record(args, directory, 20_000), directory)
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
