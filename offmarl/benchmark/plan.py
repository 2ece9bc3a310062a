"""The plan of a benchmark: its datasets, its baselines and the options of their training.

This is a whole plan::

    name = "first-hour"

    [training]                  # options of every training, as of `offmarl train`
    seeds = 5
    updates = 5_000

    [record.coverage]           # a recipe: `program`, and options of `offmarl record`
    program = "mappo"
    env = "swarm/coverage-3"
    total_steps = 100_000

    [datasets]
    "coverage medium" = { record = "coverage", tier = "medium" }
    "3m good" = "og_marl/smac_v1/3m/Good"       # a name that `offmarl pull` knows
    "mine" = { vault = "vaults/mine.vlt/0", env = "none", held_out = 0.1 }
    "pairs" = { vault = "vaults/pairs.vlt/0", partners = ["others.run/mappo-5-to-9@*"] }

    [baselines]
    bc = {}
    maicq = { learning_rate = 1e-3 }
    "maicq, λ = 0" = { program = "maicq", td_lambda = 0.0, datasets = ["3m good"] }

The policies that are trained on ``pairs`` also play with its partners, as in `offmarl cross-play`.
The options of a dataset take precedence over ``[training]``, and those of a baseline over both.
Paths are relative to the working directory. The plans in ``offmarl/benchmark/plans`` are named
without a path.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

from offmarl import records
from offmarl.config import converted, read_values
from offmarl.errors import OffmarlError, OptionError, UnknownNameError, unknown_name
from offmarl.paths import local, local_output
from offmarl.programs.program import Args
from offmarl.programs.recording.tiers import Tier, parse_tiers
from offmarl.programs.registry import Kind, load

PLANS = Path(__file__).parent / "plans"
"""The directory of the plans that come with offmarl."""

_TABLES = ("training", "record", "datasets", "baselines")
_PER_CELL = ("vault", "out", "config")
"""Options that the benchmark itself gives."""


class Recipe(NamedTuple):
    """How data is recorded."""

    name: str
    program: str
    options: Mapping[str, Any]


class PlanData(NamedTuple):
    """A dataset: a vault, or a tier of a recipe."""

    label: str
    source: Recipe | str
    """A recipe; or the path of a vault, or a name for `offmarl.hub.pull`."""
    tier: str
    options: Mapping[str, Any]
    """Options of the training on it."""
    partners: tuple[str, ...] = ()
    """Policies that trained ones play with, as `offmarl cross-play` names them."""


class Baseline(NamedTuple):
    """A method: a program with options."""

    label: str
    program: str
    options: Mapping[str, Any]
    datasets: tuple[str, ...] | None
    """Labels of the datasets that it is trained on; None for all."""


class Cell(NamedTuple):
    """A baseline on a dataset, with all of its seeds."""

    data: PlanData
    baseline: Baseline
    options: Mapping[str, Any]
    """Of the training, without the vault."""

    @property
    def label(self) -> str:
        """The cell's name in messages."""
        return f"{self.baseline.label} on {self.data.label}"

    @property
    def slug(self) -> str:
        """The cell's name in paths."""
        return f"{slug(self.data.label)}--{slug(self.baseline.label)}"


class Plan(NamedTuple):
    """What a benchmark runs."""

    name: str
    out: Path
    """Directory of its files."""
    recipes: Mapping[str, Recipe]
    datasets: Mapping[str, PlanData]
    baselines: Mapping[str, Baseline]
    training: Mapping[str, Any]

    @property
    def cells(self) -> list[Cell]:
        """The cells that are run, dataset by dataset."""
        return [
            Cell(data, method, {**self.training, **data.options, **method.options})
            for data in self.datasets.values()
            for method in self.baselines.values()
            if method.datasets is None or data.label in method.datasets
        ]


def slug(label: str) -> str:
    """Return a label as the name of a file."""
    return re.sub(r"[^\w.=+-]+", "_", label).strip("_") or "_"


