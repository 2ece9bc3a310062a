"""Tables for notebooks, which show what `_repr_html_` of an object returns."""

from collections.abc import Iterable
from html import escape


def html_table(columns: Iterable[object], rows: Iterable[Iterable[object]], title: str = "") -> str:
    """Return a table as HTML; all texts in it are escaped."""

    def line(cells: Iterable[object], tag: str) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(str(x))}</{tag}>' for x in cells)}</tr>"

    head, body = line(columns, "th"), "".join(line(row, "td") for row in rows)
    return f"<table><caption>{escape(title)}</caption>{head}{body}</table>"
