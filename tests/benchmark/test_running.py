"""Running a plan in tasks: failures, stops and repetitions, with a stub of programs and the hub."""

import csv
import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from offmarl import benchmark, envs, report, tracking, vault
from offmarl.benchmark import CellsWork, spread, tasks
from offmarl.benchmark.cells import identity, is_current, pack
from offmarl.benchmark.tasks import cell_file, preparation, record_vaults, recorded_vaults, run_of
from offmarl.cli import benchmark as cli
from offmarl.errors import NumericsError, OptionError, RunError, VaultError
from offmarl.hub import pulling
from offmarl.launch import Share, join_work, launch, run_share
from offmarl.networks import PolicyConfig
from offmarl.paths import STREAM_CACHE
from offmarl.programs import registry
from offmarl.vault.check.digest import fingerprint
from tests.benchmark import stub
from tests.runs import write_policy, write_run

PLAN = """
[training]
seeds = 5
[record.cover]
program = "mappo"
env = "swarm/coverage-3"
seed = {seed}
[datasets]
"one" = {{ record = "cover", tier = "random" }}
"two" = "{name}"
[baselines]
bc = {{}}
"deep & wide" = {{ program = "iql_cql", hidden = {hidden} }}
"""
RETURNS = [[1.0, 3.0], [2.0, 2.0], [3.0, 1.0], [4.0, 4.0], [5.0, 7.0]]


@pytest.fixture
def read(tmp_path, monkeypatch):
    """Return a function that reads a plan whose second method has a number of hidden units."""
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "template", "template", "data", RETURNS, env="swarm/coverage-3")
    monkeypatch.setenv("TEMPLATE", str(tmp_path / "template"))
    monkeypatch.setattr(pulling, "pull", stub.pull)

    def read(hidden=8, seed=0, name="some/name/Good"):
        text = PLAN.format(hidden=hidden, seed=seed, name=name)
        (tmp_path / "plan.toml").write_text(text)
        return benchmark.read_plan(tmp_path / "plan.toml", tmp_path / "out")

    return read


@pytest.fixture
def run(read, tmp_path):
    """Return a function that runs such a plan, with a task for each block."""

    def run(jobs=2, **options):
        work = CellsWork(read(**options), stub.run)
        arguments = (str(tmp_path / "plan.toml"), str(tmp_path / "out"))
        return launch(work, stub.ENTRY, arguments, workers=jobs)

    return run


def record_of(tmp_path, cell):
    return json.loads((tmp_path / "out" / "cells" / f"{cell}.json").read_text())["run.json"]


@pytest.mark.slow
def test_all_cells_run_once_with_their_options_and_vaults(run, tmp_path, capsys, monkeypatch):
    """With this seed, the recording ends after a cell of the other dataset has run."""
    monkeypatch.delenv("OFFMARL_QUIET", raising=False)
    assert run(seed=1) == (True, {})
    lines = re.findall(r"^bc on (\w+): episode return 3.200 after", capsys.readouterr().err, re.M)
    assert sorted(lines) == ["one", "two"]
    assert record_of(tmp_path, "two--deep_wide")["args"] == {
        "seeds": 5,
        "hidden": 8,
        "vault": "some/name/Good",
    }
    cell = json.loads((tmp_path / "out" / "cells" / "one--bc.json").read_text())
    assert cell["run.json"]["args"]["vault"] == cell["data"] == "cover:random"
    assert cell["recorded"] == {"program": "mappo", "env": "swarm/coverage-3", "seed": 1}
    assert cell["options"] == {"seeds": 5}
    (trained,) = (tmp_path / "out" / "runs").glob("one--bc-*/run")
    assert tracking.read_run(trained)["args"]["vault"].endswith("/vaults/mappo-random")
    assert str(tmp_path) not in json.dumps(cell)
    assert cell["seeds"] == [0, 1, 2, 3, 4]
    assert run(seed=1) == (False, {})  # nothing is missing


def labels(work):
    return [work.label(block) for block in work.missing()]


def test_another_recipe_is_recorded_beside_the_first_and_learned_from_again(read, tmp_path):
    run_share(CellsWork(read(), stub.run), Share(0, 1))
    again = CellsWork(read(seed=8), stub.run)
    assert labels(again) == ["record cover", "bc on one", "deep & wide on one"]
    run_share(again, Share(0, 1))
    assert len([*(tmp_path / "out" / "datasets").glob("cover-*/vaults/mappo-random")]) == 2


