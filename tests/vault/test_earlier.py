"""Vaults written at commit d6e64ec open, verify, and hold the same content."""

import zipfile
from pathlib import Path

import pytest

from offmarl import vault

from .experience import make

WRITTEN = Path(__file__).parent / "data" / "vaults_at_d6e64ec.zip"
DIGESTS = {
    "rows.vlt": "dfdfb0641fc091b0f044bef829979bdbc9f7615eb92b2bca4757779f056ad1e7",
    "images.vlt": "5beac64011d1da7308e14a41ea54e89cb169aea79f312c7cde6f06a1423df22b",
    "swarm/coverage-3.vlt/scripted-0": (
        "f16f067d3ac7bf0af24f8d7cf427e16f41c91e95d9e65b55d5ed9d5426431ed9"
    ),
}


@pytest.fixture
def vaults(tmp_path):
    with zipfile.ZipFile(WRITTEN) as archive:
        archive.extractall(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", DIGESTS)
def test_its_content_is_that_of_before(vaults, name):
    dataset = vault.open_vault(vaults / name)
    assert dataset.digest() == DIGESTS[name]
    assert vault.verify(dataset.path, deep=True).sound


def test_it_is_appended_to(vaults):
    with vault.resume(vaults / "rows.vlt") as writer:
        writer.append(*make(steps=6, seed=2))
    dataset = vault.open_vault(vaults / "rows.vlt")
    assert dataset.num_steps == 2 * (20 + 13 + 6)
    assert vault.verify(dataset.path, deep=True).sound
