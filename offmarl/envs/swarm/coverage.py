"""Coverage: a swarm with short sight keeps an area under survey.

Staleness is laid over the arena as a map of unit cells: 1 where nobody has looked for a long while,
0 under a drone's camera, growing back in between. The team is paid for the staleness it removes.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl.envs.base import require_positive, restart, transition
from offmarl.envs.swarm import engine
from offmarl.types import Discrete, EnvSpec, Timestep, View

_COMMANDS = engine.directions()
_RESPONSE = 0.5
_CAMERA = 1.0
_SENSING_RANGE = 5.0
_PATCH = 5


class CoverageState(NamedTuple):
    bodies: engine.Bodies
    staleness: Float[Array, "G G"]
    time: Int[Array, ""]


@dataclass(frozen=True, kw_only=True)
class Coverage:
    num_agents: int
    name: str = ""
    time_limit: int = 50
    cells_per_agent: float = 32.0
    recovery_time: float = 25.0
    num_neighbours: int = 4

    def __post_init__(self) -> None:
        require_positive(
            num_agents=self.num_agents,
            time_limit=self.time_limit,
            cells_per_agent=self.cells_per_agent,
            recovery_time=self.recovery_time,
            num_neighbours=self.num_neighbours,
        )

    @property
    def side(self) -> int:
        return max(3, round(math.sqrt(self.num_agents * self.cells_per_agent)))

    @property
    def spec(self) -> EnvSpec:
        observation = 4 + _PATCH**2 + 16 + self.num_neighbours * 5
        return EnvSpec(
            self.name,
            self.num_agents,
            observation,
            4 * self.num_agents + self.side**2,
            Discrete(len(_COMMANDS)),
            self.time_limit,
        )

    def reset(self, key: PRNGKeyArray) -> tuple[CoverageState, Timestep]:
        bodies = engine.spawn(key, self.num_agents, self.side)
        staleness = 1.0 - self._watched(bodies.position)
        state = CoverageState(bodies, staleness, jnp.zeros((), jnp.int32))
        return state, restart(self._view(state))

    def step(
        self, key: PRNGKeyArray, state: CoverageState, action: Int[Array, "N"]
    ) -> tuple[CoverageState, Timestep]:  # noqa: ARG002
        command = jnp.asarray(_COMMANDS)[action]
        bodies = engine.move(state.bodies, command, _RESPONSE, self.side)
        grown = jnp.minimum(state.staleness + 1 / self.recovery_time, 1.0)
        staleness = grown * (1.0 - self._watched(bodies.position))
        time = state.time + 1
        after = CoverageState(bodies, staleness, time)
        everyone = (self.num_agents,)
        return after, transition(
            self._view(after),
            reward=jnp.full(everyone, (grown - staleness).mean()),
            terminated=jnp.zeros(everyone, bool),
            truncated=jnp.full(everyone, time >= self.time_limit),
        )

    def _watched(self, position):
        centre = jnp.arange(self.side) + 0.5
        near = (jnp.abs(position[..., None] - centre) <= _CAMERA).astype(jnp.float32)
        seen_by = jnp.einsum("ix,iy->xy", near[:, 0], near[:, 1])
        return jnp.minimum(seen_by, 1.0)

    def _view(self, state):
        bodies = state.bodies
        own = jnp.concatenate([2 * bodies.position / self.side - 1, bodies.velocity], -1)
        cell = jnp.floor(bodies.position).astype(jnp.int32)
        cell = jnp.minimum(cell, self.side - 1)
        near = sense_map(state.staleness, cell, _PATCH)
        mid = sense_blocks(state.staleness, cell, _PATCH)
        far = sense_blocks(state.staleness, cell, 3 * _PATCH)
        others = engine.sense_neighbours(bodies, self.num_neighbours, _SENSING_RANGE, 1.0)
        return View(
            observation=jnp.concatenate([own, near, mid, far, others], -1),
            state=jnp.concatenate([own.ravel(), state.staleness.ravel()]),
            legal_actions=engine.stays_inside(bodies.position, jnp.asarray(_COMMANDS), self.side),
            alive=jnp.ones(self.num_agents, bool),
        )


def sense_map(field, cell, size):
    half = size // 2
    padded = jnp.pad(field, half)
    span = jnp.arange(size)
    rows = cell[:, 0, None] + span
    cols = cell[:, 1, None] + span
    return padded[rows[:, :, None], cols[:, None, :]].reshape(len(cell), -1)


def sense_blocks(field, cell, size):
    integral = jnp.pad(field.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    edges = np.arange(4) * size - size - size // 2
    rows = jnp.clip(cell[:, 0, None] + edges, 0, field.shape[0])
    cols = jnp.clip(cell[:, 1, None] + edges, 0, field.shape[1])
    corner = integral[rows[:, :, None], cols[:, None, :]]
    block = jnp.diff(jnp.diff(corner, axis=1), axis=2).reshape(len(cell), 9)
    return jnp.delete(block, 4, axis=1, assume_unique_indices=True) / size**2
