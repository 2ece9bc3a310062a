"""Packages whose names are imported on first use, so that importing the package costs nothing."""

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def lazy_getattr(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a package's ``__getattr__``, which imports public names and submodules on first use.

    Parameters
    ----------
    package
        The package's name.
    homes
        The public names and where each one lives: "module", or "module:attribute".
    """

    def load(name: str) -> Any:
        if name in homes:
            module, _, attribute = homes[name].partition(":")
        elif not name.startswith("_") and find_spec(f"{package}.{name}"):
            module, attribute = f"{package}.{name}", ""
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home = import_module(module)
        return getattr(home, attribute) if attribute else home

    return load
