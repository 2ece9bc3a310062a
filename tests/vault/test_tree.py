"""Trees of several levels in a store; small vaults have one level."""

import pytest
import tensorstore as ts

from offmarl.vault.format.layout import DATA
from offmarl.vault.storage import commit
from offmarl.vault.storage.store import store_of

KEYS = {f"key {number:04}": bytes([number % 251]) * 40 for number in range(300)}


@pytest.fixture
def store(tmp_path):
    config = {"max_decoded_node_bytes": 2000, "max_inline_value_bytes": 10}
    base = {"driver": "file", "path": f"{tmp_path}/"}
    spec = {"driver": "ocdbt", "base": base, "config": config}
    kvstore = ts.KvStore.open(spec).result()
    with ts.Transaction(atomic=True) as transaction:
        for key, value in KEYS.items():
            kvstore.with_transaction(transaction)[key] = value
    return tmp_path


def read(path, value):
    return (path / value.file).read_bytes()[value.offset :][: value.length]


def test_every_key_is_found_on_every_level(store):
    tree = commit.current_tree(store_of(store))
    assert tree.lost == ()
    assert {key: read(store, value) for key, value in tree.values.items()} == KEYS


def test_every_commit_is_found_in_a_long_history(tmp_path):
    """The manifest lists the newest commits only, and refers to nodes that list the others."""
    config = {"max_inline_value_bytes": 10, "version_tree_arity_log2": 1}
    base = {"driver": "file", "path": f"{tmp_path}/"}
    kvstore = ts.KvStore.open({"driver": "ocdbt", "base": base, "config": config}).result()
    for number in range(20):
        kvstore.write("key", bytes([number]) * 40).result()
    driver = store_of(tmp_path)
    assert commit.live_files(driver) == {
        f"{DATA}/{file.name}" for file in (tmp_path / DATA).iterdir()
    }
