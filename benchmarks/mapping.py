"""Relabelling the rewards of a large vault: time and memory, against copying its files.

    python benchmarks/mapping.py [--directory DIR] [--megabytes N]

A vault of N MB (1,000 by default; 1,360 B a step, 16 rows, episodes of 100 steps) is written. Then
its rewards are relabelled by a formula and by a Python function, and its statistics are computed,
each in a process of its own. The peak is that of anonymous memory: pages of the mapped source,
which the system drops when it needs the memory, do not count. Exits with 1 if relabelling takes
300 MB or more.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from offmarl import vault
from offmarl.testing import experience
from offmarl.types import Discrete, EnvSpec
from offmarl.vault.format import layout

SPEC = EnvSpec("", 5, 50, 36, Discrete(9))
LIMIT = 300

WORK = {
    "map --reward": "vault.map(sys.argv[1], sys.argv[2], reward='reward / 10')",
    "map, function": (
        "vault.map(sys.argv[1], sys.argv[2], lambda s: {'reward': s['reward'] / 10}, by='steps')"
    ),
    "map, episodes": "vault.map(sys.argv[1], sys.argv[2], lambda s: {'reward': s['reward'] / 10})",
    "statistics": "vault.open_vault(sys.argv[1]).statistics()",
}

CODE = """
import re, sys, threading, time
from offmarl import vault
peak, done = [0], threading.Event()
def anonymous():
    text = open('/proc/self/status').read()
    return int(re.search(r'RssAnon:\\s+(\\d+)', text)[1]) / 1e3
def watch():
    while not done.wait(0.01):
        peak[0] = max(peak[0], anonymous())
thread = threading.Thread(target=watch)
thread.start()
begin = time.perf_counter()
{work}
seconds = time.perf_counter() - begin
done.set()
thread.join()
print(seconds, peak[0])
"""


def main(directory: Path, megabytes: int) -> None:
    source = directory / "source.vlt" / "main"
    part, finals = experience(SPEC, 16, 1_000, 0, end_every=100.0)
    part_bytes = 16 * 1_000 * sum(leaf.step_bytes for leaf in leaves())
    with vault.create(source, SPEC, rows=16) as writer:
        for _ in range(max(1, round(megabytes * 1e6 / part_bytes))):
            writer.append(part, finals)
    size = vault.open_vault(source).num_bytes or 0
    begin = time.perf_counter()
    subprocess.run(["cp", "-r", source, directory / "copy"], check=True)
    subprocess.run(["sync", directory / "copy"], check=True)
    copied = time.perf_counter() - begin
    print(f"{size / 1e6:.0f} MB; cp and sync: {copied:.2f} s")
    worst = 0.0
    for number, (name, work) in enumerate(WORK.items()):
        command = [
            sys.executable,
            "-c",
            CODE.format(work=work),
            source,
            directory / f"{number}.vlt",
        ]
        process = subprocess.run(command, check=True, capture_output=True, text=True)
        seconds, peak = map(float, process.stdout.split())
        if name.startswith("map"):
            worst = max(worst, peak)
        rate = size / seconds / 1e6
        print(
            f"{name:15} {seconds:6.2f} s {rate:6.0f} MB/s {seconds / copied:5.1f}x cp, "
            f"peak {peak:4.0f} MB"
        )
    if worst >= LIMIT:
        sys.exit(f"relabelling took {worst:.0f} MB, and {LIMIT} is the limit")


def leaves() -> list[layout.Leaf]:
    return list(layout.leaves(SPEC).values())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, default=None)
    parser.add_argument("--megabytes", type=int, default=1_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as place:
        main(Path(place), given.megabytes)
