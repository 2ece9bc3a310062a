"""Training: programs that learn offline, and the one driver that they share.

A program says how it starts, what one update does and how its policy acts (`Program`); the driver
samples, scans, vmaps seeds, evaluates, logs, checkpoints and resumes, the same for all. Sampling
and updating are fused in one scan over a replay that stays on the device, or, where that is too
small, over batches streamed to it. Everything random is a pure function of (seed, update), so that
a resumed run gives the bits of one that never stopped, and a stream the batches of the device.
"""

from offmarl.training.driver import start, train
from offmarl.training.program import Args, Program

__all__ = ["Args", "Program", "start", "train"]
