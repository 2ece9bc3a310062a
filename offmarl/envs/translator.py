"""Reads environments of the PettingZoo parallel API as arrays over agents.

PettingZoo is an optional dependency, so this module is imported lazily.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from gymnasium.spaces import flatdim, flatten
from jaxtyping import Bool
from pettingzoo import AECEnv

from offmarl.envs.registry import family_of, release_of
from offmarl.envs.spaces import Actions, ActionSpace, Box, sizes_if_unequal
from offmarl.errors import InvalidValueError, ShapeError, UnknownNameError
from offmarl.gate import fit
from offmarl.types import (
    DTYPES,
    ArraySpec,
    Discrete,
    EnvSpec,
    SpecTree,
    View,
    empty_view,
    flatten_tree,
    map_tree,
    spec_tree,
)

Observations = Mapping[str, Any]
Infos = Mapping[str, Any]

MASK, OBSERVATION = "action_mask", "observation"
"""Names in an observation that has a mask of legal actions, by PettingZoo's convention."""

_SMALL = ("uint8", "int8", "uint16", "int16", "float16", "bool")
_TOLERANCE = 1e-5
"""Fraction of its range by which rounding may move a continuous action out of bounds."""


def check_parallel(env: Any) -> None:
    """Raise `ShapeError` if an environment does not have the parallel API."""
    parts = ("possible_agents", "reset", "step", "observation_space", "action_space")
    missing = [part for part in parts if not hasattr(env, part)]
    if missing:
        raise ShapeError(
            f"{env!r} does not have PettingZoo's parallel API (no {', '.join(missing)}): give a "
            "pettingzoo.ParallelEnv, whose agents act at the same time."
        )
    if isinstance(env, AECEnv):
        raise ShapeError(
            f"{env!r} has PettingZoo's AEC API, where agents take turns, and not the parallel one: "
            "if its agents can act at the same time, wrap it with pettingzoo.utils.aec_to_parallel."
        )


