"""What readers and writers of foreign layouts share."""

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from offmarl.errors import InvalidValueError, ShapeError, VaultError, VaultFormatError
from offmarl.paths import local
from offmarl.terminal import Progress
from offmarl.types import Discrete, EnvSpec, Transition, View, map_tree
from offmarl.vault.check.digest import digest
from offmarl.vault.convert.admission import Record, Tally, Treatment, admit, to_steps
from offmarl.vault.convert.containers import StrPath, open_arrays, readable, sha256
from offmarl.vault.format import encoding
from offmarl.vault.format.compat import FAULTS, sentences
from offmarl.vault.format.layout import Codec, Leaf, NumpyArray
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
    records: Iterable[Record]
    """The data, which goes end to end into one row."""
    total: int
    """The number of records."""
    digest: str | None = None
    """The digest that the vault must have, if the dataset records it."""
    policies: Sequence[Mapping[str, Any]] = ()
    """What is known of the policies, by their ``policy_id``, for the provenance."""


def check_spec(found: EnvSpec, wanted: EnvSpec | None) -> EnvSpec:
    """Return the wanted spec, or else the found one; `ShapeError` if they contradict."""
    if wanted is None:
        return found
    if difference := found.difference(wanted):
        raise ShapeError(
            f"the data and {wanted.name or 'the environment'} differ in {difference}: name the "
            "environment that the data is from."
        )
    return wanted


def blocks(steps: int, step_bytes: int) -> list[tuple[int, int]]:
    """Divide steps into intervals that fit in memory."""
    size = max(1, BLOCK_BYTES // max(step_bytes, 1))
    return [(start, min(steps, start + size)) for start in range(0, steps, size)]


def write_vault(
    path: StrPath,
    found: Imported,
    provenance: Mapping[str, Any],
    codec: Codec,
    treatment: Treatment,
    progress: Progress,
    name: object = "",
) -> None:
    """Write a dataset to a vault, and note its faults; ``name`` is that of its source in errors."""
    # A dataset of offmarl's own keeps what its vault kept, and is compared with its digest.
    treatment, tally = "keep" if found.digest else treatment, Tally()
    records = counted(found.records, found.total, progress)
    if not found.digest:
        records = admit(records, found.spec, treatment, tally)
    on_invalid: OnInvalid = "keep" if treatment == "keep" else "raise"
    with create_whole(
        path, found.spec, rows=1, provenance=provenance, codec=codec, on_invalid=on_invalid
    ) as writer:
        with _naming(name):
            for record in records:
                writer.append(record.steps, record.finals, cut=record.cut)
        if faults := {fault: tally[fault] for fault in FAULTS if tally[fault]}:
            writer.annotate({"faults": faults})
        for sentence in sentences(faults):
            warnings.warn(sentence, stacklevel=3)
        writer.flush()
        if found.digest and digest(Reader(writer.store)) != found.digest:
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


def counted(items: Iterable[Item], total: int, progress: Progress) -> Iterator[Item]:
    """Yield items, and report the progress after each."""
    with progress("convert", total) as advance:
        for item in items:
            yield item
            advance(1)


def with_final(views: View, final: View) -> View:
    """Append an episode's final view to the others, ``(T+1, ...)``."""
    joined: View = map_tree(lambda x, y: np.concatenate([x, y[None]]), views, final)
    return joined


# ---------------------------------------------------------------------------------- end to end


NEXT = {"observations": "next_obs", "infos.state": "next_states"}
"""Names of what follows each step, by the names on disk of what is before it."""


@contextmanager
def end_to_end(
    source: StrPath,
    layout: str,
    wanted: Callable[[set[str]], Iterable[str]],
    convert: Callable[[dict[str, NumpyArray]], dict[str, NumpyArray]],
    check: Callable[[Path, Mapping[str, Any]], None],
    env_spec: EnvSpec | None,
    time_limit: int | None,
) -> Iterator[Imported]:
    """Open arrays ``(T, ...)`` whose steps are end to end; see `open_arrays`.

    ``check`` refuses arrays of other shapes. ``convert`` names steps as they are on disk, with an
    axis of agents, and what follows them as in `NEXT`.
    """
    source = local(source)
    with open_arrays(source, f"{layout}'s", wanted) as arrays:
        lengths = {name: array.shape[0] if array.shape else 0 for name, array in arrays.items()}
        check(source, arrays)
        if len({*lengths.values()}) > 1:
            listed = ", ".join(f"{name} {length}" for name, length in lengths.items())
            raise VaultError(f"{source} is damaged: its arrays have different lengths ({listed}).")

        def read(start: int, stop: int) -> dict[str, NumpyArray]:
            with readable(source):
                return convert({name: array[start:stop] for name, array in arrays.items()})

        length = next(iter(lengths.values()))
        first = read(0, min(length, 1))
        leaves = {name: Leaf(x.dtype, x.shape[1:]) for name, x in first.items()}
        known = {name: leaf for name, leaf in leaves.items() if name not in NEXT.values()}
        found = encoding.spec_of(known)
        if found.action == Discrete(0):
            raise VaultError(
                "the data has discrete actions of an unknown number: its layout is for continuous "
                "ones."
            )
        spec = check_spec(found, env_spec)
        spec = dataclasses.replace(spec, time_limit=time_limit or spec.time_limit)
        spans = blocks(length, sum(leaf.step_bytes for leaf in leaves.values()))
        origin = {"format": layout.lower(), "file": source.name, "sha256": sha256(source)}
        yield Imported(spec, origin, _records(read, spec, spans), len(spans))


def _records(
    read: Callable[[int, int], dict[str, NumpyArray]], spec: EnvSpec, spans: list[tuple[int, int]]
) -> Iterator[Record]:
    since = 0
    for start, stop in spans:
        arrays = {name: x[None] for name, x in read(start, stop).items()}
        after = {name: arrays.pop(NEXT[name]) for name in NEXT if NEXT[name] in arrays}
        found = to_steps(arrays, spec, start)
        limits, since = find_limits(found.last[0], since, spec.time_limit)
        found = _truncate(found, limits)
        if not after or (spec.state == "native" and "infos.state" not in after):
            yield Record(found)
        else:
            after["rewards"] = arrays["rewards"]
            yield Record(found, after=to_steps(after, spec, start).view)


def find_limits(done: NumpyArray, since: int, time_limit: int | None) -> tuple[NumpyArray, int]:
    """Find the steps at which a time limit ended an episode, flagged or not."""
    limits: NumpyArray = np.zeros(len(done), bool)
    begin = -since
    for end in [*np.flatnonzero(done).tolist(), len(done)]:
        if time_limit is not None:
            inside = np.arange(begin + time_limit - 1, min(end + 1, len(done)), time_limit)
            limits[inside[inside >= 0]] = True
            begin = int(inside[-1]) + 1 if len(inside) else begin
        if end < len(done):
            begin = end + 1
    return limits, len(done) - begin


def _truncate(steps: Transition, limits: NumpyArray) -> Transition:
    limit = limits[None, :, None]
    return steps._replace(
        terminated=steps.terminated & ~limit,
        truncated=steps.truncated | limit,
        last=steps.last | limits,
    )
