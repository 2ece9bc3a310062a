"""Exact values of policies in small games of two seats: best responses, NashConv, mixtures.

`game_tree` plays all games of an environment of pgx. A tabular policy is an array ``(I, A)`` of
probabilities, with a row for each information set of either seat: all that the seat has seen and
done so far, whatever its policy looks at.

NashConv is the sum over seats of how much more the best response to the other seat's policy earns
than the seat's own policy (Lanctot et al. 2017, arXiv 1711.00832). Exploitability is half of it.
"""

from collections.abc import Iterator
from functools import lru_cache, partial
from itertools import permutations
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from offmarl._arrays import join_bytes
from offmarl._compiling import jit_rarely_run
from offmarl.envs.pgx import Pgx
from offmarl.errors import OptionError
from offmarl.types import ArrayTree, Policy, Timestep, View, remember

_DECKS = {"pgx/kuhn_poker": ((0, 1, 2), 2), "pgx/leduc_holdem": ((0, 0, 1, 1, 2, 2), 3)}
"""The ranks of the cards, and how many are dealt: one to each seat, then those for both."""

_LONGEST = 10
"""Actions in the longest game: those of pgx that are longer have far too many nodes."""

_BATCH = 1024
"""Nodes at a time: trees of any size share one program."""

_DRAWS = 256
"""Actions drawn from a policy without likelihoods; see `_distributions`."""

_TOLERANCE = 1e-3
"""By how much rounding may raise a sum of probabilities above 1."""


class Level(NamedTuple):
    """The nodes of a tree after the same number of actions."""

    parent: Int[np.ndarray, "n"]
    """Index in the level before."""
    action: Int[np.ndarray, "n"]
    """The action that led here."""
    joint: Int[np.ndarray, "n 2"]
    """The joint action that led here, in which one seat waits."""
    seat: Int[np.ndarray, "n"]
    """The seat that acts; -1 if the game is over."""
    infoset: Int[np.ndarray, "n"]
    """Row of that seat's information set; -1 if the game is over."""
    payoff: Float[np.ndarray, "n 2"]
    """Payoff of each seat so far."""
    chance: Float[np.ndarray, "n"]
    """Probability of the cards."""
    view: View
    """The views of both seats, ``(n, 2, ...)``."""


class GameTree(NamedTuple):
    """All games that can be played in an environment."""

    levels: tuple[Level, ...]
    seats: Int[np.ndarray, "I"]
    """The seat of each information set."""
    legal: Bool[np.ndarray, "I A"]


class Solution(NamedTuple):
    """The value of a tabular policy, by seat."""

    value: Float[np.ndarray, "2"]
    """Mean payoff of the seat if both play the policy."""
    gain: Float[np.ndarray, "2"]
    """How much more its best response earns."""
    interval: tuple[float | None, float | None] = (None, None)
    """95% interval of ``nash_conv``; None if it is exact, or of too few episodes."""

    @property
    def nash_conv(self) -> float:
        """The sum of the gains; exploitability is half of it."""
        return float(self.gain.sum())


def has_small_tree(env: Any) -> bool:
    """Return whether `game_tree` takes an environment."""
    return isinstance(env, Pgx) and env.time_limit <= _LONGEST


@lru_cache(maxsize=4)
def game_tree(env: Any) -> GameTree:
    """Return the tree of a game of pgx; `OptionError` if there is none, or it is too large."""
    if not has_small_tree(env):
        raise OptionError(
            f"{env.spec.name} has no exact exploitability: only the games of pgx with at most "
            f"{_LONGEST} actions have one, such as pgx/leduc_holdem."
        )
    states, timestep, chance = _deal(env)
    step = jit_rarely_run()(jax.vmap(partial(env.step, jax.random.key(0))))
    parent = action = np.full(len(chance), -1)
    payoff, histories, joint = np.zeros((len(chance), 2)), [parent] * 2, np.stack([parent] * 2, 1)
    levels, seats, legal = list[Level](), list[Any](), list[Any]()
    num_infosets = 0
    while True:
        view = timestep.view
        acts = view.legal_actions[..., :-1]
        seat = np.where(acts.any((1, 2)), acts.any(-1).argmax(-1), -1)
        histories = [
            _number((histories[x], joint[:, x], view.observation[:, x], view.legal_actions[:, x]))
            for x in range(2)
        ]
        live = np.flatnonzero(seat >= 0)
        labels = (2 * np.where(seat == 0, *histories) + seat)[live]
        _, first, which = np.unique(labels, return_index=True, return_inverse=True)
        infoset = np.full(len(seat), -1)
        infoset[live] = num_infosets + which
        payoff = payoff + timestep.reward
        levels.append(Level(parent, action, joint, seat, infoset, payoff, chance, view))
        if not len(live):
            return GameTree(tuple(levels), np.concatenate(seats), np.concatenate(legal))
        at = live[first]
        seats.append(seat[at])
        legal.append(view.legal_actions[at, seat[at]])
        num_infosets += len(at)
        parent, action = np.nonzero(acts.any(1))
        waits = env.spec.num_actions - 1
        joint = np.where(seat[parent, None] == np.arange(2), action[:, None], waits)
        states, timestep = _in_batches(step, _rows(states, parent), joint.astype(np.int32))
        payoff, chance, histories = payoff[parent], chance[parent], [x[parent] for x in histories]


