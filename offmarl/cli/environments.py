"""``offmarl envs``."""

from offmarl import envs as registry
from offmarl.cli.output import Report, table


def envs() -> Report:
    """List the environments; a capital letter in a name stands for a number of your choice."""
    return Report(
        {"environments": registry.describe()}, table(["name", ""], registry.describe().items())
    )
