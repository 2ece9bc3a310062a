"""Cross-play: tables of policies against policies, their scores, and the command."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import chex
import jax
import numpy as np
import pytest

from offmarl import envs, tracking
from offmarl.cli import output
from offmarl.cli.cross_play import _map, _notes
from offmarl.errors import (
    NotFiniteError,
    OffmarlError,
    OptionError,
    RunError,
    ShapeError,
    UnknownNameError,
)
from offmarl.launch import Share, join_work, run_share
from offmarl.networks import PolicyConfig
from offmarl.programs import load_policy
from offmarl.programs.cross_play import CrossPlayWork, scores
from offmarl.programs.runs import evaluate
from tests import plain
from tests.children import stopped
from tests.runs import write_policy, write_side

XOR = envs.make("classic/xor").spec
TEAMS = f"{Path(__file__).parents[1] / 'envs' / 'rivals.py'}:Rivals"
FEW = {"episodes": 4}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs of five and of two seeds on the XOR game, one of them with a policy of the other."""
    place = tmp_path_factory.mktemp("runs")
    for name, seeds in (("five", [*range(5)]), ("two", [3, 9]), ("more", [*range(20, 35)])):
        write_policy(place / name, PolicyConfig("feedforward"), XOR, seeds)
    return place


@pytest.fixture
def here(runs, tmp_path, monkeypatch):
    """Return a directory with links to these runs, which is the working directory."""
    monkeypatch.chdir(tmp_path)
    for run in runs.iterdir():
        (tmp_path / run.name).symlink_to(run)
    return tmp_path


def played(work):
    run_share(work, Share(0, 1))
    join_work(work)
    return work.tables()


def actions(run, seed):
    """The actions of both agents, which see the same in every step of the game."""
    view = envs.make("classic/xor").reset(jax.random.key(0))[1].view
    return load_policy(run, seed)(view.observation, view.legal_actions)[0].tolist()


@pytest.mark.slow
def test_the_cells_of_the_xor_game_are_exact_in_both_seat_orders(here, monkeypatch):
    """20 policies meet 20 others in one compilation, of runs whose policies compute the same."""
    traced = chex.assert_max_traces(evaluate.play_against.__wrapped__, n=1)
    play = jax.jit(traced, static_argnums=(0, 1, 2, 3))
    monkeypatch.setattr(evaluate, "play_against", play)
    work = CrossPlayWork(["five", "more"], **FEW)
    tables = played(work)
    first, second = np.array(
        [actions("five", x) for x in range(5)] + [actions("more", x) for x in range(20, 35)]
    ).T
    expected = np.array([[0, 50], [50, -100]])[first[:, None], second]
    np.testing.assert_array_equal(tables["greedy"][..., 0], expected)
    assert (tables["greedy"][..., 1] == 0).all() and len(np.unique(expected)) == 3
    assert tables["greedy"].shape == tables["sampled"].shape == (20, 20, 2)
    assert (tables["sampled"][..., 1] > 0).all()


@pytest.mark.slow
def test_partners_are_met_in_both_seats_and_policies_have_self_play(here):
    work = CrossPlayWork(["five"], ["two@9", "five@1", "random"], **FEW)
    assert work.scored == [0, 1, 2, 3, 4] and work.partners == [5, 1, 6]
    names = [member.name for member in work.members]
    assert names == [*(f"five@{x}" for x in range(5)), "two@9", "random"]
    table = played(work)["greedy"][..., 0]
    mask = np.eye(7, dtype=bool)
    mask[:5, [1, 5, 6]] = True
    np.testing.assert_array_equal(np.isfinite(table), mask | mask.T)


@pytest.mark.slow
def test_policies_that_compute_the_same_of_other_parameters_meet(here):
    """The best action is the same function of values and of logits; only values have epsilon."""
    write_policy(here / "values", PolicyConfig("feedforward", "q"), XOR, [0, 1])
    work = CrossPlayWork(["two", "values"], **FEW)
    joint = [actions("two", 3), actions("two", 9), actions("values", 0), actions("values", 1)]
    first, second = np.array(joint).T
    expected = np.array([[0, 50], [50, -100]])[first[:, None], second]
    np.testing.assert_array_equal(played(work)["greedy"][..., 0], expected)


