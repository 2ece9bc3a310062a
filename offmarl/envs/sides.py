"""One side of an environment: its agents act, and other policies act for the others.

`play_side` makes an environment whose agents are one team, or some agents of one. Learners see an
environment with one team; what is recorded holds all agents (see `Side.whole`). `compose` makes one
policy of several, each of which acts for some of the agents, and `population` one that draws a
member for each episode.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray
from numpy.typing import NDArray

from offmarl.envs.base import Environment, EnvState, Wrapper, extras_of, no_action, restart
from offmarl.errors import OptionError, ShapeError
from offmarl.teams import Team, find_side, name_of_side, spec_of
from offmarl.types import (
    ArraySpec,
    ArrayTree,
    EnvSpec,
    FinalObservations,
    Policy,
    Timestep,
    Transition,
    View,
    remember,
)

_PACKED = "others-"
"""Beginning of the names of the extras that hold the other agents' part of a step."""


@dataclass(frozen=True, eq=False)
class TeamPolicy:
    """A policy with its parameters, which acts for the agents of one side.

    Equal only to itself, so that an environment that holds one can be a static argument.

    Parameters
    ----------
    policy, params
        The policy, and its parameters.
    agents
        The agents that the policy acts for, in order: those of the side, or all of the environment
        that it was made for.
    name
        What to call it, such as "scripted" or the directory of a run.
    about
        A JSON object that identifies it, for recordings.
    members
        The members of a population, from `population`; empty for a single policy.
    """

    policy: Policy
    params: ArrayTree
    agents: tuple[int, ...]
    name: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)
    members: tuple["TeamPolicy", ...] = ()
    run: Path | None = None
    """The directory of the run that it was loaded from."""

    def seat(self, agents: tuple[int, ...]) -> "Seat":
        """Return the policy as that of some agents."""
        return Seat(agents, self.policy, self.agents, len(self.members) or 1)


class Seat(NamedTuple):
    """Agents, and the policy that acts for them."""

    agents: tuple[int, ...]
    """The agents whose actions are taken from the policy."""
    policy: Policy
    sees: tuple[int, ...]
    """The agents that the policy acts for, in order; ``agents`` are among them."""
    size: int = 1
    """Number of policies that it draws from; `Policy.number` says which one acts."""


def take_agents(tree: ArrayTree, agents: Sequence[int]) -> ArrayTree:
    """Return the rows of some agents of a tree of arrays whose first axis counts agents."""
    index = np.array(agents, int)
    return jax.tree.map(lambda leaf: leaf.take(index, 0), tree)


def compose(spec: EnvSpec, seats: Sequence[Seat]) -> Policy:
    """Return one policy of several, each for some of the agents.

    Its parameters and its carry are tuples with an entry for each seat. Agents without a seat do
    action 0 with a log-probability of 0. `Policy.number` counts the policies of the seats in order.

    Parameters
    ----------
    spec
        The spec of the environment of all agents.
    seats
        The policies.

    Raises
    ------
    ShapeError
        A policy acts for agents that do not exist, or two act for the same agent.
    OptionError
        Agents of a policy choose after one another, and it would act for some of them alone.
    """
    return _compose(spec, tuple(seats))


