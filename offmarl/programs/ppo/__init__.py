"""Proximal policy optimisation of several agents: what MAPPO and IPPO share.

The two programs differ in what the critic sees. Everything else is here: the arguments, the losses
and the update, which collects steps, estimates advantages and learns from windows of the steps. A
feed-forward network learns from single steps, a recurrent one from windows of several, whose first
step starts from the memory that acting had there.
"""

from offmarl.programs.ppo.arguments import PPOArgs, policy_config
from offmarl.programs.ppo.learning import ActorCritic, Networks, State, Windows
from offmarl.programs.ppo.program import make_program

__all__ = [
    "ActorCritic",
    "Networks",
    "PPOArgs",
    "State",
    "Windows",
    "make_program",
    "policy_config",
]
