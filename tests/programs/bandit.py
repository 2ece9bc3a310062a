"""A recorder that learns one number: it moves towards 1 by its rate, and its reward is in view."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from offmarl import envs
from offmarl.config import Positive, PositiveInt
from offmarl.errors import OptionError
from offmarl.programs import (
    OnlineArgs,
    Program,
    Stage,
    add,
    init_capture,
    make_buffer,
    record_online,
)
from offmarl.rollout import init_rollout, rollout
from offmarl.types import Policy


@dataclass(frozen=True)
class Args(OnlineArgs):
    """Arguments of the bandit."""

    num_steps: PositiveInt = 2
    """Time steps between updates."""
    rate: Positive = 0.1
    """Logit of the first action that an update adds."""
    width: PositiveInt = 4
    """Not used; 13 is not possible."""
    updates: PositiveInt = 1
    """Not used."""


class State(NamedTuple):
    logit: jax.Array
    rollout: object
    capture: object


def make(spec, args, env):
    if args.width == 13:
        raise OptionError("13 is not possible.")
    env, buffer = envs.autoreset(env), make_buffer(args.num_envs, args.num_steps)

    def policy(_greedy):
        def act(logit, carry, observation, legal_actions, key):
            first = jax.random.uniform(key, (spec.num_agents,)) < jax.nn.sigmoid(logit)
            return jnp.where(first, 1, 0), jnp.zeros(spec.num_agents), carry

        return Policy(tuple, act)

    def init(key, _hyper):
        state = init_rollout(env, policy(False), key, args.num_envs)
        return State(jnp.zeros(()), state, init_capture(buffer, spec))

    def update(state, _batch, key, hyper):
        after, transitions, views, _ = rollout(
            env, policy(False), state.logit, state.rollout, key, args.num_steps, policy_id=0
        )
        capture = add(buffer, state.capture, transitions, views)
        return State(state.logit + hyper.rate, after, capture), {"grad_norm": hyper.rate}

    return Program(
        init, (Stage(update),), policy, lambda state: state.logit, False, num_steps=args.num_steps
    )


def main(args):
    """Record the bandit."""
    return record_online(make, args)
