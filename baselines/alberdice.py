"""AlberDICE: agents that correct the stationary distribution of the data in turns, discrete.

One agent after the other improves its policy π_i while the others keep theirs. The data's steps
are weighted so that the others act by their current policies, and a model of the data's joint
actions says how far that is from the data:

    weights    ρ_i = Π_{j≠i} π_j(a_j | o_j) / π^D_j(a_j | s, a_i, a_<j), at most 100,
    penalty    K_i = Σ_{j≠i} KL(π_j(· | o_j) ‖ π^D_j(· | s, a_i, a_<j)),
    values     L = α log( E[ ρ_i e^{δ_i / α} ] + m ) + (1 - γ) E[ ν_i(s) ] + c E[ |∇ν_i(s̃)|² ],
               δ_i = r - α K_i + γ (1 - terminated) ν_i(s') - ν_i(s),
    advantages L = E_ρ[ (e_i(s, a_i) - δ_i)² ] + β E_ρ[ logsumexp over legal a of e_i(s, a)
                   - Σ_a π^D_i(a | o_i) e_i(s, a) ],
    policy     L = E_ρ[ -Σ_a π*_i(a | o_i) log π_i(a | o_i) ],   π*_i ∝ π^D_i e^{e_i / α}.

π^D_i is a clone of each agent alone; π^D_j(· | s, a_i, a_<j) predicts an agent's action from those
of agent i and of the agents before it. E_ρ is the mean with weights ρ_i that are scaled to add up
to one. α falls from α_0 to α_1 by the same factor in every update, so that the agents settle on one
of the data's ways to act together before the rewards alone decide. s̃ lies on a line between two
states of the batch.

An episode that terminates goes on in an absorbing state, in which nothing is earned. Adding a
constant to ν_i changes nothing, so its value there is 0, and it enters the values' loss only by its
share of the data: m = γ / (1 - γ) times the share of steps that terminate. One that is truncated
goes on in the data's states: ν_i(s') is the mean of ν_i over the batch there. No step leads on from
the view that it ended with, whose own value would fall for ever, and with it the δ_i of last steps.
Dead agents count neither in ρ_i and K_i nor in losses of their own.

Reference: Matsunaga et al. 2023 (arXiv 2311.02194), with the defaults of the authors' code
(github.com/dematsunaga/alberdice, commit 4d69f0e). Differences from it:

- There, π_i minimises E_ρ[ -Σ_a π_i e_i + α KL(π_i ‖ π^D_i) ]. Its minimum is π*_i too, but its
  gradient vanishes where π_i is sure of an action. So an agent that chose early, when the
  advantages were not learned yet, kept an action that does not fit the others'.
- There, α_1 is 0.001, beside rewards in the data's unit. Two agents settle on one of two ways once
  α is below a quarter of what their two disagreements cost together; far below that, errors of the
  values decide. On the bridge with random play (`benchmarks/exact.py`), where this is about 0.2,
  α from 1 to 0.1, 0.01 and 0.001 led 0, 5 and 2 seeds of five across on one of the data's ways.
- There, batches are resampled by ρ_i; here the losses are weighted, without the noise of a second
  draw. K_i is estimated by 16 draws there, and is summed over actions here.
- There, episodes are filled up with steps in the absorbing state, where m counts the steps of an
  endless one. The view that a truncated episode ended with has a value of its own.
- Here, one network models the data's joint actions for all agents; it is told which actions are
  given. Policies are feed-forward there, or transformers over the history; here, feed-forward or
  recurrent.
- The weights e^{δ_i / α} are normalised over the batch, so none is above the number of its steps:
  the bound e^20 of the authors' settings, which their program does not use either, is never
  reached.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl import cli, programs
from offmarl.config import Fraction, NonNegative, Positive, PositiveInt
from offmarl.distributions import categorical, mask_illegal, select
from offmarl.errors import OptionError
from offmarl.losses import (
    cloning_loss,
    divergence,
    masked_mean,
    probability_ratios,
    soft_maximum,
    weighted_mean,
)
from offmarl.networks import (
    AgentNetwork,
    Inputs,
    JointActionModel,
    OwnCritic,
    Unshared,
    agent_network,
    blank_view,
    given_actions,
    init_policy,
    make_policy,
    of_agent,
    unroll_batch,
    view_of_agent,
)
from offmarl.programs import (
    DatasetStatistics,
    Hyperparameters,
    Program,
    Stage,
    ValueArgs,
    make_optimiser,
    policy_config,
)
from offmarl.teams import require_one_team
from offmarl.types import ArrayTree, EnvSpec, Sequence

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(ValueArgs):
    """Alternating stationary distribution correction."""

    learning_rate: Positive = 1e-4
    """Adam's step size at the first update, of all networks."""
    hidden: PositiveInt = 128
    """Width of the layers of all networks."""
    gamma: Fraction = 0.99
    """Discount γ, below 1."""
    alpha_start: Positive = 5.0
    """α_0, the weight of staying near the data at the first update."""
    alpha_end: Positive = 0.01
    """α_1, its weight at the last update."""
    ratio_max: Positive = 100.0
    """Largest weight ρ_i of a step."""
    cql_weight: NonNegative = 0.1
    """Weight β of the conservative penalty on the advantages."""
    gradient_penalty: NonNegative = 0.1
    """Weight c of the squared gradients of the values."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.gamma == 1:
            raise OptionError("gamma must be below 1, not 1: values are weighted by 1 - gamma.")


# ---------------------------------------------------------------------------------- state


class Part(NamedTuple):
    """A network's parameters, and the state of their optimiser."""

    params: ArrayTree
    moments: ArrayTree


