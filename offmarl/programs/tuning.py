"""Search for settings with which a program learns: ``offmarl tune``.

Optuna proposes values (a tree-structured Parzen estimator, Bergstra et al. 2011) and stops trials
that learn less than the median of the earlier ones. Trials are stored as they end, in an SQLite
file. What is proposed depends on the seed and the stored trials only, so that a stopped search goes
on as if it had never stopped; a trial that was running is repeated. The first trial is the default:
the values with which the program would run without a search.
"""

import json
import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, NamedTuple

import numpy as np
import tomli_w
from numpy.typing import NDArray

from offmarl import settings, tracking
from offmarl._compiling import pinned
from offmarl._imports import import_optional
from offmarl._lock import writing
from offmarl.config import PositiveInt, Role, Seed, Validated, with_role
from offmarl.envs.registry import code_of
from offmarl.errors import OffmarlError, OptionError, RunError, Stopped
from offmarl.launch import Work, once
from offmarl.paths import local
from offmarl.programs.continuing import start_of_baseline
from offmarl.programs.drawing import open_data
from offmarl.programs.evaluate import make_evaluator
from offmarl.programs.identity import MAY_DIFFER, differences, made_from
from offmarl.programs.offline import digests
from offmarl.programs.program import Args, OnlineArgs, shared_names
from offmarl.programs.registry import origin_of, program_of
from offmarl.programs.run import watched
from offmarl.programs.search import Space, drawn
from offmarl.programs.sides import opponents_of
from offmarl.programs.unrecorded import learning_curve, scored_environment

Score = Literal["last", "area"]

_WARM_UP = 5
"""Trials that are never stopped early; twice as many proposals are drawn at random."""


@dataclass(frozen=True)
class Search(Validated):
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
    prune: bool = True
    """Stop trials that are worse than the median of the earlier ones at the same step."""


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
    """Number of the trial with the values that were not searched; older searches have none."""


_NAME = "tune"
"""Name of the study in its storage."""


class _Pruned(Exception):
    """Ends a trial that is worse than others."""


def tune(
    program: ModuleType,
    args: Validated,
    space: Space,
    file: str | Path,
    search: Search | None = None,
) -> Tuned:
    """Search settings of a program, and write the best; after a kill, the same call continues.

    The arguments that are in the space are replaced in each trial but the first. The trials are
    stored beside the TOML file that is written, as ``.db``. Raises `OptionError` if nothing can be
    searched or no trial could be run, `RunError` if the file belongs to another search, is in use
    or has unreadable trials, `MissingExtraError` without Optuna, and `Stopped` after Ctrl-C.
    """
    study = _Study(program, args, space, local(file), search or Search())
    take_over = getattr(args, "take_over", False)
    with writing(Path(f"{study.file}.lock"), study.file, take_over), study.stored():
        return study.run()


def _require_file(file: Path) -> None:
    """Raise `OptionError` if a search cannot write its settings there."""
    if file.suffix != ".toml" or file.is_dir():
        raise OptionError(
            f"--out {file} is not the name of a TOML file: give one that ends in .toml."
        )
    stored = file.with_suffix(".db").exists() or file.with_suffix(".journal").exists()
    if file.exists() and not stored:
        raise OptionError(
            f"{file} exists, and has no trials beside it to continue: the search would replace it. "
            "Give another --out."
        )


@pinned()
def _made_from(program: ModuleType, args: Validated) -> dict[str, Any]:
    """Return what scores are made from; raise what every trial would, such as that of no data.

    A search compares scores, so the version of offmarl may not differ, as it may in a run.
    """
    source: dict[str, Any] = {}
    if isinstance(args, OnlineArgs):
        env: Any = scored_environment(args)
        source = opponents_of(env)
    else:
        assert isinstance(args, Args)
        evaluator = make_evaluator(args, dataset := open_data(args))
        env = evaluator.env
        source = digests(dataset, evaluator) | start_of_baseline(args, dataset.spec).source
        if args.weight and (code := code_of(args.weight)):
            source |= {"weight_source": code}
    if env is not None and env.spec.package:
        source |= {"package": env.spec.package}
    found = made_from(origin_of(program.make), env, source)
    return {name: x for name, x in found.items() if name == "offmarl" or name not in MAY_DIFFER}


