"""Transforms in blocks give what they give in one process."""

import shutil

import chex
import numpy as np
import pytest

from offmarl import vault
from offmarl.errors import RunError
from offmarl.launch import Share, join_work, run_share
from offmarl.launch.transforms import TransformWork, blocks_of
from offmarl.vault.transform.plan import SHARED
from tests.vault.experience import SPEC, make, recorded

DOUBLED = "def doubled(steps):\n    return {'reward': steps['reward'] * 2}\n"


def record(path, seed, rows, num_steps):
    provenance = {"tier": "medium", "program": f"p{seed}", "recipe": {"seed": seed}}
    return recorded(path, SPEC, rows, num_steps, seed, end_every=6.0, provenance=provenance)


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    place = tmp_path_factory.mktemp("sources")
    return [record(place / "a.vlt", 0, 2, 40), record(place / "b.vlt", 1, 1, 70)]


def by_tasks(plan, path, tasks, block_steps=20):
    for index in range(tasks):
        run_share(TransformWork(plan(), path, block_steps), Share(index, tasks))
    join_work(TransformWork(plan(), path, block_steps))
    return vault.open_vault(path)


@pytest.mark.filterwarnings("ignore:Episodes without their beginning")
@pytest.mark.parametrize("tasks", [pytest.param(1, marks=pytest.mark.nightly), 3])
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cat", {}),
        ("cat", {"codec": "zstd"}),
        ("filter", {"condition": "return > p40 and seed < 2"}),
        ("filter", {"condition": "policy in (0, 4)"}),
        ("filter", {"condition": "reward > 0 and program == 'p0'", "by": "steps"}),
        ("sample", {"steps": 50, "seed": 3}),
        ("sample", {"top": 0.2}),
        ("sample", {"episodes": 6, "match_returns": True}),
        ("recode", {"chunk_steps": 8}),
    ],
)
def test_tasks_make_what_one_process_makes(name, options, tasks, sources, tmp_path):
    stream = {"layout": "stream"} if name == "recode" else {}
    arguments = [options["condition"]] if "condition" in options else []
    kwargs = {key: x for key, x in options.items() if key != "condition"}
    alone = getattr(vault, name)(sources, *arguments, path=tmp_path / "one.vlt", **kwargs, **stream)
    result = by_tasks(lambda: SHARED[name](sources, **options), tmp_path / "c.vlt", tasks)
    assert result.digest() == alone.digest()
    chex.assert_trees_all_equal(result.read(), alone.read())
    about = dict(result.provenance)
    assert about.pop("tasks")["operation"] == name
    assert about == alone.provenance
    assert result.manifest.schema == alone.manifest.schema
    assert vault.verify(result.path, deep=True).sound


