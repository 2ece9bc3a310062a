"""Cost of the adapters: steps per second with an adapter, relative to the raw environment.

    python benchmarks/adapters.py [--rounds 5]

Both sides run 64 environments with autoreset and random actions (legal ones, if the raw environment
has a mask of legal actions), in a scan of 16 steps that returns observations, rewards and ends. The
sides take turns, and the median ratio is printed. (In longer scans, the arrays of one side exceed
32 MB, for which glibc allocates new memory in each call, and those of the other do not.) JaxMARL's
``step`` and Jumanji's ``AutoResetWrapper`` reset in every step, so the last column compares both
sides without resets: it is the cost of the adapter alone. If other programs are running, use one
core (``taskset -c 0``) for the most stable ratios.
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

from offmarl import envs
from offmarl._imports import quiet
from offmarl.types import Continuous

NUM_ENVS, NUM_STEPS = 64, 16

ADAPTED = (
    "jaxmarl/mpe/simple_spread_v3",
    "jaxmarl/mpe/simple_tag_v3",
    "jaxmarl/smax/3m",
    "jaxmarl/smax/8m",
    "jaxmarl/overcooked_v2/cramped_room",
    "jumanji/lbf",
    "jumanji/robot_warehouse",
    "jumanji/search_and_rescue",
    "jumanji/connector",
)


def draw(spec, key, legal):
    if isinstance(spec.action, Continuous):
        return jax.random.uniform(key, (spec.num_agents, spec.action_size), minval=-1, maxval=1)
    if legal is None:
        return jax.random.randint(key, (spec.num_agents,), 0, spec.num_actions)
    return jax.random.categorical(key, jnp.where(legal, 0.0, -jnp.inf))


def masked(env):
    """Whether the raw environment has a mask of legal actions."""
    return env.spec.name.startswith(("jumanji", "jaxmarl/smax"))


def ours(env, *, resets=True):
    stepped = envs.autoreset(env) if resets else env

    def legal_of(timestep):
        return timestep.view.legal_actions if masked(env) else None

    def step(carry, key):
        state, legal = carry
        action_key, step_key = jax.random.split(key)
        action = draw(env.spec, action_key, legal)
        state, timestep = stepped.step(step_key, state, action)
        seen = timestep.view.observation, timestep.reward, timestep.terminated, timestep.truncated
        return (state, legal_of(timestep)), seen

    def reset(key):
        state, timestep = env.reset(key)
        return state, legal_of(timestep)

    return reset, step


def raw_jaxmarl(env, *, resets=True):
    raw, spec = env.wrapped, env.spec
    raw_step = raw.step if resets else raw.step_env

    def legal_of(state):
        if not masked(env):
            return None
        legal = raw.get_avail_actions(state)
        return jnp.stack([legal[agent] for agent in raw.agents])

    def step(carry, key):
        state, legal = carry
        action_key, step_key = jax.random.split(key)
        action = draw(spec, action_key, legal)
        actions_by_agent = {agent: action[i] for i, agent in enumerate(raw.agents)}
        observation, state, reward, done, _ = raw_step(step_key, state, actions_by_agent)
        return (state, legal_of(state)), (observation, reward, done)

    def reset(key):
        _, state = raw.reset(key)
        return state, legal_of(state)

    return reset, step


def raw_jumanji(env, *, resets=True):
    from jumanji.wrappers import AutoResetWrapper

    raw = AutoResetWrapper(env.wrapped, next_obs_in_extras=True) if resets else env.wrapped

    def legal_of(timestep):
        return getattr(timestep.observation, "action_mask", None)

    def step(carry, key):
        state, legal = carry
        action_key, _ = jax.random.split(key)
        action = draw(env.spec, action_key, legal)
        state, timestep = raw.step(state, action)
        seen = timestep.observation, timestep.reward, timestep.last()
        return (state, legal_of(timestep)), seen

    def reset(key):
        state, timestep = raw.reset(key)
        return state, legal_of(timestep)

    return reset, step


def compiled(program):
    reset, step = program

    @jax.jit
    def run(carry, key):
        keys = jax.random.split(key, (NUM_STEPS, NUM_ENVS))
        return jax.lax.scan(jax.vmap(step), carry, keys)

    with quiet("scatter inputs", "OvercookedV2", "max_dist"):
        carry = jax.jit(jax.vmap(reset))(jax.random.split(jax.random.key(0), NUM_ENVS))
        jax.block_until_ready(run(carry, jax.random.key(1)))
    return run, carry


def speed(run, carry, turn, repeats):
    start = time.perf_counter()
    for i in range(repeats):
        carry, seen = run(carry, jax.random.key(turn * repeats + i))
    jax.block_until_ready(seen)
    return repeats * NUM_ENVS * NUM_STEPS / (time.perf_counter() - start)


def compare(one, other, rounds):
    """Return the median speeds of both, and of the ratios of the turns."""
    one, other = compiled(one), compiled(other)
    repeats = max(1, int(speed(*one, 0, 1) * 0.5 / (NUM_ENVS * NUM_STEPS)))
    turns = [(speed(*one, i, repeats), speed(*other, i, repeats)) for i in range(rounds)]
    ratio = statistics.median(a / b for a, b in turns)
    return *(statistics.median(column) for column in zip(*turns, strict=True)), ratio


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default="", help="environments whose names have this in them")
    args = parser.parse_args()
    print(f"{jax.default_backend()}, {NUM_ENVS} environments, scan of {NUM_STEPS}")
    columns = ("steps/s, with resets", "adapter", "raw", "ratio", "ratio without resets")
    print("{:36s} {:>10s} {:>10s} {:>9s} {:>24s}".format(*columns))
    for name in ADAPTED:
        if args.only in name:
            with_resets, without = both(envs.make(name), args.rounds)
            line = "{:36s} {:10,.0f} {:10,.0f} {:9.2f} {:24.2f}"
            print(line.format(name, *with_resets, without[-1]), flush=True)


def both(env, rounds):
    """Compare with the raw environment, both with their own resets and without any."""
    raw = raw_jaxmarl if env.spec.name.startswith("jaxmarl") else raw_jumanji
    return tuple(
        compare(ours(env, resets=resets), raw(env, resets=resets), rounds)
        for resets in (True, False)
    )


if __name__ == "__main__":
    main()
