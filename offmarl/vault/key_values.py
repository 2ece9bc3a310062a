"""Drivers that users register: vaults in any key-value store."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath, PurePosixPath
from typing import Protocol, runtime_checkable

from offmarl.errors import VaultError
from offmarl.vault.drivers import Driver, openers
from offmarl.vault.layout import METADATA
from offmarl.vault.location import Url, schemes


@runtime_checkable
class KeyValues(Protocol):
    """A key-value store below a URL, which a user's driver provides; see `register_driver`.

    Keys are relative paths, such as ``observations./0.0`` or, below the directory of several
    vaults, ``main/observations./0.0``. Several threads may call one object.
    """

    def read(self, keys: Sequence[str]) -> list[bytes | None]:
        """Return the values of keys; None for each key that does not exist."""

    def sizes(self, prefix: str) -> Mapping[str, int]:
        """Return the keys that begin with a prefix, and the bytes of their values."""

    def generations(self, keys: Sequence[str]) -> list[bytes]:
        """Return a stamp for each key, missing ones too; every write of a key changes its stamp."""

    def commit(self, writes: Mapping[str, bytes], fence: Mapping[str, bytes]) -> None:
        """Write all values or none, durably.

        Parameters
        ----------
        writes
            Keys and values.
        fence
            Keys and the generations that they must still have.

        Raises
        ------
        VaultConflictError
            A key of the fence has another generation; nothing was written.
        """

    def clear(self) -> None:
        """Remove all keys."""


Factory = Callable[[str], KeyValues]
"""Opens the key-value store below a URL, which need not hold anything."""


class Registered(Driver):
    """A place of a scheme that a user registered.

    Attributes
    ----------
    values
        The user's key-value store. It also holds ``metadata.json``, which is written last when a
        vault is created, so a vault exists once this key does.
    """

    is_writable = True

    def __init__(self, path: Url, values: KeyValues):
        super().__init__(path)
        self.values = values

    @property
    def num_bytes(self) -> int:
        """Bytes of all values."""
        return sum(self.values.sizes("").values())

    def read(self, name: str) -> bytes | None:
        """Return the value of a key, or None."""
        (value,) = self.values.read([name])
        return value

    def prefetch(self, keys: Sequence[str]) -> None:
        """Start to read the values of keys, if the store can."""
        if prefetch := getattr(self.values, "prefetch", None):
            prefetch(keys)

    def write(self, name: str, content: bytes) -> None:
        """Write one value."""
        self.values.commit({name: content}, {})

    def clear(self) -> None:
        """Remove all keys."""
        self.values.clear()

    def is_vault(self) -> bool:
        """Whether ``metadata.json`` exists."""
        return self.read(METADATA) is not None

    def vaults(self) -> list[PurePath]:
        """Return the vaults below, at any depth."""
        keys = (PurePosixPath(key) for key in self.values.sizes("") if key.endswith(METADATA))
        found = sorted({key.parent for key in keys if key.name == METADATA and len(key.parts) > 1})
        return [self.path / below for below in found if not below.name.startswith(".")]


def register_driver(scheme: str, factory: Factory) -> None:
    """Register a driver for URLs of a scheme, such as ``memory://name/data.vlt/main``.

    Parameters
    ----------
    scheme
        In lower case, without ``://``. A scheme that was registered before is replaced.
    factory
        Called with the URL of a vault, or of a directory of vaults. Calls with the same URL must
        return views of the same data.

    Raises
    ------
    VaultError
        The scheme belongs to offmarl, or is not a word of lower-case letters, digits and ``+.-``.
    """
    reserved = schemes - openers.keys()
    if scheme in reserved or not scheme[:1].isalpha() or not _is_scheme(scheme):
        raise VaultError(f"{scheme!r} cannot be registered as the scheme of a driver.")
    schemes.add(scheme)
    openers[scheme] = lambda url: Registered(url, factory(str(url)))


def _is_scheme(text: str) -> bool:
    allowed = set("abcdefghijklmnopqrstuvwxyz0123456789+.-")
    return len(text) > 1 and allowed.issuperset(text)
