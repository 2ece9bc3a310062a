"""Options from function parameters and dataclass fields, the same way everywhere."""

import contextlib
import inspect
import io
import math
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    Required,
    TypedDict,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from offmarl.config import (
    REPEATED,
    Fraction,
    Role,
    Rule,
    Validated,
    Vaults,
    check_rules,
    check_seed,
    read_values,
    with_role,
)
from offmarl.errors import OffmarlError, OptionError
from offmarl.paths import expand_user
from offmarl.programs.registry import Kind, load
from offmarl.programs.runs.configs import Config, read_config

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class SettingsFile:
    """The option of programs that names a file of settings."""

    settings: Path | None = None
    """TOML file with settings of the program, such as `offmarl tune` writes, or "reference" for the
    published update of a baseline. They take precedence over offmarl's own settings for the
    environment, and options over both."""


@dataclass(frozen=True, kw_only=True)
class _ConfigFile:
    """The option of programs that names a file of arguments."""

    config: Path | None = None
    """TOML file with `program` and the arguments of a run, or a run's directory to repeat it.
    Options take precedence over it."""


@dataclass(frozen=True, kw_only=True)
class JsonFlag:
    """The option of all commands; `offmarl.cli.main` takes it out."""

    json: bool = False
    """Print the outcome as one JSON object, for programs."""


HELP = ("-h", "--help", "--help-all")
AT_LEAST_ONE = Rule("at least one (give the path of each)", bool)
"""For arguments of which a command takes several; its help shows them without a default."""


def parse(
    target: Callable[..., T],
    command: str,
    description: str,
    arguments: list[str],
    *more: type,
) -> T:
    """Call a function, or build a dataclass, with arguments from the command line.

    ``command`` are the words before the arguments, such as "ls"; ``more`` are dataclasses of
    options that ``--help-all`` lists, too. A parameter that is a dataclass is built from options of
    its fields. Exits after help; `OptionError` for wrong arguments.
    """
    from tyro.conf import Positional

    hints = get_type_hints(target, include_extras=True)
    values = read_args([target], f"offmarl {command}", description, arguments, *more)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    values |= {name: take_fields(kind, values) for name, kind in groups.items()}
    bound = inspect.signature(target).bind(**values)
    bound.apply_defaults()
    for name, value in bound.arguments.items():
        is_positional = Positional in getattr(hints[name], "__metadata__", ())
        shown = name if is_positional else f"--{name.replace('_', '-')}"
        check_rules(shown, hints[name], value)
    return target(*bound.args, **bound.kwargs)


def take_fields(kind: type[T], values: dict[str, Any]) -> T:
    """Return a dataclass of its fields' values, which are removed from ``values``."""
    names = inspect.signature(kind).parameters.keys() & values.keys()
    return kind(**{name: values.pop(name) for name in names})


def refuse_unused(why: str, **values: Any) -> None:
    """Raise `OptionError` for options that a command would not use, if they have a value."""
    if names := [f"--{name.replace('_', '-')}" for name, value in values.items() if value]:
        raise OptionError(f"{why}: leave out {', '.join(names)}.")


def parse_script(target: type[T], description: str | None) -> T:
    """Return a program's arguments from `sys.argv`, for a program that is run as a script.

    Parameters
    ----------
    target
        The program's ``Args``, or another dataclass.
    description
        Printed by ``--help``.

    Raises
    ------
    SystemExit
        With code 0, after ``--help``.
    OptionError
        An argument or a file of settings is invalid.
    """
    return parse_program(target, None, description, sys.argv[1:])


def parse_program(
    target: type[T],
    command: str | None,
    description: str | None,
    arguments: list[str],
    *more: type,
) -> T:
    """Return a program's arguments: from ``arguments``, and by default from files of settings.

    ``command`` is None for a script; other parameters are those of `parse`.
    """
    is_program = issubclass(target, Validated)  # other scripts have any arguments
    config = config_among(arguments) if is_program else None
    values = {} if config is None else config.arguments(cast(Any, target))
    files = [SettingsFile] if hasattr(target, "for_env") else []
    targets = [target, *files, *([_ConfigFile] if is_program else [])]
    prog = f"offmarl {command}" if command else None
    overrides = read_args(targets, prog, description or "", arguments, *more, values=values)
    overrides.pop("config", None)
    file = overrides.pop("settings", None)
    return program_arguments(target, {**values, **overrides}, file)


