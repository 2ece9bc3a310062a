"""Forged foreign datasets that refer to other files of the machine."""

import json
import os
import shutil
import zipfile

import numpy as np
import pytest

from offmarl import vault
from tests.test_records import HEADERS, npy

from .experience import SPEC, make, save_hdf5, written
from .test_convert import LENGTHS, batch
from .test_convert_flat import omiga

h5py = pytest.importorskip("h5py")

STEPS = 8


def external_storage(group, name, data, secret):
    del group[name]
    storage = [(str(secret), 0, data.nbytes)]
    group.create_dataset(name, data.shape, data.dtype, external=storage)


def external_link(group, name, data, secret):
    del group[name]
    group[name] = h5py.ExternalLink(str(secret.with_suffix(".h5")), "/data")


def virtual(group, name, data, secret):
    del group[name]
    layout = h5py.VirtualLayout(data.shape, data.dtype)
    layout[...] = h5py.VirtualSource(str(secret.with_suffix(".h5")), "data", data.shape)
    group.create_virtual_dataset(name, layout)


def soft_to_external(group, name, data, secret):
    external_link(group, name, data, secret)
    group.file.move(f"{group.name}/{name}", "/elsewhere")
    group[name] = h5py.SoftLink("/elsewhere")


FORGERIES = {
    external_storage: "has external storage",
    external_link: "is an external link",
    virtual: "is virtual",
    soft_to_external: "/elsewhere in .* is an external link",
}


@pytest.fixture
def secret(tmp_path):
    """A file that no conversion may read, as bytes and as HDF5."""
    path = tmp_path / "secret"
    path.write_bytes(b"PRIVATE " * 4096)
    with h5py.File(path.with_suffix(".h5"), "w") as file:
        file["data"] = np.full((5, 6, 2, 3), 7.0)
    return path


@pytest.fixture(scope="module")
def ours(tmp_path_factory):
    """A vault to export."""
    path = tmp_path_factory.mktemp("ours") / "a.vlt"
    return written(path, make(SPEC, rows=1, steps=STEPS))


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
@pytest.mark.parametrize(
    ("layout", "arrays", "name"),
    [("pymarl", batch, "obs"), ("omiga", omiga, "o"), ("pymarl", batch, "not/read/by/it")],
)
def test_hdf5_files_that_refer_to_others_are_refused(
    tmp_path, secret, layout, arrays, name, forge, refused
):
    source = tmp_path / "data.h5"
    group, _, leaf = name.rpartition("/")
    with h5py.File(source, "w") as file:
        for key, array in ({name: np.ones(9)} | arrays()).items():
            file[key] = array
        forge(file[group or "/"], leaf, file[name][:], secret)
    refused(FORGERIES[forge], source, layout)


def test_links_inside_the_file_are_followed_and_cycles_end(tmp_path, refused):
    source = tmp_path / "data.h5"
    with h5py.File(source, "w") as file:
        for key, array in batch().items():
            file[f"kept/{key}"] = array
            file[key] = h5py.SoftLink(f"/kept/{key}")
        file["kept/around"] = file["/"]
        file["nothing"] = h5py.SoftLink("/nowhere")
        file["type"] = np.dtype(np.float32)
    data = vault.import_dataset(source, tmp_path / "out.vlt")
    assert data.num_steps == sum(LENGTHS)
    with h5py.File(source, "a") as file:
        file["loop"] = h5py.SoftLink("/loop")
    refused("too many links", source)


def forge_link(path, secret):
    path.unlink()
    path.symlink_to(secret)


def test_a_folder_with_links_out_of_it_is_refused(tmp_path, secret, refused):
    folder = tmp_path / "seed_0_data"
    folder.mkdir()
    values = {"obs": 3, "acs": 2, "rews": 1, "next_obs": 3, "dones": 1}
    for name, size in values.items():
        np.save(folder / f"{name}_0.npy", np.ones((STEPS, size)))
    (folder / "again.npy").symlink_to("obs_0.npy")
    assert vault.import_dataset(folder, tmp_path / "a.vlt", "omar", time_limit=STEPS)
    forge_link(folder / "obs_0.npy", secret)
    refused(r"obs_0\.npy is a link that leads out", folder, "omar")


def test_a_zarr_group_with_links_pipes_or_objects_is_refused(tmp_path, secret, ours, refused):
    import zarr

    source = vault.export_dataset(ours, tmp_path / "a.zarr", "zarr")
    chunk = next(path for path in (source / "observations" / "c").rglob("*") if path.is_file())
    stored = chunk.read_bytes()
    forge_link(chunk, secret)
    refused("is a link that leads out", source, "zarr")
    chunk.unlink()
    os.mkfifo(chunk)
    refused("neither a file nor a directory", source, "zarr")
    chunk.unlink()
    chunk.write_bytes(stored)
    group = zarr.open_group(source, mode="a")
    del group["rewards"]
    group.create_array("rewards", shape=(2**30, 2), chunks=(2**30, 2), dtype="f4")
    refused("chunks of rewards that are above 4 GiB", source, "zarr")
    zarr.create_group(tmp_path / "old.zarr", zarr_format=2)
    refused("is a zarr v2 group", tmp_path / "old.zarr", "zarr")


def test_pickles_and_deep_documents_in_npz_files_are_refused(tmp_path, ours, refused):
    source = vault.export_dataset(ours, tmp_path / "a.npz", "numpy")
    arrays = dict(np.load(source))
    ran = tmp_path / "ran"

    class Forged:
        def __reduce__(self):
            return os.mkdir, (str(ran),)

    np.savez(source, **arrays | {"episodes.cause": np.array([Forged()])})
    refused("Python objects", source, "numpy")
    assert not ran.exists()
    np.savez(source, **arrays | {"about": np.array("[" * 100_000)})
    refused("recursion", source, "numpy")
    np.savez(source, **arrays | {"episodes.cause": np.array(["x"] * len(arrays["episodes.cause"]))})
    refused(r"'episodes\.cause' holds <U1, not numbers", source, "numpy")


