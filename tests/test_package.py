"""The facade: what ``import offmarl`` offers, and what it does not load."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import offmarl

ROOT = Path(__file__).parents[1]


def _extras() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {k: v for k, v in project["optional-dependencies"].items() if k not in ("dev", "docs")}


@pytest.mark.parametrize(
    "requirement", sorted({one for wanted in _extras().values() for one in wanted})
)
def test_every_extra_brings_what_the_library_uses(requirement):
    module = re.match(r"[\w-]+", requirement)[0].replace("-", "_")
    used = re.compile(rf"(import |from |[\"]){module}\b")
    assert any(used.search(path.read_text()) for path in (ROOT / "offmarl").rglob("*.py"))


@pytest.mark.parametrize("name", offmarl.__all__)
def test_every_name_is_there(name):
    assert getattr(offmarl, name) is not None
    assert name in dir(offmarl)


def test_every_error_is_a_name_of_the_package():
    from offmarl import errors

    kinds = {name for name in vars(errors) if name.endswith("Error")}
    assert kinds <= set(offmarl.__all__)


def test_other_names_are_not():
    with pytest.raises(AttributeError, match="no attribute 'load_polices'"):
        _ = offmarl.load_polices


def test_every_module_is_found_without_importing_it_first():
    code = "import offmarl; offmarl.statistics; offmarl.vault.convert.READERS"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_importing_it_loads_nothing_heavy():
    code = "import sys, offmarl; sys.exit(bool({'jax', 'tensorstore', 'numpy'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)
