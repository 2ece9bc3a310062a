"""Environments of users, compared with their specs.

`admit` traces reset and step, which shows shapes and types and compiles nothing. `faults` finds
what only values show, in the first steps that are recorded.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path
from jaxtyping import Array, PRNGKeyArray

from offmarl._imports import summarize
from offmarl.envs.base import Environment, EnvState, Wrapper, extras_of
from offmarl.errors import OptionError, ShapeError
from offmarl.terminal import one_line
from offmarl.types import ArraySpec, Continuous, EnvSpec, Timestep, Transition, View, map_tree
from offmarl.types import leaf_difference as difference_of

_LEAST = {"num_agents": 1, "action_size": 1, "observation_size": 0, "state_size": 0}
_BY_AGENT = ("agents", "observation_sizes", "action_sizes", "teams", "kinds")


@dataclass(frozen=True)
class Outside(Wrapper):
    """A user's environment under its full name, whose arrays have the types of the spec."""

    spec: EnvSpec

    def reset(self, key: PRNGKeyArray) -> tuple[EnvState, Timestep]:
        """Start an episode."""
        state, timestep = self.env.reset(key)
        return state, _cast(_wanted(self.spec, timestep), timestep)

    def step(self, key: PRNGKeyArray, state: EnvState, action: Array) -> tuple[EnvState, Timestep]:
        """Take one step."""
        state, timestep = self.env.step(key, state, action)
        return state, _cast(_wanted(self.spec, timestep), timestep)

    def extras(self, key: PRNGKeyArray, state: EnvState) -> dict[str, Array]:
        """Return the extras of the step that ``step(key, state, action)`` takes."""
        found = extras_of(self.env, key, state) or {}
        return {name: _cast(self.spec.extras[name], leaf) for name, leaf in found.items()}


def _wanted(spec: EnvSpec, timestep: Timestep) -> Any:
    """Return the specs of the arrays of a timestep."""
    numbers, flags = (ArraySpec((spec.num_agents,), dtype) for dtype in ("float32", "bool"))
    shaping = None if timestep.shaping is None else numbers
    extras = {name: spec.extras[name] for name in spec.extras if name in (timestep.extras or ())}
    arrays: Any = (numbers, flags, flags, ArraySpec((), "bool"), shaping, extras or None)
    return Timestep(spec.view_spec, spec.view_spec, *arrays)


def _cast(wanted: Any, found: Any) -> Any:
    return map_tree(lambda leaf, x: jnp.asarray(x).astype(leaf.numpy_dtype), wanted, found)


def admit(env: Any, name: str, package: str = "") -> Environment:
    """Return a user's object as an environment with a name; `OptionError` or `ShapeError` if not.

    Arrays must have the shapes of the spec. Numbers and booleans of other types are cast.
    """
    reason = ""
    try:
        spec = env.spec
        hash((env, spec))
    except Exception as error:
        spec, reason = None, f" ({summarize(error)})"
    if not isinstance(spec, EnvSpec) or not isinstance(env, Environment):
        raise OptionError(
            f"{name} returned {one_line(f'{env!r:.80}')}, which is not an environment{reason}: it "
            "needs the attribute spec, an offmarl.EnvSpec, and the methods reset and step of "
            "offmarl.envs.Environment, and must be hashable, as a frozen dataclass of hashable "
            "fields is. (PettingZoo environments are recorded with offmarl.record.)"
        )
    named = replace(spec, name=name, package=package)
    alike = name == spec.name and package == spec.package
    return env if has_types(env, named) and alike else Outside(env, named)


@lru_cache(maxsize=16)
def has_types(env: Any, spec: EnvSpec) -> bool:
    """Compare what reset and step return with a spec; whether all types are equal, too."""
    _check_spec(spec)
    size = (1, spec.num_agents, spec.action_size)
    actions = jnp.zeros(size) if isinstance(spec.action, Continuous) else jnp.zeros(size[:2], int)
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
    state, first = _traced(spec, env, "reset", keys)
    after, timestep = _traced(spec, env, "step", keys, state, actions)
    if difference := difference_of("", _texts(after), _texts(state)):
        raise ShapeError(f"{spec.name}: the states of step and reset differ in {difference}.")
    if jax.tree.structure(after) != jax.tree.structure(state):
        raise ShapeError(f"{spec.name}: the states of step and reset differ in their structure.")
    extras = dict(timestep.extras or {})
    if spec.extras and hasattr(env, "extras"):
        extras |= _traced(spec, env, "extras", keys, state)
    typed = _agrees(spec, "reset", first._replace(shaping=None, extras={}), {})
    return _agrees(spec, "step", timestep._replace(extras=extras), spec.extras) and typed


