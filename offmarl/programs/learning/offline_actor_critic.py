"""Deterministic policies learned offline from action-value critics, for continuous actions.

matd3_bc, maddpg_cql and omar share the arguments, the networks, the loss of the critics, with its
conservative penalty, and the rest of the program. Each of them defines the loss of its policies.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.scipy.stats import norm
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from offmarl.config import Fraction, NonNegative, Positive, PositiveInt
from offmarl.distributions import uniform_action
from offmarl.errors import ShapeError
from offmarl.losses import masked_mean, sampled_conservative_gap, smoothed_actions
from offmarl.networks import (
    AgentNetwork,
    CriticInput,
    Critics,
    NoisyParams,
    PolicyConfig,
    agent_network,
    init_policy,
    make_critics,
    make_policy,
    squash,
    unroll_batch,
)
from offmarl.programs.learning.actor_critic import (
    ActorCritics,
    Learner,
    Metrics,
    init_learner,
    learn,
    td_loss,
)
from offmarl.programs.learning.learner import (
    TargetState,
    ValueArgs,
    make_optimiser,
    policy_config,
)
from offmarl.programs.program import Hyperparameters, Program, Stage, Values
from offmarl.teams import require_one_team
from offmarl.types import ArrayTree, Continuous, EnvSpec, Sequence, View

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class ActorCriticArgs(ValueArgs):
    """Arguments of offline actor-critics for continuous actions."""

    tau: Fraction = 0.005
    """Fraction by which the target networks move to the learned ones in each update of the
    policies."""
    twin: bool = True
    """Learn two critics and use the smaller value, instead of one critic."""
    target_noise: NonNegative = 0.0
    """Standard deviation of the noise on target actions, which lie in [-1, 1]; 0 for none. 0.2
    smooths the values as in TD3."""
    target_limit: NonNegative = 0.5
    """Largest noise on target actions."""
    delay: PositiveInt = 1
    """Updates of the critics for each update of policies and target networks; 2 in TD3."""
    critic_hidden: PositiveInt = 128
    """Width of the critics' two layers."""
    share_parameters: bool = True
    """Share the networks among the agents, instead of a policy and critics for each."""


@dataclass(frozen=True)
class ConservativeArgs(ActorCriticArgs):
    """Arguments of offline actor-critics with a conservative penalty."""

    learning_rate: Positive = 1e-3
    """Adam's step size, at the first update."""
    tau: Fraction = 0.01
    """Fraction by which the target networks move to the learned ones in each update of the
    policies."""
    cql_weight: NonNegative = 0.1
    """Weight of the conservative penalty; 0 for none."""
    cql_samples: PositiveInt = 10
    """Actions of each of three kinds in the penalty: uniform ones, and those of the policies in the
    step and in the next, with noise."""
    cql_noise: Positive = 0.2
    """Standard deviation of that noise."""
    regularise: NonNegative = 1e-3
    """Weight of the squares of the policies' actions, which keeps them from the ends of the range.
    """


# ---------------------------------------------------------------------------------- networks


class Networks(NamedTuple):
    """The policies and critics of an offline program."""

    spec: EnvSpec
    config: PolicyConfig
    actor: AgentNetwork
    critics: Critics

    def actions(self, actor: ArrayTree, batch: Sequence) -> Float[Array, "B slots N A"]:
        """Return the policies' actions in all slots of the windows."""
        view = batch.view
        outputs = unroll_batch(self.actor, actor, view.observation, batch.first)
        return squash(outputs, usable_entries(view))

    def values(
        self,
        critics: tuple[ArrayTree, ...],
        view: View,
        action: Float[Array, "*#b N A"],
        own: Float[Array, "*#b N A"] | None = None,
    ) -> Float[Array, "K *#b N"]:
        """Return the value of each agent's action; see `offmarl.networks.Critics.values`."""
        return self.critics.values(critics, view, action, own).squeeze(-1)

    def own_values(
        self, actor: ArrayTree, critics: tuple[ArrayTree, ...], batch: Sequence
    ) -> tuple[Float[Array, "B T N A"], Float[Array, "B T N"]]:
        """Return each agent's policy action, and its least value beside the others' data actions.

        Gradients flow through both to the policies.
        """
        action = self.actions(actor, batch)[:, :-1]
        return action, self.values(critics, batch.view_tm1, data_action(batch), action).min(0)


