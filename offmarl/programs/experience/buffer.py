"""Trajectories in a flashbax buffer on the device, written to a vault by a thread."""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from types import TracebackType
from typing import Any, NamedTuple

import flashbax
import jax
import jax.numpy as jnp
import numpy as np
from flashbax.buffers.trajectory_buffer import TrajectoryBuffer, TrajectoryBufferState
from jaxtyping import Array, Bool, Int
from numpy.typing import NDArray

from offmarl._compiling import jit_rarely_run
from offmarl._mesh import DATA, by_shards, spec
from offmarl.envs.outside import faults
from offmarl.errors import InvalidValueError, ShapeError, VaultError
from offmarl.networks import blank_view
from offmarl.programs.cluster import gather_all
from offmarl.replay import Replay
from offmarl.types import (
    Continuous,
    EnvSpec,
    FinalObservations,
    Transition,
    View,
)
from offmarl.vault import Writer

_WAITING_BYTES = 256 * 2**20
"""Memory for chunks that wait for the disk; `ChunkWriter.put` blocks beyond it. At least one chunk
may wait."""

_STEPS_PER_FINAL = 8
"""A large buffer has room for one final view for so many steps. Episodes of fewer steps on average
leave it fewer steps than its capacity."""
_SMALL_BYTES = 2**26
"""A buffer with at most so many bytes of views has room for a final view for every step."""


class Step(NamedTuple):
    """A step in the buffer."""

    transition: Transition
    ends: Int[Array, "*b"] | None
    """Number of episodes of the row that ended before it; None in a buffer that is not sampled."""


class Capture(NamedTuple):
    """A buffer of the last steps of E environments.

    The next view of a step is the view of the step after it, except where an episode ends.
    """

    buffer: TrajectoryBufferState
    """Buffer of `Step`, ``(E, capacity, ...)``; `offmarl.programs.draw_windows` draws from it."""
    next_views: View
    """If a program samples the buffer, the final views of each row's last F episodes, that of
    episode i at ``i % F``, and then the view after the newest step: ``(E, F + 1, ...)``. Otherwise
    the next views of all steps, ``(capacity, E, ...)``, as the rollout returned them: few are ever
    read, and copying all would cost a tenth of a fast rollout."""
    total: Int[Array, ""]
    """Total number of time steps added to each row."""
    filled: Int[Array, ""]
    """Number of time steps that each row holds: the newest ones, whose next views are all known."""
    prior: Replay | None = None
    """Recorded data from which half of each batch of windows is drawn; see `OnlineArgs.prefill`."""

    @property
    def capacity(self) -> int:
        """Number of time steps that each row has room for."""
        return int(self.buffer.experience.transition.last.shape[1])

    @property
    def is_sampled(self) -> bool:
        """Whether a program samples the buffer, so that old steps matter."""
        return self.buffer.experience.ends is not None

    @property
    def num_finals(self) -> int:
        """F, the number of final views that each row of a sampled buffer has room for."""
        return int(self.next_views.alive.shape[1]) - 1

    def place_of_next(self, row: Int[Array, "*#b"], index: Int[Array, "*#b"]) -> Int[Array, "*#b"]:
        """Return the index of the next view of a step that ends an episode, or is the newest."""
        step = self.buffer.experience
        last, ends = step.transition.last[row, index], step.ends[row, index]
        return jnp.where(last, ends % self.num_finals, self.num_finals)


class StepChunk(NamedTuple):
    """Steps that are written to the vault together."""

    transition: Transition
    """``(E, T, ...)``"""
    finals: FinalObservations
    """Final views of the episodes that end in the chunk; the views are padded."""
    stop: int
    """Total number of time steps at the end of the chunk."""
    cut: NDArray[np.bool_]
    """``(E,)``: whether the recording, and not the environment, ended the row's last step."""


def make_buffer(num_envs: int, capacity: int) -> TrajectoryBuffer:
    """Make the functions of a flashbax trajectory buffer for a `Capture`.

    They add steps. `offmarl.programs.draw_windows` draws from the buffer: flashbax's own draws hold
    the steps near the buffer's ends less often, and take no account of where episodes end.

    Parameters
    ----------
    num_envs
        E, the number of rows.
    capacity
        Number of time steps of each row; new steps replace the oldest.
    """
    return flashbax.make_trajectory_buffer(
        add_batch_size=num_envs,
        max_length_time_axis=capacity,
        min_length_time_axis=1,
        sample_batch_size=1,
        sample_sequence_length=1,
        period=1,
    )


