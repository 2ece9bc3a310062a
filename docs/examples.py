"""How-to pages and notebooks, both made from the files of ``examples/``.

An example is a Python file in jupytext's percent format: cells of code, and cells of Markdown in
comments. It is the one source of a runnable file, a page of the documentation and a notebook.

Notebooks are kept with their outputs in ``examples/notebooks``. ``python -m docs.examples`` runs
those anew whose example has changed.
"""

import argparse
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import jupytext

NOTEBOOKS = "notebooks"
"""Folder of the notebooks, in that of the examples."""

NOT_RUN = {"published_data": "it downloads 1.4 GB"}
"""Examples whose notebooks have no outputs, and why."""

INSTALL = """\
# Colab has no offmarl: install it first.
import sys

if "google.colab" in sys.modules:
    %pip install -q "{}"
"""


def howto(folder: Path, repository: str | None = None) -> dict[str, str]:
    """Return a page for each example, by path; the first is the index.

    Where the repository's address is that of one on GitHub, pages open their notebooks in Colab.
    """
    files = _files(folder)
    lines = [f"- [{title(path)}]({path.stem}.md)" for path in files]
    index = (
        "# How-to pages\n\n"
        "Each page is a file of `examples/` that runs as it is, and a notebook with outputs.\n\n"
    )
    documents = {"index.md": index + "\n".join(lines) + "\n"}
    documents |= {f"{path.stem}.md": page(path, repository) for path in files}
    return {f"howto/{path}": text for path, text in documents.items()}


def downloads(folder: Path) -> dict[str, str]:
    """Return each example as it is, and as a notebook, by file name."""
    files = _files(folder)
    return {path.name: path.read_text() for path in files} | {
        f"{path.stem}.ipynb": kept(path).read_text() for path in files
    }


def kept(path: Path) -> Path:
    """Return where the notebook of an example is kept."""
    return path.parent / NOTEBOOKS / f"{path.stem}.ipynb"


def notebook(path: Path) -> Any:
    """Return an example as a notebook that has a kernel and installs offmarl, without outputs."""
    made = read(path)
    extra = re.search(r"offmarl\[[\w,]+\]", path.read_text())
    source = INSTALL.format(extra[0] if extra else "offmarl").strip()
    cell = {"cell_type": "code", "id": "install", "metadata": {}, "source": source}
    first = type(made.cells[0])
    made.cells.insert(1, first(cell | {"execution_count": None, "outputs": []}))
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    made.metadata = first({"kernelspec": kernel, "language_info": {"name": "python"}})
    return made


def sources(made: Any) -> list[tuple[str, str]]:
    """Return the kind and the text of each cell."""
    return [(cell.cell_type, cell.source) for cell in made.cells]


def is_current(path: Path) -> bool:
    """Whether the notebook that is kept has the cells of the example."""
    file = kept(path)
    return file.exists() and sources(jupytext.read(file)) == sources(notebook(path))


def run(path: Path) -> None:
    """Write the notebook of an example, with its outputs unless it cannot be run."""
    made = notebook(path)
    if path.stem not in NOT_RUN:
        from nbclient import NotebookClient

        with tempfile.TemporaryDirectory() as place:
            resources = {"metadata": {"path": place}}
            client = NotebookClient(made, timeout=900, kernel_name="python3", resources=resources)
            client.execute()
        _tidy(made, place)
        made.metadata = notebook(path).metadata
    kept(path).parent.mkdir(exist_ok=True)
    kept(path).write_text(jupytext.writes(made, "ipynb") + "\n")


def _tidy(made: Any, place: str) -> None:
    """Keep what cells print: no bars of progress, times, or paths of this machine."""
    for cell in made.cells:
        cell.metadata.pop("execution", None)
        printed = [stream for stream in cell.get("outputs", []) if stream.get("name") == "stdout"]
        for output in printed[:1]:
            text = "".join(stream.text for stream in printed)
            output.text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", text).replace(f"{place}/", "")
        if "outputs" in cell:
            cell.outputs = printed[:1]


def read(path: Path) -> Any:
    """Return an example as a notebook."""
    notebook = jupytext.read(path)
    for number, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{number}"  # jupytext draws them at random
    return notebook


def page(path: Path, repository: str | None = None) -> str:
    """Return an example as Markdown: its cells, and links to the file and the notebook."""
    cells = []
    for cell in read(path).cells:
        source = cell.source.strip()
        cells.append(source if cell.cell_type == "markdown" else f"```python\n{source}\n```")
    heading, _, rest = "\n\n".join(cells).partition("\n")
    why = f" without outputs, since {NOT_RUN[path.stem]}" if path.stem in NOT_RUN else ""
    source = (
        f"Download this page as the runnable file [{path.name}]({path.name}), or as a "
        f"[notebook]({path.stem}.ipynb){why}."
    )
    if repository and (name := re.fullmatch(r"https://github\.com/([^/]+/[^/]+)", repository)):
        place = f"blob/main/examples/{NOTEBOOKS}/{path.stem}.ipynb"
        colab = f"https://colab.research.google.com/github/{name[1]}/{place}"
        source += f" [Open in Colab]({colab}){{ .md-button }}"
    return f"{heading}\n\n{source}\n{rest}\n"


def title(path: Path) -> str:
    """Return the heading of an example."""
    first: str = read(path).cells[0].source
    return first.partition("\n")[0].removeprefix("# ")


def _files(folder: Path) -> list[Path]:
    return sorted(folder.glob("[!_]*.py"))


def main() -> None:
    """Run the examples whose notebooks are not current."""
    parser = argparse.ArgumentParser(description="Run the notebooks of changed examples.")
    parser.add_argument("names", nargs="*", help="run these, changed or not")
    names = parser.parse_args().names
    root = Path(__file__).parents[1]
    os.environ |= {"PYTHONPATH": str(root), "NO_COLOR": "1", "COLUMNS": "96"}
    for path in _files(root / "examples"):
        if path.stem in names if names else not is_current(path):
            print(path.stem, flush=True)
            run(path)


if __name__ == "__main__":
    main()
