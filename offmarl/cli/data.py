"""``offmarl ls``, ``show``, ``verify``, ``salvage`` and ``compact``: vaults, and their files."""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import numpy as np
from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree
from tyro.conf import Positional, arg

from offmarl import vault
from offmarl.cli.output import Report, as_is, grid, table
from offmarl.hub.licences import recorded_as
from offmarl.paths import may_be_name, path_text
from offmarl.report.contents import facts_of
from offmarl.report.tables import describe_agents
from offmarl.statistics import spread
from offmarl.teams import only_or_all
from offmarl.terminal import bars, number, spread_line
from offmarl.tracking import as_dicts, progress
from offmarl.vault.check.leaf_statistics import QUANTILES, Statistics
from offmarl.vault.format.compat import MEANINGS

_BINS = 40
_MOST_LINES = 50
_MOST_ENTRIES = 4
_LINE = 60  # characters

_Vault = Annotated[str, Positional, arg(metavar="VAULT")]
_in_bytes = partial(progress, unit="bytes")


def ls(
    directory: Annotated[str, Positional, arg(metavar="[DIRECTORY]")] = ".",
    remote: bool = False,
    env: str | None = None,
    agents: int | None = None,
) -> Report:
    """List local vaults or available datasets.

    Parameters
    ----------
    directory
        Where to look: a directory, a zip archive, or a bucket such as s3://bucket/data. With
        --remote, the beginning of names.
    remote
        List the datasets of the catalogue instead, which `offmarl pull` downloads: a line for each
        source, or with a selection, such as `offmarl ls --remote og_marl`, for each dataset.
    env
        Only list data of this environment, such as swarm/coverage-3, or smac_v1 with --remote.
    agents
        Only those with this number of agents.
    """
    if remote:
        from offmarl.cli.hub import catalogue

        return catalogue("" if directory == "." else directory, env, agents)
    summaries = vault.list_vaults(directory, env, agents)
    vaults = [{"path": path, **summary._asdict()} for path, summary in summaries]
    unread = [f"{path_text(entry['path'])}: {entry['error']}" for entry in vaults if entry["error"]]
    place = "this directory" if directory == "." else directory
    hint = "`offmarl record` makes some, and `offmarl ls --remote` lists published ones"
    such = "" if env is None and agents is None else "such "
    text = _listed(vaults) if vaults else f"no {such}vaults in {place}: {hint}."
    return Report({"vaults": vaults}, Group(text, *unread))


def _listed(vaults: Sequence[Mapping[str, Any]]) -> RenderableType:
    """Return a table of vaults, without environments if all paths contain them."""
    columns = {"path": "path", "env": "env", "num_agents": "agents", "steps": "steps"}
    columns |= {"episodes": "episodes"}
    if any(entry["incomplete"] for entry in vaults):
        columns |= {"incomplete": "incomplete"}
    columns |= {"mean_return": "mean return"}
    if all(f"{entry['env']}.vlt" in str(entry["path"]) for entry in vaults if entry["env"]):
        del columns["env"]
    rows = [[entry[field] for field in columns] for entry in vaults]
    return table(list(columns.values()), rows)


def show(
    path: _Vault, time_limit: int | None = None, statistics: bool = False, provenance: bool = False
) -> Report:
    """Show the contents and the origin of a vault.

    Parameters
    ----------
    path
        A vault, such as vaults/swarm/coverage-8.vlt/mappo-0-expert; the path may end in .vlt
        if there is only one vault in it. The vault may be in a zip archive (3m.zip/3m.vlt/Good) or
        a bucket (s3://...). Or the name of a pulled dataset, such as og_marl/smac_v1/3m/Good.
    time_limit
        For a vault of another program that flags the time limit as a termination: the limit.
    statistics
        Also show the mean, standard deviation and range of every array. They are computed once,
        which reads all data, and then stored in the vault.
    provenance
        Also show every setting with which the data were made; --json always has them.
    """
    data = vault.open_vault(path, time_limit=time_limit)
    computed = data.statistics(progress) if statistics else {}
    facts = facts_of(data) | {
        "stock_readable": _stock_readable(data),
        "policies": list(data.policy_ids),
        "pairings": _pairings(data.episodes),
        "digest": data.known_digest(),
    }
    leaves = {name: (str(leaf.dtype), leaf.shape) for name, leaf in data.leaves.items()}
    text = Group(
        grid(_described(facts, data)),
        table(["array", "type", "shape of a step"], [[k, *v] for k, v in leaves.items()]),
        grid(_provenance_facts(data.provenance, provenance)),
        _lineage(data.provenance),
        *_played_together(facts["pairings"], data.provenance),
        *([_statistics_table(computed)] if computed else []),
    )
    if computed:
        facts["statistics"] = {name: leaf.to_json() for name, leaf in computed.items()}
        facts["quantiles"] = QUANTILES
    described = {name: {"dtype": kind, "shape": shape} for name, (kind, shape) in leaves.items()}
    return Report(facts | {"arrays": described, "provenance": data.provenance}, text)


