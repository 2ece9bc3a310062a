"""MAPPO: proximal policy optimisation with a critic that sees the global state.

Feed-forward, parameters shared by all agents, generalised advantages, and values normalised by
running statistics (Yu et al. 2022, "The Surprising Effectiveness of PPO in Cooperative Multi-Agent
Games", arXiv 2103.01955). Each agent's value is that of the global state and its own observation.
Actions are discrete, or continuous and drawn from a clipped Gaussian.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray
from rich.console import Console

from offmarl import cli, envs
from offmarl.config import Fraction, NonNegative, Positive, PositiveInt
from offmarl.errors import OptionError
from offmarl.losses import clipped_surrogate, generalised_advantages, masked_mean
from offmarl.networks import (
    AgentId,
    AgentNetwork,
    CriticKind,
    FeedForward,
    Head,
    Moments,
    PolicyConfig,
    agent_head,
    agent_network,
    critic_encoder,
    init_policy,
    make_policy,
    stochastic_head,
)
from offmarl.programs import (
    Capture,
    Hyperparameters,
    OnlineArgs,
    Program,
    Recorded,
    Stage,
    add,
    clipped_adam,
    grad_norm,
    init_capture,
    make_buffer,
    record_online,
)
from offmarl.rollout import RolloutState, init_rollout, rollout
from offmarl.types import ArrayTree, EnvSpec, Transition, View

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(OnlineArgs):
    """Arguments of MAPPO."""

    num_steps: PositiveInt = 64
    """Time steps in each environment between updates."""
    epochs: PositiveInt = 4
    """Passes over the steps of an update."""
    minibatches: PositiveInt = 4
    """Minibatches in a pass."""
    learning_rate: Positive = 7e-4
    """Adam's step size, of actor and critic."""
    gamma: Fraction = 0.99
    """Discount."""
    gae_lambda: Fraction = 0.95
    """λ of generalised advantage estimation: trades bias for variance."""
    clip: Positive = 0.2
    """ε, the largest relative change of an action's probability in an update."""
    entropy: NonNegative = 0.01
    """Weight of the entropy bonus."""
    max_grad_norm: Positive = 0.5
    """Global norm that gradients are clipped to."""
    tanh: bool = False
    """Use a tanh-squashed Gaussian for continuous actions instead of a clipped one."""
    hidden: PositiveInt = 64
    """Width of the networks' layers."""
    agent_id: AgentId = "onehot"
    """How the network distinguishes the agents. onehot: by their index, which ties it to their
    number; sinusoidal: by 16 sines and cosines of their place in the team; none: not at all."""
    critic: CriticKind = "state"
    """What the critic sees beside an agent's own observation. state: the global state; pooled: the
    observations of all agents, by attention, with as many parameters for any number of agents."""


# ---------------------------------------------------------------------------------- state


class Params(NamedTuple):
    """Parameters of both networks."""

    actor: ArrayTree
    critic: ArrayTree


class State(NamedTuple):
    """Everything that changes during training."""

    params: Params
    optimiser: optax.OptState
    moments: Moments
    """Moments of the returns, by which values are normalised."""
    rollout: RolloutState
    capture: Capture
    iteration: Int[Array, ""]


class Batch(NamedTuple):
    """M steps to learn from, in any order."""

    view: View
    action: Int[Array, "M N"] | Float[Array, "M N A"]
    behaviour_log_prob: Float[Array, "M N"]
    advantage: Float[Array, "M N"]
    target: Float[Array, "M N"]
    """Normalised λ-returns."""


# ---------------------------------------------------------------------------------- losses


class Networks(NamedTuple):
    """The actor, which sees an agent's observation, and the critic, which also sees the state."""

    actor: AgentNetwork
    head: Head
    critic: FeedForward

    def log_prob_and_entropy(
        self, params: Params, view: View, action: Array
    ) -> tuple[Float[Array, "*b N"], Float[Array, "*b N"]]:
        """Return the log-probability of each agent's action, and the entropy of its policy."""
        outputs, _ = self.actor.apply(params.actor, (), view.observation)
        distribution = self.head(outputs, view.legal_actions)
        return distribution.log_prob(action), distribution.entropy()

    def value(self, params: Params, view: View) -> Float[Array, "*b N"]:
        """Return the normalised value of a view for each agent."""
        return self.critic.apply(params.critic, (), view)[0].squeeze(-1)


