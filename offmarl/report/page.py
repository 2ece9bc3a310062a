"""HTML pages: the parts they are made of, and the page that describes datasets.

A page is one file. Style and figures are inside, so it needs no network.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Callable, Iterable, Iterator
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from offmarl._version import __version__
from offmarl.report import dataset_figures as figures
from offmarl.report import tables
from offmarl.report.accumulators import DiscreteActions
from offmarl.report.contents import Survey
from offmarl.report.dataset_figures import Surveys
from offmarl.report.figures import to_bytes
from offmarl.report.tables import Section
from offmarl.report.warnings import warnings_by_dataset
from offmarl.terminal import number
from offmarl.tracking import to_json
from offmarl.vault.column_statistics import Ranges

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """
:root { color-scheme: light dark; --text: #1f2937; --soft: #4b5563; --faint: #6b7280;
  --line: #e5e7eb; --panel: #f3f4f6; --page: #ffffff; --mark: #b45309; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--text); background: var(--page);
  max-width: 72rem; margin: 2rem auto; padding: 0 1.5rem; overflow-wrap: break-word; }
h1 { font-size: 1.6rem; line-height: 1.25; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem 1.2rem .3rem 0; text-align: left; border-bottom: 1px solid var(--line);
  vertical-align: top; }
thead th { color: var(--faint); font-weight: 600; white-space: nowrap; }
th[scope=row] { font-weight: 500; position: sticky; left: 0; background: var(--page); }
.number { text-align: right; }
img { width: 100%; height: auto; border-radius: 4px; }
p, li, figcaption { color: var(--soft); } p, li { max-width: 48rem; }
figure { margin: 1rem 0; } figcaption { font-size: .85rem; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 21rem), 1fr));
  gap: 1rem 1.5rem; } .charts figure { margin: 0; }
.films { display: flex; flex-wrap: wrap; gap: 1rem; } .films figure { width: 20rem; margin: 0; }
.notes b { color: var(--mark); }
code { font-size: .9em; background: var(--panel); padding: .1em .3em; border-radius: 3px; }
pre { background: var(--panel); padding: .8rem 1rem; border-radius: 4px; overflow-x: auto;
  font-size: .8rem; line-height: 1.4; }
summary { cursor: pointer; color: var(--soft); }
@media (prefers-color-scheme: dark) {
  :root { --text: #e5e7eb; --soft: #b6bcc6; --faint: #9ca3af; --line: #374151; --panel: #1f2937;
    --page: #1a1a1a; --mark: #fbbf24; }
  img.chart { filter: invert(.9) hue-rotate(180deg); }
}
@media (max-width: 40rem) { body { margin: 1rem auto; padding: 0 1rem; } }
""".strip()


def document(title: str, body: Iterable[str]) -> str:
    """Return a page of parts that the other functions of this module return."""
    return "\n".join(
        [
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
            f"<main><h1>{escape(title)}</h1>",
            *body,
            "</main></body></html>\n",
        ]
    )


def heading(text: str) -> str:
    """Return the title of a section."""
    return f"<h2>{escape(text)}</h2>"


def paragraph(text: str) -> str:
    """Return a paragraph of plain text."""
    return f"<p>{escape(text)}</p>"


def notes(items: Iterable[tuple[str, str]]) -> str:
    """Return a list of notes, each with the name that it applies to, or an empty name."""
    lines = "".join(f"<li>{_bold(name)}{escape(text)}</li>" for name, text in items)
    return f'<ul class="notes">{lines}</ul>'


def _bold(name: str) -> str:
    return f"<b>{escape(name)}</b> " if name else ""


def folded(summary: str, text: str) -> str:
    """Return preformatted text that a summary line unfolds."""
    return f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>"


def table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table of plain text; the first cell of a row names it."""
    names, lines = list(columns), [list(row) for row in rows]
    kinds = [_kind([line[place] for line in lines]) for place in range(len(names))]
    heads = zip(names, kinds, strict=True)
    head = "".join(f'<th scope="col"{kind}>{escape(name)}</th>' for name, kind in heads)
    body = "".join(_row(line, kinds) for line in lines)
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'
        "</div>"
    )


