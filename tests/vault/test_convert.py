"""Importing PyMARL's episode batches: generated ones, and published ones if present."""

import hashlib
import pickle

import chex
import numpy as np
import pytest

from offmarl import vault
from offmarl.errors import (
    InvalidValueError,
    ShapeError,
    VaultError,
    VaultExistsError,
    VaultNotFoundError,
)
from offmarl.types import Discrete, EnvSpec, View
from offmarl.vault.convert import common

from .experience import save_hdf5

LENGTHS = [3, 5, 1, 4, 5]
TERMINATED = [True, True, True, False, False]
SIZES = {"num_agents": 2, "observation_size": 3, "state_size": 4}


def batch(rng=None, slots=6):
    """Five episodes of up to five steps, with noise in the unused slots."""
    rng = rng or np.random.default_rng(0)
    episodes, agents, actions = len(LENGTHS), 2, 3
    legal = rng.integers(0, 2, (episodes, slots, agents, actions)).astype(np.int32)
    indices = rng.integers(0, actions, (episodes, slots, agents, 1))
    np.put_along_axis(legal, indices, 1, -1)
    filled, terminated = np.zeros((2, episodes, slots, 1), np.uint8)
    for episode, (length, ends) in enumerate(zip(LENGTHS, TERMINATED, strict=True)):
        filled[episode, : length + 1] = 1
        terminated[episode, length - 1] = ends
    return {
        "obs": rng.normal(size=(episodes, slots, agents, 3)).astype(np.float32),
        "state": rng.normal(size=(episodes, slots, 4)).astype(np.float32),
        "actions": indices,
        "avail_actions": legal,
        "reward": rng.normal(size=(episodes, slots, 1)).astype(np.float32),
        "terminated": terminated,
        "filled": filled.astype(np.int64),
    }


@pytest.fixture(params=["savez", "savez_compressed", "hdf5"])
def source(tmp_path, request):
    """A file as PyMARL's descendants write it; CFCQL's are HDF5."""
    path = tmp_path / ("data.h5" if request.param == "hdf5" else "data.npz")
    if request.param == "hdf5":
        return save_hdf5(path, batch())
    getattr(np, request.param)(path, **batch())
    return path


def save(path, arrays):
    np.savez(path, **arrays)
    return path


def check_against(dataset, arrays, lengths):
    """Check that every step and every final view is the one in the batch, in order."""
    transition, episodes = dataset.transitions(), dataset.episodes
    assert episodes.length.tolist() == list(lengths)
    assert transition.policy_id.shape == transition.reward.shape
    assert (transition.policy_id == -1).all()
    assert np.isnan(transition.behaviour_log_prob).all()
    for number, count in enumerate(lengths):
        steps, final = dataset.episode(number)
        current = {name: array[number, :count] for name, array in arrays.items()}
        after = {name: array[number, count] for name, array in arrays.items()}
        view = steps.view._replace(alive=None), final._replace(alive=None, legal_actions=None)
        before = View(current["obs"], current["state"], current["avail_actions"] != 0, None)
        chex.assert_trees_all_equal(view, (before, View(after["obs"], after["state"], None, None)))
        expected = current["actions"][..., 0], current["reward"].repeat(2, -1)
        chex.assert_trees_all_equal((steps.action, steps.reward), expected)


@pytest.mark.parametrize("block", [1, 10**6])
def test_every_step_arrives(tmp_path, source, monkeypatch, block):
    monkeypatch.setattr(common, "BLOCK_BYTES", block)
    dataset = vault.import_dataset(source, tmp_path / "out.vlt", time_limit=5)
    assert dataset.path == tmp_path / "out.vlt" / "main"
    check_against(dataset, batch(), LENGTHS)
    assert dataset.spec == EnvSpec("", **SIZES, action=Discrete(3), time_limit=5)
    cause = ["terminated", "truncated", "terminated", "truncated", "truncated"]
    assert dataset.episodes.cause.tolist() == cause
    assert dataset.provenance == {
        "source": {
            "format": "pymarl",
            "file": source.name,
            "sha256": hashlib.sha256(source.read_bytes()).hexdigest(),
        }
    }


def test_the_time_limit_tells_truncation_from_termination(tmp_path):
    source = save(tmp_path / "data.npz", batch())

    def causes(name, **limit):
        dataset = vault.import_dataset(source, tmp_path / name, **limit)
        return dataset.episodes.cause.tolist()

    without_limit = ["terminated", "terminated", "terminated", "truncated", "truncated"]
    with_limit = ["terminated", "truncated", "terminated", "truncated", "truncated"]
    spec = EnvSpec("here", **SIZES, action=Discrete(3), time_limit=5)
    assert causes("a.vlt") == without_limit
    assert causes("b.vlt", time_limit=5) == with_limit
    assert causes("c.vlt", env_spec=spec) == with_limit
    assert causes("d.vlt", env_spec=spec, time_limit=100) == without_limit
    assert vault.open_vault(tmp_path / "d.vlt").spec.time_limit == 100
    assert vault.open_vault(tmp_path / "c.vlt").spec == spec


