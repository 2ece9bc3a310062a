"""Figures and pages are drawn completely, and identically each time."""

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from offmarl import report
from offmarl.errors import OptionError
from offmarl.report import Entry, pages
from offmarl.report.dataset_figures import bin_edges, training_of
from offmarl.report.figures import chart
from offmarl.report.tables import Section
from offmarl.statistics import Reference
from tests.runs import compared

BC, SAMPLED, MAICQ = Entry("bc", "greedy"), Entry("bc", "sampled"), Entry("maicq", "greedy")
SCORES = {
    "medium": {
        BC: np.array([1.0, 1.2, 1.1]),
        MAICQ: np.array([1.5, 1.4, 1.8]),
        SAMPLED: np.array([0.9, 1.1, 1.0]),
    },
    "expert": {BC: np.array([2.0, 2.1, 2.0])},
}
LABELS = ("bc (greedy)", "bc (sampled)", "maicq (greedy)")
FORMULA = Entry("m $x^$", "greedy")
"""A name that matplotlib would take for a formula."""


def test_a_training_of_numbers_that_cannot_be_drawn_is_left_out():
    nan, inf = float("nan"), float("inf")
    pairs = [(10**400, 1.0), (1, 10**400), (nan, 1), (1, inf), (2, 0.5), ("1", 2), (1e300, 1)]
    policies = [{"training_steps": step, "return": value} for step, value in pairs]
    survey: Any = SimpleNamespace(vault=SimpleNamespace(provenance={"policies": policies}))
    assert training_of(survey) == {"": [(2, 0.5)]}


@pytest.mark.parametrize(
    ("kind", "head"), [("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")]
)
def test_a_figure_has_the_same_bytes_each_time_in_any_format(tmp_path, monkeypatch, kind, head):
    paths = [tmp_path / "new" / f"{number}.{kind}" for number in range(2)]
    for path in paths:
        monkeypatch.setenv("SOURCE_DATE_EPOCH", path.stem)  # matplotlib's clock
        report.save(chart(lambda axes: axes.plot([0, 1]), "title", "x"), path)
    first, second = (path.read_bytes() for path in paths)
    assert first == second and first.startswith(head)


def test_a_format_that_there_is_not_is_refused(tmp_path):
    with pytest.raises(OptionError, match=r"\.docx: .* ends in \.png or \.svg or \.pdf"):
        report.save(chart(lambda axes: None, "title", "x"), tmp_path / "demo.docx")


def test_demo_figure_names_tiers_and_algorithms(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("matplotlib").rcParams, "svg.fonttype", "none")
    tiers = {"random": [0.1, 0.2, 0.15], "medium": [1.0, 1.2], "a $x^$": [2.0, 2.0]}
    scores = {"medium": SCORES["medium"], "a $x^$": {FORMULA: np.array([2.0, 2.1, 2.0])}}
    report.figure_demo(tiers, scores, tmp_path / "demo.svg")
    text = (tmp_path / "demo.svg").read_text()
    for label in (*tiers, "episode return", *LABELS, FORMULA.label):
        assert f">{label}</text>" in text


@pytest.mark.parametrize(
    "scores",
    [
        SCORES,
        {"medium": SCORES["medium"]},
        {"medium": {BC: np.array([1.0])}},
        {"medium": {BC: np.array([1.0])}, "a $x^$": {FORMULA: np.array([1.0])}},
    ],
)
def test_comparison_is_drawn_whatever_there_is_to_compare(tmp_path, scores):
    report.save(report.figure_comparison(compared(scores)), tmp_path / "comparison.svg")
    assert (tmp_path / "comparison.svg").stat().st_size > 5000


def test_intervals_are_drawn_from_three_seeds_on():
    for seeds, bars in ((2, 0), (3, 1)):
        scores = {"medium": {BC: np.arange(float(seeds))}}
        left, middle, _ = report.figure_comparison(compared(scores)).axes
        assert sum(bar.has_yerr for bar in left.containers) == bars
        assert len(middle.collections) == bars  # the band of the performance profile
        assert ("interval" in left.get_title("left")) == bool(bars)


