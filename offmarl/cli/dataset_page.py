"""The page of ``offmarl report``: what datasets hold, side by side."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from offmarl import __version__
from offmarl.cli import dataset_tables as tables
from offmarl.cli.dataset_tables import Section
from offmarl.cli.output import number
from offmarl.report import dataset_figures as figures
from offmarl.report import page
from offmarl.report.actions import DiscreteActions
from offmarl.report.contents import Survey
from offmarl.report.dataset_figures import Surveys
from offmarl.report.findings import findings
from offmarl.report.ranges import Ranges
from offmarl.tracking import to_json

_WINDOWS = (
    "Windows start anywhere in an episode and never cross its end; an episode that is shorter "
    "gives one, padded and masked. “Would cross”: the share of the windows that would cross the "
    "end of an episode if they were drawn from the time axis as it is."
)
_COVERAGE = (
    "SACo, the joint state-action coverage, is the number of distinct pairs of global state and "
    "joint action over the number of steps; “relative”, over that of the dataset here that has "
    "the most. “Each agent's own”: distinct pairs of one agent's observation and action, over all "
    "steps of all agents. Where every state is new, as with positions in space, all of these are "
    "near 1 and say little."
)
_ACTIONS = (
    "“Illegal ones”: of the actions taken. “Bits each” and “jointly”: the entropy of an agent's "
    "actions, and that of joint actions; what the former add up to, less the latter, is the total "
    "correlation, given if all agents are alive throughout."
)
_METHOD = (
    "Returns are undiscounted sums, the mean over agents. Episodes that the end of the data or of "
    "the recording cut short are excluded from returns and lengths.",
    "Actions and observations count while their agent is alive. Where there is no global state, it "
    "is all observations.",
    "SACo is as in Formanek et al., “Putting Data at the Centre of Offline Multi-Agent "
    "Reinforcement Learning” (2024), after Schweighofer et al., “A Dataset Perspective on Offline "
    "Reinforcement Learning” (2022), who relate it to a reference dataset. Pairs are told apart by "
    "hashes of 64 bits. Beyond a million distinct ones a sample of them is counted (Flajolet, “On "
    "Adaptive Sampling”, 1990), right to about a thousandth.",
    "Entropies and mutual information are plug-in estimates over all steps, whatever the state.",
)


def notes(surveys: Surveys) -> list[tuple[str, str]]:
    """Return what is worth knowing, each with the datasets that it is about."""
    about: dict[str, list[str]] = {}
    for name, one in surveys.items():
        for text in findings(one):
            about.setdefault(text, []).append(name)
    return [(_names(named, surveys), text) for text, named in about.items()]


def _names(some: Sequence[str], surveys: Surveys) -> str:
    if len(surveys) == 1:
        return ""
    return "all" if len(some) == len(surveys) else ", ".join(some)


def write(surveys: Surveys, films: list[str]) -> str:
    """Return the page; ``films`` are parts of it that show episodes."""
    known = notes(surveys)
    title = ", ".join(dict.fromkeys(one.spec.name or one.vault.name for one in surveys.values()))
    body = [
        page.paragraph(_lead(surveys)),
        *_table(tables.glance(surveys)),
        *([page.heading("Worth knowing"), page.notes(known)] if known else []),
        *_table(tables.identity(surveys)),
        *_contents({name: one for name, one in surveys.items() if one.vault.num_steps}),
        *films,
        *_provenance(surveys),
        page.heading("How the numbers are made"),
        *map(page.paragraph, _METHOD),
        page.paragraph(f"Made by offmarl {__version__}."),
    ]
    return page.document(f"Dataset report: {title}", body)


def _contents(surveys: Surveys) -> Iterator[str]:
    """Return what there is to say of datasets that hold something."""
    if surveys:
        yield from _episodes(surveys)
        yield from _actions(surveys)
        yield from _views(surveys)
        yield from _coverage(surveys)
        yield from _table(tables.windows(surveys))
        yield page.paragraph(_WINDOWS)


def _lead(surveys: Surveys) -> str:
    count = f"{len(surveys)} datasets" if len(surveys) > 1 else "One dataset"
    steps = sum(one.vault.num_steps for one in surveys.values())
    kinds = dict.fromkeys(tables.in_words(one.spec) for one in surveys.values())
    return f"{count}, {number(steps)} steps of {' or '.join(kinds)}: {', '.join(surveys)}."


def _table(section: Section) -> Iterator[str]:
    yield page.heading(section.title)
    yield _bare(section)


def _bare(section: Section) -> str:
    return page.table(section.columns, [map(number, row) for row in section.rows])


def _episodes(surveys: Surveys) -> Iterator[str]:
    yield page.heading("Episodes and rewards")
    returns = _each(surveys, lambda one: tables.spread_line(one.returns))
    lengths = _each(surveys, lambda one: tables.spread_line(one.lengths))
    paid = _each(surveys, lambda one: f"{one.rewards.nonzero_steps:,} steps pay")
    whole = "Of complete episodes."
    charts = [
        page.image(figures.figure_returns(surveys), whole, f"Returns: {returns}."),
        page.image(
            figures.figure_order(surveys),
            "Means of stretches of episodes, by when they began.",
            f"Returns in the order of recording: {returns}.",
        ),
        page.image(figures.figure_lengths(surveys), whole, f"Lengths: {lengths}."),
        page.image(
            figures.figure_ends(surveys),
            "Terminated: in itself; truncated: by a limit; cut: by the end of the recording; open: "
            "it runs on at the end of the data.",
            f"How episodes ended: {_each(surveys, tables.ends)}.",
        ),
        page.image(
            figures.figure_curve(surveys),
            "Mean over the episodes that are so long, and over agents.",
            f"Reward in the course of an episode: {paid}.",
        ),
    ]
    if not all(one.rewards.alike for one in surveys.values()):
        caption = "Median, and the middle 90% of episodes."
        alt = f"Returns of each agent: {_each(surveys, _by_agent)}."
        charts.append(page.image(figures.figure_agents(surveys), caption, alt))
    yield page.charts(charts)
    yield _bare(tables.rewards(surveys))


def _by_agent(found: Survey) -> str:
    returns = found.episodes.returns[found.episodes.scored]
    means = returns.mean(0) if len(returns) else np.zeros(0)
    some = ", ".join(f"{mean:.3g}" for mean in means[:8])
    return f"means {some}{' and more' if len(means) > 8 else ''}"


def _actions(surveys: Surveys) -> Iterator[str]:
    yield page.heading("Actions")
    acting = (_acting(name, surveys) for name in surveys)
    told = (chart for name in surveys for chart in _information(name, surveys))
    yield page.charts([*acting, *told])
    yield from map(_bare, tables.actions(surveys))
    if any(isinstance(one.actions, DiscreteActions) for one in surveys.values()):
        yield page.paragraph(_ACTIONS)


def _acting(name: str, surveys: Surveys) -> str:
    if isinstance(surveys[name].actions, DiscreteActions):
        text = "shares of an agent's steps at which it took, and could take, each action."
    else:
        text = "how the values of each dimension are distributed."
    return page.image(figures.figure_actions(surveys[name]), _of(name, surveys, text))


def _information(name: str, surveys: Surveys) -> Iterator[str]:
    """Draw how far agents' actions tell of one another's, where there are several and few."""
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
        if one.spec.state == "native"
    ]
    yield page.charts([*observed, *states])


def _features(name: str, surveys: Surveys, ranges: Ranges, what: str, text: str) -> str:
    alt = f"{what.lower()}, {_extremes(ranges)}."
    figure = figures.figure_features(ranges, what)
    return page.image(figure, _of(name, surveys, text), _of(name, surveys, alt))


def _of(name: str, surveys: Surveys, text: str) -> str:
    """Return a caption that says whose it is, where there are several."""
    return f"{name}: {text}" if len(surveys) > 1 else f"{text[0].upper()}{text[1:]}"


def _extremes(ranges: Ranges) -> str:
    if not ranges.finite.any():
        return "nothing finite"
    low, high = np.nanmin(ranges.low), np.nanmax(ranges.high)
    constant = int(ranges.constant.sum())
    return f"from {low:.3g} to {high:.3g}, {constant} of {ranges.low.size} features constant"


def _coverage(surveys: Surveys) -> Iterator[str]:
    yield from _table(tables.coverage(surveys))
    yield page.paragraph(_COVERAGE)
    if all(len(one.coverage.repeats) < 2 for one in surveys.values()):
        return  # no pair occurs more often than others
    pairs = _each(surveys, lambda one: f"{number(one.coverage.pairs)} distinct pairs")
    caption = "How many pairs of state and joint action occur how often."
    yield page.charts([page.image(figures.figure_repeats(surveys), caption, f"Pairs: {pairs}.")])


def _provenance(surveys: Surveys) -> Iterator[str]:
    told = {name: one.vault.provenance for name, one in surveys.items() if one.vault.provenance}
    if told:
        yield page.heading("Where they come from" if len(surveys) > 1 else "Where it comes from")
    for name, provenance in told.items():
        yield page.folded(name, to_json(provenance, indent=2))


def _each(surveys: Surveys, say: Callable[[Survey], Any]) -> str:
    return "; ".join(f"{name}: {say(one)}" for name, one in surveys.items())
