"""Everything that is meant to run on an accelerator, measured in at most eight minutes.

    python benchmarks/accelerator.py [--parts envs recording ...] [--jaxmarl CHECKOUT] [--tiny]

It runs on whatever device JAX has. Each measurement is printed and written at once to
``benchmarks/results/accelerator-DEVICE.json``, so that a run which is cut short keeps what it has;
parts that are measured again replace their old figures. Each part has its share of the time, and
leaves out what it does not reach. ``--tiny`` has sizes for a test on a CPU.

envs       environment steps/s of coverage with random legal actions: agents and environments
recording  rollouts with and without recording into a vault, and steps written to a disk
online     environment steps/s of training, beside JaxMARL's scripts if a checkout is given
sampling   batches of windows beside flashbax's trajectory buffer, and the memory's bandwidth
updates    updates/s of baselines with seeds side by side, and the share of the peak arithmetic

The least time of a program is that of its arithmetic at the device's peak, or of its bytes at the
memory's bandwidth, by `benchmarks.forecast`.
"""

import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, Literal, get_args

import flashbax
import jax
import jax.numpy as jnp
import numpy as np
import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import swarm, windows
from benchmarks.forecast import Cost, of_batch, of_update, peaks
from offmarl import envs
from offmarl.networks import PolicyConfig, init_policy, make_policy
from offmarl.programs import record_policy
from offmarl.programs.runs.loop import Learned, _update, start
from offmarl.programs.runs.sharding import SeedLayout
from offmarl.replay import Replay
from offmarl.rollout import init_rollout, rollout

Part = Literal["envs", "recording", "online", "sampling", "updates"]
Row = dict[str, Any]

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Args:
    parts: tuple[Part, ...] = get_args(Part)
    """What to measure."""
    minutes: float = 7.5
    """Time for all parts together."""
    rounds: int = 3
    """Measurements of each thing; the median counts."""
    tiny: bool = False
    """Small sizes, for a test."""
    jaxmarl: Path | None = None
    """A checkout of JaxMARL, whose scripts are measured beside ours."""
    out: Path = ROOT / "benchmarks" / "results"
    """Directory of the results."""


class Deadline:
    """Tells a part when its time is over."""

    def __init__(self, seconds: float):
        self._end = time.monotonic() + seconds

    def passed(self) -> bool:
        return time.monotonic() > self._end


def timed(run: Callable[[], Any], rounds: int) -> float:
    """Return the median seconds of a call; the first call, which compiles, does not count."""
    jax.block_until_ready(run())
    seconds = []
    for _ in range(rounds):
        begun = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - begun)
    return float(np.median(seconds))


def shares(cost: Cost, seconds: float) -> Row:
    """Return the least time by the device's peaks, and the shares of them that were reached."""
    flops, bandwidth = peaks(jax.devices()[0].device_kind)
    row: Row = {"operations": cost.operations, "bytes": cost.bytes}
    if flops and bandwidth:
        row |= {
            "least_seconds": cost.least_seconds(flops, bandwidth),
            "share_of_arithmetic": cost.operations / seconds / flops,
            "share_of_bandwidth": cost.bytes / seconds / bandwidth,
        }
    return row


# ---------------------------------------------------------------------------------- parts


def measure_envs(args: Args, deadline: Deadline) -> Iterator[Row]:
    agents, numbers = (10, 100, 1000), (1, 64, 1024, 8192, 65_536)
    if args.tiny:
        agents, numbers = (10,), (1, 4)
    for num_agents in agents:
        for num_envs in numbers:
            if deadline.passed():
                return
            row = {"env": f"swarm/coverage-{num_agents}", "num_envs": num_envs}
            try:
                runner = swarm.Runner(row["env"], num_envs, 32)
                speed = float(np.median([runner.speed(i + 1) for i in range(args.rounds)]))
            except (swarm.DoesNotFitError, jax.errors.JaxRuntimeError) as problem:
                yield row | {"failed": str(problem)[:200]}
                break
            yield row | {
                "env_steps_per_second": speed,
                "agent_steps_per_second": speed * num_agents,
            }


