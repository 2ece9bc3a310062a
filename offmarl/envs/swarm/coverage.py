"""Coverage: drones with short sight keep an area under survey.

A map of unit cells is laid over the arena. It holds the staleness of what is known of each cell: 0
while a drone's camera is on it, then growing, up to 1. The team is paid for the staleness it
removes, so it must spread out, and come back.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl.envs.base import require_positive, restart, transition
from offmarl.envs.swarm import engine
from offmarl.types import Discrete, EnvSpec, Timestep, View

_COMMANDS = engine.unit_commands()
_RESPONSE = 0.5
_SENSING_RANGE = 5.0
_PATCH = 5
_REWARD_SCALE = 10.0
_CAMERA = np.array([[0, 0], [0, 1], [1, 0], [1, 1]])


class CoverageState(NamedTuple):
    """The drones, and what they know."""

    bodies: engine.Bodies
    staleness: Float[Array, "G G"]
    time: Int[Array, ""]


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """N drones survey a square arena whose area grows with N.

    Each drone stays or commands a unit of speed along an axis (actions: stay, -x, +x, -y, +y), and
    its velocity follows with a lag; commands that lead out of the arena are illegal. Its camera
    covers the four cells nearest to it. Drones fly at different heights and never collide.

    The team's reward is ten times the staleness removed in the step, averaged over all cells: one
    episode's return is at most ``10 (1 + time_limit / recovery_time)`` (30 by default), whatever N;
    with the default options a random team gets about 9.5, and one in which each drone heads for the
    stale cells nearest to it about 20. (The scale is that of SMAC's returns, which the temperatures
    and weights of offline methods are tuned to.) Starts are random, nothing else is. Always
    truncated.

    An agent observes its own position (from -1 to 1) and velocity (4 numbers), the staleness around
    it (34, see `engine.sense_map`), and its nearest neighbours within 5 cells (5 each, see
    `engine.sense_neighbours`). The global state is all positions and velocities, and the whole map.

    Parameters
    ----------
    num_agents
        N, the number in the name.
    name
        What the spec calls it.
    time_limit
        Steps of an episode.
    cells_per_agent
        The area of the arena over N; its side is rounded to whole cells.
    recovery_time
        Steps in which a cell out of sight goes from 0 to 1.
    num_neighbours
        How many neighbours an agent can observe.
    """

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
        """Cells along one side of the arena: G."""
        return max(2, round(math.sqrt(self.num_agents * self.cells_per_agent)))

    @property
    def spec(self) -> EnvSpec:
        """Sizes, name and limit."""
        return EnvSpec(
            self.name,
            self.num_agents,
            observation_size=4 + _PATCH**2 + 9 + 5 * self.num_neighbours,
            state_size=4 * self.num_agents + self.side**2,
            action=Discrete(len(_COMMANDS)),
            time_limit=self.time_limit,
        )

    def reset(self, key: PRNGKeyArray) -> tuple[CoverageState, Timestep]:
        """Start an episode: drones at random places, everything out of their sight stale."""
        bodies = engine.spawn(key, self.num_agents, self.side)
        staleness = jnp.where(_watched(bodies.position, self.side), 0.0, 1.0)
        state = CoverageState(bodies, staleness, jnp.zeros((), jnp.int32))
        return state, restart(self._view(state))

    def step(
        self,
        key: PRNGKeyArray,  # noqa: ARG002
        state: CoverageState,
        action: Int[Array, "N"],
    ) -> tuple[CoverageState, Timestep]:
        """Move the drones, let knowledge age, and look."""
        bodies = engine.move(state.bodies, jnp.asarray(_COMMANDS)[action], _RESPONSE, self.side)
        aged = jnp.minimum(state.staleness + 1 / self.recovery_time, 1.0)
        staleness = jnp.where(_watched(bodies.position, self.side), 0.0, aged)
        after = CoverageState(bodies, staleness, state.time + 1)
        return after, transition(
            self._view(after),
            reward=jnp.full(self.num_agents, _REWARD_SCALE * (aged - staleness).mean()),
            terminated=jnp.zeros(self.num_agents, bool),
            truncated=jnp.full(self.num_agents, after.time >= self.time_limit),
        )

    def _view(self, state: CoverageState) -> View:
        bodies = state.bodies
        own = jnp.concatenate([2 * bodies.position / self.side - 1, bodies.velocity], -1)
        around = engine.sense_map(state.staleness, bodies.position, _PATCH)
        others = engine.sense_neighbours(bodies, self.num_neighbours, _SENSING_RANGE)
        return View(
            observation=jnp.concatenate([own, around, others], -1),
            state=jnp.concatenate([own.ravel(), state.staleness.ravel()]),
            legal_actions=engine.stays_inside(bodies.position, jnp.asarray(_COMMANDS), self.side),
            alive=jnp.ones(self.num_agents, bool),
        )


def _watched(position: Float[Array, "N 2"], side: int) -> Bool[Array, "G G"]:
    """Tell which cells are under a camera: those whose centres are the four nearest to a drone."""
    corner = jnp.floor(position - 0.5).astype(jnp.int32)
    cell = corner[:, None] + _CAMERA[None] + 1  # within a rim of one cell around the arena
    with_rim = jnp.zeros((side + 2, side + 2), bool)
    return with_rim.at[cell[..., 0], cell[..., 1]].set(True)[1:-1, 1:-1]
