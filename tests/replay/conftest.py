"""The vault that most tests of replay draw from."""

import numpy as np
import pytest

import offmarl
from offmarl.vault import Dataset

from .test_device import write


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Episodes shorter and longer than a window, one of each row's without an end."""
    path = tmp_path_factory.mktemp("a folder") / "data.vlt"
    write(path, np.random.default_rng(0).random((3, 90)) < 0.15)
    return offmarl.open(path)