def read_plan(path: str | Path, out: Path | None = None) -> Plan:
    """Read the plan of a benchmark from a TOML file, or by the name of one that offmarl brings.

    An existing file takes precedence. The directory of the benchmark's files is ``out``, or what
    the file says, or runs/NAME. `OptionError` names what is missing or not valid, and
    `UnknownNameError` an unknown program.
    """
    source = str(path)
    file, packaged = local(path), PLANS / f"{source}.toml"
    if packaged.is_file() and not file.is_file():
        file = packaged
    names = ", ".join(sorted(plan.stem for plan in PLANS.glob("*.toml")))
    missing = (
        f"there is no benchmark file {source}: give the path of one, or the name of a plan that "
        f"comes with offmarl ({names})."
    )
    content = records.user_toml(file, source, missing)
    name, given_out = _take(content, source, name=str, out=str)
    tables = [_options(content.pop(table, {}), f"{source} [{table}]") for table in _TABLES]
    training, record, datasets, baselines = tables
    for key in content:
        raise OptionError(f"{source}: {unknown_name('entry', key, ('name', 'out', *_TABLES))}")
    if not datasets or not baselines:
        raise OptionError(f"{source} needs the tables [datasets] and [baselines]: add both.")
    recipes = {name: _recipe(name, x, source) for name, x in record.items()}
    name = Path(path).stem if name is None else name
    if set(name) & {*"/\\"} or not slug(name).strip("._"):
        raise OptionError(f"{source}: name must be a text without slashes, of words, not {name!r}.")
    plan = Plan(
        name,
        local_output(out or given_out or Path("runs") / slug(name)),
        recipes,
        {label: _data(label, x, recipes, source) for label, x in datasets.items()},
        {label: _baseline(label, x, datasets, source) for label, x in baselines.items()},
        training,
    )
    _check(plan, source)
    return plan


def _recipe(name: str, values: Any, source: str) -> Recipe:
    where = f"{source} [record.{name}]"
    options = _options(values, where)
    (program,) = _take(options, where, program=str)
    if program is None:
        raise OptionError(f'{where} names no recorder: add `program = "mappo"`, for example.')
    return Recipe(name, program, options)


def _data(label: str, values: Any, recipes: Mapping[str, Recipe], source: str) -> PlanData:
    where = f"{source} [datasets] {label!r}"
    options = {"vault": values} if isinstance(values, str) else values
    options = dict(options) if isinstance(options, dict) else {}
    kinds = {"vault": str, "record": str, "tier": str, "partners": tuple[str, ...]}
    vault, recipe, tier, partners = _take(options, where, **kinds)
    if (vault is None) == (recipe is None) or (recipe is None) != (tier is None):
        raise OptionError(
            f"{where} must be the path or name of a vault, {{ vault = ... }}, or "
            f'{{ record = "RECIPE", tier = "medium" }}, not {values!r}.'
        )
    if recipe is not None and recipe not in recipes:
        raise OptionError(f"{where}: {unknown_name('recipe', recipe, recipes)}")
    origin = vault if recipe is None else recipes[recipe]
    return PlanData(label, origin, tier or "", options, partners or ())


def _baseline(label: str, values: Any, datasets: Mapping[str, Any], source: str) -> Baseline:
    where = f"{source} [baselines] {label!r}"
    options = _options(values, where)
    program, labels = _take(options, where, program=str, datasets=tuple[str, ...])
    for dataset in labels or ():
        if dataset not in datasets:
            raise OptionError(f"{where}: {unknown_name('dataset', dataset, datasets)}")
    return Baseline(label, label if program is None else program, options, labels)


def _take(options: dict[str, Any], where: str, **kinds: Any) -> list[Any]:
    """Remove values of these types from a table and return them; None for missing ones."""
    try:
        return [
            converted(name, kind, options.pop(name)) if name in options else None
            for name, kind in kinds.items()
        ]
    except OptionError as error:
        raise OptionError(f"{where}: {error}") from None


