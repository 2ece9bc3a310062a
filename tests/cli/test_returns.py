"""All commands report the same mean return of a vault, that of its complete episodes."""

import warnings

import numpy as np
import pytest

from offmarl import vault
from offmarl.hub import pushing
from offmarl.programs.recording import online
from offmarl.report.contents import survey
from offmarl.types import FinalObservations
from offmarl.vault.transform import selection
from tests.vault.experience import SPEC, make, written

RETURNS = [1.0, 2.0, 6.0]
"""Of the complete episodes; the one that is cut returned 100 so far, the one that runs on 200."""


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Five episodes of two steps and one of one: the fourth is cut, the fifth and last run on."""
    base, _ = make(rows=1, steps=9)
    ends = np.array([0, 1, 0, 1, 0, 1, 0, 1, 0], bool)[None]
    reward = np.zeros((1, 9, 2), np.float32)
    reward[0, ::2, 0] = 2 * np.array([*RETURNS, 100, 200])  # all of it is agent 0's
    flags = np.repeat(ends[..., None], 2, -1)
    terminated = flags & (np.arange(9) < 4)[None, :, None]
    transition = base._replace(
        reward=reward, last=ends, terminated=terminated, truncated=flags & ~terminated
    )
    path = tmp_path_factory.mktemp("returns") / "vaults" / "a.vlt" / "main"
    cut = np.zeros((1, 9), bool)
    cut[0, 7] = True
    final = type(base.view)(*(x[:, 7] for x in base.view))
    finals = FinalObservations(np.zeros(1, int), np.full(1, 7), final)
    with vault.create(path, SPEC, rows=1) as writer:
        writer.append(transition, finals, cut=cut)
    return path


@pytest.fixture(scope="module")
def data(path):
    return vault.open_vault(path)


def test_the_table_of_episodes_tells_it(data):
    episodes = data.episodes
    assert episodes.cause.tolist() == ["terminated", "terminated", "truncated", "cut", "open"]
    assert episodes.complete.tolist() == [True, True, True, False, False]
    assert episodes.complete_returns.tolist() == RETURNS
    assert (episodes.mean_return, episodes.incomplete, episodes.without_return) == (3.0, 2, 0)


# What each command says of a vault's episodes.
COMMANDS = {
    "show": lambda data: data,
    "ls": lambda data: data["vaults"][0],
    "recode": lambda data: data["vaults"][0],
    "report": lambda data: next(iter(data["vaults"].values())),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_tell_the_same(path, offmarl, command):
    place = path.parents[1] if command == "ls" else path
    words = [command, place, *(["-o", "b.vlt"] if command == "recode" else [])]
    result = COMMANDS[command](offmarl(*words, "--json").json)
    assert (result["episodes"], result["incomplete"]) == (5, 2)
    assert result.get("mean_return", (result.get("return") or {}).get("mean")) == 3.0
    if command == "show":
        assert (result["return"]["min"], result["return"]["max"]) == (1.0, 6.0)
        assert "to 6 (without 2 that the environment did not end)" in offmarl("show", path).out
    assert command != "ls" or "incomplete" in offmarl(*words).out


def test_the_library_tells_the_same(path, data):
    card = pushing._describe(data, "")
    assert (card.episodes, card.incomplete) == (5, 2)
    assert (card.return_min, card.return_mean, card.return_max) == (1.0, 3.0, 6.0)
    recorded = online.describe_vault(path, "medium")
    assert (recorded["episodes"], recorded["incomplete"]) == (5, 2)
    assert (recorded["mean_return"], survey(data).returns.mean()) == (3.0, 3.0)


def test_percentiles_are_of_complete_episodes(data, tmp_path):
    """The median of all would be 6, and that of the complete ones is 2."""
    subset = vault.filter(data, "return >= p50", tmp_path / "a.vlt")
    assert subset.episodes.episode_returns.tolist() == [2.0, 6.0, 100.0, 200.0]
    only = vault.filter(data, "complete and return >= p50", tmp_path / "b.vlt")
    assert only.episodes.episode_returns.tolist() == [2.0, 6.0]


def test_samples_by_return_are_of_complete_episodes(data, tmp_path):
    best = vault.sample(data, tmp_path / "a.vlt", top=0.34)
    assert best.episodes.episode_returns.tolist() == [6.0]
    like = vault.sample(data, tmp_path / "b.vlt", match_returns=True, episodes=3)
    assert like.episodes.complete.all()
    np.testing.assert_array_equal(selection.Pool([data]).returns, RETURNS)


def record_an_open_episode(path):
    written(path, make(rows=1, steps=3, end_every=1e9))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("sample", "--top", "10%"), "has no complete episode"),
        (("sample", "--match-returns", "--episodes", 1), "has no complete episode"),
        (("filter", "return >= p50"), "p50 is a percentile of complete episodes"),
    ],
)
def test_without_complete_episodes_nothing_goes_by_returns(offmarl, arguments, message, tmp_path):
    record_an_open_episode(tmp_path / "a.vlt")
    verb, *options = arguments
    outcome = offmarl(verb, "a.vlt", *options, "-o", "b.vlt")
    assert outcome.code in (1, 2) and message in outcome.err


@pytest.mark.slow
def test_without_complete_episodes_there_is_no_return(offmarl, tmp_path):
    record_an_open_episode(tmp_path / "a.vlt")
    for command in (("show", "a.vlt"), ("ls",), ("report", "a.vlt", "--html", "page.html")):
        assert offmarl(*command).code == 0
    result = offmarl("show", "a.vlt", "--json").json
    assert (result["return"], result["incomplete"]) == ({}, 1)
    assert offmarl("ls", "--json").json["vaults"][0]["mean_return"] is None


def test_an_episode_without_a_return_is_told_and_left_out(offmarl, path, tmp_path):
    """As an older version recorded it: the reward is NaN, and nothing notes it."""
    data = vault.open_vault(path)
    transition = data[:]
    reward = transition.reward.copy()
    reward[0, 0, 1] = np.nan
    with (
        pytest.warns(UserWarning),
        vault.create(tmp_path / "a.vlt", SPEC, rows=1, on_invalid="keep") as writer,
    ):
        cut = np.arange(9)[None] == 7
        writer.append(transition._replace(reward=reward), cut=cut)
    result = offmarl("show", "a.vlt", "--json").json
    assert (result["return"]["mean"], result["episodes_without_return"]) == (4.0, 1)
    outcome = offmarl("show", "a.vlt")
    assert outcome.code == 0
    assert "1 with rewards that are not finite" in outcome.out
    assert offmarl("ls", "--json").json["vaults"][0]["mean_return"] == 4.0
    page = offmarl("report", "a.vlt")
    assert page.code == 0 and "1 complete episodes have no finite return" in page.out


def test_warnings_are_printed_as_the_command_lines_own(offmarl, path):
    transition = vault.open_vault(path)[:]
    reward = np.full_like(transition.reward, np.inf)
    with (
        pytest.warns(UserWarning),
        vault.create("a.vlt", SPEC, rows=1, on_invalid="keep") as writer,
    ):
        writer.append(transition._replace(reward=reward))
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        outcome = offmarl("recode", "a.vlt", "-o", "b.vlt")
    assert outcome.code == 0
    assert outcome.err.startswith("warning: the reward of agent 0 in row 0, step 0 of the vault")
    assert "UserWarning" not in outcome.err
