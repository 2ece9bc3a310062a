"""A full disk at every single write: an error that says so, and nothing lost."""

import gc
import shutil
from contextlib import suppress

import pytest

from offmarl import vault
from offmarl.errors import ShapeError, VaultFullError, VaultLockedError, VaultNotFoundError

from .experience import SPEC, assert_same, concatenate, whole_episodes

PAGE = 4096
PARTS = [whole_episodes(steps=40, seed=seed) for seed in range(8)]


@pytest.fixture(autouse=True)
def quick_collections():
    """Exclude the objects of other tests from the garbage collections below."""
    gc.freeze()
    yield
    gc.unfreeze()


def record(path):
    """Create, append, go on, append beside others; skip what is there."""
    if not path.exists():
        with vault.create(path, SPEC, rows=2, chunk_steps=16) as writer:
            append(writer.append, range(3), run="me")
    with vault.resume(path) as writer:
        append(writer.append, range(6), run="me")
        writer.flush()
        writer.annotate({"whole": True})
    with vault.join(path, "other", gather=50) as shared:
        append(shared.append, range(6, 8))


def append(function, numbers, **options):
    for chunk, number in enumerate(numbers):
        function(*PARTS[number], chunk=chunk, **options)


def append_on(writer, *numbers):
    for number in numbers:
        writer.append(*PARTS[number])


def length(path):
    """Return the length of the vault, after a check that every step is as appended."""
    try:
        dataset = vault.open_vault(path)
    except VaultNotFoundError:
        return 0
    if dataset.length:
        assert dataset.length % 40 == 0
        parts = PARTS[: dataset.length // 40]
        assert_same(dataset.transitions(), concatenate([transition for transition, _ in parts]))
        assert len(dataset.finals.alive) == sum(len(finals.row) for _, finals in parts)
    return dataset.length


def fail_with(room, place):
    """Record with this many bytes of room; return whether it sufficed, and the recorded length."""
    path, ballast = place / "v.vlt" / "a", place / "ballast"
    ballast.write_bytes(bytes(2**20 - room))
    enough = True
    try:
        record(path)
    except VaultFullError:
        enough = False
    reached = length(path)
    ballast.unlink()
    record(path)
    assert length(path) == 320
    assert vault.open_vault(path).provenance == {"whole": True}
    shutil.rmtree(path.parent)
    gc.collect()  # a mapped file keeps its room
    return enough, reached


@pytest.mark.parametrize(
    "step", [30, pytest.param(4, marks=pytest.mark.nightly)], ids=["some", "many"]
)
@pytest.mark.slow
def test_full_at_every_write(small_disk, step):
    outcomes = [fail_with(pages * PAGE, small_disk) for pages in range(1, 200, step)]
    enough, reached = zip(*outcomes, strict=True)
    assert not enough[0]
    assert enough[-1]
    # How far the records between come depends on the instant of the commit in the background.
    assert reached[0] == 0
    assert reached[-1] == 320


@pytest.fixture
def full(small_disk):
    """A vault of one part and no room for more: its path, a way to fill the disk and one to empty.

    They are given as ``(path, fill, empty)``.
    """
    ballast = small_disk / "ballast"

    def fill():
        with ballast.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                file.write(bytes(PAGE))

    return small_disk / "v.vlt" / "a", fill, ballast.unlink


def begin(path, fill):
    """Commit a part, append another, and fill the disk."""
    writer = vault.create(path, SPEC, rows=2, chunk_steps=16)
    append_on(writer, 0)
    writer.flush()
    fill()
    append_on(writer, 1)
    return writer


def test_close_without_room_keeps_the_steps_until_there_is_some(full):
    path, fill, empty = full
    writer = begin(path, fill)
    for _ in range(2):
        with pytest.raises(VaultFullError, match="no space left on the disk"):
            writer.close()
        assert length(path) == 40
        with pytest.raises(VaultLockedError):
            vault.resume(path)
    empty()
    writer.close()
    assert length(path) == 80
    writer.close()
    vault.resume(path).close()


def test_a_writer_that_is_given_up_lets_others_write(full):
    path, fill, empty = full
    writer = begin(path, fill)
    with pytest.raises(VaultFullError):
        writer.close()
    writer.release()
    writer.close()
    empty()
    vault.resume(path).close()
    writer = begin(path.with_name("b"), fill)
    with suppress(VaultFullError):
        writer.close()
    del writer
    gc.collect()
    empty()
    vault.resume(path.with_name("b")).close()
    assert length(path) == length(path.with_name("b")) == 40


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ShapeError])
def test_a_block_that_ends_without_room_says_what_is_lost(full, error):
    path, fill, empty = full
    with pytest.raises(VaultFullError, match="the last 40 steps of each row were not") as raised:  # noqa: SIM117
        with begin(path, fill):
            if error:
                raise error
    chain = [raised.value]
    while chain[-1] is not None:
        chain.append(chain[-1].__cause__ or chain[-1].__context__)
    assert error is None or error in map(type, chain), "what ended the block is told too"
    empty()
    with vault.resume(path) as writer:
        assert writer.length == 40
        append_on(writer, 1)
    assert length(path) == 80


def test_shared_writers_keep_their_steps_too(full):
    path, fill, empty = full
    begin(path, lambda: None).close()
    shared = vault.join(path, "other", gather=100)
    fill()
    append_on(shared, 2)
    for _ in range(2):
        with pytest.raises(VaultFullError):
            shared.close()
    empty()
    shared.close()
    assert length(path) == 120


@pytest.mark.parametrize("free", range(0, 16, 3))
def test_a_map_without_room_leaves_nothing(full, tmp_path, free):
    """The disk has room for ``free`` pages; the new vault takes more."""
    path, fill, _ = full
    with vault.create(tmp_path / "a.vlt", SPEC, rows=2, chunk_steps=16) as writer:
        append_on(writer, *range(8))
    fill()
    with (path.parents[1] / "ballast").open("r+b") as file:
        file.truncate(file.seek(0, 2) - free * PAGE)
    with pytest.raises(VaultFullError):
        vault.map(tmp_path / "a.vlt", path, reward="2 * reward")
    assert not path.exists()
