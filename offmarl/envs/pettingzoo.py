"""Environments and policies of offmarl with PettingZoo's parallel API.

The API is that of Terry et al. 2021 (arXiv 2009.14471). `to_pettingzoo` converts an environment,
and `PettingZooPolicy` runs a policy in any environment of the API. PettingZoo is an optional
dependency, so this module is imported lazily.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import gymnasium
import jax
import numpy as np
from pettingzoo import ParallelEnv

from offmarl.config import check_seed
from offmarl.envs.base import Environment
from offmarl.envs.registry import make
from offmarl.envs.translator import (
    MASK,
    OBSERVATION,
    Infos,
    Observations,
    Translator,
    as_sample,
    state_of,
    to_space,
)
from offmarl.errors import OptionError
from offmarl.teams import agent_names
from offmarl.types import ArraySpec, Discrete, EnvSpec, Timestep, View, map_tree

Actor = Callable[..., tuple[Any, Any]]
"""A policy: see `offmarl.programs.LoadedPolicy`."""


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

    Each agent has its own sizes, without padding. Images keep their type, and trees are Dict
    spaces. With discrete actions an observation is a dict of ``observation`` and ``action_mask``.
    An agent that dies stays until it or the episode terminates, since it may still be rewarded.
    """

    def __init__(self, env: Environment, seed: int | None = None):
        spec = env.spec
        self.env = env
        self.metadata = {"name": spec.name, "render_modes": [], "is_parallelizable": True}
        self.render_mode = None
        self.possible_agents = agent_names(spec)
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
        number = int(self._random.integers(2**31)) if seed is None else seed
        reset_key, self._key = jax.random.split(jax.random.key(check_seed(number)))
        self._state, timestep = self._reset(reset_key)
        self._view = jax.device_get(timestep.view)
        alive = self._view.alive
        self.agents = [agent for i, agent in enumerate(self.possible_agents) if alive[i]]
        return self._observations(self.agents), {agent: {} for agent in self.agents}

    def step(self, actions: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
        """Take one step with the actions of the agents in ``agents``."""
        step_key, self._key = jax.random.split(self._key)
        self._state, timestep = self._step(step_key, self._state, self._joint(actions))
        timestep = jax.device_get(timestep)
        before, self._view = self.agents, timestep.next_view
        rewards, terminations, truncations = self._signals(before, timestep)
        self.agents = [a for a in before if not terminations[a] and not truncations[a]]
        infos: dict[str, dict[str, Any]] = {agent: {} for agent in before}
        return self._observations(before), rewards, terminations, truncations, infos

    def state(self) -> np.ndarray:
        """Return the global state."""
        spec, state = self.env.spec, self._current_view().state
        if isinstance(state, Mapping) or not spec.state_size:
            raise NotImplementedError(f"{spec.name} has no state of one array.")
        return np.asarray(state)

    def observation_space(self, agent: str) -> gymnasium.Space:
        """Return the space of an agent's observations."""
        return self.observation_spaces[agent]

    def action_space(self, agent: str) -> gymnasium.Space:
        """Return the space of an agent's actions."""
        return self.action_spaces[agent]

    def render(self) -> None:
        """Do nothing: rendering is not supported."""

    def _current_view(self) -> View:
        if self._view is None:
            raise OptionError("no episode has started: call reset first.")
        return self._view

    def _observations(self, agents: Sequence[str]) -> dict[str, Any]:
        view = self._current_view()
        return {agent: self._observation(view, agent) for agent in agents}

    def _observation(self, view: View, agent: str) -> Any:
        spec, i = self.env.spec, self.possible_agents.index(agent)
        row = map_tree(lambda leaf: leaf[i], view.observation)
        value = map_tree(as_sample, row if spec.observation else row[: _own_size(spec, i)])
        if not isinstance(spec.action, Discrete):
            return value
        actions = self.action_spaces[agent].n
        return {OBSERVATION: value, MASK: np.asarray(view.legal_actions[i, :actions], np.int8)}

    def _joint(self, actions: Mapping[str, Any]) -> np.ndarray:
        missing = [agent for agent in self.agents if agent not in actions]
        if missing or not self.agents:
            reason = f"no action for {', '.join(missing)}" if missing else "no episode has started"
            raise OptionError(f"{self.env.spec.name}: {reason}: give one for each of env.agents.")
        for agent in self.agents:
            space = self.action_spaces[agent]
            is_whole = isinstance(space, gymnasium.spaces.Discrete)
            try:
                action = np.asarray(actions[agent], None if is_whole else np.float32)
                fits = space.contains(action) if is_whole else action.shape == space.shape
            except (TypeError, ValueError):  # lists of different lengths, or text
                fits = False
            if not fits:
                raise OptionError(
                    f"{self.env.spec.name}: {agent} has the actions {space}: give one of them."
                )
        spec, legal = self.env.spec, self._current_view().legal_actions
        if isinstance(spec.action, Discrete):
            anything = legal.argmax(-1)  # for agents that no longer act
            names = enumerate(self.possible_agents)
            return np.array([actions.get(a, anything[i]) for i, a in names], np.int32)
        joint = np.zeros(legal.shape, np.float32)
        for i, agent in enumerate(self.possible_agents):
            vector = np.asarray(actions.get(agent, ()), np.float32)
            joint[i, : vector.size] = vector
        return joint

    def _signals(self, agents: Sequence[str], step: Timestep) -> tuple[dict[str, Any], ...]:
        rewards, terminations, truncations = {}, {}, {}
        for agent in agents:
            i = self.possible_agents.index(agent)
            rewards[agent] = float(step.reward[i])
            terminations[agent] = bool(step.terminated[i])
            truncations[agent] = bool(step.truncated[i])
        return rewards, terminations, truncations


def _own_size(spec: EnvSpec, agent: int) -> int:
    return spec.observation_sizes[agent] if spec.observation_sizes else spec.observation_size


def _spaces(spec: EnvSpec, agent: int) -> tuple[gymnasium.Space, gymnasium.Space]:
    size = spec.action_sizes[agent] if spec.action_sizes else spec.action_size
    vector = ArraySpec((_own_size(spec, agent),))
    observation = to_space(spec.observation_spec if spec.observation else vector)
    if not isinstance(spec.action, Discrete):
        return observation, gymnasium.spaces.Box(-1, 1, (size,), np.float32)
    mask = gymnasium.spaces.Box(0, 1, (size,), np.int8)
    space = gymnasium.spaces.Dict({OBSERVATION: observation, MASK: mask})
    return space, gymnasium.spaces.Discrete(size)


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
        self._key = jax.random.key(check_seed(seed))
        self._carry: Any = None
        self._translator: Translator | None = None

    def seed(self, number: int) -> None:
        """Seed the actions of an episode, for a policy that samples them."""
        self._key = jax.random.key(check_seed(number))

    def reset(self) -> None:
        """Clear the policy's memory of the previous episode."""
        self._carry = None

    def __call__(self, observations: Observations, infos: Infos | None = None) -> dict[str, Any]:
        """Return the actions of the agents that act now."""
        if self._translator is None:
            self._translator = Translator(self._env, like=getattr(self._policy, "spec", None))
        agents = list(self._env.agents)
        alive = [agent in agents for agent in self._translator.keys]
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
        if remember is None or self._translator is None:
            return
        agents = self._translator.keys
        reward = np.array([rewards.get(agent, 0) for agent in agents], np.float32)
        done = [terminations.get(agent, True) or truncations.get(agent, True) for agent in agents]
        self._carry = remember(self._carry, reward, np.array(done, bool))
