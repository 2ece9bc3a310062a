"""Proximal policy optimisation of several agents: what MAPPO, IPPO, IMPALA and OPRE share.

MAPPO and IPPO differ in what the critic sees. IMPALA and OPRE learn from the steps of earlier
policies, by V-trace, and OPRE has networks of its own. Everything else is here: the arguments, the
losses and the update, which collects steps, estimates advantages and learns from windows of the
steps. A feed-forward network learns from single steps, a recurrent one from windows of several,
whose first step starts from the memory that acting had there.
"""

from offmarl.programs.learning.ppo.arguments import (
    OffPolicyPPOArgs as OffPolicyPPOArgs,
    PPOArgs as PPOArgs,
    policy_config as policy_config,
)
from offmarl.programs.learning.ppo.learning import (
    ActorCritic as ActorCritic,
    Networks as Networks,
    RolloutWindows as RolloutWindows,
    State as State,
)
from offmarl.programs.learning.ppo.program import make_program as make_program
