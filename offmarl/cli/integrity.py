"""``offmarl verify``, ``repair`` and ``compact``: the integrity of a vault's files."""

from collections.abc import Sequence
from functools import partial
from typing import Annotated

from rich.console import Group, RenderableType
from tyro.conf import Positional, arg

from offmarl import vault
from offmarl.cli.output import Report, as_is
from offmarl.errors import OptionError
from offmarl.paths import may_be_name
from offmarl.terminal import number
from offmarl.tracking import progress

_MOST_LINES = 50

Path = Annotated[str, Positional, arg(metavar="VAULT")]
_in_bytes = partial(progress, unit="bytes")


def verify(path: Path, deep: bool = False) -> Report:
    """Check a vault for damage.

    The exit code is 1 if it is damaged.

    Parameters
    ----------
    path
        A vault of any program, in a directory, an archive or an object store; or the name of a
        pulled dataset, whose files are all compared with what was published.
    deep
        Also read every chunk, and compute the episodes again.
    """
    if may_be_name(path):
        from offmarl.cli.hub import verify_pulled  # the hub's client takes a while to import

        if report := verify_pulled(path):
            return report
    found = vault.verify(path, deep=deep, progress=_in_bytes)
    data = {
        "path": found.path,
        "deep": deep,
        "sound": found.sound,
        "native": found.native,
        "length": found.length,
        "chunks": found.chunks,
        "read_bytes": found.read_bytes,
        "faults": [fault._asdict() for fault in found.faults],
        "unchecked": found.unchecked,
        "skipped": found.skipped,
        "other_layout": found.other_layout or None,
    }
    return Report(data, Group(*_outcome(found)), found.sound)


def repair(path: Path, dry_run: bool = False, salvage: str | None = None) -> Report:
    """Recover the intact data of a damaged vault.

    The longest intact part from the beginning is kept, and lost data is listed. The repaired vault
    is built beside the old one and replaces it atomically. An intact vault is not changed.

    Parameters
    ----------
    path
        A vault; its manifest or metadata.json may be missing.
    dry_run
        Only print what would be kept.
    salvage
        Do not change the vault, but write all its intact episodes to a new vault at this path.
    """
    if salvage is not None:
        if dry_run:
            raise OptionError("--dry-run and --salvage both leave the vault unchanged: give one.")
        return _salvaged(vault.salvage(path, salvage, progress=_in_bytes))
    done = vault.repair(path, dry_run=dry_run, progress=_in_bytes)
    data = {
        "path": done.path,
        "changed": bool(done.faults) and not dry_run,
        "length_before": done.length_before,
        "length": done.length,
        "dropped": done.dropped,
        "faults": [fault._asdict() for fault in done.faults],
    }
    if not done.faults:
        return Report(data, f"{done.path} is intact: nothing was changed.")
    of_all = "" if done.length_before is None else f" of {number(done.length_before)}"
    kept = f"{number(done.length)}{of_all} steps of each row"
    verb = "would keep" if dry_run else "kept"
    lost = _lines(done.dropped) if done.dropped else ["  nothing"]
    return Report(
        data,
        Group(
            f"{done.path}: {verb} {kept}.",
            "Faults:",
            *_lines(done.faults),
            "Lost:",
            *lost,
        ),
    )


def _salvaged(done: vault.Salvage) -> Report:
    lost = [f"row {row}, steps {start} to {start + n - 1}" for row, start, n in done.lost]
    if done.unknown_steps:
        lost.append(f"{number(done.unknown_steps)} steps of unknown episodes")
    data = {
        "path": done.path,
        "episodes": done.episodes,
        "steps": done.steps,
        "lost": [episode._asdict() for episode in done.lost],
        "unknown_steps": done.unknown_steps,
        "faults": [fault._asdict() for fault in done.faults],
    }
    kept = f"{number(done.episodes)} episodes, {number(done.steps)} steps"
    return Report(
        data,
        Group(f"{done.path}: {kept}.", "Lost:", *_lines(lost or ["nothing"])),
    )


def compact(path: Path) -> Report:
    """Reclaim unused space.

    Data that later commits replaced is removed, and the rest is stored in reading order.

    Parameters
    ----------
    path
        A vault of any program, which no process may write to meanwhile.
    """
    done = vault.compact(path)
    line = (
        f"{done.path}: {number(done.bytes_before / 1e6)} MB in {number(done.files_before)} files "
        f"became {number(done.bytes_after / 1e6)} MB in {number(done.files_after)}."
    )
    return Report(done._asdict(), line)


def _outcome(found: vault.Verification) -> list[RenderableType]:
    read = f", {number(found.read_bytes / 1e6)} MB read" if found.deep else ", none of them read"
    looked = f"{number(found.length)} steps of each row, {number(found.chunks)} chunks{read}"
    lines: list[RenderableType] = []
    if found.sound:
        extent = "is intact" if not found.skipped else "is intact as far as checked"
        lines.append(f"{found.path} {extent}: {looked}.")
    else:
        lines += [f"{found.path} is damaged ({looked}):", *_lines(found.faults)]
        lines.append(
            "`offmarl repair` keeps the longest intact part from the beginning; `offmarl repair "
            "--salvage OUT` writes all intact episodes to a new vault."
        )
    if found.skipped:
        lines.append("Not checked, so damage there is not detected; --deep checks it:")
        lines += _lines(found.skipped)
    if found.other_layout:
        lines.append(f"It has neither offmarl's nor OG-MARL's layout: {found.other_layout}")
    if found.unchecked:
        lines += ["Without a checksum, so damage there may not be detected:"]
        lines += _lines(found.unchecked)
    return lines


def _lines(items: Sequence[object]) -> list[RenderableType]:
    lines = [as_is(f"  {item}") for item in items[:_MOST_LINES]]
    if len(items) > _MOST_LINES:
        lines.append(as_is(f"  and {number(len(items) - _MOST_LINES)} more"))
    return lines
