"""Policies unrolled over the histories of recorded episodes.

Also a clone of the policies that recorded them, where the probabilities of actions are missing.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Key, PRNGKeyArray
from numpy.typing import NDArray

from offmarl.losses import masked_mean
from offmarl.networks import (
    PolicyConfig,
    agent_head,
    agent_network,
    init_policy,
    make_policy,
    stochastic_head,
    unroll_batch,
)
from offmarl.replay import Replay, Windows, load
from offmarl.replay.batches import beginnings
from offmarl.replay.rings import Mixed
from offmarl.replay.sampling import Source
from offmarl.terminal import Progress
from offmarl.types import ArrayTree, Policy, Sequence, empty_view, remember

_BLOCK_BYTES = 2**26
"""Approximate size of the episodes that are on the device at once."""


_CLONE = Windows(batch_size=32, length=20, extras=())
_CLONING = 1000
"""Batches of a clone, and their number."""


class Followed(NamedTuple):
    """A policy's actions in M episodes of at most T steps, and their probabilities."""

    log_prob: Float[Array | np.ndarray, "M T N"]
    """Log-probability (density) of each live agent's recorded action, given the episode up to then;
    0 for others. Minus infinity if the policy would not take it, NaN if that is unknown."""
    action: Array | NDArray[Any]
    """Actions that the policy draws, ``(M, T + 1, K, N)`` or ``(M, T + 1, K, N, A)``; the last slot
    of an episode is the view that it ended with. K is 1 for a policy that does not draw."""

    @property
    def reaches_ends(self) -> bool:
        """Whether the policy draws continuous actions at an end of the interval, by clipping."""
        return bool((np.abs(self.action) >= 1).any())


class Histories:
    """Some episodes of a dataset, in blocks that fit on the device."""

    def __init__(self, source: Source | Mixed, episodes: NDArray[np.int64]):
        self._source, self.episodes, self.spec = source, episodes, source.spec
        self.lengths = np.asarray(source.episodes.length)[episodes]
        self.longest = int(self.lengths.max(initial=1))
        self.complete = np.asarray(source.episodes.complete)[episodes]

    @property
    def size(self) -> int:
        """M, the number of episodes in a block; the last is filled up with empty ones."""
        slot = sum(leaf.nbytes for leaf in jax.tree.leaves(empty_view(self._source.spec)))
        fit = _BLOCK_BYTES // max(slot * (self.longest + 1), 1)
        return int(np.clip(fit, 1, len(self.episodes)))

    def blocks(self) -> Iterator[tuple[slice, Sequence]]:
        """Yield blocks of episodes, ``(size, longest, ...)``, each with its part of all episodes.

        The arrays of empty episodes are zero, and so are their masks.
        """
        for start in range(0, len(self.episodes), self.size):
            part = slice(start, min(start + self.size, len(self.episodes)))
            windows = Windows(1, self.longest, extras=())
            sequence = beginnings(self._source, windows, self.episodes[part])
            yield part, jax.tree.map(partial(pad_episodes, size=self.size), sequence)


def pad_episodes(leaf: Array | NDArray[Any], size: int) -> Array:
    """Return an array with zeros up to a number of episodes."""
    return jnp.pad(leaf, [(0, size - len(leaf)), *[(0, 0)] * (leaf.ndim - 1)])


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
        inputs = view.observation, view.legal_actions
        actions, _, after = jax.vmap(lambda key: policy.act(params, carry, *inputs, key))(keys)
        log_prob = jnp.full(view.alive.shape, jnp.nan)
        after = jax.tree.map(lambda leaf: leaf[0], after)
        if policy.log_prob is not None:  # the carry follows the recorded action
            log_prob, after = policy.log_prob(params, carry, *inputs, action)
        if not stochastic:
            equal = jnp.where(actions[0] == action, 0.0, -jnp.inf)
            log_prob = equal if discrete else jnp.full(view.alive.shape, jnp.nan)
        log_prob = jnp.where(view.alive, log_prob, 0.0)
        return remember(policy, after, reward, done), (log_prob, actions)

    def of_episode(episode: Sequence, key: PRNGKeyArray) -> Followed:
        slots = len(episode.mask) + 1
        done = episode.terminated | episode.truncated
        steps = jax.tree.map(with_last_slot, (episode.action, episode.reward, done))
        keys = jax.random.split(key, (slots, samples))
        _, (log_prob, actions) = jax.lax.scan(
            step, policy.initial_carry(), ((episode.view, *steps), keys)
        )
        return Followed(jnp.where(episode.mask[:, None], log_prob[:-1], 0.0), actions)

    return jax.vmap(of_episode)(episodes, jax.random.split(key, len(episodes.mask)))