def make_networks(
    spec: EnvSpec, args: ActorCriticArgs, program: str, sees: CriticInput
) -> Networks:
    """Build the networks of a program."""
    if not isinstance(spec.action, Continuous):
        raise ShapeError(
            f"{spec.name or 'this dataset'} has {spec.action_size} discrete actions, and {program} "
            "is for continuous ones: choose a baseline for discrete actions."
        )
    if sees == "joint":
        require_one_team(spec, program)
    config = policy_config(args, "deterministic")
    critics = make_critics(
        spec,
        hidden=args.critic_hidden,
        count=2 if args.twin else 1,
        sees=sees,
        share_parameters=args.share_parameters,
        agent_id=args.agent_id,
    )
    return Networks(spec, config, agent_network(config, spec), critics)


def usable_entries(view: View) -> Bool[Array, "*b N A"]:
    """Return the entries of actions that have an effect: the legal ones of live agents."""
    return view.legal_actions & view.alive[..., None]


def data_action(batch: Sequence) -> Float[Array, "B T N A"]:
    """Return the data's actions, 0 where they have no effect."""
    return zero_unusable(batch.view_tm1, batch.action)


def zero_unusable(view: View, action: Float[Array, "*b N A"]) -> Float[Array, "*b N A"]:
    """Return actions as critics take them: 0 where they have no effect."""
    return jnp.where(usable_entries(view), action, 0.0)


# ---------------------------------------------------------------------------------- critics


def critic_loss(
    networks: Networks,
    hyper: Hyperparameters,
    critics: tuple[ArrayTree, ...],
    _params: ActorCritics,
    target: ActorCritics,
    batch: Sequence,
    key: PRNGKeyArray,
) -> tuple[Float[Array, ""], Metrics]:
    """Return the `td_loss` of the target policies' actions, valued by the smaller target critic."""
    view_t = batch.view_t._replace(alive=batch.acts_t)
    # An agent that is truncated alone acts in the view that it reached.
    view = batch.view._replace(alive=batch.view.alive.at[:, 1:].set(batch.acts_t))
    action_t = networks.actions(target.actor, batch._replace(view=view))[:, 1:]
    noisy = smoothed_actions(key, action_t, hyper.target_noise, hyper.target_limit)
    q_t = networks.values(target.critics, view_t, zero_unusable(view_t, noisy)).min(0)
    q_tm1 = networks.values(critics, batch.view_tm1, data_action(batch))
    loss, metrics = td_loss(networks.spec, batch, q_tm1, q_t, hyper.gamma)
    return loss, metrics | {"td_loss": loss}


def sample_actions(
    key: PRNGKeyArray,
    action: Float[Array, "B slots N A"],
    batch: Sequence,
    count: int,
    std: Float[Array, ""] | float,
) -> tuple[Float[Array, "S B T N A"], Float[Array, "S B T N"], Bool[Array, "S B T N"]]:
    """Draw ``count`` uniform actions, and as many near the policies' actions in two slots.

    These are the slots of a step and the next. Also return the log-density of each agent's own
    action, and which samples are valid: those of the next slot, if the step leads to a known view.
    The noise is Gaussian and truncated, so that the actions lie in [-1, 1] and have a density.
    Clipped actions have none: many lie at the ends of the range, and weights by the density of
    their noise have no mean.
    """
    uniform_key, noise_key = jax.random.split(key)
    acts = usable_entries(batch.view_tm1)
    uniform, of_uniform = uniform_action(uniform_key, jnp.broadcast_to(acts, (count, *acts.shape)))
    around = jnp.repeat(jnp.stack([action[:, :-1], action[:, 1:]]), count, axis=0)
    low, high = (-1.0 - around) / std, (1.0 - around) / std
    noise = jax.random.truncated_normal(noise_key, low, high)
    near = jnp.where(acts, jnp.clip(around + std * noise, -1.0, 1.0), 0.0)
    inside = jnp.log(norm.cdf(high) - norm.cdf(low))
    of_near = jnp.where(acts, norm.logpdf(noise) - jnp.log(std) - inside, 0.0).sum(-1)
    goes_on = batch.next_known & ~batch.terminated.all(-1)
    valid = jnp.ones((3 * count, *acts.shape[:-1]), bool).at[2 * count :].set(goes_on[..., None])
    return jnp.concatenate([uniform, near]), jnp.concatenate([of_uniform, of_near]), valid