def test_what_was_begun_with_other_threads_is_begun_anew(read):
    def begun(kind, name, options):
        (Path(options["out"]) / "begun").mkdir(parents=True)
        raise KeyboardInterrupt

    def run(kind, name, options):
        if (Path(options["out"]) / "begun").exists():
            raise NumericsError("it was begun with threads 2, not 1.")
        return stub.run(kind, name, options)

    plan = read()
    for block in (0, 2):  # a recording, and a cell
        with pytest.raises(KeyboardInterrupt):
            CellsWork(plan, begun).run(block)
        CellsWork(plan, run).run(block)
        assert CellsWork(plan, run).is_done(block)
    assert not [*plan.out.rglob("begun")]


def test_a_missing_vault_fails_its_cells_and_the_others_go_on(read):
    work = CellsWork(read(name="gone.vlt"), stub.run)
    with pytest.raises(VaultError, match=r"no vault at .*gone\.vlt"):
        run_share(work, Share(0, 1))
    assert labels(work) == ["bc on two", "deep & wide on two"]


def test_another_published_dataset_of_the_same_name_is_pulled_again(read):
    """Its cells run again, and must not take the data of the first."""
    plan = read()
    jobs = [preparation(p, p.datasets["two"]) for p in (plan, read(name="some/name/Poor"))]
    record_vaults(jobs[0], [("", stub.vault(Path("pulled")))])
    assert [recorded_vaults(job) is not None for job in jobs] == [True, False]


def test_a_benchmark_that_is_moved_keeps_its_data_and_results(read, tmp_path):
    run_share(CellsWork(read(), stub.run), Share(0, 1))
    (tmp_path / "moved").mkdir()
    (tmp_path / "out").rename(tmp_path / "moved" / "out")
    plan = benchmark.read_plan(tmp_path / "plan.toml", tmp_path / "moved" / "out")
    work = CellsWork(plan, stub.run)
    assert work.is_complete()
    assert all(work.is_done(block) for block in range(work.num_blocks))


@pytest.mark.slow
def test_a_cell_that_fails_is_named_with_its_log_and_the_others_go_on(run, read):
    launched = run(hidden=stub.FAILS)
    assert set(launched.failed) == {"deep & wide on one", "deep & wide on two"}
    assert "a message in the log" in launched.failed["deep & wide on two"].read_text()
    results = benchmark.read_results(read(hidden=stub.FAILS))
    assert results.missing == ["deep & wide on one", "deep & wide on two"]
    paths = benchmark.write_results(results, launched.failed)
    text = (results.plan.out / "tables" / "scores.md").read_text()
    assert "deep & wide" not in text and all(path.is_file() for path in paths)
    assert "deep &amp; wide on one failed" in (results.plan.out / "page.html").read_text()
    # With other options, what failed runs again, and only that.
    again = CellsWork(read(hidden=8), stub.run)
    assert labels(again) == ["deep & wide on one", "deep & wide on two"]


@pytest.fixture
def make(read):
    """Return the work of such a plan, and the list of the programs that it runs."""
    programs = []

    def run(*arguments):
        programs.append(arguments)
        return stub.run(*arguments)

    return CellsWork(read(), run), programs


def test_tasks_run_the_cells_and_each_dataset_is_made_once(make):
    work, programs = make
    plan = work.benchmark_plan
    assert work.plan(2)["missing cells"] == 4 and work.num_blocks == work.tasks(2) == 6
    for index in range(2):
        run_share(work, Share(index, 2))
    assert sorted(kind for kind, *_ in programs) == ["baseline"] * 4 + ["recorder"]
    for cell in plan.cells:
        record = json.loads(cell_file(plan, cell).read_text())
        assert (record["dataset"], record["baseline"]) == (cell.data.label, cell.baseline.label)
    vaults = [options["vault"] for kind, _, options in programs if kind == "baseline"]
    assert sum(path.endswith("vaults/mappo-random") for path in vaults) == 2
    assert sum(path.endswith("/pulled/some/name/Good") for path in vaults) == 2
    assert work.is_complete() and not join_work(work)


def test_datasets_come_first_and_only_those_that_are_needed(make):
    work, programs = make
    assert [work.label(block) for block in work.missing()[:3]] == [
        "record cover",
        "two",
        "bc on one",
    ]
    assert [list(work.needs(block)) for block in range(6)] == [[], [], [0], [0], [1], [1]]
    run_share(work, Share(4, 6))  # bc on two
    run_share(work, Share(5, 6))
    assert [kind for kind, *_ in programs] == ["baseline"] * 2
    assert work.missing() == [0, 2, 3]


