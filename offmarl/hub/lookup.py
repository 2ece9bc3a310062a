"""Find pulled datasets by name without contacting the hub."""

import os
from pathlib import Path
from typing import NamedTuple

from offmarl.errors import UnknownNameError, VaultNotFoundError, unknown_name
from offmarl.hub import cache, catalogue
from offmarl.hub.cache import Entry
from offmarl.paths import local
from offmarl.vault.open import SUFFIX


class Target(NamedTuple):
    """What is asked for.

    Attributes
    ----------
    name
        The dataset's name in the catalogue, or a repository on the hub.
    uid
        One of its vaults; None for all.
    revision
        The revision asked for; None for the one that the card names.
    """

    name: str
    uid: str | None
    revision: str | None

    @property
    def card(self) -> catalogue.Card | None:
        """Its card in the catalogue, if it is in there."""
        return catalogue.load(self.name) if self.name in catalogue.names() else None

    @property
    def commit(self) -> str:
        """The commit that its revision meant when the hub was last asked, or the revision."""
        revision = self.revision
        if revision is None:
            revision = self.card.hub.revision if self.card and self.card.hub else "main"
        return cache.recall(self.name, revision)


def parse(name: str) -> Target:
    """Parse ``NAME[/UID][@REVISION]``; `UnknownNameError` if no dataset can have that name."""
    path, _, revision = name.partition("@")
    parts = path.strip("/").split("/")
    known = catalogue.names()
    ours = _is_source(parts[0])
    length = 3 if ours else 2
    target = "/".join(parts[:length])
    if len(parts) not in (length, length + 1) or (ours and target not in known):
        raise unknown_name("dataset", path, known, see="offmarl ls --remote")
    return Target(target, parts[length] if len(parts) > length else None, revision or None)


def _is_source(name: str) -> bool:
    """Whether datasets of the catalogue begin with this."""
    return name in {one.split("/")[0] for one in catalogue.names()}


def pulled(target: Target) -> dict[str, Path]:
    """Return the local vaults of a target, by uid."""
    commit = cache.root() / target.name / target.commit
    found = {uid: path for entry in cache.entries(commit) for uid, path in entry.uids.items()}
    return {uid: path for uid, path in found.items() if target.uid in (None, uid)}


def find(name: str) -> Path | None:
    """Return where the pulled dataset of a name is: a vault, or the directory of several.

    None if it is not the name of a dataset, and so a path that does not exist.

    Raises
    ------
    VaultNotFoundError
        It is a name of the catalogue, or begins like one, and was not pulled.
    """
    try:
        target = parse(name)
    except UnknownNameError as error:
        source = name.partition("/")[0]
        if not _is_source(source) or Path(source).exists():
            return None
        raise VaultNotFoundError(f"the path {name} does not exist, and {error}") from error
    if paths := pulled(target):
        return paths[target.uid] if target.uid else next(iter(paths.values())).parent
    if target.card is None:
        return None
    raise VaultNotFoundError(_not_pulled(name, target))


def _not_pulled(name: str, target: Target) -> str:
    card = target.card
    if card and target.uid and card.uids and target.uid not in card.uids:
        return str(unknown_name("uid", target.uid, card.uids))
    if card and (card.hub is None or card.hub.path is None):
        how = f": record it with `{card.recipe.command}`" if card.recipe else ""
        return f"{target.name} is a dataset of the catalogue that is not published{how}."
    others = [
        f"{target.name}/{uid}@{entry.record['commit'][:12]}"
        for entry in cache.entries()
        if entry.record["name"] == target.name
        for uid in entry.uids
    ]
    here = f" Pulled before: {', '.join(others)}." if others else ""
    return (
        f"{name} is a dataset of the catalogue that is not on this machine: run `offmarl pull "
        f"{name}` first.{here}"
    )


def kept(target: Target, out: str | os.PathLike[str] | None) -> tuple[Entry, catalogue.Card] | None:
    """Return the local dataset and its card, or None if it is not complete.

    ``out`` is as for `offmarl.hub.pull`.
    """
    if out is None:
        places = cache.entries(cache.root() / target.name / target.commit)
    else:
        places = [Entry(path) for path in sorted(local(out).glob(f"*{SUFFIX}"))]
    for entry in places:
        record, here = entry.record, entry.uids
        if (record.get("name"), record.get("commit")) != (target.name, target.commit):
            continue
        text = record.get("card")
        card = target.card or (catalogue.parse(text, str(entry.path)) if text else None)
        whole = record.get("whole") or (card and card.uids and card.uids.keys() <= here.keys())
        if card and (target.uid in here if target.uid else whole):
            return entry, card
    return None
