"""Programs: algorithms that learn offline or online, and the loop that all of them share.

An offline program (a baseline) learns from a dataset with `train`. An online one (a recorder)
learns in an environment with `record_online`, which also records quality tiers. `record_policy`
records any policy, and `load_policy` loads the policy of any run. `offmarl.programs.program` says
what a program is.
"""

from offmarl.programs.buffer import (
    Capture,
    Step,
    add,
    as_sequence,
    init_capture,
    make_buffer,
    warm_start,
)
from offmarl.programs.dataset import DatasetStatistics, MeanAndStd
from offmarl.programs.loop import map_seeds, start
from offmarl.programs.offline import train
from offmarl.programs.policy import LoadedPolicy, load_policy
from offmarl.programs.program import (
    Args,
    Hyperparameters,
    OnlineArgs,
    Program,
    Stage,
    hyperparameters,
)
from offmarl.programs.record import record_policy
from offmarl.programs.tiers import TIERS, Recorded, record_online
from offmarl.programs.writer import ChunkWriter

__all__ = [
    "TIERS",
    "Args",
    "Capture",
    "ChunkWriter",
    "DatasetStatistics",
    "Hyperparameters",
    "LoadedPolicy",
    "MeanAndStd",
    "OnlineArgs",
    "Program",
    "Recorded",
    "Stage",
    "Step",
    "add",
    "as_sequence",
    "hyperparameters",
    "init_capture",
    "load_policy",
    "make_buffer",
    "map_seeds",
    "record_online",
    "record_policy",
    "start",
    "train",
    "warm_start",
]
