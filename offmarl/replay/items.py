"""Windows by number: a source for the data loaders of other libraries, such as Grain."""

from collections.abc import Iterable
from typing import Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from offmarl.errors import OptionError
from offmarl.replay.circles import Mixed
from offmarl.replay.host import WindowReader
from offmarl.replay.sampling import Chosen, Source, Windows
from offmarl.replay.starts import Uniform
from offmarl.types import Sequence, map_tree


class WindowItems:
    """All windows of a dataset by number, as NumPy arrays.

    Window i starts at slot i of the episodes laid end to end; see `offmarl.replay.sampling`. Each
    step is in as many windows as any other. Pickling keeps the path of the vault, and another
    process opens it again. It needs no JAX.

    Parameters
    ----------
    source
        What to read: a vault.
    windows
        The windows; the batch size has no meaning.
    episodes
        Numbers of the episodes; all of them by default.

    Raises
    ------
    ShapeError
        There is no step.
    OptionError
        There are no such episodes, or the source is a mixture.
    """

    def __init__(self, source: Source | Mixed, windows: Windows, episodes: Chosen = None):
        self._arguments = source, windows, episodes
        self._source = WindowReader(source, windows, episodes)
        if not isinstance(self._source.starts, Uniform):
            raise OptionError(
                f"{source.path} is a mixture, whose windows cannot be counted through: stream its "
                "batches, or read one of its vaults."
            )
        self._source.prepare_fork()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments

    def __len__(self) -> int:
        """Return the number of windows: as many as there are slots."""
        return int(self._source.starts.num_slots)

    def __getitem__(self, number: SupportsIndex) -> Sequence:
        """Return one window; fields are ``(T, ...)``."""
        found: Sequence = map_tree(lambda leaf: leaf[0], self.gather([int(number)]))
        return found

    def gather(self, numbers: Iterable[SupportsIndex]) -> Sequence:
        """Return some windows at once; fields are ``(B, T, ...)``."""
        chosen = np.array([*numbers], np.int64)
        return self._converted(self._source.arrays(self._checked(chosen)))

    def _converted(self, sequence: Sequence) -> Sequence:
        """Return windows in the form of this library's arrays."""
        return sequence

    def _checked(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        count = len(self)
        if numbers.size and not (-count <= numbers.min() and numbers.max() < count):
            wrong = numbers[(numbers < -count) | (numbers >= count)][0]
            raise IndexError(f"window {wrong} was requested, and there are {count:,}.")
        return numbers % count

    def __repr__(self) -> str:
        source, windows, _ = self._arguments
        return f"<{type(self).__name__} of {source.path}: {len(self):,} of {windows.steps} steps>"
