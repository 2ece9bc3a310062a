"""The sources of a transform: the ids of their policies in the new vault, and its provenance.

A vault that was recorded or imported, and not made by a transform, is an origin. Transforms give
the policies of every origin an interval of ids of its own, so policies of different origins stay
apart. Parts of one origin keep the same ids however often they are joined again.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec
import numpy as np
from jaxtyping import Int

from offmarl._version import __version__
from offmarl.errors import VaultError
from offmarl.records import Size
from offmarl.terminal import Advance
from offmarl.vault.check.digest import digest, hash_table
from offmarl.vault.format.layout import POLICY_IDS, NumpyArray, dump_json
from offmarl.vault.read.reader import Reader
from offmarl.vault.transform.selection import Pieces
from offmarl.vault.write.creation import DEFAULT_UID

_ORIGINS = "origins"
"""Key of the provenance that lists the origins."""
_MOST_BYTES = 2**18
"""Maximum size of the description of all sources; older generations are left out first."""
_LEAST_BYTES = 256
"""Minimum size of a source's description."""


class Origin(NamedTuple):
    """A vault in which data was recorded or imported, and the ids of its policies in this vault."""

    digest: str
    """Digest of its content, which identifies it."""
    vault: str
    """Its ``name.vlt/uid`` when it was first used as a source."""
    program: str | None
    """The program that trained the policies, or the policy itself if it was not trained."""
    tier: str
    """The recorded tier; otherwise the vault's uid, or its name if it has the default uid."""
    seed: int | None
    first: Size
    """The id of its policy 0 in this vault."""
    num_policies: Size
    """All ids of its policies are below this in the original vault."""
    unknown: bool
    """Whether the policy of some steps is unknown. Those steps have the id -1; or, in a vault of
    several origins, the id after the others of their origin."""

    @property
    def stop(self) -> int:
        """One past the last id of this origin."""
        return self.first + self.num_policies + self.unknown


class Named(NamedTuple):
    """An origin of a vault, and the facts about its policies, by their ids in that vault."""

    origin: Origin
    policies: list[dict[str, Any]]


class LineageSource(NamedTuple):
    """An input of a transform."""

    vault: Reader
    digest: str
    """Digest of its content, or of its episode table if the vault is damaged."""
    named: list[Named]

    @property
    def origins(self) -> list[Origin]:
        """The origins of its policies."""
        return [named.origin for named in self.named]

    def to_json(self) -> dict[str, Any]:
        """Return the source as JSON; `from_json` restores it without reading the vault."""
        return {"digest": self.digest, "named": [[*named] for named in self.named]}

    @classmethod
    def from_json(cls, vault: Reader, data: Mapping[str, Any]) -> "LineageSource":
        """Return the source of a vault that was examined before."""
        named = [Named(Origin(*origin), policies) for origin, policies in data["named"]]
        return cls(vault, data["digest"], named)


def examine(vault: Reader, advance: Advance) -> LineageSource:
    """Compute a vault's digest and find its origins; reads all of it."""
    try:
        content_digest = digest(vault, lambda steps: advance(steps * vault.rows))
    except VaultError:  # if a damaged part is copied, copying raises
        return examine_damaged(vault, None)
    return LineageSource(vault, content_digest, _origins(vault, content_digest))


def examine_damaged(vault: Reader, ids: Iterable[NumpyArray] | None) -> LineageSource:
    """Identify a vault that cannot be read completely by its episode table."""
    table_digest = f"damaged, episode table {hash_table(vault).hexdigest()}"
    return LineageSource(vault, table_digest, _origins(vault, table_digest, ids))


def name_of(vault: Reader) -> str:
    """Return ``name.vlt/uid``, which does not depend on the directory."""
    return f"{vault.name}.vlt/{vault.uid}"


def sources_of(provenance: Any) -> list[Mapping[str, Any]]:
    """Return the descriptions of a transform's sources; empty if no transform made the vault."""
    lineage = _mapping(_mapping(provenance).get("lineage"))
    return [source for source in _list(lineage.get("sources")) if isinstance(source, Mapping)]


def origin_of(policy_id: Int[np.ndarray, "M"], origins: Sequence[Origin]) -> Int[np.ndarray, "M"]:
    """Return the number of each policy's origin."""
    firsts = [origin.first for origin in origins]
    return np.maximum(np.searchsorted(firsts, policy_id, side="right") - 1, 0)


def merge(present: Iterable[Named]) -> list[Named]:
    """Give origins ids that do not overlap, in the order of their first appearance.

    A single origin keeps its ids.
    """
    distinct: dict[str, Named] = {}
    for named in present:
        distinct.setdefault(named.origin.digest, named)
    origins: list[Named] = []
    first = 0
    for origin, policies in distinct.values():
        label = {"origin": origin.vault} if len(distinct) > 1 else {}
        shift = first - origin.first
        renumbered = [
            {name: value for name, value in policy.items() if name != "origin"}
            | {"policy_id": policy["policy_id"] + shift}
            | label
            for policy in policies
        ]
        origins.append(Named(origin._replace(first=first), renumbered))
        first = origins[-1].origin.stop
    if len(origins) > 1 and first > 2**31:
        raise VaultError(
            f"the policies of {', '.join(named.origin.vault for named in origins)} have {first:,} "
            "ids, more than a vault can hold."
        )
    return origins


