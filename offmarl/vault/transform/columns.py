"""What a condition can ask of episodes and of steps."""

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np

from offmarl.errors import ExpressionError
from offmarl.vault import encoding
from offmarl.vault.layout import POLICY_IDS, NumpyArray
from offmarl.vault.transform import expression, origins, selection
from offmarl.vault.transform.expression import COMPLETE, POLICY_NAME, Columns, Expression, Kind
from offmarl.vault.transform.lineage import Source
from offmarl.vault.transform.selection import Pieces

OF_EPISODES: dict[str, Kind] = {
    "return": "number",  # mean over agents
    "length": "number",
    "policy": "policy",  # of the first step
    "program": "text",
    "tier": "text",
    "source": "text",  # the vault that it was recorded in, "name.vlt/uid"
    "seed": "number",
    "cause": "text",
    "terminated": "truth",
    "truncated": "truth",
    COMPLETE: "truth",
    "row": "number",
    "index": "number",  # in `Vault.episodes`
}
OF_STEPS: dict[str, Kind] = {
    **OF_EPISODES,
    "reward": "number",  # mean over agents
    "step": "number",  # from the episode's start
}


def parse(condition: str, by: selection.Unit) -> Expression:
    """Return a condition on episodes or steps; `ExpressionError` where it is not understood."""
    names = OF_EPISODES if by == "episodes" else OF_STEPS
    hints = dict.fromkeys(
        OF_STEPS.keys() - names, "Steps have it, episodes do not: select by steps."
    )
    return expression.parse(condition, names, hints, percentiles=by == "episodes")


def select(source: Source, condition: str, by: selection.Unit) -> Pieces:
    """Return the episodes, or the stretches of steps, that a condition holds for.

    Raises
    ------
    ExpressionError
        It is not understood, or asks for what the vault does not tell.
    """
    parsed = parse(condition, by)
    columns = of_episodes(source)
    _check_told(source, parsed, columns)
    if "return" in parsed.names:
        _warn_of_missing_returns(source)
    if by == "episodes":
        holds = parsed.holds(columns, len(source.vault.episodes.row))
        pieces = selection.of_episodes(source.vault, holds)
    else:
        found = zip(*_stretches(source, parsed, columns), strict=True)
        pieces = _merge(Pieces(*(np.concatenate(column) for column in found)))
    if not pieces.steps:
        raise _nothing(source, parsed, columns, by)
    return pieces


def _warn_of_missing_returns(source: Source) -> None:
    returns = source.vault.episodes.episode_returns
    if missing := int((~np.isfinite(returns)).sum()):
        warnings.warn(
            f"{missing:,} of the {len(returns):,} episodes of {source.vault.path} have a reward of "
            "NaN or infinity, and so no return: they meet no condition on it, and percentiles are "
            "those of the others.",
            stacklevel=2,
        )


def _nothing(
    source: Source, parsed: Expression, columns: Columns, by: selection.Unit
) -> ExpressionError:
    told = [
        f"{name} from {np.nanmin(columns[name]):g} to {np.nanmax(columns[name]):g}"
        for name in sorted(parsed.names & columns.keys())
        if columns[name].dtype.kind in "if" and not np.isnan(columns[name]).all()
    ]
    there = f" The data has {' and '.join(told)}." if told else ""
    return ExpressionError(
        f"of the {by} of {source.vault.path} none meet {parsed.text!r}, and an empty vault is of "
        f"no use.{there}"
    )


def of_episodes(source: Source) -> Columns:
    """Return what is told of each episode; names are missing where a vault tells of none."""
    found = source.vault.episodes
    number = origins.origin_of(found.policy_id, source.origins)

    def of_origin(field: str) -> NumpyArray:
        return np.array([getattr(origin, field) for origin in source.origins])[number]

    columns: dict[str, Any] = {
        "return": found.episode_returns,
        "length": found.length,
        "policy": found.policy_id,
        POLICY_NAME: _policy_names(source, found.policy_id),
        "tier": of_origin("tier"),
        "source": of_origin("vault"),
        "cause": found.cause,
        "terminated": found.terminated,
        "truncated": found.truncated,
        COMPLETE: found.complete,
        "row": found.row,
        "index": np.arange(len(found.row)),
    }
    if any(origin.program for origin in source.origins):
        columns["program"] = np.array([o.program or "" for o in source.origins])[number]
    if any(origin.seed is not None for origin in source.origins):
        seeds = [np.nan if o.seed is None else o.seed for o in source.origins]
        columns["seed"] = np.array(seeds)[number]
    return columns


def _policy_names(source: Source, policy_id: NumpyArray) -> NumpyArray:
    """Return the names of policies; that of the program where they have none of their own."""
    number = origins.origin_of(policy_id, source.origins)
    names = np.array([origin.program or "" for origin in source.origins], object)[number]
    for _, policies in source.named:
        for policy in policies:
            if "name" in policy:
                names[policy_id == policy["policy_id"]] = str(policy["name"])
    return names.astype(str)


def _check_told(source: Source, parsed: Expression, columns: Columns) -> None:
    for name in sorted(parsed.names - columns.keys() - {"reward", "step"}):
        raise ExpressionError(
            f"{source.vault.path} does not tell the {name} of its episodes. It tells: "
            f"{', '.join(key for key in OF_EPISODES if key in columns)}."
        )


def _stretches(source: Source, parsed: Expression, columns: Columns) -> Iterator[Pieces]:
    """Find the steps that a condition holds for, row by row."""
    vault, found = source.vault, source.vault.episodes
    leaves = [name for name in ("rewards", POLICY_IDS) if name in vault.leaves]
    yield selection.of_episodes(vault, np.zeros(len(found.row), bool))
    for row in range(vault.rows):
        mine = np.flatnonzero(found.row == row)
        for begin, stop in vault.blocks(leaves, rows=1):
            steps = vault.read(begin, stop, rows=slice(row, row + 1), leaves=leaves)
            time = np.arange(begin, stop)
            episode = mine[np.searchsorted(found.start[mine], time, side="right") - 1]
            here = {name: column[episode] for name, column in columns.items()}
            here["reward"] = steps["rewards"][0].reshape(stop - begin, -1).mean(-1)
            here["step"] = time - found.start[episode]
            if POLICY_IDS in steps:
                (ids,) = encoding.first_agents(steps[POLICY_IDS])
                here["policy"], here[POLICY_NAME] = ids, _policy_names(source, ids)
            yield _runs(episode, parsed.holds(here, stop - begin), begin)


def _runs(episode: NumpyArray, holds: NumpyArray, begin: int) -> Pieces:
    """Return the stretches within episodes where a condition holds."""
    edges = np.diff(holds.astype(np.int8), prepend=0, append=0)
    starts, stops = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    between = np.flatnonzero((np.diff(episode) > 0) & holds[1:] & holds[:-1]) + 1
    starts = np.sort(np.concatenate([starts, between]))
    stops = np.sort(np.concatenate([stops, between]))
    return Pieces(episode[starts], starts + begin, stops + begin)


def _merge(pieces: Pieces) -> Pieces:
    """Join stretches that the border of a block parts."""
    goes_on = (pieces.episode[1:] == pieces.episode[:-1]) & (pieces.start[1:] == pieces.stop[:-1])
    begins, ends = np.insert(~goes_on, 0, True), np.append(~goes_on, True)
    count = slice(len(pieces.start))  # of no pieces too
    begins, ends = begins[count], ends[count]
    return Pieces(pieces.episode[begins], pieces.start[begins], pieces.stop[ends])
