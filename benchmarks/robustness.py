"""Tests that kills and flipped bits never lead to wrong data without an error.

    python benchmarks/robustness.py [--kills 100] [--flips 200] [--recorder-kills 10]
        [--directory DIR] [--seed 0]

Kills: programs that write are killed (SIGKILL) at random instants: creating and appending, several
writers of one vault, and `offmarl train`. After each kill, the vault must not exist or hold a
prefix of the data that an undisturbed program writes. Programs that are started again must end with
the same content, and a training run with the same parameters. Every recorder is killed
--recorder-kills times, and must end with the same vaults and the same parameters.

Flips: one bit at a time is flipped, in each file of a raw vault, of a zstd vault and of a run's
checkpoints. The vaults are then read by training, and the checkpoints by loading the policy and by
resuming the run. Each flip must raise an error of offmarl or leave the result identical: many bytes
of a vault are unused, because later commits replaced them. Everything else counts as wrong, is
listed, and makes the exit status 1.
"""

import argparse
import hashlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import offmarl  # noqa: E402
from offmarl import vault  # noqa: E402
from offmarl.errors import OffmarlError, VaultNotFoundError  # noqa: E402
from offmarl.programs import registry  # noqa: E402
from offmarl.vault.format.layout import LOCK  # noqa: E402
from tests.vault.experience import SPEC, make  # noqa: E402
from tests.vault.killed import Victims  # noqa: E402

CHAIN = 5
"""Kills of a command before it may end and is compared."""
UPDATES = 8
WRITERS = ("record", "create_whole", "share")
RECORD = (
    "--env probe/observation --tiers random,replay --steps 4096 --total-steps 8192 --num-envs 16 "
    "--evaluations 4 --eval-episodes 16 --checkpoint-seconds 0.2"
)

FIXED = "--env swarm/hover-2 --steps 400000 --num-envs 16 --checkpoint-seconds 0.2"
"""Options of the recorders that do not train."""

POPULATION = (
    "--env classic/rps --iterations 3 --response-steps 4096 --episodes 64 --steps 4096 "
    "--num-envs 16"
)


class Outcome(NamedTuple):
    """The results of some damage."""

    target: str
    detected: int
    """Errors of offmarl."""
    identical: int
    wrong: tuple[str, ...]
    """Other content without an error, or an error that is not one of offmarl's."""
    seconds: float


# ------------------------------------------------------------------- flips


def write_vault(path: Path, codec: str) -> Path:
    """Write a vault with several commits, unused bytes, final views, and a partial chunk."""
    options = {"chunk_steps": 32, "codec": codec, "provenance": {"recorder": "x" * 200}}
    with vault.create(path, SPEC, rows=2, **options) as writer:
        for commit in range(6):
            writer.append(*make(rows=2, steps=37, seed=commit))
            writer.flush()
    return path


