"""Files that commands write besides their output, such as pages and figures."""

from collections.abc import Collection
from pathlib import Path

from offmarl.errors import OptionError
from offmarl.paths import kind_of, local, no_empty_directories
from offmarl.tracking import replace_file


def check_file(path: Path | None, option: str, example: str, kinds: Collection[str] = ()) -> None:
    """Check, before any work, that a file can be written; its directories need not exist."""
    if path is None:
        return
    full = local(path)
    if full.is_dir():
        where = path / example
        raise OptionError(
            f"{path} is a directory: give a file name with {option}, such as {where}."
        )
    if kinds:
        kind_of(path, kinds, option)
    partial = full.with_name(f".{full.name}.partial")
    try:
        with no_empty_directories(full.parent, always=True):
            full.parent.mkdir(parents=True, exist_ok=True)
            partial.touch()
            partial.unlink()
    except OSError as error:
        raise OptionError(
            f"{path} cannot be written ({error.strerror}: {error.filename}): give {option} another "
            "path."
        ) from None


def write_page(path: Path, text: str) -> None:
    """Write a page, and make its directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text)
