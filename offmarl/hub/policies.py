"""Trained policies on the hub: a run's record, statistics and last checkpoint, with a model card.

A policy is a model repository with these files of the run as they are, ``offmarl-policy.toml`` with
their sizes and SHA-256, and a README that the hub shows as a model card. What `pull_policy`
installs is a run: `offmarl.load_policy`, ``offmarl evaluate`` and ``offmarl record --policy`` read
it.
"""

import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tomli_w
from filelock import FileLock
from huggingface_hub import CommitOperationAdd

from offmarl import records, tracking
from offmarl.errors import CardError, HubUnreachableError, OptionError, RunError
from offmarl.hub import client
from offmarl.hub.card import File, check_files
from offmarl.hub.install import download_files
from offmarl.hub.licences import check_link, licence_named
from offmarl.hub.pushing import check_name, commit_files, files_of, open_repository
from offmarl.hub.readme import model_readme
from offmarl.paths import local
from offmarl.statistics import MIN_RUNS, bootstrap_interval, mean

CARD = records.POLICY_CARD

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = (tracking.RUN_FILE, tracking.METRICS_FILE, tracking.MARL_EVAL_FILE, "dataset.npz")
_PATH = re.compile(rf"{'|'.join(map(re.escape, _FILES))}|{tracking.CHECKPOINTS}/\d+/.+")
"""Paths of the files that a policy consists of."""

_MOST_BYTES = 10 * 2**30
"""Limit of the sum of a policy's files."""

_COMMITTED = "commit_success.txt"
"""Files of orbax's whose text names a directory of this machine, and that it does not read."""


class _Card(records.PolicyCard, frozen=True):
    """The card of a policy."""

    files: tuple[File, ...]


class PushedPolicy(NamedTuple):
    """The result of `push_policy`."""

    url: str
    commit: str
    sent: int
    """Bytes."""
    card: dict[str, Any]
    """Content of `CARD`."""


class PulledPolicy(NamedTuple):
    """The result of `pull_policy`."""

    path: Path
    """Directory of the run."""
    commit: str
    fetched: int
    """Bytes downloaded."""
    card: dict[str, Any]
    asked: bool = True
    """Whether the hub was contacted; a policy on this machine is returned if it cannot be."""


def push_policy(
    run: str | os.PathLike[str],
    repository: str,
    licence: str | None = None,
    licence_link: str | None = None,
    summary: str = "",
    private: bool = False,
    message: str = "Upload with offmarl",
) -> PushedPolicy:
    """Publish the last policies of a finished run as a model that `pull_policy` downloads.

    Parameters
    ----------
    run
        Directory of the run.
    repository
        Name of the repository, such as "org/name"; it is created if it does not exist.
    licence, licence_link
        As for `offmarl.hub.push`. A policy has none until you choose it.
    summary
        A sentence in the card; by default what was trained on which data.
    private
        Create a private repository.
    message
        Commit message.

    Raises
    ------
    RunError
        The directory is not that of a finished run with a checkpoint.
    OptionError
        The repository's name is invalid, or no licence was given.
    UnknownNameError
        There is no such licence.
    HubError, HubUnreachableError
        As for `offmarl.hub.push`.
    """
    check_name(repository)
    if licence is None:
        raise OptionError(
            "a policy has no licence until you choose one: give --licence, such as MIT, or unknown."
        )
    terms = licence_named(licence)
    check_link(terms, licence_link)
    directory = local(run)
    record = tracking.read_run(directory)
    if not record.get("complete"):
        raise RunError(f"{directory} is not finished: repeat its command first.")
    with client.errors_of(repository):
        place = open_repository(repository, private, "model")
        record = tracking.plain(tracking.publishable(record))
        text = tracking.to_json(record, indent=2) + "\n"
        contents = _members(directory) | {tracking.RUN_FILE: text.encode()}
        operations = [CommitOperationAdd(path, content) for path, content in contents.items()]
        card = _card(directory, record, repository, terms, summary)
        card["files"] = [asdict(file) for file in files_of(operations)]
        texts = {CARD: tomli_w.dumps(card), "README.md": model_readme(card, licence_link)}
        operations += [CommitOperationAdd(path, text.encode()) for path, text in texts.items()]
        sent = sum(operation.upload_info.size for operation in operations)
        gone = {path for path in place.files - contents.keys() if _PATH.fullmatch(path)}
        commit = commit_files(place, operations, message, gone)
    return PushedPolicy(place.url, commit, sent, card)


