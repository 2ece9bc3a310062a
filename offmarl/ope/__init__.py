"""Off-policy evaluation: what policies are worth, estimated from recorded episodes alone.

>>> policies = {name: offmarl.load_policy(f"runs/{name}") for name in ("bc", "maicq")}
>>> found = ope.estimate(policies, offmarl.open("vaults/swarm/coverage-3.vlt/mappo-0-medium"))
>>> found.values["local"]["maicq"].value

`estimate` evaluates policies by a local approximation from advantages, by fitted Q evaluation and
by weighted importance sampling. `rank_correlation` and `regret` say how well estimates order
policies whose returns are known.
"""

from typing import TYPE_CHECKING

from offmarl._imports import lazy_names

if TYPE_CHECKING:
    from offmarl.ope.estimation import (
        METHODS as METHODS,
        Estimates as Estimates,
        Method as Method,
        EvaluatedPolicy as EvaluatedPolicy,
        estimate as estimate,
    )
    from offmarl.ope.importance import (
        bootstrap as bootstrap,
        cumulative_ratios as cumulative_ratios,
        effective_sample_size as effective_sample_size,
        weighted_importance_sampling as weighted_importance_sampling,
        with_interval as with_interval,
    )
    from offmarl.ope.options import Options as Options
    from offmarl.ope.ranking import (
        compare_with_returns as compare_with_returns,
        rank_correlation as rank_correlation,
        regret as regret,
    )
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__)
