"""At whatever instant a process dies: the old or the new state, and nothing acknowledged lost."""

import random
import shutil
import signal
import subprocess
import sys
import time

import pytest

from offmarl import vault
from offmarl.errors import VaultLockedError

from .experience import SPEC, assert_same, concatenate, make, steps
from .killed import CHUNKS, record


def start(path, kill_at=0):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.vault.killed", str(path), str(kill_at)],
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The recording that nothing interrupts, and how many events it takes."""
    path = tmp_path_factory.mktemp("whole") / "v.vlt" / "a"
    out, _ = start(path).communicate()
    events = int(out.split()[-1])
    return vault.open_vault(path).digest(), events


@pytest.mark.slow
@pytest.mark.parametrize("instant", range(15))
def test_killed_at_any_instant_and_run_again(tmp_path, whole, instant):
    digest, events = whole
    # The first third of the instants are within creation.
    kill_at = 1 + (instant * 90 if instant < 5 else 450 + (instant - 5) * (events - 450) // 10)
    path = tmp_path / "v.vlt" / "a"
    process = start(path, kill_at)
    out, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL
    acknowledged = int((out.split() or ["0"])[-1])
    if not path.exists():
        assert acknowledged == 0
        assert list(vault.list_vaults(tmp_path)) == []
    else:
        check_prefix(path, acknowledged)
    record(path)
    assert vault.open_vault(path).digest() == digest


def check_prefix(path, acknowledged):
    found = vault.open_vault(path)
    chunks, rest = divmod(found.length, 7)
    assert rest == 0
    assert chunks >= acknowledged
    if chunks:
        parts = [make(steps=7, seed=chunk)[0] for chunk in range(chunks)]
        assert_same(found.transitions(), concatenate(parts))


@pytest.mark.slow
def test_killed_while_tensorstore_commits(tmp_path):
    """Its threads are no events of ours, so here the clock decides."""
    rng = random.Random(0)
    for attempt in range(8):
        path = tmp_path / f"v{attempt}.vlt" / "a"
        process = start(path)
        process.stdout.readline()
        time.sleep(rng.uniform(0, 0.02))
        process.kill()
        out, _ = process.communicate()
        lines = [line for line in out.split("\n") if line.isdigit()]
        check_prefix(path, int(lines[-1]) if lines else 3)
        record(path)
        check_prefix(path, CHUNKS)


def test_two_writers(tmp_path):
    path = tmp_path / "v.vlt" / "a"
    with vault.create(path, SPEC, rows=2) as writer:
        writer.append(*make())
        with pytest.raises(VaultLockedError, match="written by process"):
            vault.resume(path)
        writer.append(*make(seed=1))
    with vault.resume(path) as writer:
        assert writer.length == 20


def test_the_lock_of_a_dead_process_is_free(tmp_path):
    path = tmp_path / "v.vlt" / "a"
    hold = (
        "import sys, time; from pathlib import Path; from offmarl import vault\n"
        "from tests.vault.experience import SPEC, make\n"
        "writer = vault.create(Path(sys.argv[1]), SPEC, rows=2)\n"
        "writer.append(*make()); writer.flush(); print('held', flush=True); time.sleep(60)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", hold, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "held\n"
    with pytest.raises(VaultLockedError, match=f"process {process.pid} on "):
        vault.resume(path)
    assert vault.open_vault(path).length == 10
    process.kill()
    process.communicate()
    with vault.resume(path) as writer:
        assert writer.length == 10


def test_what_a_killed_creation_left_is_cleared(tmp_path):
    path = tmp_path / "v.vlt" / "a"
    record(path)
    shutil.copytree(path, tmp_path / "v.vlt" / ".b.new")
    (tmp_path / "v.vlt" / ".b.new" / "d" / "rest").write_text("")
    with vault.create(tmp_path / "v.vlt" / "b", SPEC, rows=2) as writer:
        writer.append(*make())
    assert_same(vault.open_vault(tmp_path / "v.vlt" / "b").transitions(), steps(make()[0], 0, 10))
    assert sorted(p.name for p in (tmp_path / "v.vlt").iterdir()) == ["a", "b"]
