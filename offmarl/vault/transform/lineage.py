"""What a transform notes of where its data comes from."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from offmarl.errors import VaultError
from offmarl.types import EnvSpec
from offmarl.vault import layout
from offmarl.vault.dataset import Vault
from offmarl.vault.digest import digest
from offmarl.vault.layout import NumpyArray
from offmarl.vault.progress import Advance
from offmarl.vault.transform import origins
from offmarl.vault.transform.origins import Named, Origin
from offmarl.vault.transform.selection import Pieces

_MOST_BYTES = 2**18
"""Of what is told of all sources of a vault; of older ones less is told."""
_LEAST_BYTES = 256
"""Less is not worth telling of a source."""


class Source(NamedTuple):
    """A vault that another is made of."""

    vault: Vault
    digest: str
    """Or what stands for it where a part of the vault is damaged: what is taken need not be."""
    named: list[Named]

    @property
    def origins(self) -> list[Origin]:
        """The origins of its policies."""
        return [named.origin for named in self.named]

    def present(self, pieces: Pieces) -> list[Named]:
        """Return the origins that pieces of it are of."""
        policy_id = self.vault.episodes.policy_id[pieces.episode]
        numbers = set(origins.origin_of(policy_id, self.origins).tolist())
        return [self.named[number] for number in sorted(numbers)]


def name_of(vault: Vault) -> str:
    """Return what a vault is called, wherever it lies: ``name.vlt/uid``."""
    return f"{vault.name}.vlt/{vault.uid}"


def examine(vault: Vault, advance: Advance) -> Source:
    """Read a vault through, for what tells it from others."""
    try:
        found = digest(vault, lambda steps: advance(steps * vault.rows))
    except VaultError:  # copying will say so if what is damaged is taken
        return of_damaged(vault, None)
    return Source(vault, found, origins.of_vault(vault, found))


def of_damaged(vault: Vault, ids: Iterable[NumpyArray] | None) -> Source:
    """Return a vault that cannot be read through, told from others by its episode table.

    ``ids`` are those of its policies, as `offmarl.vault.transform.origins.of_vault` takes them.
    """
    total = hashlib.sha256()
    for column in vault.episodes:
        total.update(column.tobytes())
    found = f"damaged, episode table {total.hexdigest()}"
    return Source(vault, found, origins.of_vault(vault, found, ids))


def provenance(
    operation: str,
    arguments: Mapping[str, Any],
    sources: Sequence[tuple[Source, Pieces]],
    united: Iterable[Named],
) -> dict[str, Any]:
    """Return the provenance of a vault that a transform makes.

    Returns
    -------
    dict
        ``lineage``: the operation, its arguments, the version, and each source with its digest, how
        much was taken of it, and its own provenance. ``origins``: the vaults whose policies these
        are. ``policies``: what was told of these, if anything, under the ids they have here.
    """
    from offmarl import __version__

    united = list(united)
    policies = [policy for named in united for policy in named.policies]
    share = _MOST_BYTES // len(sources)
    return {
        "lineage": {
            "operation": operation,
            "arguments": {
                name: arguments[name] for name in arguments if arguments[name] is not None
            },
            "offmarl": __version__,
            "sources": [_describe(source, pieces, share) for source, pieces in sources],
        },
        origins.KEY: [named.origin._asdict() for named in united],
    } | ({"policies": policies} if policies else {})


def _describe(source: Source, pieces: Pieces, most_bytes: int) -> dict[str, Any]:
    vault = source.vault
    told = {
        "vault": name_of(vault),
        "digest": source.digest,
        "native": vault.native,
        "episodes": len(vault.episodes.row),
        "steps": vault.num_steps,
        "taken": {"episodes": pieces.episodes, "steps": pieces.steps},
        "provenance": _bounded(vault.provenance, most_bytes),
    }
    if vault.quirks:
        told["quirks"] = list(vault.quirks)
    if vault.unverified:
        told["unverified"] = [list(interval) for interval in vault.unverified]
    return told


def _bounded(told: Mapping[str, Any], most_bytes: int) -> dict[str, Any]:
    """Leave out what makes a provenance too long, the oldest sources first."""
    sources = sources_of(told)
    if sources:  # the vault made of it tells of its policies
        told = {key: told[key] for key in told if key not in (origins.KEY, "policies")}
    size = len(layout.dump_json(dict(told)))
    if size <= most_bytes:
        return dict(told)
    share = most_bytes // (2 * max(len(sources), 1))
    if not sources or share < _LEAST_BYTES:
        return {"left out": f"{size} bytes"}
    shorter = [
        {**source, "provenance": _bounded(source.get("provenance", {}), share)}
        for source in sources
    ]
    return {"lineage": {**told["lineage"], "sources": shorter}}


def sources_of(told: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return what a provenance tells of the sources of a transform; nothing if there was none."""
    lineage = told.get("lineage")
    sources = lineage.get("sources") if isinstance(lineage, dict) else None
    return sources if isinstance(sources, list) else []


def common_spec(vaults: Sequence[Vault]) -> EnvSpec:
    """Return the spec of vaults that are to be one.

    Raises
    ------
    ShapeError
        Their sizes differ, or their environments do.
    """
    from offmarl.errors import ShapeError

    first = next((vault for vault in vaults if vault.spec.name), vaults[0])
    limits = {vault.time_limit for vault in vaults} - {None}
    if len(limits) > 1:
        raise ShapeError(f"the vaults have different time limits: {', '.join(map(str, limits))}.")
    for vault in vaults:
        difference = vault.spec.difference(first.spec)
        if vault.spec.name and not difference:
            difference = _other_settings(vault.spec, first.spec)
        if difference:
            raise ShapeError(
                f"{vault.path} cannot be joined with {first.path}: it differs in {difference}."
            )
    return first.spec


def _other_settings(ours: EnvSpec, theirs: EnvSpec) -> str:
    for setting in ("name", "time_limit", "reward", "state"):
        a, b = getattr(ours, setting), getattr(theirs, setting)
        if a != b:
            return f"{setting} ({a!r}, not {b!r})"
    return ""