def measure_recording(args: Args, deadline: Deadline) -> Iterator[Row]:
    sizes = (("classic/xor", 4, 128),) if args.tiny else _RECORDED
    for name, num_envs, steps in sizes:
        if not deadline.passed():
            yield {"env": name, "num_envs": num_envs, **_recording(name, num_envs, steps, args)}


_RECORDED = (("swarm/coverage-8", 1024, 1024), ("swarm/coverage-100", 256, 1024))
"""Environments, their number, and time steps of each."""


def _recording(name: str, num_envs: int, steps: int, args: Args) -> Row:
    env, chunk = envs.make(name), 64
    config = PolicyConfig("feedforward")
    policy, auto = make_policy(config, env.spec), envs.autoreset(env)
    params = init_policy(config, env.spec, jax.random.key(0))
    play = jax.jit(partial(rollout, auto, policy, num_steps=chunk))

    def unrecorded() -> None:
        state = init_rollout(auto, policy, jax.random.key(0), num_envs)
        for number in range(steps // chunk):
            state, *seen = play(params, state, jax.random.key(number))
            jax.block_until_ready(seen)

    with tempfile.TemporaryDirectory() as directory:
        paths = (Path(directory) / f"{number}.vlt" / "main" for number in count())

        def recorded() -> None:
            record_policy(env, policy, params, next(paths), steps * num_envs, num_envs)

        plain, with_record = timed(unrecorded, args.rounds), timed(recorded, args.rounds)
        files = [x.stat().st_size for x in Path(directory).rglob("*") if x.is_file()]
    return {
        "env_steps_per_second": steps * num_envs / plain,
        "recorded_steps_per_second": steps * num_envs / with_record,
        "recorded_share": plain / with_record,
        "written_bytes_per_second": sum(files) / (args.rounds + 1) / with_record,
    }


def measure_online(args: Args, deadline: Deadline) -> Iterator[Row]:
    from benchmarks import online

    online.replace_imports()
    coverage = {
        name: online.Pair(name, "swarm/coverage-8", {"num_envs": number}, "", "")
        for name, number in (("mappo", 1024), ("qmix", 64))
    }
    pairs = {f"{name} recurrent, coverage-8": pair for name, pair in coverage.items()}
    cases = ("mappo recurrent, simple_spread", "mappo recurrent, 3m", "qmix, simple_spread")
    pairs |= {name: online.PAIRS[name] for name in (*cases, "qmix, 3m")}
    if args.tiny:
        pairs = {"mappo, xor": online.Pair("mappo", "classic/xor", {"num_envs": 4}, "", "")}
    for name, pair in pairs.items():
        if deadline.passed():
            return
        steps = 1000 if args.tiny else 400_000
        ours = online.our_speed(pair, steps)
        row = {"training": name, "env_steps_per_second": float(np.median([ours(), ours()]))}
        if args.jaxmarl is not None and pair.script and not deadline.passed():
            theirs = online.their_speed(pair, args.jaxmarl, steps)
            peer = float(np.median([theirs(), theirs()]))
            row |= {"jaxmarl": peer, "ratio": row["env_steps_per_second"] / peer}
        yield row


def measure_sampling(args: Args, deadline: Deadline) -> Iterator[Row]:
    spec, steps = windows.BYTES_1360, 2_000 if args.tiny else 1_000_000
    for batch in (32, 256, 4096)[: 1 if args.tiny else 3]:
        if deadline.passed():
            return
        replay, _ = windows.random_replay(spec, steps, batch)
        buffer = flashbax.make_trajectory_buffer(
            add_batch_size=1,
            max_length_time_axis=steps,
            min_length_time_axis=windows.WINDOW,
            sample_batch_size=batch,
            sample_sequence_length=windows.WINDOW,
            period=1,
        )
        state = buffer.init(windows.leaves_of(spec)).replace(is_full=jnp.array(True))
        ways: dict[str, tuple[Callable[[Any, Any], Any], Any]] = {
            "ours": (Replay.sample, replay),
            "flashbax": (lambda state, key, b=buffer: b.sample(state, key).experience, state),
        }
        draws, took, row = 5 if args.tiny else 200, {}, {"batch": batch, "window": windows.WINDOW}
        for name, (sample, data) in ways.items():
            run = windows.keeping_last(sample, draws)
            took[name] = timed(partial(run, data, jax.random.key(1)), args.rounds) / draws
        yield row | {
            "seconds": took["ours"],
            "flashbax": took["flashbax"],
            "ratio": took["ours"] / took["flashbax"],
            **shares(of_batch(batch), took["ours"]),
        }


def measure_updates(args: Args, deadline: Deadline) -> Iterator[Row]:
    spec, steps = windows.SMAX, 2_000 if args.tiny else 20_000
    replay, _ = windows.random_replay(spec, steps, 32)
    for name in ("bc",) if args.tiny else ("bc", "maicq", "qmix_cql", "oryx"):
        program, hyper = windows.make(name, spec)
        cost = of_update(name)
        for seeds in (1, 2) if args.tiny else (1, 10, 100):
            if deadline.passed():
                return
            number = 2 if args.tiny else 20
            several = jax.tree.map(lambda leaf, n=seeds: jnp.stack([leaf] * n), hyper)
            keys = jax.random.split(jax.random.key(1), seeds)
            learned = [Learned(start(program, keys, several), None)]
            rest = (keys, several, np.ones(seeds, bool)), (0, 0, number), replay, None

            def run(program=program, seeds=seeds, learned=learned, rest=rest) -> Any:
                learned[0], metrics = _update(
                    program.stages[0], SeedLayout(seeds), learned[0], *rest
                )
                return metrics

            row = {"program": name, "seeds": seeds, "shape": spec.name}
            try:
                seconds = timed(run, args.rounds) / number
            except jax.errors.JaxRuntimeError as problem:
                yield row | {"failed": str(problem)[:200]}
                break
            yield row | {
                "updates_per_second": seeds / seconds,
                **shares(Cost(seeds * cost.operations, seeds * cost.bytes), seconds),
            }


MEASURES: dict[Part, Callable[[Args, Deadline], Iterator[Row]]] = {
    "envs": measure_envs,
    "recording": measure_recording,
    "online": measure_online,
    "sampling": measure_sampling,
    "updates": measure_updates,
}
WEIGHTS = {"envs": 2, "recording": 1, "online": 3, "sampling": 1, "updates": 2}
"""Shares of the time."""


# ---------------------------------------------------------------------------------- results


def about() -> Row:
    """Return what the figures were measured on."""
    device = jax.devices()[0]
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "commit": commit.stdout.strip() or None,
        "date": datetime.now(UTC).date().isoformat(),
    }


def main(args: Args) -> Path:
    """Measure the parts, and return the file of the results."""
    document = about()
    name = "".join(x if x.isalnum() else "-" for x in document["device"].lower()).strip("-")
    path = args.out / f"accelerator-{name}.json"
    old = json.loads(path.read_text()).get("parts", {}) if path.exists() else {}
    parts = {key: value for key, value in old.items() if key not in args.parts}
    args.out.mkdir(parents=True, exist_ok=True)
    total = sum(WEIGHTS[part] for part in args.parts)
    for part in args.parts:
        begun, rows = time.monotonic(), []
        deadline = Deadline(60 * args.minutes * WEIGHTS[part] / total)
        try:
            for row in MEASURES[part](args, deadline):
                rows.append(row)
                print(part, json.dumps(row), flush=True)
                parts[part] = {**document, "rows": rows}
                path.write_text(json.dumps({"parts": parts}, indent=1) + "\n")
        except Exception as problem:  # the other parts count all the same
            print(f"{part} failed: {type(problem).__name__}: {problem}", flush=True)
        print(f"{part}: {time.monotonic() - begun:.0f} s", flush=True)
    return path


if __name__ == "__main__":
    print(main(tyro.cli(Args, description=__doc__)))