@pytest.mark.slow
def test_a_partner_whose_name_says_how_it_acts_does_so_in_both_tables(here):
    work = CrossPlayWork(["two@9"], ["five@0/sampled", "five@0"], **FEW)
    names = [member.name for member in work.members]
    assert names == ["two@9", "five@0/sampled", "five@0"]
    tables = played(work)
    for way in ("greedy", "sampled"):
        fixed, both = tables[way][0, 1:, 1] > 0  # only drawn actions differ between episodes
        assert fixed and both == (way == "sampled")


def test_the_same_policy_counts_once(here):
    assert len(CrossPlayWork(["five", "five@2", "two"], **FEW).members) == 6  # both have seed 3


@pytest.mark.slow
def test_a_table_does_not_depend_on_how_it_was_divided(here):
    again = CrossPlayWork(["five"], **FEW)
    tables = played(again)
    again.row(3).write_text("kept")  # rows that are there are not played again
    run_share(again, Share(3, 5))
    assert again.row(3).read_text() == "kept"
    for number in range(5):
        again.row(number).unlink()
    for number in (4, 2, 0, 1, 3):
        run_share(again, Share(number, 5))
    chex.assert_trees_all_equal(again.tables(), tables)
    assert CrossPlayWork(["five"], seed=1, **FEW).path != again.path


@pytest.mark.parametrize("text", ["{}", '{"greedy": [[0, 0]]}', '{"greedy": "x"}', "[]", "kept"])
def test_the_file_of_another_row_is_named(here, text):
    work = CrossPlayWork(["two@9"], ["random"], **FEW)
    work.path.mkdir(parents=True)
    for block in range(2):
        work.row(block).write_text(text)
    with pytest.raises(RunError, match=r"row-0.json (is not the row|is damaged|holds no JSON)"):
        work.tables()


@pytest.mark.slow
def test_a_killed_table_ends_with_the_same_bits(here):
    work = CrossPlayWork(["more"], episodes=16)
    code = "import sys; from offmarl.cli import main; sys.argv[0] = 'offmarl'; main()"
    command = ["cross-play", "more", "--eval-episodes", "16", "--program", plain.__file__]
    stopped([sys.executable, "-c", code, *command], work.row(1).exists)
    assert len(work.missing()) > 1
    tables = played(work)
    rows = [work.row(row).read_bytes() for row in range(15)]
    for row in range(15):
        work.row(row).unlink()
    chex.assert_trees_all_equal(played(work), tables)
    assert [work.row(row).read_bytes() for row in range(15)] == rows


@pytest.mark.slow
def test_a_response_that_acts_for_one_agent_meets_partners_in_its_seat(here):
    run = write_side(here / "response", "classic/xor", "agent_1")
    table = played(CrossPlayWork([str(run)], ["five"], **FEW))["greedy"][..., 0]
    mask = np.zeros((6, 6), bool)
    mask[0, 1:] = True  # as the side that the run learned
    np.testing.assert_array_equal(np.isfinite(table), mask | np.diag([False, *[True] * 5]))
    response = played(CrossPlayWork(["five"], [str(run)], side="agent_0", **FEW))["greedy"]
    np.testing.assert_array_equal(response[:5, 5, 0], table[0, 1:])
    with pytest.raises(OptionError, match="no pair to play"):
        CrossPlayWork([str(run)], **FEW)


@pytest.mark.slow
def test_each_policy_plays_episodes_of_its_own_so_that_intervals_hold_their_chance(here):
    """Two names of the uniform policy: with the same episodes, all cells would be equal."""
    (here / "mine.py").write_text(UNIFORM)
    work = CrossPlayWork(["mine.py:one", "mine.py:other"], env="classic/xor", **FEW)
    table = played(work)["greedy"][..., 0]
    np.testing.assert_array_equal(table[:, 0], table[:, 1])
    assert table[0, 0] != table[1, 0]


UNIFORM = """
from offmarl.networks import PolicyConfig, make_policy

def one(env):
    return make_policy(PolicyConfig("random"), env.spec)

other = one
"""


