"""The program of proximal policy optimisation, for any critic."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray

from offmarl import envs
from offmarl.errors import OptionError
from offmarl.networks import (
    AgentNetwork,
    Head,
    Moments,
    agent_head,
    agent_network,
    blank_view,
    head_policy,
    init_network,
)
from offmarl.programs.experience.buffer import add, init_capture, make_buffer
from offmarl.programs.learning.optimisers import clipped_adam, linear_schedule, training_progress
from offmarl.programs.learning.ppo.arguments import (
    OffPolicyPPOArgs,
    PPOArgs,
    policy_config,
    window_length,
)
from offmarl.programs.learning.ppo.learning import (
    ActorCritic,
    Networks,
    RolloutWindows,
    State,
    acting_params,
    begins,
    cut_windows,
    estimate,
    learn,
    normalise_targets,
    ratios,
    window_carries,
)
from offmarl.programs.program import Hyperparameters, Program, Stage
from offmarl.rollout import init_rollout, rollout
from offmarl.teams import team_numbers
from offmarl.types import ArrayTree, EnvSpec, View


def make_program(
    spec: EnvSpec,
    args: PPOArgs,
    env: envs.Environment,
    critic: AgentNetwork,
    critic_input: Callable[[View], ArrayTree],
    actor: tuple[AgentNetwork, Head] | None = None,
    kind: type[Networks] = Networks,
) -> Program:
    """Build a program of proximal policy optimisation, or of V-trace for `OffPolicyPPOArgs`.

    Parameters
    ----------
    spec, args, env
        As given to the program's ``make``.
    critic
        Network whose outputs are a value for each team, or what ``kind`` makes values of.
    critic_input
        Returns what the critic sees of a view.
    actor
        Network and head of the policy; by default those of `policy_config`.
    kind
        How both networks are evaluated.

    Raises
    ------
    OptionError
        Arguments do not fit together, or the environment has no shaped rewards.
    """
    length = window_length(args)
    if args.shaped_rewards is not None and not envs.has_shaping(env):
        raise OptionError(
            f"{spec.name} has no shaped rewards: leave out --shaped-rewards {args.shaped_rewards}."
        )
    config = policy_config(spec, args)
    actor = actor or (agent_network(config, spec), agent_head(config))
    networks = kind(*actor, critic, critic_input, team_numbers(spec))
    env, make_policy = envs.autoreset(env), partial(head_policy, *actor, spec)
    policy, off_policy = make_policy(), args if isinstance(args, OffPolicyPPOArgs) else None
    lag = off_policy.lag if off_policy else 0
    buffer = make_buffer(args.num_envs, args.num_steps)

    def init(key: PRNGKeyArray, _hyper: Hyperparameters) -> State:
        actor_key, critic_key, env_key = jax.random.split(key, 3)
        view, fresh = blank_view(spec), critic.initial_carry(spec.num_agents)
        params = ActorCritic(
            init_network(networks.actor, spec, actor_key),
            critic.init(critic_key, fresh, critic_input(view)),
        )
        return State(
            params=params,
            optimiser=clipped_adam(0.0, 0.0).init(params),
            moments=Moments.zero(max(networks.teams) + 1),
            rollout=init_rollout(env, policy, env_key, args.num_envs),
            critic_carry=jax.tree.map(
                lambda leaf: jnp.broadcast_to(leaf, (args.num_envs, *leaf.shape)), fresh
            ),
            capture=init_capture(buffer, spec),
            iteration=jnp.zeros((), jnp.int32),
            behind=jax.tree.map(lambda x: jnp.zeros((lag, *x.shape)), params.actor) if lag else (),
        )

    def update(
        state: State, _batch: None, key: PRNGKeyArray, hyper: Hyperparameters
    ) -> tuple[State, dict[str, Array]]:
        rollout_key, learn_key = jax.random.split(key)
        progress = training_progress(args, state.iteration)
        actor, behind = acting_params(state, lag)
        after, transitions, next_views, shaping = rollout(
            env,
            policy,
            actor,
            state.rollout,
            rollout_key,
            args.num_steps,
            jnp.maximum(state.iteration - lag, 0),
        )
        reward, metrics = learned_reward(args, hyper, transitions.reward, shaping, progress)
        log_prob, log_ratio = transitions.behaviour_log_prob, None
        if off_policy:
            log_prob, log_ratio, metrics["ratio"] = ratios(networks, state, transitions)
        if off_policy and not off_policy.correct:
            log_ratio = None
        steps = estimate(networks, hyper, spec, state, transitions, reward, next_views, log_ratio)
        carry = window_carries(networks, state, transitions, steps.carries, length)
        if args.normalise_values:
            state, steps = normalise_targets(networks, state, steps, transitions.view.alive)
        batch = RolloutWindows(
            transitions.view,
            begins(transitions.last),
            transitions.action,
            log_prob,
            steps.advantage,
            steps.value,
            steps.target,
        )
        ended = transitions.last[-1][:, None, None]
        state = state._replace(
            rollout=after,
            critic_carry=jax.tree.map(lambda leaf: jnp.where(ended, 0.0, leaf[-1]), steps.carries),
            capture=add(buffer, state.capture, transitions, next_views),
            iteration=state.iteration + 1,
            behind=behind,
        )
        state, learn_metrics = learn(
            networks, args, hyper, state, cut_windows(batch, length), carry, progress, learn_key
        )
        return state, metrics | learn_metrics

    return Program(
        init,
        stages=(Stage(update),),
        policy=make_policy,
        policy_params=lambda state: state.params.actor,
        greedy=False,
        num_steps=args.num_steps,
    )


def learned_reward(
    args: PPOArgs,
    hyper: Hyperparameters,
    reward: Float[Array, "T E N"],
    shaping: Float[Array, "T E N"] | None,
    progress: Float[Array, ""],
) -> tuple[Float[Array, "T E N"], dict[str, Any]]:
    """Return the rewards to learn from, and the weight of shaped rewards as a metric."""
    if args.shaped_rewards is None or shaping is None:
        return reward * hyper.reward_scale, {}
    weight = linear_schedule(progress, 1.0, 0.0, args.shaped_rewards)
    return (reward + weight * shaping) * hyper.reward_scale, {"shaping_weight": weight}
