"""Every command and library function accepts paths in any notation."""

import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants

import offmarl as library
from offmarl import tracking, vault
from offmarl.checkpoint import Checkpoints
from offmarl.cli import policies
from offmarl.errors import OptionError, RunError, VaultError
from offmarl.networks import PolicyConfig, init_policy
from offmarl.paths import local, local_output
from offmarl.programs.runs import run as runs
from offmarl.report import pages
from offmarl.types import Discrete, EnvSpec
from offmarl.vault.storage.location import absolute_location, kvstore_spec
from tests.runs import least_record, write_run
from tests.vault.experience import make, whole_episodes, written

HOME = "home"


class Place:
    """A directory with a vault, a run and a converted dataset in it, and ways that lead there."""

    def __init__(self, root: Path):
        self.root = root
        self.home = root / "with spaces" / "dönées-数据"
        self.home.mkdir(parents=True)
        for name in ("v.vlt", "other.vlt"):
            written(self.home / name / "main", make(steps=40))
        _write_run(self.home / "run")
        self.home.joinpath("sub").mkdir()
        (root / "link").symlink_to(self.home)
        (root / "deep").symlink_to(self.home / "sub")
        data = vault.open_vault(self.home / "v.vlt")
        vault.export_dataset(data, self.home / "n.npz", "numpy")


def _write_run(directory):
    import jax

    write_run(directory, "bc", "v/main", [[1.0, 2.0]])
    spec = EnvSpec("x", 3, 58, 112, Discrete(5))
    init = partial(init_policy, PolicyConfig("recurrent"), spec)
    shapes = jax.eval_shape(init, jax.random.key(0))
    params = jax.tree.map(lambda leaf: np.zeros((1, *leaf.shape), leaf.dtype), shapes)
    checkpoints = Checkpoints(directory / tracking.CHECKPOINTS)
    checkpoints.save(1, {"policy": params}, {})


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("places"))


# Each spelling: the directory to be in, and how the path of something in the home is written there.
SPELLINGS = {
    "absolute": lambda place, name: (place.root, f"{place.home}/{name}"),
    "relative": lambda place, name: (place.root, f"with spaces/dönées-数据/{name}"),
    "dots": lambda place, name: (place.home / "sub", f"../{name}"),
    "dots after a link": lambda place, name: (place.root, f"deep/../{name}"),
    "dots at the end": lambda place, name: (place.home, f"{name}/../{Path(name).name}"),
    "home": lambda place, name: (place.root, f"~/{name}"),
    "link": lambda place, name: (place.root, f"link/{name}"),
    "slash": lambda place, name: (place.home, f"{name}/"),
    "dot": lambda place, name: (place.home / name, "."),
}
TO_MAKE = ["dots after a link", "home", "link", "slash"]


@pytest.fixture
def spelled(place, monkeypatch, request):
    """Return a function that spells a path in the home directory, and changes directory."""

    def spell(name, spelling):
        directory, text = SPELLINGS[spelling](place, name)
        monkeypatch.setenv("HOME", str(place.home))
        monkeypatch.chdir(directory)
        return text

    return spell


@pytest.fixture
def light(monkeypatch):
    """Replace the slow parts of the verbs: learning, acting, and the network."""
    monkeypatch.setattr("offmarl.programs.runs.training.learn", lambda *_: None)
    returns = lambda _, loaded, *__: {"team": dict.fromkeys(loaded, np.zeros(2))}  # noqa: E731
    monkeypatch.setattr(policies, "play", returns)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def same(path, expected):
    return os.path.realpath(path) == os.path.realpath(expected)


# ------------------------------------------------------------------------------ what is there

