"""Conversion to and from the PettingZoo parallel API (Terry et al. 2021, arXiv 2009.14471).

`to_pettingzoo` converts an environment of offmarl; a `Translator` reads a PettingZoo environment as
arrays over agents, to record it and to run offmarl's policies in it. PettingZoo is an optional
dependency, so this module is imported lazily.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import jax
import numpy as np
from gymnasium.spaces import flatdim, flatten
from jaxtyping import Bool, Float
from pettingzoo import AECEnv, ParallelEnv

from offmarl.envs.base import Environment
from offmarl.envs.registry import family_of, make
from offmarl.envs.spaces import Actions, ActionSpace, Box, sizes_if_unequal
from offmarl.errors import InvalidValueError, OptionError, ShapeError, UnknownNameError
from offmarl.types import Discrete, EnvSpec, Timestep, View

Observations = Mapping[str, Any]
Infos = Mapping[str, Mapping[str, Any]]

Actor = Callable[..., tuple[Any, Any]]
"""A policy: see `offmarl.programs.LoadedPolicy`."""

_MASK = "action_mask"
_TOLERANCE = 1e-5
"""Fraction of its range by which rounding may move a continuous action out of bounds."""


def to_pettingzoo(env: Environment | str, seed: int | None = None) -> "OffmarlParallelEnv":
    """Convert an environment of offmarl to the PettingZoo parallel API.

    Parameters
    ----------
    env
        The environment, without autoreset, or its name.
    seed
        Seed of the episodes for which ``reset`` gets no seed; random by default.
    """
    return OffmarlParallelEnv(make(env) if isinstance(env, str) else env, seed)


class OffmarlParallelEnv(ParallelEnv):
    """An environment of offmarl with the PettingZoo parallel API.

    Each agent has its own sizes, without padding. With discrete actions an observation is a dict of
    ``observation`` and ``action_mask``. An agent that is no longer alive is terminated.
    """

    def __init__(self, env: Environment, seed: int | None = None):
        spec = env.spec
        self.env = env
        self.metadata = {"name": spec.name, "render_modes": [], "is_parallelizable": True}
        self.render_mode = None
        self.possible_agents = list(agent_names(spec))
        self.agents: list[str] = []
        self.observation_spaces, self.action_spaces = {}, {}
        for i, agent in enumerate(self.possible_agents):
            self.observation_spaces[agent], self.action_spaces[agent] = _spaces(spec, i)
        self._random = np.random.default_rng(seed)
        self._reset, self._step = jax.jit(env.reset), jax.jit(env.step)
        self._state: Any = None
        self._view: View | None = None
        self._key = jax.random.key(0)

    def reset(
        self, seed: int | None = None, options: Mapping[str, Any] | None = None
    ) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Start an episode; the same seed starts the same episode."""
        del options
        drawn = int(self._random.integers(2**31)) if seed is None else seed
        reset_key, self._key = jax.random.split(jax.random.key(drawn))
        self._state, timestep = self._reset(reset_key)
        self._view = jax.device_get(timestep.view)
        alive = self._view.alive
        self.agents = [agent for i, agent in enumerate(self.possible_agents) if alive[i]]
        return self._observations(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
        """Take one step with the actions of the agents in ``agents``.

        Raises
        ------
        OptionError
            An agent has no action, or no episode has started.
        """
        step_key, self._key = jax.random.split(self._key)
        self._state, timestep = self._step(step_key, self._state, self._joint(actions))
        timestep = jax.device_get(timestep)
        before, self._view = self.agents, timestep.next_view
        rewards, terminations, truncations = self._signals(before, timestep)
        self.agents = [a for a in before if not terminations[a] and not truncations[a]]
        infos: dict[str, dict[str, Any]] = {agent: {} for agent in before}
        return self._observations(before), rewards, terminations, truncations, infos

    def state(self) -> np.ndarray:
        """Return the global state, ``(S,)`` float32."""
        return np.asarray(self._seen().state)

    def observation_space(self, agent: str) -> gymnasium.Space:
        """Return the space of an agent's observations."""
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> gymnasium.Space:
        """Return the space of an agent's actions."""
        return self.action_spaces[agent]

    def render(self) -> None:
        """Do nothing: rendering is not supported."""

    def _seen(self) -> View:
        if self._view is None:
            raise OptionError("no episode has started: call reset first.")
        return self._view

    def _observations(self, agents: Sequence[str]) -> dict[str, Any]:
        view = self._seen()
        return {agent: self._observation(view, agent) for agent in agents}

    def _observation(self, view: View, agent: str) -> Any:
        space, i = self.observation_spaces[agent], self.possible_agents.index(agent)
        if isinstance(space, gymnasium.spaces.Dict):
            size, actions = space["observation"].shape[0], space[_MASK].shape[0]
            mask = np.asarray(view.legal_actions[i, :actions], np.int8)
            return {"observation": np.asarray(view.observation[i, :size]), _MASK: mask}
        return np.asarray(view.observation[i, : space.shape[0]])

    def _joint(self, actions: Mapping[str, Any]) -> np.ndarray:
        missing = [agent for agent in self.agents if agent not in actions]
        if missing or not self.agents:
            what = f"no action for {', '.join(missing)}" if missing else "no episode has started"
            raise OptionError(f"{self.env.spec.name}: {what}: give one for each of env.agents.")
        spec, legal = self.env.spec, self._seen().legal_actions
        if isinstance(spec.action, Discrete):
            anything = legal.argmax(-1)  # for agents that no longer act
            names = enumerate(self.possible_agents)
            return np.array([actions.get(a, anything[i]) for i, a in names], np.int32)
        joint = np.zeros(legal.shape, np.float32)
        for i, agent in enumerate(self.possible_agents):
            own = np.asarray(actions.get(agent, ()), np.float32)
            joint[i, : own.size] = own
        return joint

    def _signals(self, agents: Sequence[str], step: Timestep) -> tuple[dict[str, Any], ...]:
        rewards, terminations, truncations = {}, {}, {}
        for agent in agents:
            i = self.possible_agents.index(agent)
            died = not step.last and not step.next_view.alive[i]
            rewards[agent] = float(step.reward[i])
            terminations[agent] = bool(step.terminated[i]) or died
            truncations[agent] = bool(step.truncated[i])
        return rewards, terminations, truncations


def agent_names(spec: EnvSpec) -> tuple[str, ...]:
    """Return the names of the agents; by default ``agent_0`` and so on."""
    return spec.agents or tuple(f"agent_{i}" for i in range(spec.num_agents))


def _spaces(spec: EnvSpec, agent: int) -> tuple[gymnasium.Space, gymnasium.Space]:
    seen = spec.observation_sizes[agent] if spec.observation_sizes else spec.observation_size
    size = spec.action_sizes[agent] if spec.action_sizes else spec.action_size
    observation = gymnasium.spaces.Box(-np.inf, np.inf, (seen,), np.float32)
    if not isinstance(spec.action, Discrete):
        return observation, gymnasium.spaces.Box(-1, 1, (size,), np.float32)
    mask = gymnasium.spaces.Box(0, 1, (size,), np.int8)
    both = gymnasium.spaces.Dict({"observation": observation, _MASK: mask})
    return both, gymnasium.spaces.Discrete(size)


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

    Observations of any space are flattened (Discrete ones to one-hot vectors) and padded with
    zeros; legal actions come from ``action_mask`` in the observation or the info. The state is
    ``env.state()``, or all observations if there is none.

    Parameters
    ----------
    env
        An environment with the parallel API, reset at least once.
    name
        Name for the spec; by default the one in its metadata, if it is a registered name.
    time_limit
        Time limit for the spec.

    Raises
    ------
    ShapeError
        It does not have the parallel API, its actions are neither Discrete nor Boxes with finite
        bounds, or the agents have actions of both kinds.
    """

    def __init__(self, env: Any, name: str | None = None, time_limit: int | None = None):
        check_parallel(env)
        self.agents = tuple(map(str, env.possible_agents))
        self._spaces = [_without_mask(env.observation_space(a)) for a in env.possible_agents]
        self._keys = list(env.possible_agents)
        self.actions = Actions(tuple(_action_space(a, env.action_space(a)) for a in self._keys))
        self._starts = [int(getattr(env.action_space(a), "start", 0)) for a in self._keys]
        self._shapes = [env.action_space(a).shape for a in self._keys]
        sizes = [flatdim(space) for space in self._spaces]
        state = state_of(env)
        self.spec = EnvSpec(
            name=_registered_name(env) if name is None else name,
            num_agents=len(self.agents),
            observation_size=max(sizes),
            state_size=len(self.agents) * max(sizes) if state is None else state.size,
            action=self.actions.joint,
            time_limit=time_limit,
            reward="individual",
            state="concatenated" if state is None else "native",
            agents=self.agents,
            observation_sizes=sizes_if_unequal(sizes),
            action_sizes=sizes_if_unequal(self.actions.sizes),
        )

    def view(
        self,
        observations: Observations,
        infos: Infos,
        alive: Sequence[bool] | Bool[np.ndarray, "N"],
        state: Float[np.ndarray, "S"] | None,
    ) -> View:
        """Return the view after a step or a reset.

        Parameters
        ----------
        observations, infos
            As the environment returned them.
        alive
            Which agents will act, in order.
        state
            The result of `state_of`.
        """
        seen = np.zeros((len(self.agents), self.spec.observation_size), np.float32)
        legal = self.actions.mask.copy()
        for i, (agent, space) in enumerate(zip(self._keys, self._spaces, strict=True)):
            if agent not in observations:
                continue
            vector, mask = _split_mask(observations[agent], space)
            seen[i, : vector.size] = vector
            mask = infos.get(agent, {}).get(_MASK) if mask is None else mask
            if mask is not None:
                legal[i, : np.size(mask)] = np.ravel(mask).astype(bool)
        everything = seen.ravel() if state is None else state
        leaves: Any = seen, everything, legal, np.array(alive)
        return View(*leaves)

    def joint(self, actions: Mapping[str, Any]) -> np.ndarray:
        """Return the agents' actions as one array; those of absent agents are zero.

        Raises
        ------
        InvalidValueError
            An action is outside its agent's action space.
        """
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


class PettingZooPolicy:
    """Runs a policy in a PettingZoo environment.

    Call it with the observations and infos, pass the actions that it returns to the environment,
    and pass the outcome of the step to `after_step`. Call `reset` at the start of every episode:

        policy = PettingZooPolicy(offmarl.load_policy("runs/mine/bc"), env)
        observations, infos = env.reset()
        policy.reset()
        while env.agents:
            actions = policy(observations, infos)
            observations, rewards, terminations, truncations, infos = env.step(actions)
            policy.after_step(rewards, terminations, truncations)

    A policy that does not remember rewards does not need `after_step`.

    Parameters
    ----------
    policy
        From `offmarl.load_policy`, trained on data of this environment.
    env
        An environment with the parallel API.
    seed
        Seed of a policy that samples its actions.
    """

    def __init__(self, policy: Actor, env: Any, seed: int = 0):
        self._policy, self._env = policy, env
        self._key = jax.random.key(seed)
        self._carry: Any = None
        self._translator: Translator | None = None

    def reset(self) -> None:
        """Clear the policy's memory of the previous episode."""
        self._carry = None

    def __call__(self, observations: Observations, infos: Infos | None = None) -> dict[str, Any]:
        """Return the actions of the agents that act now."""
        self._translator = self._translator or Translator(self._env)
        agents = list(self._env.agents)
        alive = [agent in agents for agent in self._env.possible_agents]
        view = self._translator.view(observations, infos or {}, alive, state_of(self._env))
        self._key, key = jax.random.split(self._key)
        action, self._carry = self._policy(view.observation, view.legal_actions, self._carry, key)
        return self._translator.by_agent(np.asarray(action), agents)

    def after_step(
        self,
        rewards: Mapping[str, float],
        terminations: Mapping[str, bool],
        truncations: Mapping[str, bool],
    ) -> None:
        """Pass the outcome of a step to the policy; the arguments are what ``env.step`` returned.

        An absent agent has a reward of 0 and is done.
        """
        remember = getattr(self._policy, "after_step", None)
        if remember is None:
            return
        agents = self._env.possible_agents
        reward = np.array([rewards.get(agent, 0) for agent in agents], np.float32)
        done = [terminations.get(agent, True) or truncations.get(agent, True) for agent in agents]
        self._carry = remember(self._carry, reward, np.array(done, bool))


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


def state_of(env: Any) -> Float[np.ndarray, "S"] | None:
    """Return an environment's global state as a float32 vector; None if it has none."""
    try:
        return np.ravel(env.state()).astype(np.float32)
    except (NotImplementedError, AttributeError):
        return None


def _without_mask(space: gymnasium.Space) -> gymnasium.Space:
    if not isinstance(space, gymnasium.spaces.Dict) or _MASK not in space.spaces:
        return space
    return gymnasium.spaces.Dict({k: v for k, v in space.spaces.items() if k != _MASK})


def _split_mask(observation: Any, space: gymnasium.Space) -> tuple[Any, Any]:
    mask = None
    if isinstance(observation, Mapping) and _MASK in observation:
        mask = observation[_MASK]
        observation = {k: v for k, v in observation.items() if k != _MASK}
    return flatten(space, observation), mask


def _action_space(agent: Any, space: gymnasium.Space) -> ActionSpace:
    if isinstance(space, gymnasium.spaces.Discrete):
        return Discrete(int(space.n))
    if isinstance(space, gymnasium.spaces.Box) and space.is_bounded():
        return Box(tuple(space.low.ravel().tolist()), tuple(space.high.ravel().tolist()))
    raise ShapeError(
        f"the actions of {agent} are of {space}, and a dataset holds discrete ones or vectors with "
        "bounds: wrap the environment so that they are Discrete, or a Box with finite bounds."
    )
