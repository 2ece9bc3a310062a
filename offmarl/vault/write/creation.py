"""Creates vaults: each is built in a temporary directory, made durable, and moved to its path."""

import json
import operator
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, SupportsIndex, get_args

from offmarl.errors import VaultError, VaultExistsError, VaultLockedError
from offmarl.paths import no_empty_directories
from offmarl.types import EnvSpec
from offmarl.vault.format import layout
from offmarl.vault.format.layout import METADATA, Codec, Head, Schema
from offmarl.vault.format.metadata import to_metadata, without_episodes
from offmarl.vault.format.tables import none_running
from offmarl.vault.format.values import OnInvalid
from offmarl.vault.read.manifest import Manifest
from offmarl.vault.read.open import SUFFIX
from offmarl.vault.storage.files import (
    WriterLock,
    clear_directory,
    errors_of,
    make_directory,
    publish,
)
from offmarl.vault.storage.location import absolute_location
from offmarl.vault.storage.store import Directory, Store, store_of
from offmarl.vault.write.writer import Writer

DEFAULT_UID = "main"


def create(
    path: str | os.PathLike[str],
    spec: EnvSpec,
    *,
    rows: SupportsIndex,
    provenance: Mapping[str, Any] | None = None,
    chunk_steps: SupportsIndex | None = None,
    expected_steps: SupportsIndex | None = None,
    codec: Codec = "raw",
    on_invalid: OnInvalid = "raise",
) -> Writer:
    """Create an empty vault and open it for writing.

    Parameters
    ----------
    path
        ``<directory>/<name>.vlt/<uid>``; if it ends in ``.vlt``, the uid is "main".
    spec
        The environment's sizes, and so the arrays' shapes and types: the leaves of observations and
        of the state, and `EnvSpec.extras`, further arrays of your own.
    rows
        Parallel environments; every append has as many rows.
    provenance
        Where the data comes from; a JSON object.
    chunk_steps
        Steps of one row that are stored together, a chunk: 1024 by default, or fewer so that all
        rows take at most 32 MB (with images, 1 MB). One chunk is held in memory. `Writer.flush`
        writes an unfinished chunk as a whole, so flush at multiples of this number if you flush
        often.
    expected_steps
        Steps that each row will have, if you know it. Without ``chunk_steps``, chunks are then
        shorter so that little of the last one stays empty. More or fewer steps are accepted.
    codec
        "raw": uncompressed, with a CRC32C for each chunk. "zstd": compressed frames with checksums.
    on_invalid
        What the writer does with invalid values, such as NaN: "raise" refuses them, as
        `Writer.append` says. "keep", for data that is imported as it is, stores them with a warning
        and records them in the provenance, under "quirks".

    Raises
    ------
    VaultExistsError
        Something exists at the path.
    VaultError
        The path cannot be a vault's, an option is invalid, or the place is not writable.
    ShapeError
        A leaf of the spec is empty or has too many axes, or there are too many leaves.
    """
    place = destination(path)
    schema = _schema(spec, rows, chunk_steps, expected_steps, codec)
    with errors_of(place.path), _building(place, "new") as (built, lock):
        empty = _fill(built, schema, provenance or {})
        _publish(built, place)
        return Writer(place, lock, empty, on_invalid)


def _schema(
    spec: EnvSpec,
    rows: SupportsIndex,
    chunk_steps: SupportsIndex | None,
    expected_steps: SupportsIndex | None,
    codec: Codec,
) -> Schema:
    """Return a new vault's schema; `VaultError` if an option is invalid, or it is too large."""
    spec = _plain(spec)
    count = _at_least("rows", rows)
    if expected_steps is not None:
        expected_steps = _at_least("expected_steps", expected_steps)
    if chunk_steps is None:
        chunk_steps = layout.default_chunk_steps(spec, count, expected_steps)
    steps = _at_least("chunk_steps", chunk_steps)
    if codec not in get_args(Codec):
        raise VaultError(f"codec must be {' or '.join(get_args(Codec))}, not {codec!r}.")
    schema = Schema(spec, count, layout.default_chunk_rows(count, steps), steps, codec)
    if schema.rows > layout.MAX_ROWS:
        raise VaultError(f"a vault can have at most {layout.MAX_ROWS} rows: got {schema.rows}.")
    if schema.chunk_bytes > layout.MAX_CHUNK_BYTES:
        raise VaultError(
            f"chunks of {schema.chunk_rows} rows and {schema.chunk_steps} steps would take "
            f"{schema.chunk_bytes} bytes, and {layout.MAX_CHUNK_BYTES} is the most: choose fewer "
            "chunk_steps."
        )
    return schema


