"""Settings of the whole suite, and environment variables that JAX reads when it is imported."""

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["OFFMARL_QUIET"] = "1"
os.environ.setdefault("JAX_NUM_CPU_DEVICES", "1")  # whichever test starts JAX, and with which seeds
# Compilation is most of what the tests cost. Nightly runs set this to 0, so that optimised code is
# tested too.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

if (
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1"
    and "OFFMARL_FUSION" not in os.environ
    and version("jaxlib").startswith("0.10.")
):
    # jaxlib 0.10 compiles two to three times as fast without the way of fusing that users get.
    # Later versions compile as fast by themselves, and have no such option.
    os.environ["OFFMARL_FUSION"] = "fast"
    os.environ["XLA_FLAGS"] = " ".join(
        [os.environ.get("XLA_FLAGS", ""), "--xla_cpu_use_fusion_emitters=false"]
    ).strip()

if (
    "TMPDIR" not in os.environ
    and Path("/dev/shm").is_dir()
    and shutil.disk_usage("/dev/shm").free > 2**32
):
    # Writes to memory do not wait for a disk. No test cuts the power, which is when they differ.
    os.environ["TMPDIR"] = tempfile.tempdir = "/dev/shm"

# Processes that tests start import `tests` from here, and not pgx's, which pgx installs.
os.environ["PYTHONPATH"] = os.pathsep.join(
    filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
)
os.environ["OFFMARL_DIGEST_CACHE"] = "off"  # tests leave nothing in the home directory

if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    # Workers, and the commands that tests start, compile the same programs: each once a run.
    _programs = tempfile.mkdtemp(prefix="offmarl-programs-")
    atexit.register(shutil.rmtree, _programs, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _programs
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

import hypothesis
import jaxtyping
from jaxtyping import install_import_hook

from tests import typecheck  # noqa: F401 - the hook imports only the package

# Shapes and types are checked at run time: always in the code that JAX runs; elsewhere, where the
# checks take most of the time, in nightly runs, which set this to "offmarl".
_checked = os.environ.get(
    "OFFMARL_TYPECHECK",
    "offmarl.distributions offmarl.envs offmarl.evaluation offmarl.losses offmarl.networks "
    "offmarl.programs offmarl.replay offmarl.rollout",
)
install_import_hook(_checked.split(), "tests.typecheck.check")

hypothesis.settings.register_profile("offmarl", deadline=None, derandomize=True)
hypothesis.settings.load_profile("offmarl")

ROOT = Path(__file__).parents[1]


MAPS = Path("/proc/self/maps")

PUBLISHED = ROOT.parent / "shared" / "data"


@pytest.fixture(autouse=True, scope="module")
def few_compiled_programs() -> Iterator[None]:
    """Release compiled programs before a worker reaches Linux's limit of 65,530 mappings.

    Each program takes several, and a process that can map no more memory crashes.
    """
    yield
    if "jax" in sys.modules and MAPS.exists() and MAPS.read_bytes().count(b"\n") > 20_000:
        sys.modules["jax"].clear_caches()
        gc.collect()


@pytest.fixture
def unchecked_types() -> Iterator[None]:
    """Let values of wrong types reach the package where types are checked at run time."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(scope="session")
def published_data() -> Path:
    """Return the directory of published datasets beside the checkout.

    Without it the test is skipped, or fails where OFFMARL_REQUIRE_DATA is 1.
    """
    if not PUBLISHED.is_dir():
        missing = pytest.fail if _data_is_required() else pytest.skip
        missing("needs the published datasets in ../shared/data")
    return PUBLISHED


@pytest.fixture(scope="session")
def shared_data(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the published datasets, or generated ones of the same layout and counts."""
    if PUBLISHED.is_dir() or _data_is_required():
        path: Path = request.getfixturevalue("published_data")
        return path
    from tests.published import write_published

    return write_published(tmp_path_factory.mktemp("published"))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark nightly tests as slow too, so that ``-m "not slow"`` leaves both out.

    Tests marked ``bits`` are left to `test_bits.py` where XLA fuses as it does not for users. Tests
    marked ``untyped`` are left out where all types are checked.
    """
    for item in items:
        if item.get_closest_marker("nightly"):
            item.add_marker("slow")
    left_out = {
        "bits": os.environ.get("OFFMARL_FUSION") == "fast",
        "untyped": "offmarl" in _checked.split(),
    }
    for mark in (mark for mark, left in left_out.items() if left):
        config.hook.pytest_deselected(items=[x for x in items if x.get_closest_marker(mark)])
        items[:] = [item for item in items if not item.get_closest_marker(mark)]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Leave neighbouring tests to one worker, which compiles and records for them once."""
    from xdist.scheduler import WorkStealingScheduling

    return WorkStealingScheduling(config, log)


def _data_is_required() -> bool:
    return os.environ.get("OFFMARL_REQUIRE_DATA") == "1"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which data the tests read, and how many tests had none."""
    if PUBLISHED.is_dir():
        return
    skipped = sum(
        "needs the published datasets" in str(report.longrepr)
        for report in terminalreporter.stats.get("skipped", [])
    )
    terminalreporter.write_line(
        f"../shared/data is missing: generated data of its layout took its place; {skipped} tests "
        "that need the published files were skipped."
    )


@pytest.fixture(scope="session")
def random_data(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the vault that a uniform policy recorded in an environment of some name."""
    from offmarl import envs
    from offmarl.networks import PolicyConfig, make_policy
    from offmarl.programs import record_policy

    @cache
    def record(name: str) -> Path:
        env = envs.make(name)
        path = tmp_path_factory.mktemp("data") / f"{name.replace('/', '-')}.vlt" / "random"
        policy = make_policy(PolicyConfig("random"), env.spec)
        record_policy(env, policy, (), path, steps=2048, num_envs=16)
        return path

    return record


@pytest.fixture
def notices(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the notices of programs instead of the terminal."""
    lines: list[str] = []
    monkeypatch.setattr("offmarl.tracking.notice", lines.append)
    return lines
