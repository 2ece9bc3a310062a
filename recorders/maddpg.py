"""MADDPG: deterministic policies with centralised critics, learned off-policy from replay.

Each agent has a critic of the global state and the actions of all agents, which learns from the
agent's own reward; so teams may oppose one another (Lowe et al. 2017, arXiv 1706.02275). Continuous
actions are squashed by tanh; discrete ones are samples through which a straight-through
Gumbel-softmax gradient flows. With ``twin`` it is MATD3 (Ackermann et al. 2019, arXiv 1910.01465):
the smaller value of two critics, smoothed target actions, and policies that are updated less often
(Fujimoto et al. 2018, arXiv 1802.09477).

The recorded log-probabilities are exact: those of the clipped Gaussian noise around continuous
actions, of the softmax that discrete actions are drawn from, and of uniform actions at the start.
"""

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray
from rich.console import Console

from offmarl import cli, envs
from offmarl.config import Fraction, NonNegative, NonNegativeInt, Positive, PositiveInt
from offmarl.losses import (
    bootstrap_discounts,
    masked_mean,
    smoothed_actions,
    squared_errors,
    td_targets,
)
from offmarl.networks import (
    AgentId,
    AgentNetwork,
    Critics,
    NoisyParams,
    PolicyConfig,
    agent_network,
    as_vectors,
    differentiable_action,
    init_policy,
    make_critics,
    make_policy,
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
    draw_windows,
    grad_norm,
    init_capture,
    linear_schedule,
    make_buffer,
    record_online,
    training_progress,
)
from offmarl.rollout import RolloutState, init_rollout, rollout
from offmarl.types import ArrayTree, Continuous, EnvSpec, Sequence, View

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(OnlineArgs):
    """Arguments of MADDPG."""

    num_steps: PositiveInt = 25
    """Time steps in each environment between rounds of updates."""
    updates: PositiveInt = 16
    """Gradient updates in a round."""
    capacity: PositiveInt = 8192
    """Time steps that the replay holds of each environment."""
    batch_size: PositiveInt = 512
    """Steps in a batch."""
    learning_rate: Positive = 1e-3
    """Adam's step size, of actors and critics."""
    anneal: bool = False
    """Decrease the learning rate linearly to 0 over the training."""
    gamma: Fraction = 0.95
    """Discount."""
    reward_scale: Positive = 1.0
    """Factor of the rewards that are learned from; the recorded ones keep their scale."""
    tau: Fraction = 0.01
    """Fraction by which the target networks move to the learned ones in each update of the
    policies."""
    noise: Positive = 0.1
    """Standard deviation of the noise on continuous actions, which lie in [-1, 1]."""
    random_steps: NonNegativeInt = 10_000
    """Environment steps with uniformly random actions at the start. Give 0 with
    --init: otherwise a policy that was learned does not act in these steps."""
    gumbel_temperature: Positive = 1.0
    """Temperature of the Gumbel-softmax gradient of discrete actions."""
    regularise: NonNegative = 1e-3
    """Weight of the squares of the actors' outputs, which keeps them from saturating."""
    twin: bool = False
    """Learn two critics and use the smaller value (MATD3), with the three options below."""
    target_noise: NonNegative = 0.2
    """With --twin: standard deviation of the noise on continuous target actions."""
    target_limit: NonNegative = 0.5
    """With --twin: largest noise on continuous target actions."""
    delay: PositiveInt = 2
    """With --twin: updates of the critics for each update of policies and target networks."""
    max_grad_norm: Positive = 0.5
    """Global norm that the gradients of actors, and those of critics, are clipped to."""
    hidden: PositiveInt = 64
    """Width of the networks' layers."""
    share_parameters: bool = False
    """Share the networks among the agents, instead of one actor and critic for each."""
    agent_id: AgentId = "onehot"
    """With --share-parameters, how the networks distinguish the agents. onehot: by their index,
    which ties them to their number; sinusoidal: by 16 sines and cosines of their place in the team;
    none: not at all."""


# ---------------------------------------------------------------------------------- state


class Params(NamedTuple):
    """Parameters of all networks."""

    actor: ArrayTree
    critics: tuple[ArrayTree, ...]


class Learner(NamedTuple):
    """What the updates of a round change."""

    params: Params
    target: Params
    optimiser: tuple[optax.OptState, optax.OptState]
    """States of the optimisers of the critics and of the actors."""


