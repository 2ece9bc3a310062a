"""Imports by name: the user's own code, optional packages, and names loaded on first use.

Only names that the user typed may reach `import_file` and `import_module`. Names read from files
are `offmarl.records.RecordedName`, for which `offmarl.records.import_code` imports nothing, because
the author of a downloaded dataset or policy chose them.
"""

import ast
import hashlib
import importlib
import io
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from offmarl.errors import MissingExtraError, OptionError

_HIDDEN = ("<", str(Path(__file__).parent), str(Path(importlib.__file__).parent))
"""Beginnings of the file names of frames that are not the user's code."""


def import_file(path: Path, name: str | None = None) -> ModuleType:
    """Import a Python file that may be anywhere; `OptionError` if that fails.

    The same content at the same path is the same module, so that classes and compiled programs are
    shared; a changed file is imported again. The file can import modules in its directory, except
    one of offmarl's own, which has a ``name``.
    """
    if path.suffix != ".py" or not path.is_file():
        raise OptionError(f"{path} is not a Python file: give the path of an existing .py file.")
    source = path.read_bytes()
    if name is None:
        digest = hashlib.sha256(bytes(path) + source).hexdigest()
        name = f"_offmarl_file_{path.stem}_{digest[:16]}"
        _add_to_path(path.parent)
    if name in sys.modules:
        return sys.modules[name]
    if (spec := spec_from_file_location(name, path)) is None:
        raise OptionError(f"{path} cannot be imported as Python code.")
    sys.modules[name] = module = module_from_spec(spec)  # dataclasses look up their module by name
    try:
        # Not by an import, which would use the code that Python has compiled of a file of the same
        # size and second.
        exec(compile(source, path, "exec"), vars(module))
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, (Exception, SystemExit)):  # such as KeyboardInterrupt
            raise
        raise OptionError(f"{path} cannot be imported: {summarize(error)}") from error
    return module


def code_digest(file: Path) -> str:
    """Return the SHA-256 of a Python file, or of it and the files around it that it imports.

    Those are modules in its directory and below, and in its package.
    """
    sources, queue = dict[Path, bytes](), [file]
    while queue:
        if (path := queue.pop()).is_file() and path not in sources:
            sources[path] = path.read_bytes()
            queue += _imported(path, sources[path])
    digests = [hashlib.sha256(sources[path]).digest() for path in sorted(sources)]
    return (digests[0] if len(digests) == 1 else hashlib.sha256(b"".join(digests)).digest()).hex()


def _imported(path: Path, source: bytes) -> Iterator[Path]:
    """Yield the possible paths, near a file, of the modules that it imports."""
    with suppress(SyntaxError, ValueError):  # its import says what is wrong
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            level, names = 1, [alias.name for alias in node.names]
            if isinstance(node, ast.ImportFrom):
                home, level = node.module or "", min(max(node.level, 1), len(path.parents))
                names = [home, *(f"{home}.{name}" for name in names)]
            for name in names:
                parts = name.strip(".").split(".")
                inside = level == 1 and parts[0] == path.parent.name
                place = path.parents[level - 1].joinpath(*parts[inside:])
                yield from (place.parent / f"{place.name}.py", place / "__init__.py")


def import_module(name: str) -> ModuleType:
    """Import an installed module, or one in the working directory; `OptionError` if that fails."""
    _add_to_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise OptionError(f"module {name} cannot be imported: {summarize(error)}") from error


def attribute(module: ModuleType, name: str, where: str) -> Any:
    """Return an attribute of a module, with dots for nested ones; `OptionError` if it has none."""
    value: Any = module
    for part in name.split("."):
        if not hasattr(value, part):
            public = {key: x for key, x in vars(module).items() if not key.startswith("_")}
            home = module.__name__
            defined = [k for k, x in public.items() if getattr(x, "__module__", "") == home]
            raise OptionError(
                f"{where} has no {name}: it defines {', '.join(defined or public) or 'nothing'}."
            )
        value = getattr(value, part)
    return value


def summarize(error: BaseException) -> str:
    """Return an error of a user's code in one line, with the file and line that raised it."""
    text = f"{type(error).__name__}: {error}".partition("\n")[0]
    if isinstance(error, SyntaxError):  # its text has the file and the line
        return text
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not (frame.filename.startswith(_HIDDEN) or "/jax/_src/" in frame.filename)
    ]
    return (
        f"{text} ({Path(frames[-1].filename).name}, line {frames[-1].lineno})" if frames else text
    )


