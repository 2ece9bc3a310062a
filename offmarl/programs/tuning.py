"""Search for settings with which a program learns: ``offmarl tune``.

Optuna proposes values, stops trials that learn less than others, and stores them in a journal, to
which tasks add, too. What is proposed depends on the seed and the stored trials only, so that a
stopped search goes on as if it had never stopped; a trial that was running is repeated. The first
trial is the default: the values with which the program would run without a search.
"""

import json
import math
import os
import shutil
import uuid
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, fields, replace
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Annotated, Any, Literal, NamedTuple, cast, get_type_hints

import numpy as np
import tomli_w
from numpy.typing import NDArray

from offmarl import settings, trackers, tracking
from offmarl._compiling import pinned
from offmarl._imports import import_optional
from offmarl._lock import hold_lock
from offmarl.config import (
    REPEATED,
    Fraction,
    NonNegative,
    Positive,
    PositiveInt,
    Role,
    Seed,
    Validated,
    check_names,
    converted,
    with_role,
)
from offmarl.envs.registry import code_of
from offmarl.errors import (
    OffmarlError,
    OptionError,
    RunError,
    Stopped,
    UnknownNameError,
    unknown_name,
)
from offmarl.launch import Work
from offmarl.paths import hide_all_credentials, local_output
from offmarl.programs.offline import digests
from offmarl.programs.program import Args, OnlineArgs, shared_names
from offmarl.programs.recording.sides import learning_environment, opponents_of
from offmarl.programs.registry import origin_of
from offmarl.programs.runs.continuing import start_of_baseline
from offmarl.programs.runs.drawing import open_data
from offmarl.programs.runs.evaluate import make_evaluator
from offmarl.programs.runs.identity import MAY_DIFFER, differences, made_from
from offmarl.programs.runs.run import watch_runs
from offmarl.teams import teams_of

Score = Literal["last", "area"]

_SAMPLERS = {"tpe": "TPESampler", "gp": "GPSampler", "random": "RandomSampler"}
_PRUNERS = {"median": "MedianPruner", "hyperband": "HyperbandPruner", "none": "NopPruner"}
"""Optuna's classes."""

# ---------------------------------------------------------------------------------- ranges

_TRIAL_SEEDS = 1_000_000
"""Added to the seeds of trials, so that a run with the best settings does not repeat their luck."""
_NOT_SIZES = ("capacity", "seeds")
"""Whole numbers whose value does not trade off anything: more is better, or another question."""


class Range(NamedTuple):
    """Numbers from ``low`` to ``high``: whole ones if both ends are."""

    low: float
    high: float
    log: bool = False
    """Whether their logarithms are drawn uniformly."""
    complement: bool = False
    """Whether 1 minus the number is drawn instead: for those close to 1, such as discounts."""

    def words(self) -> str:
        """Describe the range."""
        scale = ", on a scale of log(1 - x)" if self.complement else ", log" if self.log else ""
        return f"{self.low:g} to {self.high:g}{scale}"

    def suggest(self, trial: Any, name: str) -> float:
        """Draw a value."""
        if self.complement:
            rest: float = trial.suggest_float(f"1-{name}", 1 - self.high, 1 - self.low, log=True)
            return 1 - rest
        is_whole = isinstance(self.low, int) and isinstance(self.high, int)
        suggest = trial.suggest_int if is_whole else trial.suggest_float
        value: float = suggest(name, self.low, self.high, log=self.log)
        return value


class Choices(NamedTuple):
    """Some values."""

    values: tuple[Any, ...]

    def words(self) -> str:
        """Describe the values."""
        return ", ".join(str(value) for value in self.values)

    @property
    def options(self) -> tuple[Any, ...]:
        """Values as Optuna stores them: numbers, texts and truth values; others as their text."""
        plain = all(isinstance(value, bool | int | float | str) for value in self.values)
        return self.values if plain else tuple(map(str, self.values))

    def suggest(self, trial: Any, name: str) -> Any:
        """Draw a value."""
        option = trial.suggest_categorical(name, self.options)
        return self.values[self.options.index(option)]


Space = dict[str, Range | Choices]
"""Ranges to search, by argument."""


def parameters_of(entry: Range | Choices, name: str, value: Any) -> dict[str, Any]:
    """Return Optuna's parameters for a value; empty if it is outside the range."""
    if isinstance(entry, Choices):
        return {name: entry.options[entry.values.index(value)]} if value in entry.values else {}
    if not isinstance(value, int | float) or not entry.low <= value <= entry.high:
        return {}
    if isinstance(entry, Range) and entry.complement:
        return {f"1-{name}": min(max(1 - value, 1 - entry.high), 1 - entry.low)}
    return {name: value}


