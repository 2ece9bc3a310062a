"""Programs: algorithms that learn offline or online, and the loop that all of them share.

An offline program (a baseline) learns from a dataset with `train`. An online one (a recorder)
learns in an environment with `record_online`, which also records quality tiers. `record_policy`
records any policy, and `load_policy` loads the policy of any run. `offmarl.programs.program` says
what a program is.
"""

from typing import TYPE_CHECKING

from offmarl._imports import homes_in, lazy_getattr

if TYPE_CHECKING:
    from offmarl.programs.buffer import (
        Capture,
        ChunkWriter,
        Step,
        add,
        init_capture,
        make_buffer,
    )
    from offmarl.programs.critic import LoadedCritic, load_critic
    from offmarl.programs.dataset import DatasetStatistics, MeanAndStd
    from offmarl.programs.foreign import function_policy, network_policy
    from offmarl.programs.learner import LearnerArgs, TargetState, make_optimiser, policy_config
    from offmarl.programs.loop import start
    from offmarl.programs.off_policy import OffPolicyArgs
    from offmarl.programs.offline import train
    from offmarl.programs.online import Recorded, record_from_run, record_online
    from offmarl.programs.optimisers import (
        ScheduleKind,
        clipped_adam,
        grad_norm,
        linear_schedule,
        scheduled,
        training_progress,
    )
    from offmarl.programs.policy import LoadedPolicy, load_policy
    from offmarl.programs.program import (
        TD_ERRORS,
        Args,
        Hyperparameters,
        OnlineArgs,
        Program,
        Stage,
        Values,
        hyperparameters,
    )
    from offmarl.programs.record import record_policy
    from offmarl.programs.replaying import ReplayedEpisode, replay_episode
    from offmarl.programs.sharding import map_seeds
    from offmarl.programs.soft_actor_critic import SoftArgs, make_soft_actor_critic
    from offmarl.programs.tiers import TIERS
    from offmarl.programs.windows import draw_windows, warm_start

__all__ = [
    "TD_ERRORS",
    "TIERS",
    "Args",
    "Capture",
    "ChunkWriter",
    "DatasetStatistics",
    "Hyperparameters",
    "LearnerArgs",
    "LoadedCritic",
    "LoadedPolicy",
    "MeanAndStd",
    "OffPolicyArgs",
    "OnlineArgs",
    "Program",
    "Recorded",
    "ReplayedEpisode",
    "ScheduleKind",
    "SoftArgs",
    "Stage",
    "Step",
    "TargetState",
    "Values",
    "add",
    "clipped_adam",
    "draw_windows",
    "function_policy",
    "grad_norm",
    "hyperparameters",
    "init_capture",
    "linear_schedule",
    "load_critic",
    "load_policy",
    "make_buffer",
    "make_optimiser",
    "make_soft_actor_critic",
    "map_seeds",
    "network_policy",
    "policy_config",
    "record_from_run",
    "record_online",
    "record_policy",
    "replay_episode",
    "scheduled",
    "start",
    "train",
    "training_progress",
    "warm_start",
]

_HOMES = {
    "buffer": "Capture ChunkWriter Step add init_capture make_buffer",
    "critic": "LoadedCritic load_critic",
    "dataset": "DatasetStatistics MeanAndStd",
    "foreign": "function_policy network_policy",
    "learner": "LearnerArgs TargetState make_optimiser policy_config",
    "loop": "start",
    "offline": "train",
    "off_policy": "OffPolicyArgs",
    "online": "Recorded record_from_run record_online",
    "optimisers": "ScheduleKind clipped_adam grad_norm linear_schedule scheduled training_progress",
    "policy": "LoadedPolicy load_policy",
    "program": "TD_ERRORS Args Hyperparameters OnlineArgs Program Stage Values hyperparameters",
    "record": "record_policy",
    "replaying": "ReplayedEpisode replay_episode",
    "sharding": "map_seeds",
    "soft_actor_critic": "SoftArgs make_soft_actor_critic",
    "tiers": "TIERS",
    "windows": "draw_windows warm_start",
}

if not TYPE_CHECKING:  # type checkers take any name from a module that has this
    __getattr__ = lazy_getattr(__name__, homes_in(__name__, _HOMES))
