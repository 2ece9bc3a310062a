"""The matrix games of matrax (climbing, penalty, and the 2x2 games) as ours."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from offmarl.envs import extras
from offmarl.envs.base import require_positive, restart, transition
from offmarl.envs.spaces import strong
from offmarl.errors import OptionError
from offmarl.types import Discrete, EnvSpec, Timestep, View

_TABLES = {
    "penalty": "penalty_games",
    "no-conflict": "no_conflict_games",
    "conflict": "conflict_games",
}


@dataclass(frozen=True, kw_only=True)
class Matrax:
    """A matrix game for two, repeated ``time_limit`` times; always truncated.

    Parameters
    ----------
    game
        A kind of game.
    number
        Which of its kind; the penalty, for penalty games.
    keep_state
        Show each agent what all did in the round before (-1 before the first); else zeros.
    """

    name: str = ""
    game: str = "climbing"
    number: int = 0
    keep_state: bool = False
    time_limit: int = 500

    def __post_init__(self) -> None:
        require_positive(time_limit=self.time_limit)
        _ = self.wrapped

    @property
    def wrapped(self) -> Any:
        """Matrax's own environment."""
        return _wrap(self.game, self.number, self.keep_state, self.time_limit)

    @property
    def spec(self) -> EnvSpec:
        """Sizes, name and limit."""
        payoff = self.wrapped.payoff_matrix
        return EnvSpec(
            self.name,
            *(2, 2, 4),
            Discrete(int(payoff.shape[1])),
            self.time_limit,
            "team" if (payoff[0] == payoff[1]).all() else "individual",
            "concatenated",
        )

    def reset(self, key: PRNGKeyArray) -> tuple[Any, Timestep]:
        """Start an episode; nothing is random."""
        state, timestep = self.wrapped.reset(key)
        return strong(state), restart(self._view(timestep.observation))

    def step(
        self,
        key: PRNGKeyArray,  # noqa: ARG002
        state: Any,
        action: Array,
    ) -> tuple[Any, Timestep]:
        """Play a round."""
        state, timestep = self.wrapped.step(state, action)
        truncated = jnp.full(2, timestep.last())
        view, reward = self._view(timestep.observation), timestep.reward.astype(jnp.float32)
        return strong(state), transition(view, reward, jnp.zeros(2, bool), truncated)

    def _view(self, observation: Any) -> View:
        seen = observation.agent_obs.astype(jnp.float32)
        legal = jnp.ones((2, self.wrapped.num_actions), bool)
        return View(seen, seen.ravel(), legal, jnp.ones(2, bool))


@lru_cache(maxsize=256)
def _wrap(game: str, number: int, keep_state: bool, time_limit: int) -> Any:
    matrax = extras.load("matrax", "envs")
    if game == "climbing":
        payoff = matrax.climbing_game
    else:
        games = getattr(matrax, _TABLES[game])
        if str(number) not in games:
            raise OptionError(
                f"there is no {game} game {number} in matrax: its numbers are {', '.join(games)}."
            )
        payoff = games[str(number)]
    return matrax.MatrixGame(np.asarray(payoff), keep_state, time_limit)