class Agents(NamedTuple):
    """The parts of each agent; the leaves have an axis of agents in front."""

    policy: Part
    value: Part
    advantage: Part


class State(NamedTuple):
    """Parameters and states that an update changes."""

    agents: Agents
    clone: Part
    """Imitates each agent alone."""
    joint: Part
    """Predicts agents' actions from those of others."""
    updates: Int[Array, ""]


# ---------------------------------------------------------------------------------- losses


class Networks(NamedTuple):
    """The networks; parameters of the first and the last two belong to one agent each."""

    policies: Unshared
    clone: AgentNetwork
    joint: JointActionModel
    value: OwnCritic
    advantage: OwnCritic


class Turn(NamedTuple):
    """The data, reward and weights that an agent learns from in its turn."""

    batch: Sequence
    agent: Int[Array, ""]
    reward: Float[Array, "B T"]
    """r - α K_i."""
    ratio: Float[Array, "B T"]
    """ρ_i, multiplied by the weights of the batch."""
    cloned: Float[Array, "B T A"]
    """log π^D_i of all actions."""
    alpha: Float[Array, ""]


def clone_loss(
    params: ArrayTree, network: AgentNetwork, batch: Sequence
) -> tuple[Float[Array, ""], Float[Array, "B T N A"]]:
    """Return the cross-entropy of the clones, and their log-probabilities."""
    view = batch.view_tm1
    logits = unroll_batch(network, params, view.observation, batch.first[:, :-1])
    return cloning_loss(logits, batch), log_probs_of(logits, view.legal_actions)


def joint_loss(
    params: ArrayTree, model: JointActionModel, batch: Sequence, agent: Int[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, "B T N A"]]:
    """Return the cross-entropy of the other agents' actions, and the log-probabilities."""
    view = batch.view_tm1
    context = given_actions(batch.action, view.alive, agent, view.legal_actions.shape[-1])
    logits = model.apply(params, view, context)
    loss = cloning_loss(logits, batch, others(batch, agent))
    return loss, log_probs_of(logits, view.legal_actions)


