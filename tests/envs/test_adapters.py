"""Adapters: names, sizes and ends; `test_conformance` tests the protocol."""

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import envs
from offmarl.envs import catalogue, jaxmarl
from offmarl.envs.conformance import compile_programs, record
from offmarl.envs.spaces import Actions, Box
from offmarl.errors import MissingExtraError, OptionError, UnknownNameError
from offmarl.types import EnvSpec
from tests.children import python


@pytest.fixture(scope="module", autouse=True)
def packages():
    """Import the packages here: it takes seconds, and every worker collects this file."""
    for name in ("jaxmarl", "jumanji", "matrax", "pgx"):
        pytest.importorskip(name, reason="needs pip install 'offmarl[envs,games]'")


SPEAKER = "jaxmarl/mpe/simple_speaker_listener_v4"


@pytest.mark.slow
def test_agents_of_several_sizes_are_padded_and_masked():
    spec = envs.make(SPEAKER).spec
    assert spec.agents == ("speaker_0", "listener_0")
    assert (spec.observation_sizes, spec.action_sizes) == ((3, 11), (3, 5))
    assert spec.time_limit == 26  # one step more than JaxMARL's max_steps
    assert EnvSpec.from_json(spec.to_json()) == spec
    view = record(envs.make(spec.name)).first.view
    assert view.observation[:, 0, :3].any()
    assert view.legal_actions[0].tolist() == [[True] * 3 + [False] * 2, [True] * 5]


def riddle(prisoner_tells, time):
    """Take one step of the riddle, in the room alone with a certain clock."""
    env = envs.make("jaxmarl/switch_riddle")
    state, _ = compile_programs(env).reset(jax.random.key(0))
    inner = state.inner.replace(step=jnp.asarray(time), agent_in_room=jnp.asarray(1))
    action = jnp.asarray([2, 2 if prisoner_tells else 0, 2])
    return env.step(jax.random.key(1), state._replace(inner=inner, time=jnp.asarray(time)), action)[
        1
    ]


@pytest.mark.parametrize(
    ("tells", "time", "terminated", "truncated"),
    [
        (False, 0, False, False),
        (True, 0, True, False),
        (False, 5, False, True),
        (True, 5, True, False),
    ],
)
@pytest.mark.slow
def test_the_end_of_a_task_is_told_from_the_end_of_its_time(tells, time, terminated, truncated):
    step = riddle(tells, time)
    assert step.terminated.tolist() == [terminated] * 3
    assert step.truncated.tolist() == [truncated] * 3


@pytest.mark.slow
def test_vehicles_that_stay_are_stopped_after_twice_as_many_steps_as_customers():
    env = envs.make("jumanji/multi_cvrp:num_customers=6")
    state, _ = env.reset(jax.random.key(0))
    step, stay, ends = jax.jit(env.step), jnp.zeros(2, jnp.int32), []
    while not any(ends):
        state, timestep = step(jax.random.key(0), state, stay)
        ends.append(bool(timestep.truncated.all()))
    assert len(ends) == env.spec.time_limit == 12


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.slow
def test_an_illegal_move_of_a_cleaner_is_a_termination_also_in_the_last_step(limit):
    env = envs.make(f"jumanji/cleaner:num_rows=5,num_cols=5,num_agents=2,time_limit={limit}")
    state, first = env.reset(jax.random.key(0))
    legal = first.view.legal_actions
    for action, ends in ((legal.argmax(1), (False, limit == 1)), (legal.argmin(1), (True, False))):
        _, timestep = jax.jit(env.step)(jax.random.key(0), state, action)
        assert (bool(timestep.terminated.all()), bool(timestep.truncated.all())) == ends


def test_continuous_actions_are_stretched_over_their_bounds():
    actions = Actions((Box((0.0, -2.0), (1.0, 2.0)), Box((-1.0,), (1.0,))))
    first, second = actions.split(np.array([[0.0, 1.0], [0.5, 0.7]], np.float32))
    assert first.tolist() == [0.5, 2.0]
    assert second.tolist() == [0.5]
    assert actions.mask.tolist() == [[True, True], [True, False]]


def test_the_tables_know_every_map_and_layout():
    from jaxmarl.environments import overcooked_layouts, overcooked_v2_layouts
    from jaxmarl.environments.smax.smax_env import MAP_NAME_TO_SCENARIO

    tables = {
        "smax/MAP": MAP_NAME_TO_SCENARIO,
        "overcooked/LAYOUT": overcooked_layouts,
        "overcooked_v2/LAYOUT": overcooked_v2_layouts,
    }
    for name, expected in tables.items():
        assert set(envs.describe()[f"jaxmarl/{name}"].choices) == set(expected)


def named(package):
    return [family for family in catalogue.BUILT_IN if family.name.startswith(f"{package}/")]


