"""``offmarl train``."""

from offmarl.cli import programs
from offmarl.cli.output import Report


def train(arguments: list[str]) -> Report:
    """Train an offline baseline by name."""
    if not arguments or arguments[0] in ("-h", "--help"):
        return programs.overview("baseline", "offmarl train NAME --vault PATH ...")
    name, *rest = arguments
    return programs.run("baseline", name, rest)
