"""Mutation testing: change one expression or statement at a time, and run the tests of that file.

    python benchmarks/mutations.py --seed 0 --mutations 60 [--jobs N] [--results FILE]
    python benchmarks/mutations.py --seed 0 --mutations 100 --fix benchmarks/mutants.json
    python benchmarks/mutations.py --fixed benchmarks/mutants.json

The nodes to change are drawn uniformly, without replacement, from all nodes of the library, the
baselines and the recorders to which one of the rules below applies. Then one of the changes of that
node is drawn. A smaller ``--mutations`` takes the first nodes of the same order. The rules exclude
type annotations, decorators, blocks under ``TYPE_CHECKING``, strings (including docstrings and the
texts of errors) and the arguments of raised errors. A mutant is killed if the tests that are not
slow fail, or take more than four times as long as without it: first the tests that name the module,
and then those of its directory. What survives these meets the slow tests that name the module, for
at most half an hour, and is killed if they fail with it and pass without it. The tests run in
copies of the tracked files, so the checkout is not changed. Mutants that are in the results file
are not run again.

``--fix`` writes the mutants to a file, by function, node and change, and runs nothing. ``--fixed``
runs those of a file, wherever their functions stand now, and names those that are gone.
"""

import argparse
import ast
import copy
import difflib
import hashlib
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]

SOURCES = ("offmarl", "baselines", "recorders")
"""Directories whose files are changed."""

_FAST, _SLOW = "not slow and not nightly", "slow and not nightly"
"""Tests that run for every mutant, and for what survives them."""
_QUIETLY = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "--no-header", "--tb=line"]
_PATIENCE = 4.0
_LEAST_SECONDS = 120.0
_MOST_SECONDS = 1800.0

# ---------------------------------------------------------------------------------- rules

_OPERATORS: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.Div,),
    ast.Div: (ast.Mult,),
    ast.FloorDiv: (ast.Mult,),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.LShift: (ast.RShift,),
    ast.RShift: (ast.LShift,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
    ast.BitXor: (ast.BitAnd,),
    ast.And: (ast.Or,),
    ast.Or: (ast.And,),
}
_NAMES = {
    "min": "max",
    "minimum": "maximum",
    "argmin": "argmax",
    "any": "all",
    "logical_and": "logical_or",
    "floor": "ceil",
    "startswith": "endswith",
    "removeprefix": "removesuffix",
}
_NAMES |= {new: old for old, new in _NAMES.items()}

Change = tuple[str, ast.AST]
"""What a change does, and the node in place of the old one."""


def changes(node: ast.AST) -> list[Change]:
    """Return all changes that the rules allow for a node."""
    results = [change for rule in _RULES for change in rule(node)]
    before = ast.dump(node)
    return [change for change in results if ast.dump(change[1]) != before]


def _with(node: ast.AST, **fields: object) -> ast.AST:
    other = copy.deepcopy(node)
    for name, value in fields.items():
        setattr(other, name, value)
    return other


def _operators(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.Compare):
        for place, operator in enumerate(node.ops):
            for other in _OPERATORS[type(operator)]:
                ops = [*node.ops[:place], other(), *node.ops[place + 1 :]]
                yield f"{type(operator).__name__} to {other.__name__}", _with(node, ops=ops)
    elif isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign):
        for other in _OPERATORS.get(type(node.op), ()):
            yield f"{type(node.op).__name__} to {other.__name__}", _with(node, op=other())
    elif isinstance(node, ast.UnaryOp):
        yield f"drop {type(node.op).__name__}", node.operand
    if isinstance(node, ast.BoolOp):
        for place in range(len(node.values)):
            rest = [*node.values[:place], *node.values[place + 1 :]]
            operation = rest[0] if len(rest) == 1 else _with(node, values=rest)
            yield f"drop operand {place}", operation


def _constants(node: ast.AST) -> Iterator[Change]:
    if not isinstance(node, ast.Constant):
        return
    if isinstance(node.value, bool):
        yield f"{node.value} to {not node.value}", ast.Constant(not node.value)
    elif isinstance(node.value, int | float):
        yield "one more", ast.Constant(node.value + 1)
        yield "one less", ast.Constant(node.value - 1)


def _conditions(node: ast.AST) -> Iterator[Change]:
    if isinstance(node, ast.IfExp):
        yield "swap the branches", _with(node, body=node.orelse, orelse=node.body)
    elif isinstance(node, ast.expr) and getattr(node, "is_test", False):
        yield "negate the condition", ast.UnaryOp(ast.Not(), node)


