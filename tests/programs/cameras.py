"""A PettingZoo environment with images: no display, no dependency."""

import numpy as np
import pytest

pettingzoo = pytest.importorskip("pettingzoo", reason="needs pip install 'offmarl[pettingzoo]'")

from gymnasium import spaces  # noqa: E402

SIZE = 6


class Chase(pettingzoo.ParallelEnv):
    """Two agents with cameras chase a light each on a field of 6 x 6; 1 for a step that ends on it.

    The image has three bytes a cell: the agent, its light, the other agent. Actions are to stay,
    up, down, left and right. The light moves on when it is caught.
    """

    metadata = {"name": "chase"}  # noqa: RUF012

    def __init__(self, length=12):
        self.possible_agents = ["red", "blue"]
        self.agents, self.length = [], length

    def observation_space(self, agent):
        return spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8)

    def action_space(self, agent):
        return spaces.Discrete(5)

    def reset(self, seed=None, options=None):
        self.random = np.random.default_rng(seed)
        self.agents, self.time = list(self.possible_agents), 0
        self.places, self.lights = self.random.integers(SIZE, size=(2, 2, 2))
        return self._see(), {agent: {} for agent in self.agents}

    def step(self, actions):
        moves = np.array([[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]])
        choices = [actions[agent] for agent in self.possible_agents]
        self.places = np.clip(self.places + moves[choices], 0, SIZE - 1)
        caught = (self.places == self.lights).all(-1)
        self.lights[caught] = self.random.integers(SIZE, size=(caught.sum(), 2))
        self.time += 1
        observations, over = self._see(), self.time == self.length
        agents, self.agents = self.agents, [] if over else self.agents
        rewards = dict(zip(agents, caught.astype(float).tolist(), strict=True))
        ends = dict.fromkeys(agents, False), dict.fromkeys(agents, over)
        return observations, rewards, *ends, {agent: {} for agent in agents}

    def _see(self):
        return {agent: self._image(i) for i, agent in enumerate(self.possible_agents)}

    def _image(self, i):
        image = np.zeros((SIZE, SIZE, 3), np.uint8)
        for channel, place in enumerate((self.places[i], self.lights[i], self.places[1 - i])):
            image[(*place, channel)] = 255
        return image


def chase(observations):
    """Move each agent towards its light, as its image shows it; return the actions."""
    return {agent: towards(image) for agent, image in observations.items()}


def towards(image):
    place, light = (np.argwhere(image[..., channel])[0] for channel in range(2))
    down, right = light - place
    if down:
        return 2 if down > 0 else 1
    return 0 if not right else 4 if right > 0 else 3
