"""MADDPG: deterministic policies with centralised critics, learned off-policy from replay.

Each agent has a critic of the global state and the actions of all agents, which learns from the
agent's own reward; so teams may oppose one another (Lowe et al. 2017, arXiv 1706.02275). Continuous
actions are squashed by tanh; discrete ones are samples through which a straight-through
Gumbel-softmax gradient flows. With ``twin`` it is MATD3 (Ackermann et al. 2019, arXiv 1910.01465):
the smaller value of two critics, smoothed target actions, and policies that are updated less often
(Fujimoto et al. 2018, arXiv 1802.09477). Policies are feed-forward or recurrent; critics have no
memory.

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

from offmarl import cli, envs, programs
from offmarl.config import NonNegative, NonNegativeInt, Positive, PositiveInt
from offmarl.losses import masked_mean, smoothed_actions
from offmarl.networks import (
    AgentNetwork,
    Critics,
    NoisyParams,
    agent_network,
    as_vectors,
    differentiable_action,
    init_policy,
    make_critics,
    make_policy,
    unroll_part,
)
from offmarl.programs import (
    Capture,
    Hyperparameters,
    OffPolicyArgs,
    Program,
    Stage,
    add,
    clipped_adam,
    init_capture,
    make_buffer,
    scheduled,
    training_progress,
)
from offmarl.programs.learning.actor_critic import (
    ActorCritics,
    Learner,
    init_learner,
    learn,
    td_loss,
)
from offmarl.programs.learning.off_policy import draw_steps, fit_unit, mean_metrics, no_rewards
from offmarl.rollout import RolloutState, init_rollout, rollout
from offmarl.types import ArrayTree, Continuous, EnvSpec, Sequence

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(OffPolicyArgs):
    """Arguments of MADDPG."""

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
    share_parameters: bool = False
    """Share the networks among the agents, instead of one actor and critic for each."""


# ---------------------------------------------------------------------------------- state


class State(NamedTuple):
    """Everything that changes during training."""

    params: ActorCritics
    target: ActorCritics
    optimiser: tuple[optax.OptState, optax.OptState]
    noise: Float[Array, ""]
    """Standard deviation of the noise of the policy that is evaluated and recorded."""
    rollout: RolloutState
    capture: Capture
    iteration: Int[Array, ""]
    totals: Float[Array, "E teams"]
    largest_return: Float[Array, ""]


# ---------------------------------------------------------------------------------- losses


class Networks(NamedTuple):
    """The actors and critics of an environment."""

    spec: EnvSpec
    actor: AgentNetwork
    critics: Critics

    def act(
        self,
        params: ArrayTree,
        batch: Sequence,
        slots: slice,
        key: PRNGKeyArray,
        temperature: Array,
    ) -> tuple[Float[Array, "B T N A"], Float[Array, "B T N A"]]:
        """Return differentiable actions in some slots as vectors, and the actors' outputs."""
        outputs = unroll_part(self.actor, params, batch, slots)
        legal = batch.view.legal_actions[:, slots]
        return differentiable_action(self.spec, outputs, legal, key, temperature), outputs


