"""A survey of a dataset, block by block, against NumPy on the whole dataset."""

import tracemalloc
from collections import Counter

import numpy as np
import pytest

from offmarl import report, vault
from offmarl.errors import VaultError
from offmarl.report import tables
from offmarl.report.contents import _columns, data_warnings
from offmarl.types import Continuous, Discrete, EnvSpec, FinalObservations, map_tree
from offmarl.vault.dataset import open_vault
from tests.specs import image_spec, typed_spec
from tests.vault.experience import make, written

DISCRETE = EnvSpec("test/made-up", 3, 2, 2, Discrete(4), time_limit=9)
CONTINUOUS = EnvSpec("", 2, 3, 4, Continuous(2), reward="individual")
ROWS, STEPS = 3, 200


def write(path, spec, transition, finals=None, rows=ROWS, **options):
    written(path, (transition, finals), spec=spec, chunk_steps=16, **options)
    return vault.open_vault(path, checked=True)


@pytest.fixture(scope="module")
def discrete(tmp_path_factory):
    """A vault whose states, observations and actions recur, with rewards that are mostly zero."""
    steps, finals = make(DISCRETE, ROWS, STEPS, seed=1, end_every=12.0)
    rng = np.random.default_rng(0)
    view = steps.view._replace(
        observation=rng.integers(0, 2, steps.view.observation.shape).astype(np.float32),
        state=rng.choice(np.float32([-0.0, 0.0, 1.5]), steps.view.state.shape),
    )
    reward = (steps.reward * (rng.random(steps.reward.shape) < 0.1)).astype(np.float32)
    steps = steps._replace(view=view, reward=reward)
    view.legal_actions[0, :20, 1] = np.arange(4) == 2  # some of these steps have other actions
    path = tmp_path_factory.mktemp("vaults") / "made.vlt" / "up"
    with pytest.warns(UserWarning, match="must be legal"):
        return write(path, DISCRETE, steps, finals)


