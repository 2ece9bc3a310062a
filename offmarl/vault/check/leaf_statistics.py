"""Statistics of every leaf of a vault: count, moments, range and quantiles.

They are computed in one pass and bounded memory, and kept under a key of the vault with a
fingerprint of the data that they belong to, so that they are computed again after an append.
"""

import hashlib
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int
from numpy.typing import NDArray

from offmarl.errors import VaultError
from offmarl.terminal import Progress, quiet
from offmarl.types import EnvSpec, Transition
from offmarl.vault.format import encoding, layout
from offmarl.vault.format.column_statistics import (
    QuantileSketch,
    Ranges,
    RangesAccumulator,
    capacity_for,
)
from offmarl.vault.format.layout import STATISTICS_KEY, Leaf, NumpyArray, column_of
from offmarl.vault.read.manifest import Manifest, read_manifest, read_pull_record
from offmarl.vault.read.reader import Reader

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
"""The quantiles that are computed."""

_OF_LIVE_AGENTS = ("observation", "legal_actions", "action", "behaviour_log_prob")
"""Columns whose values have no meaning for dead agents, which are not counted."""
_MEMORY = 2**26
"""Bytes of the sketches of quantiles."""
_VERSION = 1


@dataclass(frozen=True)
class LeafStatistics:
    """Statistics of the entries of a leaf, of shape ``*c``; NaN for entries without finite values.

    ``*c`` is the shape of one step's array; an array of more than two axes, such as an image, has
    one entry for each index of the last axis, such as a channel.
    """

    count: Int[np.ndarray, "*c"]
    """Number of finite values; only of live agents, where those of dead agents mean nothing."""
    not_finite: Int[np.ndarray, "*c"]
    """NaN and infinities, which the other statistics leave out."""
    mean: Float[np.ndarray, "*c"]
    std: Float[np.ndarray, "*c"]
    """Standard deviation, divided by the count."""
    min: Float[np.ndarray, "*c"]
    max: Float[np.ndarray, "*c"]
    quantiles: Float[np.ndarray, "Q *c"]
    """At `QUANTILES`: the smallest values that at least this fraction does not exceed."""
    quantile_error: float
    """Largest error of a quantile's rank, as a fraction of the values; 0 where they are exact."""

    @property
    def ranges(self) -> Ranges:
        """The statistics without the quantiles."""
        return Ranges(self.min, self.max, self.mean, self.std, self.count, self.not_finite)

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object that `from_json` reads back."""
        return {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in vars(self).items()
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "LeafStatistics":
        """Read what `to_json` wrote."""
        counts = {name: np.array(data[name], np.int64) for name in ("count", "not_finite")}
        names = ("mean", "std", "min", "max", "quantiles")
        floats = {name: np.array(data[name], float) for name in names}
        return cls(**counts, **floats, quantile_error=float(data["quantile_error"]))


Statistics = Mapping[str, LeafStatistics]
"""Statistics by column, such as "reward" or "observation.image"."""


def statistics(vault: Reader, progress: Progress = quiet) -> Statistics:
    """Return a vault's statistics: the stored ones, or new ones, which are stored if possible.

    See `Dataset.statistics`.
    """
    if (existing := stored_statistics(vault)) is not None:
        return existing
    accumulator = StatisticsAccumulator(vault.spec, vault.num_steps)
    with progress("statistics", vault.num_steps) as advance:
        for begin, stop in vault.blocks():
            accumulator.add(vault.transitions(begin, stop))
            advance((stop - begin) * vault.rows)
    computed = accumulator.statistics
    store_statistics(vault, computed)
    return computed


# ---------------------------------------------------------------------------------- computing


class StatisticsAccumulator:
    """Accumulates the statistics of leaves, by default of all, over blocks of steps.

    The sketches are sized for about ``count`` steps; None leaves out quantiles.
    """

    def __init__(
        self, spec: EnvSpec, count: int | None = None, columns: Collection[str] | None = None
    ):
        leaves = {column_of(name): leaf for name, leaf in layout.leaves(spec).items()}
        leaves = {name: leaves[name] for name in (leaves if columns is None else columns)}
        sketched = (leaf for leaf in leaves.values() if leaf.dtype != np.uint8)
        num_columns = sum(int(np.prod(_columns(leaf))) for leaf in sketched)
        capacity = None if count is None else capacity_for(num_columns, count, _MEMORY)
        self._leaves = {
            name: _LeafAccumulator(name, leaf, spec, capacity) for name, leaf in leaves.items()
        }

    def add(self, steps: Transition) -> None:
        """Add a block of steps ``(B, T, ...)``."""
        arrays = {column_of(k): v for k, v in encoding.to_disk(steps).items()}
        alive = np.asarray(steps.view.alive, bool).reshape(-1, steps.view.alive.shape[-1])
        for name, accumulator in self._leaves.items():
            array = arrays[name]
            accumulator.add(array.reshape(-1, *array.shape[2:]), alive)

    @property
    def statistics(self) -> Statistics:
        """The statistics of everything added so far."""
        return {name: accumulator.statistics for name, accumulator in self._leaves.items()}

    @property
    def ranges(self) -> dict[str, Ranges]:
        """The statistics of everything added so far, without quantiles."""
        return {name: accumulator.ranges for name, accumulator in self._leaves.items()}


def _columns(leaf: Leaf) -> tuple[int, ...]:
    return leaf.shape if len(leaf.shape) <= 2 else leaf.shape[-1:]


class _LeafAccumulator:
    """Statistics of one leaf."""

    def __init__(self, name: str, leaf: Leaf, spec: EnvSpec, capacity: int | None):
        field = name.partition(".")[0]
        self._live = field in _OF_LIVE_AGENTS
        self._agents = _agents_of(name, spec)
        self._shape, self._columns = leaf.shape, _columns(leaf)
        self._ranges = RangesAccumulator(*self._columns)
        # Agents die at different times, so each has a number of values of its own.
        self._apart = self._live and len(leaf.shape) <= 2
        agents = leaf.shape[0] if self._apart else 1
        self._padding = _padding(field, leaf, spec) if self._apart else None
        size = int(np.prod(self._columns)) // agents
        self._parts: list[_Counts | QuantileSketch] = [
            _Counts(size) if leaf.dtype == np.uint8 else QuantileSketch(size, capacity)
            for _ in range(agents)
            if capacity is not None
        ]

    def add(self, values: NumpyArray, alive: NumpyArray) -> None:
        """Add ``(n, *shape)``."""
        if values.dtype.kind not in "fiub":  # bfloat16
            values = values.astype(np.float32)
        if self._agents is not None:
            alive = alive[:, self._agents]
        if self._apart:
            mask = alive.reshape(*alive.shape, *([1] * (len(self._shape) - 1)))
            self._ranges.add(values, mask if self._padding is None else mask & self._padding)
            for agent, part in enumerate(self._parts):
                part.add(values[alive[:, agent], agent].reshape(-1, *self._shape[1:] or (1,)))
            return
        if self._live:
            values = values[alive]
        flat = values.reshape(-1, *self._columns)
        self._ranges.add(flat)
        for part in self._parts:
            part.add(flat.reshape(len(flat), -1))

    @property
    def ranges(self) -> Ranges:
        """The statistics of everything added so far, without quantiles."""
        return self._ranges.ranges

    @property
    def statistics(self) -> LeafStatistics:
        """The statistics of everything added so far."""
        ranges = self.ranges
        parts = [part.quantiles(np.array(QUANTILES)) for part in self._parts]
        quantiles = np.concatenate(parts, axis=1).reshape(len(QUANTILES), *self._columns)
        quantiles = np.where(ranges.finite > 0, quantiles, np.nan)
        error = max(part.error for part in self._parts)
        low, high, mean, std, count, not_finite = map(np.asarray, ranges)
        return LeafStatistics(count, not_finite, mean, std, low, high, quantiles, error)


class _Counts:
    """Exact quantiles of bytes, by counting the values."""

    error = 0.0

    def __init__(self, columns: int):
        self._counts: NumpyArray = np.zeros((columns, 256), np.int64)

    def add(self, values: NDArray[np.uint8]) -> None:
        """Add values ``(n, columns)``."""
        for column in range(len(self._counts)):
            self._counts[column] += np.bincount(values[:, column], minlength=256)

    def quantiles(self, at: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return quantiles as `QuantileSketch.quantiles` does."""
        cumulative = np.cumsum(self._counts, axis=1)
        ranks = np.maximum(np.ceil(at[:, None] * cumulative[:, -1] * (1 - 1e-12)), 1)
        return (cumulative[None] < ranks[..., None]).sum(-1).astype(float)


