"""Datasets on the hub as vaults that are read without a download: ``hf://org/name``.

A name is that of `offmarl.hub.pull`: ``hf://org/name``, ``hf://org/name/uid`` and
``hf://org/name@revision/uid``. Requests are for ranges of the published files, by the vault's
`Index`; see `offmarl.hub.pages`.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property, lru_cache
from pathlib import PurePath

import google_crc32c
from huggingface_hub import constants

from offmarl.errors import (
    HubChecksumError,
    HubError,
    VaultError,
    VaultNotFoundError,
    unknown_name,
)
from offmarl.hub import client
from offmarl.hub.cache import DatasetName
from offmarl.hub.card import Card, File
from offmarl.hub.index import Index, ValueRange
from offmarl.hub.pages import Pages
from offmarl.vault.format.layout import METADATA
from offmarl.vault.storage.location import Url
from offmarl.vault.storage.store import Registered

_DATASETS = "datasets"
"""The host of addresses as huggingface_hub writes them: ``hf://datasets/org/name``."""
_TOGETHER = 2**25
"""Bytes that are fetched together, which are in memory until all have arrived."""
_TRIES = 3
"""Requests for a value whose checksum is wrong."""
_MOST = 2**28
"""Maximum bytes of a file that is read whole."""


def parse(url: Url) -> DatasetName:
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
    uid = parts[2] if len(parts) > 2 else None
    return DatasetName("/".join(parts[:2]), uid, revision or None)


class PublishedValues:
    """The values of a published vault, read from its files: a `KeyValues` that is never written.

    ``files`` are those of the vault, by their paths in its directory.
    """

    def __init__(
        self,
        files: Mapping[str, File],
        index: File,
        open_pages: Callable[[File], Pages],
        name: str,
    ):
        self._files, self._name = files, name
        self._pages = lru_cache(None)(lambda path: open_pages(files[path]))
        sizes = {path: file.size for path, file in files.items()}
        self._index = Index(self._whole(open_pages(index), index), sizes, index.path)

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of keys; None for each key that does not exist."""
        return [self._value(key) for key in keys]

    def _value(self, key: str) -> bytes | None:
        if key == METADATA:
            return self._whole(self._pages(key), self._files[key])
        place = self._index.get(key)
        if not isinstance(place, ValueRange):
            return place

        def is_intact(content: bytes) -> bool:
            return google_crc32c.value(content) == place.crc32c

        start, stop = place.offset, place.offset + place.length
        return self._checked(self._pages(place.file), start, stop, is_intact)

    def _whole(self, pages: Pages, file: File) -> bytes:
        """Return the content of a small file, which has the SHA-256 in the card."""
        if file.size > _MOST:
            raise HubError(
                f"{file.path} of {self._name} has {file.size:,} bytes; at most {_MOST:,} are read "
                "of such a file."
            )

        def is_intact(content: bytes) -> bool:
            return hashlib.sha256(content).hexdigest() == file.sha256

        return self._checked(pages, 0, file.size, is_intact)

    def _checked(
        self, pages: Pages, start: int, stop: int, is_intact: Callable[[bytes], bool]
    ) -> bytes:
        """Return an interval of a file; it is fetched again if it is damaged."""
        for _ in range(_TRIES):
            content = pages.read(start, stop)
            if is_intact(content):
                return content
            pages.drop(start, stop)
        raise HubChecksumError(
            f"bytes {start} to {stop} of {pages.remote.url} arrived {_TRIES} times with a "
            "wrong checksum: the connection damages them. Nothing of them was used; "
            "what was fetched before is kept."
        )

    def prefetch(self, keys: Sequence[str]) -> None:
        """Fetch the values of keys, several requests at a time, so that `read` finds them."""
        spans: dict[str, list[tuple[int, int]]] = {}
        size = 0
        for key in keys:
            if isinstance(place := self._index.get(key), ValueRange):
                span = place.offset, place.offset + place.length
                spans.setdefault(place.file, []).append(span)
                size += place.length
            if size > _TOGETHER:
                self._fetch(spans)
                spans, size = {}, 0
        self._fetch(spans)

    def _fetch(self, spans: Mapping[str, Iterable[tuple[int, int]]]) -> None:
        futures = [
            future for path, ranges in spans.items() for future in self._pages(path).start(ranges)
        ]
        for future in futures:
            future.result()

    def sizes(self, prefix: str) -> Mapping[str, int]:
        """Return the keys that begin with a prefix, and the bytes of their values."""
        return self._index.sizes(prefix)

    def generations(self, keys: Sequence[str]) -> list[bytes]:
        """Return a stamp for each key; a commit on the hub never changes."""
        return [b"1"] * len(keys)


class HubDriver(Registered):
    """A published vault, or a dataset of several."""

    is_writable = False
    is_remote = True

    def __init__(self, path: Url):
        self.path, self.address = path, parse(path)

    @cached_property
    def _found(self) -> tuple[str, Card]:
        """The commit and the card of the dataset, as they were when it was first used."""
        return client.find_card(self.address.name, self.address.revision)

    @property
    def _uid(self) -> str:
        assert self.address.uid is not None
        return self.address.uid

    @cached_property
    def values(self) -> PublishedValues:  # type: ignore[override]
        """The values of the vault."""
        (commit, card), repository = self._found, self.address.name
        owner = f"{constants.ENDPOINT}/{repository}"

        def open_pages(file: File) -> Pages:
            return Pages(client.remote_of(repository, commit, file), owner)

        name = f"{repository}/{self._uid}"
        return PublishedValues(*card.files_of(self._uid), open_pages, name)

    @property
    def digest(self) -> str | None:
        """The digest of the vault's content, from the card."""
        return self._found[1].uids[self._uid].digest

    @property
    def num_bytes(self) -> int:
        """Bytes of the vault's files."""
        files, _ = self._found[1].files_of(self._uid)
        return sum(file.size for file in files.values())

    def is_vault(self) -> bool:
        """Whether the address names a vault of the dataset."""
        if self.address.uid is None:
            return False
        if self._uid not in (uids := self._found[1].uids):
            error = unknown_name("uid", self._uid, uids)
            raise VaultNotFoundError(f"{self.path}: {error}")
        return True

    def vaults(self) -> list[PurePath]:
        """Return the vaults of the dataset."""
        return [] if self.address.uid else [self.path / uid for uid in self._found[1].uids]