@pytest.fixture(scope="module")
def contents(discrete, module_monkeypatch):
    """Its survey in blocks of 16 steps; episodes cross the borders of blocks."""
    module_monkeypatch.setattr("offmarl.vault.read.reader._BLOCK_BYTES", 1)
    module_monkeypatch.setattr("offmarl.report.accumulators._ROWS", 7)
    assert len(list(discrete.blocks())) == -(-STEPS // 16)
    return report.survey(discrete)


@pytest.fixture(scope="module")
def module_monkeypatch():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module")
def steps(discrete):
    """All steps of a vault, ``(B * T, ...)``."""
    return map_tree(lambda x: x.reshape(-1, *x.shape[2:]), discrete.transitions())


def test_identity(discrete, contents):
    assert contents.digest == discrete.digest()
    assert contents.alive.tolist() == discrete.transitions().view.alive.sum((0, 1)).tolist()
    assert contents.log_probs == contents.alive.sum()


def test_returns_and_lengths_are_of_whole_episodes(discrete, contents):
    episodes = discrete.episodes
    complete = (episodes.cause == "terminated") | (episodes.cause == "truncated")
    assert 0 < complete.sum() < len(complete)
    np.testing.assert_array_equal(contents.returns, episodes.returns[complete].mean(1))
    np.testing.assert_array_equal(contents.lengths, episodes.length[complete])


def test_ranges_are_of_agents_that_are_alive(contents, steps):
    alive = steps.view.alive
    assert 0 < alive.mean() < 1
    for agent in range(3):
        observations = steps.view.observation[alive[:, agent], agent]
        ranges = contents.observations
        np.testing.assert_array_equal(ranges.low[agent], observations.min(0))
        np.testing.assert_array_equal(ranges.high[agent], observations.max(0))
        np.testing.assert_allclose(ranges.mean[agent], observations.mean(0, dtype=float))
        np.testing.assert_allclose(ranges.std[agent], observations.std(0, dtype=float))
        assert (ranges.finite[agent] == len(observations)).all()
    np.testing.assert_allclose(contents.state.mean, steps.view.state.mean(0, dtype=float))


def test_actions(contents, steps):
    alive, action, legal = steps.view.alive, steps.action, steps.view.legal_actions
    one_hot = (action[..., None] == np.arange(4)) & alive[..., None]
    np.testing.assert_array_equal(contents.actions.taken, one_hot.sum(0))
    np.testing.assert_array_equal(contents.actions.legal, (legal & alive[..., None]).sum(0))
    illegal = ~np.take_along_axis(legal, action[..., None], -1)[..., 0] & alive
    assert illegal.sum() > 0
    np.testing.assert_array_equal(contents.actions.illegal, illegal.sum(0))
    together = np.einsum("tia,tjb->iajb", one_hot.astype(int), one_hot.astype(int))
    np.testing.assert_array_equal(contents.actions.together, together)


def test_mutual_information_and_entropy(contents, steps):
    both = steps.view.alive[:, [0, 2]].all(1)
    pairs = Counter(map(tuple, steps.action[both][:, [0, 2]].tolist()))
    joint = np.array([[pairs[a, b] for b in range(4)] for a in range(4)]) / both.sum()
    independent = joint.sum(1, keepdims=True) * joint.sum(0)
    expected = (joint * np.log2(joint / independent)).sum()
    expected -= (4 - 1) * (4 - 1) / (2 * both.sum() * np.log(2))  # Miller and Madow's correction
    np.testing.assert_allclose(contents.actions.information[0, 2], expected)
    np.testing.assert_allclose(contents.actions.information, contents.actions.information.T)
    share = contents.actions.taken[1] / contents.actions.taken[1].sum()
    np.testing.assert_allclose(contents.actions.entropy[1], -(share * np.log2(share)).sum())


def test_coverage(contents, steps):
    state, action, alive = steps.view.state, steps.action, steps.view.alive
    pairs, counts = np.unique(np.concatenate([state, action], 1), axis=0, return_counts=True)
    coverage = contents.coverage
    assert coverage.exact
    assert (coverage.pairs, coverage.states) == (len(pairs), len(np.unique(state, axis=0)))
    assert contents.saco == len(pairs) / (ROWS * STEPS)
    often, many = np.unique(counts, return_counts=True)
    assert coverage.repeats.tolist() == np.stack([often, many], 1).tolist()
    local = np.concatenate([steps.view.observation, action[..., None]], -1)[alive]
    assert coverage.local_pairs == len(np.unique(local, axis=0))
    assert coverage.local_steps == alive.sum()
    joint, counts = np.unique(action, axis=0, return_counts=True)
    share = counts / counts.sum()
    assert coverage.joint_actions == len(joint)
    np.testing.assert_allclose(coverage.joint_entropy, -(share * np.log2(share)).sum())


def test_rewards(discrete, contents, steps):
    stats = contents.rewards
    assert not stats.alike
    assert stats.nonzero.tolist() == (steps.reward != 0).sum(0).tolist()
    assert stats.nonzero_steps == (steps.reward != 0).any(1).sum()
    np.testing.assert_array_equal(stats.ranges.high, steps.reward.max(0))
    table, rewards = discrete.episodes, discrete.transitions().reward.mean(-1)
    assert stats.stretch == -(-table.length.max() // 60)
    bins = [[] for _ in range(-(-int(table.length.max()) // stats.stretch))]
    for row, start, length in zip(table.row, table.start, table.length, strict=True):
        for time in range(length):
            bins[time // stats.stretch].append(rewards[row, start + time])
    np.testing.assert_allclose(stats.curve, [np.mean(values) for values in bins], atol=1e-6)
    (row,) = tables.rewards({"up": contents}).rows
    assert row[2:4] == pytest.approx([steps.reward.mean(), steps.reward.std()], rel=1e-5)


def test_the_spread_of_rewards_is_that_of_all_agents(tmp_path):
    transition, finals = make(CONTINUOUS, 1, 20)
    reward = np.broadcast_to(np.float32([1, -1]), transition.reward.shape)
    opposed = write(tmp_path / "a.vlt", CONTINUOUS, transition._replace(reward=reward), finals, 1)
    (row,) = tables.rewards({"a": report.survey(opposed)}).rows
    assert row[2:6] == [0, 1, -1, 1]


@pytest.mark.parametrize("length", [1, 2, 3, 7, 30, STEPS + 1])
def test_windows(discrete, contents, length):
    table = discrete.episodes
    is_step = np.concatenate([[True] * n + [False] for n in table.length])
    stats = contents.windows(length)
    assert stats.total == len(is_step)
    assert stats.short_episodes == (table.length < length).sum()
    windows = is_step[(np.arange(len(is_step))[:, None] + np.arange(length)) % len(is_step)]
    np.testing.assert_allclose(stats.padded, 1 - windows.mean())
    episodes = windows[:, 0] + (windows[:, 1:] & ~windows[:, :-1]).sum(1)
    np.testing.assert_allclose(stats.crossing, np.mean(episodes > 1))


def test_continuous_actions(tmp_path):
    steps, finals = make(CONTINUOUS, ROWS, 60)
    steps.action[0, :, 0, 1] = 1.0
    steps.action[1, 3, 1, 0] = -2.5
    with pytest.warns(UserWarning, match=r"is -2\.5"):
        data = write(tmp_path / "a.vlt", CONTINUOUS, steps, finals, codec="zstd", on_invalid="keep")
    contents = report.survey(data)
    alive = steps.view.alive.reshape(-1, 2)
    action = steps.action.reshape(-1, 2, 2)
    for agent in range(2):
        mine = action[alive[:, agent], agent]
        expected = [np.histogram(np.clip(x, -1, 1 - 1e-9), 40, (-1, 1))[0] for x in mine.T]
        # Values right at the border of two bins may be counted on either side of it.
        assert np.abs(contents.actions.histogram[agent] - expected).sum() <= 2
        np.testing.assert_array_equal(contents.actions.ranges.low[agent], mine.min(0))
        assert contents.actions.at_bounds[agent].tolist() == (np.abs(mine) >= 1).sum(0).tolist()
    messages = data_warnings(contents)
    if alive.reshape(ROWS, 60, 2)[1, 3, 1]:
        assert "Values of actions are not all in [-1, 1]: from -2.5 to 1." in messages


def test_an_empty_vault(tmp_path):
    with vault.create(tmp_path / "a.vlt", DISCRETE, rows=2):
        pass
    contents = report.survey(vault.open_vault(tmp_path / "a.vlt"))
    assert contents.saco is None and not len(contents.returns)
    assert contents.windows(5)[1:] == (0, 0.0, 0, 0.0)
    assert data_warnings(contents) == ["The vault holds no steps."]


def test_what_is_unusual_is_said(tmp_path):
    steps, _ = make(DISCRETE, 1, 8)
    nobody = np.zeros_like(steps.terminated)
    observation = np.random.default_rng(0).normal(size=(1, 8, 3, 2)).astype(np.float32)
    observation[0, :, 1, 0] = 7.0
    observation[0, 3:5, 2, 1] = np.nan
    state = np.random.default_rng(1).normal(size=steps.view.state.shape).astype(np.float32)
    state[0, 6, 1] = np.inf
    view = steps.view._replace(
        observation=observation,
        state=state,
        alive=np.ones_like(steps.view.alive),
        legal_actions=np.ones_like(steps.view.legal_actions),
    )
    view.legal_actions[0, 0, 0, 2] = False
    view.legal_actions[..., 0, 1] = False  # which is no action that was never taken
    action = np.tile(np.int32([2, 0, 0]), (1, 8, 1))
    steps = steps._replace(
        view=view,
        action=action,
        reward=np.zeros_like(steps.reward),
        terminated=nobody,
        truncated=nobody,
        last=np.zeros_like(steps.last),
    )
    with pytest.warns(UserWarning, match="is nan|is inf|must be legal"):
        data = write(tmp_path / "a.vlt", DISCRETE, steps, rows=1, on_invalid="keep")
    contents = report.survey(data)
    messages = data_warnings(contents)
    for sentence in (
        "All episodes continue beyond the end of the data. "
        "No episode is complete, so no return is reported.",
        "All rewards are zero.",
        "Illegal actions taken: 1 (4.17%).",
        "Legal actions that were never taken: 0, 3 (agent 0), 1-3 (agents 1-2).",
        "Observed values that are not finite: 2, in features 1 (agent 2).",
        "Constant features of the observation: 0 (agent 1).",
        "The state is not always finite, in features 1.",
    ):
        assert sentence in messages
    assert contents.observations.finite[2].tolist() == [8, 6]


ENDS = np.arange(100) % 10 == 9
FIRST = np.random.default_rng(0).normal(size=(100, 1))
LED_TO = np.where(ENDS[:, None], 9.0, np.roll(FIRST, -1, 0))
INSIDE = np.random.default_rng(1).uniform(-0.9, 0.9, (100, 1))
FEW = "Few states occur twice, so coverage, which compares states bit by bit, says little."
OPEN = "10 truncated episodes have no final observation, so their last step cannot be bootstrapped."


@pytest.mark.parametrize(
    ("steps", "changes", "messages"),
    [
        (100, {}, []),
        (110, {}, [FEW]),
        (100, {"rewards": np.ones(100)}, ["All episodes have the same return, 10."]),
        (100, {"rewards": np.arange(100) < 5}, []),
        (
            100,
            {"rewards": np.arange(100) < 4},
            ["Rewards are sparse: 4.00% of the steps have one."],
        ),
        (100, {"terminals": None, "truncations": ENDS}, [OPEN]),
        (100, {"terminals": None, "truncations": ENDS, "next_observations": LED_TO}, []),
        (100, {"states": np.zeros((100, 2))}, ["Constant features of the state: 0-1."]),
        (100, {"actions": np.where(np.arange(100) < 10, 1, INSIDE.T).T}, []),
        (
            100,
            {"actions": np.where(np.arange(100) < 11, -1, INSIDE.T).T},
            ["11.0% of the values of actions are at a bound or beyond."],
        ),
        (
            100,
            {"provenance": {"complete": False}},
            ["The recording was stopped before it was complete."],
        ),
    ],
)
def test_each_sentence_has_its_bounds(tmp_path, steps, changes, messages):
    """Episodes of ten steps, with nothing else about them that is unusual."""
    rng = np.random.default_rng(0)
    arrays = {
        "observations": rng.normal(size=(steps, 1)),
        "actions": rng.integers(0, 2, steps),
        "rewards": rng.normal(size=steps),
        "terminals": np.arange(steps) % 10 == 9,
    }
    data = vault.from_arrays(tmp_path / "a.vlt", **arrays | changes)
    assert data_warnings(report.survey(data)) == messages


def test_columns_are_listed_by_groups_of_agents():
    apart = [f"{n} (agent {n})" for n in range(6)]
    assert _columns(np.eye(6, dtype=bool)) == ", ".join(apart)
    assert _columns(np.eye(8, dtype=bool)) == ", ".join([*apart, "and 2 more groups"])
    assert _columns(np.tile([True, False, True, True], (3, 1))) == "0, 2-3"


def test_damage_does_not_go_unnoticed(tmp_path):
    steps, finals = make(DISCRETE, ROWS, 64)
    path = tmp_path / "a.vlt" / "main"
    write(path, DISCRETE, steps, finals)
    chunk = steps.view.observation[0, 16:32].tobytes()
    (file,) = (file for file in path.rglob("*") if file.is_file() and chunk in file.read_bytes())
    data = bytearray(file.read_bytes())
    data[data.index(chunk)] ^= 1
    file.write_bytes(data)
    with pytest.raises(VaultError, match="checksum"):
        report.survey(open_vault(path))


@pytest.mark.nightly
def test_memory_is_bounded(tmp_path):
    """Of a vault of 700 MB no more than 170 are ever held.

    These are blocks, at most a million keys, and at most 32 MB of final views.
    """
    spec = EnvSpec("", 8, 64, 200, Discrete(10))
    steps, finals = make(spec, 8, 1024, end_every=50.0)
    with vault.create(tmp_path / "a.vlt", spec, rows=8) as writer:
        for _ in range(24):
            writer.append(steps, finals)
    data = vault.open_vault(tmp_path / "a.vlt", checked=True)
    assert data.num_bytes > 600e6
    tracemalloc.start()
    try:
        contents = report.survey(data)
        assert tracemalloc.get_traced_memory()[1] < 170e6
    finally:
        tracemalloc.stop()
    assert contents.coverage.pairs == 8 * 1024  # each append brings the same again
    assert contents.coverage.repeats.tolist() == [[24, 8 * 1024]]


def test_what_importing_changed_and_ends_that_begin_are_said(tmp_path):
    observations = np.random.default_rng(0).normal(size=(12, 1))
    ends = np.arange(12) % 4 == 3
    led_to = np.roll(observations, -1, 0)
    led_to[11] = 9.0
    with pytest.warns(UserWarning):
        data = vault.from_arrays(
            tmp_path / "a.vlt",
            observations=np.where(np.arange(12)[:, None] == 6, np.nan, observations),
            next_observations=led_to,
            actions=np.zeros(12, int),
            rewards=np.ones(12),
            truncations=ends,
        )
    messages = data_warnings(report.survey(data))
    assert "1 episodes are cut off before values that are not finite." in messages
    assert "2 steps of these episodes are left out." in messages
    assert any(line.startswith("1 final observations are the first ones of") for line in messages)

    spec = EnvSpec("", 1, 1, 1, Discrete(1))
    steps, finals = make(spec, 1, 12, end_every=1e9)
    last = ends[None]
    truncated = last[..., None]
    steps = steps._replace(last=last, truncated=truncated, terminated=np.zeros_like(truncated))
    view = map_tree(lambda x: np.roll(x, -1, 1)[0, ends], steps.view)
    at = np.flatnonzero(ends)
    finals = FinalObservations(np.zeros_like(at), at, view)
    data = write(tmp_path / "b.vlt", spec, steps, finals, rows=1)
    messages = data_warnings(report.survey(data))
    assert any(line.startswith("2 episodes end with the observation that the") for line in messages)


# ---------------------------------------------------------------------------------- trees

SPECS = {"tree": typed_spec("test/typed"), "image": image_spec("test/image")}


@pytest.mark.parametrize("name", SPECS)
def test_a_survey_pools_the_entries_of_each_leaf(tmp_path, name):
    spec = SPECS[name]
    transition, finals = make(spec, steps=40)
    alive = np.ones_like(transition.view.alive)
    transition = transition._replace(view=transition.view._replace(alive=alive))
    contents = report.survey(write(tmp_path / "a.vlt", spec, transition, finals, rows=2))
    leaves = [*vault_leaves(transition.view.observation)]
    expected = np.array([[np.float64(leaf).mean() for leaf in leaves]])
    np.testing.assert_allclose(contents.observations.mean, expected, rtol=1e-5, atol=1e-6)
    spread = np.array([[np.float64(leaf).std() for leaf in leaves]])
    np.testing.assert_allclose(contents.observations.std, spread, rtol=1e-5)
    assert contents.observations.low.tolist() == [[float(leaf.min()) for leaf in leaves]]
    assert contents.state.low.shape == (len(spec.state_leaves) if spec.state_size else 0,)
    assert contents.coverage.local_pairs == 160


def vault_leaves(tree):
    """Return the leaves of a tree in the order of their names."""
    if isinstance(tree, dict):
        for name in sorted(tree):
            yield from vault_leaves(tree[name])
    else:
        yield tree.astype(np.float32)


def test_warnings_name_leaves(tmp_path):
    transition, finals = make(SPECS["tree"], steps=40)
    observation = map_tree(np.copy, transition.view.observation)
    observation["gear"][:] = 3
    transition = transition._replace(view=transition.view._replace(observation=observation))
    contents = report.survey(write(tmp_path / "a.vlt", SPECS["tree"], transition, finals, rows=2))
    assert "Constant features of the observation: gear." in list(data_warnings(contents))
