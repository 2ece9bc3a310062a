"""Cross-play beside jax-aht: the same policies on level-based foraging, their returns and the time.

    python3.11 -m venv peer
    peer/bin/pip install jax==0.5.3 flax==0.10.2 chex==0.1.88 orbax-checkpoint==0.11.1 \
        distrax jumanji==1.1.0 jaxmarl==0.0.7 hydra-core omegaconf safetensors prettytable \
        requests rliable seaborn "setuptools<81"
    git clone https://github.com/LARG/jax-aht
    offmarl record ippo --env jumanji/lbf:grid_size=7,fov=7,num_food=3 --activation tanh \
        --agent-id none --seeds 5 --tiers "" --total-steps 400000 --out lbf
    taskset -c 0 python benchmarks/jax_aht.py --python peer/bin/python --checkout jax-aht \
        --run "lbf/jumanji/lbf:grid_size=7,fov=7,num_food=3.run/ippo-0-to-4"

The scenario is jax-aht's own (7x7, three pieces of food), and the network its own, too, so that its
policies take the weights as they are. Each way has a process of its own in each round, and nothing
is kept between processes:

offmarl     the work of `offmarl cross-play`: tables of best and of sampled actions, twice
matrix      jax-aht's `heldout_crossplay`, which compiles a program for each pair: sampled actions,
            as in its configuration of this scenario
stacked     its `eval_egos_vs_heldouts`, which compiles one for each partner: the same table
once        its `run_episodes` in one program for all pairs, which jax-aht does not offer: both
            tables, twice. Episodes begin in the states of offmarl's, so that best actions must have
            equal returns
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIME_LIMIT = 100
MODES = ("greedy", "sampled")
PEERS = ("matrix", "stacked", "once")
SEEDS = (1, 0)


@dataclass(frozen=True)
class Args:
    python: Path
    """Python of jax-aht's environment."""
    checkout: Path
    """jax-aht's source."""
    run: Path
    """The run of the policies."""
    episodes: int = 128
    """Episodes of each pair and seat order."""
    rounds: int = 3
    """Measurements of each way, in turn."""


Tables = Callable[[int], dict[str, Any]]
"""Plays the tables of a seed: mean returns and their standard errors by mode, ``(M, M, 2)``."""


def ours(run: str, episodes: int) -> Tables:
    """Return the tables of offmarl."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from offmarl.programs.cross_play import CrossPlayWork

    def tables(seed: int) -> dict[str, Any]:
        work = CrossPlayWork([run], episodes=episodes, seed=seed)
        for block in range(work.num_blocks):
            work.run(block)
        return dict(work.tables())

    return tables


def peers(way: str, checkout: str, weights: str, episodes: int) -> Tables:
    """Return the tables of jax-aht, in one of its ways."""
    sys.path.insert(0, checkout)
    import jax
    import numpy as np
    from agents.mlp_actor_critic_agent import MLPActorCriticPolicy
    from common.tree_utils import tree_stack
    from envs import make_env
    from envs.log_wrapper import LogWrapper
    from evaluation.generate_xp_matrix import heldout_crossplay
    from evaluation.heldout_evaluator import eval_egos_vs_heldouts

    env = LogWrapper(make_env("lbf", {}))
    size, actions = env.observation_space("agent_0").shape[0], env.action_space("agent_0").n
    policy = MLPActorCriticPolicy(actions, size)
    members = members_of(weights, policy.init_params(jax.random.PRNGKey(0)))
    settings = {"MAX_EPISODE_STEPS": TIME_LIMIT, "NORMALIZE_RETURNS": False}
    evaluated = {"global_heldout_settings": settings}, env

    def matrix(greedy: bool, seed: int) -> Any:
        agents = {str(x): (policy, params, greedy, None) for x, params in enumerate(members)}
        return heldout_crossplay(*evaluated, jax.random.PRNGKey(seed), episodes, agents, agents)

    def stacked(greedy: bool, seed: int) -> Any:
        partners = [(policy, params, greedy, None) for params in members]
        common = policy, tree_stack(members), partners, None, greedy
        return eval_egos_vs_heldouts(*evaluated, jax.random.PRNGKey(seed), episodes, *common)

    if way == "once":
        play_table = in_one_program(env, policy, members, episodes)
    else:
        play_table = {"matrix": matrix, "stacked": stacked}[way]

    def tables(seed: int) -> dict[str, Any]:
        by_mode = {}
        for mode in MODES if way == "once" else MODES[1:]:
            metrics = play_table(mode == "greedy", seed)
            returns = np.asarray(metrics["returned_episode_returns"], float).mean(-1)
            errors = returns.std(-1) / (episodes - 1) ** 0.5
            by_mode[mode] = np.stack([returns.mean(-1), errors], -1)
        return by_mode

    return tables


def members_of(weights: str, fresh: Any) -> list[Any]:
    """Return the parameters of the policies; the critics, which do not act, are fresh ones."""
    import numpy as np

    held = dict(np.load(weights))
    members = []
    for number in range(len(next(iter(held.values())))):
        layers: dict[str, Any] = {}
        for path, leaf in held.items():
            layer, name = path.split("/")
            layers.setdefault(layer, {})[name] = leaf[number]
        members.append({"params": fresh["params"] | layers})
    return members


def in_one_program(env: Any, policy: Any, members: list[Any], episodes: int) -> Any:
    """Return a function that plays a table in one program, from the states of offmarl's table."""
    import jax
    import jax.numpy as jnp
    from common.run_episodes import run_episodes
    from common.tree_utils import tree_stack

    each = jax.vmap(jax.random.split)
    rows = [jax.random.PRNGKey(row) for row in range(len(members))]
    theirs = jnp.concatenate([each(jax.random.split(row, episodes + 1)[1:])[:, 1] for row in rows])
    reset = env.reset

    @jax.jit
    def play(seed: Any, row: Any, params: Any, partner: Any, greedy: Any) -> Any:
        keys = [jax.random.fold_in(jax.random.PRNGKey(seed), row) for row in range(len(members))]
        ours = jnp.concatenate([each(jax.random.split(key, episodes))[:, 0] for key in keys])
        env.reset = lambda key: reset(ours[jnp.argmax((theirs == key).all(-1))])
        modes = TIME_LIMIT, episodes, greedy, greedy
        return run_episodes(row, env, params, policy, partner, policy, *modes)

    def table(greedy: bool, seed: int) -> Any:
        returns = (
            tree_stack([play(seed, row, params, other, greedy) for other in members])
            for row, params in zip(rows, members, strict=True)
        )
        return tree_stack([*returns])

    return table


