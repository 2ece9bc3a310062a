"""The stores of our own pass what every store must."""

import pytest

from offmarl.testing import StoreConformance, VaultStore


class TestDirectory(StoreConformance):
    @pytest.fixture(params=["raw", "zstd"])
    def store(self, tmp_path, request):
        return VaultStore(tmp_path / "v.vlt", codec=request.param, chunk_steps=8)
