"""Teams: the rewards of each, and programs that accept only one."""

from dataclasses import replace
from pathlib import Path

import pytest

from offmarl import envs
from offmarl.errors import OptionError
from offmarl.programs import DatasetStatistics, registry
from offmarl.teams import require_one_team

PURSUIT = envs.make("swarm/pursuit-4-2:evaders=learned")


@pytest.mark.parametrize("teams", [None, (0, 0, 0), (3, 3, 3)])
def test_one_team_is_accepted(teams):
    spec = envs.make("swarm/coverage-3").spec
    require_one_team(replace(spec, teams=teams), "qmix")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("recorder", "qmix"),
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
