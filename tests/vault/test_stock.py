"""Stock flashbax opens, reads, samples and appends offmarl's vaults, and offmarl reads stock's."""

import dataclasses
from typing import NamedTuple

import chex
import flashbax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flashbax.vault import Vault as StockVault

from offmarl import vault
from offmarl.errors import VaultConflictError, VaultFormatError, VaultLayoutError
from offmarl.types import ArraySpec, Discrete, unflatten_tree
from offmarl.vault.format import encoding
from offmarl.vault.read import reader
from offmarl.vault.write import writer as writer_module
from tests.specs import image_spec, typed_spec

from .experience import SPEC, assert_same, concatenate, episodes_of, make, steps, table_of, written


def open_stock(path):
    return StockVault(path.parent.name, rel_dir=str(path.parents[1]), vault_uid=path.name)


def to_stock(transition):
    """A record in the nested names and types that stock keeps."""
    arrays = {name: array for name, array in encoding.to_disk(transition).items() if array.size}
    flags = dict.fromkeys(("terminals", "truncations", "infos.legals", "infos.alive"), "f4")
    return unflatten_tree(
        {name: jnp.asarray(array, flags.get(name)) for name, array in arrays.items()}
    )


def append_with_stock(stock, transition):
    """Write all steps of a record through a buffer larger than it."""
    length = transition.last.shape[1]
    tree = jax.tree.map(
        lambda x: jnp.concatenate([x, jnp.zeros_like(x[:, :1])], 1), to_stock(transition)
    )
    state = flashbax.buffers.trajectory_buffer.TrajectoryBufferState(
        experience=tree, current_index=jnp.array(length), is_full=jnp.array(False)
    )
    assert stock.write(state, source_interval=(0, length)) == length


def assert_stock_reads_and_samples(path, transition):
    """Stock reads these steps of two rows, and all its samples are windows of them."""
    state, experience = open_stock(path).read(), to_stock(transition)
    chex.assert_trees_all_equal(state.experience, experience)
    chex.assert_trees_all_equal_dtypes(state.experience, experience)
    buffer = flashbax.make_trajectory_buffer(
        add_batch_size=2,
        sample_batch_size=4,
        sample_sequence_length=5,
        period=1,
        min_length_time_axis=5,
        max_length_time_axis=transition.reward.shape[1],
    )

    def check(samples, leaf):
        windows = np.lib.stride_tricks.sliding_window_view(np.asarray(leaf), 5, axis=1)
        windows = np.moveaxis(windows.reshape(-1, *windows.shape[2:]), -1, 1)
        for sample in np.asarray(samples):
            assert any(np.array_equal(window, sample) for window in windows)

    jax.tree.map(check, buffer.sample(state, jax.random.key(0)).experience, experience)


TYPED, IMAGE = typed_spec("test/typed"), image_spec("test/image")
EXTRA = dataclasses.replace(SPEC, extras={"cost": ArraySpec((), "float16")})


@pytest.mark.parametrize(
    "spec", [SPEC, TYPED, IMAGE, EXTRA], ids=["plain", "tree", "image", "extra"]
)
@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_stock_reads_and_samples(tmp_path, spec, codec):
    path = tmp_path / "ours.vlt" / "a"
    data = make(spec, rows=2, steps=50)
    written(path, data, spec=spec, chunk_steps=16, codec=codec)
    assert_stock_reads_and_samples(path, data[0])


