"""Programs: algorithms that learn offline or online, and the loops that all of them share.

An offline program (a baseline) learns from a dataset with `train`. An online one (a recorder)
learns in an environment with `record_online`, which also records quality tiers. `record_policy`
records any policy.
"""

from offmarl.programs.buffer import Capture, Step, add, init_capture, make_buffer
from offmarl.programs.collect import OnlineProgram
from offmarl.programs.loop import start, train
from offmarl.programs.online import OnlineArgs, Recorded, record_online
from offmarl.programs.program import Args, Program
from offmarl.programs.record import record_policy
from offmarl.programs.tiers import TIERS
from offmarl.programs.writer import ChunkWriter

__all__ = [
    "TIERS",
    "Args",
    "Capture",
    "ChunkWriter",
    "OnlineArgs",
    "OnlineProgram",
    "Program",
    "Recorded",
    "Step",
    "add",
    "init_capture",
    "make_buffer",
    "record_online",
    "record_policy",
    "start",
    "train",
]
