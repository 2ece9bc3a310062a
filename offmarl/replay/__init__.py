"""Replay: windows to learn from, drawn from anything that is a `Source`.

Names are imported on first use: those that read windows as NumPy arrays or torch tensors do not
import JAX.
"""

from typing import TYPE_CHECKING

from offmarl._imports import lazy_names

if TYPE_CHECKING:
    from offmarl.replay.batches import (
        BatchSource as BatchSource,
        open_batches as open_batches,
        split_key as split_key,
        whole_episodes as whole_episodes,
    )
    from offmarl.replay.rings import (
        SlotRings as SlotRings,
        Mixed as Mixed,
        StepProbabilities as StepProbabilities,
    )
    from offmarl.replay.device import Replay as Replay, load as load
    from offmarl.replay.host import WindowItems as WindowItems, WindowReader as WindowReader
    from offmarl.replay.sampling import (
        EpisodeTable as EpisodeTable,
        Source as Source,
        Windows as Windows,
    )
    from offmarl.replay.stream import Stream as Stream, open_stream as open_stream
    from offmarl.replay.torch import TorchBatches as TorchBatches, TorchWindows as TorchWindows
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__)
