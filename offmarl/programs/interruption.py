"""When a long computation saves its work: every so often, and when a signal asks it to stop."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType

from offmarl import tracking
from offmarl.errors import Stopped

_SIGNALS = (signal.SIGINT, signal.SIGTERM)

_more = ContextVar("more to come", default=False)


class CheckpointTimer:
    """Says when a checkpoint is due, and stops the program after one that a signal asked for.

    The first signal asks for a checkpoint, where there is work to save; a second one, or one
    before there is any, raises `Stopped` at once. Made by `checkpoint_timer`.

    Parameters
    ----------
    seconds
        How much work a kill may cost.
    unit
        What positions are counted in, such as "update".
    """

    def __init__(self, seconds: float, unit: str):
        self._seconds, self._unit = seconds, unit
        self._saved: int | None = None
        self._begun = self._unsaved = False
        self._signal: int | None = None
        self._since = time.monotonic()

    def begin(self, position: int) -> None:
        """Start to work at a position: that of a checkpoint, or 0 where there is none."""
        self._saved, self._begun, self._since = position or None, True, time.monotonic()

    def work_done(self) -> None:
        """Note that there is work that the last checkpoint does not hold."""
        self._unsaved = True

    def is_due(self) -> bool:
        """Whether to save: the time is up, or a signal came."""
        return self._signal is not None or time.monotonic() - self._since > self._seconds

    def saved(self, position: int) -> None:
        """Note that there is a checkpoint at a position.

        Raises
        ------
        Stopped
            A signal asked for it.
        """
        self._saved, self._unsaved, self._since = position, False, time.monotonic()
        if self._signal is not None:
            raise self._stopped(self._signal)

    def end(self) -> None:
        """Note that the work is complete.

        Raises
        ------
        Stopped
            A signal came since the last checkpoint, and `more_to_come` says that other work
            follows. Otherwise nothing is left to stop.
        """
        if self._signal is not None and _more.get():
            raise Stopped("stopped: the same command goes on from there.", self._signal)

    def on_signal(self, signum: int, _frame: FrameType | None) -> None:
        """Handle a signal."""
        if self._signal is not None or not self._unsaved:
            raise self._stopped(signum)
        self._signal = signum
        if not tracking.is_quiet():  # written past any buffer, whose lock the program may hold
            os.write(2, b"\nstopping: saving a checkpoint first. A second signal stops at once.\n")

    def _stopped(self, signum: int) -> Stopped:
        if self._saved is not None:
            where = f"at {self._unit} {self._saved:,}: the same command goes on from there."
        elif self._begun:
            where = f"before the first checkpoint: the same command starts at {self._unit} 0."
        else:
            where = f"before the first {self._unit}: the same command starts where this one did."
        return Stopped(f"stopped {where}", signum)


@contextmanager
def more_to_come(more: bool = True) -> Iterator[None]:
    """Say that the same command has other work to do after that of the block.

    A signal that came too late to stop the work of the block then stops the command after it.

    Parameters
    ----------
    more
        False leaves it as it is outside.
    """
    token = _more.set(more or _more.get())
    try:
        yield
    finally:
        _more.reset(token)


@contextmanager
def checkpoint_timer(seconds: float, unit: str) -> Iterator[CheckpointTimer]:
    """Handle SIGINT and SIGTERM by saving, while the block runs.

    Only in the main thread, where Python delivers signals. A signal that is ignored, or that the
    application handles in its own way, is left alone.

    Parameters
    ----------
    seconds, unit
        As for `CheckpointTimer`.
    """
    timer = CheckpointTimer(seconds, unit)
    before = {}
    if threading.current_thread() is threading.main_thread():
        for signum in _SIGNALS:
            if signal.getsignal(signum) in (signal.SIG_DFL, signal.default_int_handler):
                before[signum] = signal.signal(signum, timer.on_signal)
    try:
        yield timer
        timer.end()
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
