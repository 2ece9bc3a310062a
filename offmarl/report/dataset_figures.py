"""Figures of the contents of datasets: several datasets in one figure, or a figure for each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Num

from offmarl.report.accumulators import BINS, ContinuousActions, DiscreteActions
from offmarl.report.contents import Survey, Surveys
from offmarl.report.figures import COLOURS, chart, escape, line_style, make_figure
from offmarl.vault.format.column_statistics import Ranges
from offmarl.vault.format.tables import CAUSES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STRETCHES = 60
_MOST_BINS = 40
_MOST_CELLS = 8
"""Maximum rows and columns of a map whose cells are labelled with their values."""
_MOST = 1e30
"""Numbers of a provenance up to which they are drawn."""
_SOME_BITS = 0.1
"""Smallest maximum of the scale of mutual information, so that noise looks faint."""
_CAUSE_COLOURS = dict(
    zip(CAUSES.tolist(), ("#d1d5db", COLOURS[2], COLOURS[0], COLOURS[4]), strict=True)
)


def figure_returns(surveys: Surveys) -> Figure:
    """Draw the distributions of returns."""
    values = {label: returns for label, _, returns in _labelled_returns(surveys)}
    return _histograms(values, "Returns", "episode return, mean over agents")


def _labelled_returns(surveys: Surveys) -> Iterator[tuple[str, Survey, Float[np.ndarray, "K"]]]:
    """Yield the returns of each dataset with a label, or of each team in it if it has several."""
    for label, survey in surveys.items():
        several = len(survey.team_returns) > 1
        for team, returns in survey.team_returns.items():
            yield f"{label}, {team}" if several else label, survey, returns


def figure_lengths(surveys: Surveys) -> Figure:
    """Draw the distributions of episode lengths."""
    values = {label: survey.lengths for label, survey in surveys.items()}
    return _histograms(values, "Episode lengths", "steps", whole_numbers=True)


def figure_order(surveys: Surveys) -> Figure:
    """Draw how returns change over the course of each recording."""
    lines = {}
    for label, survey, values in _labelled_returns(surveys):
        order = np.argsort(survey.episodes.start[survey.episodes.scored], kind="stable")
        parts = np.array_split(values[order], min(_STRETCHES, max(len(values), 1)))
        place = (np.arange(len(parts)) + 0.5) / len(parts)
        lines[label] = place, [part.mean() if len(part) else np.nan for part in parts]
    title = "Returns in the order of recording"
    return _line_chart(lines, title, "fraction of the recording", "mean return")


def training_of(survey: Survey) -> dict[str, list[tuple[float, float]]]:
    """Return steps and returns of a recorder's policies in a dataset: by team, "" for all."""
    policies = survey.vault.provenance.get("policies")
    points: dict[str, list[tuple[float, float]]] = {}
    for policy in policies if isinstance(policies, list) else ():
        about = policy if isinstance(policy, dict) else {}
        step, value = about.get("training_steps"), about.get("return")
        returns = value if isinstance(value, dict) else {str(about.get("team", "")): value}
        for team, score in returns.items():
            if not isinstance(step, int | float) or not isinstance(score, int | float):
                continue
            if abs(step) < _MOST and abs(score) < _MOST:  # their sum may be too large for a float
                points.setdefault(team, []).append((step, score))
    return points


def figure_training(surveys: Surveys) -> Figure:
    """Draw the learning curves of the policies that recorded the data, of each team."""
    lines = {
        f"{label}, {team}" if team else label: zip(*points, strict=True)
        for label, survey in surveys.items()
        for team, points in training_of(survey).items()
    }
    unit = "environment steps of training"
    return _line_chart(lines, "Learning curve of the recorder", unit, "return of the policy")


def figure_curve(surveys: Surveys) -> Figure:
    """Draw the mean reward by time in the episode."""
    rewards = {label: survey.rewards for label, survey in surveys.items()}
    lines = {
        label: ((np.arange(len(entry.curve)) + 0.5) * entry.stretch, entry.curve)
        for label, entry in rewards.items()
    }
    return _line_chart(lines, "Reward by time in the episode", "step of the episode", "mean reward")


def figure_ends(surveys: Surveys) -> Figure:
    """Draw the fractions of episodes by how they ended."""

    def draw(axes: Axes) -> None:
        axes.grid(axis="x")
        labels = list(surveys)[::-1]
        left = np.zeros(len(labels))
        for cause, colour in _CAUSE_COLOURS.items():
            masks = [surveys[label].episodes.cause == cause for label in labels]
            share = np.array([mask.mean() if len(mask) else 0.0 for mask in masks])
            if share.any():
                axes.barh(list(map(escape, labels)), share, 0.6, left, label=cause, color=colour)
                left += share
        axes.set_xlim(0, 1)
        if len(labels) == 1:
            axes.set_yticks([])

    return chart(draw, "How episodes ended", "fraction of episodes", legend=True)