@contextmanager
def create_whole(
    path: str | os.PathLike[str],
    spec: EnvSpec,
    *,
    rows: SupportsIndex,
    provenance: Mapping[str, Any] | None = None,
    chunk_steps: SupportsIndex | None = None,
    expected_steps: SupportsIndex | None = None,
    codec: Codec = "raw",
    on_invalid: OnInvalid = "raise",
) -> Iterator[Writer]:
    """Create a vault that appears at its path when the block ends, and not at all if it fails.

    Takes the parameters of `create`.
    """
    place = free_place(path)
    schema = _schema(spec, rows, chunk_steps, expected_steps, codec)
    with ExitStack() as last, _building(place, "part") as (built, lock):
        with errors_of(place.path):
            writer = Writer(built, lock, _fill(built, schema, provenance or {}), on_invalid)
        last.callback(writer.release)  # once a failed vault is removed, others may build there
        try:
            yield writer
            writer.flush()
        except BaseException:
            writer._settle()
            raise
        _publish(built, place)
        writer.path = place.path


def _publish(built: Store, place: Store) -> None:
    """Move a vault to its place, unless it was built there."""
    if built is not place:
        with errors_of(place.path):
            place.refuse_existing()
            publish(built.directory, place.directory)


@contextmanager
def _building(place: Store, suffix: str) -> Iterator[tuple[Store, WriterLock]]:
    """Build a vault beside its place; it is removed if the block fails.

    Where nothing can be renamed, it is built in place: ``metadata.json`` marks a vault and comes
    last, and a killed process leaves an incomplete one.
    """
    with ExitStack() as stack:
        with errors_of(place.path):
            if place.is_local:
                final = place.directory
                built: Store = Directory(final.with_name(f".{final.name}.{suffix}"))
                remove: Callable[[], None] = partial(shutil.rmtree, built.directory, True)
                stack.enter_context(no_empty_directories(final.parent))
                make_directory(built.directory)
            else:
                built, remove = place, place.clear
                place.refuse_existing()
            try:
                lock = built.lock()
            except VaultError as error:
                if built is not place and not isinstance(error, VaultLockedError):
                    remove()
                raise
        try:
            with errors_of(place.path):
                if built is place:
                    place.clear()
                else:
                    place.refuse_existing()
                    clear_directory(built.directory)
            yield built, lock
        except BaseException:
            remove()  # before others may build there
            lock.release()
            raise


def free_place(path: str | os.PathLike[str]) -> Store:
    """Return the place of a new vault; `VaultError` if it cannot be created there."""
    place = destination(path)
    place.refuse_existing()
    return place


def destination(path: str | os.PathLike[str], may_exist: bool = False) -> Store:
    """Return the place of a vault to be created."""
    vault_path = absolute_location(path)
    for above in vault_path.parents if isinstance(vault_path, Path) else ():
        if (above / layout.MANIFEST).is_file():
            raise VaultError(f"{vault_path} is inside the vault {above}: choose another place.")
    if vault_path.name.endswith(SUFFIX):
        dataset = store_of(vault_path)
        if may_exist and [vault.name for vault in dataset.vaults()] == [DEFAULT_UID]:
            return store_of(vault_path / DEFAULT_UID)
        for entry in (*dataset.vaults(), *dataset.links()):
            raise VaultExistsError(f"{vault_path} holds {entry.name} already: choose another name.")
        return store_of(vault_path / DEFAULT_UID)
    if not vault_path.parent.name.endswith(SUFFIX):
        raise VaultError(
            f"{vault_path} cannot be the path of a vault: it must be <name>{SUFFIX} or "
            f"<name>{SUFFIX}/<uid>, as in {vault_path.parent / (vault_path.stem + SUFFIX)}."
        )
    return store_of(vault_path)


def _plain(spec: EnvSpec) -> EnvSpec:
    """Return a spec as it will be read back, with NumPy's numbers converted to Python's."""
    try:
        written = json.dumps(spec.to_json(), default=operator.index)
    except TypeError as error:
        raise VaultError(f"{spec} cannot be written to a vault: {error}.") from error
    for name in ("num_agents", "observation_size", "action_size"):
        _at_least(f"the spec's {name}", getattr(spec, name))
    _at_least("the spec's state_size", spec.state_size, 0)
    plain = EnvSpec.from_json(json.loads(written))
    layout.check_leaves(plain)
    return plain


def _at_least(name: str, value: SupportsIndex, least: int = 1) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise VaultError(f"{name} must be a whole number of at least {least}: got {value!r}.")
    return number


def _fill(store: Store, schema: Schema, provenance: Mapping[str, Any]) -> Manifest:
    """Write an empty vault in a place that is locked or new."""
    keys = without_episodes(schema, provenance)
    store.commit(keys, fence={}).result()
    store.write(METADATA, layout.dump_json(to_metadata(schema)))
    running = none_running(schema.rows, schema.record)
    return Manifest(schema, Head(), running, json.loads(keys[layout.PROVENANCE_KEY]), 0)
