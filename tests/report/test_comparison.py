"""Reading and comparing runs."""

import csv

import numpy as np
import pytest

from offmarl import report, tracking
from offmarl.errors import OptionError, RunError
from offmarl.hub.card import references
from offmarl.programs.runs.run import best_of
from offmarl.report import ComparedData, DatasetResult, Entry
from offmarl.report.comparison import comparison_tables, notes, score_list
from offmarl.report.run_scores import scores_in
from offmarl.report.tables import Score, Section, to_csv, to_latex, to_markdown
from offmarl.statistics import Reference, mean_interval
from offmarl.terminal import interval, number
from offmarl.tracking import AGREEMENT, RETURN
from tests.runs import compared, write_run

LOW, HIGH = np.array([0.0, 1.0, 2.0, 3.0]), np.array([2.0, 3.0, 4.0, 5.0])
BC, MAICQ = Entry("bc", "greedy"), Entry("maicq", "greedy")
SAMPLED = Entry("bc", "sampled")


def test_runs_are_read_by_dataset_and_entry(tmp_path):
    maicq = write_run(tmp_path / "maicq", "maicq", "coverage-3/medium", [[1, 2], [3, 4]])
    online = write_run(tmp_path / "mappo", "mappo", None, [[5, 7]], greedy=False)
    runs = report.read_runs([maicq, online, maicq])
    assert list(runs.results) == ["coverage-3/medium", "swarm/coverage-3"]
    np.testing.assert_array_equal(scores_in(runs.results)["coverage-3/medium"][MAICQ], [1.5, 3.5])
    (entry,) = scores_in(runs.results)["swarm/coverage-3"]
    assert entry == Entry("mappo", "sampled") and entry.label == "mappo (sampled)"


def test_the_numbers_of_the_table():
    runs = np.array([0.0, 0.0, 1.0, 3.0, 11.0])
    comparison = compared({"data": {BC: runs, MAICQ: runs + 4}})
    summary, beats, *_ = comparison_tables(comparison)
    (bc, maicq) = (dict(zip(summary.columns, row, strict=True)) for row in summary.rows)
    assert (bc["algorithm"], bc["seeds"], bc["mean"], bc["median"]) == ("bc (greedy)", 5, 3, 1)
    assert (maicq["mean"], maicq["median"]) == (7, 5)
    value = interval(*report.estimate(runs))
    assert str(bc["IQM [95% interval]"]) == f"{value} *" and value.startswith("1.333 [")
    assert [row[0] for row in beats.rows] == ["bc (greedy)", "maicq (greedy)"]
    assert beats.rows[0][2].startswith("0.16 [") and beats.rows[1][1].startswith("0.84 [")


def test_a_policy_that_draws_its_actions_has_two_entries(tmp_path):
    bc = write_run(tmp_path / "bc", "bc", "a/b", [[1, 2], [3, 4]], [[5, 6], [7, 8]])
    maicq = write_run(tmp_path / "maicq", "maicq", "a/b", [[0, 0], [9, 9]])
    scores = scores_in(report.read_runs([bc, maicq]).results)["a/b"]
    assert list(scores) == [BC, MAICQ, SAMPLED]  # like with like, the sampled ones last
    np.testing.assert_array_equal(scores[SAMPLED], [1.5, 3.5])
    np.testing.assert_array_equal(scores[BC], [5.5, 7.5])


def test_a_policy_that_can_draw_its_actions_has_two_entries_too(tmp_path):
    other = {"sampled_returns": [[0, 1], [2, 3]]}
    run = write_run(tmp_path / "bc", "bc", "a/b", [[1, 2], [3, 4]], **other)
    results = report.read_runs([run]).results
    np.testing.assert_array_equal(scores_in(results)["a/b"][SAMPLED], [0.5, 2.5])
    rows = report.compare(results).datasets["a/b"]
    assert [(row.entry, row.headline) for row in rows] == [(BC, True), (SAMPLED, False)]
    assert compared({"a/b": {SAMPLED: HIGH}}).datasets["a/b"][0].headline


