"""Scripted: policies that do not learn, one for all agents or one for each side.

A policy is one of these:

- ``scripted``, or another name that the environment offers: the swarm tasks have controllers that
  act on the agents' observations, for pursuers and evaders alike;
- ``random``: uniform legal actions;
- code of your own, ``path/to/file.py:FUNCTION``, where ``FUNCTION(env)`` returns an
  `offmarl.types.Policy` of all agents without parameters;
- the directory of a run, whose last policy acts; ``RUN@SEED/STEP`` is another one, and ``RUN@*``
  are those of all seeds;
- several of them joined by ``+``, of which each episode draws one: ``RUN@*+random:2``, with a
  weight.

`offmarl record scripted --env swarm/pursuit-4-2:evaders=learned --policy pursuers=scripted
evaders=random` records one side's skill against another's. Each agent's steps have the id of its
policy.
"""

from dataclasses import dataclass

from rich.console import Console

from offmarl import cli
from offmarl.programs.recording.fixed import FixedArgs, record_fixed
from offmarl.programs.recording.online import Recorded

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(FixedArgs):
    """Arguments of the scripted recorder."""

    policy: tuple[str, ...] = ("scripted",)
    """One policy for all agents, or SIDE=POLICY for each team or agent: the name of a scripted
    policy of the environment, random, path/to/file.py:FUNCTION, or RUN, RUN@SEED/STEP or RUN@* with
    the directory of a run. Each episode draws one of several that are joined by +."""

    @property
    def policies(self) -> tuple[str, ...]:
        """The policies."""
        return self.policy


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> Recorded:
    """Record the policies."""
    return record_fixed(args)


if __name__ == "__main__":
    with cli.exit_codes():
        Console().print(main(cli.parse_script(Args, __doc__)).view)
