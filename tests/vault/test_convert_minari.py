"""Minari datasets: of several agents in both directions, of a single agent as published."""

import numpy as np
import pytest

from offmarl import vault
from offmarl.errors import OptionError, ShapeError, VaultError, VaultExistsError
from offmarl.types import ArraySpec, Continuous, Discrete, EnvSpec

from .experience import CONTINUOUS, SPEC, make, written

minari = pytest.importorskip("minari")
spaces = pytest.importorskip("gymnasium").spaces

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return tmp_path / "minari"


@pytest.mark.parametrize("spec", [SPEC, CONTINUOUS])
def test_there_and_back(tmp_path, home, spec, refused):
    steps, finals = make(spec, steps=30)
    truncated = steps.truncated.copy()
    truncated[:, -1] |= ~steps.terminated[:, -1]  # Minari's episodes all end
    steps = steps._replace(truncated=truncated, last=(steps.terminated | truncated).all(-1))
    source = written(tmp_path / "a.vlt", (steps, finals), spec=spec)
    assert (
        vault.export_dataset(source, "swarm/test/expert-v0", "minari")
        == home / "swarm/test/expert-v0"
    )
    dataset = minari.load_dataset("swarm/test/expert-v0")
    assert dataset.total_episodes == len(source.episodes.row)
    assert next(dataset.iterate_episodes()).observations.shape[1:] == (
        spec.num_agents,
        spec.observation_size,
    )
    again = vault.import_dataset(
        "swarm/test/expert-v0", tmp_path / "b.vlt", "minari", terms={"licence": "MIT"}
    )
    about = {"format": "minari", "dataset": "swarm/test/expert-v0", "licence": "MIT"}
    assert again.provenance["source"] == about
    assert again.spec == source.spec
    assert again.digest() == source.digest()
    with pytest.raises(VaultExistsError):
        vault.export_dataset(source, "swarm/test/expert-v0", "minari")
    other = EnvSpec("", 9, 3, 5, Discrete(4))
    refused("num_agents", "swarm/test/expert-v0", "minari", error=ShapeError, env_spec=other)
    with pytest.raises(OptionError, match="does not take"):
        vault.export_dataset(source, "no version!", "minari")
    with pytest.raises(OptionError, match="namespace"):
        vault.export_dataset(source, "x/test-v0", "minari")


@pytest.mark.parametrize("place", ["", "/dev/null/minari"])
def test_without_a_place_for_minari_datasets(tmp_path, monkeypatch, place, refused):
    monkeypatch.setenv("MINARI_DATASETS_PATH", place)
    if not place:  # a user of a container, who has no entry in /etc/passwd
        monkeypatch.delenv("HOME")
        monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    written(tmp_path / "a.vlt", make(SPEC, steps=30))
    with pytest.raises(VaultError, match="set MINARI_DATASETS_PATH"):
        vault.export_dataset(vault.open_vault(tmp_path / "a.vlt"), "a/test-v0", "minari")
    refused("set MINARI_DATASETS_PATH", "a/test-v0", "minari")


def save(name, space, action_space, *episodes):
    """Write a dataset of one agent; an episode is its observations, its actions, and changes."""
    buffers = []
    for number, (observations, actions, changed) in enumerate(episodes):
        length = len(actions)
        columns = {
            "rewards": [1.0] * length,
            "terminations": [False] * (length - 1) + [True],
            "truncations": [False] * length,
        } | changed
        buffers.append(
            minari.data_collector.EpisodeBuffer(
                id=number, observations=observations, actions=actions, **columns
            )
        )
    minari.create_dataset_from_buffers(
        name, buffers, observation_space=space, action_space=action_space
    )


LINE = spaces.Box(-np.inf, np.inf, (3,), np.float64)
SEEN = np.random.default_rng(0).normal(size=(5, 3))
TAKEN = np.array([0, 1, 1, 0])


@pytest.mark.parametrize(
    ("space", "action"),
    [(spaces.Discrete(2), Discrete(2)), (spaces.Box(-1, 1, (2,), np.float32), Continuous(2))],
)
def test_one_agent(tmp_path, space, action):
    rng, episodes = np.random.default_rng(0), []
    for length, ends in ((4, "terminations"), (6, "truncations")):
        flags = {"terminations": [False] * length} | {ends: [False] * (length - 1) + [True]}
        actions = rng.integers(0, 2, (length, *space.shape)).astype(space.dtype)
        episodes.append((rng.uniform(-1, 1, (length + 1, 3)), actions, flags))
    save("cart/expert-v0", LINE, space, *episodes)
    dataset = vault.import_dataset("cart/expert-v0", tmp_path / "a.vlt", "minari")
    assert dataset.spec == EnvSpec("", 1, 3, 3, action, state="concatenated")
    assert dataset.episodes.length.tolist() == [4, 6]
    assert dataset.episodes.cause.tolist() == ["terminated", "truncated"]
    assert dataset.episodes.returns.tolist() == [[4.0], [6.0]]
    for number, (observations, actions, _) in enumerate(episodes):
        steps, final = dataset.episode(number)
        np.testing.assert_array_equal(steps.view.observation[:, 0], observations[:-1].astype("f4"))
        np.testing.assert_array_equal(final.observation[0], observations[-1].astype("f4"))
        np.testing.assert_array_equal(steps.action[:, 0], actions)


