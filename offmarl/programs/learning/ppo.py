"""Proximal policy optimisation of several agents: what MAPPO, IPPO, IMPALA and OPRE share.

MAPPO and IPPO differ in what the critic sees. IMPALA and OPRE learn from the steps of earlier
policies, by V-trace, and OPRE has networks of its own. Everything else is here: the arguments, the
losses and the update, which collects steps, estimates advantages and learns from windows of the
steps. A feed-forward network learns from single steps, a recurrent one from windows of several,
whose first step starts from the memory that acting had there.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl import envs
from offmarl._mesh import divide
from offmarl.config import Fraction, Layers, NonNegative, NonNegativeInt, Positive, PositiveInt
from offmarl.errors import OptionError
from offmarl.losses import (
    bootstrap_discounts,
    clipped_surrogate,
    generalised_advantages,
    masked_mean,
    value_error,
    vtrace,
)
from offmarl.networks import (
    Activation,
    AgentNetwork,
    Head,
    Moments,
    PolicyConfig,
    agent_head,
    agent_network,
    blank_view,
    head_policy,
    init_network,
    stochastic_head,
)
from offmarl.programs.experience.buffer import Capture, add, init_capture, make_buffer
from offmarl.programs.learning.learner import (
    NetworkArgs,
    ScheduleKind,
    clipped_adam,
    grad_norm,
    linear_schedule,
    policy_config,
    scheduled,
    training_progress,
)
from offmarl.programs.program import Hyperparameters, Program, Stage
from offmarl.rollout import RolloutState, init_rollout, rollout
from offmarl.teams import team_numbers
from offmarl.types import ArrayTree, Continuous, EnvSpec, Transition, View

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class PPOArgs(NetworkArgs):
    """Arguments of proximal policy optimisation."""

    num_steps: PositiveInt = 64
    """Time steps in each environment between updates."""
    epochs: PositiveInt = 4
    """Passes over the steps of an update."""
    minibatches: PositiveInt = 4
    """Minibatches in a pass."""
    network: Literal["feedforward", "recurrent"] = "feedforward"
    """Kind of the actor and of the critic; recurrent networks have a GRU."""
    length: PositiveInt | None = None
    """Steps in a window that recurrent networks learn from; must divide num_steps, which is the
    default."""
    learning_rate: Positive = 7e-4
    """Adam's step size, of actor and critic."""
    gamma: Fraction = 0.99
    """Discount."""
    gae_lambda: Fraction = 0.95
    """λ of generalised advantage estimation: trades bias for variance."""
    clip: Positive = 0.2
    """ε, the largest relative change of an action's probability in an update."""
    clip_value: bool = False
    """Also limit the change of a value in an update to ε."""
    huber: Positive | None = None
    """Error beyond which the value loss grows linearly (Huber loss); by default it is the square.
    """
    value_weight: NonNegative = 1.0
    """Weight of the value loss."""
    normalise_values: bool = True
    """Learn values relative to the running mean and deviation of the returns."""
    normalise_advantages: bool = True
    """Shift and scale the advantages of each minibatch to mean 0 and deviation 1."""
    entropy: NonNegative = 0.01
    """Weight of the entropy bonus."""
    entropy_schedule: ScheduleKind = "constant"
    """How that weight changes over the training."""
    max_grad_norm: Positive = 0.5
    """Global norm that gradients are clipped to."""
    clip_separately: bool = False
    """Clip the gradients of actor and critic each by their own norm, and not by the norm of both.
    """
    shaped_rewards: Fraction | None = None
    """Also learn from the environment's shaped rewards, such as Overcooked's. Their weight falls
    from 1 to 0 over this fraction of the training. They are not recorded."""
    tanh: bool = False
    """Use a tanh-squashed Gaussian for continuous actions instead of a clipped one."""
    layers: Layers | None = None
    """Hidden layers of each network: by default 2, or 1 beside a GRU."""
    activation: Activation = "relu"
    """Function after each hidden layer."""


