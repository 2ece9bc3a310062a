"""A program that appends to a vault with others, and prints which of its episodes are durable."""

import sys
import time
from pathlib import Path

import numpy as np

from offmarl import vault
from offmarl.types import FinalObservations, Transition
from tests.vault.experience import SPEC, whole_episodes
from tests.vault.killed import say


def episode(writer: int, number: int) -> tuple[Transition, FinalObservations]:
    """Return an episode that only this writer has; its actions and policies are the numbers."""
    length = 1 + (7 * number + writer) % 40
    transition, finals = whole_episodes(SPEC, 1, length, 1000 * number + writer, end_every=1e9)
    all_legal = np.ones_like(transition.view.legal_actions)
    transition = transition._replace(
        view=transition.view._replace(legal_actions=all_legal),
        action=np.full_like(transition.action, writer),
        policy_id=np.full_like(transition.policy_id, number),
    )
    return transition, finals


def main(path: Path, name: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    with vault.join(path, f"writer {name}") as writer:
        number = 0
        while time.monotonic() < end:
            writer.append(*episode(name, number), chunk=number)
            number += 1
            if writer.chunks() == number:
                say(number)
    say(number)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
