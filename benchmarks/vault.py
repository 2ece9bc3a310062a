"""Speed of writing and reading vaults, relative to stock flashbax in the same run.

    python benchmarks/vault.py [--directory DIR]

The vaults have eight agents, one row, and 1360 bytes of observations, actions, rewards and ends per
step. Both sides write the same steps; offmarl also writes log-probabilities, policies and alive
masks. Stock syncs the file of each array in every call. The rows "durable each", where offmarl also
flushes after every call, compare equal guarantees; in the others, offmarl's data is durable when
the writer is closed.

Bulk writes are compared with appending the same number of bytes to a file and syncing it.
"""

import argparse
import contextlib
import io
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import NamedTuple

import flashbax
import jax.numpy as jnp
import numpy as np
from flashbax.vault import Vault as StockVault

from offmarl import vault
from offmarl.types import Discrete, EnvSpec, Transition, View, map_tree
from offmarl.vault.format import layout

SPEC = EnvSpec("", num_agents=8, observation_size=36, state_size=8, action=Discrete(5))
OURS = sum(leaf.step_bytes for leaf in layout.leaves(SPEC).values())
"""Bytes of a step as offmarl stores it."""
STOCK = OURS - 3 * 4 * SPEC.num_agents
"""Bytes without log-probabilities, policies and alive masks."""


def experience(steps: int) -> Transition:
    rng = np.random.default_rng(0)
    agents = (1, steps, SPEC.num_agents)
    last = np.arange(steps)[None] % 50 == 49
    ends = np.repeat(last[..., None], SPEC.num_agents, -1)
    return Transition(
        view=View(
            rng.normal(size=(*agents, SPEC.observation_size)).astype(np.float32),
            rng.normal(size=(1, steps, SPEC.state_size)).astype(np.float32),
            np.ones((*agents, SPEC.num_actions), bool),
            np.ones(agents, bool),
        ),
        action=rng.integers(0, SPEC.num_actions, agents).astype(np.int32),
        reward=rng.normal(size=agents).astype(np.float32),
        terminated=ends,
        truncated=np.zeros_like(ends),
        last=last,
        behaviour_log_prob=-rng.random(agents).astype(np.float32),
        policy_id=np.zeros((1, steps), np.int32),
    )


def cut(transition: Transition, start: int, stop: int) -> Transition:
    return map_tree(lambda leaf: leaf[:, start:stop], transition)


def write_ours(path: Path, data: Transition, call: int, flush: bool) -> None:
    with vault.create(path, SPEC, rows=1) as writer:
        for start in range(0, data.last.shape[1], call):
            writer.append(cut(data, start, start + call))
            if flush:
                writer.flush()


def write_stock(path: Path, data: Transition, call: int) -> None:
    view = data.view
    tree = {
        "observations": view.observation,
        "actions": data.action,
        "rewards": data.reward,
        "terminals": data.terminated.astype(np.float32),
        "truncations": data.truncated.astype(np.float32),
        "infos": {"state": view.state, "legals": view.legal_actions.astype(np.float32)},
    }
    state = flashbax.buffers.trajectory_buffer.TrajectoryBufferState(
        experience={k: jnp.asarray(v) for k, v in tree.items() if k != "infos"}
        | {"infos": {k: jnp.asarray(v) for k, v in tree["infos"].items()}},
        current_index=jnp.array(0),
        is_full=jnp.array(True),
    )
    stock = StockVault(path.parent.name, state.experience, str(path.parents[1]), path.name)
    for start in range(0, data.last.shape[1], call):
        stock.write(state, source_interval=(start, start + call))


def open_stock(path: Path) -> StockVault:
    return StockVault(path.parent.name, rel_dir=str(path.parents[1]), vault_uid=path.name)


def seconds(function: Callable[[], object], repeat: int = 1, tries: int = 3) -> float:
    """Return the seconds of the best of some tries."""
    times = []
    for _ in range(tries):
        start = time.perf_counter()
        for _ in range(repeat):
            function()
        times.append((time.perf_counter() - start) / repeat)
    return min(times)


def time_of(function: Callable[[bool], None], argument: bool) -> float:
    start = time.perf_counter()
    function(argument)
    return time.perf_counter() - start


