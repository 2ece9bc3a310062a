"""Mixtures of vaults and weights of steps, against their exact distributions."""

from dataclasses import replace
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

import offmarl
from offmarl import vault
from offmarl.errors import OptionError, ShapeError
from offmarl.replay import SlotRings, WindowReader, Windows
from offmarl.replay.device import draw, probability
from offmarl.replay.starts import Uniform, draw_on_host, segments
from offmarl.vault import Dataset, Mixture, Weights

from .memory import sample
from .test_device import SPEC, write

SIZES = {"short": (3, 8, 4), "long": (2, 50, 2)}
"""Rows, length and number of the episodes of each row."""


def record(path: Path, rows: int, length: int, count: int) -> Dataset:
    ends = np.zeros((rows, length * count), bool)
    ends[:, length - 1 :: length] = True
    write(path, ends)
    return vault.open_vault(path)


@pytest.fixture(scope="module")
def vaults(tmp_path_factory) -> dict[str, Dataset]:
    place = tmp_path_factory.mktemp("vaults")
    return {name: record(place / f"{name}.vlt/v", *size) for name, size in SIZES.items()}


@pytest.fixture
def mixed(vaults) -> Mixture:
    return offmarl.mix({vaults["short"]: 0.7, vaults["long"]: 0.3})


# ---------------------------------------------------------------------------------- tables


@settings(max_examples=20)
@given(st.lists(st.sampled_from([0.0, 1e-9, 0.3, 1.0, 2.5, 1e3]), min_size=1, max_size=40))
def test_an_alias_table_keeps_the_shares(shares: list[float]) -> None:
    share = np.array(shares)
    if not share.any():
        return
    sizes = np.arange(len(share)) % 3 + 1
    first = np.cumsum(sizes) - sizes
    table = segments(first, sizes, share, int(sizes.sum()))
    keep = (table.threshold.astype(np.float64) + 1) / 2**32
    count = len(table.share)
    mass = np.bincount(np.arange(count), keep, count)
    mass += np.bincount(table.alias, 1 - keep, count)
    np.testing.assert_allclose(mass / count, (share / share.sum())[share > 0], atol=1e-8)
    np.testing.assert_array_equal(table.first, first[share > 0])


@pytest.mark.parametrize("wide", [False, True])
def test_draws_of_segments_agree_with_their_shares(wide: bool) -> None:
    scale = 2**40 if wide else 1
    first, size = np.array([0, 5, 12, 20]) * scale, np.array([4, 5, 3, 10]) * scale
    table = segments(first, size, np.array([0.5, 0.2, 0.0, 0.3]), 30 * scale)
    key = jax.random.key(0)
    draws = draw_on_host(table, np.asarray(jax.random.key_data(key)), 10**5) // scale
    expected = np.zeros(30)
    for start, count, share in ((0, 4, 0.5), (5, 5, 0.2), (20, 10, 0.3)):
        expected[start : start + count] = share / count
    counts = np.bincount(draws, minlength=30)
    assert not counts[expected == 0].any()
    assert chisquare(counts[expected > 0], 1e5 * expected[expected > 0]).pvalue > 0.001
    if not wide:
        on_device = jax.jit(draw, static_argnums=2)(table, key, 10**5)
        np.testing.assert_array_equal(draws, on_device)
        np.testing.assert_allclose(probability(table, jnp.arange(30)), expected, rtol=1e-6)


# ---------------------------------------------------------------------------------- mixtures


def numbers(batch) -> np.ndarray:
    """Return a number for each counted step of a batch: 1000 times its episode, and its time."""
    values = np.asarray(batch.episode * 1000 + batch.time)[..., :-1]
    return values[np.asarray(batch.mask)]


def drawn_steps(source, weights=None, batches: int = 300, **sizes) -> tuple[np.ndarray, np.ndarray]:
    """Return the numbers of the steps in batches, and what each counts; one of each window."""
    replay = source.replay(512, 5, weights=weights, **sizes)

    @jax.jit
    def one(replay, key):
        sample_key, slot_key = jax.random.split(key)
        batch = replay.sample(sample_key)
        slot = jax.random.randint(slot_key, (512,), 0, 5)
        pick = jax.vmap(lambda x, i: x[i])
        weight = jnp.ones_like(batch.reward[..., 0]) if batch.weight is None else batch.weight
        step = pick(batch.episode * 1000 + batch.time, slot)
        return step, pick(batch.mask, slot), pick(weight, slot)

    keys = jax.random.split(jax.random.key(7), batches)
    step, mask, weight = jax.lax.map(lambda key: one(replay, key), keys)
    return np.asarray(step)[mask], np.asarray(weight)[mask]


