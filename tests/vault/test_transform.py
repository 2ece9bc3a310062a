"""Transforms: invariants for any data, and known results for small vaults."""

import json
import tracemalloc
from collections import Counter
from dataclasses import replace

import chex
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from offmarl import vault
from offmarl.errors import OptionError, ShapeError, VaultError, VaultExistsError
from offmarl.types import View
from offmarl.vault.check.digest import episode_digests
from offmarl.vault.format import layout
from offmarl.vault.read import reader
from offmarl.vault.storage.store import store_of
from offmarl.vault.transform import execute, lineage, selection
from offmarl.vault.write import writer

from .experience import CONTINUOUS, SPEC, assert_same, episodes_of, make, steps, written
from .test_stock import append_with_stock, open_stock, to_stock, write_stock

pytestmark = pytest.mark.filterwarnings("ignore:Episodes without their beginning")


def record(path, seed=0, rows=2, num_steps=40, spec=SPEC, ends=6.0, provenance=None, **options):
    provenance = {"tier": "medium", "recipe": {"seed": seed}} | (provenance or {})
    options = {"chunk_steps": 16} | options
    steps = make(spec, rows, num_steps, seed, end_every=ends)
    return written(path, steps, spec=spec, provenance=provenance, **options)


def contents(*vaults):
    """Return the content of episodes, whatever the ids of their policies."""
    return sorted(digest for data in vaults for digest in episode_digests(data, policies=False))


# ---------------------------------------------------------------------------------- laws


@pytest.mark.slow
@settings(max_examples=6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.integers(1, 3),
    num_steps=st.integers(1, 40),
    chunk_steps=st.integers(1, 9),
    codec=st.sampled_from(["raw", "zstd"]),
    spec=st.sampled_from([SPEC, CONTINUOUS]),
    seed=st.integers(0, 99),
    data=st.data(),
)
def test_laws(tmp_path_factory, rows, num_steps, chunk_steps, codec, spec, seed, data):
    place = tmp_path_factory.mktemp("laws")
    a = record(place / "a.vlt", seed, rows, num_steps, spec, chunk_steps=chunk_steps, codec=codec)
    b = record(place / "b.vlt", seed + 1, 4 - rows, 30, spec)

    again = vault.recode(
        a, place / "again.vlt", codec="raw", chunk_steps=data.draw(st.integers(1, 50))
    )
    assert again.digest() == a.digest()
    assert_same(again.transitions(), a.transitions())
    stream = vault.recode(a, place / "stream.vlt", layout="stream")
    assert stream.rows == 1 and stream.num_steps == a.num_steps

    union = vault.cat([a, b], place / "joined.vlt")
    assert union.num_steps == a.num_steps + b.num_steps
    for source, alone in ((a, stream), (b, vault.cat([b], place / "b1.vlt"))):
        name = f"{source.name}.vlt/main"
        back = vault.filter(union, f"source == {name!r}", place / f"{source.name}-back.vlt")
        assert back.digest() == alone.digest()

    twice = vault.cat([stream, stream], place / "twice.vlt")
    assert len(twice.episodes.row) == 2 * len(stream.episodes.row)
    assert vault.dedup(twice, place / "once.vlt").digest() == stream.digest()

    parts = vault.split(union, place / "parts.vlt", fractions=(0.5, 0.5), seed=seed)
    assert contents(*parts.values()) == contents(union)

    count = data.draw(st.integers(1, len(union.episodes.row)))
    subset = vault.sample(union, place / "drawn.vlt", episodes=count, seed=seed)
    assert len(subset.episodes.row) == count
    assert not Counter(contents(subset)) - Counter(contents(union))

    size = data.draw(st.integers(1, union.num_steps))
    assert vault.sample(a, place / "n.vlt", steps=min(size, a.num_steps)).num_steps == min(
        size, a.num_steps
    )


# ---------------------------------------------------------------------------------- content


@pytest.fixture(scope="module")
def a(tmp_path_factory):
    return record(tmp_path_factory.mktemp("source") / "a.vlt" / "expert", rows=3, num_steps=50)


