"""Finding out from a vault's steps what nobody noted of them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from offmarl.vault import encoding, layout, tables
from offmarl.vault.layout import NumpyArray
from offmarl.vault.reading import quirks

if TYPE_CHECKING:
    from offmarl.vault.reading.reader import Vault


def episodes(vault: "Vault", start: int = 0) -> Iterator[tables.Table]:
    """Find the episodes of the steps from one on, at which new ones begin."""
    running = tables.none_running(vault.rows, vault.spec.num_agents, start)
    names = [name for name in layout.SIGNALS if name in vault.leaves]
    for begin, stop in vault.blocks(names, start):
        signals = encoding.signals_of(vault.read(begin, stop, leaves=names))
        ended, running = tables.scan(running, begin, signals)
        yield ended
    yield running[running["length"] > 0]


def highest_action(vault: "Vault") -> int:
    """Return the highest of a vault's discrete actions; 0 if there are none."""
    names = ["actions"]
    blocks = (vault.read(*block, leaves=names)["actions"] for block in vault.blocks(names))
    return max((int(actions.max()) for actions in blocks), default=0)


def is_padded(vault: "Vault") -> bool:
    """Whether observations are, as far as the first of them tell."""
    names = ["observations"]
    _, stop = next(vault.blocks(names), (0, 0))
    return quirks.is_padded(vault.read(0, stop, leaves=names)["observations"])


def limited(vault: "Vault", table: tables.Table) -> NumpyArray:
    """Return the steps, ``(B, T)``, at which a time limit is flagged as termination.

    ``table`` has the vault's episodes as they are on disk.
    """
    if vault.time_limit is None:
        return np.broadcast_to(False, (vault.rows, vault.length))
    steps: NumpyArray = np.zeros((vault.rows, vault.length), bool)
    ended = table[quirks.by_limit(table, vault.time_limit)]
    steps[ended["row"], ended["start"] + ended["length"] - 1] = True
    return steps
