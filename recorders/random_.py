"""Random: uniform legal actions, the reference that policies are compared with.

Every agent draws each action uniformly from those that are legal for it; continuous actions are
uniform over their range. Where agents are in several teams, all of them act so: give a team another
policy with `offmarl record --policy TEAM=POLICY ...`.
"""

from dataclasses import dataclass

from rich.console import Console

from offmarl import cli
from offmarl.programs.recording.fixed import FixedArgs, record_fixed
from offmarl.programs.recording.online import Recorded

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(FixedArgs):
    """Arguments of the random recorder."""


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> Recorded:
    """Record uniform legal actions."""
    return record_fixed(args)


if __name__ == "__main__":
    with cli.exit_codes():
        Console().print(main(cli.parse_script(Args, __doc__)).view)
