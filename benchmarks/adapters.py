"""What the adapters cost: environment steps a second through ours and of the raw environment.

    python benchmarks/adapters.py [--rounds 5]

Both reset themselves, in 64 environments, with random legal actions, in a scan of 128 steps that
keeps observations, rewards and ends; turns alternate and the median ratio counts. JaxMARL's own
``step`` and Jumanji's ``AutoResetWrapper`` reset in every step, so they can be slower than ours.
The second table is autoreset alone: a pool of 256 resets against fresh ones.
"""

import argparse
import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp

from offmarl import envs
from offmarl.envs.extras import quiet
from offmarl.types import Continuous

NUM_ENVS, NUM_STEPS = 64, 128

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
POOLED = ("jumanji/connector", "jumanji/robot_warehouse")


def draw(spec, key, legal):
    if isinstance(spec.action, Continuous):
        return jax.random.uniform(key, (spec.num_agents, spec.action_size), minval=-1, maxval=1)
    if legal is None:
        return jax.random.randint(key, (spec.num_agents,), 0, spec.num_actions)
    return jax.random.categorical(key, jnp.where(legal, 0.0, -jnp.inf))


def ours(env, pool=0):
    env = envs.autoreset(env, pool)

    def step(carry, key):
        state, legal = carry
        action_key, step_key = jax.random.split(key)
        action = draw(env.spec, action_key, legal)
        state, timestep = env.step(step_key, state, action)
        seen = timestep.view.observation, timestep.reward, timestep.terminated, timestep.truncated
        return (state, timestep.view.legal_actions), seen

    def reset(key):
        state, timestep = env.reset(key)
        return state, timestep.view.legal_actions

    return reset, step


def raw_jaxmarl(env):
    raw, spec = env.wrapped, env.spec
    masked = "smax" in spec.name

    def legal_of(state):
        legal = raw.get_avail_actions(state) if masked else {}
        return jnp.stack([legal[a] for a in raw.agents]) if masked else None

    def step(carry, key):
        state, legal = carry
        action_key, step_key = jax.random.split(key)
        action = draw(spec, action_key, legal)
        given = {agent: action[i] for i, agent in enumerate(raw.agents)}
        observation, state, reward, done, _ = raw.step(step_key, state, given)
        return (state, legal_of(state)), (observation, reward, done)

    def reset(key):
        _, state = raw.reset(key)
        return state, legal_of(state)

    return reset, step


def raw_jumanji(env):
    from jumanji.wrappers import AutoResetWrapper

    raw = AutoResetWrapper(env.wrapped, next_obs_in_extras=True)

    def legal_of(timestep):
        return getattr(timestep.observation, "action_mask", None)

    def step(carry, key):
        state, legal = carry
        action = draw(env.spec, key, legal)
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    print(f"{jax.default_backend()}, {NUM_ENVS} environments, scan of {NUM_STEPS}")
    print(f"{'steps/s':36s} {'ours':>10s} {'raw':>10s} {'ours/raw':>9s}")
    for name in ADAPTED:
        env = envs.make(name)
        raw = raw_jaxmarl if name.startswith("jaxmarl") else raw_jumanji
        print(
            "{:36s} {:10,.0f} {:10,.0f} {:9.2f}".format(name, *compare(ours(env), raw(env), rounds))
        )
    print(f"{'steps/s':36s} {'pool':>10s} {'fresh':>10s} {'ratio':>9s}")
    for name in POOLED:
        env = envs.make(name)
        both = partial(ours, env, pool=256)(), ours(env)
        print("{:36s} {:10,.0f} {:10,.0f} {:9.2f}".format(name, *compare(*both, rounds)))


if __name__ == "__main__":
    main()