def merge_origins(selections: Iterable[tuple[LineageSource, Pieces]]) -> list[Named]:
    """Return the merged origins of selections from some sources."""
    origins: list[Named] = []
    for source, pieces in selections:
        numbers = origin_of(source.vault.episodes.policy_id[pieces.episode], source.origins)
        origins += [source.named[number] for number in np.unique(numbers).tolist()]
    return merge(origins)


def remap(ids: NumpyArray, source: Sequence[Named], target: Sequence[Named]) -> NumpyArray:
    """Translate policy ids of a source into those of the new vault."""
    origins = [named.origin for named in source]
    targets = {named.origin.digest: named.origin for named in target}
    number = origin_of(ids.ravel(), origins).reshape(ids.shape)
    result = np.empty_like(ids)
    for index, origin in enumerate(origins):
        mask = number == index
        new_ids = ids[mask] - origin.first
        if len(source) > 1:
            new_ids = np.where(new_ids == origin.num_policies, -1, new_ids)
        new = targets.get(origin.digest)
        if new is not None and len(target) > 1:
            new_ids = np.where(new_ids < 0, new.num_policies, new_ids) + new.first
        if new is not None:
            result[mask] = new_ids
    return result


def _origins(vault: Reader, digest: str, ids: Iterable[NumpyArray] | None = None) -> list[Named]:
    """Return the origins of a vault; the vault itself if no transform made it."""
    blocks = [(int(x.max()), int(x.min())) for x in (_ids(vault) if ids is None else ids)]
    highest = max((high for high, _ in blocks), default=-1)
    lowest = min((low for _, low in blocks), default=0)
    policies = [
        dict(policy)
        for policy in _list(vault.provenance.get("policies"))
        if isinstance(policy, Mapping) and isinstance(policy.get("policy_id"), int)
    ]
    entries = _list(vault.provenance.get(_ORIGINS)) if vault.native else []
    with suppress(AttributeError, ValueError):
        origins = [msgspec.convert([*map(x.get, Origin._fields)], Origin) for x in entries]
        if len(origins) == 1 and highest < origins[0].stop:
            return [Named(origins[0], policies)]
        if len(origins) > 1 and highest < origins[-1].stop and lowest >= 0:
            return [
                Named(x, [p for p in policies if x.first <= p["policy_id"] < x.stop])
                for x in origins
            ]
    count = max([highest, *(policy["policy_id"] for policy in policies)]) + 1
    return [Named(_root(vault, digest, count, lowest < 0), policies)]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _root(vault: Reader, digest: str, count: int, unknown: bool) -> Origin:
    facts = vault.provenance
    program = facts.get("program") or _mapping(facts.get("policy")).get("program")
    seeds = [_mapping(x).get("seed") for x in (facts, facts.get("recipe"), facts.get("args"))]
    return Origin(
        digest=digest,
        vault=name_of(vault),
        program=str(program) if program else None,
        tier=str(facts.get("tier") or (vault.name if vault.uid == DEFAULT_UID else vault.uid)),
        seed=next((seed for seed in seeds if isinstance(seed, int)), None),
        first=0,
        num_policies=count,
        unknown=unknown,
    )


def _ids(vault: Reader) -> Iterator[NumpyArray]:
    if POLICY_IDS not in vault.leaves:
        yield np.array([-1])
        return
    for block in vault.blocks([POLICY_IDS]):
        yield vault.read(*block, leaves=[POLICY_IDS])[POLICY_IDS]


# ---------------------------------------------------------------------------------- provenance


def provenance_of(
    operation: str,
    arguments: Mapping[str, Any],
    selections: Sequence[tuple[LineageSource, Pieces]],
    origins: Sequence[Named],
) -> dict[str, Any]:
    """Return the provenance of a vault that a transform makes."""
    policies = [policy for named in origins for policy in named.policies]
    share = _MOST_BYTES // len(selections)
    return {
        "lineage": {
            "operation": operation,
            "arguments": {
                name: arguments[name] for name in arguments if arguments[name] is not None
            },
            "offmarl": __version__,
            "sources": [_describe(source, pieces, share) for source, pieces in selections],
        },
        _ORIGINS: [named.origin._asdict() for named in origins],
    } | ({"policies": policies} if policies else {})


def _describe(source: LineageSource, pieces: Pieces, most_bytes: int) -> dict[str, Any]:
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
        provenance = {k: x for k, x in provenance.items() if k not in (_ORIGINS, "policies")}
    size = len(dump_json(dict(provenance)))
    if size <= most_bytes:
        return dict(provenance)
    share = most_bytes // (2 * len(sources)) if sources else 0
    if share < _LEAST_BYTES:
        return {"left out": f"{size} bytes"}
    shorter = [
        {**source, "provenance": _bounded(_mapping(source.get("provenance")), share)}
        for source in sources
    ]
    return {"lineage": {**provenance["lineage"], "sources": shorter}}
