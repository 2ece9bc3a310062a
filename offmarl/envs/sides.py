"""One side of an adversarial environment: its agents act, and fixed policies act for the others.

`play_side` makes an environment whose agents are one team. Learners see an environment with one
team; what is recorded holds all agents (see `Side.whole`). `compose` makes one policy of several,
each of which acts for some of the agents.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray
from numpy.typing import NDArray

from offmarl.envs.base import Environment, EnvState, Scene, extras_of, restart
from offmarl.errors import OptionError, ShapeError
from offmarl.teams import Team, find_team, spec_of, teams_of
from offmarl.types import (
    ArraySpec,
    ArrayTree,
    Continuous,
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
    """A policy with its parameters, which acts for the agents of one team.

    Equal only to itself, so that an environment that holds one can be a static argument.

    Parameters
    ----------
    policy, params
        The policy, and its parameters.
    agents
        The agents that the policy acts for, in order: those of a team, or all of the environment
        that it was made for.
    name
        What to call it, such as "scripted" or the directory of a run.
    about
        A JSON object that identifies it, for recordings.
    """

    policy: Policy
    params: ArrayTree
    agents: tuple[int, ...]
    name: str = ""
    about: Mapping[str, Any] = field(default_factory=dict)


class Seat(NamedTuple):
    """Agents, and the policy that acts for them."""

    agents: tuple[int, ...]
    """The agents whose actions are taken from the policy."""
    policy: Policy
    sees: tuple[int, ...]
    """The agents that the policy acts for, in order; ``agents`` are among them."""


def take_agents(tree: ArrayTree, agents: Sequence[int], axis: int = 0) -> ArrayTree:
    """Return the rows of some agents of a tree of arrays whose ``axis`` counts agents."""
    index = np.array(agents, int)
    return jax.tree.map(lambda leaf: leaf.take(index, axis), tree)


def compose(spec: EnvSpec, seats: Sequence[Seat]) -> Policy:
    """Return one policy of several, each for some of the agents.

    Its parameters and its carry are tuples with an entry for each seat. Agents without a seat do
    action 0 with a log-probability of 0.

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
    """
    taken = [agent for seat in seats for agent in seat.agents]
    if len(set(taken)) < len(taken) or not set(taken) <= set(range(spec.num_agents)):
        raise ShapeError(
            f"policies act for the agents {taken} of {spec.num_agents}: give each agent one policy."
        )
    # With NumPy, because policies are cached: JAX's arrays could be those of a trace.
    rest, silent = _no_action(spec), np.zeros(spec.num_agents, np.float32)

    def fill(parts: Sequence[Array], rest: NDArray[Any]) -> Array:
        whole = jnp.asarray(rest)
        for seat, part in zip(seats, parts, strict=True):
            chosen = np.array([seat.sees.index(agent) for agent in seat.agents])
            whole = whole.at[np.array(seat.agents)].set(part[chosen])
        return whole

    def act(
        params: ArrayTree,
        carry: ArrayTree,
        observation: ArrayTree,
        legal_actions: Bool[Array, "N A"],
        key: PRNGKeyArray,
    ) -> tuple[Array, Float[Array, "N"], ArrayTree]:
        keys = jax.random.split(key, len(seats))
        found = []
        for i, seat in enumerate(seats):
            seen, legal = take_agents((observation, legal_actions), seat.sees)
            found.append(seat.policy.act(params[i], carry[i], seen, legal, keys[i]))
        actions, log_probs, carries = zip(*found, strict=True)
        return fill(actions, rest), fill(log_probs, silent), carries

    def log_prob(
        params: ArrayTree,
        carry: ArrayTree,
        observation: ArrayTree,
        legal_actions: Bool[Array, "N A"],
        action: Array,
    ) -> tuple[Float[Array, "N"], ArrayTree]:
        found = [
            seat.policy.log_prob(
                params[i], carry[i], *take_agents((observation, legal_actions, action), seat.sees)
            )
            for i, seat in enumerate(seats)
            if seat.policy.log_prob is not None
        ]
        values, carries = zip(*found, strict=True)
        return fill(values, silent), carries

    def after_step(
        carry: ArrayTree, reward: Float[Array, "N"], done: Bool[Array, "N"]
    ) -> ArrayTree:
        return tuple(
            remember(seat.policy, own, *take_agents((reward, done), seat.sees))
            for own, seat in zip(carry, seats, strict=True)
        )

    policies = [seat.policy for seat in seats]
    return Policy(
        initial_carry=lambda: tuple(policy.initial_carry() for policy in policies),
        act=act,
        log_prob=log_prob if all(policy.log_prob for policy in policies) else None,
        after_step=after_step if any(policy.after_step for policy in policies) else None,
        draws=lambda params: any(
            policy.draws(own) for policy, own in zip(policies, params, strict=True)
        ),
    )


# ---------------------------------------------------------------------------------- one side


class SideState(NamedTuple):
    """The state of a `Side`."""

    inner: EnvState
    view: View
    """The view of all agents."""
    carry: ArrayTree
    """The carry of the others' policies."""