def test_the_best_checkpoint_is_chosen_by_one_half_and_scored_by_the_other(tmp_path):
    run = write_run(tmp_path / "bc", "bc", "a/b", [[1, 2, 1, 2], [5, 5, 5, 5]])
    assert report.best_scores(run) is None  # a single evaluation
    earlier = {
        0: [[90, 90, 90, 90], [90, 90, 90, 90]],  # untrained: no checkpoint
        3: [[9, 0, 9, 0], [1, 1, 1, 1]],
        5: [[2, 3, 2, 3], [4, 4, 4, 4]],
    }
    for step, returns in earlier.items():
        for seed, values in enumerate(returns):
            tracking.append(
                run / tracking.METRICS_FILE, {"seed": seed, "step": step, RETURN: values}
            )
    foreign = {"seed": 7, "step": 3, RETURN: [9, 9, 9, 9]}  # the run has no such seed
    tracking.append(run / tracking.METRICS_FILE, foreign)
    # Of seed 0 the first half chooses step 3, which the other half scores 0; that chooses step 5.
    np.testing.assert_array_equal(report.best_scores(run), [(0 + 2) / 2, 5])
    runs = report.read_runs([run])
    (row,) = report.compare(runs.results).datasets["a/b"]
    assert (row.iqm.value, row.best.value) == ((1.5 + 5) / 2, 3.0)


def test_a_large_evaluation_is_as_likely_to_be_the_best_as_a_small_one(tmp_path):
    run = write_run(tmp_path / "bc", "bc", "a/b", [[5, 5, 0, 0, 0, 0]])
    row = {"seed": 0, "step": 3, RETURN: [2, 2]}
    tracking.append(run / tracking.METRICS_FILE, row)
    # Each of the first two episodes chooses the last evaluation, whose others are its score.
    assert report.best_scores(run).tolist() == [1.0]
    assert best_of(tracking.read(run / tracking.METRICS_FILE), 0) == 10


def test_a_population_counts_as_one_run(tmp_path):
    args = {"learning_rate": 3e-4, "vault": None, "pbt": ["learning_rate"]}
    run = write_run(tmp_path / "ippo", "ippo", None, [[1, 2], [3, 4], [5, 6]], args=args)
    (results,) = report.read_runs([run]).results.values()
    (result,) = results.values()
    assert (result.scores.tolist(), result.seeds) == ([3.5], (0,))
    assert report.curves_of(run)[RETURN].interval() is None


@pytest.mark.parametrize("others", [0, 8])
def test_a_star_allows_for_the_number_of_methods(others):
    """What two methods show of each other may be chance among ten."""
    scores = np.arange(8.0)
    results = {Entry("best"): DatasetResult(scores + 3.5), Entry("second"): DatasetResult(scores)}
    results |= {Entry(f"bad {i}"): DatasetResult(scores - 99) for i in range(others)}
    rows = report.compare({"a": results}).datasets["a"]
    assert [row.bold for row in rows] == [True, bool(others)] + [False] * others


def settings_runs(tmp_path, *, code=(None, None), **changed):
    args = {"learning_rate": 3e-4, "updates": 100, "seeds": 1}
    return [
        write_run(tmp_path / "one", "bc", "a/b", [[1]], args=args, sha256=code[0]),
        write_run(tmp_path / "two", "bc", "c/d", [[1]], args=args | changed, sha256=code[1]),
    ]


def test_other_settings_on_another_dataset_are_not_pooled(tmp_path):
    runs = report.read_runs(settings_runs(tmp_path, learning_rate=1e-3, seeds=2))
    assert [entry.label for row in runs.results.values() for entry in row] == [
        "bc (learning_rate=0.0003, greedy)",
        "bc (learning_rate=0.001, greedy)",
    ]
    assert runs.settings == {"bc": ["learning_rate"]}
    assert report.compare(runs.results).common == {}
    pooled = report.read_runs([tmp_path / "one", tmp_path / "two"], pool_settings=True)
    assert list(report.compare(pooled.results).common) == [BC]
    assert pooled.settings == runs.settings


