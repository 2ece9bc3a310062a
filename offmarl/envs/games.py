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
"""Actions drawn from a policy without likelihoods; see `_distribution`."""


class Level(NamedTuple):
    """The nodes of a tree after the same number of actions."""

    parent: Int[np.ndarray, "n"]
    """Place in the level before."""
    action: Int[np.ndarray, "n"]
    """The action that led here."""
    seat: Int[np.ndarray, "n"]
    """Who acts; -1 if the game is over."""
    infoset: Int[np.ndarray, "n"]
    """Row of that seat's information set; -1 if the game is over."""
    payoff: Float[np.ndarray, "n 2"]
    """What each seat has earned so far."""
    chance: Float[np.ndarray, "n"]
    """Probability of the cards."""


class GameTree(NamedTuple):
    """All games that can be played in an environment."""

    levels: tuple[Level, ...]
    seats: Int[np.ndarray, "I"]
    """Whose the information sets are."""
    legal: Bool[np.ndarray, "I A"]
    views: View
    """The views of both seats at all nodes, ``(V, 2, ...)``."""
    path: Int[np.ndarray, "I T"]
    """Rows of ``views`` on the way to each information set, the last of which is its own; then -1.
    Other ways there look the same to its seat."""
    taken: Int[np.ndarray, "I T 2"]
    """Actions of both seats on that way."""


class Solution(NamedTuple):
    """What a tabular policy is worth, by seat."""

    value: Float[np.ndarray, "2"]
    """What the seat earns if both play the policy."""
    gain: Float[np.ndarray, "2"]
    """How much more its best response earns."""

    @property
    def nash_conv(self) -> float:
        """The sum of the gains; exploitability is half of it."""
        return float(self.gain.sum())


@lru_cache(maxsize=4)
def game_tree(env: Any) -> GameTree:
    """Return the tree of a game of pgx; `OptionError` if there is none, or too large a one."""
    if not isinstance(env, Pgx) or env.time_limit > _LONGEST:
        raise OptionError(
            f"{env.spec.name} has no exact exploitability: only the games of pgx with at most "
            f"{_LONGEST} actions have one, such as pgx/leduc_holdem."
        )
    states, timestep, chance = _deal(env)
    step = jit_rarely_run()(jax.vmap(partial(env.step, jax.random.key(0))))
    parent = action = np.full(len(chance), -1)
    payoff, known = np.zeros((len(chance), 2)), [parent, parent]
    path, taken = parent[:, None][:, :0], np.zeros((len(chance), 0, 2), int)
    levels, views, infosets = list[Level](), list[View](), list[Any]()
    num_infosets = num_nodes = 0
    while True:
        view = timestep.view
        acts = view.legal_actions[..., :-1]
        seat = np.where(acts.any((1, 2)), acts.any(-1).argmax(-1), -1)
        known = [
            _number((known[own], np.where(mover == own, action, -1), _of_seat(view, own)))
            for own, mover in enumerate([levels[-1].seat[parent] if levels else parent] * 2)
        ]
        live = np.flatnonzero(seat >= 0)
        mine = _number((seat, np.where(seat == 0, *known)))[live]
        _, first, which = np.unique(mine, return_index=True, return_inverse=True)
        infoset = np.full(len(seat), -1)
        infoset[live] = num_infosets + which
        payoff = payoff + timestep.reward
        levels.append(Level(parent, action, seat, infoset, payoff, chance))
        views.append(view)
        path = np.column_stack([path, num_nodes + np.arange(len(seat))])
        at = live[first]
        infosets.append((seat[at], view.legal_actions[at, seat[at]], path[at], taken[at]))
        num_infosets, num_nodes = num_infosets + len(at), num_nodes + len(seat)
        if not len(live):
            return _join(levels, views, infosets)
        parent, action = np.nonzero(acts.any(1))
        waits = env.spec.num_actions - 1
        joint = np.where(seat[parent, None] == np.arange(2), action[:, None], waits)
        states, timestep = _step(step, states, parent, joint.astype(np.int32))
        path, payoff, chance = path[parent], payoff[parent], chance[parent]
        known = [own[parent] for own in known]
        taken = np.concatenate([taken[parent], joint[:, None]], axis=1)


