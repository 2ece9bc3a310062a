"""Small games that are solved: XOR, Bridge, and rock-paper-scissors.

XOR and Bridge are from AlberDICE (Matsunaga et al. 2023, arXiv 2311.02194) and behave as in the
datasets published with it: data with several ways to coordinate misleads agents that imitate
independently.
"""

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from offmarl.config import Positive, PositiveInt, Validated
from offmarl.envs.base import MARKS, Scene, plain_scene, restart, transition
from offmarl.types import Discrete, EnvSpec, Timestep, View

_XOR_PAYOFF = np.array([[0.0, 1.0], [1.0, -2.0]], np.float32)
_XOR_OBSERVATION = np.array([0.0, 1.0, 0.0, 1.0], np.float32)

_BRIDGE_FREE = np.array([[c == "." for c in row] for row in ("..##..", "......", "..##..")])
_BRIDGE_START = np.array([[1, 2], [1, 3]], np.int32)
_BRIDGE_GOAL = np.array([[2, 5], [0, 0]], np.int32)
_BRIDGE_MOVES = np.array([[0, 0], [-1, 0], [1, 0], [0, 1], [0, -1]], np.int32)


class XorState(NamedTuple):
    """The number of rounds played."""

    time: Int[Array, ""]


@dataclass(frozen=True, kw_only=True)
class Xor(Validated):
    """The XOR matrix game, played ``time_limit`` times: two agents, two actions, one state.

    The team's reward is 1 if the agents choose different actions, 0 for (0, 0) and -2 for (1, 1).
    Episodes are always truncated. Uniform play has a mean return of 0.
    """

    name: str = ""
    time_limit: PositiveInt = 50

    @property
    def optimal_return(self) -> float:
        """The return of choosing different actions in every round."""
        return float(self.time_limit)

    @property
    def spec(self) -> EnvSpec:
        """Sizes, name and limit."""
        return EnvSpec(self.name, 2, 4, 4, Discrete(2), self.time_limit)

    def reset(self, key: PRNGKeyArray) -> tuple[XorState, Timestep]:
        """Start an episode; nothing is random."""
        return XorState(jnp.zeros((), jnp.int32)), restart(_xor_view())

    def step(
        self, key: PRNGKeyArray, state: XorState, action: Int[Array, "2"]
    ) -> tuple[XorState, Timestep]:
        """Play a round."""
        time = state.time + 1
        reward = jnp.full(2, jnp.asarray(_XOR_PAYOFF)[action[0], action[1]])
        truncated = jnp.full(2, time >= self.time_limit)
        return XorState(time), transition(
            _xor_view(), reward, terminated=jnp.zeros(2, bool), truncated=truncated
        )


def _xor_view() -> View:
    constant = jnp.asarray(_XOR_OBSERVATION)
    return View(
        observation=jnp.tile(constant, (2, 1)),
        state=constant,
        legal_actions=jnp.ones((2, 2), bool),
        alive=jnp.ones(2, bool),
    )


@dataclass(frozen=True, kw_only=True)
class RockPaperScissors(Validated):
    """Rock-paper-scissors: two opponents choose at once, and the winner gets 1 from the other.

    The actions are rock, paper and scissors. A win with rock pays ``rock``: in equilibrium both
    play rock, paper and scissors in the proportions 1 : rock : 1.
    """

    name: str = ""
    rock: Positive = 1.0

    @property
    def spec(self) -> EnvSpec:
        """Sizes, name and teams."""
        names = ("first", "second")
        return EnvSpec(
            self.name, 2, 1, 1, Discrete(3), 1, "individual", teams=(0, 1), team_names=names
        )

    def reset(self, key: PRNGKeyArray) -> tuple[tuple[()], Timestep]:
        """Start a game."""
        return (), restart(_rps_view())

    def step(
        self, key: PRNGKeyArray, state: tuple[()], action: Int[Array, "2"]
    ) -> tuple[tuple[()], Timestep]:
        """Play the game."""
        wins = jnp.array([self.rock, 1.0, 1.0])[action] * ((action - action[::-1]) % 3 == 1)
        over = jnp.ones(2, bool)
        return (), transition(_rps_view(), wins - wins[::-1], over, ~over)


def _rps_view() -> View:
    return View(jnp.ones((2, 1)), jnp.ones(1), jnp.ones((2, 3), bool), jnp.ones(2, bool))


class BridgeState(NamedTuple):
    """Positions of the agents and the time."""

    position: Int[Array, "2 2"]
    """Row and column of each agent."""
    time: Int[Array, ""]


