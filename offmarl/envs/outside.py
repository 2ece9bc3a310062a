"""Environments of users, compared with their specs.

`admit` traces reset and step, which shows shapes and types and compiles nothing. `faults` finds
what only values show, in the first steps that are recorded.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_leaves_with_path
from jaxtyping import Array, PRNGKeyArray

from offmarl._imports import summarize
from offmarl.envs.base import EnvState, Wrapper, extras_of, no_action
from offmarl.errors import OffmarlError, OptionError, ShapeError
from offmarl.terminal import one_line
from offmarl.types import (
    ArraySpec,
    EnvSpec,
    Timestep,
    Transition,
    View,
    leaf_difference,
)

_BY_AGENT = ("agents", "observation_sizes", "action_sizes", "teams", "kinds")


@dataclass(frozen=True)
class Outside(Wrapper):
    """A user's environment under its full name, whose arrays are those of the spec.

    Numbers and booleans of other types are cast. Other shapes are a `ShapeError`.
    """

    spec: EnvSpec

    def reset(self, key: PRNGKeyArray) -> tuple[EnvState, Timestep]:
        """Start an episode."""
        return outcome(self.spec, "reset", self.env.reset(key))

    def step(self, key: PRNGKeyArray, state: EnvState, action: Array) -> tuple[EnvState, Timestep]:
        """Take one step."""
        return outcome(self.spec, "step", self.env.step(key, state, action))

    def extras(self, key: PRNGKeyArray, state: EnvState) -> dict[str, Array]:
        """Return the extras of the step that ``step(key, state, action)`` takes."""
        extras = extras_of(self.env, key, state)
        specs = {name: self.spec.extras[name] for name in self.spec.extras if name in extras}
        return _cast(f"{self.spec.name}: extras", specs, extras)


def outcome(spec: EnvSpec, method: str, result: Any) -> tuple[EnvState, Timestep]:
    """Return what reset or step returned, in the types of the spec; `ShapeError` if it differs."""
    parts = result if type(result) is tuple else [result]
    kinds = ["array" if isinstance(x, jax.Array) else type(x).__name__ for x in parts]
    views = [type(x).__name__ for x in result[1][:2]] if kinds[1:] == ["Timestep"] else []
    if views != ["View", "View"]:
        raise ShapeError(
            f"{spec.name}: {method} returns {', '.join(kinds + views)}: return the state, and a "
            "Timestep of two View as offmarl.envs.restart and offmarl.envs.transition make it."
        )
    state, timestep = result
    numbers, flags = (ArraySpec((spec.num_agents,), dtype) for dtype in ("float32", "bool"))
    extras = {name: spec.extras[name] for name in spec.extras if name in (timestep.extras or ())}
    last = ArraySpec((), "bool")
    rest: Any = (
        numbers,
        flags,
        flags,
        last,
        None if timestep.shaping is None else numbers,
        extras or None,
        None if timestep.won is None else last,
    )
    specs = Timestep(spec.view_spec, spec.view_spec, *rest)
    return state, _cast(f"{spec.name}: {method}", specs, timestep)


def _cast(source: str, tree: Any, arrays: Any) -> Any:
    """Return arrays in the types of a tree of specs; `ShapeError` if their shapes differ."""
    leaves, specs = _named(arrays), _named(tree)
    for name in {**leaves, **specs}:
        leaf, spec = leaves.get(name), specs.get(name)
        if leaf is None or spec is None or not _fits(leaf, spec):
            returned = "nothing" if leaf is None else f"{jnp.asarray(leaf).dtype} {jnp.shape(leaf)}"
            raise ShapeError(
                f"{source} returns {name} as {returned}, and its spec says {spec or 'nothing'}."
            )
    typed = [jnp.asarray(leaves[name]).astype(spec.numpy_dtype) for name, spec in specs.items()]
    return jax.tree.unflatten(jax.tree.structure(tree), typed)


def _named(tree: Any) -> dict[str, Any]:
    leaves = tree_leaves_with_path(tree)
    return {keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _fits(leaf: Any, spec: ArraySpec) -> bool:
    """Whether an array has the shape of a spec, and numbers that its type holds."""
    dtype, kinds = jnp.asarray(leaf).dtype, (np.bool_, np.integer, np.floating)
    integral = spec.numpy_dtype.kind in "iu"  # other types would be rounded, or wrap around
    plain = any(jnp.issubdtype(dtype, kind) for kind in kinds)
    holds = plain and (not integral or np.can_cast(dtype, spec.numpy_dtype))
    return holds and jnp.shape(leaf) == spec.shape


def admit(env: Any, name: str, package: str = "") -> Outside:
    """Return a user's object as an environment; `OptionError` or `ShapeError` if it is none."""
    reason = ""
    try:
        spec = env.spec
        hash((env, spec))
    except Exception as error:
        spec, reason = None, f" ({summarize(error)})"
    # Since Python 3.12, `isinstance` of a protocol does not see what `__getattr__` returns.
    methods = (getattr(env, name, None) for name in ("reset", "step"))
    if not isinstance(spec, EnvSpec) or not all(map(callable, methods)):
        raise OptionError(
            f"{name} returned {one_line(f'{env!r:.80}')}, which is not an environment{reason}: it "
            "needs the attribute spec, an offmarl.EnvSpec, and the methods reset and step of "
            "offmarl.envs.Environment, and must be hashable, as a frozen dataclass of hashable "
            "fields is. (PettingZoo environments are for offmarl.record_episodes, `offmarl train` "
            "and `offmarl evaluate`.)"
        )
    admitted = Outside(env, replace(spec, name=name, package=package or spec.package))
    _check(admitted)
    return admitted


