"""Whether a plan can be run: its environments, and what its baselines learn from."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from offmarl import envs, tracking
from offmarl._imports import summarize
from offmarl.benchmark.cells import is_current
from offmarl.benchmark.plan import Cell, Plan, PlanData, Recipe, is_users
from offmarl.benchmark.tasks import cell_file, require_vault
from offmarl.config import read_values
from offmarl.errors import OffmarlError, OptionError, RunError, VaultError, raise_together
from offmarl.paths import local
from offmarl.programs.offline import resolve_args
from offmarl.programs.program import structure
from offmarl.programs.registry import load
from offmarl.programs.runs.dataset import DatasetStatistics
from offmarl.programs.runs.loop import offline_schedule
from offmarl.teams import teams_of
from offmarl.types import EnvSpec
from offmarl.vault import open_vault


@contextmanager
def _noted(
    faults: list[OffmarlError], name: str, code: str, *error_types: type[Exception]
) -> Iterator[None]:
    """Note a fault; warn of the user's own code, and of these types, which only fail cells."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if is_users(code) or isinstance(error, error_types):
            tracking.notice(f"warning: {name} will fail: {summarize(error)}")
        elif isinstance(error, OffmarlError):
            faults.append(error)
        else:
            raise


def require_fit(plan: Plan) -> None:
    """Raise an error that names all faults of a plan, before anything is recorded.

    `OptionError` if an unfinished cell's baseline cannot learn from data of its kind, such as a
    baseline for discrete actions from continuous ones; that of `offmarl.envs.make` if an
    environment cannot be made. A vault that is not there fails its own cells: it is named. Data
    that has yet to be downloaded is not checked, and neither is a baseline that reads its data when
    it is built.
    """
    faults: list[OffmarlError] = []
    options = [recipe.options for recipe in plan.recipes.values()]
    options += [cell.options for cell in plan.cells]
    for name in dict.fromkeys(values.get("env") for values in options):
        if name not in (None, "none"):
            with _noted(faults, name, name):
                envs.make(name)
    specs: dict[str, EnvSpec | None] = {}
    for cell in plan.cells:
        label = cell.data.label
        if is_current(cell, cell_file(plan, cell)):
            continue
        if label not in specs:
            specs[label] = None
            recipe = cell.data.source
            env = recipe.options.get("env", "") if isinstance(recipe, Recipe) else ""
            with _noted(faults, label, env, VaultError):
                specs[label] = _spec_of(cell.data)
        with _noted(faults, cell.label, cell.baseline.program):
            module = load("baseline", cell.baseline.program)
            if (spec := specs[label]) is not None:
                _require_fit(cell, spec, module)
    raise_together(faults)


def _spec_of(data: PlanData) -> EnvSpec | None:
    """Return the sizes of data; None if they are not known here."""
    if isinstance(data.source, Recipe):
        env = data.source.options.get("env")
        return None if env is None else envs.make(env).spec
    require_vault(data.source)
    return open_vault(local(data.source)).spec if local(data.source).exists() else None


def _require_fit(cell: Cell, spec: EnvSpec, module: ModuleType) -> None:
    options = read_values(module.Args, cell.options, cell.label)
    args = resolve_args(module.Args(**options, vault="unknown"), spec)
    if len(teams_of(spec)) > 1 and args.env != "none":
        raise OptionError(
            f"{cell.data.label} has a return for each team, and no single score that tables could "
            'show: leave it out, or compare agreement with held-out actions (env = "none" and '
            "held_out)."
        )
    try:
        offline_schedule(module.make(spec, structure(args), DatasetStatistics(None)), args)
    except RunError:  # it reads its data, which may not be there yet
        return
    except OffmarlError as error:
        raise OptionError(
            f"{cell.label}: {error} Or give {cell.baseline.label} a list of `datasets` that does "
            "without it."
        ) from None
