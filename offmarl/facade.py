"""Packages that load what they name when it is first used, so that importing them costs nothing."""

from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def lazily(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package: it finds what is named, and any of its modules.

    Parameters
    ----------
    package
        Its name.
    homes
        Where each of its names is found: "module", or "module:attribute".
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
