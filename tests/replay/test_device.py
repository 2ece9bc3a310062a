"""Replay on the device, against the vault it was loaded from."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import offmarl
from offmarl import vault
from offmarl.errors import ShapeError
from offmarl.replay import load
from offmarl.types import Continuous, Discrete, EnvSpec, FinalObservations, Transition, View
from offmarl.vault import open_vault

SPEC = EnvSpec("test", num_agents=2, observation_size=3, state_size=2, action=Discrete(3))


def random_view(rng: np.random.Generator, lead: tuple[int, ...], spec: EnvSpec) -> View:
    agents = spec.num_agents
    return View(
        observation=rng.normal(size=(*lead, agents, spec.observation_size)).astype(np.float32),
        state=rng.normal(size=(*lead, spec.state_size)).astype(np.float32),
        legal_actions=rng.random((*lead, agents, spec.action_size)) < 0.7,
        alive=rng.random((*lead, agents)) < 0.8,
    )


def write(
    path: Path,
    ends: np.ndarray,
    spec: EnvSpec = SPEC,
    terminates: float = 0.5,
    with_finals: bool = True,
) -> tuple[Transition, FinalObservations]:
    """Write random steps ``ends.shape``; an episode ends where ``ends`` is true."""
    rng = np.random.default_rng(0)
    rows, steps = ends.shape
    terminated = ends & (rng.random(ends.shape) < terminates)
    everyone = (rows, steps, spec.num_agents)
    discrete = isinstance(spec.action, Discrete)
    action_shape = everyone if discrete else (*everyone, spec.action_size)
    transition = Transition(
        view=random_view(rng, ends.shape, spec),
        action=rng.integers(0, spec.action_size, action_shape).astype(np.int32)
        if discrete
        else rng.uniform(-1, 1, action_shape).astype(np.float32),
        reward=rng.normal(size=everyone).astype(np.float32),
        terminated=np.broadcast_to(terminated[..., None], everyone),
        truncated=np.broadcast_to((ends & ~terminated)[..., None], everyone),
        last=ends,
        behaviour_log_prob=-rng.random(everyone).astype(np.float32),
        policy_id=np.zeros((rows, steps), np.int32),
    )
    row, time = np.nonzero(ends)
    finals = FinalObservations(row, time, random_view(rng, (len(row),), spec))
    with vault.create(path, spec, rows=rows, chunk_steps=16) as writer:
        writer.append(transition, finals if with_finals else None)
    return transition, finals


def check_window(
    window, transition: Transition, finals: FinalObservations | None, length: int
) -> None:
    """Find the window's first step in the data, and compare all of it with what is there."""
    first = np.asarray(window.behaviour_log_prob[0])
    row, start = np.argwhere((transition.behaviour_log_prob == first).all(-1))[0]
    rest = np.flatnonzero(transition.last[row, start:])
    ends_here = len(rest) > 0
    left = min(length, rest[0] + 1 if ends_here else transition.last.shape[1] - start)
    np.testing.assert_array_equal(window.mask, np.arange(length) < left)
    steps = slice(start, start + left)
    for name in ("action", "reward", "terminated", "truncated", "behaviour_log_prob"):
        np.testing.assert_array_equal(
            getattr(window, name)[:left], getattr(transition, name)[row, steps]
        )
    for name in View._fields:
        found = getattr(window.view, name)
        expected = getattr(transition.view, name)
        np.testing.assert_array_equal(found[:left], expected[row, steps])
        final = None
        if ends_here and left == rest[0] + 1:
            if finals is not None:
                (index,) = np.flatnonzero((finals.row == row) & (finals.time == start + left - 1))
                final = getattr(finals.view, name)[index]
        elif start + left < transition.last.shape[1]:
            final = expected[row, start + left]
        if final is not None:
            np.testing.assert_array_equal(found[left], final)
    stop = start + left - 1
    over = transition.terminated[row, stop].all()
    inside = start + left < transition.last.shape[1] and not transition.last[row, stop]
    has_final = transition.last[row, stop] and finals is not None
    np.testing.assert_array_equal(window.next_known[: left - 1], True)
    assert bool(window.next_known[left - 1]) == bool(over or inside or has_final)


DATA = given(
    ends=st.integers(0, 2**31 - 1),
    rows=st.integers(1, 3),
    steps=st.integers(1, 40),
    length=st.integers(1, 7),
    with_finals=st.booleans(),
)


@settings(max_examples=3)
@DATA
def test_every_window_is_the_data(tmp_path_factory: pytest.TempPathFactory, **data: Any) -> None:
    check_every_window(tmp_path_factory, **data)