def _kind(cells: Iterable[str]) -> str:
    """Return the class attribute of a column: numbers are aligned right."""
    numbers = all(re.fullmatch(r"(about )?-?[\d.,]+(e[-+]\d+)?%?|", cell) for cell in cells)
    return ' class="number"' if numbers else ""


def _row(cells: Iterable[str], kinds: Iterable[str]) -> str:
    first, *others = zip(map(escape, cells), kinds, strict=True)
    rest = "".join(f"<td{kind}>{cell}</td>" for cell, kind in others)
    return f'<tr><th scope="row">{first[0]}</th>{rest}</tr>'


def image(figure: Figure, caption: str, alt: str = "") -> str:
    """Return a figure as inline SVG with its caption.

    ``alt`` describes the figure for screen readers; by default it is the caption.
    """
    return _figure(to_bytes(figure, "svg"), "svg+xml", caption, alt or caption, "chart")


def charts(images: Iterable[str]) -> str:
    """Return images side by side."""
    return f'<div class="charts">{"".join(images)}</div>'


def films(animations: Iterable[tuple[bytes, str]]) -> str:
    """Return GIFs with their captions, side by side."""
    return (
        '<div class="films">'
        + "".join(_figure(gif, "gif", caption, caption, "film") for gif, caption in animations)
        + "</div>"
    )


def _figure(image: bytes, kind: str, caption: str, alt: str, style: str) -> str:
    source = f"data:image/{kind};base64,{base64.b64encode(image).decode()}"
    return (
        f'<figure><img class="{style}" src="{source}" alt="{escape(alt)}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
    )


# ---------------------------------------------------------------------------------- datasets

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
        paragraph(_introduction(surveys)),
        *_section(tables.glance(surveys)),
        *([heading("Warnings"), notes(known)] if known else []),
        *_section(tables.identity(surveys)),
        *_contents({name: one for name, one in surveys.items() if one.vault.num_steps}),
        *episodes,
        *_provenance(surveys),
        heading("Method"),
        *map(paragraph, _METHOD),
        paragraph(f"Made by offmarl {__version__}."),
    ]
    return document(f"Dataset report: {title}", body)


def _contents(surveys: Surveys) -> Iterator[str]:
    """Return the sections on the contents of datasets that are not empty."""
    if surveys:
        yield from _episodes(surveys)
        yield from _actions(surveys)
        yield from _views(surveys)
        yield from _coverage(surveys)
        yield from _section(tables.windows(surveys))
        yield paragraph(_WINDOWS)


def _introduction(surveys: Surveys) -> str:
    count = f"{len(surveys)} datasets" if len(surveys) > 1 else "One dataset"
    steps = sum(one.vault.num_steps for one in surveys.values())
    kinds = dict.fromkeys(tables.describe_agents(one.spec) for one in surveys.values())
    return f"{count}, {number(steps)} steps of {' or '.join(kinds)}: {', '.join(surveys)}."


def _section(section: Section) -> Iterator[str]:
    yield heading(section.title)
    yield _bare(section)


def _bare(section: Section) -> str:
    return table(section.columns, [map(number, row) for row in section.rows])


def _episodes(surveys: Surveys) -> Iterator[str]:
    yield heading("Episodes and rewards")
    returns = _each(surveys, tables.returns_line)
    lengths = _each(surveys, lambda one: tables.spread_line(one.lengths))
    paid = _each(surveys, lambda one: f"{one.rewards.nonzero_steps:,} steps with a reward")
    whole = "Of complete episodes."
    drawn = [
        image(figures.figure_returns(surveys), whole, f"Returns: {returns}."),
        image(
            figures.figure_order(surveys),
            "Means over intervals of episodes, by the time at which they began.",
            f"Returns in the order of recording: {returns}.",
        ),
        image(figures.figure_lengths(surveys), whole, f"Lengths: {lengths}."),
        image(
            figures.figure_ends(surveys),
            "Terminated by the environment; truncated by a limit; cut by the end of the recording; "
            "open at the end of the data.",
            f"How episodes ended: {_each(surveys, tables.ends)}.",
        ),
        image(
            figures.figure_curve(surveys),
            "Mean over agents and over the episodes that are long enough.",
            f"Reward by time in the episode: {paid}.",
        ),
    ]
    if trained := {name: one for name, one in surveys.items() if figures.training_of(one)[0]}:
        caption = "Evaluations of the policies that are in the data, by their training."
        text = _each(trained, lambda one: f"{len(figures.training_of(one)[0])} policies")
        drawn.append(image(figures.figure_training(trained), caption, f"Learning curve: {text}."))
    if not all(one.rewards.alike for one in surveys.values()):
        caption = "Median and middle 90% of episodes."
        alt = f"Returns of each agent: {_each(surveys, _by_agent)}."
        drawn.append(image(figures.figure_agents(surveys), caption, alt))
    yield charts(drawn)
    yield _bare(tables.rewards(surveys))