def _deal(env: Pgx) -> tuple[ArrayTree, Timestep, Float[np.ndarray, "n"]]:
    """Return the states and timesteps after all deals of the cards, and their probabilities."""
    inner = jit_rarely_run()(env.reset)(jax.random.key(0))[0].inner
    deck, size = _DECKS.get(env.name.partition(":")[0], ((), 0))
    deals, counts = np.unique([*permutations(deck, size)], axis=0, return_counts=True)
    first = inner.current_player
    players = [first, 1 - first, *range(2, size)]

    def begin(cards: Int[Array, "size"]) -> tuple[ArrayTree, Timestep]:
        by_player = {"_cards": jnp.stack([cards[one] for one in players])} if size else {}
        return env.begin(inner.replace(**by_player))

    dealt = jit_rarely_run()(jax.vmap(begin))(jnp.asarray(deals, jnp.int32))
    states, timestep = jax.device_get(dealt)
    return states, timestep, counts / counts.sum()


def _step(
    step: Any, states: ArrayTree, rows: Int[np.ndarray, "n"], joint: Int[np.ndarray, "n 2"]
) -> tuple[ArrayTree, Timestep]:
    """Take a step from each of some states, a batch at a time."""
    parts = []
    for begin in range(0, len(rows), _BATCH):
        some = np.resize(np.arange(begin, min(begin + _BATCH, len(rows))), _BATCH)
        given = jax.tree.map(lambda x, some=some: x[rows[some]], states)
        parts.append(jax.device_get(step(given, joint[some])))
    found: Any = jax.tree.map(lambda *each: np.concatenate(each)[: len(rows)], *parts)
    return found


def _of_seat(view: View, seat: int) -> tuple[Any, Any]:
    return view.observation[:, seat], view.legal_actions[:, seat]


def _number(tree: ArrayTree) -> Int[np.ndarray, "n"]:
    """Return the number of each row among the distinct rows of a tree of arrays."""
    leaves = [np.ascontiguousarray(x).reshape(len(x), -1) for x in jax.tree.leaves(tree)]
    rows = np.concatenate([x.view(np.uint8) for x in leaves], axis=1)
    return np.unique(rows.view(f"V{rows.shape[1]}").ravel(), return_inverse=True)[1]


def _join(levels: list[Level], views: list[View], infosets: list[Any]) -> GameTree:
    seats, legal, paths, taken = zip(*infosets, strict=True)
    length = max(path.shape[1] for path in paths)

    def joined(arrays: Any) -> np.ndarray:
        pads = [((0, 0), (0, length - x.shape[1]), *[(0, 0)] * (x.ndim - 2)) for x in arrays]
        whole = [np.pad(x, pad, constant_values=-1) for x, pad in zip(arrays, pads, strict=True)]
        return np.concatenate(whole)

    return GameTree(
        tuple(levels),
        np.concatenate(seats),
        np.concatenate(legal),
        jax.tree.map(lambda *each: np.concatenate(each), *views),
        joined(paths),
        joined(taken),
    )


# ------------------------------------------------------------------------------------ policies