def test_a_task_that_begins_after_the_plan_was_changed_is_refused(read, tmp_path):
    CellsWork(read(), stub.run).check()
    text = (tmp_path / "plan.toml").read_text()
    (tmp_path / "plan.toml").write_text(text.replace("bc = {}", "omiga = {}\nbc = {}"))
    changed = benchmark.read_plan(tmp_path / "plan.toml", tmp_path / "out")
    with pytest.raises(RunError, match="other datasets and methods in the plan"):
        run_share(CellsWork(changed, stub.run), Share(5, 8))
    work = CellsWork(changed, stub.run)
    work.forget()  # as a new launch does
    work.check()


def test_a_dataset_is_prepared_again_if_its_vault_is_gone(read):
    work = CellsWork(read(), stub.run)
    run_share(work, Share(0, 6))
    job = preparation(work.benchmark_plan, work.benchmark_plan.datasets["one"])
    vaults = recorded_vaults(job)
    assert list(vaults) == ["one"] and 0 not in work.missing()
    Path(vaults["one"]).rmdir()
    assert 0 in work.missing()


def test_a_benchmark_has_no_steps(read, offmarl):
    read()
    outcome = offmarl("benchmark", "plan.toml", "--block-steps", 100)
    assert outcome.code == 2 and "block-steps divides data" in outcome.err


def test_a_program_leaves_no_variables_and_no_memory_for_the_next_one(read, monkeypatch, released):
    values = []

    def run(*_):
        values.append(os.environ.get(STREAM_CACHE))
        os.environ[STREAM_CACHE] = "1"
        raise OptionError("no")

    monkeypatch.delenv(STREAM_CACHE, raising=False)
    for _ in range(2):
        with pytest.raises(OptionError, match="no"):
            CellsWork(read(), run).run(0)
    assert values == [None, None] and released == ["compiled", "garbage"] * 2


@pytest.mark.parametrize(
    ("options", "devices"),
    [
        ([{"seeds": 3}, {"seeds": 5}], 5),
        ([{"seeds": 3}, {"devices": 8}], 8),
        ([{"seeds": 3}, {"seeds": 2, "batching": "vmap"}], 1),
    ],
)
def test_a_cpu_is_split_once_for_all_cells(options, devices):
    data = benchmark.plan.PlanData("d", "v", "", {})
    method = benchmark.plan.Baseline("b", "bc", {}, None)
    plan = SimpleNamespace(cells=[benchmark.Cell(data, method, option) for option in options])
    assert cli._devices_of(plan) == devices


# ---------------------------------------------------------------------------------- results


def cells(plan, tmp_path, scores):
    """Write the cells of methods on a dataset with the final returns of each seed."""
    for (dataset, method), returns in scores.items():
        cell = next(c for c in plan.cells if (c.data.label, c.baseline.label) == (dataset, method))
        pairs = [[value - 1, value + 1] for value in returns]
        program = cell.baseline.program
        run = write_run(tmp_path / cell.slug, program, dataset, pairs, env="classic/xor")
        pack(cell, run, cell_file(plan, cell))
    return benchmark.read_results(plan)


SCORES = {
    ("one", "bc"): [10.0, 11, 12, 13, 14],
    ("one", "deep & wide"): [10.5, 11, 12, 13, 13],
    ("two", "bc"): [1.0, 2, 3, 4, 5],
    ("two", "deep & wide"): [11.0, 12, 13, 14, 15],
}


def scores(results):
    """Return the table of scores, by method; all act greedily."""
    table, *_ = benchmark.score_tables(results)
    return {method.removesuffix(" (greedy)"): row for method, *row in table.rows}


