"""Values of policies that play in recorded steps: a tabular model of the environment.

In each view, one of the recorded steps with the same view and joint action is drawn; its reward and
its next view follow. Where the environment is deterministic, the value is exact, however far the
policy is from those that recorded. A policy that does what was never recorded has no value.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

from offmarl._arrays import join_bytes
from offmarl.ope.history import Histories
from offmarl.types import ArrayTree, Policy, View, remember

_MOST_VIEWS = 20_000
"""Largest number of different views of a table."""

_STARTS = 256
"""Number of episodes that each member plays."""


class Table(NamedTuple):
    """The S recorded steps whose outcome is known, sorted by checksum; a pytree."""

    views: View
    """Each different view once."""
    view: Int[Array, "S"]
    """The number of the view that a step was taken in."""
    action: Int[Array, "S N"]
    """0 for agents that are not alive."""
    reward: Float[Array, "S"]
    over: Bool[Array, "S"]
    """The episode terminated, or the environment truncated it before the time limit."""
    after: Int[Array, "S"]
    """The number of the next view."""
    checksum: UInt32[Array, "S"]
    factors: UInt32[Array, "N1"]
    """Factors of the checksum, for the view and each action."""
    substitutes: Int[Array, "C S"]
    """The step that each member takes in place of each: itself in the first, and one of those with
    the same view and action in the others, at random."""
    starts: Int[Array, "C E"]
    """The first views of the episodes that each member plays: the first plays the data's, and the
    others those of a resample of the episodes."""


def read_table(histories: Histories, members: int, seed: int) -> Table | None:
    """Read the steps; None if there are none, or too many different views."""
    numbers: dict[bytes, int] = {}
    views, first, blocks = list[View](), list[int](), []
    for part, episodes in histories.blocks():
        size = part.stop - part.start
        block = jax.tree.map(lambda leaf, size=size: np.asarray(leaf)[:size], episodes)
        number, rows = np.zeros(block.first.shape, int), join_bytes(jax.tree.leaves(block.view), 2)
        # The slots that exist are those of steps, and the one that ends each episode.
        exist = np.arange(block.mask.shape[1] + 1) <= block.mask.sum(1)[:, None]
        for place in zip(*np.nonzero(exist), strict=True):
            number[place] = numbers.setdefault(rows[place].tobytes(), len(numbers))
            if len(views) < len(numbers):
                views.append(jax.tree.map(lambda leaf, place=place: leaf[place], block.view))
            if len(views) > _MOST_VIEWS:
                return None
        # What the environment truncated goes on only after the time limit: that of the longest.
        early = histories.complete[part] & (histories.lengths[part] < histories.longest)
        ended = (block.terminated | block.truncated).all(-1)
        over = block.terminated.all(-1) | (ended & early[:, None])
        action = np.where(block.view_tm1.alive, block.action, 0)
        steps = number[:, :-1], action, block.reward.mean(-1), over, number[:, 1:]
        known = block.mask & (block.next_known | over)
        blocks.append([x[known] for x in steps])
        first += [*number[:, 0]]
    columns = list(map(np.concatenate, zip(*blocks, strict=True)))
    if not len(columns[0]):
        return None
    draw = np.random.default_rng(seed)
    factors = draw.integers(2**32, size=1 + columns[1].shape[1], dtype=np.uint32)
    checksum = _checksum(columns[0], columns[1], factors)
    order = np.argsort(checksum, kind="stable")
    checksum = checksum[order]
    low, high = (np.searchsorted(checksum, checksum, side) for side in ("left", "right"))
    alternatives = draw.integers(low, high, size=(members, len(low)))
    places = np.linspace(0, len(first) - 1, _STARTS).round().astype(int)
    resampled = draw.integers(len(first), size=(members, len(first)))
    starts = np.array(first)[np.concatenate([np.arange(len(first))[None], resampled])[:, places]]
    view, joint, reward, over, after = (jnp.asarray(x[order]) for x in columns)
    return Table(
        jax.tree.map(lambda *leaves: jnp.asarray(np.stack(leaves)), *views),
        view,
        joint,
        reward,
        over,
        after,
        jnp.asarray(checksum),
        jnp.asarray(factors),
        jnp.asarray(np.concatenate([np.arange(len(low))[None], alternatives])),
        jnp.asarray(starts),
    )


def _checksum(view: Any, action: Any, factors: Any) -> Any:
    total = view.astype(np.uint32) * factors[0]
    return total + (action.astype(np.uint32) * factors[1:]).sum(-1, dtype=np.uint32)


@partial(jax.jit, static_argnums=(0, 1))
def play(
    policy: Policy,
    steps: int,
    params: ArrayTree,
    table: Table,
    gamma: Float[Array, ""] | float,
    key: PRNGKeyArray,
) -> tuple[Float[Array, "C E"], Bool[Array, "C E"], Bool[Array, "C E"]]:
    """Play episodes of at most some steps.

    Returns
    -------
    The discounted returns, whether the policy did what was never recorded, and whether the episode
    went on.
    """

    def step(substitutes: Array, carry: tuple[Any, ...], x: tuple[Array, PRNGKeyArray]) -> Any:
        (number, memory, live, missing), (discount, key) = carry, x
        act_key, draw_key = jax.random.split(key)
        view: View = jax.tree.map(lambda leaf: leaf[number], table.views)
        action, _, memory = policy.act(
            params, memory, view.observation, view.legal_actions, act_key
        )
        action = jnp.where(view.alive, action, 0)
        checksum = _checksum(number, action, table.factors)
        low, high = (jnp.searchsorted(table.checksum, checksum, side) for side in ("left", "right"))
        row = substitutes[jax.random.randint(draw_key, (), low, jnp.maximum(high, low + 1))]
        known = (table.view[row] == number) & (table.action[row] == action).all()
        over = table.over[row]
        reward = jnp.where(live & known, table.reward[row], 0.0)
        ones = jnp.ones(len(action))
        memory = remember(policy, memory, reward * ones, over & (ones > 0))
        after = table.after[row], memory, live & known & ~over, missing | (live & ~known)
        return after, discount * reward

    def episode(substitutes: Array, start: Array, key: PRNGKeyArray) -> Any:
        begin = start, policy.initial_carry(), jnp.array(True), jnp.array(False)
        inputs = gamma ** jnp.arange(steps), jax.random.split(key, steps)
        (_, _, live, missing), rewards = jax.lax.scan(partial(step, substitutes), begin, inputs)
        return rewards.sum(), missing, live

    keys = jax.random.split(key, table.starts.shape)
    of_member = jax.vmap(episode, in_axes=(None, 0, 0))
    members = table.substitutes, table.starts, keys
    arrays: tuple[Array, Array, Array] = jax.lax.map(lambda x: of_member(*x), members)
    return arrays
