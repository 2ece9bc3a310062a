"""Importing columns of a single agent, in D4RL's layout."""

import io
import tempfile
from zipfile import ZIP_BZIP2, ZIP_LZMA, ZipFile

import numpy as np
import pytest

from offmarl import vault
from offmarl.errors import InvalidValueError, VaultError, VaultFullError
from offmarl.types import Continuous, EnvSpec
from offmarl.vault.convert import common

from .experience import save_hdf5

STEPS = 30


def columns(**changes):
    """Thirty steps: one episode terminates, one times out, and the last is open."""
    rng, ends = np.random.default_rng(0), np.zeros((2, STEPS), bool)
    ends[0, 9] = ends[1, 19] = True
    observations = rng.normal(size=(STEPS, 3)).astype(np.float32)
    following = np.roll(observations, -1, axis=0)
    following[[9, 19, 29]] = rng.normal(size=(3, 3))
    arrays = {
        "observations": observations,
        "actions": rng.uniform(-1, 1, (STEPS, 2)).astype(np.float32),
        "rewards": rng.normal(size=STEPS).astype(np.float32),
        "terminals": ends[0],
        "timeouts": ends[1],
        "next_observations": following,
    }
    return {name: x for name, x in (arrays | changes).items() if x is not None}


def save(path, arrays):
    arrays = arrays | {"infos/qpos": np.ones((STEPS, 9))}
    if path.suffix != ".npz":
        return save_hdf5(path, arrays | {"metadata/algorithm": "SAC"})
    np.savez(path, **arrays)
    return path


def read(path, arrays, **options):
    return vault.import_dataset(save(path, arrays), path.with_suffix(".vlt"), "d4rl", **options)


@pytest.mark.parametrize("block", [1, 10**6])
@pytest.mark.parametrize("suffix", [".npz", ".hdf5"])
def test_every_step_is_the_one_in_the_columns(tmp_path, monkeypatch, suffix, block):
    monkeypatch.setattr(common, "BLOCK_BYTES", block)
    arrays = columns()
    dataset = read(tmp_path / f"a{suffix}", arrays)
    spec = EnvSpec("", 1, 3, 3, Continuous(2), reward="individual", state="concatenated")
    assert dataset.spec == spec
    assert dataset.episodes.length.tolist() == [10, 10, 10]
    assert dataset.episodes.cause[:2].tolist() == ["terminated", "truncated"]
    assert dataset.episodes.complete.tolist() == [True, True, False]
    steps = dataset.transitions()
    for name, leaf in (
        ("observations", steps.view.observation),
        ("actions", steps.action),
        ("rewards", steps.reward),
        ("terminals", steps.terminated),
    ):
        np.testing.assert_array_equal(leaf[0, :, 0], arrays[name])
    finals = dataset.final_views(dataset.episodes.final[:2])
    np.testing.assert_array_equal(finals.observation[:, 0], arrays["next_observations"][[9, 19]])


@pytest.mark.parametrize(
    "changes",
    [
        {"timeouts": None, "next_observations": None},
        {
            "rewards": np.ones((STEPS, 1)),
            "terminals": (np.arange(STEPS) == 9)[:, None],
            "timeouts": None,
            "next_observations": None,
        },
        {"next_observations": None, "actions": np.linspace(-1, 1, STEPS)},
    ],
)
def test_what_may_be_absent_or_have_an_axis_more(tmp_path, changes):
    dataset = read(tmp_path / "a.npz", columns(**changes))
    assert (dataset.num_steps, dataset.spec.num_agents) == (STEPS, 1)


def test_a_known_time_limit_is_no_termination(tmp_path):
    dataset = read(tmp_path / "a.npz", columns(), time_limit=10)
    assert dataset.episodes.cause.tolist() == ["truncated"] * 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rewards": None}, "it has no rewards, only"),
        ({"rewards": np.float32(1)}, r"rewards has shape \(\), and must have an entry"),
        ({"terminals": np.zeros((STEPS, 2))}, r"terminals has shape \(30, 2\)"),
        ({"timeouts": np.zeros((STEPS, 2))}, r"timeouts has shape \(30, 2\)"),
        ({"actions": np.zeros((STEPS - 1, 2))}, "arrays have different lengths"),
        ({"observations": np.array(["x"] * STEPS)}, "observations' holds <U1, not numbers"),
        ({"actions": np.zeros(STEPS, int)}, "discrete actions of an unknown number"),
    ],
)
def test_other_columns_are_refused(tmp_path, changes, message, refused):
    refused(message, save(tmp_path / "a.npz", columns(**changes)), "d4rl")


@pytest.mark.parametrize("block", [1, 10**6])
@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
def test_flipped_bits_are_found(tmp_path, monkeypatch, write, block):
    monkeypatch.setattr(common, "BLOCK_BYTES", block)
    write(tmp_path / "a.npz", **columns())
    original = (tmp_path / "a.npz").read_bytes()
    with ZipFile(tmp_path / "a.npz") as archive:
        members = archive.infolist()
    for member in members:
        begin = member.header_offset + 30 + len(member.filename) + 20
        for at in (begin + member.compress_size // 2, begin + member.compress_size - 21):
            flipped = bytearray(original)
            flipped[at] ^= 1
            (tmp_path / "a.npz").write_bytes(flipped)
            with pytest.raises((VaultError, InvalidValueError)):
                vault.import_dataset(tmp_path / "a.npz", tmp_path / "a.vlt", "d4rl")


@pytest.mark.parametrize("shape", [(10**15,), (STEPS + 1,), (STEPS - 1,)])
def test_a_forged_shape_is_refused(tmp_path, shape, refused):
    arrays = columns()
    header = io.BytesIO()
    form = {"descr": "<f4", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, form)
    forged = header.getvalue() + arrays.pop("rewards").tobytes()
    np.savez(tmp_path / "a.npz", **arrays)
    with ZipFile(tmp_path / "a.npz", "a") as archive:
        archive.writestr("rewards.npy", forged)
    refused("is damaged", tmp_path / "a.npz", "d4rl")


@pytest.mark.parametrize("compression", [ZIP_BZIP2, ZIP_LZMA])
def test_a_file_that_unpacks_to_much_more_is_refused(tmp_path, compression, refused):
    arrays = columns()
    content = io.BytesIO()
    np.save(content, np.zeros(2**23))
    del arrays["rewards"]
    np.savez(tmp_path / "a.npz", **arrays)
    with ZipFile(tmp_path / "a.npz", "a", compression) as archive:
        archive.writestr("rewards.npy", content.getvalue())
    refused(r"rewards\.npy has not the size", tmp_path / "a.npz", "d4rl")


def test_a_disk_without_room_to_unpack_is_named(tmp_path, small_disk, monkeypatch, refused):
    np.savez_compressed(tmp_path / "a.npz", **columns(rewards=np.zeros(2**18)))
    monkeypatch.setattr(tempfile, "tempdir", str(small_disk))
    refused(str(small_disk), tmp_path / "a.npz", "d4rl", error=VaultFullError)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    refused("the temporary directory cannot be", tmp_path / "a.npz", "d4rl")