def test_episodes_come_end_to_end_with_all_they_had(a, tmp_path):
    dataset = vault.cat([a], tmp_path / "v.vlt")
    expected, episodes = episodes_of(a.transitions()), dataset.episodes
    lengths = [length for _, _, length, *_ in expected]
    assert episodes.length.tolist() == lengths
    assert episodes.start.tolist() == np.cumsum([0, *lengths[:-1]]).tolist()
    assert episodes.cause.tolist() == [
        "cut" if cause == "open" else cause for _, _, _, cause, *_ in expected
    ]
    for number, (row, start, length, *_) in enumerate(expected):
        theirs = steps(a.transitions(rows=slice(row, row + 1)), start, start + length)
        begin = int(episodes.start[number])
        ours = steps(dataset.transitions(), begin, begin + length)
        if episodes.cause[number] == "cut":  # it ran on at the end of the data
            assert not theirs.last.any() and ours.last[0, -1] and ours.truncated[0, -1].all()
            ours = ours._replace(last=theirs.last, truncated=theirs.truncated)
        assert_same(ours, theirs)
    known = a.episodes.final >= 0
    assert (dataset.episodes.final >= 0).tolist() == known.tolist()
    chex.assert_trees_all_equal(
        dataset.final_views(dataset.episodes.final[known]), a.final_views(a.episodes.final[known])
    )


def test_blocks_of_any_size_give_the_same(a, tmp_path, monkeypatch):
    interval = vault.slice(a, tmp_path / "a.vlt", start=5, stop=45, by="steps")
    subset = vault.filter(a, "reward > 0", tmp_path / "b.vlt", by="steps")
    monkeypatch.setattr(execute, "BLOCK_BYTES", 1)
    monkeypatch.setattr(reader, "_BLOCK_BYTES", 1)
    monkeypatch.setattr(reader.Reader, "_final_bytes", 1)
    blocks = vault.slice(a, tmp_path / "c.vlt", start=5, stop=45, by="steps")
    assert blocks.digest() == interval.digest()
    assert vault.filter(a, "reward > 0", tmp_path / "d.vlt", by="steps").digest() == subset.digest()
    assert vault.recode(a, tmp_path / "e.vlt", codec="zstd").digest() == a.digest()


def test_a_cut_episode_ends_with_the_next_view(a, tmp_path):
    data = vault.slice(a, tmp_path / "v.vlt", start=-47, stop=12, by="steps")
    assert data.num_steps == 3 * (12 - 3)
    source, episodes, at = a.transitions(), data.episodes, 0
    for row in range(3):
        inside = steps(a.transitions(rows=slice(row, row + 1)), 3, 12)
        ours = steps(data.transitions(), at, at + 9)
        chex.assert_trees_all_equal(ours.view, inside.view)
        at += 9
        ending = np.flatnonzero(episodes.start + episodes.length == at)[0]
        if not inside.last[0, -1]:
            assert episodes.cause[ending] == "cut"
            final = View(*(field[episodes.final[ending]] for field in data.finals))
            chex.assert_trees_all_equal(final, View(*(field[row, 12] for field in source.view)))


def test_ends_of_episodes_without_their_beginning_are_counted(a, tmp_path):
    table = a.episodes
    late = (table.length > 1) & table.complete
    with pytest.warns(UserWarning, match=f"that keep their end: {late.sum()}[.]"):
        rest = vault.filter(a, "step > 0", tmp_path / "v.vlt", by="steps")
    assert rest.episodes.complete.sum() == late.sum()


def test_intervals_of_episodes(a, tmp_path):
    count = len(a.episodes.row)
    dataset = vault.slice(a, tmp_path / "v.vlt", start=-3, stop=-1)
    assert dataset.episodes.length.tolist() == a.episodes.length[count - 3 : count - 1].tolist()


# ---------------------------------------------------------------------------------- filters


@pytest.mark.parametrize(
    ("condition", "mask"),
    [
        ("return > 0 and length < 5", lambda e, r: (r > 0) & (e.length < 5)),
        ("not terminated or row == 1", lambda e, r: ~e.terminated | (e.row == 1)),
        ("return >= p75", lambda e, r: r >= np.percentile(r[e.complete], 75)),
        ("complete", lambda e, r: (e.cause == "terminated") | (e.cause == "truncated")),
        ("policy in (0, 2) and index % 2 == 0", lambda e, r: (e.policy_id != 1) & even(e)),
        ("cause not in ('truncated', 'open')", lambda e, r: e.cause == "terminated"),
        ("tier == 'medium' and seed == 0", lambda e, r: e.row >= 0),
    ],
)
def test_conditions(a, tmp_path, condition, mask):
    matches = mask(a.episodes, a.episodes.returns.mean(-1))
    dataset = vault.filter(a, condition, tmp_path / "v.vlt")
    np.testing.assert_array_equal(dataset.episodes.length, a.episodes.length[matches])
    np.testing.assert_array_equal(dataset.episodes.returns, a.episodes.returns[matches])