@lru_cache(maxsize=64)
def _compose(spec: EnvSpec, seats: tuple[Seat, ...]) -> Policy:
    """Compose policies; cached, so that equal seats share compiled programs."""
    index = [agent for seat in seats for agent in seat.agents]
    if len(set(index)) < len(index) or not set(index) <= set(range(spec.num_agents)):
        raise ShapeError(
            f"policies act for the agents {index} of {spec.num_agents}: give each agent one policy."
        )
    for seat in seats:
        if seat.policy.joint and set(seat.agents) != set(seat.sees):
            raise OptionError(
                f"the agents {list(seat.sees)} of a policy choose after one another, so it cannot "
                f"act for {list(seat.agents)} alone: give a policy whose agents act on their own."
            )
    # With NumPy, because policies are cached: JAX's arrays could be those of a trace.
    first = np.cumsum([0, *(seat.size for seat in seats)], dtype=np.int32)
    idle, silent = no_action(spec), np.zeros(spec.num_agents, np.float32)

    def fill(parts: Sequence[Array], default: NDArray[Any]) -> Array:
        joint = jnp.asarray(default)
        for seat, part in zip(seats, parts, strict=True):
            rows = np.array([seat.sees.index(agent) for agent in seat.agents])
            joint = joint.at[np.array(seat.agents)].set(part[rows])
        return joint

    def act(
        params: ArrayTree,
        carry: ArrayTree,
        observation: ArrayTree,
        legal_actions: Bool[Array, "N A"],
        key: PRNGKeyArray,
    ) -> tuple[Array, Float[Array, "N"], ArrayTree]:
        keys = jax.random.split(key, len(seats))
        outputs = []
        for i, seat in enumerate(seats):
            part, legal = take_agents((observation, legal_actions), seat.sees)
            outputs.append(seat.policy.act(params[i], carry[i], part, legal, keys[i]))
        actions, log_probs, carries = zip(*outputs, strict=True)
        return fill(actions, idle), fill(log_probs, silent), carries

    def log_prob(
        params: ArrayTree,
        carry: ArrayTree,
        observation: ArrayTree,
        legal_actions: Bool[Array, "N A"],
        action: Array,
    ) -> tuple[Float[Array, "N"], ArrayTree]:
        outputs = [
            seat.policy.log_prob(
                params[i], carry[i], *take_agents((observation, legal_actions, action), seat.sees)
            )
            for i, seat in enumerate(seats)
            if seat.policy.log_prob is not None
        ]
        values, carries = zip(*outputs, strict=True)
        return fill(values, silent), carries

    def after_step(
        carry: ArrayTree, reward: Float[Array, "N"], done: Bool[Array, "N"]
    ) -> ArrayTree:
        return tuple(
            remember(seat.policy, memory, *take_agents((reward, done), seat.sees))
            for memory, seat in zip(carry, seats, strict=True)
        )

    def number(carry: ArrayTree) -> Int[Array, "N"]:
        numbers = []
        for begin, seat, memory in zip(first, seats, carry, strict=False):
            only = jnp.zeros(len(seat.sees), jnp.int32)
            numbers.append(begin + (seat.policy.number(memory) if seat.policy.number else only))
        return fill(numbers, np.zeros(spec.num_agents, np.int32))

    policies = [seat.policy for seat in seats]
    return Policy(
        initial_carry=lambda: tuple(policy.initial_carry() for policy in policies),
        act=act,
        log_prob=log_prob if all(policy.log_prob for policy in policies) else None,
        after_step=after_step if any(policy.after_step for policy in policies) else None,
        draws=lambda params: any(
            policy.draws(seat_params) for policy, seat_params in zip(policies, params, strict=True)
        ),
        number=number if first[-1] > 1 else None,
        joint=any(policy.joint for policy in policies),
    )


# ---------------------------------------------------------------------------------- populations


@lru_cache(maxsize=16)
def one_of(policies: tuple[Policy, ...]) -> Policy:
    """Return a policy that acts as one of several; its parameters are ``(which, params)``.

    The environment around it is then traced, and compiled, once for all of them. Each policy has
    its own carry.
    """

    def act(
        selection: tuple[Int[Array, ""], ArrayTree], carries: tuple[ArrayTree, ...], *inputs: Any
    ) -> tuple[Array, Array, tuple[ArrayTree, ...]]:
        def acting(number: int) -> tuple[Array, Array, tuple[ArrayTree, ...]]:
            action, log_prob, carry = policies[number].act(selection[1], carries[number], *inputs)
            if jnp.issubdtype(action.dtype, jnp.integer):
                action = action.astype(jnp.int32)
            return action, log_prob, (*carries[:number], carry, *carries[number + 1 :])

        branches = [partial(acting, number) for number in range(len(policies))]
        outputs: tuple[Array, Array, tuple[ArrayTree, ...]] = jax.lax.switch(selection[0], branches)
        return outputs

    def after_step(carries: tuple[ArrayTree, ...], *outcome: Any) -> tuple[ArrayTree, ...]:
        return tuple(
            remember(policy, carry, *outcome)
            for policy, carry in zip(policies, carries, strict=True)
        )

    return Policy(
        lambda: tuple(policy.initial_carry() for policy in policies), act, after_step=after_step
    )


