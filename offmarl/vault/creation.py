"""Creating vaults: built beside their place, made durable, and moved there whole."""

import json
import operator
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, SupportsIndex, get_args

from offmarl.errors import VaultError, VaultExistsError, VaultLockedError
from offmarl.types import EnvSpec
from offmarl.vault import layout
from offmarl.vault.atomic import (
    clear,
    existing,
    make_directory,
    publish,
    refuse_existing,
)
from offmarl.vault.layout import Codec, Head, Schema
from offmarl.vault.location import Location, absolute
from offmarl.vault.metadata import to_metadata, without_episodes
from offmarl.vault.open import SUFFIX, is_vault, linked_vaults_in, vaults_in
from offmarl.vault.store import METADATA, Store, WriterLock, errors_of
from offmarl.vault.values import OnInvalid
from offmarl.vault.writer import Writer

DEFAULT_UID = "main"


def create(
    path: str | os.PathLike[str],
    spec: EnvSpec,
    *,
    rows: SupportsIndex,
    provenance: Mapping[str, Any] | None = None,
    chunk_steps: SupportsIndex | None = None,
    codec: Codec = "raw",
    on_invalid: OnInvalid = "raise",
) -> Writer:
    """Create an empty vault and open it for writing.

    Parameters
    ----------
    path
        ``<directory>/<name>.vlt/<uid>``; where it stops at ``.vlt`` the uid is "main".
    spec
        The environment's sizes, and so the arrays' shapes.
    rows
        Parallel environments; every append has as many rows.
    provenance
        Where the data comes from; a JSON object.
    chunk_steps
        Steps of one row that are stored together, 1024 by default, or as many as make 32 MB with
        all rows. So much is held in memory, and `Writer.flush` writes so much unless the steps so
        far are a multiple: flush at multiples where you flush often.
    codec
        "raw": uncompressed, with CRC32C beside each chunk. "zstd": compressed frames with checksum.
    on_invalid
        What the writer does with invalid values, such as NaN: "raise" refuses them, as
        `Writer.append` says. "keep", for data that is imported as it is, stores them with a warning
        and notes them in the provenance, under "quirks".

    Raises
    ------
    VaultExistsError
        There is something at the path.
    VaultError
        The path names no vault, an option makes no sense, or nothing can be written there.
    """
    location = _destination(path)
    spec = _plain(spec)
    count = _at_least_one("rows", rows)
    if chunk_steps is None:
        chunk_steps = layout.default_chunk_steps(spec, count)
    steps = _at_least_one("chunk_steps", chunk_steps)
    if codec not in get_args(Codec):
        raise VaultError(f"there is no codec {codec!r}: it is {' or '.join(get_args(Codec))}.")
    schema = Schema(spec, count, layout.default_chunk_rows(count, steps), steps, codec)
    _check_sizes(schema)
    make = _create_beside if location.is_directory else _create_in_place
    with errors_of(location.path):
        return make(location, schema, provenance or {}, on_invalid)


def _create_beside(
    location: Location, schema: Schema, provenance: Mapping[str, Any], on_invalid: OnInvalid
) -> Writer:
    final = location.directory
    fresh = final.with_name(f".{final.name}.new")
    make_directory(fresh)
    try:
        lock = WriterLock(fresh)
    except VaultLockedError:
        raise
    except VaultError:
        _remove(fresh)
        raise
    try:
        _refuse_existing(location)
        clear(fresh)
        _fill(Location(fresh), schema, provenance)
        publish(fresh, final)
        return Writer(final, lock, on_invalid)
    except BaseException:
        _remove(fresh)  # before others may build there
        lock.release()
        raise


def _create_in_place(
    location: Location, schema: Schema, provenance: Mapping[str, Any], on_invalid: OnInvalid
) -> Writer:
    """Create where nothing can be renamed: what a vault is known by comes last."""
    lock = WriterLock(location.path)
    _refuse_existing(location)
    location.clear()
    _fill(location, schema, provenance)
    return Writer(location.path, lock, on_invalid)


