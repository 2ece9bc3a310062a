"""Vaults as plain columns in NumPy and zarr files, and back."""

import json

import numpy as np
import pytest
import zarr

from offmarl import vault
from offmarl.errors import InvalidValueError, OptionError, VaultExistsError
from offmarl.vault.convert import columns
from offmarl.vault.format.tables import CUT, OPEN

from .experience import CONTINUOUS, SPEC, make, written

LAYOUTS = {"npz": "numpy", "zarr": "zarr"}


@pytest.fixture(params=[SPEC, CONTINUOUS], scope="module")
def data(request, tmp_path_factory):
    """A vault of two rows, with an episode that is cut off, and an unfinished one."""
    path = tmp_path_factory.mktemp("columns") / "a.vlt" / "b"
    steps, finals = make(request.param, steps=40)
    last = steps.last.copy()
    last[0, -1], last[1, -1] = True, False
    terminated = steps.terminated & last[..., None]
    truncated = (last[..., None] & ~terminated) | (steps.truncated & last[..., None])
    steps = steps._replace(last=last, terminated=terminated, truncated=truncated)
    known = last[finals.row, finals.time]
    finals = type(finals)(
        finals.row[known], finals.time[known], type(finals.view)(*(x[known] for x in finals.view))
    )
    with vault.create(path, request.param, rows=2, provenance={"seed": 1}) as writer:
        writer.append(steps, finals, cut=np.array([truncated[0, -1].any(), False]))
    return vault.open_vault(path)


@pytest.mark.parametrize("kind", LAYOUTS)
@pytest.mark.parametrize(("shard", "chunk"), [(2**10, 2**20), (2**10, 100), (2**26, 2**20)])
def test_there_and_back(tmp_path, data, kind, shard, chunk, monkeypatch):
    """A last shard with fewer chunks than the others is complete, too."""
    monkeypatch.setattr(columns, "_SHARD_BYTES", shard)
    monkeypatch.setattr(columns, "_CHUNK_BYTES", chunk)
    layout = LAYOUTS[kind]
    out = vault.export_dataset(data, tmp_path / f"out.{kind}", layout)
    again = vault.import_dataset(out, tmp_path / "b.vlt", layout, terms={"licence": "MIT"})
    assert again.digest() == data.digest()
    assert again.spec == data.spec
    about = {"format": layout, "file": out.name, "licence": "MIT"}
    assert again.provenance["source"] == {**about, "provenance": {"seed": 1}}
    with pytest.raises(VaultExistsError):
        vault.export_dataset(data, out, layout)
    assert {path.name for path in tmp_path.iterdir()} == {out.name, "b.vlt"}


@pytest.mark.parametrize("layout", ["numpy", "zarr", "pymarl"])
def test_a_layout_is_written_on_this_machine(data, layout):
    with pytest.raises(OptionError, match="s3://bucket/x is a URL"):
        vault.export_dataset(data, "s3://bucket/x", layout)


def test_numpy_reads_it(tmp_path, data):
    with np.load(vault.export_dataset(data, tmp_path / "a.npz", "numpy")) as file:
        assert file["rewards"].shape == (data.num_steps, data.spec.num_agents)
        assert file["episodes.length"].sum() == data.num_steps
        assert json.loads(str(file["about"]))["digest"] == data.digest()


@pytest.mark.parametrize(("name", "layout"), [*LAYOUTS.items(), ("h5", "pymarl")])
def test_a_vault_without_steps(tmp_path, name, layout, refused):
    vault.create(tmp_path / "a.vlt", SPEC, rows=2).close()
    out = vault.export_dataset(tmp_path / "a.vlt", tmp_path / f"out.{name}", layout)
    if layout == "pymarl":
        refused(r"out\.h5: the data has no steps", out, layout, error=InvalidValueError)
        return
    again = vault.import_dataset(out, tmp_path / "b.vlt", layout)
    assert (again.num_steps, len(again), again.spec) == (0, 0, SPEC)


