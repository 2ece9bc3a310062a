"""Environments as they were when older datasets were recorded."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

from offmarl.envs.catalogue import Option
from offmarl.envs.registry import make
from offmarl.errors import UnknownNameError
from offmarl.types import EnvSpec

if TYPE_CHECKING:  # it imports JAX
    from offmarl.envs.base import Environment

_EARLIER: tuple[dict[str, Option], ...] = ({"flat": True}, {"time": False})
"""Options that give the observations of recordings made before there were these options."""


def make_for(spec: EnvSpec, name: str | None = None) -> Environment:
    """Create the environment of a dataset or run, in the variant that was recorded then.

    Parameters
    ----------
    spec
        The spec of the dataset or run.
    name
        Another name for the environment; by default ``spec.name``. Errors are those of `make`.

    Returns
    -------
    The environment as `make` returns it; if its sizes differ from those of the spec, and an earlier
    version of it had those sizes, that version.
    """
    name = spec.name if name is None else name
    env = make(name)
    if spec.difference(env.spec, extras=False):
        for options in _EARLIER:
            with suppress(UnknownNameError):  # it has no such option
                earlier = make(name, **options)
                if not spec.difference(earlier.spec, extras=False):
                    return earlier
    return env
