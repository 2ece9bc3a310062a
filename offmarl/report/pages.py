"""HTML pages that describe a run, compare runs, and describe datasets.

A page is one file, made by a template in ``report/templates``. All text that a template shows is
escaped.
"""

from __future__ import annotations

import base64
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from offmarl._html import templates
from offmarl._version import __version__
from offmarl.errors import OffmarlError, OptionError, RunError
from offmarl.paths import hide_all_credentials
from offmarl.programs.registry import file_of_run
from offmarl.report import dataset_figures, tables
from offmarl.report.accumulators import DiscreteActions
from offmarl.report.comparison import ComparedRuns
from offmarl.report.contents import Survey, Surveys, warnings_by_dataset
from offmarl.report.curves import Curve, curves_of, learning_curves
from offmarl.report.figures import (
    COLOURS,
    chart,
    draw_curve,
    escape,
    figure_comparison,
    figure_curves,
    to_bytes,
)
from offmarl.report.run_scores import UNITS, Entry, broken_of
from offmarl.report.tables import Section
from offmarl.teams import only_or_all
from offmarl.terminal import number
from offmarl.tracking import (
    PARENT,
    RETURN,
    WALL_TIME,
    acting_of,
    labelled,
    progress,
    read_run,
    to_json,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from offmarl.envs import Environment

_MOST_FRAMES = 100

Films = tuple[Sequence[tuple[bytes, str]], Sequence[tuple[str, str]]]
"""GIFs of episodes with their captions; and what could not be drawn, with the reason."""


def render(template: str, **context: Any) -> str:
    """Return the page of a template in ``report/templates``; it escapes all texts."""
    environment = templates("offmarl.report", autoescape=True)
    environment.globals |= {"numeric_columns": _numeric_columns, "version": __version__}
    environment.filters |= {
        "number": number,
        "svg": partial(to_bytes, kind="svg"),
        "base64": lambda content: base64.b64encode(content).decode(),
    }
    return str(environment.get_template(template).render(context))


def _numeric_columns(rows: Sequence[Sequence[Any]]) -> set[int]:
    """Return the columns that hold numbers only, which are aligned right."""
    cell = re.compile(r"(about )?-?[\d.,]+(e[-+]\d+)?%?|")
    columns = enumerate(zip(*rows, strict=True))
    return {place for place, cells in columns if all(cell.fullmatch(number(x)) for x in cells)}


# ------------------------------------------------------------------------------------- runs


class RunReport(NamedTuple):
    """A run and its metrics."""

    directory: Path
    record: Mapping[str, Any]
    """Content of ``run.json``."""
    curves: Mapping[str, Curve]
    """By metric."""

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.title}: {self.directory}>"

    def _repr_html_(self) -> str:
        return "".join(section._repr_html_() for section in self.sections())

    @property
    def title(self) -> str:
        """The program, and its dataset or environment."""
        place = self.record.get("vault") or self.record["spec"]["name"]
        return f"{self.record['program']} on {place}"

    def evaluations(self) -> dict[str, Curve]:
        """Return the curves of the evaluations."""
        return {name: curve for name, curve in self.curves.items() if unit_of(name)}

    def metrics(self) -> dict[str, Curve]:
        """Return the curves of the training's metrics."""
        return {x: y for x, y in self.curves.items() if not unit_of(x) and x != PARENT}

    def notes(self) -> list[str]:
        """Say which curves end early because training diverged."""
        return [
            f"{name} has no finite value at the end of seed {', '.join(map(str, seeds))}: its "
            "curve lacks these steps."
            for name, seeds in broken_of(self.directory).items()
        ]

    def sections(self) -> Iterator[Section]:
        """Yield the tables of the report."""
        yield self.facts()
        for name, curve in self.evaluations().items():
            acting = acting_of(self.record) if name == RETURN else None
            entry = Entry(self.record["program"], acting)
            table = learning_curves({unit_of(name) or name: {entry: curve}})
            yield table._replace(columns=["metric", *table.columns[1:]])
        yield from self.details()

    def facts(self) -> Section:
        """Return a table of facts of the run."""
        wall = self.curves.get(WALL_TIME)
        facts = {
            "directory": str(self.directory),
            "kind": self.record["kind"],
            "data": self.record.get("vault") or "",
            "digest": str(self.record.get("vault_digest") or "")[:12],
            "environment": self.record["spec"]["name"],
            "seeds": ", ".join(map(str, self.record["seeds"])),
            "population": self._lineage() if PARENT in self.curves else "",
            "complete": "yes" if self.record.get("complete") else "no",
            "wall time": f"{float(wall.mean[-1]):,.0f} s" if wall else "",
            "offmarl": self.record.get("offmarl", ""),
        }
        return Section(self.title, ["", ""], [[name, x] for name, x in facts.items() if x])

    def _lineage(self) -> str:
        """Return how often members of a population were replaced, and the seeds that survived."""
        origin = seeds = np.array(self.record["seeds"])
        parents = self.curves[PARENT].values.T
        if not np.isin(parents, seeds).all():
            raise RunError(f"{self.directory} is not valid: its {PARENT} names no seed of the run.")
        for generation in parents:
            origin = origin[(generation[:, None] == seeds).argmax(1)]
        heirs = ", ".join(map(str, np.unique(origin)))
        return f"{(parents != seeds).sum()} replacements; the last come from seeds {heirs}"

    def details(self) -> Iterator[Section]:
        """Yield the first and last values of metrics, and where the arguments came from."""
        rows = [
            [name, float(curve.mean[0]), float(curve.mean[-1]), int(curve.steps[-1])]
            for name, curve in self.metrics().items()
        ]
        yield Section("Metrics, mean over seeds", ["metric", "first", "last", "steps"], rows)
        sources = self.record.get("settings", {})
        rows = [
            [name, "" if value is None else str(value), sources.get(name, "")]
            for name, value in self.record["args"].items()
        ]
        yield Section("Arguments", ["argument", "value", "from the file"], rows)