def _agents_of(name: str, spec: EnvSpec) -> list[int] | None:
    """Return the agents that a leaf of observations belongs to; None for all."""
    field, _, path = name.partition(".")
    leaf = spec.observation_leaves.get(path) if field == "observation" else None
    return list(leaf.agents) if leaf and leaf.agents else None


def _padding(field: str, leaf: Leaf, spec: EnvSpec) -> NumpyArray | None:
    """Return the mask of the entries that agents use, where they have different numbers."""
    sizes = {"observation": spec.observation_sizes, "legal_actions": spec.action_sizes}.get(field)
    if sizes is None or len(leaf.shape) != 2:
        return None
    return np.arange(leaf.shape[1]) < np.array(sizes)[:, None]


# ---------------------------------------------------------------------------------- storing


def stored_statistics(vault: Reader) -> Statistics | None:
    """Return the statistics that are stored with a vault; None if they are of other data."""
    with suppress(VaultError, LookupError, TypeError, ValueError, AttributeError, OverflowError):
        record = vault.store.get_json(STATISTICS_KEY) if vault.native else None
        if record and (record["version"], record["of"]) == (_VERSION, _fingerprint(vault.manifest)):
            leaves = {name: LeafStatistics.from_json(x) for name, x in record["leaves"].items()}
            return leaves if _have_shapes_of(leaves, vault.spec) else None
    return None


