"""Policies for the sides of an environment, from the names that users give them.

A name is ``random`` (uniform legal actions), a scripted policy of the environment such as
``scripted`` (see `offmarl.envs.scripted`), code as ``path/to/file.py:FUNCTION``, or the directory
of a run, whose last policy then acts with fixed parameters. ``RUN@SEED/STEP`` names another seed of
it and another checkpoint, ``RUN@*`` all seeds, and ``RUN@*/*`` all their checkpoints; ``/sampled``
or ``/greedy`` at the end says how it acts. Names joined by ``+`` are a population, of which each
episode draws a member: in ``RUN@*+scripted:2``, scripted weighs twice as much as each seed.
"""

import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, cast, get_args

import jax
import numpy as np

from offmarl import envs, tracking
from offmarl.checkpoint import Checkpoints
from offmarl.envs import Environment
from offmarl.envs.scripted import SCRIPTED, scripted_policies, scripted_policy
from offmarl.envs.sides import (
    Seat,
    Side,
    TeamPolicy,
    compose,
    play_side,
    population,
    rest_of,
)
from offmarl.errors import OptionError, RunError, ShapeError, UnknownNameError, unknown_name
from offmarl.evaluation import require_time_limit
from offmarl.networks import PolicyConfig, make_policy
from offmarl.paths import local
from offmarl.programs.program import OnlineArgs
from offmarl.programs.runs import dataset
from offmarl.programs.runs.identity import fingerprint
from offmarl.programs.runs.policy import load_policy
from offmarl.programs.runs.trained import TrainedRun
from offmarl.teams import Team, find_side, name_of_side, spec_of, teams_of
from offmarl.tracking import Acting
from offmarl.types import ArrayTree, EnvSpec, Policy

RANDOM = "random"

_CODE = re.compile(r".*\.py:.+|[\w.]+:[\w.]+")
"""A function in a file or in a module. The directories of runs may have a colon, too."""
_NUMBER = re.compile(r"-?\d*\.?\d+(e-?\d+)?")


def team_policy(source: str, env: Environment, team: Team, **how: Any) -> TeamPolicy:
    """Return the policy that a name stands for, or the population of several names.

    ``how`` is that of `members_of`.
    """
    members, weights, names = [], [], []
    for name, weight in names_in(source):
        policies = members_of(name, env, team, **how)
        members += policies
        weights += [weight] * len(policies)
        first = policies[0].name
        names.append(first if len(policies) == 1 else f"{first.partition('@')[0]}@all")
    return replace(population(env.spec, members, weights), name="+".join(names))


def names_in(source: str) -> list[tuple[str, float]]:
    """Return the names of members in that of a population, and their weights."""
    return [_weighed(part) for part in _parts(source)]


def _parts(source: str) -> list[str]:
    """Return the names in that of a population; those of a record stay `RecordedName`.

    The path of a run may have a plus, too.
    """
    first, plus, rest = source.partition("+")
    run = run_of(_weighed(source)[0])
    if not plus or (run and "+" not in (run[1] or "")):
        return [source]
    return [first, *_parts(rest)]


def _weighed(part: str) -> tuple[str, float]:
    """Return a name and the weight after it, by default 1."""
    name, _, weight = part.rpartition(":")
    return (name, float(weight)) if name and _NUMBER.fullmatch(weight) else (part, 1.0)


def run_of(name: str) -> tuple[str, str | None] | None:
    """Return the directory of a run and the text after its @, if a name is that of a run."""
    split = name.rpartition("@")
    for run, which in ((name, None), (split[0], split[2])):
        if run and (local(run) / tracking.RUN_FILE).exists():
            return run, which
    return None


def environment_of(
    sources: Sequence[str], env: str | None = None
) -> tuple[Environment, list[dict[str, Any]]]:
    """Return an environment, and the records of the runs among some names, SIDE=NAME, too.

    By default it is that of the first run; `OptionError` if there is none.
    """
    split = ((source, source.partition("=")[2]) for source in sources)
    matches = (run_of(name) for either in split for x in either if x for name, _ in names_in(x))
    runs = [tracking.read_run(local(pair[0])) for pair in matches if pair]
    if env is None and not runs:
        listing = ", ".join(sources) or "the policies"
        raise OptionError(f"none of {listing} is the directory of a run: give one, or give --env.")
    name = EnvSpec.from_json(runs[0]["spec"]).name if env is None else env
    if not name:
        raise OptionError("the first run's data is of an unknown environment: give --env.")
    return envs.make(name), runs


