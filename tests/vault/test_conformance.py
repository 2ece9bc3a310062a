"""Directories pass the conformance tests of drivers."""

from typing import Any, ClassVar

import pytest

from offmarl.testing import DriverConformance


class TestRaw(DriverConformance):
    @pytest.fixture
    def place(self, tmp_path):
        return tmp_path / "v.vlt" / "main"


class TestZstd(TestRaw):
    options: ClassVar[dict[str, Any]] = {"chunk_steps": 8, "codec": "zstd"}