@dataclass(frozen=True)
class OffPolicyPPOArgs(PPOArgs):
    """Arguments of actor-critics that learn from the steps of their earlier policies."""

    lag: NonNegativeInt = 1
    """Updates by which the policy that acts is behind the one that learns."""
    correct: bool = True
    """Correct for that by V-trace. Otherwise the steps count as if the policy that learns had taken
    them, as in a plain actor-critic."""
    num_steps: PositiveInt = 16
    """Time steps in each environment between updates."""
    epochs: PositiveInt = 1
    """Passes over the steps of an update."""
    minibatches: PositiveInt = 1
    """Minibatches in a pass."""
    gae_lambda: Fraction = 1.0
    """λ of V-trace: trades bias for variance."""
    normalise_advantages: bool = False
    """Shift and scale the advantages of each minibatch to mean 0 and deviation 1."""


def actor_config(spec: EnvSpec, args: PPOArgs) -> PolicyConfig:
    """Return the description of the actor; the critic has its kind and sizes."""
    if args.tanh and not isinstance(spec.action, Continuous):
        raise OptionError(
            f"--tanh is for continuous actions, and {spec.name} has discrete ones: leave it out."
        )
    head = stochastic_head(spec, "tanh_gaussian" if args.tanh else "gaussian")
    return policy_config(args, head)


def window_length(args: PPOArgs) -> int:
    """Return the length of the windows to learn from; `OptionError` if arguments do not fit."""
    length = (args.length or args.num_steps) if args.network == "recurrent" else 1
    if args.length is not None and args.network == "feedforward":
        raise OptionError(
            f"--length {args.length} is for recurrent networks: feed-forward ones learn from "
            "single steps. Leave it out, or give --network recurrent."
        )
    if args.num_steps % length:
        raise OptionError(
            f"--num-steps {args.num_steps} is not divisible into windows of --length {length}: "
            "give a length that divides it."
        )
    windows = args.num_envs * args.num_steps // length
    if args.minibatches > windows:
        raise OptionError(
            f"{args.num_envs} environments of {args.num_steps} steps are {windows} windows to "
            f"learn from, which cannot be divided into {args.minibatches} minibatches: give fewer "
            "minibatches, or more environments or steps."
        )
    return length


# ---------------------------------------------------------------------------------- state


class ActorCritic(NamedTuple):
    """Parameters of both networks, or their memory."""

    actor: ArrayTree
    critic: ArrayTree


class State(NamedTuple):
    """Everything that changes during training."""

    params: ActorCritic
    optimiser: ArrayTree
    moments: Moments
    """Moments of the returns of each team, by which values are normalised."""
    rollout: RolloutState
    critic_carry: ArrayTree
    """The critic's memory in the running episodes, ``(E, ...)``; the actor's is in the rollout."""
    capture: Capture
    iteration: Int[Array, ""]
    behind: ArrayTree = ()
    """The actor's parameters before each of the last updates, ``(lag, ...)``, the oldest first."""


class RolloutWindows(NamedTuple):
    """W windows of L steps to learn from."""

    view: View
    """``(L, W, ...)``"""
    first: Bool[Array, "L W"]
    """Steps that begin an episode: the memory is empty there."""
    action: Int[Array, "L W N"] | Float[Array, "L W N A"]
    behaviour_log_prob: Float[Array, "L W N"]
    advantage: Float[Array, "L W N"]
    value: Float[Array, "L W N"]
    """Outputs of the critic before the update."""
    target: Float[Array, "L W N"]
    """λ-returns, normalised."""


