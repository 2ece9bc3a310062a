# %% [markdown]
# # A PettingZoo environment with a PyTorch policy
#
# An environment is a class with a `spec` and two pure functions, `reset` and `step`. This page
# writes one, records it, and trains a baseline on the recording.
#
# In this environment two agents stand on a line of five places. Each sees its own place and the
# other's, and the team gets a reward in every step in which they stand together.

# %%
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

import offmarl
from offmarl.envs import restart, transition
from offmarl.types import Discrete, EnvSpec, View

PLACES = 5


class MeetState(NamedTuple):
    place: jax.Array  # (2,) int32
    time: jax.Array  # () int32


# %% [markdown]
# ## The environment
#
# Options are fields of a frozen dataclass. The environment never resets itself: recording and
# evaluation do that. `transition` builds the record of a step; the arrays of agents have the
# agents' axis first.


# %%
@dataclass(frozen=True, kw_only=True)
class Meet:
    """Two agents on a line are rewarded while they stand together.

    Parameters
    ----------
    time_limit
        Steps of an episode.
    """

    name: str = ""
    time_limit: int = 10

    @property
    def spec(self) -> EnvSpec:
        return EnvSpec(self.name, 2, 2 * PLACES, 2 * PLACES, Discrete(3), self.time_limit)

    def reset(self, key):
        place = jax.random.randint(key, (2,), 0, PLACES)
        state = MeetState(place, jnp.zeros((), jnp.int32))
        return state, restart(look(state))

    def step(self, key, state, action):
        place = jnp.clip(state.place + action - 1, 0, PLACES - 1)
        state = MeetState(place, state.time + 1)
        reward = jnp.full(2, (place[0] == place[1]).astype(jnp.float32))
        over = jnp.full(2, state.time >= self.time_limit)
        return state, transition(look(state), reward, jnp.zeros(2, bool), over)


def look(state: MeetState) -> View:
    """Return what each agent sees: its own place, then the other's."""
    one_hot = jax.nn.one_hot(state.place, PLACES)
    return View(
        observation=jnp.concatenate([one_hot, one_hot[::-1]], axis=1),
        state=one_hot.reshape(-1),
        legal_actions=jnp.ones((2, 3), bool),
        alive=jnp.ones(2, bool),
    )


# %% [markdown]
# ## Give it a name
#
# A registered environment is found by its name, with options behind a colon. The command line
# finds it by module and factory, without registration:
#
# ```bash
# offmarl record mappo --env jax_environment:Meet --out vaults
# ```

# %%
offmarl.envs.register("example/meet", Meet)
env = offmarl.envs.make("example/meet:time_limit=8")
print(env.spec)

# %% [markdown]
# ## Play a few steps
#
# `jit`, `vmap` and `scan` work, because `reset` and `step` are pure.

# %%
key = jax.random.key(0)
state, timestep = jax.jit(env.reset)(key)
for step in range(3):
    state, timestep = jax.jit(env.step)(key, state, jnp.array([2, 0]))
    print(timestep.reward, timestep.last)

# %% [markdown]
# ## Record and train
#
# The same commands work as for the environments that offmarl ships. In Python:


# %%
def main(out: Path = Path("meet")) -> None:
    print(out)


if __name__ == "__main__":
    main()
