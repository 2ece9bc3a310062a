"""Creating vaults: built beside their place, made durable, and moved there whole."""

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, get_args

from offmarl.errors import VaultError, VaultExistsError
from offmarl.types import EnvSpec
from offmarl.vault import layout, tables
from offmarl.vault.layout import Codec, Head, Schema
from offmarl.vault.listing import SUFFIX, vaults_in
from offmarl.vault.store import LOCK, METADATA, Store, WriterLock, errors_of
from offmarl.vault.writer import Writer

DEFAULT_UID = "main"


def create(
    path: str | os.PathLike[str],
    spec: EnvSpec,
    *,
    rows: int,
    provenance: Mapping[str, Any] | None = None,
    chunk_steps: int | None = None,
    codec: Codec = "raw",
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

    Raises
    ------
    VaultExistsError
        There is something at the path.
    VaultError
        The path names no vault, an option makes no sense, or nothing can be written there.
    """
    final = _destination(path)
    if chunk_steps is None:
        chunk_steps = layout.default_chunk_steps(spec, max(rows, 1))
    chunk_rows = layout.default_chunk_rows(max(rows, 1), chunk_steps)
    schema = _check_schema(Schema(spec, rows, chunk_rows, chunk_steps, codec))
    fresh = final.with_name(f".{final.name}.new")
    with errors_of(final):
        fresh.mkdir(parents=True, exist_ok=True)
        lock = WriterLock(fresh)
        try:
            _refuse_existing(final)
            _initialise(fresh, schema, provenance or {})
            _publish(fresh, final)
            return Writer(final, lock)
        except BaseException:
            lock.release()
            _remove(fresh)
            raise


@contextmanager
def create_whole(path: str | os.PathLike[str], spec: EnvSpec, **options: Any) -> Iterator[Writer]:
    """Create a vault that appears at its path when the block ends, and not at all if it fails.

    Takes the parameters of `create`.
    """
    final = _destination(path)
    _refuse_existing(final)
    part = final.with_name(f".{final.name}.part")
    if part.exists():
        _discard(part)
    writer = create(part, spec, **options)
    try:
        yield writer
        writer.flush()
        with errors_of(final):
            _refuse_existing(final)
            _publish(part, final)
        writer.path = final
    except BaseException:
        _remove(part)
        raise
    finally:
        writer.release()


def _destination(path: str | os.PathLike[str]) -> Path:
    given = Path(path).absolute()
    if given.name.endswith(SUFFIX):
        for found in vaults_in(given):
            raise VaultExistsError(f"{given} holds {found.name} already: choose another name.")
        return given / DEFAULT_UID
    if not given.parent.name.endswith(SUFFIX):
        raise VaultError(
            f"{given} cannot be the path of a vault: it must be <name>{SUFFIX} or "
            f"<name>{SUFFIX}/<uid>, as in {given.with_suffix(SUFFIX)}."
        )
    return given


def _refuse_existing(path: Path) -> None:
    if path.exists():
        raise VaultExistsError(
            f"there is something at {path} already: choose another path, remove it, or resume it."
        )


def _check_schema(schema: Schema) -> Schema:
    if schema.rows < 1 or schema.chunk_steps < 1 or schema.codec not in get_args(Codec):
        raise VaultError(
            f"a vault has at least one row, chunks of at least one step, and a codec among "
            f"{', '.join(get_args(Codec))}: got rows={schema.rows}, "
            f"chunk_steps={schema.chunk_steps}, codec={schema.codec!r}."
        )
    return schema


def _initialise(directory: Path, schema: Schema, provenance: Mapping[str, Any]) -> None:
    """Fill a directory that nobody else writes to, and may hold the rests of a killed attempt."""
    for rest in directory.iterdir():
        if rest.is_dir():
            shutil.rmtree(rest)
        elif rest.name != LOCK:
            rest.unlink()
    running = tables.none_running(schema.rows, schema.spec.num_agents)
    writes = {
        layout.INDEX_PREFIX + ".zarray": layout.index_zarray(),
        layout.INDEX_KEY: layout.encode_index(0),
        layout.SCHEMA_KEY: layout.dump_json(schema.to_json()),
        layout.HEAD_KEY: layout.dump_json(Head()._asdict()),
        layout.RUNNING_KEY: running.tobytes(),
        layout.PROVENANCE_KEY: layout.dump_json(dict(provenance)),
    }
    for name, leaf in layout.leaves(schema.spec).items():
        writes[layout.prefix_of(name) + ".zarray"] = layout.zarray(leaf, schema)
    Store(directory).commit(writes, fence={}).result()
    (directory / METADATA).write_bytes(layout.dump_json(layout.metadata(schema)))


def _publish(source: Path, target: Path) -> None:
    """Make a finished directory durable and move it to its place."""
    for path in (*source.rglob("*"), source):
        _sync(path)
    source.rename(target)
    for directory in target.parents[:2]:
        _sync(directory)


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


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