def _statistics_table(computed: Statistics) -> RenderableType:
    """Return a table of the statistics of all entries of each array together."""
    columns = ["array", "entries", "values", "mean", "std", "min", "median", "max"]
    middle = QUANTILES.index(0.5)
    rows = []
    for name, leaf in computed.items():
        low, high, mean, std, count, _ = leaf.ranges.pooled()
        # Of several entries, there is only the range of their medians.
        medians = leaf.quantiles[middle][leaf.count > 0]
        ends = sorted({f"{x:.4g}" for x in (medians.min(), medians.max())}) if len(medians) else []
        values = [float(x) for x in (mean, std, low)]
        rows.append([name, leaf.count.size, int(count), *values, " to ".join(ends), float(high)])
    return table(columns, rows)


def _pairings(episodes: vault.Episodes) -> list[dict[str, Any]]:
    """Return the mean returns of policies that played together, if agents had different ones."""
    ids, returns = episodes.policy_ids[episodes.scored], episodes.team_returns[episodes.scored]
    if (ids == ids[:, :1]).all():
        return []
    pairings, which = np.unique(ids, axis=0, return_inverse=True)
    names = [team.name for team in episodes.teams]
    by_pairing = [returns[which.ravel() == place] for place in range(len(pairings))]
    return [
        {
            "policies": policies,
            "episodes": len(team_returns),
            "return": only_or_all(dict(zip(names, team_returns.mean(0).tolist(), strict=True))),
        }
        for policies, team_returns in zip(pairings.tolist(), by_pairing, strict=True)
    ]


def _played_together(
    pairings: Sequence[Mapping[str, Any]], provenance: Mapping[str, Any]
) -> list[RenderableType]:
    policies = provenance.get("policies")
    names = {
        policy["policy_id"]: policy.get("name")
        for policy in (policies if isinstance(policies, list) else [])
        if isinstance(policy, dict) and isinstance(policy.get("policy_id"), int)
    }
    head = pairings[:_MOST_LINES]
    labels = {x: str(names.get(x) or x) for pairing in head for x in pairing["policies"]}
    runs = {name.rpartition("@")[0] for name in labels.values()}
    run = runs.pop() if len(runs) == 1 else ""  # a name that all share is said once
    rows = []
    for pairing in head:
        players = [labels[x].removeprefix(run) for x in pairing["policies"]]
        players = players if len(players) <= _MOST_ENTRIES else [*dict.fromkeys(players)]
        rows.append([" + ".join(players), pairing["episodes"], pairing["return"]])
    more = len(pairings) - len(rows)
    title = [f"policies{run and f' of {run}'} that played together", "episodes", "mean return"]
    return [table(title, rows), *([f"and {more} more (--json)"] if more else [])] if rows else []


def _described(facts: Mapping[str, Any], data: vault.Dataset) -> dict[str, Any]:
    """Format the facts as text."""
    spec, size = data.spec, facts["bytes"]
    environment = spec.name or data.provenance.get("environment") or "unknown"
    sizes = f"observation {spec.observation_text}, state {spec.state_text}"
    ends = ", ".join(f"{number(count)} {cause}" for cause, count in facts["ends"].items())
    return {
        "vault": data.path,
        **({} if data.native else {"made by": "another program, without an episode table"}),
        "environment": f"{environment} {spec.package and f'({spec.package})'}".strip(),
        "agents": f"{describe_agents(spec)}; {sizes}",
        "steps": f"{number(data.num_steps)} = {number(data.length)} x {data.rows} environments; "
        + ("size unknown" if size is None else f"{number(size / 1e6)} MB"),
        "episodes": f"{number(facts['episodes'])}: {ends}",
        "length": f"{spread_line(facts['length'])} {_left_out(facts, 'incomplete')}".strip(),
        **_described_returns(data.episodes, _left_out(facts)),
        "policies": number(len(facts["policies"])) if facts["policies"] else "unknown",
        **({"recorded": recording} if (recording := recorded_as(data.provenance)) else {}),
        "digest": facts["digest"],
        **({} if _stock_readable(data) else {"stock flashbax": _NOT_STOCK}),
        **({"quirks": "; ".join(MEANINGS[quirk] for quirk in data.quirks)} if data.quirks else {}),
    }


