"""Runs on several devices, each in a process of its own: JAX knows its devices from the start.

python -m tests.programs.several_devices WORK ARGUMENT...
"""

import json
import sys
from pathlib import Path

import numpy as np

from baselines import bc, qmix_cql
from offmarl import envs, programs, vault
from offmarl.envs.scripted import scripted_policy
from offmarl.networks import PolicyConfig, make_policy
from recorders import ippo


def record(
    out: str, environments: str, counts: str, kind: str = "random", num_envs: str = "8"
) -> dict[str, list[str]]:
    """Record fixed policies on several numbers of devices; return the digests of each."""
    digests: dict[str, list[str]] = {}
    for name in environments.split(","):
        env = envs.make(name)
        policy = make_policy(PolicyConfig("random"), env.spec)
        if kind == "scripted":
            policy = scripted_policy(env, kind)
        for count in map(int, counts.split(",")):
            path = Path(out) / f"{name.replace('/', '-')}.vlt" / f"on-{count}"
            steps = int(num_envs) * 70  # two chunks
            programs.record_policy(env, policy, (), path, steps, int(num_envs), devices=count)
            digests.setdefault(name, []).append(vault.open_vault(path).digest())
    return digests


def train(vault_path: str, out: str, counts: str, *options: str) -> dict[str, list[float]]:
    """Train a baseline on several numbers of devices; return the parameters of each.

    It is behaviour cloning, or with priorities QMIX+CQL.
    """
    by_count = {}
    for count in counts.split(","):
        run = Path(out) / count
        settings = dict(option.split("=") for option in options)
        program = qmix_cql if "prioritise" in settings else bc
        sizes = {"updates": 20, "batch_size": 16, "length": 5, "held_out": 0.0, "env": "none"}
        sizes |= {name: json.loads(x) for name, x in settings.items() if name != "replay"}
        sizes["replay"] = settings.get("replay", "device")
        program.main(program.Args(vault=vault_path, out=run, devices=int(count), **sizes))
        by_count[count] = parameters(run)
    return by_count


def train_online(out: str, counts: str) -> dict[str, list[float]]:
    """Train two seeds of a recorder on several numbers of devices; return their parameters."""
    by_count = {}
    for count in counts.split(","):
        args = ippo.Args(
            env="swarm/coverage-2",
            out=Path(out) / count,
            total_steps=16 * 64 * 4,
            num_envs=16,
            num_steps=64,
            evaluations=1,
            eval_episodes=2,
            tiers="random",
            steps=320,
            seeds=2,
            devices=int(count),
        )
        ippo.main(args)
        runs = Path(out) / count / "swarm" / "coverage-2.run"
        by_count[count] = [x for run in sorted(runs.iterdir()) for x in parameters(run)]
    return by_count


def parameters(run: Path) -> list[float]:
    """Return the parameters of the policies of a run, one after the other."""
    import jax

    from offmarl import load_policy, tracking

    seeds = tracking.read_run(run)["seeds"]
    policies = [load_policy(run, seed=seed).params for seed in seeds]
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(policies)]).tolist()


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
