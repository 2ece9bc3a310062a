"""MADT: a causal transformer that imitates the actions that led to a given return, discrete.

Each agent's own history is a sequence of returns-to-go, observations and actions. A transformer,
shared by all agents, is fitted to the data's actions:

    L = -E[ log π(a_t | R_t-K.., o_t-K.., a_t-K.., R_t, o_t) ],   R_t = r_t + r_t+1 + .. + r_T,

over agents and steps of complete episodes: of others, what would have followed is unknown. It sees
at most K steps, those of the window (``--burn-in`` and ``--length``), and none of another episode;
with ``--network feedforward``, K is 1. To act, it is given a return to aim for, by default that of
the data's best episode, and each reward is subtracted from it. The policy remembers the
last K steps.

Returns-to-go are divided by the data's scale of returns. A step's time is that in its episode.

Reference: Meng et al. 2021 (arXiv 2112.02845), with the defaults of the authors' code
(github.com/ReinholdM/Offline-Pre-trained-Multi-Agent-Decision-Transformer, commit c87a7ca), except
that it sees one step by default, and observations alone; the paper describes what is here. There,
the previous action precedes the return-to-go, positions are learned, actions need not be legal in
training, returns are not scaled, the target is a constant, and the second moment of Adam decays by
0.95. There, all weights of the transformer's blocks have a standard deviation of 0.02 at first;
ours are larger, see `offmarl.networks.transformer`. Online fine-tuning, with its critic, is not
here.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl import cli, programs
from offmarl.config import Layers, NonNegative, Positive, PositiveInt
from offmarl.distributions import categorical
from offmarl.errors import OptionError
from offmarl.losses import cloning_loss
from offmarl.networks import DecisionTransformer, Trajectory, blank_view, observation_encoder
from offmarl.programs import DatasetStatistics, Hyperparameters, LearnerArgs, Program, Stage
from offmarl.programs.learning.learner import step_size
from offmarl.types import ArrayTree, EnvSpec, Policy, Sequence

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(LearnerArgs):
    """A transformer that is given the return to aim for."""

    learning_rate: Positive = 5e-4
    """Adam's step size at the first update."""
    max_grad_norm: Positive | None = 0.5
    """Largest global norm of the gradients; larger ones are scaled down to it."""
    weight_decay: NonNegative = 0.1
    """Share of the linear layers' weights, times the step size, that an update removes."""
    batch_size: PositiveInt = 128
    """Windows in a batch."""
    network: Literal["recurrent", "feedforward"] = "recurrent"
    """The network sees the steps of the window before (recurrent), or not (feedforward)."""
    hidden: PositiveInt = 32
    """Width of the network's tokens, a multiple of --heads."""
    layers: Layers | None = None
    """Blocks of the transformer; by default 2."""
    heads: PositiveInt = 2
    """Attention heads of each block."""
    target_return: float | None = None
    """Return that each agent aims for; by default its own in the data's best episode."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hidden % (2 * self.heads):
            raise OptionError(
                f"hidden must be a multiple of twice heads ({2 * self.heads}), not {self.hidden}."
            )


# ---------------------------------------------------------------------------------- state


class Actor(NamedTuple):
    """Parameters of the policy."""

    network: ArrayTree
    target_return: Float[Array, "N"]
    """The return that each agent aims for; it may be changed in a loaded policy's ``params``."""


class State(NamedTuple):
    """Parameters and states that an update changes."""

    network: ArrayTree
    target_return: Float[Array, "N"]
    optimiser: ArrayTree
    updates: Int[Array, ""]


# ---------------------------------------------------------------------------------- policy


class Memory(NamedTuple):
    """Memory of the policy: its last K steps."""

    seen: Trajectory
    """Oldest first; the episode is -1 for steps before its beginning."""
    to_go: Float[Array, "N"]
    """Return-to-go after the last reward."""


def empty_memory(spec: EnvSpec, steps: int) -> Memory:
    """Return the memory before the first step of an episode."""
    observation = blank_view(spec).observation
    return Memory(
        Trajectory(
            jnp.zeros((steps, spec.num_agents)),
            jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (steps, *leaf.shape)), observation),
            action=jnp.zeros((steps, spec.num_agents), jnp.int32),
            time=jnp.full(steps, -1),
            episode=jnp.full(steps, -1),
        ),
        jnp.zeros(spec.num_agents),
    )


def remember(memory: Memory, target_return: Float[Array, "N"], observation: ArrayTree) -> Memory:
    """Add a step, whose action is not chosen yet, and drop the oldest."""
    time = memory.seen.time[-1] + 1
    to_go = jnp.where(time == 0, target_return, memory.to_go)
    step = Trajectory(to_go, observation, jnp.zeros_like(memory.seen.action[0]), time, 0 * time)
    trajectory = jax.tree.map(
        lambda leaf, new: jnp.concatenate([leaf[1:], new[None].astype(leaf.dtype)]),
        memory.seen,
        step,
    )
    return Memory(trajectory, to_go)


