"""Speed of the swarm suite: environment steps a second, by the number of agents.

    taskset -c 0,1 python benchmarks/swarm.py [--task coverage] [--agents 10 100 1000 4096]

Random legal actions, autoreset, scans of 128 steps; compiled and run once before timing. For each
number of agents several numbers of parallel environments are tried, and the fastest is printed with
the median and range of its rounds. Dense is the same with all pairs of drones compared, where that
ends in reasonable time.

    taskset -c 0,1 python benchmarks/swarm.py --together 4000 --agents 100 200 400 1000 2000 4000

How the cost grows: every number of agents in as many environments as make so many agents in all,
in turns, so that nothing but the size of the swarm differs.
"""

import argparse
import time
from statistics import median
from typing import NamedTuple

import jax

from offmarl import envs
from offmarl.envs.swarm import neighbours
from offmarl.networks import PolicyConfig, make_policy
from offmarl.rollout import init_rollout, rollout

NUM_STEPS = 128
MOST_AGENTS_AT_ONCE = 20_000
NAMES = {"pursuit": "swarm/pursuit-{n}-{half}"}


class Speed(NamedTuple):
    """Of one number of agents and of environments."""

    num_envs: int
    rounds: list[float]
    """Environment steps a second."""

    @property
    def median(self) -> float:
        return median(self.rounds)


class Runner:
    """A compiled scan in many environments, rewards summed and everything else dropped."""

    def __init__(self, name: str, num_envs: int):
        env = envs.make(name)
        policy = make_policy(PolicyConfig("random"), env.spec)
        auto = envs.autoreset(env)

        @jax.jit
        def run(state, key):
            def step(state, key):
                state, transition, _ = rollout(auto, policy, (), state, key, 1)
                return state, transition.reward.sum()

            return jax.lax.scan(step, state, jax.random.split(key, NUM_STEPS))

        self._run, self._steps = run, NUM_STEPS * num_envs
        self._state = init_rollout(auto, policy, jax.random.key(0), num_envs)
        self.speed(0)

    def speed(self, seed: int) -> float:
        """Run once more; return environment steps a second."""
        start = time.perf_counter()
        self._state, _ = jax.block_until_ready(self._run(self._state, jax.random.key(seed)))
        return self._steps / (time.perf_counter() - start)


def measure(name: str, num_envs: int, rounds: int) -> Speed:
    """Time several rounds."""
    runner = Runner(name, num_envs)
    return Speed(num_envs, [runner.speed(i + 1) for i in range(rounds)])


def fastest(name: str, num_agents: int, rounds: int) -> Speed:
    """Try numbers of environments, and return the best."""
    most = max(1, min(64, MOST_AGENTS_AT_ONCE // num_agents))
    tried = sorted({1, min(4, most), most})
    return max((measure(name, num_envs, rounds) for num_envs in tried), key=lambda s: s.median)


def full_name(task: str, num_agents: int) -> str:
    return NAMES.get(task, f"swarm/{task}-{{n}}").format(n=num_agents, half=max(1, num_agents // 2))


def compare(task: str, agents: list[int], together: int, rounds: int) -> None:
    """Print the cost of an agent's step, by the size of the swarm."""
    runners = {n: Runner(full_name(task, n), max(1, together // n)) for n in agents}
    turns = [{n: 1e9 / n / runners[n].speed(turn + 1) for n in agents} for turn in range(rounds)]
    print("agents  environments  ns per agent step (range)")
    for n in agents:
        costs = [turn[n] for turn in turns]
        print(
            f"{n:6}  {max(1, together // n):12}  {median(costs):9,.0f} "
            f"({min(costs):,.0f} to {max(costs):,.0f})"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--task", default="coverage")
    parser.add_argument("--agents", type=int, nargs="+", default=[10, 100, 1000, 4096])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dense-up-to", type=int, default=1000)
    parser.add_argument("--together", type=int)
    args = parser.parse_args()
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}, task {args.task}")
    if args.together:
        compare(args.task, args.agents, args.together, args.rounds)
        return
    print("agents  environments  env-steps/s (range)          agent-steps/s  dense env-steps/s")
    for n in args.agents:
        name = full_name(args.task, n)
        speed = fastest(name, n, args.rounds)
        dense = "-"
        if n <= args.dense_up_to:
            limit, neighbours.DENSE_LIMIT = neighbours.DENSE_LIMIT, n
            dense = f"{measure(name, speed.num_envs, args.rounds).median:,.0f}"
            neighbours.DENSE_LIMIT = limit
        low, high = min(speed.rounds), max(speed.rounds)
        print(
            f"{n:6}  {speed.num_envs:12}  {speed.median:9,.0f} ({low:,.0f} to {high:,.0f})"
            f"  {speed.median * n:16,.0f}  {dense:>12}",
            flush=True,
        )


if __name__ == "__main__":
    main()