def describe_run(directory: Path) -> RunReport:
    """Read a run; `RunError` if the directory is none."""
    return RunReport(directory, hide_all_credentials(read_run(directory)), curves_of(directory))


def unit_of(metric: str) -> str | None:
    """Return what an evaluation measures; None for a metric of the training."""
    if metric.startswith(f"{RETURN}_"):
        return f"{UNITS[RETURN]} of {metric.removeprefix(f'{RETURN}_')}"
    return UNITS.get(metric)


def run_page(run: RunReport) -> str:
    """Return the page of a run."""
    return render("run.html", run=run, figure=_figure)


def _figure(name: str, curve: Curve, small: bool = False) -> Figure:
    size, unit = (4.4, 3.0) if small else (8.0, 4.0), escape(unit_of(name) or name)
    return chart(lambda axes: draw_curve(axes, curve, COLOURS[0]), "", "steps", unit, size=size)


# ----------------------------------------------------------------------------- comparisons


def comparison_page(
    compared: ComparedRuns, programs: Sequence[Path] = (), watched: Sequence[Path] | None = None
) -> str:
    """Return the page of a comparison, with an episode of each run that can be drawn.

    ``programs`` are files of programs that are not offmarl's, whose code is run; ``watched`` the
    runs whose episodes are shown, by default all.
    """
    curves, origins = compared.curves, []
    for directory in compared.runs:
        run = hide_all_credentials(read_run(directory))
        settings = ", ".join(f"{key}={value}" for key, value in run["args"].items())
        data = [str(run.get("vault") or ""), str(run.get("vault_digest") or "")[:12]]
        origins.append([str(directory), run["program"], *data, settings])
    return render(
        "comparison.html",
        scores=figure_comparison(compared.comparison, curves),
        curves=figure_curves(curves, compared.comparison.unit) if curves else None,
        sections=compared.sections,
        notes=compared.notes,
        runs=origins,
        films=_run_films(compared.runs if watched is None else watched, programs),
    )


def _run_films(runs: Sequence[Path], programs: Sequence[Path]) -> Films:
    """Return an episode of each run's first seed, if its environment can be drawn.

    Warns of each run whose program is in a file that the user did not give.
    """
    from offmarl.programs import load_policy  # imports JAX, as the next does
    from offmarl.report.render import play_run, to_gif

    films, unseen = [], []
    with progress("draw episodes", len(runs)) as advance:
        for directory in runs:
            file = file_of_run(directory, programs)  # an error if one of them does not exist
            record, policy = read_run(directory), None
            try:
                policy = load_policy(directory, greedy=None, program=file)
                gif = to_gif(play_run(policy))
            except OffmarlError as error:  # it is not installed, or cannot be drawn
                unseen.append((str(directory), str(error)))
                if policy is None and record.get("file"):
                    text = f"the page shows no episode of {directory}: {error}"
                    warnings.warn(text, stacklevel=1)
            else:
                films.append((gif, f"{labelled(policy.name, acting_of(record))}: {directory}"))
            advance(1)
    return films, unseen