def _deal(env: Pgx) -> tuple[ArrayTree, Timestep, Float[np.ndarray, "n"]]:
    """Return the states and timesteps after all deals of the cards, and their probabilities."""
    inner = jit_rarely_run()(env.reset)(jax.random.key(0))[0].inner
    deck, size = _DECKS.get(env.name.partition(":")[0], ((), 0))
    deals, counts = np.unique([*permutations(deck, size)], axis=0, return_counts=True)
    first = inner.current_player
    players = [first, 1 - first, *range(2, size)]

    def begin(cards: Int[Array, "size"]) -> tuple[ArrayTree, Timestep]:
        by_player = {"_cards": jnp.stack([cards[player] for player in players])} if size else {}
        return env.begin(inner.replace(**by_player))

    dealt = jit_rarely_run()(jax.vmap(begin))(jnp.asarray(deals, jnp.int32))
    states, timestep = jax.device_get(dealt)
    return states, timestep, counts / counts.sum()


def _in_batches(function: Any, *rows: ArrayTree) -> Any:
    """Map a compiled function over batches of rows, all of one size."""
    count, parts = len(jax.tree.leaves(rows)[0]), []
    for begin in range(0, count, _BATCH):
        index = np.resize(np.arange(begin, min(begin + _BATCH, count)), _BATCH)
        parts.append(jax.device_get(function(*_rows(rows, index))))
    return jax.tree.map(lambda *leaves: np.concatenate(leaves)[:count], *parts)


def _rows(tree: Any, index: Int[np.ndarray, "n"]) -> Any:
    return jax.tree.map(lambda x: x[index], tree)


def _number(tree: ArrayTree) -> Int[np.ndarray, "n"]:
    """Return the number of each row among the distinct rows of a tree of arrays."""
    rows = join_bytes(jax.tree.leaves(tree), 1)
    return np.unique(rows.view(f"V{rows.shape[1]}").ravel(), return_inverse=True)[1]


# ------------------------------------------------------------------------------------ policies


def tabulate(tree: GameTree, policy: Policy, params: ArrayTree) -> Float[np.ndarray, "I A"]:
    """Return a policy of both seats as a table; one with a memory sees all that led to a view.

    Raises
    ------
    OptionError
        Its agents choose after one another, so that it has no table for each; or it draws actions
        and does not tell their probabilities.
    """
    if policy.joint:
        raise OptionError("agents that choose after one another have no policy of their own.")
    carry, ends = policy.initial_carry(), list[tuple[ArrayTree, View]]()
    carry = jax.tree.map(lambda x: np.stack([x] * len(tree.levels[0].seat)), carry)
    for number, level in enumerate(tree.levels):
        if number and jax.tree.leaves(carry):
            before = _rows((carry, tree.levels[number - 1].view), level.parent)
            carry = _in_batches(partial(_remembered, policy, params), *before, level.joint)
        rows, first = np.unique(level.infoset, return_index=True)
        at = first[rows >= 0]  # of nodes that look the same to their seat, any one
        ends.append(_rows((carry, level.view), at))
    ends = jax.tree.map(lambda *leaves: np.concatenate(leaves), *ends)
    _, first, same = np.unique(_number(ends), return_index=True, return_inverse=True)
    draws = bool(policy.draws(params))
    probabilities = _distributions(policy, draws, params, *_rows(ends, first))
    table = np.asarray(probabilities, float)[same, tree.seats] * tree.legal
    if not np.isfinite(table).all():
        raise OptionError(
            "this policy draws actions without telling their probabilities, so that it has no "
            "table: return log-probabilities from act, or give it log_prob."
        )
    return table / table.sum(1, keepdims=True)


@partial(jax.jit, static_argnums=0)
def _remembered(
    policy: Policy, params: ArrayTree, carry: ArrayTree, view: View, joint: Array
) -> ArrayTree:
    """Return the carries of a policy after joint actions, one for each row."""

    def update(carry: ArrayTree, view: View, joint: Array) -> ArrayTree:
        inputs = view.observation, view.legal_actions
        if policy.log_prob is None:
            after = policy.act(params, carry, *inputs, jax.random.key(0))[2]
        else:
            after = policy.log_prob(params, carry, *inputs, joint)[1]
        return remember(policy, after, jnp.zeros(2), jnp.zeros(2, bool))

    return jax.vmap(update)(carry, view, joint)


