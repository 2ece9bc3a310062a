"""Statistics for comparisons of few runs.

Point estimates, performance profiles and stratified bootstrap intervals after Agarwal et al.,
"Deep Reinforcement Learning at the Edge of the Statistical Precipice" (NeurIPS 2021), on the
protocol of Gorsane et al., "Towards a Standardised Performance Evaluation Protocol for Cooperative
MARL" (NeurIPS 2022).

Scores are arrays ``(runs, tasks)``: one number per independent run (training seed) and task. Every
estimate also accepts leading axes, ``(*b, runs, tasks)``, so that the bootstrap is one vectorised
call.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from jaxtyping import Float, Num

from offmarl.config import PositiveInt, check_rules, check_seed
from offmarl.errors import OptionError, ShapeError, unknown_name

Scores = Float[np.ndarray, "*b runs tasks"]
Estimator = Callable[..., Any]
"""A function of one or more arrays of scores ``(*b, runs, tasks)`` to an array ``(*b, ...)``."""

MIN_RUNS = 3
"""Minimum number of runs for an interval: resamples of fewer do not estimate the spread."""

ENOUGH_RUNS = 5
"""Number of runs from which intervals cover as often as they claim; see `IntervalMethod`."""

_TAIL = 0.025
"""Probability of each tail that an interval leaves out."""

IntervalMethod = Literal["expanded", "percentile"]
"""How an interval is cut from the estimates of resamples.

"percentile": at the 2.5th and the 97.5th percentile, as rliable does. Of few runs it covers too
seldom, because the spread of n runs is itself uncertain. "expanded": at percentiles that are moved
outwards for that, to the tail probability Φ(-t), with the quantile t of Student's distribution with
n - 1 degrees of freedom. This is the expanded percentile interval of Hesterberg (2015, arXiv
1411.5279, section 5.3) without its factor sqrt(n / (n - 1)), which is made for the mean: with it,
intervals of the interquartile mean of ten runs cover more than they claim.
`benchmarks/coverage.py` measures all three.
"""


class Reference(NamedTuple):
    """Mean returns of an environment, by which scores are normalised."""

    random: float
    """Mean return of uniform legal actions; normalised to 0."""
    expert: float
    """Mean return of an expert; normalised to 1."""


def normalise(scores: Float[np.ndarray, "*s"], reference: Reference) -> Float[np.ndarray, "*s"]:
    """Return scores on the scale from random (0) to expert (1), which they may exceed.

    Raises
    ------
    OptionError
        The references are equal, or not finite.
    """
    random, expert = reference
    if not np.isfinite(reference).all() or random == expert:
        raise OptionError(
            f"returns cannot be normalised from {random} (random) to {expert} (expert): give two "
            "different, finite numbers."
        )
    return np.asarray((scores - random) / (expert - random))


def spread(values: Num[np.ndarray, "count"]) -> dict[str, float]:
    """Return the mean, standard deviation, minimum and maximum; empty if there are no values."""
    names = ("mean", "std", "min", "max") if len(values) else ()
    return {name: float(getattr(values, name)()) for name in names}


class Estimate(NamedTuple):
    """A point estimate with its 95% interval."""

    value: float
    low: float | None = None
    """None if there are too few values for an interval, and so is ``high``."""
    high: float | None = None

    @property
    def finite(self) -> bool:
        """Whether it and its interval are finite: others are neither ranked nor chosen."""
        return all(x is None or np.isfinite(x) for x in self)


def mean_interval(values: Num[np.ndarray, "count"]) -> Estimate:
    """Return the mean of independent values, with Student's t interval.

    For many values of one policy, such as the returns of its episodes; for few runs, which may be
    far from normal, use `bootstrap_interval`.

    Raises
    ------
    ShapeError
        There are no values.
    """
    if len(values) == 0:
        raise ShapeError("there are no values to take the mean of: give one or more.")
    centre = float(np.mean(values))
    if len(values) < MIN_RUNS:
        return Estimate(centre)
    from scipy.special import stdtrit  # slow to import, and not needed for --help

    quantile = stdtrit(len(values) - 1, 1 - _TAIL)
    half = float(quantile * standard_error(values))
    return Estimate(centre, centre - half, centre + half)


def standard_error(values: Num[np.ndarray, "count *more"]) -> Float[np.ndarray, "*more"]:
    """Return the standard error of the mean of independent values; NaN if there is only one."""
    if len(values) < 2:
        return np.full(values.shape[1:], np.nan)
    return np.asarray(np.std(values, axis=0, ddof=1) / np.sqrt(len(values)))


def mean(scores: Scores) -> Float[np.ndarray, "*b"]:
    """Return the mean over tasks of each task's mean."""
    return np.asarray(np.mean(scores, axis=(-2, -1)))


def median(scores: Scores) -> Float[np.ndarray, "*b"]:
    """Return the median over tasks of each task's mean."""
    return np.asarray(np.median(np.mean(scores, axis=-2), axis=-1))


