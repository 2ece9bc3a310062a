"""The adapters: the conformance class, and step-by-step equality with what they wrap."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import envs
from offmarl.envs import families
from offmarl.envs.extras import quiet
from offmarl.errors import MissingExtraError, OptionError, ShapeError, UnknownNameError
from offmarl.types import Continuous, Discrete, EnvSpec

from .conformance import (
    EnvironmentConformance,
    assert_close,
    assert_equal,
    compiled,
    record,
    rollout,
)

pytest.importorskip("jaxmarl", reason="needs pip install 'offmarl[envs]'")
pytest.importorskip("jumanji", reason="needs pip install 'offmarl[envs]'")

ONE_OF_A_KIND = [
    "jaxmarl/mpe/simple_speaker_listener_v4",
    "jumanji/lbf:grid_size=6,fov=3",
    "matrax/climbing:time_limit=20",
]

MORE = [
    "jaxmarl/mpe/simple_v3",
    "jaxmarl/mpe/simple_spread_v3:action_type=Continuous",
    "jaxmarl/mpe/simple_tag_v3",
    "jaxmarl/mpe/simple_adversary_v3",
    "jaxmarl/mpe/simple_push_v3",
    "jaxmarl/mpe/simple_crypto_v3",
    "jaxmarl/mpe/simple_reference_v3",
    "jaxmarl/mpe/simple_world_comm_v3",
    "jaxmarl/mpe/simple_facmac_v1",
    "jaxmarl/mpe/simple_facmac_3a_v1",
    "jaxmarl/mpe/simple_facmac_6a_v1",
    "jaxmarl/mpe/simple_facmac_9a_v1",
    "jaxmarl/smax/3m",
    "jaxmarl/smax/smacv2_5_units:max_steps=20",
    "jaxmarl/smax_self_play/5m_vs_6m",
    "jaxmarl/overcooked/cramped_room:max_steps=50",
    "jaxmarl/overcooked_v2/cramped_room:max_steps=50,agent_view_size=1",
    "jaxmarl/jaxnav:max_steps=60",
    "jaxmarl/jaxnav:act_type=Discrete,evaporating=true,num_agents=3,max_steps=60",
    "jaxmarl/hanabi",
    "jaxmarl/switch_riddle",
    "jaxmarl/storm:num_inner_steps=40",
    "jaxmarl/storm_2p:num_inner_steps=40",
    "jaxmarl/storm_np:num_inner_steps=40",
    "jumanji/robot_warehouse:column_height=3,num_agents=2",
    "jumanji/search_and_rescue:num_targets=5,num_vision=16,time_limit=60",
    "jumanji/connector:grid_size=6,num_agents=3",
    "jumanji/cleaner:num_rows=5,num_cols=5,time_limit=40",
    "jumanji/multi_cvrp:num_customers=6",
    "matrax/penalty-25:keep_state=true",
    "matrax/no-conflict-2",
    "matrax/conflict-5",
]
MABRAX = ["jaxmarl/mabrax/halfcheetah_6x1:episode_length=20", "jaxmarl/mabrax/humanoid_9_8"]

IN_FULL = (
    "jaxmarl/mpe/simple_world_comm_v3",
    "jaxmarl/smax/3m",
    "jaxmarl/jaxnav:act_type=Discrete,evaporating=true,num_agents=3,max_steps=60",
    "jaxmarl/switch_riddle",
    "jumanji/connector:grid_size=6,num_agents=3",
    "jumanji/cleaner:num_rows=5,num_cols=5,time_limit=40",
)
"""Of those below, one of each kind of quirk; compiling all takes many minutes."""


@pytest.mark.parametrize(
    "env",
    [*ONE_OF_A_KIND, *(pytest.param(name, marks=pytest.mark.slow) for name in IN_FULL)],
    indirect=True,
)
class TestAdapters(EnvironmentConformance):
    @pytest.fixture
    def env(self, request):
        return envs.make(request.param)

    def test_a_state_has_its_types_from_the_beginning(self, env):
        """Else a program would be compiled for fresh states, and again for all others."""
        fresh, _ = jax.eval_shape(env.reset, jax.random.key(0))
        assert not any(leaf.weak_type for leaf in jax.tree.leaves(fresh))


def test_the_examples_cover_every_family():
    adapted = {name for name, about in envs.describe().items() if about.extra == "envs"}
    assert {envs.family_of(name) for name in ONE_OF_A_KIND + MORE} == adapted


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MORE if name not in IN_FULL])
def test_an_environment_keeps_the_protocol(name):
    """The conformance class in small, from one program."""
    env = envs.make(name)
    spec = env.spec
    _, (_, _, _, step) = jax.jit(rollout, static_argnums=(0, 2))(
        envs.autoreset(env), jax.random.key(0), 120
    )
    assert jax.tree.all(jax.tree.map(lambda x: bool(np.isfinite(x).all()), step))
    assert step.view.observation.shape[1:] == (spec.num_agents, spec.observation_size)
    assert step.view.state.shape[1:] == (spec.state_size,)
    assert step.view.legal_actions.shape[1:] == (spec.num_agents, spec.action_size)
    assert step.view.legal_actions.dtype == step.view.alive.dtype == bool
    assert (step.next_view.legal_actions.any(-1) | ~step.next_view.alive).all()
    assert spec.reward == "individual" or (step.reward == step.reward[:, :1]).all()
    assert not (step.terminated & step.truncated).any()
    lengths = np.diff(np.flatnonzero(step.last), prepend=-1)
    assert (lengths <= spec.time_limit).all()
    cut = step.truncated.any(-1)[np.asarray(step.last)]
    assert (lengths[cut] == spec.time_limit).all()


def replay(env, step):
    """Return our steps, and what the wrapped environment makes of the same ones."""
    _, (state, action, key, ours) = compiled(env).run(jax.random.key(4))
    keys = jax.vmap(lambda key: jax.random.split(key)[0])(key)
    return ours, jax.jit(jax.vmap(step))(keys, state, action)


@pytest.mark.parametrize(
    "name",
    [
        "jaxmarl/mpe/simple_speaker_listener_v4",
        pytest.param("jaxmarl/mpe/simple_world_comm_v3", marks=pytest.mark.slow),
        pytest.param("jaxmarl/smax/3m", marks=pytest.mark.slow),
        pytest.param(
            "jaxmarl/overcooked_v2/cramped_room:max_steps=50,agent_view_size=1",
            marks=pytest.mark.slow,
        ),
        pytest.param("jaxmarl/hanabi", marks=pytest.mark.slow),
        pytest.param("jaxmarl/jaxnav:max_steps=60", marks=pytest.mark.slow),
        pytest.param("jaxmarl/switch_riddle", marks=pytest.mark.slow),
    ],
)
def test_every_step_is_that_of_jaxmarl(name):
    env = envs.make(name)
    raw = env.wrapped

    def step(key, state, action):
        if isinstance(env.spec.action, Continuous):
            spaces = [raw.action_space(agent) for agent in raw.agents]
            action = [
                s.low + (a[: s.shape[0]] + 1) / 2 * (s.high - s.low)
                for a, s in zip(action, spaces, strict=True)
            ]
        given = dict(zip(raw.agents, action, strict=True))
        observations, after, rewards, dones, _ = raw.step_env(key, state.inner, given)
        legal = raw.get_avail_actions(after) if "smax" in name else {}
        return observations, rewards, dones, legal

    with quiet("scatter inputs have incompatible types", "max_dist_to_goal"):
        ours, (observations, rewards, dones, legal) = replay(env, step)
    for i, agent in enumerate(raw.agents):
        seen, expected = ours.next_view.observation[:, i], observations[agent]
        expected = expected.reshape(len(expected), -1)
        assert_close(seen[:, : expected.shape[1]], expected.astype(np.float32))
        assert not seen[:, expected.shape[1] :].any()
        assert_close(ours.reward[:, i], rewards[agent].astype(np.float32))
        if legal:
            assert_equal(ours.next_view.legal_actions[:, i], legal[agent].astype(bool))
    assert_equal(ours.last, dones["__all__"])
    if "world_state" in observations:
        assert_close(ours.next_view.state, observations["world_state"])
    assert ours.last.any()


@pytest.mark.parametrize(
    "name",
    [
        "jumanji/lbf:grid_size=6,fov=3",
        pytest.param(
            "jumanji/robot_warehouse:column_height=3,num_agents=2", marks=pytest.mark.slow
        ),
        pytest.param("jumanji/connector:grid_size=6,num_agents=3", marks=pytest.mark.slow),
        pytest.param("jumanji/cleaner:num_rows=5,num_cols=5,time_limit=40", marks=pytest.mark.slow),
        pytest.param(
            "jumanji/search_and_rescue:num_targets=5,num_vision=16,time_limit=60",
            marks=pytest.mark.slow,
        ),
        pytest.param("jumanji/multi_cvrp:num_customers=6", marks=pytest.mark.slow),
    ],
)
def test_every_step_is_that_of_jumanji(name):
    env = envs.make(name)
    raw = env.wrapped

    def step(key, state, action):
        return raw.step(state, action.astype(raw.action_spec.dtype))

    ours, (_, theirs) = replay(env, step)
    assert_close(ours.reward.T, np.broadcast_to(theirs.reward.T, ours.reward.T.shape))
    assert_equal(ours.last, theirs.last())
    if hasattr(theirs.observation, "action_mask"):
        assert_equal(ours.next_view.legal_actions, theirs.observation.action_mask)
    if hasattr(theirs.observation, "agents_view"):
        assert_equal(ours.next_view.observation, theirs.observation.agents_view)
    if name.startswith("jumanji/lbf"):  # one of two that tell truncation from termination
        assert_equal(ours.truncated, theirs.last()[:, None] & (theirs.discount == 1))
    assert ours.last.any()


def test_particles_are_cut_off_after_one_step_more_than_max_steps():
    env = envs.make("jaxmarl/mpe/simple_speaker_listener_v4")
    step = record(env)[1][3]
    assert env.wrapped.max_steps == 25
    assert env.spec.time_limit == 26
    np.testing.assert_array_equal(np.flatnonzero(step.last[0])[:3], [25, 51, 77])
    assert not step.terminated.any()


def test_agents_of_several_sizes_are_padded_and_masked():
    spec = envs.make("jaxmarl/mpe/simple_speaker_listener_v4").spec
    assert spec.agents == ("speaker_0", "listener_0")
    assert (spec.observation_sizes, spec.action_sizes) == ((3, 11), (3, 5))
    assert EnvSpec.from_json(spec.to_json()) == spec
    view = record(envs.make(spec.name))[0].view
    assert not view.observation[:, 0, 3:].any()
    assert view.legal_actions[0].tolist() == [[True] * 3 + [False] * 2, [True] * 5]


def riddle(prisoner_tells, time):
    """Take one step of the riddle, in the room alone with a certain clock."""
    env = envs.make("jaxmarl/switch_riddle")
    state, _ = compiled(env).reset(jax.random.key(0))
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
def test_the_end_of_a_task_is_told_from_the_end_of_its_time(tells, time, terminated, truncated):
    step = riddle(tells, time)
    assert step.terminated.tolist() == [terminated] * 3
    assert step.truncated.tolist() == [truncated] * 3


@pytest.mark.slow
def test_dead_soldiers_do_not_end_the_battle():
    step = record(envs.make("jaxmarl/smax/3m"))[1][3]
    dead = ~step.next_view.alive
    assert (dead.any(-1) & ~step.last).any()
    assert not (step.terminated & ~step.last[..., None]).any()
    legal = step.next_view.legal_actions[dead]
    assert (legal.sum(-1) == 1).all()


@pytest.mark.slow
def test_storm_shows_the_last_observation_of_an_episode():
    env = envs.make("jaxmarl/storm_np:num_inner_steps=40")
    _, _, _, step = record(env)[1]
    assert step.truncated[:, 39].all()
    last, fresh = step.next_view.observation[:, 39], step.view.observation[:, 39]
    assert (last != fresh).any()


def test_actions_of_both_kinds_are_refused():
    from offmarl.envs.spaces import Actions, Box

    with pytest.raises(ShapeError, match="of both kinds"):
        Actions((Discrete(2), Box((0.0,), (1.0,))))


def test_continuous_actions_are_stretched_over_their_bounds():
    from offmarl.envs.spaces import Actions, Box

    actions = Actions((Box((0.0, -2.0), (1.0, 2.0)), Box((-1.0,), (1.0,))))
    one, other = actions.split(np.array([[0.0, 1.0], [0.5, 0.7]], np.float32))
    assert one.tolist() == [0.5, 2.0]
    assert other.tolist() == [0.5]
    assert actions.mask.tolist() == [[True, True], [True, False]]


def test_the_tables_know_every_map_and_layout():
    from jaxmarl.environments import overcooked_layouts, overcooked_v2_layouts
    from jaxmarl.environments.smax.smax_env import MAP_NAME_TO_SCENARIO

    assert set(families.SMAX_MAPS) == set(MAP_NAME_TO_SCENARIO)
    assert set(families.OVERCOOKED_LAYOUTS) == set(overcooked_layouts)
    assert set(families.OVERCOOKED_V2_LAYOUTS) == set(overcooked_v2_layouts)


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("jaxmarl/smax/3mm", UnknownNameError, "no jaxmarl/smax environment named '3mm'.*3m"),
        ("jaxmarl/mpe/simple_tag_v3:num_agents=3", UnknownNameError, "num_good_agents"),
        ("jaxmarl/mpe/simple_v3:action_type=both", OptionError, "action_type=both.*not supported"),
        ("jaxmarl/switch_riddle:num_agents=2", OptionError, "minimum number of agents"),
        ("jumanji/lbf:fov=20", OptionError, "Field of view"),
        ("jumanji/lbf:num_agents=0", OptionError, "num_agents must be above 0"),
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
    ],
)
def test_a_missing_package_is_one_line_that_helps(name, package, monkeypatch):
    for module in [*sys.modules]:
        if module.partition(".")[0] == package:
            monkeypatch.delitem(sys.modules, module)
    monkeypatch.setattr(sys, "meta_path", [Missing(package), *sys.meta_path])
    with pytest.raises(MissingExtraError, match=r"run `pip install 'offmarl\[envs\]'`") as error:
        envs.make(name)
    assert package in str(error.value)


class Missing:
    """Finds nothing of a package, as if it were not installed."""

    def __init__(self, package):
        self.package = package

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == self.package:
            raise ModuleNotFoundError(f"No module named {name!r}", name=self.package)


@pytest.mark.slow
def test_importing_jaxmarl_prints_nothing_and_leaves_the_streams():
    code = """
import io, sys
sys.stdout = mine = io.StringIO()
from offmarl import envs
envs.make("jaxmarl/switch_riddle")
assert sys.stdout is mine and mine.getvalue() == ""
assert sys.stderr is sys.__stderr__ and sys.__stdout__ is not mine
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", MABRAX)
def test_brax_bodies(name):
    pytest.importorskip("brax", reason="needs pip install 'offmarl[mabrax]'")
    env = envs.make(name)
    _, (_, _, _, step) = jax.jit(rollout, static_argnums=(0, 2))(
        envs.autoreset(env), jax.random.key(0), 30
    )
    assert jax.tree.all(jax.tree.map(lambda x: bool(np.isfinite(x).all()), step))
    assert env.spec.state == "native"
    if "halfcheetah" in name:
        assert np.flatnonzero(step.truncated.all(-1)).tolist() == [19]
        assert env.spec.observation_sizes == (9, 9, 8, 9, 9, 8)
    else:
        assert env.spec.action_sizes == (9, 8)