class Translator:
    """Reads a PettingZoo environment as arrays over agents, in the order of ``possible_agents``.

    Observations are arrays or trees of arrays, as `spec_of` describes them for their spaces: images
    keep their type. Those of agents with spaces of different sizes are padded with zeros. If the
    spaces have different names, types or numbers of axes, or the spec ``like`` has vectors, all
    observations are flattened to float32 vectors. Agents with the names of those of ``like`` have
    its order. Legal actions come from ``action_mask`` in the observation or the info. The state is
    ``env.state()``; if there is none, it is all observations, provided that these are vectors.
    """

    def __init__(
        self,
        env: Any,
        name: str | None = None,
        time_limit: int | None = None,
        like: EnvSpec | None = None,
    ):
        check_parallel(env)
        self.keys = list(env.possible_agents)
        by_name = {str(agent): agent for agent in self.keys}
        if like is not None and by_name.keys() == {*(like.agents or ())}:
            self.keys = [by_name[name] for name in like.agents or ()]
        self.agents = tuple(map(str, self.keys))
        self._spaces = [_without_mask(env.observation_space(a)) for a in self.keys]
        self._action_spaces = [env.action_space(a) for a in self.keys]
        self.actions = Actions(tuple(map(_action_space, self.keys, self._action_spaces)))
        self._masks = [ArraySpec((size,), "bool") for size in self.actions.sizes]
        flat = like is not None and like.is_vector
        tree = None if flat else common_specs([spec_of(space) for space in self._spaces])
        self._flat = tree is None
        self._readers = [*map(flat_reader if self._flat else make_reader, self._spaces)]
        sizes = [flatdim(space) for space in self._spaces]
        observation = ArraySpec((max(sizes),)) if tree is None else tree
        is_vector = isinstance(observation, ArraySpec) and len(observation.shape) == 1
        state = state_of(env)
        self._state_shape = np.shape(state)
        self.spec = EnvSpec(
            name=_registered_name(env) if name is None else name,
            num_agents=len(self.agents),
            observation_size=0,
            state_size=0,
            action=self.actions.joint,
            time_limit=time_limit,
            reward="individual",
            state="concatenated" if state is None else "native",
            agents=self.agents,
            observation_sizes=sizes_if_unequal(sizes) if is_vector else None,
            action_sizes=sizes_if_unequal(self.actions.sizes),
            observation=observation,
            global_state=self._state_spec(state, observation),
            package=release_of(type(getattr(env, "unwrapped", env)).__module__),
        )
        self._blank = empty_view(self.spec)

    def _state_spec(self, state: Any, observation: Any) -> ArraySpec:
        if state is not None:
            array = np.asarray(state)
            name = array.dtype.name
            keeps = name in _SMALL or (array.ndim > 2 and name in DTYPES)
            keeps &= not self._flat
            return ArraySpec(array.shape, name) if keeps else ArraySpec((array.size,))
        if isinstance(observation, ArraySpec) and observation == ArraySpec((observation.size,)):
            return ArraySpec((len(self.agents) * observation.size,))
        return ArraySpec((0,))

    def view(
        self,
        observations: Observations,
        infos: Infos | None,
        alive: Sequence[bool] | Bool[np.ndarray, "N"],
        state: Any,
    ) -> View:
        """Return the view after a step or a reset."""
        check_agents("observations", observations, self.keys)
        view, legal = map_tree(np.copy, self._blank), self.actions.mask.copy()
        for i, (agent, space) in enumerate(zip(self.keys, self._spaces, strict=True)):
            if agent in observations:
                value, mask = _split_mask(observations[agent], space)
                label = f"the observation of {agent}"
                map_tree(partial(_put, i), view.observation, self._readers[i](value, label))
                mask = _info_of(infos, agent).get(MASK) if mask is None else mask
                if mask is not None:
                    spec = self._masks[i]
                    legal[i, : spec.size] = fit(mask, spec, f"the action mask of {agent}")
            elif alive[i]:
                raise InvalidValueError(f"{agent} is alive and has no observation.")
            if alive[i] and not legal[i].any():
                raise InvalidValueError(f"{agent} is alive and has no legal action.")
        everything = self._state(view.observation, state)
        leaves: Any = view.observation, everything, legal, np.array(alive)
        return View(*leaves)

    def _state(self, observation: Any, state: Any) -> np.ndarray:
        spec = self.spec.state_leaves[""]
        if self.spec.state != "native":
            return np.ravel(observation) if spec.size else np.zeros(spec.shape, np.float32)
        if state is None:
            raise InvalidValueError("the environment had a state at its first step, and has none.")
        return fit(state, ArraySpec(self._state_shape, spec.dtype), "the state").reshape(spec.shape)

    def joint(self, actions: Mapping[str, Any]) -> np.ndarray:
        """Return the agents' actions as one array; those of absent agents are zero."""
        return self.actions.join(
            [
                self._vector(agent, space, actions)
                if isinstance(space, Box)
                else self._number(i, actions)
                for i, (agent, space) in enumerate(zip(self.keys, self.actions.spaces, strict=True))
            ]
        )

    def _vector(self, agent: Any, space: Box, actions: Mapping[str, Any]) -> np.ndarray:
        """Return an agent's continuous action; the centre of its bounds if it is absent."""
        low, high = np.array(space.low), np.array(space.high)
        action = actions.get(agent, (low + high) / 2)
        try:
            vector = np.ravel(np.asarray(action, np.float64))
        except (TypeError, ValueError):
            vector = np.empty(0)
        if vector.size != space.size:
            raise InvalidValueError(
                f"the action of {agent} is {action!r}, but must be {space.size} numbers."
            )
        slack = _TOLERANCE * (high - low)
        inside = (vector >= low - slack) & (vector <= high + slack)
        if not inside.all():
            i = int(np.argmin(inside))
            raise InvalidValueError(
                f"the action of {agent}, entry {i}, is {vector[i]!s}, but must be from "
                f"{low[i]:g} to {high[i]:g}."
            )
        return vector

    def _number(self, i: int, actions: Mapping[str, Any]) -> int:
        """Return an agent's discrete action, counted from 0."""
        agent, start = self.keys[i], int(self._action_spaces[i].start)
        number = actions.get(agent, start)
        with suppress(ValueError):  # of lists of different lengths, which are no number
            array = np.asarray(number)
            number = array.item() if array.size == 1 else array.tolist()
        stop = start + self.actions.sizes[i]
        if number not in range(start, stop):
            raise InvalidValueError(
                f"the action of {agent} is {number!r}, but must be from {start} to {stop - 1}."
            )
        return int(number) - start

    def by_agent(self, action: np.ndarray, agents: Sequence[str]) -> dict[str, Any]:
        """Return the actions of some agents from an array, as the environment takes them."""
        split = self.actions.split(action)
        actions: dict[str, Any] = {}
        for agent in agents:
            i = self.keys.index(agent)
            space = self._action_spaces[i]
            if self.actions.discrete:
                actions[agent] = int(split[i]) + int(space.start)
            else:
                actions[agent] = np.asarray(split[i], np.float32).reshape(space.shape)
        return actions


