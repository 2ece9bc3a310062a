"""`offmarl.vault.map`: laws for any data, known results, errors, random numbers."""

import json

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offmarl import vault
from offmarl.errors import (
    ExpressionError,
    InvalidValueError,
    OptionError,
    ShapeError,
    UnknownNameError,
    VaultError,
)
from offmarl.types import ArraySpec, Discrete, EnvSpec
from offmarl.vault.check.leaf_statistics import QUANTILES
from offmarl.vault.transform import mapping

from .experience import CONTINUOUS, SPEC, assert_same, make, recorded
from .test_stock import to_stock, write_stock


@pytest.fixture(scope="module")
def a(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("source") / "a.vlt", rows=3, steps=50)


def assert_sound(dataset):
    assert vault.verify(dataset.path, deep=True).faults == ()


def tenth(steps):
    return {"reward": steps["reward"] / 10}


def shift(steps):
    return {name: steps[name] + 1 for name in steps if name.endswith("observation")}


def everything(steps):
    return dict(steps)


# ---------------------------------------------------------------------------------- laws


@pytest.mark.slow
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 4),
    num_steps=st.integers(1, 40),
    chunk_steps=st.integers(1, 9),
    codec=st.sampled_from(["raw", "zstd"]),
    spec=st.sampled_from([SPEC, CONTINUOUS]),
    by=st.sampled_from(["episodes", "steps"]),
    seed=st.integers(0, 99),
)
def test_laws(tmp_path_factory, rows, num_steps, chunk_steps, codec, spec, by, seed):
    place = tmp_path_factory.mktemp("laws")
    options = {"chunk_steps": chunk_steps, "codec": codec}
    a = recorded(place / "a.vlt", spec, rows, num_steps, seed, **options)
    for number, identity in enumerate((lambda _: {}, everything)):
        same = vault.map(a, place / f"same{number}.vlt", identity, by=by)
        assert same.digest() == a.digest()
        assert_same(same.transitions(), a.transitions())
        np.testing.assert_array_equal(same.episodes.returns, a.episodes.returns)
        assert same.manifest.schema == a.manifest.schema
        assert_sound(same)

    doubled = vault.map(a, place / "b.vlt", lambda s: {"reward": s["reward"] * 2}, by=by)
    both = vault.map(doubled, place / "c.vlt", shift, by=by)
    at_once = vault.map(a, place / "d.vlt", lambda s: {"reward": s["reward"] * 2} | shift(s))
    assert both.digest() == at_once.digest() != a.digest()
    np.testing.assert_array_equal(both.episodes.returns, at_once.episodes.returns)
    known = a.episodes.final >= 0
    np.testing.assert_array_equal(
        both.finals.observation[both.episodes.final[known]],
        a.finals.observation[a.episodes.final[known]] + 1,
    )
    assert_sound(both)


def test_known_rewards(a, tmp_path, monkeypatch):
    dataset = vault.map(a, tmp_path / "b.vlt", tenth)
    monkeypatch.setattr(mapping, "_PART_BYTES", 1)
    assert vault.map(a, tmp_path / "c.vlt", tenth, by="steps").digest() == dataset.digest()
    np.testing.assert_array_equal(dataset.transitions().reward, a.transitions().reward / 10)
    np.testing.assert_allclose(dataset.episodes.returns, a.episodes.returns / 10, rtol=1e-5)
    assert dataset.manifest.head.total_return == pytest.approx(a.manifest.head.total_return / 10)
    assert dataset.rows == a.rows and dataset.episodes.cause.tolist() == a.episodes.cause.tolist()
    assert_same(
        dataset.transitions()._replace(reward=a.transitions().reward),
        a.transitions(),
    )


