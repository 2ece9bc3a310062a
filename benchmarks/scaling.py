"""How bytes, files, requests, hours and cost grow with the steps of a dataset.

    python benchmarks/scaling.py [--directory DIR] [--steps 500000] [--rates RATES.json]

Three vaults are written, in processes of their own: of a quarter and a half of ``--steps``, and of
all of them. The model is fitted to the first two, and its predictions for the third are printed
beside what was measured. Then the model says what 1e9, 1e11 and 1e13 steps take. Sizes are
measured here; rates and prices are assumptions, which a file of options can replace. The tables of
``docs/tasks.md`` are those of this program.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import tyro

sys.path.insert(0, str(Path(__file__).parents[1]))

from offmarl import vault
from offmarl.testing import experience
from offmarl.types import Discrete, EnvSpec

SPEC = EnvSpec("", 8, 35, 20, Discrete(5))
ROWS, EVERY = 16, 50.0
REQUEST = 8 * 2**20
"""Bytes of a range request: eight pages."""
SIZES = 1e9, 1e11, 1e13


@dataclass(frozen=True)
class Rates:
    """What is assumed of machines, links and prices."""

    recording: float = 30_000.0
    """Environment steps a second of one core."""
    link: float = 125e6
    """Bytes a second between a machine and the store: 1 Gbit/s."""
    storage: float = 20.0
    """Dollars for a terabyte and month in an object store."""
    reads: float = 0.4
    """Dollars for a million GET requests."""
    writes: float = 5.0
    """Dollars for a million PUT requests."""
    egress: float = 0.0
    """Dollars for a terabyte that leaves the store; 0 within its region, about 90 elsewhere."""
    core: float = 0.04
    """Dollars for an hour of one core."""


@dataclass(frozen=True)
class Args:
    directory: Path | None = None
    """Where the vaults are written and removed; by default the system's temporary directory."""
    steps: int = 500_000
    """Steps of the largest vault."""
    rates: Path | None = None
    """A JSON file that replaces rates and prices."""


class Size(NamedTuple):
    """The size of a vault."""

    steps: float
    episodes: float
    disk: float
    """Bytes of its files."""
    files: float
    tables: float
    """Bytes that are not steps: episodes, final views, checksums and the trees of the store."""
    memory: float
    """Bytes of memory that the episode table takes."""


MEASURE = """
import json, re, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from offmarl import vault
def anonymous():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
found = vault.open_vault(sys.argv[1])
found.num_steps
before = anonymous()
episodes = found.episodes
print(json.dumps([len(episodes.start), anonymous() - before]))
"""


def measured(directory: Path, steps: int) -> Size:
    """Write a vault, and measure it in another process."""
    path = directory / f"{steps}.vlt" / "main"
    block, finals = experience(SPEC, ROWS, 1_000, 0, end_every=EVERY)
    with vault.create(path, SPEC, rows=ROWS, chunk_steps=1_000) as writer:
        for _ in range(max(1, steps // (ROWS * 1_000))):
            writer.append(block, finals)
    vault.compact(path)
    dataset = vault.open_vault(path)
    files = [file for file in path.rglob("*") if file.is_file()]
    code = MEASURE.format(root=str(Path(__file__).parents[1]))
    out = subprocess.run(
        [sys.executable, "-c", code, path], check=True, capture_output=True, text=True
    ).stdout
    episodes, memory = json.loads(out)
    disk = sum(file.stat().st_size for file in files)
    tables = disk - dataset.num_steps * sum(leaf.step_bytes for leaf in dataset.leaves.values())
    return Size(dataset.num_steps, episodes, disk, len(files), tables, memory)


def predicted(small: Size, large: Size, steps: float) -> Size:
    """Return the size at a number of steps, on the line through two."""
    slope = (steps - small.steps) / (large.steps - small.steps)
    return Size(*(a + slope * (b - a) for a, b in zip(small, large, strict=True)))


def check(directory: Path, steps: int) -> tuple[Size, Size]:
    """Print the model's error for a vault that it was not fitted to; return the other two."""
    small, large, held_out = (measured(directory, steps * part // 4) for part in (1, 2, 4))
    model = predicted(small, large, held_out.steps)
    print(f"| of {held_out.steps:,} steps | predicted | measured | ratio |\n|---|---|---|---|")
    for name, guess, value in zip(Size._fields[1:], model[1:], held_out[1:], strict=True):
        print(f"| {name} | {guess:,.0f} | {value:,.0f} | {guess / value:.2f} |")
    return small, large


def columns(size: Size, rates: Rates) -> dict[str, str]:
    """Return what a dataset takes, by what it is called."""
    requests = size.disk / REQUEST
    hours = size.steps / rates.recording / 3600
    passed = size.disk / 1e12 * rates.egress + requests / 1e6 * rates.reads
    return {
        "episodes": quantity(size.episodes),
        "data": quantity(size.disk, "B"),
        "files, here and published": quantity(size.files),
        "of the data, tables": quantity(size.tables, "B"),
        "memory of the episode table": quantity(size.memory, "B"),
        "requests of a pass": quantity(requests),
        "hours of a pass": quantity(size.disk / rates.link / 3600),
        "core-hours of recording": quantity(hours),
        "dollars of recording": quantity(hours * rates.core),
        "dollars of uploading": quantity(size.files / 1e6 * rates.writes),
        "dollars of storing, a month": quantity(size.disk / 1e12 * rates.storage),
        "dollars of a pass": quantity(passed),
    }


def quantity(value: float, unit: str = "") -> str:
    """Return a number with two digits and a prefix."""
    value = float(f"{value:.2g}")
    for factor, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= factor:
            return f"{value / factor:.4g} {prefix}{unit}".rstrip()
    return f"{value:.4g} {unit}".rstrip()


def main(args: Args) -> None:
    rates = Rates(**json.loads(args.rates.read_text())) if args.rates else Rates()
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        small, large = check(Path(directory), args.steps)
    columns_by_size = [columns(predicted(small, large, steps), rates) for steps in SIZES]
    print(f"\n| steps | {' | '.join(f'{steps:.0e}' for steps in SIZES)} |\n|---|---|---|---|")
    for name in columns_by_size[0]:
        print(f"| {name} | {' | '.join(cells[name] for cells in columns_by_size)} |")


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
