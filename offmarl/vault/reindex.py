"""Finding the episodes of a vault again from its steps, to check its table or to replace it."""

from collections.abc import Iterator

import numpy as np

from offmarl.vault import encoding, layout, tables
from offmarl.vault.dataset import Dataset
from offmarl.vault.faults import Fault
from offmarl.vault.scan import Books
from offmarl.vault.tables import Signals, Table

_MAX_FAULTS = 100


def reindex(vault: Dataset, stop: int, known: Table) -> tuple[Table, Table]:
    """Find the episodes in the first ``stop`` steps of each row.

    Parameters
    ----------
    vault
        Whose steps to read.
    stop
        Where to end.
    known
        What is known of the episodes: nothing in the steps tells of those that were given up, nor
        what is an end by the recording and what by the environment.

    Returns
    -------
    ended, running
        As `tables.scan` returns them.
    """
    given_up = known[(known["cause"] == tables.OPEN) & (_ends(known) < stop)]
    running = tables.none_running(vault.rows, vault.spec.num_agents)
    found = [known[:0]]
    names = [name for name in (*layout.SIGNALS, layout.POLICY_IDS) if name in vault.leaves]
    for begin, end in vault.blocks(names):
        if begin < stop:
            arrays = vault.read(begin, min(end, stop), leaves=names)
            signals = _with_ends(encoding.signals_of(arrays), given_up, begin)
            ended, running = tables.scan(running, begin, signals)
            found.append(ended)
    ended = np.concatenate(found)
    ended["cause"] = np.where(_among(ended, given_up), tables.OPEN, ended["cause"])
    cut = known[known["cause"] == tables.CUT]
    by_limit = ended["cause"] == tables.TRUNCATED
    ended["cause"] = np.where(by_limit & _among(ended, cut), tables.CUT, ended["cause"])
    return ended, running


def differences(vault: Dataset, own: Books) -> Iterator[Fault]:
    """Yield what the episode table says otherwise than the steps do."""
    table, head = own.table, own.head
    if table is None or head is None:
        return
    ended, running = reindex(vault, head.length, table[: head.episodes])
    found, kept = (_sorted(x) for x in (np.concatenate([ended, running]), table))
    found = found[found["length"] > 0]
    if len(found) != len(kept):
        yield Fault(f"the steps make {len(found)} episodes, and the table has {len(kept)}")
        return
    names = [name for name in found.dtype.names or () if name != "final"]
    same = [_equal(found[name], kept[name]) for name in names]
    for episode in np.flatnonzero(~np.all(same, axis=0))[:_MAX_FAULTS].tolist():
        wrong = ", ".join(
            name for name, equal in zip(names, same, strict=True) if not equal[episode]
        )
        yield Fault(
            f"the episode table does not say what the steps do of its {wrong}",
            episodes=(episode,),
        )


def _equal(a: Table, b: Table) -> Table:
    equal = (a == b) | ((a != a) & (b != b))  # noqa: PLR0124 - NaN
    return equal.all(tuple(range(1, equal.ndim)))


def _sorted(table: Table) -> Table:
    return table[np.lexsort((table["start"], table["row"]))]


def _ends(table: Table) -> Table:
    return table["start"] + table["length"] - 1


def _with_ends(signals: Signals, given_up: Table, begin: int) -> Signals:
    """Return the signals with an end where an episode was given up."""
    time = _ends(given_up) - begin
    here = (time >= 0) & (time < signals.reward.shape[1])
    terminated = signals.terminated.copy()
    terminated[given_up["row"][here], time[here]] = True
    return signals._replace(terminated=terminated)


def _among(table: Table, others: Table) -> Table:
    """Whether each episode of a table is one of the others."""
    known = set(zip(others["row"].tolist(), _ends(others).tolist(), strict=True))
    mine = zip(table["row"].tolist(), _ends(table).tolist(), strict=True)
    return np.fromiter((end in known for end in mine), bool, len(table))
