"""The time limit of published data: on its card, recorded by a pull, used when it is opened."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

from baselines import bc
from offmarl import hub as library
from offmarl import programs, vault
from offmarl.errors import CardError, OptionError, RunError, ShapeError
from offmarl.hub import cache
from offmarl.hub import card as catalogue
from offmarl.records import PULLED
from offmarl.report.contents import data_warnings, survey
from offmarl.vault import open_vault
from tests.vault.experience import SPEC, make, written
from tests.vault.test_quirks import tree
from tests.vault.test_stock import write_stock

from .conftest import NAME, PATH, REPOSITORY, write_card, zipped

LENGTHS = [6, 3, 6, 4]
LIMITED = ["truncated", "terminated", "truncated", "terminated"]
UNLIMITED = ["terminated"] * 4


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """An archive of a vault of another program, which flags the end of time as a termination."""
    root = tmp_path_factory.mktemp("foreign")
    actions = np.random.default_rng(0).integers(0, 3, (1, sum(LENGTHS), 3))
    write_stock(root / "small.vlt" / "Good", tree(1, LENGTHS, actions=actions))
    return zipped(root)


@pytest.fixture
def published(hub, packed):
    """The hub with this archive on it, whose card tells the time limit."""
    hub.commit(REPOSITORY, {PATH: packed})
    card = hub.cards / f"{NAME}.toml"
    card.write_text(card.read_text().replace("num_agents", "time_limit = 6\nnum_agents"))
    return hub


@pytest.fixture
def bare(hub, packed):
    """Its vault, pulled from a hub whose card tells no limit."""
    hub.commit(REPOSITORY, {PATH: packed})
    return library.pull(f"{NAME}/Good").paths["Good"]


def causes(path, **options):
    return vault.open_vault(path, **options).episodes.cause.tolist()


def test_a_pull_notes_the_limit_of_the_card_and_all_that_opens_it_uses_it(published):
    pulled = library.pull(f"{NAME}/Good")
    path = pulled.paths["Good"]
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    assert pulled.time_limit == 6 and causes(path) == LIMITED
    data = open_vault(path)
    assert (data.time_limit, data.spec.time_limit) == (6, 6)
    assert data.quirks[-1] == "time limit terminal"
    assert library.load_dataset(f"{NAME}/Good").episodes.cause.tolist() == LIMITED
    assert causes(path, time_limit=7) == UNLIMITED, "a limit that is given goes before"
    (entry,) = cache.entries()
    assert cache.verify(entry) == len(before), "no file of the vault is touched"
    assert before == {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_a_limit_that_is_given_is_kept(published):
    assert library.pull(f"{NAME}/Good", time_limit=7).time_limit == 7
    again = library.pull(f"{NAME}/Good")
    assert again.time_limit == 7 and causes(again.paths["Good"]) == UNLIMITED
    assert library.load_dataset(f"{NAME}/Good", time_limit=6).episodes.cause.tolist() == LIMITED
    assert library.pull(f"{NAME}/Good", time_limit=6).time_limit == 6
    assert causes(again.paths["Good"]) == LIMITED
    assert library.pull(f"{NAME}/Good", time_limit=1).time_limit == 1, "one step is a limit"
    for limit in (0, -1):
        with pytest.raises(OptionError, match="positive number of steps"):
            library.load_dataset(f"{NAME}/Good", time_limit=limit)


def test_data_without_a_limit_keeps_its_warning(bare, tmp_path):
    data = vault.open_vault(bare)
    assert data.time_limit is None and "time limit unknown" in data.quirks
    assert any(line.startswith("Time limit unknown") for line in data_warnings(survey(data)))
    copy = vault.filter(vault.recode(data, tmp_path / "a.vlt"), "length > 0", tmp_path / "b.vlt")
    assert any(line.startswith("Time limit unknown") for line in data_warnings(survey(copy)))
    limited = library.load_dataset(f"{NAME}/Good", time_limit=6)
    assert "time limit unknown" not in limited.quirks
    copy = vault.recode(limited, tmp_path / "c.vlt")
    assert not any("ime limit unknown" in line for line in data_warnings(survey(copy)))


@pytest.mark.parametrize(
    "content", ["", "[]", '{"time_limit": "6"}', '{"time_limit": -1}', "{" * 9]
)
def test_a_note_that_makes_no_sense_is_no_limit(published, content):
    path = library.pull(f"{NAME}/Good").paths["Good"]
    (path.parent / PULLED).write_text(content)
    data = vault.open_vault(path)
    assert data.time_limit is None and "published" not in data.provenance


def test_transforms_keep_the_limit(published, tmp_path):
    path = library.pull(f"{NAME}/Good").paths["Good"]
    for data in (
        vault.recode(path, tmp_path / "a.vlt"),
        vault.cat([path], tmp_path / "b.vlt"),
        vault.filter(path, "length > 0", tmp_path / "c.vlt"),
        vault.cat([path, tmp_path / "a.vlt" / "main"], tmp_path / "d.vlt", time_limit=6),
    ):
        assert data.spec.time_limit == 6
        assert data.episodes.cause.tolist()[:4] == LIMITED


@pytest.mark.parametrize("verb", [vault.recode, vault.cat])
def test_a_copy_takes_a_limit(bare, tmp_path, verb):
    copy = verb([bare], tmp_path / "a.vlt", time_limit=6)
    assert copy.spec.time_limit == 6 and copy.episodes.cause.tolist() == LIMITED
    with pytest.raises(OptionError, match="leave the time limit out"):
        verb([copy], tmp_path / "c.vlt", time_limit=6)


def test_vaults_of_different_limits_are_not_joined(bare, tmp_path):
    limited = vault.open_vault(bare, time_limit=6), vault.open_vault(bare, time_limit=7)
    with pytest.raises(ShapeError, match="different time limits: 6, 7"):
        vault.cat(limited, tmp_path / "c.vlt")


def test_train_takes_the_limit_and_notes_it(bare, tmp_path, monkeypatch):
    learnt = []
    monkeypatch.setattr(
        "offmarl.programs.runs.training.learn", lambda training, *_: learnt.append(training.data)
    )
    args = bc.Args(vault=bare, env="none", held_out=0.25, out=tmp_path / "run", time_limit=6)
    run = programs.train(bc.make, args) / "run.json"
    assert learnt[0].episodes.cause.tolist() == LIMITED
    record = json.loads(run.read_text())
    assert record["args"]["time_limit"] == record["spec"]["time_limit"] == 6
    untold = dataclasses.replace(args, out=tmp_path / "old", time_limit=None)
    old = programs.train(bc.make, untold) / "run.json"
    record = json.loads(old.read_text())
    del record["args"]["time_limit"]  # as a run has it that is from before there was the option
    old.write_text(json.dumps(record))
    assert programs.train(bc.make, untold) == tmp_path / "old" and len(learnt) == 2


def test_another_limit_makes_another_run_wherever_it_is_from(published, tmp_path, monkeypatch):
    path = library.pull(f"{NAME}/Good").paths["Good"]
    monkeypatch.setattr("offmarl.programs.runs.training.learn", lambda *_: None)
    args = bc.Args(vault=path, env="none", held_out=0.25, out=tmp_path / "run")
    run = programs.train(bc.make, args)
    programs.train(bc.make, dataclasses.replace(args, time_limit=6))
    with pytest.raises(RunError, match=r"spec\.time_limit 6, not 7"):
        programs.train(bc.make, dataclasses.replace(args, time_limit=7))
    noted = json.loads((path.parent / PULLED).read_text())
    (path.parent / PULLED).write_text(json.dumps(noted | {"time_limit": 7}))
    with pytest.raises(RunError, match=r"spec\.time_limit 6, not 7"):
        programs.train(bc.make, args)
    assert programs.train(bc.make, dataclasses.replace(args, time_limit=6)) == run


def test_a_card_keeps_the_limit_of_what_is_pushed(published, tmp_path):
    path = library.pull(f"{NAME}/Good").paths["Good"]
    pushed = library.push([path], "org/again")
    assert pushed.card.time_limit == 6
    again = library.pull("org/again/Good", tmp_path / "again", time_limit=7)
    assert "digest of its content" in again.checks["Good"], "the digest is of the card's limit"
    assert library.pull("org/again/Good").time_limit == 6


def test_a_card_of_vaults_with_different_limits(published, tmp_path):
    path = library.pull(f"{NAME}/Good").paths["Good"]
    bare = tmp_path / "bare.vlt" / "Bare"
    shutil.copytree(path, bare)
    with pytest.raises(CardError, match=r"time limits \(Good 6, Bare unknown\), but a card holds"):
        library.push([path, bare], "org/mixed", "CC0-1.0")
    for uid, limit in (("a", 9), ("b", 20)):
        spec = dataclasses.replace(SPEC, time_limit=limit)
        written(tmp_path / "own.vlt" / uid, make(spec), spec=spec)
    card = library.push([tmp_path / "own.vlt"], "org/own", "MIT").card
    assert card.time_limit is None
    assert card.quirks == ("The time limits of the uids differ: a 9, b 20.",)
    pulled = library.pull("org/own").paths
    assert [vault.open_vault(pulled[uid]).spec.time_limit for uid in "ab"] == [9, 20]


def test_vaults_that_tell_how_episodes_ended_take_no_limit(hub, tmp_path):
    path = tmp_path / "own.vlt" / "a"
    written(path, make())
    library.push([path], "org/own", "MIT")
    pulled = library.pull("org/own/a", time_limit=3).paths["a"]
    assert vault.open_vault(pulled).episodes.cause.tolist() == causes(path)
    assert library.load_dataset("org/own/a", time_limit=3).time_limit is None
    write_card(hub.cards)
    assert catalogue.load(NAME).time_limit is None
