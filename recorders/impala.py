"""IMPALA: actors that lag behind the learner, whose steps V-trace corrects.

The steps that an update learns from were taken by the policy of `--lag` updates before. V-trace
weighs them by how much likelier the policy that learns is to take them, at most 1 (Espeholt et al.
2018, "IMPALA: Scalable Distributed Deep-RL with Importance Weighted Actor-Learner Architectures",
arXiv 1802.01561). The old parameters are a part of the training's state, so that a run is a pure
function of its seed, and resumes to the same bits, while actors in processes of their own would lag
by chance.

Each agent has the ratio of its own action: what the others have changed since is not corrected.
The critic sees the global state and the agent's observation, as in MAPPO. Actions are discrete or
continuous, and networks feed-forward or recurrent. An update is one gradient step by default; more
`--epochs` and `--minibatches` have the clipped objective of proximal policy optimisation.
`offmarl.programs.learning.ppo` has the losses and the update.
"""

from dataclasses import dataclass

from rich.console import Console

from offmarl import cli, envs, programs
from offmarl.networks import make_network, view_encoder
from offmarl.programs import Program
from offmarl.programs.learning.ppo import OffPolicyPPOArgs, actor_config, make_program
from offmarl.teams import teams_of
from offmarl.types import EnvSpec

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(OffPolicyPPOArgs):
    """Arguments of IMPALA."""


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, env: envs.Environment) -> Program:
    """Build the program for an environment, given without autoreset."""
    encoder, outputs = view_encoder(spec, args.hidden), len(teams_of(spec))
    critic = make_network(actor_config(spec, args), spec, outputs, encoder, sees="view")
    return make_program(spec, args, env, critic, critic_input=spec.shared)


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> "programs.Recorded":
    """Train IMPALA, and record the requested tiers."""
    return programs.record_online(make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        Console().print(main(cli.parse_script(Args, __doc__)).view)
