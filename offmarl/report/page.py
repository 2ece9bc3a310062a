"""Self-contained HTML pages: one file, no network, figures and style inside."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from offmarl.report.figures import render

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1f2937; max-width: 72rem; margin: 2rem auto;
  padding: 0 1.5rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem 1.2rem .3rem 0; text-align: left; border-bottom: 1px solid #e5e7eb; }
th { color: #6b7280; font-weight: 600; }
img { width: 100%; height: auto; }
p, figcaption { color: #4b5563; } figure { margin: 1rem 0; }
.films { display: flex; flex-wrap: wrap; gap: 1rem; } .films figure { width: 20rem; margin: 0; }
code { font-size: .9em; background: #f3f4f6; padding: .1em .3em; border-radius: 3px; }
""".strip()


def document(title: str, body: Iterable[str]) -> str:
    """Return a whole page of the parts given, which the other functions of this module make."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
            f"<h1>{escape(title)}</h1>",
            *body,
            "</body></html>\n",
        ]
    )


def heading(text: str) -> str:
    """Return the title of a section."""
    return f"<h2>{escape(text)}</h2>"


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table of plain text."""

    def line(tag: str, cells: Iterable[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line("td", row) for row in rows)
    return f"<table><thead>{line('th', columns)}</thead><tbody>{body}</tbody></table>"


def image(figure: Figure, caption: str) -> str:
    """Return a figure with its caption, drawn as SVG inside the page."""
    return _figure(render(figure, "svg"), "svg+xml", caption)


def films(animations: Iterable[tuple[bytes, str]]) -> str:
    """Return GIFs with their captions, side by side where there is room."""
    return (
        '<div class="films">'
        + "".join(_figure(gif, "gif", caption) for gif, caption in animations)
        + "</div>"
    )


def _figure(image: bytes, kind: str, caption: str) -> str:
    source = f"data:image/{kind};base64,{base64.b64encode(image).decode()}"
    text = escape(caption)
    return f'<figure><img src="{source}" alt="{text}"><figcaption>{text}</figcaption></figure>'
