"""Runs on several devices, each in a process of its own: JAX knows its devices from the start.

python -m tests.programs.several_devices WORK ARGUMENT...
"""

import json
import sys
from pathlib import Path

from offmarl import envs, programs, vault
from offmarl.networks import PolicyConfig, make_policy


def record(out: str, environments: str, counts: str, num_envs: str = "8") -> dict[str, list[str]]:
    """Record random policies on several numbers of devices; return the digests of each."""
    found: dict[str, list[str]] = {}
    for name in environments.split(","):
        env = envs.make(name)
        policy = make_policy(PolicyConfig("random"), env.spec)
        for count in map(int, counts.split(",")):
            path = Path(out) / f"{name.replace('/', '-')}.vlt" / f"on-{count}"
            steps = int(num_envs) * 70  # two chunks
            programs.record_policy(env, policy, (), path, steps, int(num_envs), devices=count)
            found.setdefault(name, []).append(vault.open_vault(path).digest())
    return found


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*sys.argv[2:])))
