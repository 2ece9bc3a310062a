"""IPPO: independent proximal policy optimisation; no agent sees more than its own observation.

The critic of an agent sees the agent's observation only (de Witt et al. 2020, "Is Independent
Learning All You Need in the StarCraft Multi-Agent Challenge?", arXiv 2011.09533). Everything else
is as in MAPPO: parameters shared by all agents by default, generalised advantages, values
normalised by running statistics of each team, feed-forward or recurrent networks.
`offmarl.programs.learning.ppo` has the losses and the update.
"""

from dataclasses import dataclass

from rich.console import Console

from offmarl import cli, envs, programs
from offmarl.networks import make_network, observation_encoder
from offmarl.programs import Program
from offmarl.programs.learning.ppo import PPOArgs, actor_config, make_program
from offmarl.teams import teams_of
from offmarl.types import EnvSpec

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(PPOArgs):
    """Arguments of IPPO."""


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, env: envs.Environment) -> Program:
    """Build the program for an environment, given without autoreset."""
    encoder = observation_encoder(spec, args.hidden)
    critic = make_network(actor_config(spec, args), spec, len(teams_of(spec)), encoder)
    return make_program(spec, args, env, critic, critic_input=lambda view: view.observation)


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> "programs.Recorded":
    """Train IPPO, and record the requested tiers."""
    return programs.record_online(make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        Console().print(main(cli.parse_script(Args, __doc__)).view)
