"""Values of policies from recorded episodes, where the truth is known."""

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import norm

import offmarl
from offmarl import envs, vault
from offmarl.distributions import ClippedGaussian, TanhGaussian
from offmarl.envs.base import restart, transition
from offmarl.errors import OptionError, ShapeError, UnknownNameError
from offmarl.ope import Estimates, Options, estimate, estimation, fitted, history
from offmarl.ope.history import follow
from offmarl.ope.tabular import play, read_table
from offmarl.programs import record_policy
from offmarl.replay import Windows
from offmarl.replay.sampling import are_whole
from offmarl.statistics import Estimate
from offmarl.terminal import quiet
from offmarl.testing import experience
from offmarl.types import (
    Continuous,
    Discrete,
    EnvSpec,
    FinalObservations,
    Policy,
    Sequence,
    View,
)
from tests.rollouts import sequence, view_of
from tests.vault.experience import written

GAMMA = 0.8
TWO = EnvSpec("two", 2, 1, 1, Discrete(2))
FAST = Options(
    gamma=GAMMA, updates=500, batch_size=64, hidden=16, learning_rate=1e-2, tau=0.05, members=3
)


class Loaded(NamedTuple):
    policy: Policy
    params: object
    spec: EnvSpec


def coin(spec, chance):
    """Each agent takes action 1 with some probability, whatever it observes."""

    def log_probs(params):
        return jnp.log(jnp.array([1 - params, params]))

    def act(params, carry, observation, legal_actions, key):
        action = jax.random.bernoulli(key, params, (spec.num_agents,)).astype(jnp.int32)
        return action, log_probs(params)[action], carry

    def log_prob(params, carry, observation, legal_actions, action):
        return log_probs(params)[action], carry

    return Loaded(Policy(tuple, act, log_prob), jnp.float32(chance), spec)


@pytest.fixture
def observed(random_data):
    """The data of twelve episodes, and what a policy would do in them."""
    options = replace(FAST, episodes=12)
    dataset = vault.open_vault(random_data("probe/two-step"))
    data = estimation.RecordedData.read(dataset, options)
    slots = data.mask.shape[1] + 1
    action = np.zeros((12, slots, 1, dataset.spec.num_agents), np.int32)
    log_prob = np.zeros(data.behaviour_log_prob.shape)
    return data, history.Followed(log_prob, action)


# Flags of both agents at the end of an episode, and whether nothing follows: by itself, and where
# truncations end values.
ENDS = [
    ((False, False), (False, False), False, False),
    ((True, True), (False, False), True, True),
    ((True, False), (False, False), False, False),
    ((False, False), (True, True), False, True),
    ((False, False), (False, True), False, False),
    ((True, False), (False, True), False, True),
]


