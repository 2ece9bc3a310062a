"""Runs of two processes, of which one is stopped, lost, hangs, fails or has other arguments."""

import signal
import time
from pathlib import Path

import pytest

from offmarl import vault
from tests.programs.several_processes import FAULTY, ended, finished, start

pytestmark = pytest.mark.nightly

VAULT = Path("classic/xor.vlt/random-0")
COMMAND = ["record", "random", "--env", "classic/xor", "--steps", 160_000, "--num-envs", 16]
COMMAND += ["--out"]


def begun(tmp_path, **options):
    """Start two processes, and wait for a checkpoint of theirs."""
    started = start(*COMMAND, tmp_path, "--checkpoint-seconds", 0.1, **options)
    end, saved = time.monotonic() + 120, f".{VAULT.name}.recording/[0-9]*/about"
    while not any((tmp_path / VAULT.parent).glob(saved)):
        assert time.monotonic() < end and all(p.poll() is None for p in started), ended(started)
        time.sleep(0.1)
    return started


def is_continued(tmp_path):
    """Whether the recording is unfinished, and the same commands finish it."""
    assert not vault.open_vault(tmp_path / VAULT).provenance["complete"]
    finished(start(*COMMAND, tmp_path))
    data = vault.open_vault(tmp_path / VAULT)
    return data.provenance["complete"] and vault.verify(tmp_path / VAULT).sound


@pytest.mark.parametrize("lost", [0, 1])
def test_a_lost_process_ends_the_others_and_the_same_commands_continue(lost, tmp_path):
    started = begun(tmp_path)
    started[lost].kill()
    code, errors = ended(started)[1 - lost]
    assert code and errors
    assert is_continued(tmp_path)


@pytest.mark.parametrize("signalled", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_any_process_stops_all_with_a_checkpoint(signalled, signum, tmp_path):
    started = begun(tmp_path)
    for number in signalled:
        started[number].send_signal(signum)
    for code, errors in ended(started, 30):
        assert code == -signum and "the same command resumes there" in errors
        assert "Traceback" not in errors and "Terminating" not in errors
    assert is_continued(tmp_path)


@pytest.mark.parametrize("hung", [0, 1])
def test_a_process_that_hangs_ends_the_others(hung, tmp_path):
    started = begun(tmp_path, patience=5)
    started[hung].send_signal(signal.SIGSTOP)
    try:
        ((code, errors),) = ended([started[1 - hung]], 40)
    finally:
        started[hung].send_signal(signal.SIGCONT)
    assert code and errors
    assert ended([started[hung]], 60)[0][0]
    assert is_continued(tmp_path)


@pytest.mark.parametrize("faulty", [0, 1])
def test_a_bug_in_one_process_ends_the_others_within_seconds(faulty, tmp_path):
    begin = time.monotonic()
    results = ended(start(*COMMAND, tmp_path, programs={faulty: ["-c", FAULTY]}), 60)
    assert time.monotonic() - begin < 45  # a barrier of JAX would wait for 300 s
    assert results[faulty][0] == 1 and "a bug of the program" in results[faulty][1]
    code, errors = results[1 - faulty]
    assert code and errors


@pytest.mark.parametrize(
    ("each", "words"),
    [
        ({1: ["--seed", 5]}, "--seed is 5 in process 1 and 0 in process 0"),
        ({1: ["--processes", 3]}, "--processes is 3 in process 1 and 2 in process 0"),
    ],
)
def test_processes_with_other_arguments_are_refused(each, words, tmp_path):
    for code, errors in ended(start(*COMMAND, tmp_path, each=each), 60):
        assert code and words in errors and "Traceback" not in errors
    assert not (tmp_path / VAULT).exists()


@pytest.mark.parametrize("number", [0, 1])
def test_two_processes_with_one_number_are_refused(number, tmp_path):
    each = {1 - number: ["--process", number]}
    results = ended(start(*COMMAND, tmp_path, each=each), 100)
    matches = ["its own --process" in text or "start process 0" in text for _, text in results]
    assert all(code and "Traceback" not in text for code, text in results)
    # JAX aborts the first process 0, which waits for a process 1 that does not come.
    assert all(matches) or (number == 0 and any(matches))
    assert not (tmp_path / VAULT).exists()
