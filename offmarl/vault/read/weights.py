"""Weights of steps: from the episodes' returns, from a column, from a function, or given."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from offmarl import records
from offmarl.errors import OptionError, ShapeError
from offmarl.teams import policy_columns
from offmarl.vault.read.reader import Reader

RETURN_TEMPERATURE = 0.1
"""The temperature of returns if none is given, as in Hong et al. 2023 (arXiv 2306.13085)."""

_LENGTH = "length"
_RETURN = "return"
_REWARD = "reward"
_EXTRAS = "extras."


@dataclass(frozen=True)
class Weights:
    """Weights of the steps of a dataset, by which batches are drawn.

    Parameters
    ----------
    of
        Where weights come from. "return", "length" or "policy": the mean return over agents, the
        number of steps or the first agent's policy's id of each episode; of several teams
        "return_TEAM", the mean over the agents of one, and of other agents "policy_AGENT" or
        "policy_TEAM". By returns, incomplete episodes weigh
        nothing, because theirs are not known. "reward" or the name of an extra: the
        value of each step, the mean over agents if each agent has one. A function, or its name as
        ``path/to/file.py:function`` or ``package.module:function``: it is called with each
        `Dataset` and returns a number for each episode, ``(M,)``, or for each step, ``(rows,
        length)``. Or an array of such numbers.
    temperature
        Values are scaled to [0, 1], over all data, and weigh exp(value / temperature): small
        temperatures prefer the highest values. None: the values are the weights, except that
        returns have a temperature of 0.1.

    Raises
    ------
    OptionError
        The temperature is not above 0 and finite.
    """

    of: str | Callable[[Any], Any] | ArrayLike
    temperature: float | None = None

    def __post_init__(self) -> None:
        """Check the temperature."""
        if self.temperature is not None and not 0 < self.temperature < np.inf:
            raise OptionError(
                f"weights cannot have a temperature of {self.temperature:g}: give a finite number "
                "above 0; a smaller one prefers the highest values more."
            )

    @property
    def name(self) -> str:
        """The source of the weights, for messages."""
        if isinstance(self.of, str):
            return repr(self.of)
        return getattr(self.of, "__name__", "the given numbers")


WeightsLike = Weights | str | Callable[[Any], Any] | ArrayLike | None


class _Values(NamedTuple):
    """The numbers of one dataset: ``(M,)`` for its episodes, or ``(rows, length)``."""

    dataset: Reader
    numbers: NDArray[np.float64]
    mask: NDArray[np.bool_]
    """Of the same shape: numbers of the episodes that are drawn from; the others weigh nothing."""


def resolve(
    source: Any, weights: WeightsLike, episodes: NDArray[np.int64] | None = None
) -> tuple[Any, ...] | None:
    """Return the weights of the steps of a dataset, or of each vault of a mixture."""
    if weights is None:
        return None
    weights = weights if isinstance(weights, Weights) else Weights(weights)
    datasets: tuple[Reader, ...] = getattr(source, "sources", (source,))
    by_return = {_RETURN}.union(*(dataset.episodes.returns_by_name for dataset in datasets))
    of_returns = isinstance(weights.of, str) and weights.of in by_return
    temperature = weights.temperature
    if of_returns and temperature is None:
        temperature = RETURN_TEMPERATURE
    count = sum(map(len, datasets))
    mask = np.zeros(count, bool)
    mask[... if episodes is None else episodes] = True
    masks = np.split(mask, np.cumsum([*map(len, datasets)])[:-1])
    parts = [
        _shaped(dataset, numbers, weights, _scored(dataset, mask) if of_returns else mask)
        for dataset, numbers, mask in zip(
            datasets, _numbers(datasets, weights, episodes), masks, strict=True
        )
    ]
    _check(parts, weights, may_be_negative=temperature is not None)
    if temperature is not None:
        parts = _exponentials(parts, temperature)
    parts = [part._replace(numbers=np.where(part.mask, part.numbers, 0.0)) for part in parts]
    for part in parts:
        if part.mask.any() and not part.numbers.any():
            raise OptionError(
                f"all weights of {part.dataset.path} by {weights.name} are 0: give at least one "
                "above 0, or leave this vault out."
            )
    return tuple(part.numbers for part in parts)


def _scored(dataset: Reader, mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Leave out episodes without a return: those that are incomplete, or hold no finite rewards."""
    scored = mask & dataset.episodes.scored
    if mask.any() and not scored.any():
        raise OptionError(
            f"{dataset.path} has no complete episode to weigh by its return: the environment ended "
            "none of them. Weigh by a function, or leave this vault out."
        )
    return scored