def test_returns_beside_partners_are_a_column_of_their_own(read, tmp_path):
    """Only methods whose agents act independently have one; a note says why others have none."""
    plan = read()
    data = plan.datasets["one"]._replace(partners=("random",))
    plan = plan._replace(datasets=plan.datasets | {"one": data})
    tables = {
        "bc": {"greedy": [0.0, 1, 2, 3, 4], "sampled": [1.0] * 5},
        "deep & wide": {"refused": "x"},
    }
    for cell in plan.cells:
        if cell.data is data:
            (tmp_path / cell.slug).mkdir()
            tracking.write_json(tmp_path / cell.slug / "partners.json", tables[cell.baseline.label])
    results = cells(plan, tmp_path, SCORES)
    assert "deep & wide on one plays with no partner: x." in [*benchmark.notes(results, {})]
    (beside,) = [t for t in benchmark.score_tables(results) if "partners" in t.title]
    assert [(name, score.value) for name, score, *_ in beside.rows] == [("bc (greedy)", 2.0)]
    compared = report.compare_runs(results.files["one"].values(), {}, {})
    (section,) = [t for t in compared.sections if "with partners" in t.columns]
    assert section.rows[0][-1].value == 2.0 and section.rows[1][-1] is None
    path = results.files["one"]["bc"]
    path.write_text(path.read_text().replace('"sampled": [', '"sampled": ["many", '))
    with pytest.raises(RunError, match=r"\(partners.json\) is not valid"):
        report.read_runs([path])


@pytest.mark.parametrize("env", ["swarm/coverage-3", "none"])
def test_partners_are_met_where_the_cell_is_evaluated(read, monkeypatch, env):
    plan, works = read(), []
    data = plan.datasets["two"]._replace(source="two.vlt", partners=("random",))
    plan = plan._replace(datasets={"two": data}, training={"env": env})
    run = run_of(plan, plan.cells[0])
    stub.vault(Path("two.vlt"))

    def play(work):
        works.append(work)
        return {"greedy": np.array([[[0.0, 0], [3, 0]], [[5, 0], [0, 0]]])}

    monkeypatch.setattr(tasks, "run_share", lambda *_: None)
    monkeypatch.setattr(tasks, "join_work", lambda *_: None)
    monkeypatch.setattr(tasks.CrossPlayWork, "tables", play)
    monkeypatch.setattr(tasks, "pack", lambda *_: None)
    write_policy(run, PolicyConfig("feedforward"), envs.make("swarm/coverage-3").spec, [0])
    CellsWork(plan, lambda *_: None).run(0)
    (work,) = works
    assert [member.name for member in work.members] == [f"{run}@0", "random"]
    assert work.env.spec.name == "swarm/coverage-3"
    assert json.loads((run / "partners.json").read_text()) == {"greedy": [4.0]}


def test_a_cell_depends_on_the_runs_of_all_partners(read, tmp_path):
    runs = [write_run(tmp_path / name, "bc", "a/b", [[1]]) for name in "ab"]
    (cell, *_) = read().cells
    cell = cell._replace(data=cell.data._replace(partners=(f"{runs[0]}@*+{runs[1]}@0/8",)))
    before = identity(cell)["partners"]
    assert [name.rpartition("/")[2] for name, _ in before] == ["a@*", "8"]
    with (runs[1] / "metrics.jsonl").open("a") as file:
        file.write("{}\n")
    same = [a == b for a, b in zip(before, identity(cell)["partners"], strict=True)]
    assert same == [True, False]


CLOSE = {("one", "bc"): [10.0, 11, 12, 13, 14], ("one", "deep & wide"): [11.0, 12, 13, 14, 15]}
APART = {("two", "bc"): [1.0, 2, 3, 4, 6.5], ("two", "deep & wide"): [6.0, 7, 8, 8.5, 10]}


@pytest.mark.parametrize(
    ("given", "bc", "deep"),
    [
        (SCORES, [True, False], [True, True]),  # on the second, every run of the other is better
        # Beating the best: 6 wins and 4 draws of 25 pairs are 0.32, and on the second 1 is 0.04.
        (CLOSE | APART, [True, False], [True, True]),
        ({key: [3.0, 4.0] for key in SCORES}, [True, True], [True, True]),
        ({key: values[:2] for key, values in SCORES.items()}, [False, False], [True, True]),
    ],
    ids=["better", "close", "equal", "too few for intervals"],
)
def test_bold_is_the_best_and_what_may_be_as_good(read, tmp_path, given, bc, deep):
    table = scores(cells(read(), tmp_path, given))
    bold = {method: [score.bold for score in row] for method, row in table.items()}
    assert bold == {"bc": bc, "deep & wide": deep}


def test_the_spread_is_the_best_minus_the_worst_in_widths_of_intervals(read, tmp_path):
    results = cells(read(), tmp_path, SCORES)
    first, second = results.datasets.values()
    width = np.mean([row.iqm.high - row.iqm.low for row in second])
    assert spread(first) == 0 and spread(second) == pytest.approx(10 / width)
    assert spread(second[:1]) is None
    sentence = next(note for note in benchmark.notes(results, {}) if note.startswith("Spread"))
    assert f"greedy: one 0.0, two {10 / width:.1f}." in sentence


