"""Pages that describe a run, compare runs, and describe datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from offmarl._version import __version__
from offmarl.report import dataset_figures as figures
from offmarl.report import page, tables
from offmarl.report.accumulators import DiscreteActions
from offmarl.report.comparison import Comparison
from offmarl.report.contents import Survey, warnings_by_dataset
from offmarl.report.curves import Curve, Curves, broken_of, curves_of
from offmarl.report.dataset_figures import Surveys
from offmarl.report.figures import (
    COLOURS,
    draw_curve,
    figure_comparison,
    figure_curves,
    make_figure,
)
from offmarl.report.run_scores import UNITS, Entry
from offmarl.report.tables import Section
from offmarl.terminal import number
from offmarl.tracking import RETURN, WALL_TIME, acting_of, read_run, to_json
from offmarl.vault.format.column_statistics import Ranges

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# ------------------------------------------------------------------------------------- runs

_MEAN = "Mean over seeds. Band: 95% interval; thin lines: seeds."


class RunReport(NamedTuple):
    """A run and its metrics."""

    directory: Path
    record: Mapping[str, Any]
    """Content of ``run.json``."""
    curves: Mapping[str, Curve]
    """By metric."""
    broken: Mapping[str, list[int]]
    """The seeds whose last number of a metric is not finite, by metric."""

    @property
    def title(self) -> str:
        """The program and what it learned in or from."""
        place = self.record.get("vault") or self.record["spec"]["name"]
        return f"{self.record['program']} on {place}"

    def evaluations(self) -> dict[str, Curve]:
        """Return the curves of the evaluations."""
        return {name: curve for name, curve in self.curves.items() if unit_of(name)}

    def notes(self) -> list[str]:
        """Say which curves end early because training diverged."""
        return [
            f"{name} has no finite value at the end of seed {', '.join(map(str, seeds))}: its "
            "curve lacks these steps."
            for name, seeds in self.broken.items()
        ]

    def sections(self) -> Iterator[Section]:
        """Yield the tables of the report."""
        yield self._facts()
        for name, curve in self.evaluations().items():
            acting = acting_of(self.record) if name == RETURN else None
            entry = Entry(self.record["program"], acting)
            table = tables.learning_curves({unit_of(name) or name: {entry: curve}})
            yield table._replace(columns=["metric", *table.columns[1:]])
        yield self._metrics()
        yield self._arguments()

    def _facts(self) -> Section:
        wall = self.curves.get(WALL_TIME)
        facts = {
            "directory": str(self.directory),
            "kind": self.record.get("kind", ""),
            "data": self.record.get("vault") or "",
            "digest": str(self.record.get("vault_digest") or "")[:12],
            "environment": self.record["spec"]["name"],
            "seeds": ", ".join(map(str, self.record["seeds"])),
            "complete": "yes" if self.record.get("complete") else "no",
            "wall time": f"{float(wall.mean[-1]):,.0f} s" if wall else "",
            "offmarl": self.record.get("offmarl", ""),
        }
        return Section(self.title, ["", ""], [[name, x] for name, x in facts.items() if x])

    def _metrics(self) -> Section:
        rows = [
            [name, float(curve.mean[0]), float(curve.mean[-1]), int(curve.steps[-1])]
            for name, curve in self.curves.items()
            if not unit_of(name)
        ]
        return Section("Metrics, mean over seeds", ["metric", "first", "last", "steps"], rows)

    def _arguments(self) -> Section:
        sources = self.record.get("settings", {})
        rows = [
            [name, "" if value is None else str(value), sources.get(name, "")]
            for name, value in self.record["args"].items()
        ]
        return Section("Arguments", ["argument", "value", "from the file"], rows)


def describe_run(directory: Path) -> RunReport:
    """Read a run.

    Raises
    ------
    RunError
        The directory is not a run.
    """
    return RunReport(directory, read_run(directory), curves_of(directory), broken_of(directory))


def unit_of(metric: str) -> str | None:
    """Return what an evaluation measures; None for a metric of the training."""
    if metric.startswith(f"{RETURN}_"):
        return f"{UNITS[RETURN]} of {metric.removeprefix(f'{RETURN}_')}"
    return UNITS.get(metric)


def run_page(run: RunReport) -> str:
    """Return the page of a run."""
    facts, *others = run.sections()
    figures = [page.image(_figure(name, curve), _MEAN) for name, curve in run.evaluations().items()]
    small = [
        page.image(_figure(name, curve, small=True), name)
        for name, curve in run.curves.items()
        if not unit_of(name)
    ]
    body = [
        page.section(facts, titled=False),
        page.notes(("", note) for note in run.notes()),
        *([page.heading("Learning curves"), *figures] if figures else []),
        *([page.heading("Metrics"), page.charts(small)] if small else []),
        *map(page.section, others[len(figures) :]),
        page.paragraph(f"offmarl {__version__}."),
    ]
    return page.document(f"Run: {run.title}", body)


def _figure(name: str, curve: Curve, small: bool = False) -> Figure:
    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        draw_curve(axes, curve, COLOURS[0])
        axes.set_xlabel("steps")
        axes.set_ylabel(unit_of(name) or name)

    return make_figure(draw, (4.4, 3.0) if small else (8.0, 4.0))


# ----------------------------------------------------------------------------- comparisons


def comparison_page(
    comparison: Comparison,
    curves: Curves,
    sections: Iterable[Section],
    notes: Iterable[str],
    runs: Iterable[Path],
    episodes: Iterable[str],
) -> str:
    """Return the page of a comparison; ``episodes`` is what `episodes_section` returns."""
    scores = (
        "Left: the mean return of each seed, and the IQM over seeds. Hollow markers and dashed "
        "lines: sampled actions. Bands and bars: 95% intervals."
    )
    learning = "Learning curves: mean over seeds. Bands: 95% intervals; thin lines: seeds."
    body = [page.image(figure_comparison(comparison), scores)]
    if curves:
        body.append(page.image(figure_curves(curves, comparison.unit), learning))
    body += [
        *map(page.section, sections),
        page.notes(("", note) for note in notes),
        *episodes,
        page.heading("Runs"),
        page.table(["run", "program", "data", "digest", "settings"], map(_origin, runs)),
    ]
    return page.document("Comparison of runs", body)


def _origin(directory: Path) -> list[str]:
    run = read_run(directory)
    settings = ", ".join(f"{key}={value}" for key, value in run["args"].items())
    data = [str(run.get("vault") or ""), str(run.get("vault_digest") or "")[:12]]
    return [str(directory), run["program"], *data, settings]


def episodes_section(
    shown: Sequence[tuple[bytes, str]], unseen: Sequence[tuple[str, str]]
) -> list[str]:
    """Return films with their captions, and the reasons for those that are missing."""
    return [
        page.heading("Episodes"),
        *([page.films(shown)] if shown else []),
        *([page.notes(unseen)] if unseen else []),
    ]


# --------------------------------------------------------------------------------- datasets

_WINDOWS = (
    "Windows are cut from the episodes laid end to end, so that each step is equally likely. After "
    "each episode, a slot without a step holds the view that it ended with: these are the “slots "
    "empty”. “Episodes shorter” are those with fewer steps than a window. “Hold several” is the "
    "share of windows with steps of more than one episode."
)
_COVERAGE = (
    "SACo, the joint state-action coverage, is the number of distinct pairs of global state and "
    "joint action divided by the number of steps. “Relative” divides by the largest number of "
    "pairs of the datasets on this page. “Local pairs” are distinct pairs of an agent's "
    "observation and action, divided by the steps of all agents. If every state is new, as with "
    "positions in space, these numbers are all near 1 and carry little information."
)
_ACTIONS = (
    "“Illegal” is the share of actions taken that were illegal. “Entropy” is the mean entropy of "
    "an agent's actions, “joint entropy” that of joint actions, in bits. The total correlation is "
    "the sum of the agents' entropies minus the joint entropy; it is given if all agents are alive "
    "throughout."
)
_METHOD = (
    "Returns are undiscounted sums, mean over agents. Returns and lengths exclude episodes that "
    "the end of the data or of the recording cut short.",
    "Actions and observations count while their agent is alive. Without a global state, the "
    "concatenated observations are used.",
    "SACo is as in Formanek et al., “Putting Data at the Centre of Offline Multi-Agent "
    "Reinforcement Learning” (2024), after Schweighofer et al., “A Dataset Perspective on Offline "
    "Reinforcement Learning” (2022), who relate it to a reference dataset. Pairs are compared by "
    "64-bit hashes. Beyond a million distinct pairs a sample is counted (Flajolet, “On Adaptive "
    "Sampling”, 1990), with an error of about a thousandth.",
    "Entropies and mutual information are plug-in estimates over all steps, regardless of the "
    "state.",
)


def dataset_page(surveys: Surveys, episodes: Iterable[str]) -> str:
    """Return the page that describes datasets."""
    known = warnings_by_dataset(surveys)
    title = ", ".join(dict.fromkeys(one.spec.name or one.vault.name for one in surveys.values()))
    body = [
        page.paragraph(_introduction(surveys)),
        page.section(tables.glance(surveys)),
        *([page.heading("Warnings"), page.notes(known)] if known else []),
        page.section(tables.identity(surveys)),
        *_contents({name: one for name, one in surveys.items() if one.vault.num_steps}),
        *episodes,
        *_provenance(surveys),
        page.heading("Method"),
        *map(page.paragraph, _METHOD),
        page.paragraph(f"Made by offmarl {__version__}."),
    ]
    return page.document(f"Dataset report: {title}", body)


def _contents(surveys: Surveys) -> Iterator[str]:
    """Return the sections on the contents of datasets that are not empty."""
    if surveys:
        yield from _episodes(surveys)
        yield from _actions(surveys)
        yield from _views(surveys)
        yield from _coverage(surveys)
        yield page.section(tables.windows(surveys))
        yield page.paragraph(_WINDOWS)


def _introduction(surveys: Surveys) -> str:
    count = f"{len(surveys)} datasets" if len(surveys) > 1 else "One dataset"
    steps = sum(one.vault.num_steps for one in surveys.values())
    kinds = dict.fromkeys(tables.describe_agents(one.spec) for one in surveys.values())
    return f"{count}, {number(steps)} steps of {' or '.join(kinds)}: {', '.join(surveys)}."


def _episodes(surveys: Surveys) -> Iterator[str]:
    yield page.heading("Episodes and rewards")
    returns = _each(surveys, tables.returns_line)
    lengths = _each(surveys, lambda one: tables.spread_line(one.lengths))
    paid = _each(surveys, lambda one: f"{one.rewards.nonzero_steps:,} steps with a reward")
    whole = "Of complete episodes."
    drawn = [
        page.image(figures.figure_returns(surveys), whole, f"Returns: {returns}."),
        page.image(
            figures.figure_order(surveys),
            "Means over intervals of episodes, by the time at which they began.",
            f"Returns in the order of recording: {returns}.",
        ),
        page.image(figures.figure_lengths(surveys), whole, f"Lengths: {lengths}."),
        page.image(
            figures.figure_ends(surveys),
            "Terminated by the environment; truncated by a limit; cut by the end of the recording; "
            "open at the end of the data.",
            f"How episodes ended: {_each(surveys, tables.ends)}.",
        ),
        page.image(
            figures.figure_curve(surveys),
            "Mean over agents and over the episodes that are long enough.",
            f"Reward by time in the episode: {paid}.",
        ),
    ]
    if trained := {name: one for name, one in surveys.items() if figures.training_of(one)[0]}:
        caption = "Evaluations of the policies that are in the data, by their training."
        text = _each(trained, lambda one: f"{len(figures.training_of(one)[0])} policies")
        alt = f"Learning curve: {text}."
        drawn.append(page.image(figures.figure_training(trained), caption, alt))
    if not all(one.rewards.alike for one in surveys.values()):
        caption = "Median and middle 90% of episodes."
        alt = f"Returns of each agent: {_each(surveys, _by_agent)}."
        drawn.append(page.image(figures.figure_agents(surveys), caption, alt))
    yield page.charts(drawn)
    yield page.section(tables.rewards(surveys), titled=False)


def _by_agent(found: Survey) -> str:
    returns = found.episodes.returns[found.episodes.scored]
    means = returns.mean(0) if len(returns) else np.zeros(0)
    some = ", ".join(f"{mean:.3g}" for mean in means[:8])
    return f"means {some}{' and more' if len(means) > 8 else ''}"


def _actions(surveys: Surveys) -> Iterator[str]:
    yield page.heading("Actions")
    acting = (_acting(name, surveys) for name in surveys)
    information = (chart for name in surveys for chart in _information(name, surveys))
    yield page.charts([*acting, *information])
    for table in tables.actions(surveys):
        yield page.section(table, titled=False)
    if any(isinstance(one.actions, DiscreteActions) for one in surveys.values()):
        yield page.paragraph(_ACTIONS)


def _acting(name: str, surveys: Surveys) -> str:
    if isinstance(surveys[name].actions, DiscreteActions):
        text = "share of an agent's steps at which it took, and could take, each action."
    else:
        text = "distribution of the values of each dimension."
    return page.image(figures.figure_actions(surveys[name]), _of(name, surveys, text))


def _information(name: str, surveys: Surveys) -> Iterator[str]:
    """Draw the mutual information of agents' actions, if it was computed."""
    actions = surveys[name].actions
    if isinstance(actions, DiscreteActions) and surveys[name].spec.num_agents > 1:
        information = actions.information
        if information is not None:
            most = number(float(information.max()))
            caption = _of(name, surveys, f"at most {most} bits between two agents.")
            alt = _of(name, surveys, f"mutual information of actions, at most {most} bits.")
            yield page.image(figures.figure_information(information), caption, alt)


