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
    Moments,
    agent_head,
    agent_network,
    blank_view,
    init_policy,
    make_policy,
)
from offmarl.programs.experience.buffer import add, init_capture, make_buffer
from offmarl.programs.learning.optimisers import clipped_adam, linear_schedule, training_progress
from offmarl.programs.learning.ppo.arguments import PPOArgs, policy_config, window_length
from offmarl.programs.learning.ppo.learning import (
    ActorCritic,
    Networks,
    State,
    Windows,
    begins,
    cut,
    estimate,
    learn,
    normalise_targets,
    window_carries,
)
from offmarl.programs.program import Hyperparameters, Program, Stage
from offmarl.rollout import init_rollout, rollout_shaped
from offmarl.teams import team_numbers
from offmarl.types import ArrayTree, EnvSpec, View


def make_program(
    spec: EnvSpec,
    args: PPOArgs,
    env: envs.Environment,
    critic: AgentNetwork,
    critic_input: Callable[[View], ArrayTree],
) -> Program:
    """Build a program of proximal policy optimisation.

    Parameters
    ----------
    spec, args, env
        As given to the program's ``make``.
    critic
        Network with an output for each team: the value of an agent of the team.
    critic_input
        Returns what the critic sees of a view.

    Raises
    ------
    OptionError
        Arguments do not fit together, or the environment has no shaped rewards.
    """
    length = window_length(args)
    config = policy_config(spec, args)
    if args.shaped_rewards is not None and not envs.has_shaping(env):
        raise OptionError(
            f"{spec.name} has no shaped rewards: leave out --shaped-rewards {args.shaped_rewards}."
        )
    env, policy = envs.autoreset(env), make_policy(config, spec)
    actor, teams = agent_network(config, spec), team_numbers(spec)
    networks = Networks(actor, agent_head(config), critic, critic_input, teams)
    buffer = make_buffer(args.num_envs, args.num_steps)

    def init(key: PRNGKeyArray, _hyper: Hyperparameters) -> State:
        actor_key, critic_key, env_key = jax.random.split(key, 3)
        view, fresh = blank_view(spec), critic.initial_carry(spec.num_agents)
        params = ActorCritic(
            init_policy(config, spec, actor_key),
            critic.init(critic_key, fresh, critic_input(view)),
        )
        return State(
            params=params,
            optimiser=clipped_adam(0.0, 0.0).init(params),
            moments=Moments.zero(max(teams) + 1),
            rollout=init_rollout(env, policy, env_key, args.num_envs),
            critic_carry=jax.tree.map(
                lambda leaf: jnp.broadcast_to(leaf, (args.num_envs, *leaf.shape)), fresh
            ),
            capture=init_capture(buffer, spec),
            iteration=jnp.zeros((), jnp.int32),
        )

    def update(
        state: State, _batch: None, key: PRNGKeyArray, hyper: Hyperparameters
    ) -> tuple[State, dict[str, Array]]:
        rollout_key, learn_key = jax.random.split(key)
        progress = training_progress(
            state.iteration, args.total_steps, args.num_envs, args.num_steps
        )
        after, transitions, next_views, shaping = rollout_shaped(
            env,
            policy,
            state.params.actor,
            state.rollout,
            rollout_key,
            args.num_steps,
            state.iteration,
        )
        reward, metrics = learned_reward(args, hyper, transitions.reward, shaping, progress)
        found = estimate(networks, hyper, spec, state, transitions, reward, next_views)
        carry = window_carries(networks, state, transitions, found.carries, length)
        if args.normalise_values:
            state, found = normalise_targets(networks, state, found, transitions.view.alive)
        batch = Windows(
            transitions.view,
            begins(transitions.last),
            transitions.action,
            transitions.behaviour_log_prob,
            found.advantage,
            found.value,
            found.target,
        )
        ended = transitions.last[-1][:, None, None]
        state = state._replace(
            rollout=after,
            critic_carry=jax.tree.map(lambda leaf: jnp.where(ended, 0.0, leaf[-1]), found.carries),
            capture=add(buffer, state.capture, transitions, next_views),
            iteration=state.iteration + 1,
        )
        state, learned = learn(
            networks, args, hyper, state, cut(batch, length), carry, progress, learn_key
        )
        return state, metrics | learned

    return Program(
        init,
        stages=(Stage(update),),
        policy=partial(make_policy, config, spec),
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