def _calls(node: ast.AST) -> Iterator[Change]:
    if not isinstance(node, ast.Call):
        return
    name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    name = name or (node.func.id if isinstance(node.func, ast.Name) else "")
    if name in _NAMES:
        field = "attr" if isinstance(node.func, ast.Attribute) else "id"
        func = _with(node.func, **{field: _NAMES[name]})
        yield f"{name} to {_NAMES[name]}", _with(node, func=func)
    plain = [not isinstance(argument, ast.Starred) for argument in node.args]
    if plain[:2] == [True, True]:
        first, second, *rest = node.args
        yield "swap two arguments", _with(node, args=[second, first, *rest])
    if plain == [True] and not isinstance(node.args[0], ast.GeneratorExp):
        yield "drop the call", node.args[0]
    for place, keyword in enumerate(node.keywords):
        if keyword.arg:
            rest = [*node.keywords[:place], *node.keywords[place + 1 :]]
            yield f"drop {keyword.arg}", _with(node, keywords=rest)


def _statements(node: ast.AST) -> Iterator[Change]:
    removable = isinstance(node, ast.Expr | ast.AugAssign | ast.Raise | ast.Delete)
    if isinstance(node, ast.Assign):
        removable = any(isinstance(t, ast.Attribute | ast.Subscript) for t in node.targets)
    if removable:
        yield "remove the statement", ast.Pass()
    if isinstance(node, ast.Continue | ast.Break):
        yield "remove the statement", ast.Pass()
    if isinstance(node, ast.Return) and node.value is not None:
        yield "return None", ast.Return(ast.Constant(None))


_RULES: tuple[Callable[[ast.AST], Iterator[Change]], ...] = (
    _operators,
    _constants,
    _conditions,
    _calls,
    _statements,
)


# ---------------------------------------------------------------------------------- drawing


class Mutant(NamedTuple):
    """One change of one file."""

    file: str
    line: int
    function: str
    """Names of the classes and functions around it, divided by dots; empty at the module's top."""
    node: str
    """Source of what is changed."""
    occurrence: int
    """Its number among the equal ones of the function."""
    change: str
    source: str
    """The whole file with it."""
    diff: str

    @property
    def key(self) -> str:
        """Identifies the mutant; it depends on the file's content."""
        return hashlib.sha256(f"{self.file}\n{self.source}".encode()).hexdigest()[:16]


@cache
def mutable(file: str) -> list[tuple[str, ast.AST]]:
    """Return the nodes of a file that may be changed, in order."""
    return [(file, node) for node in _nodes(ast.parse((ROOT / file).read_text())) if changes(node)]


def _nodes(node: ast.AST, function: str = "") -> Iterator[ast.AST]:
    """Yield a node and its descendants, without nodes that are never changed."""
    if isinstance(node, ast.JoinedStr) or _is_text(node) or _is_for_types(node):
        return
    for test in (getattr(node, "test", None), *getattr(node, "ifs", ())):
        if isinstance(test, ast.expr):
            test.is_test = True  # type: ignore[attr-defined]
    node.function = function  # type: ignore[attr-defined]
    yield node
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        function = f"{function}.{node.name}".removeprefix(".")
    skipped = {"annotation", "returns", "decorator_list"}
    if isinstance(node, ast.Raise):
        skipped |= {"exc", "cause"}
    for name, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in skipped:
                yield from _nodes(child, function)


