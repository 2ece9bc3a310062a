# %% [markdown]
# # A PettingZoo environment with a PyTorch policy
#
# This page records a PettingZoo environment of the parallel API while a policy written in PyTorch
# acts in it. Then it trains a baseline on the recording, and lets the baseline act in the same
# environment. Install `offmarl[pettingzoo]` and `torch` first.

# %%
import subprocess
import sys

import numpy as np
import pettingzoo
import torch
from gymnasium import spaces

import offmarl

# %% [markdown]
# ## The environment
#
# Each of two agents sees a light that is on or off, and is rewarded for choosing the action with
# the same number. Any environment works whose actions are Discrete, or Boxes with finite bounds.


# %%
class Lights(pettingzoo.ParallelEnv):
    metadata = {"name": "lights"}

    def __init__(self, steps=10):
        self.possible_agents = ["left", "right"]
        self.agents = []
        self.steps = steps

    def observation_space(self, agent):
        return spaces.Box(0, 1, (1,), np.float32)

    def action_space(self, agent):
        return spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        if seed is not None:
            self.random = np.random.default_rng(seed)
        self.agents, self.time = list(self.possible_agents), 0
        return self.look(), {agent: {} for agent in self.agents}

    def look(self):
        self.light = self.random.integers(2, size=2)
        lights = self.light.astype(np.float32)[:, None]
        return dict(zip(self.possible_agents, lights, strict=True))

    def step(self, actions):
        right = {a: actions[a] == self.light[i] for i, a in enumerate(self.possible_agents)}
        rewards = {agent: float(value) for agent, value in right.items()}
        self.time += 1
        over = dict.fromkeys(self.agents, self.time >= self.steps)
        nothing = dict.fromkeys(self.agents, False)
        infos = {agent: {} for agent in self.agents}
        self.agents = [] if self.time >= self.steps else self.agents
        return self.look(), rewards, nothing, over, infos


# %% [markdown]
# ## The policy
#
# The policy returns an action for each agent, and the log-probability of each action. The
# recording keeps both. The log-probabilities are optional.

# %%
torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(1, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))


@torch.no_grad()
def act(observations):
    inputs = torch.as_tensor(np.stack(list(observations.values())))
    drawn = torch.distributions.Categorical(logits=network(inputs))
    actions = drawn.sample()
    log_probs = drawn.log_prob(actions)
    return (
        dict(zip(observations, actions.tolist(), strict=True)),
        dict(zip(observations, log_probs.tolist(), strict=True)),
    )


# %% [markdown]
# ## Train it a little
#
# Train the policy in any way. This example follows the rewards of single steps (REINFORCE).

# %%
optimiser = torch.optim.Adam(network.parameters(), lr=0.02)
light = torch.randint(2, (4096, 1))
for inputs in light.float().split(64):
    drawn = torch.distributions.Categorical(logits=network(inputs))
    actions = drawn.sample()
    rewards = (actions == inputs[:, 0]).float() - 0.5
    loss = -(rewards * drawn.log_prob(actions)).mean()
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()

# %% [markdown]
# ## Record it
#
# The recorder steps the environment, and writes each episode when it has ended. If the program is
# stopped, the vault is valid. When it runs again, `resume=True` appends the missing episodes:
# `recorded` counts those that writers of this `run` name have written.

# %%
env = Lights()
with offmarl.record(env, "lights.vlt", resume=True, run="lights") as recorder:
    for episode in range(recorder.recorded(), 100):
        observations, infos = recorder.reset(seed=episode)
        while env.agents:
            actions, log_probs = act(observations)
            observations, *_, infos = recorder.step(actions, log_prob=log_probs)

dataset = offmarl.open("lights.vlt")
print("mean return recorded:", dataset.episodes.mean_return)

# %% [markdown]
# ## Train a baseline on it
#
# offmarl cannot build this environment by a name, so the baseline is trained without it:
#
# ```bash
# offmarl train bc --vault lights.vlt --env none --updates 300 --out lights/bc
# ```

# %%
command = "train bc --vault lights.vlt --env none --updates 300 --out lights/bc"
subprocess.run([sys.executable, "-m", "offmarl", *command.split()], check=True)

# %% [markdown]
# ## Act with the baseline
#
# `PettingZooPolicy` maps PettingZoo's dictionaries to actions.

# %%
policy = offmarl.envs.PettingZooPolicy(offmarl.load_policy("lights/bc", greedy=True), env)
returns = []
for episode in range(20):
    observations, infos = env.reset(seed=1000 + episode)
    policy.reset()
    total = 0.0
    while env.agents:
        observations, rewards, *_, infos = env.step(policy(observations, infos))
        total += float(np.mean(list(rewards.values())))
    returns.append(total)
print("mean return of the clone's best actions:", np.mean(returns))
