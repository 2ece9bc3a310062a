"""Training from data on another machine, beside the same data on this one, in one run.

    python benchmarks/remote.py [--steps 400000] [--latency 0.02] [--cut 0.2] [--updates 4000]
    python benchmarks/remote.py --large 5 [--cache-gb 0.5]

The data has the shape of SMAX 3m. It is served by a loopback hub with the protocol of
huggingface.co, and by an S3 server, each in a process of its own, with added latency before each
answer and a share of connections that are cut. `bc` trains from each place in turn, in processes of
their own; the ratio is that of updates a second after the first block of updates. The first batch
is timed apart, in a process that has nothing in its cache.

With ``--large``, a vault of so many GB is recorded, pushed to the hub and removed; then `bc` trains
from it with a small cache. Printed are the peak memory and the most that the cache took.
"""

import json
import logging
import multiprocessing
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import tyro

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import offmarl  # noqa: E402
from offmarl import vault  # noqa: E402
from offmarl.testing import experience  # noqa: E402
from offmarl.types import Discrete, EnvSpec  # noqa: E402
from tests.hub.server import Hub  # noqa: E402
from tests.proxy import Proxy  # noqa: E402

SPEC = EnvSpec("", num_agents=3, observation_size=42, state_size=48, action=Discrete(8))
"""SMAX 3m."""
_BLOCK = 2**15


@dataclass(frozen=True)
class Args:
    steps: int = 400_000
    """Steps of the vault."""
    latency: float = 0.02
    """Seconds before each answer."""
    cut: float = 0.2
    """Share of connections that are cut."""
    updates: int = 4_000
    """Updates of a training run."""
    rounds: int = 2
    """Training runs from each place, in turn."""
    large: float | None = None
    """Size in GB of the large vault; then nothing else is measured."""
    cache_gb: float = 1.0
    """Largest size of the cache of streamed data."""
    directory: Path | None = None
    """Where to write; a temporary directory by default."""


def record(path: Path, steps: int) -> None:
    transition, *rest = experience(SPEC, 1, _BLOCK, end_every=30.0)
    with vault.create(path, SPEC, rows=1) as writer:
        while writer.length < steps:
            writer.append(transition, *rest)


# ------------------------------------------------------------------------------------ servers


def _hub_process(directory: Path, latency: float, cut: float, queue: Any) -> None:
    hub = Hub(directory)
    hub.faults.latency, hub.faults.cut = latency, cut
    queue.put(hub.url)
    time.sleep(1e6)


def _s3_process(latency: float, cut: float, queue: Any) -> None:
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    direct = f"http://{host}:{port}"
    queue.put((direct, Proxy(direct, latency, cut).url))
    time.sleep(1e6)


@contextmanager
def started(target: Any, *args: Any) -> Iterator[Any]:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=target, args=(*args, queue), daemon=True)
    process.start()
    try:
        yield queue.get(timeout=60)
    finally:
        process.kill()
        process.join()


# ----------------------------------------------------------------------------------- training

FIRST = """
import sys, time, offmarl
start = time.perf_counter()
with offmarl.open(sys.argv[1]).stream(32, 20, to="numpy") as stream:
    next(stream)
print(time.perf_counter() - start)
"""

TRAIN = """
import json, resource, sys, threading, time
from pathlib import Path
from offmarl import cli, tracking
from offmarl.hub.pages import page_cache

most = [0]
def watch():
    while True:
        sizes = []
        for path in page_cache().root.rglob("*"):
            try:
                sizes.append(path.stat().st_size)
            except OSError:
                pass
        most[0] = max(most[0], sum(sizes))
        time.sleep(0.5)
if len(sys.argv) > 4:
    threading.Thread(target=watch, daemon=True).start()
address, out, updates = sys.argv[1:4]
sys.argv = ["offmarl", "train", "bc", "--vault", address, "--out", out, "--env", "none",
            "--updates", updates, "--eval-every", updates, "--final-episodes", "32",
            "--eval-episodes", "32", "--memory", "0.25"]
try:
    cli.main()
except SystemExit as stop:
    assert not stop.code, stop.code
lines = tracking.read(Path(out) / "metrics.jsonl")
times = [(one["step"], one["wall_time"]) for one in lines if one.get("wall_time")]
(first, begun), (last, ended) = times[0], times[-1]
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
rate = (last - first) / (ended - begun) if last > first else last / ended
print(json.dumps({"rate": rate, "peak_gb": peak, "cache": most[0] / 1e9}))
"""


