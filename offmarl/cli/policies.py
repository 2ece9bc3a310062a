"""Trained policies in environments, for the commands that play or record them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np
from jaxtyping import Float

from offmarl import envs, evaluation
from offmarl.envs import Environment
from offmarl.errors import OptionError
from offmarl.paths import local
from offmarl.programs import LoadedPolicy
from offmarl.programs.recording.sides import side_of
from offmarl.programs.runs.evaluate import play_policy
from offmarl.programs.runs.parallel import ParallelEnvironment, Player
from offmarl.report import render
from offmarl.teams import only_or_all, teams_of
from offmarl.terminal import number
from offmarl.tracking import progress, read_run
from offmarl.types import EnvSpec

if TYPE_CHECKING:
    from offmarl.cli.programs import PolicyOptions


def load(
    run: Path, options: "PolicyOptions", seeds: Sequence[int], opponents: Sequence[str]
) -> tuple[Environment, dict[int, LoadedPolicy]]:
    """Return the environment of a run, or another one, and the policies of training seeds for it.

    ``opponents`` play in place of the recorded ones.
    """
    record = read_run(run)
    recorded = EnvSpec.from_json(record["spec"]).name
    environment = envs.make(recorded if options.env is None else options.env)
    side = record["args"].get("side")
    if opponents and not side:
        raise OptionError(f"{run} learned no side that has opponents: leave out --opponents.")
    if side:
        environment = side_of(environment, side, opponents, None if opponents else local(run))
    return environment, {seed: options.load(run, seed, environment) for seed in seeds}


def play(
    environment: Environment, policies: Mapping[int, LoadedPolicy], episodes: int, seed: int
) -> dict[str, dict[int, Float[np.ndarray, "episodes"]]]:
    """Return the returns of each team in each policy's episodes, by team.

    The episodes of all policies have the same initial states.
    """
    policy, key = next(iter(policies.values())).policy, jax.random.key(seed)
    teams = [team.name for team in teams_of(environment.spec)]
    returns: dict[str, dict[int, Float[np.ndarray, "episodes"]]] = {team: {} for team in teams}
    with progress("evaluate", len(policies)) as advance:
        for trained, loaded in policies.items():
            played = play_policy(environment, policy, episodes, None, loaded.params, key)
            found = evaluation.returns_by_team(environment.spec, played)
            by_team = dict(zip(teams, found.T, strict=True))
            for team, values in by_team.items():
                returns[team][trained] = values
            means = {team: float(values.mean()) for team, values in by_team.items()}
            advance(1, f"return {number(only_or_all(means))}")
    return returns


def play_parallel(
    run: Path, options: "PolicyOptions", env: str, episodes: int, seed: int, processes: int
) -> dict[str, dict[int, Float[np.ndarray, "episodes"]]]:
    """Do what `play` does in a PettingZoo environment, with all policies of a run."""
    record = read_run(run)
    spec = EnvSpec.from_json(record["spec"])
    loaded = {trained: options.load(run, trained) for trained in record["seeds"]}
    policy = next(iter(loaded.values())).policy
    copies = ParallelEnvironment(env, spec.is_vector, processes)
    copies.require(spec, str(run))
    players = [Player(policy, one.params, seed) for one in loaded.values()]
    with progress("evaluate", len(players) * episodes) as advance:
        played = copies.play(players, episodes, advance)
    copies.close()
    return {
        team.name: dict(zip(loaded, played[..., list(team.agents)].mean(-1), strict=True))
        for team in teams_of(spec)
    }


def watch(environment: Environment, loaded: LoadedPolicy, seed: int) -> render.Playback:
    """Play one episode of a policy, to be drawn."""
    return render.play(environment, loaded.policy, loaded.params, jax.random.key(seed))
