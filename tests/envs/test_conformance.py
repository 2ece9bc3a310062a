"""Every named environment, its maps and layouts, and some with other options."""

import re

import pytest

from offmarl import envs

from .wrapped import WrappedConformance

QUICK = {"probe/match", "swarm/coverage-N", "matrax/climbing", "pgx/kuhn_poker"}
"""Environments that the tests by default cover: quick ones of several kinds."""

DAILY = {
    "classic/bridge",
    "classic/xor",
    "probe/one-step",
    "probe/memory",
    "swarm/search-3",
    "jaxmarl/mpe/simple_speaker_listener_v4",
    "jaxmarl/mpe/simple_spread_v3",
    "jaxmarl/smax/5m_vs_6m",  # sides of unequal size
    "pgx/leduc_holdem",
    "pgx/tic_tac_toe",
}
"""Environments that CI covers every time: one of each main family. The others run nightly."""

NUMBERS = {"matrax/penalty-K": 25, "matrax/no-conflict-K": 2, "matrax/conflict-K": 5}
"""Where not every number goes."""

OPTIONS = {
    "jaxmarl/overcooked/LAYOUT": "max_steps=50",
    "jaxmarl/overcooked_v2/LAYOUT": "max_steps=50",
    "jaxmarl/jaxnav": "max_steps=60",
    "jaxmarl/coin_game": "num_inner_steps=40",
    "jaxmarl/storm": "num_inner_steps=40,num_agents=3",
    "jaxmarl/storm_2p": "num_inner_steps=40",
    "jaxmarl/storm_np": "num_inner_steps=40",
    "jaxmarl/mabrax/ant_4x2": "episode_length=20",
    "jaxmarl/mabrax/halfcheetah_6x1": "episode_length=20",
    "jaxmarl/mabrax/hopper_3x1": "episode_length=20",
    "jaxmarl/mabrax/humanoid_9_8": "episode_length=20",
    "jaxmarl/mabrax/walker2d_2x3": "episode_length=20",
    "jumanji/robot_warehouse": "column_height=3,num_agents=2,time_limit=60",
    "jumanji/lbf": "grid_size=6,fov=3",
    "jumanji/search_and_rescue": "num_targets=5,num_vision=16,time_limit=60",
    "jumanji/connector": "grid_size=6,num_agents=3",
    "jumanji/cleaner": "num_rows=5,num_cols=5,time_limit=40",
    "jumanji/multi_cvrp": "num_customers=6",
    "matrax/climbing": "time_limit=20",
    "matrax/penalty-K": "keep_state=true,time_limit=20",
    "matrax/no-conflict-K": "time_limit=20",
    "matrax/conflict-K": "time_limit=20",
}
"""Small, and with episodes that end within a few hundred steps."""

TOO_LONG = {"pgx/go_19x19"}
"""Random games take more steps than the suite; a smaller board has the same code."""

SELF_PLAY = ("3m", "3s5z_vs_3s6z", "smacv2_5_units")
"""The maps of SMAX that are played by both sides too: all are run against its own opponent."""

VARIANTS = [
    "jaxmarl/mpe/simple_spread_v3:action_type=Continuous",
    "jaxmarl/smax/3m:action_type=continuous",
    "jaxmarl/overcooked_v2/cramped_room:max_steps=50,agent_view_size=1",
    "jaxmarl/jaxnav:act_type=Discrete,evaporating=true,num_agents=3,max_steps=60",
    "jaxmarl/coin_game:cnn=true,num_inner_steps=40",
    "pgx/kuhn_poker:history=false",
]
"""Options that change what an adapter has to do."""


def examples(name, about):
    """Return all names that a registered one stands for; of those with numbers, one."""
    options = f":{OPTIONS[name]}" if name in OPTIONS else ""
    if about.choices:
        stem = name.rpartition("/")[0]
        choices = SELF_PLAY if "self_play" in name else about.choices
        return [f"{stem}/{choice}{options}" for choice in choices]
    return [re.sub(r"-[A-Z]\b", f"-{NUMBERS.get(name, 3)}", name) + options]


def cases(extras):
    """Return the environments that need one of these extras, as parameters of tests."""
    params = []
    for name, about in envs.describe().items():
        if about.extra not in extras or name in TOO_LONG:
            continue
        for example in examples(name, about):
            slow = pytest.mark.slow if example in DAILY else pytest.mark.nightly
            params.append(pytest.param(example, marks=[] if name in QUICK else slow))
    return params


def make(name):
    """Build an environment; skip the test where its package is not installed."""
    package = name.partition("/")[0]
    if package in ("jaxmarl", "jumanji", "matrax", "pgx"):
        extra = "games" if package == "pgx" else "envs"
        pytest.importorskip(package, reason=f"needs pip install 'offmarl[{extra}]'")
    return envs.make(name)


@pytest.mark.parametrize(
    "env",
    [
        *cases({"", "envs", "games"}),
        *(pytest.param(name, marks=pytest.mark.nightly) for name in VARIANTS),
    ],
    indirect=True,
)
class TestRegistered(WrappedConformance):
    @pytest.fixture
    def env(self, request):
        return make(request.param)


@pytest.mark.parametrize("env", cases({"mabrax"}), indirect=True)
class TestBodies(WrappedConformance):
    tolerance = 1e-3
    """Contacts are stiff, and five steps of physics are one of ours."""

    @pytest.fixture
    def env(self, request):
        pytest.importorskip("brax", reason="needs pip install 'offmarl[mabrax]'")
        return make(request.param)
