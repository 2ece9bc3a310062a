"""Conditions on episodes or steps: their columns, and the pieces of vaults that meet them."""

import warnings
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import numpy as np

from offmarl.errors import ExpressionError
from offmarl.teams import policy_columns
from offmarl.vault.format.layout import POLICY_IDS, NumpyArray
from offmarl.vault.transform import expression, lineage
from offmarl.vault.transform.columns import StepColumns, StepInterval
from offmarl.vault.transform.expression import (
    ANY_EXTRA,
    ANY_POLICY,
    ANY_TEAM_RETURN,
    COMPLETE,
    EXTRA,
    POLICY_NAME,
    Columns,
    Expression,
    Kind,
)
from offmarl.vault.transform.lineage import LineageSource, Named
from offmarl.vault.transform.selection import Pieces, Pool, Unit, whole_episodes

OF_EPISODES: dict[str, Kind] = {
    "return": "number",  # mean over agents, if they are one team
    ANY_TEAM_RETURN: "number",  # mean over the team's agents
    "length": "number",
    "policy": "policy",  # of the first agent in the first step
    ANY_POLICY: "policy",  # of an agent, or of the first one of a team
    "program": "text",
    "tier": "text",
    "source": "text",  # the vault it was recorded in, "name.vlt/uid"
    "seed": "number",
    "cause": "text",
    "terminated": "truth",
    "truncated": "truth",
    COMPLETE: "truth",
    "row": "number",
    "index": "number",  # in `Dataset.episodes`
}
"""The columns of conditions on episodes."""
OF_STEPS: dict[str, Kind] = {
    **OF_EPISODES,
    "reward": "number",  # mean over agents
    "step": "number",  # from the start of the episode
    ANY_EXTRA: "number",  # mean over agents
}
"""The columns of conditions on steps."""


def parse_condition(condition: str, by: Unit) -> Expression:
    """Parse a condition on episodes or steps."""
    names = OF_EPISODES if by == "episodes" else OF_STEPS
    hints = dict.fromkeys(
        OF_STEPS.keys() - names, "only steps have it: select by steps (--by steps)."
    )
    return expression.parse(condition, names, hints, percentiles=by == "episodes")


def take_meeting(
    sources: Sequence[LineageSource],
    condition: str,
    by: Unit,
    within: Sequence[Pieces] | None = None,
) -> list[Pieces]:
    """Take the episodes, or the intervals of steps, that meet a condition.

    Percentiles are over the episodes of all sources, and ids of policies those of the joined
    sources.
    """
    parsed = parse_condition(condition, by)
    named = sources[0].named
    if len(sources) > 1:
        named = lineage.merge(named for source in sources for named in source.named)
    columns = [columns_of(source, named, parsed.names) for source in sources]
    for source, source_columns in zip(sources, columns, strict=True):
        check_known(source, parsed, source_columns)
        if any(name.startswith("return") for name in parsed.names):
            _warn_of_missing_returns(source)
    if by == "episodes":
        pieces = _whole_meeting(sources, parsed, columns)
    else:
        intervals = within or [whole_episodes(source.vault) for source in sources]
        pieces = [
            _steps_meeting(source, parsed, source_columns, named, inside)
            for source, source_columns, inside in zip(sources, columns, intervals, strict=True)
        ]
    if within is None and not sum(part.steps for part in pieces):
        raise _nothing_meets(sources, parsed, columns, by)
    return pieces


def _whole_meeting(
    sources: Sequence[LineageSource], parsed: Expression, columns: Sequence[Columns]
) -> list[Pieces]:
    pool = Pool([source.vault for source in sources])
    shared = set.intersection(*map(set, columns))
    pooled = {name: np.concatenate([x[name] for x in columns]) for name in shared}
    pooled["index"] = np.arange(len(pool.length))
    return pool.take(np.where(parsed.holds(pooled, len(pool.length)), pool.length, 0))


