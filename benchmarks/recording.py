"""Cost of recording: the speed of a rollout with recording, relative to the same rollout without.

Without recording, the transitions and next views of a rollout are computed and dropped. With
recording, they go through the flashbax buffer and the writer's thread into a vault, until all data
is on the disk. The two take turns, and the median of the rounds is printed.
"""

import tempfile
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median

import jax
import tyro

from offmarl import envs
from offmarl.networks import PolicyConfig, init_policy, make_policy
from offmarl.programs import record_policy
from offmarl.rollout import init_rollout, rollout


@dataclass(frozen=True)
class Args:
    env: str = "swarm/coverage-8"
    """Environment."""
    num_envs: int = 64
    """Environments side by side."""
    num_steps: int = 8192
    """Time steps of each in a round."""
    rounds: int = 5
    """Rounds."""
    directory: Path = Path(tempfile.gettempdir())
    """Where the vaults go; the disk to measure with."""


CHUNK = 64


def main(args: Args) -> None:
    env = envs.make(args.env)
    config = PolicyConfig("feedforward")
    policy = make_policy(config, env.spec)
    params = init_policy(config, env.spec, jax.random.key(0))
    auto = envs.autoreset(env)
    play = jax.jit(partial(rollout, auto, policy, num_steps=CHUNK))

    def unrecorded(num_steps: int) -> None:
        state = init_rollout(auto, policy, jax.random.key(0), args.num_envs)
        for chunk in range(num_steps // CHUNK):
            key = jax.random.fold_in(jax.random.key(1), chunk)
            state, *seen = play(params, state, key)
            jax.block_until_ready(seen)

    def recorded(num_steps: int) -> None:
        with tempfile.TemporaryDirectory(dir=args.directory) as directory:
            path = Path(directory) / "bench.vlt" / "main"
            record_policy(env, policy, params, path, num_steps * args.num_envs, args.num_envs)

    def speed(run, num_steps: int) -> float:
        start = time.perf_counter()
        run(num_steps)
        return num_steps * args.num_envs / (time.perf_counter() - start)

    for run in (unrecorded, recorded):
        speed(run, CHUNK)
    ratios = []
    for _ in range(args.rounds):
        plain, with_record = speed(unrecorded, args.num_steps), speed(recorded, args.num_steps)
        ratios.append(with_record / plain)
        print(f"unrecorded {plain:10,.0f}   recorded {with_record:10,.0f}   ratio {ratios[-1]:.3f}")
    print(
        f"{args.env}, {args.num_envs} environments: recorded at {median(ratios):.1%} of the speed"
    )


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