def test_notes_tell_of_datasets_of_one_name(tmp_path):
    runs = [
        write_run(tmp_path / str(i), "bc", "a/b", [[i]], vault_digest=str(i) * 64) for i in (1, 2)
    ]
    for subset, expected in ((runs[:1], False), (runs, True)):
        result = report.read_runs(subset)
        lines = [*notes(report.compare(result.results), result, RETURN, False)]
        assert any(line.startswith("Several datasets") for line in lines) == expected


def test_many_other_settings_are_named_by_a_checksum(tmp_path):
    changed = {"learning_rate": 1e-3, "updates": 7}
    runs = settings_runs(tmp_path, code=("1" * 64, "2" * 64), **changed)
    labels = [entry.label for row in report.read_runs(runs).results.values() for entry in row]
    assert labels[1] == "bc (learning_rate=0.001, updates=7, code=22222222, greedy)"
    changed |= {"gamma": 0.9, "tau": 0.1}
    same = write_run(tmp_path / "three", "bc", "e/f", [[1]], args={"learning_rate": 3e-4})
    assert report.read_runs([runs[0], same]).settings == {}  # what only one of them has


def test_runs_of_one_program_on_one_dataset_are_told_apart(tmp_path):
    places = ("lr1/bc", "lr2/bc", "bc")
    runs = [write_run(tmp_path / place, "bc", "a/b", [[i]]) for i, place in enumerate(places)]
    scores = scores_in(report.read_runs(runs[:2]).results)["a/b"]
    assert [(entry.label, score) for entry, (score,) in scores.items()] == [
        ("bc (lr1/bc, greedy)", 0.0),
        ("bc (lr2/bc, greedy)", 1.0),
    ]
    assert len(scores_in(report.read_runs(runs).results)["a/b"]) == 3


@pytest.mark.parametrize(
    ("first", "second", "labels"),
    [
        (("a/b", "1" * 64), ("a/b", "1" * 64), ["a/b"]),
        (("a/b", "1" * 64), ("copy/b", "1" * 64), ["a/b = copy/b"]),
        (
            ("a/b", "1" * 64),
            ("a/b", "2" * 64),
            ["a/b (data 11111111)", "a/b (data 22222222)"],
        ),
        (("a/b", "1" * 64), ("a/b", None), ["a/b (data 11111111)", "a/b (data unknown)"]),
        (("a/b", None), ("a/b", None), ["a/b"]),
    ],
)
def test_runs_are_grouped_by_the_content_that_they_learnt_from(tmp_path, first, second, labels):
    runs = [
        write_run(tmp_path / program, program, name, [[1]], vault_digest=digest)
        for program, (name, digest) in (("bc", first), ("maicq", second))
    ]
    assert list(report.read_runs(runs).results) == labels


def test_runs_evaluated_in_different_environments_are_kept_apart(tmp_path):
    args = {"env": "swarm/coverage-3:time_limit=9"}
    runs = [
        write_run(tmp_path / "bc", "bc", "a/b", [[1]], vault_digest="1" * 64),
        write_run(tmp_path / "maicq", "maicq", "a/b", [[1]], vault_digest="1" * 64, args=args),
    ]
    assert list(report.read_runs(runs).results) == [
        "a/b (evaluated in swarm/coverage-3)",
        "a/b (evaluated in swarm/coverage-3:time_limit=9)",
    ]


def test_agreement_with_other_held_out_episodes_is_kept_apart(tmp_path):
    digest, held_out = {"vault_digest": "1" * 64}, [{"held_out": 0.05}, {"held_out": 0.3}]
    validation = {"held_out": 0.0, "validation": "x.vlt"}
    runs = [
        write_run(tmp_path / str(i), "bc", "a/b", [[1]], metric=AGREEMENT, args=args, **digest, **e)
        for i, (args, e) in enumerate(
            [(o, {}) for o in held_out]
            + [(validation, {"validation_digest": x}) for x in ("abcdefghij", None)]
        )
    ]
    assert list(report.read_runs(runs, AGREEMENT).results) == [
        "a/b (evaluated in 5% of the episodes)",
        "a/b (evaluated in 30% of the episodes)",
        "a/b (evaluated in data abcdefgh)",
        "a/b (evaluated in data unknown)",
    ]


