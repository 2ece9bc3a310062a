"""Trained policies in environments, for the commands that play or record them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jaxtyping import Float

from offmarl import envs, evaluation
from offmarl.envs import Environment
from offmarl.envs.registry import make_parallel
from offmarl.errors import OptionError
from offmarl.paths import local
from offmarl.programs import LoadedPolicy, load_policy
from offmarl.programs.recording.python import play_episodes
from offmarl.programs.recording.sides import side_of
from offmarl.programs.runs.evaluate import play_policy
from offmarl.report import render
from offmarl.teams import only_or_all, teams_of
from offmarl.terminal import number
from offmarl.tracking import progress, read_run
from offmarl.types import EnvSpec


def load(
    run: Path,
    env: str | None,
    seeds: Sequence[int],
    greedy: bool,
    program: Path | None,
    checkpoint: int | str = "last",
    opponents: Sequence[str] = (),
) -> tuple[Environment, dict[int, LoadedPolicy]]:
    """Return an environment, by default that of a run, and the policies of training seeds for it.

    The arguments are those of `load_policy`, with ``checkpoint`` for its ``step``. ``opponents``
    play in place of the recorded ones.
    """
    record = read_run(run)
    environment = envs.make(EnvSpec.from_json(record["spec"]).name if env is None else env)
    side = record["args"].get("side")
    if opponents and not side:
        raise OptionError(f"{run} learned no side that has opponents: leave out --opponents.")
    if side:
        environment = side_of(environment, side, opponents, None if opponents else local(run))
    return environment, {
        seed: load_policy(run, seed, greedy, program, environment, checkpoint) for seed in seeds
    }


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
    make_policy: Callable[[int, Any], Any],
    env: str,
    spec: EnvSpec,
    seeds: Sequence[int],
    episodes: int,
    seed: int,
    processes: int,
) -> dict[str, dict[int, Float[np.ndarray, "episodes"]]]:
    """Do what `play` does in a PettingZoo environment; ``spec`` is that of the run."""
    teams, make_env = teams_of(spec), partial(make_parallel, env)
    returns: dict[str, dict[int, Float[np.ndarray, "episodes"]]] = {team.name: {} for team in teams}
    for trained in seeds:
        policy = partial(make_policy, trained)
        played = play_episodes(make_env, policy, episodes, processes, seed)
        for team in teams:
            returns[team.name][trained] = played[:, list(team.agents)].mean(1)
    return returns


def parallel_policy(
    run: Path, greedy: bool, program: Path | None, checkpoint: int | str, seed: int, env: Any
) -> Any:
    """Return the policy of a training seed, to act in a PettingZoo environment."""
    return envs.PettingZooPolicy(load_policy(run, seed, greedy, program, None, checkpoint), env)


def watch(environment: Environment, loaded: LoadedPolicy, seed: int) -> render.Playback:
    """Play one episode of a policy, to be drawn."""
    return render.play(environment, loaded.policy, loaded.params, jax.random.key(seed))
