"""The rings of slots of one vault or several, and their weights, from which batches are drawn.

Each vault of a mixture is a ring of its own (see `offmarl.replay.sampling`), and each window lies
in one of them. The slots of all rings are numbered through. T numbers are left out after each
ring, where the device repeats the ring's beginning.

Weights of steps act twice. First, a window is drawn in proportion to the sum of the weights of its
steps. The steps beside a heavy step are then drawn too often, and those beside light steps too
rarely. So, second, each step's loss is multiplied by its weight over the frequency of its draws:
in the mean over batches it counts exactly as its weight says. Where weights belong to whole
episodes, these stand in the ring in order of weight. Neighbours then weigh about the same, and
the factors are close to 1. Episodes that weigh 0 are left out.
"""

from functools import cached_property
from pathlib import PurePath
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from offmarl.errors import OptionError
from offmarl.replay.sampling import Chosen, SlotTable, Source, Windows, numbers_of, sound_episodes
from offmarl.replay.starts import Starts, Uniform, segments
from offmarl.types import EnvSpec

Weighting = tuple[NDArray[np.float64], ...] | None
"""For each source the weights of its steps, finite and at least 0: ``(M,)``, one for all steps of
an episode, or ``(rows, length)``. None where all steps weigh the same."""


@runtime_checkable
class Mixed(Protocol):
    """Several sources, each with a share of the batches; `offmarl.vault.Mixture` is one.

    The episodes of the sources are numbered through, in order.

    Attributes
    ----------
    path
        For messages.
    shares
        Shares of the steps in batches, one for each of the `sources`; they add up to 1.
    by_steps
        Whether the shares follow from the steps that are drawn from, and their weights, instead.
    """

    path: PurePath
    shares: tuple[float, ...]
    by_steps: bool

    @property
    def sources(self) -> tuple[Source, ...]:
        """The sources of the mixture."""

    @property
    def spec(self) -> EnvSpec:
        """Sizes of the data."""

    @property
    def episodes(self) -> Any:
        """The `EpisodeTable` of all sources, one after the other."""


class SlotRing(NamedTuple):
    """The ring of one source, among all."""

    share: float
    table: SlotTable
    first_slot: int
    first_episode: int
    """Number of the source's first episode among those of all sources."""
    weights: NDArray[np.float64] | None
    """``(R,)`` weights of its slots, whose mean is 1; None where all are the same."""
    begins: NDArray[np.float64]
    """``(R,)`` in proportion to the probability that a window starts there; ``(1,)`` for all."""


class StepProbabilities(NamedTuple):
    """The exact shares of the n steps that can be drawn, ordered by episode and time."""

    episode: NDArray[np.int64]
    """``(n,)`` number of each step's episode."""
    time: NDArray[np.int64]
    """``(n,)`` steps of the episode before it."""
    drawn: NDArray[np.float64]
    """``(n,)`` share of the steps in batches, as far as their ``mask`` is true."""
    counted: NDArray[np.float64]
    """``(n,)`` share in the sum of losses: drawn, and multiplied by ``Sequence.weight``."""


