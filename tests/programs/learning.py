"""Training without recording, to test what is learned."""

from functools import partial

import jax

from offmarl import envs
from offmarl.evaluation import evaluate
from offmarl.programs import hyperparameters
from offmarl.programs.loop import Schedule, collect


def train(recorder, args, env=None):
    """Return the environment, the program, and its state after the training of ``args``."""
    env = env or envs.make(args.env)
    program, hyper = recorder.make(env.spec, args, env), hyperparameters(args)
    begin = jax.jit(program.init)(jax.random.key(args.seed), hyper)
    iterations = args.total_steps // (args.num_envs * args.num_steps)
    schedule = Schedule(iterations, iterations, 1, (0,))
    work = collect(program, begin, hyper, jax.random.key(1), schedule, 0, None)
    *_, (_, state, _) = work
    return env, program, state


def learn(recorder, args, env=None):
    """Return the greedy return and the sampled one after the training of ``args``."""
    return returns_of(*train(recorder, args, env))


def returns_of(env, program, state):
    """Return the greedy return and the sampled one of a trained program."""
    returns = []
    for greedy in (True, False):
        play = jax.jit(partial(evaluate, env, program.policy(greedy)), static_argnums=2)
        params = program.policy_params(state)
        returns.append(float(play(params, jax.random.key(2), 256).returns.mean()))
    return returns
