"""NashConv by the size of a population: of a run of ``record psro``, or of OpenSpiel's PSRO.

    offmarl record psro --env pgx/leduc_holdem --iterations 40 --response-steps 204800 --out DIR
    python benchmarks/psro.py DIR/pgx/leduc_holdem.run/psro-ippo-nash-0
    python benchmarks/psro.py --peer BR --meta nash --iterations 40

The mixtures are those of the meta-strategy of each size, and their NashConv is exact. The peer's
oracles are the exact best response (``BR``), which no learner has, and its ``DQN`` with the sizes
of its example. The peer needs OpenSpiel, cvxpy and optax.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np


def curves(run: Path) -> None:
    """Print the NashConv of each seed's mixtures, by size."""
    import offmarl
    from offmarl.envs.games import game_tree, mixture, solve, tabulate

    held = json.loads((run / "population.json").read_text())
    name = json.loads((run / "run.json").read_text())["spec"]["name"]
    tree = game_tree(offmarl.envs.make(name))
    for seed, seed_curves in held["seeds"].items():
        steps = range(len(seed_curves["strategies"]))
        members = [offmarl.load_policy(run, int(seed), greedy=None, step=step) for step in steps]
        tables = np.stack([tabulate(tree, member.policy, member.params) for member in members])
        for size, strategies in enumerate(seed_curves["strategies"], 1):
            first, second = (
                mixture(tree, tables[:size], np.array(weights)) for weights in strategies
            )
            table = np.where((tree.seats == 0)[:, None], first, second)
            print(f"seed {seed}, {size}: {solve(tree, table).nash_conv:.4f}", flush=True)


def peer_oracle(name: str, game: Any) -> tuple[Any, list[Any]]:
    """Return an oracle of OpenSpiel's, and the policies that a population starts from."""
    # Its module of policies also imports an oracle that needs Haiku, which nothing here uses.
    stub: Any = ModuleType("open_spiel.python.jax.policy_gradient")
    stub.PolicyGradient = object
    sys.modules.setdefault(stub.__name__, stub)
    from open_spiel.python import policy, rl_environment
    from open_spiel.python.algorithms.psro_v2 import best_response_oracle, rl_oracle, rl_policy

    if name == "BR":
        table = policy.TabularPolicy(game)
        oracle = best_response_oracle.BestResponseOracle(game=game, policy=table)
        return oracle, [table.__copy__() for _ in range(2)]
    env = rl_environment.Environment(game)
    options = {
        "state_representation_size": env.observation_spec()["info_state"][0],
        "num_actions": env.action_spec()["num_actions"],
        "hidden_layers_sizes": [256] * 4,
        "batch_size": 32,
        "learning_rate": 1e-2,
        "update_target_network_every": 1000,
        "learn_every": 10,
        "optimizer_str": "adam",
    }
    agents = [rl_policy.DQNPolicy(env, seat, **options) for seat in range(2)]
    for agent in agents:
        agent.freeze()
    learner = rl_policy.DQNPolicy
    return rl_oracle.RLOracle(env, learner, options, number_training_episodes=10_000), agents


def peer_curve(oracle_name: str, meta: str, iterations: int, seed: int) -> None:
    """Print the NashConv of OpenSpiel's mixtures, by size, with the CPU time of PSRO alone."""
    import pyspiel
    from open_spiel.python.algorithms import exploitability, policy_aggregator
    from open_spiel.python.algorithms.psro_v2 import psro_v2

    np.random.seed(seed)  # noqa: NPY002 — what the peer draws from
    game = pyspiel.load_game("leduc_poker")
    oracle, agents = peer_oracle(oracle_name, game)
    solver = psro_v2.PSROSolver(
        game,
        oracle,
        initial_policies=agents,
        training_strategy_selector="probabilistic",
        sims_per_entry=1000,
        meta_strategy_method=meta,
        sample_from_marginals=True,
    )
    spent = 0.0
    for _ in range(iterations):
        start = time.process_time()
        solver.iteration()
        spent += time.process_time() - start
        policies, weights = solver.get_policies(), solver.get_meta_strategies()
        mean = policy_aggregator.PolicyAggregator(game).aggregate(range(2), policies, weights)
        value = exploitability.nash_conv(game, mean)
        print(f"{oracle_name} {meta}, {len(policies[0])}: {value:.4f}, {spent:.0f} s", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path, nargs="?", help="a run of `record psro`")
    parser.add_argument("--peer", choices=["BR", "DQN"], help="OpenSpiel's PSRO with this oracle")
    parser.add_argument("--meta", choices=["nash", "uniform"], default="nash")
    parser.add_argument("--iterations", type=int, default=40)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if args.peer:
        peer_curve(args.peer, args.meta, args.iterations, args.seed)
    elif args.run:
        curves(args.run)
    else:
        parser.error("name a run, or a peer's oracle with --peer")
