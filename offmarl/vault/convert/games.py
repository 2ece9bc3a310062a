"""Games that were recorded elsewhere as a start and actions, played again in an environment.

Games of Hanabi that humans played, as AH2AC2 ships them (Dizdarevic et al. 2025, 2506.21490), are
in ``.safetensors`` files of G games: ``num_players ()``, ``game_ids``, ``scores`` and ``num_actions
(G,)``, ``actions (G, T, N)`` in JaxMARL's numbers, and ``decks (G, 50, 2)``, colour and rank of the
cards from the top. The players have no names.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from offmarl import envs
from offmarl.errors import VaultError
from offmarl.paths import local
from offmarl.types import Transition
from offmarl.vault.convert.admission import ImportedRow
from offmarl.vault.convert.common import Imported, blocks, origin_of
from offmarl.vault.convert.containers import StrPath, check_layout, readable, require
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
) -> Iterator[ImportedRow]:
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
        batch = [games[min(number, stop - 1)] for number in range(start, start + spans[0][1])]
        starts = jax.tree.map(lambda *x: np.stack(x), *(game.start for game in batch))
        padded = [np.pad(x.actions, ((0, longest - len(x.actions)), (0, 0))) for x in batch]
        results = jax.device_get(compiled(starts, np.stack(padded)))
        for number, game in enumerate(batch[: stop - start]):
            yield _record(game, *jax.tree.map(lambda x, n=number: x[n], results))


def _record(game: Game, first: Any, timesteps: Any) -> ImportedRow:
    """Make a record of a game, from its first view and the timesteps of its actions and more."""
    import jax

    shape, length = game.actions.shape, len(game.actions)
    unknown: Any = np.full(shape, np.nan, np.float32)
    ids: Any = np.broadcast_to(np.asarray(game.policy_ids, np.int32), shape)
    after = jax.tree.map(lambda x: x[:length], timesteps)
    view = jax.tree.map(lambda x, y: np.concatenate([x[None], y[:-1]]), first, after.next_view)
    legal, over = view.legal_actions, after.last.cumsum() > after.last
    allowed = (legal & (game.actions[..., None] == np.arange(legal.shape[-1]))).any(-1)
    expected = np.where(allowed | over[:, None], game.actions, legal.argmax(-1))
    compare(game, "an agent's action", expected, game.actions)
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
    return ImportedRow(steps, cut=cut[None], after=after)


def compare(game: Game, quantity: str, replayed: NumpyArray, recorded: NumpyArray) -> None:
    """Raise `VaultError` for the first of some values ``(T, ...)`` that differs."""
    for at in np.argwhere(replayed != recorded)[:1].tolist():
        label = f"{quantity} {at[1:]}" if at[1:] else quantity
        value, expected = replayed[tuple(at)], np.broadcast_to(recorded, replayed.shape)[tuple(at)]
        raise VaultError(
            f"game {game.name} differs from its replay at step {at[0]}: {label} is {value}, and "
            f"{expected} in the file. It is damaged, or made with other rules than this release of "
            "JaxMARL's. Nothing was converted."
        )


# ---------------------------------------------------------------------------------- AH2AC2

_NAMES = ("num_players", "game_ids", "scores", "num_actions", "decks", "actions")


@contextmanager
def read_ah2ac2(source: StrPath) -> Iterator[Imported]:
    """Read human games of Hanabi in .safetensors, as AH2AC2 ships them."""
    path, safetensors = local(source), require("safetensors.numpy")
    with readable(path):
        arrays: dict[str, Any] = safetensors.load(path.read_bytes())
    check_layout(path, "AH2AC2's", arrays, _NAMES)
    num_players, ids, scores, lengths, decks, actions = (arrays[name] for name in _NAMES)
    shapes = [(), *3 * [ids.shape], (ids.size, 50, 2), (ids.size, *actions.shape[1:2], num_players)]
    are_integers = all(array.dtype.kind in "iu" for array in (num_players, lengths, decks, actions))
    alike = are_integers and [arrays[x].shape for x in _NAMES] == shapes and ids.size > 0
    if not alike or not 0 < lengths.min() <= lengths.max() <= actions.shape[1]:
        listing = ", ".join(f"{name} {arrays[name].dtype}{arrays[name].shape}" for name in _NAMES)
        raise VaultError(
            f"{path} is not of AH2AC2's layout: it has {listing}, or games that are empty or "
            "longer than its actions."
        )
    env: Any = envs.make("jaxmarl/hanabi", num_agents=int(num_players))
    columns = zip(map(str, ids), decks, actions, lengths, strict=True)
    games = [Game(name, deck, moves[:length]) for name, deck, moves, length in columns]

    def begin(deck: Any) -> Any:
        return env.begin(*env.wrapped.reset_from_deck_of_pairs(deck))

    def records() -> Iterator[ImportedRow]:
        for game, record, score in zip(games, play_again(env, begin, games), scores, strict=True):
            returns = record.steps.reward[0, :, 0].cumsum()
            compare(game, "the score", np.where(record.steps.last[0], returns, score), score)
            yield record

    origin = {**origin_of("ah2ac2", path), "games": ids.tolist()}
    yield Imported(env.spec, origin, records(), len(games))