def even(episodes):
    return np.arange(len(episodes.row)) % 2 == 0


def test_steps_that_a_condition_holds_for(a, tmp_path):
    data = vault.filter(
        a, "reward > 0 and step < 4 and policy != 1", tmp_path / "v.vlt", by="steps"
    )
    source = a.transitions()
    step = np.zeros(source.last.shape, int)
    for row, start, length, *_ in episodes_of(source):
        step[row, start : start + length] = np.arange(length)
    target = (source.reward.mean(-1) > 0) & (step < 4) & (source.policy_id[..., 0] != 1)
    np.testing.assert_array_equal(data.transitions().reward[0], source.reward[target])
    np.testing.assert_array_equal(data.transitions().view.state[0], source.view.state[target])
    # Every next view is known, but for those that the source does not know.
    assert (data.episodes.final == -1).sum() <= 3


# ---------------------------------------------------------------------------------- samples


def test_a_sample_of_steps_ends_in_a_cut_episode(a, tmp_path):
    dataset = vault.sample(a, tmp_path / "v.vlt", steps=31, seed=5)
    assert dataset.num_steps == 31
    lengths, theirs = dataset.episodes.length.tolist(), a.episodes.length.tolist()
    assert sum(length not in theirs for length in lengths) <= 1
    same = vault.sample(a, tmp_path / "w.vlt", steps=31, seed=5)
    assert same.digest() == dataset.digest()
    assert vault.sample(a, tmp_path / "x.vlt", steps=31, seed=6).digest() != dataset.digest()
    for name, everything in (("y", {"steps": a.num_steps}), ("z", {"episodes": len(a)})):
        assert vault.sample(a, tmp_path / f"{name}.vlt", **everything).num_steps == a.num_steps


@given(st.integers(0, 99), st.integers(1, 300), st.floats(0, 1))
def test_prefixes_of_a_matched_order_keep_the_distribution(seed, count, fraction):
    rng = np.random.default_rng(seed)
    returns = np.round(rng.normal(size=count) * rng.choice([1, 3, 100]), 1)
    order = selection.match_returns(returns, returns, seed)
    assert sorted(order.tolist()) == list(range(count))
    prefix = order[: max(1, int(fraction * count))]
    for decile in np.quantile(returns, np.linspace(0, 1, 11)):
        expected = (returns <= decile).mean() * len(prefix)
        assert abs((returns[prefix] <= decile).sum() - expected) <= 10


def test_returns_are_matched_to_those_of_others():
    """Of 900 returns in [0, 1) and 100 in [1, 2), half and half: 100 of each at most."""
    returns = np.concatenate([np.linspace(0, 0.999, 900), np.linspace(1, 1.999, 100)])
    like = np.linspace(0, 1.999, 50)
    order = selection.match_returns(returns, like, 0)
    assert len(order) == pytest.approx(200, abs=10)
    assert (returns[order] < 1).mean() == pytest.approx(0.5, abs=0.03)
    assert (returns[order[:40]] < 1).sum() == pytest.approx(20, abs=3)
    only = selection.match_returns(returns, np.full(5, 0.0), 0)
    assert only.tolist() == [0]
    with pytest.raises(OptionError, match=r"no episode with a return from 2 to 2\.5"):
        selection.match_returns(returns, np.linspace(0, 5, 50), 0)


def test_a_sample_like_another_vault(a, tmp_path):
    low = vault.filter(a, "return < p30", tmp_path / "low.vlt")
    dataset = vault.sample(a, tmp_path / "v.vlt", like=low)
    assert dataset.episodes.returns.tolist() == low.episodes.returns.tolist()
    reference = dataset.provenance["lineage"]["arguments"]["match_returns"]
    assert reference == {"vault": "low.vlt/main", "digest": low.digest()}