@pytest.mark.parametrize(
    ("spec", "codec", "length"),
    [
        *((SPEC, codec, length) for codec in ("raw", "zstd") for length in (16, 50)),
        *(pytest.param(one, "raw", 20, marks=pytest.mark.slow) for one in (TYPED, IMAGE, EXTRA)),
    ],
)
def test_stock_appends_and_we_adopt(tmp_path, spec, codec, length):
    path = tmp_path / "ours.vlt" / "a"
    ours, theirs, more = (make(spec, steps=n, seed=s) for s, n in enumerate((length, 37, 21)))
    written(path, ours, spec=spec, chunk_steps=16, codec=codec)
    append_with_stock(open_stock(path), theirs[0])

    def check(dataset, parts):
        transitions = concatenate([part[0] for part in parts])
        assert_same(dataset.transitions(), transitions)
        begin = parts[0][0].last.shape[1]
        table = table_of(dataset.episodes)
        expected = episodes_of(parts[0][0])
        for part in parts[1:]:
            stop = begin + part[0].last.shape[1]
            expected += [(row, start + begin, *rest) for row, start, *rest in episodes_of(part[0])]
            begin = stop
        assert table == sorted(expected)

    unknown = theirs[0]._replace(policy_id=np.full_like(theirs[0].policy_id, -1))
    dataset = vault.open_vault(path)
    assert dataset.unverified == ((length, length + 37),)
    assert [row[4] for row in table_of(dataset.episodes) if row[1] >= length] == [-1] * sum(
        dataset.episodes.start >= length
    )
    assert dataset.length == length + 37

    with vault.resume(path) as writer:
        assert writer.length == length + 37
        writer.append(*more)
    dataset = vault.open_vault(path)
    assert dataset.unverified == ((length, length + 37),)
    check(dataset, [ours, (unknown, None), more])
    state = open_stock(path).read()
    np.testing.assert_array_equal(
        state.experience["rewards"], np.asarray(dataset.transitions().reward)
    )
    assert open_stock(path).vault_index == length + 37 + 21
    assert vault.verify(path, deep=True).sound


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_one_commit_adopts_all_steps(tmp_path, codec, eager, monkeypatch):
    """A first one would set the index below the steps that are left, which stock then replaces."""
    monkeypatch.setattr(reader, "_BLOCK_BYTES", 1)
    path = tmp_path / "a.vlt"
    written(path, make(steps=20), chunk_steps=16, codec=codec)
    append_with_stock(open_stock(path / "main"), make(steps=100, seed=1, end_every=15)[0])
    before = vault.open_vault(path)

    def interrupted(self, *arguments, real=writer_module.Writer._accept, **options):
        real(self, *arguments, **options)
        if self._tip.length == 96:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(writer_module.Writer, "_accept", interrupted)
        vault.resume(path)
    after = vault.open_vault(path)
    assert (after.manifest.head, after.length) == (before.manifest.head, 120)
    assert table_of(after.episodes) == table_of(before.episodes)
    vault.resume(path).close()
    assert vault.open_vault(path).unverified == ((20, 120),)
    assert vault.verify(path, deep=True).sound


@pytest.mark.parametrize("same_length", [False, True])
def test_stock_under_an_open_writer_is_fenced(tmp_path, same_length):
    """Also if the index is as expected, and only the steps are not."""
    path = tmp_path / "ours.vlt" / "a"
    ours, theirs = make(steps=20), make(steps=8, seed=1)
    writer = vault.create(path, SPEC, rows=2, chunk_steps=16)
    writer.append(*ours)
    writer.flush()
    stock = open_stock(path)
    if same_length:
        writer.append(*make(steps=8, seed=2))
        writer.flush()
    append_with_stock(stock, theirs[0])
    writer.append(*ours)
    with pytest.raises(VaultConflictError):
        writer.flush()
    writer.release()
    dataset = vault.open_vault(path, checked=not same_length)
    assert dataset.length == 28
    assert_same(dataset[:20], ours[0])
    np.testing.assert_array_equal(dataset[20:28].reward, theirs[0].reward)


def test_an_index_set_back_is_found(tmp_path):
    path = tmp_path / "ours.vlt" / "a"
    with vault.create(path, SPEC, rows=2, chunk_steps=16) as writer:
        writer.append(*make(steps=20))
        writer.flush()
        stock = open_stock(path)
        writer.append(*make(steps=20, seed=1))
    append_with_stock(stock, make(steps=4)[0])
    for attempt in (vault.open_vault, vault.resume):
        with pytest.raises(VaultFormatError, match="set back to 24"):
            attempt(path)


def write_stock(path, tree, compression=None):
    stock = StockVault(
        path.parent.name,
        jax.tree.map(lambda x: x[:, :1], tree),
        rel_dir=str(path.parents[1]),
        vault_uid=path.name,
        compression=compression,
        metadata={"scenario": "3m"},
    )
    length = jax.tree.leaves(tree)[0].shape[1]
    state = flashbax.buffers.trajectory_buffer.TrajectoryBufferState(
        experience=tree, current_index=jnp.array(0), is_full=jnp.array(True)
    )
    stock.write(state, source_interval=(0, length))
    return vault.open_vault(path)


@pytest.mark.parametrize("compression", [None, {"id": "blosc"}, {"id": "zstd", "level": 3}])
def test_we_read_stock(tmp_path, compression):
    transition, _ = make(rows=5, steps=60)
    dataset = write_stock(tmp_path / "s.vlt" / "Good", to_stock(transition), compression)
    assert not dataset.native
    assert dataset.provenance == {"scenario": "3m"}
    assert (dataset.rows, dataset.length) == (5, 60)
    assert_same(dataset.transitions(), transition)
    assert_same(dataset[10:20], steps(transition, 10, 20))
    unknown = [(*e[:4], -1, e[5]) for e in episodes_of(transition)]
    assert table_of(dataset.episodes) == unknown
    assert (dataset.episodes.final == -1).all()
    assert dataset.finals.observation.shape == (0, 2, 3)
    assert dataset.spec.action == Discrete(4)
    assert dataset.spec.time_limit is None
    ((path, summary),) = vault.list_vaults(tmp_path)
    assert summary == vault.Summary("s", "Good", None, 2, 300)
    with pytest.raises(VaultFormatError, match="not written by offmarl"):
        vault.resume(path)


