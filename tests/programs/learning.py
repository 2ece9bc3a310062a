"""Training without any recording, to see what is learnt."""

from functools import partial

import jax

from offmarl import envs
from offmarl.evaluation import evaluate
from offmarl.networks import make_policy
from offmarl.programs.collect import collect


def learn(recorder, args, config, env=None):
    """Return the greedy return and the sampled one after the training of ``args``."""
    env = env or envs.make(args.env)
    program = recorder.make_program(args, env, config)
    begin = program.prepare(jax.jit(program.init)(jax.random.key(args.seed)))
    iterations = args.total_steps // (args.num_envs * args.num_steps)
    *_, (_, state, _) = collect(program, begin, jax.random.key(1), range(iterations), None)
    returns = []
    for greedy in (True, False):
        play = jax.jit(
            partial(evaluate, env, make_policy(config, env.spec, greedy)), static_argnums=2
        )
        returns.append(float(play(program.acting(state), jax.random.key(2), 256).returns.mean()))
    return returns
