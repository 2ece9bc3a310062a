import signal

import chex
import jax
import numpy as np
import pytest

from offmarl import envs, vault
from offmarl.errors import OffmarlError, RunError, Stopped
from offmarl.networks import PolicyConfig, init_policy, make_policy
from offmarl.programs import record_policy
from offmarl.programs.recording import record as recording
from offmarl.programs.runs.training import more_to_come
from offmarl.rollout import init_rollout, rollout
from tests.vault.damage import small_files

CONFIG = PolicyConfig("recurrent")


ENV = envs.make("swarm/coverage-2")
POLICY = make_policy(CONFIG, ENV.spec)  # one for all tests, which so compile once


@pytest.fixture(scope="module")
def fixed():
    return {
        "env": ENV,
        "policy": POLICY,
        "params": init_policy(CONFIG, ENV.spec, jax.random.key(0)),
        "steps": 4 * 130,  # three chunks of 44, and episodes of 50 steps
        "num_envs": 4,
        "seed": 3,
        "provenance": {"program": "test"},
    }


@pytest.fixture
def arguments(fixed, tmp_path):
    return fixed | {"path": tmp_path / "coverage.vlt" / "expert"}


@pytest.fixture(scope="module")
def whole(fixed, tmp_path_factory):
    """A recording that was never stopped."""
    path = tmp_path_factory.mktemp("whole") / "coverage.vlt" / "expert"
    assert record_policy(**fixed, path=path)
    return vault.open_vault(path)


@pytest.mark.slow
def test_a_recording_holds_whole_episodes_and_cuts_the_last(whole, fixed):
    data = whole
    assert (data.rows, data.length, data.num_steps) == (4, 132, 528)  # rounded up to chunks
    episodes = data.episodes
    assert episodes.length.reshape(4, 3).tolist() == [[50, 50, 32]] * 4
    assert episodes.cause.reshape(4, 3).tolist() == [["truncated", "truncated", "cut"]] * 4
    assert (episodes.final >= 0).all()
    np.testing.assert_array_equal(episodes.policy_id, 0)
    assert data.provenance["program"] == "test"
    assert data.provenance["complete"]
    for leaf in jax.tree.leaves(fixed["params"]):
        assert not leaf.is_deleted()


@pytest.mark.slow
def test_what_is_recorded_is_what_was_played(whole, fixed):
    auto = envs.autoreset(ENV)
    init_key, key = jax.random.split(jax.random.key(3))
    state = jax.jit(lambda key: init_rollout(auto, POLICY, key, 4))(init_key)
    play = jax.jit(lambda state, key: rollout(auto, POLICY, fixed["params"], state, key, 44, 0))
    steps, led_to = [], []
    for chunk in range(3):
        state, transitions, next_views, _ = play(state, jax.random.fold_in(key, chunk))
        steps.append(transitions)
        led_to.append(next_views)
    steps, led_to = (
        jax.tree.map(lambda *parts: np.concatenate(parts).swapaxes(0, 1), *parts)
        for parts in (steps, led_to)
    )
    steps = steps._replace(policy_id=np.repeat(steps.policy_id[..., None], 2, -1))
    steps.truncated[:, -1] = steps.last[:, -1] = True
    chex.assert_trees_all_close(whole.transitions(), steps, rtol=1e-5, atol=1e-6)
    episodes = whole.episodes
    ends = (episodes.row, episodes.start + episodes.length - 1)
    finals = jax.tree.map(lambda leaf: leaf[episodes.final], whole.finals)
    expected = jax.tree.map(lambda leaf: leaf[ends], led_to)
    chex.assert_trees_all_close(finals, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("steps", "chunks"),
    [(1, (1, 1)), (4 * 64, (1, 64)), (4 * 64 + 1, (2, 33)), (4 * 130 - 3, (3, 44))],
)
def test_chunks_have_at_most_64_steps_and_one_size(steps, chunks):
    assert recording.chunks_of(steps, num_envs=4) == chunks


