# %% [markdown]
# # RWARE: record, learn offline and compare
#
# Four robots bring shelves to the goals of a small warehouse: the task *tiny-4ag* of RWARE
# (Papoudakis et al. 2021) in Jumanji's version, in which a collision of two robots ends the
# episode. Rewards are sparse, one for each delivery. Needs `pip install 'offmarl[envs]'`.
#
# The file runs as it is. By default it takes a small budget, minutes on a CPU, in which the robots
# hardly learn to deliver: it shows the way from the environment to the comparison.
# `python rware.py --full` takes the budget of a study: eight million steps, after which the robots
# deliver 22 shelves in an episode, and five seeds for each baseline. The training takes ten minutes
# on two cores. Stop it at any time, and start it again to continue.

# %%
import subprocess
import sys
from pathlib import Path

import offmarl

FULL = "--full" in sys.argv
OUT = "rware-full" if FULL else "rware"
ENV = "jumanji/robot_warehouse:request_queue_size=4,shelf_rows=1"


def run(command: str) -> None:
    """Run a command of offmarl, which must succeed."""
    subprocess.run([sys.executable, "-m", "offmarl", *command.split()], check=True)


# %% [markdown]
# ## Record
#
# MAPPO learns in the warehouse, and its training data becomes a vault. In the full budget it is
# also recorded at two levels of skill, which offmarl refuses to do for a policy that is not better
# than random play.

# %%
tiers, budget = (
    ("random,medium,expert", "--total-steps 8000000 --eval-episodes 128")
    if FULL
    else ("random,replay", "--total-steps 40000 --num-envs 16 --steps 8000 --eval-episodes 16")
)
run(f"record mappo --env {ENV} --tiers {tiers} {budget} --out {OUT}")

# %% [markdown]
# ## Learn offline

# The policies that recorded the data have no memory, and so have their clones.

# %%
data = Path(OUT) / f"{ENV}.vlt"
source = data / ("mappo-0-medium" if FULL else "mappo-0-replay")
sizes = (
    "--seeds 5 --updates 5000 --batch-size 64 --hidden 128 --eval-every 1000"
    if FULL
    else "--seeds 3 --updates 60 --batch-size 8 --final-episodes 16 --eval-episodes 8"
)
for baseline in ("bc", "maicq"):
    path = f"{OUT}/runs/{baseline}"
    run(f"train {baseline} --vault {source} --network feedforward {sizes} --out {path}")

# %% [markdown]
# ## Compare
#
# The scores are returns: deliveries, and the mean over the robots. Here it matters how a policy
# acts. Four robots that always take their best action block each other for good: the expert itself
# makes 11 deliveries so, and 22 when it samples. Compare both columns before you rank methods.

# %%
run(f"compare {OUT}/runs/bc {OUT}/runs/maicq --html {OUT}/report.html")
for path in sorted(data.iterdir()):
    recorded = offmarl.open(path).episodes
    print(path.name, "mean return:", round(recorded.mean_return or 0.0, 3))
