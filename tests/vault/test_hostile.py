"""Forged vaults: an error of offmarl or correct data, quickly and in little memory."""

import json
import random
import resource
import shutil
import time
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import pytest
import tensorstore as ts
from numcodecs import Blosc, Zstd

from offmarl import vault
from offmarl.errors import OffmarlError, VaultFormatError, VaultLayoutError
from offmarl.vault.format import encoding, layout
from offmarl.vault.format.layout import METADATA
from offmarl.vault.format.metadata import Grid
from offmarl.vault.storage.store import store_of

from .damage import (
    change,
    change_episode,
    change_metadata,
    documents,
    make_foreign,
    put,
    remove,
)
from .experience import make, written

HUGE = 10**18
NONSENSE = (
    None,
    True,
    -1,
    0,
    HUGE,
    -HUGE,
    10**400,
    float("nan"),
    float("inf"),
    1.5,
    "",
    "x" * 100_000,
    "(1000000000000000000, 1000000000000000000)",
    f"({HUGE - 1}, {HUGE - 1}, {HUGE - 1})",
    "float32,int32",
    "O",
    "\ud800",
    [],
    {},
    [[[]]],
    {"": {"": {"": ""}}},
    ["(2, 8, 2)"] * 9,
)


class _Known(NamedTuple):
    """A future that is done."""

    value: Any

    def result(self):
        return self.value


def change_documents(path, function):
    """Merge into each array's description what a function of its key and content returns."""
    put(path, {key: old | function(key, old) for key, old in documents(path).items()})


def remove_chunks(path):
    keys = store_of(path).keys("")
    remove(path, *(k for k in keys if not k.endswith(".zarray") and "vault_index" not in k))


def put_index(path, length):
    put(path, {layout.INDEX_KEY: length.to_bytes(4, "little")})