def _is_text(node: ast.AST) -> bool:
    """Whether a statement is a string, such as a docstring."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def draw(seed: int, count: int) -> list[Mutant]:
    """Draw mutants, at most one of each node."""
    rng = random.Random(seed)
    nodes = [place for file in sources() for place in mutable(file)]
    rng.shuffle(nodes)
    mutants: list[Mutant] = []
    for file, node in nodes:
        mutant = _mutant(file, node, rng.choice(changes(node)))
        if mutant:
            mutants.append(mutant)
        if len(mutants) == count:
            break
    return mutants


def sources() -> list[str]:
    """Return the files to change, in order."""
    files = (path for name in SOURCES for path in (ROOT / name).rglob("*.py"))
    return sorted(str(path.relative_to(ROOT)) for path in files)


def _mutant(file: str, node: ast.AST, alternative: Change) -> Mutant | None:
    """Change a node; None if Python cannot compile the result."""
    change, new = alternative
    original = (ROOT / file).read_text()
    text = ast.unparse(ast.fix_missing_locations(new))
    if isinstance(new, ast.expr):
        text = f"({text})"
    source = _splice(original, node, text)
    try:
        compile(source, file, "exec")
    except SyntaxError:
        return None
    lines = (original.splitlines(), source.splitlines())
    diff = "\n".join(list(difflib.unified_diff(*lines, lineterm="", n=1))[2:])
    text, function = ast.unparse(node), node.function  # type: ignore[attr-defined]
    equal = [x for _, x in mutable(file) if (x.function, ast.unparse(x)) == (function, text)]  # type: ignore[attr-defined]
    number = [x is node for x in equal].index(True)
    place = node.lineno, function, text, number  # type: ignore[attr-defined]
    return Mutant(file, *place, change, source, diff)


def _splice(source: str, node: ast.AST, text: str) -> str:
    """Put text in the place of a node; columns count bytes."""
    lines = [line.encode() for line in source.splitlines(keepends=True)]
    first, last = node.lineno - 1, node.end_lineno - 1  # type: ignore[attr-defined]
    head = lines[first][: node.col_offset]  # type: ignore[attr-defined]
    tail = lines[last][node.end_col_offset :]  # type: ignore[attr-defined]
    return b"".join([*lines[:first], head, text.encode(), tail, *lines[last + 1 :]]).decode()


_FIXED = ("file", "function", "node", "occurrence", "change")


def fix(mutants: list[Mutant], path: Path) -> None:
    """Write mutants to a file, by what stays the same when functions move."""
    path.write_text(
        json.dumps([{x: getattr(entry, x) for x in _FIXED} for entry in mutants], indent=1)
    )


def fixed(path: Path) -> list[Mutant]:
    """Return the mutants of a file, and print those that are gone."""
    nodes: dict[tuple[str, ...], list[tuple[str, ast.AST]]] = {}
    for file in sources():
        for place in mutable(file):
            function, text = place[1].function, ast.unparse(place[1])  # type: ignore[attr-defined]
            # Methods keep their own name when their class gets another.
            for key in ((file, function, text), (function.rpartition(".")[2], text)):
                nodes.setdefault(key, []).append(place)
    mutants = []
    for entry in json.loads(path.read_text()):
        candidates = nodes.get((entry["file"], entry["function"], entry["node"]), [])
        places = candidates or nodes.get((entry["function"].rpartition(".")[2], entry["node"]), [])
        places = places[entry["occurrence"] :] + places[: entry["occurrence"]]
        alike = [
            (*x, change) for x in places for change in changes(x[1]) if change[0] == entry["change"]
        ]
        mutant = next(filter(None, (_mutant(*place) for place in alike)), None)
        if mutant is None:
            print(f"gone: {entry['file']} {entry['function']}: {entry['node']} ({entry['change']})")
        else:
            mutants.append(mutant)
    return mutants


# ---------------------------------------------------------------------------------- running


@cache
def stages(file: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the tests to run for a file: those that name it, and its directory."""
    package, *parts = file.removesuffix(".py").split("/")
    name = ".".join(parts) if package == "offmarl" else parts[-1]
    room = parts[0] if package == "offmarl" and len(parts) > 1 else package
    room = {"recorders": "programs", "offmarl": "", "benchmark": "benchmark"}.get(room, room)
    tests = ROOT / "tests" / room
    if not tests.is_dir():
        tests = ROOT / "tests"
    stem = re.escape(parts[-1])
    named = re.compile(rf'offmarl\.{re.escape(name)}\b|import {stem}\b|\b{stem}\.py|"{stem}"')
    near = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        if path.stem == f"test_{parts[-1].lstrip('_')}" or named.search(path.read_text())
    ]
    whole = () if tests == ROOT / "tests" else (str(tests.relative_to(ROOT)),)
    return tuple(near), whole