def conservative_loss(
    networks: Networks,
    args: ConservativeArgs,
    hyper: Hyperparameters,
    critics: tuple[ArrayTree, ...],
    actor: ArrayTree,
    batch: Sequence,
    key: PRNGKeyArray,
) -> Float[Array, ""]:
    """Return the `sampled_conservative_gap` of each critic's own values, summed over the critics.

    Joint critics value samples of all agents at once, whose log-density is the sum over the agents.
    """
    action, log_density, valid = sample_actions(
        key, networks.actions(actor, batch), batch, args.cql_samples, hyper.cql_noise
    )
    if networks.critics.network.sees == "joint":
        log_density = jnp.broadcast_to(log_density.sum(-1, keepdims=True), log_density.shape)
    q = networks.values(critics, batch.view_tm1, action)
    q_data = networks.values(critics, batch.view_tm1, data_action(batch))
    gap = sampled_conservative_gap(q, log_density, valid, q_data)
    # A dead agent takes no action. In a team all values are alike, so that they are all counted.
    counts = batch.mask[..., None] & (batch.view_tm1.alive | (networks.spec.reward == "team"))
    return jax.vmap(lambda gap: masked_mean(gap, counts, batch.weight))(gap).sum()


def conservative_critic_loss(
    networks: Networks,
    args: ConservativeArgs,
    hyper: Hyperparameters,
    critics: tuple[ArrayTree, ...],
    params: ActorCritics,
    target: ActorCritics,
    batch: Sequence,
    key: PRNGKeyArray,
) -> tuple[Float[Array, ""], Metrics]:
    """Return the `critic_loss` with the weighted `conservative_loss`."""
    td_key, cql_key = jax.random.split(key)
    loss, metrics = critic_loss(networks, hyper, critics, params, target, batch, td_key)
    gap = conservative_loss(networks, args, hyper, critics, params.actor, batch, cql_key)
    return loss + hyper.cql_weight * gap, metrics | {"cql_loss": gap}


# ---------------------------------------------------------------------------------- program


def actor_critic_program(
    networks: Networks,
    args: ActorCriticArgs,
    of_critics: Callable[..., tuple[Float[Array, ""], Metrics]],
    of_actor: Callable[..., tuple[Float[Array, ""], Metrics]],
) -> Program:
    """Build an offline program from its networks and losses, which take hyperparameters first."""

    def init(key: PRNGKeyArray, hyper: Hyperparameters) -> TargetState:
        actor_key, critic_key = jax.random.split(key)
        actor = init_policy(networks.config, networks.spec, actor_key).network
        params = ActorCritics(actor, networks.critics.init(critic_key, networks.spec))
        learner = init_learner(params, make_optimiser(args, hyper))
        return TargetState(*learner, jnp.zeros((), jnp.int32))

    def update(
        state: TargetState, batch: Sequence, key: PRNGKeyArray, hyper: Hyperparameters
    ) -> tuple[TargetState, Metrics]:
        losses = partial(of_critics, hyper), partial(of_actor, hyper)
        optimiser, step = make_optimiser(args, hyper, state.updates), state.updates + 1
        learner, metrics = learn(
            *losses, optimiser, hyper.tau, args.delay, Learner(*state[:-1]), batch, key, step
        )
        return TargetState(*learner, step), metrics

    def values(
        critics: tuple[ArrayTree, ...], view: View, _first: Bool[Array, "B T"], action: Array
    ) -> Float[Array, "B T N"]:
        return networks.values(critics, view, zero_unusable(view, action)).min(0)

    return Program(
        init,
        stages=(Stage(update),),
        policy=partial(make_policy, networks.config, networks.spec),
        policy_params=lambda state: NoisyParams(state.params.actor, jnp.zeros(()), jnp.zeros(())),
        td_errors=True,
        values=Values(lambda state: state.params.critics, values),
    )