class _Others(NamedTuple):
    """The other agents' part of a step, without the state."""

    view: View
    action: Array
    log_prob: Array
    reward: Array
    terminated: Array
    truncated: Array
    next_view: View | None


@dataclass(frozen=True)
class Side:
    """An environment whose agents are one team of another; fixed policies act for the others.

    Its episodes end when they have ended for all agents of the team. The other agents' part of each
    step is in its extras, from which `whole` makes steps of all agents.

    Parameters
    ----------
    env
        The environment of all agents.
    team
        The team whose agents act.
    opponents
        Who acts for each other team, by its name.
    """

    env: Environment
    team: Team
    opponents: tuple[tuple[str, TeamPolicy], ...]

    @property
    def spec(self) -> EnvSpec:
        """The spec of the team's agents, with the others' part of a step as extras."""
        return _spec(self)

    @property
    def recorded_spec(self) -> EnvSpec:
        """The spec of what `whole` returns: that of all agents."""
        return self.env.spec

    def reset(self, key: PRNGKeyArray) -> tuple[SideState, Timestep]:
        """Start an episode."""
        inner, timestep = self.env.reset(key)
        state = SideState(inner, timestep.view, _policy(self).initial_carry())
        return state, restart(self._own(timestep.view))

    def step(
        self, key: PRNGKeyArray, state: SideState, action: Array
    ) -> tuple[SideState, Timestep]:
        """Take one step with the actions of the team's agents."""
        policy, mine = _policy(self), np.array(self.team.agents)
        act_key, step_key = jax.random.split(key)
        params = [own.params for _, own in self.opponents]
        theirs, log_prob, carry = policy.act(
            params, state.carry, state.view.observation, state.view.legal_actions, act_key
        )
        joint = theirs.at[mine].set(action)
        inner, timestep = self.env.step(step_key, state.inner, joint)
        carry = remember(policy, carry, timestep.reward, timestep.terminated | timestep.truncated)
        after, view = SideState(inner, timestep.next_view, carry), self._own(timestep.next_view)
        terminated, truncated = timestep.terminated[mine], timestep.truncated[mine]
        return after, Timestep(
            view,
            view,
            timestep.reward[mine],
            terminated,
            truncated,
            last=(terminated | truncated).all(),
            shaping=None if timestep.shaping is None else timestep.shaping[mine],
            extras=_pack(self._others(state.view, joint, log_prob, timestep)),
        )

    def extras(self, key: PRNGKeyArray, state: SideState) -> dict[str, Array]:
        """Return the environment's own extras of the step."""
        _, step_key = jax.random.split(key)
        return extras_of(self.env, step_key, state.inner) or {}

    def scene(self, state: SideState) -> Scene:
        """Return the positions to draw, if the environment has them."""
        drawn: Any = self.env
        return drawn.scene(state.inner)

    def whole(
        self, transition: Transition, finals: FinalObservations, first_id: int
    ) -> tuple[Transition, FinalObservations]:
        """Return recorded steps of all agents.

        Parameters
        ----------
        transition, finals
            Steps ``(E, T, ...)`` of the team's agents and the final views of their episodes: NumPy.
        first_id
            Policy id of the first opponents; those of the next team have the next id.
        """
        extras, view = dict(transition.extras or {}), transition.view
        packed = [extras.pop(name) for name in sorted(extras) if name.startswith(_PACKED)]
        others = jax.tree.unflatten(jax.tree.structure(_shapes(self)), packed)
        over = transition.last[..., None] & ~others.terminated
        others = others._replace(truncated=others.truncated | over)
        own = _Others(
            view._replace(state=None),
            transition.action,
            transition.behaviour_log_prob,
            transition.reward,
            transition.terminated,
            transition.truncated,
            next_view=None,
        )
        joined = self._join(own, others._replace(next_view=None))
        whole = transition._replace(
            view=joined.view._replace(state=view.state),
            action=joined.action,
            reward=joined.reward,
            terminated=joined.terminated,
            truncated=joined.truncated,
            behaviour_log_prob=joined.log_prob,
            policy_id=self._ids(transition, first_id),
            extras=extras or None,
        )
        after = jax.tree.map(lambda leaf: leaf[finals.row, finals.time], others.next_view)
        ends = self._join(finals.view._replace(state=None), after, axis=1)
        return whole, finals._replace(view=ends._replace(state=finals.view.state))

    def _ids(self, transition: Transition, first_id: int) -> Any:
        """Return the policy ids of all agents: the recorded ones, and those of the opponents."""
        names, lead = [name for name, _ in self.opponents], transition.last.shape
        own = transition.policy_id.reshape(*lead, -1)
        team_of = {x: team.name for team in teams_of(self.env.spec) for x in team.agents}
        ids = [first_id + names.index(team_of[agent]) for agent in _others(self)]
        return self._join(
            np.broadcast_to(own, (*lead, len(self.team.agents))),
            np.broadcast_to(np.array(ids, own.dtype), (*lead, len(ids))),
        )

    def _join(self, own: ArrayTree, others: ArrayTree, axis: int = 2) -> ArrayTree:
        """Join the rows of the team's agents with the others', in the order of all agents."""
        order = np.argsort((*self.team.agents, *_others(self)))
        return jax.tree.map(
            lambda a, b: np.concatenate([np.asarray(a), np.asarray(b)], axis).take(order, axis),
            own,
            others,
        )

    def _own(self, view: View) -> View:
        return _part(view, self.team.agents)

    def _others(self, view: View, action: Array, log_prob: Array, timestep: Timestep) -> _Others:
        whole = _Others(
            view._replace(state=None),
            action,
            log_prob,
            timestep.reward,
            timestep.terminated,
            timestep.truncated,
            timestep.next_view._replace(state=None),
        )
        others: _Others = take_agents(whole, _others(self))
        return others