READING = {
    "show": lambda out: out.json["path"],
    "verify": lambda out: out.json["path"],
    "compact": lambda out: out.json["path"],
    "report": lambda out: next(iter(out.json["vaults"].values()))["path"],
    "ls": lambda out: out.json["vaults"][0]["path"],
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_verbs_that_read(offmarl, place, spelled, light, spelling):
    text = spelled("v.vlt/main", spelling)
    for verb, path_in in READING.items():
        outcome = offmarl(verb, text, "--json")
        assert outcome.code == 0, (verb, outcome)
        assert same(path_in(outcome), place.home / "v.vlt" / "main"), verb
    outcome = offmarl("push", text, "--to", "org/x", "--licence", "CC0-1.0")
    assert "offline mode" in outcome.err  # the vault was opened
    text = spelled("run", spelling)
    assert same(offmarl("evaluate", text, "--json").json["run"], place.home / "run")
    assert offmarl("compare", text, "--json").json["datasets"]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_library_reads(place, spelled, spelling):
    text = spelled("run", spelling)
    assert library.load_policy(text).name == library.load_policy(Path(text)).name == "bc"
    text = spelled("v.vlt", spelling)
    for path in (text, Path(text)):
        assert same(library.open(path).path, place.home / "v.vlt" / "main")
        assert vault.verify(path).sound
        assert [summary.name for _, summary in vault.list_vaults(path)] == ["v"]
        vault.resume(path).close()
        vault.join(path, "me").close()


# ---------------------------------------------------------------------------- what is made

MAKING = {
    "cat": ["{in}", "{in}", "-o", "{out}"],
    "filter": ["{in}", "index < 3", "-o", "{out}"],
    "sample": ["{in}", "--episodes", "2", "--like", "{in}", "-o", "{out}"],
    "split": ["{in}", "-o", "{out}"],
    "slice": ["{in}", "--stop", "2", "-o", "{out}"],
    "dedup": ["{in}", "-o", "{out}"],
    "recode": ["{in}", "-o", "{out}"],
    "map": ["{in}", "--reward", "reward * 2", "-o", "{out}"],
    "salvage": ["{in}", "-o", "{out}"],
    "convert": ["{npz}", "{out}", "--from", "numpy"],
    "record": ["--policy", "{run}", "--steps", "9", "--out", "{out}"],
    "train": ["bc", "--vault", "{in}", "--validation", "{held}", "--env=none", "--out", "{out}"],
}


@pytest.mark.parametrize("spelling", TO_MAKE)
@pytest.mark.parametrize(
    "verb",
    [pytest.param(verb, marks=[pytest.mark.slow] * (verb == "record")) for verb in MAKING],
)
def test_verbs_that_make_something(offmarl, place, spelled, light, verb, spelling):
    name = f"{verb} {spelling}.vlt".replace("record", "made")
    names = {"in": "v.vlt/main", "npz": "n.npz", "run": "run", "out": name}
    names["held"] = "other.vlt/main"
    texts = {f"{{{key}}}": spelled(value, spelling) for key, value in names.items()}
    outcome = offmarl(verb, *(texts.get(word, word) for word in MAKING[verb]), "--json")
    assert outcome.code == 0, outcome
    assert (place.home / name).is_dir()


@pytest.mark.parametrize("spelling", TO_MAKE)
def test_files_that_verbs_write_and_vaults_that_the_library_makes(
    offmarl, place, spelled, spelling, monkeypatch
):
    monkeypatch.setattr(pages, "dataset_page", lambda *_: "a page")
    source = spelled("v.vlt", spelling)
    for number, (verb, *words) in enumerate((("report", "--html"), ("convert", "--to", "numpy"))):
        name = f"{number} {spelling}.npz"
        assert offmarl(verb, source, *words, spelled(name, spelling)).code == 0
        assert (place.home / name).is_file()
    for kind in (str, Path):
        name = f"made {spelling} {kind.__name__}.vlt"
        written(kind(spelled(name, spelling)), whole_episodes())
        assert (place.home / name / "main").is_dir()


def test_a_home_in_an_option_as_shells_leave_it(offmarl, place, spelled, light):
    data = spelled("v.vlt", "home")
    words = ["train", "bc", f"--vault={data}", "--env=none", "--out=~/option", "--json"]
    assert offmarl(*words).json["run"] == str(place.home / "option")


def test_programs_are_named_by_their_path(offmarl, place, monkeypatch, light):
    from baselines import bc

    mine = place.home / "my programs" / "mine.py"
    mine.parent.mkdir()
    mine.write_bytes(Path(bc.__file__).read_bytes())
    (mine.parent / "here").mkdir()
    monkeypatch.chdir(mine.parent / "here")
    for name in ("../mine.py", str(mine)):
        out = place.home / f"run of {len(name)}"
        words = ["train", name, f"--vault={place.home / 'v.vlt'}", "--env=none", f"--out={out}"]
        assert offmarl(*words, "--json").json["run"] == str(out)
        assert tracking.read_run(out)["file"] == str(mine)
    for verb in ("train", "record"):
        wrong = offmarl(verb, "../nothing.py", "--vault=x")
        assert wrong.code == 2 and "there is no file" in wrong.err
        assert "Traceback" not in wrong.err


# ------------------------------------------------------------------------ after a change of place


def test_what_was_opened_by_a_relative_path_goes_on_elsewhere(tmp_path, monkeypatch):
    pytest.importorskip("pettingzoo")
    from tests.programs.pettingzoo import Duel

    monkeypatch.chdir(tmp_path)
    recorder = library.record(Duel(), "recorded.vlt")
    written("a.vlt", whole_episodes(steps=40))
    data, shared = library.open("a.vlt"), vault.join("a.vlt", "me")
    resumed = Path("a.vlt")
    monkeypatch.chdir("/")
    assert len(data[:].reward[0]) == 40 and data.digest()
    shared.append(*whole_episodes())
    shared.close()
    recorder.reset()
    recorder.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.vlt", "recorded.vlt"]
    with pytest.raises(VaultError, match=r"there is no vault at /a\.vlt"):
        vault.open_vault(resumed)


def test_a_run_goes_on_with_its_vault_written_in_another_way(tmp_path):
    record = least_record(args={"vault": "a.vlt", "updates": 3}, vault_digest="x")
    runs.open_run(tmp_path / "run", record)
    again = {**record, "args": {"vault": "../a.vlt/main", "updates": 3}}
    assert not runs.open_run(tmp_path / "run", again).complete


def test_another_program_is_the_first_difference_of_a_run(tmp_path):
    first, second = {"greedy": True, "program": "omiga"}, {"greedy": False, "program": "bc"}
    runs.open_run(tmp_path / "run", least_record(**first, args={"a": 1}))
    with pytest.raises(RunError, match="holds a run with program 'omiga', not 'bc'"):
        runs.open_run(tmp_path / "run", least_record(**second, args={"b": 1}))


def test_a_run_that_failed_before_its_first_checkpoint_leaves_nothing_in_the_way(tmp_path):
    record = {"program": "bc", "args": {"length": 9}}
    run = runs.open_run(tmp_path / "run", record)
    with pytest.raises(MemoryError), runs.no_run_without_checkpoint(run):
        run.metrics.write_text("{}\n")
        raise MemoryError
    assert not any((tmp_path / "run").iterdir())
    run = runs.open_run(tmp_path / "run", {**record, "args": {"length": 3}})
    (run.directory / "checkpoints").mkdir()
    with pytest.raises(MemoryError), runs.no_run_without_checkpoint(run):
        raise MemoryError
    assert (tmp_path / "run" / "run.json").exists()  # to be resumed


# ---------------------------------------------------------------------------------- what is odd


def test_dots_after_a_link_mean_what_they_mean_to_the_system(place, monkeypatch):
    monkeypatch.chdir(place.root)
    assert local("deep/../v.vlt") == place.home / "v.vlt"
    assert local("link/v.vlt") == place.root / "link" / "v.vlt", "the name that was given stays"
    (place.root / "circle").symlink_to(place.root / "circle")
    assert local("circle/../x").name == "x"
    assert local("~nobody-has-this-name/x") == place.root / "~nobody-has-this-name" / "x"


def test_no_path_at_all(tmp_path, monkeypatch):
    with pytest.raises(OptionError, match="path is empty"):
        library.open("")
    directory = tmp_path / "gone"
    directory.mkdir()
    monkeypatch.chdir(directory)
    directory.rmdir()
    with pytest.raises(OptionError, match="was removed"):
        library.open("v.vlt")


def test_a_path_that_libraries_cannot_write():
    with pytest.raises(OptionError, match=r"'a/b\\udcfc.vlt' is not UTF-8: rename it"):
        library.open("a/b\udcfc.vlt")


@pytest.mark.parametrize(
    "url",
    ["s3://bucket/a.vlt", "gs:/bucket/a.vlt", "new://a/b", "my_store://b/y", "file:///a", "ftp:/a"],
)
def test_what_is_written_here_has_no_url(url, offmarl, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=r"://.* is a URL, and this is written on this machine"):
        local_output(url)
    if url.partition(":")[0] not in ("new", "my_store"):  # which pathlib makes a path like others
        refused = offmarl("record", "random", "--env", "classic/xor", "--steps", 64, "--out", url)
        assert refused.code == 2 and "is a URL" in refused.err
    assert not [*tmp_path.iterdir()]


def test_an_empty_path_is_not_the_working_directory(offmarl, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for option in ("--out", "--vault"):
        offmarl.refuses("the path is empty", "train", "bc", "--vault", "a.vlt", option, "")


def test_ls_follows_links_but_not_in_circles(offmarl, place, tmp_path):
    (tmp_path / "data").symlink_to(place.home)
    (tmp_path / "data2").symlink_to(place.home)
    (tmp_path / "up").symlink_to(tmp_path.parent)
    (tmp_path / "v2.vlt").symlink_to(place.home / "v.vlt")
    paths = [x["path"] for x in offmarl("ls", "--json").json["vaults"]]
    assert str(tmp_path / "data/v.vlt/main") in paths and str(tmp_path / "v2.vlt/main") in paths
    assert not any({"up", "data2"} & {*Path(path).parts} for path in paths)
    assert "data/v.vlt/main" in (out := offmarl("ls").out) and str(tmp_path) not in out


@pytest.mark.parametrize(
    ("url", "wanted"),
    [
        ("s3://bucket/a/../b.vlt/main/", "s3://bucket/b.vlt/main"),
        (Path("s3://bucket/b.vlt"), "s3://bucket/b.vlt"),
        ("s3:/bucket/b.vlt", "s3://bucket/b.vlt"),
        ("s3://bucket/tag@1/b.vlt", "s3://bucket/tag@1/b.vlt"),
        ("https://me:secret@host/x.zip/x.vlt", "https://***@host/x.zip/x.vlt"),
        ("http:/me:secret@host:80/x.vlt", "http://***@host:80/x.vlt"),
        ("http://localhost:80/tag@1/x.vlt", "http://localhost:80/tag@1/x.vlt"),
        ("http://[::1]:80/tag@1/x.vlt", "http://[::1]:80/tag@1/x.vlt"),
    ],
)
def test_urls(url, wanted):
    path = absolute_location(url)
    assert str(path) == wanted
    assert absolute_location(path) is path


def test_credentials_reach_the_server_and_no_message():
    path = absolute_location("http://me:secret@host/x.vlt/main")
    assert kvstore_spec(path)["base_url"] == "http://me:secret@host/"
    assert "secret" not in f"{path} {path / 'y'} {path!r}"


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://me:secret@bucket/x.vlt", "AWS_ACCESS_KEY_ID"),
        ("S3://me:secret@bucket/x.vlt", "has an unsupported scheme"),
        ("gs://secret@bucket/x.vlt", "which buckets do not accept"),
        ("s3:/me:secret@bucket/x.vlt", "s3://***@bucket/x.vlt has a user name or password"),
        ("S3:/me:secret@bucket/x.vlt", "has an unsupported scheme"),
        ("s3:///me:secret@bucket/x.vlt", "s3://***@bucket/x.vlt has a user name or password"),
        ("s3://me:sec/secret@bucket/x.vlt", "s3://***@bucket/x.vlt has a user name or password"),
        ("http://me:sec/secret@host/x.vlt", r"http://***@host/x.vlt names no server: write / in"),
        ("http://me:p@secret/secret@host/../../x.vlt", "http://***@host/../../x.vlt leads out of"),
        ("s3://bucket/../other/x.vlt", "leads out of its bucket"),
    ],
)
def test_urls_that_cannot_be(offmarl, url, message):
    for verb in ("show", "ls", "verify"):
        outcome = offmarl(verb, url)
        assert outcome.code == 1 and message in outcome.err
        assert "secret" not in outcome.err + outcome.out
