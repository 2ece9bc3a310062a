"""The provenance of vaults that transforms make."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from offmarl._version import __version__
from offmarl.vault import layout
from offmarl.vault.transform import policy_ids
from offmarl.vault.transform.policy_ids import Named, Source, name_of, sources_of
from offmarl.vault.transform.selection import Pieces

_MOST_BYTES = 2**18
"""Maximum size of the description of all sources; older generations are left out first."""
_LEAST_BYTES = 256
"""Minimum size of a source's description."""


def provenance_of(
    operation: str,
    arguments: Mapping[str, Any],
    taken: Sequence[tuple[Source, Pieces]],
    merged: Iterable[Named],
) -> dict[str, Any]:
    """Return the provenance of a vault that a transform makes."""
    merged = list(merged)
    policies = [policy for named in merged for policy in named.policies]
    share = _MOST_BYTES // len(taken)
    return {
        "lineage": {
            "operation": operation,
            "arguments": {
                name: arguments[name] for name in arguments if arguments[name] is not None
            },
            "offmarl": __version__,
            "sources": [_describe(source, pieces, share) for source, pieces in taken],
        },
        policy_ids.KEY: [named.origin._asdict() for named in merged],
    } | ({"policies": policies} if policies else {})


def _describe(source: Source, pieces: Pieces, most_bytes: int) -> dict[str, Any]:
    vault = source.vault
    facts = {
        "vault": name_of(vault),
        "digest": source.digest,
        "native": vault.native,
        "episodes": len(vault.episodes.row),
        "steps": vault.num_steps,
        "taken": {"episodes": pieces.episodes, "steps": pieces.steps},
        "provenance": _bounded(vault.provenance, most_bytes),
    }
    if vault.quirks:
        facts["quirks"] = list(vault.quirks)
    if vault.unverified:
        facts["unverified"] = [list(interval) for interval in vault.unverified]
    return facts


def _bounded(provenance: Mapping[str, Any], most_bytes: int) -> dict[str, Any]:
    """Shorten a provenance to a size, from the oldest sources on."""
    sources = sources_of(provenance)
    if sources:  # the new vault lists the policies itself
        left_out = (policy_ids.KEY, "policies")
        provenance = {key: provenance[key] for key in provenance if key not in left_out}
    size = len(layout.dump_json(dict(provenance)))
    if size <= most_bytes:
        return dict(provenance)
    share = most_bytes // (2 * max(len(sources), 1))
    if not sources or share < _LEAST_BYTES:
        return {"left out": f"{size} bytes"}
    shorter = [
        {**source, "provenance": _bounded(source.get("provenance", {}), share)}
        for source in sources
    ]
    return {"lineage": {**provenance["lineage"], "sources": shorter}}