def _warn_of_missing_returns(source: LineageSource) -> None:
    returns = source.vault.episodes.team_returns
    if missing := int((~np.isfinite(returns)).any(1).sum()):
        warnings.warn(
            f"{missing:,} of the {len(returns):,} episodes of {source.vault.path} have a reward of "
            "NaN or infinity and therefore no return: they meet no condition on it, and "
            "percentiles leave them out.",
            stacklevel=2,
        )


def _nothing_meets(
    sources: Sequence[LineageSource], parsed: Expression, columns: Sequence[Columns], by: Unit
) -> ExpressionError:
    paths = ", ".join(str(source.vault.path) for source in sources)
    ranges = []
    for name in sorted(parsed.names & columns[0].keys()):
        values = np.concatenate([x[name] for x in columns])
        policies = {policy for x in columns for policy in x.get(name + POLICY_NAME, ())} - {""}
        among = f" ({', '.join(sorted(policies))})" if 0 < len(policies) <= 20 else ""
        if values.dtype.kind in "if" and not np.isnan(values).all():
            ranges.append(f"{name} from {np.nanmin(values):g} to {np.nanmax(values):g}{among}")
    hint = f" The data has {' and '.join(ranges)}." if ranges else ""
    return ExpressionError(
        f"no {by} of {paths} meet {parsed.text!r}: an empty vault is not written.{hint}"
    )


def columns_of(
    source: LineageSource, named: Sequence[Named] | None = None, names: Iterable[str] = ()
) -> Columns:
    """Return one value for each episode, by name, without columns that the vault does not have.

    Columns of policies are returned only if they are among the names. Ids of policies are those of
    the origins ``named``, by default the source's.
    """
    table = source.vault.episodes
    number = lineage.origin_of(table.policy_id, source.origins)
    columns: dict[str, Any] = {
        **table.returns_by_name,
        "length": table.length,
        **_policies(source, table.policy_ids, named or source.named, names),
        "tier": np.array([origin.tier for origin in source.origins])[number],
        "source": np.array([origin.vault for origin in source.origins])[number],
        "cause": table.cause,
        "terminated": table.terminated,
        "truncated": table.truncated,
        COMPLETE: table.complete,
        "row": table.row,
        "index": np.arange(len(table.row)),
    }
    if any(origin.program for origin in source.origins):
        columns["program"] = np.array([o.program or "" for o in source.origins])[number]
    if any(origin.seed is not None for origin in source.origins):
        seeds = [np.nan if o.seed is None else o.seed for o in source.origins]
        columns["seed"] = np.array(seeds)[number]
    return columns


def _policies(
    source: LineageSource, ids: NumpyArray, named: Sequence[Named], names: Iterable[str]
) -> dict[str, NumpyArray]:
    """Return the ids and the names of policies, from those of each agent, for these columns."""
    columns: dict[str, NumpyArray] = {}
    agents = policy_columns(source.vault.spec)
    for name in agents.keys() & names:
        policy_id = ids[:, agents[name]]
        columns[name] = lineage.remap(policy_id, source.named, named)
        columns[name + POLICY_NAME] = _policy_names(source, policy_id)
    return columns


def _policy_names(source: LineageSource, policy_id: NumpyArray) -> NumpyArray:
    """Return the names of policies; the program's name for policies without their own."""
    number = lineage.origin_of(policy_id, source.origins)
    names = np.array([origin.program or "" for origin in source.origins], object)[number]
    for _, policies in source.named:
        for policy in policies:
            if "name" in policy:
                names[policy_id == policy["policy_id"]] = str(policy["name"])
    return names.astype(str)


