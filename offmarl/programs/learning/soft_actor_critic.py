"""Soft actor-critics of several agents, which MASAC and ISAC share.

The reward of each agent includes the entropy of its policy, weighted by a temperature that is
learned so that the entropy approaches a target (Haarnoja et al. 2018, arXiv 1812.05905). The
smaller value of two critics is used. With discrete actions the critics have a value for each action
of an agent, so that expectations over its policy are exact (Christodoulou 2019, arXiv 1910.07207).
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl import envs
from offmarl.config import Fraction, NonNegative, Positive
from offmarl.distributions import Categorical, TanhGaussian
from offmarl.losses import masked_mean, soft_values, temperature_loss
from offmarl.networks import (
    AgentNetwork,
    Critics,
    Head,
    agent_head,
    agent_network,
    as_vectors,
    init_policy,
    make_critics,
    make_policy,
    stochastic_head,
    unroll_part,
)
from offmarl.programs.experience.buffer import Capture, add, init_capture, make_buffer
from offmarl.programs.learning.actor_critic import Learner, td_loss
from offmarl.programs.learning.learner import (
    clipped_adam,
    grad_norm,
    policy_config,
    scheduled,
    training_progress,
)
from offmarl.programs.learning.off_policy import (
    OffPolicyArgs,
    draw_steps,
    fit_unit,
    mean_metrics,
    no_rewards,
)
from offmarl.programs.program import Hyperparameters, Program, Stage
from offmarl.rollout import RolloutState, init_rollout, rollout
from offmarl.types import ArrayTree, Continuous, EnvSpec, Sequence, View

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class SoftArgs(OffPolicyArgs):
    """Arguments of soft actor-critics."""

    temperature: Positive = 0.05
    """Weight of the entropy at the start, beside rewards in the unit of `reward_scale`; each agent
    learns its own."""
    fix_temperature: bool = False
    """Keep the temperature, instead of learning it."""
    discrete_entropy: Fraction = 0.2
    """Target of the entropy of discrete actions, as a fraction of that of uniform legal actions."""
    continuous_entropy: NonNegative = 1.0
    """Target of the entropy of continuous actions: minus this many nats for each entry."""
    max_grad_norm: Positive = 10.0
    """Global norm that the gradients of actors, of critics and of temperatures are clipped to."""
    initial: ClassVar[tuple[str, ...]] = ("temperature",)


# ---------------------------------------------------------------------------------- state


class Params(NamedTuple):
    """Everything that is learned by gradients."""

    actor: ArrayTree
    critics: tuple[ArrayTree, ...]
    log_temperature: Float[Array, "N"]


class Target(NamedTuple):
    """Parameters of the target critics."""

    critics: tuple[ArrayTree, ...]


class State(NamedTuple):
    """Everything that changes during training."""

    params: Params
    target: Target
    optimiser: optax.OptState
    rollout: RolloutState
    capture: Capture
    iteration: Int[Array, ""]
    totals: Float[Array, "E N"]
    largest_return: Float[Array, ""]


# ---------------------------------------------------------------------------------- losses


class Networks(NamedTuple):
    """The actors and critics of an environment."""

    spec: EnvSpec
    actor: AgentNetwork
    head: Head
    critics: Critics

    def policy(
        self, params: ArrayTree, batch: Sequence, slots: slice
    ) -> Categorical | TanhGaussian:
        """Return the distribution of each agent's actions in some slots of windows."""
        outputs = unroll_part(self.actor, params, batch, slots)
        distribution = self.head(outputs, batch.view.legal_actions[:, slots])
        assert isinstance(distribution, (Categorical, TanhGaussian))
        return distribution

    def temperature(self, params: Params) -> Float[Array, "N"]:
        """Return the temperature of each agent, through which no gradient flows."""
        return jax.lax.stop_gradient(jnp.exp(params.log_temperature))

    def soft_values(
        self,
        critics: tuple[ArrayTree, ...],
        view: View,
        others: Float[Array, "*b N A"],
        policy: Categorical | TanhGaussian,
        temperature: Float[Array, "N"],
        key: PRNGKeyArray,
    ) -> tuple[Float[Array, "*b N"], Float[Array, "*b N"]]:
        """Return the value of each agent's policy with its entropy, and the entropy.

        It is exact for discrete actions. For continuous ones it belongs to one sampled action,
        through which gradients flow.
        """
        if isinstance(policy, Categorical):
            q = self.critics.values(critics, view, others, jnp.zeros_like(others)).min(0)
            log_probs = jax.nn.log_softmax(policy.logits)
            return soft_values(q, log_probs, temperature), policy.entropy()
        # The log-probability of the clipped action has gradients that run away at saturation.
        action, log_prob = policy.sample_and_density(key)
        q = self.critics.values(critics, view, others, action).squeeze(-1).min(0)
        return q - temperature * log_prob, -log_prob


