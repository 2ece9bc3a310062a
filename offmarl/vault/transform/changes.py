"""What transforms of several vaults do, so that one process or many tasks can do it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from offmarl.errors import OptionError
from offmarl.vault import tables
from offmarl.vault.digest import digest
from offmarl.vault.layout import Codec
from offmarl.vault.reader import Reader
from offmarl.vault.transform import sampling, selection
from offmarl.vault.transform.function import Function, load, parse_reward
from offmarl.vault.transform.pipeline import AnyVault, Select, opened, opened_all, opened_with_limit
from offmarl.vault.transform.policy_ids import Source, name_of
from offmarl.vault.transform.selection import Pieces, Pool, Unit


class Change(NamedTuple):
    """A transform: what it takes of which vaults, and how it is stored.

    The new vault has the pieces one after the other, in one row.
    """

    operation: str
    arguments: Callable[[], Mapping[str, Any]]
    """Returns the arguments for the lineage; it may read vaults."""
    vaults: Sequence[Reader]
    select: Select
    codec: Codec | None = None
    chunk_steps: int | None = None
    reads_steps: bool = False
    """Whether the selection reads steps, and so cannot be made from the episode tables."""
    function: "MappedFunction | None" = None
    """A function that changes the columns of what was taken."""
    settings: Mapping[str, Any] = {}
    """A JSON object of what the result depends on, besides the vaults."""


class MappedFunction(NamedTuple):
    """The arguments of `offmarl.vault.map`."""

    function: str | None
    reward: str | None
    by: Unit
    seed: int

    def load(self) -> Function | None:
        """Import the function, to find errors early; None for a formula."""
        if self.reward is not None:
            parse_reward(self.reward)
        return None if self.function is None else load(self.function, self.seed)


def joining(
    sources: Sequence[AnyVault], codec: Codec | None = None, time_limit: int | None = None
) -> Change:
    """Return what `offmarl.vault.cat` does."""
    vaults = opened_with_limit(sources, time_limit)
    settings = {"codec": codec, "time_limit": time_limit}
    return Change("cat", dict, vaults, _everything, codec, settings=settings)


def filtering(
    source: AnyVault | Sequence[AnyVault],
    condition: str,
    by: Unit = "episodes",
    codec: Codec | None = None,
) -> Change:
    """Return what `offmarl.vault.filter` does."""
    selection.parse_condition(condition, by)  # before anything slow
    arguments = {"condition": condition, "by": by}

    def select(sources: Sequence[Source], within: Sequence[Pieces] | None) -> list[Pieces]:
        return selection.meeting(sources, condition, by, within if by == "steps" else None)

    return Change(
        "filter",
        lambda: arguments,
        opened_all(source),
        select,
        codec,
        reads_steps=by == "steps",
        settings={**arguments, "codec": codec},
    )


def sampling_episodes(
    source: AnyVault | Sequence[AnyVault],
    steps: int | None = None,
    episodes: int | None = None,
    top: float | None = None,
    match_returns: bool = False,
    like: AnyVault | None = None,
    seed: int = 0,
    codec: Codec | None = None,
) -> Change:
    """Return what `offmarl.vault.sample` does."""
    sampling.check_amount(steps, episodes, top, match_returns, like is not None)
    vaults = opened_all(source)
    models = vaults if like is None else [opened(like)]
    matching = match_returns or like is not None
    given: dict[str, Any] = {"steps": steps, "episodes": episodes, "top": top, "seed": seed}

    def arguments() -> dict[str, Any]:
        if not matching:
            return given
        digests = [one.store.driver.digest or digest(one) for one in models]
        described = [
            {"vault": name_of(one), "digest": found}
            for one, found in zip(models, digests, strict=True)
        ]
        return {**given, "match_returns": described[0] if len(described) == 1 else described}

    def select(sources: Sequence[Source], within: Sequence[Pieces] | None) -> list[Pieces]:
        del within
        pool = Pool([source.vault for source in sources])
        if top is None and not matching:
            order = tables.shuffled(len(pool.length), seed)
            return sampling.take_first(pool, order, steps, episodes)
        if top is not None:
            best = pool.scored[sampling.best_first(pool.returns)]
            return pool.whole(best[: max(1, round(top * len(best)))])
        wanted = Pool(models).returns
        order = pool.scored[sampling.matched(pool.returns, wanted, seed)]
        return sampling.take_first(pool, order, steps, episodes)

    likeness = [str(model.path) for model in models] if matching else None
    settings = {**given, "match_returns": likeness, "codec": codec}
    return Change("sample", arguments, vaults, select, codec, settings=settings)


def recoding(
    source: AnyVault | Sequence[AnyVault],
    codec: Codec | None = None,
    chunk_steps: int | None = None,
    time_limit: int | None = None,
) -> Change:
    """Return what `offmarl.vault.recode` does with the layout "stream"."""
    vaults = opened_with_limit(source, time_limit)
    arguments = {"codec": codec, "chunk_steps": chunk_steps, "layout": "stream"}
    settings = {**arguments, "time_limit": time_limit}
    return Change(
        "recode",
        lambda: arguments,
        vaults,
        _everything,
        codec,
        chunk_steps,
        settings=settings,
    )


def mapping_columns(
    source: AnyVault | Sequence[AnyVault],
    function: str | None = None,
    reward: str | None = None,
    by: Unit = "episodes",
    seed: int = 0,
) -> Change:
    """Return what `offmarl.vault.map` does, but that all episodes are in one row."""
    if (function is None) == (reward is None):
        raise OptionError("give a function (--with) or a formula of rewards (--reward).")
    mapped = MappedFunction(function, reward, by, seed)
    loaded = mapped.load()
    settings = {"reward": reward, "by": by, "seed": seed}
    settings |= {} if loaded is None else {"function": loaded.name, "sha256": loaded.sha256}
    return Change(
        "map",
        dict,
        opened_all(source),
        _everything,
        function=mapped,
        settings=settings,
    )


def _everything(sources: Sequence[Source], within: Sequence[Pieces] | None) -> list[Pieces]:
    del within
    return [selection.everything(source.vault) for source in sources]


CHANGES: Mapping[str, Callable[..., Change]] = {
    "cat": joining,
    "filter": filtering,
    "sample": sampling_episodes,
    "recode": recoding,
    "map": mapping_columns,
}
"""The change of each transform that tasks can share, made from its arguments."""
