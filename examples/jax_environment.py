# %% [markdown]
# # A JAX environment of your own
#
# An environment is a class with a `spec` and two pure functions, `reset` and `step`. This page
# writes one, records it, and trains a baseline on the recording.
#
# In this environment two agents move on a line of five places. Each agent sees both places. The
# team gets a reward in every step after which both agents are at the same place.

# %%
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp

import offmarl
from offmarl.envs import restart, transition
from offmarl.networks import PolicyConfig, make_policy
from offmarl.programs import record_policy
from offmarl.types import Discrete, EnvSpec, View

PLACES = 5


class MeetState(NamedTuple):
    place: jax.Array  # (2,) int32
    time: jax.Array  # () int32


# %% [markdown]
# ## The environment
#
# Options are fields of a frozen dataclass. The environment never resets itself: recording and
# evaluation do that. `transition` builds the timestep after a step. In arrays over agents, the
# agents are the first axis.


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
        return EnvSpec(
            name=self.name,
            num_agents=2,
            observation_size=2 * PLACES,
            state_size=2 * PLACES,
            action=Discrete(3),  # step back, stay, step forward
            time_limit=self.time_limit,
        )

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
# ## Play a few steps
#
# Every argument with a default is an option. `jit`, `vmap` and `scan` work, because `reset` and
# `step` are pure functions.

# %%
if __name__ == "__main__":  # skipped when a command imports this file
    env = Meet(time_limit=8)
    state, timestep = jax.jit(env.reset)(jax.random.key(0))
    print("places:", state.place)
    for _ in range(3):
        state, timestep = jax.jit(env.step)(jax.random.key(1), state, jnp.array([0, 2]))
        print("places:", state.place, "rewards:", timestep.reward)

# %% [markdown]
# ## Use it from the command line
#
# Name the file and the class wherever a command takes an environment. Options follow a second
# colon. Save this page as `jax_environment.py`, then describe the environment, train agents in it
# online, record them, and learn offline from the recording:
#
# ```bash
# offmarl envs jax_environment.py:Meet
# offmarl record mappo --env jax_environment.py:Meet --total-steps 100000 --steps 10000 --out meet
# offmarl ls meet
# ```
#
# ```bash
# offmarl train bc --vault meet/*/mappo-0-expert --env jax_environment.py:Meet \
#     --updates 3000 --out meet/bc
# ```
#
# `train` needs `--env` again, because a vault only stores the environment's name, and offmarl never
# imports code because a dataset names it.
#
# ## Use it from Python
#
# `offmarl.envs.register` gives the environment a name in this process. A package gives it one in
# every process with an entry point in the group `offmarl.envs`.


# %%
def main(path: Path) -> None:
    offmarl.envs.register("example/meet", Meet)
    env = offmarl.envs.make("example/meet:time_limit=8")
    uniform = make_policy(PolicyConfig("random"), env.spec)
    record_policy(env, uniform, (), path, steps=2000, num_envs=8)
    dataset = offmarl.open(path)
    print(dataset.spec.name, "mean return of random play:", dataset.episodes.mean_return)
    batch = dataset.replay(batch=32, length=4).sample(jax.random.key(0))
    print("a batch of actions:", batch.action.shape)


if __name__ == "__main__":
    main(Path("meet/python.vlt/random"))
