# %% [markdown]
# # RWARE: record, learn offline and compare
#
# Four robots bring shelves to the goals of a small warehouse: the task *tiny-4ag* of RWARE
# (Papoudakis et al. 2021) in Jumanji's version, in which a collision of two robots ends the
# episode. Rewards are sparse, one for each delivery. Needs `pip install 'offmarl[envs]'`.
#
# The file runs as it is. By default it takes a small budget, minutes on a CPU, in which the robots
# hardly learn to deliver: it shows the way from the environment to the comparison.
# `python rware.py --full` takes the budget of a study, 20 million steps and ten seeds for each
# baseline, for which an accelerator is advisable. Stop it at any time, and start it again to
# continue.

# %%
import subprocess
import sys
from pathlib import Path

import offmarl

FULL = "--full" in sys.argv
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
    ("random,medium,expert,replay", "--total-steps 20000000 --num-envs 64 --num-steps 128")
    if FULL
    else ("random,replay", "--total-steps 40000 --num-envs 16 --steps 8000 --eval-episodes 16")
)
run(f"record mappo --env {ENV} --tiers {tiers} {budget} --out rware")

# %% [markdown]
# ## Learn offline

# %%
data = Path("rware") / f"{ENV}.vlt"
source = data / ("mappo-0-medium" if FULL else "mappo-0-replay")
sizes = (
    "--seeds 10 --updates 100000"
    if FULL
    else "--seeds 3 --updates 60 --batch-size 8 --final-episodes 16 --eval-episodes 8"
)
for baseline in ("bc", "maicq"):
    run(f"train {baseline} --vault {source} {sizes} --out rware/runs/{baseline}")

# %% [markdown]
# ## Compare
#
# The scores are returns: deliveries, and the mean over the robots.

# %%
run("compare rware/runs/bc rware/runs/maicq --html rware/report.html")
for path in sorted(data.iterdir()):
    recorded = offmarl.open(path).episodes
    print(path.name, "mean return:", round(recorded.mean_return or 0.0, 3))