def test_all_that_jaxmarl_registers_has_a_name():
    from jaxmarl.registration import registered_envs

    with_a_network = {"LearnedPolicyEnemySMAX"}
    in_no_package = {name for name in registered_envs if name.startswith("JaxRobotarium")}
    names = {family.name.removeprefix("jaxmarl/") for family in named("jaxmarl")}
    short = {name.rpartition("/")[2] if "mabrax" in name else name for name in names}
    ours = {
        {"smax/MAP": "HeuristicEnemySMAX", "smax_self_play/MAP": "SMAX"}.get(
            name, name.removesuffix("/LAYOUT").replace("mpe/", "MPE_")
        )
        for name in short
    }
    assert {name.replace("|", "_") for name in registered_envs} == (
        ours | with_a_network | in_no_package
    )


PUZZLES = {
    *("BinPack", "CVRP", "FlatPack", "Game2048", "GraphColoring", "JobShop", "Knapsack", "Maze"),
    *("Minesweeper", "MMST", "PacMan", "RubiksCube", "SlidingTilePuzzle", "Snake", "Sokoban"),
    *("Sudoku", "Tetris", "TSP"),
}
"""Of Jumanji, for one; and MMST, spanning trees, which has no name here."""


def test_all_that_pgx_offers_has_a_name_or_a_reason():
    import pgx

    ours = {family.name for family in named("pgx")}
    assert ours.isdisjoint(catalogue.LEFT_OUT)
    offered = {f"pgx/{game}" for game in (*pgx.available_envs(), "bridge_bidding")}
    assert ours | catalogue.LEFT_OUT.keys() == offered
    with pytest.raises(UnknownNameError, match="'pgx/backgammon': a game has no longest length"):
        envs.make("pgx/backgammon")


def play(name, *actions):
    """Play a game from the deal of one key; return the timesteps, the first from the reset."""
    env = envs.make(name)
    programs = compile_programs(env)
    state, first = programs.reset(jax.random.key(0))
    steps = [first]
    for action in actions:
        acts = np.asarray(steps[-1].view.legal_actions)[:, :-1].any(-1)
        joint = np.where(acts, action, env.spec.num_actions - 1).astype(np.int32)
        state, step = programs.step(jax.random.key(0), state, joint)
        steps.append(step)
    return steps


def test_the_seats_of_a_game_play_in_turn_and_the_other_waits():
    opening, later, over = play("pgx/kuhn_poker", 0, 1)  # a bet, and a pass: the first seat wins
    assert opening.view.legal_actions.tolist() == [[True, True, False], [False, False, True]]
    assert later.view.legal_actions.tolist() == [[False, False, True], [True, True, False]]
    assert over.view.legal_actions.tolist() == [[False, False, True]] * 2
    assert over.reward.tolist() == [1.0, -1.0]
    assert (later.view.alive.all(), later.last, over.last) == (True, False, True)
    assert over.terminated.all()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("game", "one", "other"),
    [
        ("kuhn_poker", [], [1]),  # the opening, and the view after a pass
        ("leduc_holdem", [1, 1, 0], [0, 1, 1, 0]),  # who raised last
    ],
)
def test_only_the_history_tells_all_information_sets_apart(game, one, other):
    def seen(name):
        ends = [play(name, *actions)[-1].view for actions in (one, other)]
        return [np.asarray(view.observation) for view in ends]

    ours = seen(f"pgx/{game}")
    assert (ours[0] != ours[1]).any(-1).all()
    np.testing.assert_array_equal(*seen(f"pgx/{game}:history=false"))


def test_all_that_jumanji_and_matrax_register_for_several_has_a_name():
    import jumanji
    import matrax

    registered = {name.partition("-")[0] for name in jumanji.registered_environments()}
    games = {"Climbing", "Penalty", "NoConflict", "Conflict"}  # matrax registers them there too
    assert games < registered
    ours = {family.factory.partition(":")[2].lower() for family in named("jumanji")}
    assert ours == {name.lower() for name in registered - games - PUZZLES}
    assert {family.fixed["game"].replace("-", "") for family in named("matrax")} == {
        name.lower() for name in games
    }
    for kind in ("penalty", "conflict", "no_conflict"):
        for number, payoff in getattr(matrax, f"{kind}_games").items():
            env = envs.make(f"matrax/{kind.replace('_', '-')}-{number}")
            np.testing.assert_array_equal(env.wrapped.payoff_matrix, payoff)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("jaxmarl/smax/3mm", UnknownNameError, "no jaxmarl/smax environment named '3mm'.*3m"),
        ("jaxmarl/mpe/simple_tag_v3:num_agents=3", UnknownNameError, "num_good_agents"),
        ("jaxmarl/mpe/simple_v3:action_type=both", OptionError, "action_type=both.*not supported"),
        ("jaxmarl/switch_riddle:num_agents=2", OptionError, "minimum number of agents"),
        ("jumanji/lbf:fov=20", OptionError, "Field of view"),
        ("jumanji/lbf:num_agents=0", OptionError, "num_agents must be at least 1"),
        ("jumanji/connector:grid_size=3", OptionError, "10 paths have no room"),
        ("matrax/penalty-3", OptionError, "its numbers are 0, 25, 50, 75, 100"),
    ],
)
def test_what_cannot_be_made_is_explained(name, error, message):
    with pytest.raises(error, match=message):
        envs.make(name)