@pytest.mark.parametrize("options", [{"reward": "reward * 2"}, {"function": "mine.py:doubled"}])
@pytest.mark.slow
def test_a_map_by_tasks(options, sources, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tmp_path.joinpath("mine.py").write_text(DOUBLED)
    results = [
        by_tasks(lambda: SHARED["map"](sources, **options), tmp_path / f"{tasks}.vlt", tasks)
        for tasks in (1, 3)
    ]
    union = vault.cat(sources, tmp_path / "joined.vlt")
    expected = vault.map(union, tmp_path / "whole.vlt", reward="reward * 2")
    assert {data.digest() for data in results} == {expected.digest()}
    assert results[0].provenance["lineage"]["arguments"]["columns"] == ["reward"]


@pytest.mark.slow
def test_random_numbers_of_a_map_depend_on_the_block_and_not_on_the_task(sources, tmp_path):
    code = "def noisy(steps, rng):\n    return {'reward': rng.random(steps['reward'].shape)}\n"
    tmp_path.joinpath("noise.py").write_text(code)
    options = {"function": str(tmp_path / "noise.py:noisy"), "by": "steps", "seed": 5}
    results = [
        by_tasks(lambda: SHARED["map"](sources, **options), tmp_path / f"{tasks}.vlt", tasks)
        for tasks in (1, 2)
    ]
    assert results[0].digest() == results[1].digest()
    assert len(np.unique(results[0].read()["rewards"])) > 200


def test_a_map_keeps_no_copies_of_its_source(sources, tmp_path):
    def work():
        return TransformWork(SHARED["map"](sources, reward="reward * 2"), path, 20)

    path = tmp_path / "m.vlt" / "main"
    run_share(work(), Share(0, 1))
    assert not [*work().directory.glob("copied.vlt/*")]
    join_work(work())
    assert not [*work().directory.glob("*.vlt")]


def test_blocks_are_intervals_of_episodes(sources):
    blocks = blocks_of(sources, 20)
    for number, source in enumerate(sources):
        mine = [block for block in blocks if block.source == number]
        assert [block.start for block in mine[1:]] == [block.stop for block in mine[:-1]]
        assert (mine[0].start, mine[-1].stop) == (0, len(source))
        lengths = source.episodes.length
        for block in mine:
            steps = lengths[block.start : block.stop].sum()
            assert steps <= 20 or block.stop == block.start + 1
    assert len(blocks_of(sources)) == 2  # small ones are one block each


def test_other_work_is_refused_and_a_complete_one_is_not_repeated(sources, tmp_path):
    def work(**options):
        return TransformWork(SHARED["cat"](sources, **options), tmp_path / "c.vlt", 20)

    run_share(work(), Share(0, 1))
    with pytest.raises(RunError, match="were started with settings"):
        run_share(work(codec="zstd"), Share(0, 1))
    assert join_work(work()) and not join_work(work())
    with pytest.raises(RunError, match=r"c.vlt/main exists already, and other tasks"):
        work(codec="zstd").is_complete()


def test_a_plan_has_the_sizes(sources, tmp_path):
    plan = TransformWork(SHARED["cat"](sources), tmp_path / "c.vlt", 20).plan(4)
    assert (plan["sources"], plan["steps"], plan["tasks"]) == (2, 150, 4)
    assert plan["episodes"] == sum(map(len, sources))
    few = TransformWork(SHARED["cat"](sources[:1]), tmp_path / "c.vlt")
    assert (few.plan(4)["blocks"], few.plan(4)["tasks"]) == (1, 1)
    assert few.notes(4) == ["cat has 1 block, so that only 1 of 4 tasks runs."]
    assert plan["bytes"] > 0 and plan["memory of a task"] > 1e8


def test_a_source_that_has_changed_meanwhile_is_refused(tmp_path):
    """It has as many steps and episodes as before; only the global state differs."""

    def work():
        return TransformWork(SHARED["cat"]([vault.open_vault(tmp_path / "a.vlt")]), out, 20)

    out, (steps, *rest) = tmp_path / "c.vlt", make(SPEC, 1, 70, 0, end_every=6.0)
    changed = steps._replace(view=steps.view._replace(state=steps.view.state + 1))
    for number, written in enumerate((steps, steps, changed)):
        shutil.rmtree(tmp_path / "a.vlt", ignore_errors=True)
        with vault.create(tmp_path / "a.vlt", SPEC, rows=1, chunk_steps=16) as writer:
            writer.append(written, *rest)
        if number < 2:
            run_share(work(), Share(number, 3))
            continue
        with pytest.raises(
            RunError, match=r"started with other sources \(path, steps, episodes or"
        ):
            run_share(work(), Share(2, 3))


@pytest.mark.parametrize(("name", "given"), [("cat", ()), ("filter", ("return > p40",))])
def test_a_task_goes_on_after_it_was_killed_when_it_had_written_a_block(
    name, given, sources, tmp_path
):
    def work():
        return TransformWork(SHARED[name](sources, *given), tmp_path / "c.vlt", 20)

    work().run(0)  # and is killed before it notes that the block is done
    run_share(work(), Share(0, 1))
    join_work(work())
    expected = getattr(vault, name)(sources, *given, path=tmp_path / "one.vlt")
    assert vault.open_vault(tmp_path / "c.vlt").digest() == expected.digest()