@dataclass(frozen=True, kw_only=True)
class Bridge(Validated):
    """Two agents must pass each other on a bridge that is wide enough for one.

    The grid is ``1.##..`` / ``......`` / ``..##.2``: blocks ``#``, and the goals of agent 2 (top
    left) and agent 1 (bottom right). The agents start on the bridge, face to face. Actions: stay,
    up, down, right, left. An agent on its goal is done: it stays there and does not block the
    other; when both are done the episode terminates. The team's reward is -0.1 times the mean
    Euclidean distance to the goals. Either agent can make way, and the episode then takes 8 steps.

    As in the published datasets, both agents are always alive and all actions are always legal.
    """

    name: str = ""
    time_limit: PositiveInt = 50

    optimal_return: ClassVar[float] = -1.2354525
    """Found by searching all joint paths; the best path steps aside on the far side."""

    @property
    def spec(self) -> EnvSpec:
        """Sizes, name and limit."""
        return EnvSpec(self.name, 2, 8, 8, Discrete(5), self.time_limit)

    def reset(self, key: PRNGKeyArray) -> tuple[BridgeState, Timestep]:
        """Start an episode; nothing is random."""
        state = BridgeState(jnp.asarray(_BRIDGE_START), jnp.zeros((), jnp.int32))
        return state, restart(_bridge_view(state.position))

    def step(
        self, key: PRNGKeyArray, state: BridgeState, action: Int[Array, "2"]
    ) -> tuple[BridgeState, Timestep]:
        """Move both agents."""
        position, time = _bridge_move(state.position, action), state.time + 1
        distance = jnp.linalg.norm((position - _BRIDGE_GOAL).astype(jnp.float32), axis=-1)
        over = _done(position).all()
        return BridgeState(position, time), transition(
            _bridge_view(position),
            reward=jnp.full(2, -0.1 * distance.mean()),
            terminated=jnp.full(2, over),
            truncated=jnp.full(2, ~over & (time >= self.time_limit)),
        )

    def scene(self, state: BridgeState) -> Scene:
        """Return the positions to draw; blocks are cells with value 1."""
        rows, columns = _BRIDGE_FREE.shape

        def place(cell: Int[Array, "2 2"]) -> Float[Array, "2 2"]:
            return jnp.stack([cell[:, 1] + 0.5, rows - cell[:, 0] - 0.5], -1)

        return plain_scene(
            columns,
            place(state.position),
            team=jnp.arange(2),
            marks=place(jnp.asarray(_BRIDGE_GOAL)),
            mark=jnp.full(2, MARKS.index("site")),
            cells=jnp.asarray(~_BRIDGE_FREE[::-1].T, jnp.float32),
        )


def _bridge_move(position: Int[Array, "2 2"], action: Int[Array, "2"]) -> Int[Array, "2 2"]:
    """Move the agents by the rules of the published data, whose order matters."""
    done, moves = _done(position), jnp.asarray(_BRIDGE_MOVES)[action]
    last_cell = np.array(_BRIDGE_FREE.shape) - 1
    target = jnp.clip(position + jnp.where(done[:, None], 0, moves), 0, last_cell)
    free = jnp.asarray(_BRIDGE_FREE)[target[:, 0], target[:, 1]]
    target = jnp.where(free[:, None], target, position)
    swap = _same(target[0], position[1]) & _same(target[1], position[0])
    target = jnp.where(swap, position, target)
    home = _same(target, jnp.asarray(_BRIDGE_GOAL))  # an agent can always enter its own goal

    stands_in_way = _same(target[0], position[1]) & _same(target[1], position[1]) & ~done[1]
    first = jnp.where(stands_in_way & ~home[0], position[0], target[0])
    taken = _same(target[1], first) & ~done[0]
    second = jnp.where(taken & ~home[1], position[1], target[1])
    return jnp.stack([first, second])


def _same(a: Int[Array, "*n 2"], b: Int[Array, "*n 2"]) -> Bool[Array, "*n"]:
    return (a == b).all(-1)


def _done(position: Int[Array, "2 2"]) -> Bool[Array, "2"]:
    return _same(position, jnp.asarray(_BRIDGE_GOAL))


def _bridge_view(position: Int[Array, "2 2"]) -> View:
    everything = jnp.concatenate([position, _BRIDGE_GOAL], -1).ravel().astype(jnp.float32)
    return View(
        observation=jnp.tile(everything, (2, 1)),
        state=everything,
        legal_actions=jnp.ones((2, 5), bool),
        alive=jnp.ones(2, bool),
    )