def _numbers(
    datasets: tuple[Reader, ...], weights: Weights, episodes: NDArray[np.int64] | None
) -> list[Any]:
    """Return the numbers of each dataset."""
    of, count = weights.of, sum(map(len, datasets))
    if not (isinstance(of, str) or callable(of)):
        of = np.asarray(of)
        if episodes is not None and of.shape == (len(episodes),):
            spread = np.zeros(count, of.dtype)
            spread[episodes] = of
            of = spread
        if len(datasets) == 1:
            return [of]
        if of.shape != (count,):
            raise ShapeError(
                f"the weights of a mixture are one for each of its {count} episodes: got shape "
                f"{of.shape}."
            )
        return np.split(of, np.cumsum([*map(len, datasets)])[:-1])
    if isinstance(of, str) and ":" in of:
        of, _ = records.import_code(of, "--weight")
    return [_column(dataset, of) if isinstance(of, str) else of(dataset) for dataset in datasets]


def _shaped(dataset: Reader, numbers: Any, weights: Weights, mask: NDArray[np.bool_]) -> _Values:
    """Check the numbers of a dataset, and give the mask of its episodes their shape."""
    array = np.asarray(numbers, np.float64)
    if array.shape not in ((len(dataset),), (dataset.rows, dataset.length)):
        raise ShapeError(
            f"the weights of {dataset.path} by {weights.name} have shape {array.shape}: give one "
            f"for each of its {len(dataset)} episodes, or one for each step, as an array of shape "
            f"{(dataset.rows, dataset.length)}."
        )
    mask = np.repeat(mask, dataset.episodes.length) if array.ndim == 2 else mask
    return _Values(dataset, array, mask.reshape(array.shape))


def _column(dataset: Reader, name: str) -> Any:
    """Return the numbers of a column, ``(M,)`` or ``(rows, length)``."""
    table, policies = dataset.episodes, policy_columns(dataset.spec)
    by_name = {**table.returns_by_name, _LENGTH: table.length}
    by_name |= {column: table.policy_ids[:, agent] for column, agent in policies.items()}
    if name == _RETURN:
        return table.episode_returns  # an error if there are several teams
    if name in by_name:
        return by_name[name]
    if name == _REWARD:
        return dataset.rewards(0, dataset.length).mean(-1)
    leaf = _EXTRAS + name.removeprefix(_EXTRAS)
    if leaf not in dataset.leaves:
        extras = [x.removeprefix(_EXTRAS) for x in dataset.leaves if x.startswith(_EXTRAS)]
        columns = ", ".join([*by_name, _REWARD, *extras])
        raise OptionError(f"{dataset.path} has no column {name!r}: its columns are {columns}.")
    extra = dataset.read(leaves=[leaf])[leaf]
    if extra.ndim > 3 or (extra.ndim == 3 and extra.shape[2] not in (1, dataset.spec.num_agents)):
        raise ShapeError(
            f"the extra {name!r} of {dataset.path} has shape {extra.shape[2:]} a step: weights "
            "need one number, or one for each agent. Give a function that computes it."
        )
    return extra.astype(np.float64).mean(-1) if extra.ndim == 3 else extra


def _check(parts: list[_Values], weights: Weights, may_be_negative: bool) -> None:
    for part in parts:
        wrong = part.mask & ~np.isfinite(part.numbers)
        if not may_be_negative:
            wrong |= part.mask & (part.numbers < 0)
        if wrong.any():
            at = np.argwhere(wrong)[0]
            place = f"step {at[1]} of row {at[0]}" if len(at) > 1 else f"episode {at[0]}"
            advice = (
                "leave these episodes out with `offmarl filter`, or give a function."
                if may_be_negative
                else "give numbers of at least 0, or a temperature, which takes any finite numbers."
            )
            raise OptionError(
                f"{part.dataset.path} has a weight of {part.numbers[tuple(at)]:g} by "
                f"{weights.name} at {place}: {advice}"
            )


def _exponentials(parts: list[_Values], temperature: float) -> list[_Values]:
    low = min(part.numbers.min(initial=np.inf, where=part.mask) for part in parts)
    high = max(part.numbers.max(initial=-np.inf, where=part.mask) for part in parts)
    span = high - low if high > low else 1.0
    return [
        part._replace(
            numbers=np.exp(np.where(part.mask, part.numbers - high, 0.0) / span / temperature)
        )
        for part in parts
    ]