def agree(draws: np.ndarray, shares) -> None:
    number = shares.episode * 1000 + shares.time
    kept = shares.drawn > 0
    counts = np.array([np.bincount(np.searchsorted(number, draws), minlength=len(number))])[0]
    assert not counts[~kept].any()
    expected = shares.drawn[kept] * len(draws)
    assert chisquare(counts[kept], expected).pvalue > 0.001


def test_shares_of_a_mixture_are_exact(vaults, mixed) -> None:
    shares = mixed.step_probabilities(5)
    of_short = shares.episode < len(vaults["short"])
    assert shares.drawn[of_short].sum() == pytest.approx(0.7, rel=1e-12)
    assert np.ptp(shares.drawn[of_short]) < 1e-15
    np.testing.assert_array_equal(shares.drawn, shares.counted)
    agree(drawn_steps(mixed)[0], shares)


def test_a_mixture_holds_the_data_of_its_vaults(mixed, vaults) -> None:
    assert len(mixed) == len(vaults["short"]) + len(vaults["long"]) == 16
    batch = sample(mixed.replay(64, 5), jax.random.key(0))
    for window, slot in np.argwhere(np.asarray(batch.mask)):
        episode = mixed[int(batch.episode[window, slot])]
        time = int(batch.time[window, slot])
        np.testing.assert_array_equal(batch.action[window, slot], episode.transition.action[time])
    assert set(np.unique(np.asarray(batch.episode) < 12)) == {False, True}


@pytest.mark.parametrize("weights", [None, "return", Weights("reward", temperature=0.5)])
@pytest.mark.slow
def test_a_stream_gives_the_batches_of_the_device(mixed, weights) -> None:
    replay = mixed.replay(128, 5, burn_in=2, weights=weights)
    with mixed.stream(128, 5, burn_in=2, weights=weights, seed=3) as stream:
        for number in range(3):
            key = jax.random.fold_in(jax.random.key(3), number)
            chex.assert_trees_all_equal(next(stream), sample(replay, key))


def test_held_out_episodes_and_subsets_of_a_mixture(mixed) -> None:
    train, held_out = mixed.hold_out(0.25)
    assert sorted([*train, *held_out]) == list(range(16))
    assert (held_out < 12).sum() == 3
    assert (held_out >= 12).sum() == 1
    shares = mixed.step_probabilities(5, train)
    assert set(shares.episode) == set(train)
    assert shares.drawn[shares.episode < 12].sum() == pytest.approx(0.7)
    episodes = mixed.whole_episodes(held_out)
    np.testing.assert_array_equal(episodes.mask.sum(-1), mixed.episodes.length[held_out])
    batch = sample(mixed.subset([2, 14]).replay(8, 5), jax.random.key(0))
    assert set(np.unique(batch.episode)) == {2, 14}


@pytest.mark.parametrize("episodes", [[0, 16], [-1, 3]])
def test_episodes_that_no_vault_of_a_mixture_has(mixed, episodes: list[int]) -> None:
    message = "has episodes 0 to 15: choose some of these"
    with pytest.raises(OptionError, match=message):
        mixed.step_probabilities(5, np.array(episodes))
    with pytest.raises(OptionError, match=message):
        SlotRings(mixed, Windows(1, 5), np.array(episodes))


def test_a_mixture_without_shares_draws_all_steps_alike(vaults) -> None:
    shares = offmarl.mix(vaults.values()).step_probabilities(5)
    np.testing.assert_allclose(shares.drawn, 1 / len(shares.drawn), rtol=1e-12)


@pytest.mark.parametrize("weights", [None, "return"])
def test_some_episodes_of_a_mixture_without_shares_are_drawn_as_if_joined(
    vaults, tmp_path, weights
) -> None:
    mixed, chosen = offmarl.mix(vaults.values()), np.array([0, 5, 13])
    joined = vault.cat([*vaults.values()], tmp_path / "joined.vlt")
    of_both = [data.step_probabilities(5, chosen, weights=weights) for data in (mixed, joined)]
    mine, theirs = (x._replace(drawn=x.counted) for x in of_both)  # neighbours are drawn, too
    chex.assert_trees_all_close(mine, theirs, rtol=1e-6)
    steps = mixed.episodes.length[chosen]
    shares = [part.share for part in mixed.parts(chosen)]
    assert shares == pytest.approx([steps[:2].sum() / steps.sum(), steps[2] / steps.sum()])


