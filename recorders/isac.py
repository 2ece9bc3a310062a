"""ISAC: independent soft actor-critics, learned off-policy from replay.

Each agent has a stochastic policy and two critics of its own observation and action, which learn
from its own reward and the entropy of its policy (Haarnoja et al. 2018, arXiv 1812.05905). The
other agents are part of its environment. Actions are discrete, or continuous and squashed by tanh.
Policies are feed-forward or recurrent. Critics have no memory, so where an agent must remember what
it saw, MASAC's critics of the state value its actions better.
`offmarl.programs.learning.soft_actor_critic` holds the losses and the update, which MASAC shares.
"""

from dataclasses import dataclass

from rich.console import Console

from offmarl import cli, envs, programs
from offmarl.programs import Program, SoftArgs, make_soft_actor_critic
from offmarl.types import EnvSpec

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(SoftArgs):
    """Arguments of ISAC."""


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, env: envs.Environment) -> Program:
    """Build the program for an environment, given without autoreset."""
    return make_soft_actor_critic(spec, args, env, centralised=False)


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> "programs.Recorded":
    """Train ISAC, and record the requested tiers."""
    return programs.record_online(make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        Console().print(main(cli.parse_script(Args, __doc__)).view)
