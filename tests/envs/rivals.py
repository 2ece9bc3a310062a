"""A game of two teams, small enough to compute by hand."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from offmarl.envs import restart, transition
from offmarl.types import Discrete, EnvSpec, Policy, View

TEAMS = (0, 1, 0)


class State(NamedTuple):
    """The time, the last actions, who is alive, and a random number."""

    time: Any
    action: Any
    alive: Any
    luck: Any


@dataclass(frozen=True)
class Rivals:
    """Agents 0 and 2 are cats, agent 1 is a mouse.

    Each cat earns its action plus the mouse's; the mouse earns minus the cats' sum. The mouse
    terminates in a step after the first in which it does 2, and the others after 4 steps.
    """

    name: str = ""

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(
            self.name or "rivals",
            num_agents=3,
            observation_size=2,
            state_size=2,
            action=Discrete(3),
            time_limit=4,
            reward="individual",
            teams=TEAMS,
            team_names=("cats", "mice"),
        )

    def reset(self, key):
        luck = jax.random.uniform(key)
        state = State(jnp.zeros((), jnp.int32), jnp.zeros(3, jnp.int32), jnp.ones(3, bool), luck)
        return state, restart(self._view(state))

    def step(self, key, state, action):
        caught = (action[1] == 2) & (state.time > 0)
        alive = state.alive.at[1].set(state.alive[1] & ~caught)
        after = State(state.time + 1, action, alive, jax.random.uniform(key))
        cats, mouse = action[0] + action[2], action[1]
        reward = jnp.array([action[0] + mouse, -cats, action[2] + mouse], jnp.float32)
        terminated = ~alive
        over = after.time >= 4
        return after, transition(
            self._view(after), reward, terminated, truncated=~terminated & over
        )

    def scripted(self) -> Policy:
        """Each agent's action is its index."""

        def act(_params, carry, observation, legal_actions, _key):
            action = jnp.arange(3, dtype=jnp.int32)
            return action, jnp.zeros(3), carry

        return Policy(lambda: (), act, draws=lambda _params: False)

    def _view(self, state):
        time = jnp.full(3, state.time, jnp.float32)
        observation = jnp.stack([time, state.action.astype(jnp.float32)], -1)
        return View(
            observation, jnp.array([state.time, state.luck]), jnp.ones((3, 3), bool), state.alive
        )