def test_splits(a, tmp_path):
    parts = vault.split(a, tmp_path / "parts.vlt", fractions=(0.5, 0.25, 0.25), seed=1)
    assert list(parts) == ["train", "validation", "test"]
    count = len(a.episodes.row)
    assert [len(part.episodes.row) for part in parts.values()] == [
        round(0.5 * count),
        round(0.75 * count) - round(0.5 * count),
        count - round(0.75 * count),
    ]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["parts.vlt"]


# ---------------------------------------------------------------------------------- policies


@pytest.mark.parametrize(
    "forged",
    [
        {"num_policies": 10**30},
        {"num_policies": None},
        {"first": -5},
        {"first": "a"},
        {"seed": "x"},
        {"digest": 1},
    ],
)
def test_origins_that_cannot_be_are_not_believed(a, tmp_path, forged):
    b = record(tmp_path / "b.vlt" / "poor", seed=1)
    both = vault.cat([a, b], tmp_path / "v.vlt")
    first, second = both.provenance["origins"]
    forge_origins(both, [first, {**second, **forged}])
    data = vault.cat([both.path, b], tmp_path / "w.vlt")
    assert [o["vault"] for o in data.provenance["origins"]] == ["v.vlt/main", "b.vlt/poor"]


def forge_origins(dataset, origins):
    provenance = layout.dump_json({**dataset.provenance, "origins": origins})
    store_of(dataset.path).commit({layout.PROVENANCE_KEY: provenance}, {}).result()


def test_forged_origins_do_not_change_ids_where_rows_are_kept(a, tmp_path):
    both = vault.cat([a, record(tmp_path / "b.vlt" / "poor", seed=1)], tmp_path / "v.vlt")
    first, second = both.provenance["origins"]
    expected = both.transitions().policy_id
    late = [{**first, "first": 1, "num_policies": 99}]
    twice = [first, {**second, "digest": first["digest"]}]
    for number, forged in enumerate((late, twice)):
        forge_origins(both, forged)
        copy = vault.recode(both.path, tmp_path / f"{number}.vlt")
        np.testing.assert_array_equal(copy.transitions().policy_id, expected)


def test_policies_of_different_sources_stay_apart(a, tmp_path):
    b = record(tmp_path / "b.vlt" / "poor", seed=1, provenance={"policies": [{"policy_id": 4}]})
    stock = write_stock(tmp_path / "s.vlt" / "Good", unknown_policies(make(seed=2)[0]))
    dataset = vault.cat([b, a, stock, b], tmp_path / "v.vlt")
    (one, two, three) = dataset.provenance["origins"]
    assert [one["vault"], two["vault"], three["vault"]] == [
        "b.vlt/poor",
        "a.vlt/expert",
        "s.vlt/Good",
    ]
    assert [(o["first"], o["num_policies"], o["unknown"]) for o in (one, two, three)] == [
        (0, 5, False),
        (5, 3, False),
        (8, 0, True),
    ]
    ids = dataset.transitions().policy_id[0]
    first, second = b.num_steps, b.num_steps + a.num_steps
    np.testing.assert_array_equal(ids[:first], ids[-first:])
    np.testing.assert_array_equal(
        ids[first:second, 0], a.transitions().policy_id[..., 0].ravel() + 5
    )
    assert (ids[second:-first] == 8).all()
    assert dataset.provenance["policies"] == [{"policy_id": 4, "origin": "b.vlt/poor"}]
    second = vault.filter([b, a], "policy >= 5", tmp_path / "second.vlt")  # as in the joined vault
    np.testing.assert_array_equal(second.episodes.returns, a.episodes.returns)

    good = vault.filter(dataset, "tier == 'Good'", tmp_path / "good.vlt")
    assert (good.transitions().policy_id == -1).all()
    late = vault.filter(dataset, "seed == 1 or tier == 'Good'", tmp_path / "late.vlt")
    assert late.provenance["policies"] == [{"policy_id": 4, "origin": "b.vlt/poor"}]
    assert set(np.unique(late.transitions().policy_id)) == {0, 1, 2, 5}


def unknown_policies(transition):
    tree = to_stock(transition)
    del tree["infos"]["policy_ids"]
    return tree


