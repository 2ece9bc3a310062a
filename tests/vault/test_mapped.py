"""Memory maps: changes to the files meanwhile, low memory use, and checked reads."""

import resource
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import chex
import google_crc32c
import numpy as np
import pytest

from offmarl import vault
from offmarl.errors import VaultChecksumError, VaultError
from offmarl.types import Discrete, EnvSpec
from offmarl.vault.read import arrays
from offmarl.vault.read.arrays import Arrays
from offmarl.vault.read.chunks import MappedArray
from offmarl.vault.read.manifest import map_contents
from offmarl.vault.storage.commit import Region
from offmarl.vault.storage.store import store_of
from tests.children import python

from .damage import put
from .experience import SPEC, assert_same, make, steps, written


def record(path: Path, count: int = 40, chunk_steps: int = 32) -> Path:
    written(path, make(rows=2, steps=count), chunk_steps=chunk_steps)
    return path


@pytest.fixture(params=[True, False], ids=["mapped", "read"])
def mapped(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether vaults are read by memory maps."""
    if not request.param:
        monkeypatch.setattr(vault.Dataset, "_mapped", False)
    return request.param


def test_more_data_files_than_a_process_may_open(tmp_path: Path) -> None:
    spec = replace(SPEC, observation_size=40)  # short values are in the tree, and not in the files
    path, (transition, _) = tmp_path / "data.vlt", make(spec, rows=2, steps=60)
    with vault.create(path, spec, rows=2, chunk_steps=1) as writer:
        for step in range(60):
            writer.append(steps(transition, step, step + 1))
            writer.flush()
    assert len([*(path / "main" / "d").iterdir()]) > 60
    dataset = vault.open_vault(path)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = 20 + len([*Path("/dev/fd").iterdir()])
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    try:
        dataset.prepare_fork()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    np.testing.assert_array_equal(dataset[:].reward, transition.reward)


def test_steps_of_large_windows_go_where_they_are_asked_for(tmp_path: Path) -> None:
    """A step's observations take 640 bytes; some windows cross the end of a chunk."""
    spec = EnvSpec("", num_agents=2, observation_size=80, state_size=0, action=Discrete(4))
    transition, finals = make(spec, rows=2, steps=40)
    dataset = written(tmp_path / "data.vlt", (transition, finals), spec=spec, chunk_steps=16)
    rows, starts, length = np.array([0, 1, 1]), np.array([3, 13, 30]), 5
    index = np.array([[0, 1, 2], [6, 7, 9], [14, 13, 12]])  # counted through all windows
    time = (starts[:, None] + np.arange(length)).ravel()
    expected = transition.view.observation[rows.repeat(length), time][index]
    for at in (None, np.array([4, 0, 2])):
        places = np.arange(3) if at is None else at
        out = np.full((places.max() + 1, 3, 2, 80), np.nan, np.float32)
        dataset.window_fields(rows, starts, length, index, {"observation": out}, at)
        np.testing.assert_array_equal(out[places], expected)
        assert np.isnan(np.delete(out, places, 0)).all()


def test_another_vault_in_its_place(tmp_path: Path) -> None:
    dataset = vault.open_vault(record(tmp_path / "data.vlt"))
    (tmp_path / "data.vlt" / "main").rename(tmp_path / "away")
    record(tmp_path / "data.vlt", count=20)
    with pytest.raises(VaultError, match="was replaced"):
        dataset.windows([0], [0], 5)


def largest_file(path: Path) -> Path:
    return max((path / "main" / "d").iterdir(), key=lambda file: file.stat().st_size)


@pytest.mark.parametrize("damage", [lambda f: f.unlink(), lambda f: f.write_bytes(b"short")])
def test_data_files_lost_or_cut_off(tmp_path: Path, damage) -> None:
    path = record(tmp_path / "data.vlt")
    dataset = vault.open_vault(path)
    damage(largest_file(path))
    with pytest.raises(VaultError, match=r"damaged after it was opened|cannot be read|has lost"):
        dataset.windows([0], [0], 5)


@pytest.mark.usefixtures("mapped")
def test_checked_reads_name_what_is_damaged(tmp_path: Path) -> None:
    path = record(tmp_path / "data.vlt", count=64)
    needle = make(rows=2, steps=64)[0].reward[1, 32:].tobytes()
    file = next(f for f in (path / "main" / "d").iterdir() if needle in f.read_bytes())
    data = bytearray(file.read_bytes())
    data[data.index(needle) + 5] ^= 16
    file.write_bytes(data)

    dataset = vault.open_vault(path)
    dataset.read(0, 32)
    dataset.read(leaves=["observations"])
    hit = np.flatnonzero(dataset.episodes.start + dataset.episodes.length > 32)
    place = rf"rewards, rows 0 to 1, steps 32 to 63: its checksum is wrong \(.*{hit[0]}.*\)"
    for use in (lambda: dataset.read(60, 64), lambda: dataset.windows([0], [30], 5)):
        with pytest.raises(VaultChecksumError, match=place):
            use()
    unchecked = vault.open_vault(path, checked=False)
    unchecked.read()
    assert unchecked.unchecked == ("all arrays: the vault was opened with checked=False",)


def test_checks_of_vaults_without_checksums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from .test_stock import append_with_stock, open_stock, to_stock, write_stock

    path = record(tmp_path / "data.vlt") / "main"
    transition = make(rows=2, steps=12, seed=1)[0]
    append_with_stock(open_stock(path), transition)  # the chunk's checksum is no longer right
    for mapped in (True, False):
        monkeypatch.setattr(vault.Dataset, "_mapped", mapped)
        dataset = vault.open_vault(path)
        assert dataset.unchecked == ("steps 32 to 51: another program appended to them",)
        rewards = dataset.read(leaves=["rewards"])["rewards"][:, 40:]
        np.testing.assert_array_equal(rewards, transition.reward)
    theirs = write_stock(tmp_path / "foreign.vlt" / "a", to_stock(transition))
    np.testing.assert_array_equal(theirs.read()["rewards"], transition.reward)
    assert "a program other than offmarl wrote them" in theirs.unchecked[0]


def test_the_disk_is_asked_for_windows_as_long_as_it_has_to_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All are requested at once: page after page took fifty times as long on a cold disk."""
    dataset = vault.open_vault(record(tmp_path / "data.vlt"))
    # Before and after each call: read on request, in memory already, read without a request.
    reading = iter([0, 8, 8, 8, 8, 11, 11, 16])
    monkeypatch.setattr(arrays, "_disk_reads", lambda: next(reading))
    requests: list[int] = []
    ask = MappedArray.prefetch
    monkeypatch.setattr(MappedArray, "prefetch", lambda *args: requests.append(1) or ask(*args))
    counts = []
    for _ in range(4):
        dataset.windows([0], [3], 5, ["rewards"])
        counts.append(len(requests))
    assert counts == [1, 2, 2, 3]


@pytest.mark.parametrize(("start", "length"), [(3, 5), (30, 5), (5, 35), (0, 40), (32, 8)])
def test_the_disk_is_asked_for_every_byte_of_a_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, start: int, length: int
) -> None:
    """And of the chunks in it, which must be compared."""
    dataset = vault.open_vault(record(tmp_path / "data.vlt"))
    requests: list[tuple[int, int]] = []
    monkeypatch.setattr(
        Region, "will_need", lambda _, *spans: requests.extend(zip(*spans, strict=True))
    )
    dataset.windows([1], [start], length, ["observations"])
    chunk = 2 * 32 * dataset.leaves["observations"].step_bytes
    assert [size for _, size in requests].count(chunk) == 1 + (start < 32 < start + length)
    region = map_contents(dataset.store, dataset.manifest).region.bytes
    data = {region[begin : begin + size].tobytes() for begin, size in requests}
    expected = make(rows=2, steps=40)[0].view.observation[1, start : start + length]
    assert expected.tobytes() in data or {step.tobytes() for step in expected} <= data


def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collect the bytes that are compared with a checksum from now on."""
    sizes: list[int] = []
    value = google_crc32c.value

    def noted(data: bytes | np.ndarray) -> int:
        sizes.extend([data.nbytes] if isinstance(data, np.ndarray) else [])
        return value(data)

    monkeypatch.setattr(google_crc32c, "value", noted)
    return sizes


def test_each_chunk_is_compared_once(
    tmp_path: Path, mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = record(tmp_path / "data.vlt", count=96)
    data = vault.open_vault(path)
    sizes = compared(monkeypatch)
    rewards = 2 * 32 * data.leaves["rewards"].step_bytes
    data.windows([0, 1, 1], [3, 3, 20], 5, ["rewards", "actions"])
    assert sizes == [rewards, 2 * 32 * data.leaves["actions"].step_bytes]
    data.read(0, 40, leaves=["rewards"])
    assert sizes[2:] == [rewards]
    expected = vault.open_vault(path, checked=False).read()
    for _ in range(2):
        chex.assert_trees_all_equal(data.read(), expected)
    data.windows([0], [0], 96)
    data.episode(0), data.transitions(5, 7), data[:]
    total = sum(2 * 96 * leaf.step_bytes for leaf in data.leaves.values())
    assert sum(sizes) == total if mapped else sum(sizes) >= total  # as often as they are fetched


@pytest.mark.usefixtures("mapped")
def test_what_a_dead_stock_program_left_past_the_end_is_not_compared(tmp_path: Path) -> None:
    path = record(tmp_path / "data.vlt") / "main"
    chunk = bytearray(store_of(path).get("rewards./0.1.0"))
    chunk[-4:] = b"left"
    put(path, {"rewards./0.1.0": chunk})
    assert_same(vault.open_vault(path)[:], make(rows=2, steps=40)[0])
    assert vault.verify(path, deep=True).sound


@pytest.mark.usefixtures("mapped")
def test_a_writer_while_a_checked_reader_reads(tmp_path: Path) -> None:
    """The last chunk and its checksum are replaced between two reads of it."""
    path = record(tmp_path / "data.vlt")
    dataset, not_read_yet = vault.open_vault(path), vault.open_vault(path)
    first = make(rows=2, steps=40)[0]
    for seed in range(1, 4):
        assert_same(dataset[:], first)
        with vault.resume(path) as writer:
            writer.append(*make(rows=2, steps=3, seed=seed))
    assert_same(not_read_yet[:], first)


LITTLE_MEMORY = """
import resource, sys
import numpy as np
from offmarl import vault
found = vault.open_vault(sys.argv[1])
found.windows(np.zeros(16, int), np.arange(16), 20, ["observations"])
# A thread that starts late takes 8 MB for its stack, and more for its heap.
in_use = int(open("/proc/self/statm").read().split()[5]) * resource.getpagesize()
limit = in_use + 2**27
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
rng = np.random.default_rng(0)
total = 0.0
for _ in range(40):
    starts = rng.integers(0, found.length - 20, 16)
    windows = found.windows(np.zeros(16, int), starts, 20, ["observations"])["observations"]
    total += float(windows[:, :, 0, 0].sum())
try:
    found.read(leaves=["observations"])
except MemoryError:
    print(found.num_steps * found.leaves["observations"].step_bytes, total)
"""


_READS_TO_THE_END = """
import sys
from threading import Event
import offmarl
from offmarl._ahead import end_if_abandoned, in_thread

data, has_read = offmarl.open(sys.argv[1]), Event()
data.prepare_fork()

def read():
    while True:
        end_if_abandoned()
        has_read.set()
        for _ in range(50):
            data.read()

in_thread(read, "reader")
has_read.wait()
"""


def test_a_thread_reads_while_the_interpreter_ends(tmp_path: Path) -> None:
    python("-c", _READS_TO_THE_END, record(tmp_path / "data.vlt", count=2000))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux")
def test_threads_that_map_while_others_read(tmp_path: Path, monkeypatch) -> None:
    """A read continues with the state at its start while another thread maps the files."""
    path = record(tmp_path / "data.vlt", count=640, chunk_steps=8)
    dataset, rewards = vault.open_vault(path), make(rows=2, steps=640)[0].reward
    copy, is_first = Arrays._copy, iter([True])

    def interrupted(*args):
        copy(*args)
        if next(is_first, False):
            with ThreadPoolExecutor() as pool:
                pool.submit(dataset.windows, [0, 1], [0, 8], 6).result()

    monkeypatch.setattr(Arrays, "_copy", interrupted)
    part = dataset.read(0, 8, leaves=["rewards"])["rewards"]
    assert dataset._arrays._is_mapped
    np.testing.assert_array_equal(part, rewards[:, :8])


def test_threads_share_a_map(tmp_path: Path, monkeypatch) -> None:
    """The files are mapped once, whichever thread is first, and all threads read them."""
    path = record(tmp_path / "data.vlt", count=64, chunk_steps=8)
    rewards, mapped = make(rows=2, steps=64)[0].reward, []

    def slowly(*args):
        mapped.append(args)
        time.sleep(0.02)  # the others come now
        return map_contents(*args)

    monkeypatch.setattr(arrays, "map_contents", slowly)
    dataset, together = vault.open_vault(path), threading.Barrier(8)
    starts = np.arange(0, 56, 8)

    def read(number: int) -> None:
        together.wait()
        if number % 2:
            windows = dataset.windows(starts * 0 + 1, starts, 8, ["rewards"])["rewards"]
            np.testing.assert_array_equal(windows, rewards[1, :56].reshape(-1, 8, 2))
        else:
            np.testing.assert_array_equal(dataset.read(leaves=["rewards"])["rewards"], rewards)

    with ThreadPoolExecutor(8) as pool:
        for done in [pool.submit(read, number) for number in range(8)]:
            done.result()
    assert len(mapped) == 1


def test_windows_of_more_than_memory(tmp_path: Path) -> None:
    """Windows of 192 MB with 128 MB to spare, in which reading all of it fails."""
    spec = EnvSpec("", 2, 1200, 1, Discrete(2))
    path = tmp_path / "large.vlt"
    block, _ = make(spec, rows=1, steps=1000)
    with vault.create(path, spec, rows=1) as writer:
        for _ in range(20):
            writer.append(block)
    out = python("-c", LITTLE_MEMORY, path).split()
    rng = np.random.default_rng(0)
    expected = 0.0
    for _ in range(40):
        index = rng.integers(0, 20_000 - 20, 16)[:, None] + np.arange(20)
        expected += float(block.view.observation[0, index % 1000, 0, 0].sum())
    assert out == [str(192_000_000), str(expected)]
