"""Work that is cut into blocks, and run by many tasks on one machine or on a cluster.

A `Work` has a number of blocks that does not depend on how many tasks run it. A task is a `Share`
of the blocks: task I of N runs blocks I, I + N, and so on. `launch` starts tasks with a `Launcher`
and joins what they made: ``local`` (processes), ``slurm`` (submitit), ``ray`` (Ray tasks), or
``module:class`` of another one.
"""

from typing import TYPE_CHECKING

from offmarl._imports import lazy_names

if TYPE_CHECKING:
    from offmarl.launch.launching import (
        LAUNCHERS as LAUNCHERS,
        Launched as Launched,
        Launcher as Launcher,
        launch as launch,
    )
    from offmarl.launch.task import Call as Call, run_task as run_task
    from offmarl.launch.work import (
        Share as Share,
        Work as Work,
        join_work as join_work,
        make_once as make_once,
        run_share as run_share,
    )
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__)
