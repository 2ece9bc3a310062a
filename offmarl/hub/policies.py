"""Trained policies on the hub: a run's record, statistics and last checkpoint, with a model card.

A policy is a model repository with these files of the run as they are, ``offmarl-policy.toml`` with
their sizes and SHA-256, and a README that the hub shows as a model card. The copies of opponents
that a run of one side learned against are runs in it, and are published with it. What `pull_policy`
installs is a run: `offmarl.load_policy`, ``offmarl evaluate`` and ``offmarl record --policy`` read
it.
"""

import json
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
from offmarl.hub import cache, client
from offmarl.hub.card import File, check_files
from offmarl.hub.install import disk_errors, download_files
from offmarl.hub.licences import check_link, licence_named
from offmarl.hub.pushing import Pushed, commit_files, files_of, open_repository
from offmarl.hub.readme import README, model_readme
from offmarl.paths import local, local_output
from offmarl.statistics import estimate, mean

CARD = records.POLICY_CARD

_FILES = (tracking.RUN_FILE, tracking.METRICS_FILE, tracking.MARL_EVAL_FILE, "dataset.npz")
_COPIES = f"{tracking.OPPONENTS}/*"
_PATH = re.compile(
    rf"({tracking.OPPONENTS}/\d+-\d+/)?"
    rf"({'|'.join(map(re.escape, _FILES))}|{tracking.CHECKPOINTS}/\d+/.+)"
)
"""Paths of the files that a policy consists of."""

_MOST_BYTES = 10 * 2**30
"""Limit of the sum of a policy's files, pushed or pulled."""

_COMMIT = re.compile("[0-9a-f]{7,40}")
_COMMITTED = "commit_success.txt"
"""Name of orbax's marker files, which contain a path of this machine and are never read."""


class _Card(records.PolicyCard, frozen=True):
    """The card of a policy."""

    files: tuple[File, ...]


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
) -> Pushed[dict[str, Any]]:
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
    CardError
        The files have more than 10 GiB.
    HubError, HubUnreachableError
        As for `offmarl.hub.push`.
    """
    client.check_name(repository)
    if licence is None:
        raise OptionError(
            "a policy has no licence until you choose one: give --licence, such as MIT, or unknown."
        )
    terms = licence_named(licence)
    check_link(terms, licence_link)
    directory = local(run)
    if not tracking.read_run(directory).get("complete"):
        raise RunError(f"{directory} is not finished: repeat its command first.")
    contents = {
        (place.relative_to(directory) / name).as_posix(): content
        for place in (directory, *directory.glob(_COPIES))
        for name, content in _members(place).items()
    }
    files = (Path(content) for content in contents.values() if isinstance(content, str))
    if links := [x for x in files if not x.resolve().is_relative_to(directory.resolve())]:
        raise RunError(
            f"{links[0]} is a link that leads out of {directory}, and could publish any file of "
            "this machine: replace it by a copy if you trust it."
        )
    record = json.loads(contents[tracking.RUN_FILE])
    operations = [CommitOperationAdd(path, content) for path, content in contents.items()]
    card = _card(directory, record, repository, terms, summary)
    card["files"] = [asdict(file) for file in files_of(operations)]
    texts = {CARD: tomli_w.dumps(card), README: model_readme(card, licence_link)}
    _parse(texts[CARD], repository)  # so that what is published can be pulled
    operations += [CommitOperationAdd(path, text.encode()) for path, text in texts.items()]
    with client.errors_of(repository):
        place = open_repository(repository, private, "model")
        obsolete = {path for path in place.files - contents.keys() if _PATH.fullmatch(path)}
        commit = commit_files(place, operations, message, obsolete)
    return Pushed(card, place.url, commit, sum(x.upload_info.size for x in operations))


def _members(directory: Path) -> dict[str, str | bytes]:
    """Return the files of a run that a policy consists of, by their paths in it.

    The record has no details of this machine. Files of copies of opponents are not included.
    """
    folder = directory / tracking.CHECKPOINTS
    steps = [int(path.name) for path in folder.glob("*") if path.name.isdecimal()]
    if not steps:
        raise RunError(f"{directory} has no checkpoint: repeat its command first.")
    last = folder / str(max(steps))
    paths = [*(directory / name for name in _FILES), *last.rglob("*")]
    files = {x.relative_to(directory).as_posix(): x for x in sorted(paths) if x.is_file()}
    record = tracking.plain(tracking.publishable(tracking.read_run(directory)))
    return {
        **{name: b"" if x.name == _COMMITTED else str(x) for name, x in files.items()},
        tracking.RUN_FILE: (tracking.to_json(record, indent=2) + "\n").encode(),
    }


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
        "returns": _returns(directory, bool(args.get("pbt"))),
        "arguments": {
            name: value if isinstance(value, bool | int | float | str) else str(value)
            for name, value in args.items()
            if value is not None
        },
    }


def _returns(directory: Path, dependent: bool) -> dict[str, Any]:
    """Return the mean return of each seed's last policy, and of all seeds; empty if unknown.

    ``dependent`` seeds, those of a population, have no interval.
    Returns that are not finite are null in the metrics, and then the means are unknown.
    """
    rows = tracking.read(directory / tracking.METRICS_FILE)
    evaluated = [row for row in rows if tracking.RETURN in row]
    last = max((row["step"] for row in evaluated), default=None)
    by_seed = {row["seed"]: row[tracking.RETURN] for row in evaluated if row["step"] == last}
    if not by_seed or any(None in values for values in by_seed.values()):
        return {}
    means = np.array([np.mean(values) for values in by_seed.values()])
    runs = means.mean(keepdims=True) if dependent else means
    value, low, high = estimate(mean, runs[:, None])
    interval = {} if low is None else {"low": low, "high": high}
    sizes = {"seeds": means.tolist(), "episodes": len(next(iter(by_seed.values())))}
    return {"mean": value, **interval, **sizes}


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
        There is no such policy, its files are not valid, or the disk is full.
    OptionError
        ``out`` holds something else.
    """
    repository, _, revision = name.partition("@")
    client.check_name(repository)
    place = _root() / repository
    try:
        remote = client.find(repository, CARD, revision or "main", "model")
    except HubUnreachableError:
        policy = _newest_pulled(place, cache.commit_of(place, revision or "main"))
        policy = policy or (None if revision else _newest_pulled(place))
        if policy is None or out is not None:
            raise
        return policy
    run, policy = local_output(out) if out else place / remote.commit / "run", None
    if not run.exists():
        with disk_errors(run):
            lock = place / remote.commit / ".lock"
            lock.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(lock):
                if not run.exists():  # no other process was faster
                    policy = _install(run, repository, remote)
    policy = policy or _installed(run, repository, remote.commit)
    cache.remember(place, revision or "main", remote.commit)
    return policy


