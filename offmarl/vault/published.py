"""What `offmarl pull` notes of vaults, in a file beside them.

The files of a published vault stay as they were published, so that they can be compared with its
checksums; what its card says and they do not is noted in the directory above.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from offmarl.errors import VaultFormatError
from offmarl.vault.drivers import Driver
from offmarl.vault.layout import load_json

RECORD = "pulled.json"
"""Beside the vaults of a dataset that was pulled, in ``<name>.vlt``."""
TIME_LIMIT = "time_limit"
"""In the record: steps after which episodes were cut off, if that is known."""
PUBLISHED = "published"
"""In the record, and in the provenance of these vaults: where they are from, licence, citation."""


class Beside(NamedTuple):
    """Facts recorded by `offmarl pull`; empty for other vaults."""

    time_limit: int | None = None
    provenance: Mapping[str, Any] = {}


def read_beside(driver: Driver) -> Beside:
    """Return the facts recorded beside a vault in a local directory.

    Invalid fields are ignored; the vault is readable without them.
    """
    try:
        content = driver.read_beside(RECORD)
        found = load_json(content, RECORD) if content else {}
    except (OSError, VaultFormatError):
        return Beside()
    limit, published = found.get(TIME_LIMIT), found.get(PUBLISHED)
    return Beside(
        limit if type(limit) is int and limit > 0 else None,
        {PUBLISHED: published} if isinstance(published, dict) else {},
    )
