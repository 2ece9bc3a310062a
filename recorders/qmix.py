"""QMIX: monotonic value factorisation, recurrent, learned off-policy from replay.

Agents share a recurrent network of action values. A mixing network, which is monotonic in each
value and depends on the global state, combines them to Q_tot (Rashid et al. 2018, arXiv
1803.11485). Q_tot is learned by double Q-learning (van Hasselt et al. 2015, arXiv 1509.06461) with
ε-greedy exploration. The replay is the buffer that is recorded: a flashbax trajectory buffer on the
device, whose initial content can come from a vault.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int, PRNGKeyArray
from rich.console import Console

from offmarl import cli, envs
from offmarl.config import Fraction, Positive, PositiveInt
from offmarl.distributions import select
from offmarl.losses import double_q_values, masked_mean, td_targets
from offmarl.networks import (
    AgentId,
    Mixer,
    MixerKind,
    MixerWeights,
    PolicyConfig,
    PooledMixer,
    QParams,
    Recurrent,
    agent_network,
    init_mixer,
    init_policy,
    make_mixer,
    make_policy,
    mix,
    mixing_weights,
    unroll_batch,
)
from offmarl.programs import (
    TD_ERRORS,
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
    make_buffer,
    record_online,
    warm_start,
)
from offmarl.programs.prioritised import admit, begin_priorities, learned, sample
from offmarl.replay.priorities import Priorities
from offmarl.rollout import RolloutState, init_rollout, rollout
from offmarl.teams import require_one_team
from offmarl.types import ArrayTree, EnvSpec, Sequence
from offmarl.vault import open_vault

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(OnlineArgs):
    """Arguments of QMIX."""

    num_steps: PositiveInt = 32
    """Time steps in each environment between rounds of updates."""
    updates: PositiveInt = 32
    """Gradient updates in a round."""
    capacity: PositiveInt = 4096
    """Time steps that the replay holds of each environment."""
    warm_start: Path | None = None
    """Vault whose newest steps fill the replay at the start."""
    batch_size: PositiveInt = 32
    """Windows in a batch."""
    length: PositiveInt = 10
    """Steps in a window."""
    prioritise: Fraction | None = None
    """Draw windows by their temporal-difference errors to this power: 0.6 is usual; by default they
    are drawn without regard to errors."""
    importance: Fraction | None = None
    """With --prioritise: power of the weights that correct the loss for it, in the first round (by
    default 0.4); it grows to 1 in the last."""
    learning_rate: Positive = 1e-3
    """Adam's step size."""
    gamma: Fraction = 0.95
    """Discount. Rewards of the swarm tasks come soon after the actions, so a short horizon learns
    faster."""
    epsilon: Fraction = 0.05
    """Probability of a random action at the end of exploration, which starts at 1. The recorded
    policy also acts at random with this probability."""
    exploration: Fraction = 0.2
    """Fraction of the training over which that probability decreases from 1 to epsilon."""
    target_every: PositiveInt = 200
    """Updates between copies to the target networks."""
    max_grad_norm: Positive = 10.0
    """Global norm that gradients are clipped to."""
    hidden: PositiveInt = 64
    """Width of the agents' layers, and of the mixer's hypernetworks."""
    mixer_embed: PositiveInt = 32
    """Width of the mixing function."""
    mixer: MixerKind = "state"
    """What the mixer sees. state: the global state; pooled: the observations of all agents, by
    attention, with as many parameters for any number of agents."""
    agent_id: AgentId = "onehot"
    """How the network distinguishes the agents. onehot: by their index, which ties it to their
    number; sinusoidal: by 16 sines and cosines of their place in the team; none: not at all."""


# ---------------------------------------------------------------------------------- state


class Params(NamedTuple):
    """Parameters of the agents' shared network and of the mixer."""

    agent: ArrayTree
    mixer: ArrayTree


class State(NamedTuple):
    """Everything that changes during training."""

    params: Params
    target: Params
    optimiser: optax.OptState
    epsilon: Float[Array, ""]
    """Probability of a random action of the policy that is evaluated and recorded."""
    rollout: RolloutState
    capture: Capture
    iteration: Int[Array, ""]
    priorities: Priorities | None = None
    """Of the buffer's windows; None if they are drawn without regard to errors."""


Learner = tuple[Params, Params, optax.OptState, Priorities | None]
"""What the updates of a round change."""

# ---------------------------------------------------------------------------------- losses


class Networks(NamedTuple):
    """The agents' network of action values, and the mixer."""

    agent: Recurrent
    mixer: Mixer | PooledMixer

    def values(self, params: Params, batch: Sequence) -> tuple[Array, MixerWeights]:
        """Return Q of all actions ``(B, T+1, N, A)`` and mixing functions ``(B, T+1, ...)``."""
        q = unroll_batch(self.agent, params.agent, batch.view.observation, batch.first)
        return q, mixing_weights(self.mixer, params.mixer, batch.view)