def _members(directory: Path) -> dict[str, str | bytes]:
    """Return the files of a run that a policy consists of, by their paths in it."""
    folder = directory / tracking.CHECKPOINTS
    steps = [int(path.name) for path in folder.glob("*") if path.name.isdigit()]
    if not steps:
        raise RunError(f"{directory} has no checkpoint: repeat its command first.")
    last = folder / str(max(steps))
    found = [*(directory / name for name in _FILES), *last.rglob("*")]
    files = {x.relative_to(directory).as_posix(): x for x in sorted(found) if x.is_file()}
    return {name: b"" if x.name == _COMMITTED else str(x) for name, x in files.items()}


# ---------------------------------------------------------------------------------- card


def _card(
    directory: Path, record: Mapping[str, Any], repository: str, licence: str, summary: str
) -> dict[str, Any]:
    spec, args = record["spec"], record["args"]
    offline = record["kind"] == "baseline"
    about = f"{record['program']}, trained on {record['vault'] if offline else spec['name']}"
    return {
        "name": repository,
        "summary": summary or f"{about}, to act in {spec['name'] or 'an unknown environment'}.",
        "program": record["program"],
        "own_file": record.get("file") is not None,
        "environment": spec["name"],
        "agents": spec["num_agents"],
        "seeds": record["seeds"],
        "offline": offline,
        "dataset": record.get("vault") or "",
        "dataset_digest": record.get("vault_digest") or "",
        "licence": licence,
        "offmarl": record["offmarl"],
        "acting": tracking.acting_of(record),
        "returns": _returns(directory),
        "arguments": {name: _plain(x) for name, x in args.items() if x is not None},
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | float | str) else str(value)


def _returns(directory: Path) -> dict[str, Any]:
    """Return the mean return of each seed's last policy, and of all seeds; empty if unknown."""
    rows = tracking.read(directory / tracking.METRICS_FILE)
    evaluated = [row for row in rows if tracking.RETURN in row]
    last = max((row["step"] for row in evaluated), default=None)
    found = {row["seed"]: row[tracking.RETURN] for row in evaluated if row["step"] == last}
    if not found:
        return {}
    means = np.array([np.mean(values) for values in found.values()])
    interval = {}
    if len(means) >= MIN_RUNS:
        low, high = bootstrap_interval(mean, means[:, None], seed=0)
        interval = {"low": float(low), "high": float(high)}
    each = {"seeds": means.tolist(), "episodes": len(next(iter(found.values())))}
    return {"mean": float(means.mean()), **interval, **each}


# ---------------------------------------------------------------------------------- pulling


