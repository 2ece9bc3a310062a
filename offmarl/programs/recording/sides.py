"""Policies for the teams of an environment, from the names that users give them.

A name is ``random`` (uniform legal actions), a scripted policy of the environment such as
``scripted`` (see `offmarl.envs.scripted`), code as ``path/to/file.py:FUNCTION``, or the directory
of a run, whose last policy then acts with fixed parameters.
"""

import re
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from offmarl import envs, tracking
from offmarl.envs import Environment
from offmarl.envs.scripted import SCRIPTED, scripted_policies, scripted_policy
from offmarl.envs.sides import Seat, Side, TeamPolicy, compose, play_side
from offmarl.errors import OptionError, ShapeError, unknown_name
from offmarl.evaluation import require_time_limit
from offmarl.networks import PolicyConfig, make_policy
from offmarl.paths import local
from offmarl.programs.program import OnlineArgs
from offmarl.programs.runs.identity import fingerprint
from offmarl.programs.runs.policy import load_policy
from offmarl.records import RecordedName
from offmarl.teams import Team, find_team, spec_of, teams_of
from offmarl.types import ArrayTree, Policy

RANDOM = "random"

_CODE = re.compile(r".*\.py:.+|[\w.]+:[\w.]+")
"""A function in a file or in a module. The directories of runs may have a colon, too."""


def team_policy(source: str, env: Environment, team: Team) -> TeamPolicy:
    """Return the policy that a name stands for."""
    everyone = tuple(range(env.spec.num_agents))
    about: dict[str, Any] = {"policy": source}
    if source == RANDOM:
        policy = make_policy(PolicyConfig("random"), env.spec)
        return TeamPolicy(policy, (), everyone, source, about)
    if (local(source) / tracking.RUN_FILE).exists():
        return _of_run(local(source), env, team)
    offered = scripted_policies(env)
    if source not in offered and not _CODE.fullmatch(source):
        raise unknown_name(
            f"policy for {team.name} of {env.spec.name}, and no run's directory,",
            source,
            [RANDOM, *offered],
        )
    return TeamPolicy(scripted_policy(env, source), (), everyone, source, about)


def _of_run(directory: Path, env: Environment, team: Team) -> TeamPolicy:
    """Return the last policy of a run, which acts for all agents or for this team."""
    loaded = load_policy(directory, greedy=None)
    about = {
        "policy": loaded.name,
        "run": directory.name,
        "parameters": fingerprint(loaded.params),
    }
    for agents, spec in (
        (tuple(range(env.spec.num_agents)), env.spec),
        (team.agents, spec_of(env.spec, team.agents)),
    ):
        if not loaded.spec.difference(spec, extras=False):
            return TeamPolicy(loaded.policy, loaded.params, agents, str(directory), about)
    raise ShapeError(
        f"the policy of {directory} cannot act for {team.name} of {env.spec.name}, whose sizes "
        f"differ in {loaded.spec.difference(spec_of(env.spec, team.agents), extras=False)}: give "
        "a run that was trained in the same environment, for this team or for all agents."
    )


def policies_by_team(
    sources: Sequence[str], env: Environment, teams: Sequence[Team]
) -> dict[str, TeamPolicy]:
    """Return the policies of some teams."""
    given = _by_name(sources, env, teams)
    return {team.name: team_policy(given[team.name], env, team) for team in teams}


def _by_name(sources: Sequence[str], env: Environment, teams: Sequence[Team]) -> dict[str, str]:
    known = {team.name for team in teams_of(env.spec)}
    if len(sources) == 1 and sources[0].partition("=")[0] not in known:
        return {team.name: sources[0] for team in teams}
    given: dict[str, str] = {}
    for pair in sources:
        name, equals, source = pair.partition("=")
        if not equals or not source:
            raise OptionError(
                f"{pair!r} is not a policy of a team: write TEAM=POLICY for each of "
                f"{', '.join(team.name for team in teams)}, or one policy for all of them."
            )
        if find_team(env.spec, name) not in teams:
            raise OptionError(f"{name} learns, so it has no other policy: leave out {pair!r}.")
        if name in given:
            raise OptionError(f"{name} was given two policies: {given[name]} and {source}.")
        given[name] = source
    for team in teams:
        if team.name not in given:
            raise OptionError(f"{team.name} has no policy: add {team.name}=POLICY.")
    return given


def side_of(env: Environment, team: str, opponents: Sequence[str]) -> Side:
    """Return the environment of one team, whose opponents act by the named policies."""
    own = find_team(env.spec, team)
    others = [one for one in teams_of(env.spec) if one != own]
    return play_side(env, team, policies_by_team(opponents, env, others))


def near(sources: Sequence[str], run_dir: Path) -> tuple[str, ...]:
    """Return names of policies that a run recorded, with runs as they are found from here.

    The path of a run was typed where the recorder was started, which by default is a directory
    above its run.
    """

    def found(source: str) -> str:
        team, sign, name = source.rpartition("=")
        if (local(name) / tracking.RUN_FILE).exists():
            return source
        places = (above / name for above in run_dir.parents)
        there = next((one for one in places if (one / tracking.RUN_FILE).exists()), None)
        return source if there is None else RecordedName(f"{team}{sign}{there}")

    return tuple(map(found, sources))


def learning_environment(args: OnlineArgs) -> Environment:
    """Return the environment that a recorder learns in: one side of it if one is named."""
    if args.opponents != OnlineArgs.opponents and not args.side:
        raise OptionError(
            "--opponents play against one side that learns: give --side with its team, or leave "
            "out --opponents."
        )
    env = envs.make(args.env)
    require_time_limit(env.spec)
    env = envs.record_states(env) if args.env_states else env
    return side_of(env, args.side, args.opponents) if args.side else env


def opponents_of(env: Environment) -> dict[str, dict[str, Any]]:
    """Return what a record or recipe says of the opponents in an environment.

    ``{"opponents": ...}``, with what identifies the policy of each team; empty if there are none.
    """
    if not isinstance(env, Side):
        return {}
    return {"opponents": {name: dict(own.about) for name, own in env.opponents}}


@lru_cache(maxsize=16)
def against_reference(
    env: Environment, team: Team, policy: Policy
) -> tuple[Policy, tuple[ArrayTree, ...]]:
    """Return a policy that plays a team by a given policy, and all others by reference policies.

    The reference is the environment's policy ``scripted``, or else uniform legal actions.
    """
    everyone = tuple(range(env.spec.num_agents))
    reference = scripted_policies(env).get(SCRIPTED) or make_policy(
        PolicyConfig("random"), env.spec
    )
    rest = tuple(agent for agent in everyone if agent not in team.agents)
    seats = [Seat(team.agents, policy, everyone), Seat(rest, reference, everyone)]
    return compose(env.spec, seats), ((),)


def joint_policy(
    env: Environment, players: dict[str, TeamPolicy]
) -> tuple[Policy, tuple[ArrayTree, ...]]:
    """Return the policy of all agents, and its parameters, from a policy for each team."""
    teams = teams_of(env.spec)
    seats = [
        Seat(team.agents, players[team.name].policy, players[team.name].agents) for team in teams
    ]
    return compose(env.spec, seats), tuple(players[team.name].params for team in teams)
