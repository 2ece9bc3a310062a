"""Training without recording, to test what is learned."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from offmarl import envs
from offmarl.envs.base import restart, transition
from offmarl.evaluation import evaluate
from offmarl.programs import hyperparameters
from offmarl.programs.program import structure
from offmarl.programs.runs.loop import Schedule, collect
from offmarl.types import Continuous, Discrete, EnvSpec, View
from tests.rollouts import view_of


@dataclass(frozen=True)
class Dial:
    """One step; each agent is paid for how near its two dials come to 0.5 and to its cue."""

    spec = EnvSpec("dial", 2, 2, 2, Continuous(2), time_limit=1)
    optimal_return = 1.0

    def reset(self, key):
        cue = jax.random.choice(key, jnp.array([-1.0, 1.0]), (2,))
        return cue, restart(self.view(cue))

    def step(self, key, cue, action):
        wrong = jnp.abs(action - jnp.stack([jnp.full(2, 0.5), cue], -1)).mean()
        over = jnp.ones(2, bool)
        return cue, transition(self.view(cue), jnp.full(2, 1 - wrong), over, ~over)

    def view(self, cue):
        return View(jnp.eye(2) * cue, cue, jnp.ones((2, 2), bool), jnp.ones(2, bool))


@dataclass(frozen=True)
class OneStep:
    """Episodes of one step without information, whose rewards are functions of the actions."""

    spec: EnvSpec
    reward: Callable
    shaping: Callable = lambda _action: None

    def reset(self, _key):
        return jnp.zeros(()), restart(view_of(self.spec))

    def step(self, _key, state, action):
        over, rewards = jnp.ones(2, bool), (self.reward(action), self.shaping(action))
        return state, transition(view_of(self.spec), rewards[0], over, ~over, rewards[1])


GUIDED = OneStep(
    EnvSpec("guided", 2, 1, 1, Discrete(2), time_limit=1),
    lambda _action: jnp.ones(2),
    lambda action: jnp.array([0.0, 10.0]) * action,
)
"""Of the shaped reward the second agent has ten times its action."""


class Given:
    """A network whose outputs are its parameters."""

    def apply(self, params, *_, method):
        return params, ()


def begun(recorder, args, env=None):
    """Return a program, its state before any update, and its hyperparameters."""
    env, hyper = env or envs.make(args.env), hyperparameters(args)
    program = recorder.make(env.spec, structure(args), env)
    return program, jax.jit(program.init)(jax.random.key(args.seed), hyper), hyper


def train(recorder, args, env=None):
    """Return the environment, the program, and its state after the training of ``args``."""
    env = env or envs.make(args.env)
    program, begin, hyper = begun(recorder, args, env)
    iterations = args.total_steps // (args.num_envs * args.num_steps)
    schedule = Schedule(iterations, iterations, 1, (0,))
    work = collect(program, [begin], [hyper], [jax.random.key(1)], schedule, 0, [None])
    *_, (_, (state,), _) = work
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
