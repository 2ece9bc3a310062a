"""Trained policies on the hub: a run's record, statistics and last checkpoint, with a model card.

A policy is a model repository with one archive of the run's files, ``offmarl-policy.toml`` with its
size and SHA-256, and a README that the hub shows as a model card. What `pull_policy` installs is a
run: `offmarl.load_policy`, ``offmarl evaluate`` and ``offmarl record --policy`` read it.
"""

import os
import re
import shutil
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import tomli_w
from filelock import FileLock
from huggingface_hub import CommitOperationAdd, HfApi

from offmarl import records, tracking
from offmarl.errors import CardError, HubError, HubUnreachableError, OptionError, RunError
from offmarl.hub import client
from offmarl.hub.install import fetch_checked
from offmarl.hub.licences import check_link, hub_metadata, licence_named
from offmarl.hub.push import commit_files, repository_of
from offmarl.paths import local
from offmarl.statistics import MIN_RUNS, bootstrap_interval, mean
from offmarl.terminal import number

CARD = records.POLICY_CARD
ARCHIVE = "run.zip"

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_FILES = (tracking.RUN_FILE, tracking.METRICS_FILE, tracking.MARL_EVAL_FILE, "dataset.npz")
_EPOCH = (1980, 1, 1, 0, 0, 0)
_MOST_BYTES = 10 * 2**30
"""Largest size of an unpacked policy."""


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
    if not _NAME.fullmatch(repository):
        raise OptionError(f"a repository is named org/name: got {repository!r}.")
    if licence is None:
        raise OptionError(
            "a policy has no licence until you choose one: give --licence, such as MIT, or unknown."
        )
    terms = licence_named(licence)
    check_link(terms, licence_link)
    directory = local(run)
    record = _finished(directory)
    endpoint = client.answering()[0]
    api, url = HfApi(endpoint=endpoint), f"{endpoint}/{repository}"
    with TemporaryDirectory() as place, client.errors_of(repository):
        parent = repository_of(api, repository, private, "model")
        record = tracking.plain(tracking.publishable(record))
        archive, own = Path(place, ARCHIVE), Path(place, tracking.RUN_FILE)
        tracking.write_json(own, record)
        _pack(_members(directory) | {tracking.RUN_FILE: own}, archive)
        operations = [CommitOperationAdd(ARCHIVE, str(archive))]
        packed = operations[0].upload_info
        card = _card(directory, record, repository, terms, summary)
        card["file"] = {"path": ARCHIVE, "size": packed.size, "sha256": packed.sha256.hex()}
        texts = {CARD: tomli_w.dumps(card), "README.md": _readme(card, licence_link)}
        operations += [CommitOperationAdd(path, text.encode()) for path, text in texts.items()]
        sent = sum(operation.upload_info.size for operation in operations)
        commit = commit_files(api, repository, operations, message, parent, "model")
    return PushedPolicy(url, commit, sent, card)


def _finished(directory: Path) -> dict[str, Any]:
    record = tracking.read_run(directory)
    if not record.get("complete"):
        raise RunError(f"{directory} is not finished: repeat its command first.")
    return record


def _members(directory: Path) -> dict[str, Path]:
    """Return the files of a run that a policy consists of, by their names in the archive."""
    folder = directory / tracking.CHECKPOINTS
    steps = [int(path.name) for path in folder.glob("*") if path.name.isdigit()]
    if not steps:
        raise RunError(f"{directory} has no checkpoint: repeat its command first.")
    last = folder / str(max(steps))
    found = [directory / name for name in _FILES if (directory / name).is_file()]
    found += [path for path in last.rglob("*") if path.is_file()]
    return {path.relative_to(directory).as_posix(): path for path in sorted(found)}


def _pack(members: Mapping[str, Path], archive: Path) -> None:
    """Pack files into an archive whose bytes depend on them only."""
    with zipfile.ZipFile(archive, "w") as packed:
        for name, path in members.items():
            member = zipfile.ZipInfo(name, _EPOCH)
            with path.open("rb") as source, packed.open(member, "w", force_zip64=True) as target:
                shutil.copyfileobj(source, target)


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


