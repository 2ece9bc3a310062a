"""Buffers of steps beside checkpoints: each step is written once, and read back bit by bit."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl.checkpoint import Checkpoints
from offmarl.programs.experience.buffer import Capture, add, init_capture, make_buffer
from offmarl.programs.experience.captures import CaptureCheckpoints, remove_buffers
from offmarl.programs.experience.windows import WindowStart, windows_at
from offmarl.testing import experience, views
from offmarl.types import Continuous, Discrete, EnvSpec, Transition, View
from tests.specs import typed_spec

NUM_ENVS, CAPACITY = 2, 12
VECTORS = EnvSpec("vectors", 3, observation_size=2, state_size=4, action=Discrete(3))
TREE = replace(typed_spec("tree"), action=Continuous(2))
BUFFER = make_buffer(NUM_ENVS, CAPACITY)


class State(NamedTuple):
    params: jax.Array
    capture: Capture


PUT = jax.jit(add, static_argnums=0)
DRAW = jax.jit(windows_at, static_argnums=2)


def rollout(spec: EnvSpec, steps: int, seed: int) -> tuple[Transition, View]:
    """Steps as a rollout returns them: most next views are the views that follow."""
    by_row, _ = experience(spec, NUM_ENVS, steps, seed, end_every=3)
    by_row.reward[0, 0, 0] = np.nan
    by_row = by_row._replace(policy_id=np.full((NUM_ENVS, steps), seed, "int32"))
    transition = jax.tree.map(lambda leaf: leaf.swapaxes(0, 1), by_row)

    def next_view(view: np.ndarray, other: np.ndarray) -> np.ndarray:
        last = transition.last.reshape(transition.last.shape + (1,) * (view.ndim - 2))
        return np.where(last, other, np.concatenate([view[1:], other[-1:]]))

    others = views(spec, (steps, NUM_ENVS), np.random.default_rng(seed))
    return transition, jax.tree.map(next_view, transition.view, others)


def begin(spec: EnvSpec) -> State:
    return State(jnp.zeros(2), init_capture(BUFFER, spec, sampled=True))


def grow(state: State, spec: EnvSpec, steps: int, seed: int) -> State:
    return State(state.params + seed, PUT(BUFFER, state.capture, *rollout(spec, steps, seed)))


def visible(tree: Any) -> Any:
    """The tree with what can be drawn from its buffers in place of their final views."""

    def drawn(node: Any) -> Any:
        if not isinstance(node, Capture) or not int(node.filled):
            return node
        row, age = np.divmod(np.arange(NUM_ENVS * CAPACITY), CAPACITY)
        age = np.minimum(age, node.filled - 1)  # of one shape, which is compiled once
        start = WindowStart(jnp.asarray(row), jnp.asarray(age), jnp.zeros(len(row), bool))
        return node._replace(next_views=DRAW(node, start, 1).view_t)

    return jax.tree.map(drawn, tree, is_leaf=lambda node: isinstance(node, Capture))


def assert_same(first: Any, second: Any) -> None:
    chex.assert_trees_all_equal(visible(first), visible(second), strict=True)


def resumed(directory: Path, state: State) -> tuple[int, State]:
    checkpoints = CaptureCheckpoints(directory, keep=2)
    checkpoint = checkpoints.resume({"state": jax.eval_shape(lambda: state)})
    assert checkpoint is not None
    return checkpoint.step, checkpoint.tree["state"]


def steps_on_disk(directory: Path) -> int:
    return sum(int(path.stem.split("-")[1]) for path in directory.glob("buffer/0/*.npz"))


@pytest.mark.parametrize("spec", [TREE, VECTORS])
def test_an_empty_buffer_has_room_for_the_steps_of_its_spec(spec: EnvSpec) -> None:
    steps, views = rollout(spec, 1, 0)
    for sampled in (True, False):
        capture = init_capture(BUFFER, spec, sampled)
        assert (capture.capacity, int(capture.total), capture.is_sampled) == (CAPACITY, 0, sampled)
        empty = capture.buffer.experience.transition, capture.next_views
        of_one_step = jax.tree.map(lambda leaf: leaf[0, 0], (empty, (steps, views)))
        chex.assert_trees_all_equal_shapes_and_dtypes(*of_one_step)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "rounds"), [(TREE, [5, 4, 5]), (VECTORS, [12, 12]), (VECTORS, [7, 7, 7, 7])]
)
def test_a_buffer_is_read_back_bit_by_bit_wherever_it_wraps(
    tmp_path: Path, spec: EnvSpec, rounds: list[int]
) -> None:
    state, checkpoints = begin(spec), CaptureCheckpoints(tmp_path, keep=2)
    for step, count in enumerate(rounds, 1):
        state = grow(state, spec, count, step)
        checkpoints.save(step, {"state": state}, {})
    step, result = resumed(tmp_path, state)
    assert step == len(rounds)
    assert_same(result, state)
    # A step is on disk once, and for the oldest of two checkpoints no longer than it needs it.
    assert steps_on_disk(tmp_path) <= CAPACITY + 2 * max(rounds)


@pytest.mark.slow
def test_a_buffer_with_few_final_views_is_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds fewer steps than its capacity, and the same ones as before."""
    monkeypatch.setattr("offmarl.programs.experience.buffer._SMALL_BYTES", 0)
    state = State(jnp.zeros(2), init_capture(BUFFER, VECTORS, sampled=True, num_steps=3))
    checkpoints, counts = CaptureCheckpoints(tmp_path, keep=2), []
    for step in range(1, 6):
        state = grow(state, VECTORS, 3, step)
        checkpoints.save(step, {"state": state}, {})
        counts.append(int(state.capture.filled))
        capture = resumed(tmp_path, state)[1].capture
        assert int(capture.filled) == counts[-1]
        assert_same(visible(capture).next_views, visible(state.capture).next_views)
        grown = [visible(grow(State(0, x), VECTORS, 3, 99)) for x in (capture, state.capture)]
        assert_same(grown[0].capture.next_views, grown[1].capture.next_views)
    assert counts[0] == 3 < max(counts) < CAPACITY


