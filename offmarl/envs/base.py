"""The environment protocol, and autoreset."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key, PRNGKeyArray

from offmarl.errors import OptionError
from offmarl.types import ArrayTree, EnvSpec, Timestep, View

EnvState = Any
"""The state of an environment: a pytree of arrays that only the environment looks into."""

_PARTS = 8
"""A batch is reset by at most so many parts of it, one after the other; see `_renew_if`."""


@runtime_checkable
class Environment(Protocol):
    """A multi-agent environment as pure functions: jit, vmap and scan them at will.

    One environment, no batch axis. The environment itself never resets: after a step whose
    ``last`` is true the state is spent, and `autoreset` (or the caller) starts a new episode.
    """

    @property
    def spec(self) -> EnvSpec:
        """Sizes, names and limits; static."""
        ...

    def reset(self, key: PRNGKeyArray) -> tuple[EnvState, Timestep]:
        """Start an episode. Rewards are zero and ``view`` equals ``next_view``."""
        ...

    def step(self, key: PRNGKeyArray, state: EnvState, action: Array) -> tuple[EnvState, Timestep]:
        """Take one step with the agents' actions, ``(N,)`` int32 or ``(N, A)`` float32."""
        ...


def restart(view: View) -> Timestep:
    """Build the timestep of a fresh episode."""
    num_agents = view.alive.shape[0]
    nobody = jnp.zeros(num_agents, bool)
    return Timestep(view, view, jnp.zeros(num_agents), nobody, nobody, jnp.zeros((), bool))


def transition(
    view: View,
    reward: Float[Array, "N"],
    terminated: Bool[Array, "N"],
    truncated: Bool[Array, "N"],
) -> Timestep:
    """Build the timestep of a step taken; the episode is over when every agent's is."""
    return Timestep(view, view, reward, terminated, truncated, (terminated | truncated).all())


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
    """Index into `offmarl.envs.swarm.dynamics.KINDS`."""
    velocity: Float[Array, "P D"]
    heading: Float[Array, "P"]
    """Angle from the first axis to the second: a unicycle's heading, of others the course."""
    links: Int[Array, "N K"]
    """Whom each agent hears, -1 for nobody; K = 0 where drones do not communicate."""
    obstacles: Float[Array, "M D"]
    """Centres of discs (balls) of radius `offmarl.envs.swarm.dynamics.OBSTACLE_RADIUS`."""
    marks: Float[Array, "Q D"]
    """Other points of interest."""
    mark: Int[Array, "Q"]
    """What each mark is: index into `MARKS`."""
    cells: Float[Array, "*G"]
    """A map of the arena with values in [0, 1]; of size 0 where the task has none."""


@dataclass(frozen=True)
class AutoReset:
    """An environment that starts a new episode in the step that ends one.

    The returned ``view`` is then the first of the new episode, while ``next_view``, ``reward``,
    ``terminated``, ``truncated`` and ``last`` still speak of the step taken.

    Parameters
    ----------
    env
        The environment.
    pool
        How many initial states to draw beforehand and begin episodes with, see `autoreset`; 0 for
        a fresh one each time.
    """

    env: Environment
    pool: int = 0

    @property
    def spec(self) -> EnvSpec:
        """The wrapped environment's."""
        return self.env.spec

    def reset(self, key: PRNGKeyArray) -> tuple[EnvState, Timestep]:
        """Start an episode."""
        return self.env.reset(key)

    def step(self, key: PRNGKeyArray, state: EnvState, action: Array) -> tuple[EnvState, Timestep]:
        """Take one step, and reset if it was the episode's last."""
        step_key, reset_key = jax.random.split(key)
        state, timestep = self.env.step(step_key, state, action)
        state, view = _renew_if(timestep.last, reset_key, (state, timestep.view), self._begin)
        return state, timestep._replace(view=view)

    def _begin(self, key: PRNGKeyArray) -> tuple[EnvState, View]:
        if self.pool:
            which, renew = jax.random.split(key)
            drawn = jax.random.randint(which, (), 0, self.pool)
            pool = _pool(self.env, self.pool)  # type: ignore[arg-type]
            return jax.tree.map(lambda leaf: _renew_key(leaf[drawn], renew), pool)
        return _first(self.env, key)


