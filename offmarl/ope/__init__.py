"""Off-policy evaluation: what policies are worth, estimated from recorded episodes alone.

>>> policies = {name: offmarl.load_policy(f"runs/{name}") for name in ("bc", "maicq")}
>>> found = ope.estimate(policies, offmarl.open("vaults/swarm/coverage-3.vlt/mappo-0-medium"))
>>> found.values["fqe"]["maicq"].value

`estimate` evaluates policies by fitted Q evaluation, by weighted importance sampling and by a
doubly robust combination of both. `rank_correlation` and `regret` say how well estimates order
policies whose returns are known, and `tuning_curve` what a search in the environment would find.
"""

from typing import TYPE_CHECKING

from offmarl._imports import homes_in, lazy_getattr

if TYPE_CHECKING:
    from offmarl.ope.estimation import METHODS, Estimates, Method, Target, estimate
    from offmarl.ope.fitted import Options
    from offmarl.ope.importance import (
        Ratios,
        bootstrap,
        doubly_robust,
        effective_sample_size,
        weighted_importance_sampling,
    )
    from offmarl.ope.ranking import (
        Compared,
        TuningCurve,
        compare_with_returns,
        rank_correlation,
        regret,
        tuning_curve,
    )

__all__ = [
    "METHODS",
    "Compared",
    "Estimates",
    "Method",
    "Options",
    "Ratios",
    "Target",
    "TuningCurve",
    "bootstrap",
    "compare_with_returns",
    "doubly_robust",
    "effective_sample_size",
    "estimate",
    "rank_correlation",
    "regret",
    "tuning_curve",
    "weighted_importance_sampling",
]

_HOMES = {
    "estimation": "METHODS Estimates Method Target estimate",
    "fitted": "Options",
    "importance": "Ratios bootstrap doubly_robust effective_sample_size "
    "weighted_importance_sampling",
    "ranking": "Compared TuningCurve compare_with_returns rank_correlation regret tuning_curve",
}

if not TYPE_CHECKING:  # type checkers take any name from a module that has this
    __getattr__ = lazy_getattr(__name__, homes_in(__name__, _HOMES))


def __dir__() -> list[str]:
    return sorted(__all__)
