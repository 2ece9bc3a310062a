"""The table of baselines says what the programs do by default."""

import re
from contextlib import suppress
from pathlib import Path

import pytest

from offmarl.errors import RunError, ShapeError
from offmarl.programs import DatasetStatistics, registry
from offmarl.programs.program import structure
from offmarl.types import Continuous, Discrete, EnvSpec

PAGE = (Path(__file__).parents[2] / "docs" / "baselines.md").read_text()
ROWS = {
    name: [cell.strip() for cell in cells.split("|")]
    for name, cells in re.findall(r"^\| \[`(\w+)`\][^|]*\|(.*)\|$", PAGE, re.MULTILINE)
}


@pytest.mark.parametrize("name", ROWS)
def test_defaults_are_those_of_the_program(name: str) -> None:
    program = registry.load("baseline", name)
    args = program.Args(vault=Path(), updates=100)
    actions, network, *numbers, source = ROWS[name]
    values = [args.learning_rate, args.batch_size, args.length, getattr(args, "gamma", "")]
    assert network == args.network
    assert numbers == [str(value) for value in values]
    commits = re.findall(r"`([0-9a-f]{7})`", source)
    assert commits and all(commit in program.__doc__ for commit in commits)
    for kind, action in (("discrete", Discrete(3)), ("continuous", Continuous(3))):
        spec = EnvSpec("", num_agents=2, observation_size=2, state_size=2, action=action)
        accepted = suppress(RunError)  # of a program that reads numbers of its dataset
        with accepted if actions in (kind, "both") else pytest.raises(ShapeError):
            program.make(spec, structure(args), DatasetStatistics(None))
