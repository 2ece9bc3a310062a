"""Options from function parameters and dataclass fields, the same way everywhere."""

import contextlib
import functools
import inspect
import io
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeVar,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
)

from offmarl.config import REPEATED, Rule, Validated, Vaults, check_seed
from offmarl.errors import OffmarlError, OptionError
from offmarl.paths import expanded
from offmarl.programs.configs import Config, read_config

T = TypeVar("T")

_ADDED: dict[str, tuple[Any, Any, str]] = {
    "settings": (
        Path | None,
        None,
        "TOML file with settings of the program, such as `offmarl tune` writes. They take "
        "precedence over offmarl's own settings for the environment, and options over both.",
    ),
    "config": (
        Path | None,
        None,
        "TOML file with `program` and the arguments of a run, or a run's directory to repeat it. "
        "Options take precedence over it.",
    ),
    "json": (bool, False, "Print the outcome as one JSON object, for programs."),
    "tasks": (
        int | None,
        None,
        "Divide the work into this many tasks, which --launcher runs side by side. What they make "
        "does not depend on their number.",
    ),
    "launcher": (
        Literal["local", "slurm", "ray"],
        "local",
        "What runs the tasks: local, processes of this machine; slurm, a job array; ray, a Ray "
        "cluster.",
    ),
    "workers": (
        int | None,
        None,
        "Tasks that run at the same time; by default one for each core, or as many as the cluster "
        "has room for.",
    ),
    "launcher_option": (
        Annotated[tuple[str, ...], REPEATED],
        (),
        "KEY=VALUE for the launcher, such as partition=gpu or timeout_min=600 for slurm (as "
        "submitit names them), address=HOST:PORT or num_gpus=1 for ray.",
    ),
    "task": (
        str | None,
        None,
        "I/N: run task I of N here and now, with I from 0, for other schedulers; --join follows.",
    ),
    "join": (bool, False, "Join what all tasks of --task made."),
    "block_steps": (
        int | None,
        None,
        "Environment steps of a block, of which tasks run whole ones; by default it follows from "
        "the sizes of the data.",
    ),
    "dry_run": (bool, False, "Print the plan, with its sizes, tasks and memory, and run nothing."),
}
"""Options that a function's parameters do not have: their types, defaults and texts."""

TASK_OPTIONS = tuple(_ADDED)[list(_ADDED).index("tasks") :]
"""Options of verbs whose work is divided into tasks; `offmarl.cli.tasks` takes them out."""


def parse(
    target: Callable[..., T],
    command: str,
    description: str,
    arguments: list[str],
    added: Sequence[str] = (),
) -> T:
    """Call a function, or build a dataclass, with arguments from the command line.

    Parameters
    ----------
    target
        The function or dataclass; its parameters become the options.
    command
        The words before the arguments, such as "ls" or "train bc".
    description
        Text for ``--help``.
    arguments
        The arguments, without ``--json``.
    added
        Options to list in ``--help`` that are not among the arguments: see `documented`.

    Raises
    ------
    SystemExit
        With code 0, after ``--help``.
    OptionError
        The arguments are wrong.
    """
    described = documented(target, *added, "json")
    return _parse(described, f"offmarl {command}", description, arguments)()


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
    SystemExit, OptionError
        As `parse_program`.
    """
    return parse_program(target, None, description, sys.argv[1:])


def parse_program(
    target: type[T],
    command: str | None,
    description: str | None,
    arguments: list[str],
    added: Sequence[str] = (),
) -> T:
    """Return a program's arguments: those given, and for the others settings from files."""
    configurable = hasattr(target, "for_env")
    is_program = issubclass(target, Validated)  # other scripts have any arguments
    general = {"settings": configurable, "config": is_program, "json": command is not None}
    config = config_among(arguments) if is_program else None
    values = {} if config is None else config.arguments(cast(Any, target))
    names = (name for name, add in general.items() if add)
    described = documented(target, *added, *names, defaults=values)
    prog = f"offmarl {command}" if command else None
    call = _parse(described, prog, description or "", arguments)
    call.keywords.pop("config", None)
    given = [*arguments, *(f"--{name}" for name in values)]
    args = _configured(target, call.keywords, given) if configurable else call()
    use_cores_for(args)
    return args


def config_among(arguments: list[str]) -> Config | None:
    """Return the content of the file that ``--config`` names among arguments; None without it."""
    for place, one in enumerate(arguments):
        option, sign, value = one.partition("=")
        if option == "--config" and (sign or place + 1 < len(arguments)):
            return read_config(expanded(value if sign else arguments[place + 1]))
    return None


