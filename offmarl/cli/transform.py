"""``offmarl cat``, ``filter``, ``sample``, ``split``, ``slice``, ``dedup`` and ``recode``.

Each is the function of that name in `offmarl.vault`: its parameters become the options, and its
docstring the help.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Any, get_type_hints

import docstring_parser
from tyro.conf import Positional, arg
from tyro.constructors import PrimitiveConstructorSpec

from offmarl import vault
from offmarl.cli.output import Report, table
from offmarl.statistics import spread
from offmarl.tracking import progress
from offmarl.vault.transform.pipeline import AnyVault, StrPath

_NOT_OPTIONS = ("progress", "provenance")


def _count(text: str) -> int:
    """Read a whole number, which may be written as 1e5."""
    try:
        return int(text)
    except ValueError:
        value = _number(text)
        if value is None:
            raise
    if value != round(value):
        raise ValueError(f"a whole number is needed, such as 100000 or 1e5: got {text}")
    return round(value)


def _fraction(text: str) -> float:
    """Read a number, which may be written as a percentage."""
    value = _number(text.removesuffix("%"))
    if value is None:
        raise ValueError(
            f"a percentage such as 10%, or a number such as 0.1, is needed: got {text}"
        )
    return value / 100 if text.endswith("%") else value


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return value if abs(value) < float("inf") else None


def _written(kind: type, read: Callable[[str], Any], metavar: str) -> Any:
    """Return how tyro reads values of a type."""
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda texts: read(texts[0]),
        is_instance=lambda value: isinstance(value, kind),
        str_from_instance=lambda value: [str(value)],
    )


_Count = Annotated[int, _written(int, _count, "NUMBER")]
_Fraction = Annotated[float, _written(float, _fraction, "FRACTION")]

_HINTS: dict[Any, Any] = {
    AnyVault: Annotated[str, arg(metavar="VAULT")],
    AnyVault | None: Annotated[str | None, arg(metavar="VAULT")],
    Sequence[AnyVault]: Annotated[
        tuple[str, ...], arg(metavar="VAULT...", help_behavior_hint="(required)")
    ],
    StrPath: Annotated[str, arg(name="out", aliases=["-o"], metavar="VAULT")],
    str: Annotated[str, arg(metavar="CONDITION")],
    int: _Count,
    int | None: _Count | None,
    float | None: _Fraction | None,
    Sequence[float] | None: Annotated[
        tuple[_Fraction, ...] | None, arg(metavar="FRACTION FRACTION [FRACTION]")
    ],
}
"""Types of the library, and how the command line reads them; others are read as they are."""


def verb_of(function: Callable[..., Any]) -> Callable[..., Report]:
    """Return a transform as a verb.

    Parameters that may be given by position become arguments, except the path of the new vault,
    which becomes ``--out``; all others become options.
    """

    def verb(**options: Any) -> Report:
        made = function(**options, progress=progress)
        return _report(made.values() if isinstance(made, dict) else [made])

    hints, parameters = get_type_hints(function), []
    positional: Any = Positional
    for name, one in inspect.signature(function).parameters.items():
        if name in _NOT_OPTIONS:
            continue
        hint = _HINTS.get(hints[name], hints[name])
        if one.kind is one.POSITIONAL_OR_KEYWORD and hints[name] != StrPath:
            hint = positional[hint]
        parameters.append(one.replace(annotation=hint, kind=one.KEYWORD_ONLY))
    verb.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    verb.__annotations__ = {one.name: one.annotation for one in parameters}
    verb.__name__, verb.__doc__ = function.__name__, _help(function)
    return verb


def _help(function: Callable[..., Any]) -> str:
    """Return a docstring without markup, with the texts that "As for `cat`" refers to."""
    texts = _texts(function)
    parts = [f"{name}\n    {' '.join(text.split())}" for name, text in texts.items()]
    summary = str(docstring_parser.parse_from_object(function).short_description)
    return "\n".join([summary, "", "Parameters", "----------", *parts]).replace("``", "")


def _texts(function: Callable[..., Any]) -> dict[str, str]:
    texts = {}
    for one in docstring_parser.parse_from_object(function).params:
        text = one.description or ""
        other = re.fullmatch(r"As for `(\w+)`\.", text)
        for name in re.split(", ", one.arg_name):
            texts[name] = _texts(getattr(vault, other[1]))[name] if other else text
    return texts


def _report(made: Iterable[vault.Dataset]) -> Report:
    """Describe the new vaults and their sources."""
    facts = [_facts(one) for one in made]
    columns = ["path", "steps", "episodes", "incomplete", "mean return", "of"]
    rows = [
        [
            *(f[name] for name in columns[:4]),
            f["return"].get("mean"),
            _source_episodes(f["lineage"]),
        ]
        for f in facts
    ]
    return Report({"vaults": facts}, table(columns, rows))


def _facts(made: vault.Dataset) -> dict[str, Any]:
    return {
        "path": made.path,
        "steps": made.num_steps,
        "episodes": len(made.episodes.row),
        "incomplete": made.episodes.incomplete,
        "return": spread(made.episodes.complete_returns),
        "length": spread(made.episodes.length),
        "lineage": made.provenance["lineage"],
    }


def _source_episodes(lineage: dict[str, Any]) -> str:
    return f"{sum(source['episodes'] for source in lineage['sources']):,}"


cat = verb_of(vault.cat)
filter = verb_of(vault.filter)
sample = verb_of(vault.sample)
split = verb_of(vault.split)
slice = verb_of(vault.slice)
dedup = verb_of(vault.dedup)
recode = verb_of(vault.recode)
