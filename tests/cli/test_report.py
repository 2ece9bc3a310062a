"""``report``: one page for one or several datasets of any program and content."""

import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from offmarl import vault
from offmarl.types import Continuous, Discrete, EnvSpec
from tests.vault.experience import SPEC, make, whole_episodes, written
from tests.vault.test_quirks import tree
from tests.vault.test_stock import write_stock


class _Page(HTMLParser):
    """The headings, tables and images of a page; fails where a tag is not closed."""

    def __init__(self, path: Path):
        super().__init__()
        self.text = path.read_text()
        self.open: list[str] = []
        self.titles: list[str] = []
        self.cells: list[list[str]] = []
        self.alts: list[str] = []
        self.feed(self.text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        if tag == "img":
            self.alts.append(dict(attrs)["alt"])
        if tag == "tr":
            self.cells.append([])
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "h2":
            self.titles.append(data)
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1].append(data)

    def row(self, name: str, columns: int) -> list[str]:
        (cells,) = (row for row in self.cells if row[0] == name and len(row) == columns)
        return cells


@pytest.fixture
def tiers(tmp_path):
    """Two datasets of one name; the returns of ``good`` are higher by three a step."""
    for seed, uid in enumerate(("good", "bad")):
        steps, finals = whole_episodes(rows=2, steps=60, seed=seed)
        reward = np.repeat(steps.reward[..., :1], 2, -1) + np.float32(3 * (uid == "good"))
        written(tmp_path / "made.vlt" / uid, (steps._replace(reward=reward), finals))
    return tmp_path / "made.vlt"


@pytest.mark.slow
def test_tiers_stand_side_by_side(offmarl, tiers):
    outcome = offmarl("report", "made.vlt", "--html", "new/page.html")
    assert outcome.code == 0 and "wrote new/page.html" in outcome.out
    page = _Page(Path("new/page.html"))
    assert page.titles == [
        "Overview",
        "Warnings",
        "Properties",
        "Episodes and rewards",
        "Actions",
        "Observations and states",
        "Coverage",
        "Training windows",
        "Episodes",
        "Method",
    ]
    assert "Dataset report: test/made-up" in page.text
    assert page.row("vault", 3) == ["vault", "made.vlt/bad", "made.vlt/good"]  # the better, later
    assert page.row("rewards", 3)[1:] == 2 * ["shared by all agents"]
    assert page.row("checked", 3)[1:] == 2 * ["agrees with its checksums"]
    data = vault.open_vault(tiers / "good")
    returns = data.episodes.returns.mean(1)
    cells = next(row for row in page.cells if row[0] == "good")
    assert cells[1:3] == [str(len(returns)), "120"]
    assert (
        cells[3] == f"{returns.mean():.4g}\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}{returns.std():.3g}"
    )
    assert data.digest()[:12] in page.text
    assert set(re.findall(r'(?:src|href)="([a-z]+:)', page.text)) == {"data:"}
    assert all(page.alts) and len(set(page.alts)) == len(page.alts)
    assert "test/made-up" in page.text.split("Episodes")[-1]  # there is no such environment
    offmarl("report", "made.vlt", "--html", "again.html")
    assert Path("again.html").read_bytes() == Path("new/page.html").read_bytes()


def test_numbers_for_programs(offmarl, tiers):
    result = offmarl("report", "made.vlt/good", "made.vlt/bad", "--json").json["vaults"]
    assert list(result) == ["good", "bad"]  # as they were given
    data = vault.open_vault(tiers / "bad")
    bad = result["bad"]
    assert bad["digest"] == data.digest()
    assert bad["return"]["mean"] == data.episodes.returns.mean()
    assert bad["ends"] == dict(
        zip(*np.unique(data.episodes.cause, return_counts=True), strict=True)
    )
    assert np.array(bad["actions"]["taken"]).shape == (2, 4)
    assert np.array(bad["observations"]["low"]).shape == (2, 3)
    assert bad["coverage"]["saco"] == bad["coverage"]["pairs"] / 120
    assert [window["length"] for window in bad["windows"]] == [5, 10, 20, 50, 100]


@pytest.mark.slow
def test_a_vault_of_another_program_in_an_archive(offmarl, tmp_path):
    observations = np.random.default_rng(0).normal(size=(1, 18, 3, 4))
    observations[0, 4, 1, 2] = np.inf
    write_stock(tmp_path / "3m.vlt" / "Good", tree(1, [6, 12], observations=observations))
    assert "another program, without" in offmarl("show", "3m.vlt").out
    shutil.make_archive("3m", "zip", tmp_path, "3m.vlt")
    outcome = offmarl("report", "3m.zip", "--time-limit", "12", "--html", "page.html")
    assert outcome.code == 0
    page = _Page(Path("page.html"))
    assert page.row("environment", 2)[1] == "unknown"
    assert page.row("size", 2)[1] == "unknown"
    assert page.row("episodes", 2)[1] == "1 terminated, 1 truncated"
    for sentence in (
        "Another program wrote the vault",
        "Time limit terminal: the time limit is flagged as termination",
        "Observed values that are not finite: 1, in features 2 (agent 1).",
        "the environment of the dataset is unknown",
    ):
        assert sentence in page.text