def value_loss(
    params: ArrayTree, value: OwnCritic, turn: Turn, key: PRNGKeyArray, hyper: Hyperparameters
) -> tuple[Float[Array, ""], Float[Array, "B T"]]:
    """Return the loss of ν_i, and the residuals δ_i."""
    batch, gamma = turn.batch, hyper.gamma
    inputs = value.apply(params, view_of_agent(batch.view, turn.agent), method="encode")
    nu = value.apply(params, inputs, method="of_inputs")[..., 0]
    nu_tm1, ends = nu[:, :-1], batch.terminated.all(-1)
    is_cut = (batch.terminated | batch.truncated).all(-1) & ~ends
    nu_t = jnp.where(is_cut, masked_mean(nu_tm1, batch.mask), nu[:, 1:])
    delta = turn.reward + gamma * (1 - ends) * nu_t - nu_tm1

    counts = batch.mask & batch.next_known
    steps = jnp.maximum(counts.sum(), 1)
    absorbing = gamma / (1 - gamma) * masked_mean(1.0 * ends, counts, batch.weight)
    shares = jnp.append(turn.ratio * counts / steps, absorbing)
    best = soft_maximum(jnp.append(delta, 0.0), shares, turn.alpha)
    start = (1 - gamma) * masked_mean(nu_tm1, batch.mask, batch.weight)
    inputs_tm1 = jax.tree.map(lambda leaf: leaf[:, :-1], inputs)
    slope = squared_slope(params, value, inputs_tm1, batch.mask, key)
    return best + start + hyper.gradient_penalty * slope, delta


def squared_slope(
    params: ArrayTree, value: OwnCritic, inputs: Inputs, mask: Bool[Array, "B T"], key: PRNGKeyArray
) -> Float[Array, ""]:
    """Return the mean of |∇ν|² at random points between pairs of steps."""
    pair_key, place_key = jax.random.split(key)
    order = jax.random.permutation(pair_key, mask.size)
    place = jax.random.uniform(place_key, mask.shape)

    def paired(leaf: Array) -> Array:
        return leaf.reshape(-1, *leaf.shape[2:])[order].reshape(leaf.shape)

    def between(leaf: Array) -> Array:
        share = place.reshape(*place.shape, *(1,) * (leaf.ndim - 2))
        return share * leaf + (1 - share) * paired(leaf)

    def total(inputs: Inputs) -> Float[Array, ""]:
        return value.apply(params, inputs, method="of_inputs").sum()

    slopes = jax.tree.leaves(jax.grad(total)(jax.tree.map(between, inputs)))
    squares = [(leaf**2).reshape(*mask.shape, -1).sum(-1) for leaf in slopes]
    return masked_mean(sum(squares, jnp.zeros(mask.shape)), mask & paired(mask))


def advantage_loss(
    params: ArrayTree, advantage: OwnCritic, turn: Turn, delta: Array, hyper: Hyperparameters
) -> tuple[Float[Array, ""], Float[Array, "B T A"]]:
    """Return the loss of e_i, and e_i of all actions."""
    batch, view = turn.batch, view_of_agent(turn.batch.view_tm1, turn.agent)
    e = advantage.apply(params, view)
    action = of_agent(batch.action, turn.agent, 2)[..., 0]
    error = select(e, action) - jax.lax.stop_gradient(delta)
    above = jax.nn.logsumexp(mask_illegal(e, view.legal_actions[..., 0, :]), axis=-1)
    gap = above - (jnp.exp(turn.cloned) * e).sum(-1)
    weight = turn.ratio * (batch.mask & batch.next_known & view.alive[..., 0])
    return weighted_mean(error**2, weight) + hyper.cql_weight * weighted_mean(gap, weight), e


def policy_loss(
    params: ArrayTree, policies: Unshared, turn: Turn, e: Float[Array, "B T A"]
) -> tuple[Float[Array, ""], None]:
    """Return the loss of π_i."""
    log_probs = own_log_probs(params, policies, turn.batch, turn.agent)
    pi_star = jax.lax.stop_gradient(jax.nn.softmax(turn.cloned + e / turn.alpha))
    losses = -(pi_star * log_probs).sum(-1)
    acts = turn.batch.mask & of_agent(turn.batch.view_tm1.alive, turn.agent, 2)[..., 0]
    return weighted_mean(losses, turn.ratio * acts), None