@contextmanager
def create_whole(path: str | os.PathLike[str], spec: EnvSpec, **options: Any) -> Iterator[Writer]:
    """Create a vault that appears at its path when the block ends, and not at all if it fails.

    Takes the parameters of `create`.
    """
    location = free_place(path)
    whole = _whole_beside if location.is_directory else _whole_in_place
    with whole(location, spec, options) as writer:
        yield writer


@contextmanager
def _whole_beside(location: Location, spec: EnvSpec, options: dict[str, Any]) -> Iterator[Writer]:
    final = location.directory
    part = final.with_name(f".{final.name}.part")
    if part.exists():
        _discard(part)
    writer = create(part, spec, **options)
    try:
        yield writer
        writer.flush()
        with errors_of(final):
            _refuse_existing(location)
            publish(part, final)
        writer.path = final
    except BaseException:
        _remove(part)
        raise
    finally:
        writer.release()


@contextmanager
def _whole_in_place(location: Location, spec: EnvSpec, options: dict[str, Any]) -> Iterator[Writer]:
    """Create where nothing can be renamed; a killed process leaves the steps so far."""
    writer = create(location.path, spec, **options)
    try:
        yield writer
        writer.flush()
    except BaseException:
        writer.release()
        location.clear()
        raise
    finally:
        writer.release()


def free_place(path: str | os.PathLike[str]) -> Location:
    """Return where a vault of this path will be; `VaultError` where it cannot be created."""
    location = _destination(path)
    _refuse_existing(location)
    return location


def _destination(path: str | os.PathLike[str]) -> Location:
    given = absolute(path)
    if given.name.endswith(SUFFIX):
        for found in (*vaults_in(given), *linked_vaults_in(given)):
            raise VaultExistsError(f"{given} holds {found.name} already: choose another name.")
        return Location.of(given / DEFAULT_UID)
    if not given.parent.name.endswith(SUFFIX):
        raise VaultError(
            f"{given} cannot be the path of a vault: it must be <name>{SUFFIX} or "
            f"<name>{SUFFIX}/<uid>, as in {given.with_suffix(SUFFIX)}."
        )
    return Location.of(given)


def _refuse_existing(location: Location) -> None:
    if location.is_directory:
        refuse_existing(location.directory)
    elif is_vault(location):
        raise existing(location.path)


def _plain(spec: EnvSpec) -> EnvSpec:
    """Return a spec as it will be read back, with Python's numbers where it has NumPy's."""
    try:
        written = json.dumps(spec.to_json(), default=operator.index)
    except TypeError as error:
        raise VaultError(f"{spec} cannot be written to a vault: {error}.") from error
    plain = EnvSpec.from_json(json.loads(written))
    for name in ("num_agents", "observation_size", "state_size", "action_size"):
        _at_least_one(f"the spec's {name}", getattr(plain, name))
    return plain


def _at_least_one(name: str, value: SupportsIndex) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = 0
    if number < 1:
        raise VaultError(f"{name} must be a whole number of at least 1: got {value!r}.")
    return number


def _check_sizes(schema: Schema) -> None:
    """Raise `VaultError` where a vault would be one that nobody opens."""
    if schema.rows > layout.MAX_ROWS:
        raise VaultError(f"a vault has {layout.MAX_ROWS} rows at most: got {schema.rows}.")
    if schema.chunk_bytes > layout.MAX_CHUNK_BYTES:
        raise VaultError(
            f"chunks of {schema.chunk_rows} rows and {schema.chunk_steps} steps would take "
            f"{schema.chunk_bytes} bytes, and {layout.MAX_CHUNK_BYTES} is the most: choose fewer "
            "chunk_steps."
        )


def _fill(location: Location, schema: Schema, provenance: Mapping[str, Any]) -> None:
    """Write an empty vault where nobody else writes."""
    writes = without_episodes(schema, provenance, Head())
    Store(location.path).commit(writes, fence={}).result()
    location.write(METADATA, layout.dump_json(to_metadata(schema)))


def _discard(part: Path) -> None:
    """Remove what a killed process left, unless it still writes."""
    lock = WriterLock(part)
    shutil.rmtree(part)
    lock.release()


def _remove(failed: Path) -> None:
    """Remove a vault that came to nothing, and the directory made for it."""
    shutil.rmtree(failed, ignore_errors=True)
    with suppress(OSError):
        failed.parent.rmdir()
