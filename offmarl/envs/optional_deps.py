"""Packages that offmarl does without, until an environment of theirs is asked for."""

import importlib
import io
import sys
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
        with _untouched_streams(), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # packages warn of one another
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise MissingExtraError(
            f"{package} is not installed: run `pip install 'offmarl[{extra}]'` to have it."
        ) from error


@contextmanager
def _untouched_streams() -> Iterator[None]:
    """Keep what a package prints from the user, and the user's streams from the package.

    JaxMARL prints when it is imported, and sets ``sys.stdout`` and ``sys.stderr`` to Python's own,
    which a notebook, or a test that captures them, has replaced.
    """
    before = sys.stdout, sys.stderr, sys.__stdout__
    sys.stdout = sys.__stdout__ = io.StringIO()  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr, sys.__stdout__ = before  # type: ignore[misc]


@contextmanager
def quiet(*messages: str) -> Iterator[None]:
    """Keep a package's prints, and its warnings that begin with these messages, from the user."""
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        for message in messages:
            warnings.filterwarnings("ignore", message)
        yield