def work(tables: Tables, seeds: tuple[int, ...]) -> None:
    """Play the tables of some seeds; print the last ones, and the wall and CPU seconds of each."""
    took = []
    for seed in seeds:
        begun = time.monotonic(), time.process_time()
        returns = tables(seed)
        took.append((time.monotonic() - begun[0], time.process_time() - begun[1]))
    print(json.dumps({"took": took} | {mode: table.tolist() for mode, table in returns.items()}))


def run(python: str, *words: str) -> dict[str, Any]:
    """Run a way in a process of its own, in an empty directory, without caches."""
    unset = {"PYTHONPATH", "JAX_COMPILATION_CACHE_DIR"}
    env = {name: value for name, value in os.environ.items() if name not in unset}
    env |= {"JAX_PLATFORMS": "cpu", "OFFMARL_COMPILATION_CACHE": "off"}
    with tempfile.TemporaryDirectory() as here:
        command = [python, __file__, "work", *words]
        done = subprocess.run(command, env=env, cwd=here, stdout=subprocess.PIPE, check=True)
    document: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return document


def main(args: Args) -> None:
    """Play the tables in all ways, in turns, and print what they say and take."""
    with tempfile.TemporaryDirectory() as there:
        weights = f"{there}/weights.npz"
        export(args.run, weights)
        ways = {"offmarl": (sys.executable, str(args.run.resolve()), str(args.episodes))}
        for way in PEERS:
            source = str(args.checkout.resolve()), weights, str(args.episodes)
            ways[way] = (str(args.python.absolute()), way, *source)
        rounds = [{way: run(*words) for way, words in ways.items()} for _ in range(args.rounds)]
    report(rounds)


def report(rounds: list[dict[str, Any]]) -> None:
    """Print what the ways took, and how their returns compare."""
    import numpy as np

    base = rounds[0]["offmarl"]
    for way, result in rounds[0].items():
        took = np.array([one[way]["took"] for one in rounds])  # (rounds, times, 2)
        times = [
            "wall {} s, CPU {} s".format(*(" ".join(f"{x:.1f}" for x in one) for one in time.T))
            for time in np.moveaxis(took, 1, 0)
        ]
        print(f"{way}: {'; again: '.join(times)}")
        for mode in result.keys() & MODES:
            (mean, error), (their, errors) = (
                np.moveaxis(np.array(one[mode]), -1, 0) for one in (base, result)
            )
            apart, differ = ~np.eye(len(mean), dtype=bool), np.abs(mean - their)
            scores = differ / np.maximum(np.hypot(error, errors), 1e-6)
            print(
                f"  {mode}: self-play {np.diag(their).mean():.4f}, cross-play "
                f"{their[apart].mean():.4f}; cells differ from offmarl's by at most "
                f"{differ.max():.2g}, by {(scores**2).mean() ** 0.5:.2f} standard errors"
            )


def export(run: Path, file: str) -> None:
    """Write the weights of all seeds of a run, ``(seeds, ...)``, by layer and name."""
    import jax
    import numpy as np

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from offmarl import load_policy
    from offmarl.tracking import read_run

    seeds = read_run(run)["seeds"]
    params = [load_policy(run, seed).params["params"] for seed in seeds]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *params)
    np.savez(
        file, **{f"{x}/{name}": leaf for x, tree in stacked.items() for name, leaf in tree.items()}
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["work"]:
        *words, count = sys.argv[2:]
        tables = (ours if len(words) == 1 else peers)(*words, int(count))
        work(tables, SEEDS[1:] if words[0] in PEERS[:2] else SEEDS)
    else:
        import tyro

        main(tyro.cli(Args, description=__doc__))