def figure_repeats(surveys: Surveys) -> Figure:
    """Draw the numbers of state-action pairs by how often they occur."""

    def draw(axes: Axes) -> None:
        axes.set(xscale="log", yscale="log")
        for axis in (axes.xaxis, axes.yaxis):
            _label_counts(axis)
        for number, (label, survey) in enumerate(surveys.items()):
            occurrences, counts = survey.coverage.repeats.T
            style: dict[str, Any] = {"s": 14, "alpha": 0.7, "linewidth": 0, "label": escape(label)}
            axes.scatter(occurrences, counts, color=line_style(number)["color"], **style)

    title = "Occurrences of state-action pairs"
    return chart(draw, title, "occurrences of a pair", "pairs", legend=len(surveys) > 1)


def figure_agents(surveys: Surveys) -> Figure:
    """Draw the median and the middle 90% of each agent's returns."""

    def draw(axes: Axes) -> None:
        for number, (label, survey) in enumerate(surveys.items()):
            returns = survey.episodes.returns[survey.episodes.scored]
            if not len(returns):
                continue
            low, middle, high = np.quantile(returns, (0.05, 0.5, 0.95), axis=0)
            place = np.arange(len(middle)) + 0.6 * ((number + 0.5) / len(surveys) - 0.5)
            ends, colour = [middle - low, high - middle], line_style(number)["color"]
            style: dict[str, Any] = {"fmt": "o", "markersize": 4, "label": escape(label)}
            axes.errorbar(place, middle, ends, color=colour, **style)
        axes.locator_params(axis="x", integer=True)

    return chart(draw, "Returns of each agent", "agent", "episode return", legend=len(surveys) > 1)


def figure_actions(survey: Survey) -> Figure:
    """Draw the distribution of each agent's actions."""
    actions = survey.actions
    if isinstance(actions, ContinuousActions):
        return chart(lambda axes: _draw_values(axes, actions), "Values of actions", "action")
    return make_figure(lambda figure: _draw_choices(figure, actions), (5.0, 3.1))


def figure_information(information: Float[np.ndarray, "N N"]) -> Figure:
    """Draw the mutual information of each two agents' actions."""
    highest, title = (
        max(float(information.max()), _SOME_BITS),
        "Mutual information of actions, bits",
    )
    return chart(lambda axes: _draw_map(axes, information, highest), title, "agent", "agent")


def figure_features(ranges: Ranges, title: str) -> Figure:
    """Draw the range of every feature, its mean and standard deviation."""
    return chart(lambda axes: _draw_ranges(axes, ranges), title, "feature")


def _line_chart(lines: Mapping[str, Iterable[Any]], title: str, x: str, y: str) -> Figure:
    def draw(axes: Axes) -> None:
        for number, (label, (places, values)) in enumerate(lines.items()):
            marker = "o" if len(places) < 3 else ""
            axes.plot(places, values, label=escape(label), marker=marker, **line_style(number))

    return chart(draw, title, x, y, legend=len(lines) > 1)