def init_capture(
    buffer: TrajectoryBuffer,
    spec: EnvSpec,
    sampled: bool = False,
    num_steps: int | None = None,
    each_agent: bool = False,
) -> Capture:
    """Return an empty capture.

    Parameters
    ----------
    buffer
        From `make_buffer`.
    spec
        Spec of the environment.
    sampled
        Whether a program samples the buffer. Otherwise every `add` must fill the buffer.
    num_steps
        Number of time steps of each `add` to a buffer that is sampled. A large buffer then has room
        for fewer final views than steps, and holds fewer steps than its capacity where episodes
        have fewer than eight on average; without it, the buffer has room for as many.
    each_agent
        Whether steps have the id of each agent's policy, and not of all agents' one.
    """
    transition, view = _empty_step(spec)
    if each_agent:
        transition = transition._replace(policy_id=jnp.zeros(spec.num_agents, jnp.int32))
    state = buffer.init(Step(transition, jnp.zeros((), jnp.int32) if sampled else None))
    rows, capacity = state.experience.transition.last.shape
    lead, finals = (capacity, rows), capacity
    if sampled:
        size = rows * capacity * sum(leaf.nbytes for leaf in jax.tree.leaves(view))
        if num_steps is not None and size > _SMALL_BYTES:
            finals = max(num_steps, capacity // _STEPS_PER_FINAL)
        lead = (rows, finals + 1)
    next_views = jax.tree.map(lambda leaf: jnp.zeros((*lead, *leaf.shape), leaf.dtype), view)
    return Capture(state, next_views, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))


def add(
    buffer: TrajectoryBuffer, capture: Capture, transitions: Transition, next_views: View
) -> Capture:
    """Add the steps of a rollout, ``(T, E, ...)``; T is at most the buffer's capacity.

    Raises
    ------
    ShapeError
        The steps do not fill a buffer that is not sampled.
    """
    num_steps = transitions.last.shape[0]
    total = capture.total + num_steps
    by_row = jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), transitions)
    if capture.is_sampled:
        return _add_sampled(buffer, capture, by_row, next_views)._replace(total=total)
    if num_steps != capture.capacity:
        raise ShapeError(
            f"{num_steps} steps were added to a buffer of {capture.capacity}: add as many steps as "
            "its capacity, or give init_capture sampled=True."
        )
    # All steps are new: flashbax would copy them one by one.
    state = capture.buffer.replace(experience=Step(by_row, None), is_full=jnp.array(True))
    filled = jnp.array(num_steps, jnp.int32)
    return capture._replace(buffer=state, next_views=next_views, total=total, filled=filled)


def _add_sampled(
    buffer: TrajectoryBuffer, capture: Capture, steps: Transition, next_views: View
) -> Capture:
    """Add steps ``(E, T, ...)`` with their next views ``(T, E, ...)``, of which finals are kept."""
    last, room, newest = steps.last, capture.num_finals, capture.buffer.current_index - 1
    ends_before = capture.buffer.experience.ends[:, newest, None]
    ends_before += capture.buffer.experience.transition.last[:, newest, None]
    ends_after = ends_before + jnp.cumsum(last, axis=1)
    state = buffer.add(capture.buffer, Step(steps, ends_after - last))
    kept = last & (ends_after > ends_after[:, -1:] - room)
    place = jnp.where(kept, (ends_after - last) % room, room + 1)
    put = by_shards(
        jax.vmap(_put_views, in_axes=(0, 0, 1)),
        len(last),
        in_specs=(spec(DATA), spec(DATA), spec(None, DATA)),
        out_specs=spec(DATA),
    )
    # Steps are held as far back as the final views of all rows are.
    age = (state.current_index - 1 - jnp.arange(capture.capacity)) % capture.capacity
    known = (ends_after[:, -1:] - state.experience.ends <= room).all(0)
    filled = jnp.sum(known & (age < capture.filled + last.shape[1]), dtype=jnp.int32)
    finals = put(capture.next_views, place, next_views)
    return capture._replace(buffer=state, next_views=finals, filled=filled)


def _put_views(finals: View, place: Int[Array, "T"], next_views: View) -> View:
    """Put final views of a row in their places, and the view after its newest step in the last."""
    return jax.tree.map(
        lambda leaf, views: leaf.at[place].set(views, mode="drop").at[-1].set(views[-1]),
        finals,
        next_views,
    )


