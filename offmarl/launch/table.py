"""One table of the progress of all tasks."""

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rich.console import Group, RenderableType
from rich.live import Live

from offmarl import tracking
from offmarl.launch.task import Call, State, Status, read_status
from offmarl.terminal import one_line, table

_ROWS = 12
"""Tasks that are shown in a terminal; the others are counted."""
_SECONDS_BETWEEN_LINES = 10.0
_SECONDS_BETWEEN_READS = 1.0
_ORDER: tuple[State, ...] = ("failed", "crashed", "running", "stopped", "waiting", "done")


class TaskTable:
    """Shows the tasks in a terminal; other outputs get a line every few seconds."""

    def __init__(self, name: str, calls: Mapping[int, Call], names: Mapping[int, str]):
        self._name, self._calls, self._names = name, calls, names
        self._found: dict[int, Status] = {}
        self._read = self._printed = time.monotonic()
        self._live: Live | None = None

    @contextmanager
    def shown(self) -> Iterator["TaskTable"]:
        """Show the table while the block runs."""
        if tracking.is_quiet() or not tracking.console().is_terminal:
            yield self
            return
        with Live(console=tracking.console(), auto_refresh=False) as self._live:
            yield self

    def show(self, failed: Mapping[int, str], over: bool) -> None:
        """Show the present states, with the tasks given up; cheap if it is called often."""
        now = time.monotonic()
        if not over and now - self._read < _SECONDS_BETWEEN_READS:
            return
        self._read = now
        self.update(failed)
        if self._live:
            self._live.update(Group(self.table(), self._summary()), refresh=True)
        elif over or now - self._printed >= _SECONDS_BETWEEN_LINES:
            self._printed = now
            tracking.notice(f"{self._name}: {self._summary()}")

    def update(self, failed: Mapping[int, str]) -> None:
        """Read the states of the tasks that have not ended."""
        for number, call in self._calls.items():
            before = self._found.get(number)
            if before is None or before.state not in ("done", "failed"):
                self._found[number] = read_status(call)
            if number in failed:
                self._found[number] = self._found[number]._replace(state="failed")

    def _summary(self) -> str:
        states = Counter(status.state for status in self._found.values())
        counts = ", ".join(f"{states[one]} {one}" for one in reversed(_ORDER) if states[one])
        done = sum(status.done for status in self._found.values())
        unit = "task" if len(self._calls) == 1 else "tasks"
        blocks = "block" if done == 1 else "blocks"
        return f"{len(self._calls)} {unit}: {counts}; {done} {blocks} done"

    def table(self) -> RenderableType:
        """Return the rows of the tasks that matter most now."""
        order = sorted(self._found, key=lambda one: (_ORDER.index(self._found[one].state), one))
        columns = "task", "state", "blocks", "time", "host", "last line of the log"
        return table(columns, map(self._row, order[:_ROWS]))

    def _row(self, number: int) -> list[str]:
        status = self._found[number]
        seconds = time.time() - status.since if status.state == "running" else 0
        return [
            self._names[number],
            status.state,
            f"{status.done}/{status.total}" if status.total else "",
            f"{seconds:,.0f} s" if seconds else "",
            status.host,
            last_line(self._calls[number].log) if status.state != "waiting" else "",
        ]


def last_line(log: Path) -> str:
    """Return the last line of a log, without its comments."""
    try:
        with log.open("rb") as file:
            file.seek(max(log.stat().st_size - 2_000, 0))
            lines = file.read().decode(errors="replace").splitlines()
    except OSError:
        return ""
    kept = [line for line in lines if line.strip() and not line.startswith("#")]
    return one_line(kept[-1])[:80] if kept else ""