def _described_returns(episodes: vault.Episodes, left_out: str) -> dict[str, str]:
    """Format the returns, of each team if there are several."""
    texts: dict[str, str] = {}
    for team, returns in episodes.complete_team_returns.items():
        of = f" of {team}" if len(episodes.teams) > 1 else ""
        texts[f"return{of}"] = f"{spread_line(spread(returns))} {left_out}".strip()
        if len(returns):
            stretches = np.array_split(returns, min(_BINS, len(returns)))
            texts[f"  in order{of}"] = bars([float(stretch.mean()) for stretch in stretches])
            # Large returns that are all alike fit no bins of their own scale.
            span = np.ptp(returns) or 1.0
            counts, _ = np.histogram((returns - returns.min()) / span, bins=_BINS)
            texts[f"  distribution{of}"] = bars(counts.tolist())
    return texts


_NOT_STOCK = "cannot use this vault: leaves of observations belong to some agents only"


def _stock_readable(data: vault.Dataset) -> bool:
    return data.manifest is None or data.manifest.schema.stock_readable


_REASONS = {
    "incomplete": "that the environment did not end",
    "episodes_without_return": "with rewards that are not finite",
}


def _left_out(facts: Mapping[str, Any], *reasons: str) -> str:
    """Describe the episodes that statistics exclude, for all reasons or for the given ones."""
    parts = [f"{number(facts[x])} {_REASONS[x]}" for x in reasons or _REASONS if facts[x]]
    return f"(without {' and '.join(parts)})" if parts else ""


# --------------------------------------------------------------------------------- lineage

_SHOWN = ("lineage", "origins")


def _provenance_facts(provenance: Mapping[str, Any], is_full: bool) -> dict[str, Any]:
    """Return the entries of the provenance that fit on a line; or all of them."""
    facts = {k: v for k, v in provenance.items() if v != {} and k not in _SHOWN}
    short = {k: v for k, v in facts.items() if is_full or len(json.dumps(v, default=str)) <= _LINE}
    more = ", ".join(k for k in facts if k not in short)
    return short | ({"more": f"{more} (--provenance)"} if more else {})


def _lineage(provenance: Mapping[str, Any]) -> RenderableType:
    """Return the tree of sources, and the recordings that the policies come from.

    Values of another program under these keys are shown unchanged.
    """
    lineage, origins = values = [provenance.get(key) for key in _SHOWN]
    try:
        return Group(*_origin(lineage, origins))
    except (AttributeError, LookupError, TypeError, ValueError):
        return grid({key: x for key, x in zip(_SHOWN, values, strict=True) if x is not None})


def _origin(lineage: Any, origins: Any) -> Iterator[RenderableType]:
    if lineage is None:
        return
    tree = Tree(_operation(lineage), guide_style="dim")
    _grow(tree, lineage)
    yield tree
    if origins:
        columns = ["recording", "tier", "program", "seed", "policies here", "digest"]
        rows = [
            [
                *(origin[name] for name in ("vault", "tier", "program")),
                None if origin["seed"] is None else str(origin["seed"]),
                _ids(origin, len(origins)),
                origin["digest"][:12],
            ]
            for origin in origins
        ]
        yield table(columns, rows)


def _grow(tree: Tree, lineage: Mapping[str, Any]) -> None:
    for source in lineage.get("sources", []):
        below, label = source["provenance"].get("lineage"), _source(source)
        if below:
            label.append("  from  ", style="dim").append(_operation(below))
            _grow(tree.add(label), below)
        else:
            tree.add(label)


def _operation(lineage: Mapping[str, Any]) -> Text:
    arguments = " ".join(f"{name}={value}" for name, value in lineage["arguments"].items())
    return Text.assemble((lineage["operation"], "bold"), f" {arguments}", overflow="fold")


