"""``offmarl envs``."""

from offmarl import envs as registry
from offmarl.cli.output import Report, table


def envs() -> Report:
    """List the environments; a capital letter in a name stands for a number of your choice."""
    return Report(
        {"environments": {name: about.summary for name, about in registry.describe().items()}},
        table(["name", ""], [[name, about.summary] for name, about in registry.describe().items()]),
    )