def test_function_gets_whole_episodes_in_columns(a, tmp_path):
    episodes = a.episodes
    numbers = []

    def first_at_the_end(steps):
        (number,) = set(steps.episode.tolist())
        numbers.append(number)
        assert steps.time.tolist() == list(range(episodes.length[number]))
        assert ("final.state" in steps) == (episodes.final[number] >= 0)
        assert len(steps.ends) == (episodes.final[number] >= 0)
        assert len(steps) == len([*steps])
        assert repr(steps) == f"<Steps: {len(steps.time)} steps of {', '.join(steps)}>"
        assert steps["alive"].dtype == bool and steps["reward"].shape == (len(steps.time), 2)
        reward = np.zeros_like(steps["reward"])
        reward[-1] = steps["reward"].sum(0)
        return {"reward": reward}

    dataset = vault.map(a, tmp_path / "b.vlt", first_at_the_end)
    assert sorted(numbers) == list(range(len(episodes.row)))
    np.testing.assert_allclose(dataset.episodes.returns, episodes.returns, rtol=1e-5, atol=1e-5)
    paid = (dataset.transitions().reward != 0).any(-1)
    assert paid.sum() == len(episodes.row)


@pytest.mark.parametrize("by", ["episodes", "steps"])
@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_new_columns_are_extras(tmp_path, by, codec):
    a = recorded(tmp_path / "a.vlt", codec=codec)

    def add(steps):
        cost = np.square(steps["state"]).sum(-1)
        columns = {"extras.cost": cost.astype(float), "extras.seen": steps["observation"] > 0}
        return columns | {"extras.time": steps.time}

    dataset = vault.map(a, tmp_path / "b.vlt", add, by=by)
    steps, cost = dataset.transitions(), np.square(a.transitions().view.state).sum(-1)
    np.testing.assert_array_equal(steps.extras["cost"], cost)
    np.testing.assert_array_equal(steps.extras["seen"], a.transitions().view.observation > 0)
    assert dataset.spec.extras == {
        "cost": ArraySpec((), "float32"),
        "seen": ArraySpec((2, 3), "bool"),
        "time": ArraySpec((), "int32"),
    }
    begins = np.zeros(steps.last.shape, bool)
    begins[a.episodes.row, a.episodes.start] = True
    np.testing.assert_array_equal(steps.extras["time"] == 0, begins)
    assert_same(steps._replace(extras=None), a.transitions())
    assert_sound(dataset)

    double = vault.map(dataset, tmp_path / "c.vlt", lambda s: {"extras.cost": s["extras.cost"] * 2})
    np.testing.assert_array_equal(double.transitions().extras["cost"], cost * 2)
    assert double.statistics()["extras.cost"].mean == pytest.approx(2 * cost.mean(), rel=1e-6)
    same = vault.map(dataset, tmp_path / "d.vlt", everything)
    assert same.digest() == dataset.digest() != a.digest()


