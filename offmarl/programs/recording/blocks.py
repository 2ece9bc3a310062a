"""Recording of a fixed policy in blocks, which many tasks share.

The number of blocks and their random keys depend on the recording only. A block is a vault with one
row for each environment; its episodes begin and end in it. The recording is the blocks one after
the other, so that it does not depend on which task recorded which block.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from offmarl import tracking, vault
from offmarl.config import PositiveInt, check_rules
from offmarl.errors import OptionError
from offmarl.launch import Work
from offmarl.paths import local_output
from offmarl.programs.recording.record import (
    CHUNK,
    HINTS,
    Recording,
    is_complete,
    recorded_return,
    recording_layout,
    software,
)
from offmarl.programs.recording.recorder import fold_key
from offmarl.vault.format import layout
from offmarl.vault.transform.execute import join_rows

_BLOCKS = 2
"""Purpose of the random key of blocks."""
_MOST_BLOCKS = 1024
_LEAST_STEPS = 128
"""Least number of time steps of a block."""
_LEAST_EPISODES = 4
"""Episodes that fit into a block, one after the other: the last ones are cut."""
_PROCESS_BYTES = 6e8
"""Memory of a process that runs JAX, in addition to the data."""
_BUFFERS = 4
"""Buffers of one chunk that a recording has in memory at the same time."""


class RecordWork(Work):
    """A recording in blocks of ``block_steps`` environment steps.

    By default there are at most 1,024, each with room for four episodes in each environment.
    `OptionError` if a number is not positive, or the recording is divided over devices.
    """

    hints = HINTS

    def __init__(self, recording: Recording, block_steps: int | None = None):
        env, num_envs = recording.env, recording.num_envs
        check_rules("block_steps", PositiveInt | None, block_steps)
        if recording.devices is not None:
            raise OptionError(
                "--devices divides the environments of one program, and a task records its blocks "
                "on one device: divide the recording by tasks or by devices."
            )
        self.recording = recording
        self.times = block_times(recording.steps, num_envs, env.spec.time_limit, block_steps)
        self._row = -(-recording.steps // num_envs)
        num_blocks = -(-self._row // self.times)
        path = local_output(recording.path)
        identity = recording.recipe | {"blocks": [num_blocks, self.times]}
        super().__init__(f"record {path.name}", path, identity, num_blocks)

    def run(self, block: int) -> None:
        """Record a block, or continue it from its last checkpoint."""
        recording = self.recording
        replace(
            recording,
            path=self._vault(block),
            steps=self.times * recording.num_envs,
            key=fold_key(recording.seed, _BLOCKS, block),
            identity={"seed": recording.seed, "block": [block, self.num_blocks]},
            provenance=dict,
        ).record()

    def cuts_episodes(self) -> bool:
        """Whether a block is shorter than an episode may be, and than the whole recording."""
        return self.times < min(self._row, self.recording.env.spec.time_limit or 0)

    def is_complete(self) -> bool:
        """Whether the recording exists, joined."""
        return is_complete(self.path, self.identity)

    def join(self) -> None:
        """Write the blocks one after the other into the vault of the recording."""
        blocks = [vault.open_vault(self._vault(block)) for block in range(self.num_blocks)]
        spec, rows, length = blocks[0].spec, blocks[0].rows, sum(block.length for block in blocks)
        about = dict(self.recording.provenance())
        about |= {"recipe": self.identity, **software(spec.name), "complete": True}
        join_rows(
            blocks,
            self.path,
            lambda reader: {**about, "recorded": recorded_return(reader, self.times)},
            tracking.progress,
            chunk_steps=layout.default_chunk_steps(spec, rows, length),
        )

    def plan(self, tasks: int | None) -> dict[str, Any]:
        """Return sizes: environment steps, bytes on disk in whole chunks, memory of a task."""
        num_envs = self.recording.num_envs
        spec, _ = recording_layout(self.recording.env, first_id=1)
        step_bytes = sum(leaf.step_bytes for leaf in layout.leaves(spec).values())
        chunk = min(self.times, CHUNK) * num_envs * step_bytes
        total, block = (
            layout.stored_bytes(spec, num_envs, times)
            for times in (self.num_blocks * self.times, self.times)
        )
        return super().plan(tasks) | {
            "steps": self.num_blocks * self.times * num_envs,
            "steps of a block": self.times * num_envs,
            "bytes": total,
            "bytes while joining": total + self.num_blocks * block,
            "memory of a task": int(_PROCESS_BYTES + _BUFFERS * chunk),
        }

    def _vault(self, block: int) -> Path:
        return self.directory / "blocks.vlt" / f"{block:06d}"


def block_times(steps: int, num_envs: int, time_limit: int | None, block_steps: int | None) -> int:
    """Return the number of time steps of a block, which all blocks have."""
    row = -(-steps // num_envs)
    if block_steps is not None:
        return min(-(-block_steps // num_envs), row)
    least = max(_LEAST_STEPS, _LEAST_EPISODES * (time_limit or 0))
    blocks = min(_MOST_BLOCKS, max(row // least, 1))
    return -(-row // blocks)