def members_of(source: str, env: Environment, team: Team, **how: Any) -> list[TeamPolicy]:
    """Return the policy that a name stands for, or those of all seeds or checkpoints of a run.

    ``how`` are ``greedy`` and ``program`` of `load_policy`; by default runs act as in training. A
    name that says how it acts takes precedence.
    """
    everyone = tuple(range(env.spec.num_agents))
    about: dict[str, Any] = {"policy": envs.short_name(source)}  # the digest identifies a file
    if source == RANDOM:
        policy = make_policy(PolicyConfig("random"), env.spec)
        return [TeamPolicy(policy, (), everyone, RANDOM, about)]
    if (run := run_of(source)) is not None:
        return _policies_of_run(local(run[0]), run[1], env, team, **how)
    offered = scripted_policies(env)
    if source == "scripted" and not offered:  # the default of `--opponents`
        raise UnknownNameError(
            f"{env.spec.name} has no scripted policy for {team.name}: name another one "
            "(`--opponents` of recorders), such as random, a run's directory or code of your own."
        )
    if source not in offered and not _CODE.fullmatch(source):
        raise unknown_name(
            f"policy for {team.name} of {env.spec.name}, and no run's directory,",
            source,
            [RANDOM, *offered],
        )
    policy, name = scripted_policy(env, source), source.rpartition(":")[2]
    about |= {"sha256": policy.code} if policy.code else {}
    return [TeamPolicy(policy, (), everyone, name, about)]


def split_acting(which: str) -> tuple[str, str]:
    """Split the text after a run's @ from the way of acting at its end; "" for none."""
    target, _, acting = which.rpartition("/")
    return (target, acting) if acting in get_args(Acting) else (which, "")


def _policies_of_run(
    directory: Path, which: str | None, env: Environment, team: Team, **how: Any
) -> list[TeamPolicy]:
    """Return policies of a run, as SEED/STEP/ACTING names them."""
    target, acting = split_acting(which or "")
    seed, _, step = target.partition("/")
    if which is not None and seed != "*" and not seed.isdecimal():
        raise OptionError(
            f"{directory}@{which} names no seed: write RUN@SEED, RUN@SEED/STEP or RUN@*, each with "
            "/sampled or /greedy at its end if it shall act so."
        )
    members = list[TeamPolicy]()
    how = {"greedy": None, **how} | ({"greedy": acting == "greedy"} if acting else {})
    seeds = tracking.read_run(directory)["seeds"] if seed == "*" else [int(seed or 0)]
    steps = [step]
    if step == "*":
        steps = [*map(str, TrainedRun.open(directory, how.get("program")).steps())] or [""]
    for run_seed, at in product(seeds, steps):
        number = int(at) if at.isdecimal() else at or None
        loaded = load_policy(directory, run_seed if seed else None, step=number, **how)
        about: dict[str, Any] = {
            "policy": loaded.name,
            "run": directory.name,
            "parameters": fingerprint(loaded.params),
        }
        about |= {"seed": run_seed, "step": at or "last"} if seed else {}
        about |= {"acting": acting} if acting else {}
        policy = members[0].policy if members else loaded.policy  # compiled once for all of them
        agents = _agents_of(loaded.spec, directory, env, team)
        name = _name_of(about)
        members.append(TeamPolicy(policy, loaded.params, agents, name, about, run=directory))
    return members


def _agents_of(trained: EnvSpec, directory: Path, env: Environment, team: Team) -> tuple[int, ...]:
    """Return the agents that a run's policy acts for: all, or those of the side."""
    for agents, spec in (
        (tuple(range(env.spec.num_agents)), env.spec),
        (team.agents, spec_of(env.spec, team.agents)),
    ):
        if not trained.difference(spec, extras=False):
            return agents
    raise ShapeError(
        f"the policy of {directory} cannot act for {team.name} of {env.spec.name}, whose sizes "
        f"differ in {trained.difference(spec_of(env.spec, team.agents), extras=False)}: give "
        "a run that was trained in the same environment, for this side or for all agents."
    )