@pytest.mark.slow
def test_continuous_actions_and_rewards_of_each_agent(offmarl, tmp_path):
    spec = EnvSpec("", 3, 2, 4, Continuous(2), reward="individual")
    steps, finals = make(spec, 2, 50)
    written(tmp_path / "a.vlt", (steps, finals), spec=spec, codec="zstd")
    assert offmarl("report", "a.vlt", "--html", "page.html").code == 0
    page = _Page(Path("page.html"))
    assert page.row("rewards", 2)[1] == "individual"
    assert any(alt.startswith("Returns of each agent: a/main: means ") for alt in page.alts)
    assert "Distribution of the values of each dimension." in page.alts


@pytest.mark.parametrize("steps", [0, 1])
def test_as_good_as_nothing(offmarl, tmp_path, steps):
    spec = EnvSpec("", 1, 1, 1, Discrete(1))
    with vault.create(tmp_path / "a.vlt", spec, rows=1) as writer:
        if steps:
            writer.append(*make(spec, 1, 1, end_every=1.0))
    outcome = offmarl("report", "a.vlt", "--html", "page.html")
    assert outcome.code == 0
    assert ("The vault holds no steps." in outcome.out) == (steps == 0)
    _Page(Path("page.html"))


@pytest.mark.slow
@pytest.mark.bits
def test_recorded_episodes_are_shown(offmarl, random_data):
    path = random_data("swarm/coverage-2:time_limit=6")
    outcome = offmarl("report", path, "--html", "page.html")
    assert outcome.code == 0
    page = _Page(Path("page.html"))
    films = [alt for alt in page.alts if ", return" in alt]
    assert [film.split(": ")[0] for film in films] == [
        f"swarm-coverage-2:time_limit=6/random, {rank}" for rank in ("worst", "median", "best")
    ]
    assert page.text.count("data:image/gif;base64,") == 3


MEETING = """
from offmarl import envs


def meet(name):
    return envs.make("swarm/coverage-2:time_limit=6")
"""


@pytest.mark.bits
@pytest.mark.nightly
def test_recorded_episodes_are_shown_in_an_environment_that_the_user_names(
    offmarl, random_data, tmp_path
):
    path = random_data("swarm/coverage-2:time_limit=6")
    (tmp_path / "mine.py").write_text(MEETING)
    offmarl.succeeds("report", path, "--html", "page.html", "--env", "mine.py:meet")
    assert Path("page.html").read_text().count("data:image/gif;base64,") == 3
    other = offmarl("report", path, "--html", "other.html", "--env", "swarm/coverage-3")
    assert other.code == 1 and "differ in num_agents (2, not 3)" in other.err
    assert not Path("other.html").exists()
    offmarl.refuses("give --html, too", "report", path, "--env", "mine.py:meet")


@pytest.mark.slow
def test_odd_names_and_numbers(offmarl, tmp_path):
    """Names that matplotlib would take for formulas or hide; numbers that spoil a linear axis."""
    steps, finals = make(SPEC, 2, 40)
    steps.reward[0, 3] = np.nan
    steps.view.observation[..., 0] *= 1e9
    for uid in ("_first $x^$", "<b>"):
        path = tmp_path / "a.vlt" / uid
        with (
            pytest.warns(UserWarning, match="is nan"),
            vault.create(path, SPEC, rows=2, on_invalid="keep") as writer,
        ):
            writer.append(steps, finals)
    outcome = offmarl("report", "a.vlt", "--html", "page.html")
    assert outcome.code == 0 and "all: Rewards that are not finite: 2." in outcome.out
    page = _Page(Path("page.html"))
    assert page.row("vault", 3)[1:] == ["a.vlt/<b>", "a.vlt/_first $x^$"]


def test_names_tell_datasets_apart(offmarl, tmp_path):
    for name in ("x/a.vlt", "x/b.vlt", "y/a.vlt"):
        with vault.create(tmp_path / name, SPEC, rows=2):
            pass
    assert list(offmarl("report", "x/a.vlt", "x/b.vlt", "--json").json["vaults"]) == [
        "a/main",
        "b/main",
    ]
    twice = offmarl("report", "x/a.vlt", "y/a.vlt", "x/a.vlt/main", "--json").json["vaults"]
    assert [Path(name).relative_to(tmp_path).parts[0] for name in twice] == ["x", "y"]


@pytest.mark.parametrize(
    ("arguments", "message", "code"),
    [
        ([], "vaults must be at least one (give the path of each)", 2),
        (["missing.vlt"], "there is no vault at", 1),
        (["made.vlt", "--time-limit", "5"], "leave the time limit out", 2),
        (["made.vlt", "--html", "."], "give a file name", 2),
    ],
)
def test_mistakes_are_named(offmarl, tiers, arguments, message, code):
    offmarl.refuses(message, "report", "--html", "page.html", *arguments, code=code)
    assert not Path("page.html").exists()


@pytest.mark.parametrize(
    ("command", "option"),
    [("report", "--html"), ("compare", "--html"), ("compare", "--figure"), ("envs", "--picture")],
)
def test_files_that_cannot_be_written_are_refused_before_any_work(
    offmarl, tmp_path, command, option
):
    argument = "swarm/coverage-3" if command == "envs" else str(tmp_path / "missing")
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to("nowhere")
    for place, words in (
        (tmp_path, "is a directory: give a file name with"),
        (tmp_path / "file" / "below" / "page.png", "page.png cannot be written (Not a directory"),
        (tmp_path / "dangling" / "page.png", "page.png cannot be written (File exists"),
        (Path("/proc/nowhere/page.png"), "cannot be written (No such file"),
        *([] if option == "--html" else [(tmp_path / "page.xyz", "give a path that ends in .")]),
    ):
        outcome = offmarl(command, argument, option, place)
        assert outcome.code == 2
        assert words in outcome.err
        assert option in outcome.err
