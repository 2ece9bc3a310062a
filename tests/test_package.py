"""The facade: what ``import offmarl`` offers, and what it does not load."""

import subprocess
import sys

import pytest

import offmarl


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