def loss(
    params: Params, target: Params, networks: Networks, hyper: Hyperparameters, batch: Sequence
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return the mean of ½ (Q_tot - y)² over the valid steps, where y is the double-Q target."""
    q, weights = networks.values(params, batch)
    q_target, weights_target = networks.values(target, batch)
    view_tm1, view_t = batch.view_tm1, batch.view_t

    v_t = double_q_values(q_target[:, 1:], q[:, 1:], view_t.legal_actions) * view_t.alive
    q_tot_t = mix(jax.tree.map(lambda x: x[:, 1:], weights_target), v_t)
    discount_t = hyper.gamma * (1 - batch.terminated.all(-1))
    target_tm1 = td_targets(batch.reward.mean(-1), discount_t, q_tot_t)

    q_tm1 = select(q[:, :-1], batch.action) * view_tm1.alive
    q_tot_tm1 = mix(jax.tree.map(lambda x: x[:, :-1], weights), q_tm1)
    error = q_tot_tm1 - target_tm1
    value = masked_mean(0.5 * error**2, batch.mask, batch.weight)
    metrics = {"td_loss": value, "q_tot": masked_mean(q_tot_tm1, batch.mask)}
    return value, metrics | {TD_ERRORS: error}


# ---------------------------------------------------------------------------------- update


def exploration(args: Args, hyper: Hyperparameters, iteration: Int[Array, ""]) -> Float[Array, ""]:
    """Return the probability of a random action, which falls linearly from 1 to ``epsilon``."""
    iterations = args.total_steps / (args.num_envs * args.num_steps)
    falling = jnp.maximum(jnp.floor(hyper.exploration * iterations), 1.0)
    return (1 - hyper.epsilon) * (1 - jnp.clip(iteration / falling, 0, 1)) + hyper.epsilon


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, env: envs.Environment) -> Program:
    """Build the program for an environment, given without autoreset."""
    require_one_team(spec, "qmix")
    config = PolicyConfig("recurrent", "q", args.hidden, args.agent_id)
    env, policy = envs.autoreset(env), make_policy(config, spec)
    networks = Networks(
        agent_network(config, spec), make_mixer(spec, args.mixer_embed, args.hidden, args.mixer)
    )
    capacity = max(args.capacity, args.num_steps)
    buffer = make_buffer(args.num_envs, capacity)

    def init(key: PRNGKeyArray, hyper: Hyperparameters) -> State:
        agent_key, mixer_key, env_key = jax.random.split(key, 3)
        mixer = init_mixer(networks.mixer, spec, mixer_key)
        params = Params(init_policy(config, spec, agent_key).network, mixer)
        capture = init_capture(buffer, spec, sampled=True)
        return State(
            params=params,
            target=params,
            optimiser=clipped_adam(0.0, 0.0).init(params),
            epsilon=jnp.asarray(hyper.epsilon),
            rollout=init_rollout(env, policy, env_key, args.num_envs),
            capture=capture,
            iteration=jnp.zeros((), jnp.int32),
            priorities=fresh_priorities(capture),
        )

    def fresh_priorities(capture: Capture) -> Priorities | None:
        return begin_priorities(capture) if args.prioritise else None

    def on_start(state: State) -> State:
        if args.warm_start is None:
            return state
        data = open_vault(args.warm_start)
        capture = warm_start(buffer, args.num_envs, capacity, spec, data)
        return state._replace(capture=capture, priorities=fresh_priorities(capture))

    def draw(
        priorities: Priorities | None,
        capture: Capture,
        key: PRNGKeyArray,
        step: Int[Array, ""],
    ) -> tuple[Sequence, Array | None]:
        if priorities is None:
            return draw_windows(capture, key, args.batch_size, args.length), None
        updates = args.updates * args.total_steps / (args.num_envs * args.num_steps)
        begun = 0.4 if args.importance is None else args.importance
        exponent = begun + (1 - begun) * jnp.minimum(step / updates, 1)
        return sample(priorities, capture, key, args.batch_size, args.length, exponent)

    def learn(
        learner: Learner,
        step: Int[Array, ""],
        key: PRNGKeyArray,
        capture: Capture,
        hyper: Hyperparameters,
    ) -> tuple[Learner, dict[str, Array]]:
        params, target, optimiser_state, priorities = learner
        batch, slots = draw(priorities, capture, key, step)
        grads, metrics = jax.grad(loss, has_aux=True)(params, target, networks, hyper, batch)
        optimiser = clipped_adam(hyper.learning_rate, hyper.max_grad_norm)
        updates, optimiser_state = optimiser.update(grads, optimiser_state)
        params = optax.apply_updates(params, updates)
        target = optax.periodic_update(params, target, step, args.target_every)
        errors = metrics.pop(TD_ERRORS)
        metrics["grad_norm"] = grad_norm(grads)
        if priorities is not None and slots is not None:
            priorities = learned(priorities, slots, errors, batch.mask, args.prioritise or 0.0)
        return (params, target, optimiser_state, priorities), metrics

    def update(
        state: State, _batch: None, key: PRNGKeyArray, hyper: Hyperparameters
    ) -> tuple[State, dict[str, Array]]:
        rollout_key, learn_key = jax.random.split(key)
        explore = QParams(state.params.agent, exploration(args, hyper, state.iteration))
        after, transitions, next_views = rollout(
            env, policy, explore, state.rollout, rollout_key, args.num_steps, state.iteration
        )
        capture = add(buffer, state.capture, transitions, next_views)
        steps = state.iteration * args.updates + jnp.arange(1, args.updates + 1)
        priorities = state.priorities
        if priorities is not None:
            priorities = admit(priorities, capture, args.num_steps, args.length)
        (params, target, optimiser_state, priorities), metrics = jax.lax.scan(
            lambda learner, x: learn(learner, *x, capture, hyper),
            (state.params, state.target, state.optimiser, priorities),
            (steps, jax.random.split(learn_key, args.updates)),
        )
        state = State(
            params,
            target,
            optimiser_state,
            state.epsilon,
            after,
            capture,
            state.iteration + 1,
            priorities,
        )
        return state, jax.tree.map(jnp.mean, metrics) | {"epsilon": explore.epsilon}

    return Program(
        init,
        stages=(Stage(update, on_start=on_start),),
        policy=partial(make_policy, config, spec),
        policy_params=lambda state: QParams(state.params.agent, state.epsilon),
        greedy=False,
        num_steps=args.num_steps,
    )


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> Recorded:
    """Train QMIX, and record the requested tiers."""
    return record_online(make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        Console().print(main(cli.parse_script(Args, __doc__)).view)
