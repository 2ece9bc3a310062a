"""Recordings in blocks, which do not depend on who records them."""

from dataclasses import dataclass

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import envs, vault
from offmarl.envs.base import transition
from offmarl.envs.probes import TwoStep
from offmarl.errors import OptionError, RunError
from offmarl.launch import Share, join_work, run_share
from offmarl.networks import PolicyConfig, make_policy
from offmarl.programs.recording.blocks import RecordWork, block_times
from offmarl.programs.recording.record import Recording

ENV = envs.make("swarm/hover-2")
POLICY = make_policy(PolicyConfig("random"), ENV.spec)


def work_at(path, **changed):
    about = {"program": "random"}
    options = {"steps": 4 * 120, "num_envs": 4, "seed": 1, "provenance": lambda: about} | changed
    block_steps = options.pop("block_steps", 4 * 20)
    return RecordWork(Recording(ENV, POLICY, (), path, **options), block_steps)


def recorded_by(tasks, path, **changed):
    for index in range(tasks):
        run_share(work_at(path, **changed), Share(index, tasks))
    join_work(work_at(path, **changed))
    return vault.open_vault(path)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    return recorded_by(1, tmp_path_factory.mktemp("one") / "hover.vlt" / "random")


def test_the_recording_does_not_depend_on_the_number_of_tasks(one, tmp_path):
    data = recorded_by(2, tmp_path / "hover.vlt" / "random")
    assert data.digest() == one.digest()
    chex.assert_trees_all_equal(data.read(), one.read())
    assert data.provenance == one.provenance


def test_the_blocks_stand_in_order_and_differ(one):
    assert (one.rows, one.length) == (4, 120)
    episodes = one.episodes
    assert episodes.length.sum() == 480
    ends = (episodes.start + episodes.length).reshape(4, -1)
    assert {20, 40, 60, 80, 100, 120} <= {*ends[0].tolist()}
    actions = one.read()["actions"].reshape(4, 6, 20, -1)
    assert len(np.unique(actions[0], axis=0)) == 6
    np.testing.assert_array_equal(episodes.policy_id, 0)
    assert one.provenance["complete"] and one.provenance["recipe"]["blocks"] == [6, 20]
    assert vault.verify(one.path, deep=True).sound


def test_a_complete_recording_is_not_changed_and_another_is_refused(one):
    assert not join_work(work_at(one.path))
    with pytest.raises(RunError, match="started with seed=1, not 2"):
        work_at(one.path, seed=2).is_complete()
    assert (
        work_at(one.path).cuts_episodes()
        and not work_at(one.path, block_steps=4 * 120).cuts_episodes()
    )
    with pytest.raises(RunError, match="with other --steps, --num-envs or --block-steps: give"):
        work_at(one.path, block_steps=40).is_complete()


def test_states_of_the_environment_make_another_recording(one, tmp_path):
    states = Recording(envs.record_states(ENV), POLICY, (), one.path, 4 * 120, 4, 1)
    with pytest.raises(RunError, match=r"started with extras=None, not \['env_key', 'env_state'\]"):
        RecordWork(states, 4 * 20).is_complete()
    path = tmp_path / "hover.vlt" / "random"
    about = {"recipe": RecordWork(states, 4 * 20).identity, "complete": True}
    vault.create(path, states.env.spec, rows=4, provenance=about).close()
    with pytest.raises(RunError, match="started with extras="):
        work_at(path).is_complete()


def test_other_seeds_give_other_data(one, tmp_path):
    data = recorded_by(1, tmp_path / "hover.vlt" / "random", seed=2)
    assert data.digest() != one.digest()


@pytest.mark.parametrize(
    ("steps", "num_envs", "time_limit", "block_steps", "times"),
    [
        (1_000_000, 64, 50, None, 201),  # four episodes, rounded so that blocks are equal
        (10**9, 64, 100, None, 15_259),  # at most 1,024 blocks
        (1_000, 64, 50, None, 16),  # one block
        (12_791, 10, None, None, 128),  # the least number of steps; all are rounded up
        (10_000, 10, None, 301, 31),
        (100, 10, None, 10**6, 10),
    ],
)
def test_sizes_of_blocks(steps, num_envs, time_limit, block_steps, times):
    assert block_times(steps, num_envs, time_limit, block_steps) == times


def test_the_plan_has_sizes(one, tmp_path):
    plan = work_at(tmp_path / "hover.vlt" / "random").plan(3)
    assert (plan["blocks"], plan["tasks"], plan["steps"]) == (6, 3, 480)
    chunk_steps, step_bytes = one.manifest.schema.chunk_steps, plan["bytes"] // (4 * 120)
    assert chunk_steps == 120  # the steps of a row: nothing of the chunk is empty
    assert plan["bytes"] < one.num_bytes < plan["bytes"] + 200_000  # tables and names
    assert plan["bytes while joining"] == step_bytes * 4 * (120 + 6 * 64)
    assert plan["memory of a task"] == 600_000_000 + 4 * (step_bytes * 4 * 20)
    with pytest.raises(OptionError, match="divide the recording by tasks or by devices"):
        work_at(tmp_path / "hover.vlt" / "random", devices=1)


@dataclass(frozen=True, kw_only=True)
class Coin(TwoStep):
    """Half of the episodes end after a step, and the others return 1 at the limit."""

    length = 4

    def step(self, key, state, action):
        after, timestep = super().step(key, state, action)
        wins, ends = state.cue[0] == 1, after.time >= self.length
        return after, transition(
            timestep.next_view,
            reward=jnp.full(2, wins & ends, jnp.float32),
            terminated=jnp.full(2, ~wins | ends),
            truncated=jnp.zeros(2, bool),
        )


@pytest.mark.parametrize("in_blocks", [False, True])
def test_the_return_is_of_episodes_that_had_the_time_to_end(in_blocks, tmp_path):
    env, rows, steps = Coin(name="coin"), 256, 20
    policy = make_policy(PolicyConfig("random"), env.spec)
    recording = Recording(env, policy, (), tmp_path / "coin.vlt" / "random", rows * steps, rows, 0)
    if in_blocks:
        work = RecordWork(recording, rows * steps // 2)
        run_share(work, Share(0, 1))
        join_work(work)
    else:
        recording.record()
    data = vault.open_vault(recording.path)
    about, times = data.provenance["recorded"], steps // (1 + in_blocks)
    begins_early = data.episodes.start % times <= times - env.length
    assert about["episodes"] == begins_early.sum() < data.episodes.complete.sum()
    assert about["return"] == data.episodes.episode_returns[begins_early].mean()
    assert about["return"] == pytest.approx(0.5, abs=0.03)
    assert data.episodes.mean_return < 0.5 - 0.03  # cut episodes would have won
