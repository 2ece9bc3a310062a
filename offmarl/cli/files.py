"""Files that commands write besides their output, such as pages and figures."""

import os
from pathlib import Path

from offmarl.errors import OptionError
from offmarl.paths import local
from offmarl.tracking import replace_file


def check_file(path: Path | None, option: str, example: str) -> None:
    """Check, before any work, that a file can be written; its directories need not exist.

    Parameters
    ----------
    path
        The file; None if there is none to write.
    option, example
        The option that names it, and the name of such a file, for the error.

    Raises
    ------
    OptionError
        The path is a directory, or cannot be written.
    """
    if path is None:
        return
    full = local(path)
    if full.is_dir():
        where = path / example
        raise OptionError(
            f"{path} is a directory: give a file name with {option}, such as {where}."
        )
    above = next(one for one in full.parents if one.exists())
    if above.is_dir() and os.access(above, os.W_OK | os.X_OK):
        return
    why = "is not writable" if above.is_dir() else "is a file"
    raise OptionError(f"{path} cannot be written: {above} {why}. Give {option} another path.")


def write_page(path: Path, text: str) -> None:
    """Write a page, and make its directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text)