_LONG = "9" * 5000


@pytest.mark.parametrize(
    "content",
    [
        "{}",
        '{"e": {"t": {"bc": {"seed_0": {"step_0": {}}}}}}',
        f'{{"e": {{"t": {{"bc": {{"seed_{_LONG}": {{"absolute_metrics": {{"x": [1]}}}}}}}}}}}}',
    ],
    ids=["empty", "steps", "long"],
)
def test_a_run_without_final_evaluation_is_refused(tmp_path, content):
    run = write_run(tmp_path / "bc", "bc", "a/b", [[1]])
    (run / "marl_eval.json").write_text(content)
    with pytest.raises(RunError, match="no final evaluation"):
        report.read_runs([run])


def test_one_dataset_is_compared_in_its_own_unit():
    comparison = compared({"a": {BC: LOW, MAICQ: HIGH}})
    low, high = comparison.datasets["a"]
    assert (low.entry, low.runs, low.iqm.value, low.mean, low.median) == (BC, 4, 1.5, 1.5, 1.5)
    assert high.iqm.low < high.iqm.value == 3.5 < high.iqm.high
    assert low.normalised is None and not comparison.normalised
    assert comparison.overall == []


@pytest.mark.parametrize("pooled", [False, True])
def test_the_notes_on_a_comparison(pooled):
    mappo, omar, two = Entry("mappo", "sampled"), Entry("omar", "greedy"), np.array([1.0, 2.0])
    results = {
        "a": {BC: DatasetResult(two, best=two), SAMPLED: DatasetResult(two)},
        "b": {BC: DatasetResult(two), omar: DatasetResult(np.array([0.0, 1.0, 2.0]))},
    }
    results["a"] |= {mappo: DatasetResult(np.array([3.0, 4.0, 5.0])), omar: DatasetResult(two)}
    data = {name: ComparedData(name, "", f"env {name}") for name in results}
    runs = report.Runs(results, data, {"bc": ["learning_rate"]})
    known = {name: Reference(0.0, 5.0) for name in ("a", "b")[: 1 + pooled]}
    comparison = report.compare(results, known)
    scale = "are normalised: 0 is random play (0.000), 1 is the expert (5.000)."
    heads = [
        f"Returns in env a {scale}",
        f"Returns in env b {scale}"
        if pooled
        else "The reference returns of env b are unknown, so returns there are not normalised: "
        "give them with --references 'env b' RANDOM EXPERT. Without them the datasets are not sum",
        "bc was trained with other settings on one dataset than on another (learning_rate): "
        + (
            "its runs are summarised together, because"
            if pooled
            else "such runs are not summarised"
        ),
        "bc (sampled) is in no summary over the datasets and no probability: it was not run on b.",
        "mappo (sampled) is in no summary over the datasets and no probability: it was not run on",
        "omar (greedy) is in no summary over the datasets and no probability: its numbers of seeds "
        "differ (2, 3).",
        "Headline: the last policy's best actions (greedy).",
        "mappo (sampled) was not evaluated greedily, so it is compared only with other sampled pol",
        "mappo (sampled) has no pairs with bc: no seed is in both (a).",
        "omar (greedy) has no pairs with bc: no seed is in both (a, b).",
        "Best checkpoint: the best evaluation of each seed, chosen by some of its episodes",
        "* (bold in files): the best of those that acted alike",
        "Intervals need at least 3 seeds; without them only the best has a *.",
        "warning: some runs have 2 seeds. Below 5 seeds, intervals cover less often than 95%",
    ]
    lines = [*notes(comparison, runs, RETURN, pooled)]
    assert all(line.startswith(head) for line, head in zip(lines, heads, strict=True))
    first, *_ = comparison_tables(comparison)
    assert first.columns[2] == "IQM [95% interval]"  # of one of them