def _views(surveys: Surveys) -> Iterator[str]:
    yield page.heading("Observations and states")
    observed = [
        _features(name, surveys, one.observations, "Observation", "features, over all agents.")
        for name, one in surveys.items()
    ]
    states = [
        _features(name, surveys, one.state, "Global state", "features.")
        for name, one in surveys.items()
        if one.spec.state == "native" and one.spec.state_size
    ]
    yield page.charts([*observed, *states])


def _features(name: str, surveys: Surveys, ranges: Ranges, what: str, text: str) -> str:
    alt = f"{what.lower()}, {_extremes(ranges)}."
    figure = figures.figure_features(ranges, what)
    return page.image(figure, _of(name, surveys, text), _of(name, surveys, alt))


def _of(name: str, surveys: Surveys, text: str) -> str:
    """Return a caption that names the dataset, if there are several."""
    return f"{name}: {text}" if len(surveys) > 1 else f"{text[0].upper()}{text[1:]}"


def _extremes(ranges: Ranges) -> str:
    if not ranges.finite.any():
        return "no finite values"
    low, high = np.nanmin(ranges.low), np.nanmax(ranges.high)
    constant = int(ranges.constant.sum())
    return f"from {low:.3g} to {high:.3g}, {constant} of {ranges.low.size} features constant"


def _coverage(surveys: Surveys) -> Iterator[str]:
    yield page.section(tables.coverage(surveys))
    yield page.paragraph(_COVERAGE)
    if all(len(one.coverage.repeats) < 2 for one in surveys.values()):
        return  # all pairs occur equally often
    pairs = _each(surveys, lambda one: f"{number(one.coverage.pairs)} distinct pairs")
    caption = "How many pairs of state and joint action occur how often."
    yield page.charts([page.image(figures.figure_repeats(surveys), caption, f"Pairs: {pairs}.")])


def _provenance(surveys: Surveys) -> Iterator[str]:
    known = {name: one.vault.provenance for name, one in surveys.items() if one.vault.provenance}
    if known:
        yield page.heading("Provenance")
    for name, provenance in known.items():
        yield page.folded(name, to_json(provenance, indent=2))


def _each(surveys: Surveys, say: Callable[[Survey], Any]) -> str:
    return "; ".join(f"{name}: {say(one)}" for name, one in surveys.items())
