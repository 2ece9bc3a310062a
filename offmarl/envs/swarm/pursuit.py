"""Pursuit: drones hunt faster drones.

An evader escapes any single pursuer; several pursuers must cut it off, using the walls.
"""

from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from offmarl.config import PositiveInt
from offmarl.envs.base import among
from offmarl.envs.swarm import dynamics, quadrotor
from offmarl.envs.swarm.dynamics import Kind, length_of
from offmarl.envs.swarm.env import Advanced, GrowingArena
from offmarl.envs.swarm.neighbours import find_distance, find_neighbours
from offmarl.envs.swarm.observations import Blocks, SwarmState, describe
from offmarl.envs.swarm.options import Range
from offmarl.errors import OptionError

_CATCH_RANGE = 1.0
_CATCH_REWARD = 10.0
_CLOSING_REWARD = 2.0
_OPPONENTS_SEEN = 3
_THREATS = 3
_WALL = 1.5
"""Distance within which fleeing evaders avoid walls."""

Control = Annotated[str, among("scripted", "learned")]


class PursuitTask(NamedTuple):
    """Progress of the hunt."""

    gap: Float[Array, ""]
    """Mean distance from the free evaders to their nearest pursuers, over the arena's side."""


@dataclass(frozen=True, kw_only=True)
class Pursuit(GrowingArena):
    """N pursuers catch M evaders that are 20% faster, in a walled arena.

    An evader within 1 cell of a pursuer is caught: it is dead and stays in its place. When all
    evaders are caught, the episode terminates.

    The pursuers' reward for a catch at time t is ``10 (2 - t / time_limit) / M``. Catching all
    evaders in the first step would give 20, in the last step 10. In addition, pursuers get twice
    the decrease of the mean distance (over the arena's side) from the free evaders to the nearest
    pursuer of each.

    With ``evaders="learned"`` the evaders are agents too, listed after the pursuers: the teams are
    ``pursuers`` and ``evaders``. Rewards are then individual: an evader gets
    ``-10 (2 - t / time_limit)`` when it is caught, and terminates. With ``pursuers="scripted"``
    only the evaders are agents. `scripted` has a policy for either side; inside the environment,
    scripted drones act alike, but on exact positions and by continuous commands:

    - Evaders flee from the 3 nearest pursuers in sight, from near ones more strongly, and avoid
      walls; without a pursuer in sight they rest.
    - Pursuers head for the future position of the nearest evader in sight and keep apart; without
      an evader in sight they go to the centre.

    In addition to the common parts, an agent observes the ``time`` that rewards depend on,
    ``t / time_limit``, and the 3 nearest live ``opponents`` in sight (each: relative position and
    velocity, 1). It broadcasts the relative position (in cells over 10) of the nearest opponent
    that it sees, and whether there is one. The global state includes which drones are alive, and
    the time.

    Metrics: ``caught``, a fraction of the evaders.

    Parameters
    ----------
    num_agents, num_evaders
        N and M, the numbers in the name.
    evaders, pursuers
        "scripted" or "learned", and not both "scripted".
    """

    num_evaders: PositiveInt
    evaders: Control = "scripted"
    pursuers: Control = "learned"
    sensing_range: Range = 6.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.evaders == self.pursuers == "scripted":
            raise OptionError(
                "both sides of pursuit are scripted, so there are no agents: give "
                "evaders=learned, or leave out pursuers=scripted."
            )

    @property
    def _num_drones(self) -> int:
        return self.num_agents + self.num_evaders

    @property
    def _num_acting(self) -> int:
        sizes = {"pursuers": self.num_agents, "evaders": self.num_evaders}
        return sum(count for side, count in sizes.items() if getattr(self, side) == "learned")

    @property
    def _teams(self) -> tuple[int, ...]:
        sides = [(0,) * self.num_agents, (1,) * self.num_evaders]
        first, second = sides[::-1] if self.pursuers == "scripted" else sides
        return first + second

    @property
    def _pursuers(self) -> slice:
        begin = self._teams.index(0)
        return slice(begin, begin + self.num_agents)

    @property
    def _evaders(self) -> slice:
        begin = self._teams.index(1)
        return slice(begin, begin + self.num_evaders)

    @property
    def _acting_sides(self) -> list[tuple[slice, slice]]:
        """The drones of each side that acts, in order, and those of its opponents."""
        sides = [(self._pursuers, self._evaders), (self._evaders, self._pursuers)]
        return [pair for pair in sides if pair[0].start < self._num_acting]

    @property
    def _reward(self) -> Literal["team", "individual"]:
        return "individual" if self.evaders == "learned" else "team"

    @property
    def _team_names(self) -> tuple[str, ...]:
        return ("pursuers", "evaders")

    @property
    def _kinds(self) -> tuple[Kind, ...]:
        pursuers = iter(super()._kinds)
        return tuple(dynamics.EVADER if team else next(pursuers) for team in self._teams)

    def metrics(self, state: SwarmState) -> dict[str, Float[Array, ""]]:
        """Return the fraction of evaders caught."""
        return {"caught": 1 - state.alive[self._evaders].mean(dtype=jnp.float32)}

    def _begin(self, key: PRNGKeyArray, state: SwarmState) -> PursuitTask:
        return PursuitTask(self._gap(state, self._closest(state)))

    def _closest(self, state: SwarmState) -> Float[Array, "M"]:
        """Return the distance from each evader to the nearest pursuer."""
        position = state.drones.position
        return find_distance(position[self._evaders], position[self._pursuers], self.side)

    def _gap(self, state: SwarmState, closest: Float[Array, "M"]) -> Float[Array, ""]:
        free = state.alive[self._evaders]
        return jnp.where(free, closest, 0.0).mean() / self.side

    def _advance(self, key: PRNGKeyArray, before: SwarmState, moved: SwarmState) -> Advanced:
        closest = self._closest(moved)
        free = before.alive[self._evaders]
        caught = free & (closest <= _CATCH_RANGE)
        alive = before.alive.at[self._evaders].set(free & ~caught)
        after = moved._replace(alive=alive)
        gap = self._gap(after, closest)
        worth = _CATCH_REWARD * (2 - before.time / self.time_limit) * caught
        reward = worth.mean() + _CLOSING_REWARD * (before.task.gap - gap)
        rewards = jnp.full(self._num_drones, reward).at[self._evaders].set(-worth)
        done = ~alive[self._evaders].any()
        return after._replace(task=PursuitTask(gap)), rewards[: self._num_acting], done

    def _drive_scripted(self, state: SwarmState) -> Float[Array, "Q D"]:
        """Return the commands of the scripted side."""
        if self._num_acting == self._num_drones:
            return super()._drive_scripted(state)
        chasing = self.pursuers == "scripted"
        drones = self._pursuers if chasing else self._evaders
        desired = self._chase(state) if chasing else self._flee(state)
        _, velocity, heading, attitude, spin = dynamics.take_drones(state.drones, drones)
        top_speed = state.params.top_speed[drones, None]
        if attitude is not None and spin is not None:
            rotation = quadrotor.to_matrix(attitude)
            return quadrotor.command_towards(
                top_speed * desired, velocity, rotation, spin, top_speed, self.control
            )
        if self.dynamics == "unicycle":
            desired, velocity = (
                dynamics.to_frame(heading, x[:, None])[:, 0] for x in (desired, velocity)
            )
        return dynamics.command_towards(desired, velocity / top_speed, self.dynamics)

    def _flee(self, state: SwarmState) -> Float[Array, "M D"]:
        """Return the velocities of scripted evaders, along the axes of the arena."""
        position = state.drones.position[self._evaders]
        pursuers = state.drones.position[self._pursuers]
        near = self._spot(state, self._evaders, pursuers, _THREATS)
        seen = jnp.isfinite(near.distance)
        offset = jnp.where(seen[..., None], pursuers[near.which], jnp.inf)
        return flee(position, offset - position[:, None], self.side)

    def _chase(self, state: SwarmState) -> Float[Array, "N D"]:
        """Return the velocities of scripted pursuers, along the axes of the arena."""
        position, sight = state.drones.position[self._pursuers], state.params.sight[self._pursuers]
        evaders, velocity = (part[self._evaders] for part in state.drones[:2])
        near = self._spot(state, self._pursuers, evaders, 1, state.alive[self._evaders])
        reach = self._farthest_sight
        mates = find_neighbours(
            position, state.alive[self._pursuers], self.num_neighbours, reach, self.side
        )
        visible = self._visible(state, position, position[mates.which], reach)
        seen = (visible & (mates.distance <= sight[:, None]))[..., None]
        offsets = jnp.where(seen, position[mates.which] - position[:, None], 0.0)
        nearest = near.which[:, 0]
        return chase(
            evaders[nearest] - position,
            velocity[nearest],
            jnp.isfinite(near.distance),
            away_from(offsets, seen),
            self.side / 2 - position,
        )

    def _sense(self, measured: SwarmState) -> Blocks:
        opponents = [self._describe_others(measured, *sides) for sides in self._acting_sides]
        time = jnp.full((self._num_acting, 1), measured.time / self.time_limit)
        return {"time": time, "opponents": jnp.concatenate(opponents)}

    def _describe_others(
        self, measured: SwarmState, observers: slice, opponents: slice
    ) -> Float[Array, "Q K F"]:
        position, velocity, heading = (part[observers] for part in measured.drones[:3])
        targets = measured.drones.position[opponents]
        sight = measured.params.sight[observers, None]
        near = self._spot(measured, observers, targets, _OPPONENTS_SEEN, measured.alive[opponents])
        offset = (targets[near.which] - position[:, None]) / sight[..., None]
        relative = measured.drones.velocity[opponents][near.which] - velocity[:, None]
        offset, relative = (self._in_frame(heading, x) for x in (offset, relative))
        return describe(jnp.isfinite(near.distance), offset, relative)

    def _status(self, state: SwarmState) -> Float[Array, "N C"]:
        nearest = self._sense(state)["opponents"][:, :1]
        sight = state.params.sight[: self._num_acting, None]
        # Along the arena's axes: others do not know the heading of the sender.
        heading = state.drones.heading[: self._num_acting]
        offset = self._in_frame(-heading, nearest[..., : self.dims])[:, 0] * sight / 10
        return jnp.concatenate([offset, nearest[:, 0, -1:]], -1)

    def _summary(self, state: SwarmState) -> Float[Array, "S"]:
        alive = state.alive.astype(jnp.float32)
        return jnp.append(alive, state.time / self.time_limit)

    def _steer(self, see: Blocks) -> Float[Array, "N D"]:
        """Pursuers head for the future position of the nearest opponent; evaders flee."""
        dims = self.dims
        opponents, neighbours = see["opponents"], see["neighbours"]
        theirs = self._offsets(opponents)
        home = -see["own"][:, None, :dims] * self.side / 2
        mates, apart = neighbours[..., -1:] > 0, self._offsets(neighbours)
        if "scripted" not in (self.evaders, self.pursuers):  # then neighbours may be opponents
            place = 2 * dims + self.heterogeneous
            mates &= neighbours[..., place, None] == see["own"][:, None, -1:]
            apart = jnp.where(mates, apart, 0.0)
        hunt = chase(
            theirs[:, 0],
            opponents[:, 0, dims : 2 * dims] + see["own"][:, dims : 2 * dims],
            opponents[:, 0, -1:] > 0,
            away_from(apart, mates),
            self._from_arena(see["own"], home)[:, 0],
        )
        if self.evaders == "scripted":
            return hunt
        threats = self._to_arena(see["own"], theirs)
        threats = jnp.where(opponents[..., -1:] > 0, threats, jnp.inf)
        away = flee((see["own"][:, :dims] + 1) * self.side / 2, threats, self.side)
        away = self._from_arena(see["own"], away[:, None])[:, 0]
        teams = jnp.asarray(self._teams[: self._num_acting])
        return jnp.where(teams[:, None] == 1, away, hunt)


def away_from(offsets: Float[Array, "N K D"], seen: Bool[Array, "N K 1"]) -> Float[Array, "N D"]:
    """Return the direction away from the drones at relative positions (zero if not seen)."""
    mean = offsets.sum(1) / jnp.maximum(seen.sum(1), 1)
    return -mean / jnp.maximum(length_of(mean, keepdims=True), 1.0)


def chase(
    offset: Float[Array, "N D"],
    velocity: Float[Array, "N D"],
    known: Bool[Array, "N 1"],
    apart: Float[Array, "N D"],
    home: Float[Array, "N D"],
) -> Float[Array, "N D"]:
    """Return the velocities of pursuers towards an evader, if it is known, or else home."""
    distance = length_of(offset, keepdims=True)
    hunt = offset + velocity * jnp.minimum(distance, 3.0) + apart * jnp.minimum(distance / 3, 1.0)
    return jnp.where(known, hunt, home + 2 * apart)


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
    length = length_of(total, keepdims=True)
    return jnp.where(near.any(1), total / jnp.maximum(length, 1e-6), 0.0)
