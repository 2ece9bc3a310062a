"""Games that were recorded elsewhere as a start and actions, played again in an environment."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from offmarl.errors import VaultError
from offmarl.types import Transition
from offmarl.vault.convert.admission import Record
from offmarl.vault.convert.common import blocks
from offmarl.vault.format import layout
from offmarl.vault.format.layout import NumpyArray


class Game(NamedTuple):
    """A game of T steps: how it begins, actions ``(T, N)``, and the ids of the players."""

    name: str
    start: Any
    actions: NumpyArray
    policy_ids: Sequence[int] | int = -1


def play_again(
    env: Any, begin: Callable[[Any], tuple[Any, Any]], games: Sequence[Game]
) -> Iterator[Record]:
    """Yield games as they go in an environment; ``begin`` makes its first state and timestep.

    As many games as fit in a block are played side by side, and stay so to its last step.
    """
    import jax

    def play(start: Any, actions: Any) -> Any:
        state, first = begin(start)
        return first.view, jax.lax.scan(partial(env.step, jax.random.key(0)), state, actions)[1]

    longest = max(len(game.actions) for game in games)
    step_bytes = sum(leaf.step_bytes for leaf in layout.leaves(env.spec).values())
    spans, compiled = blocks(len(games), longest * step_bytes), jax.jit(jax.vmap(play))
    for start, stop in spans:
        # The last block repeats a game, so that all blocks have one shape and compile once.
        some = [games[min(number, stop - 1)] for number in range(start, start + spans[0][1])]
        starts = jax.tree.map(lambda *x: np.stack(x), *(game.start for game in some))
        padded = [np.pad(x.actions, ((0, longest - len(x.actions)), (0, 0))) for x in some]
        played = jax.device_get(compiled(starts, np.stack(padded)))
        for number, game in enumerate(some[: stop - start]):
            yield _record(game, *jax.tree.map(lambda x, n=number: x[n], played))


def _record(game: Game, first: Any, played: Any) -> Record:
    """Make a record of a game, from its first view and the timesteps of its actions and more."""
    import jax

    shape, length = game.actions.shape, len(game.actions)
    unknown: Any = np.full(shape, np.nan, np.float32)
    ids: Any = np.broadcast_to(np.asarray(game.policy_ids, np.int32), shape)
    after = jax.tree.map(lambda x: x[:length], played)
    view = jax.tree.map(lambda x, y: np.concatenate([x[None], y[:-1]]), first, after.next_view)
    legal, over = view.legal_actions, after.last.cumsum() > after.last
    allowed = (legal & (game.actions[..., None] == np.arange(legal.shape[-1]))).any(-1)
    taken = np.where(allowed | over[:, None], game.actions, legal.argmax(-1))
    compare(game, "an agent's action", taken, game.actions)
    compare(game, "the end", after.last[:-1], np.False_)
    cut = (np.arange(length) == length - 1) & ~after.last  # the players stopped
    steps = Transition(
        view=view,
        action=game.actions,
        reward=after.reward,
        terminated=after.terminated,
        truncated=after.truncated | cut[:, None],
        last=after.last | cut,
        behaviour_log_prob=unknown,
        policy_id=ids,
    )
    steps, after = jax.tree.map(lambda x: x[None], (steps, after.next_view))
    return Record(steps, cut=cut[None], after=after)


def compare(game: Game, what: str, played: NumpyArray, recorded: NumpyArray) -> None:
    """Raise `VaultError` for the first of some values ``(T, ...)`` that differs."""
    for at in np.argwhere(played != recorded)[:1].tolist():
        where = f"{what} {at[1:]}" if at[1:] else what
        here, there = played[tuple(at)], np.broadcast_to(recorded, played.shape)[tuple(at)]
        raise VaultError(
            f"game {game.name} differs from its replay at step {at[0]}: {where} is "
            f"{here}, and {there} in the file. It is damaged, or made with other rules than this "
            "release of JaxMARL's. Nothing was converted."
        )
