"""Every adapted environment: 1,000 random steps keep the protocol, and are those of what it wraps.

Of STORM for many, which takes long, the first 120 are compared.

The conformance class compiles four programs of an environment, this module two; so the class is for
some of them (see `test_adapters`), this for all.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl import envs
from offmarl.envs.extras import quiet
from offmarl.types import Continuous

from .conformance import QUICKLY, assert_close, assert_equal, compiled

pytest.importorskip("jaxmarl", reason="needs pip install 'offmarl[envs]'")
pytest.importorskip("jumanji", reason="needs pip install 'offmarl[envs]'")

QUICK = ["jaxmarl/mpe/simple_speaker_listener_v4", "matrax/climbing:time_limit=20"]
NAMES = [
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
    "jaxmarl/hanabi",
    "jaxmarl/switch_riddle",
    "jaxmarl/coin_game:num_inner_steps=40",
    "jaxmarl/storm:num_inner_steps=40,num_agents=3",
    "jaxmarl/storm_2p:num_inner_steps=40",
    "jaxmarl/storm_np:num_inner_steps=40",
    "jaxmarl/mabrax/halfcheetah_6x1:episode_length=20",
    "jumanji/robot_warehouse:column_height=3,num_agents=2",
    "jumanji/lbf:grid_size=6,fov=3",
    "jumanji/search_and_rescue:num_targets=5,num_vision=16,time_limit=60",
    "jumanji/connector:grid_size=6,num_agents=3",
    "jumanji/cleaner:num_rows=5,num_cols=5,time_limit=40",
    "jumanji/multi_cvrp:num_customers=6",
    "matrax/penalty-25:keep_state=true",
    "matrax/no-conflict-2",
    "matrax/conflict-5",
]


class Theirs(NamedTuple):
    """What a wrapped environment makes of a step."""

    observations: list
    """Each agent's own, a vector."""
    reward: Any
    last: Any
    legal_actions: Any = None
    state: Any = None


def vector(*parts):
    return jnp.concatenate([jnp.ravel(part).astype(jnp.float32) for part in parts])


def step_of_jaxmarl(env):
    raw = env.wrapped

    def step(key, state, action):
        given = list(action)
        if isinstance(env.spec.action, Continuous):
            given = [stretched(raw.action_space(raw.agents[i]), own) for i, own in enumerate(given)]
        by_agent = dict(zip(raw.agents, given, strict=True))
        given = tuple(given) if "storm_2p" in env.name else by_agent
        seen, after, rewards, dones, _ = raw.step_env(key, state.inner, given)
        return Theirs(
            observations_of_jaxmarl(raw, seen),
            jnp.stack([rewards[agent] for agent in raw.agents]),
            dones["__all__"],
            legal_in_jaxmarl(env.name, raw, after),
            seen.get("world_state") if isinstance(seen, dict) else None,
        )

    return step


def stretched(space, action):
    own = action[: space.shape[0]]
    return space.low + (own + 1) / 2 * (space.high - space.low)


def observations_of_jaxmarl(raw, seen):
    if isinstance(seen, dict) and "inventory" in seen:  # storm
        grids, inventory = seen["observations"], seen["inventory"]
        return [vector(grids[agent], inventory[:, agent]) for agent in raw.agents]
    if isinstance(seen, dict):
        return [vector(seen[agent]) for agent in raw.agents]
    if isinstance(seen[0], dict):  # storm_2p
        return [vector(each["observation"], each["inventory"]) for each in seen]
    return [vector(each) for each in seen]


def legal_in_jaxmarl(name, raw, state):
    if "smax" in name:
        legal = raw.get_avail_actions(state)
    elif "hanabi" in name:
        legal = raw.get_legal_moves(state)
    else:
        return None
    most = max(raw.action_space(agent).n for agent in raw.agents)
    padded = [jnp.pad(legal[agent], (0, most - len(legal[agent]))) for agent in raw.agents]
    return jnp.stack(padded).astype(bool)


def step_of_jumanji(env):
    raw = env.wrapped
    observe = OBSERVE[env.name.partition(":")[0]]

    def step(key, state, action):
        _, timestep = raw.step(state, action.astype(raw.action_spec.dtype))
        seen = timestep.observation
        return Theirs(
            observe(seen, env.spec.num_agents),
            jnp.broadcast_to(timestep.reward, (env.spec.num_agents,)),
            timestep.last(),
            getattr(seen, "action_mask", None),
        )

    return step


def view_of_jumanji(seen, num_agents):
    return [vector(seen.agents_view[i]) for i in range(num_agents)]


def view_of_a_searcher(seen, num_agents):
    return [
        vector(seen.searcher_views[i], seen.positions[i], seen.targets_remaining)
        for i in range(num_agents)
    ]


def view_of_a_connector(seen, num_agents):
    from jumanji.environments.routing.connector.utils import get_path, get_position, get_target

    kinds = get_path, get_position, get_target
    agents = range(num_agents)
    own = [[seen.grid == kind(i) for kind in kinds] for i in agents]
    others = [
        [sum(own[j][k].astype(int) for j in agents if j != i) for k in range(3)] for i in agents
    ]
    return [vector(*own[i], *others[i]) for i in agents]


def view_of_a_cleaner(seen, num_agents):
    from jumanji.environments.routing.cleaner.constants import DIRTY, WALL

    agents = range(num_agents)
    empty = jnp.zeros_like(seen.grid, jnp.float32)
    here = [empty.at[tuple(seen.agents_locations[i])].set(1) for i in agents]
    others = [sum(here[j] for j in agents if j != i) > 0 for i in agents]
    return [vector(seen.grid == DIRTY, seen.grid == WALL, here[i], others[i]) for i in agents]


