"""Delivery: drones carry loads between sites; heavy loads need several drones.

A load moves with the drones next to it if they are strong enough. A drone alone with a heavy load
must call for help or fly on.
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl.config import PositiveInt
from offmarl.envs.base import MARKS
from offmarl.envs.swarm import dynamics
from offmarl.envs.swarm.dynamics import length_of
from offmarl.envs.swarm.env import Advanced, GrowingArena
from offmarl.envs.swarm.neighbours import Points, find_points, reduce_within
from offmarl.envs.swarm.observations import Blocks, SwarmState
from offmarl.envs.swarm.options import Comm, Range

_GRIP = 1.5
_ARRIVED = 1.5
_LIGHT, _HEAVY = 1.0, 3.0
_LOADS_SEEN = 3
_SITE_GAP = 4.5
_CARRY_REWARD = 0.5
_DELIVER_REWARD = 2.0


class DeliveryTask(NamedTuple):
    """The loads and the sites."""

    sites: Float[Array, "S D"]
    position: Float[Array, "M D"]
    goal: Int[Array, "M"]
    """Index of the site to deliver it to."""
    heavy: Bool[Array, "M"]
    carried: Bool[Array, "M"]
    """Whether the drones next to it are strong enough."""
    carrying: Int[Array, "N"]
    """The load that each drone grips, -1 for none."""
    delivered: Int[Array, ""]
    """Number of loads delivered so far."""


@dataclass(frozen=True, kw_only=True)
class Delivery(GrowingArena):
    """N drones, alternately scouts and lifters, carry loads from site to site.

    There are N loads, and a site for every two drones (at least three), at random positions. Each
    load is heavy with probability 0.5. A drone grips the nearest load within 1.5 cells. If the
    drones that grip a load have a total strength of 1, or 3 if it is heavy (a lifter and another,
    or three scouts), the load moves by the mean of their movements. Within 1.5 cells of its goal it
    is delivered, and a new load appears at a random site.

    The team's reward, divided by N: 0.5 for each cell that a load gets nearer to its goal (negative
    if it gets further away), and 2 when it is delivered; twice as much for heavy loads. Episodes
    are always truncated.

    In addition to the common parts, an agent observes the 3 nearest ``loads`` in sight (each:
    relative position, way from the load to its goal over 10 cells, whether heavy, whether carried,
    1). It broadcasts whether it grips a load, and whether that load needs more strength. The global
    state holds the loads' positions, goals, weights, and whether they are carried.

    Metrics: ``delivered``, loads so far over N; ``carried``, the fraction of loads on the move.
    """

    time_limit: PositiveInt = 80
    sensing_range: Range = 6.0
    comm: Comm = "status"
    comm_range: Range = 8.0
    heterogeneous: bool = True

    @property
    def num_sites(self) -> int:
        """Number of sites: S."""
        return max(3, self.num_agents // 2)

    def metrics(self, state: SwarmState) -> dict[str, Float[Array, ""]]:
        """Return loads delivered so far over N, and the fraction carried now."""
        return {
            "delivered": state.task.delivered / self.num_agents,
            "carried": state.task.carried.mean(dtype=jnp.float32),
        }

    def _begin(self, key: PRNGKeyArray, state: SwarmState) -> DeliveryTask:
        site_key, load_key = jax.random.split(key)
        sites = dynamics.scatter(site_key, self.num_sites, self.side, self.dims, _SITE_GAP)
        position, goal, heavy = self._new_loads(load_key, sites)
        none = jnp.zeros(self.num_agents, bool)
        free = jnp.full(self.num_agents, -1, jnp.int32)
        delivered = jnp.zeros((), jnp.int32)
        task = DeliveryTask(sites, position, goal, heavy, none, free, delivered)
        return self._grip(state, task)

    def _new_loads(
        self, key: PRNGKeyArray, sites: Float[Array, "S D"]
    ) -> tuple[Float[Array, "M D"], Int[Array, "M"], Bool[Array, "M"]]:
        """Draw where new loads appear, where they must go, and which are heavy."""
        source_key, goal_key, weight_key, place_key = jax.random.split(key, 4)
        loads = (self.num_agents,)
        source = jax.random.randint(source_key, loads, 0, self.num_sites)
        goal = source + jax.random.randint(goal_key, loads, 1, self.num_sites)
        heavy = jax.random.bernoulli(weight_key, 0.5, loads)
        scatter = jax.random.uniform(place_key, (*loads, self.dims), minval=-1.0, maxval=1.0)
        position = jnp.clip(sites[source] + scatter, 0.0, self.side)
        return position, goal % self.num_sites, heavy

    def _grip(self, state: SwarmState, task: DeliveryTask) -> DeliveryTask:
        """Update which drone grips which load, and which loads are carried."""
        near = find_points(state.drones.position, task.position, 1, _GRIP, self.side)
        carrying = jnp.where(jnp.isfinite(near.distance), near.which, -1)[:, 0]
        strength = jax.ops.segment_sum(state.params.strength, carrying, self.num_agents)
        carried = strength >= jnp.where(task.heavy, _HEAVY, _LIGHT)
        return task._replace(carried=carried, carrying=carrying)

    def _haul(self, before: SwarmState, moved: SwarmState) -> Float[Array, "M D"]:
        """Return the mean movement of the drones that grip each load."""
        load = jnp.arange(self.num_agents)

        def add(
            total: Float[Array, "S M"],
            squared: Float[Array, "C M"],
            carrying: Int[Array, "C M"],
            *steps: Float[Array, "C M"],
        ) -> Float[Array, "S M"]:
            grips = (carrying == load) & jnp.isfinite(squared)
            sums = [jnp.where(grips, step, 0.0).sum(0) for step in (*steps, jnp.ones(()))]
            return total + jnp.stack(sums)

        # A scatter-add would differ between runs on a GPU.
        start, task = before.drones.position, before.task
        values = (task.carrying, *(moved.drones.position - start).T)
        grippers = Points(start, before.alive, values)
        nothing = jnp.zeros((self.dims + 1, self.num_agents))
        total = reduce_within(add, nothing, task.position, grippers, _GRIP, self.side)
        return (total[:-1] / jnp.maximum(total[-1], 1)).T

    def _advance(self, key: PRNGKeyArray, before: SwarmState, moved: SwarmState) -> Advanced:
        task = before.task
        step = jnp.where(task.carried[:, None], self._haul(before, moved), 0.0)
        position = task.position + step
        goal = task.sites[task.goal]
        distance = length_of(goal - position)
        arrived = distance <= _ARRIVED
        gained = (
            _CARRY_REWARD * (length_of(goal - task.position) - distance) + _DELIVER_REWARD * arrived
        )
        reward = (jnp.where(task.heavy, 2.0, 1.0) * gained).mean()
        new_position, new_goal, new_heavy = self._new_loads(key, task.sites)
        after = task._replace(
            position=jnp.where(arrived[:, None], new_position, position),
            goal=jnp.where(arrived, new_goal, task.goal),
            heavy=jnp.where(arrived, new_heavy, task.heavy),
            delivered=task.delivered + arrived.sum(dtype=jnp.int32),
        )
        after = self._grip(moved, after)
        rewards = jnp.full(self.num_agents, reward)
        return moved._replace(task=after), rewards, jnp.zeros((), bool)

    def _sense(self, measured: SwarmState) -> Blocks:
        task = measured.task
        way = (task.sites[task.goal] - task.position) / 10
        flags = jnp.stack([task.heavy, task.carried], -1).astype(jnp.float32)
        features = jnp.concatenate([way, flags], -1)
        loads = self._sense_points(measured, task.position, _LOADS_SEEN, features)
        dims = self.dims
        way = self._in_frame(measured.drones.heading, loads[..., dims : 2 * dims])
        return {"loads": loads.at[..., dims : 2 * dims].set(way)}

    def _status(self, state: SwarmState) -> Float[Array, "N C"]:
        task = state.task
        grips = task.carrying >= 0
        calls = grips & ~task.carried[task.carrying]
        return jnp.stack([grips, calls], -1).astype(jnp.float32)

    def _summary(self, state: SwarmState) -> Float[Array, "S"]:
        task = state.task
        position = 2 * task.position / self.side - 1
        goal = 2 * task.sites[task.goal] / self.side - 1
        flags = jnp.stack([task.heavy, task.carried], -1)
        return jnp.concatenate([position, goal, flags], -1).ravel()

    def _marks(self, state: SwarmState) -> tuple[Float[Array, "Q D"], Int[Array, "Q"]]:
        task = state.task
        load = jnp.where(task.heavy, MARKS.index("heavy load"), MARKS.index("load"))
        site = jnp.full(self.num_sites, MARKS.index("site"))
        return jnp.concatenate([task.position, task.sites]), jnp.concatenate([load, site])

    def _steer(self, see: Blocks) -> Float[Array, "N D"]:
        """Carry a moving load, help a caller or wait for help, else go to the nearest load."""
        dims, loads = self.dims, see["loads"]
        offset, way = self._offsets(loads), 10 * loads[..., dims : 2 * dims]
        heavy, carried, known = (loads[..., i] > 0 for i in (-3, -2, -1))
        distance = jnp.where(known, length_of(offset), jnp.inf)
        grips, moves = distance[:, 0] <= _GRIP, carried[:, 0]
        neighbours = self._offsets(see["neighbours"])
        # Without the neighbours' messages, nothing tells which of them grip a load.
        busy = (see["neighbours"][..., -3] > 0) & (self.comm == "status")
        near = length_of(neighbours[:, :, None] - offset[:, None]) <= _GRIP
        held = (busy[..., None] & near).any(1)
        worth = ~carried & (heavy | ~held)
        cost = distance - jnp.where(heavy & held, 4.0, 0.0)
        best = jnp.where(worth & known, cost, jnp.inf).argmin(-1)
        fetch = jnp.take_along_axis(offset, best[:, None, None], 1)[:, 0]
        nothing = ~(worth & known).any(-1)
        home = self._from_arena(see["own"], -self.side / 2 * see["own"][:, None, :dims])[:, 0]
        fetch = jnp.where(nothing[:, None], home, fetch)
        return jnp.where((grips & moves)[:, None], way[:, 0] + 0.5 * offset[:, 0], fetch)
