"""Equations of docstrings and pages as MathML, which browsers draw without a script.

An indented block with mathematical signs is an equation. It is written in plain text, so that it
can be read in the source: ``L = E[ ½ (Q_tot(s, a) - y)² ]``. Here, ``_`` and ``^`` begin scripts,
single letters are variables, longer words are names, and a line may begin with a label.

This module is an extension of Python-Markdown: `docs.make` gives its name to Zensical.
"""

import re
import textwrap
import unicodedata
from html import escape
from typing import Any
from xml.etree import ElementTree

from markdown import Extension, Markdown
from markdown.blockprocessors import BlockProcessor

_LETTER = "[A-Za-zÀ-ɏΑ-Ωα-ω∇]"
_MARKS = {"\u0304": "‾", "\u0303": "~", "\u0302": "^"}
_SUPERSCRIPTS = {"²": "2", "⁻¹": "−1", "ᵀ": "T"}
_SIGNS = {"-": "−", "~": "∼", "..": "…"}

_TOKEN = re.compile(
    rf"(?P<space> +)|(?P<number>\d+(?:\.\d+)?)|(?P<word>[A-Za-z]{{2,}})"
    rf"|(?P<letter>{_LETTER}[\u0300-\u036f]?)|(?P<sign>\.\.|.)"
)
_SCRIPT = re.compile(
    r"_(?:\{(?P<sub>[^}]*)\}"
    r"|(?P<low>[<-]?[A-Za-zα-ω0-9]+(?:,[a-z](?=\())?(?:[+-][A-Z0-9](?:\.\.)?)?))"
    r"|\^(?:\{(?P<sup>[^}]*)\}|(?P<high>\w))"
    r"|(?P<power>²|⁻¹|ᵀ)|(?P<prime>')|(?P<star>\*)"
)


def is_equation(block: str) -> bool:
    """Whether an indented block is an equation: it has mathematical signs, and no strings."""
    return re.search(r"[Α-Ωα-ω½²∇]", block) is not None and '"' not in block


def render(block: str) -> str:
    """Return the HTML of an equation: a line has a label or none, and parts that may wrap."""
    lines = textwrap.dedent(block).splitlines()
    labels = [re.match(r"[a-z]{4,} +(?=\S)", line) for line in lines]
    rows = []
    for line, label in zip(lines, labels, strict=True):
        start = label.end() if label else len(line) - len(line.lstrip())
        parts = re.split(r" {2,}", line[start:].rstrip())
        formulas = "".join(f"<math>{_formula(part)}</math>" for part in parts)
        kind = "continued" if start and not label else "line"
        name = label[0].strip() if label else ""
        rows.append(f'<span>{name}</span><span class="{kind}">{formulas}</span>')
    return f'<div class="equation">{"".join(rows)}</div>'


def _formula(text: str) -> str:
    """Return a part of a line as the inside of a ``<math>``."""
    atoms: list[tuple[str, str]] = []  # kind and MathML
    place = 0
    while place < len(text):
        token = _TOKEN.match(text, place)
        assert token is not None and token.lastgroup is not None
        place = token.end()
        kind, base = token.lastgroup, _base(token)
        scripts: dict[str, list[str]] = {"sub": [], "sup": []}
        while kind != "space" and (script := _SCRIPT.match(text, place)):
            if (script["star"] and kind != "letter") or (script["prime"] and kind == "word"):
                break
            where, content = _script(script)
            scripts[where].append(content)
            place = script.end()
        atoms.append((kind, _scripted(base, *("".join(scripts[one]) for one in ("sub", "sup")))))
    return _joined(atoms)


def _joined(atoms: list[tuple[str, str]]) -> str:
    """Return atoms in a row; a space of the text is kept beside a word and between variables."""
    parts = []
    for number, (kind, markup) in enumerate(atoms):
        if kind != "space":
            parts.append(markup)
            continue
        beside = {atoms[n][0] for n in (number - 1, number + 1) if 0 <= n < len(atoms)}
        if "word" in beside or not beside & {"sign"}:
            parts.append('<mspace width="0.28em"/>')
    return "".join(parts)


def _base(token: re.Match[str]) -> str:
    text, kind = token[0], token.lastgroup
    if kind == "number":
        return f"<mn>{text}</mn>"
    if kind == "word":
        return f"<mtext>{text}</mtext>"
    if kind == "letter":
        letter, mark = (unicodedata.normalize("NFD", text) + " ")[:2]
        name = "<mi>𝔼</mi>" if letter == "E" else f"<mi>{letter}</mi>"
        sign = _MARKS.get(mark)
        return f'<mover>{name}<mo stretchy="false">{sign}</mo></mover>' if sign else name
    return "" if kind == "space" else f'<mo stretchy="false">{escape(_SIGNS.get(text, text))}</mo>'


def _script(script: re.Match[str]) -> tuple[str, str]:
    """Return where a script stands, and its MathML."""
    if (low := script["sub"] or script["low"]) is not None:
        return "sub", _formula(low)
    if (high := script["sup"] or script["high"]) is not None:
        return "sup", _formula(high)
    if script["power"]:
        return "sup", f"<mn>{_SUPERSCRIPTS[script['power']]}</mn>"
    return "sup", "<mo>′</mo>" if script["prime"] else "<mo>*</mo>"


def _scripted(base: str, low: str, high: str) -> str:
    rows = "".join(f"<mrow>{script}</mrow>" for script in (low, high) if script)
    name = "m" + "sub" * bool(low) + "sup" * bool(high)
    return f"<{name}>{base}{rows}</{name}>" if rows else base


class _Blocks(BlockProcessor):
    def test(self, parent: ElementTree.Element, block: str) -> bool:  # noqa: ARG002
        return block.startswith("    ") and is_equation(block)

    def run(self, parent: ElementTree.Element, blocks: list[str]) -> None:
        place = ElementTree.SubElement(parent, "p")
        place.text = self.parser.md.htmlStash.store(render(blocks.pop(0)))


class Equations(Extension):
    """Renders indented blocks that are equations."""

    def extendMarkdown(self, md: Markdown) -> None:
        """Try this before an indented block becomes code."""
        md.parser.blockprocessors.register(_Blocks(md.parser), "equations", 85)


def makeExtension(**options: Any) -> Equations:
    """Return the extension, for Python-Markdown."""
    return Equations(**options)
