"""How ``offmarl show`` displays what a vault was made of."""

from collections.abc import Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text
from rich.tree import Tree

from offmarl.cli.output import table

_SHOWN = ("lineage", "origins")


def others(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a provenance `view` does not show."""
    return {key: value for key, value in provenance.items() if key not in _SHOWN}


def view(provenance: Mapping[str, Any]) -> RenderableType:
    """Return the tree of sources, and the recordings that the policies are of."""
    lineage, origins = (provenance.get(key) for key in _SHOWN)
    parts: list[RenderableType] = []
    if isinstance(lineage, Mapping):
        tree = Tree(_operation(lineage), guide_style="dim")
        _grow(tree, lineage)
        parts.append(tree)
    if origins and isinstance(lineage, Mapping):
        columns = ["recording", "tier", "program", "seed", "policies here", "digest"]
        parts.append(table(columns, [_origin(one, len(origins)) for one in origins]))
    return Group(*parts)


def _origin(one: Mapping[str, Any], origins: int) -> list[str | None]:
    seed = None if one["seed"] is None else str(one["seed"])
    return [
        one["vault"],
        one["tier"],
        one["program"],
        seed,
        _ids(one, origins),
        one["digest"][:12],
    ]


def _grow(tree: Tree, lineage: Mapping[str, Any]) -> None:
    for source in lineage.get("sources", []):
        told = source["provenance"]
        label = _source(source)
        if "lineage" in told:
            label.append("  from  ", style="dim").append(_operation(told["lineage"]))
            _grow(tree.add(label), told["lineage"])
        else:
            tree.add(label)


def _operation(lineage: Mapping[str, Any]) -> Text:
    arguments = " ".join(f"{name}={value}" for name, value in lineage["arguments"].items())
    return Text.assemble((lineage["operation"], "bold"), f" {arguments}")


def _source(source: Mapping[str, Any]) -> Text:
    taken = source["taken"]
    what = f"{taken['episodes']:,} of {source['episodes']:,} episodes"
    foreign = "" if source["native"] else ", not ours"
    quirks = f", {', '.join(source['quirks'])}" if "quirks" in source else ""
    unverified = f", unverified steps {source['unverified']}" if "unverified" in source else ""
    return Text.assemble(
        (source["vault"], "cyan"), f"  {what}{foreign}{quirks}{unverified}  {source['digest'][:12]}"
    )


def _ids(origin: Mapping[str, Any], origins: int) -> str:
    """Return the ids that an origin's policies have in the vault."""
    last = origin["first"] + origin["num_policies"] - 1 + (origin["unknown"] and origins > 1)
    if last < origin["first"]:
        return "unknown"
    return f"{origin['first']} to {last}" if last > origin["first"] else str(last)