def test_a_cell_whose_evaluation_is_not_finite_is_empty_and_named(read, tmp_path):
    diverged = SCORES | {("one", "bc"): [10.0, float("nan"), 12, float("inf"), 14]}
    results = cells(read(), tmp_path, diverged)
    table = scores(results)
    assert table["bc"][0] is None and table["deep & wide"][0].value == 12.0
    text = " ".join(benchmark.notes(results, {}))
    assert "bc on one is not in the tables: episode_return of seed 1, 3 is not finite" in text
    assert not results.missing and "Not run" not in text
    assert benchmark.write_results(results)


@pytest.mark.parametrize(
    ("is_played", "why"),
    [(True, "these runs have a return for each team"), (False, "was trained without an evaluatio")],
)
def test_a_dataset_without_a_common_score_leaves_the_others(read, tmp_path, is_played, why):
    plan = read()
    for cell in plan.cells:
        run = write_run(tmp_path / cell.slug, cell.baseline.program, "data", RETURNS)
        if cell.data.label == "two" and is_played:
            text = (run / "marl_eval.json").read_text()
            (run / "marl_eval.json").write_text(text.replace("episode_return", "episode_return_a"))
        elif cell.data.label == "two":
            (run / "marl_eval.json").unlink()
            (run / "metrics.jsonl").unlink()
        pack(cell, run, cell_file(plan, cell))
    results = benchmark.read_results(plan)
    (score,) = scores(results)["bc"]
    assert score.value == pytest.approx(8 / 3)
    (note,) = (x for x in benchmark.notes(results, {}) if x.startswith("bc on two is not in the"))
    assert why in note
    work = CellsWork(plan, stub.run)
    told = [work.result(block) for block in (0, 2, 4)]  # a recording, and two cells
    assert told[:2] == ["", "episode return 3.200"] and why in told[2]


def test_cells_of_other_code_and_machines_are_noted(read, tmp_path):
    results = cells(read(), tmp_path, SCORES)
    assert "different" not in " ".join(benchmark.notes(results, {}))
    path = results.files["one"]["bc"]
    cell = json.loads(path.read_text())
    assert len(cell["code"]) == 64
    other = {"code": "f" * 64, "versions": {"jax": "9"}, "hardware": {"device": "x"}}
    path.write_text(json.dumps(cell | other))
    *_, code, versions, machines = benchmark.notes(benchmark.read_results(read()), {})
    texts = f"{cell['code'][:8]} (3 cells), ffffffff (1 cells)", "None (3 cells), 9 (1 cells)"
    assert code == f"The cells were made with different code of offmarl: {texts[0]}."
    assert versions == f"The cells were made with different versions of JAX: {texts[1]}."
    assert machines == "The cells ran on different machines: None, None; x, None."


def test_a_whole_benchmark_is_compared_and_a_cell_described(offmarl, read, tmp_path):
    part = {key: values for key, values in SCORES.items() if key[0] == "one"}
    cells(read(), tmp_path, part)
    first = offmarl("compare", "out", "--json")
    assert first.code == 0, first.err
    other = offmarl("compare", *sorted((tmp_path / "out" / "cells").iterdir()), "--json")
    assert len(first.json["datasets"]) == 1 and first.json["datasets"] == other.json["datasets"]
    cell = offmarl("report", "out/cells/one--bc.json")
    assert cell.code == 0 and "bc" in cell.out
    assert offmarl("compare", "template/../out/nothing").code == 1
    assert "`offmarl compare out` compares its runs" in offmarl("report", "out").err
    assert "out is the directory of a benchmark: its runs are in out/runs" in (
        offmarl("evaluate", "out").err
    )


def test_compare_names_the_runs_of_a_plan_as_the_plan_does(read, tmp_path):
    cells(read(), tmp_path, SCORES)
    runs = report.read_runs((tmp_path / "out" / "cells").iterdir())
    labels = [{entry.label for entry in scores} for scores in runs.results.values()]
    # One name on both datasets, so that they are pooled.
    assert labels == [{"bc (greedy)", "iql_cql (deep & wide, greedy)"}] * 2


