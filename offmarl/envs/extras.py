"""Packages that offmarl does without, until an environment of theirs is asked for."""

import importlib
import io
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from types import ModuleType

from offmarl.errors import MissingExtraError


def load(module: str, extra: str) -> ModuleType:
    """Import a module of an optional package.

    Raises
    ------
    MissingExtraError
        The package is not installed.
    """
    package = module.partition(".")[0]
    try:
        with redirect_stdout(io.StringIO()):  # JaxMARL prints what it finds
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != package:
            raise
        raise MissingExtraError(
            f"{package} is not installed: run `pip install 'offmarl[{extra}]'` to have it."
        ) from error


@contextmanager
def quiet(*messages: str) -> Iterator[None]:
    """Keep a package's prints, and its warnings that begin with these messages, from the user."""
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        for message in messages:
            warnings.filterwarnings("ignore", message)
        yield
