"""Training of a large swarm: environment steps a second and peak memory, on one core.

    taskset -c 0 python benchmarks/large.py

Each variant of MAPPO trains in a process of its own, for a few updates that are compiled before.
"state": a critic of the global state, whose part of the first layer is computed once; "pooled": a
critic that pools over the agents; "copied": the peer, for which the state is copied to every agent
before the first layer, as a dense layer on the concatenation needs it. Where other work shares the
core, the steps for each second of CPU time tell more than those for each second.
"""

import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import tyro

from offmarl import envs
from offmarl.networks import Inputs, torsos
from offmarl.networks.linear import id_features
from offmarl.programs import hyperparameters, registry
from offmarl.programs.program import structure

VARIANTS = ("copied", "state", "pooled")


@dataclass(frozen=True)
class Args:
    env: str = "swarm/coverage-100"
    """Environment."""
    num_envs: int = 8
    """Environments side by side."""
    num_steps: int = 64
    """Time steps of each in an update."""
    updates: int = 10
    """Updates that are timed."""
    only: Literal["copied", "state", "pooled"] | None = None
    """Measure one variant in this process, and print JSON."""


class CopyingLayer(nn.Module):
    """The first layer as a dense layer on the concatenation for each agent."""

    features: int
    agent_id: Any = "onehot"
    kernel_init: Any = nn.initializers.orthogonal(2**0.5)

    @nn.compact
    def __call__(self, inputs: Any) -> jax.Array:
        own_view = inputs.own if isinstance(inputs, Inputs) else inputs
        parts = [own_view]
        if isinstance(inputs, Inputs):
            shared = inputs.shared[..., None, :]
            parts.insert(0, jnp.broadcast_to(shared, (*own_view.shape[:-1], shared.shape[-1])))
        ids = jnp.asarray(id_features(self.agent_id, own_view.shape[-2]))
        parts.append(jnp.broadcast_to(ids, (*own_view.shape[:-1], ids.shape[-1])))
        layer = nn.Dense(self.features, kernel_init=self.kernel_init)
        return layer(jnp.concatenate(parts, -1))


def measure(args: Args) -> dict[str, float]:
    """Return the speed and the peak memory of a variant."""
    if args.only == "copied":
        torsos.InputLayer = CopyingLayer  # type: ignore[misc,assignment]
    module = registry.load("recorder", "mappo")
    options: dict[str, Any] = {"agent_id": "none"} if args.only == "pooled" else {}
    options["critic"] = "pooled" if args.only == "pooled" else "state"
    sizes = {"num_envs": args.num_envs, "num_steps": args.num_steps}
    program_args = module.Args(env=args.env, **sizes, **options)
    env = envs.make(args.env)
    program = module.make(env.spec, structure(program_args), env)
    hyper, key = hyperparameters(program_args), jax.random.key(0)
    update = jax.jit(program.stages[0].update, donate_argnums=0)
    state, _ = jax.block_until_ready(update(jax.jit(program.init)(key, hyper), None, key, hyper))
    start, begun = time.perf_counter(), time.process_time()
    for number in range(args.updates):
        state, _ = update(state, None, jax.random.fold_in(key, number), hyper)
        jax.block_until_ready(state)
    seconds, busy = time.perf_counter() - start, time.process_time() - begun
    steps = args.updates * args.num_steps * args.num_envs
    return {
        "speed": steps / seconds,
        "busy": steps / busy,
        "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def main(args: Args) -> None:
    if args.only is not None:
        print(json.dumps(measure(args)))
        return
    print(f"MAPPO on {args.env}, {args.num_envs} environments, updates of {args.num_steps} steps\n")
    print("| critic | env-steps/s | for each second of CPU | of copied | peak memory, GiB |")
    print("|---|---:|---:|---:|---:|")
    slowest = 0.0
    for variant in VARIANTS:
        command = [sys.executable, __file__, *sys.argv[1:], "--only", variant]
        printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        figures = json.loads(printed.splitlines()[-1])
        slowest = slowest or figures["busy"]
        cells = [variant, f"{figures['speed']:,.0f}", f"{figures['busy']:,.0f}"]
        cells += [f"{figures['busy'] / slowest:.1f}x", f"{figures['memory']:.2f}"]
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