def test_a_policy_whose_code_has_changed_is_played_again(here):
    paths = set()
    for number, action in enumerate(("zeros", "ones", "ones")):
        (here / f"code{number}").mkdir()
        code = JOINT.replace("joint=True", "").replace("jnp.zeros(2, int)", f"jnp.{action}(2, int)")
        (here / f"code{number}" / "mine.py").write_text(code)
        (here / "mine.py").unlink(missing_ok=True)
        (here / "mine.py").symlink_to(here / f"code{number}" / "mine.py")
        paths.add(CrossPlayWork(["two@9", "mine.py:joint"], **FEW).path)
    assert len(paths) == 2


JOINT = """
from offmarl.types import Policy
import jax.numpy as jnp

def act(params, carry, *seen):
    return jnp.zeros(2, int), jnp.zeros(2), carry

def joint(env):
    return Policy(tuple, act, joint=True)
"""


@pytest.mark.parametrize(
    ("policies", "options", "error", "message"),
    [
        (["two@9"], {}, OptionError, "no pair to play among two@9: give several runs"),
        (["two@9"], {"partners": ["two@9"]}, OptionError, "no pair to play"),
        (["five@7"], {}, RunError, r"has no seed 7: its seeds are \[0, 1, 2, 3, 4\]"),
        (["five@1/9"], {}, RunError, r"no checkpoint of step 9, but of \[1\]"),
        (["five@*/x"], {}, OptionError, "step is 'x'"),
        (["five@x"], {}, OptionError, "names no seed: write RUN@SEED"),
        (["five"], {"side": "agent_2"}, UnknownNameError, "agent of classic/xor.* 'agent_2'"),
        (["five"], {"side": "all"}, OptionError, "these are all agents of classic/xor"),
        (["five:2"], {}, OptionError, "^five:2 has a weight, but pairs count alike: leave it out"),
        (["five:-1+two"], {}, OptionError, "has a weight"),
        (["five:0"], {}, OptionError, "has a weight"),
        (["five"], {"env": "classic/bridge"}, ShapeError, "cannot act for .* sizes differ"),
        (["five", "wide"], {}, UnknownNameError, "no run's directory, named 'wide'"),
        (["random", "scripted"], {}, OptionError, "none of random, scripted is the directory"),
        (["five", "joint.py:joint"], {}, OptionError, "agents of joint.py:joint choose after one"),
        (["five"], {"episodes": 0}, OptionError, "eval_episodes"),
        (["five"], {"env": TEAMS}, OptionError, "of one team, and .* has the teams cats, mice"),
    ],
)
def test_mistakes_are_named_in_one_line(here, policies, options, error, message):
    (here / "joint.py").write_text(JOINT)
    with pytest.raises(error, match=message) as caught:
        CrossPlayWork(policies, **options)
    assert "\n" not in str(caught.value)


def test_names_that_a_run_records_run_no_code(here):
    (here / "evil.py").write_text("open('ran', 'w')")
    record = json.loads((here / "five" / tracking.RUN_FILE).read_text())
    for change in (
        {"spec": record["spec"] | {"name": f"{here}/evil.py:make"}},
        {"file": str(here / "evil.py"), "sha256": "0" * 64},
        {"args": record["args"] | {"side": f"{here}/evil.py:make"}},
    ):
        shutil.rmtree(here / "copy", ignore_errors=True)
        shutil.copytree(here / "five", here / "copy")
        tracking.write_json(here / "copy" / tracking.RUN_FILE, record | change)
        with pytest.raises(OffmarlError):
            CrossPlayWork(["copy"])
    assert not (here / "ran").exists()


def test_returns_that_are_not_finite_are_no_absent_pairs(here, monkeypatch):
    play = evaluate.play_against

    def broken(*args):
        outcome = play(*args)
        return outcome._replace(team_returns=outcome.team_returns.at[0].set(np.nan))

    monkeypatch.setattr(evaluate, "play_against", broken)
    with pytest.raises(NotFiniteError, match="classic/xor gave rewards whose sum is NaN"):
        played(CrossPlayWork(["two"], **FEW))


# ------------------------------------------------------------------------------------ scores

NONE = np.nan
NAMES = "ABC"