def iqm(scores: Scores) -> Float[np.ndarray, "*b"]:
    """Return the interquartile mean: the mean of the middle half of all runs of all tasks.

    A quarter of the scores, rounded down, is excluded at each end.
    """
    ordered = np.sort(scores.reshape(*scores.shape[:-2], -1), axis=-1)
    trim = ordered.shape[-1] // 4
    return np.asarray(np.mean(ordered[..., trim : ordered.shape[-1] - trim], axis=-1))


def performance_profile(
    scores: Scores, thresholds: Float[np.ndarray, "K"]
) -> Float[np.ndarray, "*b K"]:
    """Return the fraction of runs, over all tasks, with scores above each threshold."""
    above = scores[..., None] > thresholds
    return np.asarray(np.mean(above, axis=(-3, -2)))


def probability_of_improvement(
    x: Float[np.ndarray, "*b runs_x tasks"], y: Float[np.ndarray, "*b runs_y tasks"]
) -> Float[np.ndarray, "*b"]:
    """Return the probability that a run of ``x`` beats a run of ``y``, averaged over tasks.

    This is the Mann-Whitney statistic of each task over the number of pairs; a tie counts half.
    """
    difference = x[..., :, None, :] - y[..., None, :, :]
    return np.asarray(np.mean((np.sign(difference) + 1) / 2, axis=(-3, -2, -1)))


def estimate(
    estimator: Estimator, *scores: Float[np.ndarray, "_ tasks"], tests: int = 1
) -> Estimate:
    """Return an estimate of runs, with its bootstrap interval from `MIN_RUNS` runs on.

    The draws have a fixed seed: the same runs always give the same interval. Of several ``tests``
    all intervals together cover 95%, by Bonferroni's correction.

    Raises
    ------
    ShapeError
        Scores are not ``(runs, tasks)``, or contain a NaN.
    """
    value = float(estimator(*map(checked, scores)))
    if min(map(len, scores)) < MIN_RUNS:
        return Estimate(value)
    low, high = bootstrap_interval(estimator, *scores, seed=0, tests=tests)
    return Estimate(value, float(low), float(high))


def bootstrap_interval(
    estimate: Estimator,
    *scores: Float[np.ndarray, "_ tasks"],
    seed: int,
    resamples: int = 10_000,
    method: IntervalMethod = "expanded",
    tests: int = 1,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the stratified bootstrap interval of an estimate, which covers 95%.

    Runs are drawn with replacement within each task, independently for each array of scores, and
    the interval is cut from the estimates of these resamples.

    Parameters
    ----------
    estimate
        A function of this module, or one with the same signature.
    scores
        Its arguments, each ``(runs, tasks)``.
    seed
        Seed of the draws: the same seed gives the same interval.
    resamples
        Number of draws.
    method
        Where the interval is cut; "percentile" gives the intervals of rliable.
    tests
        Number of intervals that cover 95% together.

    Returns
    -------
    low, high
        Arrays of the shape of the estimate.

    Raises
    ------
    ShapeError
        Scores are not ``(runs, tasks)``, have fewer than `MIN_RUNS` runs, or contain a NaN.
    OptionError, UnknownNameError
        A number is not positive, or ``method`` is none of `IntervalMethod`.
    """
    check_rules("resamples", PositiveInt, resamples)
    check_rules("tests", PositiveInt, tests)
    if method not in get_args(IntervalMethod):
        raise unknown_name("method of an interval", method, get_args(IntervalMethod))
    for array in map(checked, scores):
        if len(array) < MIN_RUNS:
            raise ShapeError(
                f"an interval needs at least {MIN_RUNS} runs: got {len(array)}. Train more seeds."
            )
    generator = np.random.default_rng(check_seed(seed))
    samples = [_resample(generator, array, resamples) for array in scores]
    tail = _TAIL / tests
    tail = expanded_tail(tail, min(map(len, scores))) if method == "expanded" else tail
    low, high = np.quantile(estimate(*samples), [tail, 1 - tail], axis=0)
    return np.asarray(low), np.asarray(high)


def expanded_tail(tail: float, runs: int) -> float:
    """Return the tail probability of the method "expanded"."""
    from scipy.special import ndtr, stdtrit  # slow to import, and not needed for --help

    return float(ndtr(stdtrit(runs - 1, tail)))


def checked(scores: np.ndarray) -> Float[np.ndarray, "runs tasks"]:
    """Return the scores, or raise `ShapeError` if they are invalid."""
    if scores.ndim != 2 or scores.size == 0:
        raise ShapeError(
            f"scores have the shape {scores.shape}: give a number per run and task, (runs, tasks)."
        )
    if not np.isfinite(scores).all():
        raise ShapeError("scores contain a NaN or an infinity: leave out the runs that failed.")
    return scores


def _resample(
    generator: np.random.Generator, scores: Float[np.ndarray, "runs tasks"], resamples: int
) -> Float[np.ndarray, "resamples runs tasks"]:
    runs = generator.integers(len(scores), size=(resamples, *scores.shape))
    return np.take_along_axis(scores[None], runs, axis=1)