@pytest.mark.slow
def test_the_files_hold_all_datasets_and_methods(read, tmp_path):
    results = cells(read(), tmp_path, SCORES)
    benchmark.write_results(results)
    tables = {kind: results.plan.out / "tables" / f"scores.{kind}" for kind in ("md", "csv")}
    assert "| method | one | two |\n" in tables["md"].read_text()
    rows = csv.DictReader(tables["csv"].read_text().splitlines())
    assert [float(row["iqm"]) for row in rows] == [12, 12, 3, 13]
    scores_of = json.loads((results.plan.out / "marl_eval.json").read_text())
    assert set(scores_of["classic"]) == {"one", "two"}
    figure = results.plan.out / "scores.svg"
    assert figure.exists()
    benchmark.write_results(benchmark.read_results(read(seed=5, name="some/name/Poor")))
    assert not figure.exists()
    assert set(scores_of["classic"]["one"]) == {"bc (greedy)", "deep & wide (greedy)"}


def test_compare_reads_cells_as_it_reads_runs(read, tmp_path):
    cells(read(), tmp_path, SCORES)
    cell = next(cell for cell in read().cells if cell.data.label == "one")
    packed, run = cell_file(read(), cell), tmp_path / cell.slug
    record = tracking.read_run(run)
    packed_args = record["args"] | {"vault": "cover:random"}
    label = {"label": cell.baseline.label}
    assert tracking.read_run(packed) == record | {"args": packed_args} | label
    for measure in (report.final_evaluation, report.best_scores):
        ours, theirs = measure(packed), measure(run)
        assert str(ours) == str(theirs)
    curves = [report.curves_of(path)["episode_return"] for path in (packed, run)]
    np.testing.assert_array_equal(curves[0].values, curves[1].values)
    with pytest.raises(RunError, match=r"it has no no\.json"):
        tracking.read_json(packed, "no.json")


@pytest.mark.parametrize("episodes", [8, 7])
def test_a_packed_run_scores_its_best_checkpoint_as_the_run_does(read, tmp_path, episodes):
    run = write_run(tmp_path / "run", "bc", "data", RETURNS)
    rng = np.random.default_rng(0)
    for step in (20, 30, 40):
        for seed in range(5):
            values = rng.normal(size=episodes).tolist()
            tracking.append(
                run / "metrics.jsonl", {"seed": seed, "step": step, "episode_return": values}
            )
    cell = read().cells[0]
    pack(cell, run, tmp_path / "cell.json")
    best = [report.best_scores(path) for path in (run, tmp_path / "cell.json")]
    np.testing.assert_allclose(*best, rtol=1e-12)


