"""Optional packages, imported when one of their environments is created."""

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
            warnings.simplefilter("ignore", DeprecationWarning)  # packages warn about each other
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise MissingExtraError(
            f"{package} is not installed: run `pip install 'offmarl[{extra}]'`."
        ) from error


@contextmanager
def _untouched_streams() -> Iterator[None]:
    """Hide what a package prints, and restore the streams that it replaces.

    JaxMARL prints when it is imported, and resets ``sys.stdout`` and ``sys.stderr`` to Python's
    own, although a notebook or a test may have replaced them.
    """
    before = sys.stdout, sys.stderr, sys.__stdout__
    sys.stdout = sys.__stdout__ = io.StringIO()  # type: ignore[misc, assignment]
    try:
        yield
    finally:
        sys.stdout, sys.stderr, sys.__stdout__ = before  # type: ignore[misc]


@contextmanager
def quiet(*messages: str) -> Iterator[None]:
    """Hide a package's output and its warnings that begin with these messages."""
    with redirect_stdout(io.StringIO()), warnings.catch_warnings():
        for message in messages:
            warnings.filterwarnings("ignore", message)
        yield