def derive_space(args: Validated) -> Space:
    """Return ranges for a program's own arguments, from their types and values.

    Positive numbers and small fractions: a tenth to ten times the value, on a logarithmic scale.
    Fractions above one half, such as discounts: the same of their difference to 1. Sizes: half the
    value, the value and twice the value. Numbers that are zero, and arguments of other types, are
    not searched.
    """
    hints = get_type_hints(type(args), include_extras=True)
    shared = shared_names(args) - with_role(type(args), Role.SEARCHED)
    names = [name for name in hints if name not in shared]
    ranges = {name: _range(name, hints[name], getattr(args, name)) for name in names}
    return {name: entry for name, entry in ranges.items() if entry is not None}


def _range(name: str, hint: Any, value: Any) -> Range | Choices | None:
    if hint == Fraction and value is not None and 0.5 < value < 1:
        return Range(max(1 - 10 * (1 - value), 0), 1 - (1 - value) / 10, True, complement=True)
    if hint in (Positive, NonNegative, Fraction) and value and value < (hint == Fraction or 1e9):
        return Range(value / 10, min(10 * value, 1.0) if hint == Fraction else 10 * value, log=True)
    if hint == PositiveInt and name not in _NOT_SIZES:
        return Choices(tuple(sorted({max(value // 2, 1), value, 2 * value})))
    return None


def read_space(path: Path, kind: type[Validated]) -> Space:
    """Return the ranges in the table ``[search]`` of a file; `OptionError` for what is not valid.

    An entry is a list of values, or ``{low = ..., high = ..., log = true}``.
    """
    table = settings.tables(path).get(settings.SEARCH)
    if not table:
        raise OptionError(
            f"{path} has no table [{settings.SEARCH}]: add one with the ranges to search."
        )
    hints = get_type_hints(kind, include_extras=True)
    section = f"{path} [{settings.SEARCH}]"
    try:
        check_names(kind, table, with_role(kind, Role.CASE))
        return {name: _entry(name, hints[name], entry) for name, entry in table.items()}
    except (OptionError, UnknownNameError) as error:
        raise OptionError(f"{section}: {error}") from None


def _entry(name: str, hint: Any, entry: Any) -> Range | Choices:
    if isinstance(entry, list) and entry:
        return Choices(tuple(converted(name, hint, value) for value in entry))
    required = {"low", "high"}
    if not isinstance(entry, Mapping) or not required <= entry.keys() <= {*required, "log"}:
        raise OptionError(
            f"{name} must be a list of values, or {{low = ..., high = ..., log = true}}, "
            f"not {entry!r}."
        )
    low, high = (converted(name, hint, entry[key]) for key in ("low", "high"))
    log = entry.get("log", False)
    if not isinstance(low, int | float) or isinstance(low, bool):
        raise OptionError(f"{name} is not a number: give a list of values.")
    if low > high or (log and low <= 0):
        raise OptionError(f"{name}: low must be at most high, and with log above 0.")
    return Range(low, high, bool(log))


def choose_ranges(space: Space, names: Iterable[str]) -> Space:
    """Return the part of a space with some names; all of it if there are none."""
    for name in names:
        if name not in space:
            raise unknown_name("argument with a range", name, space)
    return {name: entry for name, entry in space.items() if name in names} if names else space


# ---------------------------------------------------------------------------------- searches


@dataclass(frozen=True)
class SearchSpace(Validated):
    """How settings are searched."""

    trials: PositiveInt = 50
    """Number of trials, with those of earlier calls."""
    seeds: PositiveInt = 3
    """Number of training seeds of a trial, which share the device; the score is their mean."""
    search_seed: Seed = 0
    """Random seed of the proposals."""
    score: Score = "last"
    """What is maximised: the last evaluation, or "area", the mean of all evaluations of a training,
    for settings that also learn fast. Evaluations measure the return; without an environment, the
    agreement with held-out actions."""
    sampler: Literal["tpe", "gp", "random"] = "tpe"
    """What proposes values: a tree-structured Parzen estimator, a Gaussian process (which needs
    PyTorch), both after nine random trials; or chance."""
    pruner: Literal["median", "hyperband", "none"] = "median"
    """What stops trials early. median: those that are worse than the median of the earlier ones at
    the same step, from the sixth trial on; hyperband: all but the best third at each rung of
    evaluations."""
    track: Annotated[tuple[str, ...], REPEATED] = ()
    """mlflow or mlflow=URI: MLflow gets a parent run with the scores, the file of settings and the
    figures, and a nested run for each trial, with its metrics and its policy."""


class Tuned(NamedTuple):
    """The result of a search."""

    file: Path
    """File of settings, for ``--settings``."""
    best: Mapping[str, Any]
    """The best trial's values, by argument."""
    score: float
    trials: list[dict[str, Any]]
    """Number, state, score and values of each trial."""
    default: int | None = None
    """Number of the trial with the values that were not searched."""


def tune(
    program: ModuleType,
    args: Validated,
    space: Space,
    file: str | Path,
    search: SearchSpace | None = None,
) -> Tuned:
    """Search settings of a program, and write the best; after a kill, the same call continues.

    The arguments that are in the space are replaced in each trial but the first. The trials are
    stored beside the TOML file that is written, as ``.journal``. Raises `OptionError` if nothing
    can be searched or no trial could be run, `RunError` if the file belongs to another search, is
    in use or has unreadable trials, `MissingExtraError` without Optuna, and `Stopped` after Ctrl-C.
    """
    return TrialsWork(program, args, space, file, search or SearchSpace()).search()


class TrialsWork(Work):
    """A search whose trials are blocks; takes the parameters of `tune`.

    Which values a trial proposes depends on the trials that have ended before it, and so on the
    tasks that run at the same time.
    """

    def __init__(
        self,
        program: ModuleType,
        args: Validated,
        space: Space,
        file: str | Path,
        search: SearchSpace,
    ):
        self.program, self.args, self.space, self.file = program, args, space, local_output(file)
        self._search, self._program_name = search, origin_of(program.make).name
        if not space:
            raise OptionError("there is no argument to search: give a table [search] of ranges.")
        _require_fresh(args, space)
        _require_file(self.file)
        self._made_from = _made_from(program, args)
        self._optuna: Any = import_optional("optuna", "tune")
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        if search.sampler == "gp":
            import_optional("torch", "torch")
        for text in search.track:
            if text.partition("=")[0] != "mlflow":
                raise OptionError(f"--track {text}: searches are tracked by mlflow alone.")
        trackers.check_trackers(search.track)
        super().__init__(f"tune {self._program_name}", self.file, self._facts(), search.trials)

    def _facts(self) -> dict[str, Any]:
        """Return the facts that must be the same to continue a search."""
        args = {field.name: getattr(self.args, field.name) for field in fields(self.args)}
        free = with_role(type(self.args), Role.FREE)
        fixed = {name: x for name, x in args.items() if name not in (*free, *self.space)}
        names = ("seeds", "score", "search_seed", "sampler", "pruner")
        search = {name: getattr(self._search, name) for name in names}
        space = {name: entry.words() for name, entry in self.space.items()}
        facts: dict[str, Any] = tracking.plain({**self._made_from, **search, "ranges": space})
        arguments = hide_all_credentials(tracking.plain(fixed))
        return facts | {"arguments": json.dumps(arguments, sort_keys=True)}

    def missing(self) -> list[int]:
        """Return the trials that have not ended."""
        if not self._journal.exists():
            return [*range(self.num_blocks)]
        done = {trial.user_attrs["block"] for trial in self._ended(self._open())}
        return [block for block in range(self.num_blocks) if block not in done]

    def is_done(self, block: int) -> bool:
        """Return whether a trial has ended."""
        return block not in self.missing()

    def check(self) -> None:
        """Record the source of scores in the journal, or compare it."""
        self.file.parent.mkdir(parents=True, exist_ok=True)
        study = self._open()
        identity = study.user_attrs.get("identity")
        if identity is None:
            study.set_user_attr("tracking", uuid.uuid4().hex)
            study.set_user_attr("identity", identity := self.identity)
        stored = {**identity, "arguments": json.loads(identity["arguments"])}
        current = {**self.identity, "arguments": json.loads(self.identity["arguments"])}
        for path, theirs, ours in differences(stored, current):
            raise RunError(
                f"{self.file} was started with {path.removeprefix('arguments.')} {theirs!r}, not "
                f"{ours!r}: give the same arguments, data and code to continue, or another --out."
            )
        self._track(study, ())

    def is_complete(self) -> bool:
        """Return whether all trials have ended, and their best is in the file."""
        if self.missing() or not self.file.exists():
            return False
        study = self._open()
        return self._best(study) is not None and self.file.read_text() == self._text(study)

    def join(self) -> None:
        """Write the settings of the best trial."""
        self.tuned()

    def search(self) -> Tuned:
        """Run the trials that are missing; see `tune`."""
        take_over = getattr(self.args, "take_over", False)
        try:
            with hold_lock(self.lock, self.file, take_over):
                self.check()
                missing = self.missing()
                done = self.num_blocks - len(missing)
                try:
                    with tracking.progress(self.name, self.num_blocks, done) as advance:
                        for block in missing:
                            self.run(block)
                            advance(1, self.best_score())
                finally:
                    self.clean()
                return self.tuned()
        except KeyboardInterrupt as stop:
            raise Stopped(
                f"stopped after {self.num_blocks - len(self.missing())} trials: the same command "
                "continues.",
                getattr(stop, "signum", 2),
            ) from stop
        finally:
            with suppress(OSError):  # it has the logs of tasks
                self.directory.rmdir()

    def tuned(self) -> Tuned:
        """Write the settings of the best trial, and return the result."""
        trials = self._ended(study := self._open())
        if (best := self._best(study)) is None:
            reasons = [trial.user_attrs.get("error", "it was stopped early") for trial in trials]
            raise OptionError(f"no trial was completed: {reasons[-1]}")
        tracking.replace_file(self.file, self._text(study))
        rows = [
            {
                "trial": number,
                "state": trial.state.name.lower(),
                "score": trial.value if trial.state.name == "COMPLETE" else None,
                **trial.user_attrs.get("values", {}),
            }
            for number, trial in enumerate(trials, 1)
        ]
        default = next((n for n, x in enumerate(trials, 1) if not x.user_attrs["block"]), None)
        self._track(study, trials)
        return Tuned(self.file, best.user_attrs["values"], best.value, rows, default)

    def _open(self) -> Any:
        """Open the journal of trials; `RunError` if it cannot be read."""
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        file = self._journal
        try:
            _drop_unfinished_line(file)
            study = self._optuna.create_study(
                storage=JournalStorage(JournalFileBackend(str(file))),
                study_name="tune",
                direction="maximize",
                load_if_exists=True,
            )
            study.get_trials(deepcopy=False)
        except Exception as error:
            reason = str(error.__cause__ or error).partition("\n")[0].rstrip(".")
            raise RunError(
                f"the trials in {file} cannot be used ({reason}): end the process that uses the "
                "file, make it writable, restore it from a copy, or give another --out."
            ) from error
        return study

    @property
    def _journal(self) -> Path:
        return self.file.with_suffix(".journal")

    @staticmethod
    def _ended(study: Any) -> list[Any]:
        """Return the trials, without those that were interrupted."""
        return [trial for trial in study.get_trials(deepcopy=False) if trial.state.is_finished()]

    def figures(self) -> dict[str, bytes]:
        """Return Optuna's plots of the trials, as SVG by name; fewer if there are few trials."""
        from matplotlib import pyplot

        study, plots = self._open(), self._optuna.visualization.matplotlib
        complete = [trial.params for trial in self._ended(study) if trial.state.name == "COMPLETE"]
        importance, figures = self._optuna.importance, dict[str, Any]()
        with pyplot.rc_context(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # these plots are experimental
            figures["history"] = plots.plot_optimization_history(study)
            figures["intermediate values"] = plots.plot_intermediate_values(study)
            if len({*map(str, complete)}) > 1 and len(complete[-1]) > 1:
                ranked = importance.PedAnovaImportanceEvaluator()  # others need scikit-learn
                first = [*importance.get_param_importances(study, evaluator=ranked)][:2]
                figures["importances"] = plots.plot_param_importances(study, ranked)
                figures["contour"] = plots.plot_contour(study, first)
            for name, axes in figures.items():
                axes.figure.savefig(file := BytesIO(), format="svg", bbox_inches="tight")
                pyplot.close(axes.figure)
                figures[name] = file.getvalue()
        return figures

    def _track(self, study: Any, trials: Sequence[Any]) -> None:
        """Give trackers the scores of the trials that have ended, the settings and the figures."""
        if not self._search.track:
            return
        name, identity = f"{self.name}: {self.file.stem}", study.user_attrs["tracking"]
        facts = self.identity | json.loads(self.identity["arguments"])
        run = trackers.Tracked(self.file.parent, name, identity, trackers.flatten_facts(facts))
        scores = [(x.number, {"score": x.value}) for x in trials if x.state.name == "COMPLETE"]
        with TemporaryDirectory() as folder:
            files = [self.file] if trials else []
            for name, image in self.figures().items() if trials else ():
                files.append(Path(folder) / f"{name}.svg")
                files[-1].write_bytes(image)
            trackers.give_run(self._search.track, run, scores, files, is_required=not trials)

    # ------------------------------------------------------------------------ a trial

    def run(self, block: int) -> None:
        """Run a trial; values that cannot be used are a trial that failed."""
        optuna, search, study = self._optuna, self._search, self._open()
        seed = int(np.random.SeedSequence([search.search_seed, block]).generate_state(1)[0])
        pruner = _PRUNERS[search.pruner if block else "none"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # some are experimental
            study.sampler = getattr(optuna.samplers, _SAMPLERS[search.sampler])(seed=seed)
            waits = {"n_warmup_steps": 2} if pruner == "MedianPruner" else {}
            study.pruner = getattr(optuna.pruners, pruner)(**waits)
        trial, state = self._trial(study, block), optuna.trial.TrialState
        values = self._suggested(trial, block) if block else self._default
        trial.set_user_attr("values", tracking.plain(values))
        try:
            score = self._score(trial, values, self.directory / "blocks" / f"trial-{block}")
            if not math.isfinite(score):
                raise OptionError("the score is not finite")
        except optuna.TrialPruned:
            study.tell(trial, state=state.PRUNED)
        except OffmarlError as error:
            trial.set_user_attr("error", str(error))
            study.tell(trial, state=state.FAIL)
        else:
            study.tell(trial, score)
            tracking.replace_file(self.file, self._text(study))

    def _trial(self, study: Any, block: int) -> Any:
        """Return the trial of a block; one that was interrupted goes on with its values."""
        of_blocks = {trial.user_attrs["block"]: trial for trial in study.get_trials(deepcopy=False)}
        optuna, running = self._optuna, of_blocks.get(block)
        if running is not None:
            return optuna.trial.Trial(study, running._trial_id)
        # All values are proposed before one is stored: they follow from one stream of numbers.
        proposed = optuna.create_study(sampler=study.sampler, direction="maximize")
        proposed.add_trials(study.get_trials(deepcopy=False))
        if not block:
            params = (parameters_of(x, name, self._default[name]) for name, x in self.space.items())
            proposed.enqueue_trial({key: x for pairs in params for key, x in pairs.items()})
        self._suggested(trial := proposed.ask(), block)
        new = {"state": optuna.trial.TrialState.RUNNING, "user_attrs": {"block": block}}
        suggested = {"params": trial.params, "distributions": trial.distributions}
        study.add_trial(optuna.trial.create_trial(**new, **suggested))
        return self._trial(study, block)

    @property
    def _default(self) -> dict[str, Any]:
        """The values of the arguments that are searched."""
        return {name: getattr(self.args, name) for name in self.space}

    def _suggested(self, trial: Any, block: int) -> dict[str, Any]:
        """Return the values of a trial; of the first one, those in their ranges."""
        return {
            name: entry.suggest(trial, name)
            for name, entry in self.space.items()
            if block or parameters_of(entry, name, self._default[name])
        }

    def best_score(self) -> str:
        """Return the best score so far in words; empty if there is none."""
        best = self._best(self._open())
        return "" if best is None else f"best {best.value:.4g}"

    def _score(self, trial: Any, values: Mapping[str, Any], directory: Path) -> float:
        """Train with some values, and return the score."""
        curve: list[float] = []

        def score() -> float:
            return float(np.mean(curve)) if self._search.score == "area" else curve[-1]

        def report(_step: int, evaluated: NDArray[Any]) -> None:
            curve.append(float(evaluated.mean()))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # an interrupted trial has reported it before
                trial.report(score(), len(curve))
            if trial.should_prune():
                raise self._optuna.TrialPruned

        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        changes = {**values, "out": directory / "run", "seeds": self._search.seeds}
        changes["seed"] = (cast(Any, self.args).seed + _TRIAL_SEEDS) % 2**31
        changes["track"] = self._search.track
        if isinstance(self.args, OnlineArgs):
            changes["tiers"] = ""
        with watch_runs(report), trackers.as_part(trial.number, trial.study.user_attrs["tracking"]):
            self.program.main(replace(self.args, **changes))
        shutil.rmtree(directory)
        return score()

    @staticmethod
    def _best(study: Any) -> Any:
        with suppress(ValueError):  # no trial was completed
            return study.best_trial
        return None

    def _text(self, study: Any) -> str:
        """Return the file of settings of the best trial so far."""
        best = self._best(study)
        best_values, trials = best.user_attrs["values"], self._ended(study)
        values = self._fixed() | {name: x for name, x in best_values.items() if x is not None}
        number = 1 + [trial.number for trial in trials].index(best.number)
        names = ("env", "vault", self._budget)
        facts = {name: x for name in names if (x := getattr(self.args, name, None)) is not None}
        about = [
            f"offmarl tune {self._program_name}: trial {number} of {len(trials)}, "
            f"score {best.value:.6g} ({self._search.score}, {self._search.seeds} seeds)",
            *(f"{key}: {value}" for key, value in facts.items()),
            *(f"searched: {name} in {entry.words()}" for name, entry in self.space.items()),
        ]
        comments = "".join(f"# {line}\n" for line in about)
        return comments + tomli_w.dumps({self._program_name: values})

    @property
    def _budget(self) -> str:
        """Argument that says how long the program trains; a file of settings does not have it.

        The ``updates`` of recorders are those of a round.
        """
        return "total_steps" if isinstance(self.args, OnlineArgs) else "updates"

    def _fixed(self) -> dict[str, Any]:
        """Return the other arguments that shape the learning.

        Those that have their default, and neither were given nor are in a file, are left out.
        """
        used = settings.origins_of(self.args)
        explicit = {*used.given, *used.settings}
        kind = type(self.args)
        left_out = shared_names(self.args) - with_role(kind, Role.SHAPES | Role.LEARNS)
        left_out |= {self._budget, *with_role(kind, Role.CASE)}
        return {
            field.name: tracking.plain(value)
            for field in fields(self.args)
            if field.name not in left_out
            and (value := getattr(self.args, field.name)) is not None
            and (value != field.default or field.name in explicit)
        }


def _drop_unfinished_line(journal: Path) -> None:
    """Cut off a last line that a full disk has left without its end, before others follow it."""
    from optuna.storages.journal import JournalFileSymlinkLock

    content = journal.read_bytes() if journal.exists() else b""
    start = b'{"op_code"'[: len(content)]  # of any line; other files stay as they are
    if not content.startswith(start) or content.endswith(b"\n") or not content:
        return
    lock = JournalFileSymlinkLock(str(journal))
    lock.acquire()
    try:  # another process may have been writing the line
        os.truncate(journal, journal.read_bytes().rfind(b"\n") + 1)
    finally:
        lock.release()


def _require_file(file: Path) -> None:
    """Raise `OptionError` if a search cannot write its settings there."""
    if file.suffix != ".toml" or file.is_dir():
        raise OptionError(
            f"--out {file} is not the name of a TOML file: give one that ends in .toml."
        )
    if file.exists() and not file.with_suffix(".journal").exists():
        raise OptionError(
            f"{file} exists, and has no trials beside it to continue: the search would replace it. "
            "Give another --out."
        )


@pinned()
def _made_from(program: ModuleType, args: Validated) -> dict[str, Any]:
    """Return the source of scores; raise the errors that every trial would, such as a lack of data.

    A search compares scores, so the version of offmarl may not differ, as it may in a run.
    """
    source: dict[str, Any] = {}
    if isinstance(args, OnlineArgs):
        env: Any = learning_environment(args)
        if len(teams := teams_of(env.spec)) > 1:
            raise OptionError(
                f"{env.spec.name} has {len(teams)} teams, whose returns are not one number: give "
                f"--side with one of {', '.join(team.name for team in teams)}."
            )
        source = opponents_of(env)
    else:
        assert isinstance(args, Args)
        with closing(make_evaluator(args, dataset := open_data(args))) as evaluator:
            env = evaluator.env
            source = digests(dataset, evaluator) | start_of_baseline(args, dataset.spec).source
        if args.weight and (code := code_of(args.weight)):
            source |= {"weight_source": code}
    if env is not None and env.spec.package:
        source |= {"package": env.spec.package}
    record = made_from(origin_of(program.make), env, source)
    return {name: x for name, x in record.items() if name == "offmarl" or name not in MAY_DIFFER}


def _require_fresh(args: Validated, space: Space) -> None:
    """Refuse the runs and data that a recorder starts from: trials start without them."""
    if not isinstance(args, OnlineArgs):
        return
    for name in ("init", "prefill"):
        if name in space or getattr(args, name) is not None:
            raise OptionError(
                f"the trials of a search start from nothing: leave out {name}, and give --{name} "
                "when you record with the settings that are found."
            )