@pytest.fixture
def local_cell(tmp_path, random_data, monkeypatch):
    """The finished cell of a local vault and of a program in a file, and its plan."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(random_data("probe/observation").parent, tmp_path / "mine.vlt")
    shutil.copy(registry.find("baseline")["bc"], tmp_path / "mine.py")
    text = '[datasets]\n"mine" = { vault = "mine.vlt" }\n[baselines]\n'
    (tmp_path / "plan.toml").write_text(text + '"custom" = { program = "mine.py" }\n')
    plan = benchmark.read_plan(tmp_path / "plan.toml", tmp_path / "out")
    (cell,) = plan.cells
    digest = vault.open_vault("mine.vlt").digest()
    run = write_run(tmp_path / "run", "mine", "data", RETURNS, vault_digest=digest)
    pack(cell, run, cell_file(plan, cell))
    return plan, cell


def test_a_cell_of_the_same_data_is_current_wherever_it_is(
    local_cell, tmp_path, random_data, monkeypatch
):
    plan, cell = local_cell
    with monkeypatch.context() as patch:
        patch.setattr("offmarl.benchmark.cells.open_vault", None)  # it was read for the result
        assert is_current(cell, cell_file(plan, cell))
    shutil.rmtree(tmp_path / "mine.vlt")
    assert is_current(cell, cell_file(plan, cell))
    again = vault.cat([random_data("probe/observation")], tmp_path / "mine.vlt" / "again")
    assert fingerprint(again) != json.loads(cell_file(plan, cell).read_text())["fingerprint"]
    assert is_current(cell, cell_file(plan, cell))  # in other chunks


@pytest.mark.parametrize("field", ["digest", "seeds", "versions", "hardware", "seconds"])
def test_a_cell_that_lacks_a_field_is_trained_again(local_cell, field):
    plan, cell = local_cell
    result = json.loads((path := cell_file(plan, cell)).read_text())
    path.write_text(json.dumps({name: x for name, x in result.items() if name != field}))
    assert not is_current(cell, path)


@pytest.mark.parametrize("field", ["run.json", "marl_eval.json"])
def test_a_cell_without_a_file_of_its_run_is_broken_alone(local_cell, field):
    plan, cell = local_cell
    result = json.loads((path := cell_file(plan, cell)).read_text())
    path.write_text(json.dumps({name: x for name, x in result.items() if name != field}))
    results = benchmark.read_results(plan)
    assert not results.files and list(results.broken) == [cell.label]


OPTIONS = {
    "mine.vlt": "",
    "mine.py": "",
    "game.py": 'env = "game.py:make"',
    "helper.py": 'env = "game.py:make"',
    "bench_pack/inner.py": 'env = "bench_pack.games:make"',
    "held.vlt": 'validation = "held.vlt"',
    "weights.py": 'weight = "weights.py:weigh"',
    "other run/metrics.jsonl": 'init = "other run"',
}
"""What a cell depends on, and the option that names it, if it is not its vault or program."""


@pytest.mark.parametrize("edited", OPTIONS)
def test_a_cell_whose_code_data_or_first_run_changed_is_not_current(
    edited, local_cell, tmp_path, random_data, monkeypatch
):
    monkeypatch.syspath_prepend(tmp_path)
    source = "def make():\n    return offmarl.envs.make('probe/observation')\n"
    (tmp_path / "helper.py").write_text("REWARD = 1\n")
    (tmp_path / "game.py").write_text(f"import offmarl\nfrom helper import REWARD\n\n{source}")
    (tmp_path / "bench_pack").mkdir()
    (tmp_path / "bench_pack" / "__init__.py").touch()
    (tmp_path / "bench_pack" / "inner.py").write_text("REWARD = 1\n")
    (tmp_path / "bench_pack" / "games.py").write_text(
        f"import offmarl\nfrom . import inner\n\n{source}"
    )
    (tmp_path / "weights.py").write_text("def weigh(data):\n    return 1\n")
    write_run(tmp_path / "other run", "bc", "data", RETURNS)
    shutil.copytree(random_data("probe/observation").parent, tmp_path / "held.vlt")
    data = '[datasets]\n"mine" = { vault = "mine.vlt" }\n[baselines]\n'
    program = "mine.py" if edited == "mine.py" else "bc"
    text = f'[training]\n{OPTIONS[edited]}\n{data}custom = {{ program = "{program}" }}\n'
    (tmp_path / "plan.toml").write_text(text)
    plan = benchmark.read_plan(tmp_path / "plan.toml", tmp_path / "out")
    (cell,) = plan.cells
    before = run_of(plan, cell)
    digest = vault.open_vault("mine.vlt").digest()
    run = write_run(tmp_path / "run", "mine", "data", RETURNS, vault_digest=digest)
    pack(cell, run, cell_file(plan, cell))
    assert is_current(cell, cell_file(plan, cell))
    if edited.endswith(".vlt"):
        shutil.rmtree(tmp_path / edited)
        shutil.copytree(random_data("probe/two-step").parent, tmp_path / edited)
    else:
        with (tmp_path / edited).open("a") as file:
            file.write("# changed\n")
    assert not is_current(cell, cell_file(plan, cell))
    assert run_of(plan, cell) != before


def test_a_packed_cell_holds_no_directories(local_cell, tmp_path):
    records = []
    for place in (tmp_path, tmp_path / "elsewhere"):
        place.mkdir(exist_ok=True)
        shutil.copy(registry.find("baseline")["bc"], place / "own.py")
        text = f'[datasets]\n"mine" = "{tmp_path}/mine.vlt"\n[baselines]\n'
        (place / "plan.toml").write_text(text + f'own = {{ program = "{place}/own.py" }}\n')
        plan = benchmark.read_plan(place / "plan.toml", tmp_path / "out")
        (cell,) = plan.cells
        record = {"file": f"{place}/own.py"}
        run = write_run(place / "own run", "own", "data", RETURNS, **record)
        pack(cell, run, cell_file(plan, cell))
        assert is_current(cell, cell_file(plan, cell))
        records.append(json.loads(cell_file(plan, cell).read_text()))
        assert str(tmp_path) not in json.dumps(records)
    assert records[0]["program"] == "own.py" and records[0]["data"].endswith("/mine.vlt")


def test_methods_with_different_data_are_noted(read, tmp_path):
    plan = read()
    for number, cell in enumerate(plan.cells):
        run = write_run(tmp_path / cell.slug, "bc", "data", RETURNS, vault_digest=f"{number // 3}")
        pack(cell, run, cell_file(plan, cell))
    notes = benchmark.notes(benchmark.read_results(plan), {})
    (note,) = (n for n in notes if n.startswith("Do not"))
    assert note.startswith("Do not compare the methods on two, whose data differ: bc 0, deep")


WHOLE = """
name = "whole"
[training]
seeds = 2
updates = 4
eval_every = 2
eval_episodes = 2
final_episodes = 4
batch_size = 4
length = 4
[record.cover]
program = "random"
env = "swarm/coverage-3"
steps = 1000
num_envs = 8
[datasets]
"random" = { record = "cover", tier = "random" }
[baselines]
bc = {}
broken = { program = "maicq", env = "swarm/coverage-4" }
"""


BROKEN = {
    "raises": "def make(*_): raise KeyError('a bug')",
    "exits": "def make(*_): raise SystemExit(3)",
    "refuses": "def make(*_): raise OptionError('not that.')",
    "syntax": "def make(:",
    "imports": "import offmarl_absent",
    "lacks": "del make",
    "odd": "Args = 5",
    "defaults": "class Args(Args):\n    def __post_init__(self): raise ValueError('no')",
}


@pytest.fixture
def broken(tmp_path, monkeypatch, random_data):
    """A plan with a sound program, a missing vault, and programs that fail in every way."""
    monkeypatch.chdir(tmp_path)
    good = "from offmarl.errors import OptionError\nfrom tests.programs.two_stage import *\n"
    (tmp_path / "good.py").write_text(f"{good}from tests.programs.two_stage import make\n")
    rows = [
        'good = { program = "good.py" }',
        'absent = { program = "absent.py", datasets = ["a"] }',
    ]
    for name, code in BROKEN.items():
        (tmp_path / f"{name}.py").write_text(f"{good}{code}\n")
        rows.append(f'{name} = {{ program = "{name}.py", datasets = ["a"] }}')
    vault = random_data("probe/observation")
    head = f'[training]\nseeds = 1\n[datasets]\na = "{vault}"\nb = "gone.vlt"\n[baselines]\n'
    (tmp_path / "broken.toml").write_text(head + "\n".join(rows))
    return tmp_path / "broken.toml"


def test_programs_that_fail_are_named_and_none_stops_the_others(
    broken, offmarl, monkeypatch, capsys
):
    monkeypatch.setenv("OFFMARL_QUIET", "0")
    outcome = offmarl("benchmark", broken, "--dry-run")
    assert outcome.code == 0 and "Traceback" not in outcome.err and "gone.vlt" in outcome.err
    for name in (*BROKEN, "absent"):
        assert f"{name} on a will fail: " in outcome.err
    assert "good on a will fail" not in outcome.err
    ran = []

    def run(kind, name, _options):
        program = registry.load(kind, name)
        if name != "good.py":
            program.make(None, None, None)
        ran.append(name)

    monkeypatch.setattr("offmarl.cli.benchmark.run_program", run)
    monkeypatch.setattr("offmarl.benchmark.tasks.pack", lambda *_: None)
    with pytest.raises(KeyError, match="a bug"):  # at the end: the first bug of a program
        offmarl("benchmark", broken, "--task", "0/1")
    err = capsys.readouterr().err
    assert ran == ["good.py"] and "good on b failed: there is no vault" in err
    for name in (*BROKEN, "absent"):
        assert f"{name} on a failed: " in err


@pytest.mark.nightly
def test_the_command_from_the_recording_to_the_page(offmarl, tmp_path):
    (tmp_path / "whole.toml").write_text(WHOLE)
    outcome = offmarl("benchmark", "whole.toml", "--json")
    assert outcome.code == 1
    assert outcome.json["finished"] == 1 and set(outcome.json["failed"]) == {"broken on random"}
    out = tmp_path / "runs" / "whole"
    assert "bc" in (out / "tables" / "scores.md").read_text()
    cell = json.loads((out / "cells" / "random--bc.json").read_text())
    assert cell["digest"] and cell["hardware"]["cores"] and cell["versions"]["jax"]
    assert offmarl("compare", *(out / "cells").glob("*.json")).code == 0
    again = offmarl("benchmark", "whole.toml", "--dry-run")
    assert again.code == 0 and "Not run: broken on random" in again.out