def run_program(kind: Kind, name: str, options: Mapping[str, Any], where: str | None = None) -> Any:
    """Run a program with options as a file holds them, and return its result.

    ``where`` is named in errors, by default the program.
    """
    module = load(kind, name)
    values = read_values(module.Args, options, where or name)
    return module.main(program_arguments(module.Args, values))


def program_arguments(target: type[T], values: Mapping[str, Any], file: Path | None = None) -> T:
    """Return a program's arguments: these values, and by default those of a file of settings."""
    args: Any
    if hasattr(target, "for_env"):
        kind: Any = target
        args = kind.for_env(settings_environment(kind, values), settings=file, **values)
    else:
        args = target(**values)
    use_cores_for(args)
    return cast(T, args)


def config_among(arguments: Sequence[str]) -> Config | None:
    """Return the content of the file that ``--config`` names among arguments; None without it."""
    file = options_among(arguments, config=Path).get("config")
    return None if file is None else read_config(file)


def settings_environment(target: Any, values: Mapping[str, Any]) -> str:
    """Return the environment whose settings a program uses, for a baseline that of its vault."""
    env: str | None = values.get("env", target.env)
    if "vault" in values and env in (None, "none"):
        from offmarl.programs.runs.drawing import environment_of

        with contextlib.suppress(OffmarlError, OSError):  # the program will raise it again
            env = environment_of(target(**values))
    return env or ""


