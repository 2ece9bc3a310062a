"""What the wheel holds, and that it works where there is no checkout."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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
    expected = sources("offmarl", "*.py") | {"offmarl/py.typed"} | programs | cards
    names = set(zipfile.ZipFile(wheel).namelist())
    found = {name for name in names if ".dist-info/" not in name}
    assert found == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_wheel_brings_its_programs_along(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "from offmarl.programs import registry; print(*registry.find('baseline').values())"
    found = subprocess.run(
        [sys.executable, "-P", "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        check=True,
        capture_output=True,
        text=True,
    )
    expected = {path.name for path in (ROOT / "baselines").glob("[!_]*.py")}
    assert set(found.stdout.split()) == {str(tmp_path / "offmarl/baselines" / e) for e in expected}
