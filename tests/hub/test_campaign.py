"""Many kills of a pull."""

import os
import subprocess
import sys
import time

import pytest

from offmarl import hub as library
from offmarl.hub import cache

from .conftest import NAME, PATH, REPOSITORY, make_archive
from .test_pull import assert_whole

pytestmark = pytest.mark.slow
KILLS = 20


@pytest.mark.nightly
def test_kill_at_20_instants_loses_a_block_at_most(hub, tmp_path):
    archive = make_archive(300_000)
    hub.commit(REPOSITORY, {PATH: archive})
    hub.faults.delay = 0.02
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    counter = tmp_path / "received"
    script = [sys.executable, str(__file__).replace("test_campaign", "killed")]
    command = [*script, str(hub.cards), NAME, str(counter)]
    lost, lost_at_most = [], 2**17  # a block, and the directory of the archive is read again
    for instant in range(KILLS):
        counter.unlink(missing_ok=True)
        process = subprocess.Popen(command, env=environment)
        aim = len(archive) * (instant + 0.5) / KILLS
        while process.poll() is None and received(counter) < aim:
            time.sleep(0.002)
        process.kill()
        process.wait()
        (entry,) = cache.entries()
        lost.append(received(counter) - noted(entry))
        assert not entry.uids
        pulled = library.pull(NAME)
        assert_whole(archive, pulled.paths)
        assert pulled.fetched <= len(archive) - received(counter) + lost_at_most
        cache.remove(entry)
    print("bytes lost by each kill:", lost)
    assert max(lost) <= lost_at_most


def received(counter) -> int:
    return int(counter.read_text() or 0) if counter.exists() else 0


def noted(entry) -> int:
    """Bytes of the archive on the disk."""
    return sum(path.stat().st_size for path in entry.arriving.glob("*.part"))
