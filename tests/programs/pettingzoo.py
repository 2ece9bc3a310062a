"""A PettingZoo environment for the tests: agents of different sizes, one of which dies."""

import numpy as np
import pytest

pettingzoo = pytest.importorskip("pettingzoo", reason="needs pip install 'offmarl[pettingzoo]'")

from gymnasium import spaces  # noqa: E402


class Duel(pettingzoo.ParallelEnv):
    """A knight with a picture of 2x3 and a squire with a number; the squire falls at step 2.

    The episode is cut off at step 5, unless the knight does 3: then it has won.
    """

    metadata = {"name": "duel"}  # noqa: RUF012

    def __init__(self):
        self.possible_agents = ["knight", "squire"]
        self.agents = []
        self._observations = {
            "knight": spaces.Box(0, 255, (2, 3), np.uint8),
            "squire": spaces.Dict(
                {"observation": spaces.Discrete(3), "action_mask": spaces.Box(0, 1, (2,), np.int8)}
            ),
        }
        self._actions = {"knight": spaces.Discrete(4), "squire": spaces.Discrete(2, start=10)}

    def observation_space(self, agent):
        return self._observations[agent]

    def action_space(self, agent):
        return self._actions[agent]

    def reset(self, seed=None, options=None):
        self.agents = list(self.possible_agents)
        self.time, self.seed = 0, seed or 0
        return self._see(self.agents), self._tell(self.agents)

    def step(self, actions):
        before, self.time = self.agents, self.time + 1
        won = actions["knight"] == 3
        terminations = {a: won or (a == "squire" and self.time == 2) for a in before}
        truncations = dict.fromkeys(before, self.time == 5 and not won)
        rewards = {a: float(self.time + (a == "squire")) for a in before}
        self.agents = [a for a in before if not terminations[a] and not truncations[a]]
        return self._see(before), rewards, terminations, truncations, self._tell(before)

    def state(self):
        return np.array([self.time, self.seed], np.float64)

    def _see(self, agents):
        both = {
            "knight": np.full((2, 3), self.time, np.uint8),
            "squire": {"observation": 1, "action_mask": np.ones(2, np.int8)},
        }
        return {agent: both[agent] for agent in agents}

    def _tell(self, agents):
        mask = np.array([1, 0, 1, 1], np.int8)
        return {agent: {"action_mask": mask} if agent == "knight" else {} for agent in agents}
