"""QMIX+BCQ: monotonic value factorisation over the actions that are likely in the data, discrete.

A behaviour network is fitted to the data by maximum likelihood, with an optimiser of its own. An
action is allowed where it is legal and not too unlikely,

    A_i = { a legal: π_b(a | o_i) / max over legal a' of π_b(a' | o_i) ≥ τ },

and QMIX learns and acts by allowed actions only, in its targets and in its policy:

    L = E[ ½ (Q_tot(s, a) - y)² ],
    y = r + γ (1 - terminated) Q̄_tot(s', argmax over A_i of Q_i(o_i', ·)),

with r the mean of the agents' rewards. The episode terminates where all agents do. Dead agents add
nothing to Q_tot.

References: discrete BCQ, Fujimoto et al. 2019 (arXiv 1910.01708); QMIX, Rashid et al. 2018 (arXiv
1803.11485). Defaults are those of ``qmix_bcq.yaml`` of OG-MARL (github.com/instadeepai/og-marl,
commit f4eb8f0; Formanek et al. 2023, arXiv 2302.00521), which has recurrent networks only. There,
the policy that is evaluated may take any legal action. Our mixer starts with smaller weights; see
`offmarl.networks.Mixer`.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl import cli, programs
from offmarl.config import Fraction
from offmarl.distributions import categorical, mask_illegal, select
from offmarl.losses import cloning_loss, double_q_values, masked_mean
from offmarl.networks import (
    AgentNetwork,
    MixedParams,
    agent_network,
    init_policy,
    mix,
    mixing_weights,
    unroll_batch,
)
from offmarl.programs import (
    TD_ERRORS,
    DatasetStatistics,
    Hyperparameters,
    Program,
    Stage,
    Values,
)
from offmarl.programs.learning.offline_q_learning import MixedArgs, make_mixed_values, team_errors
from offmarl.teams import require_one_team
from offmarl.types import ArrayTree, EnvSpec, Policy, Sequence

# ---------------------------------------------------------------------------------- arguments


@dataclass(frozen=True)
class Args(MixedArgs):
    """QMIX with batch-constrained actions."""

    threshold: Fraction = 0.4
    """τ: an action is allowed if its probability is at least this fraction of the likeliest
    action's; 0 gives plain offline QMIX, 1 behaviour cloning."""


# ---------------------------------------------------------------------------------- state


class State(NamedTuple):
    """Parameters and states that an update changes."""

    params: MixedParams
    target: MixedParams
    behaviour: ArrayTree
    optimiser: ArrayTree
    behaviour_optimiser: ArrayTree
    threshold: Float[Array, ""]
    """τ, which the policy needs too."""
    updates: Int[Array, ""]


class Actor(NamedTuple):
    """Parameters of the policy: those of both networks, and the threshold τ."""

    network: ArrayTree
    behaviour: ArrayTree
    threshold: Float[Array, ""]


# ---------------------------------------------------------------------------------- policy


def allowed_actions(
    logits: Float[Array, "*b A"], legal: Bool[Array, "*b A"], threshold: Float[Array, ""] | float
) -> Bool[Array, "*b A"]:
    """Return the legal actions that are likely enough by the behaviour network."""
    log_probs = jax.nn.log_softmax(categorical(logits, legal).logits)
    ratio = jnp.exp(log_probs - log_probs.max(-1, keepdims=True))
    return legal & (ratio >= threshold)


def constrained_policy(
    network: AgentNetwork, behaviour: AgentNetwork, num_agents: int, _greedy: bool
) -> Policy:
    """Build the policy that takes the allowed action of the largest value."""

    def act(
        actor: Actor, carry: ArrayTree, observation: ArrayTree, legal: Array, _key: PRNGKeyArray
    ) -> tuple[Array, Array, ArrayTree]:
        q, memory = network.apply(actor.network, carry[0], observation)
        logits, behaviour_memory = behaviour.apply(actor.behaviour, carry[1], observation)
        allowed = allowed_actions(logits, legal, actor.threshold)
        action = mask_illegal(q, allowed).argmax(-1)
        return action, jnp.zeros(num_agents), (memory, behaviour_memory)

    def initial_carry() -> ArrayTree:
        return network.initial_carry(num_agents), behaviour.initial_carry(num_agents)

    return Policy(initial_carry, act, draws=lambda _actor: False)


