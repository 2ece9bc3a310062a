"""Games of Hanabi that humans played, as AH2AC2 ships them (Dizdarevic et al. 2025, 2506.21490).

A ``.safetensors`` file holds G games: ``num_players ()``, ``game_ids``, ``scores`` and
``num_actions (G,)``, ``actions (G, T, N)`` in JaxMARL's numbers, and ``decks (G, 50, 2)``, colour
and rank of the cards from the top. The players have no names.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from offmarl import envs
from offmarl.errors import VaultError
from offmarl.paths import local
from offmarl.vault.convert.admission import Record
from offmarl.vault.convert.common import Imported
from offmarl.vault.convert.containers import StrPath, check_layout, readable, require, sha256
from offmarl.vault.convert.games import Game, compare, play_again

_NAMES = ("num_players", "game_ids", "scores", "num_actions", "decks", "actions")


@contextmanager
def read_ah2ac2(source: StrPath) -> Iterator[Imported]:
    """Read human games of Hanabi in .safetensors, as AH2AC2 ships them."""
    path, safetensors = local(source), require("safetensors.numpy")
    with readable(path, require("safetensors").SafetensorError, KeyError):
        arrays: dict[str, Any] = safetensors.load(path.read_bytes())
    check_layout(path, "AH2AC2's", arrays, _NAMES)
    num_players, ids, scores, lengths, decks, actions = (arrays[name] for name in _NAMES)
    shapes = [(), *3 * [ids.shape], (ids.size, 50, 2), (ids.size, *actions.shape[1:2], num_players)]
    whole = all(array.dtype.kind in "iu" for array in (num_players, lengths, decks, actions))
    alike = whole and [arrays[x].shape for x in _NAMES] == shapes and ids.size > 0
    if not alike or not 0 < lengths.min() <= lengths.max() <= actions.shape[1]:
        found = ", ".join(f"{name} {arrays[name].dtype}{arrays[name].shape}" for name in _NAMES)
        raise VaultError(
            f"{path} is not of AH2AC2's layout: it has {found}, or games that are empty or longer "
            "than its actions."
        )
    env: Any = envs.make("jaxmarl/hanabi", num_agents=int(num_players))
    listed = zip(map(str, ids), decks, actions, lengths, strict=True)
    games = [Game(name, deck, taken[:length]) for name, deck, taken, length in listed]

    def begin(deck: Any) -> Any:
        return env.begin(*env.wrapped.reset_from_deck_of_pairs(deck))

    def records() -> Iterator[Record]:
        for game, record, score in zip(games, play_again(env, begin, games), scores, strict=True):
            returns = record.steps.reward[0, :, 0].cumsum()
            compare(game, "the score", np.where(record.steps.last[0], returns, score), score)
            yield record

    origin = {"format": "ah2ac2", "file": path.name, "sha256": sha256(path), "games": ids.tolist()}
    yield Imported(env.spec, origin, records(), len(games))
