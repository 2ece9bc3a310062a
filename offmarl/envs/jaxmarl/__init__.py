"""JaxMARL's environments (Rutherford et al. 2024, arXiv 2311.10090) as ours.

The adapter steps with ``step_env``, so that resets are ours and no final observation is lost, and
tells the end of a task from the end of its time. JaxMARL's rewards are shared at least in part, so
``terminated`` and ``truncated`` are those of the episode for all agents alike; who died on the way
is not ``alive``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PRNGKeyArray

from offmarl.envs import extras
from offmarl.envs.base import restart, transition
from offmarl.envs.families import Option
from offmarl.envs.jaxmarl.build import build, options_of
from offmarl.envs.jaxmarl.quirks import Observations, Quirks, quirks_of
from offmarl.envs.spaces import Actions, ActionSpace, Box, flatten, pad, strong, unequal
from offmarl.types import Discrete, EnvSpec, Timestep, View

_WARNINGS = (
    "scatter inputs have incompatible types",
    "OvercookedV2 is now released",
    "max_dist_to_goal",
    "MABrax is deprecated",
    "Brax System",
    "Accessing `",
)


class JaxMarlState(NamedTuple):
    """The wrapped environment's state, and how many steps were taken."""

    inner: Any
    time: Int[Array, ""]


@dataclass(frozen=True)
class JaxMarl:
    """An environment of JaxMARL; made by name, see `offmarl.envs.make`.

    Parameters
    ----------
    name
        Ours.
    env_id
        JaxMARL's.
    arguments
        What JaxMARL's class is called with.
    """

    name: str
    env_id: str
    arguments: tuple[tuple[str, Option], ...] = ()

    @classmethod
    def options(cls, env_id: str) -> dict[str, Option]:
        """Return the options of an environment, with their defaults."""
        return options_of(env_id)

    @classmethod
    def build(cls, name: str, env_id: str, **arguments: Option) -> "JaxMarl":
        """Make an environment, and see to it that JaxMARL takes the arguments."""
        env = cls(name, env_id, tuple(sorted(arguments.items())))
        _ = env.spec
        return env

    @property
    def wrapped(self) -> Any:
        """JaxMARL's own environment."""
        return _wrap(self.env_id, self.arguments).env

    @property
    def spec(self) -> EnvSpec:
        """Sizes, names and limits."""
        return _spec(self)

    def reset(self, key: PRNGKeyArray) -> tuple[JaxMarlState, Timestep]:
        """Start an episode."""
        wrapped = _wrap(self.env_id, self.arguments)
        with extras.quiet(*_WARNINGS):
            observations, inner = wrapped.env.reset(key)
            view = _view(wrapped, observations, inner)
        return JaxMarlState(strong(inner), jnp.zeros((), jnp.int32)), restart(view)

    def step(
        self, key: PRNGKeyArray, state: JaxMarlState, action: Array
    ) -> tuple[JaxMarlState, Timestep]:
        """Take one step with JaxMARL's ``step_env``."""
        wrapped = _wrap(self.env_id, self.arguments)
        env, quirks = wrapped.env, wrapped.quirks
        taken = wrapped.actions.split(action)
        by_agent = dict(zip(env.agents, taken, strict=True))
        given = tuple(taken) if quirks.tuple_of_actions else by_agent
        with extras.quiet(*_WARNINGS):
            observations, inner, rewards, dones, _ = env.step_env(key, state.inner, given)
            view = _view(wrapped, observations, inner)
            terminal = quirks.terminal(env, state.inner, by_agent, inner)
        reward = jnp.stack([jnp.asarray(rewards[agent], jnp.float32) for agent in env.agents])
        time = state.time + 1
        over = dones["__all__"] | (time >= quirks.time_limit(env))
        everyone = jnp.ones(len(env.agents), bool)
        timestep = transition(
            view,
            reward,
            terminated=everyone & over & terminal,
            truncated=everyone & over & ~terminal,
        )
        return JaxMarlState(strong(inner), time), timestep


class _Wrapped(NamedTuple):
    env: Any
    quirks: Quirks
    actions: Actions
    observation_sizes: tuple[int, ...]


@lru_cache(maxsize=256)
def _wrap(env_id: str, arguments: tuple[tuple[str, Option], ...]) -> _Wrapped:
    """Build JaxMARL's environment; equal ones are one object, so that JAX compiles them once."""
    with extras.quiet(*_WARNINGS):
        with jax.ensure_compile_time_eval():
            env = build(env_id, dict(arguments))
        observations, _ = jax.eval_shape(env.reset, jax.random.key(0))
    quirks = quirks_of(env_id)
    each = jax.eval_shape(lambda seen: _split(env, quirks, seen), observations)
    actions = Actions(tuple(_action_space(env, agent) for agent in env.agents))
    return _Wrapped(env, quirks, actions, tuple(vector.size for vector in each))


@lru_cache(maxsize=256)
def _spec(env: JaxMarl) -> EnvSpec:
    wrapped = _wrap(env.env_id, env.arguments)
    view = jax.eval_shape(env.reset, jax.random.key(0))[1].view
    has_state = jax.eval_shape(lambda key: _native_state(wrapped, key), jax.random.key(0))
    names = [agent if isinstance(agent, str) else f"agent_{agent}" for agent in wrapped.env.agents]
    return EnvSpec(
        env.name,
        len(names),
        max(wrapped.observation_sizes),
        view.state.shape[0],
        wrapped.actions.joint,
        wrapped.quirks.time_limit(wrapped.env),
        wrapped.quirks.reward,
        "concatenated" if has_state is None else "native",
        agents=tuple(names),
        observation_sizes=unequal(wrapped.observation_sizes),
        action_sizes=unequal(wrapped.actions.sizes),
    )


def _native_state(wrapped: _Wrapped, key: PRNGKeyArray) -> Array | None:
    with extras.quiet(*_WARNINGS):
        return wrapped.quirks.state(wrapped.env, *wrapped.env.reset(key))


def _view(wrapped: _Wrapped, observations: Observations, inner: Any) -> View:
    env, quirks = wrapped.env, wrapped.quirks
    observation, joined = _observe(wrapped, observations)
    state = quirks.state(env, observations, inner)
    legal = quirks.legal(env, inner)
    return View(
        observation=observation,
        state=joined if state is None else state.astype(jnp.float32),
        legal_actions=wrapped.actions.legal(legal and [legal[agent] for agent in env.agents]),
        alive=quirks.alive(env, inner),
    )


def _observe(
    wrapped: _Wrapped, observations: Observations
) -> tuple[Float[Array, "N O"], Float[Array, "S"]]:
    """Return the agents' observations, padded, and joined without what was padded."""
    if len(set(wrapped.observation_sizes)) > 1:
        each = _split(wrapped.env, wrapped.quirks, observations)
        return pad(each, max(wrapped.observation_sizes)), jnp.concatenate(each)
    # Stacked first: JaxMARL took them out of one array, which XLA recognises only then.
    each = wrapped.quirks.split(wrapped.env, observations)
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    observation = jax.vmap(flatten)(stacked)
    return observation, observation.ravel()


def _split(env: Any, quirks: Quirks, observations: Observations) -> Sequence[Array]:
    return [flatten(each) for each in quirks.split(env, observations)]


def _action_space(env: Any, agent: Any) -> ActionSpace:
    space = env.action_space(agent)
    if hasattr(space, "n"):
        return Discrete(int(space.n))
    low, high = (np.broadcast_to(bound, space.shape).ravel() for bound in (space.low, space.high))
    return Box(tuple(low.tolist()), tuple(high.tolist()))