def tabulate(tree: GameTree, policy: Policy, params: ArrayTree) -> Float[np.ndarray, "I A"]:
    """Return a policy of both seats as a table; one with a memory sees all that led to a view.

    Raises
    ------
    OptionError
        Its agents choose after one another, so that it has no table for each.
    """
    if policy.joint:
        raise OptionError("agents that choose after one another have no policy of their own.")
    path, taken = tree.path, tree.taken
    same = np.arange(len(path))
    if not jax.tree.leaves(policy.initial_carry()):  # only the last view matters
        path = np.take_along_axis(path, (path >= 0).sum(1, keepdims=True) - 1, axis=1)
        views = jax.tree.map(lambda x: x[path[:, 0]], tree.views)
        _, first, same = np.unique(_number(views), return_index=True, return_inverse=True)
        path, taken = path[first], taken[first, :1]
    seen = tree.views.observation, tree.views.legal_actions
    found = _tables(policy, bool(policy.draws(params)), params, seen, path, taken)
    table = np.asarray(found, float)[same, tree.seats] * tree.legal
    return table / table.sum(1, keepdims=True)


@partial(jax.jit, static_argnums=(0, 1))
def _tables(
    policy: Policy, draws: bool, params: ArrayTree, seen: Any, path: Array, taken: Array
) -> Float[Array, "M 2 A"]:
    """Return how both seats would act at the ends of paths."""

    def remembered(carry: ArrayTree, at: Any) -> tuple[ArrayTree, None]:
        row, next_row, joint = at
        observation, legal = jax.tree.map(lambda x: x[row], seen)
        if policy.log_prob is None:
            after = policy.act(params, carry, observation, legal, jax.random.key(0))[2]
        else:
            after = policy.log_prob(params, carry, observation, legal, joint)[1]
        after = remember(policy, after, jnp.zeros(2), jnp.zeros(2, bool))
        return jax.tree.map(lambda x, y: jnp.where(next_row >= 0, x, y), after, carry), None

    def last(given: Any) -> Float[Array, "2 A"]:
        path, taken = given
        before = path[:-1], path[1:], taken[: len(path) - 1]
        carry, _ = jax.lax.scan(remembered, policy.initial_carry(), before)
        view = jax.tree.map(lambda x: x[path[(path >= 0).sum() - 1]], seen)
        return _distribution(policy, draws, params, carry, *view)

    return jax.lax.map(last, (path, taken), batch_size=min(_BATCH, len(path)))


def _distribution(
    policy: Policy, draws: bool, params: ArrayTree, carry: ArrayTree, seen: Any, legal: Array
) -> Float[Array, "2 A"]:
    """Return the probabilities of all actions.

    A policy without likelihoods tells those of the actions that it draws. Those that it never drew
    share the rest: for uniform and epsilon-greedy policies, this is exact.
    """
    actions = legal.shape[1]
    if not draws:
        return jax.nn.one_hot(policy.act(params, carry, seen, legal, jax.random.key(0))[0], actions)
    if policy.log_prob is not None:
        likelihood, everywhere = policy.log_prob, jnp.arange(actions)[:, None].repeat(2, 1)
        return jnp.exp(
            jax.vmap(lambda joint: likelihood(params, carry, seen, legal, joint)[0])(everywhere)
        ).T
    keys = jax.random.split(jax.random.key(0), _DRAWS)
    action, log_prob, _ = jax.vmap(lambda key: policy.act(params, carry, seen, legal, key))(keys)
    known = (jax.nn.one_hot(action, actions) * jnp.exp(log_prob)[..., None]).max(0)
    other = legal & (known == 0)
    rest = jnp.maximum(1 - known.sum(1), 0) / jnp.maximum(other.sum(1), 1)
    return jnp.where(other, rest[:, None], known)


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
    for own in range(2):
        after, worth = None, np.zeros(0)
        for level, reach in reversed(reached):  # worth: times the probability of all but `own`
            later = worth
            worth = level.chance * reach[:, 1 - own] * level.payoff[:, own] * (level.seat < 0)
            if after is not None:
                mine, row = level.seat[after.parent] == own, level.infoset[after.parent]
                gains = np.where(tree.legal, 0.0, -np.inf)
                np.add.at(gains, (row[mine], after.action[mine]), later[mine])
                kept = ~mine | (after.action == gains.argmax(1)[row])
                worth += np.bincount(after.parent[kept], later[kept], len(worth))
            after = level
        best[own] = worth.sum()
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