def loss(
    params: Params,
    target: Target,
    networks: Networks,
    hyper: Hyperparameters,
    batch: Sequence,
    key: PRNGKeyArray,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return the sum of the losses of critics, actors and temperatures; no gradient is in two.

    Critics: ½ (Q_i - y_i)², where y_i bootstraps from the value of the next actions of all
    policies, with the entropy of agent i. Actors: minus the value of an agent's policy beside the
    others' actions in the data.
    """
    critic_key, actor_key = jax.random.split(key)
    critic, q = _critic_loss(params, target, networks, hyper, batch, critic_key)
    view = batch.view_tm1
    policy = networks.policy(params.actor, batch, slice(None, -1))
    temperature = networks.temperature(params)
    value, entropy = networks.soft_values(
        jax.lax.stop_gradient(params.critics),
        view,
        as_vectors(networks.spec, batch.action, view.legal_actions),
        policy,
        temperature,
        actor_key,
    )
    mask = batch.mask[..., None] & view.alive
    actor = masked_mean(-value, mask)
    aim = target_entropy(networks.spec, hyper, view.legal_actions)
    of_temperature = masked_mean(temperature_loss(params.log_temperature, entropy, aim), mask)
    metrics = {
        "critic_loss": critic,
        "actor_loss": actor,
        "q": q,
        "entropy": masked_mean(entropy, mask),
        "temperature": temperature.mean(),
    }
    return critic + actor + of_temperature, metrics


def _critic_loss(
    params: Params,
    target: Target,
    networks: Networks,
    hyper: Hyperparameters,
    batch: Sequence,
    key: PRNGKeyArray,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the loss of the critics, and the mean value of the data's actions.

    The targets of a team reward also bootstrap from the values of dead agents, so these are learned
    too; but the entropy of a dead agent does not count.
    """
    spec, view_t = networks.spec, batch.view_t
    others_key, own_key = jax.random.split(key)
    policy_t = networks.policy(params.actor, batch, slice(1, None))
    temperature = networks.temperature(params)
    others_t = as_vectors(spec, policy_t.sample(others_key))
    v_t, entropy_t = networks.soft_values(
        target.critics, view_t, others_t, policy_t, temperature, own_key
    )
    v_t -= jnp.where(view_t.alive, 0.0, temperature * entropy_t)
    action = as_vectors(spec, batch.action, batch.view_tm1.legal_actions)
    if isinstance(spec.action, Continuous):
        q_tm1 = networks.critics.values(params.critics, batch.view_tm1, action).squeeze(-1)
    else:
        blank = jnp.zeros_like(action)
        q_tm1 = networks.critics.values(params.critics, batch.view_tm1, action, blank)
        q_tm1 = (q_tm1 * action).sum(-1)
    loss, metrics = td_loss(spec, batch, q_tm1, v_t, hyper.gamma, hyper.reward_scale)
    return loss, metrics["q"]


def target_entropy(
    spec: EnvSpec, hyper: Hyperparameters, legal_actions: Bool[Array, "*b N A"]
) -> Float[Array, "*b N"]:
    """Return the entropy that the temperatures aim at, which depends on what is legal."""
    count = legal_actions.sum(-1)
    if isinstance(spec.action, Continuous):
        return -hyper.continuous_entropy * count
    return hyper.discrete_entropy * jnp.log(jnp.maximum(count, 1))


# ---------------------------------------------------------------------------------- program


def make_soft_actor_critic(
    spec: EnvSpec, args: SoftArgs, env: envs.Environment, centralised: bool
) -> Program:
    """Build a soft actor-critic for an environment, given without autoreset.

    ``centralised`` critics see the state and the actions of all agents, others what their agent
    sees.
    """
    config = policy_config(args, stochastic_head(spec, "soft_gaussian"))
    env, policy = envs.autoreset(env), make_policy(config, spec)
    critics = make_critics(
        spec,
        outputs=1 if isinstance(spec.action, Continuous) else spec.num_actions,
        hidden=args.hidden,
        count=2,
        sees="joint" if centralised else "observation",
        share_parameters=args.share_parameters,
        agent_id=args.agent_id,
    )
    networks = Networks(spec, agent_network(config, spec), agent_head(config), critics)
    buffer = make_buffer(args.num_envs, args.replay_steps)

    def init(key: PRNGKeyArray, hyper: Hyperparameters) -> State:
        actor_key, critic_key, env_key = jax.random.split(key, 3)
        critics = networks.critics.init(critic_key, spec)
        log_temperature = jnp.full(spec.num_agents, jnp.log(hyper.temperature))
        params = Params(init_policy(config, spec, actor_key), critics, log_temperature)
        return State(
            params=params,
            target=Target(critics),
            optimiser=clipped_adam(0.0, 0.0, separately=True).init(params),
            rollout=init_rollout(env, policy, env_key, args.num_envs),
            capture=init_capture(buffer, spec, True, args.num_steps),
            iteration=jnp.zeros((), jnp.int32),
            **no_rewards(spec, args.num_envs),
        )

    def update(
        state: State, _batch: None, key: PRNGKeyArray, hyper: Hyperparameters
    ) -> tuple[State, dict[str, Array]]:
        rollout_key, learn_key = jax.random.split(key)
        actor = state.params.actor
        after, transitions, next_views, _ = rollout(
            env, policy, actor, state.rollout, rollout_key, args.num_steps, state.iteration
        )
        capture = add(buffer, state.capture, transitions, next_views)
        state, hyper = fit_unit(spec, state, transitions, hyper)
        progress = training_progress(args, state.iteration)
        rate = scheduled(hyper.learning_rate, progress, args.schedule)
        optimiser = clipped_adam(rate, hyper.max_grad_norm, separately=True)

        def step(learner: Learner, key: PRNGKeyArray) -> tuple[Learner, dict[str, Array]]:
            draw_key, key = jax.random.split(key)
            params, target, moments = learner
            batch = draw_steps(args, capture, draw_key)
            gradient = jax.grad(loss, has_aux=True)
            grads, metrics = gradient(params, target, networks, hyper, batch, key)
            metrics["grad_norm"] = grad_norm(grads)
            if args.fix_temperature:
                grads = grads._replace(log_temperature=jnp.zeros_like(grads.log_temperature))
            updates, moments = optimiser.update(grads, moments)
            params = optax.apply_updates(params, updates)
            target = optax.incremental_update(Target(params.critics), target, hyper.tau)
            return Learner(params, target, moments), metrics

        learner, metrics = jax.lax.scan(
            step,
            Learner(state.params, state.target, state.optimiser),
            jax.random.split(learn_key, args.updates),
        )
        state = state._replace(**learner._asdict(), rollout=after, capture=capture)
        return state._replace(iteration=state.iteration + 1), mean_metrics(metrics, hyper)

    return Program(
        init,
        stages=(Stage(update),),
        policy=partial(make_policy, config, spec),
        policy_params=lambda state: state.params.actor,
        greedy=False,
        num_steps=args.num_steps,
    )
