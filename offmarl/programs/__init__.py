"""Programs: algorithms that learn offline or online, and the loop that all of them share.

An offline program (a baseline) learns from a dataset with `train`. An online one (a recorder)
learns in an environment with `record_online`, which also records quality tiers. `record_policy`
records any policy, and `load_policy` loads the policy of any run. `offmarl.programs.program` says
what a program is.
"""

from typing import TYPE_CHECKING

from offmarl._imports import lazy_names

if TYPE_CHECKING:
    from offmarl.programs.buffer import Capture as Capture
    from offmarl.programs.buffer import ChunkWriter as ChunkWriter
    from offmarl.programs.buffer import Step as Step
    from offmarl.programs.buffer import add as add
    from offmarl.programs.buffer import init_capture as init_capture
    from offmarl.programs.buffer import make_buffer as make_buffer
    from offmarl.programs.critic import LoadedCritic as LoadedCritic
    from offmarl.programs.critic import load_critic as load_critic
    from offmarl.programs.dataset import DatasetStatistics as DatasetStatistics
    from offmarl.programs.dataset import MeanAndStd as MeanAndStd
    from offmarl.programs.foreign import function_policy as function_policy
    from offmarl.programs.foreign import network_policy as network_policy
    from offmarl.programs.learner import LearnerArgs as LearnerArgs
    from offmarl.programs.learner import TargetState as TargetState
    from offmarl.programs.learner import make_optimiser as make_optimiser
    from offmarl.programs.learner import policy_config as policy_config
    from offmarl.programs.loop import start as start
    from offmarl.programs.off_policy import OffPolicyArgs as OffPolicyArgs
    from offmarl.programs.offline import train as train
    from offmarl.programs.online import Recorded as Recorded
    from offmarl.programs.online import record_from_run as record_from_run
    from offmarl.programs.online import record_online as record_online
    from offmarl.programs.optimisers import ScheduleKind as ScheduleKind
    from offmarl.programs.optimisers import clipped_adam as clipped_adam
    from offmarl.programs.optimisers import grad_norm as grad_norm
    from offmarl.programs.optimisers import linear_schedule as linear_schedule
    from offmarl.programs.optimisers import scheduled as scheduled
    from offmarl.programs.optimisers import training_progress as training_progress
    from offmarl.programs.policy import LoadedPolicy as LoadedPolicy
    from offmarl.programs.policy import load_policy as load_policy
    from offmarl.programs.program import TD_ERRORS as TD_ERRORS
    from offmarl.programs.program import Args as Args
    from offmarl.programs.program import Hyperparameters as Hyperparameters
    from offmarl.programs.program import OnlineArgs as OnlineArgs
    from offmarl.programs.program import Program as Program
    from offmarl.programs.program import Stage as Stage
    from offmarl.programs.program import Values as Values
    from offmarl.programs.program import hyperparameters as hyperparameters
    from offmarl.programs.record import record_policy as record_policy
    from offmarl.programs.replaying import ReplayedEpisode as ReplayedEpisode
    from offmarl.programs.replaying import replay_episode as replay_episode
    from offmarl.programs.sharding import map_seeds as map_seeds
    from offmarl.programs.soft_actor_critic import SoftArgs as SoftArgs
    from offmarl.programs.soft_actor_critic import make_soft_actor_critic as make_soft_actor_critic
    from offmarl.programs.tiers import TIERS as TIERS
    from offmarl.programs.windows import draw_windows as draw_windows
    from offmarl.programs.windows import warm_start as warm_start
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__)