def take_chunk(capture: Capture, num_steps: int, cut: bool = False) -> StepChunk:
    """Copy the last ``num_steps`` time steps out of the buffer, so that it may be overwritten.

    The copy is made on the device. Of the next views only the final views of episodes are copied:
    the others are in the transitions. Blocks until the steps are computed, because the number of
    final views depends on them.
    """
    experience, capacity = capture.buffer.experience, capture.capacity
    start = (int(capture.buffer.current_index) - num_steps) % capacity
    wraps = start + num_steps > capacity
    copied = _copy_transitions(experience.transition, start, num_steps, wraps, cut)
    transition, is_cut = gather_all(copied)
    finals = copy_finals(capture, np.asarray(transition.last), start)
    return StepChunk(transition, finals, int(capture.total), np.asarray(is_cut))


def copy_finals(capture: Capture, last: NDArray[np.bool_], start: int) -> FinalObservations:
    """Copy the next views of steps from ``start`` on that end episodes, or are the newest."""
    ends: Any = np.array(np.nonzero(last), np.int32)
    row, time = ends
    size = capture.buffer.experience.transition.last.shape[0]
    while size < len(row):  # few sizes, so that few programs are compiled
        size *= 4
    indices = np.zeros((2, size), np.int32)
    indices[:, : len(row)] = row, (start + time) % capture.capacity
    view = gather_all(_copy_views(capture, *indices))
    return FinalObservations(row, time, view)


@jit_rarely_run(static_argnames=("num_steps", "wraps"))
def _copy_transitions(
    transition: Transition,
    start: Int[Array, ""] | int,
    num_steps: int,
    wraps: bool,
    cut: Bool[Array, ""] | bool,
) -> tuple[Transition, Bool[Array, "E"]]:
    def copy(leaf: Array) -> Array:
        if wraps:
            return leaf[:, (start + jnp.arange(num_steps)) % leaf.shape[1]]
        return jax.lax.dynamic_slice_in_dim(leaf, start, num_steps, axis=1)

    copied = jax.tree.map(copy, transition)
    running = cut & ~copied.last[:, -1]
    truncated = copied.truncated[:, -1] | (running[:, None] & ~copied.terminated[:, -1])
    cut_steps = copied._replace(
        truncated=copied.truncated.at[:, -1].set(truncated),
        last=copied.last.at[:, -1].set(copied.last[:, -1] | running),
    )
    return cut_steps, running


@jit_rarely_run()
def _copy_views(capture: Capture, row: Int[Array, "M"], index: Int[Array, "M"]) -> View:
    if capture.is_sampled:
        first, second = row, capture.place_of_next(row, index)
    else:
        first, second = index, row

    def copy(leaf: Array) -> Array:
        # Devices that lack an entry add 0 to it, which would turn -0.0 into 0.0.
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf[first, second]
        words = jnp.dtype(f"uint{8 * leaf.dtype.itemsize}")
        bits = jax.lax.bitcast_convert_type(leaf, words)[first, second]
        return jax.lax.bitcast_convert_type(bits, leaf.dtype)

    return jax.tree.map(copy, capture.next_views)


def _empty_step(spec: EnvSpec) -> tuple[Transition, View]:
    num_agents, view = spec.num_agents, blank_view(spec)
    continuous = isinstance(spec.action, Continuous)
    transition = Transition(
        view=view,
        action=jnp.zeros((num_agents, spec.action_size))
        if continuous
        else jnp.zeros(num_agents, jnp.int32),
        reward=jnp.zeros(num_agents),
        terminated=jnp.zeros(num_agents, bool),
        truncated=jnp.zeros(num_agents, bool),
        last=jnp.zeros((), bool),
        behaviour_log_prob=jnp.zeros(num_agents),
        policy_id=jnp.zeros((), jnp.int32),
        extras={name: jnp.zeros(leaf.shape, leaf.numpy_dtype) for name, leaf in spec.extras.items()}
        or None,
    )
    return transition, view


# ---------------------------------------------------------------------------------- writing


