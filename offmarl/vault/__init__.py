"""Vaults: experience on disk, in the format of flashbax, written so that nothing is ever lost.

>>> with vault.create("coverage.vlt/expert", spec, rows=64) as writer:
...     writer.append(transition, finals)
>>> data = vault.open_vault("coverage.vlt/expert")
>>> data[:100]
"""

from typing import TYPE_CHECKING

from offmarl._imports import homes_in, lazy_getattr

if TYPE_CHECKING:
    from offmarl.vault.archive import unpack
    from offmarl.vault.compaction import Compaction, compact
    from offmarl.vault.convert import export_dataset, from_arrays, import_dataset
    from offmarl.vault.creation import create, create_whole
    from offmarl.vault.dataset import Dataset, open_vault
    from offmarl.vault.drivers import KeyValues, register_driver
    from offmarl.vault.faults import Fault
    from offmarl.vault.mixture import Mixture, mix
    from offmarl.vault.open import Summary, list_vaults
    from offmarl.vault.salvaging import Salvage, salvage
    from offmarl.vault.shared import SharedWriter, join
    from offmarl.vault.tables import Episodes
    from offmarl.vault.transform.columns import Steps
    from offmarl.vault.verbs import cat, dedup, filter, map, recode, sample, slice, split
    from offmarl.vault.verification import Verification, verify
    from offmarl.vault.weights import Weights
    from offmarl.vault.writer import Writer, resume

__all__ = [
    "Compaction",
    "Dataset",
    "Episodes",
    "Fault",
    "KeyValues",
    "Mixture",
    "Salvage",
    "SharedWriter",
    "Steps",
    "Summary",
    "Verification",
    "Weights",
    "Writer",
    "cat",
    "compact",
    "create",
    "create_whole",
    "dedup",
    "export_dataset",
    "filter",
    "from_arrays",
    "import_dataset",
    "join",
    "list_vaults",
    "map",
    "mix",
    "open_vault",
    "recode",
    "register_driver",
    "resume",
    "salvage",
    "sample",
    "slice",
    "split",
    "unpack",
    "verify",
]

_HOMES = {
    "archive": "unpack",
    "convert": "export_dataset from_arrays import_dataset",
    "faults": "Fault",
    "compaction": "Compaction compact",
    "verification": "Verification verify",
    "drivers": "KeyValues register_driver",
    "open": "Summary list_vaults",
    "dataset": "Dataset open_vault",
    "mixture": "Mixture mix",
    "weights": "Weights",
    "salvaging": "Salvage salvage",
    "tables": "Episodes",
    "transform.columns": "Steps",
    "verbs": "cat dedup filter map recode sample slice split",
    "creation": "create create_whole",
    "shared": "SharedWriter join",
    "writer": "Writer resume",
}

if not TYPE_CHECKING:  # type checkers take any name from a module that has this
    __getattr__ = lazy_getattr(__name__, homes_in(__name__, _HOMES))


def __dir__() -> list[str]:
    return sorted(__all__)