@pytest.mark.slow
def test_several_updates_between_checkpoints_and_none_of_two_seeds(tmp_path: Path) -> None:
    seeds, checkpoints = [begin(VECTORS), begin(VECTORS)], CaptureCheckpoints(tmp_path)
    checkpoints.save(1, {"state": seeds}, {})
    for number in range(4):  # more than the buffer holds
        seeds = [grow(state, VECTORS, 5, 4 * place + number) for place, state in enumerate(seeds)]
    checkpoints.save(2, {"state": seeds}, {})
    checkpoints.save(3, {"state": seeds}, {})
    for step in (1, 2, 3):
        tree, _ = checkpoints.restore({"state": jax.eval_shape(lambda: seeds)}, step)
        assert_same(tree["state"], [begin(VECTORS)] * 2 if step == 1 else seeds)


@pytest.mark.parametrize("lost", [False, True])
@pytest.mark.slow
def test_work_after_the_last_checkpoint_is_repeated(tmp_path: Path, lost: bool) -> None:
    """A kill between the steps and their checkpoint leaves a file that no checkpoint needs."""
    states = [begin(VECTORS)]
    for seed in range(1, 5):
        states.append(grow(states[-1], VECTORS, 5, seed))
    checkpoints = CaptureCheckpoints(tmp_path, keep=2)
    for step in (1, 2):
        checkpoints.save(step, {"state": states[step]}, {})
    if lost:
        checkpoints.save(3, {"state": states[3]}, {})
        (tmp_path / "3").rename(tmp_path / "unfinished")
    (tmp_path / "buffer" / "0" / "part.npz").write_bytes(b"half of a fi")
    again = CaptureCheckpoints(tmp_path, keep=2)
    checkpoint = again.resume({"state": jax.eval_shape(lambda: states[0])})
    assert checkpoint is not None and checkpoint.step == 2
    again.save(4, {"state": grow(grow(checkpoint.tree["state"], VECTORS, 5, 3), VECTORS, 5, 4)}, {})
    assert_same(resumed(tmp_path, states[0])[1], states[4])
    assert len(list(tmp_path.glob("buffer/0/*-*.npz"))) == 3  # of 1 and 2, which need 10, and of 4


