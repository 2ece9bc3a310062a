"""The verbs of the command line: their groups, modules and examples."""

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple


class Verb(NamedTuple):
    """The module of a verb's function, and its help."""

    module: str
    example: str = ""
    """Arguments of the example in ``--help``."""
    is_raw: bool = False
    """Whether the function takes the arguments unparsed."""
    work: str = ""
    """The function of the module that makes the work which tasks can share, if any. It takes the
    verb, its arguments and ``--block-steps``; the verb's own function takes the parsed options."""


GROUPS: dict[str, dict[str, Verb]] = {
    "Begin": {
        "demo": Verb("demo"),
        "envs": Verb("environments", "swarm/flock-8 --picture flock.gif"),
        "new": Verb("new", "env my_env --out ~/research"),
        "doctor": Verb("doctor"),
        "completion": Verb("doctor"),
    },
    "Record and train": {
        "record": Verb("programs", is_raw=True, work="record_work"),
        "train": Verb("programs", is_raw=True, work="train_work"),
        "tune": Verb("tune", is_raw=True, work="tune_work"),
        "benchmark": Verb("benchmark", "plan.toml --jobs 2", work="benchmark"),
    },
    "Evaluate": {
        "evaluate": Verb(
            "programs", "runs/swarm/coverage-3/mappo-0-medium/bc --render episode.gif"
        ),
        "compare": Verb("compare", "runs/swarm/coverage-3/*-medium/* --html report.html"),
        "cross-play": Verb("cross_play", "vaults/classic/xor.run/mappo-0-to-4", work="cross_play"),
        "exploitability": Verb("exploitability", "vaults/pgx/kuhn_poker.run/ippo-0"),
        "ope": Verb(
            "ope", "runs/swarm/coverage-3/*/* --vault vaults/swarm/coverage-3.vlt/mappo-0-replay"
        ),
    },
    "Look at data": {
        "ls": Verb("data", "--remote --env smac_v1 --agents 3"),
        "show": Verb("data", "vaults/swarm/coverage-3.vlt/mappo-0-medium"),
        "report": Verb("report", "vaults/swarm/coverage-3.vlt --html page.html"),
        "verify": Verb("data", "A.vlt --deep"),
    },
    "Share data": {
        "pull": Verb("hub", "og_marl/smac_v1/3m/Good --dry-run"),
        "push": Verb("hub", "vaults/swarm/coverage-3.vlt --to org/name --licence CC-BY-4.0"),
        "export": Verb("programs", "runs/swarm/coverage-3/mappo-0-medium/bc --out deployed"),
        "cache": Verb("hub", "rm og_marl/smac_v1/3m"),
        "convert": Verb("transform", "bridge.npz bridge.vlt --from pymarl --env classic/bridge"),
    },
    "Change data": {
        "cat": Verb("transform", "A.vlt B.vlt -o C.vlt", work="transform_work"),
        "filter": Verb(
            "transform", 'A.vlt "return > 10 and length < 50" -o B.vlt', work="transform_work"
        ),
        "sample": Verb(
            "transform",
            "A.vlt --steps 1e5 --match-returns --seed 0 -o B.vlt",
            work="transform_work",
        ),
        "split": Verb("transform", "A.vlt --fractions .8 .1 .1 --seed 0 -o B.vlt"),
        "slice": Verb("transform", "A.vlt --start 100 --stop 200 -o B.vlt"),
        "dedup": Verb("transform", "A.vlt -o B.vlt"),
        "map": Verb("transform", 'A.vlt --reward "reward / 10" -o B.vlt', work="transform_work"),
        "recode": Verb(
            "transform", "A.vlt --codec zstd --chunk-steps 2048 -o B.vlt", work="transform_work"
        ),
        "compact": Verb("data", "A.vlt"),
        "salvage": Verb("data", "A.vlt -o B.vlt"),
    },
}

VERBS = {name: verb for group in GROUPS.values() for name, verb in group.items()}


def function_of(name: str, verb: Verb) -> Callable[..., Any]:
    """Import a function of a verb's module."""
    module = import_module(f"offmarl.cli.{verb.module}")
    function: Callable[..., Any] = getattr(module, name.replace("-", "_"))
    return function


def summary_of(name: str, verb: Verb) -> str:
    """Return the first line of the docstring of a verb's function.

    The source is searched, because to import or to parse it takes most of the time of `--help`.
    """
    first_line = re.compile(rf'(?ms)^def {name.replace("-", "_")}\(.*?"""(.*?)\.?("""|$)')
    package = Path(__file__).parents[1]
    files = package / "cli" / f"{verb.module}.py", package / "vault" / "verbs.py"
    matches = (first_line.search(file.read_text("utf-8")) for file in files)
    return next(match[1] for match in matches if match)
