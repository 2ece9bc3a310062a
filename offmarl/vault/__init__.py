"""Vaults: experience on disk, in the format of flashbax, written so that nothing is ever lost.

>>> with vault.create("coverage.vlt/expert", spec, rows=64) as writer:
...     writer.append(transition, finals)
>>> data = vault.open_vault("coverage.vlt/expert")
>>> data[:100]
"""

from offmarl.vault.convert import convert_pymarl
from offmarl.vault.faults import Fault
from offmarl.vault.integrity.compaction import Compaction, compact
from offmarl.vault.integrity.repairing import Repair, repair
from offmarl.vault.integrity.verification import Verification, verify
from offmarl.vault.listing import Summary, list_vaults, open_vault
from offmarl.vault.reading.reader import Vault
from offmarl.vault.tables import Episodes
from offmarl.vault.transform import cat, dedup, filter, recode, sample, slice, split
from offmarl.vault.unpacking import unpack
from offmarl.vault.writing.creation import create, create_whole
from offmarl.vault.writing.shared import SharedWriter, join
from offmarl.vault.writing.writer import Writer, resume

__all__ = [
    "Compaction",
    "Episodes",
    "Fault",
    "Repair",
    "SharedWriter",
    "Summary",
    "Vault",
    "Verification",
    "Writer",
    "cat",
    "compact",
    "convert_pymarl",
    "create",
    "create_whole",
    "dedup",
    "filter",
    "join",
    "list_vaults",
    "open_vault",
    "recode",
    "repair",
    "resume",
    "sample",
    "slice",
    "split",
    "unpack",
    "verify",
]
