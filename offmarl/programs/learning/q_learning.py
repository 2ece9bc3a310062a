"""Q-learning from the buffer that is recorded: all of qmix, vdn and iql except their losses.

Agents act ε-greedily on the values of their networks, or of one that they share. After a round of
steps comes a round of updates on windows of the buffer. A program gives its networks and its loss
to `q_program`; its targets come from `bootstrap`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl import envs
from offmarl.config import Fraction, PositiveInt
from offmarl.envs.sides import Population, TeamPolicy, population
from offmarl.losses import double_q_values, q_lambda_targets
from offmarl.networks import (
    AgentNetwork,
    QParams,
    agent_network,
    init_policy,
    make_policy,
)
from offmarl.programs.experience.buffer import Capture, add, init_capture, make_buffer
from offmarl.programs.experience.prioritised import admit, begin_priorities, reprioritise, sample
from offmarl.programs.learning.learner import (
    clipped_adam,
    grad_norm,
    linear_schedule,
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
    running_sums,
)
from offmarl.programs.program import TD_ERRORS, Hyperparameters, Program, Stage
from offmarl.replay.priorities import IMPORTANCE, Priorities
from offmarl.rollout import RolloutState, init_rollout, rollout
from offmarl.teams import require_one_team
from offmarl.types import EnvSpec, Policy, Sequence, Transition


@dataclass(frozen=True)
class QArgs(OffPolicyArgs):
    """Arguments of recorders that learn action values."""

    network: Literal["feedforward", "recurrent"] = "recurrent"
    """Network of the agents: with a memory, or without."""
    num_steps: PositiveInt = 32
    """Time steps in each environment between rounds of updates."""
    updates: PositiveInt = 32
    """Gradient updates in a round."""
    capacity: PositiveInt = 4096
    """Time steps that the replay holds of each environment. A large replay holds fewer where
    episodes have fewer than eight steps on average."""
    batch_size: PositiveInt = 32
    """Windows in a batch."""
    length: PositiveInt = 10
    """Steps in a window."""
    prioritise: Fraction | None = None
    """Draw windows by their temporal-difference errors to this power: 0.6 is usual; by default they
    are drawn without regard to errors."""
    gamma: Fraction = 0.95
    """Discount. Rewards of the swarm tasks come soon after the actions, so a short horizon learns
    faster."""
    td_lambda: Fraction = 0.0
    """λ of the targets: 0 for one step, 1 for the rewards of the rest of the window. The actions
    taken are not corrected for (Peng's Q(λ))."""
    epsilon: Fraction = 0.05
    """Probability of a random action at the end of exploration, which starts at 1. The recorded
    policy also acts at random with this probability."""
    exploration: Fraction = 0.2
    """Fraction of the training over which that probability decreases from 1 to epsilon."""
    target_every: PositiveInt = 200
    """Updates between steps of the target networks."""
    tau: Fraction = 1.0
    """How far a step brings the target networks to the networks; 1 copies them."""
    init_acts: ClassVar[bool] = True

    @property
    def windows(self) -> int:
        """Windows in a batch."""
        return self.batch_size


class Guide(NamedTuple):
    """The policy of another run, and its returns and the learner's.

    It plays half of the episodes, and is evaluated and recorded, until the learner's recent ones
    return more: jump-start learning (Uchendu et al. 2023, arXiv 2204.02372) by whole episodes.
    """

    agent: Any
    """The parameters of its agents' network, which stay as they are."""
    scores: Float[Array, "2 2"]
    """For the learner and the guide: the sum of their episodes' returns, and their number. For the
    learner, which changes, about the last `_REMEMBERED` episodes count; for the guide all do, as
    otherwise a streak of low returns would end its episodes for good."""
    totals: Float[Array, "E N"]
    """The rewards of the episodes so far."""

    @property
    def is_worse(self) -> Bool[Array, ""]:
        """Whether the learner returns more on average; false before both have enough episodes."""
        (returns, episodes), (guide_returns, guide_episodes) = self.scores
        enough = jnp.minimum(episodes, guide_episodes) > _REMEMBERED / 2
        return enough & (returns * guide_episodes > guide_returns * episodes)


class QState(NamedTuple):
    """Everything that changes during training."""

    params: Any
    """A NamedTuple whose field ``agent`` holds the parameters of the agents' network."""
    target: Any
    optimiser: optax.OptState
    epsilon: Float[Array, ""]
    """Probability of a random action of the policy that is evaluated and recorded."""
    rollout: RolloutState
    capture: Capture
    iteration: Int[Array, ""]
    totals: Float[Array, "E N"]
    """Rewards of the running episodes so far, the mean over the agents of each team."""
    largest_return: Float[Array, ""]
    """The largest absolute sum of the rewards of an episode so far."""
    priorities: Priorities | None = None
    """Priorities of the buffer's windows; None if they are drawn without regard to errors."""
    guide: Guide | None = None
    """None if training starts from nothing."""


QLoss = Callable[[Any, Any, Hyperparameters, Sequence], tuple[Float[Array, ""], dict[str, Array]]]
"""``loss(params, target, hyper, batch) -> (loss, metrics)``; the metrics hold `TD_ERRORS`."""


_Learner = tuple[Any, Any, optax.OptState, Priorities | None]
"""Parameters and states that the updates of a round change."""

_REMEMBERED = 50


def bootstrap(
    hyper: Hyperparameters,
    batch: Sequence,
    r_t: Float[Array, "B T *b"],
    terminated: Bool[Array, "B T *b"],
    v_t: Float[Array, "B T *b"],
    follows: Bool[Array, "B T *b"] | bool = True,
) -> Float[Array, "B T *b"]:
    """Return the TD(λ) targets, through which no gradient flows.

    ``terminated`` says whether nothing follows a step, and ``v_t`` is the value of the slot after.
    ``follows`` says whether the step there belongs to the same return.
    """
    r_t, discount_t = hyper.reward_scale * r_t, hyper.gamma * (1 - terminated)
    # The next slot holds the next step of the episode, if it holds a step that counts.
    goes_on = jnp.pad(batch.mask[:, 1:], ((0, 0), (0, 1)))
    goes_on = goes_on.reshape(goes_on.shape + (1,) * (v_t.ndim - 2)) & follows
    targets = jax.vmap(q_lambda_targets, in_axes=(0, 0, 0, 0, None))
    return targets(r_t, discount_t, v_t, goes_on, hyper.td_lambda)


def next_values(
    q_t: Float[Array, "B T N A"],
    q_target_t: Float[Array, "B T N A"],
    batch: Sequence,
    of_dead: bool = False,
) -> Float[Array, "B T N"]:
    """Return each agent's value of the slot after each step, by double Q-learning.

    ``q_t`` and ``q_target_t`` are the values of all actions there by the network and the target
    network. The values of dead agents are 0, unless ``of_dead``.
    """
    view_t = batch.view_t
    values = double_q_values(q_target_t, q_t, view_t.legal_actions)
    return values if of_dead else values * view_t.alive


class AgentParams(NamedTuple):
    """Parameters of programs that learn the agents' network alone."""

    agent: Any


def agents_program(
    spec: EnvSpec, args: QArgs, env: envs.Environment, loss: Callable[[AgentNetwork], QLoss]
) -> Program:
    """Build a program that learns the agents' network alone, from its loss."""
    config = policy_config(args, "q")

    def init_params(key: PRNGKeyArray) -> AgentParams:
        return AgentParams(init_policy(config, spec, key).network)

    return q_program(spec, args, env, init_params, loss(agent_network(config, spec)))


def q_program(
    spec: EnvSpec,
    args: QArgs,
    env: envs.Environment,
    init_params: Callable[[PRNGKeyArray], Any],
    loss: QLoss,
) -> Program:
    """Build a program of a loss, and networks of the head "q"."""
    config, buffer = policy_config(args, "q"), make_buffer(args.num_envs, args.replay_steps)
    env, policy = envs.autoreset(env), make_policy(config, spec)
    mixture = population(spec, [TeamPolicy(policy, (), tuple(range(spec.num_agents)))] * 2).policy

    def init(key: PRNGKeyArray, hyper: Hyperparameters) -> QState:
        params_key, env_key = jax.random.split(key)
        params, capture = init_params(params_key), init_capture(buffer, spec, True, args.num_steps)
        return QState(
            params=params,
            target=params,
            optimiser=clipped_adam(0.0, 0.0).init(params),
            epsilon=jnp.asarray(hyper.epsilon),
            rollout=init_rollout(env, policy, env_key, args.num_envs),
            capture=capture,
            iteration=jnp.zeros((), jnp.int32),
            **no_rewards(spec, args.num_envs),
            priorities=begin_priorities(capture) if args.prioritise else None,
        )

    def update(
        state: QState, _batch: None, key: PRNGKeyArray, hyper: Hyperparameters
    ) -> tuple[QState, dict[str, Array]]:
        rollout_key, learn_key = jax.random.split(key)
        epsilon, number = _exploration(args, state, hyper)
        acting, params, policy_id = policy, QParams(state.params.agent, epsilon), number
        if state.guide is not None:
            acting, params, policy_id = mixture, _members(params, state.guide, hyper), jnp.int32(0)
        after, transitions, next_views, _ = rollout(
            env, acting, params, state.rollout, rollout_key, args.num_steps, policy_id
        )
        state, hyper = fit_unit(spec, state, transitions, hyper)
        extra = {"epsilon": epsilon}
        if state.guide is not None:
            guide, transitions = _judged(state.guide, transitions, number, state.iteration)
            state, extra = state._replace(guide=guide), extra | {"guided": 1.0 - guide.is_worse}
        capture = add(buffer, state.capture, transitions, next_views)
        state = state._replace(rollout=after, capture=capture)
        state, metrics = _learn(args, loss, state, learn_key, hyper)
        return state._replace(iteration=state.iteration + 1, epsilon=hyper.epsilon), metrics | extra

    return Program(
        init,
        stages=(Stage(update),),
        policy=partial(make_policy, config, spec),
        policy_params=lambda state: QParams(_best(state), state.epsilon),
        greedy=False,
        num_steps=args.num_steps,
        guided=partial(_guided, spec, mixture),
    )


def _exploration(args: QArgs, state: QState, hyper: Hyperparameters) -> tuple[Array, Array]:
    """Return the ε of a round, and the number of the version that acts."""
    progress = training_progress(args, state.iteration)
    epsilon = linear_schedule(progress, 1.0, hyper.epsilon, hyper.exploration)
    # The version of an iteration is evaluated with the last ε, so it did not act before.
    return epsilon, jnp.where(progress < hyper.exploration, -1, state.iteration)


def _guided(spec: EnvSpec, mixture: Policy, state: QState, params: QParams) -> QState:
    """Return a fresh state in which either the learner or a policy with ``params`` acts."""
    require_one_team(spec, "--init", "recorder")
    carry = jax.vmap(lambda _alive: mixture.initial_carry())(state.rollout.view.alive)
    guide = Guide(params.network, jnp.zeros((2, 2)), jnp.zeros_like(state.totals))
    return state._replace(rollout=state.rollout._replace(carry=carry), guide=guide)


def _best(state: QState) -> Any:
    """Return the parameters of the better network, the learner's or the guide's."""
    if (guide := state.guide) is None:
        return state.params.agent
    return jax.tree.map(partial(jnp.where, guide.is_worse), state.params.agent, guide.agent)


def _members(learner: QParams, guide: Guide, hyper: Hyperparameters) -> Any:
    """Return the learner, and the guide unless it is worse, of which each episode draws one."""
    agents = jax.tree.map(lambda *x: jnp.stack(x), learner, QParams(guide.agent, hyper.epsilon))
    return Population((agents,), jnp.stack([jnp.ones(()), 1.0 - guide.is_worse]))


def _judged(
    guide: Guide,
    steps: Transition,
    number: Array,
    number_of_guide: Array,
) -> tuple[Guide, Transition]:
    """Score the episodes that ended in a round, and number its steps by their policy.

    The version of an iteration is the better of the two; the other's steps have no known policy.
    """
    totals, sums = running_sums(guide.totals, steps)
    by_guide = steps.policy_id[..., 0]
    ended = jax.nn.one_hot(by_guide, 2) * steps.last[..., None]
    new = jnp.stack(
        [(ended * sums.mean(-1, keepdims=True)).sum((0, 1)), ended.sum((0, 1))], axis=-1
    )
    decay = jnp.array([[1 - 1 / _REMEMBERED], [1.0]])
    scores = decay ** new[:, 1:] * guide.scores + new
    version = jnp.where(by_guide, number_of_guide, number)
    steps = steps._replace(policy_id=jnp.where(by_guide == ~guide.is_worse, version, -1))
    return guide._replace(scores=scores, totals=totals), steps


def _learn(
    args: QArgs, loss: QLoss, state: QState, key: PRNGKeyArray, hyper: Hyperparameters
) -> tuple[QState, dict[str, Array]]:
    """Make a round of updates on the buffer's windows."""
    capture, priorities = state.capture, state.priorities
    if priorities is not None:
        priorities = admit(priorities, capture, args.num_steps, args.length)

    def step(learner: _Learner, x: tuple[Array, Array]) -> tuple[_Learner, dict[str, Array]]:
        params, target, optimiser, priorities = learner
        number, key = x
        progress = training_progress(args, (number - 1) / args.updates)
        batch, slots = _draw(args, priorities, capture, key, progress)
        grads, metrics = jax.grad(loss, has_aux=True)(params, target, hyper, batch)
        rate = scheduled(hyper.learning_rate, progress, args.schedule)
        changes, optimiser = clipped_adam(rate, hyper.max_grad_norm).update(grads, optimiser)
        params = optax.apply_updates(params, changes)
        nearer = optax.incremental_update(params, target, hyper.tau)
        target = optax.periodic_update(nearer, target, number, args.target_every)
        errors = metrics.pop(TD_ERRORS)
        if priorities is not None and slots is not None:
            priorities = reprioritise(priorities, slots, errors, batch.mask, args.prioritise or 0.0)
        return (params, target, optimiser, priorities), metrics | {"grad_norm": grad_norm(grads)}

    numbers = state.iteration * args.updates + jnp.arange(1, args.updates + 1)
    (params, target, optimiser, priorities), metrics = jax.lax.scan(
        step,
        (state.params, state.target, state.optimiser, priorities),
        (numbers, jax.random.split(key, args.updates)),
    )
    state = state._replace(params=params, target=target, optimiser=optimiser, priorities=priorities)
    return state, mean_metrics(metrics, hyper)


def _draw(
    args: QArgs,
    priorities: Priorities | None,
    capture: Capture,
    key: PRNGKeyArray,
    progress: Float[Array, ""],
) -> tuple[Sequence, Int[Array, "own"] | None]:
    """Draw windows, and return where they start if they are drawn by priorities."""
    if priorities is None:
        return draw_steps(args, capture, key), None
    exponent = linear_schedule(progress, IMPORTANCE, 1.0)
    sizes = args.batch_size, args.length
    return sample(priorities, capture, key, *sizes, exponent, args.burn_in)
