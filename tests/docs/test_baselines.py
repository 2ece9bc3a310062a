"""The table of baselines says what the programs do by default."""

import re
from pathlib import Path

import pytest

from offmarl.programs import registry

PAGE = (Path(__file__).parents[2] / "docs" / "baselines.md").read_text()
ROWS = {
    name: [cell.strip() for cell in cells.split("|")]
    for name, cells in re.findall(r"^\| \[`(\w+)`\][^|]*\|(.*)\|$", PAGE, re.MULTILINE)
}


@pytest.mark.parametrize("name", ROWS)
def test_defaults_are_those_of_the_program(name: str) -> None:
    program = registry.load("baseline", name)
    args = program.Args(vault=Path())
    actions, network, *numbers, source = ROWS[name]
    found = [args.learning_rate, args.batch_size, args.length, getattr(args, "gamma", "")]
    assert network == args.network
    assert numbers == [str(value) for value in found]
    # The docstring names the kind of actions and the commits of the reference.
    first_line = program.__doc__.partition("\n")[0]
    kinds = {"both": "discrete or continuous", "discrete": "discrete", "continuous": "continuous"}
    assert first_line.endswith((f", {kinds[actions]}.", f"of {kinds[actions]} actions."))
    commits = re.findall(r"`([0-9a-f]{7})`", source)
    assert commits and all(commit in program.__doc__ for commit in commits)
