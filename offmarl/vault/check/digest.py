"""Digests of a vault's content, which do not depend on how it is stored."""

import hashlib
import re
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np

from offmarl._arrays import join_bytes
from offmarl.errors import VaultError
from offmarl.paths import cache_directory, is_off
from offmarl.terminal import Advance, silent
from offmarl.tracking import replace_file
from offmarl.types import EnvSpec, Transition, flatten_view
from offmarl.vault.format import encoding, layout
from offmarl.vault.format.layout import Leaf, NumpyArray
from offmarl.vault.read.manifest import read_manifest
from offmarl.vault.read.reader import Reader
from offmarl.vault.storage.location import is_forked
from offmarl.vault.storage.store import OcdbtStore

DIGESTS_DIRECTORY = "digests"
"""The directory of `offmarl.paths.cache_directory` in which `known_digest` keeps digests."""
_CACHE_VERSION = 2
_OFF = "OFFMARL_DIGEST_CACHE"
_HEXADECIMAL = re.compile("[0-9a-f]{64}")


def digest(vault: Reader, advance: Advance = silent) -> str:
    """Return the SHA-256 of a vault's logical content, in hexadecimal.

    It covers every episode's steps, cause and final view, in any order. So it does not depend on
    the codec, the chunks, the rows, the order of the episodes or the program that wrote them.
    Policy ids that are equal over agents count as one: a vault with one id for a step has the same
    digest as a vault with one for each agent.
    """
    # The axis of agents of policy ids is not hashed, so the digests of older vaults stay the same.
    leaves = dict(layout.leaves(vault.spec))
    leaves[layout.POLICY_IDS] = Leaf(leaves[layout.POLICY_IDS].dtype, ())
    shapes = [_describe(name, leaf, vault.spec) for name, leaf in leaves.items()]
    total = hashlib.sha256(layout.dump_json(shapes))
    total.update(np.sort(episode_digests(vault, advance=advance)).data)
    return total.hexdigest()


def known_digest(vault: Reader, advance: Advance = silent) -> str:
    """Return the `digest`, from a cache if this user computed it of the same commit before.

    So only the first use of a vault reads all of it. Without checksums for all of its chunks, it is
    always read: with them, data that was damaged since raises an error when it is used. To compare
    data with a digest, call `digest`.
    """
    if vault.store.digest:
        return vault.store.digest
    directory, name = cache_directory(DIGESTS_DIRECTORY), None if is_off(_OFF) else _commit(vault)
    if directory is None or name is None:
        return digest(vault, advance)
    file = directory / name
    with suppress(OSError, ValueError):
        hexdigest = file.read_text()
        if _HEXADECIMAL.fullmatch(hexdigest):
            advance(vault.length)
            return hexdigest
    hexdigest = digest(vault, advance)
    with suppress(OSError):
        replace_file(file, hexdigest)
    return hexdigest


def _commit(vault: Reader) -> str | None:
    """Return an identifier of the content of a vault without reading it; None if there is none.

    It is a checksum of the file that says where the last commit is stored, and of what the system
    says of the data files: a copy of a vault, or one that replaces it, may have other data in
    files of the same names.
    """
    store, manifest = vault.store, vault.manifest
    # Reads must see later commits. A fork of a process that read the vault sees the old one.
    shows_commits = isinstance(store, OcdbtStore) and store.staleness is None
    if manifest is None or vault.unchecked or not shows_commits or is_forked():
        return None
    with suppress(OSError, ValueError, VaultError):
        content, now = store.read(layout.MANIFEST), read_manifest(store)
        is_old = now is None or now.counts != manifest.counts
        if content is None or is_old or content != store.read(layout.MANIFEST):
            return None  # a program has written to the vault since it was opened
        paths = sorted(store.directory.glob(f"{layout.DATA}/*")) if store.is_local else []
        files = [(x.name, x.stat().st_ino, x.stat().st_ctime_ns) for x in paths]
        identity = layout.dump_json([_CACHE_VERSION, files]) + manifest.counts
        return hashlib.sha256(identity + content).hexdigest()
    return None