def _add_to_path(directory: Path) -> None:
    """Append a directory to the import path: installed packages keep precedence."""
    if str(directory) not in sys.path:
        sys.path.append(str(directory))


# ------------------------------------------------------------------------- optional packages


def import_optional(module: str, extra: str, parents_on_use: bool = False) -> ModuleType:
    """Import a module of an optional package; `MissingExtraError` if it is not installed.

    With ``parents_on_use`` the ``__init__`` of the packages around the module runs only when one of
    their names is first used: it may import much that the module does not need.
    """
    package = module.partition(".")[0]
    try:
        with quiet():
            warnings.simplefilter("ignore", DeprecationWarning)  # packages warn about each other
            for size in range(1, module.count(".") + 1) if parents_on_use else ():
                _defer(".".join(module.split(".")[:size]))
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != package:
            raise
        raise MissingExtraError(
            f"{package} is not installed: run `pip install 'offmarl[{extra}]'`."
        ) from error


_NOT_DEFINED = ("__wrapped__", "__warningregistry__")
"""Names that Python looks for in every module, and that no package defines."""


def _defer(package: str) -> None:
    """Add a package to the imported ones without running its ``__init__``.

    The ``__init__`` runs when a name is looked up that is not one of the package's modules: for
    other code the package is the same as if it had been imported. No-op if it is imported already.
    """
    if package in sys.modules or (spec := find_spec(package)) is None or spec.loader is None:
        return
    module, loader = module_from_spec(spec), spec.loader

    def load(name: str) -> Any:
        if name in _NOT_DEFINED:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if not name.startswith("__") and find_spec(f"{package}.{name}"):
            return importlib.import_module(f"{package}.{name}")
        run()
        return getattr(module, name)

    def names() -> list[str]:
        run()
        return sorted(vars(module))

    def run() -> None:
        del hooks["__getattr__"], hooks["__dir__"]
        try:
            loader.exec_module(module)
        except BaseException:
            hooks.update(__getattr__=load, __dir__=names)
            raise

    hooks = vars(module)
    hooks.update(__getattr__=load, __dir__=names)
    sys.modules[package] = module
    parent, _, name = package.rpartition(".")
    if parent:
        setattr(sys.modules[parent], name, module)


@contextmanager
def quiet(*messages: str) -> Iterator[None]:
    """Hide a package's output and its warnings that begin with these messages.

    The streams that it replaces are restored: JaxMARL resets ``sys.stdout`` and ``sys.stderr`` to
    Python's own when it is imported, although a notebook or a test may have replaced them.
    """
    before = sys.stdout, sys.stderr, sys.__stdout__
    sys.stdout = sys.__stdout__ = io.StringIO()  # type: ignore[misc, assignment]
    try:
        with warnings.catch_warnings():
            for message in messages:
                warnings.filterwarnings("ignore", message)
            yield
    finally:
        sys.stdout, sys.stderr, sys.__stdout__ = before  # type: ignore[misc]


# -------------------------------------------------------------------------------- lazy names


def lazy_names(
    package: str, **extras: str
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """Return ``__all__``, ``__getattr__`` and ``__dir__`` of a package whose names load on use.

    The names are those that the package imports as themselves ``if TYPE_CHECKING``, as in
    ``from offmarl.types import View as View``, so that each is written once; ``open = open_vault``
    renames an import. Submodules are found, too. ``extras`` are the extras that modules need.
    """
    module = sys.modules[package]
    source = ast.parse(Path(str(module.__file__)).read_bytes())
    block = next(node for node in source.body if isinstance(node, ast.If)).body
    imports = [node for node in block if isinstance(node, ast.ImportFrom)]
    homes = {x.name: (node.module or "", x.name) for node in imports for x in node.names}
    public = {x.asname: homes[x.name] for node in imports for x in node.names if x.asname}
    for node in block:
        if isinstance(node, ast.Assign):
            public[ast.unparse(node.targets[0])] = homes[ast.unparse(node.value)]
    names = sorted(public)

    def load(name: str) -> Any:
        home, attribute = public.get(name, (package, name))
        if home != package:
            if extra := extras.get(home.rpartition(".")[2]):
                import_optional(extra, extra)
            value = getattr(importlib.import_module(home), attribute)
        elif name in public or (not name.startswith("_") and find_spec(f"{package}.{name}")):
            value = importlib.import_module(f"{package}.{name}")
        else:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        setattr(module, name, value)
        return value

    return names, load, lambda: names
