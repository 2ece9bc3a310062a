"""MASAC: soft actor-critics with centralised critics, learned off-policy from replay.

Each agent has a stochastic policy of its own observation, and two critics of the global state and
the actions of all agents, which learn from the agent's own reward and the entropy of its policy
(Haarnoja et al. 2018, arXiv 1812.05905, with the critics of Lowe et al. 2017, arXiv 1706.02275).
Actions are discrete, or continuous and squashed by tanh. Policies are feed-forward or recurrent.
`offmarl.programs.learning.soft_actor_critic` holds the losses and the update, which ISAC shares.
"""

from dataclasses import dataclass

from rich.console import Console

from offmarl import cli, envs, programs
from offmarl.programs import Program, SoftArgs, make_soft_actor_critic
from offmarl.types import EnvSpec

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(SoftArgs):
    """Arguments of MASAC."""


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, env: envs.Environment) -> Program:
    """Build the program for an environment, given without autoreset."""
    return make_soft_actor_critic(spec, args, env, centralised=True)


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> "programs.Recorded":
    """Train MASAC, and record the requested tiers."""
    return programs.record_online(make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        Console().print(main(cli.parse_script(Args, __doc__)).view)
