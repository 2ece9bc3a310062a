"""Recording: from rollouts on the device, through a flashbax buffer, to vaults on the disk.

`record_policy` records a policy as it is; `record_online` drives an `OnlineProgram` through its
training and records the quality tiers asked for.
"""

from offmarl.recording.capture import Capture, Step, add, init_capture, make_buffer
from offmarl.recording.loop import OnlineProgram
from offmarl.recording.online import OnlineArgs, Recorded, record_online
from offmarl.recording.policy import record_policy
from offmarl.recording.tiers import TIERS
from offmarl.recording.writer import ChunkWriter

__all__ = [
    "TIERS",
    "Capture",
    "ChunkWriter",
    "OnlineArgs",
    "OnlineProgram",
    "Recorded",
    "Step",
    "add",
    "init_capture",
    "make_buffer",
    "record_online",
    "record_policy",
]
