"""Learning curves: of several runs beside one another, of one run, of a dataset's recorder."""

import numpy as np
import pytest

from offmarl import envs, report, tracking
from offmarl.networks import PolicyConfig, make_policy
from offmarl.programs import record_policy
from offmarl.report import Entry, pages
from offmarl.report.curves import Curve, learning_curves
from offmarl.report.dataset_figures import figure_training
from offmarl.terminal import bars
from tests.runs import write_run
from tests.vault.experience import recorded

RISING = [0.0, 1.0, 2.0, 4.0]


def learned(directory, program, seeds, offset=0.0, **record):
    """Write a run whose seeds' evaluations rise from their number on; step 50 lacks a seed."""
    run = write_run(directory, program, "a/b", [[4.0 + seed] for seed in range(seeds)], **record)
    (run / tracking.METRICS_FILE).unlink()
    for number, value in enumerate(RISING):
        step = 10 * (number + 1)
        rows = [{"seed": seed, "step": step} for seed in range(seeds)]
        tracking.append(
            run / tracking.METRICS_FILE,
            *({**row, "loss": 5 - value, tracking.WALL_TIME: float(step)} for row in rows),
            *({**row, tracking.RETURN: [value + offset, value + 2 * row["seed"]]} for row in rows),
        )
    extra = {"seed": 0, "step": 50, tracking.RETURN: [9.0]}
    tracking.append(run / tracking.METRICS_FILE, extra)
    return run


def test_curves_have_the_steps_that_all_seeds_have(tmp_path):
    curves = report.curves_of(learned(tmp_path / "run", "bc", 2))
    assert list(curves) == ["loss", tracking.WALL_TIME, tracking.RETURN]
    curve = curves[tracking.RETURN]
    assert curve.steps.tolist() == [10, 20, 30, 40]
    np.testing.assert_allclose(curve.values, [RISING, np.array(RISING) + 1])
    np.testing.assert_allclose(curve.mean, np.array(RISING) + 0.5)
    assert curve.interval() is None  # of two seeds
    assert curve.data()["low"] is None


def test_intervals_contain_the_mean_and_vanish_where_the_seeds_agree():
    values = np.array([[0.0, 1.0], [0.0, 2.0], [0.0, 3.0], [0.0, 6.0]])
    low, high = Curve(np.array([1, 2]), values).interval()
    assert low[0] == high[0] == 0
    assert 1 <= low[1] < 3 < high[1] <= 6


def test_compare_shows_curves(offmarl, tmp_path):
    runs = [learned(tmp_path / name, name, 3) for name in ("bc", "maicq")]
    out = offmarl("compare", *runs, "--html", tmp_path / "page.html").out
    assert "Learning curves" in out and "▁" in out and "█" in out
    assert "Learning curves: mean over seeds." in (tmp_path / "page.html").read_text()
    points = offmarl("compare", *runs, "--json").json["curves"]["a/b"]["bc (greedy)"]
    assert points["step"] == [10, 20, 30, 40]
    assert points["mean"] == [1.0, 2.0, 3.0, 5.0] and len(points["seeds"]) == 3
    low, mean, high = (np.array(points[name]) for name in ("low", "mean", "high"))
    assert (low <= mean).all() and (mean <= high).all()


def test_runs_without_metrics_are_compared_without_curves(offmarl, tmp_path):
    run = write_run(tmp_path / "bc", "bc", "a/b", [[1.0]])
    (run / tracking.METRICS_FILE).unlink()
    assert offmarl("compare", run, "--json").json["curves"] == {}


def test_bars_of_one_dataset_have_one_scale():
    curve = Curve(np.arange(2), np.array([[0.0, 1.0]]))
    higher = Curve(np.arange(2), np.array([[3.0, 7.0]]))
    curves = {"data": {Entry("a"): curve, Entry("b"): higher}}
    rows = learning_curves(curves).rows
    assert [row[3] for row in rows] == ["▁▂", "▄█"]
    long = Curve(np.arange(100), np.linspace(0, 1, 100)[None])
    (row,) = learning_curves({"data": {Entry("a"): long}}).rows
    assert len(row[3]) == 30 and row[3] == "".join(sorted(row[3]))
    assert bars([]) == "" and bars([2.0, 2.0]) == "▁▁"