def _readme(card: Mapping[str, Any], licence_link: str | None) -> str:
    """Return the model card."""
    from huggingface_hub import EvalResult, ModelCard, ModelCardData  # pulling does not need them

    returns = card["returns"]
    results = returns and [
        EvalResult(
            task_type="reinforcement-learning",
            dataset_type=card["environment"] or "unknown",
            dataset_name=card["environment"] or "unknown",
            metric_type="mean_reward",
            metric_value=number(returns["mean"]),
        )
    ]
    terms: dict[str, Any] = {**hub_metadata(card["licence"], licence_link)}
    metadata = ModelCardData(
        **terms,
        library_name="offmarl",
        pipeline_tag="reinforcement-learning",
        tags=["multi-agent", "offline-rl", "reinforcement-learning", "jax", "offmarl"],
        model_name=card["name"].rpartition("/")[2],
        eval_results=results or None,
    )
    return str(ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{_text(card)}"))


_CHOICES = {
    None: "Its returns are those of the last update, and were not used to choose a checkpoint.",
    "agreement": "Its agreement with held-out actions chose the update at which training stopped.",
    "return": "Returns in the environment chose the update at which training stopped.",
}
"""How the published checkpoint was chosen, by ``--stop-on``."""


def _text(card: Mapping[str, Any]) -> str:
    returns, name = card["returns"], card["name"]
    rows = "".join(f"| `{key}` | {value} |\n" for key, value in card["arguments"].items())
    score = "It was not evaluated in an environment."
    if returns:
        low = (
            f" (95% interval {returns['low']:.4g} to {returns['high']:.4g})"
            if "low" in returns
            else ""
        )
        score = (
            f"Mean return of the last policies, actions {card['acting']}, over "
            f"{len(returns['seeds'])} seeds of {returns['episodes']} episodes each: "
            f"{returns['mean']:.4g}{low}."
        )
    code = (
        "\nThe program is in a file of its author's own, which is not part of this repository:\n"
        "give it with `program=`.\n"
        if card["own_file"]
        else ""
    )
    where = card["environment"] or "unknown"
    trained, choice = f"online in `{where}`", ""
    if card["offline"]:
        trained = f"on `{card['dataset']}` (digest `{card['dataset_digest'][:12]}`)"
        choice = " The policy was trained offline. " + _CHOICES[card["arguments"].get("stop_on")]
    return f"""# {name}

{card["summary"]}

{card["agents"]} agents in `{where}`, trained {trained} by offmarl
{card["offmarl"]}. {score}

## Use

```bash
pip install offmarl
offmarl pull {name} --policy
```

```python
import offmarl

policy = offmarl.load_policy(offmarl.hub.pull_policy("{name}").path)
action, carry = policy(observation, legal_actions)
```
{code}
`{ARCHIVE}` holds the run; `{CARD}` lists its SHA-256, which a pull checks.

## Intended use and limits

Returns in other environments, or after changes of the environment, are unknown.{choice}

## Arguments

| argument | value |
|---|---|
{rows}"""


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
    place = _root() / repository
    try:
        remote = client.find(repository, CARD, revision or "main", "model")
    except HubUnreachableError:
        if (kept := _kept(place, revision, out)) is not None:
            return kept
        raise
    run = local(out) if out else place / remote.commit / "run"
    if run.exists():
        return _installed(run, repository, remote.commit)
    with FileLock(_lock_of(place)):
        if run.exists():  # another process was faster
            return _installed(run, repository, remote.commit)
        card = _parse(client.read_text_file(remote, f"{CARD} of {repository}"), repository)
        fetched = _install(run, repository, remote.commit, card)
    return PulledPolicy(run, remote.commit, fetched, card)


def run_named(name: str | os.PathLike[str]) -> Path:
    """Return the run of a pulled policy, by its name; anything else is returned as a path.

    An existing path takes precedence. Of several revisions, the one pulled last is meant.
    """
    path, text = Path(name), os.fspath(name)
    if path.exists() or not _NAME.fullmatch(text):
        return path
    if (found := _kept(_root() / text, "", None)) is None:
        raise RunError(
            f"there is no run at {text}, and no policy of this name was downloaded: give the "
            f"directory of a run, or download the policy with `offmarl pull {text} --policy`."
        )
    return found.path


def _root() -> Path:
    return client.kept_in("policies", "pulled")


def _lock_of(place: Path) -> Path:
    place.mkdir(parents=True, exist_ok=True)
    return place / ".lock"


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
        card = _parse((run / CARD).read_text(), str(run))
    except (FileNotFoundError, NotADirectoryError):
        card = {}
    if not card or repository not in ("", card["name"]) or card.get("commit") != commit:
        raise OptionError(f"{run} exists and holds something else: give another --out.")
    return PulledPolicy(run, commit, 0, card)


def _parse(text: str, where: str) -> dict[str, Any]:
    where = f"the card of {where}"
    card = records.parse_toml(text, where, CardError)
    file = records.checked(card, records.PolicyCard, where, CardError).file
    if file.get("path") != ARCHIVE or not isinstance(file.get("sha256"), str):
        raise CardError(f"{where} is not valid: it does not describe {ARCHIVE}.")
    return card


def _install(run: Path, repository: str, commit: str, card: dict[str, Any]) -> int:
    """Download, check and unpack a policy completely, or not at all."""
    arriving = run.with_name(f".{run.name}.arriving")
    arriving.mkdir(parents=True, exist_ok=True)
    remote = client.find(repository, ARCHIVE, commit, "model")
    archive = arriving / f"{commit}.part"
    with tracking.progress(repository, remote.size, unit="bytes") as advance:
        name, sha256 = f"{ARCHIVE} of {repository}", card["file"]["sha256"]
        fetched = fetch_checked(remote, archive, name, sha256, advance)
    unpacked = arriving / "unpacked"
    shutil.rmtree(unpacked, ignore_errors=True)
    _unpack(archive, unpacked, repository)
    (unpacked / CARD).write_text(tomli_w.dumps({**card, "commit": commit}))
    tracking.read_run(unpacked)
    unpacked.rename(run)
    shutil.rmtree(arriving)
    return fetched


def _unpack(archive: Path, directory: Path, repository: str) -> None:
    """Unpack an archive whose names stay in the directory; `HubError` for any other."""
    try:
        with zipfile.ZipFile(archive) as packed:
            members = packed.infolist()
            if sum(member.file_size for member in members) > _MOST_BYTES:
                raise HubError(f"the policy {repository} has more than {_MOST_BYTES:,} bytes.")
            for member in members:
                path = PurePosixPath(member.filename)
                if path.is_absolute() or ".." in path.parts or "\\" in member.filename:
                    raise HubError(f"the policy {repository} has an unsafe file name: {path}.")
                if not member.is_dir():
                    packed.extract(member, directory)
    except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
        raise HubError(f"the policy {repository} is not a zip archive ({error}).") from error