def _label_counts(axis: Any) -> None:
    """Label a logarithmic axis with few numbers, also if its range is small."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=8))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axis.set_minor_formatter(NullFormatter())


def _histograms(
    values: Mapping[str, Num[np.ndarray, "_"]],
    title: str,
    unit: str,
    whole_numbers: bool = False,
) -> Figure:
    edges = bin_edges(list(values.values()), whole_numbers)

    def draw(axes: Axes) -> None:
        for number, (label, numbers) in enumerate(values.items()):
            if len(numbers):
                shares = np.histogram(numbers, edges)[0] / len(numbers)
                axes.stairs(shares, edges, fill=True, color=line_style(number)["color"], alpha=0.25)
                axes.stairs(shares, edges, label=escape(label), **line_style(number))

    return chart(draw, title, unit, "fraction of episodes", legend=len(values) > 1)


def bin_edges(
    values: Sequence[Num[np.ndarray, "_"]], whole_numbers: bool = False
) -> Float[np.ndarray, "edges"]:
    """Return the edges of common bins for several sets of numbers; whole numbers are centred."""
    numbers = np.concatenate([np.asarray(array, float) for array in values] or [np.zeros(0)])
    numbers = numbers[np.isfinite(numbers)]
    if not len(numbers):
        return np.array([0.0, 1.0])
    low, high = float(numbers.min()), float(numbers.max())
    if whole_numbers:
        low, high = min(low, (low + high) // 2 - 2), max(high, (low + high) // 2 + 2)
        step = max(1, -(-int(high - low + 1) // _MOST_BINS))
        return np.arange(low, high + step + 1, step) - 0.5
    if low == high:
        return low + np.array([-0.5, 0.5]) * max(abs(low) / 10, 1e-3)
    return 2 * np.linspace(low / 2, high / 2, _MOST_BINS + 1)  # high - low may be infinite


def _draw_choices(figure: Figure, actions: DiscreteActions) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    steps = np.maximum(actions.steps, 1)[:, None]
    left.set_title("Taken")
    right.set_title("Legal")
    shares = actions.taken / steps
    _draw_map(left, shares, max(float(shares.max()), 2 / shares.shape[1]))
    _draw_map(right, actions.legal / steps, 1.5)
    left.set(xlabel="action", ylabel="agent")
    right.set_xlabel("action")


def _draw_values(axes: Axes, actions: ContinuousActions) -> None:
    agents, size, _ = actions.histogram.shape
    shares = actions.histogram / np.maximum(actions.histogram.sum(-1, keepdims=True), 1)
    rows = shares.reshape(agents * size, BINS)
    extent = (-1.0, 1.0, agents * size - 0.5, -0.5)
    drawing = axes.imshow(rows, cmap="Blues", vmin=0, aspect="auto", extent=extent)
    axes.set_xticks([-1, -0.5, 0, 0.5, 1])
    axes.figure.colorbar(drawing, ax=axes, label="fraction of steps", fraction=0.05)
    axes.grid(visible=False)
    if size == 1:
        axes.set_ylabel("agent")
    elif agents <= 16:
        axes.set_yticks(np.arange(agents) * size + (size - 1) / 2, [str(i) for i in range(agents)])
        axes.hlines(np.arange(1, agents) * size - 0.5, -1, 1, color="#9ca3af", linewidth=0.6)
        axes.set_ylabel(f"agent, {size} dimensions each")
    else:
        axes.set_ylabel(f"agent x {size} + dimension")


def _draw_map(axes: Axes, values: Float[np.ndarray, "R C"], highest: float) -> None:
    axes.grid(visible=False)
    drawing = axes.imshow(values, cmap="Blues", vmin=0, vmax=highest, aspect="auto")
    axes.locator_params(integer=True)
    if len(values) > _MOST_CELLS or values.shape[1] > _MOST_CELLS:
        bar = axes.figure.colorbar(drawing, ax=axes, fraction=0.08)
        bar.ax.set_ylim(0, float(values.max()) or 1.0)
        return
    for (row, column), value in np.ndenumerate(values):
        colour = "white" if value > 0.6 * highest else "#374151"
        axes.text(column, row, _brief(value), ha="center", va="center", fontsize=8, color=colour)


def _brief(value: float) -> str:
    if 0 < value < 0.005:
        return "<.01"
    return f"{value:.2f}".removeprefix("0") if 0 < value < 0.995 else f"{value:.2g}"


def _draw_ranges(axes: Axes, ranges: Ranges) -> None:
    """Draw columns ``(..., O)``, merged over agents if there are several."""
    from matplotlib.ticker import SymmetricalLogLocator

    low, high, mean, std = (
        field.reshape(-1, field.shape[-1])
        for field in (ranges.low, ranges.high, ranges.mean, ranges.std)
    )
    if not np.isfinite(low).any():
        return
    low, high = np.fmin.reduce(low), np.fmax.reduce(high)
    below = np.maximum(np.fmin.reduce(mean - std), low)
    above = np.minimum(np.fmax.reduce(mean + std), high)
    place = np.arange(len(low))
    constant = low == high
    axes.bar(place, high - low, 0.8, low, color=COLOURS[5], alpha=0.35, label="range")
    axes.bar(place, above - below, 0.8, below, color=COLOURS[0], label="mean ± std")
    if constant.any():
        axes.scatter(place[constant], low[constant], marker="_", color=COLOURS[1], label="constant")
    wide = (high - low)[high > low]
    if len(wide) and np.nanmax(np.abs([low, high])) > 100 * np.median(wide):
        axes.set_yscale("symlog", linthresh=float(np.median(wide)))
        locator = SymmetricalLogLocator(axes.yaxis.get_transform())
        locator.set_params(numticks=7)
        axes.yaxis.set_major_locator(locator)
    axes.margins(y=0.05)
    axes.locator_params(axis="x", integer=True)
    axes.legend(fontsize=8, loc="best", frameon=True, framealpha=0.8, edgecolor="none")
