"""Fitted Q evaluation: critics of given policies, learned from recorded steps.

    L = E[ (Q(s, a) - y)² ],   y = r + γ Q̄(s', a'),   a' ~ π(· | history)

with the recorded joint action a and a joint action a' of the evaluated policy (Le et al. 2019,
arXiv 1903.08738). The policy was unrolled over each episode's history beforehand, so a' is exact
for recurrent policies, too. Critics of all policies learn side by side from the same batches; each
has members that weigh the episodes differently, by a bootstrap (Hao et al. 2021, arXiv 2102.03607),
which gives the interval.
"""

from collections.abc import Callable
from functools import partial
from math import ceil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl.losses import masked_mean, td_targets
from offmarl.networks import (
    ActionValue,
    as_vectors,
    blank_view,
    observation_encoder,
    state_encoder,
)
from offmarl.ope.options import Options
from offmarl.replay import Replay
from offmarl.terminal import Progress, quiet
from offmarl.types import ArrayTree, EnvSpec, Sequence, View

_PRETRAINING = 0.2
"""Fraction of the updates in which critics learn the returns of the data, which they start from."""

_CALLS = 20
"""Calls of the compiled loop: progress is shown between them."""


class Critic(NamedTuple):
    """A critic of joint actions, as pure functions."""

    init: Callable[[PRNGKeyArray], ArrayTree]
    """``init(key) -> params``"""
    values: Callable[
        [ArrayTree, View, Float[Array, "*b"], Array],
        Float[Array, "*b"],
    ]
    """``values(params, view, time, action)``: the value of joint actions ``(*b, N)`` or ``(*b, N,
    A)``; ``time`` is the part of the longest episode that has passed, from 0 to 1."""


def make_critic(spec: EnvSpec, hidden: int = 64) -> Critic:
    """Build a critic of joint actions."""
    network = ActionValue(
        hidden=hidden,
        sees="joint",
        agent_id="none",
        observation=observation_encoder(spec, hidden),
        state=state_encoder(spec, hidden),
        normalised=True,
    )
    valued = jnp.arange(1)

    def init(key: PRNGKeyArray) -> ArrayTree:
        action = jnp.zeros((spec.num_agents, spec.action_size + 1))
        return network.init(key, blank_view(spec), action, action[valued], valued)

    def values(
        params: ArrayTree, view: View, time: Float[Array, "*b"], action: Array
    ) -> Float[Array, "*b"]:
        vectors = as_vectors(spec, action, view.legal_actions) * view.alive[..., None]
        clock = jnp.broadcast_to(time[..., None, None], (*vectors.shape[:-1], 1))
        inputs = jnp.concatenate([vectors, clock], axis=-1)
        outputs: Any = network.apply(params, view, inputs, inputs[..., valued, :], valued)
        return outputs[..., 0, 0]

    return Critic(init, values)


class Transitions(NamedTuple):
    """Steps that critics learn from; a pytree."""

    replay: Replay
    """Batches of single steps."""
    place: Int[Array, "episodes"]
    """Place of each episode of the dataset among the M that are used."""
    first: Int[Array, "M"]
    """The slot of each episode's first view in ``actions``."""
    actions: Array
    """Actions that each of P policies draws in each slot, ``(P, slots, K, N)`` or ``(P, slots, K,
    N, A)``."""
    complete: Bool[Array, "M"]
    """Episodes that the environment ended, by a time limit, too: their returns are known."""
    weights: Float[Array, "P C M"]
    """Weight of each episode for each member of each policy."""
    scale: Float[Array, ""]
    """Rewards are divided by it."""
    longest: Float[Array, ""]
    """Steps of the longest episode."""
    bounds: Float[Array, "2 slots"]
    """The smallest and the largest value that the rewards allow from each time on, divided by the
    scale."""


class _Learner(NamedTuple):
    params: ArrayTree
    target: ArrayTree
    optimiser: ArrayTree


class Batch(NamedTuple):
    """Steps, with an action of each policy after each."""

    view_tm1: View
    view_t: View
    bounds: Float[Array, "2 B"]
    """Bounds of the value of the second view."""
    time_tm1: Float[Array, "B"]
    time_t: Float[Array, "B"]
    action: Array
    reward: Float[Array, "B"]
    to_go: Float[Array, "B"]
    """Discounted return of the recorded steps."""
    discount: Float[Array, "B"]
    known: Bool[Array, "B"]
    counts: Bool[Array, "B"]
    """Steps whose return is known."""
    episode: Int[Array, "B"]
    next_action: Array
    """Next action of each policy, ``(P, B, ...)``."""


@partial(jax.jit, static_argnums=0)
def start_values(
    critic: Critic, params: ArrayTree, episodes: Sequence, action: Array
) -> Float[Array, "C M"]:
    """Return the mean value of K drawn actions ``(M, slots, K, ...)`` at the start of episodes.

    ``params`` are those of C members.
    """
    view, first = jax.tree.map(lambda leaf: leaf[:, 0], (episodes.view, action))
    actions, time = jnp.moveaxis(first, 1, 0), jnp.zeros(len(episodes.mask))

    def of_member(params: ArrayTree) -> Float[Array, "M"]:
        return jax.lax.map(lambda x: critic.values(params, view, time, x), actions).mean(0)

    return jax.lax.map(of_member, params)


