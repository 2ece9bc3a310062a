"""Vaults made of vaults: joined, filtered, sampled, split, cut, and coded anew.

Every function makes a new vault, which appears at its path whole or not at all; the sources are
only read, a block at a time, and may be any that `open_vault` reads, by path or open. What is taken
of a vault of ours is compared with its checksums, unless it was opened without. Steps, final views,
causes, log-probabilities and policies are as they were. Episodes come end to end in one row, in the
order of their sources, unless `recode` is asked to keep the rows. An episode whose end is not taken
is cut off where it stops: ``truncated``, with the cause "cut" and the next view, if the source has
one, as its final view.

The provenance says what was done to what; see `offmarl.vault.transform.lineage`.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from offmarl.errors import OptionError, VaultError
from offmarl.vault.dataset import Vault
from offmarl.vault.digest import episode_digests
from offmarl.vault.layout import Codec
from offmarl.vault.open import open_vault
from offmarl.vault.progress import Progress, quiet
from offmarl.vault.transform import columns, sampling, selection
from offmarl.vault.transform.lineage import Source, name_of
from offmarl.vault.transform.making import (
    AnyVault,
    StrPath,
    as_vault,
    derive,
    examine,
    rewrite,
    together,
    with_limit,
    write,
)
from offmarl.vault.transform.selection import Pieces, Unit


def cat(
    sources: Sequence[AnyVault],
    path: StrPath,
    *,
    time_limit: int | None = None,
    codec: Codec | None = None,
    progress: Progress = quiet,
) -> Vault:
    """Join vaults, one after the other.

    Policies of different sources get ids of their own, which ``provenance["origins"]`` maps to the
    ones they had; parts of one recording keep theirs in common.

    Parameters
    ----------
    sources
        Vaults of one environment.
    path
        The vault to make, as for `offmarl.vault.create`.
    time_limit
        Of sources that other programs wrote, as for `offmarl.vault.open_vault`: what is made tells
        truncations from terminations by it, and keeps it in its spec.
    codec
        As for `create`; that of the first source by default.
    progress
        Shows how far it is.

    Raises
    ------
    ShapeError
        The sources differ in their sizes or their environment.
    VaultExistsError
        There is something at the path.
    VaultError
        There is nothing to write, or a vault cannot be read or written.
    """
    if not sources:
        raise VaultError("there is nothing to join: name one vault at least.")
    chosen = [(source, _everything) for source in with_limit(sources, time_limit)]
    return derive("cat", {}, chosen, path, codec, progress)


def _everything(source: Source) -> Pieces:
    return selection.everything(source.vault)


def filter(
    source: AnyVault,
    condition: str,
    path: StrPath,
    *,
    by: Unit = "episodes",
    codec: Codec | None = None,
    progress: Progress = quiet,
) -> Vault:
    """Take the episodes, or the steps, that a condition holds for.

    Parameters
    ----------
    source, path, codec, progress
        As for `cat`.
    condition
        Such as ``return > 10 and length < 50``, ``policy in (3, 4)``, ``return >= p90``,
        ``cause == "terminated" and tier != "random"``. Of episodes it can ask for ``return`` (mean
        over agents), ``length``, ``policy`` (an id, or a name where it is compared with text),
        ``program``, ``tier``, ``source``, ``seed``, ``cause``, ``terminated``, ``truncated``,
        ``row`` and ``index``.
    by
        "steps" asks of every step, of which there are also the ``reward`` (mean over agents) and
        ``step`` (from the start of the episode), and keeps the stretches where the condition holds.

    Raises
    ------
    ExpressionError
        The condition is not understood, or asks for what the vault does not tell.
    VaultError
        As for `cat`.
    """
    columns.parse(condition, by)  # before anything long
    arguments = {"condition": condition, "by": by}
    select = partial(columns.select, condition=condition, by=by)
    return derive("filter", arguments, [(as_vault(source), select)], path, codec, progress)


def sample(
    source: AnyVault,
    path: StrPath,
    *,
    steps: int | None = None,
    episodes: int | None = None,
    top: float | None = None,
    match_returns: bool | AnyVault = False,
    seed: int = 0,
    codec: Codec | None = None,
    progress: Progress = quiet,
) -> Vault:
    """Take a sample of episodes; they stay in the order they have.

    Parameters
    ----------
    source, path, codec, progress
        As for `cat`.
    steps
        Take so many steps: episodes at random until there are as many, the last one cut short.
    episodes
        Take so many episodes, at random.
    top
        Take this fraction, in (0, 1], of the complete episodes, those that the environment ended:
        those with the highest returns.
    match_returns
        Whose distribution of returns the sample shall have: the source's own (True), or another
        vault's. Both are of complete episodes, and so is the sample. Deciles of these returns bound
        ten strata, and each gives episodes in proportion to its share, to within one. Without
        ``steps`` and ``episodes``, as many as can be matched.
    seed
        Decides everything random.

    Raises
    ------
    OptionError
        There is not so much in the source, or what is asked for makes no sense.
    VaultError
        As for `cat`.
    """
    sampling.check_amount(steps, episodes, top, match_returns)
    opened = as_vault(source)
    like = None if isinstance(match_returns, bool) else as_vault(match_returns)
    arguments: dict[str, Any] = {"steps": steps, "episodes": episodes, "top": top, "seed": seed}
    if match_returns:
        matched = like or opened
        arguments["match_returns"] = {"vault": name_of(matched), "digest": matched.digest()}

    def select(source: Source) -> Pieces:
        table = source.vault.episodes
        if top is None and not match_returns:
            order = sampling.at_random(len(table.row), seed)
            return sampling.take_first(source.vault, order, steps, episodes)
        scored, returns = np.flatnonzero(table.scored), sampling.returns_of(source.vault)
        if top is not None:
            best = scored[sampling.best_first(returns)]
            return selection.of_episodes(source.vault, best[: max(1, round(top * len(best)))])
        wanted = sampling.returns_of(like) if like else returns
        order = scored[sampling.matched(returns, wanted, seed)]
        return sampling.take_first(source.vault, order, steps, episodes)

    return derive("sample", arguments, [(opened, select)], path, codec, progress)


def split(
    source: AnyVault,
    path: StrPath,
    *,
    fractions: Sequence[float] = (0.9, 0.1),
    seed: int = 0,
    codec: Codec | None = None,
    progress: Progress = quiet,
) -> dict[str, Vault]:
    """Deal the episodes out, at random, to vaults for training, validation and, if asked for, test.

    Parameters
    ----------
    source, codec, progress
        As for `cat`.
    path
        ``<directory>/<name>.vlt``, which must not exist: it will hold ``train``, ``validation`` and
        ``test``, all of them or none.
    fractions
        Of the episodes, for two or three parts; they sum to 1.
    seed
        Decides everything random.

    Returns
    -------
    dict
        The vaults by their names.

    Raises
    ------
    OptionError
        The fractions make no sense, or leave a part empty.
    VaultError
        As for `cat`.
    """
    sampling.check_fractions(fractions)
    opened = as_vault(source)
    order = sampling.at_random(len(opened.episodes.row), seed)
    edges = np.round(np.cumsum(fractions)[:-1] * len(order)).astype(int)
    parts = dict(zip(sampling.SPLITS[len(fractions)], np.split(order, edges), strict=True))
    for name, part in parts.items():
        if not len(part):
            raise OptionError(
                f"{name} would be empty: {opened.path} has {len(order)} episodes, to be split "
                f"{' : '.join(f'{fraction:g}' for fraction in fractions)}."
            )
    with together(path) as directory:
        (found,) = examine([opened], progress)
        for name, part in parts.items():
            taken = found, selection.of_episodes(opened, part)
            told = {"fractions": list(fractions), "seed": seed, "part": name}
            write("split", told, taken, directory / name, codec, progress)
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
) -> Vault:
    """Take an interval of the episodes, or of time.

    Parameters
    ----------
    source, path, codec, progress
        As for `cat`.
    start, stop
        The first, and the one after the last, by Python's rules for slices.
    by
        "steps" counts steps of every row, as ``source[start:stop]`` does, and takes of episodes
        what lies between.
    provenance
        A JSON object to note besides.

    Raises
    ------
    OptionError
        There is nothing in the interval.
    VaultError
        As for `cat`.
    """

    def select(source: Source) -> Pieces:
        vault = source.vault
        if by == "steps":
            return selection.of_time(vault, *selection.interval(start, stop, vault.length))
        count = len(vault.episodes.row)
        return selection.of_episodes(vault, np.arange(*selection.interval(start, stop, count)))

    arguments = {"start": start, "stop": stop, "by": by}
    chosen = [(as_vault(source), select)]
    return derive("slice", arguments, chosen, path, codec, progress, provenance)


def dedup(
    source: AnyVault, path: StrPath, *, codec: Codec | None = None, progress: Progress = quiet
) -> Vault:
    """Take each episode once: of those with the same content, the first.

    The content is the steps, final view and cause, without the ids of policies.

    Parameters
    ----------
    source, path, codec, progress
        As for `cat`.

    Raises
    ------
    VaultError
        As for `cat`.
    """

    def select(source: Source) -> Pieces:
        with progress("compare", source.vault.num_steps) as advance:
            hashes = episode_digests(
                source.vault,
                policies=False,
                advance=lambda steps: advance(steps * source.vault.rows),
            )
        first = {one: number for number, one in reversed(list(enumerate(hashes)))}
        return selection.of_episodes(source.vault, np.array(list(first.values()), int))

    return derive("dedup", {}, [(as_vault(source), select)], path, codec, progress)


def recode(
    source: AnyVault,
    path: StrPath,
    *,
    codec: Codec | None = None,
    chunk_steps: int | None = None,
    layout: Literal["rows", "stream"] = "rows",
    time_limit: int | None = None,
    progress: Progress = quiet,
) -> Vault:
    """Store the same content in another way.

    Parameters
    ----------
    source, path, codec, time_limit, progress
        As for `cat`.
    chunk_steps
        As for `offmarl.vault.create`.
    layout
        "rows": as the source has them, and nothing changes: the digest is the same. "stream": one
        row, the episodes end to end, as programs for OG-MARL's vaults expect; what runs on at the
        end of a row is cut off there.

    Raises
    ------
    VaultError
        As for `cat`.
    """
    (opened,) = with_limit([source], time_limit)
    told = {"codec": codec, "chunk_steps": chunk_steps, "layout": layout}
    if layout == "stream":
        whole = [(opened, _everything)]
        return derive("recode", told, whole, path, codec, progress, chunk_steps=chunk_steps)
    rewrite(opened, told, path, codec, chunk_steps, progress)
    return open_vault(path)
