"""The parts of HTML pages.

A page is one file. Style and figures are inside, so it needs no network.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from html import escape
from typing import TYPE_CHECKING

from offmarl.report.figures import to_bytes
from offmarl.report.tables import Section
from offmarl.terminal import number

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
:root { color-scheme: light dark; --text: #1f2937; --soft: #4b5563; --faint: #6b7280;
  --line: #e5e7eb; --panel: #f3f4f6; --page: #ffffff; --mark: #b45309; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page);
  max-width: 72rem; margin: 2rem auto; padding: 0 1.5rem; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem 1.2rem .3rem 0; text-align: left; border-bottom: 1px solid var(--line);
  vertical-align: top; }
thead th { color: var(--faint); font-weight: 600; white-space: nowrap; }
th[scope=row] { font-weight: 500; position: sticky; left: 0; background: var(--page); }
.number { text-align: right; }
img { width: 100%; height: auto; border-radius: 4px; }
p, li, figcaption { color: var(--soft); } p, li { max-width: 48rem; }
figure { margin: 1rem 0; } figcaption { font-size: .85rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr));
  gap: 1rem 1.5rem; } .charts figure { margin: 0; }
.films { display: flex; flex-wrap: wrap; gap: 1rem; } .films figure { width: 20rem; margin: 0; }
.notes b { color: var(--mark); }
code { font-size: .9em; background: var(--panel); padding: .1em .3em; border-radius: 3px; }
pre { background: var(--panel); padding: .8rem 1rem; border-radius: 4px; overflow-x: auto;
  font-size: .8rem; line-height: 1.4; }
summary { cursor: pointer; color: var(--soft); }
@media (prefers-color-scheme: dark) {
  :root { --text: #e5e7eb; --soft: #b6bcc6; --faint: #9ca3af; --line: #374151; --panel: #1f2937;
    --page: #1a1a1a; --mark: #fbbf24; }
  img.chart { filter: invert(.9) hue-rotate(180deg); }
}
@media (max-width: 40rem) { body { margin: 1rem auto; padding: 0 1rem; } }
""".strip()


def document(title: str, body: Iterable[str]) -> str:
    """Return a page of parts that the other functions of this module return."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
            f"<main><h1>{escape(title)}</h1>",
            *body,
            "</main></body></html>\n",
        ]
    )


def heading(text: str) -> str:
    """Return the title of a section."""
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str) -> str:
    """Return a paragraph of plain text."""
    return f"<p>{escape(text)}</p>"


def notes(items: Iterable[tuple[str, str]]) -> str:
    """Return a list of notes, each with the name that it applies to, or an empty name."""
    lines = "".join(f"<li>{_bold(name)}{escape(text)}</li>" for name, text in items)
    return f'<ul class="notes">{lines}</ul>'


def _bold(name: str) -> str:
    return f"<b>{escape(name)}</b> " if name else ""


def folded(summary: str, text: str) -> str:
    """Return preformatted text that a summary line unfolds."""
    return f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>"


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table of plain text; the first cell of a row names it."""
    names, lines = list(columns), [list(row) for row in rows]
    kinds = [_kind([line[place] for line in lines]) for place in range(len(names))]
    heads = zip(names, kinds, strict=True)
    head = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in heads)
    body = "".join(_row(line, kinds) for line in lines)
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        "</div>"
    )


def _kind(cells: Iterable[str]) -> str:
    """Return the class attribute of a column: numbers are aligned right."""
    numbers = all(re.fullmatch(r"(about )?-?[\d.,]+(e[-+]\d+)?%?|", cell) for cell in cells)
    return ' class="number"' if numbers else ""


def _row(cells: Iterable[str], kinds: Iterable[str]) -> str:
    first, *others = zip(map(escape, cells), kinds, strict=True)
    rest = "".join(f"<td{kind}>{cell}</td>" for cell, kind in others)
    return f'<tr><th scope="row">{first[0]}</th>{rest}</tr>'


def section(content: Section, titled: bool = True) -> str:
    """Return a table under its title."""
    lines = table(content.columns, [map(number, row) for row in content.rows])
    return f"{heading(content.title)}\n{lines}" if titled else lines


def image(figure: Figure, caption: str, alt: str = "") -> str:
    """Return a figure as inline SVG with its caption.

    ``alt`` describes the figure for screen readers; by default it is the caption.
    """
    return _figure(to_bytes(figure, "svg"), "svg+xml", caption, alt or caption, "chart")


def charts(images: Iterable[str]) -> str:
    """Return images side by side."""
    return f'<div class="charts">{"".join(images)}</div>'


def films(animations: Iterable[tuple[bytes, str]]) -> str:
    """Return GIFs with their captions, side by side."""
    return (
        '<div class="films">'
        + "".join(_figure(gif, "gif", caption, caption, "film") for gif, caption in animations)
        + "</div>"
    )


def _figure(image: bytes, kind: str, caption: str, alt: str, style: str) -> str:
    source = f"data:image/{kind};base64,{base64.b64encode(image).decode()}"
    return (
        f'<figure><img class="{style}" src="{source}" alt="{escape(alt)}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )
