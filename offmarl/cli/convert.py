"""``offmarl convert``: datasets of other projects, to vaults and from them."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from offmarl.cli.data import show
from offmarl.cli.output import Report
from offmarl.errors import OptionError, VaultError
from offmarl.tracking import progress
from offmarl.vault.convert import READERS, WRITERS, export_dataset, import_dataset
from offmarl.vault.open import locate, open_source


def _choices(names: Iterable[str]) -> str:
    return f"{{{','.join(names)}}}"


def _summaries(table: Mapping[str, Callable[..., Any]]) -> str:
    """Return the names of layouts and the first lines of their readers' docstrings."""
    names: dict[str, list[str]] = {}
    for name, function in table.items():
        line = (function.__doc__ or "").strip().split("\n")[0].rstrip(".")
        names.setdefault(line.removeprefix("Read "), []).append(name)
    return "; ".join(f"{' or '.join(same)} for {line}" for line, same in names.items())


def convert(
    source: Annotated[str, Positional, arg(metavar="SOURCE")],
    out: Annotated[Path, Positional, arg(metavar="OUT")],
    layout: Annotated[str | None, arg(name="from", metavar=_choices(READERS))] = None,
    to: Annotated[str | None, arg(metavar=_choices(WRITERS))] = None,
    env: str | None = None,
    time_limit: int | None = None,
    licence: Annotated[str | None, arg(metavar="SPDX")] = None,
    citation: str | None = None,
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
        The environment it was recorded in, if offmarl has it.
    time_limit
        Steps after which episodes were cut off, so that their ends are not taken for terminations;
        by default the environment's.
    licence
        SPDX identifier of the dataset's licence, such as CC-BY-4.0, or an expression of them. It is
        stored with the vault and published by `offmarl push`.
    citation
        What the dataset asks to cite, as BibTeX. It is stored and published in the same way.
    """
    terms = _terms(licence, citation)
    if to is not None:
        if layout or env or terms:
            raise OptionError(
                "--to writes a vault in another layout and cannot be combined with --from, --env, "
                "--licence and --citation."
            )
        return _export(source, out, to, time_limit)
    _check_source(source)
    made = import_dataset(
        source,
        out,
        layout or "pymarl",
        env_spec=_spec(env) if env else None,
        time_limit=time_limit,
        terms=terms,
        progress=progress,
    )
    return show(str(made.path))


convert.__doc__ = (convert.__doc__ or "").replace("LAYOUTS", _summaries(READERS))


def _export(source: str, out: Path, layout: str, time_limit: int | None) -> Report:
    data = open_source(source, time_limit=time_limit)
    path = export_dataset(data, out, layout, progress=progress)
    facts = {
        "path": path,
        "format": layout,
        "episodes": len(data.episodes.row),
        "steps": data.num_steps,
    }
    return Report(facts, f"{data.num_steps:,} steps of {source} are in {path}.")


def _terms(licence: str | None, citation: str | None) -> dict[str, str]:
    """Return the licence and citation; `UnknownNameError` if there is no such licence."""
    terms = {"citation": citation} if citation else {}
    if licence is None:
        return terms
    from offmarl.hub.licences import OTHER, licence_named

    if (name := licence_named(licence)) == OTHER:
        raise OptionError("'other' names no licence: give it, and its link, to `offmarl push`.")
    return terms | {"licence": name}


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


def _spec(env: str) -> Any:
    from offmarl import envs

    return envs.make(env).spec