def make_policy(
    network: DecisionTransformer, spec: EnvSpec, steps: int, scale: float, greedy: bool
) -> Policy:
    """Build the policy; arguments are those of the program, and K steps."""

    def distribution(actor: Actor, memory: Memory, legal: Bool[Array, "N A"]) -> Any:
        trajectory = memory.seen._replace(return_to_go=memory.seen.return_to_go / scale)
        return categorical(network.apply(actor.network, trajectory)[-1], legal)

    def acted(memory: Memory, action: Int[Array, "N"]) -> Memory:
        actions = memory.seen.action.at[-1].set(action)
        return memory._replace(seen=memory.seen._replace(action=actions))

    def act(
        actor: Actor,
        memory: Memory,
        observation: ArrayTree,
        legal_actions: Bool[Array, "N A"],
        key: PRNGKeyArray,
    ) -> tuple[Int[Array, "N"], Float[Array, "N"], Memory]:
        memory = remember(memory, actor.target_return, observation)
        actions = distribution(actor, memory, legal_actions)
        if greedy:
            action, log_prob = actions.mode(), jnp.zeros(spec.num_agents)
        else:
            action, log_prob = actions.sample_and_log_prob(key)
        return action, log_prob, acted(memory, action)

    def log_prob(
        actor: Actor,
        memory: Memory,
        observation: ArrayTree,
        legal_actions: Bool[Array, "N A"],
        action: Int[Array, "N"],
    ) -> tuple[Float[Array, "N"], Memory]:
        memory = remember(memory, actor.target_return, observation)
        return distribution(actor, memory, legal_actions).log_prob(action), acted(memory, action)

    def after_step(memory: Memory, reward: Float[Array, "N"], _done: Bool[Array, "N"]) -> Memory:
        return memory._replace(to_go=memory.to_go - reward)

    return Policy(
        initial_carry=lambda: empty_memory(spec, steps),
        act=act,
        log_prob=log_prob,
        after_step=after_step,
        draws=lambda _actor: not greedy,
    )


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, dataset: DatasetStatistics) -> Program:
    """Build the program for one kind of data."""
    encoder = observation_encoder(spec, args.hidden)
    network = DecisionTransformer(
        spec.num_actions, args.hidden, args.layers or 2, args.heads, args.agent_id, encoder
    )
    returns = dataset.returns()
    if not len(returns):
        raise OptionError("madt needs returns, and the data has no complete episode to learn from.")
    best = dataset.best_returns() if args.target_return is None else args.target_return
    scale = dataset.return_scale()
    scored = jnp.asarray(dataset.scored())
    remembers = args.network == "recurrent"
    steps = args.burn_in + args.length if remembers else 1

    def init(key: PRNGKeyArray, hyper: Hyperparameters) -> State:
        trajectory = empty_memory(spec, steps).seen
        params = network.init(key, trajectory)
        optimiser = programs.make_optimiser(args, hyper).init(params)
        return State(
            params,
            jnp.full(spec.num_agents, best, jnp.float32),
            optimiser,
            jnp.zeros((), jnp.int32),
        )

    def loss(params: ArrayTree, batch: Sequence) -> Float[Array, ""]:
        view = batch.view_tm1
        assert batch.return_to_go is not None and batch.time is not None
        assert batch.episode is not None
        time, known = batch.time[:, :-1], scored[batch.episode[:, :-1]]
        alone = jnp.broadcast_to(jnp.arange(time.shape[-1]), time.shape)
        episode = jnp.cumsum(batch.first[:, :-1], axis=-1) if remembers else alone
        to_go = jnp.where(known[..., None], batch.return_to_go / scale, 0.0)
        trajectory = Trajectory(to_go, view.observation, batch.action, time, episode)
        logits = network.apply(params, trajectory)
        return cloning_loss(logits, batch._replace(mask=batch.mask & known))

    def update(
        state: State, batch: Sequence, _key: PRNGKeyArray, hyper: Hyperparameters
    ) -> tuple[State, dict[str, Array]]:
        params = state.network
        value, gradient = jax.value_and_grad(loss)(params, batch)
        adam = programs.make_optimiser(args, hyper, state.updates)
        step, optimiser = adam.update(gradient, state.optimiser, params)
        shrink = step_size(args, hyper, state.updates) * hyper.weight_decay
        step = jax.tree_util.tree_map_with_path(partial(_decayed, shrink), step, params)
        params = optax.apply_updates(params, step)
        metrics = {"policy_loss": value, "grad_norm": programs.grad_norm(gradient)}
        return State(params, state.target_return, optimiser, state.updates + 1), metrics

    return Program(
        init,
        stages=(Stage(update),),
        policy=partial(make_policy, network, spec, steps, scale),
        policy_params=lambda state: Actor(state.network, state.target_return),
        return_to_go=1.0,
        given=("target_return",),
    )


def _decayed(shrink: Float[Array, ""], path: Any, step: Array, weights: Array) -> Array:
    """Return a step that also decreases the weights of linear layers, but no others."""
    return step - shrink * weights if path[-1].key == "kernel" else step


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> Path:
    """Train, evaluate and write the run; return its directory."""
    return programs.train(make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        main(cli.parse_script(Args, __doc__))
