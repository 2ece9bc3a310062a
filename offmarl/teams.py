"""Teams of agents: which agents play together, and what each team earns.

``EnvSpec.teams`` has the team of each agent; None stands for one team of all agents. Where there
are several, their returns are never averaged: a sum over opponents says nothing about either side.
`by_team` is the one place that turns values of agents into values of teams.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from offmarl.errors import OptionError, ShapeError, unknown_name
from offmarl.types import EnvSpec

if TYPE_CHECKING:  # jaxtyping's Array imports JAX, which listing and reading data do without
    from jaxtyping import Array, Float


class Team(NamedTuple):
    """Agents that play together."""

    name: str
    agents: tuple[int, ...]
    """Indices of the agents, in order."""


def teams_of(spec: EnvSpec) -> tuple[Team, ...]:
    """Return the teams of an environment or dataset, in the order of their numbers.

    Teams without names are called ``team_0``, ``team_1``, ...; one team of all agents is ``all``.
    `ShapeError` if the spec has more or fewer names than teams.
    """
    agents: dict[int, list[int]] = {}
    for agent, number in enumerate(spec.teams or (0,) * spec.num_agents):
        agents.setdefault(number, []).append(agent)
    if len(agents) == 1:
        return (Team("all", tuple(range(spec.num_agents))),)
    names = spec.team_names or [f"team_{number}" for number in sorted(agents)]
    if len(names) != len(agents):
        raise ShapeError(
            f"team_names {spec.team_names} do not fit the teams {spec.teams}: name each team."
        )
    return tuple(
        Team(name, tuple(agents[number]))
        for name, number in zip(names, sorted(agents), strict=True)
    )


def team_numbers(spec: EnvSpec) -> tuple[int, ...]:
    """Return the place of each agent's team among `teams_of`."""
    places = {number: place for place, number in enumerate(sorted(set(spec.teams or ())))}
    return tuple(map(places.__getitem__, spec.teams or ())) or (0,) * spec.num_agents


def find_side(spec: EnvSpec, name: str) -> Team:
    """Return a side by its name: a team, or agents of one team, joined by commas.

    `UnknownNameError` if there is no such team or agent, `OptionError` for agents of several teams.
    """
    teams, agents = {team.name: team for team in teams_of(spec)}, agent_names(spec)
    for part in name.split(","):
        if name not in teams and part not in agents:
            env_name = spec.name or "the environment"
            raise unknown_name(f"team or agent of {env_name}", part, [*teams, *agents])
    members = tuple(sorted({agents.index(part) for part in name.split(",") if part in agents}))
    side = teams.get(name) or Team(name_of_side(spec, members), members)
    if not any(set(side.agents) <= set(team.agents) for team in teams.values()):
        raise OptionError(f"the agents {name} are of several teams: a side is of one.")
    return side


def name_of_side(spec: EnvSpec, agents: Sequence[int]) -> str:
    """Return the name of a side that `find_side` finds, of the team or of the agents."""
    names = (team.name for team in teams_of(spec) if team.agents == tuple(agents))
    return next(names, ",".join(agent_names(spec)[agent] for agent in agents))


def policy_columns(spec: EnvSpec) -> dict[str, int]:
    """Return the names that the policies of agents have as columns, with the agent's number.

    ``policy`` is that of the first agent, ``policy_AGENT`` that of an agent, and ``policy_TEAM``
    that of the first agent of a team, where there are several.
    """
    teams = teams_of(spec)
    first = {team.name: team.agents[0] for team in teams if len(teams) > 1}
    agents = {name: number for number, name in enumerate(agent_names(spec))}
    columns = {f"policy_{name}": number for name, number in (first | agents).items()}
    return {"policy": 0} | columns


def agent_names(spec: EnvSpec) -> list[str]:
    """Return the names of the agents; by default ``agent_0`` and so on."""
    return list(spec.agents or (f"agent_{number}" for number in range(spec.num_agents)))


def spec_of(spec: EnvSpec, agents: tuple[int, ...]) -> EnvSpec:
    """Return the spec of some agents, as one team; all see the same state as before."""

    def chosen(values: tuple[Any, ...] | None) -> tuple[Any, ...] | None:
        return None if values is None else tuple(values[agent] for agent in agents)

    kinds = chosen(spec.kinds)
    return replace(
        spec,
        num_agents=len(agents),
        agents=chosen(spec.agents),
        observation_sizes=chosen(spec.observation_sizes),
        action_sizes=chosen(spec.action_sizes),
        kinds=kinds if len(set(kinds or ())) > 1 else None,
        teams=None,
        team_names=None,
    )


def by_team(
    values: Float[Array | np.ndarray, "*b N"], teams: Sequence[Team]
) -> list[Float[Array | np.ndarray, "*b"]]:
    """Return the mean over the agents of each team, of a value of each agent: NumPy or JAX."""
    if len(teams) == 1:
        return [values.mean(-1)]
    index: Any = [np.array(team.agents) for team in teams]
    return [values[..., agents].mean(-1) for agents in index]


def largest_return(
    returns: Float[Array | np.ndarray, "*b N"],
    teams: Sequence[Team],
    initial: Float[Array, ""] | float = 0.0,
) -> Any:
    """Return the largest absolute return of a team, which is the mean over its agents.

    It is at least an agent's return divided by the size of its team: so much its own return counts
    in the mean, and where rewards of one team are opposed, their mean says nothing.
    """
    largest: Any = initial
    means: Any
    for team, means in zip(teams, by_team(returns, teams), strict=True):
        values: Any = returns[..., list(team.agents)]
        largest = abs(means).max(initial=abs(values / len(team.agents)).max(initial=largest))
    return largest


def names_by_team(quantity: str, teams: Sequence[Team]) -> list[str]:
    """Return the name of a quantity for each team: ``return``, or ``return_TEAM`` for several."""
    return [quantity] if len(teams) == 1 else [f"{quantity}_{team.name}" for team in teams]


def only_or_all(values: Mapping[str, Any]) -> Any:
    """Return the value of the only team, or a dictionary of the values of several."""
    return next(iter(values.values())) if len(values) == 1 else dict(values)


_INSTEAD = {
    "recorder": "let one team learn with --side, against a fixed opponent, or use a program whose "
    "agents have values of their own, such as mappo, ippo, iql or maddpg.",
    "baseline": "use a program whose agents have values of their own, such as bc or iql_cql, or "
    "for continuous actions matd3_bc or omar.",
    "evaluation": "play in the environment with `offmarl evaluate`.",
}
"""What to do in place of one value for several teams, by the kind of program."""


def require_one_team(
    spec: EnvSpec, program: str, kind: Literal["recorder", "baseline", "evaluation"] = "baseline"
) -> None:
    """Raise `OptionError` unless all agents are in one team, as for factorised joint values.

    ``program`` and ``kind`` are named in the message.
    """
    teams = teams_of(spec)
    if len(teams) > 1:
        raise OptionError(
            f"{program} learns one value for all agents together, but {spec.name or 'the data'} "
            f"has {len(teams)} teams with rewards of their own "
            f"({', '.join(team.name for team in teams)}): {_INSTEAD[kind]}"
        )
