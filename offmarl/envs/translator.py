"""Reads environments of the PettingZoo parallel API as arrays over agents.

PettingZoo is an optional dependency, so this module is imported lazily.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import gymnasium
import numpy as np
from gymnasium.spaces import flatdim
from jaxtyping import Bool
from pettingzoo import AECEnv

from offmarl.envs.gym_spaces import common, flat_reader, reader, spec_of
from offmarl.envs.registry import family_of, release_of
from offmarl.envs.spaces import Actions, ActionSpace, Box, sizes_if_unequal
from offmarl.errors import InvalidValueError, ShapeError, UnknownNameError
from offmarl.gate import fit
from offmarl.types import DTYPES, ArraySpec, Discrete, EnvSpec, View, empty_view, map_tree

Observations = Mapping[str, Any]
Infos = Mapping[str, Any]

MASK, SEEN = "action_mask", "observation"
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

    Observations are arrays or trees of arrays, as `offmarl.envs.gym_spaces` makes them of their
    spaces: images keep their type. Those of agents with spaces of different sizes are padded with
    zeros. If the spaces have different names, types or numbers of axes, all observations are
    flattened to float32 vectors. Legal actions come from ``action_mask`` in the observation or the
    info. The state is ``env.state()``; if there is none, it is all observations, provided that
    these are vectors.
    """

    def __init__(
        self,
        env: Any,
        name: str | None = None,
        time_limit: int | None = None,
        flat: bool = False,
    ):
        check_parallel(env)
        self.agents = tuple(map(str, env.possible_agents))
        self._spaces = [_without_mask(env.observation_space(a)) for a in env.possible_agents]
        self._keys = list(env.possible_agents)
        self.actions = Actions(tuple(_action_space(a, env.action_space(a)) for a in self._keys))
        self._starts = [int(getattr(env.action_space(a), "start", 0)) for a in self._keys]
        self._masks = [ArraySpec((size,), "bool") for size in self.actions.sizes]
        self._shapes = [env.action_space(a).shape for a in self._keys]
        tree = None if flat else common([spec_of(space) for space in self._spaces])
        self._flat = tree is None
        self._readers = [*map(flat_reader if self._flat else reader, self._spaces)]
        observation = ArraySpec((max(map(flatdim, self._spaces)),)) if tree is None else tree
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
            observation_sizes=self._own_sizes(observation),
            action_sizes=sizes_if_unequal(self.actions.sizes),
            observation=observation,
            global_state=self._state_spec(state, observation),
            package=release_of(type(getattr(env, "unwrapped", env)).__module__),
        )
        self._blank = empty_view(self.spec)

    def _own_sizes(self, observation: Any) -> tuple[int, ...] | None:
        """Return the sizes of the agents' vectors, if they differ."""
        if not isinstance(observation, ArraySpec) or len(observation.shape) != 1:
            return None
        return sizes_if_unequal([flatdim(space) for space in self._spaces])

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
        check_agents("observations", observations, self._keys)
        view, legal = map_tree(np.copy, self._blank), self.actions.mask.copy()
        for i, (agent, space) in enumerate(zip(self._keys, self._spaces, strict=True)):
            if agent in observations:
                value, mask = _split_mask(observations[agent], space)
                what = f"the observation of {agent}"
                map_tree(partial(_put, i), view.observation, self._readers[i](value, what))
                mask = _told(infos, agent).get(MASK) if mask is None else mask
                if mask is not None:
                    own = self._masks[i]
                    legal[i, : own.size] = fit(mask, own, f"the action mask of {agent}")
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
                for i, (agent, space) in enumerate(
                    zip(self._keys, self.actions.spaces, strict=True)
                )
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
        agent, start = self._keys[i], self._starts[i]
        action = np.asarray(actions.get(agent, start))
        number = action.item() if action.size == 1 else action.tolist()
        stop = start + self.actions.sizes[i]
        if number not in range(start, stop):
            raise InvalidValueError(
                f"the action of {agent} is {number!r}, but must be from {start} to {stop - 1}."
            )
        return int(number) - start

    def by_agent(self, action: np.ndarray, agents: Sequence[str]) -> dict[str, Any]:
        """Return the actions of some agents from an array, as the environment takes them."""
        each = self.actions.split(action)
        taken: dict[str, Any] = {}
        for agent in agents:
            i = self._keys.index(agent)
            if self.actions.discrete:
                taken[agent] = int(each[i]) + self._starts[i]
            else:
                taken[agent] = np.asarray(each[i], np.float32).reshape(self._shapes[i])
        return taken


def name_of(env: Any) -> str:
    """Return the name in an environment's metadata; empty if there is none."""
    return str((getattr(env, "metadata", None) or {}).get("name", ""))


def _registered_name(env: Any) -> str:
    name = name_of(env)
    try:
        family_of(name)
    except UnknownNameError:
        return ""
    return name


def state_of(env: Any) -> Any:
    """Return an environment's global state; None if it has none.

    Of states, images and arrays of small integers keep their shape and type; others become float32
    vectors.
    """
    try:
        return env.state()
    except (NotImplementedError, AttributeError):
        return None


def check_agents(what: str, by_agent: Any, agents: Sequence[Any]) -> None:
    """Raise `InvalidValueError` if something is not a dict by agent, or names an unknown one."""
    if not isinstance(by_agent, Mapping):
        raise InvalidValueError(f"{what} are {by_agent!r:.60}, and must be a dict by agent.")
    if unknown := [name for name in by_agent if name not in agents]:
        raise InvalidValueError(
            f"{what} are of {unknown[0]!r}, and the agents are {', '.join(map(str, agents))}."
        )


def _without_mask(space: gymnasium.Space) -> gymnasium.Space:
    """Return the space without the mask; PettingZoo's convention then leaves ``observation``."""
    if not isinstance(space, gymnasium.spaces.Dict) or MASK not in space.spaces:
        return space
    rest = {k: v for k, v in space.spaces.items() if k != MASK}
    return rest[SEEN] if [*rest] == [SEEN] else gymnasium.spaces.Dict(rest)


def _split_mask(observation: Any, space: gymnasium.Space) -> tuple[Any, Any]:
    """Return the value of a space of `_without_mask`, and the mask if there is one."""
    if not isinstance(observation, Mapping) or MASK not in observation:
        return observation, None
    rest = {k: v for k, v in observation.items() if k != MASK}
    is_only = [*rest] == [SEEN] and not isinstance(space, gymnasium.spaces.Dict)
    return rest[SEEN] if is_only else rest, observation[MASK]


def _told(infos: Any, agent: Any) -> Mapping[str, Any]:
    """Return the info of an agent; empty if the environment gives none."""
    own = infos.get(agent) if isinstance(infos, Mapping) else None
    return own if isinstance(own, Mapping) else {}


def _put(agent: int, into: np.ndarray, seen: np.ndarray) -> None:
    """Put an agent's array into the corner of the padded array of all agents."""
    corner: Any = (agent, *map(slice, seen.shape))
    into[corner] = seen


def _action_space(agent: Any, space: gymnasium.Space) -> ActionSpace:
    if isinstance(space, gymnasium.spaces.Discrete):
        return Discrete(int(space.n))
    if isinstance(space, gymnasium.spaces.Box) and space.is_bounded():
        return Box(tuple(space.low.ravel().tolist()), tuple(space.high.ravel().tolist()))
    raise ShapeError(
        f"the actions of {agent} are of {space}, and a dataset holds discrete ones or vectors with "
        "bounds: wrap the environment so that they are Discrete, or a Box with finite bounds."
    )
