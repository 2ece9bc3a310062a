"""Every step of a rollout reaches the vault once, or an error says that it cannot."""

import time
from contextlib import nullcontext

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from offmarl import vault
from offmarl.errors import ShapeError, VaultError, VaultFullError
from offmarl.programs import ChunkWriter, init_capture, make_buffer
from offmarl.programs import add as add_eagerly
from offmarl.programs.experience import buffer as buffers
from offmarl.programs.experience.buffer import chunks_at_once, take_chunk
from offmarl.types import Discrete, EnvSpec
from tests.rollouts import steps_of, view_of

E, N = 2, 2
SPEC = EnvSpec("", N, 1, 1, Discrete(2))

add = jax.jit(add_eagerly, static_argnums=0)


def stretch(start, num_steps, rng):
    """Steps whose every number says where they belong; episodes end where chance has it."""
    time = start + np.arange(num_steps)
    mark = (time[:, None] * E + np.arange(E)).astype(np.float32)
    ends = rng.random(mark.shape) < 0.3
    by_limit = rng.random(mark.shape) < 0.5
    causes = {
        "terminated": np.repeat((ends & ~by_limit)[..., None], N, axis=-1),
        "truncated": np.repeat((ends & by_limit)[..., None], N, axis=-1),
    }
    transition = steps_of(SPEC, ends, mark, reward=np.ones((*mark.shape, N), np.float32), **causes)
    return transition, view_of(SPEC, -mark - 1)


class Memory(vault.Writer):
    """A writer that keeps the appended records in memory."""

    spec = SPEC

    def __init__(self):
        self.records = []
        self.closed = False

    def chunks(self, run):
        return 0

    def append(self, transition, finals, *, run, chunk, cut):
        assert chunk == len(self.records)
        self.records.append((transition, finals))

    def flush(self):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.closed = True

    def discard(self):
        self.records.clear()


RECORDINGS = given(
    capacity=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=6),
    sampled=st.booleans(),
    seed=st.integers(0, 99),
)


@pytest.mark.slow
@settings(max_examples=1)
@RECORDINGS
@example(capacity=3, sizes=[3, 3, 3], sampled=True, seed=0)  # exactly full, each time
@example(capacity=3, sizes=[3, 3, 3], sampled=False, seed=0)
@example(capacity=4, sizes=[3, 3, 3, 1], sampled=True, seed=1)  # wraps; ends within a chunk
@example(capacity=2, sizes=[3], sampled=True, seed=0)  # more than it holds
def test_what_comes_out_is_what_went_in(capacity, sizes, sampled, seed):
    check_recording(capacity, sizes, sampled, seed)


@pytest.mark.slow
def test_final_views_are_written_where_a_buffer_has_room_for_few(monkeypatch):
    monkeypatch.setattr("offmarl.programs.experience.buffer._SMALL_BYTES", 0)
    check_recording(16, [3, 2, 3, 3, 3, 3, 3], sampled=True, seed=0)


def test_several_chunks_at_once_are_those_of_one_by_one():
    """The buffer wraps within them, and episodes end in them."""
    rng, buffer = np.random.default_rng(0), make_buffer(E, 7)
    capture, at_once, one_by_one = init_capture(buffer, SPEC, sampled=True), Memory(), Memory()
    with ChunkWriter(at_once, "run") as several, ChunkWriter(one_by_one, "run") as single:
        for number in range(9):
            capture = add(buffer, capture, *stretch(2 * number, 2, rng))
            cut = number == 8
            single.put(capture, 2, cut)
            if number % 3 == 2:
                several.put(capture, 2, cut, 3)
    assert len(at_once.records) == len(one_by_one.records) == 9
    assert sum(len(finals.row) for _, finals in at_once.records) > 5
    chex.assert_trees_all_equal(at_once.records, one_by_one.records)


@pytest.mark.nightly
@settings(max_examples=50)
@RECORDINGS
def test_what_comes_out_of_many_recordings(capacity, sizes, sampled, seed):
    check_recording(capacity, sizes, sampled, seed)


