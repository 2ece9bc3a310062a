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
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from offmarl.programs.program import Args, ArgsT, Hyperparameters, Program, Stage, Values, structure
from offmarl.programs.runs.dataset import DatasetStatistics, MeanAndStd
from offmarl.types import (
    ArrayTree,
    EnvSpec,
    Policy,
    Sequence,
    View,
    flatten_tree,
    unflatten_tree,
)

UNIT = 20.0
"""What the largest return becomes: that of SMAC, for whose data most settings were published."""

_VALUES = ("q", "q_tot")
"""Metrics that are values."""

Normalise = Callable[[Any], Any]


def make_program(
    make: Callable[[EnvSpec, ArgsT, Any], Program], spec: EnvSpec, args: ArgsT, source: Any
) -> Program:
    """Build a program, with the normalisation that its arguments ask for."""
    program = make(spec, structure(args), source)
    scaled: bool = getattr(args, "scale_rewards", False)
    if not isinstance(args, Args) or not (args.normalise or scaled or args.blind):
        return program
    assert isinstance(source, DatasetStatistics)
    return normalised(program, args.normalise, source, scaled, args.blind)


def normalised(
    program: Program,
    what: tuple[str, ...],
    dataset: DatasetStatistics,
    scale_rewards: bool = False,
    blind: bool = False,
) -> Program:
    """Wrap a program so that it learns from, and acts on, normalised data, or sees nothing."""
    observation = _standard(dataset.observation_moments()) if "observation" in what else _same
    if blind:
        observation = partial(jax.tree.map, jnp.zeros_like)
    state = _standard(dataset.state_moments()) if "state" in what else _same
    scale = np.float32(UNIT / dataset.return_scale() if scale_rewards else 1.0)

    def seen(view: View) -> View:
        return view._replace(observation=observation(view.observation), state=state(view.state))

    def batch(sequence: Sequence) -> Sequence:
        to_go = sequence.return_to_go
        return sequence._replace(
            view=seen(sequence.view),
            reward=sequence.reward * scale,
            return_to_go=None if to_go is None else to_go * scale,
        )

    return program._replace(
        stages=tuple(_stage(stage, batch, scale) for stage in program.stages),
        policy=lambda greedy: _policy(program.policy(greedy), observation, scale),
        values=program.values and _values(program.values, seen, scale),
    )


def _values(values: Values, seen: Callable[[View], View], scale: np.float32) -> Values:
    """Return a critic of views as they are recorded, in the unit of the recorded rewards."""
    return values._replace(
        apply=lambda params, view, *rest: values.apply(params, seen(view), *rest) / scale
    )


def _stage(stage: Stage, batch: Callable[[Sequence], Sequence], scale: np.float32) -> Stage:
    def update(
        state: ArrayTree, sequence: Sequence, key: PRNGKeyArray, hyper: Hyperparameters
    ) -> tuple[ArrayTree, dict[str, Array]]:
        state, metrics = stage.update(state, batch(sequence), key, hyper)
        in_unit = {name: metrics[name] / scale for name in _VALUES if name in metrics}
        return state, {**metrics, **in_unit}

    return stage._replace(update=update)


def _policy(policy: Policy, observation: Normalise, scale: np.float32) -> Policy:
    act, log_prob, after_step = policy.act, policy.log_prob, policy.after_step
    return policy._replace(
        act=lambda params, carry, seen, *rest: act(params, carry, observation(seen), *rest),
        log_prob=log_prob
        and (lambda params, carry, seen, *rest: log_prob(params, carry, observation(seen), *rest)),
        after_step=after_step
        and (lambda carry, reward, done: after_step(carry, reward * scale, done)),
    )


def _same(tree: ArrayTree) -> ArrayTree:
    return tree


def _standard(moments: MeanAndStd) -> Normalise:
    """Return the function that makes a tree's floating-point leaves have mean 0 and deviation 1."""
    mean, std = (flatten_tree(tree) for tree in moments)
    return partial(_standardise, mean, std)


def _standardise(mean: dict[str, Any], std: dict[str, Any], tree: ArrayTree) -> ArrayTree:
    leaves = {
        path: (leaf - mean[path]) / std[path] if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
        for path, leaf in flatten_tree(tree).items()
    }
    return unflatten_tree(leaves)
