"""Importing datasets with steps end to end, in the layouts of OMAR and OMIGA."""

import numpy as np
import pytest

from offmarl import vault
from offmarl.errors import ShapeError
from offmarl.types import Continuous, EnvSpec
from offmarl.vault.convert import common
from offmarl.vault.convert.end_to_end import find_limits

from .experience import save_hdf5

LENGTHS = [6, 3, 6, 4]
STEPS = sum(LENGTHS)
DONE = np.isin(np.arange(STEPS), np.cumsum(LENGTHS) - 1)


def following(array):
    """Return the view after each step: the next entry, or an additional one after an end."""
    return np.where(DONE.reshape(-1, *(1,) * (array.ndim - 1)), array + 1, np.roll(array, -1, 0))


def omiga():
    rng = np.random.default_rng(0)
    return {
        "s": rng.normal(size=(STEPS, 2, 5)),
        "o": rng.normal(size=(STEPS, 2, 3)),
        "a": rng.uniform(-1, 1, (STEPS, 2, 2)),
        "r": rng.normal(size=(STEPS, 1)),
        "d": DONE[:, None].astype(float),
    }


@pytest.fixture(scope="module")
def arrays():
    return omiga()


def check_episodes(dataset):
    assert dataset.spec == EnvSpec("", 2, 3, 10, Continuous(2), 6, "individual")
    assert dataset.episodes.length.tolist() == LENGTHS
    assert dataset.episodes.cause.tolist() == ["truncated", "terminated"] * 2


@pytest.mark.parametrize("block", [1, 10**6])
def test_omiga(tmp_path, arrays, monkeypatch, block):
    monkeypatch.setattr(common, "BLOCK_BYTES", block)
    source = save_hdf5(tmp_path / "ant.hdf5", arrays)
    dataset = vault.import_dataset(
        source, tmp_path / "a.vlt", "omiga", time_limit=6, terms={"licence": "MIT"}
    )
    check_episodes(dataset)
    assert (dataset.episodes.final == -1).all()
    steps = dataset.transitions()
    np.testing.assert_array_equal(steps.view.observation[0], arrays["o"].astype("f4"))
    np.testing.assert_array_equal(steps.view.state[0], arrays["s"].reshape(-1, 10).astype("f4"))
    np.testing.assert_array_equal(steps.action[0], arrays["a"].astype("f4"))
    np.testing.assert_array_equal(steps.reward[0], arrays["r"].repeat(2, 1).astype("f4"))
    about = dataset.provenance["source"]
    assert (about["format"], about["file"], about["licence"]) == ("omiga", "ant.hdf5", "MIT")


@pytest.fixture
def folder(tmp_path, arrays):
    """Two agents, the second of which sees less; only early ends are flagged."""
    directory = tmp_path / "seed_0_data"
    directory.mkdir()
    early = DONE & ~np.isin(np.arange(STEPS), [5, 14])
    for agent in range(2):
        observation = arrays["o"][:, agent, : 3 - agent]
        files = {
            "obs": observation,
            "next_obs": following(observation),
            "acs": arrays["a"][:, agent],
            "rews": arrays["r"][:, 0] * agent,
            "dones": early.astype(float),
            "states": arrays["s"][:, agent],
            "next_states": following(arrays["s"][:, agent]),
        }
        for name, array in files.items():
            np.save(directory / f"{name}_{agent}.npy", array)
    return directory


@pytest.mark.parametrize("block", [1, 10**6])
def test_omar(tmp_path, folder, arrays, monkeypatch, block):
    monkeypatch.setattr(common, "BLOCK_BYTES", block)
    dataset = vault.import_dataset(
        folder, tmp_path / "a.vlt", "omar", time_limit=6, terms={"licence": "MIT"}
    )
    assert dataset.provenance["source"]["licence"] == "MIT"
    check_episodes(dataset)
    observation = arrays["o"].astype("f4")
    observation[:, 1, 2] = 0
    np.testing.assert_array_equal(dataset.transitions().view.observation[0], observation)
    np.testing.assert_array_equal(dataset.transitions().reward[0, :, 0], 0)
    finals = dataset.final_views(dataset.episodes.final)
    led_to = (arrays["o"] + 1)[DONE].astype("f4")
    led_to[:, 1, 2] = 0
    np.testing.assert_array_equal(finals.observation, led_to)
    states = (arrays["s"] + 1)[DONE].reshape(-1, 10).astype("f4")
    np.testing.assert_array_equal(finals.state, states)


@pytest.mark.parametrize(
    ("done", "since", "limit", "limits", "left"),
    [
        ([0, 0, 0, 0, 0], 0, 2, [1, 3], 1),
        ([0, 1, 0, 0, 0], 0, 2, [1, 3], 1),
        ([1, 0, 0, 0, 0], 0, 3, [3], 1),
        ([0, 0, 0], 2, 3, [0], 2),
        ([0, 0, 1], 5, None, [], 0),
        ([0, 0, 0], 5, None, [], 8),
        ([1], 1, 2, [0], 0),
    ],
)
def test_where_a_time_limit_ends_episodes(done, since, limit, limits, left):
    mask, after = find_limits(np.array(done, bool), since, limit)
    assert np.flatnonzero(mask).tolist() == limits
    assert after == left


def test_other_layouts(tmp_path, arrays, folder, refused):
    less = {name: array for name, array in arrays.items() if name != "d"}
    for number, (wrong, message) in enumerate(
        (
            (less, r"not of OMIGA's layout: it has no d, only a, o, r, s"),
            (arrays | {"r": arrays["r"][:-1]}, "different lengths"),
            (arrays | {"o": arrays["o"][:, 0]}, r"OMIGA's layout: o has shape \(19, 3\)"),
            ({name: array[:0] for name, array in arrays.items()}, "has no steps"),
        )
    ):
        refused(message, save_hdf5(tmp_path / f"{number}.h5", wrong), "omiga")
    whole, spec = save_hdf5(tmp_path / "all.h5", arrays), EnvSpec("", 3, 3, 10, Continuous(2))
    refused(r"num_agents \(2, not 3\)", whole, "omiga", error=ShapeError, env_spec=spec)
    (tmp_path / "no.h5").write_bytes(b"no HDF5")
    refused("of another format", tmp_path / "no.h5", "omiga")
    refused("to convert", tmp_path / "missing.h5", "omiga")
    refused("is not a folder", tmp_path / "nowhere", "omar")
    # Of two columns only the first would count, and zeros would take the place of none.
    for name, columns in {"rews_1": 2, "dones_0": 2, "acs_0": 0}.items():
        array = np.load(folder / f"{name}.npy")
        np.save(folder / f"{name}.npy", np.zeros((19, columns)))
        refused(rf"OMAR's layout: {name} has shape \(19, {columns}\)", folder, "omar")
        np.save(folder / f"{name}.npy", array)
    (folder / "acs_1.npy").unlink()
    refused(r"it has no acs_1", folder, "omar")