def _check(plan: Plan, source: str) -> None:
    """Raise `OptionError` if the arguments of a cell or recipe are not valid, or names clash."""
    for recipe in plan.recipes.values():
        _check_options(
            "recorder", recipe.program, recipe.options, f"{source} [record.{recipe.name}]"
        )
        if (seeds := recipe.options.get("seeds", 1)) != 1:
            raise OptionError(
                f"{source} [record.{recipe.name}]: seeds = {seeds} makes as many vaults of each "
                "tier, and a dataset is one: write a recipe for each seed, with seed = 0, seed = 1 "
                "and so on."
            )
        _check_tiers(recipe, [x for x in plan.datasets.values() if x.source is recipe], source)
    cells = plan.cells
    for cell in cells:
        where = f"{source}, {cell.label}"
        _check_options("baseline", cell.baseline.program, cell.options, where)
    slugs = [[slug(label) for label in labels] for labels in (plan.datasets, plan.recipes)]
    for names in ([cell.slug for cell in cells], *slugs):
        if clash := {name for name in names if names.count(name) > 1}:
            raise OptionError(f"{source}: two names become the file {clash.pop()}: change one.")


def _check_tiers(recipe: Recipe, datasets: Sequence[PlanData], source: str) -> None:
    """Raise `OptionError` if the recipe's program cannot record the tiers of its datasets."""
    if not datasets or not records_tiers(recipe):
        return
    recorded = recipe.options.get("tiers")
    recipe_tiers = _tiers(recorded, f"{source} [record.{recipe.name}]") if recorded else []
    for data in datasets:
        if data.tier in [tier.name for tier in recipe_tiers]:
            continue  # a mixture may be named without its shares
        where = f"{source} [datasets] {data.label!r}"
        tiers = _tiers(data.tier, where)
        if len(tiers) != 1:
            raise OptionError(f"{where}: make a dataset of each tier of {data.tier!r}.")
        if recorded and tiers[0] not in recipe_tiers:
            raise OptionError(
                f"{where}: [record.{recipe.name}] has tiers = {recorded!r}, without {data.tier}: "
                "leave tiers out, and the benchmark records those of the datasets."
            )
    if not recorded:
        _tiers(",".join(data.tier for data in datasets), f"{source} [datasets] of {recipe.name}")


def records_tiers(recipe: Recipe) -> bool:
    """Whether the recipe's program has an argument for its tiers."""
    args = args_of("recorder", recipe.program)
    return args is not None and "tiers" in [field.name for field in fields(args)]


def _tiers(text: str, where: str) -> list[Tier]:
    try:
        return parse_tiers(text)
    except (OptionError, UnknownNameError) as error:
        raise OptionError(f"{where}: {error}") from None


def _check_options(kind: Kind, program: str, options: Mapping[str, Any], where: str) -> None:
    for name in _PER_CELL:
        if name in options:
            raise OptionError(f"{where}: {name} is set by the benchmark: leave it out.")
    if (args := args_of(kind, program)) is None:
        return
    try:
        values = read_values(args, options, where)
        args(**values, **({"vault": "unknown"} if issubclass(args, Args) else {}))
    except OptionError as error:
        text = str(error)
        raise OptionError(text if text.startswith(where) else f"{where}: {text}") from None
    except (Exception, SystemExit):
        if not is_users(program):
            raise


def is_users(name: str) -> bool:
    """Whether a program or environment is the user's own file: what it raises fails its cells."""
    return ".py" in name or ("/" in name and Path(name).exists())


def args_of(kind: Kind, program: str) -> type[Any] | None:
    """Return the arguments of a program; None for a file of the user's that has none."""
    try:
        args: type[Any] = load(kind, program).Args
    except OffmarlError:
        if not is_users(program):
            raise
        return None
    return args if is_dataclass(args) else None


def _options(values: Any, where: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise OptionError(f"{where} must be a table, such as {{ seeds = 5 }}, not {values!r}.")
    return dict(values)
