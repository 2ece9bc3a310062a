"""A program that records a vault, and kills itself at a given event of its own; see test_kill."""

import os
import signal
import sys
from pathlib import Path

from offmarl import vault
from tests.vault.experience import SPEC, make

CHUNKS = 12


def record(path: Path) -> None:
    writer = (
        vault.resume(path) if path.exists() else vault.create(path, SPEC, rows=2, chunk_steps=16)
    )
    with writer:
        for chunk in range(CHUNKS):
            writer.append(*make(steps=7, seed=chunk), run="replay", chunk=chunk)
            if chunk % 3 == 2:
                writer.flush()
                print(chunk + 1, flush=True)


def main(path: str, kill_at: int) -> None:
    events = 0

    def tick(frame, event, arg):
        nonlocal events
        if "offmarl/vault" in frame.f_code.co_filename:
            events += 1
            if events == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(tick)
    record(Path(path))
    sys.setprofile(None)
    print("events", events)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
