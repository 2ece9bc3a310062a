"""Settings of the whole suite; JAX reads its own from the environment when it is imported."""

import os
from collections.abc import Callable
from functools import cache
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


@pytest.fixture(scope="session")
def random_data(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the vault that a uniform policy recorded in an environment of some name."""
    from offmarl import envs
    from offmarl.networks import PolicyConfig, make_policy
    from offmarl.recording import record_policy

    @cache
    def record(name: str) -> Path:
        env = envs.make(name)
        path = tmp_path_factory.mktemp("data") / f"{name.replace('/', '-')}.vlt" / "random"
        policy = make_policy(PolicyConfig("random"), env.spec)
        record_policy(env, policy, (), path, steps=2048, num_envs=16)
        return path

    return record