def test_the_digest_of_a_mixture_has_the_shares(vaults) -> None:
    def digest(share: float) -> str:
        return offmarl.mix({vaults["short"]: share, vaults["long"]: 1}).digest()

    assert digest(1) == digest(1) != digest(2)


# ---------------------------------------------------------------------------------- weights


def of_time(dataset: Dataset) -> np.ndarray:
    """Weigh every eighth step 9 and the others 1, but the first quarter of time 0."""
    time = np.arange(dataset.length)
    weights = np.where(time % 8 == 7, 9.0, 1.0) * (time >= dataset.length // 4)
    return np.broadcast_to(weights, (dataset.rows, dataset.length))


@pytest.mark.parametrize(
    "weights",
    ["return", "length", of_time, Weights(of_time, temperature=2)],
)
@pytest.mark.parametrize("name", ["short", "mixed"])
@pytest.mark.slow
def test_steps_count_exactly_as_they_weigh(vaults, mixed, name: str, weights) -> None:
    source = mixed if name == "mixed" else vaults[name]
    shares = source.step_probabilities(5, weights=weights)
    expected = expected_shares(source, weights)
    index = np.cumsum(source.episodes.length)[shares.episode] + shares.time
    index -= source.episodes.length[shares.episode]
    np.testing.assert_allclose(shares.counted, expected[index], atol=1e-12)
    assert shares.counted.sum() == pytest.approx(1)
    draws, weight = drawn_steps(source, weights)
    agree(draws, shares)
    assert weight.mean() == pytest.approx(1, abs=0.05)
    number = shares.episode * 1000 + shares.time
    totals = np.bincount(np.searchsorted(number, draws), weight, len(number)) / weight.sum()
    np.testing.assert_allclose(totals, shares.counted, atol=5e-3)


def expected_shares(source, weights) -> np.ndarray:
    """Compute the shares step by step from the definition."""
    weights = weights if isinstance(weights, Weights) else Weights(weights)
    parts = getattr(source, "sources", (source,))
    values = []
    for part in parts:
        table = part.episodes
        if callable(weights.of):
            at = weights.of(part)
            for row, start, length in zip(table.row, table.start, table.length, strict=True):
                values.append(at[row, start : start + length])
        else:
            of = {"return": table.episode_returns, "length": table.length}[weights.of]
            values += [np.full(n, x, float) for n, x in zip(table.length, of, strict=True)]
    flat = np.concatenate(values)
    temperature = weights.temperature or (0.1 if weights.of == "return" else None)
    if temperature:
        low, high = flat.min(), flat.max()
        values = [np.exp((x - low) / (high - low) / temperature) for x in values]
    shares, first = [], 0
    for part, share in zip(parts, getattr(source, "shares", (1.0,)), strict=True):
        chunk = np.concatenate(values[first : first + len(part)])
        shares.append(share * chunk / chunk.sum())
        first += len(part)
    return np.concatenate(shares)


def test_equal_weights_change_nothing_but_the_draws(vaults) -> None:
    shares = vaults["short"].step_probabilities(5, weights=np.full(12, 3.0))
    np.testing.assert_allclose(shares.drawn, 1 / 96, rtol=1e-9)
    np.testing.assert_allclose(shares.counted, 1 / 96, rtol=1e-9)
    for numbers in ([3.0] * 12, jnp.full(12, 3.0)):  # arrays of any kind
        chex.assert_trees_all_equal(vaults["short"].step_probabilities(5, weights=numbers), shares)


def test_weights_of_very_different_sizes(vaults) -> None:
    """Those of low returns are e**-100 of the highest at a temperature of 0.01."""
    weights = np.where(np.arange(12) < 6, np.exp(-100), 1.0)
    factors = SlotRings(vaults["short"], Windows(4, 5), None, (weights,)).factors
    assert np.isfinite(factors).all()
    shares = vaults["short"].step_probabilities(5, weights=weights)
    np.testing.assert_allclose(shares.counted, (shares.episode >= 6) / 48, atol=1e-12)


def test_episodes_that_weigh_nothing_are_not_loaded(vaults) -> None:
    weights = np.zeros(12)
    weights[[3, 7]] = 1
    replay = vaults["short"].replay(8, 5, weights=weights)
    assert replay.num_slots == 18
    assert set(np.unique(sample(replay, jax.random.key(0)).episode)) == {3, 7}


def test_a_uniform_mixture_of_one_vault_is_that_vault(vaults) -> None:
    rings = SlotRings(offmarl.mix({vaults["short"]: 2.0}), Windows(4, 5))
    assert rings.starts == Uniform(12 * 9)
    assert SlotRings(vaults["short"], Windows(4, 5)).starts == Uniform(12 * 9)
    assert WindowReader(vaults["short"], Windows(4, 5)).rings.starts == Uniform(12 * 9)


# ---------------------------------------------------------------------------------- errors


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("shares", "message"),
    [
        ((-1, 1), r"short\.vlt/v cannot have a share of -1"),
        ((np.nan, 1), "a share of nan"),
        (("x", 1), r"short\.vlt/v cannot have a share of x"),
        ((1j, 1), "a share of 1j: give a finite number"),
        ((0, 0), r"all shares of the mixture are 0 \(.*short\.vlt/v, .*long\.vlt/v\)"),
    ],
)
def test_shares_that_cannot_be(vaults, shares, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        offmarl.mix(dict(zip(vaults.values(), shares, strict=True)))


@pytest.mark.parametrize("length", [60, 61])
def test_the_name_of_a_mixture_is_short(vaults, tmp_path: Path, length: int) -> None:
    other = record(tmp_path / "x.vlt" / ("u" * (length - 2)), *SIZES["short"])
    mixture = offmarl.mix({vaults["short"]: 1, other: 1})
    uid = f"v+{other.uid}"
    assert len(uid) == length
    short = f"mix-{mixture.known_digest()[:8]}"
    assert mixture.uid == (uid if length <= 60 else short)
    assert offmarl.mix({vaults["short"]: 1, other: 2}).known_digest()[:8] != short[4:]


def test_a_vault_is_mixed_once(vaults) -> None:
    path = vaults["short"].path
    with pytest.raises(OptionError, match="in the mixture twice"):
        offmarl.mix({vaults["short"]: 1, path: 2})
    with pytest.raises(OptionError, match="in the mixture twice"):
        offmarl.mix([path, path])
    with pytest.raises(OptionError, match="no vaults were given"):
        offmarl.mix({})
    with pytest.raises(OptionError, match="is one path"):
        offmarl.mix("a.vlt")


def test_vaults_without_a_name_are_joined_only_with_the_same_rewards(tmp_path) -> None:
    paths = [tmp_path / "first.vlt", tmp_path / "second.vlt"]
    for path, reward in zip(paths, ("team", "individual"), strict=True):
        write(path, np.ones((1, 3), bool), replace(SPEC, name="", reward=reward))
    for order in (paths, paths[::-1]):  # the spec of the first would be that of the mixture
        with pytest.raises(ShapeError, match="differs in reward"):
            offmarl.mix(order)


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        ({"observation_size": 4}, r"observation \(float32 \(4,\), not"),
        ({"name": "another"}, r"name \('another', not 'test'\)"),
        ({"time_limit": 77}, r"time_limit \(77, not None\)"),
        ({"reward": "individual"}, r"reward \('individual', not 'team'\)"),
        ({"package": "games 1.3.0"}, r"package \(games 1.3.0, not games 1.2.0, .*pip install"),
    ],
)
def test_what_cannot_be_joined_cannot_be_mixed(tmp_path, other, difference) -> None:
    first, second = tmp_path / "first.vlt", tmp_path / "second.vlt"
    spec = replace(SPEC, reward="team", package="games 1.2.0")
    write(first, np.ones((1, 3), bool), spec)
    write(second, np.ones((1, 3), bool), replace(spec, **other))
    with pytest.raises(ShapeError, match=f"second.*cannot be joined .*{difference}"):
        offmarl.mix({first: 1, second: 1})
    with pytest.raises(ShapeError, match=f"second.*cannot be joined .*{difference}"):
        vault.cat([first, second], tmp_path / "both.vlt")