def loss(
    params: Params, networks: Networks, hyper: Hyperparameters, batch: Batch
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return the clipped surrogate and entropy bonus of live agents, and the value error of all.

    Targets also bootstrap from the values of dead agents, so these are learned too (the authors'
    death masking).
    """
    mask = batch.view.alive
    log_prob, entropy = networks.log_prob_and_entropy(params, batch.view, batch.action)
    advantage = normalise(batch.advantage, mask)
    surrogate = clipped_surrogate(log_prob, batch.behaviour_log_prob, advantage, hyper.clip)
    error = 0.5 * (networks.value(params, batch.view) - batch.target) ** 2
    metrics = {
        "policy_loss": masked_mean(surrogate, mask),
        "value_loss": error.mean(),
        "entropy": masked_mean(entropy, mask),
    }
    total = metrics["policy_loss"] + metrics["value_loss"] - hyper.entropy * metrics["entropy"]
    return total, metrics


def normalise(values: Float[Array, "*b"], mask: Bool[Array, "*b"]) -> Float[Array, "*b"]:
    """Shift and scale values to mean 0 and standard deviation 1 over the mask."""
    centred = values - masked_mean(values, mask)
    return centred / (jnp.sqrt(masked_mean(centred**2, mask)) + 1e-8)


# ---------------------------------------------------------------------------------- update


def advantages(
    networks: Networks,
    hyper: Hyperparameters,
    spec: EnvSpec,
    state: State,
    transitions: Transition,
    next_views: View,
) -> tuple[Float[Array, "T E N"], Float[Array, "T E N"]]:
    """Return generalised advantages and λ-returns, both on the scale of the rewards.

    If the team shares its reward, the reward continues after one of its agents is done, and that
    agent contributed to it. The episode therefore ends for all agents at once.
    """
    terminated = transitions.terminated
    if spec.reward == "team":
        terminated = jnp.broadcast_to(terminated.all(-1, keepdims=True), terminated.shape)

    def value(view: View) -> Float[Array, "T E N"]:
        return networks.value(state.params, view) * state.moments.std + state.moments.mean

    value_tm1 = value(transitions.view)
    estimate = partial(generalised_advantages, lambda_=hyper.gae_lambda)
    for _ in ("environments", "agents"):
        estimate = jax.vmap(estimate, in_axes=1, out_axes=1)
    advantage = estimate(
        transitions.reward,
        hyper.gamma * (1 - terminated),
        jnp.broadcast_to(transitions.last[..., None], value_tm1.shape),
        value_tm1,
        value(next_views),
    )
    return advantage, advantage + value_tm1


def learn(
    networks: Networks,
    args: Args,
    hyper: Hyperparameters,
    state: State,
    batch: Batch,
    key: PRNGKeyArray,
) -> tuple[State, dict[str, Array]]:
    """Update on a batch for several epochs of minibatches, each epoch in a new random order."""
    num_samples = batch.action.shape[0]
    size = num_samples // args.minibatches
    optimiser = clipped_adam(hyper.learning_rate, hyper.max_grad_norm, eps=1e-5)

    def step(
        carry: tuple[Params, optax.OptState], indices: Int[Array, "size"]
    ) -> tuple[tuple[Params, optax.OptState], dict[str, Array]]:
        params, optimiser_state = carry
        minibatch = jax.tree.map(lambda leaf: leaf[indices], batch)
        grads, metrics = jax.grad(loss, has_aux=True)(params, networks, hyper, minibatch)
        updates, optimiser_state = optimiser.update(grads, optimiser_state)
        params = optax.apply_updates(params, updates)
        return (params, optimiser_state), metrics | {"grad_norm": grad_norm(grads)}

    orders = jax.vmap(lambda key: jax.random.permutation(key, num_samples))(
        jax.random.split(key, args.epochs)
    )
    minibatches = orders[:, : size * args.minibatches].reshape(-1, size)
    (params, optimiser_state), metrics = jax.lax.scan(
        step, (state.params, state.optimiser), minibatches
    )
    state = state._replace(params=params, optimiser=optimiser_state)
    return state, jax.tree.map(jnp.mean, metrics)


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, env: envs.Environment) -> Program:
    """Build the program for an environment, given without autoreset."""
    if args.minibatches > args.num_envs * args.num_steps:
        raise OptionError(
            f"{args.num_envs} environments of {args.num_steps} steps cannot be divided into "
            f"{args.minibatches} minibatches: give fewer minibatches, or more steps."
        )
    head = stochastic_head(spec, "tanh_gaussian" if args.tanh else "gaussian")
    config = PolicyConfig("feedforward", head, args.hidden, args.agent_id)
    env, policy = envs.autoreset(env), make_policy(config, spec)
    networks = Networks(
        actor=agent_network(config, spec),
        head=agent_head(config),
        critic=FeedForward(
            outputs=1,
            hidden=args.hidden,
            agent_id=args.agent_id,
            encoder=critic_encoder(spec, args.hidden, args.critic),
        ),
    )
    buffer = make_buffer(args.num_envs, args.num_steps)

    def init(key: PRNGKeyArray, _hyper: Hyperparameters) -> State:
        actor_key, critic_key, env_key = jax.random.split(key, 3)
        state = init_rollout(env, policy, env_key, args.num_envs)
        critic = networks.critic.init(critic_key, (), state.view)
        params = Params(init_policy(config, spec, actor_key), critic)
        return State(
            params=params,
            optimiser=clipped_adam(0.0, 0.0).init(params),
            moments=Moments.zero(),
            rollout=state,
            capture=init_capture(buffer, spec),
            iteration=jnp.zeros((), jnp.int32),
        )

    def update(
        state: State, _batch: None, key: PRNGKeyArray, hyper: Hyperparameters
    ) -> tuple[State, dict[str, Array]]:
        rollout_key, learn_key = jax.random.split(key)
        after, transitions, next_views = rollout(
            env,
            policy,
            state.params.actor,
            state.rollout,
            rollout_key,
            args.num_steps,
            state.iteration,
        )
        advantage, target = advantages(networks, hyper, spec, state, transitions, next_views)
        moments = state.moments.update(target, transitions.view.alive)
        batch = Batch(
            transitions.view,
            transitions.action,
            transitions.behaviour_log_prob,
            advantage,
            (target - moments.mean) / moments.std,
        )
        samples = jax.tree.map(lambda leaf: jax.lax.collapse(leaf, 0, 2), batch)
        state = state._replace(
            moments=moments,
            rollout=after,
            capture=add(buffer, state.capture, transitions, next_views),
            iteration=state.iteration + 1,
        )
        return learn(networks, args, hyper, state, samples, learn_key)

    return Program(
        init,
        stages=(Stage(update),),
        policy=partial(make_policy, config, spec),
        policy_params=lambda state: state.params.actor,
        greedy=False,
        num_steps=args.num_steps,
    )


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> Recorded:
    """Train MAPPO, and record the requested tiers."""
    return record_online(make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        Console().print(main(cli.parse_script(Args, __doc__)).view)
