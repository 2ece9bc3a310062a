"""MAPPO: proximal policy optimisation with a critic that sees the global state.

Parameters are shared by all agents by default, advantages are generalised, and values are
normalised by running statistics of each team (Yu et al. 2022, "The Surprising Effectiveness of PPO
in Cooperative Multi-Agent Games", arXiv 2103.01955). Each agent's value is that of the global state
and its own observation. Networks are feed-forward or recurrent. Actions are discrete, or continuous
and drawn from a clipped or squashed Gaussian. `offmarl.programs.learning.ppo` has the losses and
the update.
"""

from dataclasses import dataclass

from rich.console import Console

from offmarl import cli, envs, programs
from offmarl.errors import OptionError
from offmarl.networks import CentralInput, critic_encoder, make_network
from offmarl.programs import Program
from offmarl.programs.learning.ppo import PPOArgs, actor_config, make_program
from offmarl.teams import teams_of
from offmarl.types import EnvSpec

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(PPOArgs):
    """Arguments of MAPPO."""

    critic: CentralInput = "state"
    """What the critic sees beside an agent's own observation. state: the global state; pooled: the
    observations of all agents, by attention, with as many parameters for any number of agents."""


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, env: envs.Environment) -> Program:
    """Build the program for an environment, given without autoreset."""
    if args.critic == "pooled" and not args.share_parameters:
        raise OptionError(
            "--critic pooled is one critic that all agents share: give --critic state, or "
            "--share-parameters."
        )
    encoder, outputs = critic_encoder(spec, args.hidden, args.critic), len(teams_of(spec))
    critic = make_network(actor_config(spec, args), spec, outputs, encoder, sees="view")
    return make_program(spec, args, env, critic, critic_input=spec.shared)


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> "programs.Recorded":
    """Train MAPPO, and record the requested tiers."""
    return programs.record_online(make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        Console().print(main(cli.parse_script(Args, __doc__)).view)