class State(NamedTuple):
    """Everything that changes during training."""

    params: Params
    target: Params
    optimiser: tuple[optax.OptState, optax.OptState]
    noise: Float[Array, ""]
    """Standard deviation of the noise of the policy that is evaluated and recorded."""
    rollout: RolloutState
    capture: Capture
    iteration: Int[Array, ""]


# ---------------------------------------------------------------------------------- losses


class Networks(NamedTuple):
    """The actors and critics of an environment."""

    spec: EnvSpec
    actor: AgentNetwork
    critics: Critics

    def act(
        self, params: ArrayTree, view: View, key: PRNGKeyArray, temperature: Array
    ) -> tuple[Float[Array, "*b N A"], Float[Array, "*b N A"]]:
        """Return differentiable actions as vectors, and the actors' outputs."""
        outputs, _ = self.actor.apply(params, (), view.observation)
        action = differentiable_action(self.spec, outputs, view.legal_actions, key, temperature)
        return action, outputs


def critic_loss(
    critics: tuple[ArrayTree, ...],
    target: Params,
    networks: Networks,
    hyper: Hyperparameters,
    batch: Sequence,
    key: PRNGKeyArray,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return ½ (Q_i - y_i)², summed over the critics, with each agent's own reward in y_i.

    The targets of a team reward also bootstrap from the values of dead agents, so these are learned
    too.
    """
    spec, view_t = networks.spec, batch.view_t
    act_key, noise_key = jax.random.split(key)
    action_t, _ = networks.act(target.actor, view_t, act_key, hyper.gumbel_temperature)
    if len(critics) > 1 and isinstance(spec.action, Continuous):
        noisy = smoothed_actions(noise_key, action_t, hyper.target_noise, hyper.target_limit)
        action_t = jnp.where(view_t.legal_actions, noisy, 0.0)
    q_t = networks.critics.values(target.critics, view_t, action_t).squeeze(-1).min(0)
    shared = spec.reward == "team"
    discount_t = bootstrap_discounts(hyper.gamma, batch.terminated, shared)
    target_tm1 = td_targets(hyper.reward_scale * batch.reward, discount_t, q_t)

    action = as_vectors(spec, batch.action)
    q_tm1 = networks.critics.values(critics, batch.view_tm1, action).squeeze(-1)
    mask = batch.mask[..., None] & (batch.view_tm1.alive | shared)
    loss = squared_errors(q_tm1, target_tm1, mask)
    return loss, {"critic_loss": loss, "q": masked_mean(q_tm1[0], mask)}


def actor_loss(
    actor: ArrayTree,
    critics: tuple[ArrayTree, ...],
    networks: Networks,
    hyper: Hyperparameters,
    batch: Sequence,
    key: PRNGKeyArray,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return -Q_i of what each live agent would do, beside the others' actions in the data.

    Only the first critic is used.
    """
    view = batch.view_tm1
    own, outputs = networks.act(actor, view, key, hyper.gumbel_temperature)
    action = as_vectors(networks.spec, batch.action)
    q = networks.critics.values(critics[:1], view, action, own).squeeze((0, -1))
    mask = batch.mask[..., None] & view.alive
    saturation = jnp.where(view.legal_actions, outputs**2, 0.0).mean(-1)
    loss = masked_mean(hyper.regularise * saturation - q, mask)
    return loss, {"actor_loss": loss}


# ---------------------------------------------------------------------------------- update


def init_optimisers(params: Params) -> tuple[optax.OptState, optax.OptState]:
    """Return the states of the optimisers of the critics and of the actors."""
    optimiser = clipped_adam(0.0, 0.0)
    return optimiser.init({"critics": params.critics}), optimiser.init({"actor": params.actor})


def learn(
    networks: Networks,
    hyper: Hyperparameters,
    delay: int,
    learner: Learner,
    batch: Sequence,
    key: PRNGKeyArray,
    step: Int[Array, ""],
    learning_rate: Float[Array, ""],
) -> tuple[Learner, dict[str, Array]]:
    """Update the critics, and after every ``delay`` updates the actors and the target networks."""
    critic_key, actor_key = jax.random.split(key)
    optimiser = clipped_adam(learning_rate, hyper.max_grad_norm)
    params, target, (critic_state, actor_state) = learner
    grads, metrics = jax.grad(critic_loss, has_aux=True)(
        params.critics, target, networks, hyper, batch, critic_key
    )
    updates, critic_state = optimiser.update({"critics": grads}, critic_state)
    params = params._replace(critics=optax.apply_updates(params.critics, updates["critics"]))
    metrics["grad_norm"] = grad_norm(grads)
    learner = Learner(params, target, (critic_state, actor_state))

    def update_actor(learner: Learner) -> tuple[Learner, Array]:
        params, target, (critic_state, actor_state) = learner
        grads, found = jax.grad(actor_loss, has_aux=True)(
            params.actor, params.critics, networks, hyper, batch, actor_key
        )
        updates, actor_state = optimiser.update({"actor": grads}, actor_state)
        params = params._replace(actor=optax.apply_updates(params.actor, updates["actor"]))
        target = optax.incremental_update(params, target, hyper.tau)
        return Learner(params, target, (critic_state, actor_state)), found["actor_loss"]

    if delay == 1:
        learner, loss = update_actor(learner)
    else:
        nothing = lambda learner: (learner, jnp.zeros(()))  # noqa: E731
        learner, loss = jax.lax.cond(step % delay == 0, update_actor, nothing, learner)
        loss = loss * delay  # so that its mean over a round is that of the updates made
    return learner, metrics | {"actor_loss": loss}


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, env: envs.Environment) -> Program:
    """Build the program for an environment, given without autoreset."""
    config = PolicyConfig(
        "feedforward", "deterministic", args.hidden, args.agent_id, args.share_parameters
    )
    env, policy = envs.autoreset(env), make_policy(config, spec)
    critics = make_critics(
        spec,
        hidden=args.hidden,
        count=2 if args.twin else 1,
        share_parameters=args.share_parameters,
        agent_id=args.agent_id,
    )
    networks = Networks(spec, agent_network(config, spec), critics)
    buffer = make_buffer(args.num_envs, max(args.capacity, args.num_steps))
    delay = args.delay if args.twin else 1
    random_rounds = -(-args.random_steps // (args.num_envs * args.num_steps))

    def init(key: PRNGKeyArray, hyper: Hyperparameters) -> State:
        actor_key, critic_key, env_key = jax.random.split(key, 3)
        actor = init_policy(config, spec, actor_key).network
        params = Params(actor, critics.init(critic_key, spec))
        return State(
            params=params,
            target=params,
            optimiser=init_optimisers(params),
            noise=jnp.asarray(hyper.noise),
            rollout=init_rollout(env, policy, env_key, args.num_envs),
            capture=init_capture(buffer, spec, sampled=True),
            iteration=jnp.zeros((), jnp.int32),
        )

    def update(
        state: State, _batch: None, key: PRNGKeyArray, hyper: Hyperparameters
    ) -> tuple[State, dict[str, Array]]:
        rollout_key, learn_key = jax.random.split(key)
        uniform = (state.iteration < random_rounds).astype(jnp.float32)
        explore = NoisyParams(state.params.actor, state.noise, uniform)
        after, transitions, next_views = rollout(
            env, policy, explore, state.rollout, rollout_key, args.num_steps, state.iteration
        )
        capture = add(buffer, state.capture, transitions, next_views)
        rate = hyper.learning_rate
        if args.anneal:
            done = training_progress(
                state.iteration, args.total_steps, args.num_envs, args.num_steps
            )
            rate = linear_schedule(done, rate, 0.0)

        def step(learner: Learner, x: tuple[Array, Array]) -> tuple[Learner, dict[str, Array]]:
            draw_key, key = jax.random.split(x[1])
            batch = draw_windows(capture, draw_key, args.batch_size)
            return learn(networks, hyper, delay, learner, batch, key, x[0], rate)

        steps = state.iteration * args.updates + jnp.arange(1, args.updates + 1)
        learner, metrics = jax.lax.scan(
            step,
            Learner(state.params, state.target, state.optimiser),
            (steps, jax.random.split(learn_key, args.updates)),
        )
        state = State(*learner, state.noise, after, capture, state.iteration + 1)
        return state, jax.tree.map(jnp.mean, metrics)

    return Program(
        init,
        stages=(Stage(update),),
        policy=partial(make_policy, config, spec),
        policy_params=lambda state: NoisyParams(state.params.actor, state.noise, jnp.zeros(())),
        greedy=False,
        num_steps=args.num_steps,
    )


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> Recorded:
    """Train MADDPG, and record the requested tiers."""
    return record_online(make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        Console().print(main(cli.parse_script(Args, __doc__)).view)
