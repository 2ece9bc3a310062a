# %% [markdown]
# # Behaviour cloning in PyTorch
#
# This page trains a policy in PyTorch on a vault: batches come through a `DataLoader` with two
# workers, and a part of the episodes is held out to validate. Install `offmarl[torch]` first.
#
# offmarl provides the batches; the learner is your own code. Any vault works. So that the page
# needs no download, it makes one of its own.

# %%
from pathlib import Path

import numpy as np
import torch
from torch.utils.data import DataLoader

import offmarl

# %% [markdown]
# ## The data
#
# Three robots stand on a line. Each sees how far away its goal is, and may step to the left, stay
# or step to the right. The recorded robots go towards their goals, but one action of four is
# random. A second run of this page opens the vault that the first one made.

# %%
AGENTS, STEPS, EPISODES = 3, 20, 200


def run(act, episodes, seed):
    """Let robots act; returns observations, actions and rewards, (episodes, STEPS, ...)."""
    random = np.random.default_rng(seed)
    distance = random.integers(-9, 10, (episodes, AGENTS))
    observations, actions, rewards = [], [], []
    for _ in range(STEPS):
        observations.append(distance[..., None].astype(np.float32))
        actions.append(act(observations[-1], random))
        distance = distance - (actions[-1] - 1)
        rewards.append(-np.abs(distance).mean(-1).astype(np.float32))
    return [np.stack(arrays, axis=1) for arrays in (observations, actions, rewards)]


def towards_goals(observations, random):
    best = np.sign(observations[..., 0]).astype(int) + 1
    return np.where(random.random(best.shape) < 0.25, random.integers(3, size=best.shape), best)


if not Path("robots.vlt/main").exists():
    observations, actions, rewards = run(towards_goals, EPISODES, seed=0)
    offmarl.from_arrays(
        "robots.vlt/main",
        observations=observations.reshape(-1, AGENTS, 1),
        actions=actions.reshape(-1, AGENTS),
        rewards=rewards.reshape(-1),
        truncations=np.arange(EPISODES * STEPS) % STEPS == STEPS - 1,
        num_agents=AGENTS,  # rewards and ends are those of the team
    )
dataset = offmarl.open("robots.vlt/main")
print("mean return recorded:", round(dataset.episodes.mean_return, 1))

# %% [markdown]
# ## Batches
#
# `split` divides the episodes at random, without copying anything. `torch_batches` makes batches of
# windows of five steps. Three epochs are three passes over all windows, each in another order. The
# batches are the same for any number of workers: batch `i` follows from the seed and `i`.
#
# A batch is an `offmarl.Sequence` of tensors. Windows can hold steps of several episodes; between
# two episodes lies a slot without an action, so `mask` marks the steps that count.

# %%
parts = dataset.split(validation=0.1, seed=0)
batches = parts["train"].torch_batches(batch=64, length=5, seed=0, epochs=3)
loader = DataLoader(batches, batch_size=None, num_workers=2, multiprocessing_context="fork")

# %% [markdown]
# On systems without a fork, leave `multiprocessing_context` out, and put the lines that use the
# loader below `if __name__ == "__main__":`.
#
# ## The learner

# %%
torch.manual_seed(0)
network = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.Tanh(), torch.nn.Linear(32, 3))
optimiser = torch.optim.Adam(network.parameters(), lr=0.01)


def loss_and_agreement(batch):
    """Return the cross-entropy of the recorded actions, and the share that the best ones equal."""
    view = batch.view_tm1  # before each action; view_t is what the action led to
    logits = network(view.observation).masked_fill(~view.legal_actions, -1e9)
    counts = batch.mask[..., None] & view.alive
    losses = torch.nn.functional.cross_entropy(
        logits[counts], batch.action[counts].long(), reduction="mean"
    )
    agrees = (logits.argmax(-1) == batch.action)[counts].float().mean()
    return losses, agrees


for step, batch in enumerate(loader):
    loss, agreement = loss_and_agreement(batch)
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    if step % 50 == 0:
        print(f"batch {step} of {len(batches)}: loss {loss:.2f}, agreement {agreement:.0%}")

# %% [markdown]
# To go on after a stop, pass what `batches.state(taken)` returns, where `taken` is the number of
# batches that the loop has taken: `torch_batches(64, 5, epochs=3, **state)`.
#
# ## Validation
#
# `stream(to="torch")` gathers batches in threads of this process instead. One action of four is
# random, and a third of these is the best one by chance, so five of six actions can be predicted.

# %%
with torch.no_grad(), parts["validation"].stream(64, 5, to="torch", epochs=1) as stream:
    found = [loss_and_agreement(batch)[1] for batch in stream]
print(f"agreement on held-out episodes: {torch.stack(found).mean():.0%}")


# %% [markdown]
# The clone's best actions are not random, so it gets a higher return than the recording.


# %%
@torch.no_grad()
def clone(observations, random):
    return network(torch.from_numpy(observations)).argmax(-1).numpy()


_, _, rewards = run(clone, 500, seed=1)
print("mean return of the clone:", round(float(rewards.sum(1).mean()), 1))

# %% [markdown]
# ## Other ways to load
#
# - `dataset.torch_windows(5)` is a map-style dataset: all windows by number, for any sampler.
# - `offmarl.mix({"a.vlt": 0.7, "b.vlt": 0.3})` has `torch_batches`, a part of a split all of these.
# - `dataset.window_items(5)` is a source for Grain: `grain.MapDataset.source(...)`.
# - `dataset.episodes.to_pandas()` is the table of episodes.