def name_of(env: Any) -> str:
    """Return the name in an environment's metadata; empty if there is none."""
    return str((getattr(env, "metadata", None) or {}).get("name", ""))


def _registered_name(env: Any) -> str:
    with suppress(UnknownNameError):
        family_of(name := name_of(env))
        return name
    return ""


def state_of(env: Any) -> Any:
    """Return an environment's global state; None if it has none.

    Of states, images and arrays of small integers keep their shape and type; others become float32
    vectors.
    """
    try:
        return env.state()
    except (NotImplementedError, AttributeError):
        return None


def check_agents(label: str, by_agent: Any, agents: Sequence[Any]) -> None:
    """Raise `InvalidValueError` if something is not a dict by agent, or names an unknown one."""
    if not isinstance(by_agent, Mapping):
        raise InvalidValueError(f"{label} are {by_agent!r:.60}, and must be a dict by agent.")
    if unknown := [name for name in by_agent if name not in agents]:
        raise InvalidValueError(
            f"{label} are of {unknown[0]!r}, and the agents are {', '.join(map(str, agents))}."
        )


def _without_mask(space: gymnasium.Space) -> gymnasium.Space:
    """Return the space without the mask; PettingZoo's convention then leaves ``observation``."""
    if not isinstance(space, gymnasium.spaces.Dict) or MASK not in space.spaces:
        return space
    parts = {k: v for k, v in space.spaces.items() if k != MASK}
    return parts[OBSERVATION] if [*parts] == [OBSERVATION] else gymnasium.spaces.Dict(parts)


def _split_mask(observation: Any, space: gymnasium.Space) -> tuple[Any, Any]:
    """Return the value of a space of `_without_mask`, and the mask if there is one."""
    if not isinstance(observation, Mapping) or MASK not in observation:
        return observation, None
    parts = {k: v for k, v in observation.items() if k != MASK}
    is_only = [*parts] == [OBSERVATION] and not isinstance(space, gymnasium.spaces.Dict)
    return parts[OBSERVATION] if is_only else parts, observation[MASK]


def _info_of(infos: Any, agent: Any) -> Mapping[str, Any]:
    """Return the info of an agent; empty if the environment gives none."""
    info = infos.get(agent) if isinstance(infos, Mapping) else None
    return info if isinstance(info, Mapping) else {}


def _put(agent: int, into: np.ndarray, array: np.ndarray) -> None:
    """Put an agent's array into the corner of the padded array of all agents."""
    corner: Any = (agent, *map(slice, array.shape))
    into[corner] = array