def test_what_is_optional(tmp_path, refused):
    arrays = batch()
    del arrays["state"], arrays["avail_actions"]
    arrays["reward"] = arrays["reward"].repeat(2, -1) * [1, 2]
    source = save(tmp_path / "data.npz", arrays)
    refused("name its environment", source)
    spec = EnvSpec("", 2, 3, 6, Discrete(3), state="concatenated", reward="individual")
    dataset = vault.import_dataset(source, tmp_path / "a.vlt", env_spec=spec)
    transition = dataset.transitions()
    assert transition.view.legal_actions.all()
    np.testing.assert_array_equal(
        transition.view.state, transition.view.observation.reshape(1, -1, 6)
    )
    np.testing.assert_array_equal(transition.reward[0, :3], arrays["reward"][0, :3].astype("f4"))


def test_arrays_in_fortran_order(tmp_path):
    arrays = batch()
    expected = vault.import_dataset(save(tmp_path / "a.npz", arrays), tmp_path / "a.vlt")
    arrays["obs"] = np.asfortranarray(arrays["obs"])
    dataset = vault.import_dataset(save(tmp_path / "b.npz", arrays), tmp_path / "b.vlt")
    assert dataset.digest() == expected.digest()


def test_damaged_files(tmp_path, source, refused):
    refused(r"there is no .*nothing\.npz", tmp_path / "nothing.npz", error=VaultNotFoundError)
    data = bytearray(source.read_bytes())
    data[len(data) // 2] ^= 1
    flipped = [] if source.suffix == ".h5" else [bytes(data)]  # HDF5 has no checksums
    for wrong in (*flipped, bytes(data[:-200]), b"no zip"):
        source.write_bytes(wrong)
        with pytest.raises(VaultError):
            vault.import_dataset(source, tmp_path / "a.vlt")
    assert list(vault.list_vaults(tmp_path)) == []


def test_another_environment(tmp_path, refused):
    source, spec = save(tmp_path / "a.npz", batch()), EnvSpec("other", 3, 3, 4, Discrete(3))
    refused(r"num_agents \(2, not 3\)", source, error=ShapeError, env_spec=spec)


@pytest.mark.parametrize(
    ("name", "episodes", "steps", "mean", "cause"),
    [
        ("bridge_optimal", 500, 8, -1.2620, "terminated"),
        ("xor_02", 100, 50, 50.00, "truncated"),
        ("xor_00_02_20", 100, 50, 33.29, "truncated"),
        ("xor_random", 100, 50, 0.15, "truncated"),
    ],
)
def test_published_data(tmp_path, shared_data, name, episodes, steps, mean, cause):
    source = shared_data / "alberdice" / f"{name}.npz"
    dataset = vault.import_dataset(source, tmp_path / f"{name}.vlt", time_limit=50)
    assert dataset.episodes.length.tolist() == [steps] * episodes
    assert dataset.episodes.cause.tolist() == [cause] * episodes
    assert dataset.episodes.returns.mean() == pytest.approx(mean, abs=5e-5)
    with np.load(source) as arrays:
        check_against(dataset, dict(arrays), [steps] * episodes)


def test_a_folder_of_npy_files_is_the_same_as_they_are_zipped(tmp_path, refused):
    folder, arrays = tmp_path / "buffer", batch()
    folder.mkdir()
    for name, array in arrays.items():
        np.save(folder / f"{name}.npy", array)
    np.save(folder / "actions_onehot.npy", np.ones(3))
    zipped = vault.import_dataset(save(tmp_path / "a.npz", arrays), tmp_path / "a.vlt")
    for layout in ("alberdice", "pymarl"):
        dataset = vault.import_dataset(folder, tmp_path / f"{layout}.vlt", layout)
        assert dataset.digest() == zipped.digest()
    sums = [(x.name, hashlib.sha256(x.read_bytes()).hexdigest()) for x in sorted(folder.iterdir())]
    total = "".join(f"{name}:{checksum}\n" for name, checksum in sums)
    sha256 = hashlib.sha256(total.encode()).hexdigest()
    assert dataset.provenance["source"]["sha256"] == sha256
    (folder / "reward.npy").rename(tmp_path / "reward.npy")
    refused("it has no reward, only", folder, "alberdice")
    (folder / "reward.npy").write_bytes(pickle.dumps([1]))
    refused(r"reward\.npy .* it is a pickle of Python objects", folder, "alberdice")
    shape = "-" * 9000 + "1"  # deeper than Python parses
    header = f"{{'descr': '<f4', 'fortran_order': False, 'shape': ({shape},)}}\n".encode()
    start = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little")
    (folder / "reward.npy").write_bytes(start + header)
    refused(r"reward\.npy is damaged.*Header info length", folder, "alberdice")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "it is empty"),
        (b"hello\nworld", "it is text that begins with 'hello'"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS"),
        (pickle.dumps({}), "a pickle of Python objects, which is never read"),
        (b"\xff\x00\x01", "not a zip file"),
    ],
)
def test_a_file_that_is_no_npz_file_is_described(tmp_path, content, words):
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(VaultError) as error:
        vault.import_dataset(tmp_path / "a.npz", tmp_path / "a.vlt", "numpy")
    assert words in str(error.value) and "allow_pickle" not in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("suffix", [".npz", ".h5"])
