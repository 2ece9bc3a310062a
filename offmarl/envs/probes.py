"""Probe environments: small games that each test one ability of a learner.

All have two agents with two actions each, terminate after one to three steps, and have an optimal
return of 1. Train on them in order: the first failure shows which part of the learner is broken.
After Andy Jones, "Debugging RL, Without the Agonizing Pain" (2021), with coordination and memory
added.

With continuous actions an agent chooses the share (1 + a) / 2 of action 1, and the reward is the
expected reward of agents that choose action 1 with this probability. So the optimal return is the
same, and a reward is linear in each agent's action.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from offmarl.config import Validated
from offmarl.envs.base import ActionKind, restart, transition
from offmarl.types import Continuous, Discrete, EnvSpec, Timestep, View


class ProbeState(NamedTuple):
    """The state of any probe."""

    time: Int[Array, ""]
    cue: Int[Array, "2"]
    """One cue for each agent, drawn at the start."""
    first_action: Int[Array, "2"] | Float[Array, "2"]
    """Each agent's share of action 1 in the first step, with discrete actions the action itself; 0
    before it."""


@dataclass(frozen=True, kw_only=True)
class _Probe(Validated, ABC):
    """Everything except the observation and the reward, which differ between probes.

    Parameters
    ----------
    action
        The kind of actions.
    """

    name: str = ""
    action: ActionKind = "discrete"

    length: ClassVar[int] = 1
    """Steps until the episode terminates."""
    optimal_return: ClassVar[float] = 1.0

    @property
    def spec(self) -> EnvSpec:
        """Sizes, name and limit; episodes terminate at the limit, so none is truncated."""
        action = Discrete(2) if self.action == "discrete" else Continuous(1)
        return EnvSpec(self.name, 2, 3, 5, action, time_limit=self.length)

    def reset(self, key: PRNGKeyArray) -> tuple[ProbeState, Timestep]:
        """Start an episode with new cues."""
        cue = jax.random.randint(key, (2,), 0, 2)
        share = jnp.zeros(2, jnp.int32 if self.action == "discrete" else jnp.float32)
        state = ProbeState(jnp.zeros((), jnp.int32), cue, share)
        return state, restart(self._view(state))

    def step(
        self, key: PRNGKeyArray, state: ProbeState, action: Int[Array, "2"] | Float[Array, "2 1"]
    ) -> tuple[ProbeState, Timestep]:
        """Take one step; only the cues are random."""
        share = action if self.action == "discrete" else (1 + action[:, 0]) / 2
        first_action = jnp.where(state.time == 0, share, state.first_action)
        after = ProbeState(state.time + 1, state.cue, first_action)
        return after, transition(
            self._view(after),
            reward=jnp.full(2, self._reward(state, share)),
            terminated=jnp.full(2, after.time >= self.length),
            truncated=jnp.zeros(2, bool),
        )

    def _view(self, state: ProbeState) -> View:
        everything = jnp.concatenate([state.time[None], state.cue, state.first_action])
        return View(
            observation=self._observation(state),
            state=everything.astype(jnp.float32),
            legal_actions=jnp.ones((2, self.spec.action_size), bool),
            alive=jnp.ones(2, bool),
        )

    @abstractmethod
    def _observation(self, state: ProbeState) -> Float[Array, "2 3"]: ...

    @abstractmethod
    def _reward(self, state: ProbeState, share: Array) -> Float[Array, ""]:
        """Return the reward of each agent's share ``(2,)`` of action 1."""


class OneStep(_Probe):
    """One step without information; the reward is the fraction of agents that chose action 1.

    A learner that stays at 0.5 does not learn from rewards. One that converges to 0 has a wrong
    sign. The value of the best policy is 1.
    """

    def _observation(self, state: ProbeState) -> Float[Array, "2 3"]:
        return jnp.zeros((2, 3))

    def _reward(self, state: ProbeState, share: Array) -> Float[Array, ""]:
        return share.mean()


class TwoStep(_Probe):
    """In the first step an agent chooses 0.5 now (action 0) or 1 in the second step (action 1).

    The observation holds the step, and in the second step the agent's choice; the team's reward is
    the mean over the agents. Action 1 is better for discounts above 0.5. A learner that does not
    bootstrap, or that treats the first step as the end, gets 0.5. The values of the best policy are
    γ at the start and 1 in the second step.
    """

    length = 2

    def _observation(self, state: ProbeState) -> Float[Array, "2 3"]:
        start = jnp.stack([jnp.ones(2), jnp.zeros(2), jnp.zeros(2)], -1)
        later = jnp.stack([jnp.zeros(2), 1 - state.first_action, state.first_action], -1)
        return jnp.where(state.time == 0, start, later)

    def _reward(self, state: ProbeState, share: Array) -> Float[Array, ""]:
        now, later = 0.5 * (1 - share).mean(), state.first_action.mean()
        return jnp.where(state.time == 0, now, later)


class Observation(_Probe):
    """One step; each agent observes its own cue; the reward is the fraction that choose their cue.

    A learner that ignores the observations, or mixes up those of the agents, gets 0.5.
    """

    def _observation(self, state: ProbeState) -> Float[Array, "2 3"]:
        return jax.nn.one_hot(state.cue, 3)

    def _reward(self, state: ProbeState, share: Array) -> Float[Array, ""]:
        return _share_of(state.cue, share).mean()


class Match(_Probe):
    """One step without information; the agents must agree: 1 for (1, 1), 0.5 for (0, 0).

    Different actions give 0, so independent uniform play gets 0.375. A learner that converges to
    the worse of the two agreements gets 0.5.
    """

    def _observation(self, state: ProbeState) -> Float[Array, "2 3"]:
        return jnp.zeros((2, 3))

    def _reward(self, state: ProbeState, share: Array) -> Float[Array, ""]:
        return share.prod() + 0.5 * (1 - share).prod()


class Memory(_Probe):
    """Three steps; each agent observes its cue only in the first, and must choose it in the last.

    The last entry of the observation marks the last step. The reward, given only there, is the
    fraction of agents that are right. A learner without memory, or one that loses it between steps
    or carries it into the next episode, gets 0.5. The global state holds the cues in all steps.
    """

    length = 3

    def _observation(self, state: ProbeState) -> Float[Array, "2 3"]:
        cue = jax.nn.one_hot(state.cue, 2) * (state.time == 0)
        answer_now = jnp.full((2, 1), state.time == self.length - 1, jnp.float32)
        return jnp.concatenate([cue, answer_now], -1)

    def _reward(self, state: ProbeState, share: Array) -> Float[Array, ""]:
        return jnp.where(state.time == self.length - 1, _share_of(state.cue, share).mean(), 0.0)


def _share_of(choice: Int[Array, "2"], share: Array) -> Float[Array, "2"]:
    """Return each agent's share of the action that it should choose."""
    return jnp.where(choice == 1, share, 1 - share).astype(jnp.float32)
