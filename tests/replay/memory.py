"""A source of windows in memory, with episodes of given lengths; and how tests draw windows."""

from pathlib import PurePath
from typing import NamedTuple

import jax
import numpy as np

from offmarl.types import Discrete, EnvSpec, Transition, View, flatten_view

at = jax.jit(lambda replay, slots: replay.at(slots))
sample = jax.jit(lambda replay, key: replay.sample(key))
"""Outside of `jit`, each call would be compiled anew."""

SPEC = EnvSpec("test", num_agents=2, observation_size=3, state_size=2, action=Discrete(3))


class Table(NamedTuple):
    row: np.ndarray
    start: np.ndarray
    length: np.ndarray
    final: np.ndarray


class MemorySource:
    """Rows of episodes, ``[[8, 50], [30, 28]]``, with random steps.

    Parameters
    ----------
    lengths
        Steps of the episodes of each row; all rows have as many steps.
    without_final
        Numbers of the episodes whose last view is not known.
    """

    path = PurePath("memory")
    spec = SPEC
    chunk_shape = 1, 16

    def __init__(self, lengths: list[list[int]], without_final: tuple[int, ...] = ()):
        rng = np.random.default_rng(0)
        self.rows, self.length = len(lengths), sum(lengths[0])
        lead = self.rows, self.length
        flat = [n for row in lengths for n in row]
        final = np.arange(len(flat))
        final[list(without_final)] = -1
        self.episodes = Table(
            row=np.repeat(np.arange(self.rows), [len(row) for row in lengths]),
            start=np.concatenate([np.cumsum(row) - row for row in lengths]),
            length=np.array(flat),
            final=final,
        )
        last = np.zeros(lead, bool)
        last[self.episodes.row, self.episodes.start + self.episodes.length - 1] = True
        terminated = last & (rng.random(lead) < 0.5)
        agents = (*lead, 2)
        view, action = self._views(rng, last.shape), rng.integers(0, 3, agents).astype(np.int32)
        np.put_along_axis(view.legal_actions, action[..., None].astype(np.int64), True, -1)
        self.steps = Transition(
            view=view,
            action=action,
            reward=rng.integers(-3, 4, agents).astype(np.float32),
            terminated=np.repeat(terminated[..., None], 2, -1),
            truncated=np.repeat((last & ~terminated)[..., None], 2, -1),
            last=last,
            behaviour_log_prob=-rng.random(agents).astype(np.float32),
            policy_id=np.zeros(agents, np.int32),
        )
        self.finals = self._views(rng, (len(flat),))

    @staticmethod
    def _views(rng: np.random.Generator, lead: tuple[int, ...]) -> View:
        return View(
            observation=rng.normal(size=(*lead, 2, 3)).astype(np.float32),
            state=rng.normal(size=(*lead, 2)).astype(np.float32),
            legal_actions=rng.random((*lead, 2, 3)) < 0.7,
            alive=rng.random((*lead, 2)) < 0.8,
        )

    def blocks(self):
        return ((start, min(start + 16, self.length)) for start in range(0, self.length, 16))

    def rewards(self, start, stop):
        return self.steps.reward[:, start:stop]

    def window_fields(self, rows, starts, length, index, out, at):
        assert (starts >= 0).all() and (starts + length <= self.length).all()
        fields = self.steps._asdict() | flatten_view(self.steps.view)
        for name, array in out.items():
            number, step = np.divmod(index[:, : array.shape[1]], length)
            values = fields[name][rows[number], starts[number] + step]
            array[slice(None) if at is None else at] = values

    def final_views(self, numbers):
        assert (numbers >= 0).all()
        return jax.tree.map(lambda x: x[numbers], self.finals)

    def prepare_fork(self):
        pass
