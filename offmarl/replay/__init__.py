"""Replay: datasets as windows to learn from."""

from offmarl.replay.dataset import Dataset, open_dataset
from offmarl.replay.device import Replay, load
from offmarl.replay.feed import Feed, feeding, split_key
from offmarl.replay.stream import Batches, Stream, WindowSource
from offmarl.replay.windows import window_starts

__all__ = [
    "Batches",
    "Dataset",
    "Feed",
    "Replay",
    "Stream",
    "WindowSource",
    "feeding",
    "load",
    "open_dataset",
    "split_key",
    "window_starts",
]
