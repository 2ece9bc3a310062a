"""The size of the library, which may only fall.

    python .ci/ratchet.py [--lower]

Prints each figure beside the largest one that `ratchet.json` allows, and fails if one is above it.
A change that makes a figure smaller also lowers what is allowed, with ``--lower``. Walks are those
of `benchmarks/walks.py`; a walk's longest function is that of the most lines among its functions.
Lines are those of files as they are; statements do not depend on how they are written.
"""

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grimp
import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

ROOT = Path(__file__).parents[1]
ALLOWED = Path(__file__).with_suffix(".json")
LONG = 60
"""Lines of a function, with its docstring, that a screen holds."""

VAGUE = {"found", "given", "known", "one", "own", "wanted", "what", "whole"}
"""Names of variables that do not say what the variable holds."""

_Named = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def sizes() -> dict[str, int]:
    """Return files, lines, statements, long functions, and names: vague or undocumented ones."""
    files = sorted((ROOT / "offmarl").rglob("*.py"))
    texts = [file.read_text() for file in files]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    functions = [x for x in nodes if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)]
    lines = [(x.end_lineno or x.lineno) - x.lineno + 1 for x in functions]
    return {
        "files": len(files),
        "lines": sum(text.count("\n") for text in texts),
        "statements": sum(isinstance(node, ast.stmt) and not _is_text(node) for node in nodes),
        "functions above 60 lines": sum(count > LONG for count in lines),
        "public names without a docstring": sum(
            ast.get_docstring(name) is None for text in texts for name in public(ast.parse(text))
        ),
        "variables with a vague name": sum(_variable(node) in VAGUE for node in nodes),
    }


def _variable(node: ast.AST) -> str | None:
    """Return the name that a node gives a value, as a parameter or by an assignment."""
    if isinstance(node, ast.arg):
        return node.arg
    return node.id if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) else None


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def public(tree: ast.Module | ast.ClassDef) -> Iterator[_Named]:
    """Yield the classes, functions and methods whose names have no underscore, at any depth."""
    for node in tree.body:
        if isinstance(node, _Named) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from public(node)


def imports() -> dict[str, int]:
    """Return how many modules stand in circles of imports, and how many contracts ignore some.

    Imports inside functions count, and those for type checkers alone do not.
    """
    modules = grimp.build_graph("offmarl", exclude_type_checking_imports=True, cache_dir=None)
    names = sorted(modules.modules)
    edges = [
        (place, names.index(other))
        for place, name in enumerate(names)
        for other in modules.find_modules_directly_imported_by(name)
    ]
    shape = len(names), len(names)
    graph = coo_array((np.ones(len(edges)), tuple(np.array(edges).T)), shape)
    _, circle_of = connected_components(graph, connection="strong")
    circles = np.bincount(circle_of)
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    ignored = [name for rule in contracts["contracts"] for name in rule.get("ignore_imports", ())]
    return {
        "modules in circles": int(circles[circles > 1].sum()),
        "ignored imports": len(ignored),
    }


def walks() -> dict[str, int]:
    """Return files, functions, hops and the longest function of each walk."""
    command = [sys.executable, str(ROOT / "benchmarks" / "walks.py"), "--json"]
    by_walk = json.loads(subprocess.check_output(command, text=True, stderr=subprocess.DEVNULL))
    kinds = ("files", "functions", "hops", "longest")
    return {f"{name}: {kind}": walk[kind] for name, walk in by_walk.items() for kind in kinds}


def main(lower: bool) -> int:
    """Compare all figures with those allowed; return the exit code."""
    figures = sizes() | imports() | walks()
    allowed: dict[str, Any] = json.loads(ALLOWED.read_text()) if ALLOWED.exists() else {}
    above = []
    for name, value in figures.items():
        most = allowed.get(name, value)
        # Threads and slow machines do not walk in quite the same way each time.
        too_many = value > (1.02 * most if ": " in name else most)
        print(f"{name:40} {value:7,} of {most:,}{'  TOO MANY' if too_many else ''}")
        above += [name] if too_many else []
    if lower:
        figures = {name: min(value, allowed.get(name, value)) for name, value in figures.items()}
        ALLOWED.write_text(json.dumps(figures, indent=1) + "\n")
    for name in above:
        print(f"{name}: {figures[name]:,}, and {ALLOWED.name} allows {allowed[name]:,}")
    return bool(above)


if __name__ == "__main__":
    sys.exit(main("--lower" in sys.argv[1:]))
