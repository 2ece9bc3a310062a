"""Replay: windows to learn from, drawn from anything that is a `Source`.

Names are imported on first use: those that read windows as NumPy arrays or torch tensors do not
import JAX.
"""

from typing import TYPE_CHECKING

from offmarl._imports import homes_in, lazy_getattr

if TYPE_CHECKING:
    from offmarl.replay.batches import (
        Batches,
        BatchSource,
        WindowSource,
        open_batches,
        split_key,
        whole_episodes,
    )
    from offmarl.replay.circles import Circles, Mixed, StepProbabilities
    from offmarl.replay.device import Replay, load
    from offmarl.replay.host import WindowItems, WindowReader
    from offmarl.replay.sampling import EpisodeTable, Source, Windows
    from offmarl.replay.stream import Stream, open_stream
    from offmarl.replay.torch import TorchBatches, TorchWindows

__all__ = [
    "BatchSource",
    "Batches",
    "Circles",
    "EpisodeTable",
    "Mixed",
    "Replay",
    "Source",
    "StepProbabilities",
    "Stream",
    "TorchBatches",
    "TorchWindows",
    "WindowItems",
    "WindowReader",
    "WindowSource",
    "Windows",
    "load",
    "open_batches",
    "open_stream",
    "split_key",
    "whole_episodes",
]

_HOMES = {
    "batches": "BatchSource Batches WindowSource open_batches split_key whole_episodes",
    "circles": "Circles Mixed StepProbabilities",
    "device": "Replay load",
    "host": "WindowItems WindowReader",
    "sampling": "EpisodeTable Source Windows",
    "stream": "Stream open_stream",
    "torch": "TorchBatches TorchWindows",
}

if not TYPE_CHECKING:  # type checkers take any name from a module that has this
    __getattr__ = lazy_getattr(__name__, homes_in(__name__, _HOMES))


def __dir__() -> list[str]:
    return sorted(__all__)