def test_a_run_has_a_page(offmarl, tmp_path):
    settings = {"learning_rate": "offmarl/settings/probe.toml [bc]"}
    run = learned(tmp_path / "run", "bc", 3, settings=settings)
    out = offmarl("report", run, "--html", tmp_path / "page.html").out
    words = "bc on a/b", "offmarl/settings/probe.toml [bc]", "40 s", "Learning curves", "loss"
    assert all(text in out for text in words)
    page = (tmp_path / "page.html").read_text()
    assert page.count("<img") == 3 and "http" not in page.replace("http://www.w3.org", "")
    assert pages.run_page(pages.describe_run(run)) == page
    result = offmarl("report", run, "--json").json
    assert result["curves"][tracking.RETURN]["step"] == [10, 20, 30, 40]
    assert result["record"]["program"] == "bc"
    assert "episode return" in out  # what the evaluations measure heads their table


def test_the_first_and_the_last_value_of_a_metric(tmp_path):
    described = pages.describe_run(learned(tmp_path / "run", "bc", 3))
    (metrics,) = (x for x in described.sections() if x.title.startswith("Metrics"))
    assert metrics.columns == ["metric", "first", "last", "steps"]
    assert metrics.rows[0] == ["loss", 5.0, 1.0, 40]


def test_a_seed_that_diverged_is_named(offmarl, tmp_path):
    run = learned(tmp_path / "run", "bc", 3)
    for seed in range(3):
        value = None if seed == 1 else 0.5
        row = {"seed": seed, "step": 60, "loss": value, tracking.RETURN: [1.0, value]}
        tracking.append(run / tracking.METRICS_FILE, row)
    outcome = offmarl("report", run, "--html", tmp_path / "page.html")
    for text in (" ".join(outcome.out.split()), (tmp_path / "page.html").read_text()):
        assert "episode_return has no finite value at the end of seed 1: its" in text
        assert "loss has no finite value at the end of seed 1: its" in text


def test_a_run_of_several_teams_has_curves_and_no_single_score(offmarl, tmp_path):
    run = learned(tmp_path / "run", "bc", 3)
    for name in (tracking.METRICS_FILE, tracking.MARL_EVAL_FILE):
        text = (run / name).read_text().replace('"episode_return"', '"episode_return_red"')
        (run / name).write_text(text)
    assert "episode return of red" in offmarl("report", run).out
    offmarl.refuses("a return for each team", "compare", run, code=1)


def test_a_metric_may_have_any_name(tmp_path):
    run = learned(tmp_path / "run", "bc", 1)
    tracking.append(run / tracking.METRICS_FILE, {"seed": 0, "step": 10, r"loss_$\foo$": 1.0})
    assert r"loss_$\foo$" in pages.run_page(pages.describe_run(run))


def test_several_runs_are_for_compare(offmarl, tmp_path):
    runs = [learned(tmp_path / name, name, 1) for name in ("bc", "maicq")]
    offmarl.refuses("`offmarl compare`", "report", *runs)


@pytest.mark.slow
def test_a_dataset_shows_the_training_that_it_came_from(offmarl, tmp_path):
    env = envs.make("probe/one-step")
    uniform = make_policy(PolicyConfig("random"), env.spec)
    about = {"policies": [{"training_steps": 10 * i, "return": float(i)} for i in range(3)]}
    for name, provenance in (("trained", about), ("given", {})):
        path = tmp_path / "a.vlt" / name
        record_policy(env, uniform, (), path, steps=16, num_envs=4, provenance=provenance)
        assert offmarl("report", path, "--html", tmp_path / f"{name}.html").code == 0
    assert "Learning curve: a/trained: 3 policies." in (tmp_path / "trained.html").read_text()
    assert "Learning curve" not in (tmp_path / "given.html").read_text()


def test_each_team_of_a_recorder_has_a_line_and_what_is_no_number_has_none(tmp_path):
    pairs = [({"cats": 1.0, "mice": None}, 0), ({"cats": 2, "mice": 3.0}, 10), (None, 20), (7, "x")]
    about = {"policies": [{"training_steps": step, "return": value} for value, step in pairs]}
    about["policies"] += ["another", {"training_steps": 5, "return": 4.0, "team": "mice"}]
    stats = report.survey(recorded(tmp_path / "a.vlt" / "x", provenance=about))
    (axes,) = figure_training({"a": stats, "b": stats}).axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    cats, mice = [[0, 1], [10, 2]], [[10, 3], [5, 4]]
    assert lines == {f"{n}, {x}": y for n in "ab" for x, y in (("cats", cats), ("mice", mice))}
    assert "Learning curve: a: 2 policies." in pages.dataset_page({"a": stats})
