"""The state of swarm tasks."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int

from offmarl.envs.swarm.bodies import Bodies, Traits
from offmarl.types import ArrayTree


class Weather(NamedTuple):
    """What the world is like in an episode."""

    wind: Float[Array, "D"]
    """Its velocity, in cells a step."""
    noise: Float[Array, ""]
    """Standard deviation of the drones' errors about position (cells) and velocity (cells/step)."""


class SwarmState(NamedTuple):
    """All that a task depends on. P counts all drones: the agents, then scripted ones."""

    bodies: Bodies
    """``(P, ...)``"""
    alive: Bool[Array, "P"]
    traits: Traits
    """``(P,)``"""
    weather: Weather
    obstacles: Float[Array, "M D"] | None
    """Their centres."""
    message: Float[Array, "N C"] | None
    """What each agent broadcasts."""
    task: ArrayTree
    """The task's own."""
    time: Int[Array, ""]


Blocks = dict[str, Float[Array, "N ..."]]
"""The parts of the observations by name."""