def test_what_a_critic_bootstraps_from_by_hand():
    """Twelve steps: the six of `ENDS` where truncations do not end a value, and where they do."""
    flags = [np.array([row[i] for row in ENDS] * 2)[:, None] for i in (0, 1)]
    reward = np.arange(24.0).reshape(12, 1, 2)
    known, mask = np.arange(12) % 3 > 0, np.arange(12) != 5
    view = View(*(np.arange(24).reshape(12, 2) for _ in View._fields))
    fields = dict.fromkeys(Sequence._fields) | {
        "view": view,
        "action": np.arange(12)[:, None],
        "reward": reward,
        "terminated": flags[0],
        "truncated": flags[1],
        "mask": mask[:, None],
        "next_known": known[:, None],
        "time": np.array([[3, 4]] * 12),
        "episode": np.repeat([[7, 7], [9, 9]], 6, 0),
        "return_to_go": 10 * reward,
    }
    windows = jax.tree.map(jnp.asarray, Sequence(**fields))
    place = jnp.zeros(10, int).at[9].set(1)
    # The slot of an action says which it is: 100 times the policy, and the slot.
    actions = (100 * jnp.arange(2)[:, None] + jnp.arange(40)).reshape(2, 40, 1, 1)
    data = fitted.Transitions(
        SimpleNamespace(sample=lambda key: windows),
        place,
        first=jnp.array([10, 30]),
        actions=actions,
        complete=jnp.array([False, True]),
        weights=None,
        scale=jnp.float32(2.0),
        longest=jnp.float32(8.0),
        bounds=jnp.arange(10.0).reshape(2, 5),
    )
    batch = fitted.draw_batch(data, Options(gamma=0.5), jax.random.key(0))
    over = np.array([row[2] for row in ENDS] + [row[3] for row in ENDS])
    np.testing.assert_allclose(batch.discount, 0.5 * ~over)
    np.testing.assert_array_equal(batch.known, mask & (known | over))
    np.testing.assert_array_equal(batch.counts, mask & (np.arange(12) >= 6))
    np.testing.assert_array_equal(batch.episode, np.arange(12) // 6)
    np.testing.assert_array_equal(batch.bounds, [[4] * 12, [9] * 12])
    np.testing.assert_allclose(batch.reward, reward[:, 0].mean(-1) / 2)
    np.testing.assert_allclose(batch.to_go, 10 * reward[:, 0].mean(-1) / 2)
    np.testing.assert_allclose([batch.time_tm1, batch.time_t], [[3 / 8] * 12, [4 / 8] * 12])
    slot = np.where(np.arange(12) < 6, 14, 34)
    np.testing.assert_array_equal(batch.next_action[..., 0], [slot, 100 + slot])
    np.testing.assert_array_equal(batch.view_tm1.alive, view.alive[:, 0])
    np.testing.assert_array_equal(batch.view_t.alive, view.alive[:, 1])
    np.testing.assert_array_equal(batch.action, np.arange(12))


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A vault with episodes that terminate, that are truncated, and one that is not complete."""
    path = tmp_path_factory.mktemp("ended") / "data.vlt"
    ends = np.zeros((1, 9), bool)
    ends[0, [1, 4, 7]] = True
    steps, finals = experience(TWO, 1, 9)
    by_limit = ends[..., None] & (np.arange(9) == 4)[:, None]
    steps = steps._replace(
        last=ends,
        terminated=np.repeat(ends[..., None] & ~by_limit, 2, -1),
        truncated=np.repeat(by_limit, 2, -1),
        reward=np.repeat(np.arange(1.0, 10.0, dtype=np.float32)[None, :, None], 2, -1),
    )
    row, time = np.nonzero(ends)
    finals = FinalObservations(row, time, jax.tree.map(lambda x: x[0, [1, 4, 7]], steps.view))
    return written(path, (steps, finals), spec=TWO)


def test_which_episodes_are_complete_and_which_are_truncated(ended):
    """Of 2, 3, 3 and 1 steps; the second is truncated, and the last one is cut off."""
    data = estimation.RecordedData.read(ended, Options(members=2))
    np.testing.assert_array_equal(data.lengths, [2, 3, 3, 1])
    np.testing.assert_array_equal(data.complete, [True, True, True, False])
    np.testing.assert_array_equal(data.truncated, [False, True, False, False])
    np.testing.assert_array_equal(data.mask, np.arange(3) < [[2], [3], [3], [1]])
    np.testing.assert_allclose(data.reward, [[1, 2, 0], [3, 4, 5], [6, 7, 8], [9, 0, 0]])
    half = data._replace(options=Options(gamma=0.5))
    np.testing.assert_allclose(half.discounted[data.complete], [1 + 1, 3 + 2 + 1.25, 6 + 3.5 + 2])
    assert half.behaviour.value == pytest.approx((2 + 6.25 + 11.5) / 3)


def test_data_without_an_episode(tmp_path):
    vault.create(tmp_path / "data.vlt", TWO, rows=1).close()
    with pytest.raises(ShapeError, match="holds no episode"):
        estimation.RecordedData.read(vault.open_vault(tmp_path / "data.vlt"), Options())


def test_what_critics_learn_from_by_hand(ended):
    options = Options(gamma=0.5, members=3, updates=1)
    data = estimation.RecordedData.read(ended, options)
    action = 100 * np.arange(4)[:, None, None, None] + np.arange(4)[:, None, None]
    action = np.broadcast_to(action, (4, 4, 1, 2))
    actions = [action, action + 1000]
    transitions = estimation.transitions_for(data, actions)
    np.testing.assert_array_equal(transitions.complete, data.complete)
    assert transitions.longest == 3 and len(data.resamples) == 3
    scale = np.sqrt((3**2 + 12**2 + 21**2) / 3)  # of the returns of complete episodes
    np.testing.assert_allclose(transitions.scale, scale, rtol=1e-6)
    np.testing.assert_allclose(transitions.bounds, data.value_bounds() / scale, rtol=1e-6)
    slots = [0, 1, 2, 100, 101, 102, 103, 200, 201, 202, 203, 300, 301]
    np.testing.assert_array_equal(transitions.actions[:, :, 0, 1], [slots, np.add(slots, 1000)])
    np.testing.assert_array_equal(transitions.first, [0, 3, 7, 11])
    np.testing.assert_array_equal(transitions.place, [0, 1, 2, 3])
    weights = np.array([[1] * 4, *data.resamples])
    np.testing.assert_array_equal(transitions.weights, [weights, weights * [1, 1, 1, 0]])
    nothing = data._replace(reward=0 * data.reward)
    unscaled = estimation.transitions_for(nothing, actions)
    assert unscaled.scale == 1 and not unscaled.bounds.any()


def test_only_complete_episodes_are_weighed(ended):
    """The policy likes the actions of the last episode best, which is cut off."""
    options = Options(gamma=0.5, members=2)
    data = estimation.RecordedData.read(ended, options)
    more = np.log([[1.0], [2.0], [1.0], [1e6]]) * (np.arange(3) == 0)
    log_prob = data.behaviour_log_prob + more[..., None] * (np.arange(2) == 1)
    followed = history.Followed(log_prob * data.mask[..., None], np.zeros((4, 4, 1, 2)))
    gains = np.array([[1.0, 1, 0], [3, 1, 1], [1, 1, 1], [9, 0, 0]])
    size, result = estimation.by_ratios(True, gains, followed, data)
    assert size == pytest.approx(4**2 / (1 + 4 + 1), rel=1e-5)
    mean = (np.array([[1, 2, 0], [3, 4, 5], [6, 7, 8]]) * [[1], [2], [1]]).sum(0) / 4
    value, resampled = result["wis"]
    assert value == pytest.approx(mean @ [1, 0.5, 0.25], rel=1e-5)
    assert resampled.min() <= value <= resampled.max() and resampled.shape == (2000,)
    gained = data.behaviour.value + (2 - 1) * 3 / 3  # by one agent of the second episode
    assert result["local"][0] == pytest.approx(gained, rel=1e-5)
    none = np.broadcast_to(data.complete[:, None, None], log_prob.shape)
    nothing = followed._replace(log_prob=np.where(none, -np.inf, 0.0))
    assert estimation.by_ratios(True, None, nothing, data) == (0, {})


def test_which_methods_data_refuse(ended):
    """A method by ratios needs probabilities, a choice, and a complete episode."""
    data = estimation.RecordedData.read(ended, Options())
    assert not data.refusals()
    cut = data._replace(complete=np.zeros(4, bool), truncated=np.zeros(4, bool))
    assert {*cut.refusals()} == {"local", "wis"}
    assert "no episode of the data is complete" in cut.refusals()["wis"]
    zero = np.zeros_like(data.behaviour_log_prob)
    sure = data._replace(behaviour_log_prob=zero, certain=data.mask)
    assert "were deterministic" in sure.refusals()["local"]
    assert not sure._replace(certain=data.mask & False).refusals()  # no choice
    partial = np.where(np.arange(3)[:, None] == 0, data.behaviour_log_prob, 0.0)
    assert not sure._replace(behaviour_log_prob=partial).refusals()


def test_values_are_bounded_by_what_the_rewards_allow(ended):
    """Rewards of 1 to 9. Nothing, worth 0, follows an end unless all end at one limit."""
    data = estimation.RecordedData.read(ended, Options())
    full, half = Options(), Options(gamma=0.5)

    def bounds(data, options):
        return data._replace(options=options).value_bounds()

    np.testing.assert_allclose(bounds(data, full), [[0] * 4, [27, 18, 9, 0]])
    np.testing.assert_allclose(bounds(data, half), [[0] * 4, [15.75, 13.5, 9, 0]])
    complete = data._replace(complete=np.ones(4, bool), truncated=np.ones(4, bool))
    np.testing.assert_allclose(bounds(complete, full), [[0] * 4, [27, 18, 9, 0]])
    same = complete._replace(lengths=np.full(4, 3))
    np.testing.assert_allclose(bounds(same, full), [[3, 2, 1, 0], [27, 18, 9, 0]])
    open_ended = same._replace(complete=np.arange(4) > 0, truncated=np.arange(4) > 0)
    np.testing.assert_allclose(bounds(open_ended, full)[0], [3, 2, 1, 0])  # one is cut off
    short = data._replace(truncated=np.arange(4) == 0)  # not one of the longest
    assert data.is_limited and not short.is_limited
    np.testing.assert_allclose(bounds(short, full), [[0] * 4, [np.inf] * 4])
    np.testing.assert_allclose(bounds(short, half), [[0] * 4, [18] * 4])


def test_a_followed_policy_is_told_who_is_done():
    """Its actions count the agents that were done, by either cause, after each step.

    What it remembers besides, in tens, is of the recorded actions, and not of its own.
    """

    def act(params, carry, observation, legal_actions, key):
        return carry % 10, jnp.zeros(2), carry + 100

    def log_prob(params, carry, observation, legal_actions, action):
        return -1.0 - carry, carry + 10

    def after_step(carry, reward, done):
        return carry + done

    policy = Policy(lambda: jnp.zeros(2, jnp.int32), act, log_prob, after_step)
    alive = jnp.ones((1, 5, 2), bool).at[0, 1, 1].set(False)
    legal, no = jnp.ones((1, 5, 2, 9), bool), jnp.zeros((1, 4, 2), bool)
    episodes = sequence(
        jnp.zeros((1, 4, 2), jnp.int32),
        TWO,
        legal_actions=legal,
        alive=alive,
        terminated=no.at[0, 0, 1].set(True),
        truncated=no.at[0, 1, 0].set(True),
        mask=jnp.array([[True, True, True, False]]),
    )
    result = follow(policy, True, 1, (), episodes, jax.random.key(0))
    sure = follow(policy, False, 1, (), episodes, jax.random.key(0))
    # The data have zeros only.
    np.testing.assert_array_equal(sure.log_prob.sum(-1), [[0, 0, -np.inf, 0]])
    other = episodes._replace(action=jnp.zeros((1, 4, 2, 1)))
    exact = policy._replace(act=lambda _params, carry, *_: (jnp.zeros((2, 1)), jnp.zeros(2), carry))
    unknown = follow(exact, False, 1, (), other, jax.random.key(0)).log_prob
    np.testing.assert_array_equal(unknown.sum(-1), [[np.nan, np.nan, np.nan, 0]])
    counts = [[0, 0], [0, 1], [1, 1], [1, 1], [1, 1]]
    np.testing.assert_array_equal(result.action[0, :, 0], counts)
    # The second agent is dead in the second step, and the fourth does not exist.
    np.testing.assert_allclose(result.log_prob.sum(-1), [[-2, -11, -44, 0]])


def test_each_policy_has_its_weights_of_episodes(monkeypatch):
    """Two steps with rewards 1 and 5; the second policy's critic learns from the first alone."""
    critic = fitted.Critic(lambda key: 0.0, lambda params, view, time, action: jnp.full(2, params))
    blank = dict.fromkeys(fitted.Batch._fields, jnp.zeros(2))
    part = {"reward": jnp.array([1.0, 5.0]), "episode": jnp.arange(2), "bounds": jnp.zeros((2, 2))}
    truths = dict.fromkeys(("known", "counts"), jnp.ones(2, bool))
    batch = fitted.Batch(**(blank | part | truths | {"next_action": jnp.zeros((2, 2, 1))}))
    monkeypatch.setattr(fitted, "draw_batch", lambda *_: batch)
    data = dict.fromkeys(fitted.Transitions._fields, jnp.zeros(2))
    data["weights"] = jnp.array([[[1.0, 1.0]], [[1.0, 0.0]]])
    options = Options(updates=400, learning_rate=0.1)
    values = fitted.fit(critic, fitted.Transitions(**data), options)
    np.testing.assert_allclose(values, [[3.0], [1.0]], atol=0.01)


def test_critics_see_the_entries_of_actions_that_agents_have():
    spec = EnvSpec("", 2, 1, 1, Continuous(2), action_sizes=(2, 1))
    critic = fitted.make_critic(spec, 4)
    legal = jnp.array([[True, True], [True, False]])
    of_action = partial(
        critic.values,
        critic.init(jax.random.key(0)),
        view_of(spec, legal_actions=legal),
        jnp.zeros(()),
    )
    actions = jnp.array([[[0.5, 0.5], [0.5, x]] for x in (0.0, 0.9)])
    values = [of_action(action) for action in (*actions, -actions[0])]
    assert values[0] == values[1] != values[2]


def test_targets_bootstrap_from_bounded_values():
    """A critic whose value is its parameter; the target's has diverged."""
    critic = fitted.Critic(None, lambda params, view, time, action: jnp.full(len(time), params))
    blank = dict.fromkeys(fitted.Batch._fields)
    ones = dict.fromkeys(("time_tm1", "time_t", "reward", "to_go"), jnp.ones(3))
    truths = dict.fromkeys(("known", "counts"), jnp.ones(3, bool))
    bounds = {"bounds": jnp.array([[-3.0] * 3, [5.0, 4.0, 5.0]])}
    fields = bounds | {"discount": jnp.array([0.5, 0.5, 0.0]), **truths}
    batch = fitted.Batch(**(blank | ones | fields))
    loss = fitted.critic_loss(critic, batch, jnp.ones(3), jnp.zeros(()), False, 0.0, 1e6)
    assert loss == pytest.approx(np.mean(np.square([1 + 2.5, 1 + 2.0, 1])))
    other = fitted.critic_loss(critic, batch, jnp.ones(3), jnp.zeros(()), False, 0.5, 1e6)
    assert other == pytest.approx(np.mean(np.square([0.5 - 3.5, 0.5 - 3.0, 0.5 - 1])))
    low = fitted.critic_loss(critic, batch, jnp.ones(3), jnp.zeros(()), False, 0.0, -1e6)
    assert low == pytest.approx(np.mean(np.square([1 - 1.5, 1 - 1.5, 1])))


@pytest.mark.slow
def test_two_steps_by_all_methods(random_data):
    """An agent earns .5 at once or 1 in the second step: .5 (1 - p) + γ p."""
    data = vault.open_vault(random_data("probe/two-step"))  # 1,024 episodes
    policies = {str(chance): coin(data.spec, chance) for chance in (0.3, 0.8)}
    result = estimate(policies, data, FAST, methods=estimation.METHODS)
    assert [*result.values] == ["tabular", "local", "fqe", "wis"] and result.episodes == len(data)
    for method, values in result.values.items():
        for chance in (0.3, 0.8):
            estimated, truth = values[str(chance)], 0.5 * (1 - chance) + GAMMA * chance
            assert estimated.value == pytest.approx(truth, abs=0.03), (method, chance)
            assert estimated.low < estimated.value < estimated.high
    assert result.effective["0.3"] > result.effective["0.8"] > 100
    assert result.data.value == pytest.approx(0.5 * 0.5 + GAMMA * 0.5, abs=0.02)
    assert result.data.low < result.data.value < result.data.high
    assert result.check == pytest.approx(result.data.value, abs=0.03)
    for method in result.values:
        assert result.ranks(method) == {"0.3": (2, 2), "0.8": (1, 1)}


def greedy(spec, action):
    def act(params, carry, observation, legal_actions, key):
        return jnp.full(2, params, jnp.int32), jnp.zeros(2), carry

    return Loaded(Policy(tuple, act, draws=lambda _: False), jnp.int32(action), spec)


@pytest.mark.slow
def test_a_greedy_policy_weighs_the_episodes_that_it_would_play(random_data):
    """(1, 1) earns 1 in the match probe, and a quarter of the data is that."""
    data = vault.open_vault(random_data("probe/match"))
    result = estimate({"one": greedy(data.spec, 1)}, data, FAST, methods=("wis",))
    assert result.values["wis"]["one"] == (1.0, 1.0, 1.0)
    equal = sum(bool((episode.transition.action == 1).all()) for episode in data)
    assert result.effective["one"] == pytest.approx(equal)


def drawing(spec, distribution, mean, std):
    """The agent draws from a distribution that does not depend on what it observes."""

    def of(params):
        return distribution(
            *jnp.broadcast_to(params[:, None, None], (2, 1, 1)), jnp.ones((1, 1), bool)
        )

    def act(params, carry, observation, legal_actions, key):
        return *of(params).sample_and_log_prob(key), carry

    def log_prob(params, carry, observation, legal_actions, action):
        return of(params).log_prob(action), carry

    return Loaded(Policy(tuple, act, log_prob), jnp.array([mean, std]), spec)


@dataclass(frozen=True)
class Below:
    """One step, which earns 1 for an action below 0.9."""

    spec = EnvSpec("below", 1, 1, 1, Continuous(1), time_limit=1)

    def view(self):
        return view_of(self.spec, 1.0)

    def reset(self, key):
        return (), restart(self.view())

    def step(self, key, state, action):
        over = jnp.ones(1, bool)
        return state, transition(self.view(), jnp.float32(action[:, 0] < 0.9), over, ~over)


@pytest.mark.slow
def test_actions_at_the_ends_have_probability_0_for_a_policy_that_does_not_clip(tmp_path):
    """42% of the data lie at 1, where the policy has a density of 115, but no probability."""
    env = Below()
    clipped = drawing(env.spec, ClippedGaussian, 0.9, 0.5)
    record_policy(
        env, clipped.policy, clipped.params, tmp_path / "data.vlt", steps=4096, num_envs=64
    )
    data = vault.open_vault(tmp_path / "data.vlt")
    policies = {
        "squashed": drawing(env.spec, TanhGaussian, 2.0, 1.5),
        "clipped": drawing(env.spec, ClippedGaussian, 0.7, 0.5),
    }
    result = estimate(policies, data, FAST, methods=("wis",))
    squashed, clipped = result.values["wis"].values()
    assert squashed.value == pytest.approx(norm.cdf((np.arctanh(0.9) - 2) / 1.5), abs=0.1)
    assert squashed.low < 0.362 < squashed.high
    assert clipped.value == pytest.approx(norm.cdf((0.9 - 0.7) / 0.5), abs=0.03)
    assert result.effective["clipped"] > 2000 > result.effective["squashed"]
    (note,) = result.notes
    assert note.startswith("squashed never draw") and "4" in note


def test_a_certain_action_inside_the_interval_has_no_ratio(observed):
    data, followed = observed
    actions = np.full((*followed.action.shape, 1), 1.0)
    steps = np.arange(followed.log_prob.size).reshape(followed.log_prob.shape)
    mixed = data._replace(certain_inside=steps == 0, at_ends=steps == 1)
    reaching = estimation.without_impossible(followed._replace(action=actions), mixed).log_prob
    assert (reaching == -np.inf).sum() == 1 and reaching.flat[0] == -np.inf
    short = followed._replace(action=0.9 * actions)
    inside = estimation.without_impossible(short, mixed).log_prob
    assert (inside == -np.inf).sum() == 2
    unknown = followed._replace(log_prob=np.full(followed.log_prob.shape, np.nan), action=actions)
    assert np.isnan(estimation.without_impossible(unknown, mixed).log_prob).all()


def test_a_method_that_there_is_not_is_named(deterministic):
    with pytest.raises(UnknownNameError, match="no method named"):
        estimate({"one": greedy(deterministic.spec, 1)}, deterministic, FAST, methods=("fqi",))


@pytest.mark.parametrize(("action", "values"), [(1, {"one": (1.0, 1.0, 1.0)}), (0, {})])
def test_a_policy_plays_in_the_recorded_steps(deterministic, action, values):
    """(1, 1) earns 1 in the match probe, and all of the data is that."""
    policies = {"one": greedy(deterministic.spec, action)}
    result = estimate(policies, deterministic, FAST, methods=("tabular",))
    assert result.values == {"tabular": values}
    assert result.notes == (
        "tabular has no value of 1 policies: they do what was not recorded.",
    ) * (not values)


@pytest.mark.parametrize(
    ("observation", "action", "outcomes"),
    [("same", 0, {1.0, 2.0}), ("same", 1, {3.0}), ("new", 0, set())],
)
def test_what_a_table_draws(tmp_path, observation, action, outcomes):
    """Episodes of one step: action 0 earned 1 and 2, and action 1 earned 3."""
    number = 3
    data = offmarl.from_arrays(
        tmp_path / "a.vlt",
        observations=np.zeros((number, 2, 1)),
        actions=np.repeat([[0], [0], [1]], 2, 1),
        rewards=np.repeat([[1.0], [2.0], [3.0]], 2, 1),
        terminals=np.ones(number, bool),
    )
    table = read_table(history.Histories(data, np.arange(number)), 50, 0)
    policy = greedy(TWO, action)
    if observation == "new":
        table = table._replace(view=table.view + 1)
    returns, missing, goes_on = play(policy.policy, 1, policy.params, table, 1.0, jax.random.key(0))
    assert {*np.unique(returns[1:])} == (outcomes or {0.0})
    assert missing.all() == missing.any() == (not outcomes) and not goes_on.any()


@pytest.mark.parametrize("complete", [True, False])
def test_an_episode_that_was_truncated_early_does_not_go_on_in_the_table(tmp_path, complete):
    """Of 1 and of 3 steps, which all earn 1: only the longest may have met the time limit.

    Where the recording was cut, it goes on.
    """
    data = offmarl.from_arrays(
        tmp_path / "a.vlt",
        observations=np.zeros((4, 2, 1)),
        actions=np.repeat([[1], [0], [0], [0]], 2, 1),
        rewards=np.ones((4, 2)),
        terminals=np.zeros(4, bool),
        truncations=np.array([True, False, False, True]),
        next_observations=np.zeros((4, 2, 1)),
    )
    histories = history.Histories(data, np.arange(2))
    histories.complete = np.array([complete, True])
    table = read_table(histories, 5, 0)
    earned_by_first = 1.0 if complete else 3.0
    for action, earned, ends in ((1, earned_by_first, complete), (0, 3.0, False)):
        policy = greedy(TWO, action)
        key = jax.random.key(0)
        returns, missing, goes_on = play(policy.policy, 3, policy.params, table, 1.0, key)
        assert (returns[0] == earned).all() and not missing.any() and goes_on[0].all() != ends


def test_starts_are_resampled_by_the_episode(tmp_path):
    """Three episodes with starts of their own: a resample of three has the same start in 1 of 9."""
    data = offmarl.from_arrays(
        tmp_path / "a.vlt",
        observations=np.repeat(np.arange(3.0)[:, None, None], 2, 1),
        actions=np.zeros((3, 2), int),
        rewards=np.zeros((3, 2)),
        terminals=np.ones(3, bool),
    )
    starts = np.asarray(read_table(history.Histories(data, np.arange(3)), 450, 0).starts)
    alike = (starts[1:] == starts[1:, :1]).all(1)
    assert starts.shape == (451, 256) and len(np.unique(starts[0])) == 3
    assert alike.mean() == pytest.approx(1 / 9, abs=0.05)


def test_agents_without_a_choice_do_not_make_a_policy_close(observed):
    """One agent's ratios are 0.8; the other is dead, or has one legal action."""
    data, followed = observed
    agent = np.arange(2) == 0
    behaviour = np.where(data.mask[..., None] & agent, np.log(0.5), 0.0)
    data = data._replace(behaviour_log_prob=behaviour)
    for ratio, far in ((0.8, True), (0.95, False)):
        log_prob = behaviour + np.where(data.mask[..., None] & agent, np.log(ratio), 0.0)
        assert data.is_far(followed._replace(log_prob=log_prob)) is far


def test_few_effective_episodes_are_pointed_out(observed):
    data, followed = observed
    sizes, policies = {"a": 19.9, "b": 20.0}, {"a": followed, "b": followed}
    for methods, count in ((["wis"], 1), (["local"], 0)):
        notes = estimation.cautions_of_ratios(methods, sizes, policies, data)
        assert sum("fewer than 20 episodes of a:" in note for note in notes) == count


@pytest.fixture(scope="module")
def deterministic(tmp_path_factory):
    env = envs.make("probe/match")
    path = tmp_path_factory.mktemp("greedy") / "data.vlt"
    record_policy(env, greedy(env.spec, 1).policy, jnp.int32(1), path, steps=64, num_envs=16)
    return vault.open_vault(path)


def test_values_outside_the_returns_of_all_episodes_are_pointed_out(random_data):
    data = vault.open_vault(random_data("probe/two-step"))
    inputs = estimation.RecordedData.read(data, Options(members=2))
    returns = inputs.discounted[inputs.complete]
    low, high = returns.min(), returns.max()
    values = {
        "low": Estimate(low - 0.1),
        "right": Estimate((low + high) / 2),
        "high": Estimate(high + 0.1),
    }
    members, beyond = estimation.cautions_of_fqe(values, None, inputs)
    assert "no intervals with fewer than 3 members" in members
    assert "fqe of low, high is outside the returns" in beyond
    assert not estimation.cautions_of_fqe({}, None, inputs)


def test_deterministic_data_say_nothing_of_other_actions(deterministic):
    policies = {"coin": coin(deterministic.spec, 0.5)}
    with pytest.raises(OptionError, match=r"local cannot be used: .* were deterministic"):
        estimate(policies, deterministic, FAST, methods=("fqe", "local"))


@pytest.fixture
def quick_clone(monkeypatch):
    """Fit clones to fewer and smaller batches."""
    monkeypatch.setattr(history, "_CLONING", 200)
    monkeypatch.setattr(history, "_CLONE", Windows(batch_size=8, length=4, extras=()))


def test_data_without_probabilities(tmp_path, deterministic, quick_clone):
    unknown = tmp_path / "unknown.vlt"
    with vault.create(unknown, deterministic.spec, rows=deterministic.rows) as writer:
        steps = deterministic.transitions()
        writer.append(steps._replace(behaviour_log_prob=np.full_like(steps.reward, np.nan)))
    data = vault.open_vault(unknown)
    result = estimate({"coin": coin(data.spec, 0.5)}, data, FAST, methods=("wis",))
    note, *_ = result.notes
    assert "missing (NaN) at 64 of 64 steps: local and wis use those of a clone" in note
    # The clone has learned that both agents always take action 1; it began at 0.25.
    assert "(geometric mean 0.9" in note or "(geometric mean 1)" in note
    assert result.effective["coin"] == pytest.approx(64, rel=0.1)


@pytest.mark.slow
def test_a_clone_gives_the_probabilities_that_data_lack(random_data, quick_clone):
    """The data choose at random, so that each joint action has a probability of a quarter."""
    dataset = vault.open_vault(random_data("probe/two-step"))
    data = estimation.RecordedData.read(dataset, FAST)
    mask = (data.mask & (np.arange(len(data.mask)) > 2)[:, None])[..., None]
    lacking = data._replace(behaviour_log_prob=np.where(mask, np.nan, 2 * data.behaviour_log_prob))
    result, (note,) = estimation.with_clone(lacking, quiet)
    expected = np.where(mask, data.behaviour_log_prob, 2 * data.behaviour_log_prob)
    np.testing.assert_allclose(result.behaviour_log_prob, expected, atol=0.1)
    assert "(geometric mean 0.25)" in note
    assert estimation.with_clone(data, quiet) == (data, [])


def test_policies_are_ordered_by_paired_differences():
    """What resamples have in common cancels, so `b` is better than `a`; `c` may equal either."""
    noise, other_noise = np.random.default_rng(0).normal(size=(2, 500))
    resampled = {"a": 1 + noise, "b": 2 + noise, "c": 2.5 + other_noise, "d": np.full(500, np.nan)}
    values = {"a": Estimate(1.0), "b": Estimate(2.0), "c": Estimate(2.5), "d": Estimate(np.nan)}
    estimates = Estimates(
        {"wis": values}, {"wis": resampled}, {}, Estimate(0.0), None, 9, {"wis": 9}, ()
    )
    assert estimates.difference("wis", "b", "a") == pytest.approx((1, 1, 1))
    assert estimates.ranks("wis") == {"a": (2, 3), "b": (1, 2), "c": (1, 3)}
    single = estimates._replace(resampled={"wis": dict.fromkeys(values, np.zeros(0))})
    assert single.ranks("wis") == dict.fromkeys("abc", (1, 3))


def test_critics_that_miss_the_value_of_the_data_are_pointed_out(observed):
    data, _ = observed
    value = data.behaviour.value
    (note,) = estimation.cautions_of_fqe({}, value + 1, data)
    assert note.startswith("fqe values the data's own policies at")
    assert not estimation.cautions_of_fqe({}, value, data)
    assert not estimation.cautions_of_fqe({}, None, data)


def test_policies_that_do_not_fit_the_data(deterministic):
    other = replace(deterministic.spec, observation_size=9)
    with pytest.raises(ShapeError, match=r"policy wide differ in observation"):
        estimate({"wide": coin(other, 0.5)}, deterministic)
    with pytest.raises(ShapeError, match="no policies"):
        estimate({}, deterministic)


def test_episodes_that_batches_lack_a_part_of_are_not_used(tmp_path):
    length, count = 4, 24
    ends = np.arange(count) % length == length - 1
    legal = np.ones((count, 1, 3), bool)
    legal[[2, 9], 0, 0] = False  # episodes 0 and 2
    observations = np.random.default_rng(0).normal(size=(count, 1, 2))
    observations[4] = np.nan  # episode 1 has no step
    with pytest.warns(UserWarning):
        data = offmarl.from_arrays(
            tmp_path / "a.vlt",
            observations=observations,
            actions=np.zeros((count, 1), int),
            rewards=np.where(np.arange(count) < 12, 99.0, 1.0)[:, None],
            terminals=ends,
            legal_actions=legal,
            on_invalid="keep",
        )
    mask = are_whole(data)
    assert mask.tolist() == [False, False, False, True, True, True]
    with pytest.warns(UserWarning, match="leave out"):
        result = estimation.RecordedData.read(data, Options())
    np.testing.assert_array_equal(result.reward.sum(1), 4.0)


@pytest.mark.parametrize("target", [-1.0, -np.inf])
@pytest.mark.parametrize("recorded", [-np.inf, np.inf])
def test_an_episode_with_an_impossible_recorded_action_is_left_out(observed, recorded, target):
    data, followed = observed
    log_prob, behaviour = followed.log_prob.copy(), np.where(data.mask[..., None], -1.0, 0.0)
    log_prob[3, 0], behaviour[3, 0] = target, recorded
    broken, without = data._replace(behaviour_log_prob=behaviour), data.complete.copy()
    without[3] = False
    behaviour = np.where(data.mask[..., None], -1.0, 0.0)
    intact = data._replace(behaviour_log_prob=behaviour, complete=without)
    followed = followed._replace(log_prob=log_prob)
    result, expected = (estimation.by_ratios(True, None, followed, x) for x in (broken, intact))
    assert result[0] == expected[0] and result[1]["wis"][0] == expected[1]["wis"][0]
    np.testing.assert_array_equal(result[1]["wis"][1], expected[1]["wis"][1])
    assert np.isfinite(result[1]["wis"][1]).all()
    notes = estimation.cautions_of_ratios(["wis"], {"a": 100.0}, {"a": followed}, broken)
    assert any(
        "1 episodes are left out of local and wis: the recorded pro" in note for note in notes
    )
    none = np.where(data.mask[..., None], recorded, 0)
    reasons = data._replace(behaviour_log_prob=none).refusals()
    assert "each complete episode has an action" in reasons["wis"] and "local" in reasons


@pytest.mark.parametrize(
    ("value", "finite"),
    [((1.0,), True), ((1.0, 0.0, 2.0), True), ((np.nan,), False), ((1.0, 0.0, np.inf), False)],
)
def test_an_estimate_is_finite_with_its_interval(value, finite):
    assert Estimate(*value).finite is finite
