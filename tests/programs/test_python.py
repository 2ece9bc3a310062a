"""Recording environments that are stepped in Python."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from pettingzoo import AECEnv
from pettingzoo.utils import OrderEnforcingWrapper

import offmarl
from offmarl import envs, vault
from offmarl.errors import (
    InvalidValueError,
    OptionError,
    RunError,
    ShapeError,
    VaultExistsError,
    VaultFormatError,
    VaultNotFoundError,
)

from .pettingzoo import Duel

LONG = {"knight": 0, "squire": 10}


class Turns(AECEnv):
    """Agents take turns; before its first reset it has no ``agent_selection`` yet."""

    metadata: ClassVar[dict] = {"name": "turns"}
    possible_agents: ClassVar[list] = ["knight", "squire"]

    def observation_space(self, agent):
        return gymnasium.spaces.Discrete(2)

    action_space = observation_space


def play(recorder, knight=0, seed=None, log_prob=None):
    recorder.reset(seed=seed)
    while recorder.env.agents:
        actions = {
            a: x for a, x in (("knight", knight), ("squire", 11)) if a in recorder.env.agents
        }
        recorder.step(actions, log_prob, policy_id=4)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "duel.vlt"


def test_an_episode_is_recorded_whole(path):
    with offmarl.record(Duel(), path, time_limit=5, provenance={"by": "me"}) as recorder:
        play(recorder, seed=7, log_prob={"knight": -1.5})
        assert (recorder.episodes, recorder.steps) == (1, 5)
    data = vault.open_vault(path)
    steps = data[:]
    assert (data.spec.name, data.spec.time_limit) == ("", 5)  # not one that we could make
    assert data.provenance == {"environment": "duel", "recorded": "in Python", "by": "me"}
    np.testing.assert_array_equal(steps.reward[0], [[1, 2], [2, 3], [3, 0], [4, 0], [5, 0]])
    assert steps.view.alive[0].tolist() == [[True, True]] * 2 + [[True, False]] * 3
    assert steps.terminated[0].tolist() == [[False, False]] + [[False, True]] * 4
    assert steps.truncated[0].tolist() == [[False, False]] * 4 + [[True, False]]
    assert steps.action[0].tolist() == [[0, 1], [0, 1], [0, 0], [0, 0], [0, 0]]
    assert steps.view.state[0].tolist() == [[t, 7] for t in range(5)]
    assert steps.view.observation[0, 3].tolist() == [[3.0] * 6, [0.0] * 6]
    assert steps.view.legal_actions[0, 0].tolist() == [[1, 0, 1, 1], [1, 1, 0, 0]]
    np.testing.assert_array_equal(steps.behaviour_log_prob[0, :, 0], -1.5)
    assert np.isnan(steps.behaviour_log_prob[0, :, 1]).all()
    assert (steps.policy_id == 4).all()
    assert data.episodes.cause.tolist() == ["truncated"]
    assert data.finals.state.tolist() == [[5, 7]]
    assert data.finals.alive.tolist() == [[True, False]]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_what_a_reset_or_an_exception_interrupts_is_cut(path, error):
    with pytest.raises(error), offmarl.record(Duel(), path) as recorder:
        play(recorder)
        recorder.reset()
        recorder.step(LONG)
        recorder.reset()  # cuts
        recorder.reset()  # nothing to cut
        recorder.step(LONG)
        recorder.step(LONG)
        raise error
    episodes = vault.open_vault(path).episodes
    assert episodes.cause.tolist() == ["truncated", "cut", "cut"]
    assert episodes.length.tolist() == [5, 1, 2]


def test_resuming_appends(path):
    with offmarl.record(Duel(), path) as recorder:
        play(recorder)
    with pytest.raises(VaultExistsError, match="resume=True"):
        offmarl.record(Duel(), path)
    with pytest.raises(OptionError, match="time_limit must be at least 1"):
        offmarl.record(Duel(), path, resume=True, time_limit=0)
    with offmarl.record(Duel(), path, resume=True) as recorder:
        play(recorder, knight=3)
    episodes = vault.open_vault(path).episodes
    assert episodes.length.tolist() == [5, 1]
    assert episodes.cause.tolist() == ["truncated", "terminated"]


def test_two_recorders_share_a_vault(path):
    with (
        offmarl.record(Duel(), path) as first,
        offmarl.record(Duel(), path, resume=True) as second,
    ):
        play(first)
        play(second, knight=3)
        play(first)
    assert sorted(vault.open_vault(path).episodes.length.tolist()) == [1, 5, 5]


def test_misuse_is_explained(path):
    with pytest.raises(ShapeError, match=r"does not have PettingZoo.s parallel API.*step"):
        offmarl.record(object(), path)
    for turns in (Turns(), OrderEnforcingWrapper(Turns())):
        with pytest.raises(ShapeError, match=r"AEC API.*aec_to_parallel"):
            offmarl.record(turns, path)
    assert not path.exists()
    with offmarl.record(Duel(), path) as recorder:
        with pytest.raises(OptionError, match="call reset before step"):
            recorder.step(LONG)
        play(recorder)
    xor = envs.to_pettingzoo("classic/xor:time_limit=2")
    with (
        pytest.raises(
            ShapeError, match=r"data of another environment, which differs from classic/xor.* in"
        ),
        offmarl.record(xor, path, resume=True) as recorder,
    ):
        recorder.reset()
    assert vault.open_vault(path).num_steps == 5


class Thrusters(Duel):
    """Takes vectors: the knight's has two entries in [-2, 2], the squire's one in [0, 1]."""

    def __init__(self):
        super().__init__()
        self._actions = {"knight": spaces.Box(-2, 2, (2,)), "squire": spaces.Box(0, 1, (1,))}

    def step(self, actions):
        return super().step(dict.fromkeys(actions, 0))

    def _see(self, agents):
        observations = super()._see(agents)
        for agent in {"squire"} & observations.keys():
            observations[agent]["action_mask"] = np.ones(1, np.int8)
        return observations

    def _tell(self, agents):
        return None


STILL = {"knight": np.zeros(2, np.float32), "squire": np.array([0.5])}


STEP = "step 1 of the episode: "


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        (Duel, {"knight": 99}, f"{STEP}the action of knight is 99, .* from 0 to 3"),
        (Duel, {"knight": 1.5}, "the action of knight is 1.5"),
        (Duel, {"squire": 1}, "the action of squire is 1, but must be from 10 to 11"),
        (Duel, {"knight": ...}, "knight is alive and has no action"),
        (Duel, {"squire": ...}, "squire is alive and has no action"),
        (Duel, {"king": 1}, "the actions are of 'king'"),
        (
            Thrusters,
            {"knight": [0, 99]},
            f"{STEP}the action of knight, entry 1, is 99.0, .* from -2 to 2",
        ),
        (Thrusters, {"squire": [np.nan]}, "action of squire, entry 0, is nan, .* from 0 to 1"),
        (Thrusters, {"knight": [0, 0, 0]}, r"knight is \[0, 0, 0\], but must be 2 numbers"),
        (Thrusters, {"squire": None}, "the action of squire, entry 0, is nan"),
    ],
)
def test_an_action_that_there_is_not_is_refused_before_the_step(path, kind, changes, message):
    still = STILL if kind is Thrusters else LONG
    actions = {agent: x for agent, x in (still | changes).items() if x is not ...}
    with offmarl.record(kind(), path) as recorder:
        recorder.reset()
        recorder.step(still)
        with pytest.raises(InvalidValueError, match=f"{message}.* The step was not taken"):
            recorder.step(actions)
        assert recorder.env.time == 1
        while recorder.running:  # nothing is lost
            recorder.step({agent: still[agent] for agent in recorder.env.agents})
    assert vault.open_vault(path).episodes.length.tolist() == [5]


def test_vectors_are_scaled_to_one_and_rounding_is_no_fault(path):
    with offmarl.record(Thrusters(), path) as recorder:
        recorder.reset()
        recorder.step(STILL)
        recorder.step(STILL | {"knight": np.nextafter(np.float32([2, -2]), np.float32([3, -3]))})
    steps = vault.open_vault(path)[:]
    assert steps.action[0].tolist() == [[[0, 0], [0, 0]], [[1, -1], [0, 0]]]


def test_an_episode_that_begins_with_what_cannot_be_is_not_begun(path):
    env = Duel()
    env.state = lambda: np.array([np.inf, 0])
    with offmarl.record(env, path) as recorder:
        with pytest.raises(InvalidValueError, match="step 0 of the episode is inf"):
            recorder.reset()
        with pytest.raises(OptionError, match="call reset"):
            recorder.step(LONG)


class Odd(Duel):
    """Changes what the second step returns, or the state after it."""

    def __init__(self, change):
        super().__init__()
        self._change = change

    def step(self, actions):
        outcome = [*super().step(actions)]
        if self.time == 2:
            self._change(self, outcome)
        return tuple(outcome)


def has(place, name, value=0):
    def change(_env, outcome):
        outcome[place] = {**outcome[place], name: value}

    return change


def masked(mask):
    return has(0, "squire", {"observation": 1, "action_mask": mask})


def without(place, name):
    return lambda _env, outcome: outcome[place].pop(name)


def state_is(state):
    return lambda env, _outcome: setattr(env, "state", lambda: state)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (has(0, "knight", np.full((2, 3), 0.5)), "the observation of knight has the value 0.5 at"),
        (has(0, "knight", np.full((2, 3), 300)), "value 300 .* does not fit into uint8"),
        (has(0, "knight", np.full((2, 3), np.nan)), "value nan .* does not fit into uint8"),
        (has(0, "knight", np.zeros((3, 2), np.uint8)), r"knight has shape \(3, 2\), .* \(2, 3\)"),
        (has(0, "knight", "a picture"), "knight is 'a picture'"),
        (has(0, "squire", {"observation": 3, "action_mask": [1, 1]}), "squire is 3, .* Discrete"),
        (masked([1, 1, 1]), r"the action mask of squire has shape \(3,\)"),
        (has(4, "knight", {"action_mask": [1, 0.5, 0, 0]}), "mask of knight has the value 0.5"),
        (without(0, "knight"), "knight is alive and has no observation"),
        (without(1, "knight"), "knight is alive and has no reward"),
        (has(1, "king"), "the rewards are of 'king'"),
        (has(2, "__all__"), "the terminations are of '__all__'"),
        (has(1, "knight", [1, 2]), r"the reward of knight has shape \(2,\)"),
        (has(1, "squire", np.nan), r"reward of agent 1 \(squire\) in row 0, step 1 .* is nan"),
        (has(3, "knight", "no"), "the truncation of knight is 'no'"),
        (lambda _env, outcome: outcome.pop(), "five dicts"),
        (lambda _env, outcome: outcome.__setitem__(1, 0.0), "the rewards are 0.0"),
        (state_is(np.array([np.inf, 0])), "the state, entry 0, in row 0, step 1 .* is inf"),
        (state_is(np.zeros(3)), f"{STEP}the "),
        (state_is(None), f"{STEP}the "),
        (state_is("here"), f"{STEP}the "),
    ],
)
def test_what_does_not_fit_ends_the_episode_before_the_step(path, change, message):
    with offmarl.record(Odd(change), path) as recorder:
        recorder.reset()
        recorder.step(LONG)
        with pytest.raises(InvalidValueError, match=message) as refused:
            recorder.step(LONG)
        assert "step 1 of the episode" in str(refused.value)
        with pytest.raises(OptionError, match="call reset"):
            recorder.step(LONG)
    data = vault.open_vault(path)
    assert (data.episodes.cause.tolist(), data.episodes.length.tolist()) == (["cut"], [1])
    assert data.finals.state.tolist() == [[1, 0]]


def test_whole_numbers_keep_their_bounds(path):
    env = Odd(has(0, "knight", np.full((2, 3), 200)))
    env._observations["knight"] = spaces.Box(0, 100, (2, 3), np.int32)
    with offmarl.record(env, path) as recorder:
        recorder.reset()
        recorder.step(LONG)
        with pytest.raises(InvalidValueError, match="the observation of knight is not in Box"):
            recorder.step(LONG)


def test_an_agent_that_is_truncated_alone_leaves_and_the_others_go_on(path):
    class Retired(Duel):
        def step(self, actions):
            observations, rewards, terminations, truncations, infos = super().step(actions)
            if self.time == 2:  # instead of falling
                terminations["squire"], truncations["squire"] = False, True
            return observations, rewards, terminations, truncations, infos

    with offmarl.record(Retired(), path) as recorder:
        play(recorder)
    steps = vault.open_vault(path)[:]
    np.testing.assert_array_equal(steps.reward[0], [[1, 2], [2, 3], [3, 0], [4, 0], [5, 0]])
    assert not steps.terminated.any()
    assert steps.truncated[0].tolist() == [[False, False]] + [[False, True]] * 3 + [[True, True]]
    assert steps.view.alive[0].tolist() == [[True, True]] * 2 + [[True, False]] * 3


def test_an_agent_that_joins_later_has_not_terminated_when_the_episode_is_cut(path):
    class Joined(Duel):
        def reset(self, seed=None, options=None):
            observations, infos = super().reset(seed, options)
            self.agents = ["knight"]
            return observations, infos

        def step(self, actions):
            _, _, _, _, infos = super().step(actions)
            both, cut = list(self.possible_agents), self.time == 5
            self.agents = [] if cut else both if self.time >= 2 else ["knight"]
            flags = dict.fromkeys(both, False), dict.fromkeys(both, cut)
            return self._see(both), dict.fromkeys(both, 1.0), *flags, infos

    with offmarl.record(Joined(), path) as recorder:
        play(recorder)
    steps = vault.open_vault(path)[:]
    assert steps.view.alive[0].tolist() == [[True, False]] * 2 + [[True, True]] * 3
    assert steps.terminated[0].tolist() == [[False, True]] + [[False, False]] * 4
    assert steps.truncated[0].tolist() == [[False, False]] * 4 + [[True, True]]


class Lingering(Duel):
    """Its agents stay in ``agents`` and only have flags, at different steps."""

    def __init__(self, terminated, truncated, infos=None):
        super().__init__()
        self._flags, self._infos = (terminated, truncated), infos

    def step(self, actions):
        self.time += 1
        agents = self.possible_agents
        flags = [{a: self.time == when.get(a) for a in agents} for when in self._flags]
        infos = self._infos if self._infos and self.time == 4 else {}
        return self._see(agents), dict.fromkeys(agents, 1.0), *flags, infos

    def state(self):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("terminated", "truncated"),
    [
        ({"knight": 4, "squire": 4}, {}),
        ({"knight": 2, "squire": 4}, {}),
        ({"knight": 4, "squire": 4}, {"knight": 4, "squire": 4}),
    ],
)
def test_flags_count_although_the_agents_stay(path, terminated, truncated):
    with offmarl.record(Lingering(terminated, truncated), path) as recorder:
        for _ in range(2):
            recorder.reset()
            while recorder.running:
                recorder.step(LONG)
            with pytest.raises(OptionError, match="An episode ends when each agent"):
                recorder.step(LONG)
    data = vault.open_vault(path)
    assert data.episodes.length.tolist() == [4, 4]
    assert data.episodes.cause.tolist() == ["terminated"] * 2
    assert not data.finals.alive.any()
    steps = data[:]
    assert not (steps.terminated & steps.truncated).any()
    assert steps.terminated[0, 3].all()


LAST = {
    "knight": np.full((2, 3), 77, np.uint8),
    "squire": {"observation": 2, "action_mask": np.array([0, 1], np.int8)},
}


def play_lingering(path, infos, kind=Lingering):
    """Record an episode of an environment that begins the next one at the same step."""
    with offmarl.record(kind({}, {"knight": 4, "squire": 4}, infos), path) as recorder:
        recorder.reset()
        while recorder.running:
            recorder.step(LONG)
    return vault.open_vault(path)


@pytest.mark.parametrize(("name", "by_agent"), [("final_obs", True), ("final_observation", False)])
def test_an_environment_that_has_begun_the_next_episode_tells_how_the_last_one_ended(
    path, name, by_agent
):
    infos = {a: {name: x} for a, x in LAST.items()} if by_agent else {name: LAST}
    final = play_lingering(path, infos).finals
    assert (final.observation[0, 0] == 77).all()
    assert final.legal_actions[0, 1, :2].tolist() == [False, True]


class WithState(Lingering):
    def state(self):
        return np.zeros(2)


@pytest.mark.parametrize(("kind", "told_of"), [(Lingering, ["knight"]), (WithState, [*LAST])])
def test_a_last_view_of_which_a_part_is_unknown_is_none(path, kind, told_of):
    infos = {agent: {"final_obs": LAST[agent]} for agent in told_of}
    assert play_lingering(path, infos, kind).episodes.final.tolist() == [-1]


def test_agents_may_have_policies_of_their_own(path):
    with offmarl.record(Duel(), path) as recorder:
        recorder.reset()
        recorder.step(LONG, policy_id={"knight": 3, "squire": 5})
        recorder.step(LONG, log_prob={"knight": -0.5}, policy_id={"knight": 4})
        with pytest.raises(InvalidValueError, match=r"log-probability of agent 0 \(kn") as refused:
            recorder.step({"knight": 0}, log_prob={"knight": 0.5})
        assert "of the record" not in str(refused.value)  # an evaluation has none
        recorder.reset()
        with pytest.raises(InvalidValueError, match="the log_probs are of 'page'"):
            recorder.step(LONG, log_prob={"page": -1.0})
    assert vault.open_vault(path)[:].policy_id.tolist() == [[[3, 5], [4, -1]]]


def test_an_environment_of_ours_is_recorded_as_it_is_by_jax(tmp_path, monkeypatch, capsys):
    env = envs.to_pettingzoo("classic/bridge:time_limit=7")
    assert offmarl.record_episodes(lambda: env, tmp_path / "a.vlt", 3, seed=5) == 3
    data = vault.open_vault(tmp_path / "a.vlt")
    spec = env.env.spec
    assert data.spec.difference(spec) == ""
    assert data.spec.name == spec.name
    assert data.episodes.length.tolist() == [7, 7, 7]
    np.testing.assert_allclose(data[:].behaviour_log_prob, -np.log(5), rtol=1e-6)
    assert offmarl.record_episodes(lambda: env, tmp_path / "a.vlt", 3, seed=5) == 0
    monkeypatch.delenv("OFFMARL_QUIET")
    assert offmarl.record_episodes(lambda: env, tmp_path / "a.vlt", 4, seed=5) == 1
    assert "4/4" in capsys.readouterr().err  # progress counts those that were there
    with pytest.raises(RunError, match="'seed': 5"):
        offmarl.record_episodes(lambda: env, tmp_path / "a.vlt", 4, seed=6)
    with pytest.raises(OptionError, match="episodes must be at least 1"):
        offmarl.record_episodes(lambda: env, tmp_path / "a.vlt", 0)


def seeds_in(path):
    """Return which seeds the episodes of a vault were played with, as 32-bit floats."""
    data = vault.open_vault(path)
    return sorted(int(data[start : start + 1].view.state[0, 0, 1]) for start in data.episodes.start)


def seeds_of(seed, episodes):
    """Return the seeds that the episodes of a recording have."""
    sequences = (np.random.SeedSequence(seed, spawn_key=(i,)) for i in range(episodes))
    return sorted(int(np.float32(sequence.generate_state(1)[0] >> 1)) for sequence in sequences)


def test_neighbouring_seeds_share_no_episodes(path):
    seeds = []
    for seed in (0, 1, 2, 2**32):
        out = path.with_name(f"{seed}.vlt")
        assert offmarl.record_episodes(Duel, out, 24, seed=seed) == 24
        assert seeds_in(out) == seeds_of(seed, 24)
        seeds += seeds_in(out)
    assert len({*seeds}) == 4 * 24
    with pytest.raises(OptionError, match="seed must be at least 0, not -1"):
        offmarl.record_episodes(Duel, path, 1, seed=-1)


def test_the_policy_draws_from_another_seed_than_the_environment(path):
    class Listening:
        def __init__(self, env):
            self.env, self.seeds = env, seeds

        def seed(self, number):
            self.seeds.append(number)

        def __call__(self, *_):
            return {agent: {"knight": 3, "squire": 10}[agent] for agent in self.env.agents}

    seeds = []
    offmarl.record_episodes(Duel, path, 5, Listening, seed=3)
    assert len({*map(np.float32, seeds), *seeds_in(path)}) == 10
    assert all(0 <= number < 2**31 for number in seeds)


@pytest.mark.parametrize("limit", [1, 3])
def test_an_episode_that_outlasts_its_time_limit_is_refused(path, limit):
    with (
        offmarl.record(Duel(), path, time_limit=limit) as recorder,
        pytest.raises(InvalidValueError, match=f"not ended after {limit} steps, its time_limit"),
    ):
        play(recorder)
    assert vault.open_vault(path).episodes.length.tolist() == [limit]

    def make():
        env = make_lingering()
        env.close = lambda: closed.append(env)
        return env

    closed = []
    with pytest.raises(InvalidValueError, match=f"not ended after {limit} steps, its time_limit"):
        offmarl.record_episodes(make, path.with_name("b.vlt"), 2, time_limit=limit)
    assert closed  # its processes and windows do not outlive the error


def steps_in(path):
    with contextlib.suppress(VaultNotFoundError, VaultFormatError):
        return vault.open_vault(path).num_steps
    return 0


class SlowDuel(Duel):
    def step(self, actions):
        time.sleep(0.01)
        return super().step(actions)


@pytest.mark.slow
@pytest.mark.parametrize(
    "how", [pytest.param(signal.SIGINT, marks=pytest.mark.nightly), signal.SIGKILL]
)
def test_a_recording_in_processes_goes_on_after_it_was_stopped(path, how):
    code = (
        "import signal, sys, offmarl, offmarl.programs.recording.python\n"
        # What a shell starts in the background ignores the signal, and so does all it starts.
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from tests.programs.test_python import SlowDuel\n"
        # Some of it is on the disk long before the end.
        "offmarl.programs.recording.python._FLUSH_SECONDS = 0.5\n"
        "if __name__ == '__main__':\n"
        "    offmarl.record_episodes(SlowDuel, sys.argv[1], 600, processes=2)"
    )
    script = path.parent / "script.py"
    script.write_text(code)
    command = [sys.executable, str(script), str(path)]
    running = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    while not steps_in(path):
        assert running.poll() is None
        time.sleep(0.05)
    os.killpg(running.pid, how)
    running.wait(timeout=60)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(running.pid, signal.SIGKILL)
    before = len(vault.open_vault(path).episodes.length)
    assert before < 600
    assert "cut" not in vault.open_vault(path).episodes.cause
    assert offmarl.record_episodes(Duel, path, 600, processes=2) == 600 - before
    assert seeds_in(path) == seeds_of(0, 600)


def make_lingering():
    return Lingering({"knight": 4, "squire": 4}, {})


def test_episodes_whose_agents_stay_are_played_to_their_end(path):
    assert offmarl.record_episodes(make_lingering, path, episodes=3) == 3
    assert vault.open_vault(path).episodes.cause.tolist() == ["terminated"] * 3


def test_a_flag_is_kept_where_the_recording_ends(path):
    with offmarl.record(Lingering({"knight": 2}, {}), path) as recorder:
        recorder.reset()
        for _ in range(4):
            recorder.step(LONG)
    steps = vault.open_vault(path)[:]
    assert steps.terminated[0, -1].tolist() == [True, False]
    assert steps.truncated[0, -1].tolist() == [False, True]
