"""A thread that moves chunks from the device to a vault while the next ones are collected."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from offmarl.errors import VaultError
from offmarl.programs.buffer import Capture, Chunk, take, whole
from offmarl.types import FinalObservations
from offmarl.vault import Writer

_WAITING_BYTES = 256 * 2**20
"""Steps that wait for the disk, in memory, before `ChunkWriter.put` blocks; at least one chunk
may."""


class ChunkWriter:
    """Writes chunks to a vault in order, without holding up the device.

    What goes wrong in the thread is raised by the next call of any method, and nothing is written
    after it. Used as a context manager it writes all that was handed over and closes the vault,
    also when the block is left by an exception such as ctrl-C.

    Parameters
    ----------
    vault
        Open for writing.
    run
        The name that the vault knows these chunks by.
    start
        Number of the first chunk that will come.
    written
        Time steps before that chunk.
    """

    def __init__(self, vault: Writer, run: str, start: int = 0, written: int = 0):
        self._vault = vault
        self._run = run
        self._next = start
        self._written = written
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offmarl-vault")
        self._pending: deque[Future[None]] = deque()
        self._spares: deque[Capture] = deque()
        self._failed = False

    def put(self, capture: Capture, num_steps: int, cut: bool = False) -> Capture:
        """Hand the newest steps over; blocks while the disk is behind.

        A buffer that holds just these steps is handed over as it is, and exchanged for another;
        from a larger one they are copied.

        Parameters
        ----------
        capture
            Every step of it belongs to exactly one chunk.
        num_steps
            T, the time steps added since the last call.
        cut
            End the running episodes at the last step.

        Returns
        -------
        Capture
            The one to use from now on.
        """
        self._make_room(capture, num_steps)
        if cut or capture.capacity > num_steps:
            self._submit(self._write, take(capture, num_steps, cut), cut)
            return capture
        spare = self._spares.popleft() if self._spares else _like(capture)
        self._submit(self._write_whole, capture)
        return spare._replace(total=capture.total + 0)  # a copy: going on donates it

    def _make_room(self, capture: Capture, num_steps: int) -> None:
        transition = capture.buffer.experience.transition
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(transition))
        room = max(_WAITING_BYTES * capture.capacity // (size * num_steps), 1)
        while self._pending and (self._pending[0].done() or len(self._pending) >= room):
            self._wait()

    def _submit(self, write: Callable[..., None], *what: Any) -> None:
        self._pending.append(self._thread.submit(write, self._next, *what))
        self._next += 1

    def flush(self) -> None:
        """Return when everything handed over is on the disk."""
        while self._pending:
            self._wait()
        self._vault.flush()

    def complete(self, **provenance: Any) -> None:
        """Mark the recording as whole, and add to its provenance."""
        self.flush()
        self._vault.annotate(provenance | {"complete": True})

    def __enter__(self) -> "ChunkWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._thread.shutdown()
        with self._vault:
            while self._pending and kind is None:
                self._wait()

    def _wait(self) -> None:
        self._pending.popleft().result()

    def _write_whole(self, index: int, capture: Capture) -> None:
        self._write(index, whole(capture), cut=False)
        self._spares.append(capture)

    def _write(self, index: int, chunk: Chunk, cut: bool) -> None:
        if self._failed:
            return
        try:
            self._check(chunk)
            if index >= self._vault.chunks(self._run):
                transition = jax.tree.map(np.asarray, chunk.transition)
                finals = _unpad(chunk.finals)
                self._vault.append(transition, finals, run=self._run, chunk=index, cut=cut)
                self._vault.drop_pages()
        except BaseException:
            self._failed = True
            raise

    def _check(self, chunk: Chunk) -> None:
        start = chunk.stop - chunk.transition.last.shape[1]
        if start != self._written:
            raise VaultError(
                f"run {self._run!r}: a chunk that starts at time step {start} cannot follow "
                f"{self._written} written ones. The steps between were overwritten in the buffer "
                "or taken twice: hand over as many steps as were added, before more are added."
            )
        self._written = chunk.stop


def _unpad(finals: FinalObservations) -> FinalObservations:
    count = len(finals.row)
    return finals._replace(view=jax.tree.map(lambda leaf: np.asarray(leaf)[:count], finals.view))


@jax.jit
def _like(capture: Capture) -> Capture:
    """Make another with a buffer of its own; what is in it does not matter."""
    return jax.tree.map(jnp.zeros_like, capture)