class Population(NamedTuple):
    """The parameters of a policy that draws a member for each episode."""

    members: tuple[ArrayTree, ...]
    """Of each policy the parameters of the members that have it, ``(M, ...)``."""
    weights: Float[Array | np.ndarray, "members"]
    """Weights of the members, in order."""


class _Memory(NamedTuple):
    """The carry of a population."""

    member: Int[Array, ""]
    """Number of the member; -1 before the first step of an episode."""
    carries: tuple[ArrayTree, ...]
    """The carry of each policy."""


def population(
    spec: EnvSpec, members: Sequence[TeamPolicy], weights: Sequence[float] | None = None
) -> TeamPolicy:
    """Return a policy that acts as one of several members, drawn anew for each episode.

    Members are drawn in proportion to their weights, by default equally; `OptionError` for negative
    weights, or if all are zero. Members with the same policy and other parameters are stacked: a
    program that was compiled for some plays any others of the same number and shapes. Each has a
    memory of its own.
    """
    shares = np.ones(len(members)) if weights is None else np.asarray(weights, float)
    some = 0 < shares.sum() < np.inf
    if shares.shape != (len(members),) or not some or not (shares >= 0).all():
        raise OptionError(
            f"{len(members)} policies cannot have the weights {shares.tolist()}: give each a "
            "number of at least 0, and one of them more; their sum must be finite."
        )
    if len(members) == 1:
        return members[0]
    alike = members
    if len({member.agents for member in members}) > 1:
        everyone = tuple(range(spec.num_agents))
        alike = [
            replace(
                member,
                policy=compose(spec, [member.seat(member.agents)]),
                params=(member.params,),
                agents=everyone,
            )
            for member in members
        ]
    distinct = tuple(dict.fromkeys(member.policy for member in alike))
    kinds = tuple(distinct.index(member.policy) for member in alike)
    stacks = [[member.params for member in alike if member.policy == policy] for policy in distinct]
    return TeamPolicy(
        _mixture(distinct, kinds, len(alike[0].agents)),
        Population(
            tuple(jax.tree.map(lambda *leaves: np.stack(leaves), *stack) for stack in stacks),
            np.asarray(shares / shares.sum(), np.float32),
        ),
        alike[0].agents,
        "+".join(dict.fromkeys(member.name for member in members)),
        {"members": [dict(member.about) for member in members], "weights": shares.tolist()},
        tuple(members),
    )


@lru_cache(maxsize=64)
def _mixture(policies: tuple[Policy, ...], kinds: tuple[int, ...], num_agents: int) -> Policy:
    """Return the policy of a population, whose members have the policies ``kinds``."""
    place = np.array([kinds[:number].count(kind) for number, kind in enumerate(kinds)])

    def of_kind(kind: int) -> Policy:
        def act(params: tuple[Array, ArrayTree], *inputs: Any) -> Any:
            index, stacked = params
            return policies[kind].act(
                jax.tree.map(lambda x: jnp.asarray(x)[index], stacked[kind]), *inputs
            )

        return policies[kind]._replace(act=act)

    switch = one_of(tuple(map(of_kind, range(len(policies)))))

    def act(
        params: Population,
        memory: _Memory,
        observation: ArrayTree,
        legal_actions: Bool[Array, "N A"],
        key: PRNGKeyArray,
    ) -> tuple[Array, Float[Array, "N"], _Memory]:
        draw_key, key = jax.random.split(key)
        edges = jnp.cumsum(params.weights)
        draw = jnp.searchsorted(edges, edges[-1] * (1 - jax.random.uniform(draw_key)))
        member = jnp.where(memory.member < 0, draw, memory.member)
        selection = jnp.array(kinds)[member], (jnp.array(place)[member], params.members)
        action, log_prob, carries = switch.act(
            selection, memory.carries, observation, legal_actions, key
        )
        return action, log_prob, _Memory(member, carries)

    def after_step(memory: _Memory, *outcome: Any) -> _Memory:
        return memory._replace(carries=remember(switch, memory.carries, *outcome))

    return Policy(
        lambda: _Memory(jnp.full((), -1, jnp.int32), switch.initial_carry()),
        act,
        after_step=after_step,
        number=lambda memory: jnp.full(num_agents, memory.member),
        joint=any(policy.joint for policy in policies),
    )


