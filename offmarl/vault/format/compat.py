"""Vaults of other programs: infers what they do not record, and corrects deviations on reading.

Such vaults have no episode table and no spec, so both are inferred from the data. Each deviation
is reported by a name, its quirk. The vaults are of `offmarl.vault.read.reader.Reader`.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from offmarl import gate
from offmarl.errors import VaultError, VaultLayoutError
from offmarl.records import MOST_ACTIONS
from offmarl.types import Discrete, EnvSpec, Transition, View, flatten_tree, map_tree
from offmarl.vault.format import encoding, layout, tables
from offmarl.vault.format.layout import Leaf, NumpyArray
from offmarl.vault.format.tables import Table

LIMIT_UNKNOWN = "time limit unknown"
NOT_FINITE = "not finite"
ILLEGAL_ACTIONS = "illegal actions"
IMPOSSIBLE_ACTIONS = "impossible actions"

MEANINGS = {
    "several rows": "episodes lie in several rows, each on its own time axis",
    "state per agent": "each agent has a state of its own: they are concatenated",
    "action axis": "actions have one more axis, of length one: it is dropped",
    "no legal actions": "legal actions are unknown: all actions count as legal",
    "no state": "there is no global state: all observations are used as the state, if they are "
    "vectors",
    "no terminals": "terminations are unknown: no episode terminates",
    "no truncations": "truncations are unknown",
    "padded observations": "observations are padded with -inf, which is read as 0",
    "time limit terminal": "the time limit is flagged as termination and read as truncation",
    LIMIT_UNKNOWN: "all episodes of the greatest length are flagged as terminated: if that "
    "is a time limit, give it (--time-limit, or time_limit in Python)",
    NOT_FINITE: "some observations, states or rewards are NaN or infinite and are kept "
    "unchanged; batches end an episode before the first of them, and episodes without a finite "
    "return are excluded from mean returns",
    ILLEGAL_ACTIONS: "some actions of living agents are illegal by the recorded mask; batches "
    "leave out these steps",
    "no legal action": "some living agents have no legal action, and are kept unchanged",
    IMPOSSIBLE_ACTIONS: "some actions are outside the action space and are kept unchanged; "
    "batches end an episode before the first that is not finite",
    "flags other than 0 and 1": "some flags are neither 0 nor 1 and count as 1",
    "impossible log-probabilities": "some log-probabilities are infinite or above 0 and are "
    "kept unchanged",
    "negative policies": "some policy ids are below -1, which means unknown",
}
"""All quirks, and how they are handled."""

FAULTS = {
    "episodes_cut": "{:,} episodes are cut off before values that are not finite.",
    "steps_left_out": "{:,} steps of these episodes are left out.",
    "ends_without_flag": "{:,} steps lead to another observation than that of the next step, "
    "without a flag of an end: episodes are cut off there.",
    "final_views_of_resets": "{:,} final observations are the first ones of the next episode, as "
    "environments that reset in their own step give them: they count as unknown. If the reset is a "
    "step of its own, leave out the first of each episode.",
    "final_views_left_out": "{:,} final observations are not finite, and count as unknown.",
    "steps_without_end": "at no step have all agents a flag of an end: all {:,} steps count as "
    "one episode that was cut off.",
}
"""Descriptions of changes, by their names in the provenance, under "faults"."""

_ABSENT = {
    "infos.legals": "no legal actions",
    "infos.state": "no state",
    "terminals": "no terminals",
    "truncations": "no truncations",
}


def sentences(faults: Any) -> Iterator[str]:
    """Yield a sentence for each fault of a provenance."""
    counts = faults if isinstance(faults, Mapping) else {}
    for name, text in FAULTS.items():
        if isinstance(count := counts.get(name), int):
            yield text.format(count)


def recorded_quirks(provenance: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the quirks recorded in the provenance of a vault of offmarl that was imported."""
    noted = provenance.get("quirks")
    return tuple(quirk for quirk in MEANINGS if isinstance(noted, list) and quirk in noted)


