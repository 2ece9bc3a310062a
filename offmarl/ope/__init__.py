"""Off-policy evaluation: what policies are worth, estimated from recorded episodes alone.

>>> policies = {name: offmarl.load_policy(f"runs/{name}") for name in ("bc", "maicq")}
>>> found = ope.estimate(policies, offmarl.open("vaults/swarm/coverage-3.vlt/mappo-0-medium"))
>>> found.values["fqe"]["maicq"].value

`estimate` evaluates policies by fitted Q evaluation, by weighted importance sampling and by a
doubly robust combination of both. `rank_correlation` and `regret` say how well estimates order
policies whose returns are known, and `tuning_curve` what a search in the environment would find.
"""

from typing import TYPE_CHECKING

from offmarl._imports import lazy_names

if TYPE_CHECKING:
    from offmarl.ope.estimation import METHODS as METHODS
    from offmarl.ope.estimation import Estimates as Estimates
    from offmarl.ope.estimation import Method as Method
    from offmarl.ope.estimation import Target as Target
    from offmarl.ope.estimation import Value as Value
    from offmarl.ope.estimation import estimate as estimate
    from offmarl.ope.fitted import Critic as Critic
    from offmarl.ope.fitted import FittedQ as FittedQ
    from offmarl.ope.fitted import Options as Options
    from offmarl.ope.fitted import Transitions as Transitions
    from offmarl.ope.fitted import fit as fit
    from offmarl.ope.fitted import make_critic as make_critic
    from offmarl.ope.history import Followed as Followed
    from offmarl.ope.history import Histories as Histories
    from offmarl.ope.importance import Ratios as Ratios
    from offmarl.ope.importance import bootstrap as bootstrap
    from offmarl.ope.importance import doubly_robust as doubly_robust
    from offmarl.ope.importance import effective_sample_size as effective_sample_size
    from offmarl.ope.importance import weighted_importance_sampling as weighted_importance_sampling
    from offmarl.ope.ranking import TuningCurve as TuningCurve
    from offmarl.ope.ranking import rank_correlation as rank_correlation
    from offmarl.ope.ranking import regret as regret
    from offmarl.ope.ranking import tuning_curve as tuning_curve
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__)
