"""The verbs of the command line: their groups, modules, summaries and examples."""

from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple


class Verb(NamedTuple):
    """The module of a verb's function, and its help."""

    module: str
    summary: str
    example: str = ""
    """Arguments of the example in ``--help``."""
    is_raw: bool = False
    """Whether the function takes the arguments unparsed."""
    work: str = ""
    """The function of the module that makes the work which tasks can share, if any. It takes the
    verb, its arguments and ``--block-steps``; the verb's own function takes the parsed options."""
    blocks: str = ""
    """What the blocks of the work are, if ``--block-steps`` does not set their size."""


GROUPS: dict[str, dict[str, Verb]] = {
    "Begin": {
        "demo": Verb("demo", "Record, train offline and compare on a small swarm, in minutes"),
        "envs": Verb(
            "environments",
            "List the environments, or describe, measure and draw one",
            "swarm/flock-8 --picture flock.gif",
        ),
        "new": Verb(
            "new",
            "Create a working baseline or environment file to start from",
            "env my_env --out ~/research",
        ),
        "doctor": Verb("doctor", "Check the installation and the connection to the hub"),
        "completion": Verb("doctor", "Print a shell completion script"),
    },
    "Record and train": {
        "record": Verb(
            "programs",
            "Train agents online and record them at several tiers",
            is_raw=True,
            work="record_work",
        ),
        "train": Verb(
            "programs",
            "Train an offline baseline on a vault",
            is_raw=True,
            work="train_work",
            blocks="a training is divided by its seeds",
        ),
        "tune": Verb(
            "tune",
            "Search settings with which a program learns",
            is_raw=True,
            work="tune_work",
            blocks="a search is divided by its trials",
        ),
        "benchmark": Verb(
            "benchmark",
            "Train baselines on datasets, and make tables, curves and a page",
            "plan.toml --jobs 2",
            work="benchmark",
            blocks="a benchmark is divided by its cells",
        ),
    },
    "Evaluate": {
        "evaluate": Verb(
            "programs",
            "Play episodes with a trained policy",
            "runs/swarm/coverage-3/mappo-0-medium/bc --render episode.gif",
        ),
        "compare": Verb(
            "compare",
            "Compare runs: IQM with intervals, profiles, a figure, a page",
            "runs/swarm/coverage-3/*-medium/* --html report.html",
        ),
        "cross-play": Verb(
            "cross_play",
            "Play policies with partners that they were not trained with",
            "vaults/classic/xor.run/mappo-0-to-4",
            work="cross_play",
            blocks="a table is divided by its rows",
        ),
        "exploitability": Verb(
            "exploitability",
            "Measure what the best response of each side gains against a policy",
            "vaults/pgx/kuhn_poker.run/ippo-0",
        ),
        "ope": Verb(
            "ope",
            "Estimate the returns of trained policies from a dataset, without the environment",
            "runs/swarm/coverage-3/*/* --vault vaults/swarm/coverage-3.vlt/mappo-0-replay",
        ),
    },
    "Look at data": {
        "ls": Verb(
            "data",
            "List local vaults or available datasets",
            "--remote --env smac_v1 --agents 3",
        ),
        "show": Verb(
            "data",
            "Show the contents and the origin of a vault",
            "vaults/swarm/coverage-3.vlt/mappo-0-medium",
        ),
        "report": Verb(
            "report",
            "Describe the contents of datasets: figures, coverage, episodes",
            "vaults/swarm/coverage-3.vlt --html page.html",
        ),
        "verify": Verb("data", "Check a vault for damage", "A.vlt --deep"),
    },
    "Share data": {
        "pull": Verb("hub", "Download a published dataset", "og_marl/smac_v1/3m/Good --dry-run"),
        "push": Verb(
            "hub",
            "Publish vaults as a dataset on the hub",
            "vaults/swarm/coverage-3.vlt --to org/name --licence CC-BY-4.0",
        ),
        "export": Verb(
            "programs",
            "Write a trained policy as files that run without offmarl",
            "runs/swarm/coverage-3/mappo-0-medium/bc --out deployed",
        ),
        "cache": Verb("hub", "List, remove or verify pulled datasets", "rm og_marl/smac_v1/3m"),
        "convert": Verb(
            "transform",
            "Convert a dataset of another project into a vault, or back",
            "bridge.npz bridge.vlt --from pymarl --env classic/bridge",
        ),
    },
    "Change data": {
        "cat": Verb(
            "transform", "Join vaults into one", "A.vlt B.vlt -o C.vlt", work="transform_work"
        ),
        "filter": Verb(
            "transform",
            "Select the episodes or steps of a vault that meet a condition",
            'A.vlt "return > 10 and length < 50" -o B.vlt',
            work="transform_work",
        ),
        "sample": Verb(
            "transform",
            "Sample the episodes of a vault, or select the best",
            "A.vlt --steps 1e5 --match-returns --seed 0 -o B.vlt",
            work="transform_work",
        ),
        "split": Verb(
            "transform",
            "Split episodes into training, validation and test sets",
            "A.vlt --fractions .8 .1 .1 --seed 0 -o B.vlt",
        ),
        "slice": Verb(
            "transform",
            "Extract a range of episodes or time steps",
            "A.vlt --start 100 --stop 200 -o B.vlt",
        ),
        "dedup": Verb("transform", "Remove duplicate episodes", "A.vlt -o B.vlt"),
        "map": Verb(
            "transform",
            "Change or add columns of a vault: relabel rewards, normalise observations",
            'A.vlt --reward "reward / 10" -o B.vlt',
            work="transform_work",
        ),
        "recode": Verb(
            "transform",
            "Store a vault with another codec, chunk size or layout",
            "A.vlt --codec zstd --chunk-steps 2048 -o B.vlt",
            work="transform_work",
        ),
        "compact": Verb("data", "Reclaim unused space", "A.vlt"),
        "salvage": Verb("data", "Copy the intact episodes of a damaged vault", "A.vlt -o B.vlt"),
    },
}

VERBS = {name: verb for group in GROUPS.values() for name, verb in group.items()}


def function_of(name: str, verb: Verb) -> Callable[..., Any]:
    """Import a function of a verb's module."""
    module = import_module(f"offmarl.cli.{verb.module}")
    function: Callable[..., Any] = getattr(module, name.replace("-", "_"))
    return function