def test_several_datasets_are_put_on_one_scale_by_their_references():
    scores = {
        "a": {BC: LOW, MAICQ: HIGH, Entry("only here"): LOW},
        "b": {BC: 10 * LOW, MAICQ: 10 * HIGH},
    }
    comparison = compared(scores, {"a": Reference(-5.0, 5.0), "b": Reference(0.0, 100.0)})
    low, high = comparison.overall
    assert (low.entry, high.entry) == (BC, MAICQ) and comparison.normalised
    assert comparison.datasets["a"][0].iqm.value == 1.5
    assert (low.mean, high.mean) == pytest.approx(((0.65 + 0.15) / 2, (0.85 + 0.35) / 2))
    assert comparison.common[MAICQ].shape == (4, 2)


def test_without_a_reference_returns_are_raw_and_not_summed_up():
    scores = {"a": {BC: LOW, MAICQ: HIGH}, "b": {BC: 10 * LOW, MAICQ: 10 * HIGH}}
    comparison = compared(scores, {"a": Reference(0.0, 5.0)})
    assert comparison.overall == [] and not comparison.normalised and not comparison.pooled
    assert comparison.datasets["a"][0].normalised.value == pytest.approx(0.3)
    assert comparison.datasets["b"][0].normalised is None
    # Ranks need no scale. Of the 16 pairs, high wins 13, two tie and it loses one.
    assert comparison.improvement[MAICQ][BC].value == (13 + 0.5 * 2) / 16


def test_agreement_has_one_scale_everywhere():
    scores = {"a": {Entry("bc"): LOW / 5}, "b": {Entry("bc"): HIGH / 5}}
    comparison = compared(scores, {"a": Reference(0, 9), "b": Reference(0, 9)}, "action_agreement")
    assert comparison.overall[0].mean == pytest.approx(0.5) and not comparison.normalised


@pytest.mark.parametrize("reference", [Reference(1.0, 1.0), Reference(0.0, float("nan"))])
def test_references_that_are_no_scale_are_refused(reference):
    with pytest.raises(OptionError, match="cannot be normalised"):
        compared({"a": {BC: LOW}}, {"a": reference})


def test_only_what_acted_alike_is_compared_in_pairs():
    mappo = Entry("mappo", "sampled")
    scores = {"a": {BC: LOW, MAICQ: HIGH, SAMPLED: LOW, mappo: HIGH}}
    improvement = compared(scores).improvement
    assert {first: set(row) for first, row in improvement.items()} == {
        BC: {MAICQ},
        MAICQ: {BC},
        SAMPLED: {mappo},
        mappo: {SAMPLED},
    }
    assert compared({"a": {BC: LOW, SAMPLED: LOW}}).improvement == {}


@pytest.mark.parametrize(("seeds", "there"), [(1, False), (2, False), (3, True)])
def test_there_is_no_interval_below_three_seeds(seeds, there):
    comparison = compared({"a": {BC: LOW[:seeds], MAICQ: HIGH}}, {"a": Reference(0.0, 5.0)})
    row, other = comparison.datasets["a"]
    for x in (row.iqm, row.normalised, comparison.improvement[MAICQ][BC]):
        assert (x.low is not None, x.high is not None) == (there, there)
    assert other.iqm.low is not None


def test_equal_scores_do_not_divide_by_zero():
    same = {BC: np.ones(3), MAICQ: np.ones(3)}
    reference = Reference(0.0, 2.0)
    comparison = compared({"a": same, "b": same}, {"a": reference, "b": reference})
    assert [row.iqm for row in comparison.overall] == [(0.5, 0.5, 0.5)] * 2
    assert comparison.improvement[BC][MAICQ] == (0.5, 0.5, 0.5)