def check_recording(capacity, sizes, sampled, seed):
    rng = np.random.default_rng(seed)
    sizes = [min(size, capacity) if sampled else capacity for size in sizes]
    buffer = make_buffer(E, capacity)
    capture = init_capture(buffer, SPEC, sampled, num_steps=max(sizes))
    memory = Memory()
    added, next_views, start = [], [], 0
    with ChunkWriter(memory, "run") as chunks:
        for size in sizes:
            transition, next_view = stretch(start, size, rng)
            capture = add(buffer, capture, transition, next_view)
            cut = size == sizes[-1] and len(added) == len(sizes) - 1
            chunks.put(capture, size, cut)
            added.append(transition)
            next_views.append(next_view)
            start += size
    assert memory.closed
    expected = jax.tree.map(lambda *parts: np.concatenate(parts).swapaxes(0, 1), *added)
    expected.truncated[:, -1] |= ~expected.last[:, -1:]
    expected.last[:, -1] = True
    written = jax.tree.map(
        lambda *parts: np.concatenate(parts, 1), *[record for record, _ in memory.records]
    )
    chex.assert_trees_all_equal(written, expected)

    ends = []
    for (transition, finals), offset in zip(
        memory.records, np.cumsum([0, *sizes[:-1]]), strict=True
    ):
        np.testing.assert_array_equal(
            np.argwhere(transition.last), np.stack([finals.row, finals.time], 1)
        )
        marks = (offset + finals.time) * E + finals.row
        np.testing.assert_array_equal(finals.view.state[:, 0], -marks - 1)
        np.testing.assert_array_equal(finals.view.observation[:, :, 0].T, [-marks - 1] * N)
        ends.extend(zip(finals.row, offset + finals.time, strict=True))
    assert sorted(ends) == sorted(zip(*np.nonzero(expected.last), strict=True))


@pytest.mark.parametrize("steps", [1, 3])
def test_a_buffer_nobody_samples_from_is_filled_at_once(steps):
    buffer = make_buffer(E, 2)
    with pytest.raises(ShapeError, match=f"{steps} steps were added to a buffer of 2"):
        add(buffer, init_capture(buffer, SPEC), *stretch(0, steps, np.random.default_rng(0)))


@pytest.mark.parametrize("taken", [[4, 4], [4, 0, 4], [3, 4]])
def test_steps_overwritten_or_taken_twice_are_noticed(taken):
    """Four steps are added each time; zero stands for not taking them."""
    rng = np.random.default_rng(0)
    buffer = make_buffer(E, 4)
    capture = init_capture(buffer, SPEC)

    error = pytest.raises(VaultError, match="overwritten in the buffer or written twice")
    with error if taken != [4, 4] else nullcontext(), ChunkWriter(Memory(), "run") as chunks:
        for index, size in enumerate(taken):
            capture = add(buffer, capture, *stretch(4 * index, 4, rng))
            if size:
                chunks.put(capture, size)


class Slow(Memory):
    def append(self, *args, **kwargs):
        time.sleep(0.05)
        super().append(*args, **kwargs)


def test_few_chunks_wait_for_the_disk(monkeypatch):
    monkeypatch.setattr(buffers, "_WAITING_BYTES", 1)
    rng, buffer, memory = np.random.default_rng(0), make_buffer(E, 2), Slow()
    capture = init_capture(buffer, SPEC)
    with ChunkWriter(memory, "run") as chunks:
        for index in range(4):
            capture = add(buffer, capture, *stretch(2 * index, 2, rng))
            chunks.put(capture, 2)
            assert len(memory.records) >= index  # all before it are written
        chunks.flush()
        assert len(memory.records) == 4


def test_as_many_chunks_are_written_at_once_as_the_buffer_and_memory_hold(monkeypatch):
    capture = init_capture(make_buffer(E, 16), SPEC)
    assert [chunks_at_once(capture, steps) for steps in (1, 5, 16, 17)] == [16, 3, 1, 1]
    step_bytes = sum(x.nbytes for x in jax.tree.leaves(capture.buffer.experience.transition)) // 16
    monkeypatch.setattr(buffers, "_WAITING_BYTES", 24 * step_bytes)  # a quarter of it for the copy
    assert [chunks_at_once(capture, steps) for steps in (1, 2, 4)] == [6, 3, 1]
    monkeypatch.setattr(buffers, "_SMALL_BYTES", 0)
    sampled = init_capture(make_buffer(E, 16), SPEC, sampled=True, num_steps=3)
    assert [chunks_at_once(sampled, steps) for steps in (1, 2)] == [3, 1]  # 3 final views in a row


