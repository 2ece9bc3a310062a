"""Losses as pure functions of one trajectory.

Arguments carry time in their names: ``_tm1`` is the step an action was taken in, ``_t`` the one
after it. Callers vmap over the batch and average with `masked_mean`.
"""

from offmarl.losses.conservative import conservative_gap, sample_legal_actions
from offmarl.losses.imitation import cross_entropy
from offmarl.losses.implicit import softmax_weights
from offmarl.losses.td import (
    double_q_values,
    lambda_targets,
    masked_mean,
    td_targets,
)

__all__ = [
    "conservative_gap",
    "cross_entropy",
    "double_q_values",
    "lambda_targets",
    "masked_mean",
    "sample_legal_actions",
    "softmax_weights",
    "td_targets",
]