def sound_episodes(vault: Any) -> tables.Episodes | None:
    """Return the episodes up to their first step that is not finite; None if all are finite.

    Episodes that begin with such a step have length 0, and final views that are not finite are
    unknown. The data is read only where it may have such values: where offmarl recorded the quirk,
    or another program wrote it to this machine.
    """
    if not (_may_have(vault, NOT_FINITE) or _may_have(vault, IMPOSSIBLE_ACTIONS)):
        return None
    episodes = vault.episodes
    length, final = episodes.length.copy(), episodes.final.copy()
    begins = episodes.row * vault.length + episodes.start
    for start, stop in vault.blocks():
        steps = vault.transitions(start, stop)
        fine = is_finite(steps) & np.isfinite(steps.action).all(tuple(range(2, steps.action.ndim)))
        bad_rows, bad_times = np.nonzero(~fine)
        episode = np.searchsorted(begins, bad_rows * vault.length + start + bad_times, "right") - 1
        np.minimum.at(length, episode, start + bad_times - episodes.start[episode])
    with_final = np.flatnonzero(final >= 0)
    if len(with_final):
        view = vault.final_views(final[with_final])
        final[with_final[~views_are_finite(view, 1)]] = -1
    final[length < episodes.length] = -1
    changed = (length < episodes.length).any() or (final != episodes.final).any()
    return episodes._replace(length=length, final=final) if changed else None


def illegal_steps(vault: Any) -> NumpyArray | None:
    """Return the steps of each episode, ``(M,)``, in which a living agent has an illegal action.

    None if there are none. As for `sound_episodes`, not all data is read.
    """
    names = ["actions", "infos.legals", "infos.alive"]
    if not _may_have(vault, ILLEGAL_ACTIONS) or not {*names} <= vault.leaves.keys():
        return None
    begins = vault.episodes.row * vault.length + vault.episodes.start
    counts: NumpyArray = np.zeros(len(begins), np.int64)
    for start, stop in vault.blocks(names):
        actions, legal, alive = vault.read(start, stop, leaves=names).values()
        wrong = find_illegal(actions.reshape(alive.shape), legal, alive)
        if wrong is not None:
            row, time = np.nonzero(wrong.any(-1))
            at = row * vault.length + start + time
            np.add.at(counts, np.searchsorted(begins, at, "right") - 1, 1)
    return counts if counts.any() else None


def _may_have(vault: Any, quirk: str) -> bool:
    """Whether a vault on this machine may have a quirk that only reading it would show."""
    if vault.is_remote:
        if quirk == NOT_FINITE and vault.native and quirk in vault.quirks:
            raise VaultError(
                f"{vault.path} has values that are not finite, which no batch may have: pull it "
                "first, so that they can be found."
            )
        return False
    return not vault.native or bool(vault.unverified) or quirk in vault.quirks


def find_illegal(
    actions: NumpyArray, legal: NumpyArray, alive: NumpyArray | None
) -> NumpyArray | None:
    """Find actions of living agents that the mask forbids, among those of the action space."""
    if actions.dtype.kind not in "iu" or legal.all():
        return None
    inside = (actions >= 0) & (actions < legal.shape[-1])
    indices = np.where(inside, actions, 0)[..., None].astype(np.int64)
    wrong = inside & (np.take_along_axis(legal, indices, -1)[..., 0] == 0)
    wrong = wrong if alive is None else wrong & (alive != 0)
    return wrong if wrong.any() else None


def is_finite(steps: Transition) -> NumpyArray:
    """Return the mask ``(B, T)`` of steps whose observations, state and rewards are finite."""
    reward: NumpyArray = np.isfinite(steps.reward).all(-1)
    return reward & views_are_finite(steps.view, 2)


def views_are_finite(view: View, axes: int) -> NumpyArray:
    """Return the mask of views that are finite, over the first ``axes`` axes of their arrays."""
    are_finite: NumpyArray = np.ones(np.shape(view.alive)[:axes], bool)
    for leaf in (*flatten_tree(view.observation).values(), *flatten_tree(view.state).values()):
        if gate.is_float(leaf.dtype) and not (finite := np.isfinite(leaf)).all():
            are_finite &= finite.all(tuple(range(axes, leaf.ndim)))
    return are_finite


def ended_by_limit(episodes: Table, time_limit: int | None) -> NumpyArray:
    """Return the mask of episodes that a time limit ended although they are flagged terminated."""
    if time_limit is None:
        return np.zeros(len(episodes), bool)
    return (episodes["cause"] == tables.TERMINATED) & (episodes["length"] >= time_limit)


