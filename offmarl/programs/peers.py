"""The other processes of a run: each shows that it is alive, and tells the others why it ends.

Process 0 has JAX's coordination service, which keeps a few values for all of them: what each was
started with, a counter of each that grows about once a second, and the reason for which the run
ends. A thread in each process reads them, and ends the process when another one has failed or
hangs: an exchange of arrays with it would wait for ever.
"""

import atexit
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any

import jax

from offmarl._ahead import briefly
from offmarl.errors import OptionError, ProcessLostError

_BEAT_SECONDS = 1.0
_LONGEST_ROUND = 3.0
"""Seconds that a round counts at most: a process that was suspended itself does not blame others.
"""
_HEARD_SECONDS = 2.5
"""How long the process with the service stays, so that the others can read why it ends."""
_SILENT_SECONDS = 4.0
"""How long the others are listened to after an exchange has failed, to find out which was lost."""

_STARTED, _ALIVE, _END = "offmarl/started/", "offmarl/alive/", "offmarl/end"
_DONE = "done"


class Peers:
    """What a process knows of the others.

    Parameters
    ----------
    client
        JAX's client of the coordination service.
    own, count
        Number of this process, and of all.
    patience
        Seconds after which a process that does not answer is lost.
    end
        Ends this process, with the reason for which the run has ended.
    """

    def __init__(
        self, client: Any, own: int, count: int, patience: float, end: Callable[[str], None]
    ):
        self._client, self._own, self.count = client, own, count
        self._patience, self._end = patience, end
        self._seen: dict[int, str] = {}
        self._silent: dict[int, float] = {}
        self._round = time.monotonic()
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._beat, self._watch)
        ]
        self._left = threading.Event()
        """Set when the main thread itself ends the process."""
        self._done = False
        self.advice = ""
        """Said after the reason for which a run has ended."""

    def start(self) -> None:
        """Show that this process is alive, and watch the others, in threads."""
        self._client.key_value_set(f"{_ALIVE}{self._own}", "0", allow_overwrite=True)
        atexit.register(self._finish)
        for thread in self._threads:
            thread.start()

    # ------------------------------------------------------------------------ the main thread

    def compare(self, facts: Mapping[str, Any]) -> None:
        """Compare what this process was started with with that of process 0.

        Parameters
        ----------
        facts
            JSON values by name.

        Raises
        ------
        OptionError
            They differ, or another process has the same number.
        """
        key = f"{_STARTED}{self._own}"
        try:
            self._client.key_value_set(key, json.dumps(facts))
        except jax.errors.JaxRuntimeError:
            raise OptionError(
                f"two processes have --process {self._own}: give each a number of its own, from 0 "
                f"to {self.count - 1}."
            ) from None
        seconds = int(1000 * self._patience)
        first = json.loads(self._client.blocking_key_value_get(f"{_STARTED}0", seconds))
        for name in sorted(first.keys() | facts.keys()):
            theirs, ours = first.get(name), facts.get(name)
            if theirs != ours:
                error = OptionError(
                    f"{name} is {ours!r} in process {self._own} and {theirs!r} in process 0: give "
                    "all processes the same command, except for --process."
                )
                self.tell(str(error))
                raise error

    def tell(self, reason: str) -> None:
        """Tell the others why this process ends; they end, too."""
        if self._left.is_set():
            return
        self._left.set()
        text = f"process {self._own} of {self.count} ended: {reason}"
        # Process 0 may hang.
        briefly(partial(self._publish, text), "tell", _HEARD_SECONDS)
        if self._own == 0:
            time.sleep(_HEARD_SECONDS)

    def leave(self) -> None:
        """Stop watching: all processes end together."""
        self._left.set()

    def explain(self) -> str:
        """Return what has happened to another process, after an exchange with it has failed."""
        self._left.set()
        counters, end = self._counters(), time.monotonic() + _SILENT_SECONDS
        while time.monotonic() < end:
            if (reason := self._reason()) is not None:
                return reason
        now = self._counters()
        if now is None or counters is None:
            return "process 0 was lost, or cannot be reached"
        lost = [
            str(one)
            for one in range(self.count)
            if one != self._own and now.get(one) in (counters.get(one), _DONE)
        ]
        return f"process {', '.join(lost)} was lost" if lost else "an exchange of arrays failed"

    # ------------------------------------------------------------------------ threads

    def _beat(self) -> None:
        key, number = f"{_ALIVE}{self._own}", 0
        while not self._left.is_set():
            number += 1
            with suppress(jax.errors.JaxRuntimeError):
                self._client.key_value_set(key, str(number), allow_overwrite=True)
            self._left.wait(_BEAT_SECONDS)
        if self._done:
            with suppress(jax.errors.JaxRuntimeError):
                self._client.key_value_set(key, _DONE, allow_overwrite=True)

    def _watch(self) -> None:
        while not self._left.is_set():
            reason = self._reason() or self._find_silent()
            if reason and not self._left.is_set():
                if self._own == 0:
                    self._publish(reason)
                    time.sleep(_HEARD_SECONDS)
                self._end(f"{reason.rstrip('.')}. {self.advice}".strip())

    def _reason(self) -> str | None:
        """Wait for a beat; return the reason for which the run has ended, None if it goes on."""
        try:
            found: str = self._client.blocking_key_value_get(_END, int(1000 * _BEAT_SECONDS))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE" not in str(error):
                time.sleep(_BEAT_SECONDS)  # the service cannot be reached
            return None
        return found

    def _find_silent(self) -> str | None:
        """Return which process has not shown for a long time that it is alive.

        Process 0 looks for all others, and these for process 0.
        """
        counters, now = self._counters() if self._own == 0 else self._first(), time.monotonic()
        passed, self._round = min(now - self._round, _LONGEST_ROUND), now
        for one in range(1, self.count) if self._own == 0 else (0,):
            counter = (counters or {}).get(one)
            if counter == _DONE or (counter is not None and counter != self._seen.get(one)):
                self._seen[one], self._silent[one] = str(counter), 0.0
                continue
            self._silent[one] = self._silent.get(one, 0.0) + passed
            if self._silent[one] > self._patience:
                return f"process {one} of {self.count} has not answered for {self._patience:g} s"
        return None

    def _counters(self) -> dict[int, str] | None:
        """Return the counters of all processes; None if the service cannot be reached."""
        try:
            found = self._client.key_value_dir_get(_ALIVE)
        except jax.errors.JaxRuntimeError:
            return None
        return {int(key.rpartition("/")[2]): value for key, value in found}

    def _first(self) -> dict[int, str] | None:
        """Return the counter of process 0, which may hang."""
        try:
            wait = int(1000 * _BEAT_SECONDS)
            return {0: self._client.blocking_key_value_get(f"{_ALIVE}0", wait)}
        except jax.errors.JaxRuntimeError:
            return None

    def _publish(self, text: str) -> None:
        with suppress(
            jax.errors.JaxRuntimeError
        ):  # another process was first, or process 0 is lost
            self._client.key_value_set(_END, text)

    def _finish(self) -> None:
        """Show at the end of the interpreter that this process has done its work.

        No thread can be started then, so `_beat` does it. The threads end before the interpreter:
        Python crashes if it ends one that is inside of JAX.
        """
        self._done = True
        self._left.set()
        for one in self._threads:
            one.join(_HEARD_SECONDS)


