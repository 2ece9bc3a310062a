"""Files, functions and hops of everyday tasks, and the stores that they open.

    python benchmarks/walks.py [--json]

Each task runs once to import its modules, and is traced the second time, in all threads. A hop is a
call whose nearest caller in offmarl is in another file; a link is a pair of files with such calls.
Opening a store means that TensorStore opens an OCDBT database.
"""

import json
import shutil
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import jax
import numpy as np
import tensorstore as ts
import tyro

import offmarl
from offmarl import vault
from offmarl.types import Discrete, EnvSpec, Transition, View

PACKAGE = f"{Path(offmarl.__file__).parent}/"
SPEC = EnvSpec("classic/xor", 2, 3, 3, Discrete(2))
STEPS = 64
EPISODE = 8


@dataclass(frozen=True)
class Args:
    """Settings."""

    json: bool = False
    """Print JSON instead of a table."""


@dataclass
class Walk:
    """The trace of a task."""

    files: int = 0
    functions: int = 0
    links: int = 0
    hops: int = 0
    longest: int = 0
    """Lines of the longest function."""
    stores: dict[str, int] = field(default_factory=dict)
    """Number of times a store was opened, by path."""

    @property
    def opens(self) -> int:
        """Stores opened in all."""
        return sum(self.stores.values())


class Trace:
    """Counts calls in all threads while it is active."""

    def __init__(self) -> None:
        self.codes: set[CodeType] = set()
        self.hops: Counter[tuple[str, str]] = Counter()

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGE):
            return
        self.codes.add(code)
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(PACKAGE):
            caller = caller.f_back
        if caller is not None and caller.f_code.co_filename != code.co_filename:
            self.hops[caller.f_code.co_filename, code.co_filename] += 1

    @contextmanager
    def on(self) -> Iterator[None]:
        threading.setprofile(self)
        sys.setprofile(self)
        try:
            yield
        finally:
            sys.setprofile(None)
            threading.setprofile(None)


@contextmanager
def counted_opens(root: Path) -> Iterator[Counter[str]]:
    """Count the stores that are opened below a directory, by their paths."""
    opens: Counter[str] = Counter()
    opened = ts.KvStore.open

    def count(spec: Any, *args: Any, **options: Any) -> Any:
        if isinstance(spec, dict) and spec.get("driver") == "ocdbt":
            base = spec["base"]
            path = base if isinstance(base, str) else str(base.get("path", base))
            opens[path.removeprefix("file://").removeprefix(f"{root}/").rstrip("/")] += 1
        return opened(spec, *args, **options)

    ts.KvStore.open = count
    try:
        yield opens
    finally:
        ts.KvStore.open = opened


def experience() -> Transition:
    rng = np.random.default_rng(0)
    agents, last = (1, STEPS, 2), np.arange(STEPS)[None] % EPISODE == EPISODE - 1
    ends = np.repeat(last[..., None], 2, -1)
    view = View(
        rng.normal(size=(*agents, 3)).astype(np.float32),
        np.zeros((1, STEPS, 3), np.float32),
        np.ones((*agents, 2), bool),
        np.ones(agents, bool),
    )
    return Transition(
        view,
        rng.integers(0, 2, agents).astype(np.int32),
        rng.normal(size=agents).astype(np.float32),
        ends,
        np.zeros_like(ends),
        last,
        np.zeros(agents, np.float32),
        np.zeros((1, STEPS), np.int32),
    )


def write(path: Path) -> None:
    with vault.create(path, SPEC, rows=1) as writer:
        writer.append(experience())


def walks(root: Path) -> dict[str, Callable[[Path], object]]:
    """Return the tasks; each is given a fresh directory, and finds two vaults in ``root``."""
    one, two = root / "one.vlt" / "main", root / "two.vlt" / "main"

    def replay(_: Path) -> None:
        offmarl.open(one).replay(4, 8).sample(jax.random.key(0))

    def train(out: Path) -> None:
        from offmarl.cli import main

        words = ["train", "bc", "--vault", str(one), "--env", "none", "--out", str(out / "run")]
        sys.argv = ["offmarl", *words, "--updates", "2", "--batch-size", "4", "--length", "8"]
        with open("/dev/null", "w") as nowhere:  # noqa: PTH123
            shown, sys.stdout = sys.stdout, nowhere
            try:
                main()
            except SystemExit as done:
                assert not done.code, done.code
            finally:
                sys.stdout = shown

    return {
        "create and write": lambda out: write(out / "new.vlt"),
        "resume and append": lambda _: append(two),
        "open and slice": lambda _: vault.open_vault(one)[3:9],
        "cat of two": lambda out: vault.cat([one, two], out / "both.vlt"),
        "filter": lambda out: vault.filter(one, "return > 0", out / "some.vlt"),
        "verify": lambda _: vault.verify(one, deep=True),
        "compact": lambda out: vault.compact(_copied(one, out)),
        ".replay()": replay,
        "train bc": train,
    }


def append(path: Path) -> None:
    with vault.resume(path) as writer:
        writer.append(experience())


def _copied(source: Path, out: Path) -> Path:
    return Path(shutil.copytree(source, out / "copied.vlt" / "main"))


def trace(walk: Callable[[Path], object], root: Path) -> Walk:
    for name in ("warm", "traced"):
        out = Path(tempfile.mkdtemp(prefix=f"{name}-", dir=root))
        traced = Trace()
        with counted_opens(root) as stores, traced.on():
            walk(out)
    files = {code.co_filename for code in traced.codes}
    functions = [code for code in traced.codes if not code.co_name.startswith("<")]
    named = {path.replace(f"{out.name}/", ""): count for path, count in sorted(stores.items())}
    longest = max(len({line for *_, line in code.co_lines() if line}) for code in functions)
    hops = traced.hops.total()
    return Walk(len(files), len(functions), len(traced.hops), hops, longest, named)


def main(args: Args) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory).resolve()
        write(root / "one.vlt")
        write(root / "two.vlt")
        by_walk = {name: trace(walk, root) for name, walk in walks(root).items()}
    if args.json:
        print(json.dumps({name: asdict(walk) for name, walk in by_walk.items()}, indent=1))
        return
    print(f"{'':18} files functions links  hops stores")
    for name, walk in by_walk.items():
        print(
            f"{name:18} {walk.files:5} {walk.functions:9} {walk.links:5} {walk.hops:5} "
            f"{walk.opens:6}  {', '.join(f'{path} {n}' for path, n in walk.stores.items())}"
        )


if __name__ == "__main__":
    main(tyro.cli(Args))
