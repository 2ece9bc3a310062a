"""The result of a cell: a run without its checkpoints, packed into one JSON file.

Commands that read runs, such as `offmarl compare` and `offmarl report`, read packed runs, too
(`offmarl.tracking.read_json`). Of each evaluation with an even number of episodes the file holds
two numbers, the means of every other episode: curves and final scores need their mean, and the
score of the best checkpoint needs both (`offmarl.report.best_scores`).
"""

import hashlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from msgspec import Struct

import offmarl
from offmarl import records, tracking
from offmarl._imports import code_digest
from offmarl.benchmark.plan import Cell, Recipe
from offmarl.envs.registry import code_of
from offmarl.errors import RunError, VaultError
from offmarl.paths import local
from offmarl.programs import registry
from offmarl.vault import open_vault
from offmarl.vault.check import digest as vaults
from offmarl.vault.format.layout import MANIFEST

_EVALUATED = (*tracking.EVALUATED, *tracking.OTHER_RETURN.values())


class Result(Struct, frozen=True):
    """What tables show of a cell beside its scores."""

    digest: str | None
    seeds: list[int]
    versions: dict[str, str] | None
    hardware: dict[str, Any] | None
    seconds: float | None


def identity(cell: Cell) -> dict[str, Any]:
    """Return what the result of a cell depends on besides the content of its vault, for JSON.

    Absolute paths are replaced by their ends: the code of a program and the content of a vault
    have checksums of their own.
    """
    program, data = cell.baseline.program, cell.data
    facts: dict[str, Any] = {
        "program": program,
        "data": _shortened(data.source),
        "options": {name: _shortened(value) for name, value in cell.options.items()},
    }
    if code := sources(program, cell.options):
        facts |= {"program": Path(program).name, "sources": code}
    if isinstance(recipe := data.source, Recipe):
        facts["data"] = f"{recipe.name}:{data.tier}"
        facts["recorded"] = {"program": recipe.program, **recipe.options}
        if code := sources(recipe.program, recipe.options):
            facts["recorded"]["sources"] = code
    if data.partners:
        from offmarl.programs.recording.sides import names_in, run_of  # imports JAX

        policies = [name for partner in data.partners for name, _ in names_in(partner)]
        facts["partners"] = [[_shortened(x), _checksum_of((run_of(x) or [x])[0])] for x in policies]
    return dict(tracking.plain(facts))


_NAMING = ("env", "validation", "weight", "init", "opponents", "prefill")
"""Options that may name the user's own code, vaults and runs."""


def sources(program: str, options: Mapping[str, Any]) -> dict[str, str]:
    """Return checksums of the user's own code, data and runs that a program and options name."""
    file = local(program)
    checksums = {"program": code_digest(file) if file.suffix == ".py" and file.is_file() else ""}
    for name in _NAMING:
        value = options.get(name) or ()
        names = [value] if isinstance(value, str) else value
        checksums[name] = " ".join(filter(None, map(_checksum_of, map(str, names))))
    return {name: code for name, code in checksums.items() if code}


def _checksum_of(text: str) -> str | None:
    """Return a checksum of the code, vault or run that an option names, perhaps as TEAM=NAME."""
    for name in (text, text.partition("=")[2]):
        if code := code_of(name):
            return code
        if name and (run := local(name) / tracking.RUN_FILE).is_file():
            metrics = run.with_name(tracking.METRICS_FILE)  # with the times of this training
            files = [path.read_bytes() for path in (run, metrics) if path.is_file()]
            return hashlib.sha256(b"".join(files)).hexdigest()
        if name and (content := fingerprint(name)):
            return content
    return None


def _shortened(value: Any) -> Any:
    """Return an option without the directories of this machine."""
    if isinstance(value, str) and Path(value).is_absolute():
        return tracking.path_end(value)
    return value


def fingerprint(source: Recipe | str) -> str | None:
    """Return what identifies the content of a vault, without reading its steps.

    None for data that the plan records or downloads, and for a vault that is not here.
    """
    if isinstance(source, Recipe) or not (place := local(source)).exists():
        return None
    manifests = (*place.glob(MANIFEST), *place.glob(f"*/{MANIFEST}"))
    return _fingerprint(place, max(path.stat().st_mtime_ns for path in (place, *manifests)))