def digest_of(tree: object) -> str:
    """Return the SHA-256 of the arrays of a pytree."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(tree):
        digest.update(np.ascontiguousarray(leaf).tobytes())
    return digest.hexdigest()


def train(path: Path, run: Path, updates: int = UPDATES) -> str:
    """Train on a vault as the command line does, and return a hash of the parameters."""
    baseline = registry.load("baseline", "bc")
    options = {"seeds": 1, "updates": updates, "eval_every": UPDATES // 2, "batch_size": 8}
    args = baseline.Args(vault=path, out=run, env="none", length=5, hidden=8, **options)
    try:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()):
            return digest_of(offmarl.load_policy(baseline.main(args), 0).params)
    finally:
        jax.clear_caches()  # the programs of hundreds of runs would fill the memory


def train_anew(path: Path) -> str:
    """Train on a vault in a directory of its own."""
    with tempfile.TemporaryDirectory() as name:
        return train(path, Path(name) / "run")


def go_on(path: Path, run: Path) -> str:
    """Load the policy of a stopped run, and resume a copy of the run."""
    policy = digest_of(offmarl.load_policy(run, 0).params)
    with tempfile.TemporaryDirectory() as name:
        copy = shutil.copytree(run, Path(name) / "run")
        return policy + train(path, copy)


def flips(
    title: str, directory: Path, read: Callable[[], str], count: int, rng: random.Random
) -> Outcome:
    """Flip bits in every file below a directory in turn, and read."""
    expected, began = read(), time.monotonic()
    files = sorted(f for f in directory.rglob("*") if f.is_file() and f.stat().st_size)
    files = [file for file in files if file.name != LOCK]
    counts: Counter[str] = Counter()
    wrong = []
    for number in range(count):
        file = files[number % len(files)]
        outcome = outcome_of_flip(file, rng.randrange(8 * file.stat().st_size), read, expected)
        counts[outcome] += 1
        if outcome not in ("detected", "identical"):
            wrong.append(f"{file.relative_to(directory)}: {outcome}")
    seconds = time.monotonic() - began
    return Outcome(title, counts["detected"], counts["identical"], tuple(wrong), seconds)


def outcome_of_flip(file: Path, bit: int, read: Callable[[], str], expected: str) -> str:
    """Flip one bit of a file, read, and put the bit back."""
    data = file.read_bytes()
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    file.write_bytes(flipped)
    try:
        same = read() == expected
    except OffmarlError:
        return "detected"
    except Exception as error:
        return f"raw error, bit {bit}: {type(error).__name__}: {str(error)[:80]!r}"
    finally:
        file.write_bytes(data)
    return "identical" if same else f"silent, bit {bit}: other parameters"


def all_flips(root: Path, count: int, seed: int) -> Iterator[Outcome]:
    """Flip bits of both kinds of vaults and of the checkpoints of a run that was stopped."""
    for codec in ("raw", "zstd"):
        path = write_vault(root / f"{codec}.vlt" / "a", codec)
        rng = random.Random(f"{seed} {codec}")
        yield flips(f"{codec} vault", path, lambda path=path: train_anew(path), count, rng)
    path, run = root / "raw.vlt" / "a", stopped_run(root)
    rng = random.Random(f"{seed} checkpoints")
    yield flips("checkpoints", run / "checkpoints", lambda: go_on(path, run), count, rng)


def stopped_run(root: Path) -> Path:
    """Return a run that was killed after its first checkpoint."""
    path, run = root / "raw.vlt" / "a", root / "stopped"
    from offmarl.checkpoint import Checkpoints

    save, saved = Checkpoints.save, []

    def stop(self: Checkpoints, *args: object) -> None:
        if saved:
            raise KeyboardInterrupt
        saved.append(save(self, *args))

    Checkpoints.save = stop
    try:
        train(path, run)
    except (KeyboardInterrupt, SystemExit):
        pass
    finally:
        Checkpoints.save = save
    return run


# ------------------------------------------------------------------- kills


def kill_writers(root: Path, count: int, rng: random.Random) -> Outcome:
    """Kill programs that append, at random instants, and run each again to its end."""
    began, wrong = time.monotonic(), []
    with Victims() as victims:
        for number in range(count):
            program = WRITERS[number % len(WRITERS)]
            path = root / f"kill{number}" / "v.vlt" / "a"
            reference = root / f"whole-{program}" / "v.vlt" / "a"
            for place in (path, reference):
                if program == "share" and not place.exists():
                    vault.create(place, SPEC, rows=2, chunk_steps=16).close()
            if number < len(WRITERS):
                victims.run(program, reference)
            seconds = rng.uniform(0.001, 0.15)
            death = victims.run(program, path, seconds=seconds)
            if fault := is_wrong(path, reference, death.acknowledged * 7):
                wrong.append(f"{program} after {seconds:.3f} s: {fault}")
            victims.run(program, path)
            if vault.open_vault(path).digest() != vault.open_vault(reference).digest():
                wrong.append(f"{program} after {seconds:.3f} s: run again it has other content")
            shutil.rmtree(root / f"kill{number}")
    return Outcome("writers", 0, count - len(wrong), tuple(wrong), time.monotonic() - began)


def is_wrong(path: Path, whole: Path, acknowledged: int = 0) -> str:
    """Describe the fault of a killed program's vault; empty if it holds a prefix of the data."""
    try:
        dataset = vault.open_vault(path)
    except VaultNotFoundError:
        return "what was acknowledged is gone" if acknowledged else ""
    if dataset.length < acknowledged:
        return f"{acknowledged} steps were acknowledged, and {dataset.length} are there"
    expected = vault.open_vault(whole).read(0, dataset.length)
    same = (np.array_equal(a, expected[n], equal_nan=True) for n, a in dataset.read().items())
    return "" if all(same) else "its steps are others"


