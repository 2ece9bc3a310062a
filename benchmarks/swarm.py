"""Speed of the swarm suite, as Markdown tables.

    python benchmarks/swarm.py

The full sweep measures every task with 10 to 4096 agents in 1 to 16,384 environments: random legal
actions, autoreset, scans of 128 steps, compiled and run once before timing. Rows are printed as
they are measured. Settings are skipped if they do not fit into the device's memory, or if a round
would take more than half a minute by the row before; the table says which. Select fewer with
``--tasks``, ``--agents`` and ``--envs``.

    taskset -c 0,1 python benchmarks/swarm.py --together 4000 --agents 100 1000 4000

This measures how the cost grows: each swarm size runs in as many environments as give about 4000
agents in all, in turns, so that only the size of the swarm differs.

    taskset -c 0,1 python benchmarks/swarm.py --variants --agents 8 1000

This measures what the options cost: the speed of each variant over that of the plain one, in turns.

There are half as many targets and evaders as agents, as many loads, and as many obstacles as fit
(flock). ``--dense`` compares all pairs for any size of the swarm.
"""

import argparse
import os
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import jax

from offmarl import envs
from offmarl.envs.swarm import neighbours
from offmarl.networks import PolicyConfig, make_policy
from offmarl.rollout import init_rollout, rollout

TASKS = ("coverage", "search", "delivery", "pursuit", "flock", "hover")
VARIANTS = (
    ("coverage", "", "collisions=elastic"),
    ("coverage", "", "obstacles=0.1"),
    ("coverage", "obstacles=0.1", "obstacles=0.1,opaque=true"),
    ("pursuit", "obstacles=0.1", "obstacles=0.1,opaque=true"),
    ("coverage", "", "randomise=full"),
    ("coverage", "dims=3,action=continuous", "dims=3,action=continuous,dynamics=quadrotor"),
    ("hover", "collisions=none", ""),
    ("hover", "", "control=motors"),
)
"""Tasks, the options of the plain variant, and those of the other one."""
AGENTS = (10, 100, 1000, 4096)
ENVS = (1, 16, 256, 4096, 16_384)
LONGEST_ROUND = 30.0


class DoesNotFitError(Exception):
    """The program needs more memory than the device has."""


class Runner:
    """A compiled scan in many environments, rewards summed and everything else dropped."""

    def __init__(self, name: str, num_envs: int, num_steps: int):
        env = envs.make(name)
        policy = make_policy(PolicyConfig("random"), env.spec)
        auto = envs.autoreset(env)

        def begin(key: jax.Array) -> Any:
            return init_rollout(auto, policy, key, num_envs)

        def run(state: Any, key: jax.Array) -> Any:
            def step(state: Any, key: jax.Array) -> Any:
                state, transition, *_ = rollout(auto, policy, (), state, key, 1)
                return state, transition.reward.sum()

            return jax.lax.scan(step, state, jax.random.split(key, num_steps))

        key = jax.random.key(0)
        shapes = jax.eval_shape(begin, key)
        self._run = jax.jit(run, donate_argnums=0).lower(shapes, key).compile()
        require_memory(self._run)
        self._steps = num_steps * num_envs
        self._state = jax.jit(begin)(key)
        self.speed(0)

    def speed(self, seed: int) -> float:
        """Run once more; return environment steps a second."""
        start = time.perf_counter()
        self._state, _ = jax.block_until_ready(self._run(self._state, jax.random.key(seed)))
        return self._steps / (time.perf_counter() - start)


def require_memory(program: Any) -> None:
    """Raise `DoesNotFitError` where the device has too little memory for a compiled program."""
    plan = program.memory_analysis()
    needed = plan.temp_size_in_bytes + plan.argument_size_in_bytes + plan.output_size_in_bytes
    needed -= plan.alias_size_in_bytes
    if needed > memory():
        raise DoesNotFitError(f"needs {needed / 2**30:,.0f} GiB of {memory() / 2**30:,.0f}")


def memory() -> float:
    """Return the bytes that JAX may use of an accelerator's memory, or half of the machine's."""
    stats = jax.devices()[0].memory_stats() or {}
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return stats.get("bytes_limit", machine / 2)


def full_name(task: str, num_agents: int) -> str:
    """Return the name with the default numbers of everything else; half as many evaders."""
    evaders = f"-{max(1, num_agents // 2)}" if task == "pursuit" else ""
    return f"swarm/{task}-{num_agents}{evaders}"