# ---------------------------------------------------------------------------------- one side


class SideState(NamedTuple):
    """The state of a `Side`."""

    inner: EnvState
    view: View
    """The view of all agents."""
    carry: ArrayTree
    """The carry of the others' policies."""


@dataclass(frozen=True, eq=False)
class Side:
    """An environment whose agents are some of another's; other policies act for the others.

    Its episodes end when they have ended for all agents of the side, or for all agents where they
    share one reward, which goes on until then. The other agents' part of each step is in its
    extras, from which `join_agents` makes steps of all agents.

    Parameters
    ----------
    env
        The environment of all agents.
    team
        The side: its name, and the agents that act.
    seats
        The policies of the other agents.
    others
        Their parameters. They are data: `with_others` replaces them, and `without_others` leaves
        them out, so that one compiled program plays any others of a shape.
    opponents
        The policies, by the names of their sides.
    """

    env: Any
    team: Team
    seats: tuple[Seat, ...]
    others: ArrayTree
    opponents: Mapping[str, TeamPolicy] = field(default_factory=dict)

    @property
    def spec(self) -> EnvSpec:
        """The spec of the side's agents, with the others' part of a step as extras."""
        return _spec(self.env, self.team)

    @property
    def recorded_spec(self) -> EnvSpec:
        """The spec of what `join_agents` returns: that of all agents."""
        return self.env.spec

    def reset(self, key: PRNGKeyArray) -> tuple[SideState, Timestep]:
        """Start an episode."""
        inner, timestep = self.env.reset(key)
        policy = compose(self.env.spec, self.seats)
        state = SideState(inner, timestep.view, policy.initial_carry())
        return state, restart(_part(timestep.view, self.team.agents))

    def step(
        self, key: PRNGKeyArray, state: SideState, action: Array
    ) -> tuple[SideState, Timestep]:
        """Take one step with the actions of the side's agents."""
        policy, agents = compose(self.env.spec, self.seats), np.array(self.team.agents)
        act_key, step_key = jax.random.split(key)
        joint, log_prob, carry = policy.act(
            self.others, state.carry, state.view.observation, state.view.legal_actions, act_key
        )
        number = policy.number(carry) if policy.number else jnp.zeros(len(joint), jnp.int32)
        joint = joint.at[agents].set(action)
        inner, timestep = self.env.step(step_key, state.inner, joint)
        carry = remember(policy, carry, timestep.reward, timestep.terminated | timestep.truncated)
        after = SideState(inner, timestep.next_view, carry)
        view = _part(timestep.next_view, self.team.agents)
        terminated, truncated = timestep.terminated[agents], timestep.truncated[agents]
        last = (terminated | truncated).all()
        if self.env.spec.reward == "team":
            goes_on, last = last & ~timestep.last, timestep.last
            terminated, truncated = terminated & ~goes_on, truncated & ~goes_on
        return after, Timestep(
            view,
            view,
            timestep.reward[agents],
            terminated,
            truncated,
            last=last,
            shaping=None if timestep.shaping is None else timestep.shaping[agents],
            extras=_pack(_others_of(self.team, state.view, joint, log_prob, number, timestep)),
            won=timestep.won,
        )

    def extras(self, key: PRNGKeyArray, state: SideState) -> dict[str, Array]:
        """Return the environment's own extras of the step."""
        _, step_key = jax.random.split(key)
        return extras_of(self.env, step_key, state.inner)

    @property
    def scene(self) -> Callable[[SideState], Any]:
        """What to draw of a state, if the environment can be drawn."""
        inner: Callable[[EnvState], Any] = self.env.scene
        return lambda state: inner(state.inner)

    @property
    def pictures(self) -> Callable[[Sequence[Any]], Sequence[Any]]:
        """The environment's own pictures, if it draws by itself."""
        pictures: Callable[[Sequence[Any]], Sequence[Any]] = self.env.pictures
        return pictures

    def join_agents(
        self, transition: Transition, finals: FinalObservations, first_id: int
    ) -> tuple[Transition, FinalObservations]:
        """Return recorded steps of all agents.

        Parameters
        ----------
        transition, finals
            Steps ``(E, T, ...)`` of the side's agents and the final views of their episodes: NumPy.
        first_id
            Policy id of the first of the opponents' policies; the next ones have the next ids.
        """
        extras, view = dict(transition.extras or {}), transition.view
        packed = [extras.pop(name) for name in sorted(extras) if name.startswith(_PACKED)]
        others, after = jax.tree.unflatten(jax.tree.structure(_shapes(self.env, self.team)), packed)
        over = transition.last[..., None] & ~others.terminated
        others = others._replace(
            truncated=others.truncated | over, policy_id=first_id + others.policy_id
        )
        lead = transition.last.shape
        ids = np.asarray(transition.policy_id).reshape(*lead, -1)
        side: Any = transition._replace(
            view=view._replace(state=None),
            last=None,  # type: ignore[arg-type]
            policy_id=np.broadcast_to(ids, (*lead, len(self.team.agents))),  # type: ignore[arg-type]
            extras=None,
        )
        joint = self._join(side, others)
        steps = joint._replace(
            view=joint.view._replace(state=view.state),
            last=transition.last,
            extras=extras or None,
        )
        after = jax.tree.map(lambda leaf: leaf[finals.row, finals.time], after)
        ends = self._join(finals.view._replace(state=None), after, axis=1)
        return steps, finals._replace(view=ends._replace(state=finals.view.state))

    def _join(self, side: ArrayTree, others: ArrayTree, axis: int = 2) -> ArrayTree:
        """Join the rows of the side's agents with the others', in the order of all agents."""
        order = np.argsort((*self.team.agents, *rest_of(self.env.spec, self.team)))
        return jax.tree.map(
            lambda a, b: np.concatenate([np.asarray(a), np.asarray(b)], axis).take(order, axis),
            side,
            others,
        )