def _by_agent(found: Survey) -> str:
    returns = found.episodes.returns[found.episodes.scored]
    means = returns.mean(0) if len(returns) else np.zeros(0)
    some = ", ".join(f"{mean:.3g}" for mean in means[:8])
    return f"means {some}{' and more' if len(means) > 8 else ''}"


def _actions(surveys: Surveys) -> Iterator[str]:
    yield heading("Actions")
    acting = (_acting(name, surveys) for name in surveys)
    information = (chart for name in surveys for chart in _information(name, surveys))
    yield charts([*acting, *information])
    yield from map(_bare, tables.actions(surveys))
    if any(isinstance(one.actions, DiscreteActions) for one in surveys.values()):
        yield paragraph(_ACTIONS)


def _acting(name: str, surveys: Surveys) -> str:
    if isinstance(surveys[name].actions, DiscreteActions):
        text = "share of an agent's steps at which it took, and could take, each action."
    else:
        text = "distribution of the values of each dimension."
    return image(figures.figure_actions(surveys[name]), _of(name, surveys, text))


def _information(name: str, surveys: Surveys) -> Iterator[str]:
    """Draw the mutual information of agents' actions, if it was computed."""
    actions = surveys[name].actions
    if isinstance(actions, DiscreteActions) and surveys[name].spec.num_agents > 1:
        information = actions.information
        if information is not None:
            most = number(float(information.max()))
            caption = _of(name, surveys, f"at most {most} bits between two agents.")
            alt = _of(name, surveys, f"mutual information of actions, at most {most} bits.")
            yield image(figures.figure_information(information), caption, alt)


def _views(surveys: Surveys) -> Iterator[str]:
    yield heading("Observations and states")
    observed = [
        _features(name, surveys, one.observations, "Observation", "features, over all agents.")
        for name, one in surveys.items()
    ]
    states = [
        _features(name, surveys, one.state, "Global state", "features.")
        for name, one in surveys.items()
        if one.spec.state == "native" and one.spec.state_size
    ]
    yield charts([*observed, *states])


def _features(name: str, surveys: Surveys, ranges: Ranges, what: str, text: str) -> str:
    alt = f"{what.lower()}, {_extremes(ranges)}."
    figure = figures.figure_features(ranges, what)
    return image(figure, _of(name, surveys, text), _of(name, surveys, alt))


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
    yield from _section(tables.coverage(surveys))
    yield paragraph(_COVERAGE)
    if all(len(one.coverage.repeats) < 2 for one in surveys.values()):
        return  # all pairs occur equally often
    pairs = _each(surveys, lambda one: f"{number(one.coverage.pairs)} distinct pairs")
    caption = "How many pairs of state and joint action occur how often."
    yield charts([image(figures.figure_repeats(surveys), caption, f"Pairs: {pairs}.")])


def _provenance(surveys: Surveys) -> Iterator[str]:
    known = {name: one.vault.provenance for name, one in surveys.items() if one.vault.provenance}
    if known:
        yield heading("Provenance")
    for name, provenance in known.items():
        yield folded(name, to_json(provenance, indent=2))


def _each(surveys: Surveys, say: Callable[[Survey], Any]) -> str:
    return "; ".join(f"{name}: {say(one)}" for name, one in surveys.items())
