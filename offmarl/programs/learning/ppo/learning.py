"""Losses, advantages and windows of proximal policy optimisation."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl._mesh import divide
from offmarl.losses import (
    bootstrap_discounts,
    clipped_surrogate,
    generalised_advantages,
    masked_mean,
    value_error,
    vtrace,
)
from offmarl.networks import AgentNetwork, Head, Moments
from offmarl.programs.experience.buffer import Capture
from offmarl.programs.learning.optimisers import clipped_adam, grad_norm, scheduled
from offmarl.programs.learning.ppo.arguments import PPOArgs
from offmarl.programs.program import Hyperparameters
from offmarl.rollout import RolloutState
from offmarl.types import ArrayTree, EnvSpec, Transition, View

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