def own_log_probs(
    params: ArrayTree, policies: Unshared, batch: Sequence, agent: Int[Array, ""]
) -> Float[Array, "B T A"]:
    """Return log π_i of all actions."""
    view = batch.view_tm1
    observation, legal = of_agent((view.observation, view.legal_actions), agent, 2)
    outputs = unroll_batch(policies.torso, params, observation, batch.first[:, :-1])
    return log_probs_of(outputs, legal)[..., 0, :]


def log_probs_of(
    outputs: Float[Array, "*b A"], legal_actions: Bool[Array, "*b A"]
) -> Float[Array, "*b A"]:
    """Return the log-probabilities of all actions; those of illegal ones are about -1e9."""
    return jax.nn.log_softmax(categorical(outputs, legal_actions).logits)


def others(batch: Sequence, agent: Int[Array, ""]) -> Bool[Array, "B T N"]:
    """Return the live agents other than ``agent``."""
    alive = batch.view_tm1.alive
    return alive & (jnp.arange(alive.shape[-1]) != agent)


def turn_of(
    agent: Int[Array, ""],
    batch: Sequence,
    log_probs: Float[Array, "B T N A"],
    predicted: Float[Array, "B T N A"],
    cloned: Float[Array, "B T N A"],
    alpha: Float[Array, ""],
    ratio_max: Float[Array, ""],
) -> Turn:
    """Return an agent's turn, by the current policies and models of the data."""
    mask, action = others(batch, agent), batch.action
    log_pi, log_data = select(log_probs, action), select(predicted, action)
    ratio = probability_ratios(log_pi, log_data, mask, ratio_max)
    if batch.weight is not None:
        ratio *= batch.weight.reshape(*batch.weight.shape, *(1,) * (2 - batch.weight.ndim))
    penalty = jnp.where(mask, divergence(log_probs, predicted), 0.0).sum(-1)
    reward = batch.reward.mean(-1) - alpha * penalty
    return Turn(batch, agent, reward, ratio, of_agent(cloned, agent, 2)[..., 0, :], alpha)


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, _dataset: DatasetStatistics) -> Program:
    """Build the program for one kind of data."""
    require_one_team(spec, "alberdice")
    config = policy_config(args, "softmax", share_parameters=False)
    cloning = replace(config, share_parameters=True)
    policies, agents, total = agent_network(config, spec), spec.num_agents, args.updates or 1
    assert isinstance(policies, Unshared)
    value = OwnCritic(spec, 1, args.hidden, args.layers)
    nets = Networks(
        policies,
        agent_network(cloning, spec),
        JointActionModel(spec, args.hidden, args.layers),
        value,
        value.clone(outputs=spec.num_actions),
    )

    def init(key: PRNGKeyArray, hyper: Hyperparameters) -> State:
        keys, optimiser = jax.random.split(key, 5), make_optimiser(args, hyper)
        view = jax.tree.map(lambda leaf: leaf[None, None], blank_view(spec))
        context = jnp.zeros((1, 1, agents, agents * spec.num_actions))

        def of_each(critic: OwnCritic, key: PRNGKeyArray) -> Part:
            own = view_of_agent(view, 0)
            params = jax.lax.map(lambda key: critic.init(key, own), jax.random.split(key, agents))
            return Part(params, jax.vmap(optimiser.init)(params))

        def of_all(params: ArrayTree) -> Part:
            return Part(params, optimiser.init(params))

        policy = init_policy(config, spec, keys[0])
        return State(
            Agents(
                Part(policy, jax.vmap(optimiser.init)(policy)),
                of_each(nets.value, keys[1]),
                of_each(nets.advantage, keys[2]),
            ),
            of_all(init_policy(cloning, spec, keys[3])),
            of_all(nets.joint.init(keys[4], view, context)),
            jnp.zeros((), jnp.int32),
        )

    def update(
        state: State, batch: Sequence, key: PRNGKeyArray, hyper: Hyperparameters
    ) -> tuple[State, dict[str, Array]]:
        learn = partial(_learn, make_optimiser(args, hyper, state.updates))
        falls = hyper.alpha_end / hyper.alpha_start
        alpha = hyper.alpha_start * falls ** jnp.minimum(state.updates / total, 1.0)
        clone, cloned, of_clone = learn(clone_loss, state.clone, nets.clone, batch)

        def take_turn(
            carry: tuple[Agents, Part, Array], x: tuple[Array, PRNGKeyArray]
        ) -> tuple[tuple[Agents, Part, Array], tuple[dict[str, _Loss], Array]]:
            (all_agents, joint, log_probs), (agent, key) = carry, x
            agent_i: Agents = jax.tree.map(lambda leaf: leaf[agent], all_agents)
            joint, predicted, of_joint = learn(joint_loss, joint, nets.joint, batch, agent)
            turn = turn_of(agent, batch, log_probs, predicted, cloned, alpha, hyper.ratio_max)
            value, delta, of_value = learn(value_loss, agent_i.value, nets.value, turn, key, hyper)
            advantage, e, of_advantage = learn(
                advantage_loss, agent_i.advantage, nets.advantage, turn, delta, hyper
            )
            policy, _, of_policy = learn(policy_loss, agent_i.policy, policies, turn, e)
            agent_i = Agents(policy, value, advantage)
            all_agents = jax.tree.map(lambda x, own: x.at[agent].set(own), all_agents, agent_i)
            log_pi = own_log_probs(policy.params, policies, batch, agent)
            results = {
                "joint": of_joint,
                "value": of_value,
                "advantage": of_advantage,
                "policy": of_policy,
            }
            ratio = masked_mean(turn.ratio, batch.mask)
            return (all_agents, joint, log_probs.at[:, :, agent].set(log_pi)), (results, ratio)

        view = batch.view_tm1
        outputs = unroll_batch(
            policies, state.agents.policy.params, view.observation, batch.first[:, :-1]
        )
        initial = state.agents, state.joint, log_probs_of(outputs, view.legal_actions)
        turns = jnp.arange(agents), jax.random.split(key, agents)
        (all_agents, joint, _), (results, ratio) = jax.lax.scan(take_turn, initial, turns)
        metrics = _summary(results | {"clone": of_clone})
        metrics |= {"alpha": alpha, "ratio": ratio.mean()}
        return State(all_agents, clone, joint, state.updates + 1), metrics

    return Program(
        init,
        stages=(Stage(update),),
        policy=partial(make_policy, config, spec),
        policy_params=lambda state: state.agents.policy.params,
    )


class _Loss(NamedTuple):
    """The loss of a part, and the squared norm of its gradient."""

    loss: Float[Array, "*agents"]
    square: Float[Array, "*agents"]


def _learn(
    optimiser: optax.GradientTransformation, loss: Any, part: Part, *args: Any
) -> tuple[Part, Any, _Loss]:
    """Return a part after an update, and the auxiliary result and value of its loss before."""
    (error, aux), gradient = jax.value_and_grad(loss, has_aux=True)(part.params, *args)
    step, moments = optimiser.update(gradient, part.moments)
    aux = jax.lax.stop_gradient(aux)
    square = programs.grad_norm(gradient) ** 2
    return Part(optax.apply_updates(part.params, step), moments), aux, _Loss(error, square)


def _summary(parts: dict[str, _Loss]) -> dict[str, Array]:
    """Return the mean loss of each part, and the norm of all gradients."""
    losses = {f"{name}_loss": part.loss.mean() for name, part in parts.items()}
    squares = jnp.stack([part.square.sum() for part in parts.values()])
    return losses | {"grad_norm": jnp.sqrt(squares.sum())}


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> Path:
    """Train, evaluate and write the run; return its directory."""
    return programs.train(make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        main(cli.parse_script(Args, __doc__))
