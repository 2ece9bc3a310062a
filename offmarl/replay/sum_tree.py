"""A sum tree: draws an index in proportion to a value that may change after every batch.

Each node is the sum of `FAN_OUT` children, down to one leaf for each index. So a draw or a change
touches a few contiguous groups of nodes, however many leaves there are. Sums are computed anew from
the children, never corrected by differences: rounding errors do not grow with the number of
changes. Each level of a draw uses a random number of its own, because one number of 24 bits could
not tell many millions of leaves apart. A leaf of value 0 is never drawn.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

FAN_OUT = 64
"""Children of a node."""


class SumTree(NamedTuple):
    """Values of n leaves, and their sums; a pytree.

    A leaf has two values, one known and one in units of a number that is given with each draw. Its
    value in a draw is ``known + unit * open``. So leaves whose value is "the largest so far" follow
    that number without being changed.
    """

    levels: tuple[Float[Array, "groups fan_out 2"], ...]
    """Groups of siblings, leaves first; the last level is one group. Padded with zeros."""

    @classmethod
    def of(cls, known: Float[Array, "n"], open_: Float[Array, "n"]) -> "SumTree":
        """Return the tree of two values a leaf, both at least 0 and finite."""
        levels = [_grouped(jnp.stack([known, open_], axis=-1).astype(jnp.float32))]
        while len(levels[-1]) > 1:
            levels.append(_grouped(levels[-1].sum(1)))
        return cls(tuple(levels))

    def values(self, leaves: Int[Array, "m"], unit: Float[Array, ""] | float) -> Float[Array, "m"]:
        """Return the values of some leaves in a draw."""
        return _value(self.levels[0][leaves // FAN_OUT, leaves % FAN_OUT], unit)

    def total(self, unit: Float[Array, ""] | float) -> Float[Array, ""]:
        """Return the sum of the values of all leaves in a draw."""
        return _value(self.levels[-1][0].sum(0), unit)

    def put(
        self, leaves: Int[Array, "m"], known: Float[Array, "m"], open_: Float[Array, "m"]
    ) -> "SumTree":
        """Return the tree with other values of some leaves.

        Of a leaf that is named twice, the larger values count, in whatever order they come.
        """
        group, place = leaves // FAN_OUT, leaves % FAN_OUT
        values = jnp.stack([known, open_], axis=-1)
        changed = self.levels[0].at[group, place].set(0.0).at[group, place].max(values)
        levels = [changed]
        for level in self.levels[1:]:
            sums = levels[-1][group].sum(1)
            group, place = group // FAN_OUT, group % FAN_OUT
            levels.append(level.at[group, place].set(sums))
        return SumTree(tuple(levels))

    def draw(
        self, key: PRNGKeyArray, count: int, unit: Float[Array, ""] | float
    ) -> Int[Array, "count"]:
        """Draw leaves, each in proportion to its value; at least one value is above 0."""
        uniforms = jax.random.uniform(key, (len(self.levels), count))
        node = jnp.zeros(count, jnp.int32)
        for level, uniform in zip(reversed(self.levels), uniforms, strict=True):
            node = node * FAN_OUT + _pick(_value(level[node], unit), uniform)
        return node


def _grouped(values: Float[Array, "n 2"]) -> Float[Array, "groups fan_out 2"]:
    return jnp.pad(values, ((0, -len(values) % FAN_OUT), (0, 0))).reshape(-1, FAN_OUT, 2)


def _value(pair: Float[Array, "*b 2"], unit: Float[Array, ""] | float) -> Float[Array, "*b"]:
    return pair[..., 0] + unit * pair[..., 1]


def _pick(values: Float[Array, "m fan_out"], uniform: Float[Array, "m"]) -> Int[Array, "m"]:
    """Draw one of each row's values, in proportion to it.

    Parallel sums may be rounded so that they fall where a 0 was added, or never pass the product on
    the right: only values above 0 are picked, and if none is, the last of these.
    """
    sums, positive = jnp.cumsum(values, axis=-1), values > 0
    reached: Bool[Array, "m fan_out"] = (sums > uniform[:, None] * sums[:, -1:]) & positive
    last = FAN_OUT - 1 - positive[:, ::-1].argmax(-1)
    return jnp.where(reached.any(-1), reached.argmax(-1), last).astype(jnp.int32)
