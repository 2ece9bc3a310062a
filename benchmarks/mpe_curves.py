"""Learning curves of recorders in the multi-agent particle environments, as JSON and a figure.

    python benchmarks/mpe_curves.py run --scenario simple_tag_v3 --out curves
    python benchmarks/mpe_curves.py draw curves --figure curves.svg

``run`` trains without recording and evaluates both the greedy policy and the one that explores.
Returns are sums over the agents of a side, per episode of 26 steps (JaxMARL's limit of 25 steps
ends an episode after the 26th). In scenarios with an adversary both sides learn at the same time,
so a curve shows one side against a moving opponent. The first point is uniform play. In JaxMARL's
simple_crypto_v3 colours have entries of 255, so that an eavesdropper's reward is about -65,000 in a
step: give ``--options reward_scale=1.5e-5``.
"""

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import tyro
from jaxtyping import Array

from offmarl import envs
from offmarl.networks import PolicyConfig, make_policy
from offmarl.programs import hyperparameters, registry
from offmarl.programs.runs.loop import Schedule, collect
from offmarl.rollout import init_rollout, rollout
from offmarl.teams import teams_of
from offmarl.types import ArrayTree, Policy

SCENARIOS = (
    "simple_spread_v3",
    "simple_speaker_listener_v4",
    "simple_reference_v3",
    "simple_adversary_v3",
    "simple_push_v3",
    "simple_tag_v3",
    "simple_crypto_v3",
)


@dataclass(frozen=True)
class Run:
    """Train one program in one scenario."""

    program: str = "maddpg"
    """Name of a recorder."""
    scenario: str = "simple_spread_v3"
    """Name below jaxmarl/mpe/, or the whole name of another environment."""
    continuous: bool = False
    """Use MPE's continuous actions."""
    steps: int = 500_000
    """Environment steps of training."""
    seeds: tuple[int, ...] = (0,)
    """Training seeds, one after the other."""
    points: int = 20
    """Evaluations in a run."""
    episodes: int = 256
    """Episodes in an evaluation."""
    options: tuple[str, ...] = ()
    """Arguments of the program, as name=value in JSON: twin=true learning_rate=1e-3."""
    out: Path = Path("curves")
    """Folder of the JSON files, one for each run."""


@dataclass(frozen=True)
class Draw:
    """Draw the curves of a folder."""

    folder: Annotated[Path, tyro.conf.Positional]
    """Folder of JSON files that ``run`` wrote."""
    figure: Path = Path("curves.svg")
    """File of the figure."""
    columns: int = 4
    """Panels side by side."""


def main(args: Run | Draw) -> None:
    """Train, or draw."""
    if isinstance(args, Draw):
        draw(args)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    for seed in args.seeds:
        kind = "continuous" if args.continuous else "default"
        name = f"{args.program}-{args.scenario.replace('/', '_')}-{kind}-{seed}.json"
        for row in run(args, seed):
            (args.out / name).write_text(json.dumps(row))


# ---------------------------------------------------------------------------------- running