class SlotRings:
    """The slots that windows may start at, how likely each is, and what steps weigh in losses.

    Parameters
    ----------
    source
        A vault or a mixture.
    windows
        The windows to draw.
    episodes
        Numbers of the episodes to draw from; all of them by default. Vaults of a mixture that have
        none of these are left out, and the shares of the others keep their ratio.
    weights
        Weights of steps; all the same by default.

    Attributes
    ----------
    source, windows
        As given.
    members
        The rings, in order of their slots.

    Raises
    ------
    ShapeError
        There is no step to draw.
    OptionError
        There are no episodes of such numbers, or they weigh nothing.
    """

    def __init__(
        self,
        source: Source | Mixed,
        windows: Windows,
        episodes: Chosen = None,
        weights: Weighting = None,
    ):
        self.source, self.windows, rings = source, windows, []
        sources: tuple[Any, ...] = (source,)
        shares: tuple[float, ...] = (1.0,)
        by_steps = False
        if isinstance(source, Mixed):
            sources, shares, by_steps = source.sources, source.shares, source.by_steps
            if episodes is not None:
                episodes = numbers_of(episodes, len(source.episodes.length), source.path)
        slot = episode = 0
        for number, (vault, share) in enumerate(zip(sources, shares, strict=True)):
            numbers = episodes
            if episodes is not None and len(sources) > 1:  # the numbers within this source
                numbers = episodes - episode
                numbers = numbers[(numbers >= 0) & (numbers < len(vault.episodes.length))]
            if numbers is None or len(numbers) or len(sources) == 1:
                vault_weights = None if weights is None else weights[number]
                table, slot_weights = _weighted_table(vault, numbers, vault_weights)
                begins, of_slots = np.ones(1), np.ones(1) if slot_weights is None else slot_weights
                weight = (of_slots * table.is_step).sum() if by_steps else share
                if slot_weights is not None:  # the sums over the steps that count in windows
                    slot_weights = slot_weights / slot_weights.mean()
                    begins = _sums(slot_weights, windows.burn_in, windows.steps)
                rings.append(SlotRing(weight, table, slot, episode, slot_weights, begins))
                slot += table.num_slots + windows.steps
            episode += len(vault.episodes.length)
        self.members = tuple(rings)

    @property
    def num_rows(self) -> int:
        """Numbers of slots, with those that repeat the beginning of each ring."""
        last = self.members[-1]
        return last.first_slot + last.table.num_slots + self.windows.steps

    @property
    def num_slots(self) -> int:
        """Numbers of the slots that a window may start at, with those left out between rings."""
        return self.num_rows - self.windows.steps

    @property
    def chances(self) -> NDArray[np.float64]:
        """How likely a window is to lie in each ring, so that the shares are exact."""
        chances = np.array([ring.share / _rate(ring) for ring in self.members])
        return chances / chances.sum()

    @cached_property
    def starts(self) -> Starts:
        """How likely a window is to start at each slot."""
        if len(self.members) == 1 and self.members[0].weights is None:
            return Uniform(self.num_slots)
        first, size, share = [], [], []
        for ring, chance in zip(self.members, self.chances, strict=True):
            count = len(ring.begins)
            first.append(ring.first_slot + np.arange(count))
            size.append(np.full(count, ring.table.num_slots // count))
            share.append(chance * ring.begins / ring.begins.sum())
        columns = np.concatenate(first), np.concatenate(size), np.concatenate(share)
        return segments(*columns, self.num_slots)

    @cached_property
    def factors(self) -> NDArray[np.float32] | None:
        """The factor of each row's step in losses, ``(num_rows,)``; None for 1.

        The mean over the steps in batches is 1.
        """
        if all(ring.weights is None for ring in self.members):
            return None
        row_factors, draws, counts = np.ones(self.num_rows), 0.0, 0.0
        for ring, chance in zip(self.members, self.chances, strict=True):
            usage, factors = chance * self._usage(ring), self._factors(ring)
            is_step = ring.table.is_step
            draws += usage[is_step].sum()
            counts += (usage * factors)[is_step].sum()
            at = ring.first_slot + np.arange(ring.table.num_slots + self.windows.steps)
            row_factors[at] = np.resize(factors, len(at))
        return (row_factors * (draws / counts)).astype(np.float32)

    def step_probabilities(self) -> StepProbabilities:
        """Return how often each step is in batches, and how much it counts.

        Steps whose actions the mask forbids are drawn like others, and then their mask is false:
        the shares are those of before.
        """
        episode, time, share, weighted = [], [], [], []
        for ring, chance in zip(self.members, self.chances, strict=True):
            index, before = ring.table.locate(np.arange(ring.table.num_slots))
            is_step = ring.table.is_step
            episode.append(ring.table.episodes[index[is_step]] + ring.first_episode)
            time.append(before[is_step])
            usage = chance * self._usage(ring)
            share.append(usage[is_step])
            weighted.append((usage * self._factors(ring))[is_step])
        columns = [np.concatenate(x) for x in (episode, time, share, weighted)]
        order = np.lexsort((columns[1], columns[0]))
        numbers, times, draws, counts = (x[order] for x in columns)
        return StepProbabilities(numbers, times, draws / draws.sum(), counts / counts.sum())

    def _usage(self, ring: SlotRing) -> NDArray[np.float64]:
        """Return each slot's share of the slots that count, over all windows of a ring."""
        begins, windows = ring.begins / ring.begins.sum(), self.windows
        if len(begins) == 1:
            return np.full(ring.table.num_slots, 1 / ring.table.num_slots)
        return _sums(begins[::-1], windows.burn_in, windows.steps)[::-1] / windows.length

    def _factors(self, ring: SlotRing) -> NDArray[np.float64]:
        """Return the factor of each slot's loss, up to a constant."""
        if ring.weights is None:
            return np.ones(ring.table.num_slots)
        share, usage = ring.weights / ring.weights.sum(), self._usage(ring)
        # A usage that rounding makes 0 is of a slot that is never drawn.
        return np.divide(share, usage, out=np.zeros_like(share), where=usage > 0)


def _weighted_table(
    source: Source, episodes: Chosen, weights: NDArray[np.float64] | None
) -> tuple[SlotTable, NDArray[np.float64] | None]:
    """Return a source's ring of the episodes that weigh something, and its slots' weights.

    The slot that ends an episode weighs as much as the last step.
    """
    recorded = sound_episodes(source)
    table = SlotTable(source, recorded, episodes)
    if weights is None:
        return table, None
    if weights.ndim == 1:
        heavy = _heavy(table, weights[table.episodes], sort=True)
        table = SlotTable(source, recorded, heavy)
        slot_weights = np.repeat(weights[table.episodes], table.lengths + 1)
    else:
        sums = np.add.reduceat(_of_slots(table, weights), table.offsets)
        table = SlotTable(source, recorded, _heavy(table, sums, sort=False))
        slot_weights = _of_slots(table, weights)
    return table, slot_weights


def _heavy(table: SlotTable, weights: NDArray[np.float64], sort: bool) -> NDArray[np.int64]:
    """Return the episodes of a table that weigh something, with ``sort`` in order of weight."""
    order = np.argsort(weights, kind="stable") if sort else np.arange(len(weights))
    heavy = order[weights[order] > 0]
    if not len(heavy):
        raise OptionError(
            f"all {len(weights)} episodes of {table.source.path} to draw from weigh 0: give at "
            "least one of them a weight above 0."
        )
    return table.episodes[heavy]


def _of_slots(table: SlotTable, weights: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the weights of steps, by row and time, as those of a ring's slots."""
    index, time = table.locate(np.arange(table.num_slots))
    number = table.episodes[index]
    time = np.minimum(time, table.lengths[index] - 1)
    row, start = table.recorded.row[number], table.recorded.start[number]
    slot_weights: NDArray[np.float64] = weights[row, start + time]
    return slot_weights


def _sums(x: NDArray[np.float64], first: int, stop: int) -> NDArray[np.float64]:
    """Return the sums over ``x[i + first : i + stop]`` for each i, on a ring."""
    sums = np.append(0.0, np.cumsum(np.resize(x, len(x) + stop)))
    index = np.arange(len(x))
    return np.maximum(sums[index + stop] - sums[index + first], 0.0)


def _rate(ring: SlotRing) -> float:
    """Return the mean number of steps that a slot drawn from a ring stands for, by weight."""
    is_step = ring.table.is_step
    slots = np.ones(len(is_step)) if ring.weights is None else ring.weights
    return float(slots[is_step].mean() * is_step.mean())
