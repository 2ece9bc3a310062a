"""Measurements as data: ``benchmarks/results/*.json``, from which `benchmarks.page` makes a page.

Each file holds the rows of one topic. A script adds its rows with ``--out FILE``.
"""

import json
import os
import subprocess
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks/results"


@dataclass(frozen=True)
class Row:
    """One measurement."""

    claim: str
    """What was measured, on what."""
    value: str
    """The figures, with their units."""
    aim: str | None = None
    peer: str | None = None
    """The figures of what it is compared with, in the same unit."""
    ratio: str | None = None
    """Of the value and the peer's, in words if they do not say which is better."""
    met: bool | None = None
    """Whether the aim is met. False without an aim: it was not measured, or is a weakness."""
    machine: str = ""
    commit: str | None = None
    date: str = ""
    script: str | None = None


def measured(script: str, claim: str, value: str, **rest: Any) -> Row:
    """Return the row of what a script measured here and now."""
    import jax

    device, *_ = jax.devices()
    cores = f"{len(os.sched_getaffinity(0))} cores"
    return Row(
        claim=claim,
        value=value,
        machine=cores if device.platform == "cpu" else device.device_kind,
        commit=_commit(),
        date=datetime.now(UTC).date().isoformat(),
        script=Path(script).name,
        **rest,
    )


def read(path: Path) -> tuple[str, list[Row]]:
    """Return the topic of a file, and its rows."""
    held = json.loads(path.read_text())
    return held["topic"], [Row(**row) for row in held["rows"]]


def write(path: Path, rows: Iterable[Row]) -> None:
    """Write rows to a file, each in the place of the row with its claim, or at the end."""
    topic, old = read(path) if path.exists() else (path.stem.capitalize(), [])
    by_claim = {row.claim: row for row in (*old, *rows)}
    held = {"topic": topic, "rows": list(map(asdict, by_claim.values()))}
    path.write_text(json.dumps(held, indent=1, ensure_ascii=False) + "\n")


def _commit() -> str | None:
    command = ["git", "rev-parse", "--short", "HEAD"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return process.stdout.strip() or None