_peers: list[Peers] = []
"""Those of this process, once it has joined them."""


def watch(process: int | None, processes: int | None, patience: float) -> Peers:
    """Return the other processes, after `jax.distributed.initialize`."""
    from orbax.checkpoint import multihost

    client = multihost.get_jax_distributed_client()
    own = jax.process_index() if process is None else process
    count = jax.process_count() if processes is None else processes
    _peers.append(Peers(client, own, count, patience, _end_at_once))
    return _peers[-1]


def peers() -> Peers | None:
    """Return the other processes of this process; None if it has joined none."""
    return _peers[-1] if _peers else None


def tell(error: BaseException) -> None:
    """Tell the others that an error ends this process; without others, do nothing."""
    if _peers:
        text = first_line(error)
        _peers[-1].tell(f"{type(error).__name__}: {text}" if text else type(error).__name__)


# ---------------------------------------------------------------------------------- ending

_guarded = ContextVar("inside of ends_with_others", default=False)

_OWN_FAULTS = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT", "UNIMPLEMENTED")
"""Beginnings of errors of this process itself, such as a device without memory left."""


@contextmanager
def ends_with_others(where: Path) -> Iterator[None]:
    """Turn the loss of another process into an error that says how to continue.

    A process that dies closes its connections, and the next exchange with it fails. One that fails
    tells the others why, and one that does not answer ends them after a while: see `Peers`. If
    process 0 dies, JAX aborts the others; a second process, which only waits for the end of this
    one, then prints the message. Within another block of this kind, a block does nothing.
    """
    if jax.process_count() == 1 or _guarded.get():
        yield
        return
    advice = (
        f"Start all processes again with the same commands: {where} continues from its last "
        "checkpoint."
    )
    own = f"process {jax.process_index()} of {jax.process_count()}"
    cause = "" if jax.process_index() == 0 else ", or aborted because process 0 was lost"
    found, token = peers(), _guarded.set(True)
    if found is not None:
        found.advice = advice
    try:
        # JAX may abort this process while it finds out what has happened.
        with last_words(f"offmarl: {own} was killed{cause}. {advice}"), _explained(advice):
            yield
    finally:
        _guarded.reset(token)
        if found is not None:
            found.advice = ""


@contextmanager
def _explained(advice: str) -> Iterator[None]:
    """Tell the others of an error in the block, or find out from them what it means."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if str(error).startswith(_OWN_FAULTS):
            tell(error)
            raise
        found = peers()
        reason = found.explain() if found is not None else "another process was lost"
        raise ProcessLostError(f"{reason} ({first_line(error)}). {advice}") from None
    except (Exception, KeyboardInterrupt) as error:
        tell(error)
        raise


_PRINT_UNLESS_DONE = "import sys; sys.stdin.read() or print(sys.argv[1], file=sys.stderr)"


@contextmanager
def last_words(message: str) -> Iterator[None]:
    """Let another process print a message if this one is killed or aborted in the block."""
    command = [sys.executable, "-I", "-S", "-c", _PRINT_UNLESS_DONE, message]
    witness = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, start_new_session=True
    )
    _witnesses.append(witness)
    try:
        yield
    finally:
        _witnesses.remove(witness)
        witness.communicate("done")


_witnesses: list[subprocess.Popen[str]] = []
"""The processes that would print last words now."""


def _end_at_once(reason: str) -> None:
    """End this process, whose main thread may wait for a process that is lost."""
    for witness in _witnesses:
        with suppress(OSError, ValueError):
            witness.communicate("done")
    os.write(2, f"error: {reason}\n".encode())
    os._exit(1)


def first_line(error: BaseException) -> str:
    """Return the first line of an error, shortened."""
    return str(error).strip().partition("\n")[0][:200]