def pull_policy(name: str, out: str | os.PathLike[str] | None = None) -> PulledPolicy:
    """Download a policy that `push_policy` published, unless it is on this machine already.

    Parameters
    ----------
    name
        ``ORG/NAME[@REVISION]``.
    out
        Directory of the run; by default one in the cache.

    Raises
    ------
    HubUnreachableError
        No hub answers, and the policy is not on this machine.
    HubChecksumError
        The data received differs from what was published; nothing is installed.
    HubError, CardError
        There is no such policy, or its files are not valid.
    OptionError
        ``out`` holds something else.
    """
    repository, _, revision = name.partition("@")
    if not _NAME.fullmatch(repository):
        raise OptionError(f"a policy is named org/name: got {repository!r}.")
    place = client.kept_in("policies", "pulled", repository)
    try:
        remote = client.find(repository, CARD, revision or "main", "model")
    except HubUnreachableError:
        if (kept := _kept(place, revision, out)) is not None:
            return kept
        raise
    run = local(out) if out else place / remote.commit / "run"
    if run.exists():
        return _installed(run, repository, remote.commit)
    place.mkdir(parents=True, exist_ok=True)
    with FileLock(place / ".lock"):
        if run.exists():  # another process was faster
            return _installed(run, repository, remote.commit)
        text = client.read_text_file(remote, f"{CARD} of {repository}")
        card, files = _parse(text, repository)
        fetched = _install(run, repository, remote.commit, card, files)
    return PulledPolicy(run, remote.commit, fetched, card)


def run_named(name: str | os.PathLike[str]) -> Path:
    """Return the run of a pulled policy, by its name; anything else is returned as a path.

    An existing path takes precedence. Of several revisions, the one pulled last is meant.
    """
    path, text = Path(name), os.fspath(name)
    if path.exists() or not _NAME.fullmatch(text):
        return path
    if (found := _kept(client.kept_in("policies", "pulled", text), "", None)) is None:
        raise RunError(
            f"there is no run at {text}, and no policy of this name was downloaded: give the "
            f"directory of a run, or download the policy with `offmarl pull {text} --policy`."
        )
    return found.path


def _kept(place: Path, revision: str, out: Any) -> PulledPolicy | None:
    """Return the newest policy on this machine, for when the hub cannot be reached."""
    found = sorted(place.glob("*/run"), key=lambda path: path.stat().st_mtime)
    wanted = [path for path in found if path.parent.name.startswith(revision)]
    if out is not None or not wanted:
        return None
    return _installed(wanted[-1], "", wanted[-1].parent.name)._replace(asked=False)


def _installed(run: Path, repository: str, commit: str) -> PulledPolicy:
    """Return a policy that is on this machine; `OptionError` if a directory holds another one."""
    try:
        card, _ = _parse((run / CARD).read_text(), str(run))
    except (FileNotFoundError, NotADirectoryError):
        card = {}
    # The card's own name is another one if the repository was renamed or copied on the hub.
    same = repository in ("", card.get("repository"))
    if not card or not same or card.get("commit") != commit:
        raise OptionError(f"{run} exists and holds something else: give another --out.")
    return PulledPolicy(run, commit, 0, card)


def _parse(text: str, where: str) -> tuple[dict[str, Any], dict[str, File]]:
    """Return a card, and its files by path; `CardError` if a path cannot be that of a policy's."""
    where = f"the card of {where}"
    card = records.parse_toml(text, where, CardError)
    files = records.checked(card, _Card, where, CardError).files
    check_files(files, where)
    if wrong := [file.path for file in files if not _PATH.fullmatch(file.path)]:
        raise CardError(f"{where} is not valid: {wrong[0]!r:.80} is no file of a policy.")
    if sum(file.size for file in files) > _MOST_BYTES:
        raise CardError(f"{where} lists more than {_MOST_BYTES:,} bytes: it is no policy's.")
    return card, {file.path: file for file in files}


def _install(
    run: Path, repository: str, commit: str, card: dict[str, Any], files: Mapping[str, File]
) -> int:
    """Download and check a policy completely, or not at all."""
    arriving = run.with_name(f".{run.name}.arriving")
    content = arriving / commit / "run"
    content.mkdir(parents=True, exist_ok=True)
    locate = partial(client.known, repository, commit, kind="model")
    fetched = download_files(files, content, locate, repository)
    (content / CARD).write_text(tomli_w.dumps({**card, "repository": repository, "commit": commit}))
    tracking.read_run(content)
    content.rename(run)
    shutil.rmtree(arriving)
    return fetched