@pytest.fixture
def dataset(tmp_path, monkeypatch, ours):
    """The directory of a Minari dataset's files."""
    pytest.importorskip("minari")
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "minari"))
    return vault.export_dataset(ours, "forged/b-v0", "minari") / "data"


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
def test_a_minari_dataset_that_refers_to_others_is_refused(
    tmp_path, secret, dataset, forge, refused
):
    with h5py.File(dataset / "main_data.hdf5", "a") as file:
        episode = file["episode_0"]
        forge(episode, "observations", episode["observations"][:], secret)
    refused(FORGERIES[forge], "forged/b-v0", "minari")


def test_a_minari_dataset_runs_no_code_and_has_no_links(tmp_path, secret, dataset, refused):
    metadata = json.loads((dataset / "metadata.json").read_text())
    del metadata["action_space"]
    ran = tmp_path / "ran"
    forged = {"id": "x-v0", "entry_point": "os:mkdir", "kwargs": {"path": str(ran)}}
    metadata["env_spec"] = json.dumps(forged)
    (dataset / "metadata.json").write_text(json.dumps(metadata))
    refused("does not record the observation and action spaces", "forged/b-v0", "minari")
    assert not ran.exists()
    shutil.copy(dataset / "main_data.hdf5", secret)
    forge_link(dataset / "main_data.hdf5", secret)
    refused("is a link that leads out", "forged/b-v0", "minari")


def test_arrays_that_stand_for_more_than_the_file_holds(tmp_path, ours, refused):
    """Slots of no step, HDF5's arrays that were never written, and descriptions of spaces."""
    source = tmp_path / "data.h5"
    with h5py.File(source, "w") as file:
        for name, array in omiga().items():
            shape = 10**9, *array.shape[1:]
            file.create_dataset(name, shape, array.dtype, chunks=(2**16, *array.shape[1:]))
    refused("has not the size that it says", source, "omiga")
    source = tmp_path / "data.npz"
    np.savez(source, **{name: array[:, :0] for name, array in batch().items()})
    refused("is not of PyMARL's layout", source)
    source = vault.export_dataset(ours, tmp_path / "ours.npz", "numpy")
    np.savez_compressed(source, **dict(np.load(source)) | {"about": np.array(" " * 2**23)})
    bare = zipfile.ZipFile(tmp_path / "bare.npz", "w", zipfile.ZIP_DEFLATED)
    with zipfile.ZipFile(source) as old, bare:
        for name in old.namelist():  # NumPy also reads what lacks the suffix
            bare.writestr("about" if name == "about.npy" else name, old.read(name))
    for path in (source, tmp_path / "bare.npz"):
        refused("about has more than 16 MiB", path, "numpy")


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("kind", ["folder", "archive", "about"])
def test_a_forged_header_of_an_array_is_damage(tmp_path, ours, header, kind, refused):
    source = tmp_path / "data.npz"
    arrays = dict(np.load(vault.export_dataset(ours, tmp_path / "ours.npz", "numpy")))
    forged, layout = ("about", "numpy") if kind == "about" else ("obs", "pymarl")
    np.savez(source, **{x: y for x, y in (arrays | batch()).items() if x != forged})
    with zipfile.ZipFile(source, "a") as archive:
        archive.writestr(f"{forged}.npy", npy(header))
    if kind == "folder":
        with zipfile.ZipFile(source) as archive:
            archive.extractall(source := tmp_path / "folder")
    refused("is damaged, incomplete or of another format", source, layout)


def test_arrays_of_hdf5_that_hold_no_numbers(tmp_path, refused):
    source = save_hdf5(tmp_path / "data.h5", batch() | {"obs": h5py.Empty("f4")})
    refused("'obs' holds nothing, not numbers", source)
    with h5py.File(source, "a") as file:
        del file["obs"]
        h5py.h5d.create(file.id, b"obs", h5py.h5t.UNIX_D32LE, h5py.h5s.create_simple((5, 6, 2, 3)))
    refused(r"data\.h5 is damaged.*No NumPy equivalent", source)


def test_entries_of_an_archive_that_are_no_arrays(tmp_path, refused):
    with zipfile.ZipFile(tmp_path / "data.npz", "w") as archive:
        for name in batch():
            archive.writestr(name, b"")
    refused(r"it has no obs, .* only nothing", tmp_path / "data.npz")


FORGED = {"data_format": "none", "observation_space": 5, "total_episodes": 9, "env_spec": "{}"}


@pytest.mark.parametrize("field", [*FORGED, "a list", "many", "alive", "final_known"])
def test_a_minari_dataset_that_is_damaged_is_named(tmp_path, dataset, field, refused):
    metadata = json.loads((dataset / "metadata.json").read_text())
    if field in ("alive", "final_known"):
        with h5py.File(dataset / "main_data.hdf5", "a") as file:
            del file[f"episode_0/infos/{field}"]
    else:
        contents = {name: metadata | {name: value} for name, value in FORGED.items()}
        contents |= {"a list": [[]], "many": metadata | {"total_episodes": 10**12}}
        content = contents[field]
        (dataset / "metadata.json").write_text(json.dumps(content))
    words = "forged/b-v0" + ".* each agent's rewards and ends" * (field == "final_known")
    refused(words, "forged/b-v0", "minari")
