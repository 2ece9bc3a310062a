"""Teams: the rewards of each, and programs that accept only one."""

import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from offmarl import envs
from offmarl.errors import OptionError, ShapeError, UnknownNameError
from offmarl.programs import DatasetStatistics, registry
from offmarl.teams import (
    Team,
    by_team,
    find_side,
    names_by_team,
    only_or_all,
    policy_columns,
    require_one_team,
    spec_of,
    team_numbers,
    teams_of,
)
from offmarl.types import Discrete, EnvSpec
from tests.envs.rivals import Rivals

RIVALS = Rivals().spec  # the cats 0 and 2, and the mouse 1
ALONE = replace(RIVALS, teams=None, team_names=None)
CATS, MICE = Team("cats", (0, 2)), Team("mice", (1,))
PURSUIT = envs.make("swarm/pursuit-4-2:evaders=learned")


def test_teams_are_in_the_order_of_their_numbers():
    assert teams_of(RIVALS) == (CATS, MICE)
    unnamed = replace(RIVALS, teams=(4, 2, 4), team_names=None)
    assert teams_of(unnamed) == (Team("team_2", (1,)), Team("team_4", (0, 2)))
    assert [team_numbers(spec) for spec in (unnamed, ALONE)] == [(1, 0, 1), (0, 0, 0)]
    assert teams_of(ALONE) == (Team("all", (0, 1, 2)),)
    with pytest.raises(ShapeError, match="name each team"):
        teams_of(replace(RIVALS, team_names=("cats",)))
    agents = {"policy_agent_0": 0, "policy_agent_1": 1, "policy_agent_2": 2}
    assert policy_columns(RIVALS) == agents | {"policy": 0, "policy_cats": 0, "policy_mice": 1}
    assert policy_columns(ALONE) == agents | {"policy": 0}


def test_as_many_teams_as_a_record_may_have():
    """Each agent of its own, in time: a forged vault of a few kilobytes may say so."""
    agents, begin = 2**16, time.monotonic()
    spec = EnvSpec("", agents, 1, 1, Discrete(2), teams=tuple(range(agents, 0, -1)))
    assert teams_of(spec)[-1] == Team(f"team_{agents}", (0,))
    assert team_numbers(spec)[:2] == (agents - 1, agents - 2)
    assert time.monotonic() - begin < 10


@pytest.mark.parametrize(
    ("name", "side"),
    [
        ("mice", MICE),
        ("agent_2,agent_0", CATS),
        ("agent_2", Team("agent_2", (2,))),
        ("agent_0,agent_1", (OptionError, "of several teams: a side is of one")),
        ("cats,agent_0", (UnknownNameError, "team or agent of rivals named 'cats'")),
    ],
)
def test_a_side_is_a_team_or_agents_of_one(name, side):
    if isinstance(side, Team):
        assert find_side(RIVALS, name) == side
    else:
        with pytest.raises(side[0], match=side[1]):
            find_side(RIVALS, name)


def test_the_spec_of_some_agents():
    agents = {"agents": tuple("abc"), "observation_sizes": (1, 2, 2), "kinds": tuple("xyx")}
    whole = replace(RIVALS, **agents, action_sizes=(3, 2, 1))
    own = {"agents": ("a", "c"), "observation_sizes": (1, 2), "action_sizes": (3, 1)}
    assert spec_of(whole, (0, 2)) == replace(ALONE, num_agents=2, **own)  # of one kind
    assert spec_of(whole, (1, 2)).kinds == ("y", "x")
    assert spec_of(RIVALS, (0, 1, 2)) == ALONE


def test_values_by_team():
    values, teams = np.array([[1.0, 2.0, 4.0]]), teams_of(RIVALS)
    assert [list(x) for x in by_team(values, teams)] == [[2.5], [2.0]]
    assert [list(x) for x in by_team(values, teams_of(ALONE))] == [[7 / 3]]
    assert names_by_team("return", teams) == ["return_cats", "return_mice"]
    assert names_by_team("return", teams_of(ALONE)) == ["return"]
    assert only_or_all({"all": 1}) == 1 and only_or_all({"a": 1, "b": 2}) == {"a": 1, "b": 2}


@pytest.mark.parametrize("teams", [None, (0, 0, 0), (3, 3, 3)])
def test_one_team_is_accepted(teams):
    spec = envs.make("swarm/coverage-3").spec
    require_one_team(replace(spec, teams=teams), "qmix")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("recorder", "qmix"),
        ("recorder", "vdn"),
        ("baseline", "alberdice"),
        ("baseline", "comadice"),
        ("baseline", "cfcql"),
        ("baseline", "mac_flow"),
        ("baseline", "maicq"),
        ("baseline", "omiga"),
        ("baseline", "oryx"),
        ("baseline", "qmix_bcq"),
        ("baseline", "qmix_cql"),
    ],
)
def test_programs_that_factorise_a_joint_value_refuse_several_teams(kind, name):
    program, spec = registry.load(kind, name), PURSUIT.spec
    source = PURSUIT if kind == "recorder" else DatasetStatistics(None)
    args = program.Args() if kind == "recorder" else program.Args(vault=Path())
    instead = "--side, against a fixed opponent" if kind == "recorder" else "bc or iql_cql"
    with pytest.raises(OptionError, match=rf"^{name} learns one value .* has 2 teams .*{instead}"):
        program.make(spec, args, source)


def test_independent_values_may_be_those_of_opponents():
    iql = registry.load("recorder", "iql")
    iql.make(PURSUIT.spec, iql.Args(), PURSUIT)