def sweep(args: argparse.Namespace) -> None:
    """Print the speed of every task, number of agents and number of environments."""
    print("| task | agents | environments | env-steps/s (range) | agent-steps/s |")
    print("|---|---:|---:|---:|---:|")
    for task in args.tasks:
        for num_agents in args.agents:
            for num_envs, speed in sweep_envs(task, num_agents, args):
                print(f"| {task} | {num_agents} | {num_envs:,} | {speed} |", flush=True)


def sweep_envs(task: str, num_agents: int, args: argparse.Namespace) -> Iterator[tuple[int, str]]:
    """Yield numbers of environments and cells of the table, up to the first that is too many."""
    fastest = 0.0
    for num_envs in sorted(args.envs):
        expected = num_envs * args.steps / fastest if fastest else 0.0
        if expected > LONGEST_ROUND:
            yield num_envs, f"a round would take some {expected:,.0f} s | –"
            return
        try:
            runner = Runner(full_name(task, num_agents), num_envs, args.steps)
            rounds = [runner.speed(i + 1) for i in range(args.rounds)]
        except DoesNotFitError as problem:
            yield num_envs, f"{problem} | –"
            return
        except jax.errors.JaxRuntimeError as problem:
            if "RESOURCE_EXHAUSTED" not in str(problem):
                raise
            yield num_envs, "out of memory | –"
            return
        fastest = max(fastest, *rounds)
        middle, low, high = median(rounds), min(rounds), max(rounds)
        agent_steps = f"{middle * num_agents:,.0f}"
        yield num_envs, f"{middle:,.0f} ({low:,.0f} to {high:,.0f}) | {agent_steps}"


def compare(args: argparse.Namespace) -> None:
    """Print the cost of a step, by the size of the swarm."""
    print(
        "| task | agents | environments | env-steps/s | agent-steps/s | ns for one agent's step "
        f"(range) | a step of all, {args.agents[0]} = 1 |"
    )
    print("|---|---:|---:|---:|---:|---:|---:|")
    for task in args.tasks:
        num_envs = {n: max(1, args.together // n) for n in args.agents}
        runners = {
            n: Runner(full_name(task, n), count, args.steps) for n, count in num_envs.items()
        }
        turns = [{n: runners[n].speed(i + 1) for n in args.agents} for i in range(args.rounds)]
        for n, count in num_envs.items():
            speed = median(turn[n] for turn in turns)
            costs = [1e9 / n / turn[n] for turn in turns]
            ratio = median(turn[args.agents[0]] / turn[n] for turn in turns)
            print(
                f"| {task} | {n} | {count} | {speed:,.0f} | {speed * n:,.0f} | {median(costs):,.0f}"
                f" ({min(costs):,.0f} to {max(costs):,.0f}) | {ratio:.1f} |",
                flush=True,
            )


def measure_variants(args: argparse.Namespace) -> None:
    """Print the speed of each variant over that of the plain one."""
    print("| task | agents | environments | plain | variant | env-steps/s | of plain (range) |")
    print("|---|---:|---:|---|---|---:|---:|")
    for task, plain, variant in VARIANTS:
        for num_agents in args.agents:
            num_envs = max(1, (args.together or 4000) // num_agents)
            names = [
                full_name(task, num_agents) + (f":{options}" if options else "")
                for options in (plain, variant)
            ]
            runners = [Runner(name, num_envs, args.steps) for name in names]
            turns = [[runner.speed(i + 1) for runner in runners] for i in range(args.rounds)]
            ratios = [fast / slow for slow, fast in turns]
            print(
                f"| {task} | {num_agents} | {num_envs} | {plain or 'default'} | "
                f"{variant or 'default'} | {median(turn[1] for turn in turns):,.0f} | "
                f"{median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |",
                flush=True,
            )


def main() -> None:
    """Read the arguments, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--agents", type=int, nargs="+", default=AGENTS)
    parser.add_argument("--envs", type=int, nargs="+", default=ENVS)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--together", type=int)
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--variants", action="store_true")
    args = parser.parse_args()
    if args.dense:
        neighbours.DENSE_LIMIT = max(args.agents) ** 2
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}\n")
    if args.variants:
        measure_variants(args)
    elif args.together:
        compare(args)
    else:
        sweep(args)


if __name__ == "__main__":
    main()