# --------------------------------------------------------------------------------- datasets


def dataset_page(surveys: Surveys, env: Environment | None = None) -> str:
    """Return the page that describes datasets; ``env`` plays their episodes again.

    By default it is the one that each was recorded in.
    """
    nonempty = {name: survey for name, survey in surveys.items() if survey.vault.num_steps}
    discrete = {k: v.actions for k, v in nonempty.items() if isinstance(v.actions, DiscreteActions)}
    informations = {
        name: actions.information
        for name, actions in discrete.items()
        if nonempty[name].spec.num_agents > 1 and actions.together is not None
    }

    count = f"{len(surveys)} datasets" if len(surveys) > 1 else "One dataset"
    steps = sum(survey.vault.num_steps for survey in surveys.values())
    kinds = " or ".join({tables.describe_agents(survey.spec): None for survey in surveys.values()})

    def each(surveys: Surveys, say: Callable[[Survey], Any]) -> str:
        return "; ".join(f"{name}: {say(survey)}" for name, survey in surveys.items())

    def of(name: str, text: str) -> str:
        """Return a caption that names the dataset, if there are several."""
        return f"{name}: {text}" if len(nonempty) > 1 else f"{text[0].upper()}{text[1:]}"

    return render(
        "dataset.html",
        titles=dict.fromkeys(survey.spec.name or survey.vault.name for survey in surveys.values()),
        introduction=f"{count}, {number(steps)} steps of {kinds}: {', '.join(surveys)}.",
        surveys=surveys,
        filled=nonempty,
        warnings=warnings_by_dataset(surveys),
        discrete=discrete,
        informations=informations,
        trained={k: v for k, v in nonempty.items() if dataset_figures.training_of(v)},
        alike=all(survey.rewards.alike for survey in nonempty.values()),
        repeated=any(len(survey.coverage.repeats) > 1 for survey in nonempty.values()),
        provenances={
            name: to_json(survey.vault.provenance, indent=2)
            for name, survey in surveys.items()
            if survey.vault.provenance
        },
        films=_episode_films(surveys, env),
        figures=dataset_figures,
        tables=tables,
        each=each,
        of=of,
    )


def _episode_films(surveys: Surveys, env: Environment | None) -> Films:
    """Return the worst, median and best episode of each dataset that can be drawn."""
    films: list[tuple[bytes, str]] = []
    unseen = []
    for name, survey in surveys.items():
        try:
            films += _films(name, survey, env)
        except OffmarlError as error:
            unseen.append((name, str(error)))
    return films, unseen


def _films(name: str, survey: Survey, env: Environment | None) -> Iterator[tuple[bytes, str]]:
    """Draw a few episodes; `OffmarlError` if the environment is unknown or cannot be drawn."""
    if env is None and not survey.spec.name:
        raise OptionError("the environment of the dataset is unknown, so no episode can be drawn.")
    numbers = np.flatnonzero(survey.episodes.scored)
    if not len(numbers):
        raise OptionError("no episode is complete, so none is drawn.")
    from offmarl import envs  # imports JAX
    from offmarl.report.render import replay, to_gif

    env = envs.make(survey.spec.name) if env is None else env
    returns = survey.episodes.team_returns  # episodes are ranked by those of the first team
    order = numbers[np.argsort(returns[numbers, 0], kind="stable")]
    by_rank = {"worst": order[0], "median": order[(len(order) - 1) // 2], "best": order[-1]}
    with progress(f"draw {name}", len(by_rank)) as advance:
        for rank, episode in by_rank.items():
            playback = replay(env, survey.vault, int(episode))
            teams = (team.name for team in survey.episodes.teams)
            value = only_or_all(dict(zip(teams, returns[episode], strict=True)))
            gif = to_gif(playback, -(-len(playback.scenes) // _MOST_FRAMES))
            yield gif, f"{name}, {rank}: episode {episode}, return {number(value)}"
            advance(1)
