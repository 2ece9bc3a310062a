"""Estimates from recorded episodes by the ratios of action probabilities.

Episodes are padded to T steps. After its end, an episode stays in an absorbing state without
rewards: its ratio is kept, so that episodes of any length are weighed against one another.

All sums over episodes are weighed by counts, ``(*r, M)``: how often each episode is in a resample.
The estimate itself has counts of one, and a bootstrap of all resamples is one matrix product.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from offmarl.losses import Scalar
from offmarl.statistics import MIN_RUNS, Estimate, expanded_tail, mean_interval

_RESAMPLED = 2**24
"""Largest number of entries of an array of resamples."""

_ENOUGH_RESAMPLES = 100
"""Number of resamples from which percentiles are the ends of an interval."""


def cumulative_ratios(
    log_prob: Float[Array, "M T"],
    behaviour_log_prob: Float[Array, "M T"],
    mask: Bool[Array, "M T"],
) -> Float[Array, "M T"]:
    """Return how likely the episodes' actions are under a policy, relative to who took them.

    They are the products of the ratios of the joint actions up to and including each step. Each
    step's products are divided by the largest of any episode, which cancels in all estimates and
    avoids overflows.

    Parameters
    ----------
    log_prob, behaviour_log_prob
        Sums over the live agents of the log-probabilities of the recorded actions.
    mask
        Steps that exist.
    """
    total = jnp.cumsum(jnp.where(mask, log_prob - behaviour_log_prob, 0.0), axis=1)
    largest = total.max(axis=0)
    return jnp.exp(total - jnp.where(jnp.isfinite(largest), largest, 0.0))


def effective_sample_size(ratios: Float[Array, "M T"]) -> Float[Array, ""]:
    """Return how many episodes of the policy itself the weighted episodes are worth.

    (Σ w)² / Σ w² of the ratios of whole episodes (Kong 1992): M if all are alike, 1 if one episode
    has all of the weight, 0 if the policy would have played none of them.
    """
    weights = ratios[:, -1]
    squares = (weights**2).sum()
    return jnp.where(squares > 0, weights.sum() ** 2 / jnp.where(squares > 0, squares, 1.0), 0.0)


@jax.jit
def weighted_importance_sampling(
    ratios: Float[Array, "M T"],
    reward: Float[Array, "M T"],
    gamma: Scalar,
    counts: Float[Array, "*r M"],
) -> Float[Array, "*r"]:
    """Return the value of a policy by per-decision weighted importance sampling.

    Σ_t γ^t Σ_i w_it r_it / Σ_i w_it, with the cumulative ratio w_it of episode i up to step t
    (Precup, Sutton and Singh 2000). It is consistent, and biased towards the data's return where
    few episodes have weight.

    Parameters
    ----------
    ratios
        `cumulative_ratios` of the policy.
    reward
        Rewards; 0 after an episode's end.
    gamma
        Discount.
    counts
        How often each episode counts; several sets of counts give several estimates.

    Returns
    -------
    The estimates; NaN without any episode that the policy could have played.
    """
    discounts = gamma ** jnp.arange(reward.shape[1])
    return (discounts * _mean(ratios, reward, counts)).sum(-1)


def _mean(
    weight: Float[Array, "M T"], x: Float[Array, "M T"], counts: Float[Array, "*r M"]
) -> Float[Array, "*r T"]:
    """Return the weighted means over the episodes.

    Where a resample holds no episode with weight, the mean over all episodes takes its place.
    """
    total, mean = counts @ weight, counts @ (weight * x)
    overall = (weight * x).sum(0) / weight.sum(0)
    return jnp.where(total > 0, mean / jnp.where(total > 0, total, 1.0), overall)


def bootstrap(
    estimator: Callable[[Float[Array, "*r M"]], Float[Array, "*r"]],
    episodes: int,
    draw: np.random.Generator,
    resamples: int = 2000,
) -> Float[np.ndarray, "resamples"]:
    """Return the estimates of resampled episodes.

    Equal generators draw equal resamples, so estimates of several policies are paired. Fewer
    episodes than `offmarl.statistics.MIN_RUNS` have no resamples.

    Parameters
    ----------
    estimator
        Compiled function of counts, such as a partial `weighted_importance_sampling`.
    episodes
        M.
    draw
        Random generator.
    resamples
        Number of resamples.
    """
    estimates = [np.zeros(0)]
    block = max(min(_RESAMPLED // episodes, resamples), 1)
    for start in range(0, resamples if episodes >= MIN_RUNS else 0, block):
        count = min(block, resamples - start)
        places = draw.integers(episodes, size=(count, episodes))
        places += episodes * np.arange(count)[:, None]
        counts = np.bincount(places.ravel(), minlength=count * episodes).reshape(count, episodes)
        estimates.append(np.asarray(estimator(jnp.asarray(counts, jnp.float32))))
    return np.concatenate(estimates)


def with_interval(
    value: float, resampled: Float[np.ndarray, "resamples"], episodes: int
) -> Estimate:
    """Return a value with the interval that the values of resamples give.

    From 100 resamples on, its ends are their percentiles, farther apart for few episodes, as in
    `offmarl.statistics`. Of fewer resamples, such as those of a few critics, it is Student's t
    interval of one of them. Below `offmarl.statistics.MIN_RUNS`, or if all are NaN, there is none.
    """
    if len(resampled) < MIN_RUNS or np.isnan(resampled).all():
        return Estimate(value)
    if len(resampled) < _ENOUGH_RESAMPLES:
        # The interval of one resample, and not of their mean.
        centre, _, high = mean_interval(resampled)
        half = 0.0 if high is None else (high - centre) * len(resampled) ** 0.5
        return Estimate(value, value - half, value + half)
    tail = expanded_tail(0.025, max(episodes, MIN_RUNS))
    low, high = np.quantile(resampled, [tail, 1 - tail])
    return Estimate(value, float(low), float(high))