@lru_cache(maxsize=16)
def _check(env: Outside) -> None:
    spec = env.spec
    least = {"num_agents": 1, "action_size": 1, "observation_size": 0, "state_size": 0}
    least |= {} if spec.time_limit is None else {"time_limit": 1}
    sizes = {name: getattr(spec, name) for name in least}
    wrong = [name for name, size in sizes.items() if type(size) is not int or size < least[name]]
    tuples = {name: getattr(spec, name) for name in _BY_AGENT}
    wrong += [
        name
        for name, values in tuples.items()
        if not (values is None or (isinstance(values, tuple) and len(values) == spec.num_agents))
    ]
    if wrong:
        raise ShapeError(
            f"the spec of {spec.name} has {wrong[0]} {getattr(spec, wrong[0])!r:.80}: sizes are "
            "whole numbers, actions Discrete or Continuous, and tuples have an entry for each "
            "agent."
        )
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
    actions = no_action(spec)[None]
    state, _ = _traced(env, "reset", keys)
    after, timestep = _traced(env, "step", keys, state, actions)
    before, later = (
        {x: f"{leaf.dtype} {leaf.shape[1:]}" for x, leaf in _named({"state": tree}).items()}
        for tree in (state, after)
    )
    structures: Any = jax.tree.structure(state), jax.tree.structure(after)
    if before != later or structures[0] != structures[1]:
        difference = leaf_difference("", later, before) or "the structure of the state"
        raise ShapeError(f"{spec.name}: what step and reset return differs in {difference}.")
    extras = _traced(env, "extras", keys, state) | (timestep.extras or {})
    if lacking := sorted(spec.extras.keys() - extras.keys()):
        raise ShapeError(f"{spec.name} returns no {lacking[0]}, which its spec has as an extra.")


def _traced(env: Outside, method: str, *arguments: Any) -> Any:
    """Return the shapes of what a method returns, for a batch of one environment."""
    try:
        return jax.eval_shape(jax.vmap(getattr(env, method)), *arguments)
    except OffmarlError as error:  # a new one, because JAX adds notes to those it passes on
        raise type(error)(str(error)) from error
    except Exception as error:
        raise OptionError(f"{env.spec.name}: {method} cannot run: {summarize(error)}.") from error


def faults(spec: EnvSpec, steps: Timestep | Transition, after: View) -> Iterator[str]:
    """Yield the faults in steps ``(E, T, ...)`` from resets on: NumPy arrays.

    ``after`` are further views, such as those at the ends of episodes.
    """
    sizes = np.array(spec.action_sizes or [spec.action_size] * spec.num_agents)
    beyond = np.arange(spec.action_size) >= sizes[:, None]
    for view in (steps.view, after):
        yield from _report(view.alive & ~view.legal_actions.any(-1), "lives without a legal action")
        yield from _report((view.legal_actions & beyond).any(-1), "has actions beyond action_sizes")
        if spec.is_vector:
            apart = (view.state != spec.shared(view).state) & ~np.isnan(view.state)
            message = 'has a state that is not all observations, and the spec says "concatenated"'
            yield from _report(apart.any(-1, keepdims=True), message)
        if spec.observation_sizes:
            padding = np.arange(spec.observation_size) >= np.array(spec.observation_sizes)[:, None]
            nonzero = ((view.observation != 0) & padding).any(-1)
            yield from _report(nonzero, "observes numbers beyond its entry of observation_sizes")
    if spec.reward == "team":
        differs = (steps.reward != steps.reward[..., :1]) & ~np.isnan(steps.reward)
        yield from _report(differs, 'has another reward than agent 0, and the spec says "team"')
    yield from _report(steps.terminated & steps.truncated, "is terminated and truncated")
    time, begins = np.arange(steps.last.shape[1]), np.roll(steps.last, 1, axis=1)
    length = 1 + time - np.maximum.accumulate(np.where(begins, time, 0), axis=1)
    late = length > (spec.time_limit or np.inf)
    yield from _report(late[..., None], f"acts after the time limit of {spec.time_limit} steps")


def _report(wrong: Any, message: str) -> Iterator[str]:
    if wrong.any():
        *place, agent = np.argwhere(wrong)[0].tolist()
        location = "in environment {}, step {}".format(*place) if place[1:] else "after an episode"
        yield f"agent {agent} {message} ({location})"