def _check_spec(spec: EnvSpec) -> None:
    wrong = [
        name
        for name, least in (
            _LEAST if spec.time_limit is None else _LEAST | {"time_limit": 1}
        ).items()
        if not (type(value := getattr(spec, name)) is int and value >= least)
    ]
    given = {name: getattr(spec, name) for name in _BY_AGENT}
    for name, value in given.items():
        if value is not None and not (isinstance(value, tuple) and len(value) == spec.num_agents):
            wrong.append(name)
    if wrong:
        raise ShapeError(
            f"the spec of {spec.name} has {wrong[0]} {getattr(spec, wrong[0])!r:.80}: sizes are "
            "whole numbers, actions Discrete or Continuous, and what differs between agents is a "
            "tuple with an entry for each."
        )


def _traced(spec: EnvSpec, env: Any, method: str, *arguments: Any) -> Any:
    """Return the shapes of what a method returns, for a batch of one environment."""
    try:
        found = jax.eval_shape(jax.vmap(getattr(env, method)), *arguments)
    except Exception as error:
        raise OptionError(f"{spec.name}: {method} cannot run: {summarize(error)}.") from error
    kinds = (
        [type(x).__name__ for x in found] if isinstance(found, tuple) else [type(found).__name__]
    )
    views = [type(x).__name__ for x in found[1][:2]] if kinds[1:] == ["Timestep"] else []
    if method != "extras" and views != ["View", "View"]:
        raise ShapeError(
            f"{spec.name}: {method} returns ({', '.join(kinds)}){views and f' of {views}' or ''}: return the state "
            "and a Timestep of two View, as offmarl.envs.restart and transition make it."
        )
    return found


def _agrees(spec: EnvSpec, method: str, timestep: Timestep, extras: Mapping[str, Any]) -> bool:
    """Whether a timestep has the types of a spec; `ShapeError` if it cannot be cast to them."""
    wanted = _named(_wanted(spec, timestep)._replace(extras=dict(extras)))
    ours, theirs = _texts(timestep), {name: str(leaf) for name, leaf in wanted.items()}
    cast = {
        name: theirs[name]
        for name, leaf in _named(timestep).items()
        if name in wanted and _can_cast(leaf, wanted[name])
    }
    if difference := difference_of("", ours | cast, theirs):
        raise ShapeError(f"{spec.name}: {method} and the spec differ in {difference}.")
    return ours == theirs


def _can_cast(leaf: Any, spec: ArraySpec) -> bool:
    """Whether an array has a shape, and numbers that fit into a type."""
    kinds = (np.bool_, np.integer, np.floating)
    fits = leaf.shape[1:] == spec.shape and any(jnp.issubdtype(leaf.dtype, x) for x in kinds)
    whole = spec.numpy_dtype.kind in "iu"  # to which others would be rounded, or wrap around
    return fits and (not whole or np.can_cast(leaf.dtype, spec.numpy_dtype))


def _named(tree: Any) -> dict[str, Any]:
    leaves = tree_leaves_with_path(tree)
    return {keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _texts(tree: Any) -> dict[str, str]:
    return {name: f"{leaf.dtype} {leaf.shape[1:]}" for name, leaf in _named(tree).items()}


def faults(spec: EnvSpec, steps: Timestep | Transition, after: View) -> Iterator[str]:
    """Yield what no environment returns, of steps ``(E, T, ...)`` that follow resets, in NumPy.

    ``after`` are further views, such as those at the ends of episodes.
    """
    sizes = np.array(spec.action_sizes or [spec.action_size] * spec.num_agents)
    beyond = np.arange(spec.action_size) >= sizes[:, None]
    for view in (steps.view, after):
        yield from _where(view.alive & ~view.legal_actions.any(-1), "lives without a legal action")
        yield from _where((view.legal_actions & beyond).any(-1), "has actions beyond action_sizes")
        if spec.observation_sizes:
            padding = np.arange(spec.observation_size) >= np.array(spec.observation_sizes)[:, None]
            seen = ((view.observation != 0) & padding).any(-1)
            yield from _where(seen, "observes numbers beyond its entry of observation_sizes")
    if spec.reward == "team":
        differs = steps.reward != steps.reward[..., :1]
        yield from _where(differs, 'has another reward than agent 0, and the spec says "team"')
    yield from _where(steps.terminated & steps.truncated, "is terminated and truncated")
    ended = (steps.terminated | steps.truncated).all(-1)
    yield from _where((steps.last != ended)[..., None], "and the others have ended, or last is set")
    time, begins = np.arange(steps.last.shape[1]), np.roll(steps.last, 1, axis=1)
    length = 1 + time - np.maximum.accumulate(np.where(begins, time, 0), axis=1)
    late = length > (spec.time_limit or np.inf)
    yield from _where(late[..., None], f"acts after the time limit of {spec.time_limit} steps")


def _where(wrong: Any, what: str) -> Iterator[str]:
    if wrong.any():
        *place, agent = np.argwhere(wrong)[0].tolist()
        where = "in environment {}, step {}".format(*place) if place[1:] else "after an episode"
        yield f"agent {agent} {what} ({where})"
