"""Prioritised replay: windows are drawn by the errors they had when they were last learned from.

Schaul et al. 2016 (arXiv 1511.05952), proportional variant, with the priority of a window as in
R2D2 (Kapturowski et al. 2019): a mix of the largest and the mean error of its steps. A window is
known by the slot it starts at.

Draws follow from the key of the update and from the priorities, which are part of the program's
state.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl.replay.device import probability
from offmarl.replay.starts import Starts

_LARGEST_SHARE = 0.9
"""Part of the largest error in a window's priority; the rest is the mean (η of R2D2)."""
IMPORTANCE = 0.4
"""Power β of the importance weights at the first update; it grows to 1 (Schaul et al. 2016)."""
_LEAST = 1e-6
"""Added to priorities, so that every window is drawn again."""
_MOST = 1e9
"""Largest priority: sums of many stay finite."""
FAN_OUT = 64
"""Children of a node."""


class SumTree(NamedTuple):
    """Values of n leaves, and their sums: draws a leaf in proportion to its value; a pytree.

    Each node is the sum of `FAN_OUT` children. So a draw or a change touches a few contiguous
    groups of nodes, however many leaves there are. Sums are computed anew from the children, never
    corrected by differences: rounding errors do not grow with the number of changes. Each level of
    a draw uses a random number of its own, because one number of 24 bits could not tell many
    millions of leaves apart. A leaf of value 0 is never drawn.

    A leaf has two values, one absolute and one relative to a unit that is given with each draw: its
    value in the draw is ``absolute + unit * relative``. So leaves whose value is "the largest so
    far" follow that number without being changed.
    """

    levels: tuple[Float[Array, "groups fan_out 2"], ...]
    """Groups of siblings, leaves first; the last level is one group. Padded with zeros."""

    @classmethod
    def of(cls, absolute: Float[Array, "n"], relative: Float[Array, "n"]) -> "SumTree":
        """Return the tree of two values a leaf, both at least 0 and finite."""
        levels = [_grouped(jnp.stack([absolute, relative], axis=-1).astype(jnp.float32))]
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
        self, leaves: Int[Array, "m"], absolute: Float[Array, "m"], relative: Float[Array, "m"]
    ) -> "SumTree":
        """Return the tree with other values of some leaves.

        Of a leaf that is named twice, the larger values count, in whatever order they come.
        """
        group, place = leaves // FAN_OUT, leaves % FAN_OUT
        values = jnp.stack([absolute, relative], axis=-1)
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


class Priorities(NamedTuple):
    """The priorities of one seed; a pytree."""

    tree: SumTree
    """Of windows never learned from, the value is in units of the largest priority so far."""
    largest: Float[Array, ""]
    """The largest priority so far, to the power of the exponent; 1 at first."""


def begin(base: Float[Array, "n"]) -> Priorities:
    """Return priorities before the first update."""
    return Priorities(SumTree.of(jnp.zeros_like(base), base), jnp.ones(()))


def window_priorities(
    errors: Float[Array, "B T"], counted: Bool[Array, "B T"], exponent: Float[Array, ""] | float
) -> Float[Array, "B"]:
    """Return the priorities of windows, to the power of the exponent."""
    size = jnp.where(counted, jnp.abs(jnp.nan_to_num(errors, posinf=_MOST, neginf=_MOST)), 0.0)
    mean = size.sum(-1) / jnp.maximum(counted.sum(-1), 1)
    mixed = _LARGEST_SHARE * size.max(-1) + (1 - _LARGEST_SHARE) * mean
    return jnp.minimum(mixed + _LEAST, _MOST) ** exponent


def importance(
    ratios: Float[Array, "B"], counted: Bool[Array, "B"], exponent: Float[Array, ""] | float
) -> Float[Array, "B"]:
    """Return the weights of windows in the loss: ratio^β, over the largest of those that count."""
    weights = ratios**exponent
    largest = jnp.max(weights, where=counted, initial=0.0)
    return weights / jnp.where(largest > 0, largest, 1.0)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=["starts", "exponent", "importance", "updates"],
    meta_fields=["num_slots", "batch_size"],
)
@dataclass(frozen=True, eq=False)
class Prioritised:
    """How a run draws by priorities; a pytree, the same for all seeds."""

    starts: Starts
    """How likely windows are without priorities."""
    exponent: Float[Array, ""] | float
    """α of Schaul et al."""
    importance: Float[Array, ""] | float
    """β at the first update; it grows linearly to 1 at the last."""
    updates: Int[Array, ""] | int
    """Number of updates of the run."""
    num_slots: int
    batch_size: int

    def begin(self) -> Priorities:
        """Return priorities before the first update."""
        return begin(self._base(jnp.arange(self.num_slots)))

    def draw(
        self, priorities: Priorities, key: PRNGKeyArray
    ) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
        """Draw windows.

        Returns
        -------
        Their slots, and how likely each was without priorities, over how likely it was.
        """
        tree, unit = priorities.tree, priorities.largest
        slots = tree.draw(key, self.batch_size, unit)
        probabilities = tree.values(slots, unit) / tree.total(unit)
        return slots, self._base(slots) / self.num_slots / probabilities

    def weigh(
        self, ratios: Float[Array, "B"], mask: Bool[Array, "B T"], update: Int[Array, ""] | int
    ) -> Float[Array, "B"]:
        """Return the importance weights of a batch."""
        progress = update / jnp.maximum(self.updates - 1, 1)
        exponent = self.importance + (1 - self.importance) * progress
        return importance(ratios, mask.any(-1), exponent)

    def reprioritise(
        self,
        priorities: Priorities,
        slots: Int[Array, "B"],
        errors: Float[Array, "B T"],
        counted: Bool[Array, "B T"],
    ) -> Priorities:
        """Return the priorities after an update on some windows, with the errors of their steps."""
        values = window_priorities(errors, counted, self.exponent)
        base = self._base(slots)
        return priorities._replace(
            tree=priorities.tree.put(slots, base * values, jnp.zeros_like(base)),
            largest=jnp.maximum(priorities.largest, values.max()),
        )

    def _base(self, slots: Int[Array, "n"]) -> Float[Array, "n"]:
        """Return how likely slots are without priorities; 1 in the mean."""
        return probability(self.starts, slots) * self.num_slots
