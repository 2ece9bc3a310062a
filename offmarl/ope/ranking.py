"""How well estimates order policies, and what a search in the environment would find."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, Key, PRNGKeyArray

from offmarl.errors import ShapeError


def rank_correlation(
    estimates: Float[np.ndarray, "P"], returns: Float[np.ndarray, "_"]
) -> float | None:
    """Return Spearman's rank correlation of estimates with known returns.

    Equal values share the mean of their ranks. None for fewer than three policies, or if all
    estimates or all returns are equal.

    Raises
    ------
    ShapeError
        There are not as many estimates as returns.
    """
    estimates, returns = _checked(estimates, returns)
    if len(estimates) < 3 or np.ptp(estimates) == 0 or np.ptp(returns) == 0:
        return None
    return float(np.corrcoef(_ranks(estimates), _ranks(returns))[0, 1])


def _ranks(values: Float[np.ndarray, "P"]) -> Float[np.ndarray, "P"]:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Float[np.ndarray, "P"] = (np.cumsum(counts) - (counts - 1) / 2)[place]
    return ranks


def regret(estimates: Float[np.ndarray, "P"], returns: Float[np.ndarray, "_"], k: int = 1) -> float:
    """Return regret@k: what is lost by trying only the k policies with the best estimates.

    The best return of all policies minus the best among these k, in the unit of the returns (Fu et
    al. 2021, arXiv 2103.16596). Of policies with equal estimates the worse are tried first.

    Raises
    ------
    ShapeError
        There are not as many estimates as returns, or not k of them.
    """
    estimates, returns = _checked(estimates, returns)
    if not 1 <= k <= len(estimates):
        raise ShapeError(f"regret@{k} of {len(estimates)} policies: give 1 to {len(estimates)}.")
    tried = np.lexsort((returns, -estimates))[:k]
    return float(returns.max() - returns[tried].max())


def _checked(
    estimates: Float[np.ndarray, "P"], returns: Float[np.ndarray, "_"]
) -> tuple[Float[np.ndarray, "P"], Float[np.ndarray, "P"]]:
    estimates, returns = np.asarray(estimates, float), np.asarray(returns, float)
    if estimates.ndim != 1 or estimates.shape != returns.shape:
        raise ShapeError(
            f"estimates {estimates.shape} and returns {returns.shape}: give one of each for every "
            "policy."
        )
    if not np.isfinite([estimates, returns]).all():
        raise ShapeError(
            "an estimate or a return is not finite: leave its policy out of the order."
        )
    return estimates, returns


class TuningCurve(NamedTuple):
    """What a search in the environment finds, by the number of episodes that it plays."""

    episodes: Int[np.ndarray, "n"]
    mean: Float[np.ndarray, "n"]
    """Expected return of the policy that the search would choose then."""
    low: Float[np.ndarray, "n"]
    """Percentiles 2.5 and 97.5 of that return over the searches."""
    high: Float[np.ndarray, "n"]


def tuning_curve(
    returns: Float[np.ndarray, "P R"],
    key: PRNGKeyArray,
    *,
    episodes: int = 200,
    policies: int = 20,
    searches: int = 1000,
    exploration: float = 2.0,
) -> TuningCurve:
    """Return how the choice among policies improves with episodes in the environment.

    Each search is a bandit whose arms are some of the policies, such as those of several
    hyperparameters: it plays one episode at a time with the policy of the largest upper confidence
    bound, and would choose the policy with the best mean so far (Jackson et al. 2025, arXiv
    2504.11453; facts from their code, EmptyJackson/unifloral, commit f2dc127). Two things differ
    from that code: returns are scaled to [0, 1] for the bound, so that exploration does not depend
    on their unit, and a policy that was not played cannot be chosen.

    Parameters
    ----------
    returns
        Returns of R episodes of each policy, from which the episodes are drawn.
    key
        Random key.
    episodes
        Number of episodes of a search.
    policies
        Number of policies that a search chooses from, drawn anew for each; at most all.
    searches
        Number of searches.
    exploration
        α of the bound: mean + sqrt(α log(n) / n_i) after n - 1 episodes, n_i of them with the arm.

    Raises
    ------
    ShapeError
        There are no returns.
    """
    returns = np.asarray(returns, np.float32)
    if returns.ndim != 2 or not returns.size or not np.isfinite(returns).all():
        raise ShapeError(
            f"returns have the shape {returns.shape}: give a finite number for each policy and "
            "episode."
        )
    low, span = returns.min(), np.ptp(returns) or np.float32(1.0)
    shape = episodes, min(policies, len(returns))
    keys = jax.random.split(key, searches)
    found = np.asarray(_searches(shape, (returns - low) / span, keys, exploration)) * span + low
    low_end, high_end = np.percentile(found, [2.5, 97.5], axis=0)
    return TuningCurve(np.arange(1, episodes + 1), found.mean(0), low_end, high_end)


@partial(jax.jit, static_argnums=0)
def _searches(
    shape: tuple[int, int],
    returns: Float[Array, "P R"],
    keys: Key[Array, "searches"],
    exploration: Float[Array, ""] | float,
) -> Float[Array, "searches n"]:
    """Return the mean return of the policy that each search would choose after each episode."""
    episodes, policies = shape

    def search(key: PRNGKeyArray) -> Float[Array, "n"]:
        arms_key, key = jax.random.split(key)
        arms = jax.random.permutation(arms_key, len(returns))[:policies]
        own, means = returns[arms], returns[arms].mean(1)

        def play(
            seen: tuple[Array, Array], x: tuple[PRNGKeyArray, Array]
        ) -> tuple[tuple[Array, Array], Array]:
            (counts, sums), (key, number) = seen, x
            tie_key, episode_key = jax.random.split(key)
            bonus = jnp.sqrt(exploration * jnp.log(number) / jnp.maximum(counts, 1))
            bound = jnp.where(counts > 0, sums / jnp.maximum(counts, 1) + bonus, jnp.inf)
            ties = jnp.where(bound == bound.max(), 0.0, -jnp.inf)
            arm = jax.random.categorical(tie_key, ties)
            earned = own[arm, jax.random.randint(episode_key, (), 0, own.shape[1])]
            counts, sums = counts.at[arm].add(1), sums.at[arm].add(earned)
            played = jnp.where(counts > 0, sums / jnp.maximum(counts, 1), -jnp.inf)
            return (counts, sums), means[played.argmax()]

        keys = jax.random.split(key, episodes)
        numbers = jnp.arange(1, episodes + 1)
        fresh = jnp.zeros(policies), jnp.zeros(policies)
        return jax.lax.scan(play, fresh, (keys, numbers))[1]

    return jax.vmap(search)(keys)