def run(script: str, *args: object, env: dict[str, str]) -> str:
    environment = os.environ | {"OFFMARL_QUIET": "1", "PYTHONPATH": str(ROOT)} | env
    command = [sys.executable, "-c", script, *map(str, args)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return (done.stdout.strip().splitlines() or [""])[-1]


def compare(args: Args, root: Path) -> dict[str, float]:
    """Train from all places, and return the ratios of their rates to that of local data."""
    path = root / "smax.vlt" / "main"
    record(path, args.steps)
    print(f"{args.steps:,} steps, {offmarl.open(path).num_bytes / 1e6:.0f} MB")
    (root / "hub").mkdir()
    with (
        started(_hub_process, root / "hub", args.latency, args.cut) as url,
        started(_s3_process, args.latency, args.cut) as (direct, slow),
    ):
        credentials = {
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_REGION": "us-east-1",
        }
        hub_env = {"HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1"}
        run(PUSH, path, env=hub_env | {"HF_HOME": str(root / "home")})
        urlopen(Request(f"{direct}/data", b"", {}, method="PUT")).close()
        run(COPY, path, "s3://data/smax.vlt/main", env=credentials | {"AWS_ENDPOINT_URL": direct})
        places = {
            "local": (str(path), {}),
            "hub": ("hf://org/smax/main", hub_env),
            "s3": ("s3://data/smax.vlt/main", credentials | {"AWS_ENDPOINT_URL": slow}),
        }
        rates: dict[str, list[float]] = {name: [] for name in places}
        for number in range(args.rounds):
            for name, (address, env) in places.items():
                fresh = env | {"HF_HOME": str(root / f"home-{number}-{name}")}
                first = float(run(FIRST, address, env=fresh))
                fresh["HF_HOME"] += "-train"
                result = json.loads(
                    run(TRAIN, address, root / f"run-{number}-{name}", args.updates, env=fresh)
                )
                rates[name].append(result["rate"])
                print(f"{name:6} first batch {first:.2f} s, {result['rate']:,.0f} updates/s")
        medians = {name: float(np.median(some)) for name, some in rates.items()}
        ratios = {name: medians[name] / medians["local"] for name in ("hub", "s3")}
        for name, ratio in ratios.items():
            print(f"{name} / local: {ratio:.2f}")
        return ratios


PUSH = """
import sys
from offmarl import hub
hub.push([sys.argv[1]], "org/smax", "CC0-1.0", name="bench/smax/3m")
"""
COPY = """
import sys
from offmarl import vault
vault.recode(sys.argv[1], sys.argv[2])
"""


def large(args: Args, root: Path) -> dict[str, float]:
    """Push a large vault, train from it, and return the figures of both."""
    assert args.large is not None
    path = root / "large.vlt" / "main"
    step = sum(leaf.step_bytes for leaf in vault_leaves().values())
    record(path, int(args.large * 1e9 / step))
    size = offmarl.open(path).num_bytes
    (root / "hub").mkdir()
    with started(_hub_process, root / "hub", args.latency, args.cut) as url:
        env = {"HF_ENDPOINT": url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(root / "home")}
        start, free = time.perf_counter(), shutil.disk_usage(root).free
        result = json.loads(run(PUSH_WATCHED, path, env=env))
        took = time.perf_counter() - start
        print(
            f"{size / 1e9:.1f} GB pushed in {took:.0f} s as {result['files']} files; peak memory "
            f"{result['peak_gb']:.2f} GB; {(free - shutil.disk_usage(root).free) / 1e9:.1f} GB of "
            "disk, which the hub takes"
        )
        shutil.rmtree(path.parent)
        env |= {"OFFMARL_STREAM_CACHE_GB": str(args.cache_gb)}
        print(f"first batch {float(run(FIRST, 'hf://org/smax/main', env=env)):.2f} s")
        trained = json.loads(
            run(TRAIN, "hf://org/smax/main", root / "run", args.updates, "watch", env=env)
        )
        print(
            f"trained: {trained['rate']:,.0f} updates/s, peak memory {trained['peak_gb']:.2f} GB, "
            f"cache {trained['cache']:.2f} GB at most"
        )
        return {"files": result["files"], "push_gb": result["peak_gb"], **trained}


PUSH_WATCHED = """
import json, resource, sys
from offmarl import hub
found = hub.push([sys.argv[1]], "org/smax", "CC0-1.0", name="bench/smax/3m")
(uid,) = found.card.uids.values()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9
print(json.dumps({"files": len(uid.files), "peak_gb": peak}))
"""


def vault_leaves() -> Any:
    from offmarl.vault.format import layout

    return layout.leaves(SPEC)


def main(args: Args) -> None:
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        (compare if args.large is None else large)(args, Path(name))


if __name__ == "__main__":
    main(tyro.cli(Args, description=__doc__))
