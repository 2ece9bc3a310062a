"""Vaults: experience on disk, in the format of flashbax, written so that nothing is ever lost.

>>> with vault.create("coverage.vlt/expert", spec, rows=64) as writer:
...     writer.append(transition, finals)
>>> data = vault.open_vault("coverage.vlt/expert")
>>> data[:100]
"""

from typing import TYPE_CHECKING

from offmarl._imports import lazy_names

if TYPE_CHECKING:
    from offmarl.vault.storage.archive import unpack as unpack
    from offmarl.vault.write.compaction import Compaction as Compaction, compact as compact
    from offmarl.vault.convert import (
        export_dataset as export_dataset,
        from_arrays as from_arrays,
        import_dataset as import_dataset,
    )
    from offmarl.vault.write.creation import create as create, create_whole as create_whole
    from offmarl.vault.dataset import Dataset as Dataset, open_vault as open_vault
    from offmarl.vault.storage.store import (
        KeyValues as KeyValues,
        register_driver as register_driver,
    )
    from offmarl.vault.format.faults import Fault as Fault
    from offmarl.vault.mixture import Mixture as Mixture, mix as mix
    from offmarl.vault.read.open import Summary as Summary, list_vaults as list_vaults
    from offmarl.vault.salvaging import Salvage as Salvage, salvage as salvage
    from offmarl.vault.write.shared import SharedWriter as SharedWriter, join as join
    from offmarl.vault.format.tables import Episodes as Episodes
    from offmarl.vault.transform.columns import StepColumns as StepColumns
    from offmarl.vault.verbs import (
        cat as cat,
        dedup as dedup,
        filter as filter,
        map as map,
        recode as recode,
        sample as sample,
        slice as slice,
        split as split,
    )
    from offmarl.vault.check.verification import Verification as Verification, verify as verify
    from offmarl.vault.read.weights import Weights as Weights
    from offmarl.vault.write.writer import Writer as Writer, resume as resume
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__)
