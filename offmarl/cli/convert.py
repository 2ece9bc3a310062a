"""``offmarl convert``: datasets of other projects, to vaults and from them."""

import inspect
from pathlib import Path
from typing import Annotated, Any, Literal

from tyro.conf import Positional, arg

from offmarl.cli.data import show
from offmarl.cli.output import Report
from offmarl.errors import OptionError, VaultError
from offmarl.tracking import progress
from offmarl.vault.convert import READERS, WRITERS
from offmarl.vault.open import locate, open_source


def convert(
    source: Annotated[str, Positional, arg(metavar="SOURCE")],
    out: Annotated[Path, Positional, arg(metavar="OUT")],
    layout: Annotated[
        Literal["pymarl", "cfcql", "omiga", "omar", "minari", "numpy", "zarr"] | None,
        arg(name="from"),
    ] = None,
    to: Literal["pymarl", "minari", "numpy", "zarr"] | None = None,
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
        The vault to make, such as bridge.vlt or vaults/bridge.vlt/optimal; with --to, the file or
        folder.
    layout
        Layout of the source. "pymarl" is the episode batch of PyMARL and its descendants, in .npz
        or HDF5 files ("cfcql" is the same); "omiga" the HDF5 files of OMIGA and ComaDICE; "omar"
        folders of .npy files; "minari" single-agent datasets; "numpy" and "zarr" plain columns, as
        --to writes them.
    to
        Layout to write a vault in; "pymarl" writes HDF5 where OUT ends in .h5, and else .npz.
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
    if to is None:
        _check_source(source)
        spec = _spec(env) if env else None
        read = READERS[layout or "pymarl"]
        options = _taken(read, spec, time_limit)
        return show(str(read(source, out, progress=progress, terms=terms, **options)))
    if layout or env or terms:
        raise OptionError(
            "--to writes a vault in another layout and cannot be combined with --from, --env, "
            "--licence and --citation."
        )
    data = open_source(source, time_limit=time_limit)
    path = WRITERS[to](data, out, progress=progress)
    facts = {
        "path": path,
        "format": to,
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
    """Raise `OptionError` where what should become a vault is one."""
    try:
        locate(source)
    except VaultError:
        return
    raise OptionError(
        f"{source} is a vault already: say --to and the layout to write it in, or copy it with "
        "`offmarl recode`."
    )


def _taken(read: Any, spec: Any, time_limit: int | None) -> dict[str, Any]:
    """Return the options that a reader takes; `OptionError` where one given is not among them."""
    options = {"env_spec": spec, "time_limit": time_limit}
    given = {name: value for name, value in options.items() if value is not None}
    known = inspect.signature(read).parameters
    if unknown := [name for name in given if name not in known]:
        names = {"env_spec": "--env", "time_limit": "--time-limit"}
        raise OptionError(
            f"{', '.join(names[name] for name in unknown)} cannot be given here: the dataset tells "
            "its environment and how its episodes ended."
        )
    return given


def _spec(env: str) -> Any:
    from offmarl import envs

    return envs.make(env).spec
