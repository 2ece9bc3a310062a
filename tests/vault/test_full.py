"""The disk is full at every write there is: an error that says so, and nothing lost."""

import gc
import shutil
from contextlib import suppress

import pytest

from offmarl import vault
from offmarl.errors import VaultFullError, VaultNotFoundError

from .experience import SPEC, assert_same, concatenate, whole_episodes

PAGE = 4096
PARTS = [whole_episodes(steps=40, seed=seed) for seed in range(8)]


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
    """Return how much is there, of which every step is what was appended."""
    try:
        found = vault.open_vault(path)
    except VaultNotFoundError:
        return 0
    if found.length:
        assert found.length % 40 == 0
        parts = PARTS[: found.length // 40]
        assert_same(found.transitions(), concatenate([transition for transition, _ in parts]))
        assert len(found.finals.alive) == sum(len(finals.row) for _, finals in parts)
    return found.length


def fail_with(room, place):
    """Record with so many bytes of room; return whether that was enough, and how far it came."""
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
    "step", [24, pytest.param(4, marks=pytest.mark.nightly)], ids=["some", "many"]
)
def test_full_at_every_write(small_disk, step):
    outcomes = [fail_with(pages * PAGE, small_disk) for pages in range(1, 200, step)]
    enough, reached = zip(*outcomes, strict=True)
    assert not enough[0]
    assert enough[-1]
    assert len(set(reached)) > 2


def test_a_writer_goes_on_when_there_is_room(small_disk):
    path, ballast = small_disk / "v.vlt" / "a", small_disk / "ballast"
    with vault.create(path, SPEC, rows=2, chunk_steps=16) as writer:
        append_on(writer, 0, 1)
        writer.flush()
        with ballast.open("wb") as file, suppress(OSError):
            file.write(bytes(2**20))
        append_on(writer, 2, 3)
        with pytest.raises(VaultFullError, match="no room on the disk"):
            writer.flush()
        assert length(path) == 80
        append_on(writer, 4)
        with pytest.raises(VaultFullError):
            writer.flush()
        ballast.unlink()
    assert length(path) == 200