@pytest.mark.slow
@pytest.mark.parametrize("how", ["a flipped bit", "fewer steps than its name says"])
def test_a_checkpoint_whose_steps_are_damaged_is_set_aside(tmp_path: Path, how: str) -> None:
    state, checkpoints = begin(VECTORS), CaptureCheckpoints(tmp_path, keep=2)
    states = [state := grow(state, VECTORS, 5, step) for step in (1, 2)]
    for step in (1, 2):
        checkpoints.save(step, {"state": states[step - 1]}, {})
    newest = tmp_path / "buffer" / "0" / "2-5.npz"
    if how == "a flipped bit":
        content = bytearray(newest.read_bytes())
        content[len(content) // 2] ^= 1
        newest.write_bytes(content)
    else:
        newest.rename(newest.with_name("2-10.npz"))
    reason = ".*buffer/0: .*" if how == "a flipped bit" else ".*5 steps are missing.*"
    with pytest.warns(UserWarning, match=rf"2 is damaged \({reason}resumes from checkpoint 1"):
        step, result = resumed(tmp_path, state)
    assert step == 1
    assert_same(result, states[0])
    (tmp_path / "buffer" / "0" / "1-5.npz").unlink()
    fresh = CaptureCheckpoints(tmp_path)
    with pytest.warns(UserWarning, match=r"lacks a part of the buffer.*starts from the beginning"):
        assert fresh.resume({"state": jax.eval_shape(lambda: state)}) is None


@pytest.mark.slow
def test_checkpoints_hold_no_steps_and_buffers_that_are_refilled_are_not_stored(
    tmp_path: Path,
) -> None:
    big = EnvSpec("big", 3, observation_size=500, state_size=4, action=Discrete(3))
    refilled = init_capture(BUFFER, big)
    refilled = PUT(BUFFER, refilled, *rollout(big, CAPACITY, 1))
    trees = {"sampled": grow(begin(big), big, CAPACITY, 1).capture, "refilled": refilled}
    for name, capture in trees.items():
        checkpoints = CaptureCheckpoints(tmp_path / name)
        for step in range(1, 4):
            checkpoints.save(step, {"state": [State(jnp.zeros(2), capture)]}, {})
        size = sum(path.stat().st_size for path in (tmp_path / name).rglob("*") if path.is_file())
        steps = sum(leaf.nbytes for leaf in jax.tree.leaves(capture))
        assert size < steps
    assert not (tmp_path / "refilled" / "buffer").exists()
    tree, _ = checkpoints.restore(
        {"state": [jax.eval_shape(lambda: State(jnp.zeros(2), refilled))]}
    )
    assert_same(tree["state"][0].capture.total, refilled.total)
    remove_buffers(tmp_path / "sampled")
    assert not (tmp_path / "sampled" / "buffer").exists()


@pytest.mark.parametrize(("sampled", "left"), [(True, [2]), (False, [1, 2])])
def test_checkpoints_whose_buffers_are_removed_are_removed_too(
    tmp_path: Path, sampled: bool, left: list[int]
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 2):
        checkpoints.save(step, {"state": np.arange(3)}, {})
    if sampled:
        (tmp_path / "buffer" / "0").mkdir(parents=True)
    remove_buffers(tmp_path)
    assert checkpoints.steps() == left and not (tmp_path / "buffer").exists()


def test_the_last_checkpoint_of_a_finished_run_is_read_without_its_buffers(tmp_path: Path) -> None:
    state = grow(begin(VECTORS), VECTORS, 5, 1)
    checkpoints = CaptureCheckpoints(tmp_path, keep=2)
    checkpoints.save(1, {"state": state}, {})
    remove_buffers(tmp_path)
    finished = CaptureCheckpoints(tmp_path, keep=2, last=1)
    checkpoint = finished.resume({"state": jax.eval_shape(lambda: state)})
    assert checkpoint is not None and checkpoint.step == 1
    assert_same(checkpoint.tree["state"].params, state.params)
    with pytest.warns(UserWarning, match=r"lacks a part of the buffer.*starts from the beginning"):
        other = CaptureCheckpoints(tmp_path, keep=2, last=2)
        assert other.resume({"state": jax.eval_shape(lambda: state)}) is None