def test_all_open_episodes_but_the_last_are_cut(tmp_path):
    """End to end, an episode that is open can only be the last: the digest is not reproduced."""
    steps, _ = make(rows=3, steps=20)
    steps = steps._replace(**{x: getattr(steps, x) * False for x in ("terminated", "truncated")})
    source = written(tmp_path / "a.vlt", (steps._replace(last=steps.last & False), None))
    out = vault.export_dataset(source, tmp_path / "a.npz", "numpy")
    with np.load(out) as file:
        assert file["episodes.cause"].tolist() == [CUT, CUT, OPEN]
        assert json.loads(str(file["about"]))["digest"] is None
    again = vault.import_dataset(out, tmp_path / "b.vlt", "numpy").episodes
    assert again.length.tolist() == [20] * 3 and again.cause.tolist() == ["cut"] * 3


def test_zarr_python_reads_it(tmp_path, data):
    group = zarr.open_group(vault.export_dataset(data, tmp_path / "a.zarr", "zarr"), mode="r")
    rewards = group["rewards"]
    axes = {name: array.metadata.dimension_names for name, array in group.arrays()}
    action = ("action",) if data.spec == CONTINUOUS else ()
    of_agents = {"terminals", "truncations", "rewards", "infos.alive"}
    of_agents |= {"infos.behaviour_log_probs", "infos.policy_ids"}
    assert axes == {
        "actions": ("time", "agent", *action),
        "observations": ("time", "agent", "observation"),
        "infos.state": ("time", "state"),
        "infos.legals": ("time", "agent", "legal"),
        "finals.observation": ("final", "agent", "observation"),
        "finals.state": ("final", "state"),
        "finals.legal_actions": ("final", "agent", "legal"),
        "finals.alive": ("final", "agent"),
        **dict.fromkeys(of_agents, ("time", "agent")),
        **dict.fromkeys(columns._TABLES, ("episode",)),
    }
    assert rewards.shards is not None
    assert rewards[:].sum() == pytest.approx(data.episodes.returns.sum(), rel=1e-5)


def test_what_is_lost_or_changed_in_zarr(tmp_path, data, refused):
    source = vault.export_dataset(data, tmp_path / "a.zarr", "zarr")
    shard = next(path for path in (source / "rewards" / "c").rglob("*") if path.is_file())
    data = shard.read_bytes()
    shard.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    refused("checksum", source, "zarr")
    shard.unlink()
    refused(r"lost chunks of rewards, or was .* without those of", source, "zarr")


def test_files_of_another_layout(tmp_path, data, refused):
    source = vault.export_dataset(data, tmp_path / "a.npz", "numpy")
    with np.load(source) as file:
        arrays = dict(file)
    np.savez(tmp_path / "less.npz", **{k: v for k, v in arrays.items() if k != "rewards"})
    refused("it has no rewards", tmp_path / "less.npz", "numpy")
    np.savez(tmp_path / "changed.npz", **(arrays | {"rewards": arrays["rewards"] + 1}))
    refused("does not have the digest it records", tmp_path / "changed.npz", "numpy")
    np.savez(tmp_path / "other.npz", **(arrays | {"about": json.dumps({"spec": 5})}))
    refused(r"other\.npz does not record its spec", tmp_path / "other.npz", "numpy")


def lengths(*lengths):
    """A table of episodes of these lengths."""
    columns = {"length": lengths, "cause": np.full(np.shape(lengths), 2)}
    columns["final"] = np.full(np.shape(lengths), -1)
    return {f"episodes.{name}": np.array(column, int) for name, column in columns.items()}


@pytest.mark.parametrize(
    "forged",
    [
        *(lengths(80, 0), lengths(90, -10), lengths(), lengths([80])),
        lengths(80) | {"episodes.final": np.full(1, 2**64 - 1, np.uint64)},
        {"episodes.cause": np.int8(1)},
        {"infos.alive": np.int8(1)},
    ],
)
def test_a_table_of_episodes_that_does_not_fit(tmp_path, data, forged, refused):
    """Without a digest, nothing else tells."""
    with np.load(vault.export_dataset(data, tmp_path / "a.npz", "numpy")) as file:
        arrays = dict(file)
    arrays["about"] = json.dumps(json.loads(str(arrays["about"])) | {"digest": None})
    np.savez(tmp_path / "forged.npz", **arrays | forged)
    refused(r"a table of episodes|is damaged|different numbers", tmp_path / "forged.npz", "numpy")