def run(args: Run, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the curve of one training seed as far as it is known, after each evaluation."""
    name = args.scenario if "/" in args.scenario else f"jaxmarl/mpe/{args.scenario}"
    env = envs.make(name, **({"action_type": "Continuous"} if args.continuous else {}))
    module = registry.load("recorder", args.program)
    options = {key: json.loads(value) for key, value in (x.split("=", 1) for x in args.options)}
    settings = module.Args(env=env.spec.name, total_steps=args.steps, seed=seed, **options)
    program, hyper = module.make(env.spec, settings, env), hyperparameters(settings)
    uniform = make_policy(PolicyConfig("random"), env.spec)
    first = player(env, uniform, args.episodes)(())
    players = [player(env, program.policy(greedy), args.episodes) for greedy in (True, False)]
    points = [{"steps": 0, "seconds": 0.0, "greedy": first, "sampled": first}]
    curve = {
        "program": args.program,
        "env": env.spec.name,
        "seed": seed,
        "options": options,
        "device": jax.devices()[0].device_kind,
        "points": points,
    }
    key = jax.random.key(seed)
    begin = jax.jit(program.init)(key, hyper)
    unit = settings.num_envs * settings.num_steps
    rounds = args.steps // unit
    schedule = Schedule(rounds, rounds, 1, (0,))
    begun, paused = time.monotonic(), 0.0
    train_key = jax.random.fold_in(key, 1)
    for done, (state,), metrics in collect(
        program, [begin], [hyper], [train_key], schedule, 0, [None]
    ):
        if done in due(rounds, args.points):
            jax.block_until_ready(metrics)
            pause = time.monotonic()
            params = program.policy_params(state)
            greedy, sampled = (play(params) for play in players)
            seconds = pause - begun - paused
            points.append(
                {"steps": done * unit, "seconds": seconds, "greedy": greedy, "sampled": sampled}
            )
            print(f"{env.spec.name} {points[-1]}", flush=True)
            yield curve
            paused += time.monotonic() - pause


def due(rounds: int, points: int) -> set[int]:
    """Return the rounds after which policies are evaluated."""
    return {int(x) for x in np.linspace(0, rounds, points + 1).round()[1:]}


def player(
    env: envs.Environment, policy: Policy, episodes: int
) -> Callable[[ArrayTree], dict[str, float]]:
    """Return a function of a policy's parameters that gives the mean return of each side.

    It plays one episode in each of ``episodes`` environments. None of MPE's episodes ends before
    its limit.
    """
    env = envs.autoreset(env)
    limit = env.spec.time_limit or 1

    @jax.jit
    def play(params: ArrayTree) -> Array:
        begin_key, key = jax.random.split(jax.random.key(0))
        state = init_rollout(env, policy, begin_key, episodes)
        _, transitions, *_ = rollout(env, policy, params, state, key, limit)
        return transitions.reward.sum(0).mean(0)

    def by_side(params: ArrayTree) -> dict[str, float]:
        every = np.asarray(play(params))
        return {team.name: float(every[[*team.agents]].sum()) for team in teams_of(env.spec)}

    return by_side


# ---------------------------------------------------------------------------------- drawing


def draw(args: Draw) -> None:
    """Draw one panel for each environment: greedy returns of each side, mean and range of seeds."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    curves = list(read(args.folder))
    names = sorted({curve["env"] for curve in curves}, key=order)
    rows = -(-len(names) // args.columns)
    size = 3.1 * args.columns, 2.5 * rows
    figure, axes = plt.subplots(rows, args.columns, figsize=size, squeeze=False)
    for axis, name in zip(axes.flat, names, strict=False):
        of_env = [curve for curve in curves if curve["env"] == name]
        for program in dict.fromkeys(curve["program"] for curve in of_env):
            same = [curve for curve in of_env if curve["program"] == program]
            for side in same[0]["points"][0]["greedy"]:
                steps = [point["steps"] / 1000 for point in same[0]["points"]]
                values = np.array([[p["greedy"][side] for p in curve["points"]] for curve in same])
                (line,) = axis.plot(steps, values.mean(0), label=f"{program} {side}")
                axis.fill_between(
                    steps, values.min(0), values.max(0), alpha=0.2, color=line.get_color()
                )
        axis.set_title(name.removeprefix("jaxmarl/"), fontsize=8)
        axis.tick_params(labelsize=7)
        axis.legend(fontsize=6, frameon=False)
    for axis in axes.flat[len(names) :]:
        axis.set_axis_off()
    figure.supxlabel("thousand environment steps", fontsize=8)
    figure.supylabel("return of an episode", fontsize=8)
    figure.tight_layout()
    figure.savefig(args.figure, dpi=110)


def read(folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the curves of a folder."""
    for path in sorted(folder.glob("*.json")):
        yield json.loads(path.read_text())


def order(name: str) -> tuple[int, str]:
    """Return a key that sorts environments as `SCENARIOS` does; others follow."""
    base = name.removeprefix("jaxmarl/mpe/").partition(":")[0]
    return (SCENARIOS.index(base) if base in SCENARIOS else len(SCENARIOS)), name


if __name__ == "__main__":
    main(tyro.extras.subcommand_cli_from_dict({"run": Run, "draw": Draw}))
