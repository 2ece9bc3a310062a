"""The local approximation of a policy's value, from the advantages of recorded actions.

    L = J(μ) + E[ Σ_t γ^t Σ_i (w_it - 1) A_t ],   w_it = min(π_i(a_it) / μ_i(a_it), 10)

μ are the data's policies. It is what trust-region methods maximise (Kakade and Langford 2002;
Schulman et al. 2015, arXiv 1502.05477), with the ratio of each agent alone: what an agent's other
actions gain while all else follows the data's policies. Its value is not that of a policy far from
the data. Yet its differences vary so little, since one ratio and not a product of N T of them
stands before each advantage, that it orders policies where other estimates cannot.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Float
from numpy.typing import NDArray

from offmarl.ope.history import Histories

_LAMBDA = 0.9
"""λ of the advantages: with 1 they have no bias from the values, and more variance."""

_LARGEST = 10.0
"""Ratios are clipped to it."""

_FEATURES = 512
"""Wider views are projected at random to this number of features."""

_RIDGE = 1e-2
"""Penalty of the squared weights, relative to that of features of variance 1."""


def advantages(
    histories: Histories,
    reward: Float[np.ndarray, "M T"],
    mask: Bool[np.ndarray, "M T"],
    folds: NDArray[np.int64],
    counts: Bool[np.ndarray, "M"],
    gamma: float,
) -> Float[np.ndarray, "M T"]:
    """Return generalised advantages (Schulman et al. 2016, arXiv 1506.02438) of recorded actions.

    The value of a view is linear in its entries and in their products with the time; that of each
    episode is learned from those of the other fold that count. It is 0 after an episode's end.
    """
    kept = mask & counts[:, None]
    to_go = _discounted_sums(reward, gamma)
    usual = _mean_of_time(to_go, kept)
    design = _Design.of(histories, mask)
    square, product = np.zeros((2, design.width, design.width)), np.zeros((2, design.width))
    for part, x in design.blocks(histories):
        for fold in (0, 1):
            rows = kept[part] & (folds[part] != fold)[:, None]
            square[fold] += x[rows].T @ x[rows]
            product[fold] += x[rows].T @ (to_go - usual)[part][rows]
    steps = np.maximum(square[:, :1, :1], 1)  # the first feature is 1; a fold may be empty
    penalty = _RIDGE * steps * np.eye(design.width)
    weights = np.linalg.solve(square + penalty, product[..., None])[..., 0]
    value = np.zeros((len(mask), mask.shape[1] + 1))
    for part, x in design.blocks(histories):
        value[part, :-1] = np.einsum("mtf,mf->mt", x, weights[folds[part]]) + usual
    value[:, :-1] *= mask
    error = np.where(mask, reward + gamma * value[:, 1:] - value[:, :-1], 0)
    sums = _discounted_sums(error, gamma * _LAMBDA)
    # The data's policies gain nothing over themselves.
    return np.where(mask, sums - _mean_of_time(sums, kept), 0)


def _mean_of_time(x: Float[np.ndarray, "M T"], kept: Bool[np.ndarray, "M T"]) -> Any:
    """Return the mean of each time over the episodes that are kept."""
    return (x * kept).sum(0) / np.maximum(kept.sum(0), 1)


def _discounted_sums(x: Float[np.ndarray, "M T"], gamma: float) -> Float[np.ndarray, "M T"]:
    """Return the sum of each step's entry and of those after it, discounted."""
    sums = np.array(x, float)
    for t in reversed(range(x.shape[1] - 1)):
        sums[:, t] += gamma * sums[:, t + 1]
    return sums


class _Design(NamedTuple):
    """Map of views to the features of a linear value."""

    centre: Float[np.ndarray, "D"]
    scale: Float[np.ndarray, "D"]
    """Infinite for an entry that never changes."""
    projection: Float[np.ndarray, "D F"] | None

    @classmethod
    def of(cls, histories: Histories, mask: Bool[np.ndarray, "M T"]) -> "_Design":
        """Measure the entries of the recorded views."""
        count, total, squares = mask.sum(), np.zeros(1), np.zeros(1)
        for part, x in _vectors(histories):
            rows = x[mask[part]]
            total, squares = total + rows.sum(0), squares + (rows**2).sum(0)
        centre = total / count
        scale = np.sqrt(np.maximum(squares / count - centre**2, 0))
        normal = np.random.default_rng(0).normal(size=(len(centre), _FEATURES)) / _FEATURES**0.5
        changes = scale > 1e-5 * (1 + np.abs(centre))
        return cls(
            centre, np.where(changes, scale, np.inf), normal if len(centre) > _FEATURES else None
        )

    @property
    def width(self) -> int:
        """Number of features."""
        entries = len(self.centre) if self.projection is None else _FEATURES
        return 2 * (entries + 2)

    def blocks(self, histories: Histories) -> Iterator[tuple[slice, Float[np.ndarray, "m T F"]]]:
        """Yield the features of the views before each step, and which episodes they are of."""
        for part, vectors in _vectors(histories):
            x = (vectors - self.centre) / self.scale
            x = x if self.projection is None else x @ self.projection
            time = np.broadcast_to(
                np.arange(x.shape[1])[:, None] / histories.longest, x[..., :1].shape
            )
            x = np.concatenate([np.ones_like(time), time**2, x], -1)
            yield part, np.concatenate([x, x * time], -1)


def _vectors(histories: Histories) -> Iterator[tuple[slice, Float[np.ndarray, "m T D"]]]:
    """Yield the views before each step as vectors, in blocks of episodes."""
    for part, episodes in histories.blocks():
        leaves = [np.asarray(leaf, float) for leaf in jax.tree.leaves(episodes.view_tm1)]
        vectors = [leaf.reshape(*leaf.shape[:2], -1)[: part.stop - part.start] for leaf in leaves]
        yield part, np.concatenate(vectors, -1)


def clipped_ratio(
    log_prob: Float[np.ndarray, "*b"], behaviour_log_prob: Float[np.ndarray, "*b"]
) -> Float[np.ndarray, "*b"]:
    """Return the ratios, which are 1 in the mean as far as the data hold what a policy does."""
    return np.asarray(np.exp(np.minimum(log_prob - behaviour_log_prob, np.log(_LARGEST))))


def local_values(
    log_prob: Float[np.ndarray, "M T N"],
    behaviour_log_prob: Float[np.ndarray, "M T N"],
    advantage: Float[np.ndarray, "M T"],
    returns: Float[np.ndarray, "M"],
    gamma: float,
) -> Float[np.ndarray, "M"]:
    """Return each episode's part of the local approximation, whose mean is the estimate."""
    gain = (clipped_ratio(log_prob, behaviour_log_prob) - 1).sum(-1) * advantage
    return np.asarray(returns + (gamma ** np.arange(gain.shape[1]) * gain).sum(1))
