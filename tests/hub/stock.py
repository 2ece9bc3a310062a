"""A published archive as other projects make them: a zipped vault of stock flashbax."""

from pathlib import Path

import jax
from flashbax.vault import Vault as StockVault

from offmarl import vault
from tests.vault.test_stock import append_with_stock, to_stock

from .conftest import zipped


def stock_archive(path: Path, name: str, uid: str, folder: Path) -> bytes:
    """Return a zip of what stock writes of a vault, with nothing of ours in it."""
    data = vault.open_vault(path)
    row = jax.tree.map(lambda field: field[:1], data.transitions(0, data.length))
    stock = StockVault(
        vault_name=f"{name}.vlt",
        experience_structure=to_stock(row),
        rel_dir=str(folder),
        vault_uid=uid,
    )
    append_with_stock(stock, row)
    return zipped(folder)
