"""A program that appends to a vault with others, and prints which of its episodes are durable."""

import sys
import time
from pathlib import Path

import numpy as np

from offmarl import vault
from offmarl.types import FinalObservations, Transition, View
from tests.vault.experience import SPEC, make
from tests.vault.killed import say


def episode(writer: int, number: int) -> tuple[Transition, FinalObservations]:
    """Return an episode that holds its writer's number in every leaf of every step."""
    length = 1 + (7 * number + writer) % 40
    transition, _ = make(rows=1, steps=length, seed=0, end_every=1e9)
    last = np.zeros((1, length), bool)
    last[:, -1] = True
    ends = np.repeat(last[..., None], SPEC.num_agents, -1)
    identity = np.float32(1000 * number + writer)
    view = View(
        np.full_like(transition.view.observation, identity),
        np.full_like(transition.view.state, identity),
        np.ones_like(transition.view.legal_actions),
        transition.view.alive,
    )
    transition = transition._replace(
        view=view,
        action=np.full_like(transition.action, writer),
        reward=np.full_like(transition.reward, identity),
        terminated=ends,
        truncated=np.zeros_like(ends),
        last=last,
        policy_id=np.full_like(transition.policy_id, number),
    )
    return transition, FinalObservations(
        np.zeros(1, int), np.full(1, length - 1), View(*(x[:, 0] for x in view))
    )


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