class ChunkWriter:
    """Writes chunks to a vault in order, in a thread, while the device computes.

    After an error in the thread, the next call of any method raises it, and nothing more is
    written. At the end of a ``with`` block, also after an exception such as Ctrl-C, the chunks that
    wait are written and the vault is closed.

    Parameters
    ----------
    vault
        The vault, open for writing; None where another process writes it.
    run
        Name of the chunks' run in the vault.
    start
        Number of the first chunk.
    written
        Number of time steps before that chunk.
    join_agents
        Makes the steps that are written of those that were captured, as of one side of an
        adversarial environment: see `offmarl.envs.sides.Side.join_agents`.
    """

    def __init__(
        self,
        vault: Writer | None,
        run: str,
        start: int = 0,
        written: int = 0,
        join_agents: Callable[..., tuple[Transition, FinalObservations]] | None = None,
    ):
        self._vault = vault
        self._join_agents = join_agents
        self._run = run
        self._next = start
        self._written = written
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="offmarl-vault")
        self._pending: deque[Future[None]] = deque()
        self._failed = False

    def put(self, capture: Capture, num_steps: int, cut: bool = False, count: int = 1) -> None:
        """Copy the newest steps, to be written; blocks while too many chunks wait for the disk.

        Parameters
        ----------
        capture
            The capture. Each of its steps must be in exactly one chunk.
        num_steps
            T, the number of time steps of a chunk.
        cut
            Cut off the running episodes at the last step.
        count
            Number of chunks added since the last call.
        """
        steps = num_steps * count
        room = max(_waiting_steps(capture) // steps, 1)
        while self._pending and (self._pending[0].done() or len(self._pending) >= room):
            self._wait()
        chunks = take_chunk(capture, steps, cut)
        self._pending.append(self._thread.submit(self._write, self._next, chunks, count))
        self._next += count

    def flush(self) -> None:
        """Block until all chunks are on disk."""
        while self._pending:
            self._wait()
        if self._vault is not None:
            self._vault.flush()

    def complete(self, **provenance: Any) -> None:
        """Mark the recording as complete, and add to its provenance."""
        self.flush()
        if self._vault is not None:
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
        with self._vault or nullcontext():
            while self._pending and kind is None:
                self._wait()
            if isinstance(error, Exception) and self._vault and not self._written:
                self._vault.discard()  # so that the same command records what is mended

    def _wait(self) -> None:
        self._pending.popleft().result()

    def _write(self, first: int, chunks: StepChunk, count: int) -> None:
        if self._failed:
            return
        try:
            for index, chunk in enumerate(_divided(chunks, count), first):
                self._check(chunk)
                if self._vault is not None and index >= self._vault.chunks(self._run):
                    self._append(self._vault, index, chunk)
                self._written = chunk.stop
        except BaseException:
            self._failed = True
            raise

    def _append(self, vault: Writer, index: int, chunk: StepChunk) -> None:
        transition, finals = chunk.transition, chunk.finals
        if self._join_agents is not None:
            transition, finals = self._join_agents(transition, finals)
        for fault in faults(vault.spec, transition, finals.view) if index == 0 else ():
            name = vault.spec.name or "the environment"
            raise InvalidValueError(f"{name}: {fault}. Nothing was recorded.")
        vault.append(transition, finals, run=self._run, chunk=index, cut=chunk.cut)

    def _check(self, chunk: StepChunk) -> None:
        start = chunk.stop - chunk.transition.last.shape[1]
        if start != self._written:
            raise VaultError(
                f"run {self._run!r}: a chunk that starts at time step {start} cannot follow "
                f"{self._written} written ones. The steps between were overwritten in the buffer "
                "or written twice: call put after each add, with the number of added steps."
            )


def chunks_at_once(capture: Capture, num_steps: int) -> int:
    """Return the number of chunks of ``num_steps`` that can be given to `ChunkWriter.put` at once.

    The buffer must hold them and their final views, and a quarter of the memory for chunks that
    wait, their copy.
    """
    room = capture.num_finals if capture.is_sampled else capture.capacity
    return max(min(room, _waiting_steps(capture) // 4) // num_steps, 1)


def _waiting_steps(capture: Capture) -> int:
    """Return the number of time steps of all rows that `_WAITING_BYTES` holds."""
    transition = capture.buffer.experience.transition
    return _WAITING_BYTES * capture.capacity // sum(x.nbytes for x in jax.tree.leaves(transition))


def _divided(chunks: StepChunk, count: int) -> Iterator[StepChunk]:
    """Divide the steps of ``count`` chunks of the same length, on the host and without padding."""
    transition, finals = jax.tree.map(np.asarray, (chunks.transition, chunks.finals))
    steps = transition.last.shape[1] // count
    for index in range(count):
        span = slice(index * steps, (index + 1) * steps)
        ends = np.flatnonzero((finals.time >= span.start) & (finals.time < span.stop))
        view = jax.tree.map(lambda leaf, ends=ends: leaf[ends], finals.view)
        last = index == count - 1
        yield StepChunk(
            jax.tree.map(lambda leaf, span=span: leaf[:, span], transition),
            FinalObservations(finals.row[ends], finals.time[ends] - span.start, view),
            chunks.stop - (count - 1 - index) * steps,
            chunks.cut if last else np.zeros_like(chunks.cut),
        )
