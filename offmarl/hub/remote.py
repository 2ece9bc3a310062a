"""Datasets on the hub as vaults that are read without a download: ``hf://org/name``.

A name is that of `offmarl.hub.pull`: ``hf://org/name``, ``hf://org/name/uid`` and
``hf://org/name@revision/uid``. Requests are for pages of the published shards; see
`offmarl.hub.pages`.
"""

from dataclasses import astuple
from functools import cached_property
from pathlib import PurePath
from typing import NamedTuple

from huggingface_hub import constants

from offmarl.errors import HubError, UnknownNameError, VaultError, VaultNotFoundError, unknown_name
from offmarl.hub import card as cards
from offmarl.hub import client
from offmarl.hub.card import Card, File
from offmarl.hub.pages import PageCache, Pages, directory
from offmarl.hub.pull import CARD
from offmarl.hub.shards import ShardedValues
from offmarl.vault.key_values import Registered
from offmarl.vault.location import Url

_DATASETS = "datasets"
"""The host of addresses as huggingface_hub writes them: ``hf://datasets/org/name``."""


class Place(NamedTuple):
    """The parts of an address."""

    repository: str
    revision: str
    uid: str | None


def parse(url: Url) -> Place:
    """Parse the address of a dataset."""
    text = "/".join(url.parts[1:])
    path, at, revision = text.removeprefix(f"{_DATASETS}/").partition("@")
    revision, _, behind = revision.partition("/")
    parts = [part for part in (*path.split("/"), *behind.split("/")) if part]
    if len(parts) not in (2, 3) or (at and not revision):
        raise VaultError(
            f"{url} is not the address of a dataset: give hf://org/name, hf://org/name/uid or "
            "hf://org/name@revision/uid."
        )
    return Place("/".join(parts[:2]), revision or "main", parts[2] if len(parts) > 2 else None)


class Published(NamedTuple):
    """A published dataset at one commit."""

    repository: str
    commit: str
    card: Card

    def values(self, uid: str) -> ShardedValues:
        """Return the values of one of its vaults."""
        files = self.card.uids[uid].files
        if not files or not all(file.path.endswith(".zip") for file in files):
            raise HubError(
                f"{self.repository}/{uid} was published by an earlier version of offmarl, and "
                "cannot be streamed: `offmarl pull` downloads it; push it again to stream it."
            )
        cache, owner = PageCache(directory()), f"{constants.ENDPOINT}/{self.repository}"

        def open_pages(file: File) -> Pages:
            remote = client.known(self.repository, *astuple(file), commit=self.commit)
            return Pages(remote, cache, owner)

        found = ShardedValues(files, open_pages, f"{self.repository}/{uid}")
        if found.digest not in (None, self.card.uids[uid].digest):
            raise HubError(
                f"the index of {found.name} is that of other data than its card describes, because "
                "two programs pushed at once: push it again."
            )
        return found


def published(place: Place) -> Published:
    """Find a dataset on the hub, and read its card."""
    remote = client.find(place.repository, CARD, place.revision)
    name = f"{CARD} of {place.repository}"
    card = cards.parse(client.read_text_file(remote, name), name)
    return Published(place.repository, remote.commit, card)


class HubDriver(Registered):
    """A published vault, or a dataset of several.

    Attributes
    ----------
    place
        The parts of the address.
    """

    is_writable = False
    is_remote = True

    def __init__(self, path: Url):
        self.path, self.place = path, parse(path)

    @cached_property
    def found(self) -> Published:
        """The dataset, as it was when it was first used."""
        return published(self.place)

    @cached_property
    def values(self) -> ShardedValues:  # type: ignore[override]
        """The values of the vault."""
        assert self.place.uid is not None
        return self.found.values(self.place.uid)

    @property
    def digest(self) -> str | None:
        """The digest of the vault's content, from the card."""
        return self.found.card.uids[self.place.uid or ""].digest

    @property
    def num_bytes(self) -> int:
        """Bytes of the vault's archives."""
        return sum(file.size for file in self.found.card.uids[self.place.uid or ""].files)

    def is_vault(self) -> bool:
        """Whether the address names a vault of the dataset."""
        if self.place.uid is None:
            return False
        if self.place.uid not in (known := self.found.card.uids):
            try:
                raise unknown_name("uid", self.place.uid, known)
            except UnknownNameError as error:
                raise VaultNotFoundError(f"{self.path}: {error}") from None
        return True

    def vaults(self) -> list[PurePath]:
        """Return the vaults of the dataset."""
        return [] if self.place.uid else [self.path / uid for uid in self.found.card.uids]