def with_last_slot(steps: Array) -> Array:
    """Repeat the last step in the slot after it, where nothing is done any more."""
    return jnp.concatenate([steps, steps[-1:]])


def recorded_log_prob(episodes: Sequence) -> Float[Array, "M T N"]:
    """Return the recorded log-probabilities of the live agents' actions; 0 for others."""
    acts = episodes.view_tm1.alive & episodes.mask[..., None]
    return jnp.where(acts, episodes.behaviour_log_prob, 0.0)


def at_ends(episodes: Sequence) -> Bool[Array, "M T N"]:
    """Return whether a live agent's action was at an end of the interval, for continuous actions.

    A policy that clips its actions takes an end with a probability. Others, such as a squashed
    Gaussian, have only a density there, and take it with probability 0.
    """
    view = episodes.view_tm1
    if jnp.issubdtype(episodes.action.dtype, jnp.integer):
        return jnp.zeros_like(view.alive)
    ends = (jnp.abs(episodes.action) >= 1) & view.legal_actions
    return ends.any(-1) & view.alive & episodes.mask[..., None]


def was_certain_inside(episodes: Sequence) -> Bool[Array, "M T N"]:
    """Return whether a live agent took a continuous action between the ends with probability 1.

    A policy that draws its actions from a density takes it with probability 0.
    """
    view = episodes.view_tm1
    if jnp.issubdtype(episodes.action.dtype, jnp.integer):
        return jnp.zeros_like(view.alive)
    inside = ((jnp.abs(episodes.action) < 1) & view.legal_actions).any(-1)
    certain = inside & view.alive & (episodes.behaviour_log_prob == 0)
    return certain & episodes.mask[..., None]


def clone(
    source: Source | Mixed, episodes: NDArray[np.int64], seed: int, progress: Progress
) -> tuple[Policy, ArrayTree]:
    """Fit a recurrent policy, shared by all agents, to recorded actions by maximum likelihood.

    This is `bc` with its defaults, but for a step size that decreases to 0, which lets the clone
    follow the frequencies of the whole data.
    """
    config = PolicyConfig("recurrent", stochastic_head(source.spec))
    network, head = agent_network(config, source.spec), agent_head(config)
    adam = optax.adam(optax.linear_schedule(1e-3, 0.0, _CLONING))

    def loss(params: ArrayTree, batch: Sequence) -> Float[Array, ""]:
        view = batch.view_tm1
        outputs = unroll_batch(network, params, view.observation, batch.first[:, :-1])
        log_prob = head(outputs, view.legal_actions).log_prob(batch.action)
        return -masked_mean(log_prob, batch.mask[..., None] & view.alive)

    @jax.jit
    def learn(params: ArrayTree, replay: Replay, key: PRNGKeyArray) -> ArrayTree:
        def update(number: Array, learner: tuple[Any, Any]) -> tuple[Any, Any]:
            batch = replay.sample(jax.random.fold_in(key, number))
            step, optimiser = adam.update(jax.grad(loss)(learner[0], batch), learner[1])
            return optax.apply_updates(learner[0], step), optimiser

        return jax.lax.fori_loop(0, _CLONING, update, (params, adam.init(params)))[0]

    init_key, key = jax.random.split(jax.random.key(seed))
    with progress("clone the data's policies", 1) as advance:
        params = init_policy(config, source.spec, init_key)
        params = learn(params, load(source, _CLONE, episodes), key)
        jax.tree.leaves(params)[0].block_until_ready()
        advance(1)
    return make_policy(config, source.spec), params
