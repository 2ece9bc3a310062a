"""Chunks of registered drivers are decoded as TensorStore decodes them, others are refused."""

import bz2
import json
import pickle
import tracemalloc
import zlib

import numpy as np
import pytest
import tensorstore as ts
from numcodecs import Blosc, Zstd

from offmarl import vault
from offmarl.errors import VaultFormatError
from offmarl.testing import DriverConformance
from offmarl.vault.format.metadata import Grid

from .experience import recorded
from .test_drivers import MEMORY, registered

__all__ = ["registered"]  # a fixture that every test uses

DOCUMENT = {
    "zarr_format": 2,
    "shape": [4, 100],
    "chunks": [2, 8],
    "dtype": "<f4",
    "compressor": None,
    "fill_value": None,
    "order": "C",
    "filters": None,
}
CODECS = [None, *({"id": name} for name in ("blosc", "bz2", "gzip", "zlib", "zstd"))]


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize(
    ("dtype", "fill"),
    [
        ("<f4", None),
        ("<f4", "NaN"),
        (">i2", 7),
        ("|b1", True),
        ("bfloat16", 1.5),
        ("bfloat16", "-Infinity"),
    ],
)
def test_chunks_are_what_tensorstore_wrote(codec, order, dtype, fill):
    document = DOCUMENT | {"compressor": codec, "order": order, "dtype": dtype, "fill_value": fill}
    document["dimension_separator"] = "/"
    spec = {"driver": "zarr", "kvstore": {"driver": "memory"}, "metadata": document}
    written = ts.open(spec, create=True).result()
    kind = written.dtype.numpy_dtype
    written[1:4, 3:21].write((np.arange(54).reshape(3, 18) % 100).astype(kind)).result()
    files = written.kvstore
    values = {f"a./{key.decode()}": files.read(key).result().value for key in files.list().result()}
    grid = Grid.of("a", json.loads(values["a./.zarray"]))

    def chunk(block, number):
        parts = [(key, values.get(key)) for key in grid.keys(block, number)]
        return grid.join([grid.decode(x, k) if x else grid.missing_chunk() for k, x in parts])

    array = np.block([[chunk(block, number) for number in range(13)] for block in range(2)])
    assert array.dtype == grid.leaf.dtype == kind
    np.testing.assert_array_equal(array[:, :100], written.read().result())


def test_chunks_that_divide_steps_are_joined():
    chunks = {"shape": [4, 100, 5, 3], "chunks": [2, 8, 2, 2]}
    spec = {"driver": "zarr", "kvstore": {"driver": "memory"}, "metadata": DOCUMENT | chunks}
    written = ts.open(spec, create=True).result()
    steps = np.arange(4 * 100 * 15, dtype="f4").reshape(4, 100, 5, 3)
    written.write(steps).result()
    grid = Grid.of("", DOCUMENT | chunks)
    keys = [key.removeprefix("./") for key in grid.keys(1, 2)]
    parts = [grid.decode(written.kvstore.read(key).result().value, key) for key in keys]
    np.testing.assert_array_equal(grid.join(parts), steps[2:, 16:24])


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"compressor": {"id": "pickle"}}, "the compressor 'pickle'"),
        ({"compressor": {"id": "lz4"}}, "the compressor 'lz4'"),
        ({"filters": [{"id": "delta", "dtype": "<f4"}]}, "has filters"),
        ({"order": "K"}, "the order 'K'"),
        ({"dimension_separator": "/../"}, "the separator"),
        ({"dtype": "|O"}, "values of object"),
        ({"dtype": "f4,f4"}, "cannot be read here"),
        ({"fill_value": "seven"}, "is invalid"),
        ({"fill_value": [0, 0, 0]}, "is invalid"),
        ({"shape": [4], "chunks": [2]}, "which no vault has"),
    ],
)
def test_documents_that_are_refused(changed, message):
    with pytest.raises(VaultFormatError, match=message):
        Grid.of("a", DOCUMENT | changed)


@pytest.mark.parametrize(
    ("codec", "value"),
    [
        ("zlib", zlib.compress(bytes(10**7))),
        ("gzip", zlib.compress(bytes(10**7), wbits=31)),
        ("bz2", bz2.compress(bytes(10**7))),
        ("zstd", Zstd().encode(bytes(10**7))),
        ("blosc", Blosc().encode(bytes(10**7))),
        *(
            (codec, compress(bytes(63)))
            for codec, compress in [
                ("zlib", zlib.compress),
                ("zstd", Zstd().encode),
                ("blosc", Blosc().encode),
            ]
        ),
        ("zstd", bytes.fromhex("28b52ffd0058010000")),  # which gives no size
        *((codec, b"damaged bytes") for codec in ("zlib", "gzip", "bz2", "zstd", "blosc")),
    ],
)
def test_a_chunk_of_another_size_is_refused_in_little_memory(codec, value):
    grid = Grid.of("a", DOCUMENT | {"compressor": {"id": codec}})
    assert grid.chunk_bytes == 64
    tracemalloc.start()
    with pytest.raises(VaultFormatError, match=r"^here (cannot be decoded|has \d+ bytes)"):
        grid.decode(value, "here")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10**6


class Trap:
    ran = 0

    def __reduce__(self):
        return exec, (f"from {__name__} import Trap; Trap.ran += 1",)


def test_verifying_unpickles_nothing():
    url = "memory://m/v.vlt/main"
    recorded(url, DriverConformance.spec, steps=20, codec="zstd")
    for key, (value, stamp) in list(MEMORY.items()):
        if key.endswith("rewards./.zarray"):
            document = json.loads(value) | {"compressor": {"id": "pickle"}}
            MEMORY[key] = json.dumps(document).encode(), stamp
        elif "rewards./" in key:
            MEMORY[key] = pickle.dumps(Trap()), stamp
    assert not vault.verify(url, deep=True).sound
    with pytest.raises(VaultFormatError):
        vault.open_vault(url).read(0, 5)
    assert Trap.ran == 0