@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("jaxmarl/hanabi:num_colors=4", "jaxmarl"),
        ("jumanji/lbf:grid_size=7", "jumanji"),
        ("matrax/climbing:time_limit=3", "matrax"),
        ("pgx/go_19x19", "pgx"),  # which no other test creates
    ],
)
def test_a_missing_package_is_one_line_that_helps(name, package, monkeypatch):
    for module in [*sys.modules]:
        if module.partition(".")[0] == package:
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [Missing(package), *sys.meta_path])
    extra = "games" if package == "pgx" else "envs"
    with pytest.raises(MissingExtraError, match=f"{package}.*install 'offmarl\\[{extra}\\]'`"):
        envs.make(name)


class Missing:
    """An import hook that hides a package, as if it were not installed."""

    def __init__(self, package):
        self.package = package

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=self.package)


@pytest.mark.slow
def test_jaxmarl_is_imported_silently_and_in_part_and_is_whole_when_it_is_used():
    code = """
import io, sys
sys.stdout = mine = io.StringIO()
from offmarl import envs
env = envs.make("jaxmarl/smax/3m")
assert sys.stdout is mine and mine.getvalue() == ""
assert sys.stderr is sys.__stderr__ and sys.__stdout__ is not mine
assert "jaxmarl.environments.smax" in sys.modules
assert "jaxmarl.environments.storm" not in sys.modules and "brax" not in sys.modules
import jaxmarl
assert isinstance(env.wrapped, jaxmarl.environments.MultiAgentEnv)
jaxmarl.make("storm")
"""
    python("-c", code)


@pytest.mark.nightly
def test_dead_soldiers_do_not_end_the_battle():
    step = record(envs.make("jaxmarl/smax/3m")).steps.timestep
    dead = ~step.next_view.alive
    assert (dead.any(-1) & ~step.last).any()
    assert not (step.terminated & ~step.last[..., None]).any()
    assert (step.next_view.legal_actions[dead].sum(-1) == 1).all()


def test_a_battle_is_won_by_those_who_are_left_alone():
    battle, won = SimpleNamespace(num_allies=2), jaxmarl.COMPAT["smax"].won
    alive = {"110001": False, "010000": True, "001000": False, "000000": False}
    for units, expected in alive.items():
        state = SimpleNamespace(unit_alive=jnp.array([unit == "1" for unit in units]))
        assert won(battle, state) == expected


@pytest.mark.nightly
def test_brax_bodies(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("brax", reason="needs pip install 'offmarl[mabrax]'")
    cheetah = envs.make("jaxmarl/mabrax/halfcheetah_6x1:episode_length=20").spec
    assert (cheetah.observation_sizes, cheetah.state) == ((9, 9, 8, 9, 9, 8), "native")
    assert envs.make("jaxmarl/mabrax/humanoid_9_8").spec.action_sizes == (9, 8)
    assert not list(tmp_path.iterdir())  # MuJoCo likes to leave a log of its warnings


@pytest.mark.slow
def test_the_shaped_rewards_of_overcooked_are_apart_from_its_rewards():
    env = envs.make("jaxmarl/overcooked/cramped_room")
    assert envs.has_shaping(env) and not envs.has_shaping(envs.make(SPEAKER))

    def step(state, keys):
        action = jax.random.randint(keys[0], (2,), 0, env.spec.num_actions)
        by_agent = dict(zip(env.wrapped.agents, action, strict=True))
        info = env.wrapped.step_env(keys[1], state.inner, by_agent)[-1]["shaped_reward"]
        state, timestep = env.step(keys[1], state, action)
        return state, (timestep.shaping, jnp.stack(list(info.values())), timestep.reward)

    def play(key):
        state, _ = env.reset(key)
        return jax.lax.scan(step, state, jax.random.split(key, (100, 2)))[1]

    shaping, expected, reward = jax.jit(jax.vmap(play))(jax.random.split(jax.random.key(0), 8))
    np.testing.assert_array_equal(shaping, expected)
    assert set(np.unique(shaping)) == {0, 3}  # an onion in a pot
    assert not reward.any()  # no soup was delivered