# ---------------------------------------------------------------------------------- program


def make(spec: EnvSpec, args: Args, _dataset: DatasetStatistics) -> Program:
    """Build the program for one kind of data."""
    require_one_team(spec, "qmix_bcq")
    networks = make_mixed_values(spec, args)
    behaviour_config = programs.policy_config(args, "softmax")
    behaviour = agent_network(behaviour_config, spec)

    def init(key: PRNGKeyArray, hyper: Hyperparameters) -> State:
        agent_key, behaviour_key, mixer_key = jax.random.split(key, 3)
        params = networks.init(spec, agent_key, mixer_key)
        cloned = init_policy(behaviour_config, spec, behaviour_key)
        adam = programs.make_optimiser(args, hyper)
        threshold, updates = jnp.asarray(hyper.threshold), jnp.zeros((), jnp.int32)
        optimisers = adam.init(params), adam.init(cloned)
        return State(params, params, cloned, *optimisers, threshold, updates)

    def behaviour_loss(cloned: ArrayTree, batch: Sequence) -> tuple[Float[Array, ""], Array]:
        logits = unroll_batch(behaviour, cloned, batch.view.observation, batch.first)
        return cloning_loss(logits[:, :-1], batch), logits

    def loss(
        params: MixedParams,
        target: MixedParams,
        logits: Array,
        batch: Sequence,
        hyper: Hyperparameters,
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        view_tm1, view_t = batch.view_tm1, batch.view_t
        observation = batch.view.observation
        q = unroll_batch(networks.agent, params.agent, observation, batch.first)
        q_target = unroll_batch(networks.agent, target.agent, observation, batch.first)
        weights_tm1 = mixing_weights(networks.mixer, params.mixer, view_tm1)
        weights_t = mixing_weights(networks.mixer, target.mixer, view_t)

        allowed = allowed_actions(logits[:, 1:], view_t.legal_actions, hyper.threshold)
        v_t = double_q_values(q_target[:, 1:], q[:, 1:], allowed) * view_t.alive
        q_tot_tm1 = mix(weights_tm1, select(q[:, :-1], batch.action) * view_tm1.alive)
        error, known = team_errors(batch, q_tot_tm1, mix(weights_t, v_t), hyper.gamma)
        td_loss = masked_mean(0.5 * error**2, known, batch.weight)
        metrics = {"td_loss": td_loss, "q_tot": masked_mean(q_tot_tm1, batch.mask)}
        return td_loss, metrics | {TD_ERRORS: error}

    def update(
        state: State, batch: Sequence, _key: PRNGKeyArray, hyper: Hyperparameters
    ) -> tuple[State, dict[str, Array]]:
        adam, updates = programs.make_optimiser(args, hyper, state.updates), state.updates + 1
        (cloning, logits), gradient = jax.value_and_grad(behaviour_loss, has_aux=True)(
            state.behaviour, batch
        )
        step, behaviour_optimiser = adam.update(gradient, state.behaviour_optimiser)
        cloned = optax.apply_updates(state.behaviour, step)
        gradient, metrics = jax.grad(loss, has_aux=True)(
            state.params, state.target, logits, batch, hyper
        )
        step, optimiser = adam.update(gradient, state.optimiser)
        params = optax.apply_updates(state.params, step)
        target = optax.periodic_update(params, state.target, updates, args.target_every)
        metrics |= {"behaviour_loss": cloning, "grad_norm": programs.grad_norm(gradient)}
        return State(
            params, target, cloned, optimiser, behaviour_optimiser, state.threshold, updates
        ), metrics

    return Program(
        init,
        stages=(Stage(update),),
        policy=partial(constrained_policy, networks.agent, behaviour, spec.num_agents),
        policy_params=lambda state: Actor(state.params.agent, state.behaviour, state.threshold),
        td_errors=True,
        given=("threshold",),
        values=Values(lambda state: state.params, networks.of_joint_actions),
    )


# ---------------------------------------------------------------------------------- main


def main(args: Args) -> Path:
    """Train, evaluate and write the run; return its directory."""
    return programs.train(make, args)


if __name__ == "__main__":
    with cli.exit_codes():
        main(cli.parse_script(Args, __doc__))