@pytest.mark.parametrize("partly", [True, False])
@pytest.mark.parametrize("recipe", ["mine", None, ["mine"], {}, {"spec": {"package": 5}}])
def test_a_vault_with_a_recipe_of_another_kind_is_another_recording(tmp_path, recipe, partly):
    vault.create(tmp_path / "a.vlt", ENV.spec, rows=1, provenance={"recipe": recipe}).close()
    with pytest.raises(RunError, match=r"was started with env=None, not 'swarm/coverage-2'"):
        ours = {"env": ENV.spec.name, "spec": {"package": "jax 0.1"}}
        recording.check_recipe(tmp_path / "a.vlt", ours, partly)


@pytest.mark.slow
def test_once_ended_a_recording_changes_nothing(whole, fixed):
    path = whole.path
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*")}
    assert not record_policy(**fixed, path=path)
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*")} == before
    assert [entry.name for entry in path.parent.iterdir()] == ["expert"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"), [("seed", 4), ("num_envs", 5), ("steps", 4 * 300), ("params", None)]
)
def test_another_recording_at_the_same_place_is_refused(whole, fixed, name, value):
    if value is None:
        value = jax.tree.map(lambda leaf: leaf + 1, fixed["params"])
    with pytest.raises(RunError, match="was started with"):
        record_policy(**fixed | {"path": whole.path, name: value})


@pytest.mark.slow
def test_a_signal_saves_and_the_same_call_goes_on(whole, arguments, monkeypatch):
    collect = recording.collect

    def signalling(*args, **options):
        for index, step in enumerate(collect(*args, **options), start=1):
            if index == 2:
                signal.raise_signal(signal.SIGTERM)
            yield step

    # As of a process in the foreground, whatever started the tests.
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_DFL)
    with (
        monkeypatch.context() as patch,
        pytest.raises(Stopped, match="at step 352 of the recording expert: the same"),
    ):
        patch.setattr(recording, "collect", signalling)
        record_policy(**arguments)
    assert vault.open_vault(arguments["path"]).num_steps == 352  # two chunks of 44 by 4
    assert record_policy(**arguments)
    assert vault.open_vault(arguments["path"]).digest() == whole.digest()


@pytest.mark.slow
def test_a_signal_at_the_end_leaves_a_complete_recording(arguments, monkeypatch):
    complete = recording.ChunkWriter.complete

    def signalling(self, *args, **kwargs):
        signal.raise_signal(signal.SIGINT)
        complete(self, *args, **kwargs)

    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_DFL)
    monkeypatch.setattr(recording.ChunkWriter, "complete", signalling)
    assert record_policy(**arguments)
    assert not record_policy(**arguments), "it is complete"
    arguments["path"] = arguments["path"].with_name("another")
    with pytest.raises(Stopped), more_to_come():
        record_policy(**arguments)
    assert not record_policy(**arguments)


class Killed(BaseException):
    pass


def killed_after(when, module=recording):
    """Return a `collect` of a module that raises after this many calls of compiled updates."""
    collect = module.collect

    def stopping(*args, **options):
        for index, step in enumerate(collect(*args, **options), start=1):
            yield step
            if index == when:
                raise Killed

    return stopping


@pytest.mark.parametrize(("when", "checkpoint_seconds"), [(1, 1e9), (2, 0.0), (3, 1e9)])
@pytest.mark.slow
def test_stopped_and_called_again_it_is_the_recording_that_never_stopped(
    whole, arguments, monkeypatch, when, checkpoint_seconds
):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(recording, "collect", killed_after(when))
        record_policy(**arguments, checkpoint_seconds=checkpoint_seconds)
    assert record_policy(**arguments)
    assert vault.open_vault(arguments["path"]).digest() == whole.digest()


@pytest.mark.slow
def test_a_full_disk_is_an_error_and_what_was_committed_stays(arguments, monkeypatch):
    arguments |= {"steps": 4 * 4000}
    with small_files(400_000), pytest.raises(OffmarlError, match="no space left"):
        record_policy(**arguments)
    committed = vault.open_vault(arguments["path"]).length
    assert committed < 4000
    record_policy(**arguments)
    assert vault.open_vault(arguments["path"]).length >= 4000
