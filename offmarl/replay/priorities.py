"""Prioritised replay: windows are drawn by the errors they had when they were last learned from.

Schaul et al. 2016 (arXiv 1511.05952), proportional variant, with the priority of a window as in
R2D2 (Kapturowski et al. 2019): a mix of the largest and the mean error of its steps. A window is
known by the slot it starts at.

Draws follow from the key of the update and from the priorities, which are part of the program's
state. A stream gathers batches ahead of time, so the batch of an update is drawn ``lag`` updates
before; the slots drawn and not yet used are part of the state, too.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from offmarl.replay.device import probability
from offmarl.replay.starts import Starts
from offmarl.replay.sum_tree import SumTree

_LARGEST_SHARE = 0.9
"""Part of the largest error in a window's priority; the rest is the mean (η of R2D2)."""
IMPORTANCE = 0.4
"""Power β of the importance weights at the first update; it grows to 1 (Schaul et al. 2016)."""
_LEAST = 1e-6
"""Added to priorities, so that every window is drawn again."""
_MOST = 1e9
"""Largest priority: sums of many stay finite."""


class Priorities(NamedTuple):
    """The priorities of one seed; a pytree."""

    tree: SumTree
    """Of windows never learned from, the value is in units of the largest priority so far."""
    largest: Float[Array, ""]
    """The largest priority so far, to the power of the exponent; 1 at first."""
    slots: Int[Array, "lag B"] | None = None
    """The windows of the updates to come: of update i at ``i % lag``; None without a lag."""
    ratios: Float[Array, "lag B"] | None = None
    """How likely each was without priorities, over how likely it was when it was drawn."""


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
    meta_fields=["num_slots", "batch_size", "lag"],
)
@dataclass(frozen=True, eq=False)
class Prioritised:
    """How a run draws by priorities; a pytree, the same for all seeds.

    Attributes
    ----------
    starts
        How likely windows are without priorities.
    exponent
        α of Schaul et al.
    importance
        β at the first update; it grows linearly to 1 at the last.
    updates
        Number of updates of the run.
    num_slots
        Numbers of the slots.
    batch_size
        Windows in a batch.
    lag
        Updates between the draw of a batch and its use.
    """

    starts: Starts
    exponent: Float[Array, ""] | float
    importance: Float[Array, ""] | float
    updates: Int[Array, ""] | int
    num_slots: int
    batch_size: int
    lag: int

    def begin(self, keys: Key[Array, "lag"]) -> Priorities:
        """Return priorities before the first update, with the draws of the first updates."""
        fresh = begin(self._base(jnp.arange(self.num_slots)))
        if not self.lag:
            return fresh
        slots, ratios = jax.lax.map(lambda key: self._draw(fresh, key), keys)
        return fresh._replace(slots=slots, ratios=ratios)

    def take(
        self, priorities: Priorities, update: Int[Array, ""] | int, key: PRNGKeyArray
    ) -> tuple[Priorities, Int[Array, "B"], Float[Array, "B"]]:
        """Return the windows of an update, and draw those of the update ``lag`` later.

        Parameters
        ----------
        priorities
            The priorities.
        update
            The update's number.
        key
            The key of the update that windows are drawn for.
        """
        slots, ratios = self._draw(priorities, key)
        if priorities.slots is None or priorities.ratios is None:
            return priorities, slots, ratios
        at = update % self.lag
        taken = priorities.slots[at], priorities.ratios[at]
        waiting = priorities._replace(
            slots=priorities.slots.at[at].set(slots), ratios=priorities.ratios.at[at].set(ratios)
        )
        return waiting, *taken

    def weigh(
        self, ratios: Float[Array, "B"], mask: Bool[Array, "B T"], update: Int[Array, ""] | int
    ) -> Float[Array, "B"]:
        """Return the importance weights of a batch."""
        grown = self.importance + (1 - self.importance) * update / jnp.maximum(self.updates - 1, 1)
        return importance(ratios, mask.any(-1), grown)

    def learned(
        self,
        priorities: Priorities,
        slots: Int[Array, "B"],
        errors: Float[Array, "B T"],
        counted: Bool[Array, "B T"],
    ) -> Priorities:
        """Return the priorities after an update on some windows, with the errors of its steps."""
        found = window_priorities(errors, counted, self.exponent)
        base = self._base(slots)
        return priorities._replace(
            tree=priorities.tree.put(slots, base * found, jnp.zeros_like(base)),
            largest=jnp.maximum(priorities.largest, found.max()),
        )

    def _draw(
        self, priorities: Priorities, key: PRNGKeyArray
    ) -> tuple[Int[Array, "B"], Float[Array, "B"]]:
        tree, unit = priorities.tree, priorities.largest
        slots = tree.draw(key, self.batch_size, unit)
        drawn = tree.values(slots, unit) / tree.total(unit)
        return slots, self._base(slots) / self.num_slots / drawn

    def _base(self, slots: Int[Array, "n"]) -> Float[Array, "n"]:
        """Return how likely slots are without priorities; 1 in the mean."""
        return probability(self.starts, slots) * self.num_slots
