"""The environment protocol, scenes to draw, and autoreset."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray
from numpy.typing import NDArray

from offmarl.config import Rule
from offmarl.types import ArrayTree, Continuous, EnvSpec, Timestep, View


def among(*choices: str) -> Rule:
    """Return the rule that an option is one of several words."""
    return Rule(f"one of {', '.join(choices)}", choices.__contains__)


ActionKind = Annotated[str, among("discrete", "continuous")]

EnvState = Any
"""The state of an environment: a pytree of arrays; only the environment reads it."""

_PARTS = 8
"""Maximum number of parts of a batch that are reset one after the other; see `_reset_if`."""


@runtime_checkable
class Environment(Protocol):
    """A multi-agent environment as pure functions, which can be jitted, vmapped and scanned.

    One environment, no batch axis. The environment never resets itself: after a step with ``last``
    true, `autoreset` (or the caller) starts a new episode. An environment must be hashable, since
    it is a static argument of compiled programs: a frozen dataclass is. If it also has a method
    ``scene(state) -> Scene``, its episodes can be drawn. One that draws by itself returns any
    arrays from ``scene``, and has a method ``pictures(scenes)``, which returns an RGB image,
    ``(height, width, 3)`` uint8, of each of several consecutive scenes. If its spec names extras,
    it has a method ``extras(key, state)``, which returns those of the step that ``step(key, state,
    action)`` takes, unless they are all in the timesteps (`Timestep.extras`).
    """

    @property
    def spec(self) -> EnvSpec:
        """Sizes, names and limits; static."""
        ...

    def reset(self, key: PRNGKeyArray) -> tuple[EnvState, Timestep]:
        """Start an episode: zero rewards, and ``view`` equals ``next_view``."""
        ...

    def step(self, key: PRNGKeyArray, state: EnvState, action: Array) -> tuple[EnvState, Timestep]:
        """Take one step with the actions of all agents, ``(N,)`` int32 or ``(N, A)`` float32."""
        ...


def extras_of(env: Any, key: PRNGKeyArray, state: EnvState) -> dict[str, Array]:
    """Return the extras of the step that ``env.step(key, state, action)`` takes."""
    if not env.spec.extras or not hasattr(env, "extras"):
        return {}
    extras: dict[str, Array] = env.extras(key, state)
    return extras


def restart(view: View) -> Timestep:
    """Build the first timestep of an episode."""
    num_agents = view.alive.shape[0]
    none = jnp.zeros(num_agents, bool)
    return Timestep(view, view, jnp.zeros(num_agents), none, none, jnp.zeros((), bool))


def transition(
    view: View,
    reward: Float[Array, "N"],
    terminated: Bool[Array, "N"],
    truncated: Bool[Array, "N"],
    shaping: Float[Array, "N"] | None = None,
    won: Bool[Array, ""] | None = None,
) -> Timestep:
    """Build the timestep of a step; the episode ends when it has ended for every agent."""
    last = (terminated | truncated).all()
    return Timestep(view, view, reward, terminated, truncated, last, shaping, won=won)


def no_action(spec: EnvSpec) -> NDArray[Any]:
    """Return zeros of the shape and type of a joint action."""
    if isinstance(spec.action, Continuous):
        return np.zeros((spec.num_agents, spec.action_size), np.float32)
    return np.zeros(spec.num_agents, np.int32)


def has_shaping(env: Environment) -> bool:
    """Whether the steps of an environment have shaped rewards (`Timestep.shaping`)."""
    key = jax.random.key(0)
    state, _ = jax.eval_shape(env.reset, key)
    _, timestep = jax.eval_shape(env.step, key, state, no_action(env.spec))
    return timestep.shaping is not None


MARKS = ("target", "held target", "load", "heavy load", "site", "beacon")
"""Names of the numbers in `Scene.mark`."""


class Scene(NamedTuple):
    """What to draw at one instant, in arena coordinates: ``[0, side]`` along each of D axes."""

    side: int
    drones: Float[Array, "P D"]
    """Positions of the drones of all teams, including scripted ones."""
    alive: Bool[Array, "P"]
    team: Int[Array, "P"]
    kind: Int[Array, "P"]
    """Index into `offmarl.envs.swarm.dynamics.KINDS`."""
    heading: Float[Array, "P"]
    """Angle from the first axis to the second: heading of unicycles, course of others."""
    links: Int[Array, "N K"]
    """Drones that each agent hears, -1 for none; K = 0 without communication."""
    obstacles: Float[Array, "M D"]
    """Centres of discs (balls) of radius `offmarl.envs.swarm.dynamics.OBSTACLE_RADIUS`."""
    marks: Float[Array, "Q D"]
    """Other points of interest."""
    mark: Int[Array, "Q"]
    """Kind of each mark: index into `MARKS`."""
    cells: Float[Array, "*G"]
    """A map of the arena with values in [0, 1]; of size 0 if there is none."""
    attitude: Float[Array, "P 4"] | None = None
    """Unit quaternions (w, x, y, z) from the body of a quadrotor to the arena; None for points."""


def plain_scene(side: int, drones: Float[Array, "P D"], **more: Array) -> Scene:
    """Return a scene of agents of one kind; by default all are alive and of one team."""
    count, dims = drones.shape
    empty = {
        "alive": jnp.ones(count, bool),
        "team": jnp.zeros(count, jnp.int32),
        "kind": jnp.zeros(count, jnp.int32),
        "heading": jnp.zeros(count),
        "links": jnp.zeros((count, 0), jnp.int32),
        "obstacles": jnp.zeros((0, dims)),
        "marks": jnp.zeros((0, dims)),
        "mark": jnp.zeros(0, jnp.int32),
        "cells": jnp.zeros(0),
    }
    return Scene(side, drones, **(empty | more))


@dataclass(frozen=True)
class Wrapper:
    """A wrapper around an environment, which passes on all attributes that it does not define."""

    env: Any

    # Python looks up the methods of a protocol in the class.

    def reset(self, key: PRNGKeyArray) -> tuple[EnvState, Timestep]:
        """Start an episode."""
        return self.env.reset(key)

    def step(self, key: PRNGKeyArray, state: EnvState, action: Array) -> tuple[EnvState, Timestep]:
        """Take one step."""
        return self.env.step(key, state, action)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "env":  # which copying and pickling look up first
            raise AttributeError(name)
        return getattr(self.env, name)


@dataclass(frozen=True)
class AutoReset(Wrapper):
    """An environment that starts a new episode in the step that ends one.

    The returned ``view`` is then the first of the new episode, while ``next_view``, ``reward``,
    ``terminated``, ``truncated`` and ``last`` still describe the step taken.

    Parameters
    ----------
    env
        The environment.
    """

    @property
    def spec(self) -> EnvSpec:
        """The spec of the wrapped environment."""
        return self.env.spec

    def step(self, key: PRNGKeyArray, state: EnvState, action: Array) -> tuple[EnvState, Timestep]:
        """Take one step, and reset if it was the last of its episode."""
        step_key, reset_key = jax.random.split(key)
        state, timestep = self.env.step(step_key, state, action)
        state, view = _reset_if(timestep.last, reset_key, (state, timestep.view), self._first)
        return state, timestep._replace(view=view)

    def extras(self, key: PRNGKeyArray, state: EnvState) -> dict[str, Array]:
        """Return the extras of the step that ``step(key, state, action)`` takes."""
        step_key, _ = jax.random.split(key)
        return extras_of(self.env, step_key, state)

    def _first(self, key: PRNGKeyArray) -> tuple[EnvState, View]:
        state, timestep = self.env.reset(key)
        return state, timestep.view


def _reset_if(
    over: Bool[Array, ""],
    key: PRNGKeyArray,
    old: ArrayTree,
    begin: Callable[[PRNGKeyArray], ArrayTree],
) -> ArrayTree:
    """Return ``begin(key)`` if the episode is over, and ``old`` if not.

    Under vmap, ``begin`` runs for a few ended episodes at a time, in a loop. Plain batching of a
    condition would run it for the whole batch in every step, which can cost many times the step.
    """

    @jax.custom_batching.custom_vmap
    def reset_many(over: Bool[Array, "B"], keys: Key[Array, "B"], old: ArrayTree) -> ArrayTree:
        return _reset_in_parts(over, keys, old, begin)

    @reset_many.def_vmap
    def reset_batches(
        size: int, batched: ArrayTree, *args: ArrayTree
    ) -> tuple[ArrayTree, ArrayTree]:
        batch = jax.tree.map(
            lambda is_batched, x: x if is_batched else jnp.broadcast_to(x, (size, *x.shape)),
            tuple(batched),
            args,
        )
        flat = jax.tree.map(lambda x: jax.lax.collapse(x, 0, 2), batch)
        count = batch[0].shape[1]
        new = jax.tree.map(lambda x: x.reshape(size, count, *x.shape[1:]), reset_many(*flat))
        return new, jax.tree.map(lambda _: True, new)

    single = jax.tree.map(lambda x: x[None], (over, key, old))
    return jax.tree.map(lambda x: x[0], reset_many(*single))


def _reset_in_parts(
    over: Bool[Array, "B"],
    keys: Key[Array, "B"],
    old: ArrayTree,
    begin: Callable[[PRNGKeyArray], ArrayTree],
) -> ArrayTree:
    size = over.shape[0]
    if size == 1:  # XLA would hoist the loop-invariant reset out of the loop and always run it
        return jax.lax.cond(over[0], lambda: jax.vmap(begin)(keys), lambda: old)
    few = -(-size // _PARTS)
    (who,) = jnp.nonzero(over, size=few * _PARTS, fill_value=size)

    def reset_part(start: Array, old: ArrayTree) -> tuple[Array, ArrayTree]:
        rows = jax.lax.dynamic_slice(who, (start,), (few,))
        fresh = jax.vmap(begin)(keys[rows])
        old = jax.tree.map(lambda x, y: x.at[rows].set(y, mode="drop"), old, fresh)
        return start + few, old

    initial = (jnp.zeros((), jnp.int32), old)
    return jax.lax.while_loop(lambda x: x[0] < over.sum(), lambda x: reset_part(*x), initial)[1]


def autoreset(env: Environment) -> AutoReset:
    """Wrap an environment so that it starts a new episode when one ends; see `AutoReset`."""
    return AutoReset(env)