class CachedPolicy(cache.CachedDataset):
    """A policy that `pull_policy` put into the cache: the directory of its run."""

    @property
    def root(self) -> Path:
        """Directory of all pulled policies."""
        return _root()

    @property
    def record(self) -> dict[str, Any]:
        """The files and their checksums, as `offmarl.hub.cache.verify` reads them."""
        try:
            _, files = _parse((self.path / CARD).read_text(encoding="utf-8"), str(self.path))
        except (OSError, UnicodeError, CardError):
            return {}
        checksums = {name: (file.size, file.sha256) for name, file in files.items()}
        return {"uids": {"": {"files": checksums}}}


def _root() -> Path:
    """Return the directory of all pulled policies."""
    return client.assets_directory("policies", cache.PULLED)


def cached_policies() -> list[CachedPolicy]:
    """Return the policies in the cache."""
    return [CachedPolicy(path) for path in sorted(_root().glob("*/*/*/run/"))]


def run_named(name: str | os.PathLike[str]) -> Path:
    """Return the run of a pulled policy, by its name; anything else is returned as a path.

    An existing path takes precedence. Of several revisions, the one pulled last is meant.
    """
    path, text = Path(name), os.fspath(name)
    if path.exists() or not client.NAME.fullmatch(text):
        return path
    if (policy := _newest_pulled(_root() / text)) is None:
        if path.parent.is_dir():
            raise RunError(f"there is no run at {text}: give the directory of a run.")
        raise RunError(
            f"there is no run at {text}, and no policy of this name was downloaded: give the "
            f"directory of a run, or download the policy with `offmarl pull {text} --policy`."
        )
    return policy.path


def locate_players(name: str) -> str:
    """Return the name of players with the run's directory in place of a pulled policy's name."""
    run, at, which = name.rpartition("@") if "@" in name else (name, "", "")
    return name if local(name).exists() else f"{run_named(run)}{at}{which}"


def _newest_pulled(place: Path, commit: str = "") -> PulledPolicy | None:
    """Return the newest policy of a commit on this machine, by default of any.

    Seven characters of the commit are enough, and fewer may be the name of a branch.
    """
    runs = [path for path in place.glob("*/run/") if path.parent.name.startswith(commit)]
    if not runs or (commit and not _COMMIT.fullmatch(commit)):
        return None
    run = max(runs, key=lambda path: path.stat().st_mtime)
    return _installed(run, "", run.parent.name)._replace(asked=False)


def _installed(run: Path, repository: str, commit: str) -> PulledPolicy:
    """Return a policy that is on this machine; `OptionError` if a directory holds another one."""
    try:
        card, _ = _parse((run / CARD).read_text(encoding="utf-8"), str(run))
    except (FileNotFoundError, NotADirectoryError):
        card = {}
    # The name in the card differs if the repository was renamed or copied on the hub.
    is_same = repository in ("", card.get("repository"))
    if not card or not is_same or card.get("commit") != commit:
        raise OptionError(f"{run} exists and holds something else: give another --out.")
    return PulledPolicy(run, commit, 0, card)


def _parse(text: str, where: str) -> tuple[dict[str, Any], dict[str, File]]:
    """Return a card, and its files by path; `CardError` if a path cannot be that of a policy's."""
    where = f"the card of {where}"
    card = records.parse_toml(text, where, CardError)
    files = records.as_type(card, _Card, where, CardError).files
    check_files(files, where)
    if wrong := [file.path for file in files if not _PATH.fullmatch(file.path)]:
        raise CardError(f"{where} is not valid: {wrong[0]!r:.80} is no file of a policy.")
    if sum(file.size for file in files) > _MOST_BYTES:
        raise CardError(
            f"{where} lists more than {_MOST_BYTES:,} bytes, the most that a pull downloads."
        )
    return card, {file.path: file for file in files}


def _install(run: Path, repository: str, remote: client.Remote) -> PulledPolicy:
    """Download and check a policy completely, or not at all."""
    about = tomli_w.dumps({"repository": repository, "commit": remote.commit})
    text = about + client.read_text_file(remote, f"{CARD} of {repository}")
    card, files = _parse(text, repository)
    arriving = run.with_name(f".{run.name}.arriving")
    content = arriving / remote.commit / "run"
    content.mkdir(parents=True, exist_ok=True)
    locate = partial(client.remote_of, repository, remote.commit, kind="model")
    fetched = download_files(files, content, locate, repository)
    (content / CARD).write_text(text, encoding="utf-8")
    for place in (content, *content.glob(_COPIES)):
        tracking.read_run(place)
    content.rename(run)
    shutil.rmtree(arriving)
    return PulledPolicy(run, remote.commit, fetched, card)