def test_scores_of_known_numbers():
    """A and B know each other's convention; C is better, and only with itself."""
    table = np.array([[10.0, 8, 0], [6, 10, 2], [0, 0, 20]])
    result = scores(table, NAMES, [0, 1, 2], [0, 1, 2])
    rows = {name: [row[name] for row in result["policies"]] for name in result["policies"][0]}
    assert rows["policy"] == ["A", "B", "C"] and rows["self_play"] == [10, 10, 20]
    assert rows["cross_play"] == [3.5, 4, 0.5]
    assert rows["worst"] == [0, 1, 0] and rows["worst_partner"] == ["C", "C", "A"]
    assert rows["best_response_share"] == pytest.approx([7 / 30, 8 / 30, 1 / 20])
    values = [result[name]["value"] for name in ("self_play", "cross_play", "gap")]
    np.testing.assert_allclose(values, [40 / 3, 8 / 3, 32 / 3])
    # By hand: the gap without A, B and C; t of two degrees of freedom.
    without = np.array([15 - 1, 15 - 0, 10 - 7])
    half = 4.302652729911275 * np.sqrt(2 / 3 * ((without - without.mean()) ** 2).sum())
    np.testing.assert_allclose(result["gap"]["high"] - result["gap"]["value"], half)
    of_population = scores(table, NAMES, [0, 1, 2], [0, 1, 2], dependent=True)
    assert of_population["gap"] == result["gap"] | {"low": None, "high": None}


def test_scores_beside_partners_and_in_one_seat():
    table = np.array([[5.0, NONE, 4], [NONE, 7, 2], [NONE, 6, 9]])
    result = scores(table, NAMES, [0, 1], [2])
    assert [row["cross_play"] for row in result["policies"]] == [4, 4]
    assert [row["best_response_share"] for row in result["policies"]] == [4 / 9, 4 / 9]
    assert result["gap"] == {"value": 2.0, "low": None, "high": None}
    only = scores(np.array([[NONE, 3.0], [NONE, -1]]), NAMES, [0], [1])
    assert only["policies"][0]["self_play"] is None and only["gap"]["value"] is None
    assert only["cross_play"]["value"] == 3 and only["best_response_share"] == 1
    mixed = scores(np.array([[5.0, 1], [NONE, NONE]]), NAMES, [0, 1], [0, 1])
    assert mixed["gap"]["value"] == 4  # of A, which alone has self-play
    lost = scores(np.array([[-5.0, -3], [-3, -4]]), NAMES, [0, 1], [0, 1])
    assert lost["best_response_share"] is None


def skilled(rng, count):
    """A table in which policies differ in skill, in either seat, and pairs and episodes vary."""
    skill, other_skill = rng.normal(size=(2, count))
    table = skill[:, None] + other_skill + 0.5 * rng.normal(size=(count, count))
    np.fill_diagonal(table, 3 + 0.3 * rng.normal(size=count))
    return table


@pytest.mark.slow
@pytest.mark.parametrize("partners", [0, 5])
def test_intervals_of_the_gap_cover_as_often_as_they_claim(partners):
    """At five policies, among themselves or beside five others; over cells, 95% covers 67%."""
    rng, covered, over_cells = np.random.default_rng(0), 0, 0
    apart = ~np.eye(5, dtype=bool)
    for _ in range(400):
        table = skilled(rng, 5 + partners)
        columns = [*range(5, 10)] if partners else [*range(5)]
        gap = scores(table, "ABCDEFGHIJ", [*range(5)], columns)["gap"]
        covered += gap["low"] <= 3 <= gap["high"]
        cells, itself = table[:5, :5][apart], np.diag(table)[:5]
        half = 1.96 * np.sqrt(cells.var(ddof=1) / cells.size + itself.var(ddof=1) / 5)
        over_cells += abs(itself.mean() - cells.mean() - 3) <= half
    assert 0.93 <= covered / 400 <= 0.985 and over_cells / 400 < 0.75


@pytest.mark.parametrize(
    ("scored", "partners", "one_side", "note"),
    [
        (2, [0, 1], [], "Intervals need at least 3 policies: train more seeds."),
        (3, [0, 1, 2], [], "Intervals over fewer than 5 policies cover less often than 95%."),
        (4, [0, 1, 2], [], "Intervals over fewer than 5 policies cover less often than 95%."),
        (5, [0, 5, 6], [], "Intervals hold for these partners: fewer than 3 are no sample of par"),
        (5, [5, 6, 7], [4, 6], "They act for one side only, without self-play: m4, m6."),
        (5, range(5), [], None),
        (0, [], [], "No intervals: members of a population (--pbt) have replaced one another."),
    ],
)
def test_what_intervals_are_of_is_said(scored, partners, one_side, note):
    members = [SimpleNamespace(name=f"m{n}", seats=(True, n not in one_side)) for n in range(8)]
    work = SimpleNamespace(scored=[*range(scored)], partners=partners, members=members)
    work.dependent = not scored
    notes = [*_notes(work)]
    assert len(notes) == (note is not None) and all(x.startswith(note) for x in notes)