def play_side(env: Environment, team: str, opponents: Mapping[str, TeamPolicy]) -> Side:
    """Return an environment whose agents are one side; other policies act for the others.

    Parameters
    ----------
    env
        An environment without autoreset.
    team
        Name of the side whose agents act: a team, or agents of one, joined by commas.
    opponents
        The policy of each other side, by its name. Members of several populations are drawn
        independently.

    Raises
    ------
    OptionError
        The side has all agents; an agent has no policy, or two; or some leaves of observations
        belong to some agents only.
    UnknownNameError
        There is no such team or agent.
    """
    side, spec = find_side(env.spec, team), env.spec
    others = rest_of(spec, side)
    sides = {name: find_side(spec, name).agents for name in opponents}
    for name, agents in sides.items():
        if set(agents) & set(side.agents):
            raise OptionError(f"{name} is of the side that learns: give policies for others only.")
    acting = {agent for agents in sides.values() for agent in agents}
    if missing := [agent for agent in others if agent not in acting]:
        raise OptionError(f"no policy acts for {name_of_side(spec, missing)}: give one.")
    if spec.is_per_agent:
        raise OptionError(
            f"some observations of {spec.name} belong to some agents only, so one side of it "
            "cannot be played."
        )
    seats = tuple(opponent.seat(sides[name]) for name, opponent in opponents.items())
    compose(spec, seats)  # or raise its errors
    return Side(env, side, seats, tuple(x.params for x in opponents.values()), opponents)


