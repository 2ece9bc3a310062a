"""Replay on the device, against the vault it was loaded from."""

from pathlib import Path

import chex
import jax
import numpy as np
import pytest

import offmarl
from offmarl import vault
from offmarl.errors import OptionError, ShapeError
from offmarl.testing import experience, views
from offmarl.types import Discrete, EnvSpec, FinalObservations, Transition
from offmarl.vault import open_vault
from tests.vault.experience import written

from .memory import sample

SPEC = EnvSpec("test", num_agents=2, observation_size=3, state_size=2, action=Discrete(3))


def write(
    path: Path, ends: np.ndarray, spec: EnvSpec = SPEC, terminates: float = 0.5
) -> tuple[Transition, FinalObservations]:
    """Write random steps ``ends.shape``; an episode ends where ``ends`` is true."""
    rng, agents = np.random.default_rng(0), (*ends.shape, spec.num_agents)
    terminated = ends & (rng.random(ends.shape) < terminates)
    transition = experience(spec, *ends.shape)[0]._replace(
        terminated=np.broadcast_to(terminated[..., None], agents),
        truncated=np.broadcast_to((ends & ~terminated)[..., None], agents),
        last=ends,
        policy_id=np.zeros(ends.shape, np.int32),
    )
    row, time = np.nonzero(ends)
    finals = FinalObservations(row, time, views(spec, (len(row),), rng))
    written(path, (transition, finals), spec=spec, chunk_steps=16)
    return transition, finals


def test_another_dataset_of_the_same_size_does_not_recompile(tmp_path: Path) -> None:
    ends = np.zeros((1, 12), bool)
    ends[0, 11] = True
    write(tmp_path / "a.vlt", ends, terminates=0.0)
    write(tmp_path / "b.vlt", ends, terminates=1.0)
    traced_once = jax.jit(chex.assert_max_traces(lambda replay, key: replay.sample(key), 1))
    for name in ("a", "b"):
        replay = open_vault(tmp_path / f"{name}.vlt").replay(batch=2, length=4)
        traced_once(replay, jax.random.key(0))


@pytest.mark.parametrize("source", ["replay", "stream"])
def test_nothing_to_draw_from(tmp_path: Path, source: str) -> None:
    vault.create(tmp_path / "empty.vlt", SPEC, rows=1).close()
    with pytest.raises(ShapeError, match="holds no steps yet"):
        getattr(open_vault(tmp_path / "empty.vlt"), source)()
    write(tmp_path / "data.vlt", np.ones((1, 3), bool))
    with pytest.raises(ShapeError, match="at least 1"):
        getattr(open_vault(tmp_path / "data.vlt"), source)(batch=0)


def test_what_a_session_shows_of_a_dataset(tmp_path: Path) -> None:
    write(tmp_path / "data.vlt", np.ones((2, 600), bool))
    dataset = open_vault(tmp_path / "data.vlt")
    path = str(tmp_path / "data.vlt" / "main")
    assert repr(dataset) == f"<Dataset {path!r}: test, 2 agents, 1,200 steps in 2 rows>"
    assert repr(dataset.replay(4, 1)) == "<Replay of test: batches of 4 windows of 1 steps>"


@pytest.mark.parametrize("source", ["replay", "stream"])
def test_guards_of_jax_are_for_the_code_of_users(tmp_path: Path, source: str) -> None:
    """Data without log-probabilities hold NaN, and reading a batch needs no care of users."""
    ends = np.zeros((2, 8), bool)
    ends[:, -1] = True
    write(tmp_path / "a.vlt", ends)
    columns = open_vault(tmp_path / "a.vlt").read()
    data = offmarl.from_arrays(
        tmp_path / "b.vlt",
        observations=columns["observations"][0],
        actions=columns["actions"][0],
        rewards=columns["rewards"][0],
        terminals=columns["terminals"][0],
        truncations=columns["truncations"][0],
    )
    key = jax.random.key(0)
    names = jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict")
    with jax.debug_nans(True), jax.transfer_guard("disallow"), names[0], names[1]:
        if source == "replay":
            batch = data.replay(batch=256, length=5).sample(key)
        else:
            batch = next(iter(data.stream(batch=256, length=5)))
    assert np.isnan(batch.behaviour_log_prob).any()


def ambient(name):
    """Return JAX under a setting that a user may have."""
    return {
        "rbg": lambda: jax.default_prng_impl("rbg"),
        "whole": lambda: jax.threefry_partitionable(False),
        "wide": lambda: jax.enable_x64(True),
    }[name]()


@pytest.mark.parametrize(
    ("setting", "weighted"), [("rbg", False), ("rbg", True), ("whole", True), ("wide", True)]
)
def test_batches_are_those_of_a_stream_under_any_settings_of_jax(tmp_path, setting, weighted):
    write(tmp_path / "a.vlt", np.random.default_rng(0).random((2, 30)) < 0.2)
    data = open_vault(tmp_path / "a.vlt")
    weights = np.arange(1.0, 1 + len(data.episodes.length)) if weighted else None
    with data.stream(4, 5, to="numpy", seed=7, weights=weights) as stream:
        expected = next(stream)
    with ambient(setting):
        key = jax.random.fold_in(jax.random.key(7), 0)
        batch = sample(data.replay(4, 5, weights=weights), key)
    chex.assert_trees_all_equal(batch, expected)


@pytest.mark.parametrize("seed", [-1, 2**32, 2**40])
def test_seeds_that_another_one_would_equal_are_refused(tmp_path, seed):
    write(tmp_path / "a.vlt", np.ones((2, 8), bool))
    data = open_vault(tmp_path / "a.vlt")
    calls = [
        lambda: data.stream(2, 1, seed=seed),
        lambda: data.stream(2, 1, seed=seed, epochs=1),
        lambda: data.split(validation=0.5, seed=seed),
        lambda: vault.sample(data, tmp_path / "b.vlt", episodes=2, seed=seed),
    ]
    for call in calls:
        with pytest.raises(OptionError, match=f"seed must be from 0 to 4,294,967,295, not {seed}"):
            call()
