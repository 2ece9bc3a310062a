"""Functions that readers and writers of foreign layouts share."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from offmarl.errors import InvalidValueError, ShapeError, VaultError, VaultFormatError
from offmarl.terminal import Progress
from offmarl.types import EnvSpec, View, map_tree
from offmarl.vault.check.digest import digest
from offmarl.vault.convert.admission import ImportedRow, Tally, Treatment, admit
from offmarl.vault.convert.containers import StrPath, readable, sha256
from offmarl.vault.format.compat import FAULTS, sentences
from offmarl.vault.format.layout import Codec, NumpyArray
from offmarl.vault.format.values import OnInvalid
from offmarl.vault.read.reader import Reader
from offmarl.vault.write.creation import create_whole

Item = TypeVar("Item")

BLOCK_BYTES = 2**25
"""Approximate size of the part of a foreign dataset that is in memory at once."""


class Imported(NamedTuple):
    """An open foreign dataset, as its reader presents it."""

    spec: EnvSpec
    origin: dict[str, Any]
    """Where it comes from, for the provenance."""
    records: Iterable[ImportedRow]
    """The data, which goes end to end into one row."""
    total: int
    """The number of records."""
    digest: str | None = None
    """The digest that the vault must have, if the dataset records it."""
    policies: Sequence[Mapping[str, Any]] = ()
    """Facts about the policies, by their ``policy_id``, for the provenance."""


def check_spec(spec: EnvSpec, expected: EnvSpec | None) -> EnvSpec:
    """Return the expected spec, by default that of the data; `ShapeError` if they contradict."""
    if expected is None:
        return spec
    if difference := spec.difference(expected):
        raise ShapeError(
            f"the data and {expected.name or 'the environment'} differ in {difference}: name the "
            "environment that the data is from."
        )
    return expected


def blocks(steps: int, step_bytes: int) -> list[tuple[int, int]]:
    """Divide steps into intervals that fit in memory."""
    size = max(1, BLOCK_BYTES // max(step_bytes, 1))
    return [(start, min(steps, start + size)) for start in range(0, steps, size)]


def read_blocks(
    source: Path,
    arrays: Mapping[str, Any],
    spans: Iterable[tuple[int, int]],
    convert: Callable[[dict[str, NumpyArray]], dict[str, NumpyArray]] = dict,
) -> Iterator[tuple[int, dict[str, NumpyArray]]]:
    """Yield where each interval begins, and the arrays in it, converted."""
    for start, stop in spans:
        with readable(source):
            block = convert({x: np.asarray(array[start:stop]) for x, array in arrays.items()})
        yield start, block


def origin_of(format: str, source: Path) -> dict[str, Any]:
    """Describe a file or folder, for the provenance."""
    return {"format": format, "file": source.name, "sha256": sha256(source)}


def write_vault(
    path: StrPath,
    dataset: Imported,
    provenance: Mapping[str, Any],
    codec: Codec,
    treatment: Treatment,
    progress: Progress,
    name: object = "",
) -> None:
    """Write a dataset to a vault, and note its faults; ``name`` is that of its source in errors."""
    # A dataset of offmarl's own keeps what its vault kept, and is compared with its digest.
    treatment, tally = "keep" if dataset.digest else treatment, Tally()
    records = count_items(dataset.records, dataset.total, progress)
    if not dataset.digest:
        records = admit(records, dataset.spec, treatment, tally)
    on_invalid: OnInvalid = "keep" if treatment == "keep" else "raise"
    with create_whole(
        path, dataset.spec, rows=1, provenance=provenance, codec=codec, on_invalid=on_invalid
    ) as writer:
        with _naming(name):
            for record in records:
                writer.append(record.steps, record.finals, cut=record.cut)
        if faults := {fault: tally[fault] for fault in FAULTS if tally[fault]}:
            writer.annotate({"faults": faults})
        for sentence in sentences(faults):
            warnings.warn(sentence, stacklevel=3)
        writer.flush()
        if dataset.digest and digest(Reader(writer.store)) != dataset.digest:
            raise VaultFormatError(
                f"the content of {name} does not have the digest it records: it is damaged or was "
                "changed. Copy it again, or remove the digest to import it anyway."
            )


@contextmanager
def _naming(source: object) -> Iterator[None]:
    """Name the source in errors of its content."""
    try:
        yield
    except (InvalidValueError, ShapeError, VaultError) as error:
        if str(source) in str(error):
            raise
        raise type(error)(f"{source}: {error}") from None


def count_items(items: Iterable[Item], total: int, progress: Progress) -> Iterator[Item]:
    """Yield items, and report the progress after each."""
    with progress("convert", total) as advance:
        for item in items:
            yield item
            advance(1)


def with_final(views: View, final: View) -> View:
    """Append an episode's final view to the others, ``(T+1, ...)``."""
    extended: View = map_tree(lambda x, y: np.concatenate([x, y[None]]), views, final)
    return extended
