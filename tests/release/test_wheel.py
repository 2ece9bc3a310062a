"""The contents of the wheel, and its use without a checkout."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.children import python

pytest.importorskip("build")
pytest.importorskip("hatchling")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT]
    subprocess.run(command, check=True, capture_output=True)
    (path,) = out.glob("offmarl-*-py3-none-any.whl")
    return path


def sources(directory: str, pattern: str) -> set[str]:
    paths = (ROOT / directory).rglob(pattern)
    return {str(path.relative_to(ROOT)) for path in paths}


def test_wheel_holds_the_sources_and_nothing_else(wheel):
    programs = {
        f"offmarl/{name}" for name in sources("recorders", "*.py") | sources("baselines", "*.py")
    }
    cards = {f"offmarl/{name}" for name in sources("datasets", "*.*")}
    expected = (
        sources("offmarl", "*.py")
        | sources("offmarl", "*.toml")
        | sources("offmarl/report/templates", "*")
        | sources("offmarl/hub/templates", "*")
        | {"offmarl/py.typed"}
        | programs
        | cards
    )
    names = set(zipfile.ZipFile(wheel).namelist())
    files = {name for name in names if ".dist-info/" not in name}
    assert files == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_brings_its_programs_along(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "from offmarl.programs import registry; print(*registry.find('baseline').values())"
    output = python("-P", "-c", code, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)})
    expected = {path.name for path in (ROOT / "baselines").glob("[!_]*.py")}
    assert set(output.split()) == {str(tmp_path / "offmarl/baselines" / e) for e in expected}


@pytest.mark.nightly
def test_the_source_distribution_makes_the_same_wheel_and_runs_the_demo(wheel, tmp_path):
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, ROOT]
    subprocess.run(command, check=True, capture_output=True)  # the wheel from the sdist
    (second,) = tmp_path.glob("offmarl-*.whl")
    assert set(zipfile.ZipFile(second).namelist()) == set(zipfile.ZipFile(wheel).namelist())
    place = tmp_path / "installed"
    zipfile.ZipFile(second).extractall(place)
    env = os.environ | {"PYTHONPATH": str(place), "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    demo = ["-P", "-m", "offmarl", "demo", "--seeds", "1", "--json"]
    output = python(*demo, cwd=tmp_path, env=env)
    assert '"trained"' in output and (tmp_path / "demo/demo.png").exists()
