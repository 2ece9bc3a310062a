"""Policies of several vaults in one: whose they are, and which ids they go by.

A vault that no transform made is an origin. Transforms carry its policies along under an interval
of ids of its own, so that policies of different origins stay apart, and those of one origin stay
the same however often parts of it come together again.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int

from offmarl.vault.creation import DEFAULT_UID
from offmarl.vault.dataset import Vault
from offmarl.vault.layout import POLICY_IDS, NumpyArray

KEY = "origins"
"""Where a vault's provenance keeps them."""


class Origin(NamedTuple):
    """A vault that data was recorded or imported in, and the ids of its policies in this one."""

    digest: str
    """Of its content; tells it from others."""
    vault: str
    """``name.vlt/uid``, as it was called."""
    program: str | None
    """What trained or was its policy."""
    tier: str
    """As it was recorded; otherwise the vault's uid, or its name where it has only the default."""
    seed: int | None
    first: int
    """The id of its policy 0 here."""
    num_policies: int
    """Its policies have ids below this, there."""
    unknown: bool
    """Whether there are steps of policies that it does not tell. These have the id -1; or, where
    there are several origins, the one after its others."""

    @property
    def stop(self) -> int:
        """The first id that is no longer of this origin."""
        return self.first + self.num_policies + self.unknown


class Named(NamedTuple):
    """An origin that a vault has, and what is told of its policies, under the ids there."""

    origin: Origin
    policies: list[dict[str, Any]]


def of_vault(vault: Vault, digest: str, ids: Iterable[NumpyArray] | None = None) -> list[Named]:
    """Return the origins of a vault; itself, if no transform made it.

    Parameters
    ----------
    vault, digest
        Which, and what tells it from others.
    ids
        The ids of its policies, a block of steps at a time; read from it if None.
    """
    highest, lowest = _extremes(_ids(vault) if ids is None else ids)
    policies = [
        dict(policy)
        for policy in _list(vault.provenance.get("policies"))
        if isinstance(policy, Mapping) and isinstance(policy.get("policy_id"), int)
    ]
    found = _carried(vault)
    if found and highest < found[-1].stop and (lowest >= 0 or len(found) == 1):
        return [Named(origin, _within(origin, policies, len(found) > 1)) for origin in found]
    count = max([highest, *(policy["policy_id"] for policy in policies)]) + 1
    return [Named(_root(vault, digest, count, lowest < 0), policies)]


def _carried(vault: Vault) -> list[Origin]:
    """Return the origins that a transform noted."""
    noted = _list(vault.provenance.get(KEY)) if vault.native else []
    fields = set(Origin._fields)
    if not all(isinstance(one, Mapping) and one.keys() == fields for one in noted):
        return []
    return [Origin(**one) for one in noted]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _within(
    origin: Origin, policies: Iterable[dict[str, Any]], shared: bool
) -> list[dict[str, Any]]:
    if not shared:
        return list(policies)
    return [policy for policy in policies if origin.first <= policy["policy_id"] < origin.stop]


def _root(vault: Vault, digest: str, count: int, unknown: bool) -> Origin:
    told = vault.provenance
    program = told.get("program") or _mapping(told.get("policy")).get("program")
    seeds = [_mapping(found).get("seed") for found in (told, told.get("recipe"), told.get("args"))]
    return Origin(
        digest=digest,
        vault=f"{vault.name}.vlt/{vault.uid}",
        program=str(program) if program else None,
        tier=str(told.get("tier") or (vault.name if vault.uid == DEFAULT_UID else vault.uid)),
        seed=next((seed for seed in seeds if isinstance(seed, int)), None),
        first=0,
        num_policies=count,
        unknown=unknown,
    )


def _ids(vault: Vault) -> Iterator[NumpyArray]:
    if POLICY_IDS not in vault.leaves:
        yield np.array([-1])
        return
    for block in vault.blocks([POLICY_IDS]):
        yield vault.read(*block, leaves=[POLICY_IDS])[POLICY_IDS]


def _extremes(blocks: Iterable[NumpyArray]) -> tuple[int, int]:
    """Return the highest and the lowest id of a policy."""
    found = [(int(ids.max()), int(ids.min())) for ids in blocks]
    return max((high for high, _ in found), default=-1), min((low for _, low in found), default=0)


def origin_of(policy_id: Int[np.ndarray, "M"], origins: Sequence[Origin]) -> Int[np.ndarray, "M"]:
    """Return the number of the origin that each policy is of."""
    firsts = [origin.first for origin in origins]
    return np.maximum(np.searchsorted(firsts, policy_id, side="right") - 1, 0)


def unite(present: Iterable[Named]) -> list[Named]:
    """Give origins ids that do not overlap, in the order they first come in.

    A single one keeps its own ids.
    """
    distinct: dict[str, Named] = {}
    for named in present:
        distinct.setdefault(named.origin.digest, named)
    united, first = [], 0
    for origin, policies in distinct.values():
        whose = {"origin": origin.vault} if len(distinct) > 1 else {}
        shift = first - origin.first
        moved = [
            {name: value for name, value in policy.items() if name != "origin"}
            | {"policy_id": policy["policy_id"] + shift}
            | whose
            for policy in policies
        ]
        united.append(Named(origin._replace(first=first), moved))
        first = united[-1].origin.stop
    return united


def translate(ids: NumpyArray, source: Sequence[Origin], target: Sequence[Origin]) -> NumpyArray:
    """Return the ids that policies of a source have in the vault made of it."""
    here = {origin.digest: origin for origin in target}
    number = origin_of(ids.ravel(), source).reshape(ids.shape)
    result = np.empty_like(ids)
    for index, origin in enumerate(source):
        mine = number == index
        own = ids[mine] - origin.first
        if len(source) > 1:
            own = np.where(own == origin.num_policies, -1, own)
        there = here.get(origin.digest)
        if there is not None:
            result[mine] = _named(own, there, shared=len(target) > 1)
    return result


def _named(own: NumpyArray, there: Origin, shared: bool) -> NumpyArray:
    """Return what an origin's own ids are called in a vault."""
    if not shared:
        return own
    return np.where(own < 0, there.num_policies, own) + there.first
