"""Tables for notebooks, which show what `_repr_html_` of an object returns, and templates."""

from collections.abc import Iterable
from functools import cache
from html import escape
from typing import Any


@cache
def templates(package: str, **options: Any) -> Any:
    """Return the templates of a package; a name that they use and do not get is an error."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # few commands need it

    options |= {"undefined": StrictUndefined, "trim_blocks": True, "lstrip_blocks": True}
    return Environment(loader=PackageLoader(package), **options)


def html_table(columns: Iterable[object], rows: Iterable[Iterable[object]], title: str = "") -> str:
    """Return a table as HTML; all texts in it are escaped."""

    def line(cells: Iterable[object], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(str(x))}</{tag}>' for x in cells)}</tr>"

    head, body = line(columns, "th"), "".join(line(row, "td") for row in rows)
    return f"<table><caption>{escape(title)}</caption>{head}{body}</table>"
