"""Meta-strategies: how the members of populations are weighed, from a table of their payoffs.

A table ``(seats, M_1, ..., M_n)`` holds the mean return of every seat in each profile: a choice of
one member for every seat.
"""

from typing import Any, Literal

import numpy as np
from jaxtyping import Float
from scipy.optimize import linprog

from offmarl.errors import OptionError

Payoffs = Float[np.ndarray, "seats *members"]
Meta = Literal["last", "uniform", "nash", "cce", "alpha-rank"]
"""Names of meta-strategies; see `meta_strategy`."""


def meta_strategy(meta: Meta, payoffs: Payoffs) -> list[Float[np.ndarray, "M"]]:
    """Return the weights of each seat's members.

    Parameters
    ----------
    meta
        last: only the newest member (self-play); uniform: all alike (fictitious self-play); nash, a
        Nash equilibrium of the table; cce, a coarse correlated one; alpha-rank. Of the last two,
        which are distributions over profiles, each seat gets its marginal.
    payoffs
        The table.

    Raises
    ------
    OptionError
        A Nash equilibrium of a general-sum game or of more than two seats is asked for.
    """
    sizes = payoffs.shape[1:]
    if meta == "last":
        return [np.eye(size)[-1] for size in sizes]
    if meta == "uniform":
        return [np.full(size, 1 / size) for size in sizes]
    if meta == "nash":
        return nash(payoffs)
    joint = (coarse_correlated if meta == "cce" else alpha_rank)(payoffs)
    seats = range(len(sizes))
    return [joint.sum(tuple(other for other in seats if other != seat)) for seat in seats]


def require_constant_sum(returns: Float[np.ndarray, "seats *outcomes"], name: str) -> None:
    """Raise `OptionError` unless two seats share a constant, whatever the outcome."""
    sums = np.asarray(returns, float).sum(0)
    if len(returns) != 2 or np.ptp(sums) > 1e-4 * np.abs(returns).max():
        raise OptionError(
            f"{name} is not a zero-sum game of two sides: give --meta cce, alpha-rank, uniform or "
            "last in place of nash."
        )


def nash(payoffs: Payoffs) -> list[Float[np.ndarray, "M"]]:
    """Return a Nash equilibrium of a two-player zero-sum table, by linear programming.

    Each player maximises what it gets at least (von Neumann 1928). Of several equilibria it is one
    that the simplex method ends at. `OptionError` for another table.
    """
    require_constant_sum(payoffs, "the table")
    strategies = []
    for payoff in (payoffs[0], payoffs[1].T):
        rows, columns = payoff.shape
        value = [*np.zeros(rows), -1.0]  # the last variable is the least payoff, which is maximised
        exceeds = np.hstack([-payoff.T, np.ones((columns, 1))])
        strategies.append(_solve(value, exceeds, [*[(0, None)] * rows, (None, None)], rows))
    return strategies


def coarse_correlated(payoffs: Payoffs) -> Float[np.ndarray, "*members"]:
    """Return the coarse correlated equilibrium of the largest sum of payoffs.

    No player gains by playing one member whatever is drawn (Moulin and Vial 1978).
    """
    sizes, rows = payoffs.shape[1:], []
    for seat, payoff in enumerate(payoffs):
        for member in range(sizes[seat]):
            always = np.expand_dims(payoff.take(member, seat), seat)
            rows.append((always - payoff).ravel())
    size = payoffs[0].size
    return _solve(-payoffs.sum(0).ravel(), rows, [(0, None)] * size, size).reshape(sizes)


def _solve(cost: Any, at_most_0: Any, bounds: Any, size: int) -> np.ndarray:
    """Return the distribution, the first variables of a linear program, of the least cost."""
    num_rows, num_columns = np.shape(at_most_0)
    sums = [[*np.ones(size), *np.zeros(num_columns - size)]]
    result = linprog(cost, at_most_0, np.zeros(num_rows), sums, [1.0], bounds)
    if not result.success:
        raise OptionError(f"no equilibrium of the table is found: {result.message}")
    weights = np.clip(result.x[:size], 0, None)
    return weights / weights.sum()


def alpha_rank(payoffs: Payoffs, epsilon: float = 1e-6) -> Float[np.ndarray, "*members"]:
    """Return the profiles' masses by alpha-rank (Omidshafiei et al. 2019, arXiv 1903.01373).

    They are the stationary distribution of a chain in which one seat tries another member at a
    time, in the limit of infinite alpha: it changes for a better one, and at even odds for an equal
    one. A worse one is taken with the probability ``epsilon``, so that the distribution is unique.
    """
    sizes = payoffs.shape[1:]
    profiles = list(np.ndindex(*sizes))
    place = {profile: number for number, profile in enumerate(profiles)}
    chain, moves = np.zeros((len(profiles), len(profiles))), max(sum(sizes) - len(sizes), 1)
    for profile in profiles:
        for seat, size in enumerate(sizes):
            for member in {*range(size)} - {profile[seat]}:
                other = (*profile[:seat], member, *profile[seat + 1 :])
                gain = payoffs[seat][other] - payoffs[seat][profile]
                probability = 0.5 if gain == 0 else 1 - epsilon if gain > 0 else epsilon
                chain[place[profile], place[other]] = probability / moves
    np.fill_diagonal(chain, 1 - chain.sum(1))
    balance = np.vstack([chain.T - np.eye(len(profiles)), np.ones(len(profiles))])
    masses, *_ = np.linalg.lstsq(balance, [*np.zeros(len(profiles)), 1.0])
    masses = np.clip(masses, 0, None)
    return (masses / masses.sum()).reshape(sizes)