@partial(jax.jit, static_argnums=(0, 1))
def _distributions(
    policy: Policy, draws: bool, params: ArrayTree, carries: ArrayTree, views: View
) -> Float[Array, "M 2 A"]:
    """Return the probabilities of all actions, for each row of carries and views.

    A policy without likelihoods gives the probabilities of the actions that it draws. Actions that
    were never drawn share the remainder: for uniform and epsilon-greedy policies, this is exact.
    They are NaN if it does not know them, or if they add up to more than one.
    """
    key, actions = jax.random.key(0), views.legal_actions.shape[-1]

    def distribution(row: tuple[ArrayTree, View]) -> Float[Array, "2 A"]:
        carry, view = row
        inputs, likelihood = (view.observation, view.legal_actions), policy.log_prob
        if not draws:
            return jax.nn.one_hot(policy.act(params, carry, *inputs, key)[0], actions)
        if likelihood is not None:
            joint = jnp.arange(actions)[:, None].repeat(2, 1)
            log_prob, _ = jax.vmap(lambda choice: likelihood(params, carry, *inputs, choice))(joint)
            return jnp.exp(log_prob).T
        keys = jax.random.split(key, _DRAWS)
        action, log_prob, _ = jax.vmap(lambda draw: policy.act(params, carry, *inputs, draw))(keys)
        probability = (jax.nn.one_hot(action, actions) * jnp.exp(log_prob)[..., None]).max(0)
        other = view.legal_actions & (probability == 0)
        remainder = jnp.maximum(1 - probability.sum(1), 0) / jnp.maximum(other.sum(1), 1)
        is_told = jnp.isfinite(log_prob).all(0) & (probability.sum(1) < 1 + _TOLERANCE)
        probability = jnp.where(other, remainder[:, None], probability)
        return jnp.where(is_told[:, None], probability, jnp.nan)

    return jax.lax.map(distribution, (carries, views), batch_size=min(_BATCH, len(views.alive)))


# ------------------------------------------------------------------------------------- values


def mixture(
    tree: GameTree, tables: Float[np.ndarray, "K I A"], weights: Float[np.ndarray, "K"]
) -> Float[np.ndarray, "I A"]:
    """Return the policy that plays as if one of several were drawn before each game.

    A member counts at an information set by its weight and the probability that its own actions
    lead there. The mean of the members' probabilities would be another policy.
    """
    weights = np.asarray(weights, float) / np.sum(weights)
    total = np.zeros(tables.shape[1:])
    for level, reach in _reach(tree, tables):
        live = np.flatnonzero(level.seat >= 0)
        rows, first = np.unique(level.infoset[live], return_index=True)
        at = live[first]
        shares = weights[:, None] * reach[:, at, level.seat[at]]
        shares = np.where(shares.sum(0) > 0, shares, weights[:, None])  # where none ever gets
        total[rows] = np.einsum("kr,kra->ra", shares, tables[:, rows])
    return total / total.sum(1, keepdims=True)


def solve(tree: GameTree, table: Float[np.ndarray, "I A"]) -> Solution:
    """Return what a policy of both seats earns, and what best responses would gain.

    For policies of different origin in the two seats, join their tables by ``tree.seats``.
    """
    reached = [(level, reach[0]) for level, reach in _reach(tree, table[None])]
    value, best = np.zeros(2), np.zeros(2)
    for level, reach in reached:
        weight = level.chance * reach.prod(1) * (level.seat < 0)
        value += weight @ level.payoff
    for seat in range(2):
        after, worth = None, np.zeros(0)
        for level, reach in reversed(reached):  # worth: times the probability of all but `own`
            later = worth
            worth = level.chance * reach[:, 1 - seat] * level.payoff[:, seat] * (level.seat < 0)
            if after is not None:
                acts, row = level.seat[after.parent] == seat, level.infoset[after.parent]
                gains = np.where(tree.legal, 0.0, -np.inf)
                np.add.at(gains, (row[acts], after.action[acts]), later[acts])
                kept = ~acts | (after.action == gains.argmax(1)[row])
                worth += np.bincount(after.parent[kept], later[kept], len(worth))
            after = level
        best[seat] = worth.sum()
    return Solution(value, best - value)


def _reach(
    tree: GameTree, tables: Float[np.ndarray, "K I A"]
) -> Iterator[tuple[Level, Float[np.ndarray, "K n 2"]]]:
    """Yield the levels, and the probabilities that the actions of each seat alone lead there."""
    before, reach = tree.levels[0], np.ones((len(tables), len(tree.levels[0].seat), 2))
    for number, level in enumerate(tree.levels):
        if number:
            seat, row = before.seat[level.parent], before.infoset[level.parent]
            reach = reach[:, level.parent]
            reach[:, np.arange(len(seat)), seat] *= tables[:, row, level.action]
        yield level, reach
        before = level
