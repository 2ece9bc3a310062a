"""Plain columns: a vault as arrays that programs without JAX read, in ``.npz`` or zarr v3.

The episodes are stored end to end. Each array of a vault becomes an array ``(T, ...)`` of the same
name. Tables have an entry for each of M episodes and F final views::

    episodes.length  (M,)      steps
    episodes.cause   (M,)      how it ended: index into `offmarl.vault.format.tables.CAUSES`
    episodes.final   (M,)      index of its final view, or -1
    finals.observation, finals.state, finals.legal_actions, finals.alive   (F, ...)

and the vault's spec, provenance and digest are stored as JSON. The leaves of trees are arrays of
their own, such as ``observations.image`` and ``finals.observation.image``. All arrays keep their
types, but for bfloat16, which becomes float32.
"""

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import numpy as np

from offmarl import gate
from offmarl.errors import ShapeError, VaultError, VaultFormatError
from offmarl.paths import local, local_output
from offmarl.terminal import Progress
from offmarl.types import ArraySpec, EnvSpec, FinalObservations, View, flatten_view
from offmarl.vault.convert import common
from offmarl.vault.convert.admission import ImportedRow, to_steps
from offmarl.vault.convert.common import Imported
from offmarl.vault.convert.containers import (
    HEADER_BYTES,
    Append,
    StrPath,
    check_layout,
    check_links_stay_inside,
    npz,
    open_arrays,
    plain_dtype,
    readable,
    require_numbers,
    to_slices,
    written_whole,
)
from offmarl.vault.dataset import Dataset
from offmarl.vault.format import encoding, layout
from offmarl.vault.format.layout import Leaf, NumpyArray
from offmarl.vault.format.tables import CAUSES, CUT, OPEN

_TABLES = ("episodes.length", "episodes.cause", "episodes.final")
_FINALS = "finals."
_ABOUT = "about"
_SHARD_BYTES = 2**26
_CHUNK_BYTES = 2**20

_AXES = {
    "observations": ("agent", "observation"),
    "infos.state": ("state",),
    "infos.legals": ("agent", "legal"),
    "observation": ("agent", "observation"),
    "state": ("state",),
    "legal_actions": ("agent", "legal"),
    "alive": ("agent",),
}
"""Names of the axes of a vector or mask, after the first."""


def write_numpy(vault: Dataset, path: StrPath, progress: Progress) -> Path:
    """Write one uncompressed ``.npz`` file of plain columns.

    ``np.load`` reads it; the entry "about" is JSON.
    """
    path = local_output(path)
    tables = _tables(vault) | {_ABOUT: np.array(json.dumps(_about(vault)))}
    columns = {name: Leaf(array.dtype, array.shape) for name, array in tables.items()}
    for name, leaf in _leaves(vault.spec).items():
        columns[name] = Leaf(leaf.dtype, (vault.num_steps, *leaf.shape))
    with written_whole(path) as part, npz(part, columns) as arrays:
        for name, array in tables.items():
            arrays[name](array)
        _append_steps(vault, arrays, progress)
    return path


