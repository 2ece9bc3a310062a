"""``offmarl pull``, ``push`` and ``cache``: datasets on the hub and in the cache."""

import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, astuple
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.console import Group, RenderableType
from rich.filesize import decimal
from tyro.conf import Positional, arg

from offmarl import hub
from offmarl.cli.output import Report, as_is, ask, grid, table
from offmarl.cli.parse import refuse_unused
from offmarl.errors import HubError, OptionError, UnknownNameError, raise_together, unknown_name
from offmarl.hub import Card
from offmarl.hub import cache as pulled_datasets
from offmarl.hub.cache import parse
from offmarl.hub.card import Uid
from offmarl.terminal import number
from offmarl.tracking import RUN_FILE
from offmarl.vault.read.open import SUFFIX

if TYPE_CHECKING:
    from offmarl.hub.pages import PageCache

_NOTHING = "no dataset was pulled."
_NOT_ASKED = "it could not be reached, so a newer version may exist."


def pull(
    name: Annotated[str, Positional, arg(metavar="NAME[/UID][@REVISION]")],
    out: Path | None = None,
    dry_run: bool = False,
    time_limit: Annotated[int | None, arg(metavar="STEPS")] = None,
    policy: bool = False,
) -> Report:
    """Download a published dataset, or a policy.

    Parameters
    ----------
    name
        A dataset of `offmarl ls --remote`, such as og_marl/smac_v1/3m, or a repository that
        `offmarl push` wrote, such as org/name. /UID: only this vault of the dataset. @REVISION: a
        branch, tag or commit.
    out
        Directory for the dataset; by default the cache that `offmarl cache ls` lists.
    dry_run
        Only print the size.
    time_limit
        For data that flags the time limit as a termination: the number of steps after which
        episodes were truncated, by default that of the card. It is stored beside the data and used
        whenever the data is opened.
    policy
        NAME is a policy that `offmarl push` published; --out is then the directory of its run.
    """
    if policy:
        refuse_unused("--policy pulls all", dry_run=dry_run, time_limit=time_limit is not None)
        return _pulled_policy(name, out)
    if dry_run:
        return _planned(hub.plan(name, out))
    pulled = hub.pull(name, out, time_limit)
    limit = {"time limit": f"{pulled.time_limit} steps"} if pulled.time_limit else {}
    facts = _about(pulled.card) | limit | _arrival(pulled)
    checks = {f"{uid} checked by": check for uid, check in pulled.checks.items()}
    text = Group(
        *map(as_is, pulled.paths.values()),
        grid(facts | checks),
        as_is(f"\n{pulled.card.citation.strip()}".rstrip("\n")),
    )
    data = {"name": pulled.card.name, **pulled._asdict(), "card": asdict(pulled.card)}
    return Report(data, text)


def _pulled_policy(name: str, out: Path | None) -> Report:
    pulled = hub.pull_policy(name, out)
    about = {"policy": pulled.card["summary"], "licence": pulled.card["licence"]}
    text = Group(as_is(pulled.path), grid(about | _arrival(pulled)))
    return Report(pulled._asdict(), text)


def _arrival(pulled: "hub.Pulled | hub.PulledPolicy") -> dict[str, str]:
    """Say what is here now, how much was fetched for it, and whether the hub was not asked."""
    facts = {"commit": pulled.commit, "fetched": decimal(pulled.fetched)}
    return facts if pulled.asked else {**facts, "hub": _NOT_ASKED}


def _planned(plan: "hub.PullPlan") -> Report:
    rows = [[uid, *map(decimal, size)] for uid, size in plan.sizes.items()]
    totals = [sum(size[i] for size in plan.sizes.values()) for i in (0, 1)]
    if len(rows) > 1:
        rows.append(["all", *map(decimal, totals)])
    about = {"commit": plan.commit, "free": f"{decimal(plan.free)} on the disk of the dataset"}
    columns = ["uid", "download", "on disk"]
    data = {
        "name": plan.card.name,
        "commit": plan.commit,
        "sizes": {uid: size._asdict() for uid, size in plan.sizes.items()},
        "free": plan.free,
    }
    return Report(data, Group(table(columns, rows), grid(_about(plan.card) | about)))


