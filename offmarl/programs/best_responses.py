"""Gains of best responses of two sides against policies: exact in small games, or learned."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import jax
import numpy as np
from jaxtyping import Float

from offmarl import tracking
from offmarl.envs import Environment
from offmarl.envs.games import GameTree, Solution, game_tree, mixture, solve, tabulate
from offmarl.envs.sides import compose
from offmarl.errors import OptionError
from offmarl.paths import local_output
from offmarl.programs import registry
from offmarl.programs.program import OnlineArgs
from offmarl.programs.recording.recorder import run_directory
from offmarl.programs.recording.sides import (
    joint_policy,
    names_in,
    run_of,
    side_of,
    split_acting,
    team_policy,
)
from offmarl.programs.runs.evaluate import play_policy
from offmarl.programs.runs.policy import load_policy
from offmarl.programs.runs.training import COMPILING
from offmarl.statistics import mean_interval
from offmarl.teams import Team, teams_of
from offmarl.tracking import Acting

SidePolicies = Sequence[tuple[Team, str]]
"""The name of the policy of each side."""


def exact_gains(env: Any, policies: SidePolicies) -> dict[str, Solution]:
    """Return the gains for greedy and for sampled actions; of one way, if both are the same.

    If a name says how it acts, it is the only way.
    """
    runs = (run_of(name) for _, source in policies for name, _ in names_in(source))
    stated = {split_acting(run[1] or "")[1] for run in runs if run}
    actings = [acting for acting in get_args(Acting) if acting in stated]
    ways: dict[str, dict[str, bool]] = {x: {"greedy": x == "greedy"} for x in get_args(Acting)}
    ways, tables = {"+".join(actings): {}} if actings else ways, {}
    name, num_sides = f"exploitability in {env.spec.name}", len(policies)
    with tracking.progress(name, 2 + num_sides * len(ways), note="builds the tree") as advance:
        tree = game_tree(env)
        advance(note="tabulates the policies")
        for acting, how in ways.items():
            sides = (_table(tree, env, side, source, how) for side, source in policies)
            tables[acting] = np.where(tree.seats[:, None] == 0, *sides)
            advance(num_sides)
        if len(ways) > 1 and np.array_equal(tables["greedy"], tables["sampled"]):
            del tables["sampled" if np.isin(tables["greedy"], (0, 1)).all() else "greedy"]
        solutions = {acting: solve(tree, policy) for acting, policy in tables.items()}
        advance()
    return solutions


def _table(
    tree: GameTree, env: Environment, side: Team, source: str, how: Mapping[str, bool]
) -> Float[np.ndarray, "I A"]:
    """Return the policy of a side as a table, of a population the mixture of its members."""
    player = team_policy(source, env, side, **how)
    tables = [
        tabulate(tree, compose(env.spec, [member.seat(side.agents)]), (member.params,))
        for member in player.members or (player,)
    ]
    return mixture(tree, np.stack(tables), np.array(player.about.get("weights", [1.0])))


def require_learner(recorder: ModuleType, oracle: str) -> None:
    """Raise `OptionError` unless a recorder learns, which was given with ``--oracle``."""
    if not issubclass(recorder.Args, OnlineArgs):
        raise OptionError(f"--oracle {oracle} learns no response: give one such as ippo.")


def learn(
    env: Environment,
    policies: SidePolicies,
    oracle: str,
    episodes: int,
    out: Path,
    limits: Mapping[str, int],
) -> Solution:
    """Return the gains of learned best responses against the policies, which act as trained.

    ``limits`` are arguments of the recorder ``oracle``: its steps and seed.
    """
    program, key = registry.load("recorder", oracle), jax.random.key(limits["seed"])
    require_learner(program, oracle)
    origin = registry.origin_of(program.make)
    players = {side.name: team_policy(source, env, side) for side, source in policies}
    about = json.dumps([*(dict(player.about) for player in players.values()), limits])
    place = local_output(out) / f"exploitability-{hashlib.sha256(about.encode()).hexdigest()[:8]}"
    policy, params = joint_policy(env, players)
    with tracking.progress("returns of the policies", 1, note=COMPILING):
        fixed = play_policy(env, policy, episodes, params, key)
    gains = np.zeros((episodes, 2))  # of episodes with the same initial states
    for number, team in enumerate(teams_of(env.spec)):
        rivals = (x for x in policies if not {*x[0].agents} <= {*team.agents})
        opponents = tuple(f"{side.name}={source}" for side, source in rivals)
        options = {"side": team.name, "opponents": opponents, "out": place}
        args = program.Args.for_env(env.spec.name, tiers="", **options, **limits)
        program.main(args)
        run, file = run_directory(args, origin.name), origin.file and oracle
        best, against = load_policy(run, program=file), side_of(env, team.name, opponents)
        with tracking.progress(f"returns of {team.name}", 1, note=COMPILING):
            returns = play_policy(against, best.policy, episodes, best.params, key)
        gains[:, number] = returns[:, 0] - fixed[:, number]
    return Solution(fixed.mean(0), gains.mean(0), mean_interval(gains.sum(1))[1:])
