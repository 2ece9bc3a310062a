"""Recorded episodes, played again in their environment."""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Key, PRNGKeyArray

from offmarl import envs
from offmarl.envs import Environment
from offmarl.envs.states import KEY, STATE, recorded_states
from offmarl.errors import OptionError, ShapeError
from offmarl.programs.recording.recorder import tier_key
from offmarl.types import ArrayTree, Episode, Timestep, Transition, View
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
    """Play a recorded episode again, and compare the outcome with the recording.

    Each step is taken from its recorded state, with its recorded action and random key. A recording
    without environment states is played from the first state on, with the random keys of its
    recording if a policy was recorded; any keys serve a deterministic environment. Of such a
    recording, observations and rewards are compared.

    Parameters
    ----------
    dataset
        A recording, best with environment states, as ``offmarl record --env-states`` makes it.
    number
        The episode's index in `Dataset.episodes`.
    env
        The environment that was recorded; by default the one that the dataset names.

    Raises
    ------
    OptionError
        The outcome differs: the environment has changed, or the random keys are not known.
    ShapeError
        The environment has other sizes.

    Examples
    --------
    >>> episode = offmarl.replay_episode(dataset, -1)
    >>> third = jax.tree.map(lambda leaf: leaf[3], episode.states)
    """
    env = envs.make(dataset.spec.name) if env is None else env
    if difference := dataset.spec.difference(env.spec, extras=False):
        raise ShapeError(
            f"{dataset.path} and the environment {env.spec.name} differ in {difference}."
        )
    episode = dataset.episode(number)
    states, after, timestep = _replayed(dataset, number, episode.transition, env)
    all_states = jax.tree.map(lambda x, y: jnp.concatenate([x, y[-1:]]), states, after)
    result = ReplayedEpisode(
        all_states,
        timestep.next_view,
        timestep.reward,
        timestep.terminated,
        timestep.truncated,
        timestep.last,
        exact=True,
    )
    was_cut = dataset.episodes.cause[number] == "cut"
    pairs = _pairs(result, episode, was_cut)
    if not _has_states(dataset):
        compared = ("observation", "the final observation", "reward")
        pairs = (pair for pair in pairs if pair[0] in compared)
    return result._replace(exact=_compare(f"{dataset.path}: episode {number}", pairs))


def _has_states(dataset: Dataset) -> bool:
    return {STATE, KEY} <= dataset.spec.extras.keys()


def _replayed(
    dataset: Dataset, number: int, steps: Transition, env: Environment
) -> tuple[ArrayTree, ArrayTree, Timestep]:
    """Take the steps of an episode again; return the states before and after each, and outcomes."""
    count, action = len(steps.last), jnp.asarray(steps.action)
    size = max(env.spec.time_limit or 0, count)  # one program for all lengths

    def pad(tree: ArrayTree) -> ArrayTree:
        return jax.tree.map(lambda leaf: leaf[np.minimum(np.arange(size), count - 1)], tree)

    if _has_states(dataset):
        assert steps.extras is not None
        states, keys = recorded_states(env, steps.extras)
        padded = states, *_take_steps(env, *pad((keys, states, action)))
    else:
        begin, keys = _keys(dataset, number)
        padded = _play(env, begin, *pad((keys, action)))
    result: tuple[ArrayTree, ArrayTree, Timestep] = jax.tree.map(lambda leaf: leaf[:count], padded)
    return result


@partial(jax.jit, static_argnums=0)
def _take_steps(env: Environment, *steps: Any) -> tuple[ArrayTree, Timestep]:
    return jax.vmap(env.step)(*steps)


@partial(jax.jit, static_argnums=0)
def _play(
    env: Environment, begin: PRNGKeyArray, keys: Key[Array, "T"], actions: Array
) -> ArrayTree:
    """Play actions; return the states before and after each step, and timesteps."""

    def step(state: ArrayTree, inputs: tuple[Array, Array]) -> tuple[ArrayTree, ArrayTree]:
        after, timestep = env.step(inputs[0], state, inputs[1])
        return after, (state, after, timestep)

    return jax.lax.scan(step, env.reset(begin)[0], (keys, actions))[1]