@pytest.mark.nightly
@settings(max_examples=40)
@DATA
def test_every_window_of_much_data(tmp_path_factory: pytest.TempPathFactory, **data: Any) -> None:
    check_every_window(tmp_path_factory, **data)


def check_every_window(
    tmp_path_factory: pytest.TempPathFactory,
    ends: int,
    rows: int,
    steps: int,
    length: int,
    with_finals: bool,
) -> None:
    path = tmp_path_factory.mktemp("replay") / "data.vlt"
    ended = np.random.default_rng(ends).random((rows, steps)) < 0.2
    transition, finals = write(path, ended, with_finals=with_finals)
    replay = load(vault.open_vault(path), batch_size=4, length=length)
    windows = jax.device_get(replay.windows(replay.starts))
    for i in range(len(replay.starts)):
        window = jax.tree.map(lambda x, i=i: x[i], windows)
        check_window(window, transition, finals if with_finals else None, length)


def test_samples_are_uniform_over_windows_and_decided_by_the_key(tmp_path: Path) -> None:
    ended = np.zeros((1, 12), bool)
    ended[0, [3, 11]] = True
    write(tmp_path / "data.vlt", ended)
    replay = offmarl.open(tmp_path / "data.vlt").replay(batch=20_000, length=4)
    sample = jax.jit(lambda replay, key: replay.sample(key))
    batch = sample(replay, jax.random.key(0))
    assert batch.view.observation.shape == (20_000, 5, 2, 3)
    # One window in the first episode, five in the second: six, all equally likely.
    _, counts = np.unique(np.asarray(batch.behaviour_log_prob[:, 0, 0]), return_counts=True)
    np.testing.assert_allclose(counts / 20_000, 1 / 6, atol=0.012)
    again = sample(replay, jax.random.key(0))
    np.testing.assert_array_equal(batch.reward, again.reward)
    assert not np.array_equal(batch.reward, sample(replay, jax.random.key(1)).reward)


def test_another_dataset_of_the_same_size_does_not_recompile(tmp_path: Path) -> None:
    ended = np.zeros((1, 12), bool)
    ended[0, 11] = True
    write(tmp_path / "a.vlt", ended, terminates=0.0)
    write(tmp_path / "b.vlt", ended, terminates=1.0)
    traces = []

    @jax.jit
    def sample(replay, key):
        traces.append(1)
        return replay.sample(key)

    for name in ("a", "b"):
        sample(open_vault(tmp_path / f"{name}.vlt").replay(batch=2, length=4), jax.random.key(0))
    assert len(traces) == 1


def test_continuous_actions(tmp_path: Path) -> None:
    spec = EnvSpec("reach", 2, 3, 2, Continuous(3))
    ended = np.zeros((2, 9), bool)
    ended[:, 8] = True
    transition, finals = write(tmp_path / "data.vlt", ended, spec)
    replay = load(vault.open_vault(tmp_path / "data.vlt"), 4, 5)
    windows = jax.device_get(replay.windows(replay.starts))
    assert windows.action.shape == (10, 5, 2, 3)
    for i in range(10):
        check_window(jax.tree.map(lambda x, i=i: x[i], windows), transition, finals, 5)


def test_beyond_the_data_every_action_is_legal(tmp_path: Path) -> None:
    ended = np.zeros((1, 3), bool)
    write(tmp_path / "data.vlt", ended)
    replay = load(vault.open_vault(tmp_path / "data.vlt"), 1, 8)
    view = replay.windows(replay.starts).view
    assert bool(view.legal_actions[0, 4:].all())
    assert bool(jnp.isfinite(view.observation).all())


def test_nothing_to_sample_from(tmp_path: Path) -> None:
    vault.create(tmp_path / "empty.vlt", SPEC, rows=1).close()
    with pytest.raises(ShapeError, match="holds no steps yet"):
        open_vault(tmp_path / "empty.vlt").replay()
    write(tmp_path / "data.vlt", np.ones((1, 3), bool))
    with pytest.raises(ShapeError, match="at least 1"):
        open_vault(tmp_path / "data.vlt").replay(batch=0)


def test_what_a_session_shows_of_a_dataset(tmp_path: Path) -> None:
    write(tmp_path / "data.vlt", np.ones((2, 600), bool))
    dataset = open_vault(tmp_path / "data.vlt")
    path = str(tmp_path / "data.vlt" / "main")
    assert repr(dataset) == f"<Dataset {path!r}: test, 2 agents, 1,200 steps in 2 rows>"
    assert repr(dataset.replay(4, 1)) == "<Replay of test: batches of 4 windows of 1 steps>"