def push(
    vaults: Annotated[
        list[Path], Positional, arg(metavar="VAULT...", help_behavior_hint="(required)")
    ],
    to: str,
    licence: Annotated[str | None, arg(metavar="SPDX", aliases=("--license",))] = None,
    licence_link: Annotated[str | None, arg(metavar="URL", aliases=("--license-link",))] = None,
    name: str | None = None,
    summary: str = "",
    citation: str = "",
    private: bool = False,
    message: str = "Upload with offmarl",
) -> Report:
    """Publish vaults on the hub as a dataset, or a policy as a model.

    The dataset consists of the vaults' files, an index, a card and Croissant metadata.

    Parameters
    ----------
    vaults
        Vaults of one environment, such as vaults/swarm/coverage-3.vlt/mappo-0-expert, or a .vlt
        directory for all vaults in it. Or the directory of a finished run, whose last policies are
        published, with a model card.
    to
        The repository, such as org/name; it is created if it does not exist.
    licence
        SPDX identifier of the data's licence, such as CC-BY-4.0, or an expression of them; "other",
        with --licence-link; or "unknown". By default the licence that all sources of the data
        state; your own recordings have none until you choose it.
    licence_link
        Address of the text of a licence that is "other".
    name
        The dataset's name, source/environment/scenario; by default made of the repository's owner
        and the environment.
    summary
        How the data was made, in a sentence; by default from its provenance.
    citation
        The citation, as BibTeX; by default what the sources of the data ask for.
    private
        Make the repository private.
    message
        The commit message.
    """
    if any((path / RUN_FILE).is_file() for path in vaults):
        if len(vaults) > 1 or name or citation:
            raise OptionError("push publishes one policy at a time, without --name and --citation.")
        policy = hub.push_policy(vaults[0], to, licence, licence_link, summary, private, message)
        facts = _publication(policy, policy.card["summary"], policy.card["licence"])
        return Report(vars(policy), grid(facts))
    pushed = hub.push(vaults, to, licence, name, summary, citation, private, message, licence_link)
    rows = [[uid, entry.digest, len(entry.files)] for uid, entry in pushed.card.uids.items()]
    facts = _publication(pushed, pushed.card.summary, _licence(pushed.card))
    text = Group(table(["uid", "digest", "files"], rows), grid(facts))
    return Report({**vars(pushed), "card": asdict(pushed.card)}, text)


def _publication(pushed: "hub.Pushed[Any]", summary: str, licence: str) -> dict[str, str]:
    facts = {"repository": pushed.url, "commit": pushed.commit, "size": decimal(pushed.sent)}
    return facts | {"summary": summary, "licence": licence}


def cache(
    action: Annotated[Literal["ls", "rm", "verify"], Positional],
    names: Annotated[tuple[str, ...], Positional, arg(metavar="[NAME[@COMMIT]...]")] = (),
    everything: Annotated[bool, arg(name="all")] = False,
    yes: bool = False,
    streamed: bool = False,
) -> Report:
    """List, remove or verify pulled datasets and policies.

    Parameters
    ----------
    action
        "verify" compares every file with its published checksum.
    names
        Datasets and policies, by the names that "ls" lists.
    everything
        All of them, instead of names.
    yes
        Remove without confirmation.
    streamed
        With "rm": remove the cached pages of streamed data instead, which are fetched again.
    """
    from offmarl.hub.pages import page_cache  # imports huggingface_hub, as the next does
    from offmarl.hub.policies import cached_policies

    if streamed:
        if action != "rm" or names or everything:
            raise OptionError(
                "--streamed is for `offmarl cache rm`, without names and --all: `offmarl cache ls` "
                "gives the size."
            )
        bytes_freed = page_cache().clear()
        return Report({"freed": bytes_freed}, f"{decimal(bytes_freed)} of streamed pages removed.")
    cached = {entry.name: entry for entry in (*pulled_datasets.entries(), *cached_policies())}
    entries = cached if action == "ls" and not names else _choose(cached, names, everything)
    match action:
        case "ls":
            return _listed(entries, page_cache())
        case "rm":
            _refuse_both_kinds(entries, names)
            _confirm(entries, yes)
            freed = {name: pulled_datasets.remove(entry) for name, entry in entries.items()}
            return Report(
                {"removed": freed}, f"{len(freed)} removed, {decimal(sum(freed.values()))} freed."
            )
        case "verify":
            return _verified(entries)


def _refuse_both_kinds(
    entries: Mapping[str, pulled_datasets.CachedDataset], names: Iterable[str]
) -> None:
    """Raise `OptionError` if a name without a commit is that of a dataset and of a policy."""
    for name in names:
        fitting = {full: x for full, x in entries.items() if full.partition("@")[0] == name}
        if len({_is_policy(entry) for entry in fitting.values()}) > 1:
            raise OptionError(
                f"{name} is a dataset and a policy: give the commit, too, of "
                f"{', '.join(map(_label, fitting, fitting.values()))}."
            )


def _label(name: str, entry: pulled_datasets.CachedDataset) -> str:
    return f"{name} (policy)" if _is_policy(entry) else name


def _confirm(entries: Mapping[str, pulled_datasets.CachedDataset], yes: bool) -> None:
    """Ask before datasets are removed; `OptionError` if standard input is not a terminal."""
    if yes or not entries:
        return
    labels = {_label(name, entry): entry for name, entry in entries.items()}
    if not sys.stdin.isatty():
        raise OptionError(
            f"removing {', '.join(labels)} needs confirmation, but standard input is not a "
            "terminal: give --yes."
        )
    lines = "\n".join(f"{label}  {decimal(entry.size)}" for label, entry in labels.items())
    if not ask(f"{lines}\nRemove?"):
        raise OptionError("nothing was removed.")


def verify_pulled(name: str) -> Report | None:
    """Verify a pulled dataset for `offmarl verify`, which takes a path or a name.

    Returns None if nothing of that name was pulled.
    """
    try:
        target = parse(name)
    except UnknownNameError:
        return None
    entries = {
        entry.name: entry
        for entry in pulled_datasets.entries()
        if entry.name.startswith(f"{target.name}@")
        and target.uid in (None, *entry.uids)
        and (target.explicit is None or entry.path.parent.name.startswith(target.commit))
    }
    return _verified(entries, target.uid) if entries else None