def view_of_a_vehicle(seen, num_agents):
    fleet, nodes = seen.vehicles, jax.tree.leaves((seen.nodes, seen.windows, seen.coeffs))
    rows = [
        vector(fleet.coordinates[i], fleet.local_times[i], fleet.capacities[i])
        for i in range(num_agents)
    ]
    return [vector(*rows[i:], *rows[:i], *nodes) for i in range(num_agents)]


OBSERVE = {
    "jumanji/robot_warehouse": view_of_jumanji,
    "jumanji/lbf": view_of_jumanji,
    "jumanji/search_and_rescue": view_of_a_searcher,
    "jumanji/connector": view_of_a_connector,
    "jumanji/cleaner": view_of_a_cleaner,
    "jumanji/multi_cvrp": view_of_a_vehicle,
}


def step_of_matrax(env):
    def step(key, state, action):
        _, timestep = env.wrapped.step(state, action)
        seen = timestep.observation.agent_obs
        return Theirs([vector(seen[0]), vector(seen[1])], timestep.reward, timestep.last())

    return step


STEP_OF = {"jaxmarl": step_of_jaxmarl, "jumanji": step_of_jumanji, "matrax": step_of_matrax}


def check_protocol(spec, step):
    """Check what the conformance class checks of a recording."""
    assert jax.tree.all(jax.tree.map(lambda x: bool(np.isfinite(x).all()), step))
    for view in (step.view, step.next_view):
        assert view.observation.shape[1:] == (spec.num_agents, spec.observation_size)
        assert view.state.shape[1:] == (spec.state_size,)
        assert view.legal_actions.shape[1:] == (spec.num_agents, spec.action_size)
        assert view.legal_actions.dtype == view.alive.dtype == bool
        assert (view.legal_actions.any(-1) | ~view.alive).all()
    assert spec.reward == "individual" or (step.reward == step.reward[:, :1]).all()
    assert not (step.terminated & step.truncated).any()
    assert_equal(step.last, (step.terminated | step.truncated).all(-1))
    lengths = np.diff(np.flatnonzero(step.last), prepend=-1)
    assert (lengths <= spec.time_limit).all()
    cut = step.truncated.any(-1)[step.last]
    assert (lengths[cut] == spec.time_limit).all()


def check_steps(name, ours, theirs):
    for i, expected in enumerate(theirs.observations):
        seen, size = ours.next_view.observation[:, i], expected.shape[1]
        assert_close(seen[:, :size], expected)
        assert not seen[:, size:].any()
    assert_close(ours.reward, theirs.reward.astype(np.float32))
    if theirs.legal_actions is not None:
        assert_equal(ours.next_view.legal_actions, theirs.legal_actions)
    if theirs.state is not None:
        assert_close(ours.next_view.state, theirs.state)
    if "num_inner_steps" in name:  # made for one step more: its own last shows another episode
        assert not theirs.last.any()
        assert_equal(np.flatnonzero(ours.last), np.arange(39, len(ours.last), 40))
    else:
        assert_equal(ours.last, theirs.last)
    assert ours.last.any()


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES)]
)
def test_a_thousand_steps_are_those_of_the_wrapped_environment(name):
    if "mabrax" in name:
        pytest.importorskip("brax", reason="needs pip install 'offmarl[mabrax]'")
    env = envs.make(name)
    _, (state, action, key, ours) = jax.device_get(compiled(env).run(jax.random.key(4)))
    check_protocol(env.spec, ours)

    compared = 120 if name.startswith("jaxmarl/storm:") else len(ours.last)  # 40 ms a step on a CPU
    state, action, key, ours = jax.tree.map(lambda x: x[:compared], (state, action, key, ours))
    step = jax.vmap(STEP_OF[name.partition("/")[0]](env))
    step_key = jax.vmap(lambda key: jax.random.split(key)[0])(key)
    with quiet("scatter inputs have incompatible types", "max_dist_to_goal", "Brax System"):
        theirs = jax.jit(step, compiler_options=QUICKLY)(step_key, state, action)
    check_steps(name, ours, jax.device_get(theirs))
    if "lbf" in name:  # one of two that tell truncation from termination
        _, timestep = jax.vmap(env.wrapped.step)(state, action)
        assert_equal(ours.truncated, timestep.last()[:, None] & (timestep.discount == 1))


@pytest.mark.slow
def test_dead_soldiers_do_not_end_the_battle():
    step = compiled(envs.make("jaxmarl/smax/3m")).run(jax.random.key(4))[1][3]
    dead = ~step.next_view.alive
    assert (dead.any(-1) & ~step.last).any()
    assert not (step.terminated & ~step.last[:, None]).any()
    assert (step.next_view.legal_actions[dead].sum(-1) == 1).all()


@pytest.mark.slow
def test_storm_shows_the_last_observation_of_an_episode():
    step = compiled(envs.make("jaxmarl/storm_np:num_inner_steps=40")).run(jax.random.key(4))[1][3]
    assert step.truncated[39].all()
    assert (step.next_view.observation[39] != step.view.observation[39]).any()


@pytest.mark.slow
def test_brax_bodies(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("brax", reason="needs pip install 'offmarl[mabrax]'")
    cheetah = envs.make("jaxmarl/mabrax/halfcheetah_6x1:episode_length=20").spec
    assert (cheetah.observation_sizes, cheetah.state) == ((9, 9, 8, 9, 9, 8), "native")
    assert envs.make("jaxmarl/mabrax/humanoid_9_8").spec.action_sizes == (9, 8)
    assert not list(tmp_path.iterdir())  # MuJoCo likes to leave a log of its warnings