def normalise(steps: Transition, limits: NumpyArray) -> Transition:
    """Correct padded observations, and ends by a time limit."""
    limit = limits[..., None] & steps.terminated
    return steps._replace(
        view=steps.view._replace(
            observation=map_tree(_unpad, steps.view.observation),
            state=map_tree(_unpad, steps.view.state),
        ),
        terminated=steps.terminated & ~limit,
        truncated=steps.truncated | limit,
    )


def _unpad(values: NumpyArray) -> NumpyArray:
    if not gate.is_float(values.dtype):
        return values
    padding = np.isneginf(values)
    return np.where(padding, values.dtype.type(0), values) if padding.any() else values


def infer_spec(vault: Any) -> EnvSpec:
    """Infer the environment's sizes from the arrays of a vault of another program."""
    spec = encoding.spec_of(vault.leaves)
    if spec.action == Discrete(0):
        names = ["actions"]
        blocks = (vault.read(*block, leaves=names)["actions"] for block in vault.blocks(names))
        highest = max((int(actions.max()) for actions in blocks), default=0)
        if not 0 <= highest < MOST_ACTIONS:  # the masks of legal actions have an entry for each
            raise VaultLayoutError(
                f"{vault.path} has actions up to {highest}, and no mask of legal ones: actions are "
                f"numbers from 0, below {MOST_ACTIONS:,}."
            )
        spec = dataclasses.replace(spec, action=Discrete(highest + 1))
    return dataclasses.replace(spec, time_limit=vault.time_limit)


def infer_episodes(vault: Any, record: np.dtype[Any], start: int) -> Iterator[Table]:
    """Yield the episodes from a step on; new episodes begin there in all rows."""
    names = [name for name in layout.SIGNALS if name in vault.leaves]
    blocks = vault.blocks(names, start)  # which compares the rows with the data first
    running = tables.none_running(vault.rows, record, start)
    for begin, stop in blocks:
        signals = encoding.signals_of(vault.read(begin, stop, leaves=names))
        episodes, running = tables.scan(running, begin, signals)
        yield episodes
    yield running[running["length"] > 0]


def find_quirks(vault: Any, table: Table) -> tuple[str, ...]:
    """Return the quirks of another program's vault; ``table`` holds its episodes as on disk."""
    leaves: Mapping[str, Leaf] = vault.leaves
    state, actions = leaves.get(layout.STATE), leaves["actions"]
    names = {*leaves, *(layout.STATE for name in leaves if name.startswith(layout.STATE))}
    quirks = {
        "several rows": vault.rows > 1,
        "state per agent": state is not None and len(state.shape) > 1,
        "action axis": actions.dtype.kind in "biu" and len(actions.shape) > 1,
        **{quirk: name not in names for name, quirk in _ABSENT.items()},
        "padded observations": _is_padded(vault),
        "time limit terminal": ended_by_limit(table, vault.time_limit).any(),
        LIMIT_UNKNOWN: vault.time_limit is None and may_have_limit(vault.episodes),
        NOT_FINITE: not np.isfinite(table["returns"]).all(),
    }
    return tuple(quirk for quirk, is_present in quirks.items() if is_present)


def may_have_limit(episodes: tables.Episodes) -> bool:
    """Whether the longest episodes, several, all terminated: a time limit may have ended them."""
    ended = episodes.take(episodes.cause != tables.CAUSES[tables.OPEN])
    longest = ended.terminated[ended.length == ended.length.max(initial=0)]
    return len(longest) > 1 and bool(longest.all())


def _is_padded(vault: Any) -> bool:
    """Whether the first observations are padded with minus infinity."""
    leaves, is_of = vault.leaves.items(), partial(encoding.is_of, layout.OBSERVATIONS)
    names = [name for name, leaf in leaves if is_of(name) and gate.is_float(leaf.dtype)]
    if not names:
        return False
    _, stop = next(vault.blocks(names), (0, 0))
    return any(np.isneginf(x).any() for x in vault.read(0, stop, leaves=names).values())


def limited_steps(vault: Any, table: Table) -> NumpyArray:
    """Return the mask ``(B, T)`` of steps where a time limit is flagged as termination.

    ``table`` holds the vault's episodes as on disk.
    """
    if vault.time_limit is None:
        return np.broadcast_to(False, (vault.rows, vault.length))
    steps: NumpyArray = np.zeros((vault.rows, vault.length), bool)
    episodes = table[ended_by_limit(table, vault.time_limit)]
    steps[episodes["row"], episodes["start"] + episodes["length"] - 1] = True
    return steps