def test_sample_efficiency_is_the_iqm_over_all_datasets_on_one_scale():
    """At the steps that both datasets have: of eight normalised scores, the middle four count."""
    runs = np.array([0.0, 1.0, 2.0, 3.0])
    curve = report.Curve(np.array([0, 5, 10]), np.stack([runs, runs, runs + 4], axis=1))
    sparse = report.Curve(np.array([0, 10]), 10 * np.stack([runs + 1, runs + 5], axis=1))
    curves = {"a": {BC: curve, MAICQ: curve}, "b": {BC: sparse}}
    scores = {"a": {BC: runs, MAICQ: runs}, "b": {BC: 10 * runs}}
    references = {"a": Reference(0.0, 1.0), "b": Reference(0.0, 10.0)}
    figure = report.figure_comparison(compared(scores, references), curves)
    (line,), (band,) = figure.axes[3].get_lines(), figure.axes[3].collections
    assert line.get_xdata().tolist() == [0, 10] and line.get_ydata().tolist() == [2.0, 6.0]
    heights = band.get_paths()[0].vertices[:, 1]
    assert heights.min() < 2 and heights.max() > 6
    for unknown in ({}, {"a": references["a"]}):  # no common scale
        assert len(report.figure_comparison(compared(scores, unknown), curves).axes) == 3


def test_sampled_entries_are_hollow_and_dashed_in_their_algorithms_colour():
    figure = report.figure_comparison(compared({"medium": SCORES["medium"]}))
    handles = {line.get_label(): line for line in figure.legends[0].get_lines()}
    greedy, sampled = handles["bc (greedy)"], handles["bc (sampled)"]
    assert greedy.get_color() == sampled.get_color() != handles["maicq (greedy)"].get_color()
    assert (greedy.get_linestyle(), sampled.get_linestyle()) == ("-", "--")
    assert (greedy.get_markerfacecolor(), sampled.get_markerfacecolor()) == ("#0072B2", "white")


def test_many_algorithms_look_different():
    scores = {"medium": {Entry(f"m{i}", "greedy"): np.array([float(i)]) for i in range(20)}}
    figure = report.figure_comparison(compared(scores))
    lines = figure.legends[0].get_lines()
    looks = {(x.get_color(), x.get_marker(), str(x._dash_pattern)) for x in lines}
    curves = {(x.get_color(), str(x._dash_pattern)) for x in lines}  # of curves, without markers
    assert len(looks) == len(curves) == 20


def test_the_numbers_that_are_drawn():
    scores = {"medium": {BC: np.array([1.0, 2.0, 6.0]), MAICQ: np.array([3.0, 5.0, 7.0])}}
    _, profiles, matrix = report.figure_comparison(compared(scores)).axes
    (first, second) = profiles.get_lines()
    taus, above = first.get_data()
    assert above[0] == 1 and above[-1] == 0 and above[np.searchsorted(taus, 1.5)] == 2 / 3
    assert second.get_ydata()[np.searchsorted(taus, 6.5)] == 1 / 3
    texts = {t.get_position()[::-1]: t.get_text() for t in matrix.texts}
    assert texts[0, 1] == "0.22" and texts[1, 0] == "0.78"  # bc wins 2 of 9 pairs
    assert [t.get_text() for t in matrix.get_yticklabels()] == ["bc (greedy)", "maicq (greedy)"]


def test_curves_are_the_means_of_the_seeds():
    curve = report.Curve(np.array([10, 20, 30]), np.array([[0.0, 1, 2], [2.0, 3, 4], [1.0, 5, 9]]))
    (axes,) = report.figure_curves({"data $": {BC: curve}}, "return").axes
    (line,) = axes.get_lines()
    np.testing.assert_array_equal(line.get_data(), [[10, 20, 30], [1, 3, 5]])
    assert axes.get_title("left") == r"data \$" and axes.get_ylabel() == "return"


OUTSIDE = """<script>'"&"""


@pytest.mark.slow
def test_a_page_is_self_contained_and_reproducible_and_escapes_what_it_shows():
    """Names of datasets, programs and devices, and all other texts, come from outside."""

    def write() -> str:
        figure = report.figure_comparison(compared(SCORES))
        section = Section(OUTSIDE, [OUTSIDE], [[OUTSIDE], [3.0]])
        return pages.render(
            "benchmark.html",
            name=OUTSIDE,
            planned=1,
            notes=[OUTSIDE, (OUTSIDE, OUTSIDE)],
            tables=[section],
            scores=figure,
            curves=[figure],
            cells=[[OUTSIDE] * 7],
        )

    text = write()
    assert text == write()
    assert text.count("&lt;script&gt;&#39;&#34;&amp;") == 15 and "<script" not in text
    assert set(re.findall(r'(?:src|href)="([a-z]+:)', text)) == {"data:"}


@pytest.mark.parametrize("values", [[], [3.0], [1, 1 + 2**-52], [1e17, 1e17 + 16], [-1e308, 1e308]])
def test_bins_hold_all_returns(values):
    edges = bin_edges([np.array(values)])
    assert np.isfinite(edges).all() and (np.diff(edges) >= 0).all()
    assert np.histogram(values, edges)[0].sum() == len(values)
