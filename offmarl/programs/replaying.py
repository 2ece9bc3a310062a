"""Recorded episodes, played again from their environment states."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from offmarl import envs
from offmarl.envs import Environment
from offmarl.envs.states import KEY, STATE, recorded_states
from offmarl.errors import OptionError, ShapeError
from offmarl.types import ArrayTree, Episode, View
from offmarl.vault import Dataset

_TOLERANCE = 1e-3
"""Tolerance for other machines and versions of JAX, which round differently."""


class ReplayedEpisode(NamedTuple):
    """The steps of an episode, taken again in its environment."""

    states: ArrayTree
    """Environment states, ``(T+1, ...)``: before each step, and after the last."""
    next_view: View
    """The view after each step, ``(T, ...)``."""
    reward: Float[Array, "T N"]
    terminated: Bool[Array, "T N"]
    truncated: Bool[Array, "T N"]
    last: Bool[Array, "T"]
    exact: bool
    """Whether all bits equal the recording. They do on the machine and with the versions that
    recorded it, apart from differences in how XLA compiles other sizes."""


def replay_episode(
    dataset: Dataset, number: int, env: Environment | None = None
) -> ReplayedEpisode:
    """Play a recorded episode again from its environment states.

    Each step is taken from its recorded state, with its recorded action and random key, and its
    outcome is compared with the recording.

    Parameters
    ----------
    dataset
        A recording with environment states, as ``offmarl record --env-states`` makes it.
    number
        The episode's index in `Dataset.episodes`.
    env
        The environment that was recorded; by default the one that the dataset names.

    Raises
    ------
    OptionError
        The recording has no states, or the outcome differs, because the environment has changed.
    ShapeError
        The environment has other sizes.

    Examples
    --------
    >>> episode = offmarl.replay_episode(dataset, -1)
    >>> third = jax.tree.map(lambda leaf: leaf[3], episode.states)
    """
    if not {STATE, KEY} <= dataset.spec.extras.keys():
        raise OptionError(f"{dataset.path} has no environment states: record it with --env-states.")
    env = envs.make(dataset.spec.name) if env is None else env
    if difference := dataset.spec.difference(env.spec, extras=False):
        raise ShapeError(
            f"{dataset.path} and the environment {env.spec.name} differ in {difference}."
        )
    episode = dataset.episode(number)
    steps = episode.transition
    count = len(steps.last)
    assert steps.extras is not None
    states, keys = recorded_states(env, steps.extras)
    size = max(env.spec.time_limit or 0, count)  # one program for all lengths
    padded = jax.tree.map(lambda leaf: _pad(leaf, size), (keys, states, jnp.asarray(steps.action)))
    after, timestep = jax.tree.map(lambda leaf: leaf[:count], _take_steps(env)(*padded))  # type: ignore[arg-type]
    whole = jax.tree.map(lambda x, y: jnp.concatenate([x, y[-1:]]), states, after)
    found = ReplayedEpisode(
        whole,
        timestep.next_view,
        timestep.reward,
        timestep.terminated,
        timestep.truncated,
        timestep.last,
        exact=True,
    )
    was_cut = dataset.episodes.cause[number] == "cut"
    return found._replace(exact=_compare(dataset, number, found, episode, was_cut))


@lru_cache(maxsize=4)
def _take_steps(env: Any) -> Any:
    return jax.jit(jax.vmap(env.step))


def _pad(leaf: Array, size: int) -> Array:
    """Repeat the last entry up to ``size`` entries."""
    return leaf[np.minimum(np.arange(size), len(leaf) - 1)]


def _compare(
    dataset: Dataset, number: int, found: ReplayedEpisode, episode: Episode, was_cut: bool
) -> bool:
    """Return whether an episode equals its recording; `OptionError` if it differs."""
    exact = True
    for name, ours, theirs in _pairs(found, episode, was_cut):
        a, b = np.asarray(ours), np.asarray(theirs)
        same = (a == b) | ((a != a) & (b != b))  # noqa: PLR0124 - NaN
        if same.all():
            continue
        exact = False
        near = np.isclose(a.astype(float), b.astype(float), atol=_TOLERANCE, equal_nan=True)
        if not near.all():
            step = int(np.argwhere(~near)[0][0])
            raise OptionError(
                f"{dataset.path}: episode {number}, played again, differs from the recording in "
                f"{name} at step {step}: the environment or its options have changed, or the data "
                "were edited after the recording."
            )
    return exact


def _pairs(
    found: ReplayedEpisode, episode: Episode, was_cut: bool
) -> Iterator[tuple[str, Any, Any]]:
    """Yield what was replayed and what was recorded; the recording moved the end of a cut one."""
    steps, count = episode.transition, len(episode.transition.last)
    for name in View._fields:
        leaves = [getattr(x, name) for x in (found.next_view, steps.view)]
        final = getattr(episode.final, name) if episode.final is not None else leaves[1]
        for ours, theirs, end in zip(*map(jax.tree.leaves, (*leaves, final)), strict=True):
            yield name, ours[: count - 1], theirs[1:]
            if episode.final is not None:
                yield f"the final {name}", ours[-1:], np.asarray(end)[None]
    yield "reward", found.reward, steps.reward
    ends = slice(count - was_cut)
    for name in ("terminated", "truncated", "last"):
        yield name, getattr(found, name)[ends], getattr(steps, name)[ends]