def use(path):
    """Use a vault as a program does; only errors of offmarl may be raised."""
    seconds, memory = time.monotonic(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    uses = (
        lambda: repr(vault.open_vault(path).provenance),
        lambda: vault.open_vault(path).digest(),
        lambda: vault.verify(path),
        lambda: list(vault.list_vaults(path.parent)),
    )
    for attempt in uses:
        try:
            attempt()
        except OffmarlError as error:
            assert len(str(error)) < 2000
    assert time.monotonic() - seconds < 20
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory
    assert grown < 500_000, f"{grown} kB"


def mutated(value, rng):
    """Change a JSON value at a random place."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        changed = {k: v for k, v in value.items() if k != key or rng.random() < 0.9}
        if key in changed:
            changed[key] = mutated(value[key], rng)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.7:
        index = rng.randrange(len(value))
        return [*value[:index], mutated(value[index], rng), *value[index + 1 :]]
    if isinstance(value, str) and value and rng.random() < 0.4:
        index = rng.randrange(len(value))
        return value[:index] + rng.choice("0123456789(),. eE-\x00é") + value[index + 1 :]
    if isinstance(value, int) and rng.random() < 0.4:
        return value + rng.choice((-1, 1, 7, HUGE))
    return rng.choice(NONSENSE)


def mutated_bytes(data, rng):
    data = bytearray(data)
    for _ in range(rng.randrange(1, 4)):
        index = rng.randrange(len(data))
        match rng.randrange(3):
            case 0:
                data[index] = rng.randrange(256)
            case 1:
                del data[index : index + rng.randrange(1, 30)]
            case _:
                data[index:index] = data[: rng.randrange(1, 30)]
    return bytes(data)


def mutate_metadata(path, count, seed):
    rng = random.Random(seed)
    original = (path / METADATA).read_bytes()
    for _ in range(count):
        if rng.random() < 0.5:
            changed = mutated_bytes(original, rng)
        else:
            changed = json.dumps(mutated(json.loads(original), rng)).encode()
        (path / METADATA).write_bytes(changed)
        use(path)
    (path / METADATA).write_bytes(original)


def mutate_own_keys(path, count, seed):
    rng = random.Random(seed)
    keys = (layout.SCHEMA_KEY, layout.HEAD_KEY, layout.PROVENANCE_KEY, *documents(path))
    values = {key: store_of(path).get(key) for key in keys}
    for number in range(count):
        key = keys[number % len(keys)]
        put(path, {key: json.dumps(mutated(json.loads(values[key]), rng)).encode()})
        use(path)
        put(path, {key: values[key]})


@pytest.mark.parametrize(
    ("native", "of_metadata", "of_keys"),
    [
        (True, 20, 20),
        pytest.param(True, 300, 300, marks=pytest.mark.nightly),
        pytest.param(False, 700, 0, marks=pytest.mark.nightly),
    ],
)
def test_mutations(path, native, of_metadata, of_keys):
    if not native:
        make_foreign(path)
    mutate_metadata(path, of_metadata, seed=1)
    mutate_own_keys(path, of_keys, seed=2)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 1_000_000,
        '{"version": 1.2, "structure_shape": ' + '{"a":' * 400 + "1" + "}" * 400 + "}",
        '{"version": NaN}',
        '{"version": 1e999}',
        '{"version": ' + "9" * 10_000 + "}",
        "[1.2]",
        '"1.2"',
        "\x00" * 100,
        "[]",
        '{"version": 2.0}',
        '{"version": 1.2, "structure_shape": {"rewards": "(2, 8, 2)"}}',
        '{"version": 1.2, "structure_shape": {"rewards": "(2, 8, 2)"}, '
        '"structure_dtype": {"rewards": "float64"}}',
    ],
)
@pytest.mark.parametrize("native", [True, False])
def test_metadata_that_is_none(path, text, native):
    if not native:
        make_foreign(path)
    (path / METADATA).write_text(text)
    with pytest.raises(OffmarlError):
        vault.open_vault(path)
    use(path)


@pytest.mark.parametrize(
    ("name", "shape", "dtype"),
    [
        ("rewards", f"(2, 8, {HUGE // 10})", "float32"),
        ("rewards", f"({HUGE // 10}, 8, 2)", "float32"),
        ("rewards", "(2, 8, 2)", "object"),
        ("rewards", "(2, 8, 2)", "V1000000000"),
        ("rewards", "(2, 8, 2)", "float128"),
        ("rewards", "(2, 8, 2)", "nonsense"),
        ("rewards", "(2, 8, 2)", "int32"),  # the arrays are of other types and shapes
        ("rewards", "(2, 8, 3)", "float32"),
        ("rewards", 7, None),
        ("rewards", {"deeper": "(2, 8, 2)"}, "float32"),
        ("rewards", ["(2, 8, 2)"] * 2, "float32"),
        ("nothing", "(2, 8, 2)", "float32"),
    ],
)
def test_shapes_and_types_that_the_arrays_have_not(path, name, shape, dtype):
    make_foreign(path)
    assert vault.open_vault(path).read(0, 1, leaves=["rewards"])["rewards"].shape == (2, 1, 2)
    change_metadata(path, lambda data: data["structure_shape"].update({name: shape}))
    change_metadata(path, lambda data: data["structure_dtype"].update({name: dtype}))
    with pytest.raises(OffmarlError):
        vault.open_vault(path)
    use(path)


def test_arrays_whose_chunks_would_fill_the_memory(path):
    """Both documents describe rows of terabytes, and the index has many rows."""
    make_foreign(path)
    change(path, "rewards./.zarray", shape=[2, 10**13, 10**6], chunks=[2, 10**6, 10**6])
    put_index(path, 2**31 - 1)
    change_metadata(path, lambda data: data["structure_shape"].update(rewards="(2, 8, 1000000)"))
    with pytest.raises(OffmarlError, match="which no vault has"):
        vault.open_vault(path)
    use(path)
    faults = vault.verify(path).faults
    assert any("which no vault has" in str(fault) for fault in faults)


@pytest.mark.parametrize("length", [2**21, 2**31 - 1])
def test_a_head_that_speaks_of_billions(tmp_path, length):
    """The index of chunks in memory would take 160 GiB."""
    path = tmp_path / "v.vlt" / "a"
    written(path, make(rows=1, steps=20), chunk_steps=1)
    change(path, layout.HEAD_KEY, length=length)
    put_index(path, length)
    dataset = vault.open_vault(path)
    uses = [lambda: dataset.read(0, 1), lambda: dataset.windows([0], [0], 1)]
    shutil.make_archive(str(tmp_path / "v"), "zip", tmp_path, "v.vlt")
    zipped = vault.open_vault(tmp_path / "v.zip" / "v.vlt" / "a")
    for use in (*uses, lambda: zipped.read(0, 1)):
        with pytest.raises(VaultFormatError, match="lost data, or its length is damaged or forged"):
            use()
    with pytest.raises(VaultFormatError, match="episode table does not fit"):
        dataset.digest()
    unchecked = vault.open_vault(path, checked=False)  # there is no map of billions of chunks
    assert unchecked.windows([0], [0], 1)["rewards"].shape == (1, 1, 2)


def test_an_index_that_speaks_of_billions(path):
    make_foreign(path)
    put_index(path, 2**31 - 1)
    report = vault.verify(path, deep=True)
    assert "2,147,483,647 steps" in str(report.faults[0])
    dataset = vault.open_vault(path)
    begin = time.monotonic()
    for call in (lambda: dataset.episodes, dataset.digest, dataset.read, lambda: dataset.quirks):
        with pytest.raises(VaultFormatError, match=r"rows of 2,147,483,647 steps, .* data for 112"):
            call()
    assert time.monotonic() - begin < 2
    assert dataset.read(0, 3)["rewards"].shape[1] == 3
    put_index(path, 2**32 - 1)
    assert "length -1" in str(vault.verify(path).faults[0])


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (layout.INDEX_KEY, layout.encode_index(51), "its index was set back to 51"),
        (layout.HEAD_KEY, None, "offmarl/head is missing"),
        (layout.episodes_key(0), b"x", "1 bytes are no whole records"),
        (layout.checksums_key(2), None, "its checksum cannot be read"),
        (layout.checksums_key(2), b"1234", "its checksum cannot be read: too few"),
    ],
)
def test_keys_that_are_missing_or_too_short(path, key, value, message):
    if value is None:
        remove(path, key)
    else:
        put(path, {key: value})
    assert any(message in str(fault) for fault in vault.verify(path, deep=True).faults)
    with pytest.raises(VaultFormatError):
        vault.open_vault(path).digest()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "<f4"}, "the index is not one number"),
        ({"shape": [2], "chunks": [2]}, "the index is not one number"),
        (None, "has lost its index"),
    ],
)
def test_a_document_of_another_index(path, fields, message):
    make_foreign(path)
    key = f"{layout.INDEX_PREFIX}.zarray"
    if fields is None:
        remove(path, key)
    else:
        change(path, key, **fields)
    with pytest.raises(VaultFormatError, match=message):
        vault.open_vault(path)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"", "is damaged: the data file of vault_index/0 is missing or truncated"),
        (b"\1\0\0", "bytes instead of 4"),
    ],
)
def test_an_index_that_is_no_number_is_listed_with_its_error(path, value, message):
    put(path, {layout.INDEX_KEY: value})
    with pytest.raises(VaultFormatError, match=message):
        vault.open_vault(path)
    assert not vault.verify(path).sound
    ((_, summary),) = vault.list_vaults(path.parent)
    assert message in summary.error


def test_an_end_of_an_unknown_cause(path):
    change_episode(path, "cause", 200)
    assert not vault.verify(path, deep=True).sound
    ((_, summary),) = vault.list_vaults(path.parent)
    assert "unknown cause 200" in summary.error


@pytest.mark.parametrize(
    ("field", "value"),
    [("row", -1), ("row", 2), ("start", 2**62), ("length", -1), ("length", 2**62), ("final", 99)],
)
def test_episodes_outside_of_the_vault(path, field, value):
    """Readers count with these numbers, and make arrays of such lengths."""
    change_episode(path, field, value)
    dataset = vault.open_vault(path)
    for read in (lambda: dataset.episodes, dataset.digest):
        with pytest.raises(VaultFormatError, match="its episode table does not fit its steps"):
            read()


def test_rows_and_a_length_that_chunks_left_out_stand_for(path):
    """Both descriptions agree on a million rows, and their missing chunks are zeros."""
    make_foreign(path)
    rows = 2**20

    def widen(_, old):
        return {
            "shape": [rows, *old["shape"][1:]],
            "chunks": [1, *old["chunks"][1:]],
            "fill_value": 0,
        }

    change_documents(path, widen)
    put_index(path, 4096)
    text = (path / METADATA).read_text()
    (path / METADATA).write_text(text.replace("(2, 8", f"({rows}, 8"))
    dataset, begin = vault.open_vault(path), time.monotonic()
    assert dataset.rows == rows
    for call in (lambda: dataset.episodes, dataset.read):
        with pytest.raises(
            VaultFormatError,
            match=r"1,048,576 rows of 4,096 .*\. Copy the vault again from its source\.$",
        ):
            call()
    assert "1,048,576 rows" in str(vault.verify(path, deep=True).faults[0])
    assert time.monotonic() - begin < 5


def test_an_unfinished_chunk_that_unpacks_to_gigabytes(tmp_path):
    written(tmp_path / "v.vlt", make(steps=10), chunk_steps=8, codec="zstd")
    path = tmp_path / "v.vlt" / "main"
    bomb = bytes(Zstd(level=1).encode(bytes(2**27)))
    put(path, {"rewards./0.1.0": bomb})
    with pytest.raises(VaultFormatError, match="its header gives 134217728 bytes"):
        vault.resume(path)


@pytest.mark.parametrize(("lie", "count"), [(0, 61), (20, 41)])
def test_a_tree_that_names_one_node_many_times(path, monkeypatch, lie, count):
    """Each of 60 levels names the next one twice: 2**60 ways lead to the last, or to a lie."""
    reads = []

    def dump(_, *location):
        if not location:
            root = {"location": "btree:d/:x:60:1", "statistics": {}}
            return _Known({"versions": [{"root": root}]})
        reads.append(location)
        height = int(location[0].split(":")[3])
        below = {"key": b"", "location": f"btree:d/:x:{height - 1}:1", "subtree_common_prefix": b""}
        twice = [below, below | {"key": b"1"}] if height else []
        return _Known({"height": height + (height == lie > 0), "entries": twice})

    monkeypatch.setattr(ts.ocdbt, "dump", dump)
    faults = vault.verify(path).faults
    assert faults
    assert len(reads) == count
    assert any("is in the wrong place of the tree" in str(fault) for fault in faults) == (lie > 0)


def grid_of(leaf, chunk):
    document = {"dtype": "|u1", "shape": [2, 10**13, *leaf], "chunks": [2, 8, *chunk]}
    return Grid.of("x", document | {"compressor": None, "fill_value": 0})


@pytest.mark.parametrize(
    ("leaf", "chunk"),
    [
        ((2**10 + 1,), (1,)),
        ((10**400,), (1,)),
        ((1,) * 17, (1,) * 17),
        ((1, 1), (1,)),
        ((0,), (1,)),
        ((1,), (0,)),
        ((2**28 + 1,), (2**28 + 1,)),
    ],
)
def test_steps_of_more_parts_axes_or_bytes_than_any_vault_has(leaf, chunk):
    """Each part is a key that is looked up."""
    with pytest.raises(VaultFormatError, match="which no vault has"):
        grid_of(leaf, chunk)


@pytest.mark.parametrize("leaf", [(2**10,), (1,) * 16, (2**28,)])
def test_steps_of_the_most_parts_axes_or_bytes(leaf):
    chunk = (1,) if leaf == (2**10,) else leaf
    assert grid_of(leaf, chunk).chunks == (2, 8, *chunk)


def test_a_blosc_chunk_that_is_shorter_than_its_header_says():
    """Blosc would copy what is behind it in memory."""
    grid = Grid("x", np.dtype("u1"), (1, 10**13), (1, 4096), "blosc")
    chunk = bytes(Blosc(clevel=0).encode(bytes(4096)))
    assert not grid.decode(chunk, "it").any()
    with pytest.raises(VaultFormatError, match="4112 stored bytes, and there are 16"):
        grid.decode(chunk[:16], "it")


def test_frames_behind_the_one_whose_size_is_right():
    grid = Grid("x", np.dtype("u1"), (1, 10**13), (1, 4096), "zstd")
    value = bytes(Zstd(level=1).encode(bytes(4096))) + bytes(Zstd(level=1).encode(bytes(2**30)))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(VaultFormatError, match="cannot be decoded"):
        grid.decode(value, "it")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 500_000


def test_a_name_that_is_repeated_in_that_of_each_array(path):
    make_foreign(path)
    many = {"n" * 300_000: {f"k{i}": "x" for i in range(5_000)}}
    change_metadata(path, lambda data: data.update(structure_shape=many, structure_dtype=many))
    with pytest.raises(VaultFormatError, match="nests its arrays too deeply"):
        vault.open_vault(path)
    use(path)


@pytest.mark.parametrize("number", [2**20, 2**31 - 1, -5])
def test_actions_that_ask_for_masks_of_any_size(path, number):
    """Without a mask of legal actions, their number is that of the highest one."""
    make_foreign(path)
    store = store_of(path)
    remove(path, *store.keys("infos.legals"))
    for kind in ("shape", "dtype"):
        change_metadata(path, lambda data, of=f"structure_{kind}": data[of]["infos"].pop("legals"))
    chunks = {key: np.frombuffer(store.get(key), "<i4") for key in store.keys("actions./0")}
    put(path, {key: np.full_like(chunk, number).tobytes() for key, chunk in chunks.items()})
    dataset = vault.open_vault(path)
    for read in (lambda: dataset.spec, dataset.transitions, dataset.digest):
        with pytest.raises(VaultLayoutError, match=f"actions up to {number}"):
            read()


@pytest.mark.parametrize(("rows", "length", "times"), [(2**24, 0, 1), (2**18, 1, 1000)])
def test_rows_without_data_take_no_memory(path, rows, length, times):
    """Of a vault that is empty, or has few steps that are large."""
    make_foreign(path)

    def widen(_, old):
        shape = [rows, old["shape"][1], *(x * times for x in old["shape"][2:])]
        return {"shape": shape, "chunks": [1, 8, *shape[2:]], "fill_value": 0}

    def widen_metadata(data):
        flat = encoding.flatten_tree(data["structure_shape"])
        shapes = {name: [*map(int, text[1:-1].split(", "))][2:] for name, text in flat.items()}
        data["structure_shape"] = encoding.unflatten_tree(
            {name: str((rows, 8, *(x * times for x in shape))) for name, shape in shapes.items()}
        )

    remove_chunks(path)
    change_documents(path, widen)
    put_index(path, length)
    change_metadata(path, widen_metadata)
    dataset, begin = vault.open_vault(path), time.monotonic()
    for read in (lambda: dataset.episodes, dataset.read, dataset.digest):
        with pytest.raises(VaultFormatError, match=f"{rows:,} rows of {length} steps"):
            read()
    use(path)
    assert time.monotonic() - begin < 5


@pytest.mark.parametrize(
    ("others", "message"),
    [(8, "there is data for 1,048,576 steps"), (2**24, "has chunks of 16,777,216")],
)
def test_chunks_of_more_steps_than_memory_holds(path, others, message):
    """One array's chunk, which is empty, stands for the data of all arrays."""
    make_foreign(path)
    length = 2**24

    def lengthen(key, old):
        steps = length if key.startswith("terminals") else others
        return {"chunks": [2, steps, *old["shape"][2:]], "fill_value": 0}

    remove_chunks(path)
    change_documents(path, lengthen)
    put(path, {"terminals./0.0.0": b""})
    put_index(path, length)
    dataset = vault.open_vault(path)
    with pytest.raises(VaultFormatError, match=message):
        (dataset.digest if others < length else dataset.blocks)()
    if others < length:
        use(path)


def test_flags_in_larger_chunks_than_arrays_that_are_left_out(path, monkeypatch):
    """As flashbax has them, which leaves out chunks of zeros."""
    make_foreign(path)
    flags = vault.open_vault(path).read(leaves=["terminals"])["terminals"]
    remove_chunks(path)
    change(path, "terminals./.zarray", chunks=[*flags.shape], compressor=None)
    put(path, {"terminals./0.0.0": flags.tobytes()})
    for name, value in {"_UNBACKED_STEPS": 0, "MAX_CHUNK_BYTES": 8 * 500}.items():
        monkeypatch.setattr(f"offmarl.vault.read.arrays.{name}", value)
    dataset = vault.open_vault(path)
    assert [*dataset.blocks()] == [(0, dataset.length)]
    np.testing.assert_array_equal(dataset.read()["terminals"], flags)


@pytest.mark.parametrize("number", [0, 10**6])
def test_final_views_that_are_counted_and_not_there(path, number):
    """So many that they are not read at once."""
    change_episode(path, "final", number)
    change(path, layout.HEAD_KEY, finals=2**40)
    if not number:
        remove(path, *store_of(path).keys(layout.FINALS_PREFIX))
    dataset = vault.open_vault(path)
    for read in (dataset.digest, lambda: dataset.final_views(np.array([number]))):
        with pytest.raises(VaultFormatError, match="it has lost final views"):
            read()
    assert not vault.verify(path, deep=True).sound


@pytest.mark.parametrize("value", [10**30, float("inf"), 10**400, None, []])
@pytest.mark.parametrize("name", ["count", "mean", "quantile_error"])
def test_statistics_that_are_no_numbers_are_computed_again(path, name, value):
    expected = vault.open_vault(path).statistics()
    stored = store_of(path).get_json(layout.STATISTICS_KEY)
    next(iter(stored["leaves"].values()))[name] = value if name == "quantile_error" else [value]
    put(path, {layout.STATISTICS_KEY: stored})
    again = vault.open_vault(path).statistics()
    np.testing.assert_array_equal(again["reward"].mean, expected["reward"].mean)


@pytest.mark.parametrize("end", [b"\x80", b"9" * 5000, b"x"])
def test_keys_of_tables_that_are_no_numbers(path, tmp_path, end):
    for prefix in (layout.EPISODES_PREFIX, layout.FINALS_PREFIX):
        store_of(path)._kv.write(prefix.encode() + end, b"").result()
    dataset = vault.open_vault(path)
    for table in ("episodes", "finals"):
        with pytest.raises(OffmarlError):
            getattr(dataset, table)
    with suppress(OffmarlError):
        vault.salvage(path, tmp_path / "saved.vlt")
