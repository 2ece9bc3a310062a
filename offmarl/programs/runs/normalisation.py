"""Normalisation by the statistics of the dataset, around any program.

The program learns from normalised batches, and its policy normalises what it observes. The
statistics are stored with the run, so `load_policy`, evaluations and recordings apply the same.

Programs that learn values (`offmarl.programs.ValueArgs`) learn from rewards in one unit, in which
the largest absolute return of the data's episodes is `UNIT`. So a temperature or a penalty means
the same on all data, and rewards times a constant give the same policy. Values are reported in the
data's own unit. Rewards are not shifted: a constant added to each would favour longer or shorter
episodes.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from offmarl.programs.program import (
    UNIT,
    VALUES,
    Args,
    Hyperparameters,
    Program,
    Stage,
    Values,
)
from offmarl.programs.runs.dataset import DatasetStatistics, MeanAndStd
from offmarl.types import (
    ArrayTree,
    Policy,
    Sequence,
    View,
    flatten_tree,
    unflatten_tree,
)

SCALE = "scale_rewards"
"""The argument that asks for the unit, and the hyperparameter that holds the factor of rewards."""

Normalise = Callable[[Any], Any]


def scale_of(dataset: DatasetStatistics) -> np.float32:
    """Return the factor of rewards, which updates take from the hyperparameter `SCALE`."""
    return np.float32(UNIT / dataset.return_scale())


def normalise_as_asked(args: object, program: Program, source: Any) -> Program:
    """Wrap a program so that it learns from, and acts on, normalised data, or sees nothing.

    Equal wrappers are one, and the updates take the scale of rewards from their hyperparameters, so
    that they are compiled once for data of any scale. ``source`` is what ``make`` was given; a
    program whose arguments ask for nothing is returned as it is.
    """
    scaled: bool = getattr(args, SCALE, False)
    if not isinstance(args, Args) or not (args.normalise or scaled or args.blind):
        return program
    assert isinstance(source, DatasetStatistics)
    observation: Normalise = _same
    if "observation" in args.normalise:
        observation = _Standardise(source.observation_moments())
    if args.blind:
        observation = _nothing
    state = _Standardise(source.state_moments()) if "state" in args.normalise else _same
    scale = scale_of(source) if scaled else np.float32(1.0)
    return program._replace(
        stages=tuple(_stage(stage, observation, state, scaled) for stage in program.stages),
        policy=partial(_policy, program, observation, scale),
        values=program.values and _values(program.values, observation, state, scale),
    )


def _normalised_view(observation: Normalise, state: Normalise, view: View) -> View:
    return view._replace(observation=observation(view.observation), state=state(view.state))


def _values(values: Values, observation: Normalise, state: Normalise, scale: np.float32) -> Values:
    """Return a critic of views as they are recorded, in the unit of the recorded rewards."""

    def apply(params: ArrayTree, view: View, *rest: Any) -> Any:
        return values.apply(params, _normalised_view(observation, state, view), *rest) / scale

    return values._replace(apply=apply)


@lru_cache(maxsize=32)
def _stage(stage: Stage, observation: Normalise, state_: Normalise, scale_rewards: bool) -> Stage:
    def update(
        state: ArrayTree, sequence: Sequence, key: PRNGKeyArray, hyper: Hyperparameters
    ) -> tuple[ArrayTree, dict[str, Array]]:
        scale = getattr(hyper, SCALE) if scale_rewards else np.float32(1.0)
        to_go = sequence.return_to_go
        batch = sequence._replace(
            view=_normalised_view(observation, state_, sequence.view),
            reward=sequence.reward * scale,
            return_to_go=None if to_go is None else to_go * scale,
        )
        state, metrics = stage.update(state, batch, key, hyper)
        in_unit = {name: metrics[name] * (1 / scale) for name in VALUES if name in metrics}
        return state, {**metrics, **in_unit}

    return stage._replace(update=update)


@lru_cache(maxsize=32)
def _policy(program: Program, observation: Normalise, scale: np.float32, greedy: bool) -> Policy:
    policy = program.policy(greedy)
    act, log_prob, after_step = policy.act, policy.log_prob, policy.after_step
    if observation is _same and after_step is None:  # programs with equal policies share it
        return policy
    return policy._replace(
        act=lambda params, carry, raw, *rest: act(params, carry, observation(raw), *rest),
        log_prob=log_prob
        and (lambda params, carry, raw, *rest: log_prob(params, carry, observation(raw), *rest)),
        after_step=after_step
        and (lambda carry, reward, done: after_step(carry, reward * scale, done)),
    )


def _same(tree: ArrayTree) -> ArrayTree:
    return tree


def _nothing(tree: ArrayTree) -> ArrayTree:
    return jax.tree.map(jnp.zeros_like, tree)


class _Standardise:
    """Makes a tree's floating-point leaves have mean 0 and deviation 1; equal for equal moments."""

    def __init__(self, moments: MeanAndStd):
        self._mean, self._std = (flatten_tree(tree) for tree in moments)
        arrays = (self._mean, self._std)
        self._key = tuple((path, x.tobytes()) for leaves in arrays for path, x in leaves.items())

    def __call__(self, tree: ArrayTree) -> ArrayTree:
        return unflatten_tree(
            {
                path: (leaf - self._mean[path]) / self._std[path]
                if jnp.issubdtype(leaf.dtype, jnp.floating)
                else leaf
                for path, leaf in flatten_tree(tree).items()
            }
        )

    def __hash__(self) -> int:
        return hash(self._key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Standardise) and self._key == other._key
