"""Commands that make vaults of other data.

``offmarl convert`` reads and writes the layouts of other projects. ``cat``, ``filter``, ``sample``,
``split``, ``slice``, ``dedup``, ``recode`` and ``map`` are the functions of these names in
`offmarl.vault`: their parameters become the options, and their docstrings the help.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import docstring_parser
from tyro.conf import Positional, arg

from offmarl import envs, vault
from offmarl.cli.data import show
from offmarl.cli.output import Report, table
from offmarl.cli.parse import fraction, parse, refuse_unused, rule_of
from offmarl.cli.tasks import Divided
from offmarl.errors import OptionError, VaultError
from offmarl.hub.licences import OTHER, licence_named
from offmarl.launch import Share, Work, join_work, run_share
from offmarl.paths import path_text
from offmarl.statistics import spread
from offmarl.teams import only_or_all
from offmarl.tracking import progress
from offmarl.vault.convert import (
    READERS,
    WRITERS,
    Treatment,
    export_dataset,
    import_dataset,
)
from offmarl.vault.dataset import open_vault
from offmarl.vault.read.open import locate
from offmarl.vault.transform.function import MapFunction
from offmarl.vault.transform.plan import SHARED, AnyVault, StrPath

_NOT_OPTIONS = ("condition", "progress", "provenance")
_NAMED = (StrPath, MapFunction | None)
"""Types of parameters that become options, although Python takes them by position."""


_Fraction = Annotated[float, rule_of(fraction, float, "FRACTION")]

_HINTS: dict[Any, Any] = {
    AnyVault: Annotated[str, arg(metavar="VAULT")],
    AnyVault | None: Annotated[str | None, arg(metavar="VAULT")],
    AnyVault | Sequence[AnyVault]: Annotated[
        tuple[str, ...], arg(metavar="VAULT...", help_behavior_hint="(required)")
    ],
    Sequence[AnyVault]: Annotated[
        tuple[str, ...], arg(metavar="VAULT...", help_behavior_hint="(required)")
    ],
    StrPath: Annotated[str, arg(name="out", aliases=["-o"], metavar="VAULT")],
    float | None: _Fraction | None,
    MapFunction | None: Annotated[str | None, arg(name="with", metavar="MODULE:FUNCTION")],
    str | None: Annotated[str | None, arg(metavar="FORMULA")],
    Sequence[float] | None: Annotated[
        tuple[_Fraction, ...] | None, arg(metavar="FRACTION FRACTION [FRACTION]")
    ],
}
"""Types of the library that the command line reads in another way."""


_VAULTS_AND_CONDITION = Annotated[
    tuple[str, ...], arg(metavar="VAULT... CONDITION", help_behavior_hint="(required)")
]


def _with_condition(options: dict[str, Any]) -> dict[str, Any]:
    """Return options with the condition, which is the last of the vaults."""
    *vaults, condition = options["source"] or ("",)
    if not vaults:
        raise OptionError("give a vault and a condition, such as A.vlt 'return > 10'.")
    return {**options, "source": tuple(vaults), "condition": condition}


def verb_of(
    function: Callable[..., Any], call: Callable[..., Any] | None = None, several: bool = False
) -> Callable[..., Any]:
    """Return a transform as a verb.

    Parameters that may be given by position become arguments, except the path of the new vault,
    which becomes ``--out``, and a function, which becomes ``--with``; all others become options.
    """

    def transform(**options: Any) -> Report:
        result = function(**options, progress=progress)
        return report(result.values() if isinstance(result, dict) else [result])

    def verb(**options: Any) -> Any:
        options = _with_condition(options) if "condition" in hints else options
        return (call or transform)(**options)

    hints, parameters = get_type_hints(function, include_extras=True), []
    positional: Any = Positional
    for name, parameter in inspect.signature(function).parameters.items():
        if name in _NOT_OPTIONS:
            continue
        if several and hints[name] == AnyVault:
            hints[name] = AnyVault | Sequence[AnyVault]
        hint = _HINTS.get(hints[name], hints[name])
        if name == "source" and "condition" in hints:
            hint = _VAULTS_AND_CONDITION
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and hints[name] not in _NAMED:
            hint = positional[hint]
        parameters.append(parameter.replace(annotation=hint, kind=parameter.KEYWORD_ONLY))
    verb.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    verb.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    verb.__name__, verb.__doc__ = function.__name__, _help(function)
    return verb


def _help(function: Callable[..., Any]) -> str:
    """Return a docstring without markup, with the texts that "As for `cat`" refers to."""
    texts = _texts(function)
    if "condition" in texts:
        texts["source"] += f" The last argument is the condition. {texts['condition']}"
    parts = [f"{name}\n    {' '.join(text.split())}" for name, text in texts.items()]
    summary = str(docstring_parser.parse_from_object(function).short_description)
    return "\n".join([summary, "", "Parameters", "----------", *parts]).replace("``", "")


def _texts(function: Callable[..., Any]) -> dict[str, str]:
    texts = {}
    for parameter in docstring_parser.parse_from_object(function).params:
        text = parameter.description or ""
        other = re.fullmatch(r"As for `(\w+)`\.", text)
        for name in re.split(", ", parameter.arg_name):
            texts[name] = _texts(getattr(vault, other[1]))[name] if other else text
    return texts


def report(datasets: Iterable[vault.Dataset]) -> Report:
    """Describe the new vaults and their sources."""
    vaults = [*datasets]
    facts = [_facts(data) for data in vaults]
    columns = ["path", "steps", "episodes", "incomplete", "mean return", "of"]
    rows = [
        [
            *(f[name] for name in columns[:4]),
            only_or_all(data.episodes.mean_returns),
            f"{sum(source['episodes'] for source in f['lineage']['sources']):,}",
        ]
        for f, data in zip(facts, vaults, strict=True)
    ]
    return Report({"vaults": facts}, table(columns, rows))


def _facts(dataset: vault.Dataset) -> dict[str, Any]:
    returns = {team: spread(x) for team, x in dataset.episodes.complete_team_returns.items()}
    return {
        "path": dataset.path,
        "steps": dataset.num_steps,
        "episodes": len(dataset.episodes.row),
        "incomplete": dataset.episodes.incomplete,
        "return": only_or_all(returns),
        "length": spread(dataset.episodes.length),
        "lineage": dataset.provenance["lineage"],
    }


def _map(**options: Any) -> Report:
    """Map one vault, or several as one task does."""
    source = options["source"]
    if len(source) > 1:
        work = _work("map", None, **options)
        run_share(work, Share(0, 1))
        join_work(work)
        return report([vault.open_vault(work.path)])
    return report([vault.map(**options | {"source": source[0]}, progress=progress)])


def transform_work(name: str, arguments: list[str], block_steps: int | None) -> Divided:
    """Return the work of a transform, from the arguments of its verb."""
    call = partial(_work, name, block_steps)
    work: Work = parse(verb_of(getattr(vault, name), call, several=True), name, "", arguments)
    return Divided(work, lambda _: report([vault.open_vault(work.path)]))


def _work(name: str, block_steps: int | None, **options: Any) -> Work:
    from offmarl.launch.transforms import TransformWork

    path = options.pop("path")
    if options.pop("layout", "stream") != "stream":
        raise OptionError("tasks write all episodes in one row: add --layout stream.")
    return TransformWork(SHARED[name](**options), path, block_steps)


cat = verb_of(vault.cat)
filter = verb_of(vault.filter)
sample = verb_of(vault.sample)
split = verb_of(vault.split)
slice = verb_of(vault.slice)
dedup = verb_of(vault.dedup)
recode = verb_of(vault.recode)
map = verb_of(vault.map, _map, several=True)


# ---------------------------------------------------------------------------------- convert


def _choices(names: Iterable[str]) -> str:
    return f"{{{','.join(names)}}}"


def _summaries(table: Mapping[str, Callable[..., Any]]) -> str:
    """Return the names of layouts and the first lines of their readers' docstrings."""
    names: dict[str, list[str]] = {}
    for name, function in table.items():
        line = (function.__doc__ or "").strip().split("\n")[0].rstrip(".")
        names.setdefault(line.removeprefix("Read "), []).append(name)
    return "; ".join(f"{' or '.join(layouts)} for {line}" for line, layouts in names.items())


