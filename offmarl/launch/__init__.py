"""Work that is cut into blocks, and run by many tasks on one machine or on a cluster.

A `Work` has a number of blocks that does not depend on how many tasks run it. A task is a `Share`
of the blocks: task I of N runs blocks I, I + N, and so on. `launch` starts tasks with a `Launcher`
and joins what they made: ``local`` (processes), ``slurm`` (submitit), ``ray`` (Ray tasks), or
``module:class`` of another one.
"""

from offmarl.launch.launching import LAUNCHERS, Launched, Launcher, launch
from offmarl.launch.task import Call, run_task
from offmarl.launch.work import Share, Work, join_work, once, run_share

__all__ = [
    "LAUNCHERS",
    "Call",
    "Launched",
    "Launcher",
    "Share",
    "Work",
    "join_work",
    "launch",
    "once",
    "run_share",
    "run_task",
]