def fingerprint(vault: Reader) -> str:
    """Return a checksum of a vault's episode table and of its chunks' checksums, in hexadecimal.

    It tells whether the data has changed since, and reads no steps. Unlike `digest`, it depends on
    the chunks and on the codec. Chunks have no checksums where another program wrote them, or where
    they are damaged: there, only a change of the episode table is found.
    """
    total = hash_table(vault)
    if vault.manifest is not None:
        schema, head = vault.manifest.schema, vault.manifest.head
        numbers = range(-(-head.length // schema.chunk_steps))
        with suppress(VaultError):
            for value in vault.store.get_all([layout.checksums_key(number) for number in numbers]):
                total.update(value)
    return total.hexdigest()


def hash_table(vault: Reader) -> Any:
    """Return the SHA-256 of a vault's episode table, to which more can be added."""
    return hashlib.sha256(b"".join(column.tobytes() for column in vault.episodes.columns))


def _describe(name: str, leaf: Leaf, spec: EnvSpec) -> list[Any]:
    """Return the parts of a leaf that the digest covers: its name, type and shape.

    The types of vectors are not covered, and float32 arrays count as vectors, so that the digests
    of existing data stay the same.
    """
    if name == layout.OBSERVATIONS and leaf.dtype == np.float32:
        return [name, spec.num_agents, spec.observation_size]
    if name == layout.STATE and leaf.dtype == np.float32:
        return [name, spec.state_size]
    trees = (layout.OBSERVATIONS, layout.STATE, layout.EXTRAS)
    types = [leaf.dtype.name] if name.startswith(trees) else []
    return [name, *types, *leaf.shape]


def episode_digests(
    vault: Reader, *, policies: bool = True, advance: Advance = silent
) -> NumpyArray:
    """Return the SHA-256 of each episode, ``(M,)`` of 32 bytes, as `Dataset.episodes` has them.

    NumPy leaves out zeros at the end of an item, so items can be compared but not hashed further.
    """
    digests = np.zeros(len(vault.episodes.row), "S32")
    for episode, value in _of_episodes(vault, policies, advance):
        digests[episode] = value
    return digests


def _of_episodes(vault: Reader, policies: bool, advance: Advance) -> Iterator[tuple[int, bytes]]:
    episodes = vault.episodes
    ends = episodes.start + episodes.length
    running: dict[int, Any] = {}
    teams: dict[int, Any] = {}
    for begin, stop in vault.blocks():
        transition = vault.transitions(begin, stop)
        steps, mixed = _pack_steps(transition, policies), _mixed_steps(transition, policies)
        some_mixed = bool(mixed.any())
        numbers = np.flatnonzero((episodes.start < stop) & (ends > begin))
        finals = _finals(vault, numbers[(ends[numbers] <= stop) & (episodes.final[numbers] >= 0)])
        for episode in numbers.tolist():
            row, start, end = episodes.row[episode], episodes.start[episode], ends[episode]
            hasher = running.setdefault(row, hashlib.sha256())
            span = slice(max(start, begin) - begin, min(end, stop) - begin)
            hasher.update(steps[row, span])
            if some_mixed and (time := np.flatnonzero(mixed[row, span]) + span.start).size:
                ids = np.column_stack([time + begin - start, transition.policy_id[row, time]])
                teams.setdefault(row, hashlib.sha256()).update(ids.astype("<i8").tobytes())
            if end <= stop:
                hasher.update(episodes.cause[episode].encode())
                hasher.update(finals.get(episode, b""))
                hasher.update(teams.pop(row).digest() if row in teams else b"")
                yield episode, running.pop(row).digest()
        advance(stop - begin)


def _mixed_steps(steps: Transition, policies: bool) -> NumpyArray:
    """Return the mask ``(B, T)`` of steps at which agents have different policies."""
    ids = np.asarray(steps.policy_id)
    if not policies:
        return np.zeros(ids.shape[:2], bool)
    return (ids != ids[..., :1]).any(-1)


def _finals(vault: Reader, episodes: NumpyArray) -> dict[int, NumpyArray]:
    """Return the final views of episodes that have one, packed."""
    views = vault.final_views(vault.episodes.final[episodes])
    packed = join_bytes(flatten_view(views).values(), 1)
    return dict(zip(episodes.tolist(), packed, strict=True))


def _pack_steps(transition: Transition, policies: bool) -> NumpyArray:
    arrays = encoding.to_disk(transition)
    ids = arrays.pop(layout.POLICY_IDS)
    if policies:  # those of the first agent; or one id for the whole team
        arrays[layout.POLICY_IDS] = ids if ids.ndim < 3 else ids[..., 0]
    return join_bytes(arrays.values(), 2)