def check_known(source: LineageSource, parsed: Expression, columns: Columns) -> None:
    """Raise `ExpressionError` if an expression uses a column that a vault does not have."""
    vault, spec = source.vault, source.vault.spec
    extras = {name: leaf.shape for name, leaf in vault.leaves.items() if name.startswith(EXTRA)}
    for name in sorted(parsed.names - columns.keys() - {"reward", "step"}):
        if not name.startswith(EXTRA):
            names = dict.fromkeys([*columns, *policy_columns(spec)])
            raise ExpressionError(
                f"{vault.path} does not record the {name} of its episodes. It records: "
                f"{', '.join(key for key in names if not key.endswith(POLICY_NAME))}."
            )
        if name not in extras:
            raise ExpressionError(
                f"{vault.path} has no {name}: it has {', '.join(extras) or 'no extras'}."
            )
        if extras[name] not in ((), (1,), (spec.num_agents,)):
            raise ExpressionError(
                f"{name} of {vault.path} has shape {extras[name]} a step: an expression needs one "
                "number, or one for each agent."
            )


def step_columns(
    source: LineageSource,
    named: Sequence[Named],
    columns: Columns,
    steps: StepColumns,
    names: Collection[str],
) -> Columns:
    """Return columns of steps, ``(T, 1)`` or ``(T, N)``: those of their episodes, and their own."""
    data = {x: y[steps.episode] for x, y in columns.items() if x.removesuffix(POLICY_NAME) in names}
    data |= {"reward": steps["reward"].astype(float), "step": steps.time}
    data |= {x: steps[x].astype(float) for x in names if x.startswith(EXTRA)}
    if "policy_id" in steps and policy_columns(source.vault.spec).keys() & names:
        ids = steps["policy_id"].reshape(len(steps.time), -1)
        ids = np.broadcast_to(ids, (len(ids), source.vault.spec.num_agents))
        data |= _policies(source, ids, named, names)
    return {name: column.reshape(len(steps.time), -1) for name, column in data.items()}


def _steps_meeting(
    source: LineageSource,
    parsed: Expression,
    columns: Columns,
    named: Sequence[Named],
    within: Pieces,
) -> Pieces:
    """Take the intervals of steps that meet a condition, within whole episodes, row by row."""
    vault, table = source.vault, source.vault.episodes
    ids = [POLICY_IDS] if policy_columns(vault.spec).keys() & parsed.names else []
    leaves = [name for name in ("rewards", *ids, *parsed.names) if name in vault.leaves]
    of_rows = [whole_episodes(vault, np.zeros(0, np.int64))]
    searched = table.row[within.episode]
    for row in np.unique(searched).tolist():
        in_row, episodes = np.flatnonzero(table.row == row), within.episode[searched == row]
        first, last = within.start[searched == row].min(), within.stop[searched == row].max()
        holds = np.zeros(vault.length, bool)
        for begin, stop in vault.blocks(leaves, rows=1):
            if stop <= first or begin >= last:
                continue
            steps = StepColumns(vault, StepInterval(slice(row, row + 1), begin, stop, number=0))
            values = step_columns(source, named, columns, steps, parsed.names)
            means = {name: x.mean(1) if x.shape[1] > 1 else x[:, 0] for name, x in values.items()}
            holds[begin:stop] = parsed.holds(means, stop - begin)
            holds[begin:stop] &= np.isin(steps.episode, episodes)
        of_rows.append(_runs(holds, in_row, table.start[in_row]))
    return Pieces(*(np.concatenate(column) for column in zip(*of_rows, strict=True)))


def _runs(holds: NumpyArray, episodes: NumpyArray, begins: NumpyArray) -> Pieces:
    """Return the intervals of a row, within the episodes that begin there, where a truth holds."""
    is_first = np.zeros(len(holds) + 1, bool)
    is_first[begins] = is_first[-1] = True
    around = np.concatenate([[False], holds, [False]])
    starts = np.flatnonzero(holds & (is_first[:-1] | ~around[:-2]))
    stops = np.flatnonzero(holds & (is_first[1:] | ~around[2:])) + 1
    return Pieces(episodes[np.searchsorted(begins, starts, side="right") - 1], starts, stops)
