"""OPRE: options as responses to what only the training sees.

The policy is a mixture of options: π(a | o) = Σ_z p(z | o) η(a | o, z), which acts by the agent's
own observation. In training, a hindsight distribution of options q(z | s, o) sees the global state,
or the observations of all agents, and with that what the others do. The mixture by q learns from
the steps of the mixture by p, corrected by V-trace, and p learns what q is: the loss holds
KL(q ‖ p). The value is Σ_z q(z | s, o) v(s, o, z). An option is thus a response to others, and what
p learns is to tell which response the observations call for (Vezhnevets et al. 2020, "OPtions as
REsponses", arXiv 1906.01470).

The *probabilities* of the options' actions are mixed, not their logits. Here the values of options
see the state, too; in the paper they see the observation alone. Everything else is as in IMPALA.
Actions are discrete.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float
from rich.console import Console

from offmarl import cli, envs, programs
from offmarl.config import NonNegative, PositiveInt
from offmarl.distributions import Categorical, mask_illegal
from offmarl.errors import OptionError
from offmarl.losses import divergence
from offmarl.networks import (
    SMALL,
    make_network,
    observation_encoder,
    view_encoder,
)
from offmarl.programs import Program
from offmarl.programs.learning.ppo import (
    ActorCritic,
    Networks,
    OffPolicyPPOArgs,
    actor_config,
    make_program,
)
from offmarl.teams import teams_of
from offmarl.types import ArrayTree, Discrete, EnvSpec

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(OffPolicyPPOArgs):
    """Arguments of OPRE."""

    num_options: PositiveInt = 16
    """Number of options."""
    penalty: NonNegative = 0.01
    """Weight of KL(q ‖ p), the divergence of the options that act from those in hindsight."""


# ---------------------------------------------------------------------------------- networks


def split(
    outputs: Float[Array, "*b _"], legal_actions: Bool[Array, "*b A"]
) -> tuple[Float[Array, "*b K"], Float[Array, "*b K A"]]:
    """Return the log-probabilities of the options, and of each option's actions."""
    num_actions = legal_actions.shape[-1]
    num_options = outputs.shape[-1] // (1 + num_actions)
    options, actions = outputs[..., :num_options], outputs[..., num_options:]
    actions = actions.reshape(*actions.shape[:-1], num_options, num_actions)
    legal = jnp.broadcast_to(legal_actions[..., None, :], actions.shape)
    return jax.nn.log_softmax(options), jax.nn.log_softmax(mask_illegal(actions, legal))


def mix(options: Float[Array, "*b K"], actions: Float[Array, "*b K A"]) -> Categorical:
    """Return the mixture of options by their log-probabilities: Σ_z p(z) η(a | z)."""
    return Categorical(jax.nn.logsumexp(options[..., None] + actions, axis=-2))


def head(outputs: Float[Array, "*b _"], legal_actions: Bool[Array, "*b A"]) -> Categorical:
    """Return the distribution of actions that an agent acts by."""
    return mix(*split(outputs, legal_actions))


class Options(Networks):
    """An actor of options, and a critic of the hindsight options and of their values."""

    def evaluate(
        self, params: ActorCritic, carry: ActorCritic, steps: ArrayTree, first: Array
    ) -> tuple[Float[Array, "L W N"], Float[Array, "L W N"], Float[Array, "L W N"]]:
        """Evaluate the mixture by the hindsight options; the part of the loss is KL(q ‖ p)."""
        view = steps.view
        outputs, _ = self.actor.apply(
            params.actor, view.observation, first, carry.actor, method="unroll"
        )
        critic_outputs, _ = self.critic.apply(
            params.critic, self.critic_input(view), first, carry.critic, method="unroll"
        )
        options, actions = split(outputs, view.legal_actions)
        hindsight = jax.nn.log_softmax(critic_outputs[..., : options.shape[-1]])
        policy = mix(hindsight, actions)
        return policy.log_prob(steps.action), policy.entropy(), divergence(hindsight, options)

    def team_values(self, outputs: Float[Array, "*b N _"]) -> Float[Array, "*b N"]:
        """Return Σ_z q(z) v(z) of each agent's team."""
        num_options = outputs.shape[-1] // (1 + len(self.members))
        hindsight = jax.nn.softmax(outputs[..., :num_options])
        values = outputs[..., num_options:].reshape(*hindsight.shape, -1)
        return super().team_values((hindsight[..., None] * values).sum(-2))


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, env: envs.Environment) -> Program:
    """Build the program for an environment, given without autoreset."""
    if not isinstance(spec.action, Discrete):
        raise OptionError(
            f"opre mixes the probabilities of discrete actions, and those of {spec.name} are "
            "continuous: record impala or mappo."
        )
    config, options = actor_config(spec, args), args.num_options
    actor = make_network(
        config,
        spec,
        options * (1 + spec.num_actions),
        observation_encoder(spec, args.hidden),
        output_scale=SMALL,
    )
    outputs = options * (1 + len(teams_of(spec)))
    critic = make_network(config, spec, outputs, view_encoder(spec, args.hidden), sees="view")
    return make_program(spec, args, env, critic, spec.shared, (actor, head), Options)


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> "programs.Recorded":
    """Train OPRE, and record the requested tiers."""
    return programs.record_online(make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        Console().print(main(cli.parse_script(Args, __doc__)).view)
