"""Trained policies in environments, for the commands that play or record them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import numpy as np
from jaxtyping import Float

from offmarl import envs
from offmarl.cli.parse import refuse_unused
from offmarl.envs import Environment
from offmarl.errors import OptionError, UnknownNameError
from offmarl.paths import local
from offmarl.programs import LoadedPolicy
from offmarl.programs.recording.sides import side_of
from offmarl.programs.runs.evaluate import default_sizes, play_policy
from offmarl.programs.runs.parallel import ParallelEnvironment, Player, is_parallel
from offmarl.records import RecordedName, refuse_recorded
from offmarl.teams import by_team, only_or_all, teams_of
from offmarl.terminal import number
from offmarl.tracking import RUN_FILE, progress, read_run
from offmarl.types import EnvSpec

if TYPE_CHECKING:
    from offmarl.cli.programs import PolicyOptions

T = TypeVar("T")


def load(
    run: Path,
    options: "PolicyOptions",
    seeds: Sequence[int],
    opponents: Sequence[str],
    jobs: int | None = None,
    drawn: bool = False,
) -> tuple[Any, dict[int, LoadedPolicy]]:
    """Return the environment of a run, or another one, and the policies of training seeds for it.

    ``opponents`` play in place of the recorded ones. A PettingZoo environment, which ``jobs``
    processes step, has none, and cannot be ``drawn``, or used without ``jobs``.
    """
    record, env = read_run(run), options.env
    spec, side = EnvSpec.from_json(record["spec"]), record["args"].get("side")
    environment: Any
    if env is not None and is_parallel(env):
        if jobs is None:
            raise OptionError(f"{env} is a PettingZoo environment: use offmarl.record_episodes.")
        refuse_unused(f"{env} is a PettingZoo environment", render=drawn, opponents=opponents)
        environment, acts_in = ParallelEnvironment(env, spec, str(run), jobs), None
    else:
        refuse_unused("processes step PettingZoo environments alone", jobs=(jobs or 1) > 1)
        try:
            environment = envs.make(spec.name if env is None else env)
        except UnknownNameError as error:
            if env is not None:
                raise
            if ":" in (name := str(record["args"].get("env"))):  # code, which spec.name omits
                recorded = RecordedName(name, str(local(run) / RUN_FILE))
                refuse_recorded(recorded, "with --env path/to/file.py:FACTORY")
            named = f"the environment {str(spec.name)!r}, which is not installed"
            raise UnknownNameError(
                f"{run} is of {named if spec.name else 'an unknown environment'}: give one of the "
                "same sizes with --env (code of your own as path/to/file.py:FACTORY)."
            ) from error
        if not side:
            refuse_unused(f"{run} learned no side that has opponents", opponents=opponents)
        else:
            environment = side_of(environment, side, opponents, None if opponents else local(run))
        acts_in = environment
    first, *others = [options.load(run, seed, acts_in) for seed in seeds]
    shared = [first, *(replace(policy, policy=first.policy) for policy in others)]  # compiled once
    return environment, dict(zip(seeds, shared, strict=True))


def play(
    environment: Environment | ParallelEnvironment,
    policies: Mapping[T, LoadedPolicy],
    episodes: int | None,
    seeds: Sequence[int],
) -> dict[str, dict[T, Float[np.ndarray, "episodes"]]]:
    """Return the returns of episodes by team and policy; a PettingZoo environment is closed.

    The episodes of policies with equal ``seeds`` have the same initial states.
    """
    teams, returns = teams_of(environment.spec), []
    episodes = episodes or default_sizes(environment)[1]
    if isinstance(environment, ParallelEnvironment):
        teams = teams_of(next(iter(policies.values())).spec)
        players = [
            Player(policy.policy, policy.params, seed)
            for policy, seed in zip(policies.values(), seeds, strict=True)
        ]
        with progress("evaluate", len(players) * episodes) as advance:
            by_agent = environment.play(players, episodes, advance)
        environment.close()
        returns = [*np.stack(by_team(by_agent, teams), -1)]
    else:
        with progress("evaluate", len(policies)) as advance:
            for policy, seed in zip(policies.values(), seeds, strict=True):
                key = jax.random.key(seed)
                args = environment, policy.policy, episodes, policy.params, key
                returns.append(play_policy(*args))
                means = {
                    team.name: float(x.mean()) for team, x in zip(teams, returns[-1].T, strict=True)
                }
                advance(1, f"return {number(only_or_all(means))}")
    return {
        team.name: dict(zip(policies, [values[:, place] for values in returns], strict=True))
        for place, team in enumerate(teams)
    }
