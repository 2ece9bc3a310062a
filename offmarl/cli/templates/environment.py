"""MyEnv: agents on a line that must meet.

Replace the options, the state, the view and the rules with your own. Then describe the environment,
record data in it, and train on the data::

    offmarl envs my_env.py:MyEnv
    offmarl record mappo --env my_env.py:MyEnv --tiers random,expert
    offmarl train bc --vault vaults/my_env.py:MyEnv.vlt/mappo-0-expert --env my_env.py:MyEnv

A test of the protocol, for pytest::

    import pytest
    from offmarl.testing import EnvironmentConformance
    from my_env import MyEnv

    class TestMyEnv(EnvironmentConformance):
        @pytest.fixture
        def env(self):
            return MyEnv()
"""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from offmarl import Discrete, EnvSpec, Timestep, View
from offmarl.envs import restart, transition

_LENGTH = 10.0
_MOVES = (0.0, -1.0, 1.0)
_NEAR = 1.0


class State(NamedTuple):
    """Everything that the next step depends on; arrays only."""

    position: Float[Array, "N"]
    time: Int[Array, ""]


# A frozen dataclass is hashable, so that JAX compiles a program once for equal environments.
@dataclass(frozen=True, kw_only=True)
class MyEnv:
    """N agents stay, or step left or right, on a line; the episode terminates when all are near.

    The team's reward is minus the mean distance from the centre of the team.

    Parameters
    ----------
    name
        The full name; offmarl sets it.
    num_agents
        N.
    time_limit
        Steps after which an episode is truncated.
    """

    name: str = ""
    num_agents: int = 3
    time_limit: int = 20

    @property
    def spec(self) -> EnvSpec:
        """Sizes, name and limit; static."""
        return EnvSpec(
            self.name,
            num_agents=self.num_agents,
            observation_size=2,
            state_size=self.num_agents,
            action=Discrete(len(_MOVES)),
            time_limit=self.time_limit,
        )

    def reset(self, key: PRNGKeyArray) -> tuple[State, Timestep]:
        """Start an episode."""
        position = jax.random.uniform(key, (self.num_agents,), maxval=_LENGTH)
        state = State(position, jnp.zeros((), jnp.int32))
        return state, restart(self._view(state))

    def step(
        self,
        key: PRNGKeyArray,  # noqa: ARG002 - for random numbers of the step
        state: State,
        action: Int[Array, "N"],
    ) -> tuple[State, Timestep]:
        """Take one step; the environment never resets itself."""
        position = jnp.clip(state.position + jnp.asarray(_MOVES)[action], 0.0, _LENGTH)
        after = State(position, state.time + 1)
        distance = jnp.abs(position - position.mean())
        met = (distance < _NEAR).all()
        over = ~met & (after.time >= self.time_limit)
        return after, transition(
            self._view(after),
            reward=jnp.full(self.num_agents, -distance.mean()),
            terminated=jnp.full(self.num_agents, met),  # nothing follows
            truncated=jnp.full(self.num_agents, over),  # the time limit
        )

    def _view(self, state: State) -> View:
        """Return the view of a state: float32 vectors, and masks."""
        centre = jnp.full(self.num_agents, state.position.mean())
        return View(
            observation=jnp.stack([state.position, centre], axis=-1) / _LENGTH,
            state=state.position / _LENGTH,
            legal_actions=jnp.ones((self.num_agents, len(_MOVES)), bool),
            alive=jnp.ones(self.num_agents, bool),
        )