def _configured(target: Any, values: dict[str, Any], arguments: list[str]) -> Any:
    """Return a program's arguments with settings for those that are not given."""
    file = values.pop("settings")
    given = {name: values[name] for name in given_among(values, arguments)}
    return target.for_env(settings_environment(target, values), settings=file, **given)


def settings_environment(target: Any, values: Mapping[str, Any]) -> str:
    """Return the environment whose settings a program uses: a baseline's is that of its vault."""
    env: str | None = values["env"]
    if "vault" in values and env in (None, "none"):
        from offmarl.programs.drawing import open_data

        with contextlib.suppress(OffmarlError, OSError):  # the program will raise it again
            env = open_data(target(**values)).spec.name
    return env or ""


def given_among(names: Iterable[str], arguments: list[str]) -> list[str]:
    """Return the options that arguments contain; tyro takes options in full, with - or _."""
    options = {one.partition("=")[0].replace("_", "-") for one in arguments}
    dashed = {name: name.replace("_", "-") for name in names}
    return [
        name
        for name, option in dashed.items()
        if not options.isdisjoint((f"--{option}", f"--no-{option}"))
    ]


def parse_bound(
    targets: Sequence[Callable[..., Any]],
    left_out: Iterable[str],
    command: str,
    description: str,
    arguments: list[str],
    added: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the values of the options of several functions or dataclasses, by name."""
    described = [documented(target, *added, "settings", "json") for target in targets]
    found = {
        name: one.replace(kind=inspect.Parameter.KEYWORD_ONLY)
        for each in reversed(described)
        for name, one in inspect.signature(each).parameters.items()
        if each is not described[-1] or name not in left_out
    }

    def bound(**options: Any) -> functools.partial[Any]:
        for name in ("json", *added):
            options.pop(name, None)
        return functools.partial(dict, **options)

    bound.__signature__ = inspect.Signature([*found.values()])  # type: ignore[attr-defined]
    bound.__annotations__ = {name: one.annotation for name, one in found.items()}
    return _parse(bound, f"offmarl {command}", description, arguments).keywords


def use_cores_for(args: Any, batching: str | None = None) -> None:
    """Split a CPU into the devices that arguments ask for, or one for each of several seeds.

    ``batching`` is by default that of the arguments.
    """
    batching = batching or getattr(args, "batching", None)
    if isinstance(args, Validated) and (devices := getattr(args, "devices", None)):
        from offmarl.programs.compiling import use_cores

        use_cores(devices // (getattr(args, "processes", None) or 1), "map")
    elif batching and args.seeds > 1:  # other scripts may have seeds of any kind
        from offmarl.programs.compiling import use_cores  # imports JAX

        use_cores(args.seeds, batching)


def _parse(
    target: Callable[..., functools.partial[T]],
    prog: str | None,
    description: str,
    arguments: list[str],
) -> functools.partial[T]:
    """Return a function with its arguments bound."""
    import tyro

    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), _constructors():
            call = tyro.cli(
                target, prog=prog, description=description, args=arguments, config=conventions()
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        raise OptionError(_reason(printed.getvalue())) from None
    if "seed" in call.keywords:  # of commands; the arguments of programs have rules of their own
        check_seed(call.keywords["seed"], "--seed")
    return call


def _constructors() -> Any:
    """Return rules for values: ``~`` is expanded, which shells do not expand in --out=~/runs."""
    from tyro.constructors import (
        ConstructorRegistry,
        PrimitiveConstructorSpec,
        PrimitiveTypeInfo,
    )

    registry = ConstructorRegistry()

    @registry.primitive_rule
    def path_rule(kind: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Path] | None:
        if kind.type is not Path:
            return None
        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="PATH",
            instance_from_str=lambda texts: expanded(texts[0]),
            is_instance=lambda value: isinstance(value, Path),
            str_from_instance=lambda path: [str(path)],
        )

    @registry.primitive_rule
    def vaults_rule(kind: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        if kind.type != Vaults:
            return None
        return PrimitiveConstructorSpec(
            nargs="*",
            metavar="PATH[=SHARE]...",
            instance_from_str=_vaults,
            is_instance=lambda value: isinstance(value, str | Path | Mapping | tuple),
            str_from_instance=lambda value: [str(value)],
        )

    return registry


def _vaults(texts: list[str]) -> Path | tuple[str, ...]:
    if not texts:
        raise ValueError("give at least one vault")
    found = tuple(str(expanded(text)) for text in texts)
    return Path(found[0]) if len(found) == 1 and "=" not in found[0] else found


def conventions() -> tuple[Any, ...]:
    """Return tyro's configuration: no option takes the value "None"."""
    from tyro.conf import DisallowNone

    return (DisallowNone,)


def documented(
    target: Callable[..., T], *added: str, defaults: Mapping[str, Any] | None = None
) -> Callable[..., functools.partial[T]]:
    """Return a function with the parameters of ``target``, prepared for tyro's help.

    Each parameter's text is one paragraph. Defaults that mean "none" are not shown. A flag
    that is off by default has one form, ``--greedy``; one that is on by default has two,
    ``--share`` and ``--no-share``, since its text describes the first.
    """

    def shown(*args: Any, **options: Any) -> functools.partial[T]:
        for name in ("json", *(set(added) & {*TASK_OPTIONS})):
            options.pop(name, None)
        return functools.partial(target, *args, **options)

    vars(shown).pop("__wrapped__", None)  # of a type checker's decorator; tyro would look at it
    # For a class, the hints of its fields; those of its `__init__` would be the same.
    hints, texts = get_type_hints(target, include_extras=True), parameter_texts(target)
    found = {
        name: one.replace(default=(defaults or {}).get(name, one.default))
        for name, one in inspect.signature(target).parameters.items()
    }
    parameters = [
        one.replace(annotation=_annotated(hints[name], one.default, texts.get(name, "")))
        for name, one in found.items()
    ]
    for name in added:
        hint, default, text = _ADDED[name]
        one = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
        parameters.append(one.replace(annotation=_annotated(hint, default, text)))
    shown.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    shown.__annotations__ = {one.name: one.annotation for one in parameters}
    return shown


def parameter_texts(target: Callable[..., Any]) -> dict[str, str]:
    """Return the text of each parameter, or of each field of a class and its bases."""
    import docstring_parser

    sources = reversed(target.__mro__[:-1]) if isinstance(target, type) else (target,)
    return {
        one.arg_name: " ".join((one.description or "").split())
        for source in sources
        for one in docstring_parser.parse_from_object(source).params
    }


def _without_rules(hint: Any) -> Any:
    """Return a union of types without the rules of its parts, which tyro's errors would print.

    The arguments check them.
    """
    if get_origin(hint) not in (Union, UnionType):
        return hint
    has_rule = [isinstance(getattr(x, "__metadata__", (None,))[0], Rule) for x in get_args(hint)]
    pairs = zip(get_args(hint), has_rule, strict=True)
    parts = [get_args(one)[0] if ruled else one for one, ruled in pairs]
    return Union[tuple(parts)]  # noqa: UP007


def _annotated(hint: Any, default: Any, text: str) -> Any:
    from tyro.conf import FlagCreatePairsOff, UseAppendAction, arg

    hint = _without_rules(hint)

    options: dict[str, Any] = {"help": text} if text else {}
    if default is False or default in (None, "", ()):
        options["help_behavior_hint"] = ""
    single_flag: Any = FlagCreatePairsOff
    annotated = Annotated[hint, arg(**options)] if options else hint
    if REPEATED in getattr(hint, "__metadata__", ()):
        append: Any = UseAppendAction
        return append[annotated]
    return single_flag[annotated] if default is False else annotated


def _reason(printed: str) -> str:
    """Return the error that tyro printed in a box as one line, without its help texts.

    The first line is the title. The box is drawn in lines, or in dashes where the output is not
    UTF-8.
    """
    inside = (re.sub("[│╰╯]", " ", line)[2:].rstrip() for line in _plain(printed).splitlines()[1:])
    text = " ".join(line.strip() for line in inside if not line.startswith(" " * 8))
    parts = [part.strip() for part in re.split("[─-]{4,}", text)]
    see = re.search(r"For full helptext, (?:run|see):? (.+? --help)", text)
    tail = f" See `{see[1]}`." if see else ""
    helps = ("For full helptext", "Argument helptext")
    reasons = [one.rstrip(".:") for one in parts if one and not one.startswith(helps)]
    # Options take no value "None", though tyro lists it.
    return re.sub(r"'None', |, 'None'", "", "; ".join(reasons)) + "." + tail


def _plain(text: str) -> str:
    """Return text without escape codes for colours."""
    return re.sub(r"\x1b\[[\d;]*m", "", text)