@pytest.mark.parametrize("package", ["games 1.2.9", "", "plays 2.0.0"])
def test_releases_that_are_alike_or_not_known_are_mixed(tmp_path, package) -> None:
    """Vaults from before packages were recorded have no versions."""
    for name, release in {"first": package, "second": "games 1.2.0"}.items():
        write(tmp_path / f"{name}.vlt", np.ones((1, 3), bool), replace(SPEC, package=release))
    paths = [tmp_path / "first.vlt", tmp_path / "second.vlt"]
    assert offmarl.mix(paths).num_steps == vault.cat(paths, tmp_path / "both.vlt").num_steps == 6
    first, second, both = (vault.open_vault(path) for path in (*paths, tmp_path / "both.vlt"))
    assert (first.spec.package, second.spec.package) == (package, "games 1.2.0")
    assert both.spec.package == (package or "games 1.2.0")
    assert first.digest() == second.digest()


def _at(value: float):
    def weights(dataset: Dataset) -> np.ndarray:
        array = np.ones((dataset.rows, dataset.length))
        array[1, 5] = value
        return array

    return weights


@pytest.mark.parametrize(
    ("weights", "error", "message"),
    [
        (
            "speed",
            OptionError,
            "no column 'speed': its columns are return, length, policy, policy_agent_0",
        ),
        ("reward", OptionError, r"short\.vlt/v has a weight of -.* by 'reward' at step \d+ of row"),
        (_at(np.nan), OptionError, "weight of nan by weights at step 5 of row 1: give numbers"),
        (Weights(_at(np.inf), temperature=1), OptionError, "weight of inf .* leave these"),
        (lambda data: np.full(12, -1.0), OptionError, "at episode 0"),
        (np.zeros(12), OptionError, "all weights of .* by the given numbers are 0"),
        (np.ones(11), ShapeError, r"have shape \(11,\): give one for each of its 12 episodes"),
        ("no_such_module:function", OptionError, "no_such_module cannot be imported"),
        (f"{Path(__file__).with_name('memory.py')}:missing", OptionError, "has no missing"),
    ],
)
def test_weights_that_cannot_be(vaults, weights, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        vaults["short"].replay(4, 5, weights=weights)
    for temperature in (0.0, -1.0, np.nan):
        with pytest.raises(OptionError, match="cannot have a temperature"):
            Weights("return", temperature=temperature)


def test_the_chosen_episodes_weigh_nothing(vaults) -> None:
    weights = np.arange(12) > 5
    with pytest.raises(OptionError, match=r"all weights of .* are 0"):
        vaults["short"].replay(4, 5, np.array([1, 2]), weights=weights)


def test_incomplete_episodes_weigh_nothing_by_return(tmp_path: Path) -> None:
    ends = np.arange(20) == 14  # returns of -15, and of -5 for the part that is there
    arrays = {"observations": np.ones((20, 3)), "actions": np.ones(20, int)}
    dataset = offmarl.from_arrays(
        tmp_path / "costs.vlt", **arrays, rewards=-np.ones(20), terminals=ends
    )
    shares = dataset.step_probabilities(5, weights="return")
    assert shares.counted[shares.episode == 0].sum() == pytest.approx(1)
    with pytest.raises(OptionError, match="no complete episode"):
        dataset.subset([1]).replay(4, 5, weights="return")


def test_weights_of_a_part_are_those_of_its_episodes(vaults) -> None:
    data = vaults["short"]
    part, values = data.subset([2, 5, 7]), np.array([1.0, 2.0, 0.0])
    spread = np.zeros(12)
    spread[[2, 5, 7]] = values
    truth = part.step_probabilities(5, weights=spread)
    np.testing.assert_array_equal(part.step_probabilities(5, weights=values).counted, truth.counted)
    # Neither are the others checked, nor do they count in the scale of a temperature.
    spread[0], values = np.nan, np.array([1.0, 2.0, 3.0])
    spread[[2, 5, 7]] = values
    shares = part.step_probabilities(5, weights=Weights(spread, temperature=0.5))
    totals = [shares.counted[shares.episode == number].sum() for number in (2, 5, 7)]
    expected = np.exp(np.array([0.0, 0.5, 1.0]) / 0.5)
    np.testing.assert_allclose(totals, expected / expected.sum())
