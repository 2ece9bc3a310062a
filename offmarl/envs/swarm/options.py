"""Options of all swarm tasks, and properties that follow from them alone."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
from jaxtyping import Float

from offmarl.config import Fraction, PositiveInt, Rule, Validated
from offmarl.envs.base import ActionKind, among
from offmarl.envs.swarm import dynamics, quadrotor, randomisation
from offmarl.envs.swarm.dynamics import Kind
from offmarl.errors import OptionError
from offmarl.types import Continuous, Discrete

GAP = 1.0
"""Free space between two obstacles."""

Dims = Annotated[int, Rule("2 or 3", lambda x: x in (2, 3))]
Dynamics = Annotated[str, among("velocity", "acceleration", "unicycle", "quadrotor")]
Control = Annotated[str, among("rates", "motors")]
Comm = Annotated[str, among("none", "status", "learned")]
Collisions = Annotated[str, among("none", "elastic", "inelastic")]
Obstacles = Annotated[float, Rule("from 0 to 0.25", lambda x: 0 <= x <= 0.25)]
"""Each obstacle needs a grid cell and free space around it."""
Range = Annotated[float, Rule("above 0", lambda x: x > 0)]
"""A distance in cells, perhaps infinite."""


@dataclass(frozen=True, kw_only=True)
class SwarmOptions(Validated, ABC):
    """Options of all swarm tasks.

    Every agent observes its ``own`` position (from -1 to 1 along each axis of the arena), velocity,
    heading (cosine and sine; unicycles only), attitude and spin (quadrotors only: the nine entries
    of the rotation matrix and the angular velocity in the body's frame, in radians per step), kind
    (heterogeneous teams only) and team (if there are two); then the parts of the task; then the 2
    nearest ``obstacles`` in sight (if there are any; each: relative position, 1); then its nearest
    ``neighbours`` (each: relative position, relative velocity, kind, team, message, 1). Relative
    positions are in units of the observer's sensing range, and objects out of sight are zeros.
    Unicycles observe everything in their own frame, whose first axis points ahead. The observation
    size does not depend on N; `read` splits an observation into its parts.

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
        "velocity", "acceleration" or "unicycle": see `offmarl.envs.swarm.dynamics`; or "quadrotor"
        (with ``dims=3`` and continuous actions): see `offmarl.envs.swarm.quadrotor`.
    control
        Commands of quadrotors: "rates" (collective thrust and body rates) or "motors".
    action
        "discrete": one motion per action. "continuous": the command, D numbers in [-1, 1]; four for
        quadrotors.
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
        What is drawn for each episode: "none", or a combination joined by "+" of "wind" (any
        direction, up to 0.25 cells per step), "noise" (standard deviation up to 0.1 of observed
        positions and velocities, own and others'), and for each drone "speed" (top speed, within
        25%), "mass" and "thrust" (within 25%; the response to a command is proportional to thrust
        over mass), "drag" (half to twice; acceleration and quadrotor dynamics only), "delay" (0 to
        2 steps from a command to its effect) and "dropout" (in each step, with a probability up to
        0.3, an agent's sensors fail: it observes only ``own`` and ``time``, zeros otherwise).
        "all": wind, noise and speed. "full": everything that the dynamics has.
    obstacles
        Fraction of the arena covered by obstacles: discs (balls) of radius 1. Drones slide along
        them.
    opaque
        Obstacles block sight: agents, and scripted drones, do not observe what is behind one.
        Messages pass. An obstacle does not hide what is inside it. Of the nearest things in range,
        as many as can be observed and 4 more are checked.
    collisions
        "none": drones pass through each other. "elastic" and "inelastic": they are discs (balls) of
        radius 0.25; see `offmarl.envs.swarm.collisions`.
    heterogeneous
        Make drones 0, 2, 4, ... scouts (20% faster, more agile, longer sight, half the strength)
        and the others lifters (20% slower, less agile, shorter sight).
    """

    num_agents: PositiveInt
    name: str = ""
    time_limit: PositiveInt = 50
    dims: Dims = 2
    dynamics: Dynamics = "velocity"
    control: Control = "rates"
    action: ActionKind = "discrete"
    sensing_range: Range = 5.0
    num_neighbours: PositiveInt = 4
    comm: Comm = "none"
    comm_size: PositiveInt = 4
    comm_range: Range = 5.0
    comm_dropout: Fraction = 0.0
    randomise: str = "none"
    obstacles: Obstacles = 0.0
    opaque: bool = False
    collisions: Collisions = "none"
    heterogeneous: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.opaque and not self.obstacles:
            raise OptionError("there are no obstacles to block sight: give obstacles=0.1 too.")
        names = ("none", "all", "full", *randomisation.PARTS)
        if wrong := [name for name in self.randomise.split("+") if name not in names]:
            choices = ", ".join(names)
            raise OptionError(f"randomise must be of {choices}, joined by +, not {wrong[0]}.")
        if self.dynamics == "quadrotor" and (self.dims, self.action) != (3, "continuous"):
            raise OptionError(
                "quadrotors fly in three dimensions, and their actions are continuous: give "
                "dims=3 and action=continuous too."
            )
        if self.dynamics != "quadrotor" and self.control != "rates":
            raise OptionError(
                f"control={self.control} is for quadrotors: give dynamics=quadrotor too."
            )
        if "drag" in self._randomised and self.dynamics not in dynamics.WITH_DRAG:
            raise OptionError(
                f"{self.dynamics} dynamics have no drag to randomise: leave out drag, or give "
                f"dynamics={' or dynamics='.join(dynamics.WITH_DRAG)}."
            )

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
    def _randomised(self) -> set[str]:
        """The parts that are drawn for each episode."""
        has_drag = self.dynamics in dynamics.WITH_DRAG
        every = {part for part in randomisation.PARTS if has_drag or part != "drag"}
        sets = {"none": set[str](), "all": {*randomisation.DISTURBANCES}, "full": every}
        return set[str]().union(*(sets.get(name, {name}) for name in self.randomise.split("+")))

    @property
    def _num_obstacles(self) -> int:
        size = {2: np.pi, 3: 4 / 3 * np.pi}[self.dims] * dynamics.OBSTACLE_RADIUS**self.dims
        return round(self.obstacles * self.side**self.dims / size)

    @property
    def _motions(self) -> Float[np.ndarray, "A D"]:
        return dynamics.motions(self.dynamics, self.dims)

    @property
    def _command_size(self) -> int:
        """Numbers in the command of a drone."""
        return quadrotor.COMMAND_SIZE if self.dynamics == "quadrotor" else self.dims

    @property
    def _fastest(self) -> float:
        """A speed that drones hardly exceed, in cells per step."""
        top_speed = max(kind.top_speed for kind in self._kinds) * (1 + randomisation.SPREAD)
        return top_speed * (2 if self.dynamics == "quadrotor" else 1) + randomisation.WIND

    @property
    def _action_space(self) -> Discrete | Continuous:
        learned = self.comm == "learned"
        if self.action == "discrete":
            return Discrete(len(self._motions) * (self.comm_size if learned else 1))
        return Continuous(self._command_size + (self.comm_size if learned else 0))
