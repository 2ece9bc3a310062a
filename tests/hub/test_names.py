"""Names of datasets in place of paths, and pulls of local datasets without a hub."""

import shutil

import pytest
from huggingface_hub import constants

import offmarl as library
from offmarl import vault
from offmarl.errors import HubUnreachableError, UnknownNameError, VaultError, VaultNotFoundError
from offmarl.hub import card as catalogue
from offmarl.vault import Dataset

from .conftest import NAME, PATH, REPOSITORY, record, write_card, zipped

GOOD = f"{NAME}/Good"


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """An archive of two readable vaults."""
    root = tmp_path_factory.mktemp("made")
    path = record(root / "small.vlt" / "Good")
    (path / "writer.lock").unlink(missing_ok=True)
    shutil.copytree(path, path.with_name("Poor"))
    return zipped(root)


@pytest.fixture
def published(hub, archive):
    """The hub, with readable vaults on it."""
    hub.commit(REPOSITORY, {PATH: archive})
    return hub


@pytest.fixture(params=["offline mode", "no answer"])
def offline(request, monkeypatch, published):
    """Call it to have the hub out of reach."""

    def cut():
        if request.param == "offline mode":
            monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        else:
            published.close()

    return cut


VERBS = {
    "show": [GOOD],
    "verify": [GOOD],
    "salvage": [GOOD, "-o", "salvaged.vlt"],
    "ls": [GOOD],
    "report": [NAME],
    "cat": [GOOD, f"{NAME}/Poor", "-o", "cat.vlt"],
    "filter": [GOOD, "index < 3", "-o", "filter.vlt"],
    "sample": [GOOD, "--like", f"{NAME}/Poor", "-o", "sample.vlt"],
    "split": [GOOD, "-o", "split.vlt"],
    "slice": [GOOD, "--stop", "2", "-o", "slice.vlt"],
    "dedup": [GOOD, "-o", "dedup.vlt"],
    "recode": [GOOD, "-o", "recode.vlt"],
    "convert": [GOOD, "out.npz", "--to", "numpy"],
    "train": ["bc", "--vault", GOOD, "--validation", f"{NAME}/Poor", "--env", "none"],
}


def test_every_verb_takes_the_name_of_what_was_pulled(offmarl, published, monkeypatch):
    monkeypatch.setattr("offmarl.programs.runs.training.learn", lambda *_: None)
    paths = library.hub.pull(NAME).paths
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for verb, arguments in VERBS.items():
        outcome = offmarl(verb, *arguments, "--json")
        assert outcome.code == 0, (verb, outcome)
        if verb == "show":
            assert outcome.json["path"] == str(paths["Good"])
    assert list(offmarl("verify", GOOD, "--json").json["verified"].values()) == [4]
    (paths["Good"] / "metadata.json").write_text("{}")
    offmarl.refuses("1 of 4 files", "verify", GOOD, code=1)
    assert offmarl("verify", f"{NAME}/Poor").code == 0


def test_the_library_takes_it_too(published, monkeypatch):
    paths = library.hub.pull(NAME).paths
    commit = paths["Good"].parents[1].name
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for name in (GOOD, f"{GOOD}/", f"{GOOD}@main", f"{GOOD}@{commit}"):
        data = library.open(name)
        assert isinstance(data, Dataset) and data.path == paths["Good"]
    assert vault.filter(GOOD, "index < 3", paths["Good"].parents[1] / "few.vlt").num_steps > 0
    assert len(list(vault.list_vaults(NAME))) == 2
    with pytest.raises(VaultError, match="several vaults: add one of Good, Poor"):
        library.open(NAME)


@pytest.fixture
def half(pushed):
    """A dataset of two vaults that was pushed, of which one was pulled."""
    return library.hub.pull("org/made-up/good").paths["good"]


def test_a_name_without_a_uid_means_the_same_whatever_was_pulled(half):
    reads = library.load_dataset, library.open, lambda name: vault.mix({name: 1.0})
    message = "org/made-up has several vaults: add one of good, poor"
    for name in ("org/made-up", "org/made-up@main", f"org/made-up@{half.parents[1].name}"):
        for read in reads:
            with pytest.raises(VaultError, match=message):
                read(name)
    for read in reads[:2]:
        assert read("org/made-up/good").path == half
    assert library.open(half.parent).path == half  # a path is what is there


@pytest.mark.parametrize("verb", sorted(VERBS))
def test_every_verb_asks_the_card(offmarl, half, verb):
    words = (word.replace(GOOD, NAME).removesuffix("/Poor") for word in VERBS[verb])
    outcome = offmarl(verb, *(word.replace(NAME, "org/made-up") for word in words))
    if verb in ("ls", "verify", "report"):  # these take directories of several, and say which
        assert outcome.code == 0 and "good" in outcome.out and "poor" not in outcome.out
    else:
        assert outcome.code == 1 and "several vaults: add one of good, poor" in outcome.err


