import asyncio
import dataclasses
import threading

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offmarl import ArraySpec, vault
from offmarl.errors import VaultError
from offmarl.types import FinalObservations, View
from offmarl.vault.format import layout
from tests.children import python

from .experience import (
    SPEC,
    assert_same,
    concatenate,
    episodes_of,
    make,
    steps,
    table_of,
    whole_episodes,
    written,
)


@given(rows=st.integers(1, 512), steps=st.integers(1, 10**6), images=st.booleans())
def test_little_of_the_last_chunk_stays_empty_in_expected_steps(rows, steps, images):
    spec = SPEC
    if images:
        spec = dataclasses.replace(SPEC, observation=ArraySpec((8, 8, 3), "uint8"))
    default = layout.default_chunk_steps(spec, rows)
    size = layout.default_chunk_steps(spec, rows, steps)
    number = -(-steps // size)

    assert number == -(-steps // default)
    assert size == default or size >= min(64, default)
    assert number * size - steps < max(number, 64)
    step_bytes = sum(leaf.step_bytes for leaf in layout.leaves(spec).values())
    assert layout.stored_bytes(spec, rows, steps) == number * size * rows * step_bytes


IMAGES = dataclasses.replace(SPEC, observation=ArraySpec((84, 84, 3), "uint8"))


@pytest.mark.parametrize(
    ("spec", "rows", "expected", "steps"),
    [
        (SPEC, 1, None, 1024),
        (SPEC, 248, None, 1024),  # a step of a row takes 132 bytes, and a chunk 32 MB at most
        (SPEC, 249, None, 512),
        (SPEC, 10**6, None, 1),
        (IMAGES, 1, None, 16),  # 42 kB a step, and 1 MB
        *((SPEC, 1, expected, max(expected, 64)) for expected in (0, 1, 63, 65, 1024)),
        (SPEC, 1, 1025, 513),
        (SPEC, 1, 3000, 1000),
        (IMAGES, 64, 10, 1),
    ],
)
def test_how_many_steps_a_chunk_has(spec, rows, expected, steps):
    assert layout.default_chunk_steps(spec, rows, expected) == steps


@pytest.mark.parametrize(
    ("rows", "steps", "together"),
    [(2, 1024, 2), (4, 1024, 2), (3, 1024, 1), (64, 64, 32), (60, 64, 30), (7, 4096, 1)],
)
def test_a_chunk_has_2048_steps_of_several_rows_at_most(rows, steps, together):
    assert layout.default_chunk_rows(rows, steps) == together


def test_more_steps_than_expected(tmp_path):
    transition, finals = make(steps=300, rows=2)
    dataset = written(tmp_path / "v.vlt", (transition, finals), expected_steps=90)

    assert dataset.manifest.schema.chunk_steps == 90
    assert_same(dataset[:], transition)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("expected", [0, -1, 2.5, "many"])
def test_expected_steps_must_be_a_whole_number(tmp_path, expected):
    with pytest.raises(VaultError, match="expected_steps must be a whole number of at least 1"):
        vault.create(tmp_path / "v.vlt", SPEC, rows=1, expected_steps=expected)
    assert not (tmp_path / "v.vlt").exists()


def test_cut_episodes_are_told_from_truncated_ones(tmp_path):
    transition, _ = make(rows=3, steps=3, end_every=1e9)
    last = np.array([[0, 0, 1], [0, 1, 1], [0, 0, 1]], bool)
    truncated = np.broadcast_to(last[..., None], transition.truncated.shape)
    terminated = truncated & np.array([False, False, True])[:, None, None]
    transition = transition._replace(
        last=last, terminated=terminated, truncated=truncated & ~terminated
    )
    with vault.create(tmp_path / "v.vlt", SPEC, rows=3) as writer:
        writer.append(transition, cut=np.array([False, True, False]))
        writer.append(transition, cut=True)
    episodes = vault.open_vault(tmp_path / "v.vlt").episodes
    assert episodes.cause.tolist() == (
        ["truncated", "cut"] + ["truncated", "cut"] * 2 + ["terminated", "terminated"]
    )
    assert episodes.truncated.tolist() == [True] * 6 + [False] * 2
    assert episodes.terminated.tolist() == [False] * 6 + [True] * 2


def test_digest_is_of_the_content_alone(tmp_path):
    parts = [whole_episodes(seed=seed, rows=1, steps=20, end_every=4) for seed in range(3)]
    data = written(tmp_path / "a.vlt", *parts, chunk_steps=7, codec="zstd")
    other = written(tmp_path / "b.vlt", *parts[::-1], chunk_steps=64, provenance={"x": 1})
    assert data.digest() == other.digest()

    wide = jax.tree.map(lambda *rows: np.concatenate(rows), *(part for part, _ in parts))
    finals = [f for _, f in parts]
    row = np.concatenate([np.full(len(f.row), number) for number, f in enumerate(finals)])
    time = np.concatenate([f.time for f in finals])
    views = View(*(np.concatenate(x) for x in zip(*(f.view for f in finals), strict=True)))
    stacked = written(tmp_path / "c.vlt", (wide, FinalObservations(row, time, views)))
    assert stacked.digest() == data.digest()

    changed = parts[0][0]._replace(reward=parts[0][0].reward + np.float32(1))
    assert written(tmp_path / "d.vlt", (changed, parts[0][1]), *parts[1:]).digest() != data.digest()
    without = written(tmp_path / "e.vlt", (parts[0][0], None), *parts[1:])
    assert without.digest() != data.digest()


def test_returns_are_the_same_bits_however_steps_are_split(tmp_path):
    transition, finals = make(rows=2, steps=200, end_every=1e9)
    at_once = written(tmp_path / "a.vlt", (transition, finals))
    parts = [(steps(transition, t, t + 7), None) for t in range(0, 200, 7)]
    split = written(tmp_path / "b.vlt", *parts)
    assert at_once.episodes.returns.tolist() == split.episodes.returns.tolist()


def test_in_an_event_loop_and_in_a_thread(tmp_path):
    async def record():
        written(tmp_path / "a.vlt", make(steps=30), chunk_steps=8)
        return vault.open_vault(tmp_path / "a.vlt")[:10]

    assert_same(asyncio.run(record()), steps(make(steps=30)[0], 0, 10))
    thread = threading.Thread(target=written, args=(tmp_path / "b.vlt", make(steps=30)))
    thread.start()
    thread.join()
    assert vault.open_vault(tmp_path / "b.vlt").length == 30


def test_listing(tmp_path):
    written(tmp_path / "swarm" / "b.vlt" / "expert", make(rows=2, steps=40))
    written(tmp_path / "a.vlt" / "random", make(rows=1, steps=7, end_every=1e9))
    (tmp_path / "bad.vlt" / "x").mkdir(parents=True)
    (tmp_path / "bad.vlt" / "x" / "metadata.json").write_text("{")
    (tmp_path / "bad.vlt" / "x" / "manifest.ocdbt").write_text("no manifest")
    (a, random), (_, bad), (b, expert) = vault.list_vaults(tmp_path)
    assert a == tmp_path / "a.vlt" / "random"
    assert random == vault.Summary("a", "random", SPEC.name, 2, 7, 1, None, True, None, 1)
    assert bad.error is not None
    episodes = vault.open_vault(b).episodes
    ended = episodes.cause != "open"
    assert (expert.episodes, expert.incomplete) == (len(ended), (~ended).sum())
    assert expert.mean_return == pytest.approx(episodes.returns[ended].mean(), rel=1e-12)
    assert expert.steps == 80
    total = vault.open_vault(b).manifest.head.total_return
    assert total == pytest.approx(episodes.returns[ended].mean(-1).sum(), rel=1e-12)


def test_a_writer_that_is_left_open_ends_without_a_word(tmp_path):
    code = (
        "import sys; from offmarl import vault; from tests.vault.experience import SPEC, make\n"
        "writer = vault.create(sys.argv[1], SPEC, rows=4)\n"
        "writer.append(*make(rows=4, steps=100))\n"
    )
    assert not python("-c", code, tmp_path / "v.vlt" / "a")


def test_a_reader_beside_a_writer_sees_whole_commits(tmp_path, eager):
    path = tmp_path / "v.vlt" / "a"
    parts = [make(steps=7, seed=seed) for seed in range(20)]
    transitions = concatenate([transition for transition, _ in parts])
    writer = vault.create(path, SPEC, rows=2, chunk_steps=4)

    looked = threading.Event()

    def record():
        with writer:
            for number, part in enumerate(parts):
                writer.append(*part)
                if number in (3, 7, 11, 15):  # let a slow reader see this length, too
                    writer.flush()
                    for _ in range(2):  # a look may have begun before
                        looked.clear()
                        looked.wait(10)

    thread = threading.Thread(target=record)
    thread.start()
    lengths = []
    while not lengths or lengths[-1] < 140:
        dataset = vault.open_vault(path)
        lengths.append(dataset.length)
        if dataset.length:
            expected = steps(transitions, 0, dataset.length)
            assert_same(dataset.transitions(), expected)
            assert table_of(dataset.episodes) == episodes_of(expected)
            assert len(dataset.finals.alive) == (dataset.episodes.final >= 0).sum()
        looked.set()
    thread.join()
    assert len(set(lengths)) > 3