def convert(
    source: Annotated[str, Positional, arg(metavar="SOURCE")],
    out: Annotated[Path, Positional, arg(metavar="OUT")],
    layout: Annotated[str | None, arg(name="from", metavar=_choices(READERS))] = None,
    to: Annotated[str | None, arg(metavar=_choices(WRITERS))] = None,
    env: str | None = None,
    time_limit: int | None = None,
    licence: Annotated[str | None, arg(metavar="SPDX", aliases=("--license",))] = None,
    citation: str | None = None,
    on_invalid: Treatment = "cut",
) -> Report:
    """Convert a dataset of another project into a vault, or back.

    Parameters
    ----------
    source
        The dataset: a file or folder, or the name of a Minari dataset; with --to, a vault.
    out
        The vault to write, such as bridge.vlt or vaults/bridge.vlt/optimal; with --to, the file or
        folder.
    layout
        Layout of the source, by default pymarl: LAYOUTS.
    to
        Layout to write a vault in; pymarl writes HDF5 if OUT ends in .h5, and otherwise .npz.
    env
        Environment that the dataset was recorded in: a name that `offmarl envs` lists, or code of
        your own as path/to/file.py:FACTORY or package.module:FACTORY.
    time_limit
        Number of steps after which episodes were truncated, so that these ends are not read as
        terminations; by default the environment's.
    licence
        SPDX identifier of the dataset's licence, such as CC-BY-4.0, or an expression of them. It is
        stored with the vault and published by `offmarl push`.
    citation
        The citation that the dataset asks for, as BibTeX. It is stored and published in the same
        way.
    on_invalid
        What becomes of observations, states and rewards that are NaN or infinite: cut ends the
        episode before the step and leaves out the rest of it, raise refuses the dataset, and keep
        stores them, and other impossible values, with a warning; no batch has them.
    """
    terms = _terms(licence, citation)
    if to is not None:
        unused: dict[str, Any] = {"from": layout, "env": env, "on_invalid": on_invalid != "cut"}
        unused |= {"licence": licence, "citation": citation}
        refuse_unused("--to writes a vault in another layout", **unused)
        return _export(source, out, to, time_limit)
    _check_source(source)
    dataset = import_dataset(
        source,
        out,
        layout or "pymarl",
        env_spec=envs.make(env).spec if env else None,
        time_limit=time_limit,
        terms=terms,
        on_invalid=on_invalid,
        progress=progress,
    )
    return show(str(dataset.path))


convert.__doc__ = (convert.__doc__ or "").replace("LAYOUTS", _summaries(READERS))


def _export(source: str, out: Path, layout: str, time_limit: int | None) -> Report:
    data = open_vault(source, time_limit=time_limit)
    path = export_dataset(data, out, layout, progress=progress)
    facts = {
        "path": path,
        "format": layout,
        "episodes": len(data.episodes.row),
        "steps": data.num_steps,
    }
    return Report(facts, f"{path_text(path)} holds {source}, {data.num_steps:,} steps.")


def _terms(licence: str | None, citation: str | None) -> dict[str, str]:
    """Return the licence and citation; `UnknownNameError` if there is no such licence."""
    terms = {
        "citation": citation,
        "licence": None if licence is None else licence_named(licence),
    }
    if terms["licence"] == OTHER:
        raise OptionError("'other' names no licence: give it, and its link, to `offmarl push`.")
    return {name: text for name, text in terms.items() if text}


def _check_source(source: str) -> None:
    """Raise `OptionError` if the dataset to import is a vault."""
    try:
        locate(source)
    except VaultError:
        return
    raise OptionError(
        f"{source} is a vault already: give --to and the layout to write it in, or copy it with "
        "`offmarl recode`."
    )
