"""Statistics of a dataset that a program uses: moments, returns, initial views."""

from collections.abc import Callable, Hashable, Iterator
from functools import partial
from io import BytesIO
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import ZIP_STORED, ZipFile

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float
from numpy.typing import NDArray

from offmarl.errors import RunError
from offmarl.tracking import replace_file
from offmarl.types import ArraySpec, ArrayTree, EnvSpec, Transition, unflatten_tree
from offmarl.vault import Dataset, Mixture
from offmarl.vault.check.leaf_statistics import StatisticsAccumulator, stored_statistics
from offmarl.vault.format.column_statistics import Ranges
from offmarl.vault.format.tables import Episodes
from offmarl.vault.mixture import MixturePart

STATISTICS_FILE = "dataset.npz"
_LEAST_STD = 1e-3
_WHOLE = 2**40
"""Number of values that a share of 1 counts as."""


class MeanAndStd(NamedTuple):
    """Mean and standard deviation of the entries of a vector, or of each leaf of a tree.

    Leaves of more than one axis, such as images, have one entry for each index of the last axis.
    """

    mean: ArrayTree
    """``(size,)``, or ``()`` of a leaf that is a number; or a tree of such arrays."""
    std: ArrayTree
    """At least 1e-3, so that constant entries can be divided by it."""


class DatasetStatistics:
    """Arrays that a program computes from its dataset, on first use.

    The run stores them. `load_policy` and a resumed run read them from there, so a policy that
    normalises its input acts without the dataset. A program reads them in ``make``: if it read them
    in ``init`` or ``update``, the compiled program would keep those of the first dataset.

    Parameters
    ----------
    dataset
        The dataset; None if only stored arrays are used. Of a `Mixture`, moments are those of the
        batches: each vault counts by its share.
    arrays
        The stored arrays, by name.
    episodes
        Numbers of the training episodes; None for all.
    """

    def __init__(
        self,
        dataset: Dataset | Mixture | None,
        arrays: dict[str, NDArray[Any]] | None = None,
        episodes: NDArray[np.int64] | None = None,
    ):
        self._dataset, self._episodes = dataset, episodes
        self._arrays = dict(arrays or {})
        self._frozen = False
        self.used: dict[str, NDArray[Any]] = {}
        """The arrays used so far, by name."""

    def array(self, name: str, compute: Callable[[Any], Any]) -> NDArray[Any]:
        """Return an array of the program, computed from the dataset or read from the run.

        Parameters
        ----------
        name
            Name of the array in the run.
        compute
            Function that computes it from the dataset, which may be a `Mixture`.

        Raises
        ------
        RunError
            The run has no array of that name, and no dataset was given.
        RuntimeError
            ``make`` has returned.
        """
        if self._frozen:
            raise RuntimeError(
                f"the program reads {name} of its dataset outside of make: read it in make, and "
                "use the result in init, update or the policy."
            )
        if name not in self._arrays:
            if self._dataset is None:
                raise RunError(
                    f"this run has no {name} of its dataset, because another version of the "
                    "program trained it: train again."
                )
            self._arrays[name] = np.asarray(compute(self._dataset))
        self.used[name] = self._arrays[name]
        return self.used[name]

    def observation_moments(self) -> MeanAndStd:
        """Return the moments of observations over all steps and live agents, ``(O,)``.

        Of observations that are trees, trees. Leaves of whole numbers have mean 0 and standard
        deviation 1: networks scale them by their range.
        """
        return self._moments("observation", lambda spec: spec.observation_leaves)

    def state_moments(self) -> MeanAndStd:
        """Return the moments of global states over all steps, ``(S,)``; or trees of them."""
        return self._moments("state", lambda spec: spec.state_leaves)

    def returns(self) -> Float[np.ndarray, "episodes"]:
        """Return the undiscounted return of each complete episode, averaged over agents."""
        return self.array("returns", self._returns)

    def return_scale(self) -> float:
        """Return the dataset's scale of returns: the ``largest_return`` of its episodes.

        The scale is 1 where all returns are 0. That of a
        mixture is the largest of its vaults, whatever their shares.
        """

        def compute(dataset: Dataset | Mixture) -> NDArray[Any]:
            return np.asarray(self._training_table(dataset).largest_return or 1.0)

        return float(self.array("return_scale", compute))

    def best_returns(self) -> Float[np.ndarray, "N"]:
        """Return the agents' returns in the complete episode whose mean return is the largest."""

        def compute(dataset: Dataset | Mixture) -> NDArray[Any]:
            table = self._training_table(dataset)
            means = np.where(table.scored, table.episode_returns, -np.inf)
            return np.asarray(table.returns[means.argmax()], np.float32)

        return self.array("best_returns", compute)

    def scored(self) -> Bool[np.ndarray, "episodes"]:
        """Return which of all episodes are complete and have finite returns."""
        return self.array("scored", lambda dataset: dataset.episodes.scored)

    def freeze(self) -> None:
        """Reject later reads."""
        self._frozen = True

    def identity(self) -> Hashable:
        """Return a key of the arrays used so far."""
        used = sorted(self.used.items())
        return tuple((name, x.dtype.str, x.shape, x.tobytes()) for name, x in used)

    def _returns(self, dataset: Dataset | Mixture) -> NDArray[np.float32]:
        table = self._training_table(dataset)
        return table.episode_returns[table.scored].astype(np.float32)

    def _training_table(self, dataset: Dataset | Mixture) -> Episodes:
        return dataset.episodes.take(self._training_episodes(dataset))

    def _training_episodes(self, dataset: Dataset | Mixture) -> NDArray[np.int64]:
        indices = np.arange(len(dataset.episodes.length))
        return indices if self._episodes is None else self._episodes

    def _moments(self, field: str, leaves: Callable[[EnvSpec], dict[str, ArraySpec]]) -> MeanAndStd:
        def compute(path: str, dataset: Dataset | Mixture) -> NDArray[Any]:
            leaf = leaves(dataset.spec)[path]
            if not jnp.issubdtype(leaf.numpy_dtype, jnp.floating):
                return np.array([0, 1], np.float32)
            ranges = self._ranges(dataset, f"{field}.{path}" if path else field)
            if field == "observation" and len(leaf.shape) < 2:
                ranges = ranges.pooled(0)
            mean, std = (np.where(ranges.finite > 0, x, 0) for x in (ranges.mean, ranges.std))
            return np.stack([mean, std.clip(_LEAST_STD)]).astype(np.float32)

        if self._dataset is not None:
            paths = [*leaves(self._dataset.spec)]
        else:
            entries = (name for name in self._arrays if name.endswith("_moments"))
            names = (name.removesuffix("_moments").partition(".") for name in entries)
            paths = [path for start, _, path in names if start == field] or [""]
        moments = {
            path: self.array(
                f"{field}.{path}_moments" if path else f"{field}_moments", partial(compute, path)
            )
            for path in paths
        }
        mean, std = ({path: array[i] for path, array in moments.items()} for i in (0, 1))
        return MeanAndStd(unflatten_tree(mean), unflatten_tree(std))

    def _ranges(self, dataset: Dataset | Mixture, column: str) -> Ranges:
        """Return the statistics of a column, of each agent if it has agents."""
        episodes = self._training_episodes(dataset)
        parts = (
            dataset.parts(episodes)
            if isinstance(dataset, Mixture)
            else [MixturePart(dataset, episodes, 1.0)]
        )
        by_part = [self._ranges_of(part, column) for part in parts]
        return by_part[0][0] if len(by_part) == 1 else _shared(by_part, parts)

    def _ranges_of(self, part: MixturePart, column: str) -> tuple[Ranges, int]:
        """Return the statistics of a column in a part, and the steps that they are of."""
        # The run keeps what it uses: training changes nothing in the dataset. The statistics of
        # data on another machine are those that were published, of all of its episodes: those of
        # the training episodes would need a download.
        uses_all = self._episodes is None or part.dataset.is_remote
        if uses_all and (statistics := stored_statistics(part.dataset)) is not None:
            return statistics[column].ranges, part.dataset.num_steps
        accumulator = StatisticsAccumulator(part.dataset.spec, columns=[column])
        for steps in _steps(part):
            accumulator.add(jax.tree.map(lambda leaf: leaf[None], steps))
        return accumulator.ranges[column], int(part.dataset.episodes.length[part.episodes].sum())


