"""Replay: windows to learn from, drawn from anything that is a `Source`."""

from offmarl.replay.batches import BatchSource, open_batches, split_key
from offmarl.replay.circles import Circles, Mixed, StepProbabilities
from offmarl.replay.device import Replay, load
from offmarl.replay.sampling import EpisodeTable, Source, Windows
from offmarl.replay.stream import Batches, Stream, WindowSource, whole_episodes

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
    "WindowSource",
    "Windows",
    "load",
    "open_batches",
    "split_key",
    "whole_episodes",
]