def disk(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


class Written(NamedTuple):
    """Seconds, and bytes on disk over the bytes of the steps, of offmarl and of stock."""

    seconds: tuple[float, float]
    size: tuple[float, float]


def writes(root: Path, steps: int, call: int, flush: bool) -> Written:
    """Write the same steps with offmarl and with stock."""
    data = experience(steps)
    ours, stock = root / "ours.vlt" / "a", root / "stock.vlt" / "a"

    def again() -> None:
        shutil.rmtree(ours, ignore_errors=True)
        write_ours(ours, data, call, flush)

    def theirs() -> None:
        shutil.rmtree(stock, ignore_errors=True)
        write_stock(stock, data, call)

    times = seconds(again, tries=5), seconds(theirs, tries=2)
    ratios = [disk(path) / (steps * size) for path, size in ((ours, OURS), (stock, STOCK))]
    return Written(times, (ratios[0], ratios[1]))


def bulk(root: Path, pieces: int = 32, call: int = 10_000) -> list[tuple[str, float, float]]:
    """Return offmarl's and a plain file's seconds, synced after each piece or at the end."""
    data = experience(call)
    piece = np.random.default_rng(0).bytes(call * OURS)
    path, file = root / "bulk.vlt" / "a", root / "bulk"

    def ours(each: bool) -> None:
        shutil.rmtree(path, ignore_errors=True)
        with vault.create(path, SPEC, rows=1) as writer:
            for _ in range(pieces):
                writer.append(data)
                if each:
                    writer.flush()

    def raw(each: bool) -> None:
        file.unlink(missing_ok=True)
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT)
        for number in range(pieces):
            os.write(descriptor, piece)
            if each or number == pieces - 1:
                os.fdatasync(descriptor)
        os.close(descriptor)

    rows = []
    for title, each in (("each", True), ("at the end", False)):
        rounds = [(time_of(ours, each), time_of(raw, each)) for _ in range(5)]
        rows.append((title, *map(median, zip(*rounds, strict=True))))
    shutil.rmtree(path.parent)
    file.unlink()
    return rows


def reads(root: Path, steps: int) -> list[tuple[str, float, float]]:
    data = experience(steps)
    ours, stock = root / "ours.vlt" / "r", root / "stock.vlt" / "r"
    write_ours(ours, data, steps, flush=False)
    write_stock(stock, data, steps)
    dataset, theirs = vault.open_vault(ours), open_stock(stock)
    names = [name for name in dataset.leaves if not name.startswith("infos.")]
    names += ["infos.state", "infos.legals"]
    starts = iter(np.random.default_rng(0).integers(0, steps - 20, 10_000).tolist())

    def window() -> None:
        start = next(starts)
        dataset.read(start, start + 20, leaves=names)

    def open_ours() -> object:
        return vault.open_vault(ours)

    def stock_window() -> object:
        return theirs.read(timesteps=20)

    return [
        ("open", seconds(open_ours, 10), seconds(lambda: open_stock(stock), 10)),
        ("read all", seconds(lambda: dataset.read(leaves=names)), seconds(theirs.read)),
        ("a window of 20 steps", seconds(window, 20), seconds(stock_window, 5)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--directory", type=Path, help="where to write; a temporary one by default")
    parser.add_argument("--bulk", action="store_true", help="measure bulk writes only")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.directory) as name:
        root = Path(name)
        rows: list[tuple[str, float, float]] = []
        with contextlib.redirect_stdout(io.StringIO()):  # stock prints
            cases = [
                ("20 x 1k steps, durable each", 20_000, 1000, True),
                ("20 x 1k steps", 20_000, 1000, False),
                ("5 x 10k steps", 50_000, 10_000, False),
                ("100 x 10 steps", 1000, 10, False),
                ("100 x 10 steps, durable each", 1000, 10, True),
            ]
            sizes: list[tuple[str, tuple[float, float]]] = []
            for title, steps, call, flush in cases:
                if args.bulk:
                    continue
                written = writes(root, steps, call, flush)
                rows.append((f"write {title}", *written.seconds))
                sizes.append((title, written.size))
            if not args.bulk:
                rows += reads(root, 100_000)
            appended = bulk(root)
    print(f"{'':34} {'offmarl ms':>10} {'stock ms':>10} {'ratio':>7}")
    for title, ours, stock in rows:
        print(f"{title:34} {1e3 * ours:10.2f} {1e3 * stock:10.2f} {stock / ours:6.1f}x")
    for title, size in sizes:
        print(f"{'disk / data, ' + title:34} {size[0]:10.2f} {size[1]:10.2f}")
    for title, ours, raw in appended:
        line = f"{1e3 * ours:10.2f} {1e3 * raw:10.2f} {raw / ours:7.0%}"
        print(f"{'bulk, file synced ' + title:34} {line}")


if __name__ == "__main__":
    main()
