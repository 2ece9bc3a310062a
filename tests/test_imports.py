import hashlib
import sys
from pathlib import Path

import pytest

from offmarl._imports import code_digest, import_file, import_optional

INIT = """
from . import light, heavy

__version__ = "3"
LIGHT = light.NAME
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    for name, text in {
        "pack/__init__.py": "from .inner import LIGHT",
        "pack/inner/__init__.py": INIT,
        "pack/inner/light.py": "class NAME: pass",
        "pack/inner/sibling.py": "from pack.inner import light",
        "pack/inner/heavy.py": "",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "pack"
    for name in [name for name in sys.modules if name.split(".")[0] == "pack"]:
        del sys.modules[name]


@pytest.mark.parametrize("module", ["light", "sibling"])
def test_a_module_comes_without_what_the_packages_around_it_import(package, module):
    import_optional(f"pack.inner.{module}", "x", parents_on_use=True)
    assert "pack.inner.light" in sys.modules
    assert "pack.inner.heavy" not in sys.modules


def test_the_packages_around_it_are_whole_when_they_are_used(package):
    light = import_optional("pack.inner.light", "x", parents_on_use=True)
    import pack

    assert pack.LIGHT is light.NAME
    assert "pack.inner.heavy" in sys.modules
    assert pack.inner.__version__ == "3"
    assert pack.inner.LIGHT is light.NAME
    with pytest.raises(AttributeError, match="unknown"):
        pack.inner.unknown  # noqa: B018


def test_the_packages_around_it_list_all_their_names(package):
    import_optional("pack.inner.light", "x", parents_on_use=True)
    assert {"LIGHT", "light", "heavy", "__version__"} <= set(dir(sys.modules["pack.inner"]))


def test_looking_through_all_modules_runs_no_package(package):
    import_optional("pack.inner.light", "x", parents_on_use=True)
    for module in list(sys.modules.values()):
        getattr(module, "__warningregistry__", None)
        getattr(module, "__file__", None)
    assert "pack.inner.heavy" not in sys.modules


def test_a_package_that_fails_can_be_used_again(package):
    (package / "inner" / "heavy.py").write_text("raise RuntimeError('no graphics')")
    light = import_optional("pack.inner.light", "x", parents_on_use=True)
    inner = sys.modules["pack.inner"]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no graphics"):
            inner.LIGHT  # noqa: B018
    (package / "inner" / "heavy.py").write_text("")
    assert inner.LIGHT is light.NAME


def test_packages_that_are_imported_already_stay(package):
    import pack

    import_optional("pack.inner.light", "x", parents_on_use=True)
    assert sys.modules["pack"] is pack
    assert pack.inner.__version__ == "3"


def test_a_module_of_a_file_has_a_spec_and_a_loader(tmp_path):
    path = tmp_path / "mine.py"
    for text in ("1", "2"):  # of one size and second
        path.write_text(f"VALUE = {text}")
        module = import_file(path)
        assert int(text) == module.VALUE and module.__spec__.origin == str(path)
        assert (module.__loader__, module.__package__) == (module.__spec__.loader, "")


USER = """
import near, far.deep
from . import sibling
from .sub import leaf
from .. import above
from pack import inside

def later():
    from .... import beyond
"""


def test_a_digest_covers_what_a_file_imports_near_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    imported = ["near", "far/deep", "sibling", "sub/__init__", "sub/leaf", "__init__", "inside"]
    covered = [Path("above.py"), *(Path(f"pack/{name}.py") for name in imported)]
    alone, user = Path("pack/alone.py"), Path("pack/mine.py")
    for path in (*covered, alone, user):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("def def" if path == covered[0] else "")  # its import says what is wrong
    assert code_digest(alone) == hashlib.sha256(b"").hexdigest()
    user.write_text(USER)
    digests = [code_digest(user)]
    for path in (*covered, user):
        path.write_text(path.read_text() + "\n")
        digests.append(code_digest(user))
    assert len(set(digests)) == len(digests)
    alone.write_text("\n")
    assert code_digest(user) == digests[-1]