def _shared(by_part: list[tuple[Ranges, int]], parts: list[MixturePart]) -> Ranges:
    """Return the statistics of several vaults, each of whose steps count by the vault's share."""
    weighted = [
        ranges._replace(finite=np.rint(ranges.finite * (part.share / steps) * _WHOLE).astype(int))
        for (ranges, steps), part in zip(by_part, parts, strict=True)
    ]
    return Ranges(*map(np.stack, zip(*weighted, strict=True))).pooled(0)


def _steps(part: MixturePart) -> Iterator[Transition]:
    """Yield the steps of some episodes, ``(M, ...)``, block by block."""
    dataset = part.dataset
    table, mask = dataset.episodes, np.zeros(len(dataset.episodes.length), bool)
    mask[part.episodes] = True
    begins = table.row * dataset.length + table.start
    for start, stop in dataset.blocks():
        step = np.arange(dataset.rows)[:, None] * dataset.length + np.arange(start, stop)
        kept = mask[np.searchsorted(begins, step, side="right") - 1]
        yield jax.tree.map(itemgetter(kept), dataset.transitions(start, stop))


def save(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    """Write a run's arrays of its dataset atomically, if there are any."""
    if arrays:
        np.savez(file := BytesIO(), allow_pickle=False, **arrays)
        replace_file(path, file.getvalue())


def is_scale(name: str) -> bool:
    """Whether a statistic scales what networks see or predict, and stays with their parameters."""
    return name.endswith("_moments") or name == "return_scale"


def read(path: Path) -> dict[str, NDArray[Any]]:
    """Return a run's arrays of its dataset."""
    if not path.exists():
        return {}
    try:
        with ZipFile(path) as archive:  # a pulled one is not trusted
            members = archive.infolist()
        size, packed = sum(member.file_size for member in members), path.stat().st_size
        if size > packed or any(member.compress_type != ZIP_STORED for member in members):
            raise ValueError(f"its {packed} bytes would become {size}")
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = dict(file)
        for name, array in arrays.items():
            if name.endswith("_moments"):
                _, std = array
                is_finite = array.dtype.kind == "f" and np.isfinite(array).all()
                if not is_finite or (std <= 0).any():
                    raise ValueError(f"{name} are no means and standard deviations")
        return arrays
    except Exception as error:  # NumPy raises any for a forged header
        raise RunError(f"{path} is damaged ({error}): delete the run and train again.") from None
