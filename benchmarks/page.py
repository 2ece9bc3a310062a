"""The page of measurements, made from ``benchmarks/results/*.json``.

    python -m benchmarks.page [--check]

It writes ``benchmarks/RESULTS.md``. ``--check`` writes nothing, and fails if that file is not what
would be written.
"""

import argparse
import sys

from benchmarks.results import RESULTS, ROOT, Row, read

PAGE = ROOT / "benchmarks/RESULTS.md"
TOPICS = [path for path in sorted(RESULTS.glob("*.json")) if "accelerator-" not in path.name]
"""Files of rows. The others hold what `benchmarks.accelerator` printed."""

INTRODUCTION = """\
# Measured

`python -m benchmarks.page` makes this page from `benchmarks/results/*.json`. The last column names
the script in `benchmarks/`, or the command, that measured. Compare the figures of one row only:
machines and their load differ. Several figures are in the order of the claim, or they are those of
seeds or of repeated runs. Sizes of the library and walks through it are in `.ci/ratchet.json`.

- **A**: 4 virtual cores, 24 GB, no GPU, Python 3.11, jax 0.10.2, flashbax 0.1.3.
- **B**: 2 virtual cores, 24 GB, no GPU, Python 3.11, jax 0.10.2. *Busy*: other programs ran.
- **H100**: NVIDIA H100 80 GB HBM3, 16 cores, Python 3.12, jax 0.11.2. All of its figures are in
  `benchmarks/results/accelerator-nvidia-h100-80gb-hbm3.json`. The least time is that of the
  arithmetic, or of the bytes that no fusion saves (`forecast.py`). Bytes bound every program there
  on paper; launches of small kernels bind those that take much longer.
"""

HEADER = """\
| claim | measured | aim | machine | commit or date | by |
|---|---|---|---|---|---|
"""


def page() -> str:
    """Return the page: first what misses its aim, then the rest by topic."""
    topics = [read(path) for path in TOPICS]
    missed = [row for _, rows in topics for row in rows if row.met is False]
    met = [(topic, [row for row in rows if row.met is not False]) for topic, rows in topics]
    tables = [("Misses, and what was not measured", missed), *met]
    return "\n".join([INTRODUCTION, *(_table(*table) for table in tables)])


def _table(title: str, rows: list[Row]) -> str:
    return f"## {title}\n{HEADER}" + "".join(map(_line, rows))


def _line(row: Row) -> str:
    beside = "; ".join(filter(None, (row.peer, row.ratio)))
    value = f"{row.value} ({beside})" if beside else row.value
    cells = (row.claim, value, row.aim, row.machine, row.commit or row.date, row.script)
    return "| " + " | ".join(cell or "" for cell in cells) + " |\n"


def main() -> None:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the page is not up to date")
    if not parser.parse_args().check:
        PAGE.write_text(page())
    elif PAGE.read_text() != page():
        sys.exit(f"{PAGE} is not up to date: run `python -m benchmarks.page`.")


if __name__ == "__main__":
    main()