@lru_cache(maxsize=256)
def _fingerprint(place: Path, _changed: int) -> str | None:
    try:
        return vaults.fingerprint(open_vault(place))
    except VaultError:  # its training says why
        return None


@lru_cache(maxsize=1)
def _code() -> str:
    """Return a checksum of the source of offmarl and its programs.

    Results of two commits of one version differ in it.
    """
    programs = (*registry.find("baseline").values(), *registry.find("recorder").values())
    files = {*Path(offmarl.__file__).parent.rglob("*.py"), *programs}
    digests = sorted(hashlib.sha256(path.read_bytes()).digest() for path in files)
    return hashlib.sha256(b"".join(digests)).hexdigest()


def pack(cell: Cell, run: Path, path: Path, seconds: float | None = None) -> None:
    """Write the result of a cell.

    It can be published: in place of paths on this machine it holds the plan's name of the dataset,
    and only the name of a program's file.
    """
    about = identity(cell)
    record = tracking.publishable(tracking.read_run(run))
    record["args"]["vault"] = about["data"]
    if "sources" in about:  # the files may have changed since the training began
        env = record.get("environment_source", {}).get("sha256")
        ran = {"program": record["sha256"], "env": env}
        about["sources"] = {name: ran.get(name) or x for name, x in about["sources"].items()}
    rows = []
    for row in tracking.read(run / tracking.METRICS_FILE):
        metrics = {name: _halves(x) for name, x in row.items() if name.startswith(_EVALUATED)}
        rows += [{"seed": row["seed"], "step": row["step"], **metrics}] if metrics else []
    document = {
        "dataset": cell.data.label,
        "baseline": cell.baseline.label,
        **about,
        "digest": record.get("vault_digest"),
        "fingerprint": fingerprint(cell.data.source),
        "seeds": record["seeds"],
        "code": _code(),
        "versions": record.get("versions"),
        "hardware": record.get("hardware"),
        "seconds": tracking.last(run / tracking.METRICS_FILE, tracking.WALL_TIME),
        "process_seconds": seconds,
        tracking.RUN_FILE: record,
        tracking.METRICS_FILE: rows,
    }
    if (run / tracking.MARL_EVAL_FILE).is_file():
        document[tracking.MARL_EVAL_FILE] = _halved(
            tracking.read_json(run, tracking.MARL_EVAL_FILE)
        )
    if cell.data.partners:
        document[tracking.PARTNERS_FILE] = tracking.read_json(run, tracking.PARTNERS_FILE)
    tracking.replace_file(path, _dumps(document) + "\n")


def is_current(cell: Cell, path: Path) -> bool:
    """Whether a file holds the result of a cell with its present options, code and vault.

    Without the vault, which need not be where the results are, that part is not checked.
    """
    try:
        result = records.parse(path.read_bytes(), str(path), RunError)
        records.as_type(result, Result, str(path), RunError)
    except (FileNotFoundError, RunError):
        return False
    if not result.items() >= identity(cell).items():
        return False
    vault = cell.data.source
    if isinstance(vault, Recipe):
        return True
    if (now := fingerprint(vault)) is None or now == result.get("fingerprint"):
        return True
    return bool(result.get("digest") == _digest(local(vault), now))  # the same in other chunks


@lru_cache(maxsize=256)
def _digest(place: Path, _fingerprint: str) -> str:
    return open_vault(place).known_digest()


def _halved(tree: Any) -> Any:
    """Return a document in which each list of numbers is replaced by its `_halves`."""
    if isinstance(tree, dict):
        return {name: _halved(value) for name, value in tree.items()}
    return _halves(tree) if isinstance(tree, list) else tree


def _halves(values: Sequence[Any]) -> list[float | None]:
    """Return the means of the values at even and at odd positions; their mean is that of all.

    An odd number of values, for which this does not hold, is returned unchanged.
    """
    if len(values) % 2 or not values or None in values:
        return list(values)
    return [sum(values[start::2]) / (len(values) // 2) for start in (0, 1)]


def _dumps(document: Mapping[str, Any]) -> str:
    """Return JSON with one line for each line of metrics, so that changes are easy to compare."""
    rows = document[tracking.METRICS_FILE]
    marker = "@metrics@"
    text = tracking.to_json({**document, tracking.METRICS_FILE: marker}, indent=1)
    lines = ",\n  ".join(map(tracking.to_json, rows))
    return text.replace(f'"{marker}"', f"[\n  {lines}\n ]" if rows else "[]")