def use_cores_for(args: Any, batching: str | None = None) -> None:
    """Split a CPU into the devices that arguments ask for, or one for each of several seeds.

    ``batching`` is by default that of the arguments.
    """
    from offmarl.programs.runs.compiling import use_cores  # imports JAX

    batching = batching or getattr(args, "batching", None)
    if isinstance(args, Validated) and (devices := getattr(args, "devices", None)):
        use_cores(devices // (getattr(args, "processes", None) or 1), "map")
    elif batching and args.seeds > 1:  # other scripts may have seeds of any kind
        use_cores(args.seeds, batching)


def read_args(
    targets: Sequence[Callable[..., Any]],
    prog: str | None,
    description: str,
    arguments: Sequence[str],
    *more: type,
    values: Mapping[str, Any] | None = None,
    left_out: Iterable[str] = (),
) -> dict[str, Any]:
    """Return the values that arguments give to parameters of functions and dataclasses, by name.

    If several targets have a parameter of one name, that of the first counts. ``values`` replace
    defaults; parameters in ``left_out`` are no options. ``--help-all`` also lists the options of
    ``more`` and rare ones.
    """
    hidden: set[str] = set()
    if help_options := {*HELP}.intersection(arguments):
        arguments, targets = ["--help"], [*targets, *more, *([JsonFlag] if prog else [])]
        if "--help-all" not in help_options:
            hidden = {name for kind in targets for name in with_role(kind, Role.RARE)}
            hidden |= {name for kind in more for name in inspect.signature(kind).parameters}
    if hidden:
        description = f"{description.rstrip()}\n\n--help-all lists all options."
    if help_options:  # tyro would not fit it into the terminal
        sys.stdout.write(f"{_fitted(description)}\n\n")
    kind, defaults = options(targets, values, {*hidden, *left_out}, bool(help_options))
    typed = _run_tyro(kind, defaults, arguments, prog=prog, description="")
    overrides = {k: x for k, x in typed.items() if k not in defaults or x != defaults[k]}
    if "seed" in overrides:  # of commands; the arguments of programs have rules of their own
        check_seed(overrides["seed"], "--seed")
    return overrides


def _fitted(description: str) -> str:
    """Return a description in lines that fit the terminal; indented lines are kept, and items."""
    width = shutil.get_terminal_size().columns

    def filled(part: str) -> str:
        if part.startswith("    "):
            return part
        items = re.split(r"\n(?=- )", part)  # of a list, or the one paragraph
        indent = "  " if part.startswith("- ") else ""
        return "\n".join(
            textwrap.fill(" ".join(item.split()), width, subsequent_indent=indent) for item in items
        )

    paragraphs = re.split(r"\n\s*\n", description.strip().replace("``", "`"))
    return "\n\n".join(map(filled, paragraphs))


def split_options(target: type, arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the values that arguments give to the fields of a dataclass, and other arguments."""
    kind, defaults = options([target], has_texts=False)
    values, rest = _run_tyro(kind, defaults, arguments, return_unknown_args=True, add_help=False)
    return {name: x for name, x in values.items() if x != defaults.get(name)}, rest


def options_among(arguments: Sequence[str], **kinds: Any) -> dict[str, Any]:
    """Return the values that arguments give to options of these names and types."""
    make: Any = TypedDict
    kind, settings = make("Options", kinds, total=False), {"return_unknown_args": True}
    values: dict[str, Any] = _run_tyro(kind, {}, arguments, add_help=False, **settings)[0]
    return values


def options(
    targets: Sequence[Callable[..., Any]],
    values: Mapping[str, Any] | None = None,
    left_out: Iterable[str] = (),
    has_texts: bool = True,
) -> tuple[Any, dict[str, Any]]:
    """Return the type that tyro parses for parameters, a dictionary, and its default values.

    The dictionary holds the options of the command line, and always flags, which have only the
    form ``--greedy`` if they are off by default, and repeated options.
    """
    fields: dict[str, Any] = {}
    defaults: dict[str, Any] = {}
    for target in (queue := [*targets]):
        # For a class, the hints of its fields; those of its `__init__` would be the same.
        hints = get_type_hints(target, include_extras=True)
        texts = parameter_texts(target) if has_texts else {}  # takes a tenth of a second
        for name, parameter in inspect.signature(target).parameters.items():
            if name in fields or name in left_out:
                continue
            if is_dataclass(hints[name]):
                queue.append(hints[name])  # comes after the others
                continue
            default = (values or {}).get(name, parameter.default)
            is_repeated = REPEATED in getattr(hints[name], "__metadata__", ())
            fields[name] = _annotated(hints[name], default, texts.get(name, ""), is_repeated)
            if default is parameter.empty:
                fields[name] = Required[fields[name]]
            if default is False or is_repeated:
                defaults[name] = default
    make: Any = TypedDict
    return make("Options", fields, total=False), defaults


def _run_tyro(kind: Any, defaults: dict[str, Any], arguments: Sequence[str], **how: Any) -> Any:
    """Return the values that tyro parses; `OptionError` with its message on one line."""
    import tyro

    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), _constructors():
            how |= {"default": defaults, "args": arguments}
            return tyro.cli(kind, **how)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise OptionError(_reason(printed.getvalue())) from None


def _constructors() -> Any:
    """Return rules by which tyro parses paths, integers and vaults.

    ``~`` is expanded, which shells do not expand in --out=~/runs, and integers may be 1e5.
    """
    from tyro.constructors import ConstructorRegistry

    rules = {
        Path: rule_of(_path, Path, "PATH"),
        int: rule_of(_whole, int, "INT"),
        Vaults: rule_of(_vaults, str | Path | Mapping | tuple, "PATH[=SHARE]...", "*"),
    }
    registry = ConstructorRegistry()
    registry.primitive_rule(lambda info: rules.get(info.type))
    return registry


def rule_of(parser: Callable[..., Any], kind: Any, metavar: str, nargs: Literal[1, "*"] = 1) -> Any:
    """Return a rule by which tyro parses values of a type from one text, or from several."""
    from tyro.constructors import PrimitiveConstructorSpec

    return PrimitiveConstructorSpec(
        nargs=nargs,
        metavar=metavar,
        instance_from_str=lambda texts: parser(texts[0] if nargs == 1 else texts),
        is_instance=lambda value: isinstance(value, kind),
        str_from_instance=lambda value: [str(value)],
    )


def _path(text: str) -> Path:
    if not text:  # which pathlib takes for the working directory
        raise ValueError("the path is empty")
    return expand_user(text)


def _whole(text: str) -> int:
    """Read a whole number, which may be written as 1e5."""
    try:
        return int(text)
    except ValueError:
        value = finite_number(text)
    if value is None or value != round(value):
        raise ValueError(f"a whole number is needed, such as 100000 or 1e5: got {text}")
    return round(value)


def fraction(text: str) -> float:
    """Read a number, which may be written as a percentage."""
    if (value := finite_number(text.removesuffix("%"))) is None:
        raise ValueError(
            f"a percentage such as 10%, or a number such as 0.1, is needed: got {text}"
        )
    return value / 100 if text.endswith("%") else value


def finite_number(text: str) -> float | None:
    """Read a number; None if the text is something else, or infinite."""
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < math.inf else None


def _vaults(texts: list[str]) -> Path | tuple[str, ...]:
    if not texts:
        raise ValueError("give at least one vault")
    vaults = tuple(str(_path(text)) for text in texts)
    return Path(vaults[0]) if len(vaults) == 1 and "=" not in vaults[0] else vaults


def parameter_texts(target: Callable[..., Any]) -> dict[str, str]:
    """Return the text of each parameter, or of each field of a class and its bases."""
    import docstring_parser

    sources = reversed(target.__mro__[:-1]) if isinstance(target, type) else (target,)
    return {
        parameter.arg_name: " ".join((parameter.description or "").split())
        for source in sources
        for parameter in docstring_parser.parse_from_object(source).params
    }


def _typed(hint: Any) -> Any:
    """Return the type that the command line accepts for a union: without None, paths without texts.

    Rules of its parts, which tyro's errors would print, are removed: the arguments check them.
    """
    if get_origin(hint) not in (Union, UnionType):
        return hint
    parts = [_without_rules(part) for part in get_args(hint) if part is not NoneType]
    return Path if parts == [str, Path] else Union[tuple(parts)]  # noqa: UP007


def _without_rules(part: Any) -> Any:
    rule, *_ = getattr(part, "__metadata__", (None,))
    if rule in get_args(Fraction):
        return Annotated[float, rule_of(fraction, float, "FRACTION")]
    return get_args(part)[0] if isinstance(rule, Rule) else part


def _annotated(hint: Any, default: Any, text: str, is_repeated: bool) -> Any:
    """Return a type with its text and default for the help, which omits defaults that mean none."""
    from tyro.conf import FlagCreatePairsOff, UseAppendAction, arg

    hint, about = _typed(hint), {"help": text}
    if default is not inspect.Parameter.empty:
        is_none = default is False or default in (None, "", ())
        default_text = " ".join(map(str, default)) if isinstance(default, tuple) else default
        about["help_behavior_hint"] = "" if is_none else f"(default: {default_text})"
    marked: Any = UseAppendAction if is_repeated else FlagCreatePairsOff
    annotated = Annotated[hint, arg(**about)]
    return marked[annotated] if is_repeated or default is False else annotated


def _reason(printed: str) -> str:
    """Return the error that tyro printed in a box as one line, without its help texts.

    The first line is the title. The box is drawn in lines, or in dashes where the output is not
    UTF-8.
    """
    _, *lines = re.sub(r"\x1b\[[\d;]*m", "", printed).splitlines()  # without colours
    inside = (re.sub("[│╰╯]", " ", line)[2:].rstrip() for line in lines)
    text = " ".join(line.strip() for line in inside if not line.startswith(" " * 8))
    # tyro does not say that an unknown option took the only positional argument.
    text = re.sub(r"(argument '\w+')\. Expected 1 values", r"\1, or an unknown option", text)
    # Its errors of several values, and of each type of a union, name functions of this file.
    wrong = r"(?:no type matching .+? from|Could not find valid parse for arguments:) (\[.*?\])"
    form = r".*?Argument helptext:\s+--[\w-]+ (.+?)(?: \(default.*?)?\s*(?=[─-]{4,})"
    text = re.sub(wrong + form, r"expected \2, got \1 ", text)
    parts = [part.strip() for part in re.split("[─-]{4,}", text)]
    see = re.search(r"For full helptext, (?:run|see):? (.+? --help)", text)
    tail = f" See `{see[1]}`." if see else ""
    helps = ("For full helptext", "Argument helptext")
    reasons = [part.rstrip(".:") for part in parts if part and not part.startswith(helps)]
    return "; ".join(reasons) + "." + tail
