"""The façade: the names of ``import offmarl``, and the modules that it does not load."""

import ast
import re
import tomllib
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

import offmarl
from tests.children import python

ROOT = Path(__file__).parents[1]


def _extras() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {k: v for k, v in project["optional-dependencies"].items() if k not in ("dev", "docs")}


OTHER_NAMES = {"mlflow_skinny": "mlflow", "sqlalchemy": "mlflow", "alembic": "mlflow"}
"""Modules that use a requirement: mlflow-skinny is one, and its SQLite store needs the others."""


@pytest.mark.parametrize(
    "requirement", sorted({one for expected in _extras().values() for one in expected})
)
def test_every_extra_brings_what_the_library_uses(requirement):
    module = re.match(r"[\w-]+", requirement)[0].replace("-", "_")
    module = OTHER_NAMES.get(module, module)
    used = re.compile(rf"(import |from |[\"]){module}\b")
    assert any(used.search(path.read_text()) for path in (ROOT / "offmarl").rglob("*.py"))


TABLE = re.findall(r"^\| ([\w ]*) ?\| (`.+) \|$", offmarl.__doc__, re.M)


@pytest.mark.parametrize("name", dir(offmarl))
def test_every_name_has_a_docstring_and_a_place_in_the_table(name):
    if name.startswith("__"):
        return
    assert (getattr(offmarl, name).__doc__ or "").strip()
    assert any(f"`{name}`" in names for _, names in TABLE)


def test_the_table_names_the_areas_and_only_what_there_is():
    areas = [area.strip() for area, _ in TABLE if area.strip()]
    assert areas[:9] == [
        *("data", "replay", "environments", "networks", "losses", "training", "recording"),
        *("evaluation", "statistics"),
    ]
    for _, names in TABLE:
        for name in re.findall(r"`([\w.]+)`", names):
            value = offmarl
            for part in name.split("."):
                value = getattr(value, part)


def test_errors_are_below_their_module_and_their_base_beside_it():
    assert [name for name in dir(offmarl) if name.endswith("Error")] == ["OffmarlError"]
    assert issubclass(offmarl.errors.VaultError, offmarl.OffmarlError)


def test_other_names_are_not():
    with pytest.raises(AttributeError, match="no attribute 'load_polices'"):
        _ = offmarl.load_polices


def test_every_module_is_found_without_importing_it_first():
    code = "import offmarl; offmarl.statistics; offmarl.vault.convert.READERS"
    python("-c", code)


def test_importing_it_loads_nothing_heavy():
    code = "import sys, offmarl; sys.exit(bool({'jax', 'tensorstore', 'numpy'} & set(sys.modules)))"
    python("-c", code)


@pytest.mark.parametrize(
    "script", sorted(ROOT.glob("benchmarks/*.py")), ids=lambda script: script.stem
)
def test_benchmarks_import_names_that_exist(script):
    """Nothing else runs them, so a function that moves would break them unnoticed."""
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("offmarl"):
            module = import_module(node.module)
            for name in (alias.name for alias in node.names):
                assert hasattr(module, name) or find_spec(f"{node.module}.{name}"), name
