"""What there is to draw of an environment at one instant, as plain arrays."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int

MARKS = ("target", "held target", "load", "heavy load", "site", "beacon")
"""What the numbers in `Scene.mark` mean."""


class Scene(NamedTuple):
    """Things and where they are, in arena coordinates: ``[0, side]`` along each of D axes."""

    side: int
    drones: Float[Array, "P D"]
    """Of all teams, scripted ones too."""
    alive: Bool[Array, "P"]
    team: Int[Array, "P"]
    kind: Int[Array, "P"]
    """Index into `offmarl.envs.swarm.bodies.KINDS`."""
    velocity: Float[Array, "P D"]
    heading: Float[Array, "P"]
    """Angle from the first axis to the second: a unicycle's heading, of others the course."""
    links: Int[Array, "N K"]
    """Whom each agent hears, -1 for nobody; K = 0 where drones do not communicate."""
    obstacles: Float[Array, "M D"]
    """Centres of discs (balls) of radius `offmarl.envs.swarm.bodies.OBSTACLE_RADIUS`."""
    marks: Float[Array, "Q D"]
    """Other points of interest."""
    mark: Int[Array, "Q"]
    """What each mark is: index into `MARKS`."""
    cells: Float[Array, "*G"]
    """A map of the arena with values in [0, 1]; of size 0 where the task has none."""