def test_references_are_those_of_the_recipes():
    table = references()
    assert table["swarm/coverage-3"] == (9.2561, 19.6055)
    assert table["classic/bridge"] == (-17.7362, -1.2606)
    tiny = "jumanji/robot_warehouse:request_queue_size=4,shelf_rows=1"
    assert table[tiny] == (0.0153, 21.9922)  # the card's name is not the environment's
    # No card of another's data holds returns of random and expert play, but those of human games.
    spread = "jaxmarl/mpe/simple_spread_v3"
    names = {"jumanji/lbf", spread, f"{spread}:action_type=Continuous", "jaxmarl/smax/3m"}
    assert names | {"classic/xor"} < set(table)
    assert len(table) == 8 + sum("/overcooked/" in name for name in table) == 13


TWO = {
    "a|b_1": {BC: np.array([0.0, 0.0, 1.0, 3.0, 11.0]), MAICQ: np.full(5, 20.0), SAMPLED: LOW},
    "c": {BC: np.array([1.0]), MAICQ: np.array([5.0])},
}
"""The IQM of the first is 4/3, and the whole of its interval is below the second's."""


def test_tables_of_methods_by_datasets_in_every_form():
    comparison = compared(TWO)
    table = next(t for t in comparison_tables(comparison) if t.columns == ["method", "a|b_1", "c"])
    texts = [[*map(number, row)] for row in table.rows]
    assert texts == [
        ["bc (greedy)", "1.333 [0.000, 11.00]", "1.000"],
        ["maicq (greedy)", "20.00 [20.00, 20.00] *", "5.000 *"],
        ["bc (sampled)", "1.500 [0.000, 3.000]", ""],
    ]
    assert to_markdown([table]) == (
        "| method | a\\|b_1 | c |\n"
        "| --- | ---: | ---: |\n"
        "| bc (greedy) | 1.333 [0.000, 11.00] | 1.000 |\n"
        "| maicq (greedy) | **20.00 [20.00, 20.00]** | **5.000** |\n"
        "| bc (sampled) | 1.500 [0.000, 3.000] |  |\n"
    )
    assert to_latex([table]) == (
        "\\begin{tabular}{lrr}\n\\toprule\nmethod & a|b\\_1 & c \\\\\n\\midrule\n"
        "bc (greedy) & 1.333 {\\scriptsize [0.000, 11.00]} & 1.000 \\\\\n"
        "maicq (greedy) & \\textbf{20.00} {\\scriptsize [20.00, 20.00]} & \\textbf{5.000} \\\\\n"
        "bc (sampled) & 1.500 {\\scriptsize [0.000, 3.000]} &  \\\\\n"
        "\\bottomrule\n\\end{tabular}\n"
    )
    rows = [*csv.DictReader(to_csv(score_list(comparison.datasets)).splitlines())]
    assert [(row["dataset"], row["method"], row["acting"], row["bold"]) for row in rows] == [
        ("a|b_1", "bc", "greedy", "0"),
        ("a|b_1", "maicq", "greedy", "1"),
        ("a|b_1", "bc", "sampled", "0"),
        ("c", "bc", "greedy", "0"),
        ("c", "maicq", "greedy", "1"),
    ]
    assert float(rows[0]["iqm"]) == 4 / 3 and rows[0]["iqm_high"] == "11.0"
    assert (rows[3]["iqm"], rows[3]["iqm_low"], rows[3]["best_checkpoint"]) == ("1.0", "", "")
    assert rows[0]["runs"] == "0.0 0.0 1.0 3.0 11.0" and rows[0]["seeds"] == "5"


def test_names_in_tables_are_text():
    section = Section("a\nb", ["x&y", "50%"], [["\\input{z}\n", None], ["λ_1 ~^$", 3]])
    latex = to_latex([section, section])
    assert latex.startswith("% a\\nb\n\\begin{tabular}{lr}\n\\toprule\nx\\&y & 50\\% ")
    assert "\\textbackslash{}input\\{z\\}\\textbackslash{}n & " in latex
    assert "\\ensuremath{\\lambda}\\_1 \\textasciitilde{}\\textasciicircum{}\\$ & 3" in latex


def test_a_column_of_scores_has_its_ends_in_csv_wherever_it_is_empty():
    section = Section("", ["Name", "IQM of all"], [["r", Score(1.0, 0.5, 2.0)], ["s", None]])
    head = "name,iqm_of_all,iqm_of_all_low,iqm_of_all_high"
    assert to_csv(section).splitlines() == [head, "r,1.0,0.5,2.0", "s,,,"]