def test_trees_and_images(tmp_path):
    image = {"image": ArraySpec((3, 3, 2), "uint8"), "body": {"speed": ArraySpec((4,), "bfloat16")}}
    spec = EnvSpec("", 2, 0, 0, Discrete(4), observation=image, global_state=ArraySpec((2, 2)))
    a = recorded(tmp_path / "a.vlt", spec)

    def shrink(steps):
        names = ("observation.image", "final.observation.image")
        return {name: steps[name] // 2 for name in names if name in steps}

    dataset = vault.map(a, tmp_path / "b.vlt", shrink)
    after, before = (x.transitions().view.observation for x in (dataset, a))
    np.testing.assert_array_equal(after["image"], before["image"] // 2)
    np.testing.assert_array_equal(after["body"]["speed"], before["body"]["speed"])
    assert after["image"].dtype == np.uint8
    assert vault.map(a, tmp_path / "c.vlt", everything).digest() == a.digest()
    assert_sound(dataset)

    statistics = a.statistics()
    alive = a.transitions().view.alive
    pixels = before["image"][alive].reshape(-1, 2)
    image = statistics["observation.image"]
    assert image.count.tolist() == [len(pixels)] * 2 and image.quantile_error == 0
    np.testing.assert_allclose(image.mean, pixels.mean(0), rtol=1e-12)
    np.testing.assert_array_equal(
        image.quantiles, np.quantile(pixels, QUANTILES, axis=0, method="inverted_cdf")
    )
    assert statistics["observation.body.speed"].mean.shape == (2, 4)


@pytest.mark.parametrize(("sizes", "size"), [(None, 6), ((3, 2), 5), (None, 4)])
def test_a_state_of_all_observations_follows_them(tmp_path, sizes, size):
    """One of another size is not made of them."""
    spec = EnvSpec("", 2, 3, size, Discrete(4), state="concatenated", observation_sizes=sizes)
    mask = np.arange(3) < np.array(sizes or (3, 3))[:, None]
    a = recorded(tmp_path / "a.vlt", spec)
    dataset = vault.map(a, tmp_path / "b.vlt", shift)
    for view, before in zip(views_of(dataset), views_of(a), strict=True):
        follows = size == mask.sum()
        state = np.asarray(view.observation)[..., mask] if follows else before.state
        np.testing.assert_array_equal(view.state, state)
    paid = vault.map(a, tmp_path / "d.vlt", tenth)
    np.testing.assert_array_equal(paid.transitions().view.state, a.transitions().view.state)
    same = vault.map(a, tmp_path / "c.vlt", lambda s: shift(s) | states_of(s))
    np.testing.assert_array_equal(same.transitions().view.state, a.transitions().view.state)
    assert_sound(dataset)


def views_of(dataset):
    final = dataset.episodes.final
    return dataset.transitions().view, dataset.final_views(final[final >= 0])


def states_of(steps):
    return {name: steps[name] for name in steps if name.endswith("state")}


# ---------------------------------------------------------------------------------- formulas


@pytest.mark.parametrize(
    ("formula", "expected"),
    [
        ("reward / 10", lambda r, t, n: r / 10),
        ("reward - 0.5 * (step > 1)", lambda r, t, n: r - 0.5 * (t > 1)),
        ("(length - step == 1) * 3", lambda r, t, n: 3.0 * (n - t == 1) + 0 * r),
        ("1", lambda r, t, n: np.ones_like(r)),
    ],
)
def test_formulas(a, tmp_path, formula, expected):
    dataset = vault.map(a, tmp_path / "b.vlt", reward=formula)
    episodes = a.episodes
    for number, row in enumerate(episodes.row.tolist()):
        span = slice(episodes.start[number], episodes.start[number] + episodes.length[number])
        reward = a.transitions().reward[row, span]
        rewards = expected(reward, np.arange(len(reward))[:, None], len(reward))
        np.testing.assert_allclose(dataset.transitions().reward[row, span], rewards, rtol=1e-6)


def test_a_formula_has_the_policy_of_each_step(a, tmp_path):
    dataset, policy = vault.map(a, tmp_path / "b.vlt", reward="policy"), a.transitions().policy_id
    np.testing.assert_array_equal(dataset.transitions().reward, policy[..., :1] + 0 * policy)
    with pytest.raises(ExpressionError, match="does not record the seed of its episodes"):
        vault.map(a, tmp_path / "c.vlt", reward="reward + seed")


@pytest.mark.filterwarnings("ignore:Episodes without their beginning")
def test_extras_in_formulas_and_conditions(a, tmp_path):
    cost = {"extras.cost": lambda s: s["reward"][:, 0] > 0, "extras.own": lambda s: s["reward"]}
    extra = vault.map(
        a, tmp_path / "b.vlt", returning(**cost, **{"extras.wide": lambda s: s["state"]})
    )
    dataset = vault.map(extra, tmp_path / "c.vlt", reward="extras.own - 2 * extras.cost")
    reward = a.transitions().reward
    np.testing.assert_allclose(
        dataset.transitions().reward, reward - 2 * (reward[..., :1] > 0), rtol=1e-6
    )
    subset = vault.filter(extra, "extras.cost == 1", tmp_path / "d.vlt", by="steps")
    assert subset.num_steps == (reward[..., 0] > 0).sum()
    for condition, message in (
        ("extras.cots > 1", "no extras.cots: it has extras.cost, extras.own"),
        ("extras.wide > 1", r"extras.wide .* has shape \(5,\) a step"),
    ):
        with pytest.raises(ExpressionError, match=message):
            vault.filter(extra, condition, tmp_path / "e.vlt", by="steps")
        with pytest.raises(ExpressionError, match=message):
            vault.map(extra, tmp_path / "e.vlt", reward=condition.replace("> 1", ""))
    with pytest.raises(ExpressionError, match="only steps have it"):
        vault.filter(extra, "extras.cost == 1", tmp_path / "e.vlt")


@pytest.mark.parametrize("formula", ["reward >", "rewards / 2", "reward == 'a'", "p90", "reward()"])
def test_bad_formulas_are_refused_before_anything_is_read(tmp_path, formula):
    with pytest.raises(ExpressionError):
        vault.map(tmp_path / "missing.vlt", tmp_path / "b.vlt", reward=formula)


# ---------------------------------------------------------------------------------- sources


def test_other_programs(tmp_path):
    """Of columns that they alone know, which a function may return, no copy is made."""
    source, tree = tmp_path / "s.vlt" / "s", to_stock(make(steps=30)[0])
    write_stock(source, tree | {"note": tree["rewards"]})
    dataset = vault.map(source, tmp_path / "made.vlt", tenth)
    rewards = vault.open_vault(source).transitions().reward
    np.testing.assert_array_equal(dataset.transitions().reward, rewards / 10)
    plain = vault.recode(source, tmp_path / "plain.vlt")
    again = vault.map(source, tmp_path / "same.vlt", everything)
    assert again.digest() == plain.digest()
    assert_sound(dataset)
    assert_sound(again)


def test_open_and_abandoned_episodes_stay_so(tmp_path):
    path = tmp_path / "a.vlt"
    with vault.create(path, SPEC, rows=2, chunk_steps=16) as writer:
        for seed, run in enumerate(("one", "two", "three")):
            writer.append(*make(steps=21, seed=seed), run=run)
    a = vault.open_vault(path)
    assert (a.episodes.cause == "open").sum() >= 2
    assert (a.episodes.cause == "open")[a.episodes.start + a.episodes.length < 42].any()
    dataset = vault.map(a, tmp_path / "b.vlt", everything)
    for name in set(a.episodes._fields) - {"final", "teams"}:
        np.testing.assert_array_equal(getattr(dataset.episodes, name), getattr(a.episodes, name))
    np.testing.assert_array_equal(dataset.episodes.final >= 0, a.episodes.final >= 0)
    assert_sound(dataset)
    with vault.resume(dataset.path) as writer:
        writer.append(*make(steps=5))
    assert_sound(vault.open_vault(dataset.path))


# ---------------------------------------------------------------------------------- lineage


def test_lineage(a, tmp_path):
    dataset = vault.map(a, tmp_path / "b.vlt", tenth, by="steps")
    (source,) = dataset.provenance["lineage"]["sources"]
    arguments = dataset.provenance["lineage"]["arguments"]
    assert source["digest"] == a.digest()
    assert arguments["function"].endswith("test_map:tenth") and len(arguments["sha256"]) == 64
    assert arguments["columns"] == ["reward"] and "seed" not in arguments
    json.dumps(dataset.provenance)


def test_functions_by_name(a, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def halve(steps):\n    return {'reward': steps['reward'] / 2}\n")
    dataset = vault.map(a, tmp_path / "b.vlt", f"{file}:halve")
    np.testing.assert_array_equal(dataset.transitions().reward, a.transitions().reward / 2)
    same = vault.map(a, tmp_path / "c.vlt", dict)  # in C: without a signature and source
    arguments = same.provenance["lineage"]["arguments"]
    assert same.digest() == a.digest() and arguments["function"] == "builtins:dict"
    assert "sha256" not in arguments


@pytest.mark.parametrize("by", ["episodes", "steps"])
@pytest.mark.slow
def test_random_numbers_depend_on_the_seed_only(tmp_path, by, monkeypatch):
    monkeypatch.setattr(mapping, "_PART_BYTES", 1)
    a = recorded(tmp_path / "a.vlt", rows=3, steps=50, chunk_steps=2048)  # in chunks of one row

    def noise(steps, rng):
        return {"reward": steps["reward"] + rng.normal(size=steps["reward"].shape)}

    vaults = [
        vault.map(a, tmp_path / f"{number}.vlt", noise, by=by, seed=seed)
        for number, seed in enumerate([0, 0, 1])
    ]
    first, same, other = (data.digest() for data in vaults)
    assert first == same and len({first, other, a.digest()}) == 3
    assert vaults[2].provenance["lineage"]["arguments"]["seed"] == 1
    noises = vaults[0].transitions().reward - a.transitions().reward
    assert len(np.unique(noises.round(5))) > noises.size * 0.9


# ---------------------------------------------------------------------------------- errors


def returning(**columns):
    return lambda steps: {name: value(steps) for name, value in columns.items()}


def invalid(steps):
    reward = steps["reward"].copy()
    if steps.episode[0] == 4:
        reward[1, 1] = np.nan
    return {"reward": reward}


def in_place(steps):
    steps["reward"][:] = 0
    return dict(steps)


@pytest.mark.parametrize(
    ("function", "error", "text"),
    [
        (returning(reward=lambda s: s["reward"][1:]), ShapeError, r"reward: .*shape .*episode 0"),
        (returning(reward=lambda s: s["reward"][:, :1]), ShapeError, r"needs \(\d+, 2\)"),
        (
            returning(action=lambda s: s["action"] * 0.5),
            ShapeError,
            r"action: .*float.* for episode 0, and the vault has int32",
        ),
        (
            invalid,
            InvalidValueError,
            r"for episode 4: the reward of agent 1 in row \d, step \d+ of the vault is nan",
        ),
        (
            returning(action=lambda s: s["action"] + 4),
            InvalidValueError,
            "for episode 0: the action of agent 0 .* from 0 to 3",
        ),
        (
            returning(observation=lambda s: s["observation"] + 1),
            OptionError,
            "returned observation and not final.observation for episode",
        ),
        (
            returning(rewards=lambda s: s["reward"]),
            UnknownNameError,
            "no column named 'rewards': did you mean reward",
        ),
        (returning(new=lambda s: s["reward"]), UnknownNameError, "no column named 'new'"),
        (
            returning(terminated=lambda s: ~s["terminated"]),
            OptionError,
            "changes terminated of episode 0",
        ),
        (
            returning(reward=lambda s: s["reward"].astype(float) + 1e300 * (s.time[:, None] == 2)),
            InvalidValueError,
            r"reward: .* returned 1e\+300 for step 2 of episode \d+, which does not fit",
        ),
        (in_place, OptionError, "read-only"),
        (lambda s: s["rewards"], UnknownNameError, "no column named 'rewards'"),
        (lambda s, key: {}, OptionError, "failed for episode 0: .* argument: 'key'"),
        (lambda s: s["reward"], OptionError, "returned ndarray: return a dictionary"),
        (lambda s: 1 / 0, OptionError, r"failed for episode 0: ZeroDivisionError.*test_map.py"),
        (lambda s: {"reward": s["reward"]} if s.episode[0] else {}, OptionError, "same columns"),
        ("offmarl.vault", OptionError, "names no function"),
        ("offmarl.vault:nothing", OptionError, "has no nothing"),
        pytest.param(3, OptionError, "is not a function", marks=pytest.mark.untyped),
    ],
)
def test_errors_name_the_leaf_and_the_episode(a, tmp_path, function, error, text):
    with pytest.raises(error, match=text):
        vault.map(a, tmp_path / "b.vlt", function)
    assert not (tmp_path / "b.vlt").exists() and not list(tmp_path.glob(".*"))


def test_a_function_or_a_formula(a, tmp_path):
    for options in ({}, {"function": tenth, "reward": "1"}):
        with pytest.raises(OptionError, match="give one of --with"):
            vault.map(a, tmp_path / "b.vlt", **options)
    vault.create(tmp_path / "empty.vlt", SPEC, rows=1).close()
    with pytest.raises(VaultError, match="no steps"):
        vault.map(tmp_path / "empty.vlt", tmp_path / "b.vlt", tenth)
