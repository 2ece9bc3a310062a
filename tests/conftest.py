"""Settings of the whole suite; JAX reads its own from the environment when it is imported."""

import os
from pathlib import Path

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["OFFMARL_QUIET"] = "1"

import hypothesis

hypothesis.settings.register_profile("offmarl", deadline=None, derandomize=True)
hypothesis.settings.load_profile("offmarl")

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The directory of published datasets beside the checkout; the test is skipped without it."""
    directory = ROOT.parent / "shared" / "data"
    if not directory.is_dir():
        pytest.skip("needs the published datasets in ../shared/data")
    return directory