def test_policies_have_names(tmp_path):
    policies = [{"policy_id": 1, "name": "late"}, {"policy_id": 2, "steps": 9}]
    provenance = {"program": "mappo", "policies": policies}
    dataset = record(tmp_path / "a.vlt", provenance=provenance)
    subset = vault.filter(dataset, "policy == 'late'", tmp_path / "b.vlt")
    assert set(subset.episodes.policy_id) == {1}
    unnamed = vault.filter(dataset, "policy == 'mappo' and program == 'mappo'", tmp_path / "c.vlt")
    assert set(unnamed.episodes.policy_id) == {0, 2}
    steps_of = vault.filter(dataset, "policy == 'late'", tmp_path / "d.vlt", by="steps")
    assert steps_of.num_steps == (dataset.transitions().policy_id[..., 0] == 1).sum()


# ---------------------------------------------------------------------------------- sources


def test_stock_vaults_are_sources_too(tmp_path):
    transition, _ = make(rows=5, steps=40)
    stock = write_stock(tmp_path / "s.vlt" / "Good", unknown_policies(transition), {"id": "blosc"})
    dataset = vault.filter(stock, "length >= 3 and tier == 'Good'", tmp_path / "v.vlt")
    expected = [e for e in episodes_of(transition) if e[2] >= 3]
    assert dataset.episodes.length.tolist() == [length for _, _, length, *_ in expected]
    assert dataset.provenance["lineage"]["sources"][0]["native"] is False
    assert dataset.provenance["lineage"]["sources"][0]["provenance"] == {"scenario": "3m"}
    assert vault.recode(stock, tmp_path / "w.vlt").digest() == stock.digest()


def test_what_stock_appended_is_noted(tmp_path):
    ours = record(tmp_path / "a.vlt", rows=2, num_steps=20)
    append_with_stock(open_stock(ours.path), make(steps=7, seed=3)[0])
    dataset = vault.cat([tmp_path / "a.vlt"], tmp_path / "b.vlt")
    assert dataset.num_steps == 54
    assert dataset.provenance["lineage"]["sources"][0]["unverified"] == [[20, 27]]


# ---------------------------------------------------------------------------------- lineage


def test_lineage_tells_what_was_done_to_what(a, tmp_path):
    first = vault.sample(a, tmp_path / "b.vlt" / "x", episodes=9, seed=7)
    dataset = vault.filter(first, "length > 1", tmp_path / "c.vlt")
    entry = dataset.provenance["lineage"]
    assert (entry["operation"], entry["arguments"]) == (
        "filter",
        {"condition": "length > 1", "by": "episodes"},
    )
    (source,) = entry["sources"]
    assert (source["vault"], source["digest"]) == ("b.vlt/x", first.digest())
    assert source["taken"] == {"episodes": len(dataset.episodes.row), "steps": dataset.num_steps}
    before = source["provenance"]["lineage"]
    assert before["arguments"] == {"episodes": 9, "seed": 7}
    assert before["sources"][0]["digest"] == a.digest()
    assert before["sources"][0]["provenance"]["recipe"] == {"seed": 0}


def test_lineage_does_not_grow_without_bound(a, tmp_path, monkeypatch):
    monkeypatch.setattr(lineage, "_MOST_BYTES", 3000)
    dataset, sizes = a, []
    for number in range(6):
        dataset = vault.cat([dataset, dataset], tmp_path / f"{number}.vlt")
        dataset = vault.dedup(dataset, tmp_path / f"{number}-once.vlt")
        sizes.append(len(json.dumps(dataset.provenance)))
    assert max(sizes) < 6000
    assert dataset.provenance["lineage"]["sources"][0]["vault"] == "5.vlt/main"
    assert dataset.digest() == vault.cat([a], tmp_path / "a.vlt").digest()


# ---------------------------------------------------------------------------------- refusals


def test_sources_must_be_of_one_kind(a, tmp_path):
    other = record(tmp_path / "o.vlt", spec=CONTINUOUS)
    with pytest.raises(ShapeError, match=r"differs in num_agents \(3, not 2\)"):
        vault.cat([a, other], tmp_path / "v.vlt")
    with pytest.raises(OptionError, match="no vaults to join"):
        vault.cat([], tmp_path / "v.vlt")
    with pytest.raises(OptionError, match="record how episodes ended, so leave the time limit out"):
        vault.cat([a, a.path], tmp_path / "v.vlt", time_limit=9)
    with pytest.raises(OptionError, match="the rows of several vaults cannot be kept"):
        vault.recode([a, a], tmp_path / "v.vlt")
    for view in (a.subset([0]), [a.subset([0])], vault.mix([a])):
        with pytest.raises(OptionError, match="is a view: give vaults"):
            vault.cat(view, tmp_path / "v.vlt")
    assert not (tmp_path / "v.vlt").exists()