def test_numbers_below_zero_have_a_minus_in_latex():
    row = ["a-b", -2, -0.5, Score(-1.5, -2.0, 1e-9, bold=True)]
    latex = to_latex([Section("", ["x", "y", "z", "score"], [row])])
    score = "\\textbf{$-$1.500} {\\scriptsize [$-$2.000, 1.000e$-$09]}"
    assert f"a-b & $-$2 & $-$0.5000 & {score} " in latex


@pytest.mark.parametrize("label", ["[2mm]", "*"])
def test_a_name_is_no_option_of_the_end_of_a_row_in_latex(label):
    assert f"\\midrule\n{{}}{label} & 1" in to_latex([Section("", ["x", "y"], [[label, 1]])])


def test_a_dataset_that_is_named_all_keeps_its_differences():
    scores = {name: {BC: LOW, MAICQ: HIGH} for name in ("all", "b")}
    scales = dict.fromkeys(scores, Reference(0.0, 5.0))
    comparison = compared(scores, scales, seeds=(0, 1, 2, 3), played=(9, 32))
    table = [*comparison_tables(comparison)][3]
    assert table.columns == ["method", "all", "b", "all, normalised"]
    assert table.rows[0][1] == table.rows[0][2] != table.rows[0][3]


PAIRED = np.array([[1.0, 2.0], [3.0, 5.0], [2.0, 5.0], [4.0, 8.0]])
"""Returns of two programs by seed: the differences are 1, 2, 3 and 4."""


def paired_runs(tmp_path):
    returns = PAIRED.T[:, :, None].tolist()
    return [
        write_run(tmp_path / name, name, "a/b", values)
        for name, values in zip(("bc", "maicq"), returns, strict=True)
    ]


def paired(runs, **options):
    result = report.compare_runs(runs, {}, {}, **options)
    differences = {row.entry.algorithm: row.difference for row in result.comparison.datasets["a/b"]}
    return result, differences


def test_runs_of_one_seed_are_compared_in_pairs(tmp_path):
    """The mean is 2.5, and Student's half width 3.18245 sqrt(5 / 3) / 2."""
    result, differences = paired(paired_runs(tmp_path))
    assert differences["bc"] is None
    half = 3.182446 * np.sqrt(5 / 3) / 2
    assert differences["maicq"] == pytest.approx((2.5, 2.5 - half, 2.5 + half), rel=1e-6)
    (table,) = (section for section in result.sections if section.title.startswith("Minus bc"))
    assert [[*map(str, row)] for row in table.rows] == [
        ["maicq (greedy)", "+2.500 [0.4457, 4.554]"]
    ]
    data = result.data()
    assert data["baseline"] == "bc"
    assert data["datasets"]["a/b"]["maicq (greedy)"]["difference"]["value"] == 2.5
    _, other = paired(paired_runs(tmp_path / "again"), baseline="maicq")
    assert other["bc"].value == -2.5 and other["maicq"] is None


@pytest.mark.parametrize(
    ("record", "value", "note"),
    [
        ({"seeds": [3, 2, 1, 0]}, 2.5, None),  # by seed, in whatever order
        ({"seeds": [2, 3, 4, 5]}, 0.5, "have only 2 seeds in common (a/b)"),
        ({"seeds": [7, 8, 9, 10]}, None, "has no pairs with bc: no seed is in both (a/b)"),
        ({"args": {"final_episodes": 9}}, 2.5, "share seeds, but played other episodes (a/b)"),
    ],
)
def test_runs_that_are_no_pairs_are_named(tmp_path, record, value, note):
    bc, maicq = paired_runs(tmp_path)
    if "seeds" in record:
        text = (maicq / tracking.MARL_EVAL_FILE).read_text()
        for seed, other in enumerate(record["seeds"]):
            text = text.replace(f'"seed_{seed}":', f'"seed-{other}":')
        (maicq / tracking.MARL_EVAL_FILE).write_text(text.replace('"seed-', '"seed_'))
    else:
        about = tracking.read_json(maicq, tracking.RUN_FILE)
        tracking.write_json(maicq / tracking.RUN_FILE, about | record)
    result, differences = paired([bc, maicq])
    difference = differences["maicq"]
    assert (difference and difference.value) == value
    text = " ".join(result.notes)
    assert ("maicq (greedy) and bc" in text or "maicq (greedy) has" in text) == (note is not None)
    assert note is None or note in text


