"""Environments of installed packages: the entry points of the group ``offmarl.envs``.

Reading the entry points imports nothing. A plug-in is imported when one of its environments is
created, so a broken one does not affect the others.
"""

import sys
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from offmarl._imports import summarize
from offmarl.envs.catalogue import EnvInfo, Family
from offmarl.errors import PluginError

GROUP = "offmarl.envs"


def plugins() -> tuple[Family, ...]:
    """Return the environments of installed packages."""
    return _plugins(tuple(sys.path))


@lru_cache(maxsize=8)
def _plugins(path: tuple[str, ...]) -> tuple[Family, ...]:
    """Read the entry points once for each import path."""
    del path
    found = []
    for point in entry_points(group=GROUP):
        about = EnvInfo(f"from the package {package(point)}")
        found.append(Family(point.name, point, about, None, package(point)))
    return tuple(found)


def package(point: EntryPoint) -> str:
    """Return the name and version of the package that an entry point belongs to."""
    return f"{point.dist.name} {point.dist.version}" if point.dist else "an unnamed package"


def load_plugin(name: str, point: EntryPoint) -> Any:
    """Import a plug-in's factory.

    Raises
    ------
    PluginError
        The import fails; the message names the package.
    """
    try:
        return point.load()
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"the package {package(point)} provides the environment {name!r} as {point.value}, "
            f"which cannot be imported ({summarize(error)}): update or uninstall the package."
        ) from error
