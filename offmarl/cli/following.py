"""What each command names at its end: the command that a user runs next."""

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from inspect import signature
from pathlib import Path, PurePath
from shlex import quote
from string import Formatter
from typing import Any

from offmarl.cli.parse import options_among
from offmarl.cli.verbs import VERBS, function_of
from offmarl.paths import path_text
from offmarl.tracking import is_run, read_run

_SHOW = {"vaults": "offmarl show {vaults[0][path]}"}
_TRAIN = {"path": "offmarl train bc --vault {path} --seeds 5 --updates 1000"}
_CHECK = {"path": "offmarl verify {path} --deep"}
_RECORD = {"run": "offmarl record --policy {run} --steps 50000 --out vaults"}
_LIST = "offmarl cache ls"

_NEXT: Mapping[str, Mapping[str, str]] = {
    "demo": {
        "page": "offmarl ls {page.parent}/vaults; offmarl compare {page.parent}/runs/expert/*"
    },
    "envs": {
        "spec": "offmarl record mappo --env {given} --tiers random,medium,expert",
        "environments": "offmarl envs swarm/coverage-3",
    },
    "doctor": {"offmarl": "offmarl demo"},
    "record": _SHOW | {"run": "offmarl report {run}"},
    "train": {"seeds": "offmarl compare {run} --html report.html", "run": "offmarl report {run}"},
    "tune": {
        "own": "offmarl train {given} --vault {vault[0]} --env {env} --settings {file}",
        "vault": "offmarl train {given} --vault {vault[0]} --settings {file}",
        "env": "offmarl record {given} --env {env} --settings {file}",
        "page": "open {page} in a browser",
    },
    "benchmark": {"written": "open {out}/page.html in a browser"},
    "evaluate": {"run": "offmarl report {run}"},
    "compare": _RECORD,
    "cross-play": {"run": "offmarl evaluate {run}"},
    "exploitability": {
        "run": "offmarl report {run}",
        "env": "offmarl record psro --env {env}",
    },
    "ope": {"run": "offmarl evaluate {run}"},
    "ls": _SHOW | {"published": "offmarl pull {published[0][name]} --dry-run"},
    "show": {"steps": _TRAIN["path"]},  # not of an empty vault
    "report": {
        "run": "offmarl compare {run}",
        "page": "open {page} in a browser",
        "vaults": "offmarl report {given} --html page.html",
    },
    "verify": {
        "faults": "offmarl salvage {path} -o intact.vlt",
        "path": "offmarl show {path}",
        "verified": "offmarl ls {given}",
    },
    "pull": {
        "paths": "offmarl show {first[paths]}",
        "sizes": "offmarl pull {given}",
        "path": "offmarl evaluate {path}",
    },
    "push": {"run": "offmarl pull {to} --policy", "url": "offmarl pull {to}"},
    "export": {"files": 'the page "Deploy a policy" of the documentation runs them.'},
    "cache": {
        "datasets": "offmarl ls {first[datasets][path]}",
        "root": "offmarl ls --remote",
        **dict.fromkeys(("removed", "freed", "verified"), _LIST),
    },
    "convert": {"format": "offmarl convert {path} again.vlt --from {format}", **_TRAIN},
    "split": {
        "vaults": "offmarl train bc --vault {vaults[0][path]} --validation {vaults[1][path]}"
    },
    **dict.fromkeys(("cat", "filter", "sample", "slice", "dedup", "map", "recode"), _SHOW),
    **dict.fromkeys(("compact", "salvage"), _CHECK),
}
"""The next command, by verb and key of the verb's data. The first key that has a value counts.

`new` lists several commands itself, and the output of `completion` is for a shell."""


class _Quoting(Formatter):
    """Quotes values for a shell."""

    def format_field(self, value: Any, _spec: str) -> str:
        """Return a value as a word of a command."""
        return quote(path_text(value) if isinstance(value, PurePath) else str(value))


def next_commands(arguments: Sequence[str], data: Mapping[str, Any]) -> str:
    """Return what follows a command, from its arguments and what ``--json`` prints.

    Nothing follows help, plans, parts of divided work, tables that are printed for a file, and
    damage to all of a vault. Code that the user named acts in the next command, too.
    """
    verb, *rest = arguments or [""]
    lost = data.get("faults") and not data.get("length")
    if "blocks" in data or lost or any(re.fullmatch("(--.*=)?-", argument) for argument in rest):
        return ""
    with suppress(Exception):  # the command has succeeded, and must not fail for a hint
        maps = {key: x for key, x in data.items() if isinstance(x, Mapping) and x}
        first = {key: next(iter(x.values())) for key, x in maps.items()}
        words = [word for word in rest if word not in _flags_of(verb)]
        given = words[0] if words and not words[0].startswith("-") else ""
        published = [x for x in data.get("datasets", ()) if verb == "ls" and x["hub"]]
        about: dict[str, Any] = {"first": first, "given": given, "published": published, **data}
        if verb == "ls":
            about["vaults"] = [x for x in data.get("vaults", ()) if not x["error"]]
        if verb in ("push", "tune"):
            options = options_among(rest, to=str, env=str, vault=tuple[str, ...])
            about = {**options, "own": "vault" in options and options.get("env"), **about}
        if "run" not in data:
            runs = (path for argument in rest if is_run(Path(path := argument.partition("@")[0])))
            about["run"] = next(runs, "")
        fitting = (
            text
            for key, text in _NEXT.get(verb, {}).items()
            if about.get(key) and (given or "{given}" not in text)
        )
        following = _Quoting().format(next(fitting, ""), **about)
        code = options_among(rest, env=str, program=str) if "evaluate" in following else {}
        if "record --policy" in following and _needs_code(Path(about["run"])):
            return ""  # which its record names, and only the user may
        if "--vault" in following and "--env" not in following and ".py:" in str(about.get("env")):
            code = {"env": "none"}  # data that name code, which no command runs
        return " ".join([following, *(f"--{key} {quote(x)}" for key, x in code.items() if x)])
    return ""


def _needs_code(run: Path) -> bool:
    """Whether a run is of a program or an environment of the user's own."""
    record = read_run(run)
    code = re.fullmatch(r"(.+\.py|[\w.]+):[\w.]+(:.*)?", str(record["args"].get("env")))
    return bool(record.get("file") or code)


def _flags_of(verb: str) -> set[str]:
    """Return the options of a verb that take no value."""
    parameters = signature(function_of(verb, VERBS[verb])).parameters.values()
    return {f"--{x.name.replace('_', '-')}" for x in parameters if x.default is False}