def test_one_end_of_all_agents(tmp_path):
    transition, _ = make(rows=2, steps=30)
    tree = to_stock(transition)
    ends = {"terminals": transition.terminated.all(-1), "truncations": transition.truncated.all(-1)}
    data = write_stock(
        tmp_path / "s.vlt" / "One", tree | {x: jnp.float32(y) for x, y in ends.items()}
    )
    result = data.transitions()
    for name, flag in (("terminals", result.terminated), ("truncations", result.truncated)):
        np.testing.assert_array_equal(flag, np.repeat(ends[name][..., None], 2, -1))
    assert len(data.episodes.row) == len(data.episodes.terminated) > 2


# ---------------------------------------------------------------------------- other layouts


class Pair(NamedTuple):
    obs: jax.Array
    reward: jax.Array


OBS, REWARD = jnp.arange(80.0).reshape(2, 10, 4), jnp.arange(20.0).reshape(2, 10)


@pytest.mark.parametrize(
    ("tree", "arrays"),
    [
        (Pair(OBS, REWARD), {"obs": OBS, "reward": REWARD}),
        ({"a": {"b": OBS}, "rewards": REWARD}, {"a.b": OBS, "rewards": REWARD}),
        ({"obs": [OBS], "reward": REWARD}, {"obs.": OBS, "reward": REWARD}),
        ((OBS,), {"": OBS}),
        (OBS, {"/": OBS}),
        ({"obs": OBS.astype(jnp.bfloat16)}, {"obs": OBS.astype(jnp.bfloat16)}),
        ({"x": OBS.astype(jnp.int4)}, {"x": OBS.astype(jnp.int4)}),
        ({"x": OBS.astype(jnp.complex64)}, {"x": OBS.astype(jnp.complex64)}),
    ],
)
def test_a_vault_of_another_layout_is_sound_and_read(tmp_path, tree, arrays):
    dataset = write_stock(tmp_path / "other.vlt" / "a", tree)
    leaves = dataset.read(2, 7)
    windows = dataset.windows(np.array([1]), np.array([3]), 4)
    assert list(leaves) == list(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(leaves[name], np.asarray(array)[:, 2:7])
        np.testing.assert_array_equal(windows[name], np.asarray(array)[1:2, 3:7])
        assert leaves[name].dtype == array.dtype
    checked = vault.verify(dataset.path, deep=True)
    assert checked.sound
    assert "no multi-agent data in OG-MARL's layout" in checked.other_layout
    for use in (lambda: dataset.spec, lambda: dataset[:1], lambda: dataset.episodes):
        with pytest.raises(VaultLayoutError, match="can still be read one by one with read"):
            use()
    ((_, summary),) = vault.list_vaults(tmp_path)
    assert summary.error is None


def test_half_precision_is_kept_in_views(tmp_path):
    transition, _ = make(rows=2, steps=20)
    tree = to_stock(transition)
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, tree)
    dataset = write_stock(tmp_path / "half.vlt" / "a", narrow)
    checked = vault.verify(dataset.path, deep=True)
    assert checked.sound and not checked.other_layout
    steps = dataset.transitions()
    assert steps.reward.dtype == np.float32
    assert steps.view.observation.dtype == jnp.bfloat16
    np.testing.assert_array_equal(steps.view.observation, narrow["observations"])
    np.testing.assert_array_equal(steps.reward, np.asarray(narrow["rewards"], np.float32))
    np.testing.assert_allclose(
        dataset.episodes.returns, [row[5] for row in episodes_of(steps)], rtol=1e-6
    )
    assert dataset.spec.action == Discrete(4)


def test_a_type_that_nobody_knows_is_a_fault(tmp_path):
    data = write_stock(tmp_path / "s.vlt" / "a", {"obs": OBS})
    file = data.path / "metadata.json"
    file.write_text(file.read_text().replace("float32", "floaf32"))
    assert "the type 'floaf32', which offmarl does not read" in str(vault.verify(data.path).faults)
    with pytest.raises(VaultFormatError, match="'floaf32'"):
        vault.open_vault(data.path)