class _Study:
    """A search: its trials and its files."""

    def __init__(
        self, program: ModuleType, args: Validated, space: Space, file: Path, search: Search
    ):
        self.program, self.args, self.space, self.file = program, args, space, file
        self._search, self.name = search, program_of(program.Args)[0]
        if not space:
            raise OptionError("there is no argument to search: give a table [search] of ranges.")
        _require_fresh(args, space)
        _require_file(file)
        self._made_from = _made_from(program, args)
        self._optuna: Any = import_optional("optuna", "tune")
        self._optuna.logging.set_verbosity(self._optuna.logging.WARNING)
        self._work, self._writes = file.with_suffix(".trial"), True

    def run(self) -> Tuned:
        """Run the trials that are missing."""
        study = self.open()
        done = len(self.ended(study))
        with tracking.progress(f"tune {self.name}", self._search.trials, done) as advance:
            try:
                for number in range(done, self._search.trials):
                    advance(1, self.trial(study, number))
            except KeyboardInterrupt as stop:
                raise Stopped(
                    f"stopped after {len(self.ended(study))} trials: the same command continues.",
                    getattr(stop, "signum", 2),
                ) from stop
            finally:
                shutil.rmtree(self._work, ignore_errors=True)
        return self.result(study)

    def open(self) -> Any:
        """Open the stored trials; those that were running are repeated with the same values."""
        study = self._opened(self._storage)
        state = self._optuna.trial.TrialState
        for trial in study.get_trials(states=(state.RUNNING,)):
            study.tell(trial.number, state=state.FAIL)
            if self.ended(study):  # the first one is the default, and needs no parameters
                study.enqueue_trial(trial.params)
        return study

    def open_shared(self) -> Any:
        """Open the trials that several tasks add to, in a file that may be on a network."""
        return self._opened(self._journal)

    def share(self) -> int:
        """Move the trials into the file that tasks share; return how many have ended."""
        if not self._journal_file.exists() and self.file.with_suffix(".db").exists():
            with self.stored(Exception):
                self._optuna.copy_study(
                    from_study_name=_NAME,
                    from_storage=self._database(),
                    to_storage=self._journal(),
                )
        return len(self.ended(self.open_shared()))

    def _storage(self) -> Any:
        """Return the storage of a search in one process, or that of tasks if there is one."""
        if self._journal_file.exists():
            return self._journal()
        return self._database()

    def _database(self) -> str:
        """Return the address of the trials of one process, in which "?" does not end the path."""
        from sqlalchemy import URL

        return URL.create("sqlite", database=str(self.file.with_suffix(".db"))).render_as_string()

    @property
    def _journal_file(self) -> Path:
        return self.file.with_suffix(".journal")

    def _journal(self) -> Any:
        from optuna.storages import JournalStorage
        from optuna.storages.journal import JournalFileBackend

        return JournalStorage(JournalFileBackend(str(self._journal_file)))

    def _opened(self, storage: Callable[[], Any]) -> Any:
        """Open the trials of this search; `RunError` if they are another's, or unreadable."""
        with self.stored(Exception):
            study = self._optuna.create_study(
                storage=storage(), study_name=_NAME, direction="maximize", load_if_exists=True
            )
            study.get_trials(deepcopy=False)
            self._check(study)
        return study

    @contextmanager
    def stored(self, *kinds: type[Exception]) -> Iterator[None]:
        """Raise `RunError` for errors of the file of trials, or of these kinds."""
        from sqlalchemy.exc import SQLAlchemyError

        try:
            yield
        except OffmarlError:
            raise
        except (self._optuna.exceptions.OptunaError, SQLAlchemyError, *kinds) as error:
            file = self._journal_file
            file = file if file.exists() else self.file.with_suffix(".db")
            reason = str(error.__cause__ or error).partition("\n")[0].rstrip(".")
            raise RunError(
                f"the trials in {file} cannot be used ({reason}): end the process that uses the "
                "file, make it writable, restore it from a copy, or give another --out."
            ) from error

    def _check(self, study: Any) -> None:
        """Record what a search must be continued with, or compare it; `RunError` if it differs."""
        identity, found = self.identity(), study.user_attrs.get("identity")
        if found is None:
            study.set_user_attr("identity", identity)
            return
        given = {**found, "arguments": json.loads(found["arguments"])}
        wanted = {**identity, "arguments": json.loads(identity["arguments"])}
        for path, theirs, ours in differences(given, wanted):
            raise RunError(
                f"{self.file} was started with {path.removeprefix('arguments.')} {theirs!r}, not "
                f"{ours!r}: give the same arguments, data and code to continue, or another --out."
            )

    def work_in(self, directory: Path) -> None:
        """Let trials write their runs into a directory."""
        directory.mkdir(parents=True, exist_ok=True)
        self._work, self._writes = directory / "run", False  # others write at the same time

    def identity(self) -> dict[str, Any]:
        """Return what a search must be continued with."""
        args = {field.name: getattr(self.args, field.name) for field in _fields(self.args)}
        free = with_role(type(self.args), Role.FREE)
        kept = {name: x for name, x in args.items() if name not in (*free, *self.space)}
        search = {"seeds": self._search.seeds, "score": self._search.score}
        search |= {"search_seed": self._search.search_seed, "prune": self._search.prune}
        space = {name: one.words() for name, one in self.space.items()}
        found: dict[str, Any] = tracking.plain({**self._made_from, **search, "ranges": space})
        return found | {"arguments": json.dumps(tracking.plain(kept), sort_keys=True)}

    def ended(self, study: Any) -> list[Any]:
        """Return the trials, without those that were interrupted."""
        state = self._optuna.trial.TrialState
        return [
            trial
            for trial in study.get_trials(deepcopy=False)
            if trial.state in (state.COMPLETE, state.PRUNED)
            or (trial.state == state.FAIL and "error" in trial.user_attrs)
        ]

    def trial(self, study: Any, number: int) -> str:
        """Run a trial, and return the best score in words."""
        optuna, search = self._optuna, self._search
        is_default = not number and not any(map(_is_default, self.ended(study)))
        study.sampler = optuna.samplers.TPESampler(
            seed=_sampler_seed(search.search_seed, number), n_startup_trials=2 * _WARM_UP
        )
        study.pruner = optuna.pruners.NopPruner()
        if search.prune and not is_default:
            study.pruner = optuna.pruners.MedianPruner(_WARM_UP, n_warmup_steps=2)
        trial, state = study.ask(), optuna.trial.TrialState
        values = (
            self._default(study, trial)
            if is_default
            else {name: one.suggest(trial, name) for name, one in self.space.items()}
        )
        trial.set_user_attr("values", tracking.plain(values))
        try:
            score = self._score(trial, values)
        except _Pruned:
            study.tell(trial, state=state.PRUNED)
        except OffmarlError as error:
            self._fail(study, trial, str(error))
        else:
            if math.isfinite(score):
                study.tell(trial, score)
                if self._writes:
                    self._write(study)
            else:
                self._fail(study, trial, "the score is not finite")
        best = self._best(study)
        return "" if best is None else f"best {best.value:.4g}"

    def _default(self, study: Any, trial: Any) -> dict[str, Any]:
        """Return the program's own values; a trial learns from those that are in their ranges."""
        values = {name: getattr(self.args, name) for name in self.space}
        known = {name: drawn(one, name, values[name]) for name, one in self.space.items()}
        fixed = {key: x for one in known.values() for key, x in one.items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the class is experimental
            study.sampler = self._optuna.samplers.PartialFixedSampler(fixed, study.sampler)
        for name in filter(known.get, known):
            self.space[name].suggest(trial, name)
        trial.set_user_attr("default", True)
        return values

    def _fail(self, study: Any, trial: Any, error: str) -> None:
        """Record that values cannot be used, such as sizes that do not fit each other."""
        trial.set_user_attr("error", error)
        study.tell(trial, state=self._optuna.trial.TrialState.FAIL)

    def _score(self, trial: Any, values: Mapping[str, Any]) -> float:
        """Train with some values, and return the score."""
        curve: list[float] = []

        def score() -> float:
            return float(np.mean(curve)) if self._search.score == "area" else curve[-1]

        def report(_step: int, evaluated: NDArray[Any]) -> None:
            curve.append(float(evaluated.mean()))
            trial.report(score(), len(curve))
            if trial.should_prune():
                raise _Pruned

        if isinstance(self.args, OnlineArgs):
            online = replace(self.args, **values)
            learning_curve(self.program.make, online, self._search.seeds, report)
        else:
            shutil.rmtree(self._work, ignore_errors=True)
            assert isinstance(self.args, Args)
            seeds = self._search.seeds
            args = replace(self.args, **values, out=self._work, seeds=seeds)
            with watched(report):
                self.program.main(args)
        return score()

    # ------------------------------------------------------------------------------ results

    def _best(self, study: Any) -> Any:
        complete = [one for one in self.ended(study) if one.value is not None]
        complete = [one for one in complete if one.state.name == "COMPLETE"]
        return max(complete, key=lambda x: (x.value, _is_default(x)), default=None)

    def _write(self, study: Any) -> None:
        """Write the settings of the best trial so far."""
        best = self._best(study)
        found, ended = best.user_attrs["values"], self.ended(study)
        values = self._fixed() | {name: x for name, x in found.items() if x is not None}
        number = 1 + [one.number for one in ended].index(best.number)
        about = [
            f"offmarl tune {self.name}: trial {number} of {len(ended)}, "
            f"score {best.value:.6g} ({self._search.score}, {self._search.seeds} seeds)",
            *(f"{key}: {value}" for key, value in self._about().items()),
            *(f"searched: {name} in {one.words()}" for name, one in self.space.items()),
        ]
        text = "".join(f"# {line}\n" for line in about) + tomli_w.dumps({self.name: values})
        tracking.replace_file(self.file, text)

    def _about(self) -> dict[str, Any]:
        names = ("env", "vault", self._budget)
        return {name: x for name in names if (x := getattr(self.args, name, None)) is not None}

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
        used = settings.used(self.args)
        chosen = {*used.given, *used.settings}
        kind = type(self.args)
        left_out = shared_names(self.args) - with_role(kind, Role.SHAPES | Role.LEARNS)
        left_out |= {self._budget, *with_role(kind, Role.CASE)}
        return {
            field.name: tracking.plain(value)
            for field in _fields(self.args)
            if field.name not in left_out
            and (value := getattr(self.args, field.name)) is not None
            and (value != field.default or field.name in chosen)
        }

    def result(self, study: Any) -> Tuned:
        ended, best = self.ended(study), self._best(study)
        if best is None:
            reasons = [one.user_attrs.get("error", "it was stopped early") for one in ended]
            raise OptionError(f"no trial was completed: {reasons[-1]}")
        self._write(study)
        rows = [
            {
                "trial": number,
                "state": one.state.name.lower(),
                "score": one.value if one.state.name == "COMPLETE" else None,
                **one.user_attrs.get("values", {}),
            }
            for number, one in enumerate(ended, 1)
        ]
        default = next((n for n, one in enumerate(ended, 1) if _is_default(one)), None)
        return Tuned(self.file, best.user_attrs["values"], best.value, rows, default)


class TrialsWork(Work):
    """A search whose trials are blocks, which tasks add to one file.

    Which values a trial proposes depends on the trials that have ended before it, and so on the
    tasks that run at the same time. Takes the parameters of `tune`.
    """

    def __init__(
        self,
        program: ModuleType,
        args: Validated,
        space: Space,
        file: str | Path,
        search: Search,
    ):
        self._study = _Study(program, args, space, local(file), search)
        self._trials = search.trials
        self.space, self.file = space, local(file)
        super().__init__(f"tune {self._study.name}", self.file, self._study.identity())

    @property
    def num_blocks(self) -> int:
        """Number of trials, with those of earlier calls."""
        return self._trials

    def check(self) -> None:
        """Compare the arguments with those of earlier tasks, and count trials of other calls."""
        super().check()
        self.file.parent.mkdir(parents=True, exist_ok=True)
        found = once(self.directory / "blocks" / "earlier.json", self._study.share)
        for block in range(min(found, self._trials)):
            self.finish(block)

    def run(self, block: int) -> None:
        """Run a trial."""
        self._study.work_in(self.directory / "blocks" / f"trial-{block}")
        with self._study.stored():
            self._study.trial(self._study.open_shared(), block)

    def is_complete(self) -> bool:
        """Whether all trials have ended, and their best is in the file."""
        is_joined = self.file.exists() and not (self.directory / "blocks").exists()
        return is_joined and self._study.share() >= self._trials

    def join(self) -> None:
        """Write the settings of the best trial."""
        self.tuned()

    def tuned(self) -> Tuned:
        """Return the result."""
        with self._study.stored():
            return self._study.result(self._study.open_shared())


def _require_fresh(args: Validated, space: Space) -> None:
    """Refuse what a recorder starts from, because its trials start from nothing."""
    if not isinstance(args, OnlineArgs):
        return
    for name in ("init", "prefill"):
        if name in space or getattr(args, name) is not None:
            raise OptionError(
                f"the trials of a search start from nothing: leave out {name}, and give --{name} "
                "when you record with the settings that are found."
            )


def _is_default(trial: Any) -> bool:
    return "default" in trial.user_attrs


def _sampler_seed(search_seed: int, number: int) -> int:
    """Return the seed of a trial's proposals, which searches with other seeds do not share."""
    return int(np.random.SeedSequence([search_seed, number]).generate_state(1)[0])


def _fields(args: Validated) -> tuple[Any, ...]:
    return fields(args)  # type: ignore[arg-type]
