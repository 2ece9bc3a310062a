"""How-to pages and notebooks, both made from the files of ``examples/``.

An example is a Python file in jupytext's percent format: cells of code, and cells of Markdown in
comments. It is the one source of a runnable file, a page of the documentation and a notebook.
"""

from pathlib import Path
from typing import Any

import jupytext


def howto(folder: Path) -> dict[str, str]:
    """Return a page for each example, by path; the first is the index."""
    files = _files(folder)
    lines = [f"- [{title(path)}]({path.stem}.md)" for path in files]
    index = (
        "# How-to pages\n\n"
        "Each page is a file of `examples/` that runs as it is, and a notebook.\n\n"
    )
    found = {"index.md": index + "\n".join(lines) + "\n"}
    found |= {f"{path.stem}.md": page(path) for path in files}
    return {f"howto/{path}": text for path, text in found.items()}


def downloads(folder: Path) -> dict[str, str]:
    """Return each example as it is, and as a notebook without output, by file name."""
    files = _files(folder)
    return {path.name: path.read_text() for path in files} | {
        f"{path.stem}.ipynb": jupytext.writes(read(path), "ipynb") for path in files
    }


def read(path: Path) -> Any:
    """Return an example as a notebook."""
    notebook = jupytext.read(path)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # jupytext draws them at random
    return notebook


def page(path: Path) -> str:
    """Return an example as Markdown: its cells, and links to the file and the notebook."""
    cells = []
    for cell in read(path).cells:
        source = cell.source.strip()
        cells.append(source if cell.cell_type == "markdown" else f"```python\n{source}\n```")
    heading, _, rest = "\n\n".join(cells).partition("\n")
    source = (
        f"Download this page as the runnable file [{path.name}]({path.name}), or as a "
        f"[notebook]({path.stem}.ipynb)."
    )
    return f"{heading}\n\n{source}\n{rest}\n"


def title(path: Path) -> str:
    """Return the heading of an example."""
    first: str = read(path).cells[0].source
    return first.partition("\n")[0].removeprefix("# ")


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("[!_]*.py"))