def _action_space(agent: Any, space: gymnasium.Space) -> ActionSpace:
    if isinstance(space, gymnasium.spaces.Discrete):
        return Discrete(int(space.n))
    if isinstance(space, gymnasium.spaces.Box) and space.is_bounded():
        return Box(tuple(space.low.ravel().tolist()), tuple(space.high.ravel().tolist()))
    raise ShapeError(
        f"the actions of {agent} are of {space}, and a dataset holds discrete ones or vectors with "
        "bounds: wrap the environment so that they are Discrete, or a Box with finite bounds."
    )


# ------------------------------------------------------------------------------------------ spaces

# Observation spaces of Gymnasium become specs of arrays, and back. A space becomes an array or a
# tree of arrays. Boxes keep their shape and data type, except that float64 becomes float32, and
# wider integers int32. Dict and Tuple spaces become dictionaries, whose Discrete spaces are one-hot
# booleans. A space that is not in a tree and has no axes is a float32 vector: a Box of one axis of
# floats, or the one-hot vector of discrete values.


_GROUPS = spaces.Dict | spaces.Tuple
_INT32 = np.iinfo(np.int32)


def spec_of(space: spaces.Space[Any]) -> Any:
    """Return the specs of the arrays that `make_reader` makes of a space's values, a `SpecTree`."""
    if isinstance(space, _GROUPS):
        return spec_tree(_specs(space))
    spec = _leaf_spec(space)
    keeps_shape = isinstance(space, spaces.Box) or len(spec.shape) > 1
    return spec if keeps_shape else ArraySpec((flatdim(space),))


def _specs(space: spaces.Space[Any]) -> Any:
    if isinstance(space, _GROUPS):
        return {name: _specs(part) for name, (_, part) in _parts_of(space).items()}
    return _leaf_spec(space)


def make_reader(space: spaces.Space[Any], in_tree: bool = False) -> Callable[[Any, str], Any]:
    """Return a function that reads values of a space as arrays, as `spec_of` describes them.

    It takes a value and its label in messages, and raises `InvalidValueError` if the value is
    not in the space: nothing is rounded, wrapped around or reshaped.
    """
    if not isinstance(space, _GROUPS):
        return partial(_read, space, _leaf_spec(space) if in_tree else spec_of(space))
    parts = _parts_of(space).items()
    return partial(
        _read_parts, {name: (key, make_reader(part, True)) for name, (key, part) in parts}
    )


def flat_reader(space: spaces.Space[Any]) -> Callable[[Any, str], np.ndarray]:
    """Return a function like that of `make_reader`, which reads a value as one float32 vector."""
    read = make_reader(space)

    def read_flat(value: Any, label: str) -> np.ndarray:
        return np.concatenate([x.ravel().astype(np.float32) for x in _leaves(read(value, label))])

    return read_flat


def _leaves(tree: Any) -> Iterator[np.ndarray]:
    """Yield the arrays of a tree in the order of the space."""
    for part in tree.values() if isinstance(tree, dict) else ():
        yield from _leaves(part)
    if not isinstance(tree, dict):
        yield tree


def _read_parts(
    parts: dict[str, tuple[Any, Callable[[Any, str], Any]]], value: Any, label: str
) -> dict[str, Any]:
    """Read a value of a Dict or a Tuple space, by the readers of its parts."""
    keys = {key for key, _ in parts.values()}
    by_number = isinstance(value, tuple | list) or np.ndim(value) > 0
    names = range(len(value)) if by_number else value if isinstance(value, Mapping) else ()
    if set(names) != keys:
        present = ", ".join(map(str, names)) or f"{value!r:.60}"
        required = ", ".join(sorted(map(str, keys)))
        raise InvalidValueError(f"{label} has {present}, and must have {required}.")
    return {name: part(value[key], f"{label}, {key}") for name, (key, part) in parts.items()}


