"""Pursuit: drones hunt faster drones.

An evader escapes any single pursuer; several pursuers must cut it off, using the walls.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from offmarl.envs.base import require_positive
from offmarl.envs.swarm import dynamics
from offmarl.envs.swarm.dynamics import Kind
from offmarl.envs.swarm.env import SwarmEnv
from offmarl.envs.swarm.neighbours import find_distance, find_points
from offmarl.envs.swarm.observations import Blocks, SwarmState, describe
from offmarl.envs.swarm.options import arena_side, require_one_of

_CATCH_RANGE = 1.0
_CATCH_REWARD = 10.0
_CLOSING_REWARD = 2.0
_OPPONENTS_SEEN = 3
_THREATS = 3
_WALL = 1.5
"""Distance within which fleeing evaders avoid walls."""


class PursuitTask(NamedTuple):
    """Progress of the hunt."""

    gap: Float[Array, ""]
    """Mean distance from the free evaders to their nearest pursuers, over the arena's side."""


@dataclass(frozen=True, kw_only=True)
class Pursuit(SwarmEnv):
    """N pursuers catch M evaders that are 20% faster, in a walled arena.

    An evader within 1 cell of a pursuer is caught: it is dead and stays in its place. When all
    evaders are caught, the episode terminates.

    The pursuers' reward for a catch at time t is ``10 (2 - t / time_limit) / M``. Catching all
    evaders in the first step would give 20, in the last step 10. In addition, pursuers get twice
    the decrease of the mean distance (over the arena's side) from the free evaders to the nearest
    pursuer of each.

    With ``evaders="learned"`` the evaders are agents too, listed after the pursuers, and form
    team 1. Rewards are then individual: an evader gets ``-10 (2 - t / time_limit)`` when it is
    caught, and terminates. With ``evaders="scripted"`` they flee from the 3 nearest pursuers in
    sight, from near ones more strongly, and avoid walls; without a pursuer in sight they rest.

    In addition to the common parts, an agent observes the 3 nearest live ``opponents`` in sight
    (each: relative position and velocity, 1). It broadcasts the relative position (in cells over
    10) of the nearest opponent that it sees, and whether there is one. The global state includes
    which agents are alive.

    Metrics: ``caught``, a fraction of the evaders.

    Parameters
    ----------
    num_agents, num_evaders
        N and M, the numbers in the name.
    evaders
        "scripted" or "learned".
    cells_per_agent
        The area (volume) of the arena over N; its side is rounded to whole cells.
    """

    num_evaders: int
    evaders: str = "scripted"
    cells_per_agent: float = 32.0
    sensing_range: float = 6.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_positive(num_evaders=self.num_evaders, cells_per_agent=self.cells_per_agent)
        require_one_of("evaders", self.evaders, ("scripted", "learned"))

    @property
    def side(self) -> int:
        """Cells along one side of the arena: G."""
        return arena_side(self.num_agents, self.cells_per_agent, self.dims)

    @property
    def _num_drones(self) -> int:
        return self.num_agents + self.num_evaders

    @property
    def _num_acting(self) -> int:
        return self._num_drones if self.evaders == "learned" else self.num_agents

    @property
    def _teams(self) -> tuple[int, ...]:
        return (0,) * self.num_agents + (1,) * self.num_evaders

    @property
    def _team_names(self) -> tuple[str, ...]:
        return ("pursuers", "evaders")

    @property
    def _kinds(self) -> tuple[Kind, ...]:
        return super()._kinds[: self.num_agents] + (dynamics.EVADER,) * self.num_evaders

    def metrics(self, state: SwarmState) -> dict[str, Float[Array, ""]]:
        """Return the fraction of evaders caught."""
        return {"caught": 1 - state.alive[self.num_agents :].mean(dtype=jnp.float32)}

    def _begin(self, key: PRNGKeyArray, state: SwarmState) -> PursuitTask:  # noqa: ARG002
        return PursuitTask(self._gap(state, self._closest(state)))

    def _closest(self, state: SwarmState) -> Float[Array, "M"]:
        """Return the distance from each evader to the nearest pursuer."""
        pursuers, evaders = jnp.split(state.drones.position, [self.num_agents])
        return find_distance(evaders, pursuers, self.side)

    def _gap(self, state: SwarmState, closest: Float[Array, "M"]) -> Float[Array, ""]:
        free = state.alive[self.num_agents :]
        return jnp.where(free, closest, 0.0).mean() / self.side

    def _advance(
        self,
        key: PRNGKeyArray,  # noqa: ARG002
        before: SwarmState,
        moved: SwarmState,
    ) -> tuple[SwarmState, Float[Array, "N"], Bool[Array, ""]]:
        closest = self._closest(moved)
        free = before.alive[self.num_agents :]
        caught = free & (closest <= _CATCH_RANGE)
        alive = before.alive.at[self.num_agents :].set(free & ~caught)
        after = moved._replace(alive=alive)
        gap = self._gap(after, closest)
        worth = _CATCH_REWARD * (2 - before.time / self.time_limit) * caught
        reward = worth.mean() + _CLOSING_REWARD * (before.task.gap - gap)
        rewards = jnp.concatenate([jnp.full(self.num_agents, reward), -worth])
        done = ~alive[self.num_agents :].any()
        return after._replace(task=PursuitTask(gap)), rewards[: self._num_acting], done

    def _drive_scripted(self, state: SwarmState) -> Float[Array, "Q D"]:
        """Return the commands of fleeing evaders."""
        if self.evaders == "learned":
            return super()._drive_scripted(state)
        pursuers = state.drones.position[: self.num_agents]
        position, velocity, heading = (part[self.num_agents :] for part in state.drones)
        reach = self._farthest_sight
        near = find_points(position, pursuers, _THREATS, reach, self.side)
        sight = state.params.sight[self.num_agents :, None]
        offset = jnp.where((near.distance <= sight)[..., None], pursuers[near.which], jnp.inf)
        desired = flee(position, offset - position[:, None], self.side)
        if self.dynamics == "unicycle":
            desired, velocity = (
                dynamics.to_frame(heading, x[:, None])[:, 0] for x in (desired, velocity)
            )
        top_speed = state.params.top_speed[self.num_agents :, None]
        return dynamics.command_towards(desired, velocity / top_speed, self.dynamics)

    def _sense(self, seen: SwarmState) -> Blocks:
        hunted = self._describe_others(seen, slice(0, self.num_agents), self._evaders)
        if self.evaders == "scripted":
            return {"opponents": hunted}
        hunters = self._describe_others(seen, self._evaders, slice(0, self.num_agents))
        return {"opponents": jnp.concatenate([hunted, hunters])}

    @property
    def _evaders(self) -> slice:
        return slice(self.num_agents, self._num_drones)

    def _describe_others(
        self, seen: SwarmState, observers: slice, others: slice
    ) -> Float[Array, "Q K F"]:
        position, velocity, heading = (part[observers] for part in seen.drones)
        theirs = seen.drones.position[others]
        sight = seen.params.sight[observers, None]
        free, reach = seen.alive[others], self._farthest_sight
        near = find_points(position, theirs, _OPPONENTS_SEEN, reach, self.side, free)
        offset = (theirs[near.which] - position[:, None]) / sight[..., None]
        relative = seen.drones.velocity[others][near.which] - velocity[:, None]
        offset, relative = (self._in_frame(heading, x) for x in (offset, relative))
        return describe(near.distance <= sight, offset, relative)

    def _status(self, state: SwarmState) -> Float[Array, "N C"]:
        nearest = self._sense(state)["opponents"][:, 0]
        sight = state.params.sight[: self._num_acting, None]
        return jnp.concatenate([nearest[:, : self.dims] * sight / 10, nearest[:, -1:]], -1)

    def _summary(self, state: SwarmState) -> Float[Array, "S"]:
        return state.alive.astype(jnp.float32)

    def _steer(self, see: Blocks) -> Float[Array, "N D"]:
        """Pursuers head for the future position of the nearest opponent; evaders flee."""
        dims = self.dims
        opponents, neighbours = see["opponents"], see["neighbours"]
        theirs = self._offsets(opponents)
        offset, known = theirs[:, 0], opponents[:, 0, -1:] > 0
        lead = opponents[:, 0, dims : 2 * dims] + see["own"][:, dims : 2 * dims]
        mean = self._offsets(neighbours).sum(1) / jnp.maximum(
            (neighbours[..., -1] > 0).sum(-1, keepdims=True), 1
        )
        apart = -mean / jnp.maximum(jnp.sqrt(jnp.square(mean).sum(-1, keepdims=True)), 1.0)
        distance = jnp.sqrt(jnp.square(offset).sum(-1, keepdims=True))
        desired = (
            offset + lead * jnp.minimum(distance, 3.0) + apart * jnp.minimum(distance / 3, 1.0)
        )
        home = -see["own"][:, None, :dims] * self.side / 2
        desired = jnp.where(known, desired, self._from_arena(see["own"], home)[:, 0] + 2 * apart)
        if self.evaders == "scripted":
            return desired
        threats = self._to_arena(see["own"], theirs)
        threats = jnp.where(opponents[..., -1:] > 0, threats, jnp.inf)
        away = flee((see["own"][:, :dims] + 1) * self.side / 2, threats, self.side)
        away = self._from_arena(see["own"], away[:, None])[:, 0]
        return jnp.where(jnp.asarray(self._teams)[:, None] == 1, away, desired)


def flee(
    position: Float[Array, "M D"], threats: Float[Array, "M K D"], side: float
) -> Float[Array, "M D"]:
    """Return the velocity that flees from threats at relative positions (infinite for none)."""
    squared = jnp.square(threats).sum(-1, keepdims=True)
    near = jnp.isfinite(squared)
    push = -jnp.where(near, threats, 0.0) / jnp.where(near, jnp.maximum(squared, 0.01), 1.0)
    push = push.sum(1)
    low, high = jnp.maximum(position, 0.1), jnp.maximum(side - position, 0.1)
    walls = jnp.where(low < _WALL, 1 / low, 0.0) - jnp.where(high < _WALL, 1 / high, 0.0)
    total = push + 0.3 * walls
    length = jnp.sqrt(jnp.square(total).sum(-1, keepdims=True))
    return jnp.where(near.any(1), total / jnp.maximum(length, 1e-6), 0.0)