def _verified(
    entries: Mapping[str, pulled_datasets.CachedDataset], uid: str | None = None
) -> Report:
    counts: dict[str, int] = {}
    errors: list[HubError] = []
    for name, entry in entries.items():
        try:
            counts[name] = pulled_datasets.verify(entry, uid)
        except HubError as error:
            errors.append(error)
    raise_together(errors)
    lines = [
        f"{name} ({uid or _contents(entries[name])}): {count} files match what was published."
        for name, count in counts.items()
    ]
    return Report({"verified": counts}, Group(*lines or [_NOTHING]))


def _choose(
    entries: dict[str, pulled_datasets.CachedDataset], names: Iterable[str], everything: bool
) -> dict[str, pulled_datasets.CachedDataset]:
    """Return the datasets that are named, with or without their commit."""
    if everything and names:
        raise OptionError(f"give names ({', '.join(names)}) or --all, not both.")
    if everything:
        return entries
    selection: dict[str, pulled_datasets.CachedDataset] = {}
    for name in names:
        matching = {
            full: entry for full, entry in entries.items() if name in (full, full.partition("@")[0])
        }
        if not matching:
            raise unknown_name("pulled dataset or policy", name, entries, see="offmarl cache ls")
        selection |= matching
    if not selection:
        raise OptionError("give names of datasets or --all; `offmarl cache ls` lists them.")
    return selection


def _listed(entries: dict[str, pulled_datasets.CachedDataset], pages: "PageCache") -> Report:
    rows = [[name, _contents(entry), decimal(entry.size)] for name, entry in entries.items()]
    root = pulled_datasets.root()
    view = table(["name", "uids", "size"], rows) if rows else _NOTHING
    data: dict[str, dict[str, Any]] = {"datasets": {}, "policies": {}}
    for name, entry in entries.items():
        about = {"path": entry.path, "uids": entry.uids, "bytes": entry.size}
        data["policies" if _is_policy(entry) else "datasets"][name] = about
    streamed = pages.size
    more = f"\n{decimal(streamed)} of streamed pages in {pages.root}" if streamed else ""
    return Report(
        {"root": root, **data, "streamed": streamed}, Group(view, as_is(f"in {root}{more}"))
    )


def _is_policy(entry: pulled_datasets.CachedDataset) -> bool:
    return entry.path.suffix != SUFFIX


def _contents(entry: pulled_datasets.CachedDataset) -> str:
    return "policy" if _is_policy(entry) else ", ".join(entry.uids)


def catalogue(start: str, env: str | None, agents: int | None) -> Report:
    """List the datasets of the catalogue, for `offmarl ls --remote`."""
    cards = [*hub.cards(start, env, agents)]
    columns = ["name", "agents", "actions", "uids (mean return)"]
    rows = [[card.name, card.num_agents, _actions(card), _uids(card)] for card in cards]
    text = table(columns, rows) if rows else "no dataset matches."
    if rows and (start, env, agents) == ("", None, None):
        text = Group(_sources(cards), "`offmarl ls --remote NAME` lists the datasets of a line.")
    return Report({"datasets": [asdict(card) for card in cards]}, text)


def _sources(cards: Iterable[Card]) -> RenderableType:
    """Return a line for the datasets of each source and suite."""
    rows = []
    for name, group in groupby(cards, key=lambda card: card.name.rpartition("/")[0]):
        agents, uids = zip(*((card.num_agents, len(card.uids)) for card in group), strict=True)
        numbers = ", ".join(map(str, sorted({*agents})))
        rows.append([name, len(uids), sum(uids) or None, numbers])
    return table(["name", "datasets", "vaults", "agents"], rows)


def _actions(card: Card) -> str:
    return ", ".join(f"{size} {kind}" for kind, size in (card.action or {}).items())


def _uids(card: Card) -> str:
    uids = ", ".join(_with_mean(uid, entry) for uid, entry in card.uids.items())
    return uids if card.hub else f"not published, record it: {uids}"


def _with_mean(uid: str, entry: Uid) -> str:
    """Return a uid with its mean return, or with that of each team."""
    if entry.teams:
        return f"{uid} ({number({name: team.return_mean for name, team in entry.teams.items()})})"
    return uid if entry.return_mean is None else f"{uid} ({number(entry.return_mean)})"


def _about(card: Card) -> dict[str, Any]:
    about = {
        "dataset": f"{card.name}: {card.summary}",
        "agents": f"{card.num_agents}, {_actions(card)}".rstrip(", "),
        "licence": _licence(card),
        "note": " ".join(card.quirks),
    }
    return {name: text for name, text in about.items() if text}


def _licence(card: Card) -> str:
    """Format the licences, and who states them."""
    _, code, link, note = astuple(card.licence)
    data = f"data {card.licence.data}" + (f" ({link})" if link else "")
    return data + (f"; code {code}" if code else "") + (f". {note}" if note else "")
