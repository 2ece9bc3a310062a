"""Figures of the demo and of comparisons, and what all figures share.

The colours are those of Okabe and Ito, which can be distinguished with any kind of colour vision.
Each algorithm also has its own marker, which is hollow if its actions were sampled, and from the
eighth on other dashes.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float

from offmarl.paths import kind_of
from offmarl.report.comparison import Comparison, estimate
from offmarl.report.curves import Curve, Curves, common_curves
from offmarl.report.run_scores import Entry, RunScores, Scores
from offmarl.statistics import MIN_RUNS, bootstrap_interval, iqm, performance_profile
from offmarl.tracking import write_output

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

KINDS = ("png", "svg", "pdf")

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = ("o", "s", "D", "^", "v", "P", "X", "*")
_Dashes = Literal["-", "--", "-.", ":"] | tuple[int, tuple[int, ...]]
_LINES: tuple[tuple[_Dashes, _Dashes], ...] = (
    ("-", "--"),
    ("-.", ":"),
    ((0, (9, 2)), (0, (3, 5))),
)
"""Lines of greedy and of sampled actions, for the first seven algorithms, the next seven and so on.
"""
_DATA = "#6b7280"

_STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9ca3af",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#e5e7eb",
    "xtick.major.size": 0,
    "legend.frameon": False,
    "svg.hashsalt": "offmarl",  # the same figure gives the same bytes
}


def figure_demo(tiers: Mapping[str, Sequence[float]], scores: Scores, path: Path) -> None:
    """Draw the returns of the datasets beside the scores of the baselines.

    Parameters
    ----------
    tiers
        The returns of each tier's episodes.
    scores
        For each tier that was trained on, the mean return of each entry and training seed.
    path
        File to write; the suffix sets the format.
    """
    returns = {tier: np.asarray(values, float) for tier, values in tiers.items()}

    def draw(figure: Figure) -> None:
        left, right = figure.subplots(1, 2, sharey=True)
        _draw_returns(left, returns)
        means = {tier: float(returns[tier].mean()) for tier in scores if tier in returns}
        _draw_scores(figure, right, scores, means)
        left.set_title("Recorded data")
        left.set_ylabel("episode return")
        right.set_title(f"Trained offline: {_iqm_title(scores)}")

    save(make_figure(draw, (11, 4.4)), path)


def figure_comparison(comparison: Comparison, curves: Curves | None = None) -> Figure:
    """Draw scores with intervals, performance profiles, probabilities of improvement.

    With ``curves`` of all datasets on one scale, also the IQM over them against the steps.
    """
    has_all = comparison.pooled and curves is not None and curves.keys() == comparison.scores.keys()
    scales = comparison.references if comparison.normalised else {}
    pooled = common_curves(curves, scales) if curves and has_all else {}

    def draw(figure: Figure) -> None:
        ratios = [1.25, 1, 1, *([1] if pooled else [])]
        left, middle, right, *more = figure.subplots(1, len(ratios), width_ratios=ratios)
        _draw_scores(figure, left, comparison.scores, {})
        left.set_title(_iqm_title(comparison.scores))
        left.set_ylabel(comparison.unit)
        _draw_profiles(middle, comparison)
        _draw_improvement(right, comparison)
        for axes in more:
            _draw_efficiency(axes, comparison, pooled)

    return make_figure(draw, (19 if pooled else 15, 4.4))


def figure_curves(curves: Curves, unit: str) -> Figure:
    """Draw the mean of each entry over the steps, with intervals: one plot for each dataset."""

    def draw(figure: Figure) -> None:
        plots = figure.subplots(1, len(curves), squeeze=False)[0]
        looks = _looks(curves)
        for axes, (dataset, by_entry) in zip(plots, curves.items(), strict=True):
            for entry, curve in by_entry.items():
                look = looks[entry]
                draw_curve(axes, curve, look.colour, look.line)
            axes.set_title(escape(dataset))
            axes.set_xlabel("steps")
        plots[0].set_ylabel(unit)
        handles = [_handle(entry.label, look, marked=False) for entry, look in looks.items()]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 6))

    return make_figure(draw, (min(6.0 * len(curves) + 1.0, 15), 4.0))


def draw_curve(axes: Axes, curve: Curve, colour: str, line: _Dashes = "-") -> None:
    """Draw the mean over seeds and its interval; with few seeds each seed instead."""
    interval = curve.interval()
    if interval is None:
        for values in curve.values if len(curve.values) > 1 else ():
            axes.plot(curve.steps, values, ls=line, color=colour, linewidth=0.8, alpha=0.4)
    else:
        axes.fill_between(curve.steps, *interval, color=colour, alpha=0.15, linewidth=0)
    marker = "." if len(curve.steps) < 3 else ""
    axes.plot(curve.steps, curve.mean, ls=line, color=colour, linewidth=1.6, marker=marker)


def save(figure: Figure, path: Path) -> None:
    """Write a figure; the suffix sets the format.

    Raises
    ------
    OptionError
        The format is not supported.
    """
    kind = kind_of(path, KINDS, "a figure")
    write_output(path, to_bytes(figure, kind))


def to_bytes(figure: Figure, kind: str) -> bytes:
    """Return a figure as the bytes of a file, in one of the formats of `KINDS`."""
    import matplotlib as mpl

    file = io.BytesIO()
    undated = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    with mpl.rc_context(_STYLE):
        figure.savefig(file, format=kind, dpi=150, metadata=undated)
    return file.getvalue()


def chart(
    draw: Callable[[Axes], None],
    title: str,
    x: str,
    y: str = "",
    *,
    size: tuple[float, float] = (5.0, 3.1),
    legend: bool = False,
) -> Figure:
    """Return a figure of one chart; a legend below it makes the figure higher."""

    def draw_chart(figure: Figure) -> None:
        axes = figure.subplots()
        axes.set(xlabel=x, ylabel=y)
        axes.set_title(title)
        draw(axes)
        if legend:
            handles, labels = axes.get_legend_handles_labels()
            columns = max(1, min(len(labels), 48 // (max(map(len, labels), default=0) + 5)))
            lines = -(-len(labels) // columns)
            figure.set_size_inches(size[0], size[1] + 0.17 * max(lines - 1, 0))
            figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=9)

    return make_figure(draw_chart, size)


def make_figure(draw: Callable[[Figure], None], size: tuple[float, float]) -> Figure:
    """Return a figure in the common style; ``size`` is in inches."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
    return figure