class Networks(NamedTuple):
    """The actor, which sees an agent's observation, and the critic, which values each team."""

    actor: AgentNetwork
    head: Head
    critic: AgentNetwork
    critic_input: Callable[[View], ArrayTree]
    """Returns what the critic sees of a view."""
    teams: tuple[int, ...]
    """The critic's output for each agent: see `offmarl.teams.team_numbers`."""

    @property
    def members(self) -> Bool[Array, "G N"]:
        """The agents of each team, as a mask."""
        return jnp.arange(max(self.teams) + 1)[:, None] == jnp.array(self.teams)

    def evaluate(
        self,
        params: ActorCritic,
        carry: ActorCritic,
        steps: Transition | RolloutWindows,
        first: Array,
    ) -> tuple[Float[Array, "L W N"], Float[Array, "L W N"], Float[Array, "L W N"] | None]:
        """Return the log-probability of each agent's action, and the entropy of its policy.

        The third result is a part of the loss, of weight ``hyper.penalty``; None for nothing.
        """
        outputs, _ = self.actor.apply(
            params.actor, steps.view.observation, first, carry.actor, method="unroll"
        )
        distribution = self.head(outputs, steps.view.legal_actions)
        return distribution.log_prob(steps.action), distribution.entropy(), None

    def value(
        self, params: ActorCritic, carry: ActorCritic, view: View, first: Bool[Array, "T *b"]
    ) -> tuple[Float[Array, "T *b N"], ArrayTree]:
        """Return the normalised values of the steps of windows, and the memory after each step."""
        inputs = self.critic_input(view)
        outputs, carries = self.critic.apply(
            params.critic, inputs, first, carry.critic, method="unroll"
        )
        return self.team_values(outputs), carries

    def next_value(self, params: ActorCritic, carries: ArrayTree, next_view: View) -> Array:
        """Return the normalised values of views, each with the memory after the step before it.

        Where no episode ends they are those that `value` returns of the next step.
        """
        outputs, _ = self.critic.apply(params.critic, carries, self.critic_input(next_view))
        return self.team_values(outputs)

    def team_values(self, outputs: Float[Array, "*b N G"]) -> Float[Array, "*b N"]:
        """Return the value of each agent's team, of the critic's outputs."""
        return (outputs * self.members.T).sum(-1)


# ---------------------------------------------------------------------------------- losses


