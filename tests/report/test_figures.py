"""The figures and the page: that they are drawn, whole, and the same each time."""

import re

import numpy as np
import pytest

from offmarl import report
from offmarl.errors import OptionError
from offmarl.report import page

SCORES = {
    "medium": {"bc": np.array([1.0, 1.2, 1.1]), "maicq": np.array([1.5, 1.4, 1.8])},
    "expert": {"bc": np.array([2.0, 2.1, 2.0])},
}
TIERS = {"random": [0.1, 0.2, 0.15], "medium": [1.0, 1.2], "expert": [2.0, 2.0]}


@pytest.mark.parametrize("suffix", [".png", ".svg", ".pdf"])
def test_demo_figure_is_written_in_any_format(tmp_path, suffix):
    path = tmp_path / "new" / f"demo{suffix}"
    report.figure_demo(TIERS, SCORES, path)
    assert path.stat().st_size > 5000


def test_a_format_that_there_is_not_is_refused(tmp_path):
    with pytest.raises(OptionError, match=r"\.docx: end it in \.png or \.svg or \.pdf"):
        report.figure_demo(TIERS, SCORES, tmp_path / "demo.docx")


def test_demo_figure_names_tiers_and_algorithms(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("matplotlib").rcParams, "svg.fonttype", "none")
    report.figure_demo(TIERS, SCORES, tmp_path / "demo.svg")
    text = (tmp_path / "demo.svg").read_text()
    for label in ("random", "medium", "expert", "bc", "maicq", "episode return"):
        assert f">{label}</text>" in text


@pytest.mark.parametrize(
    "scores",
    [
        SCORES,
        {"medium": SCORES["medium"]},
        {"medium": {"bc": np.array([1.0])}},
        {"medium": {"bc": np.array([1.0])}, "expert": {"maicq": np.array([1.0])}},
    ],
)
def test_comparison_is_drawn_whatever_there_is_to_compare(tmp_path, scores):
    report.save(report.figure_comparison(report.compare(scores)), tmp_path / "comparison.svg")
    assert (tmp_path / "comparison.svg").stat().st_size > 5000


def test_page_is_self_contained_and_reproducible():
    def write() -> str:
        figure = report.figure_comparison(report.compare(SCORES))
        body = [page.image(figure, "caption"), page.table(["a < b"], [["<script>"]])]
        return page.document("Runs & more", body)

    text = write()
    assert text == write()
    assert "<script>" not in text and "&lt;script&gt;" in text and "Runs &amp; more" in text
    assert set(re.findall(r'(?:src|href)="([a-z]+:)', text)) == {"data:"}