def play_side(env: Environment, team: str, opponents: Mapping[str, TeamPolicy]) -> Side:
    """Return an environment whose agents are one team; fixed policies act for the others.

    Parameters
    ----------
    env
        An environment with several teams, without autoreset.
    team
        Name of the team whose agents act.
    opponents
        Who acts for each other team, by its name.

    Raises
    ------
    OptionError
        The environment has one team; a team has no player; or some leaves of observations belong to
        some agents only.
    UnknownNameError
        There is no such team.
    """
    own = find_team(env.spec, team)
    others = [one for one in teams_of(env.spec) if one != own]
    for one in others:
        if one.name not in opponents:
            raise OptionError(f"no policy acts for the team {one.name}: give one.")
    for name in opponents:
        if find_team(env.spec, name) == own:
            raise OptionError(f"{name} is the team that learns: give policies for the others only.")
    if env.spec.is_per_agent:
        raise OptionError(
            f"some observations of {env.spec.name} belong to some agents only, so one side of it "
            "cannot be played."
        )
    return Side(env, own, tuple((one.name, opponents[one.name]) for one in others))


def _others(side: Side) -> tuple[int, ...]:
    """Return the agents of the other teams, in order."""
    return tuple(x for x in range(side.env.spec.num_agents) if x not in side.team.agents)


def _part(view: View, agents: Sequence[int]) -> View:
    """Return the view of some agents, with the whole state."""
    observation, legal, alive = take_agents(
        (view.observation, view.legal_actions, view.alive), agents
    )
    return View(observation, view.state, legal, alive)


def _pack(others: ArrayTree) -> dict[str, Any]:
    leaves = jax.tree.leaves(others)
    return {f"{_PACKED}{number:03}": leaf for number, leaf in enumerate(leaves)}


def _no_action(spec: EnvSpec) -> NDArray[Any]:
    """Return zeros of the shape of a joint action."""
    if isinstance(spec.action, Continuous):
        return np.zeros((spec.num_agents, spec.action_size), np.float32)
    return np.zeros(spec.num_agents, np.int32)


@lru_cache(maxsize=64)
def _policy(side: Side) -> Policy:
    """Return the policy of all opponents."""
    teams = {team.name: team for team in teams_of(side.env.spec)}
    seats = [
        Seat(teams[name].agents, player.policy, player.agents) for name, player in side.opponents
    ]
    return compose(side.env.spec, seats)


@lru_cache(maxsize=64)
def _shapes(side: Side) -> _Others:
    """Return the shapes of the other agents' part of a step."""
    spec = side.env.spec

    def others(key: PRNGKeyArray) -> _Others:
        inner, first = side.env.reset(key)
        action = jnp.asarray(_no_action(spec))
        _, timestep = side.env.step(key, inner, action)
        return side._others(first.view, action, jnp.zeros(spec.num_agents), timestep)

    shapes: _Others = jax.eval_shape(others, jax.random.key(0))
    return shapes


@lru_cache(maxsize=64)
def _spec(side: Side) -> EnvSpec:
    packed = {
        name: ArraySpec(leaf.shape, leaf.dtype.name) for name, leaf in _pack(_shapes(side)).items()
    }
    spec = spec_of(side.env.spec, side.team.agents)
    return replace(spec, extras={**spec.extras, **packed})