def policies_by_side(
    sources: Sequence[str], env: Environment, agents: Sequence[int]
) -> dict[str, TeamPolicy]:
    """Return the policies of some agents, by the name of their side."""
    pairs = sources_by_side(sources, env.spec, agents)
    return {side.name: team_policy(source, env, side) for side, source in pairs}


def sources_by_side(
    sources: Sequence[str], spec: EnvSpec, agents: Sequence[int]
) -> list[tuple[Team, str]]:
    """Return the given policy of each side of some agents; without a name, each team is a side."""
    teams = [
        Team(name_of_side(spec, members), members)
        for team in teams_of(spec)
        if (members := tuple(agent for agent in team.agents if agent in agents))
    ]
    names = ", ".join(team.name for team in teams)
    side_names = {name_of_side(spec, (agent,)) for agent in range(spec.num_agents)}
    side_names |= {team.name for team in teams_of(spec)}
    if len(sources) == 1 and sources[0].partition("=")[0].split(",")[0] not in side_names:
        return [(team, sources[0]) for team in teams]
    pairs: list[tuple[Team, str]] = []
    missing = [agent for team in teams for agent in team.agents]
    for pair in sources:
        name, equals, source = pair.partition("=")
        if not equals or not source:
            raise OptionError(
                f"{pair!r} is not a policy of a side: write SIDE=POLICY for each of {names}, where "
                "a side is a team or agents of one, or one policy for all of them."
            )
        side = find_side(spec, name)
        if not set(side.agents) <= set(agents):
            raise OptionError(f"{name} learns, so it has no other policy: leave out {pair!r}.")
        if not set(side.agents) <= set(missing):
            raise OptionError(f"{name} was given two policies: leave one of them out.")
        missing = [agent for agent in missing if agent not in side.agents]
        pairs.append((side, source))
    if missing:
        side_name = name_of_side(spec, missing)
        raise OptionError(f"{side_name} has no policy: add {side_name}=POLICY.")
    order = [agent for team in teams for agent in team.agents]
    return sorted(pairs, key=lambda entry: order.index(entry[0].agents[0]))


def side_of(
    env: Environment, team: str, opponents: Sequence[str] = (), run: Path | None = None
) -> Side:
    """Return the environment of one side, whose opponents act by the named policies.

    If they are not named, or no longer found, they are those that a run learned against; see
    `keep_opponents`.
    """
    other_agents = rest_of(env.spec, find_side(env.spec, team))
    if opponents or run is None:
        try:
            return play_side(env, team, policies_by_side(opponents, env, other_agents))
        except (RunError, UnknownNameError):
            if run is None or not (run / tracking.OPPONENTS).is_dir():
                raise
    pairs = sources_by_side(opponents, env.spec, other_agents) if opponents else []
    names = {
        side.name: {envs.short_name(x): x for x, _ in names_in(source)} for side, source in pairs
    }
    of_any = {short: x for of_side in names.values() for short, x in of_side.items()}
    about = tracking.read_run(run).get("opponents", {})
    players = {
        side: _opponent(run, env, side, entry, of_any | names.get(side, {}))
        for side, entry in about.items()
    }
    return play_side(env, team, players)


def keep_opponents(env: Environment, run: Path) -> None:
    """Copy the trained policies of opponents into a run, which then does not need their runs.

    ``opponents/FIRST-NUMBER`` is the run of policies that differ in parameters alone, of the side
    with the agent ``FIRST``. Its seeds are the numbers of the members.
    """
    directory = run / tracking.OPPONENTS
    players = {side: player.members or (player,) for side, player in players_of(env).items()}
    origins = [member.run for group in players.values() for member in group]
    if any(origin and origin.parent == directory for origin in origins):
        return  # these are copies, of a training that stopped before its first checkpoint
    shutil.rmtree(directory, ignore_errors=True)
    for side, group in players.items():
        first = find_side(cast(Side, env).recorded_spec, side).agents[0]
        alike: dict[Policy, dict[int, TeamPolicy]] = {}
        for number, member in enumerate(group):
            if member.run is not None:
                alike.setdefault(member.policy, {})[number] = member
        for members in alike.values():
            origin = cast(Path, next(iter(members.values())).run)
            place = directory / f"{first}-{min(members)}"
            place.mkdir(parents=True)
            params = [member.params for member in members.values()]
            policy = jax.tree.map(lambda *leaves: np.stack(leaves), *params)
            Checkpoints(place / tracking.CHECKPOINTS).save(1, {"policy": policy}, {})
            statistics = dataset.read(origin / dataset.STATISTICS_FILE)
            dataset.save(place / dataset.STATISTICS_FILE, statistics)
            acting = next(iter(members.values())).about.get("acting")
            record = tracking.read_run(origin) | {"seeds": [*members]}
            record |= {"greedy": acting == "greedy"} if acting else {}
            tracking.write_json(place / tracking.RUN_FILE, record)