def test_back_to_where_it_came_from(tmp_path, source, suffix):
    dataset = vault.import_dataset(source, tmp_path / "a.vlt")
    out = vault.export_dataset(dataset, tmp_path / f"out{suffix}", "pymarl")
    again = vault.import_dataset(out, tmp_path / "b.vlt")
    assert again.digest() == dataset.digest()
    assert {path.name for path in tmp_path.iterdir()} == {source.name, out.name, "a.vlt", "b.vlt"}
    with pytest.raises(VaultExistsError):
        vault.export_dataset(dataset, out, "pymarl")


def test_files_that_fill_as_many_slots_as_steps(tmp_path):
    """The flag in the last filled slot betrays them: no step and no reward is lost."""
    arrays = batch()
    arrays["filled"] = np.arange(6)[None, :, None] < np.array(LENGTHS)[:, None, None]
    data = vault.import_dataset(save(tmp_path / "a.npz", arrays), tmp_path / "a.vlt", time_limit=9)
    assert data.episodes.length.tolist() == LENGTHS
    causes = ["terminated" if ends else "truncated" for ends in TERMINATED]
    assert data.episodes.cause.tolist() == causes
    assert (data.episodes.final == -1).all()
    rewards = np.concatenate([r[:n, 0] for r, n in zip(arrays["reward"], LENGTHS, strict=True)])
    np.testing.assert_array_equal(data.transitions().reward[0, :, 0], rewards)


def test_a_file_of_both_kinds_is_refused(tmp_path, refused):
    arrays = batch()
    arrays["filled"][0, LENGTHS[0]] = 0
    refused("fill L\\+1 slots of each", save(tmp_path / "a.npz", arrays))


def test_flags_of_agents_are_those_of_the_team(tmp_path, refused):
    arrays = batch()
    arrays["terminated"] = arrays["terminated"].repeat(2, -1)
    arrays["reward"] = arrays["reward"].repeat(2, -1) * [1, 2]
    dataset = vault.import_dataset(save(tmp_path / "a.npz", arrays), tmp_path / "a.vlt")
    causes = ["terminated" if ends else "truncated" for ends in TERMINATED]
    assert (dataset.episodes.cause.tolist(), dataset.spec.reward) == (causes, "individual")
    arrays["terminated"][0, LENGTHS[0] - 1, 0] = 0
    refused("for each agent, and they differ", save(tmp_path / "b.npz", arrays))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("actions", lambda x: x[..., [0, 0, 0]], "'actions' has shape .*the last axis of actions"),
        ("actions", lambda x: np.eye(3)[x[..., 0]], "'actions' has shape"),
        ("actions", lambda x: x + 0.1, "actions has the value .*does not fit"),
        ("actions", lambda x: -x - 1, "must be from 0 to 2"),
        ("terminated", lambda x: x[..., [0, 0, 0]], "'terminated' has shape"),
        ("terminated", lambda x: x * 2, None),
        ("filled", lambda x: x[..., [0, 0]], "'filled' has shape"),
        ("reward", lambda x: x[..., [0, 0, 0]], "'reward' has shape"),
        ("avail_actions", lambda x: x * 2, "infos.legals has the value 2"),
        ("avail_actions", lambda x: x * 0, "must be 1 for an action of an agent"),
        ("reward", lambda x: x * 1e300, "rewards has the value"),
        ("filled", lambda x: x * (np.arange(6) != 1)[:, None], "has gaps"),
        ("terminated", np.ones_like, "continues after its end"),
        ("state", lambda x: x[:, :-1], "'state' has shape"),
        ("state", lambda x: x.astype(object), "holds Python objects"),
    ],
)
def test_nothing_is_cast_that_does_not_fit(tmp_path, name, change, message, refused):
    arrays = batch()
    arrays[name] = change(arrays[name].astype(np.float64) if name == "reward" else arrays[name])
    source = save(tmp_path / "a.npz", arrays)
    if message is None:  # PyMARL's own flags are compared with 0
        assert vault.import_dataset(source, tmp_path / "a.vlt", time_limit=5).episodes.length.size
        return
    refused(message, source, error=(VaultError, InvalidValueError, ShapeError))


def test_blocks_of_empty_episodes_are_left_out(tmp_path, monkeypatch, refused):
    monkeypatch.setattr(common, "BLOCK_BYTES", 1)
    arrays = batch()
    arrays["filled"][[1, 4]] = arrays["terminated"][[1, 4]] = 0
    dataset = vault.import_dataset(save(tmp_path / "a.npz", arrays), tmp_path / "a.vlt")
    assert dataset.episodes.length.tolist() == [3, 1, 4]
    arrays["actions"][3, 2] = 7
    refused("row 0, step 6 ", save(tmp_path / "b.npz", arrays), error=InvalidValueError)