def _have_shapes_of(by_column: Statistics, spec: EnvSpec) -> bool:
    """Whether statistics have the names and shapes of an environment's leaves."""
    shapes = {column_of(name): _columns(leaf) for name, leaf in layout.leaves(spec).items()}
    return by_column.keys() == shapes.keys() and all(
        leaf.quantiles.shape == (len(QUANTILES), *shapes[name])
        and all(column.shape == shapes[name] for column in leaf.ranges)
        for name, leaf in by_column.items()
    )


def store_statistics(vault: Reader, computed: Statistics) -> bool:
    """Store statistics with a vault; return whether that was possible.

    A vault that another process is writing to, that cannot be written, that offmarl did not write,
    or that was pulled, so that its files have published checksums, stays as it is.
    """
    if not vault.native or not vault.store.is_local or read_pull_record(vault.store).provenance:
        return False
    with suppress(VaultError, OSError, ValueError):
        lock = vault.store.lock()
        try:
            fingerprint = _fingerprint(vault.manifest)
            if _fingerprint(read_manifest(vault.store)) != fingerprint:
                return False
            leaves = {name: leaf.to_json() for name, leaf in computed.items()}
            value = layout.dump_json({"version": _VERSION, "of": fingerprint, "leaves": leaves})
            vault.store.commit({STATISTICS_KEY: value}, fence={}).result()
            return True
        finally:
            lock.release()
    return False


def _fingerprint(manifest: Manifest | None) -> str:
    """Return a checksum of the counts that every append changes; empty without a manifest."""
    return hashlib.sha256(manifest.counts).hexdigest() if manifest else ""
