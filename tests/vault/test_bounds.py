"""The limits of requests: numbers of more than 32 bits, and the last episode."""

import shutil

import numpy as np
import pytest

from offmarl import vault
from offmarl.errors import OptionError, VaultError

from .experience import make, whole_episodes, written


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    path = tmp_path_factory.mktemp("bounds") / "a.vlt"
    return written(path, whole_episodes(steps=20), chunk_steps=8)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64, object])
@pytest.mark.parametrize("number", [2**31, 2**32, 2**32 + 5, 2**40])
def test_windows_past_32_bits_do_not_wrap(data, number, dtype):
    zeros, large = np.array([0]), np.array([number], dtype)
    if dtype is object:
        large = [number]  # as Python has it
    with pytest.raises(VaultError, match=f"steps {number} to {number + 3} were requested"):
        data.windows(zeros, large, 3)
    with pytest.raises(VaultError, match=f"rows {number} to {number} were requested"):
        data.windows(large, zeros, 3)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32])
def test_the_end_of_a_window_is_not_counted_in_small_integers(data, dtype):
    most = int(np.iinfo(dtype).max)
    with pytest.raises(VaultError, match=f"steps {most} to {most + 3} were requested"):
        data.windows(np.zeros(1, dtype), np.array([most], dtype), 3)
    window = data.windows(np.ones(1, dtype), np.array([17], dtype), 3, ["rewards"])["rewards"]
    np.testing.assert_array_equal(window[0], data.read(17, 20, leaves=["rewards"])["rewards"][1])


@pytest.mark.parametrize(
    ("rows", "starts", "message"),
    [
        ([0.0], [0], "the rows of windows are whole numbers: got float64"),
        ([0], [0.5], "the starts of windows are whole numbers: got float64"),
        ([True], [0], "the rows of windows are whole numbers: got bool"),
        ([[0]], [[0]], r"with rows \(1, 1\) and starts \(1, 1\)"),
        ([0, 0], [0], r"with rows \(2,\) and starts \(1,\)"),
        ([0, -1], [0, 0], "rows -1 to 0 were requested, and .* has rows 0 to 1"),
        ([0, 2], [0, 0], "rows 0 to 2 were requested"),
        ([0, 0], [-1, 3], "steps -1 to 6 were requested"),
        ([0, 0], [0, 18], "steps 0 to 21 were requested"),
    ],
)
def test_windows_that_cannot_be(data, rows, starts, message):
    with pytest.raises(VaultError, match=message):
        data.windows(rows, starts, 3)


@pytest.mark.parametrize("numbers", [[-1], [0, 10_000], [2**32]])
def test_final_views_that_are_not_there(data, numbers):
    with pytest.raises(VaultError, match=r"final views .* were requested"):
        data.final_views(np.array(numbers))


def test_final_views_in_the_order_they_are_asked_for(data):
    last = len(data.finals.state) - 1
    views = data.final_views(np.array([last, 0, last]))
    np.testing.assert_array_equal(views.state, data.finals.state[[last, 0, last]])
    assert data.final_views(np.zeros(0, int)).state.shape == (0, 5)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda v: v.read(0, 21), "steps 0 to 21 were requested, and .* has steps 0 to 20"),
        (lambda v: v.read(5, 3), "steps 5 to 3 were requested"),
        (lambda v: v.read(rows=slice(None, None, 2)), "a slice of rows must have a stride of 1"),
        (lambda v: v.read(leaves=["reward"]), "no array named 'reward'"),
        (lambda v: v.windows([0], [0], 3, ["reward"]), "no array named 'reward'"),
        (lambda v: v.windows([0], [0], 0), "at least 1 step"),
        (lambda v: v[::2], "stride of 1: got 2"),
        (lambda v: v[::-1], "stride of 1: got -1"),
        pytest.param(
            lambda v: v[1.5],
            "cannot be indexed by 1.5: give the number of an episode, or a slice",
            marks=pytest.mark.untyped,
        ),
        pytest.param(
            lambda v: v["rewards"], "cannot be indexed by 'rewards'", marks=pytest.mark.untyped
        ),
        *(
            pytest.param(
                lambda v, rows=rows: v.read(0, 10, rows=rows),
                r"rows are given by a slice, such as slice\(0, 2\): got",
                marks=pytest.mark.untyped,
            )
            for rows in (0, [0])
        ),
    ],
)
def test_what_is_not_there_and_cannot_be_asked_for(data, ask, message):
    with pytest.raises(VaultError, match=message):
        ask(data)


def test_blocks_cover_time_and_end_where_chunks_do(data, monkeypatch):
    assert list(data.blocks()) == [(0, 20)]
    step = 2 * data.leaves["rewards"].step_bytes
    for limit, expected in (
        (1, [(0, 8), (8, 16), (16, 20)]),
        (16 * step, [(0, 16), (16, 20)]),
        (16 * step - 1, [(0, 8), (8, 16), (16, 20)]),
    ):
        monkeypatch.setattr("offmarl.vault.read.reader._BLOCK_BYTES", limit)
        assert list(data.blocks(["rewards"])) == expected
    assert list(data.blocks(["rewards"], start=10)) == [(10, 16), (16, 20)]
    monkeypatch.setattr("offmarl.vault.read.reader._BLOCK_BYTES", 16 * step)
    assert list(data.blocks(["rewards"], rows=1)) == [(0, 20)]


def test_one_vault_of_a_time_limit_and_without(tmp_path):
    path = tmp_path / "a.vlt"
    data = written(path, make())
    with pytest.raises(OptionError, match="leave the time limit out"):
        vault.open_vault(path, time_limit=5)
    assert (data.name, data.uid, data.quirks) == ("a", "main", ())


def test_facts_without_reading(data):
    files = [file for file in data.path.rglob("*") if file.is_file()]
    assert data.num_bytes == sum(file.stat().st_size for file in files) > 0
    assert repr(data) == (f"<Dataset '{data.path}': test/made-up, 2 agents, 40 steps in 2 rows>")


def test_an_archive_is_not_read_to_learn_its_size(data, tmp_path):
    archive = shutil.make_archive(str(tmp_path / "b"), "zip", data.path.parents[1], "a.vlt")
    assert vault.open_vault(f"{archive}/a.vlt").num_bytes is None
