"""Conformance of directories, and of a driver in one file: vaults in a dictionary."""

import itertools
import pickle
from threading import Lock
from typing import Any, ClassVar

import numpy as np
import pytest

from offmarl import vault
from offmarl.errors import VaultConflictError, VaultError, VaultFormatError, VaultNotFoundError
from offmarl.paths import openers
from offmarl.testing import DriverConformance, assert_same, experience
from offmarl.vault.format.layout import METADATA
from offmarl.vault.storage.store import store_of

from .experience import recorded
from .test_stock import to_stock, write_stock

MEMORY: dict[str, tuple[bytes, bytes]] = {}
"""URLs of keys, and their values and generations."""
_LOCK, _COUNT = Lock(), itertools.count()


class Memory:
    def __init__(self, url: str):
        self._prefix = f"{url}/"

    def read(self, keys):
        return [MEMORY.get(self._prefix + key, (None,))[0] for key in keys]

    def sizes(self, prefix):
        skip, begin = len(self._prefix), self._prefix + prefix
        items = list(MEMORY.items())
        return {key[skip:]: len(value) for key, (value, _) in items if key.startswith(begin)}

    def generations(self, keys):
        return [MEMORY.get(self._prefix + key, (b"", b"missing"))[1] for key in keys]

    def commit(self, writes, fence):
        with _LOCK:
            if self.generations(list(fence)) != list(fence.values()):
                raise VaultConflictError(f"{self._prefix} was changed by another program.")
            stamp = str(next(_COUNT)).encode()
            MEMORY.update({self._prefix + k: (value, stamp) for k, value in writes.items()})

    def clear(self):
        for key in self.sizes(""):
            del MEMORY[self._prefix + key]


@pytest.fixture(autouse=True)
def registered():
    vault.register_driver("memory", Memory)
    yield
    MEMORY.clear()


class TestRaw(DriverConformance):
    @pytest.fixture
    def place(self, tmp_path):
        return tmp_path / "v.vlt" / "main"


class TestZstd(TestRaw):
    options: ClassVar[dict[str, Any]] = {"chunk_steps": 8, "codec": "zstd"}


class TestMemory(DriverConformance):
    @pytest.fixture
    def place(self):
        return "memory://anywhere/some data/v.vlt/main"


class TestMemoryZstd(TestMemory):
    options: ClassVar[dict[str, Any]] = {"chunk_steps": 8, "codec": "zstd"}


def test_appended_arrays_are_copied(tmp_path):
    spec, path = DriverConformance.spec, tmp_path / "v.vlt"
    transition, finals = experience(spec, 2, 12)
    reward = np.array(transition.reward)
    with vault.create(path, spec, rows=2) as writer:
        writer.append(transition._replace(reward=reward), finals)
        reward[:] = 0
    assert_same(vault.open_vault(path).transitions(), transition)


def test_a_vault_of_stock_flashbax_is_read(tmp_path):
    transition, _ = experience(DriverConformance.spec, 2, 20)
    path = write_stock(tmp_path / "stock.vlt" / "a", to_stock(transition)).path
    place = "memory://m/stock.vlt/a"
    source, target = store_of(path), store_of(place)
    keys = source.keys("")
    target.commit(dict(zip(keys, source.get_all(keys), strict=True)), {}).result()
    target.write(METADATA, (path / METADATA).read_bytes())
    dataset = vault.open_vault(place)
    assert (dataset.native, dataset.rows, dataset.length) == (False, 2, 20)
    assert_same(dataset.transitions(), transition)
    assert vault.verify(place, deep=True).sound


def write(url="memory://m/v.vlt/main", **options):
    return recorded(url, DriverConformance.spec, steps=20, chunk_steps=8, **options)


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_it_holds_what_a_directory_would(tmp_path, codec):
    dataset = write(codec=codec)
    assert dataset.digest() == write(tmp_path / "v.vlt", codec=codec).digest()
    copied = vault.cat([dataset], tmp_path / "copied.vlt")
    assert vault.cat([copied], "memory://m/back.vlt").num_steps == dataset.num_steps


def test_damage_is_found():
    dataset = write()
    (key,) = (key for key in MEMORY if key.endswith("observations./0.1.0.0"))
    value, stamp = MEMORY[key]
    MEMORY[key] = bytes([value[0] ^ 1]) + value[1:], stamp
    (fault,) = vault.verify(dataset.path, deep=True).faults
    assert (fault.leaf, fault.steps) == ("observations", (8, 16))
    with pytest.raises(VaultFormatError, match="its checksum is wrong"):
        vault.open_vault(dataset.path)[:]
    del MEMORY[key]
    assert "missing" in str(vault.verify(dataset.path).faults[0])
    with pytest.raises(VaultFormatError, match=r"has lost observations./0.1.0.0"):
        vault.open_vault(dataset.path)[:]


def test_what_a_dictionary_cannot_do_is_said():
    dataset = write()
    for verb in (vault.compact, lambda path: vault.join(path, "me")):
        with pytest.raises(VaultError, match="directory on this machine"):
            verb(dataset.path)


def test_another_vault_in_the_same_place():
    write("memory://m/v.vlt/a")
    write("memory://m/v.vlt/b")
    with pytest.raises(VaultError, match="holds several vaults: add one of a, b"):
        vault.open_vault("memory://m/v.vlt")
    assert len(list(vault.list_vaults("memory://m"))) == 2
    with pytest.raises(VaultNotFoundError, match="Nearby: a, b"):
        vault.open_vault("memory://m/v.vlt/c")


@pytest.mark.parametrize("scheme", ["s3", "https", "file", "", "x", "Memory", "a b", "1up"])
def test_schemes_that_cannot_be_registered(scheme):
    with pytest.raises(VaultError, match="cannot be registered"):
        vault.register_driver(scheme, Memory)


def test_a_scheme_that_nobody_registered():
    with pytest.raises(VaultError, match="has an unsupported scheme"):
        vault.open_vault("elsewhere://m/v.vlt")


def test_a_process_that_did_not_register_the_driver_is_told_to(monkeypatch):
    sent = [pickle.dumps(write(url)) for url in ("memory://m/v.vlt/a", "memory://m/v.zip/v.vlt/a")]
    assert pickle.loads(sent[0]).length == 20
    monkeypatch.delitem(openers, "memory")
    for data in sent:
        with pytest.raises(VaultError, match=r"register_driver\('memory', ...\)` in every process"):
            pickle.loads(data)