def kill_command(
    title: str,
    command: Callable[[Path], str],
    root: Path,
    result: Callable[[Path], str],
    count: int,
    rng: random.Random,
) -> Outcome:
    """Kill a command some times in a row, let it end, and compare with one that was not killed."""
    began, wrong = time.monotonic(), []
    run_command(command(root / "whole"), None)
    seconds, expected = time.monotonic() - began, result(root / "whole")
    for chain in range(-(-count // CHAIN)):
        place = root / f"chain{chain}"
        for _ in range(min(CHAIN, count - chain * CHAIN)):
            run_command(command(place), rng.uniform(0.3, 1.1) * seconds)
        run_command(command(place), None)
        if result(place) != expected:
            wrong.append(f"{title}, chain {chain}: another result")
    lasted = time.monotonic() - began
    return Outcome(title, 0, count - len(wrong), tuple(wrong), lasted)


def run_command(command: str, seconds: float | None) -> None:
    """Run the command line, and kill it after some seconds; otherwise it must succeed."""
    arguments = [sys.executable, "-m", "offmarl", *command.split()]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        arguments, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment, text=True
    )
    try:
        _, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGKILL)
        process.communicate()
        return
    if process.returncode:
        raise RuntimeError(f"{command} failed: {errors}")


def recorder_command(name: str) -> Callable[[Path], str]:
    """Return a function that makes the command of a recorder, given the place to record to."""
    options = {"random": FIXED, "psro": POPULATION}.get(name, RECORD)
    return lambda place: f"record {name} {options} --out {place}"


def recorder_result(place: Path) -> str:
    """Return the digests of all vaults that a recorder made, and of its parameters if it trains."""
    paths = sorted(path for path, _ in vault.list_vaults(place))
    digests = "".join(f"{path.name} {vault.open_vault(path).digest()}" for path in paths)
    runs = sorted(file.parent for file in place.rglob("run.json"))
    return digests + "".join(digest_of(offmarl.load_policy(run).params) for run in runs)


def kill_recorders(root: Path, count: int, seed: int) -> Iterator[Outcome]:
    """Kill every recorder."""
    for name in registry.find("recorder"):
        rng = random.Random(f"{seed} {name}")
        command = recorder_command(name)
        yield kill_command(f"record {name}", command, root / name, recorder_result, count, rng)


def all_kills(root: Path, count: int, seed: int) -> Iterator[Outcome]:
    """Kill writers and training: four fifths and a fifth of the kills."""
    rng = random.Random(f"{seed} kills")
    few = count // 5
    yield kill_writers(root / "writers", count - few, rng)
    data = write_vault(root / "data.vlt" / "a", "raw")
    options = "--env none --seeds 1 --updates 200 --eval-every 20 --batch-size 8 --length 5"
    train_it = f"train bc --vault {data} {options} --hidden 8 --out "
    yield kill_command(
        "offmarl train",
        lambda to: f"{train_it}{to}",
        root / "runs",
        lambda run: digest_of(offmarl.load_policy(run, 0).params),
        few,
        rng,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=100, help="in all")
    parser.add_argument("--flips", type=int, default=200, help="of each target")
    parser.add_argument("--recorder-kills", type=int, default=10, help="of each recorder")
    parser.add_argument("--seed", type=int, default=0, help="decides where and when")
    parser.add_argument("--directory", type=Path, help="where to write; a temporary one by default")
    args = parser.parse_args()
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        root = Path(name)
        print(f"{'':16} {'detected':>9} {'identical':>9} {'wrong':>7} {'seconds':>8}")
        for outcomes in (
            all_kills(root / "kills", args.kills, args.seed) if args.kills else (),
            kill_recorders(root / "recorders", args.recorder_kills, args.seed)
            if args.recorder_kills
            else (),
            all_flips(root / "flips", args.flips, args.seed) if args.flips else (),
        ):
            for outcome in outcomes:
                numbers = f"{outcome.detected:9} {outcome.identical:9} {len(outcome.wrong):7}"
                print(f"{outcome.target:16} {numbers} {outcome.seconds:8.0f}", flush=True)
                wrong += [f"{outcome.target}: {message}" for message in outcome.wrong]
    print(*wrong, sep="\n")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