def line_style(number: int) -> dict[str, Any]:
    """Return how the line of one of several datasets is drawn."""
    lines = _LINES[number // len(COLOURS) % len(_LINES)]
    return {"color": COLOURS[number % len(COLOURS)], "linestyle": lines[0], "linewidth": 1.6}


def _draw_returns(axes: Axes, returns: Mapping[str, Float[np.ndarray, "episodes"]]) -> None:
    """Draw each tier's distribution: its density, its episodes, its mean."""
    jitter = np.random.default_rng(0)
    for x, values in enumerate(returns.values()):
        if np.ptp(values) > 0:
            parts: Any = axes.violinplot([values], [x], widths=0.8, showextrema=False)
            parts["bodies"][0].set(facecolor=COLOURS[5], alpha=0.45, edgecolor="none")
        sample = values[:: max(1, len(values) // 150)]
        spread = jitter.uniform(-0.09, 0.09, len(sample))
        axes.scatter(x + spread, sample, s=5, color=COLOURS[0], alpha=0.4, linewidth=0)
        axes.hlines(values.mean(), x - 0.4, x + 0.4, color=_DATA, linestyle="--", linewidth=1.2)
        axes.annotate(
            f"{values.mean():.3g}",
            (x + 0.42, values.mean()),
            va="center",
            fontsize=9,
            color="#374151",
        )
    axes.set_xticks(range(len(returns)), list(map(escape, returns)))
    axes.set_xlim(-0.6, len(returns) - 0.25)


def _iqm_title(scores: Scores) -> str:
    """Return the title of a plot of scores, which has intervals if there are enough seeds."""
    seeds = max(len(runs) for entries in scores.values() for runs in entries.values())
    return "IQM over seeds" + (", 95% interval" if seeds >= MIN_RUNS else "")


class _Look(NamedTuple):
    """How an entry is drawn: an algorithm has one colour and marker, greedy or sampled."""

    colour: str
    marker: str
    line: _Dashes
    face: str
    """Colour inside of the marker."""


def _looks(scores: Scores | Curves) -> dict[Entry, _Look]:
    entries = dict.fromkeys(entry for by_entry in scores.values() for entry in by_entry)
    names = [*dict.fromkeys((entry.algorithm, entry.run) for entry in entries)]
    looks = {}
    for entry in entries:
        number, sampled = names.index((entry.algorithm, entry.run)), entry.acting == "sampled"
        colour = COLOURS[number % len(COLOURS)]
        line = _LINES[number // len(COLOURS) % len(_LINES)][sampled]
        marker = _MARKERS[number % len(_MARKERS)]
        looks[entry] = _Look(colour, marker, line, "white" if sampled else colour)
    return looks


def _draw_scores(
    figure: Figure, axes: Axes, scores: Scores, data_means: Mapping[str, float]
) -> None:
    """Draw the IQM of each entry with its interval, dataset by dataset, and the legend."""
    from matplotlib.lines import Line2D

    looks = _looks(scores)
    spacing = 0.6 / max(len(looks), 3)
    offsets = {entry: spacing * (i - (len(looks) - 1) / 2) for i, entry in enumerate(looks)}
    for x, dataset in enumerate(scores):
        for entry, runs in scores[dataset].items():
            _draw_estimate(axes, x + offsets[entry], runs, looks[entry], 0.3 * spacing)
        if dataset in data_means:
            axes.hlines(data_means[dataset], x - 0.42, x + 0.42, color=_DATA, linestyle="--")
    handles = [_handle(entry.label, look) for entry, look in looks.items()]
    if data_means:
        dashed: dict[str, Any] = {"color": _DATA, "linestyle": "--"}
        handles.append(Line2D([], [], label="mean of the data", **dashed))
    figure.legend(handles=handles, loc="outside lower center", ncols=min(len(handles), 6))
    names = [escape(x).replace("/", "/\n") for x in scores]  # so that neighbours do not overlap
    axes.set_xticks(range(len(scores)), names)
    axes.set_xlim(-0.6, len(scores) - 0.4)


def _draw_estimate(axes: Axes, x: float, runs: RunScores, look: _Look, aside: float) -> None:
    value, low, high = estimate(runs)
    axes.scatter(
        np.full(len(runs), x + aside), runs, s=14, color=look.colour, alpha=0.35, linewidth=0
    )
    axes.errorbar(
        x,
        value,
        yerr=None if low is None or high is None else [[value - low], [high - value]],
        color=look.colour,
        marker=look.marker,
        markerfacecolor=look.face,
        markersize=7,
        capsize=3,
        linewidth=1.8,
    )


def _draw_profiles(axes: Axes, comparison: Comparison) -> None:
    """Draw, for each score, the fraction of runs above it, with pointwise intervals."""
    axes.set_title("Performance profile")
    scale = "normalised " if comparison.normalised else ""
    axes.set_xlabel(f"{scale}{comparison.unit} τ")
    axes.set_ylabel("fraction of runs above τ")
    axes.set_ylim(-0.02, 1.05)
    if not comparison.common or not comparison.pooled:
        why = "no reference returns:\nno common scale"
        if comparison.pooled:
            why = "no algorithm ran on all\ndatasets with as many seeds"
        axes.text(0.5, 0.5, why, ha="center", va="center", color=_DATA, transform=axes.transAxes)
        return
    values = np.concatenate([runs.ravel() for runs in comparison.common.values()])
    margin = 0.05 * (np.ptp(values) or 1.0)
    taus = np.linspace(values.min() - margin, values.max() + margin, 101)
    looks = _looks(comparison.scores)
    for entry, runs in comparison.common.items():
        colour, line = looks[entry].colour, looks[entry].line
        profile = performance_profile(runs, taus)
        axes.step(taus, profile, ls=line, where="post", color=colour)
        if len(runs) >= MIN_RUNS:
            low, high = bootstrap_interval(
                partial(performance_profile, thresholds=taus), runs, seed=0, resamples=1000
            )
            axes.fill_between(taus, low, high, step="post", color=colour, alpha=0.15, linewidth=0)


def _draw_efficiency(
    axes: Axes, comparison: Comparison, pooled: Mapping[Entry, tuple[Any, Any]]
) -> None:
    """Draw the IQM over the runs of all datasets against the steps, with pointwise intervals."""
    axes.set_title("Sample efficiency: IQM")
    axes.set_xlabel("steps")
    axes.set_ylabel(f"{'normalised ' * comparison.normalised}{comparison.unit}")
    looks = _looks(comparison.scores)
    for entry, (steps, scores) in pooled.items():
        look = looks[entry]
        axes.plot(steps, iqm(scores), ls=look.line, color=look.colour, linewidth=1.6)
        if scores.shape[1] >= MIN_RUNS:
            ends = [bootstrap_interval(iqm, runs, seed=0, resamples=1000) for runs in scores]
            axes.fill_between(
                steps, *np.transpose(ends), color=look.colour, alpha=0.15, linewidth=0
            )


def _draw_improvement(axes: Axes, comparison: Comparison) -> None:
    """Draw the matrix of the probabilities that the row's entry beats the column's.

    Cells of entries that acted in different ways are empty.
    """
    entries = list(comparison.improvement)
    matrix = np.full((len(entries), len(entries)), np.nan)
    for row, first in enumerate(entries):
        for column, second in enumerate(entries):
            if second in comparison.improvement[first]:
                matrix[row, column] = comparison.improvement[first][second].value
                axes.text(column, row, f"{matrix[row, column]:.2f}", ha="center", va="center")
    axes.set_title("P(row beats column)")
    axes.grid(visible=False)
    if entries:
        axes.imshow(matrix, cmap="PuOr_r", vmin=-0.3, vmax=1.3)
    names = [escape(entry.label) for entry in entries]
    slanted: dict[str, Any] = {"rotation": 35, "ha": "right", "rotation_mode": "anchor"}
    axes.set_xticks(range(len(names)), names, **(slanted if len(names) > 2 else {}))
    axes.set_yticks(range(len(names)), names)


def _handle(label: str, look: _Look, marked: bool = True) -> Any:
    from matplotlib.lines import Line2D

    return Line2D(
        [],
        [],
        color=look.colour,
        linestyle=look.line,
        marker=look.marker if marked else "",
        markerfacecolor=look.face,
        markersize=7,
        linewidth=1.8,
        label=escape(label),
    )


def escape(text: str) -> str:
    """Escape a name for matplotlib, which reads ``$`` as a formula and hides leading ``_``."""
    escaped = text.replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped
