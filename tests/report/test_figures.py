"""Figures and pages are drawn completely, and identically each time."""

import re

import numpy as np
import pytest

from offmarl import report
from offmarl.errors import OptionError
from offmarl.report import Entry, page

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
TIERS = {"random": [0.1, 0.2, 0.15], "medium": [1.0, 1.2], "expert": [2.0, 2.0]}


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_demo_figure_is_written_in_any_format(tmp_path, suffix):
    path = tmp_path / "new" / f"demo{suffix}"
    report.figure_demo(TIERS, SCORES, path)
    assert path.stat().st_size > 5000


def test_a_format_that_there_is_not_is_refused(tmp_path):
    with pytest.raises(OptionError, match=r"\.docx: .* ends in \.png or \.svg or \.pdf"):
        report.figure_demo(TIERS, SCORES, tmp_path / "demo.docx")


def test_demo_figure_names_tiers_and_algorithms(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("matplotlib").rcParams, "svg.fonttype", "none")
    report.figure_demo(TIERS, SCORES, tmp_path / "demo.svg")
    text = (tmp_path / "demo.svg").read_text()
    for label in ("random", "medium", "expert", "episode return", *LABELS):
        assert f">{label}</text>" in text


@pytest.mark.parametrize(
    "scores",
    [
        SCORES,
        {"medium": SCORES["medium"]},
        {"medium": {BC: np.array([1.0])}},
        {"medium": {BC: np.array([1.0])}, "expert": {MAICQ: np.array([1.0])}},
    ],
)
def test_comparison_is_drawn_whatever_there_is_to_compare(tmp_path, scores):
    report.save(report.figure_comparison(report.compare(scores)), tmp_path / "comparison.svg")
    assert (tmp_path / "comparison.svg").stat().st_size > 5000


def test_intervals_are_drawn_from_three_seeds_on():
    for seeds, bars in ((2, 0), (3, 1)):
        scores = {"medium": {BC: np.arange(float(seeds))}}
        left, middle, _ = report.figure_comparison(report.compare(scores)).axes
        assert sum(one.has_yerr for one in left.containers) == bars
        assert len(middle.collections) == bars  # the band of the performance profile
        assert ("interval" in left.get_title("left")) == bool(bars)


def test_sampled_entries_are_hollow_and_dashed_in_their_algorithms_colour():
    figure = report.figure_comparison(report.compare({"medium": SCORES["medium"]}))
    handles = {line.get_label(): line for line in figure.legends[0].get_lines()}
    greedy, sampled = handles["bc (greedy)"], handles["bc (sampled)"]
    assert greedy.get_color() == sampled.get_color() != handles["maicq (greedy)"].get_color()
    assert (greedy.get_linestyle(), sampled.get_linestyle()) == ("-", "--")
    assert (greedy.get_markerfacecolor(), sampled.get_markerfacecolor()) == ("#0072B2", "white")


@pytest.mark.slow
def test_page_is_self_contained_and_reproducible():
    def write() -> str:
        figure = report.figure_comparison(report.compare(SCORES))
        body = [page.image(figure, "caption"), page.table(["a < b"], [["<script>"]])]
        return page.document("Runs & more", body)

    text = write()
    assert text == write()
    assert "<script>" not in text and "&lt;script&gt;" in text and "Runs &amp; more" in text
    assert set(re.findall(r'(?:src|href)="([a-z]+:)', text)) == {"data:"}