def fit(
    critic: Critic, data: Transitions, options: Options, progress: Progress = quiet
) -> ArrayTree:
    """Learn the critics of all P policies with C members each; return the parameters ``(P, C)``.

    The values that critics bootstrap from are bounded by what the rewards allow, so that critics
    cannot diverge.
    """
    key = jax.random.key(options.seed)
    learner = _begin(critic, data.weights.shape[1], key)
    pretrained, part = ceil(_PRETRAINING * options.updates), max(options.updates // _CALLS, 1)
    with progress("fit critics", options.updates) as advance:
        for pretraining, first, end in (
            (True, 0, pretrained),
            (False, pretrained, options.updates),
        ):
            if not pretraining:  # until here, the critics of all policies are equal
                learner = jax.tree.map(lambda leaf: leaf.repeat(len(data.actions), 0), learner)
            for done in range(first, end, part):
                count = min(part, end - done)
                learner = _learn(critic, options, pretraining, learner, data, key, done, count)
                jax.tree.leaves(learner)[0].block_until_ready()
                advance(count)
    return learner.params


def _begin(critic: Critic, members: int, key: PRNGKeyArray) -> _Learner:
    """Draw the parameters of each member, ``(1, C, ...)``: they are the same for all policies."""
    # One after another: vmapped orthogonal initialisation can deadlock on a CPU with few cores.
    initial = jax.jit(partial(jax.lax.map, critic.init))(jax.random.split(key, members))
    params = jax.tree.map(lambda leaf: leaf[None], initial)
    return _Learner(params, params, jax.vmap(jax.vmap(optax.adam(0.0).init))(params))


@partial(jax.jit, static_argnums=(0, 1, 2))
def _learn(
    critic: Critic,
    options: Options,
    pretraining: bool,
    learner: _Learner,
    data: Transitions,
    key: PRNGKeyArray,
    first: Int[Array, ""] | int,
    count: Int[Array, ""] | int,
) -> _Learner:
    """Make ``count`` updates, from number ``first`` on."""

    def update(number: Array, learner: _Learner) -> _Learner:
        batch = draw_batch(data, options, jax.random.fold_in(key, number))
        progress = number / options.updates
        rate = options.learning_rate * (1 - progress)

        def of_member(learner: _Learner, weight: Array, next_action: Array) -> _Learner:
            loss = partial(critic_loss, critic, batch, weight, next_action, pretraining)
            gradient = jax.grad(loss)(learner.params, learner.target)
            step, optimiser = optax.adam(rate).update(gradient, learner.optimiser)
            params = optax.apply_updates(learner.params, step)
            target = optax.incremental_update(params, learner.target, options.tau)
            return _Learner(params, target, optimiser)

        of_policy = jax.vmap(of_member, in_axes=(0, 0, None))
        by_policy = data.weights[..., batch.episode], batch.next_action
        weights, next_action = (leaf[:1] if pretraining else leaf for leaf in by_policy)
        return jax.vmap(of_policy)(learner, weights, next_action)

    return jax.lax.fori_loop(first, first + count, update, learner)


def critic_loss(
    critic: Critic,
    batch: Batch,
    weight: Float[Array, "B"],
    next_action: Array,
    pretraining: bool,
    params: ArrayTree,
    target: ArrayTree,
) -> Float[Array, ""]:
    """Return the squared error of a critic, of returns or of bootstrapped targets."""
    if pretraining:
        y, known = batch.to_go, batch.counts
    else:
        v_t = critic.values(target, batch.view_t, batch.time_t, next_action)
        y = td_targets(batch.reward, batch.discount, jnp.clip(v_t, *batch.bounds))
        known = batch.known
    error = critic.values(params, batch.view_tm1, batch.time_tm1, batch.action) - y
    return masked_mean(error**2, known, weight)


def draw_batch(data: Transitions, options: Options, key: PRNGKeyArray) -> Batch:
    """Draw steps, and an action of each policy in the view after each."""
    batch_key, action_key = jax.random.split(key)
    windows = data.replay.sample(batch_key)
    assert windows.episode is not None and windows.time is not None
    assert windows.return_to_go is not None
    episode = data.place[windows.episode[:, 0]]
    ended = (windows.terminated | windows.truncated)[:, 0].all(-1) & data.complete[episode]
    over = windows.terminated[:, 0].all(-1) | ended
    sample = jax.random.randint(action_key, episode.shape, 0, data.actions.shape[2])
    slot = data.first[episode] + windows.time[:, 1]
    mask = windows.mask[:, 0]
    first, second = (jax.tree.map(lambda leaf, i=i: leaf[:, i], windows.view) for i in (0, 1))
    return Batch(
        first,
        second,
        data.bounds[:, windows.time[:, 1]],
        windows.time[:, 0] / data.longest,
        windows.time[:, 1] / data.longest,
        windows.action[:, 0],
        windows.reward[:, 0].mean(-1) / data.scale,
        windows.return_to_go[:, 0].mean(-1) / data.scale,
        options.gamma * (1 - over),
        mask & (windows.next_known[:, 0] | over),
        mask & data.complete[episode],
        episode,
        data.actions[:, slot, sample],
    )
