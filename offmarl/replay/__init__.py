"""Replay: windows to learn from, drawn from anything that is a `Source`.

Names are imported on first use: those that read windows as NumPy arrays or torch tensors do not
import JAX.
"""

from typing import TYPE_CHECKING

from offmarl._imports import lazy_names

if TYPE_CHECKING:
    from offmarl.replay.batches import BatchSource as BatchSource
    from offmarl.replay.batches import open_batches as open_batches
    from offmarl.replay.batches import split_key as split_key
    from offmarl.replay.circles import Circles as Circles
    from offmarl.replay.circles import Mixed as Mixed
    from offmarl.replay.circles import StepProbabilities as StepProbabilities
    from offmarl.replay.device import Replay as Replay
    from offmarl.replay.device import load as load
    from offmarl.replay.host import Stream as Stream
    from offmarl.replay.host import WindowReader as WindowReader
    from offmarl.replay.host import open_stream as open_stream
    from offmarl.replay.items import WindowItems as WindowItems
    from offmarl.replay.sampling import EpisodeTable as EpisodeTable
    from offmarl.replay.sampling import Source as Source
    from offmarl.replay.sampling import Windows as Windows
    from offmarl.replay.stream import Batches as Batches
    from offmarl.replay.stream import WindowSource as WindowSource
    from offmarl.replay.stream import whole_episodes as whole_episodes
    from offmarl.replay.torch import TorchBatches as TorchBatches
    from offmarl.replay.torch import TorchWindows as TorchWindows
else:
    __all__, __getattr__, __dir__ = lazy_names(__name__)
