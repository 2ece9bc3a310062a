"""Adapter for the two-player games of pgx (Koyamada et al. 2023, arXiv 2303.17503).

The agents are the seats in the order of play: pgx deals out the seats to its players at random,
the adapter undoes it. The seats play in turn, and both are alive all the time: the one that waits
has a single legal action, the last, which does nothing. Each seat is a team of its own.

Games of pgx that may go on forever, or that are not for two, are in ``catalogue.toml`` under
``left_out``. Checked against pgx 2.6.0.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, PRNGKeyArray

from offmarl._imports import import_optional
from offmarl.envs.base import restart, transition
from offmarl.envs.registry import release
from offmarl.envs.spaces import strengthen_types, trace_spec
from offmarl.types import Discrete, EnvSpec, Timestep, View


class PgxState(NamedTuple):
    """The state of pgx and what the adapter adds to it."""

    inner: Any
    first: Int[Array, ""]
    """Number of the player, in pgx, that has the first seat."""
    time: Int[Array, ""]
    history: Float[Array, "T A"]
    """The actions so far, one-hot; T = 0 if they are not observed."""


@dataclass(frozen=True)
class Pgx:
    """A game of pgx; create it by name with `offmarl.envs.make`.

    Boards are observed as pgx shows them, by each seat from its own side. Card games are vectors:
    what pgx shows, and with ``history`` all actions so far, one-hot. pgx alone merges information
    sets: the opening of Kuhn poker looks like the view after a pass, and Leduc hold'em does not
    show who raised.

    Parameters
    ----------
    name
        The full name.
    time_limit
        Actions in the longest game; pgx ends its games by then.
    history
        Whether observations show the actions so far; boards do not have it.
    """

    name: str
    time_limit: int
    history: bool = True

    def __post_init__(self) -> None:
        _ = self.spec

    @property
    def wrapped(self) -> Any:
        """The environment of pgx."""
        return _game(self.name.removeprefix("pgx/").partition(":")[0])

    @property
    def spec(self) -> EnvSpec:
        """Sizes, names and limits."""
        return _spec(self)

    def reset(self, key: PRNGKeyArray) -> tuple[PgxState, Timestep]:
        """Start a game: deal the cards, if there are any."""
        return self.begin(strengthen_types(self.wrapped.init(key)))

    def begin(self, inner: Any) -> tuple[PgxState, Timestep]:
        """Start a game in a state of pgx."""
        (num_actions,) = inner.legal_action_mask.shape
        history = jnp.zeros((self.time_limit if self.history else 0, num_actions))
        state = PgxState(inner, inner.current_player, jnp.zeros((), jnp.int32), history)
        return state, restart(self._view(state))

    def step(
        self, key: PRNGKeyArray, state: PgxState, action: Int[Array, "N"]
    ) -> tuple[PgxState, Timestep]:
        """Play the action of the seat to move.

        An illegal action loses the game, and one that waits out of turn is the game's last action.
        """
        inner, first, time, history = state
        (num_actions,) = inner.legal_action_mask.shape
        move = action[(inner.current_player != first).astype(jnp.int32)]
        move = jnp.minimum(move, num_actions - 1)
        after = strengthen_types(self.wrapped.step(inner, move))
        if self.history:
            history = history.at[time].set(jax.nn.one_hot(move, num_actions))
        state = PgxState(after, first, time + 1, history)
        over = jnp.broadcast_to(after.terminated, 2)
        reward = after.rewards[self._players(state)].astype(jnp.float32)
        return state, transition(self._view(state), reward, over, jnp.zeros(2, bool))

    def _players(self, state: PgxState) -> Int[Array, "N"]:
        return jnp.stack([state.first, 1 - state.first])

    def _view(self, state: PgxState) -> View:
        players, inner = self._players(state), state.inner
        # pgx's public `observe` is for the player to move only.
        arrays = jax.vmap(lambda player: self.wrapped._observe(inner, player))(players)
        is_vector = arrays.ndim == 2
        if is_vector:
            history = jnp.broadcast_to(state.history.ravel(), (2, state.history.size))
            arrays = jnp.concatenate([arrays.astype(jnp.float32), history], axis=1)
        moves = (players == inner.current_player) & ~inner.terminated
        legal = moves[:, None] & inner.legal_action_mask
        return View(
            observation=arrays,
            state=arrays.ravel() if is_vector else jnp.zeros(0),  # boards would be stored twice
            legal_actions=jnp.concatenate([legal, ~moves[:, None]], axis=1),
            alive=jnp.ones(2, bool),
        )


@lru_cache(maxsize=16)
def _game(name: str) -> Any:
    """Create the environment of pgx once: JAX compiles once for the same object."""
    with jax.ensure_compile_time_eval():  # the modules of pgx hold arrays
        return import_optional("pgx", "games").make(name)


@lru_cache(maxsize=16)
def _spec(env: Pgx) -> EnvSpec:
    return trace_spec(
        env,
        Discrete,
        time_limit=env.time_limit,
        reward="individual",
        state="concatenated",
        teams=(0, 1),
        team_names=("first", "second"),
        package=release("pgx"),
    )