class Broken(Memory):
    def append(self, *args, **kwargs):
        if len(self.records) == 1:
            raise VaultFullError("no room")
        super().append(*args, **kwargs)


def test_what_goes_wrong_in_the_thread_is_raised_and_nothing_follows_it():
    rng = np.random.default_rng(0)
    buffer = make_buffer(E, 2)
    capture = init_capture(buffer, SPEC)
    memory = Broken()
    with pytest.raises(VaultFullError, match="no room"), ChunkWriter(memory, "run") as chunks:
        for index in range(200):
            capture = add(buffer, capture, *stretch(2 * index, 2, rng))
            chunks.put(capture, 2)
    assert len(memory.records) == 1
    assert memory.closed


def test_an_interrupt_loses_nothing_that_was_handed_over(tmp_path):
    rng = np.random.default_rng(0)
    buffer = make_buffer(E, 5)
    capture = init_capture(buffer, SPEC)
    writer = vault.create(tmp_path / "a.vlt" / "b", SPEC, rows=E)
    with pytest.raises(KeyboardInterrupt), ChunkWriter(writer, "run") as chunks:
        for index in range(3):
            capture = add(buffer, capture, *stretch(5 * index, 5, rng))
            chunks.put(capture, 5)
        raise KeyboardInterrupt
    dataset = vault.open_vault(tmp_path / "a.vlt" / "b")
    assert dataset.length == 15
    expected = np.arange(15) * E + np.arange(E)[:, None]
    np.testing.assert_array_equal(dataset.transitions().view.state[..., 0], expected)


@pytest.mark.parametrize("sampled", [True, False])
def test_a_cut_truncates_the_living_alone(sampled):
    # In environment 0 agent 0 is dead for good; environment 1's episode ends in the last step.
    transition, next_view = stretch(0, 3, np.random.default_rng(0))
    no = np.zeros((3, E, N), bool)
    terminated, truncated, last = no.copy(), no.copy(), np.zeros((3, E), bool)
    terminated[1:, 0, 0] = True
    truncated[2, 1], last[2, 1] = [True, False], True
    terminated[2, 1, 1] = True
    transition = transition._replace(
        terminated=jnp.asarray(terminated), truncated=jnp.asarray(truncated), last=jnp.asarray(last)
    )
    buffer = make_buffer(E, 3)
    capture = add(buffer, init_capture(buffer, SPEC, sampled), transition, next_view)
    uncut, cut = take_chunk(capture, 3), take_chunk(capture, 3, cut=True)
    np.testing.assert_array_equal(uncut.transition.last.T, last)
    np.testing.assert_array_equal(uncut.transition.truncated.swapaxes(0, 1), truncated)
    truncated[2, 0], last[2, 0] = [False, True], True
    np.testing.assert_array_equal(cut.transition.last.T, last)
    np.testing.assert_array_equal(cut.transition.truncated.swapaxes(0, 1), truncated)
    np.testing.assert_array_equal(cut.transition.terminated.swapaxes(0, 1), terminated)
    # The episode that is cut has a final view too, and both are those of the last step.
    for chunk, rows in ((uncut, [1]), (cut, [0, 1])):
        assert chunk.finals.row.tolist() == rows
        assert chunk.finals.time.tolist() == [2] * len(rows)
        marks = [-(2 * E + row) - 1 for row in rows]
        assert chunk.finals.view.state[: len(rows), 0].tolist() == marks
        assert len(chunk.finals.view.state) >= len(
            rows
        )  # padded, so that few programs are compiled
    assert (uncut.stop, cut.stop) == (3, 3)
    assert (uncut.cut.tolist(), cut.cut.tolist()) == ([False, False], [True, False])
