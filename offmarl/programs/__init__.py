"""Programs: algorithms that learn offline or online, and the loop that all of them share.

An offline program (a baseline) learns from a dataset with `train`. An online one (a recorder)
learns in an environment with `record_online`, which also records quality tiers. `record_policy`
records any policy, and `load_policy` loads the policy of any run. `offmarl.programs.program` says
what a program is.
"""

from typing import TYPE_CHECKING

from offmarl._imports import lazy_names

if TYPE_CHECKING:
    from offmarl.programs.experience.buffer import (
        Capture as Capture,
        ChunkWriter as ChunkWriter,
        Step as Step,
        add as add,
        init_capture as init_capture,
        make_buffer as make_buffer,
    )
    from offmarl.programs.runs.dataset import (
        DatasetStatistics as DatasetStatistics,
        MeanAndStd as MeanAndStd,
    )
    from offmarl.programs.recording.foreign import (
        function_policy as function_policy,
        network_policy as network_policy,
    )
    from offmarl.programs.learning.learner import (
        LearnerArgs as LearnerArgs,
        ScheduleKind as ScheduleKind,
        TargetState as TargetState,
        ValueArgs as ValueArgs,
        clipped_adam as clipped_adam,
        grad_norm as grad_norm,
        linear_schedule as linear_schedule,
        make_optimiser as make_optimiser,
        policy_config as policy_config,
        scheduled as scheduled,
        training_progress as training_progress,
    )
    from offmarl.programs.runs.loop import start as start
    from offmarl.programs.learning.off_policy import (
        OffPolicyArgs as OffPolicyArgs,
        fit_unit as fit_unit,
        mean_metrics as mean_metrics,
        no_rewards as no_rewards,
    )
    from offmarl.programs.offline import train as train
    from offmarl.programs.recording.online import (
        Recorded as Recorded,
        record_from_run as record_from_run,
        record_online as record_online,
    )
    from offmarl.programs.runs.policy import (
        LoadedCritic as LoadedCritic,
        LoadedPolicy as LoadedPolicy,
        load_critic as load_critic,
        load_policy as load_policy,
    )
    from offmarl.programs.program import (
        TD_ERRORS as TD_ERRORS,
        Args as Args,
        Hyperparameters as Hyperparameters,
        OnlineArgs as OnlineArgs,
        Program as Program,
        Stage as Stage,
        Values as Values,
        hyperparameters as hyperparameters,
    )
    from offmarl.programs.recording.record import (
        record_policy as record_policy,
        record_tiers as record_tiers,
    )
    from offmarl.programs.recording.replaying import (
        ReplayedEpisode as ReplayedEpisode,
        replay_episode as replay_episode,
    )
    from offmarl.programs.runs.sharding import map_seeds as map_seeds
    from offmarl.programs.learning.soft_actor_critic import (
        SoftArgs as SoftArgs,
        make_soft_actor_critic as make_soft_actor_critic,
    )
    from offmarl.programs.recording.tiers import TIERS as TIERS
    from offmarl.programs.experience.windows import (
        draw_windows as draw_windows,
    )
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__)