def test_a_map_has_numbers_where_there_is_room():
    names = ["runs/a", "runs/b"]
    seats = {"first": [[0.0, 8.0], [4.0, None]], "second": [[0.0, 4.0], [8.0, None]]}
    data = {"policies": names, "partners": names, "greedy": {"returns": seats}}
    among = _map(data, "greedy")
    assert among.columns == ["policy", "as first"] and among.title == (
        "Returns, best actions, beside each partner in order: ▁ 0.000 to █ 8.000"
    )
    assert among.rows == [["a", "0.000 ▁  8.000 █  "], ["b", "4.000 ▅  " + 9 * " "]]
    beside = {"first": [[1.0] * 4], "second": [[2.0, None, 1.0, 2.0]]}
    data = {"policies": names[:1], "partners": ["x"] * 4, "greedy": {"returns": beside}}
    assert _map(data, "greedy").rows == [["runs/a", "▁▁▁▁", "█ ▁█"]]


# ----------------------------------------------------------------------------------- the command


@pytest.mark.slow
def test_the_command_in_text_json_and_on_a_page(here, offmarl, monkeypatch):
    (here / "<b>").symlink_to(here / "five")
    command = ("cross-play", "<b>", "two@9", "--eval-episodes", 4, "--program", plain.__file__)
    result = offmarl(*command, "--html", "page.html", "--json").json
    names = [*(f"<b>@{seed}" for seed in range(5)), "two@9"]
    assert result["policies"] == result["partners"] == names
    mean = np.array(result["greedy"]["returns"]["agent_0"])
    assert set(mean.ravel()) <= {-100, 0, 50} and result["page"] == "page.html"
    np.testing.assert_array_equal(mean, np.array(result["greedy"]["returns"]["agent_1"]).T)
    assert result["greedy"]["self_play"]["value"] == np.diag(mean).mean()
    assert result["greedy"].keys() == result["sampled"].keys() and result["notes"] == []
    page = (here / "page.html").read_text()
    assert "&lt;b&gt;@3" in page and "<b>" not in page and "Sampled" not in page.split("<h2>")[1]
    monkeypatch.setattr(output._out, "width", 80)
    text = offmarl(*command).out
    assert max(map(len, text.splitlines())) <= 80
    assert "gap " in text and "two@9" in text and "█" in text


@pytest.mark.slow
def test_a_table_is_divided_into_tasks(here, offmarl):
    words = ("cross-play", "two", "--eval-episodes", 4, "--program", plain.__file__)
    plan = offmarl(*words, "--dry-run", "--json").json
    assert plan["blocks"] == 2 and not (here / "runs").exists()
    assert offmarl(*words, "--task", "1/2", "--json").json["missing"] == 1
    assert offmarl(*words, "--join").code == 1
    assert offmarl(*words, "--task", "0/2", "--json").json["missing"] == 0
    table = offmarl(*words, "--join", "--json").json
    assert table == offmarl(*words, "--json").json == offmarl(*words, "--tasks", 2, "--json").json
    alone = offmarl("cross-play", "two", "--eval-episodes", 1, "--json").json["greedy"]
    assert alone["standard_errors"] == dict.fromkeys(["agent_0", "agent_1"], [[None] * 2] * 2)
    assert None not in np.ravel(alone["returns"]["agent_0"])
    for wrong, message in (
        (["nosuch/run"], "there is no run at nosuch/run"),
        ([], "runs must be at least one"),
        (["two", "--partners"], "--partners must be at least one"),
        (["two", "--block-steps", 4], "block-steps divides data"),
    ):
        refused = offmarl("cross-play", *wrong)
        assert refused.code and message in refused.err and refused.err.count("\n") == 1
