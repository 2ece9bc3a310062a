"""The options that all swarm tasks have, and what follows from them alone."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from offmarl.envs.base import require_positive
from offmarl.envs.swarm import dynamics
from offmarl.envs.swarm.dynamics import Kind
from offmarl.errors import OptionError
from offmarl.types import Continuous, Discrete

RANDOMISABLE = ("wind", "noise", "speed")
GAP = 1.0
"""Room to pass between any two obstacles."""
_MOST_OBSTACLES = 0.25
"""So that each fits into a cell of its own with room to pass."""


@dataclass(frozen=True, kw_only=True)
class SwarmOptions(ABC):
    """Options that all swarm tasks have, and what they share.

    Every agent observes its ``own`` position (from -1 to 1 along each axis of the arena) and
    velocity, its heading (cosine, sine; unicycles), kind (heterogeneous teams) and team (where
    there are two); then what the task says; then the 2 nearest ``obstacles`` in sight (where there
    are any; each: relative position, 1); then its nearest ``neighbours`` (each: relative position
    and velocity, kind, whether of the own team, message, 1). Relative positions are in units of the
    observer's range of sight, and things out of sight are zeros. Unicycles see all this in their
    own frame, whose first axis is straight ahead. The size does not depend on N; `read` takes an
    observation apart. Drones fly past one another freely where the task does not say otherwise.

    Parameters
    ----------
    num_agents
        N, the (first) number in the name.
    name
        What the spec calls it.
    time_limit
        Steps of an episode.
    dims
        2 or 3.
    dynamics
        "velocity", "acceleration" or "unicycle": see `offmarl.envs.swarm.dynamics`.
    action
        "discrete": a motion each. "continuous": the command itself, D numbers in [-1, 1].
    sensing_range
        How far a standard drone sees, in cells.
    num_neighbours
        How many neighbours an agent can observe.
    comm
        What agents broadcast, to be observed by their neighbours in the next view. "none".
        "status": what the task says. "learned": a message chosen along with the action, one of
        ``comm_size`` symbols (``action = motion * comm_size + symbol``) or, with continuous
        actions, that many numbers behind the command.
    comm_size
        Of a learned message.
    comm_range
        How far messages carry, in cells; hearing a drone also tells where it is.
    comm_dropout
        Probability that a message is lost, for each step and receiver.
    randomise
        What is drawn anew for each episode: "none", "all", or some of "wind" (any direction, up to
        0.25 cells a step), "noise" (standard deviation up to 0.1 in what drones know of positions
        and velocities, their own and others'), "speed" (top speeds, within 25%), joined by "+".
    obstacles
        Fraction of the arena that obstacles cover: discs (balls) of radius 1 that drones slide
        along.
    heterogeneous
        Make every other drone, from the first, a scout (20% faster, more agile and far-sighted,
        half as strong) and the others lifters (20% slower, less agile and short-sighted).
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
        """Team of each drone."""
        return (0,) * self._num_drones

    @property
    def _kinds(self) -> tuple[Kind, ...]:
        if not self.heterogeneous:
            return (dynamics.STANDARD,) * self._num_drones
        return tuple((dynamics.SCOUT, dynamics.LIFTER)[i % 2] for i in range(self._num_drones))

    @property
    def _farthest_sight(self) -> float:
        """How far the drone sees that sees furthest."""
        return self.sensing_range * max(kind.sight for kind in self._kinds)

    @property
    def _labels(self) -> list[Float[np.ndarray, "P"]]:
        """What tells drones apart, as numbers: the kind, and the team."""
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
    """Return the side of an arena in which drones have so many cells each, in whole cells."""
    return max(2, round((num_agents * cells_per_agent) ** (1 / dims)))


def require_one_of(option: str, value: object, known: tuple[object, ...]) -> None:
    """Raise `OptionError` for an option that has none of the values it can have."""
    if value not in known:
        choices = ", ".join(map(str, known))
        raise OptionError(f"{option} must be one of {choices}, not {value!r}.")


def _require_within(option: str, value: float, most: float) -> None:
    if not 0 <= value <= most:
        raise OptionError(f"{option} must be from 0 to {most}, not {value}.")