def _source(source: Mapping[str, Any]) -> Text:
    selection = source["taken"]
    count = f"{selection['episodes']:,} of {source['episodes']:,} episodes"
    foreign = "" if source["native"] else ", by another program"
    quirks = f", {', '.join(source['quirks'])}" if "quirks" in source else ""
    unverified = f", unverified steps {source['unverified']}" if "unverified" in source else ""
    return Text.assemble(
        (source["vault"], "cyan"),
        f"  {count}{foreign}{quirks}{unverified}  {source['digest'][:12]}",
        overflow="fold",
    )


def _ids(origin: Mapping[str, Any], origins: int) -> str:
    """Return the ids that an origin's policies have in the vault."""
    last = origin["first"] + origin["num_policies"] - 1 + (origin["unknown"] and origins > 1)
    if last < origin["first"]:
        return "unknown"
    return f"{origin['first']} to {last}" if last > origin["first"] else str(last)


# --------------------------------------------------------------------------------- integrity


def verify(path: _Vault, deep: bool = False) -> Report:
    """Check a vault for damage.

    The exit code is 1 if it is damaged.

    Parameters
    ----------
    path
        A vault of any program, in a directory, an archive or an object store; or the name of a
        pulled dataset: all its files are compared with the published checksums.
    deep
        Also read every chunk, and recompute the episode table.
    """
    if may_be_name(path):
        from offmarl.cli.hub import verify_pulled  # the hub's client takes a while to import

        if report := verify_pulled(path):
            return report
    result = vault.verify(path, deep=deep, progress=_in_bytes)
    data = as_dicts(result)
    data |= {"sound": result.sound, "other_layout": result.other_layout or None}
    return Report(data, Group(*_outcome(result)), result.sound)


def salvage(path: _Vault, out: Annotated[str, arg(aliases=["-o"], metavar="VAULT")]) -> Report:
    """Copy the intact episodes of a damaged vault.

    They are written to a new vault, and the damaged one is not changed. Lost episodes are listed.

    Parameters
    ----------
    path
        A vault of any program.
    out
        The new vault.
    """
    result = vault.salvage(path, out, progress=progress)
    lost = [f"row {row}, steps {start} to {start + n - 1}" for row, start, n in result.lost]
    if result.unknown_steps:
        lost.append(f"{number(result.unknown_steps)} steps of unknown episodes")
    amount = f"{number(result.episodes)} episodes, {number(result.steps)} steps"
    view = Group(f"{path_text(result.path)}: {amount}.", "Lost:", *_lines(lost or ["nothing"]))
    return Report(as_dicts(result), view)


def compact(path: _Vault) -> Report:
    """Reclaim unused space.

    Data that later commits replaced is removed, and the rest is stored in reading order.

    Parameters
    ----------
    path
        A vault of any program. No process may write to it meanwhile.
    """
    done = vault.compact(path)
    before, after = number(done.bytes_before / 1e6), number(done.bytes_after / 1e6)
    line = (
        f"{path_text(done.path)}: {before} MB in {number(done.files_before)} files became "
        f"{after} MB in {number(done.files_after)}."
    )
    return Report(done._asdict(), line)


def _outcome(result: vault.Verification) -> list[RenderableType]:
    tail = f", {number(result.read_bytes / 1e6)} MB read" if result.deep else ", none of them read"
    scope = f"{number(result.length)} steps of each row, {number(result.chunks)} chunks{tail}"
    lines: list[RenderableType] = []
    if result.sound:
        extent = "is intact" if not result.skipped else "is intact as far as checked"
        lines.append(f"{path_text(result.path)} {extent}: {scope}.")
    else:
        lines += [f"{path_text(result.path)} is damaged ({scope}):", *_lines(result.faults)]
    sections = {
        "What it holds that is no damage:": result.notes,
        "Not checked, so damage there is not detected; --deep checks it:": result.skipped,
        "Without a checksum, so damage there may not be detected:": result.unchecked,
    }
    for title, items in sections.items():
        lines += [title, *_lines(items)] if items else []
    if result.other_layout:
        lines.append(f"It has neither offmarl's nor OG-MARL's layout: {result.other_layout}")
    return lines


def _lines(items: Sequence[object]) -> list[RenderableType]:
    lines = [as_is(f"  {item}") for item in items[:_MOST_LINES]]
    if len(items) > _MOST_LINES:
        lines.append(as_is(f"  and {number(len(items) - _MOST_LINES)} more"))
    return lines