def loss(
    params: ActorCritic,
    networks: Networks,
    args: PPOArgs,
    hyper: Hyperparameters,
    entropy_weight: Float[Array, ""],
    batch: RolloutWindows,
    carry: ActorCritic,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Return the clipped surrogate and entropy bonus of live agents, and the value error of all.

    Targets also bootstrap from the values of dead agents, so these are learned too (death masking
    in Yu et al. 2022, arXiv 2103.01955).
    """
    mask = batch.view.alive
    log_prob, entropy, penalty = networks.evaluate(params, carry, batch, batch.first)
    advantage = batch.advantage
    if args.normalise_advantages:
        advantage = normalise(advantage, mask, networks)
    surrogate = clipped_surrogate(log_prob, batch.behaviour_log_prob, advantage, hyper.clip)
    value, _ = networks.value(params, carry, batch.view, batch.first)
    behaviour_value = batch.value if args.clip_value else None
    error = value_error(value, batch.target, behaviour_value, hyper.clip, args.huber)
    change = log_prob - batch.behaviour_log_prob
    metrics = {
        "policy_loss": masked_mean(surrogate, mask),
        "value_loss": error.mean(),
        "entropy": masked_mean(entropy, mask),
        "kl": masked_mean(jnp.expm1(change) - change, mask),
    }
    total = metrics["policy_loss"] - entropy_weight * metrics["entropy"]
    if penalty is not None:
        metrics["penalty"] = masked_mean(penalty, mask)
        total += hyper.penalty * metrics["penalty"]
    return total + hyper.value_weight * metrics["value_loss"], metrics


def normalise(
    values: Float[Array, "*b N"], mask: Bool[Array, "*b N"], networks: Networks
) -> Float[Array, "*b N"]:
    """Shift and scale each team's values to mean 0 and standard deviation 1 over the mask."""

    def mean(values: Float[Array, "*b N"]) -> Float[Array, "N"]:
        of_teams = jax.vmap(lambda team: masked_mean(values, mask & team))(networks.members)
        return of_teams[jnp.array(networks.teams)]

    centred = values - mean(values)
    return centred / (jnp.sqrt(mean(centred**2)) + 1e-8)


# ---------------------------------------------------------------------------------- advantages


class StepEstimates(NamedTuple):
    """Advantages, targets and values of the steps of a rollout."""

    advantage: Float[Array, "T E N"]
    target: Float[Array, "T E N"]
    """λ-returns in the scale of the rewards, as advantages are, until `normalise_targets`."""
    value: Float[Array, "T E N"]
    """Outputs of the critic: normalised values."""
    carries: ArrayTree
    """The critic's memory after each step, ``(T, E, ...)``."""


def estimate(
    networks: Networks,
    hyper: Hyperparameters,
    spec: EnvSpec,
    state: State,
    transitions: Transition,
    reward: Float[Array, "T E N"],
    next_views: View,
    log_ratio: Float[Array, "T E N"] | None = None,
) -> StepEstimates:
    """Return generalised advantages and λ-returns of ``reward``; see also `bootstrap_discounts`.

    They are V-trace's if ``log_ratio`` is given: the log-probabilities of the actions, minus those
    of the policy that took them. ``state`` is the one before the steps. An agent with rewards of
    its own that is truncated alone bootstraps there, and its absence counts for nothing.
    """
    last, alone = transitions.last[..., None], transitions.truncated & (spec.reward != "team")
    carry = ActorCritic((), state.critic_carry)
    value, carries = networks.value(state.params, carry, transitions.view, begins(transitions.last))
    next_value = _next_values(networks, state.params, value, carries, transitions.last, next_views)
    teams = jnp.array(networks.teams)
    scale, shift = state.moments.std[teams], state.moments.mean[teams]
    value_tm1, value_t = value * scale + shift, next_value * scale + shift

    steps = (
        reward,
        bootstrap_discounts(hyper.gamma, transitions.terminated, spec.reward == "team"),
        last | alone,
        value_tm1,
        value_t,
    )

    def of_each(function: Callable[..., Any]) -> Callable[..., Any]:
        of_agent = partial(function, lambda_=hyper.gae_lambda)
        return jax.vmap(jax.vmap(of_agent, in_axes=1, out_axes=1), in_axes=1, out_axes=1)

    if log_ratio is None:
        error = advantage = of_each(generalised_advantages)(*steps)
    else:
        error, advantage = of_each(vtrace)(*steps, log_ratio)
    counts = transitions.view.alive | ~alone | last
    return StepEstimates(advantage, jnp.where(counts, error, 0.0) + value_tm1, value, carries)


def _next_values(
    networks: Networks,
    params: ActorCritic,
    value: Float[Array, "T E N"],
    carries: ArrayTree,
    last: Bool[Array, "T E"],
    next_views: View,
) -> Float[Array, "T E N"]:
    """Return the values after each step, which are those of the next step unless episodes end."""

    def following() -> Float[Array, "T E N"]:
        after, view = jax.tree.map(lambda leaf: leaf[-1:], (carries, next_views))
        return jnp.concatenate([value[1:], networks.next_value(params, after, view)])

    return jax.lax.cond(
        last[:-1].any(), lambda: networks.next_value(params, carries, next_views), following
    )


def normalise_targets(
    networks: Networks, state: State, estimates: StepEstimates, alive: Bool[Array, "T E N"]
) -> tuple[State, StepEstimates]:
    """Add the targets to the moments of the teams, and normalise the targets by them.

    The critic is not rescaled so that its values stay (PopArt): on coverage-3 that slows learning.
    """

    def add(moments: Moments, team: Bool[Array, "N"]) -> Moments:
        return moments.update(estimates.target, alive & team)

    moments, teams = jax.vmap(add)(state.moments, networks.members), jnp.array(networks.teams)
    target = (estimates.target - moments.mean[teams]) / moments.std[teams]
    return state._replace(moments=moments), estimates._replace(target=target)


def begins(last: Bool[Array, "T E"]) -> Bool[Array, "T E"]:
    """Return the steps of a rollout that begin an episode after its first step."""
    return jnp.concatenate([jnp.zeros_like(last[:1]), last[:-1]])


# ---------------------------------------------------------------------------------- off-policy


def acting_params(state: State, lag: int) -> tuple[ArrayTree, ArrayTree]:
    """Return the actor's parameters of ``lag`` updates ago, or the first, and the next `behind`."""
    now = state.params.actor
    if not lag:
        return now, ()

    def add(leaf: Array, behind: Array) -> Array:
        return jnp.concatenate([jnp.where(state.iteration == 0, leaf, behind), leaf[None]])

    versions = jax.tree.map(add, now, state.behind)
    return jax.tree.map(lambda x: x[0], versions), jax.tree.map(lambda x: x[1:], versions)


def ratios(
    networks: Networks, state: State, transitions: Transition
) -> tuple[Float[Array, "T E N"], Float[Array, "T E N"], Float[Array, ""]]:
    """Return the actions' log-probabilities, these minus those when taken, and the mean ratio."""
    carry = ActorCritic(state.rollout.carry, state.critic_carry)
    log_prob = networks.evaluate(state.params, carry, transitions, begins(transitions.last))[0]
    alive = transitions.view.alive  # what a dead agent does has no effect: its ratio is 1
    log_ratio = jnp.where(alive, log_prob - transitions.behaviour_log_prob, 0.0)
    return log_prob, log_ratio, masked_mean(jnp.exp(jnp.minimum(log_ratio, 0.0)), alive)


# ---------------------------------------------------------------------------------- windows


def cut_windows(tree: ArrayTree, length: int) -> ArrayTree:
    """Cut steps ``(T, E, ...)`` into windows ``(length, T / length * E, ...)``."""

    def cut_leaf(leaf: Array) -> Array:
        num_steps, *rest = leaf.shape
        parts = leaf.reshape(num_steps // length, length, *rest).swapaxes(0, 1)
        return jax.lax.collapse(parts, 1, 3)

    return jax.tree.map(cut_leaf, tree)


def start_carries(carry: ArrayTree, carries: ArrayTree, length: int) -> ArrayTree:
    """Return the memory at the start of each window, ``(T / length * E, ...)``.

    ``carry`` is the one before the first step, and ``carries`` are those after each step, ``(T, E,
    ...)``. If the step ended an episode, the window's first flag empties the memory.
    """

    def start_leaf(start: Array, after: Array) -> Array:
        before = jnp.concatenate([start[None], after[length - 1 : -1 : length]])
        return jax.lax.collapse(before, 0, 2)

    return jax.tree.map(start_leaf, carry, carries)


def window_carries(
    networks: Networks, state: State, transitions: Transition, carries: ArrayTree, length: int
) -> ActorCritic:
    """Return the memory that both networks had in the rollout at the start of each window."""
    critic, actor = start_carries(state.critic_carry, carries, length), state.rollout.carry
    if length < transitions.last.shape[0]:
        _, during = networks.actor.apply(
            state.params.actor,
            transitions.view.observation,
            begins(transitions.last),
            actor,
            method="unroll",
        )
        actor = start_carries(actor, during, length)
    return ActorCritic(actor, critic)


# ---------------------------------------------------------------------------------- update


def learn(
    networks: Networks,
    args: PPOArgs,
    hyper: Hyperparameters,
    state: State,
    batch: RolloutWindows,
    carry: ActorCritic,
    progress: Float[Array, ""],
    key: PRNGKeyArray,
) -> tuple[State, dict[str, Array]]:
    """Update on windows for several epochs of minibatches, each epoch in a new random order."""
    num_windows = batch.first.shape[1]
    size = num_windows // args.minibatches
    rate = scheduled(hyper.learning_rate, progress, args.schedule)
    entropy = scheduled(hyper.entropy, progress, args.entropy_schedule)
    optimiser = clipped_adam(rate, hyper.max_grad_norm, eps=1e-5, separately=args.clip_separately)

    def step(
        learner: tuple[ActorCritic, ArrayTree], indices: Int[Array, "size"]
    ) -> tuple[tuple[ActorCritic, ArrayTree], dict[str, Array]]:
        params, optimiser_state = learner
        windows = divide(jax.tree.map(lambda leaf: leaf[:, indices], batch), axis=1)
        begin = divide(jax.tree.map(lambda leaf: leaf[indices], carry))
        grads, metrics = jax.grad(loss, has_aux=True)(
            params, networks, args, hyper, entropy, windows, begin
        )
        updates, optimiser_state = optimiser.update(grads, optimiser_state)
        params = optax.apply_updates(params, updates)
        return (params, optimiser_state), metrics | {"grad_norm": grad_norm(grads)}

    # `jax.random.permutation` sorts twice from 1,626 windows on, so that equal bits decide nothing.
    # Here two windows of equal bits keep their order: one pair in 93,000 windows.
    orders = jax.random.bits(key, (args.epochs, num_windows)).argsort(axis=1)
    minibatches = orders[:, : size * args.minibatches].reshape(-1, size)
    (params, optimiser_state), metrics = jax.lax.scan(
        step, (state.params, state.optimiser), minibatches
    )
    state = state._replace(params=params, optimiser=optimiser_state)
    return state, jax.tree.map(jnp.mean, metrics)


# ---------------------------------------------------------------------------------- program


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
        Network and head of the policy; by default those of `actor_config`.
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
    config = actor_config(spec, args)
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