@dataclass(frozen=True)
class _Named:
    """An environment under another name: all else is that of the wrapped one."""

    env: Any
    name: str

    @property
    def spec(self) -> EnvSpec:
        return replace(self.env.spec, name=self.name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "env":  # which copying and pickling look up first
            raise AttributeError(name)
        return getattr(self.env, name)


def with_name(env: Any, name: str) -> Environment:
    """Check that a user's object has the protocol, and give its spec a name.

    Raises
    ------
    OptionError
        It is not an environment, or cannot be a static argument of compiled programs.
    """
    if not isinstance(getattr(env, "spec", None), EnvSpec) or not isinstance(env, Environment):
        raise OptionError(
            f"{name} returned {env!r}, which is not an environment: it needs the attribute spec, "
            "an offmarl.EnvSpec, and the methods reset and step of offmarl.envs.Environment. "
            "(PettingZoo environments are recorded with offmarl.record.)"
        )
    try:
        hash(env)
    except TypeError as error:
        raise OptionError(
            f"{name} returned {type(env).__name__}, which is not hashable ({error}): make it a "
            "frozen dataclass of hashable fields, so that JAX compiles it once."
        ) from error
    named: Environment = env if env.spec.name == name else _Named(env, name)
    return named


def _first(env: Environment, key: PRNGKeyArray) -> tuple[EnvState, View]:
    state, timestep = env.reset(key)
    return state, timestep.view


def _renew_key(leaf: Array, key: PRNGKeyArray) -> Array:
    """Replace keys that an environment keeps in its state, so that its randomness is fresh."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.random.split(key, leaf.shape) if is_key else leaf


@lru_cache(maxsize=8)
def _pool(env: Environment, size: int) -> tuple[EnvState, View]:
    """Draw initial states, once for all programs that use them."""
    with jax.ensure_compile_time_eval():
        keys = jax.random.split(jax.random.key(0), size)
        return jax.jit(jax.vmap(partial(_first, env)))(keys)


def _renew_if(
    over: Bool[Array, ""],
    key: PRNGKeyArray,
    old: ArrayTree,
    begin: Callable[[PRNGKeyArray], ArrayTree],
) -> ArrayTree:
    """Return ``begin(key)`` if the episode is over, and ``old`` if not.

    Under vmap, ``begin`` runs for a few episodes at a time, and only while there are some that are
    over. The plain batching of a condition would run it for all of the batch in every step, which
    can cost many times the step itself.
    """

    @jax.custom_batching.custom_vmap
    def renew_one(over: Bool[Array, ""], key: PRNGKeyArray, old: ArrayTree) -> ArrayTree:
        return jax.lax.cond(over, lambda: begin(key), lambda: old)

    @jax.custom_batching.custom_vmap
    def renew_many(over: Bool[Array, "B"], keys: Key[Array, "B"], old: ArrayTree) -> ArrayTree:
        return _renew_few_by_few(over, keys, old, begin)

    @renew_one.def_vmap
    def renew_batch(size: int, batched: ArrayTree, *args: ArrayTree) -> tuple[ArrayTree, ArrayTree]:
        new = renew_many(*_spread(size, batched, args))
        return new, jax.tree.map(lambda _: True, new)

    @renew_many.def_vmap
    def renew_batches(
        size: int, batched: ArrayTree, *args: ArrayTree
    ) -> tuple[ArrayTree, ArrayTree]:
        spread = _spread(size, batched, args)
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), spread)
        new = jax.tree.map(lambda x: x.reshape(size, -1, *x.shape[1:]), renew_many(*flat))
        return new, jax.tree.map(lambda _: True, new)

    return renew_one(over, key, old)


def _renew_few_by_few(
    over: Bool[Array, "B"],
    keys: Key[Array, "B"],
    old: ArrayTree,
    begin: Callable[[PRNGKeyArray], ArrayTree],
) -> ArrayTree:
    size = over.shape[0]
    if size == 1:  # nothing would change from turn to turn, so XLA would run it before the loop
        return jax.lax.cond(over[0], lambda: jax.vmap(begin)(keys), lambda: old)
    few = -(-size // _PARTS)
    (who,) = jnp.nonzero(over, size=few * _PARTS, fill_value=size)

    def renew(start: Array, old: ArrayTree) -> tuple[Array, ArrayTree]:
        some = jax.lax.dynamic_slice(who, (start,), (few,))
        fresh = jax.vmap(begin)(keys[some])
        old = jax.tree.map(lambda x, y: x.at[some].set(y, mode="drop"), old, fresh)
        return start + few, old

    left = (jnp.zeros((), jnp.int32), old)
    return jax.lax.while_loop(lambda x: x[0] < over.sum(), lambda x: renew(*x), left)[1]


def _spread(size: int, batched: ArrayTree, args: ArrayTree) -> ArrayTree:
    """Give everything the batch axis that only some have."""

    def spread(is_batched: bool, x: Array) -> Array:
        return x if is_batched else jnp.broadcast_to(x, (size, *x.shape))

    return jax.tree.map(spread, tuple(batched), args)


def autoreset(env: Environment, pool: int = 0) -> AutoReset:
    """Wrap an environment so that it never stops; see `AutoReset`.

    Parameters
    ----------
    env
        The environment.
    pool
        Where a reset costs much more than a step, as in Jumanji's Connector, draw this many initial
        states beforehand and begin episodes with one of them at random. Only those states are
        reused: what happens from there on is random as ever, also where an environment keeps the
        key of its randomness in its state. They are always the same (drawn with
        ``jax.random.key(0)``), and part of the compiled program. The first episode of all, by
        ``reset``, is fresh.

    Raises
    ------
    OptionError
        The pool is negative.
    """
    if pool < 0:
        raise OptionError(f"pool must be a number of initial states, or 0 for none, not {pool}.")
    return AutoReset(env, pool)


def require_positive(**values: float) -> None:
    """Raise `OptionError` for the first option that is not above zero."""
    for name, value in values.items():
        if not value > 0:
            raise OptionError(f"{name} must be above 0, not {value}: choose a larger one.")
