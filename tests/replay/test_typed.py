"""Leaves of any type and shape: on the device, in streams and in NumPy arrays."""

from functools import partial
from pathlib import Path
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import offmarl
from offmarl import vault
from offmarl.errors import OptionError
from offmarl.replay import Replay, WindowReader, Windows, device, load, open_batches
from offmarl.replay.batches import on_device
from offmarl.replay.fields import fields_of
from offmarl.replay.packing import layout_of, pack, unpack
from offmarl.testing import entries
from offmarl.types import DTYPES, ArraySpec, Discrete, EnvSpec, Sequence, flatten_tree
from offmarl.vault import Dataset
from tests.specs import image_spec, typed_spec
from tests.vault.experience import CONTINUOUS, recorded

from .memory import at


@pytest.fixture(scope="module")
def typed(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Windows cross the ends of chunks of 16 steps, of episodes and of rows."""
    return recorded(tmp_path_factory.mktemp("typed") / "t.vlt", typed_spec("t"), steps=60, seed=1)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return recorded(
        tmp_path_factory.mktemp("images") / "i.vlt", image_spec("i", (24, 24, 3)), steps=30, seed=1
    )


same_bits = partial(chex.assert_trees_all_equal, strict=True)

# ---------------------------------------------------------------------------------- equality


@pytest.mark.parametrize(
    "length", [7, *(pytest.param(length, marks=pytest.mark.slow) for length in (1, 40))]
)
def test_device_stream_and_arrays_are_equal(typed: Dataset, length: int) -> None:
    windows = Windows(4, length, return_to_go=0.9)
    replay, source = load(typed, windows), WindowReader(typed, windows)
    slots = np.arange(replay.num_slots)
    arrays = source.arrays(slots)
    same_bits(at(replay, jnp.asarray(slots)), arrays)
    (batch,) = on_device(source, [slots])
    same_bits(batch, arrays)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_some_episodes_of_an_image_vault(images: Dataset, tmp_path: Path, codec: Any) -> None:
    vault.recode(images.path, tmp_path / "i.vlt", codec=codec)
    dataset = offmarl.open(tmp_path / "i.vlt")
    windows, episodes = Windows(4, 5), np.arange(len(dataset.episodes.row))[::-2]
    replay, source = load(dataset, windows, episodes), WindowReader(dataset, windows, episodes)
    slots = np.arange(replay.num_slots)
    same_bits(at(replay, jnp.asarray(slots)), source.arrays(slots))


def test_a_continuous_vault_is_on_the_device_as_it_is(tmp_path: Path) -> None:
    data = recorded(tmp_path / "c.vlt", CONTINUOUS, steps=40, seed=1)
    replay = load(data, Windows(4, 1))
    windows = at(replay, jnp.arange(replay.num_slots))
    steps, mask = data.transitions(), windows.mask[:, 0]
    for name in ("action", "reward", "terminated", "truncated", "behaviour_log_prob"):
        expected = getattr(steps, name)
        same_bits(getattr(windows, name)[mask, 0], expected.reshape(-1, *expected.shape[2:]))


def test_leaves_have_the_types_and_values_of_the_vault(typed: Dataset) -> None:
    windows = WindowReader(typed, Windows(1, 1)).arrays(
        np.arange(typed.num_steps + len(typed.episodes.row))
    )
    row, time = np.divmod(np.arange(typed.num_steps), typed.length)
    steps, mask = typed.transitions(), windows.mask[:, 0]
    for name, leaf in flatten_tree(steps.view._asdict()).items():
        values = flatten_tree(windows.view._asdict())[name]
        same_bits(values[mask, 0], leaf[row, time])
    assert set(windows.extras) == set(typed.spec.extras)
    for name, leaf in steps.extras.items():
        same_bits(windows.extras[name][mask, 0], leaf[row, time])
    assert {leaf.dtype.name for leaf in jax.tree.leaves(windows.view.observation)} == {
        leaf.dtype for leaf in typed.spec.observation_leaves.values()
    }


shapes = st.lists(st.integers(1, 9), max_size=3).map(tuple)
specs = st.builds(ArraySpec, shapes, st.sampled_from(DTYPES))
trees = specs | st.dictionaries(
    st.sampled_from("abc"),
    specs | st.dictionaries(st.sampled_from("xy"), specs, min_size=1),
    min_size=1,
)


@settings(max_examples=8)
@given(trees, trees, st.dictionaries(st.sampled_from("mn"), specs))
@pytest.mark.slow
def test_slots_of_any_trees_are_packed_and_unpacked(
    observation: Any, state: Any, extras: dict[str, ArraySpec]
) -> None:
    spec = EnvSpec(
        "any", 2, 0, 0, Discrete(3), observation=observation, global_state=state, extras=extras
    )
    windows, rng = Windows(1, 2), np.random.default_rng(0)
    layout = layout_of(spec, windows)
    fields = {name: entries(leaf, (5,), rng) for name, leaf in fields_of(spec, windows).items()}
    rows = pack(fields, layout, 5)
    assert sum(array.nbytes for array in rows.values()) == 5 * layout.slot_bytes
    slots = np.array([[1, 2, 3], [0, 1, 2]])
    result = jax.jit(lambda rows: unpack(rows, layout, jnp.asarray(slots[:, 0]), 3))(rows)
    same_bits(result, {name: array[slots] for name, array in fields.items()})


@pytest.mark.parametrize(
    ("actions", "extras", "size", "own"),
    [
        (12, {}, 17, []),  # 16 numbers, and as many flags as a word has bits
        (12, {"flag": ArraySpec((), "bool")}, 18, []),
        (13, {"small": ArraySpec((63,)), "large": ArraySpec((64,))}, 18 + 63 + 64, ["large"]),
        (12, {"half": ArraySpec((2, 3), "float16")}, 17 + 3, ["half"]),
    ],
)
def test_flags_take_a_bit_and_numbers_no_more_than_their_bytes(
    actions: int, extras: dict[str, ArraySpec], size: int, own: list[str]
) -> None:
    spec = EnvSpec("hand", 2, 3, 2, Discrete(actions), extras=extras)
    layout, rng = layout_of(spec, Windows(1, 2)), np.random.default_rng(0)
    assert layout.slot_bytes == 4 * size
    assert [*layout.arrays] == [f"extras.{name}" for name in own]
    leaves = fields_of(spec, Windows(1, 2))
    fields = {name: entries(leaf, (4,), rng) for name, leaf in leaves.items()}
    part = pack({"alive": fields["alive"], "time": fields["time"]}, layout, 4)
    zeros = {name: np.zeros_like(x) for name, x in fields.items()}
    both = zeros | {"alive": fields["alive"], "time": fields["time"]}
    chex.assert_trees_all_equal(part["words"], pack(both, layout, 4)["words"])

    starts, packed = np.array([2, 0]), pack(fields, layout, 6)
    assert not any(array[4:].any() for array in packed.values())
    rows = jax.tree.map(jnp.asarray, packed)
    result = unpack(rows, layout, jnp.asarray(starts), 2)
    same_bits(result, {name: x[starts[:, None] + np.arange(2)] for name, x in fields.items()})


# ---------------------------------------------------------------------------------- sizes


def test_data_that_is_too_large_for_the_device(
    images: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "free_bytes", lambda: 20_000)
    message = rf"{images.path} is too large for the device: .* and 20,000 are free. Stream the"
    with pytest.raises(OptionError, match=message):
        images.replay(2, 3)
    keys = jax.random.split(jax.random.key(0), 1)
    with open_batches(images, "auto", Windows(2, 3), keys, range(0, 2, 2), 2**22) as source:
        assert isinstance(next(source.data), Sequence)
    monkeypatch.setattr(device, "free_bytes", lambda: 2**40)
    with open_batches(images, "auto", Windows(2, 3), keys, range(0, 2, 2), 2**22) as source:
        assert isinstance(next(source.data), Replay)


# ---------------------------------------------------------------------------------- extras


def test_extras_are_chosen(typed: Dataset) -> None:
    name = min(typed.spec.extras)
    source = WindowReader(typed, Windows(1, 2, extras=(name,)))
    assert set(source.arrays(np.arange(3)).extras) == {name}
    assert set(at(load(typed, Windows(1, 2, extras=(name,))), jnp.arange(3)).extras) == {name}
    assert source.batch_bytes < WindowReader(typed, Windows(1, 2)).batch_bytes
    assert WindowReader(typed, Windows(1, 2, extras=())).arrays(np.arange(3)).extras is None


@pytest.mark.parametrize("make", [load, WindowReader])
def test_extras_that_do_not_exist(typed: Dataset, make: Any) -> None:
    with pytest.raises(OptionError, match=r"t.vlt/main has no extra column 'no': choose from "):
        make(typed, Windows(1, 2, extras=("no",)))
