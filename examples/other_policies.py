# %% [markdown]
# # Record a policy of another program
#
# `record_policy` records any policy in an environment: the steps, the log-probability of each
# action, the last observation of each episode, and where the data comes from. A recording that is
# stopped goes on when the same call is repeated; with other parameters, or another Python function,
# it is refused. Recordings need three things: the environment, the policy, and its parameters.

# %%
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import offmarl
from offmarl.programs import function_policy, network_policy, record_policy

env = offmarl.envs.make("swarm/coverage-2")

# %% [markdown]
# ## A Python function
#
# It gets the observations and legal actions of the agents of one environment as NumPy arrays, and
# returns their actions. It may be a planner, a script, or the policy of another library.


# %%
def hold_course(observation: np.ndarray, legal_actions: np.ndarray) -> np.ndarray:
    """Each drone takes the first of its legal actions, drone 1 the last."""
    first = legal_actions.argmax(-1)
    last = legal_actions.shape[-1] - 1 - legal_actions[:, ::-1].argmax(-1)
    return np.where([True, False], first, last)


policy = function_policy(env.spec, hold_course)
source = {"program": "hold_course", "paper": "none"}
record_policy(env, policy, (), "other.vlt/function", steps=400, num_envs=4, provenance=source)

# %% [markdown]
# ## A flax module with parameters
#
# Its outputs are the logits of the actions. The policy samples legal actions and records their
# log-probabilities. Here the parameters are fresh; yours come from your checkpoint.


# %%
class Network(nn.Module):
    actions: int

    @nn.compact
    def __call__(self, observation: jax.Array) -> jax.Array:
        return nn.Dense(self.actions)(nn.relu(nn.Dense(32)(observation)))


network = Network(env.spec.num_actions)
params = network.init(jax.random.key(0), jnp.zeros((2, env.spec.observation_size)))
record_policy(env, network_policy(network.apply), params, "other.vlt/flax", 400, num_envs=4)

# %% [markdown]
# A policy with a memory, or one that computes its actions in JAX, is an `offmarl.types.Policy`: a
# NamedTuple of pure functions.
#
# ## A PyTorch policy in a loop of your own
#
# A policy that steps a PettingZoo environment is recorded by `offmarl.record`, as
# [this page](pettingzoo_torch.md) shows for a PyTorch network.
#
# ## The data

# %%
for name in ("function", "flax"):
    data = offmarl.open(f"other.vlt/{name}")
    print(name, "mean return:", round(data.episodes.mean_return, 2), data.provenance["recorded"])