def _keys(dataset: Dataset, number: int) -> tuple[PRNGKeyArray, Key[Array, "T"]]:
    """Return the keys of an episode's reset and steps, as the recording of a policy drew them.

    Those of other recordings are arbitrary.
    """
    table = dataset.episodes
    row, start, length = (int(x[number]) for x in (table.row, table.start, table.length))
    origin = _recording_key(dataset.provenance.get("recipe"), dataset.rows, dataset.length)
    if origin is None:
        return jax.random.key(0), jax.random.split(jax.random.key(0), length)
    began, beside, chunk = origin
    first, key = jax.random.split(began)
    before = np.maximum(np.arange(start - 1, start + length), 0)
    step_keys, reset_keys = _draws(dataset.rows, chunk, key, row, before)
    begin = reset_keys[0] if start else jax.random.split(first, dataset.rows)[row]
    if beside:  # opponents drew from the keys, too: see `Side.step`
        step_keys = jax.vmap(jax.random.split)(step_keys)[:, 1]
    return begin, step_keys[1:]


def _recording_key(recipe: Any, rows: int, length: int) -> tuple[PRNGKeyArray, bool, int] | None:
    """Return the key of a policy's recording, whether opponents drew from it, and a chunk's steps.

    None if they are unknown, or not those of a vault of this size, as a forged recipe may be.
    """
    match recipe:
        case {"block": _}:
            return None
        case {"num_envs": int(envs), "chunks": [int(), int(chunk)], **rest}:
            if envs != rows or not 0 < chunk <= length:
                return None
        case _:
            return None
    with suppress(OverflowError):  # of a seed that is none of JAX's
        match rest:
            case {"seed": int(seed)}:
                return jax.random.key(seed), "opponents" in recipe, chunk
            case {"tier": str(tier), "training": {"seed": int(seed), "side": str(side)}}:
                return tier_key(seed, tier), bool(side), chunk
    return None


@partial(jax.jit, static_argnums=(0, 1))
def _draws(
    num_envs: int, chunk: int, key: PRNGKeyArray, row: Any, times: Any
) -> tuple[Array, Array]:
    """Draw the keys of steps, and of the resets after them."""

    def of_step(time: Any) -> Any:
        of_chunk = jax.random.fold_in(key, time // chunk)
        keys = jax.random.split(of_chunk, (chunk, 2, num_envs))
        return jax.random.split(keys[time % chunk, 1, row])

    pairs = jax.lax.map(of_step, times)
    return pairs[:, 0], pairs[:, 1]


def _compare(label: str, pairs: Iterable[tuple[str, Any, Any]]) -> bool:
    """Return whether an episode equals its recording; `OptionError` if it differs."""
    exact = True
    for name, ours, theirs in pairs:
        a, b = np.asarray(ours), np.asarray(theirs)
        same = (a == b) | ((a != a) & (b != b))  # noqa: PLR0124 - NaN
        if same.all():
            continue
        exact = False
        near = np.isclose(a.astype(float), b.astype(float), atol=_TOLERANCE, equal_nan=True)
        if not near.all():
            step = int(np.argwhere(~near)[0][0])
            raise OptionError(
                f"{label}, played again, differs from the recording in {name} at step {step}: the "
                "environment or its options have changed, the data were edited after the "
                "recording, or its random keys are unknown."
            )
    return exact


def _pairs(
    replayed: ReplayedEpisode, episode: Episode, was_cut: bool
) -> Iterator[tuple[str, Any, Any]]:
    """Yield replayed and recorded arrays by name; the recording moved the end of a cut episode."""
    steps, count = episode.transition, len(episode.transition.last)
    for name in View._fields:
        leaves = [getattr(x, name) for x in (replayed.next_view, steps.view)]
        final = getattr(episode.final, name) if episode.final is not None else leaves[1]
        for ours, theirs, end in zip(*map(jax.tree.leaves, (*leaves, final)), strict=True):
            yield name, ours[: count - 1], theirs[1:]
            if episode.final is not None:
                yield f"the final {name}", ours[-1:], np.asarray(end)[None]
    yield "reward", replayed.reward, steps.reward
    ends = slice(count - was_cut)
    for name in ("terminated", "truncated", "last"):
        yield name, getattr(replayed, name)[ends], getattr(steps, name)[ends]
