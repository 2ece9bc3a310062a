"""What policies would do in recorded episodes, unrolled over each episode's own history."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Key, PRNGKeyArray
from numpy.typing import NDArray

from offmarl.replay import Windows, WindowSource
from offmarl.replay.circles import Mixed
from offmarl.replay.sampling import Source
from offmarl.types import ArrayTree, Policy, Sequence, empty_view, remember

_BLOCK_BYTES = 2**26
"""Approximate size of the episodes that are on the device at once."""


class Followed(NamedTuple):
    """What a policy would do in M episodes of at most T steps."""

    log_prob: Float[Array, "M T"]
    """Log-probability (density) of the recorded joint action: the sum over live agents, given the
    episode up to then. Minus infinity if the policy would not take it, NaN if that is unknown."""
    action: Array
    """Actions that the policy draws, ``(M, T + 1, K, N)`` or ``(M, T + 1, K, N, A)``; the last slot
    of an episode is the view that it ended with."""


class Histories:
    """Some episodes of a dataset, in blocks that fit on the device."""

    def __init__(self, source: Source | Mixed, episodes: NDArray[np.int64]):
        self._source, self.episodes = source, episodes
        self.lengths = np.asarray(source.episodes.length)[episodes]
        self.longest = int(self.lengths.max(initial=1))

    @property
    def size(self) -> int:
        """M, the number of episodes in a block; the last is filled up with empty ones."""
        slot = sum(leaf.nbytes for leaf in jax.tree.leaves(empty_view(self._source.spec)))
        fit = _BLOCK_BYTES // max(slot * (self.longest + 1), 1)
        return int(np.clip(fit, 1, len(self.episodes)))

    def blocks(self) -> Iterator[tuple[slice, Sequence]]:
        """Yield the episodes, ``(size, longest, ...)``, and which of all they are.

        The arrays of empty episodes are zero, and so are their masks.
        """
        for start in range(0, len(self.episodes), self.size):
            chosen = slice(start, min(start + self.size, len(self.episodes)))
            windows = Windows(1, self.longest, extras=())
            found = WindowSource(self._source, windows, self.episodes[chosen]).beginnings()
            missing = self.size - (chosen.stop - chosen.start)
            yield chosen, jax.tree.map(partial(_padded, missing), found) if missing else found


def _padded(missing: int, leaf: Array) -> Array:
    return jnp.pad(leaf, [(0, missing), *[(0, 0)] * (leaf.ndim - 1)])


@partial(jax.jit, static_argnums=(0, 1, 2))
def follow(
    policy: Policy,
    stochastic: bool,
    samples: int,
    params: ArrayTree,
    episodes: Sequence,
    key: PRNGKeyArray,
) -> Followed:
    """Unroll a policy over recorded episodes.

    It observes what was recorded, from the first step on, and its memory follows the recorded
    actions and rewards.
    """
    discrete = jnp.issubdtype(episodes.action.dtype, jnp.integer)

    def step(carry: ArrayTree, x: tuple[Any, Key[Array, "K"]]) -> tuple[ArrayTree, Any]:
        (view, action, reward, done), keys = x
        seen = view.observation, view.legal_actions
        drawn, _, after = jax.vmap(lambda key: policy.act(params, carry, *seen, key))(keys)
        log_prob = jnp.full(view.alive.shape, jnp.nan)
        after = jax.tree.map(lambda leaf: leaf[0], after)
        if policy.log_prob is not None:  # the carry follows the recorded action
            log_prob, after = policy.log_prob(params, carry, *seen, action)
        if not stochastic:
            equal = jnp.where(drawn[0] == action, 0.0, -jnp.inf)
            log_prob = equal if discrete else jnp.full(view.alive.shape, jnp.nan)
        joint = jnp.where(view.alive, log_prob, 0.0).sum()
        return remember(policy, after, reward, done), (joint, drawn)

    def of_episode(episode: Sequence, key: PRNGKeyArray) -> Followed:
        slots = len(episode.mask) + 1
        done = episode.terminated | episode.truncated
        taken = jax.tree.map(_with_last_slot, (episode.action, episode.reward, done))
        keys = jax.random.split(key, (slots, samples))
        _, (log_prob, drawn) = jax.lax.scan(
            step, policy.initial_carry(), ((episode.view, *taken), keys)
        )
        return Followed(jnp.where(episode.mask, log_prob[:-1], 0.0), drawn)

    return jax.vmap(of_episode)(episodes, jax.random.split(key, len(episodes.mask)))


def _with_last_slot(steps: Array) -> Array:
    """Repeat the last step in the slot after it, where nothing is done any more."""
    return jnp.concatenate([steps, steps[-1:]])


def joint_behaviour(episodes: Sequence) -> Float[Array, "M T"]:
    """Return the recorded log-probabilities of the joint actions: sums over the live agents."""
    log_prob = jnp.where(episodes.view_tm1.alive, episodes.behaviour_log_prob, 0.0).sum(-1)
    return jnp.where(episodes.mask, log_prob, 0.0)


def at_ends(episodes: Sequence) -> Bool[Array, "M T"]:
    """Whether a live agent's action was at an end of the interval, for continuous actions.

    A policy that clips its actions takes an end with a probability. Others, such as a squashed
    Gaussian, have only a density there, and take it with probability 0.
    """
    view = episodes.view_tm1
    if jnp.issubdtype(episodes.action.dtype, jnp.integer):
        return jnp.zeros_like(episodes.mask)
    ends = (jnp.abs(episodes.action) >= 1) & view.legal_actions
    return (ends.any(-1) & view.alive).any(-1) & episodes.mask


def was_certain_inside(episodes: Sequence) -> Bool[Array, "M T"]:
    """Whether a live agent took a continuous action between the ends with probability 1.

    A policy that draws its actions from a density takes it with probability 0.
    """
    view = episodes.view_tm1
    if jnp.issubdtype(episodes.action.dtype, jnp.integer):
        return jnp.zeros_like(episodes.mask)
    inside = ((jnp.abs(episodes.action) < 1) & view.legal_actions).any(-1)
    certain = inside & view.alive & (episodes.behaviour_log_prob == 0)
    return certain.any(-1) & episodes.mask


def had_no_choice(episodes: Sequence) -> Bool[Array, "M T"]:
    """Whether no live agent had another action in a step.

    Of discrete actions one is legal then; of continuous ones, the agent has no entry.
    """
    view, discrete = episodes.view_tm1, jnp.issubdtype(episodes.action.dtype, jnp.integer)
    return ((view.legal_actions.sum(-1) <= int(discrete)) | ~view.alive).all(-1)