def critic_loss(
    networks: Networks,
    hyper: Hyperparameters,
    critics: tuple[ArrayTree, ...],
    _params: ActorCritics,
    target: ActorCritics,
    batch: Sequence,
    key: PRNGKeyArray,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return the `td_loss` of target policies' actions, valued by the smallest target critic."""
    spec, view_t = networks.spec, batch.view_t
    act_key, noise_key = jax.random.split(key)
    temperature = hyper.gumbel_temperature
    action_t, _ = networks.act(target.actor, batch, slice(1, None), act_key, temperature)
    if len(critics) > 1 and isinstance(spec.action, Continuous):
        noisy = smoothed_actions(noise_key, action_t, hyper.target_noise, hyper.target_limit)
        action_t = jnp.where(view_t.legal_actions, noisy, 0.0)
    q_t = networks.critics.values(target.critics, view_t, action_t).squeeze(-1).min(0)
    action = as_vectors(spec, batch.action, batch.view_tm1.legal_actions)
    q_tm1 = networks.critics.values(critics, batch.view_tm1, action)
    loss, metrics = td_loss(spec, batch, q_tm1.squeeze(-1), q_t, hyper.gamma, hyper.reward_scale)
    return loss, {"critic_loss": loss, "q": metrics["q"]}


def actor_loss(
    networks: Networks,
    hyper: Hyperparameters,
    actor: ArrayTree,
    critics: tuple[ArrayTree, ...],
    batch: Sequence,
    key: PRNGKeyArray,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return -Q_i of each live agent's policy action, beside the others' actions in the data.

    Only the first critic is used.
    """
    view = batch.view_tm1
    pi, outputs = networks.act(actor, batch, slice(None, -1), key, hyper.gumbel_temperature)
    action = as_vectors(networks.spec, batch.action, view.legal_actions)
    q = networks.critics.values(critics[:1], view, action, pi).squeeze((0, -1))
    mask = batch.mask[..., None] & view.alive
    saturation = jnp.where(view.legal_actions, outputs**2, 0.0).mean(-1)
    loss = masked_mean(hyper.regularise * saturation - q, mask)
    return loss, {"actor_loss": loss}


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, env: envs.Environment) -> Program:
    """Build the program for an environment, given without autoreset."""
    config = programs.policy_config(args, "deterministic")
    env, policy = envs.autoreset(env), make_policy(config, spec)
    critics = make_critics(
        spec,
        hidden=args.hidden,
        count=2 if args.twin else 1,
        share_parameters=args.share_parameters,
        agent_id=args.agent_id,
    )
    networks = Networks(spec, agent_network(config, spec), critics)
    buffer = make_buffer(args.num_envs, args.replay_steps)
    delay = args.delay if args.twin else 1
    random_rounds = -(-args.random_steps // (args.num_envs * args.num_steps))

    def init(key: PRNGKeyArray, hyper: Hyperparameters) -> State:
        actor_key, critic_key, env_key = jax.random.split(key, 3)
        actor = init_policy(config, spec, actor_key).network
        params = ActorCritics(actor, critics.init(critic_key, spec))
        return State(
            *init_learner(params, clipped_adam(0.0, 0.0)),
            noise=jnp.asarray(hyper.noise),
            rollout=init_rollout(env, policy, env_key, args.num_envs),
            capture=init_capture(buffer, spec, True, args.num_steps),
            iteration=jnp.zeros((), jnp.int32),
            **no_rewards(spec, args.num_envs),
        )

    def update(
        state: State, _batch: None, key: PRNGKeyArray, hyper: Hyperparameters
    ) -> tuple[State, dict[str, Array]]:
        rollout_key, learn_key = jax.random.split(key)
        is_random = state.iteration < random_rounds
        explore = NoisyParams(state.params.actor, hyper.noise, is_random.astype(jnp.float32))
        number = jnp.where(is_random, -1, state.iteration)
        after, transitions, next_views, _ = rollout(
            env, policy, explore, state.rollout, rollout_key, args.num_steps, number
        )
        capture = add(buffer, state.capture, transitions, next_views)
        state, hyper = fit_unit(spec, state, transitions, hyper)
        progress = training_progress(args, state.iteration)
        rate = scheduled(hyper.learning_rate, progress, args.schedule)
        optimiser = clipped_adam(rate, hyper.max_grad_norm)
        losses = partial(critic_loss, networks, hyper), partial(actor_loss, networks, hyper)

        def step(learner: Learner, x: tuple[Array, Array]) -> tuple[Learner, dict[str, Array]]:
            draw_key, key = jax.random.split(x[1])
            batch = draw_steps(args, capture, draw_key)
            return learn(*losses, optimiser, hyper.tau, delay, learner, batch, key, x[0])

        steps = state.iteration * args.updates + jnp.arange(1, args.updates + 1)
        learner, metrics = jax.lax.scan(
            step,
            Learner(state.params, state.target, state.optimiser),
            (steps, jax.random.split(learn_key, args.updates)),
        )
        state = state._replace(**learner._asdict(), noise=hyper.noise, rollout=after)
        state = state._replace(capture=capture, iteration=state.iteration + 1)
        return state, mean_metrics(metrics, hyper)

    return Program(
        init,
        stages=(Stage(update),),
        policy=partial(make_policy, config, spec),
        policy_params=lambda state: NoisyParams(state.params.actor, state.noise, jnp.zeros(())),
        greedy=False,
        num_steps=args.num_steps,
    )


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> "programs.Recorded":
    """Train MADDPG, and record the requested tiers."""
    return programs.record_online(make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        Console().print(main(cli.parse_script(Args, __doc__)).view)
