"""Options of all swarm tasks, and properties that follow from them alone."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float

from offmarl.envs.base import require_positive
from offmarl.envs.swarm import dynamics
from offmarl.envs.swarm.dynamics import Kind
from offmarl.errors import OptionError
from offmarl.types import Continuous, Discrete

RANDOMISABLE = ("wind", "noise", "speed")
GAP = 1.0
"""Free space between two obstacles."""
_MOST_OBSTACLES = 0.25
"""Largest fraction of the arena: each obstacle needs a grid cell and free space around it."""


@dataclass(frozen=True, kw_only=True)
class SwarmOptions(ABC):
    """Options of all swarm tasks.

    Every agent observes its ``own`` position (from -1 to 1 along each axis of the arena), velocity,
    heading (cosine and sine; unicycles only), kind (heterogeneous teams only) and team (if there
    are two); then the parts of the task; then the 2 nearest ``obstacles`` in sight (if there are
    any; each: relative position, 1); then its nearest ``neighbours`` (each: relative position,
    relative velocity, kind, whether of the own team, message, 1). Relative positions are in units
    of the observer's sensing range, and objects out of sight are zeros. Unicycles observe
    everything in their own frame, whose first axis points ahead. The observation size does not
    depend on N; `read` splits an observation into its parts. Drones pass through each other unless
    the task says otherwise.

    Parameters
    ----------
    num_agents
        N, the (first) number in the name.
    name
        Name in the spec; `offmarl.envs.make` sets it.
    time_limit
        Steps of an episode.
    dims
        2 or 3.
    dynamics
        "velocity", "acceleration" or "unicycle": see `offmarl.envs.swarm.dynamics`.
    action
        "discrete": one motion per action. "continuous": the command, D numbers in [-1, 1].
    sensing_range
        Distance that a standard drone sees, in cells.
    num_neighbours
        Number of neighbours that an agent can observe.
    comm
        What agents broadcast; their neighbours observe it in the next view. "none": nothing.
        "status": defined by the task. "learned": a message chosen with the action, one of
        ``comm_size`` symbols (``action = motion * comm_size + symbol``) or, with continuous
        actions, that many numbers after the command.
    comm_size
        Size of a learned message.
    comm_range
        Distance that messages carry, in cells; a received message includes the sender's position.
    comm_dropout
        Probability that a message is lost, for each step and receiver.
    randomise
        What is drawn for each episode: "none", "all", or a combination joined by "+" of "wind" (any
        direction, up to 0.25 cells per step), "noise" (standard deviation up to 0.1 of observed
        positions and velocities, own and others') and "speed" (top speeds, within 25%).
    obstacles
        Fraction of the arena covered by obstacles: discs (balls) of radius 1. Drones slide along
        them.
    heterogeneous
        Make drones 0, 2, 4, ... scouts (20% faster, more agile, longer sight, half the strength)
        and the others lifters (20% slower, less agile, shorter sight).
    """

    num_agents: int
    name: str = ""
    time_limit: int = 50
    dims: int = 2
    dynamics: str = "velocity"
    action: str = "discrete"
    sensing_range: float = 5.0
    num_neighbours: int = 4
    comm: str = "none"
    comm_size: int = 4
    comm_range: float = 5.0
    comm_dropout: float = 0.0
    randomise: str = "none"
    obstacles: float = 0.0
    heterogeneous: bool = False

    def __post_init__(self) -> None:
        require_positive(
            num_agents=self.num_agents,
            time_limit=self.time_limit,
            sensing_range=self.sensing_range,
            num_neighbours=self.num_neighbours,
            comm_size=self.comm_size,
            comm_range=self.comm_range,
        )
        require_one_of("dims", self.dims, (2, 3))
        require_one_of("dynamics", self.dynamics, dynamics.DYNAMICS)
        require_one_of("action", self.action, ("discrete", "continuous"))
        require_one_of("comm", self.comm, ("none", "status", "learned"))
        _require_within("comm_dropout", self.comm_dropout, 1.0)
        _require_within("obstacles", self.obstacles, _MOST_OBSTACLES)
        for part in self._randomised:
            require_one_of("randomise", part, ("none", "all", *RANDOMISABLE))

    @property
    @abstractmethod
    def side(self) -> int:
        """Cells along one side of the arena: G."""

    @property
    def _num_drones(self) -> int:
        return self.num_agents

    @property
    def _num_acting(self) -> int:
        return self.num_agents

    @property
    def _teams(self) -> tuple[int, ...]:
        """The team of each drone."""
        return (0,) * self._num_drones

    @property
    def _reward(self) -> Literal["team", "individual"]:
        return "team"

    @property
    def _team_names(self) -> tuple[str, ...] | None:
        """Names of the teams, in the order of their numbers, if there are several."""
        return None

    @property
    def _kinds(self) -> tuple[Kind, ...]:
        if not self.heterogeneous:
            return (dynamics.STANDARD,) * self._num_drones
        return tuple((dynamics.SCOUT, dynamics.LIFTER)[i % 2] for i in range(self._num_drones))

    @property
    def _farthest_sight(self) -> float:
        """The largest sensing range of any drone."""
        return self.sensing_range * max(kind.sight for kind in self._kinds)

    @property
    def _labels(self) -> list[Float[np.ndarray, "P"]]:
        """Kind and team of each drone as numbers, if they differ."""
        labels = []
        if self.heterogeneous:
            labels.append(np.array([kind == dynamics.LIFTER for kind in self._kinds], np.float32))
        if len(set(self._teams[: self._num_acting])) > 1:
            labels.append(np.array(self._teams, np.float32))
        return labels

    @property
    def _randomised(self) -> tuple[str, ...]:
        return RANDOMISABLE if self.randomise == "all" else tuple(self.randomise.split("+"))

    @property
    def _num_obstacles(self) -> int:
        size = {2: np.pi, 3: 4 / 3 * np.pi}[self.dims] * dynamics.OBSTACLE_RADIUS**self.dims
        return round(self.obstacles * self.side**self.dims / size)

    @property
    def _motions(self) -> Float[np.ndarray, "A D"]:
        return dynamics.motions(self.dynamics, self.dims)

    @property
    def _action_space(self) -> Discrete | Continuous:
        learned = self.comm == "learned"
        if self.action == "discrete":
            return Discrete(len(self._motions) * (self.comm_size if learned else 1))
        return Continuous(self.dims + (self.comm_size if learned else 0))


def arena_side(num_agents: int, cells_per_agent: float, dims: int) -> int:
    """Return the side of an arena with so many cells per drone, in whole cells."""
    return max(2, round((num_agents * cells_per_agent) ** (1 / dims)))


def require_one_of(option: str, value: object, known: tuple[object, ...]) -> None:
    """Raise `OptionError` if an option does not have one of the known values."""
    if value not in known:
        choices = ", ".join(map(str, known))
        raise OptionError(f"{option} must be one of {choices}, not {value!r}.")


def _require_within(option: str, value: float, most: float) -> None:
    if not 0 <= value <= most:
        raise OptionError(f"{option} must be from 0 to {most}, not {value}.")