def common_specs(trees: Sequence[Any]) -> Any:
    """Return the smallest specs that the padded arrays of all agents fit into; None for none."""
    flat = [flatten_tree(tree) for tree in trees]
    kinds = {tuple((p, s.dtype, len(s.shape)) for p, s in leaves.items()) for leaves in flat}
    if len(kinds) > 1:
        return None

    def largest(*leaves: ArraySpec) -> ArraySpec:
        return ArraySpec(tuple(map(max, *(leaf.shape for leaf in leaves))), leaves[0].dtype)

    return trees[0] if len(trees) == 1 else map_tree(largest, *trees)


def to_space(spec: SpecTree) -> spaces.Space[Any]:
    """Return the space of the arrays that a spec describes."""
    if not isinstance(spec, ArraySpec):
        return spaces.Dict({name: to_space(part) for name, part in spec.items()})
    if spec.dtype == "bool":
        return spaces.MultiBinary(spec.shape)
    if "float" in spec.dtype:
        dtype: Any = np.float32 if spec.dtype == "bfloat16" else np.dtype(spec.dtype)
        return spaces.Box(-np.inf, np.inf, spec.shape, dtype)
    limits = np.iinfo(spec.dtype)
    return spaces.Box(limits.min, limits.max, spec.shape, np.dtype(spec.dtype).type)


def as_sample(array: np.ndarray) -> np.ndarray:
    """Return an array in the type that it has in the space that `to_space` returns."""
    names = {"bool": "int8", "bfloat16": "float32"}
    return np.asarray(array).astype(names.get(array.dtype.name, array.dtype))


def _parts_of(space: Any) -> dict[str, tuple[Any, spaces.Space[Any]]]:
    """Return the keys and the spaces of a space's parts, by the names of leaves."""
    items = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
    parts = {re.sub(r"[^\w-]", "_", str(key))[:64]: (key, part) for key, part in items}
    if len(parts) < len(space.spaces):
        raise ShapeError(
            f"the names of {space} are not distinct as names of leaves, of letters, digits, _ "
            "and -: rename them in a wrapper."
        )
    return parts


def _leaf_spec(space: spaces.Space[Any]) -> ArraySpec:
    """Return the spec of a space that is one array."""
    if isinstance(space, spaces.Box):
        return ArraySpec(space.shape, _dtype(space))
    if isinstance(space, spaces.MultiBinary):
        return ArraySpec(space.shape, "bool")
    is_discrete = isinstance(space, spaces.Discrete | spaces.MultiDiscrete)
    return ArraySpec((flatdim(space),), "bool" if is_discrete else "float32")


def _dtype(space: spaces.Box) -> str:
    """Return the data type to store a Box in."""
    name = np.dtype(space.dtype).name
    if name in DTYPES:
        return name
    if np.dtype(space.dtype).kind not in "iu":
        return "float32"
    fits = _INT32.min <= space.low.min(initial=0) and space.high.max(initial=0) <= _INT32.max
    return "int32" if fits else "float32"


def _read(space: spaces.Space[Any], spec: ArraySpec, value: Any, label: str) -> np.ndarray:
    if isinstance(space, spaces.Box | spaces.MultiBinary):
        array = fit(value, spec, label)
        low, high = getattr(space, "low", 0), getattr(space, "high", 1)
        if array.dtype.kind in "iu" and ((array < low) | (array > high)).any():
            raise InvalidValueError(f"{label} is not in {space}.")
        return array
    if isinstance(space, spaces.Discrete) and np.size(value) == 1:
        value = np.asarray(value).item()
    try:
        inside = space.contains(value)
    except (TypeError, ValueError, OverflowError):
        inside = False
    if not inside:
        raise InvalidValueError(f"{label} is {value!r:.60}, which is not in {space}.")
    return np.asarray(flatten(space, value)).reshape(spec.shape).astype(spec.numpy_dtype)