class Bench:
    """Copies of the project that tests run in, and how long they take without a mutant."""

    def __init__(self, directory: Path, jobs: int):
        self._free: queue.Queue[Path] = queue.Queue()
        self._cache = os.environ.get("JAX_COMPILATION_CACHE_DIR", str(directory / "programs"))
        self._seconds: dict[tuple[str, ...], float] = {}
        self._slow_pass: dict[tuple[str, ...], bool] = {}
        names = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True)
        for job in range(jobs):
            tree = directory / str(job) / "project"
            for name in names.split("\0"):
                if name and (ROOT / name).is_file():
                    (tree / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / name, tree / name)
            if (data := ROOT.parent / "shared").is_dir():
                (tree.parent / "shared").symlink_to(data)
            self._free.put(tree)

    def time(self, tests: tuple[str, ...]) -> None:
        """Run tests without a mutant, which must pass."""
        if not tests or tests in self._seconds:
            return
        begin = time.monotonic()
        tree = self._free.get()
        failed = self._run(tree, tests, _FAST, 2 * _MOST_SECONDS)
        self._free.put(tree)
        if failed:
            sys.exit(f"tests fail without a mutant: {failed}")
        self._seconds[tests] = time.monotonic() - begin
        print(f"{self._seconds[tests]:6.0f} s without a mutant: {' '.join(tests)}", flush=True)

    def judge(self, mutant: Mutant) -> str:
        """Return what killed a mutant; empty if it survived."""
        tree = self._free.get()
        file = tree / mutant.file
        original = file.read_text()
        try:
            _write(file, mutant.source)
            near, whole = stages(mutant.file)
            for tests in filter(None, (near, whole)):
                limit = max(_LEAST_SECONDS, _PATIENCE * self._seconds[tests])
                if killer := self._run(tree, tests, _FAST, limit):
                    return killer
            if near and (killer := self._run(tree, near, _SLOW, _MOST_SECONDS)):
                _write(file, original)
                if near not in self._slow_pass:
                    self._slow_pass[near] = not self._run(tree, near, _SLOW, _MOST_SECONDS)
                return killer if self._slow_pass[near] else ""
            return ""
        finally:
            _write(file, original)
            self._free.put(tree)

    def _run(self, tree: Path, tests: tuple[str, ...], marks: str, limit: float) -> str:
        environment = os.environ | {
            "PYTHONPATH": str(tree),
            "JAX_COMPILATION_CACHE_DIR": self._cache,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        }
        command = [sys.executable, "-m", "pytest", *_QUIETLY, "-m", marks, *tests]
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                command,
                cwd=tree,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                return f"not finished in {limit:.0f} s"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
            if status in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
                return ""
            output.seek(0)
            return _failure(output.read().splitlines()) or f"pytest ended with {status}"


def _write(file: Path, source: str) -> None:
    """Write a module, and delete its compiled version."""
    file.write_text(source)
    for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
        compiled.unlink()


def _failure(lines: list[str]) -> str:
    """Return the line of pytest's summary that names the failed test."""
    named = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return named[0][:160] if named else ""


# ---------------------------------------------------------------------------------- main


def main(mutants: list[Mutant], seed: int, jobs: int, results: Path) -> None:
    outcomes = json.loads(results.read_text()) if results.is_file() else {}
    with (
        tempfile.TemporaryDirectory(prefix="offmarl-mutations-") as directory,
        ThreadPoolExecutor(jobs) as pool,
    ):
        bench = Bench(Path(directory), jobs)
        fresh = [mutant for mutant in mutants if mutant.key not in outcomes]
        needed = {tests for mutant in fresh for tests in stages(mutant.file)}
        list(pool.map(bench.time, sorted(needed)))
        judged = pool.map(bench.judge, fresh)
        for number, (mutant, killer) in enumerate(zip(fresh, judged, strict=True), 1):
            outcomes[mutant.key] = {
                "file": mutant.file,
                "line": mutant.line,
                "change": mutant.change,
                "diff": mutant.diff,
                "seed": seed,
                "killed_by": killer,
            }
            results.write_text(json.dumps(outcomes, indent=1))
            verdict = killer or "SURVIVED"
            place = f"{mutant.file}:{mutant.line}"
            print(f"{number}/{len(fresh)} {place} {mutant.change}: {verdict}", flush=True)
    report(mutants, outcomes, seed)


def report(mutants: list[Mutant], known: dict[str, dict[str, str]], seed: int) -> None:
    """Print the fraction of killed mutants by file, and the survivors."""
    survivors = [mutant for mutant in mutants if not known[mutant.key]["killed_by"]]
    print(f"\n{'file':48} killed")
    for file in dict.fromkeys(mutant.file for mutant in mutants):
        total = sum(mutant.file == file for mutant in mutants)
        alive = sum(mutant.file == file for mutant in survivors)
        print(f"{file:48} {total - alive} of {total}")
    for mutant in survivors:
        print(f"\nsurvived: {mutant.file}:{mutant.line} ({mutant.change})\n{mutant.diff}")
    killed = len(mutants) - len(survivors)
    share = killed / max(len(mutants), 1)
    print(f"\n{killed} of {len(mutants)} mutants killed ({share:.0%}), seed {seed}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mutations", type=int, default=60)
    parser.add_argument("--jobs", type=int, default=2, help="copies that tests run in at once")
    parser.add_argument("--results", type=Path, default=Path("mutations.json"))
    parser.add_argument("--only", default="", help="draw as ever, and run only files named so")
    parser.add_argument("--fix", type=Path, help="write the mutants to a file, and run nothing")
    parser.add_argument("--fixed", type=Path, help="run the mutants of a file")
    given = parser.parse_args()
    drawn = draw(given.seed, given.mutations) if given.fixed is None else fixed(given.fixed)
    drawn = [mutant for mutant in drawn if given.only in mutant.file]
    if given.fix is None:
        main(drawn, given.seed, given.jobs, given.results)
    else:
        fix(drawn, given.fix)