def test_an_unfinished_episode_does_not_become_complete(tmp_path):
    steps, _ = make(SPEC, steps=30)
    last = np.zeros_like(steps.last)
    last[:, 14] = True
    ended = steps._replace(
        last=last,
        terminated=np.broadcast_to(last[..., None], steps.terminated.shape),
        truncated=np.zeros_like(steps.truncated),
    )
    source = written(tmp_path / "a.vlt", (ended, None))
    assert source.episodes.cause.tolist() == ["terminated", "open"] * source.rows
    vault.export_dataset(source, "unended-v0", "minari")
    again = vault.import_dataset("unended-v0", tmp_path / "b.vlt", "minari")
    assert again.episodes.cause.tolist() == ["terminated", "cut"] * source.rows


def test_what_is_not_taken(tmp_path, refused):
    refused("nope-v0 to convert", "nope-v0", "minari")
    save("cart/start-v0", LINE, spaces.Discrete(2, start=1), (SEEN, TAKEN + 1, {}))
    refused("counts its actions from 1", "cart/start-v0", "minari")
    tree = {"a": SEEN}
    save("cart/tree-v0", spaces.Dict({"a": LINE}), spaces.Discrete(2), (tree, TAKEN, {}))
    refused(r"tree-v0 has observations .* only boxes", "cart/tree-v0", "minari")
    save("cart/many-v0", LINE, spaces.Discrete(10**9), (SEEN, TAKEN, {}))
    refused("Expected int <= 1048576", "cart/many-v0", "minari", error=ShapeError)
    written(tmp_path / "b.vlt", make())
    with pytest.raises(OptionError, match="as in a-v0"):
        vault.export_dataset(vault.open_vault(tmp_path / "b.vlt"), "expert", "minari")


@pytest.mark.parametrize(
    ("low", "high", "scaled"),
    [
        (-2.0, 2.0, lambda x: x / 2),
        (0.0, 10.0, lambda x: x / 5 - 1),
        (-1.0, 1.0, lambda x: x),
        (-np.inf, np.inf, lambda x: x),
    ],
)
def test_actions_are_scaled_from_their_bounds(tmp_path, low, high, scaled):
    space = spaces.Box(low, high, (2,), np.float64)
    actions = np.random.default_rng(0).uniform(
        *((low, high) if np.isfinite(low) else (-1, 1)), (4, 2)
    )
    save("odd/some-v0", LINE, space, (SEEN, actions, {}))
    dataset = vault.import_dataset("odd/some-v0", tmp_path / "a.vlt", "minari")
    np.testing.assert_allclose(dataset.transitions().action[0, :, 0], scaled(actions), atol=1e-6)
    bounds = dataset.provenance["source"].get("action_bounds")
    assert bounds == (None if abs(low) in (1, np.inf) else [[low, low], [high, high]])


@pytest.mark.parametrize(
    ("space", "dtype"),
    [
        (spaces.Box(0, 255, (8, 8, 3), np.uint8), "uint8"),
        (spaces.Box(-9, 9, (4, 5), np.int16), "int16"),
        (spaces.Box(-9, 9, (2, 2), np.float64), "float32"),
        (spaces.Box(0, 1, (6,), np.float16), "float16"),
    ],
)
def test_observations_keep_their_shape_and_type(tmp_path, space, dtype):
    observations = np.stack([space.sample() for _ in range(5)])
    save("odd/some-v0", space, spaces.Discrete(2), (observations, TAKEN, {}))
    dataset = vault.import_dataset("odd/some-v0", tmp_path / "a.vlt", "minari")
    assert dataset.spec.observation_leaves[""] == ArraySpec(space.shape, dtype)
    observation = dataset.transitions().view.observation
    np.testing.assert_array_equal(observation[0, :, 0], observations[:4].astype(dtype))
    np.testing.assert_array_equal(dataset.finals.observation[0, 0], observations[4].astype(dtype))