def others_of(env: Environment) -> ArrayTree:
    """Return the parameters of the policies that act for others in an environment, if any do."""
    if isinstance(env, Wrapper):
        return others_of(env.env)
    return env.others if isinstance(env, Side) else ()


def with_others(env: Environment, others: ArrayTree) -> Environment:
    """Return an environment in which policies with these parameters act for the others."""
    if isinstance(env, Wrapper):
        return replace(env, env=with_others(env.env, others))
    return replace(env, others=others) if isinstance(env, Side) else env


def without_others(env: Environment) -> Environment:
    """Return an environment without the others' parameters; the same for all of equal shapes.

    What is compiled for it plays any others, which are in `offmarl.rollout.RolloutState.others`.
    """
    if not isinstance(env, Side):
        return env
    leaves, structure = jax.tree.flatten(env.others)
    shapes = tuple((np.shape(leaf), jax.dtypes.result_type(leaf)) for leaf in leaves)
    return _slot(env.env, env.team, env.seats, structure, shapes)


@lru_cache(maxsize=64)
def _slot(
    env: Environment,
    team: Team,
    seats: tuple[Seat, ...],
    structure: Any,
    shapes: tuple[tuple[tuple[int, ...], Any], ...],
) -> Side:
    params = jax.tree.unflatten(structure, [np.zeros(*shape) for shape in shapes])
    return Side(env, team, seats, params)


def rest_of(spec: EnvSpec, side: Team) -> tuple[int, ...]:
    """Return the agents that are not of a side, in order; `OptionError` if there are none."""
    if len(side.agents) == spec.num_agents:
        raise OptionError(
            f"{side.name}: these are all agents of {spec.name or 'the environment'}, and a side "
            "is a part of them: name one team of several, or agents such as "
            f"{name_of_side(spec, (0,))}."
        )
    return tuple(agent for agent in range(spec.num_agents) if agent not in side.agents)


def _part(view: View, agents: Sequence[int]) -> View:
    """Return the view of some agents, with the whole state."""
    observation, legal, alive = take_agents(
        (view.observation, view.legal_actions, view.alive), agents
    )
    return View(observation, view.state, legal, alive)


def _pack(others: ArrayTree) -> dict[str, Any]:
    leaves = jax.tree.leaves(others)
    return {f"{_PACKED}{number:03}": leaf for number, leaf in enumerate(leaves)}


def _others_of(
    side: Team, view: View, action: Array, log_prob: Array, number: Array, timestep: Timestep
) -> tuple[Transition, View]:
    """Return the other agents' part of a step, and of the view after it; both without the state."""
    last: Any = None  # the side's step has it
    step = Transition(
        view._replace(state=None),
        action,
        timestep.reward,
        timestep.terminated,
        timestep.truncated,
        last,
        log_prob,
        number,
    )
    others = [x for x in range(len(number)) if x not in side.agents]
    part: tuple[Transition, View] = take_agents(
        (step, timestep.next_view._replace(state=None)), others
    )
    return part


@lru_cache(maxsize=64)
def _shapes(env: Environment, side: Team) -> tuple[Transition, View]:
    """Return the shapes of the other agents' part of a step."""
    spec = env.spec

    def others(key: PRNGKeyArray) -> tuple[Transition, View]:
        inner, first = env.reset(key)
        action, none = jnp.asarray(no_action(spec)), jnp.zeros(spec.num_agents)
        _, timestep = env.step(key, inner, action)
        return _others_of(side, first.view, action, none, none.astype(jnp.int32), timestep)

    shapes: tuple[Transition, View] = jax.eval_shape(others, jax.random.key(0))
    return shapes


@lru_cache(maxsize=64)
def _spec(env: Any, side: Team) -> EnvSpec:
    packed = {
        name: ArraySpec(leaf.shape, leaf.dtype.name)
        for name, leaf in _pack(_shapes(env, side)).items()
    }
    spec = spec_of(env.spec, side.agents)
    return replace(spec, extras={**spec.extras, **packed})