def _opponent(
    run: Path, env: Environment, side: str, about: Mapping[str, Any], names: Mapping[str, str]
) -> TeamPolicy:
    """Return an opponent that a run's record describes; ``names`` are the user's, by short name."""
    team = find_side(env.spec, side)
    copies: dict[int, TeamPolicy] = {}
    for place in (run / tracking.OPPONENTS).glob(f"{team.agents[0]}-*"):
        policies = _policies_of_run(place, "*", env, team)
        copies |= {policy.about["seed"]: policy for policy in policies}
    members = []
    for number, entry in enumerate(about.get("members") or [about]):
        if "run" not in entry:
            name = entry.get("policy", "")
            members += members_of(names.get(envs.short_name(name), name), env, team)
            continue
        policy = copies.get(number)
        if policy is None or policy.about["parameters"] != entry.get("parameters"):
            raise RunError(
                f"{run} has no copy of the policy {_name_of(entry)} that it learned against: name "
                "the opponents with --opponents."
            )
        members.append(replace(policy, name=_name_of(entry), about=entry))
    return population(env.spec, members, about.get("weights"))


def _name_of(about: Mapping[str, Any]) -> str:
    """Return the name of a member of a run."""
    step = f"/{about['step']}" if about.get("step", "last") != "last" else ""
    acting = f"/{about['acting']}" if "acting" in about else ""
    return about["run"] + (f"@{about['seed']}{step}{acting}" if "seed" in about else "")


def learning_environment(args: OnlineArgs, run: Path | None = None) -> Environment:
    """Return the environment that a recorder learns in: one side of it if one is named.

    ``run`` is the directory of its run, as for `side_of`.
    """
    if args.opponents not in (OnlineArgs.opponents, ()) and not args.side:
        raise OptionError(
            "--opponents play against one side that learns: give --side with its team or agents, "
            "or leave out --opponents."
        )
    env = envs.make(args.env)
    require_time_limit(env.spec)
    env = envs.record_states(env) if args.env_states else env
    return side_of(env, args.side, args.opponents, run) if args.side else env


def opponents_of(env: Environment) -> dict[str, dict[str, Any]]:
    """Return what a record or recipe says of the opponents in an environment.

    ``{"opponents": ...}``, with what identifies the policy of each side; empty if there are none.
    """
    opponents = identify_policies(players_of(env))
    return {"opponents": opponents} if opponents else {}


def identify_policies(players: Mapping[str, TeamPolicy]) -> dict[str, dict[str, Any]]:
    """Return what identifies the policies of sides."""
    return {side: dict(player.about) for side, player in players.items()}


def players_of(env: Environment) -> Mapping[str, TeamPolicy]:
    """Return the opponents in an environment, by the name of their side."""
    return env.opponents if isinstance(env, Side) else {}


def describe_policies(players: Mapping[str, TeamPolicy], first_id: int) -> list[dict[str, Any]]:
    """Return what a vault says of the policies of sides, whose ids follow one another."""
    policies = [
        ({} if side == "all" else {"team": side}) | {"name": member.name, **member.about}
        for side, player in players.items()
        for member in player.members or (player,)
    ]
    return [{"policy_id": first_id + number, **entry} for number, entry in enumerate(policies)]


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
    other_agents = rest_of(env.spec, team)
    seats = [Seat(team.agents, policy, everyone), Seat(other_agents, reference, everyone)]
    return compose(env.spec, seats), ((),)


def joint_policy(
    env: Environment, players: Mapping[str, TeamPolicy]
) -> tuple[Policy, tuple[ArrayTree, ...]]:
    """Return the policy of all agents, and its parameters, from a policy for each side."""
    seats = [player.seat(find_side(env.spec, side).agents) for side, player in players.items()]
    return compose(env.spec, seats), tuple(player.params for player in players.values())
