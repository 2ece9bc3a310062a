"""Vaults made from vaults: joined, filtered, sampled, split, cut, deduplicated, recoded, mapped.

Every function writes a new vault, which appears at its path whole or not at all. Sources are only
read, a block at a time; they may be anything `offmarl.open` reads, by path or open. What offmarl
wrote is compared with its checksums, unless the source was opened with ``checked=False``. Steps,
final views, causes, log-probabilities and policies are copied unchanged, except what `map` changes.

The new vault has one row with the episodes end to end, in the order of the sources; `map`, and
`recode` by default, keep the rows. An episode whose end is not taken is cut there: ``truncated``,
with the cause "cut" and, if the source has it, the next view as its final view. The provenance
records what was done to which sources.

The command line builds its verbs from these functions: their names, parameters and docstrings.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from offmarl.config import PositiveInt
from offmarl.errors import VaultError
from offmarl.terminal import Progress, quiet
from offmarl.vault.dataset import Dataset, open_vault
from offmarl.vault.format import tables
from offmarl.vault.format.layout import Codec
from offmarl.vault.read.open import SUFFIX
from offmarl.vault.storage.files import built_whole
from offmarl.vault.storage.store import store_of
from offmarl.vault.transform import plan
from offmarl.vault.transform.execute import examine_all, execute
from offmarl.vault.transform.function import MapFunction
from offmarl.vault.transform.mapping import map_columns
from offmarl.vault.transform.plan import AnyVault, StrPath, TransformPlan
from offmarl.vault.transform.selection import Unit, interval, time_interval, whole_episodes


def cat(
    sources: Sequence[AnyVault],
    path: StrPath,
    *,
    codec: Codec | None = None,
    time_limit: int | None = None,
    progress: Progress = quiet,
) -> Dataset:
    """Join vaults into one.

    The vaults are joined in the order given. Policies of different recordings get different ids,
    which ``provenance["origins"]`` maps to the original ones; parts of one recording keep the same
    ids.

    Parameters
    ----------
    sources
        Vaults of one environment.
    path
        The vault to write.
    codec
        raw or zstd; by default the codec of the first source.
    time_limit
        For vaults of other programs that flag the time limit as a termination: the limit. The new
        vault then distinguishes truncation from termination, and its spec has the limit.
    progress
        Shows the progress.

    Raises
    ------
    ShapeError
        The sources differ in their sizes or their environment.
    VaultExistsError
        The path exists.
    OptionError
        There are no sources, or ``time_limit`` is given for vaults that record how episodes ended.
    VaultError
        There is nothing to write, or a vault cannot be read or written.
    """
    return _write(plan.cat(sources, codec, time_limit), path, progress)


def _write(planned: TransformPlan, path: StrPath, progress: Progress) -> Dataset:
    execute(planned, path, progress)
    return open_vault(path)


def filter(
    source: AnyVault | Sequence[AnyVault],
    condition: str,
    path: StrPath,
    *,
    by: Unit = "episodes",
    codec: Codec | None = None,
    progress: Progress = quiet,
) -> Dataset:
    """Select the episodes or steps of a vault that meet a condition.

    For example ``return > 10 and length < 50``, ``policy in (3, 4)``, ``return >= p90``, or
    ``cause == "terminated" and tier != "random"``.

    Parameters
    ----------
    source
        A vault, or several of one environment, as if they were joined.
    condition
        Made of and, or, not, parentheses, comparisons (< <= > >= == != in), arithmetic and p90 (the
        90th percentile over complete episodes), over return (mean over agents), length, policy (its
        id; its name if compared with text), program, tier, source, seed, cause, terminated,
        truncated, complete (the environment ended it, not the recording), row and index.
    path, codec, progress
        As for `cat`.
    by
        steps keeps the intervals of steps that meet the condition, which can then also use the
        reward of a step (mean over agents) and step, its number within the episode.

    Raises
    ------
    ExpressionError
        The condition cannot be parsed, uses what the vault does not record, or nothing meets it.
    VaultError
        As for `cat`.
    """
    return _write(plan.filter(source, condition, by, codec), path, progress)


def sample(
    source: AnyVault | Sequence[AnyVault],
    path: StrPath,
    *,
    steps: int | None = None,
    episodes: int | None = None,
    top: float | None = None,
    match_returns: bool = False,
    like: AnyVault | None = None,
    seed: int = 0,
    codec: Codec | None = None,
    progress: Progress = quiet,
) -> Dataset:
    """Sample the episodes of a vault, or select the best.

    The episodes keep their order.

    Parameters
    ----------
    source
        A vault, or several of one environment, as if they were joined.
    path, codec, progress
        As for `cat`.
    steps
        How many steps, such as 1e5; the last episode is cut short.
    episodes
        How many episodes.
    top
        The fraction of the complete episodes with the highest returns, such as 10% or 0.1.
    match_returns
        Keep the distribution of the returns: draw complete episodes only, from each tenth of the
        returns in equal shares, to within one episode.
    like
        Match the returns of this vault instead; without a number, draw as many episodes as can be
        matched.
    seed
        Random seed.

    Raises
    ------
    OptionError
        The source has too little data, or the options contradict each other.
    VaultError
        As for `cat`.
    """
    planned = plan.sample(source, steps, episodes, top, match_returns, like, seed, codec)
    return _write(planned, path, progress)


def split(
    source: AnyVault,
    path: StrPath,
    *,
    fractions: Sequence[float] | None = None,
    validation: float | None = None,
    seed: int = 0,
    by: str | None = None,
    codec: Codec | None = None,
    progress: Progress = quiet,
) -> dict[str, Dataset]:
    """Split episodes into training, validation and test sets.

    Parameters
    ----------
    source
        A vault.
    path
        NAME.vlt, which must not exist. It will hold train, validation and, for three fractions,
        test: all of them or none.
    fractions
        Shares of the episodes, such as .8 .1 .1, which sum to 1; by default .9 .1.
    validation
        The share for validation; the rest is for training.
    seed
        Random seed.
    by
        A column of policies, policy_AGENT or policy_TEAM: its policies are divided, and not the
        episodes, so that none is in two parts, such as partners that are held out.
    codec, progress
        As for `cat`.

    Returns
    -------
    dict
        The vaults by their names.

    Raises
    ------
    OptionError
        The fractions do not sum to 1, or leave a part empty; or there is no such column.
    VaultError
        As for `cat`.
    """
    vault, fractions = plan.open_checked(source), tables.shares(fractions, validation)
    policies = None if by is None else tables.policies_by(vault.episodes, vault.spec, by)
    parts = tables.split(len(vault), fractions, seed, vault.path, policies)
    final = store_of(path).directory
    if not final.name.endswith(SUFFIX):
        raise VaultError(f"{final} cannot hold several vaults: its name must end in {SUFFIX}.")
    with built_whole(final) as directory:
        examined = examine_all([vault], progress)
        for name, episodes in parts.items():
            pieces = [whole_episodes(vault, episodes)]
            arguments = {"fractions": fractions, "seed": seed, "by": by, "part": name}
            planned = TransformPlan(
                "split", [vault], lambda *_, pieces=pieces: pieces, arguments, codec
            )
            execute(planned, directory / name, progress, examined)
    return {name: open_vault(Path(path) / name) for name in parts}


def slice(
    source: AnyVault,
    path: StrPath,
    *,
    start: int | None = None,
    stop: int | None = None,
    by: Unit = "episodes",
    codec: Codec | None = None,
    provenance: Mapping[str, Any] | None = None,
    progress: Progress = quiet,
) -> Dataset:
    """Extract a range of episodes or time steps.

    Parameters
    ----------
    source
        A vault.
    path, codec, progress
        As for `cat`.
    start
        The first episode or step, counted from 0; negative numbers count from the end.
    stop
        One past the last.
    by
        steps counts the time steps of every row, as ``source[start:stop]`` does, and cuts the
        episodes at the borders.
    provenance
        Additional provenance, a JSON object.

    Raises
    ------
    OptionError
        The interval is empty.
    VaultError
        As for `cat`.
    """
    vault = plan.open_checked(source)
    if by == "steps":
        pieces = time_interval(vault, *interval(start, stop, vault.length))
    else:
        pieces = whole_episodes(vault, np.arange(*interval(start, stop, len(vault))))
    arguments = {"start": start, "stop": stop, "by": by}
    more = provenance or {}
    planned = TransformPlan(
        "slice", [vault], lambda *_: [pieces], arguments, codec, provenance=more
    )
    return _write(planned, path, progress)


def dedup(
    source: AnyVault, path: StrPath, *, codec: Codec | None = None, progress: Progress = quiet
) -> Dataset:
    """Remove duplicate episodes.

    Among episodes with equal steps, final view and cause, the first is kept. Policy ids may differ.

    Parameters
    ----------
    source
        A vault.
    path, codec, progress
        As for `cat`.

    Raises
    ------
    VaultError
        As for `cat`.
    """
    return _write(plan.dedup(source, codec, progress), path, progress)


def recode(
    source: AnyVault | Sequence[AnyVault],
    path: StrPath,
    *,
    codec: Codec | None = None,
    chunk_steps: PositiveInt | None = None,
    layout: Literal["rows", "stream"] = "rows",
    time_limit: int | None = None,
    progress: Progress = quiet,
) -> Dataset:
    """Store a vault with another codec, chunk size or layout.

    Parameters
    ----------
    source
        A vault, or several of one environment, as if they were joined.
    path, time_limit, progress
        As for `cat`.
    codec
        raw to learn from, zstd to distribute; by default that of the source.
    chunk_steps
        Steps of one row that are stored together.
    layout
        rows keeps the rows of the source, and the digest does not change; stream puts all episodes
        end to end in one row, as programs for OG-MARL's vaults expect, and cuts those that are
        still open at the end of a row.

    Raises
    ------
    VaultError
        As for `cat`.
    """
    planned = plan.recode(source, codec, chunk_steps, time_limit, layout == "rows")
    return _write(planned, path, progress)


def map(
    source: AnyVault,
    path: StrPath,
    function: MapFunction | None = None,
    *,
    reward: str | None = None,
    by: Unit = "episodes",
    seed: int = 0,
    progress: Progress = quiet,
) -> Dataset:
    """Change or add columns of a vault: relabel rewards, normalise observations.

    The columns that the function does not return are copied; a column of a new name that begins
    with ``extras.`` is added. Rows, chunks, codec and episodes stay the same, and the table of
    returns follows the new rewards.

    Parameters
    ----------
    source
        A vault. The command line takes several, whose episodes are then in one row.
    path, progress
        As for `cat`.
    function
        A Python function of some steps, as module:function or path/to/file.py:function; in Python
        also the function itself. It gets a mapping from columns to arrays, and returns one of those
        that change.
    reward
        A formula for the new rewards of all agents instead, such as ``reward / 10`` or ``reward -
        0.1 * (step > 50)``. It uses the names of conditions on steps, such as ``extras.cost``; a
        condition counts as 0 or 1.
    by
        What the function gets in a call: an episode, or as many steps as fit in memory. Rewards by
        formula are always computed by steps.
    seed
        Random seed, for a function with a second parameter ``rng``, a NumPy generator. Each call
        gets a new one, which depends on the seed and the data only.

    Raises
    ------
    OptionError
        There is no such function, it failed, or it returned something else than columns.
    UnknownNameError
        The function used or returned a column that does not exist.
    ShapeError, InvalidValueError
        It returned a column of another length, shape or type, or an invalid value such as NaN.
    VaultError
        As for `cat`.

    Examples
    --------
    >>> def scale(steps):
    ...     return {"reward": steps["reward"] / 10}
    >>> offmarl.vault.map("vaults/a.vlt", "vaults/b.vlt", scale)
    """
    map_columns(source, path, function, reward, by, seed, progress)
    return open_vault(path)
