"""Replay: datasets as windows to learn from."""

from offmarl.replay.dataset import Dataset, open_dataset
from offmarl.replay.device import Replay, load
from offmarl.replay.windows import window_starts

__all__ = ["Dataset", "Replay", "load", "open_dataset", "window_starts"]