def write_zarr(vault: Dataset, path: StrPath, progress: Progress) -> Path:
    """Write a zarr v3 group of plain columns, sharded, each chunk with its CRC32C.

    zarr-python reads it, and xarray by the names of its dimensions.
    """
    import zarr
    from zarr.codecs import Crc32cCodec, ZstdCodec

    path = local_output(path)
    with written_whole(path) as part, zarr.config.set({"array.write_empty_chunks": True}):
        group = zarr.create_group(part, zarr_format=3, attributes={_ABOUT: _about(vault)})

        def create(name: str, shape: tuple[int, ...], dtype: np.dtype[Any], shard: int) -> Any:
            row_bytes = max(1, int(np.prod(shape[1:])) * dtype.itemsize)
            chunk = max(1, min(_CHUNK_BYTES // row_bytes, shard))
            row_shape = [max(size, 1) for size in shape[1:]]  # chunks cannot be empty
            return group.create_array(
                name,
                shape=shape,
                dtype=dtype,
                chunks=(chunk, *row_shape),
                shards=(-(-shard // chunk) * chunk, *row_shape),
                compressors=[ZstdCodec(level=3), Crc32cCodec()],
                dimension_names=_axes(name, len(shape)),
            )

        for name, array in _tables(vault).items():
            create(name, array.shape, array.dtype, max(len(array), 1))[...] = array
        steps = {
            name: to_slices(
                create(name, (vault.num_steps, *leaf.shape), leaf.dtype, _shard_steps(vault))
            )
            for name, leaf in _leaves(vault.spec).items()
        }
        _append_steps(vault, steps, progress)
    return path


@contextmanager
def read_numpy(source: StrPath) -> Iterator[Imported]:
    """Read plain columns in an .npz file, as --to numpy writes them."""
    source = local(source)
    load = partial(np.load, allow_pickle=False, max_header_size=HEADER_BYTES)
    with readable(source), ZipFile(source) as archive, load(source) as file:
        check_layout(source, "plain NumPy's", file.files, _NEEDED)
        names = _ABOUT, f"{_ABOUT}.npy"
        if any(x.file_size > 2**24 and x.filename in names for x in archive.infolist()):
            raise ValueError(f"{_ABOUT} has more than 16 MiB, unpacked")
        about = json.loads(str(file[_ABOUT]))
    with open_arrays(source, "plain NumPy's", lambda names: names - {_ABOUT}) as arrays:
        yield _imported("numpy", source, arrays, about)


@contextmanager
def read_zarr(source: StrPath) -> Iterator[Imported]:
    """Read plain columns in a zarr v3 group, as --to zarr writes them.

    A missing chunk is an error, not zeros.
    """
    import zarr

    source = local(source)
    check_links_stay_inside(source)
    if (source / ".zgroup").exists():
        raise VaultError(f"{source} is a zarr v2 group: write it again as zarr v3.")
    with readable(source):
        group = zarr.open_group(source, mode="r", zarr_format=3)
        arrays: dict[str, Any] = dict(sorted(group.arrays()))
        check_layout(source, "plain zarr's", {*arrays, *group.attrs}, _NEEDED)
        for name, array in arrays.items():
            require_numbers(array, name)
            if math.prod(array.chunks) * array.dtype.itemsize > layout.MAX_CHUNK_BYTES:
                raise VaultFormatError(f"{source} has chunks of {name} that are above 4 GiB.")
            files = (source / name).rglob("*")
            num_files = sum(path.is_file() and path.name != "zarr.json" for path in files)
            sizes = zip(array.shape, array.shards or array.chunks, strict=True)
            if num_files != math.prod(-(-size // part) for size, part in sizes):
                raise VaultFormatError(
                    f"{source} has lost chunks of {name}, or was written without those of zeros "
                    "(zarr's default): copy its files, or set zarr's array.write_empty_chunks."
                )
        about: Any = group.attrs[_ABOUT]
    yield _imported("zarr", source, arrays, about)


_NEEDED = (*_TABLES, _ABOUT, "actions", "rewards")
"""Entries of any dataset; `_imported` checks those that depend on its spec."""


def _leaves(spec: EnvSpec) -> dict[str, Leaf]:
    """Return the arrays of steps, in the types that they are written in."""
    return {x: Leaf(plain_dtype(y.dtype), y.shape) for x, y in layout.leaves(spec).items()}


def _axes(name: str, count: int) -> tuple[str | None, ...]:
    """Return the names of an array's axes; those within images and other leaves have none."""
    lead = "episode" if name in _TABLES else "final" if name.startswith(_FINALS) else "time"
    group = name.removeprefix(_FINALS)
    tree = group.startswith((layout.OBSERVATIONS, layout.STATE, layout.EXTRAS, *View._fields))
    axes = _AXES.get(group, () if tree else ("agent", "action"))
    if tree and len(axes) != count - 1:
        axes = ("agent",) if group.startswith("observation") else ()
    return (lead, *axes, *([None] * count))[:count]


def _shard_steps(vault: Dataset) -> int:
    largest = max(leaf.step_bytes for leaf in _leaves(vault.spec).values())
    return max(1, min(vault.num_steps, _SHARD_BYTES // max(largest, 1)))


def _order(vault: Dataset) -> NumpyArray:
    """Return the episodes in the order to write them: an open one can only be the last."""
    return np.argsort(vault.episodes.cause == CAUSES[OPEN], kind="stable")


def _tables(vault: Dataset) -> dict[str, NumpyArray]:
    order, table = _order(vault), vault.episodes
    cause = (table.cause[order][:, None] == CAUSES).argmax(1)
    cause[:-1][cause[:-1] == OPEN] = CUT
    has_final = table.final[order] >= 0
    views = vault.final_views(table.final[order][has_final])
    return {
        "episodes.length": table.length[order],
        "episodes.cause": cause.astype(np.int8),
        "episodes.final": np.where(has_final, np.cumsum(has_final) - 1, -1),
        **{
            _FINALS + name: np.asarray(leaf, plain_dtype(leaf.dtype))
            for name, leaf in flatten_view(views).items()
        },
    }


def _about(vault: Dataset) -> dict[str, Any]:
    """Describe a vault; the digest is left out if the columns cannot reproduce it."""
    complete = (vault.episodes.cause == CAUSES[OPEN]).sum() <= 1
    return {
        "version": 1,
        "spec": vault.spec.to_json(),
        "provenance": dict(vault.provenance),
        "digest": vault.digest() if complete else None,
    }


def _append_steps(vault: Dataset, arrays: Mapping[str, Append], progress: Progress) -> None:
    for block in _blocks(vault, progress):
        for name, values in block.items():
            arrays[name](values)


def _blocks(vault: Dataset, progress: Progress) -> Iterator[dict[str, NumpyArray]]:
    """Yield all episodes end to end, whole shards at a time."""
    size, count = _shard_steps(vault), 0
    dtypes = {name: leaf.dtype for name, leaf in _leaves(vault.spec).items()}
    gathered: dict[str, list[NumpyArray]] = {name: [] for name in dtypes}
    order = _order(vault)
    for number in common.count_items(order, len(order), progress):
        arrays = encoding.to_disk(vault.episode(int(number)).transition)
        count += len(arrays["rewards"])
        for name, dtype in dtypes.items():
            gathered[name].append(arrays[name].astype(dtype, copy=False))
        if count >= size:
            columns = {name: np.concatenate(values) for name, values in gathered.items()}
            stop = count - count % size
            yield {name: values[:stop] for name, values in columns.items()}
            gathered = {name: [values[stop:]] for name, values in columns.items()}
            count -= stop
    if count:
        yield {name: np.concatenate(values) for name, values in gathered.items()}


def _imported(
    format: str, source: Path, arrays: Mapping[str, Any], about: Mapping[str, Any]
) -> Imported:
    try:
        spec = EnvSpec.from_json(about["spec"])
    except (KeyError, TypeError, ValueError, AttributeError, ShapeError) as error:
        raise VaultError(f"{source} does not record its spec ({error!r}).") from error
    leaves, finals = layout.leaves(spec), (_FINALS + x for x in flatten_view(spec.view_spec))
    required = [x for x in leaves if x.startswith((layout.OBSERVATIONS, layout.EXTRAS))]
    check_layout(source, "plain columns'", arrays, [*required, *finals])
    origin = {"format": format, "file": source.name, "provenance": about.get("provenance")}
    lengths = {arrays[name].shape[:1] for name in leaves if name in arrays}
    if len(lengths) > 1 or () in lengths:
        raise VaultError(f"{source} has arrays of different numbers of steps.")
    ((steps,),) = lengths
    spans = common.blocks(steps, sum(leaf.step_bytes for leaf in leaves.values()))
    return Imported(
        spec, origin, _records(arrays, spec, spans, source), len(spans), about.get("digest")
    )


def _records(
    arrays: Mapping[str, Any], spec: EnvSpec, spans: list[tuple[int, int]], source: Path
) -> Iterator[ImportedRow]:
    with readable(source):
        length, cause, final = (np.asarray(arrays[name][:]) for name in _TABLES)
        ends, total = np.cumsum(length), arrays["rewards"].shape[0]
        most = min(arrays[name].shape[0] for name in arrays if name.startswith(_FINALS))
        fits = all(x.dtype.kind in "iu" and x.shape == ends.shape for x in (length, cause, final))
        fits = fits and length.min(initial=1) > 0 and length.sum() == total
        if not fits or final.max(initial=-1) >= most:
            raise VaultError(f"{source} has a table of episodes that does not fit its arrays.")
    of_steps = {name: arrays[name] for name in layout.leaves(spec) if name in arrays}
    for start, block in common.read_blocks(source, of_steps, spans):
        stop = start + len(block["rewards"])
        episodes = np.flatnonzero((ends > start) & (ends <= stop) & (cause != OPEN))
        last = ends[episodes] - 1 - start
        cut: NumpyArray = np.zeros((1, stop - start), bool)
        cut[0, last] = cause[episodes] == CUT
        steps = to_steps({name: values[None] for name, values in block.items()}, spec, start)
        # An open episode was cut off when it was written, without a flag.
        truncated = steps.truncated | (cut[..., None] & ~steps.terminated)
        steps = steps._replace(truncated=truncated, last=(steps.terminated | truncated).all(-1))
        has_final = final[episodes] >= 0
        with readable(source):
            views = _finals(arrays, final[episodes][has_final], spec)
        time: NumpyArray = last[has_final]
        row: NumpyArray = np.zeros_like(time)
        yield ImportedRow(steps, FinalObservations(row, time, views), cut)


def _finals(arrays: Mapping[str, Any], numbers: NumpyArray, spec: EnvSpec) -> View:
    """Return the final views of these numbers, in the types of a vault."""
    first, stop = (int(numbers.min()), int(numbers.max()) + 1) if len(numbers) else (0, 0)

    def read(name: str, leaf: ArraySpec) -> NumpyArray:
        values = np.asarray(arrays[_FINALS + name][first:stop])[numbers - first]
        return gate.fit(values, ArraySpec(values.shape, leaf.dtype), f"the array {_FINALS}{name}")

    leaves = flatten_view(spec.view_spec)
    return encoding.unflatten_view({name: read(name, leaf) for name, leaf in leaves.items()})