def test_a_dataset_of_one_vault_needs_no_uid(hub, tmp_path):
    library.hub.push([record(tmp_path / "made" / "one.vlt" / "A")], "org/one", "MIT")
    path = library.load_dataset("org/one").path
    assert library.load_dataset("org/one").path == library.open("org/one").path == path


def test_a_card_that_lists_no_uids_is_not_guessed_at(published, tmp_path):
    """An archive whose card does not say what it holds must be here as a whole."""
    write_card(catalogue.directory(), uids=())
    library.hub.pull(GOOD)
    with pytest.raises(VaultNotFoundError, match=f"run `offmarl pull {NAME}` first"):
        library.open(NAME)
    with pytest.raises(VaultError, match="several vaults: add one of Good, Poor"):
        library.load_dataset(NAME)


@pytest.mark.parametrize("name", ["made/one.vlt/A", "{}/made/one.vlt/A", "../x/made/one.vlt"])
def test_load_dataset_of_a_path_names_open(tmp_path, monkeypatch, name):
    directory = tmp_path / "x"
    record(directory / "made" / "one.vlt" / "A")
    monkeypatch.chdir(directory)
    with pytest.raises(UnknownNameError, match="is a path, not the name of a dataset"):
        library.load_dataset(name.format(directory))


def test_what_is_at_a_path_comes_first(published, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    library.hub.pull(GOOD)
    (tmp_path / NAME).mkdir(parents=True)
    mine = record(tmp_path / "mine.vlt" / "main", seed=1)
    mine.rename(tmp_path / GOOD)
    assert library.open(GOOD).path == tmp_path / GOOD
    assert library.open(f"./{GOOD}").path == tmp_path / GOOD


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (GOOD, f"run `offmarl pull {GOOD}` first"),
        (f"{NAME}/Godo", "no uid named 'Godo': did you mean Good"),
        ("lab/suite/smal/Good", "the path .* does not exist, .* did you mean lab/suite/small"),
        ("lab/suite/bridge", "not published: record it with `offmarl record mappo`"),
        ("org/unknown", "there is no vault at"),
        ("lab/suite/x.vlt", "there is no vault at"),
        (f"./{GOOD}", "there is no vault at"),
    ],
)
def test_what_was_not_pulled_is_not_fetched(hub, name, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for function in (library.open, vault.verify, vault.open_vault):
        with pytest.raises(VaultNotFoundError, match=message):
            function(name)
    assert hub.requests == []


def test_another_commit_that_is_here_is_told(published, tmp_path, monkeypatch):
    library.hub.pull(GOOD)
    published.commit(REPOSITORY, {"another": b"file"})
    library.hub.plan(NAME)  # changes nothing here
    assert library.open(GOOD).uid == "Good"
    library.hub.pull(f"{NAME}/Poor")  # main means another commit now
    with pytest.raises(VaultNotFoundError, match="`offmarl cache ls` lists other"):
        library.open(GOOD)


# ------------------------------------------------------------------------------ without a hub


@pytest.mark.parametrize("out", [None, "~/data", "sub/../data"])
def test_a_pull_of_what_is_here(offmarl, offline, published, out, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    place = ["--out", out] if out else []
    first = offmarl("pull", NAME, *place, "--json").json
    if out:
        assert first["paths"]["Good"] == str(tmp_path / "data" / "small.vlt" / "Good")
    offline()
    for name in (NAME, GOOD, f"{GOOD}@main"):
        again = offmarl("pull", name, *place, "--json")
        assert again.code == 0, again
        assert again.json["paths"]["Good"] == first["paths"]["Good"]
        assert again.json["commit"] == first["commit"]
        assert (again.json["fetched"], again.json["asked"]) == (0, False)
    out = offmarl("pull", GOOD, *place).out
    assert "it could not be reached" in out and "Made of nothing." in out


def test_a_pull_of_what_is_here_in_part(offline, published):
    library.hub.pull(GOOD)
    offline()
    assert list(library.hub.pull(GOOD).paths) == ["Good"]
    for name in (NAME, f"{NAME}/Poor", f"{GOOD}@v2"):
        with pytest.raises(HubUnreachableError, match="`offmarl cache ls`"):
            library.hub.pull(name)


@pytest.mark.parametrize("place", ["a.zip/made.vlt/main", "s3://bucket/made.vlt/main"])
def test_what_is_no_directory_is_not_pushed(hub, tmp_path, place, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record(tmp_path / "made.vlt" / "main")
    shutil.make_archive("a", "zip", tmp_path, "made.vlt")
    with pytest.raises(VaultError, match="is not a directory on this machine"):
        library.hub.push([place], "org/made-up", "CC-BY-4.0")
    assert hub.requests == []


def test_a_pushed_name_is_the_data_that_was_pulled(published, tmp_path):
    digest = library.vault.open_vault(library.hub.pull(GOOD).paths["Good"]).digest()
    pushed = library.hub.push([GOOD], "org/again")
    assert pushed.card.uids["Good"].digest == digest
