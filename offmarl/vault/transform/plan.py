"""Plans of transforms, which `offmarl.vault.transform.execute` carries out."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from offmarl.errors import OptionError
from offmarl.terminal import Progress
from offmarl.types import EnvSpec
from offmarl.vault.check.digest import digest, episode_digests
from offmarl.vault.format import tables
from offmarl.vault.format.layout import Codec
from offmarl.vault.read.open import open_reader
from offmarl.vault.read.reader import Reader
from offmarl.vault.transform import conditions, selection
from offmarl.vault.transform.episode_set import EpisodeSet
from offmarl.vault.transform.function import Function, load, parse_reward
from offmarl.vault.transform.lineage import LineageSource, name_of
from offmarl.vault.transform.selection import Pieces, Pool, Unit, whole_episodes

StrPath = str | os.PathLike[str]
AnyVault = StrPath | Reader
"""A vault, open or by its path."""

Select = Callable[[Sequence[LineageSource], Sequence[Pieces] | None], Sequence[Pieces]]
"""Selects pieces of each source. If it has to read steps, it reads those of the given whole
episodes of each source; None stands for all."""


class TransformPlan(NamedTuple):
    """A transform: the selection from its vaults, and the layout of the result.

    The new vault has the pieces one after the other in one row, unless it keeps the rows.
    """

    operation: str
    vaults: Sequence[Reader]
    select: Select
    arguments: Mapping[str, Any] = {}
    """For the lineage; a JSON object."""
    codec: Codec | None = None
    chunk_steps: int | None = None
    spec: EnvSpec | None = None
    """The spec of the new vault; None for that of the sources."""
    like: Sequence[Reader] = ()
    """Vaults that the selection depends on, which the lineage names with their digests."""
    keeps_rows: bool = False
    """Whether the new vault has the rows of its only source, and all episodes."""
    reads_steps: bool = False
    """Whether the selection reads steps, and so cannot be made from the episode tables."""
    provenance: Mapping[str, Any] = {}
    """Additional provenance."""

    def described(self) -> dict[str, Any]:
        """Return the arguments with the digests of the vaults in ``like``, which may be read."""
        likeness = [{"vault": name_of(x), "digest": x.store.digest or digest(x)} for x in self.like]
        match = likeness[0] if len(likeness) == 1 else likeness
        return {**self.arguments, **({"match_returns": match} if likeness else {})}

    @property
    def settings(self) -> dict[str, Any]:
        """The settings that determine the result, besides the sources; a JSON object."""
        return {
            **self.arguments,
            "codec": self.codec,
            "chunk_steps": self.chunk_steps,
            "like": [str(vault.path) for vault in self.like],
            "time_limits": [vault.time_limit for vault in self.vaults],
        }


def open_checked(vault: AnyVault | EpisodeSet) -> Reader:
    """Open a vault, checked, unless it is open."""
    if isinstance(vault, EpisodeSet) and not isinstance(vault, Reader):
        raise OptionError(f"{vault!r} is a view: give vaults, and filter them by a condition.")
    return vault if isinstance(vault, Reader) else open_reader(vault)


def open_all(vaults: AnyVault | Sequence[AnyVault], time_limit: int | None = None) -> list[Reader]:
    """Open one vault or several; vaults of other programs get the time limit."""
    several = [vaults] if isinstance(vaults, str | os.PathLike | Reader | EpisodeSet) else [*vaults]
    if not several:
        raise OptionError("no vaults to join: give at least one vault.")
    readers = [open_checked(vault) for vault in several]
    if time_limit is None:
        return readers
    if all(vault.native for vault in readers):
        names = ", ".join(str(vault.path) for vault in readers)
        raise OptionError(
            f"{names}: these vaults record how episodes ended, so leave the time limit out."
        )
    return [x if x.native else open_reader(x.path, time_limit=time_limit) for x in readers]


def cat(
    sources: Sequence[AnyVault], codec: Codec | None = None, time_limit: int | None = None
) -> TransformPlan:
    """Plan `offmarl.vault.cat`."""
    return TransformPlan("cat", open_all(sources, time_limit), take_all, codec=codec)


def filter(
    source: AnyVault | Sequence[AnyVault],
    condition: str,
    by: Unit = "episodes",
    codec: Codec | None = None,
) -> TransformPlan:
    """Plan `offmarl.vault.filter`."""
    conditions.parse_condition(condition, by)  # before anything slow

    def select(sources: Sequence[LineageSource], within: Sequence[Pieces] | None) -> list[Pieces]:
        return conditions.take_meeting(sources, condition, by, within if by == "steps" else None)

    arguments, of_steps = {"condition": condition, "by": by}, by == "steps"
    return TransformPlan("filter", open_all(source), select, arguments, codec, reads_steps=of_steps)


def sample(
    source: AnyVault | Sequence[AnyVault],
    steps: int | None = None,
    episodes: int | None = None,
    top: float | None = None,
    match_returns: bool = False,
    like: AnyVault | None = None,
    seed: int = 0,
    codec: Codec | None = None,
) -> TransformPlan:
    """Plan `offmarl.vault.sample`."""
    selection.check_amount(steps, episodes, top, match_returns, like is not None)
    vaults = open_all(source)
    models = vaults if like is None and match_returns else [open_checked(like)] if like else []

    def select(*_: object) -> list[Pieces]:
        pool = Pool(vaults)
        if top is not None:
            best = pool.scored[np.argsort(-pool.returns, kind="stable")]  # ties keep their order
            return selection.take_first(pool, best, None, max(1, round(top * len(best))))
        if models:
            order = pool.scored[selection.match_returns(pool.returns, Pool(models).returns, seed)]
        else:
            order = tables.shuffle_episodes(len(pool.length), seed)
        return selection.take_first(pool, order, steps, episodes)

    arguments = {"steps": steps, "episodes": episodes, "top": top, "seed": seed}
    return TransformPlan("sample", vaults, select, arguments, codec, like=models)


def dedup(source: AnyVault, codec: Codec | None, progress: Progress) -> TransformPlan:
    """Plan `offmarl.vault.dedup`."""
    vault = open_checked(source)

    def select(*_: object) -> list[Pieces]:
        with progress("compare", vault.num_steps) as advance:
            hashes = episode_digests(
                vault, policies=False, advance=lambda steps: advance(steps * vault.rows)
            )
        return [whole_episodes(vault, np.unique(hashes, return_index=True)[1])]

    return TransformPlan("dedup", [vault], select, codec=codec)


def recode(
    source: AnyVault | Sequence[AnyVault],
    codec: Codec | None = None,
    chunk_steps: int | None = None,
    time_limit: int | None = None,
    keeps_rows: bool = False,
) -> TransformPlan:
    """Plan `offmarl.vault.recode`, by default with the layout "stream"."""
    vaults = open_all(source, time_limit)
    if keeps_rows and len(vaults) > 1:
        raise OptionError("the rows of several vaults cannot be kept: give --layout stream.")
    layout = "rows" if keeps_rows else "stream"
    arguments = {"codec": codec, "chunk_steps": chunk_steps, "layout": layout}
    return TransformPlan(
        "recode", vaults, take_all, arguments, codec, chunk_steps, keeps_rows=keeps_rows
    )


def map(
    source: AnyVault | Sequence[AnyVault],
    function: str | None = None,
    reward: str | None = None,
    by: Unit = "episodes",
    seed: int = 0,
) -> TransformPlan:
    """Plan `offmarl.vault.map`, but with all episodes in one row, which only tasks carry out."""
    mapper = checked_function(function, reward, seed)
    arguments: dict[str, Any] = {"reward": reward, "by": by, "seed": seed}
    arguments |= {} if mapper is None else {"function": mapper.name, "sha256": mapper.sha256}
    return TransformPlan("map", open_all(source), take_all, arguments)


def checked_function(function: Any, reward: str | None, seed: int) -> Function | None:
    """Import a function, or else parse a formula, before anything slow."""
    if (function is None) == (reward is None):
        raise OptionError("give one of --with (a function) and --reward (a formula).")
    if reward is not None:
        parse_reward(reward)
    return None if function is None else load(function, seed)


def take_all(sources: Sequence[LineageSource], within: Sequence[Pieces] | None) -> list[Pieces]:
    """Select all episodes of all sources."""
    del within
    return [whole_episodes(source.vault) for source in sources]


SHARED: Mapping[str, Callable[..., TransformPlan]] = {
    "cat": cat,
    "filter": filter,
    "sample": sample,
    "recode": recode,
    "map": map,
}
"""The plans that tasks can share, made from the arguments of their verbs."""