def test_nothing_is_written_over(a, tmp_path):
    record(tmp_path / "b.vlt" / "main")
    before = {file: file.stat().st_mtime_ns for file in (tmp_path / "b.vlt").rglob("*")}
    for path in (tmp_path / "b.vlt", tmp_path / "b.vlt" / "main"):
        with pytest.raises(VaultExistsError):
            vault.cat([tmp_path / "b.vlt"], path)
        with pytest.raises(VaultError, match="exists" if path.suffix else "must end in .vlt"):
            vault.split(a, path)
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "b.vlt").rglob("*")} == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "give --steps, --episodes or --top"),
        ({"steps": 5, "episodes": 5}, "only one of"),
        ({"top": 0.1, "match_returns": True}, "cannot be matched"),
        ({"top": 1.5}, r"in \(0, 1\]: got 1.5"),
        ({"steps": 0}, "at least one"),
        ({"steps": 10**9}, "1,000,000,000 steps were requested, and .* has 150"),
        ({"episodes": 10**6}, "has .* to choose from"),
    ],
)
def test_samples_that_make_no_sense(a, tmp_path, options, message):
    with pytest.raises(OptionError, match=message):
        vault.sample(a, tmp_path / "v.vlt", **options)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fractions", [(1.0,), (0.5, 0.6), (1.5, -0.5), (0.25,) * 4, ()])
def test_fractions_that_make_no_sense(a, tmp_path, fractions):
    with pytest.raises(OptionError, match="sum to 1"):
        vault.split(a, tmp_path / "v.vlt", fractions=fractions)


def test_empty_outcomes_are_refused(a, tmp_path):
    with pytest.raises(OptionError, match="empty range: 900 to 27"):
        vault.slice(a, tmp_path / "v.vlt", start=900)
    with pytest.raises(OptionError, match="validation would be empty"):
        vault.split(a, tmp_path / "v.vlt", fractions=(0.999, 0.001))
    with vault.create(tmp_path / "empty.vlt", SPEC, rows=2):
        pass
    with pytest.raises(VaultError, match=r"no steps of .* are left"):
        vault.cat([tmp_path / "empty.vlt"], tmp_path / "v.vlt")
    assert [path.name for path in tmp_path.iterdir()] == ["empty.vlt"]


def test_what_fails_leaves_nothing(a, tmp_path, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(lineage, "provenance_of", fail)
    for make_it in (vault.cat, vault.split, vault.recode):
        with pytest.raises(KeyboardInterrupt):
            make_it([a] if make_it is vault.cat else a, tmp_path / "v.vlt")
        assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------------------------- memory


@pytest.mark.nightly
def test_memory_does_not_grow_with_the_data(tmp_path, monkeypatch):
    """Blocks of half a megabyte; episodes are few, and so are chunks, which an index lists."""
    limits = (execute, "BLOCK"), (reader, "_BLOCK"), (writer, "_COMMIT"), (writer, "_MOST_COMMIT")
    for module, limit in limits:
        monkeypatch.setattr(module, f"{limit}_BYTES", 2**19)
    spec = replace(SPEC, observation_size=64)
    peaks, sizes = [], []
    for number, count in enumerate((3, 12)):
        source = tmp_path / f"s{number}.vlt"
        with vault.create(source, spec, rows=2, chunk_steps=256) as recording:
            for seed in range(count):
                recording.append(*make(spec, rows=2, steps=1024, seed=seed, end_every=500))
        sizes.append(vault.open_vault(source).num_bytes)
        tracemalloc.start()
        vault.filter(source, "length > 0", tmp_path / f"f{number}.vlt")
        vault.recode(source, tmp_path / f"r{number}.vlt")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert sizes[1] - sizes[0] > 10**7
    assert peaks[1] - peaks[0] < (sizes[1] - sizes[0]) / 4
