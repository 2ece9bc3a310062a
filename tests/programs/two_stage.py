"""A small program of two stages: cloning, then a shift towards rewarded actions.

Its policy remembers the last reward, and its input is normalised by the dataset's moments. As a
critic, it says how many steps of the episode are over, and the score of the action.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from offmarl import programs
from offmarl.config import Positive, PositiveInt
from offmarl.distributions import categorical, select
from offmarl.types import Policy


@dataclass(frozen=True)
class Args(programs.Args):
    """Arguments of the toy program."""

    pretrain: PositiveInt = 7
    """Updates of the first stage."""
    learning_rate: Positive = 0.1
    """Of both."""


class State(NamedTuple):
    """The state of training."""

    weights: Any
    anchor: Any
    """The weights that the second stage began with."""
    updates: Any
    """Of each stage."""


TRACED: list[str] = []
"""The stages that were traced, each time."""


def make(spec, args, dataset):
    """Build the program."""
    moments = dataset.observation_moments()
    best = dataset.array("best", lambda data: data.episodes.complete_returns.max())

    def scores(weights, observation):
        scaled = (observation - moments.mean) / moments.std
        return jnp.concatenate([scaled, jnp.ones((*scaled.shape[:-1], 1))], -1) @ weights

    def init(key, hyper):
        weights = 0.01 * jax.random.normal(key, (spec.observation_size + 1, spec.num_actions))
        return State(weights, weights, jnp.zeros(2, jnp.int32))

    def step(stage):
        def update(state, batch, key, hyper):
            TRACED.append(stage)
            view = batch.view_tm1
            gain = batch.reward / best if stage == "improve" else jnp.ones_like(batch.reward)

            def loss(weights):
                policy = categorical(scores(weights, view.observation), view.legal_actions)
                return -(policy.log_prob(batch.action) * gain * batch.mask[..., None]).mean()

            value, gradient = jax.value_and_grad(loss)(state.weights)
            weights = optax.apply_updates(state.weights, -hyper.learning_rate * gradient)
            done = state.updates.at[0 if stage == "clone" else 1].add(1)
            anchor = jnp.where(state.updates[1] == 0, state.weights, state.anchor)
            metrics = {"loss": value, "stage": jnp.float32(stage == "improve")}
            return State(weights, anchor, done), metrics

        return update

    def policy(greedy):
        def act(weights, carry, observation, legal_actions, key):
            logits = scores(weights, observation) + 0 * carry[:, None]
            return categorical(logits, legal_actions).mode(), jnp.zeros(spec.num_agents), carry

        return Policy(
            initial_carry=lambda: jnp.zeros(spec.num_agents),
            act=act,
            after_step=lambda carry, reward, done: carry + reward,
            draws=lambda weights: False,
        )

    def value(weights, view, first, action):
        def count(steps, first):
            steps = jnp.where(first, 0, steps + 1)
            return steps, steps

        _, steps = jax.lax.scan(count, jnp.full(first.shape[:1], -1), first.T)
        return 100 * steps.T[..., None] + select(scores(weights, view.observation), action)

    return programs.Program(
        init,
        stages=(
            programs.Stage(step("clone"), updates=args.pretrain),
            programs.Stage(step("improve")),
        ),
        policy=policy,
        policy_params=lambda state: state.weights,
        values=programs.Values(lambda state: state.weights, value),
    )


def main(args: Args) -> Path:
    """Train, evaluate and write the run; return its directory."""
    return programs.train(make, args)