def test_a_plans_run_bc_is_the_baseline_of_its_other_runs_of_bc():
    top = Entry("bc", "greedy", "bc-top")
    result = compared({"a": {top: HIGH, BC: LOW, MAICQ: HIGH}}, seeds=tuple(range(len(LOW))))
    differences = {row.entry: row.difference for row in result.datasets["a"]}
    assert differences.pop(BC) is None
    assert {d.value for d in differences.values()} == {np.mean(HIGH - LOW)}
    # Where a dataset lacks it, no other takes its place.
    result = compared({"a": {BC: LOW}, "b": {top: HIGH, MAICQ: HIGH}}, seeds=tuple(range(len(LOW))))
    assert all(row.difference is None for row in result.datasets["b"])
    # Of several, none of which has just this name, none is the baseline.
    three = {top: HIGH, BC._replace(run="bc-all"): LOW, MAICQ: HIGH}
    result = compared({"a": three}, seeds=tuple(range(len(LOW))))
    assert all(row.difference is None for row in result.datasets["a"])


def test_a_baseline_that_there_is_not_is_named(tmp_path):
    with pytest.raises(OptionError, match=r"no run is named bcc: .* of bc \(greedy\), maicq"):
        paired(paired_runs(tmp_path), baseline="bcc")


def test_differences_over_datasets_are_of_normalised_scores():
    scores = {
        name: {BC: scale * np.array([1.0, 2.0, 3.0]), MAICQ: scale * np.array([2.0, 4.0, 6.0])}
        for name, scale in (("a", 1.0), ("b", 10.0))
    }
    scales = {"a": Reference(0.0, 10.0), "b": Reference(0.0, 100.0)}
    comparison = compared(scores, scales, seeds=(0, 1, 2), played=(10, 4))
    (_, maicq) = comparison.overall
    assert maicq.difference.value == pytest.approx(0.2)
    assert comparison.datasets["b"][1].difference.value == pytest.approx(20.0)


@pytest.mark.parametrize("kind", ["normal", "skewed", "failing", "unlike"])
@pytest.mark.parametrize("shared", [0.0, 0.95])
def test_intervals_of_pairs_cover_as_often_as_they_claim(kind, shared):
    """Of five pairs; ``shared`` is the part of the variance that the runs of a seed share.

    The share of a thousand intervals is known within .7% (one standard deviation). In "failing" a
    fifth of the runs fails; in "unlike" only those of one program do.
    """
    draw = np.random.default_rng(0)

    def returns(kind):
        if kind == "skewed":
            return draw.exponential(size=(1000, 5)) - 1
        if kind == "failing":
            return np.where(draw.random((1000, 5)) < 0.8, 0.4, -1.6)
        return draw.normal(size=(1000, 5))

    common = returns("normal" if kind == "unlike" else kind)
    first, second = ("normal", "failing") if kind == "unlike" else (kind, kind)
    x, y = (np.sqrt(shared) * common + np.sqrt(1 - shared) * returns(k) for k in (first, second))
    low, high = np.array([mean_interval(pairs)[1:] for pairs in x - y]).T
    covered = np.mean((low <= 0) & (high >= 0))
    assert covered >= 0.93 and (kind != "normal" or covered <= 0.97)
    apart = np.sqrt(x.var(1, ddof=1) / 5 + y.var(1, ddof=1) / 5)
    if shared == 0.95:  # pairs are at least twice as precise
        assert np.median(high - low) < np.median(2 * 2.306 * apart) / 2
