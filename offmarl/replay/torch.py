"""PyTorch: datasets of windows and of batches for ``torch.utils.data.DataLoader``.

Worker processes read the vault themselves, forked or spawned, and never use JAX. Each batch follows
from the seed and its number, so the number of workers changes nothing. Reads are checked in workers
as everywhere else.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from offmarl._imports import import_optional
from offmarl.replay.blocks import open_reader
from offmarl.replay.host import GATHERED_WINDOWS, WindowItems, WindowReader
from offmarl.replay.orders import check_start
from offmarl.replay.rings import Mixed, Weighting
from offmarl.replay.sampling import Chosen, Source, Windows
from offmarl.types import Sequence, map_tree

import_optional("torch", "torch")  # its error says what to install

import torch  # noqa: E402
from torch.utils import data  # noqa: E402

_ALIGNMENT = 64


def to_tensors(tree: Any) -> Any:
    """Return a tree of NumPy or JAX arrays as tensors that share their memory.

    Arrays of JAX stay on their device (DLPack). Do not write to their tensors: JAX takes them for
    constant.

    Examples
    --------
    >>> batch = to_tensors(replay.sample(key))
    """
    return map_tree(_tensor, tree)


def each_tensor(reader: WindowReader, starts: list[NDArray[np.int64]]) -> list[Sequence]:
    """Return batches of windows, each from its slots, as tensors."""
    return [*map(to_tensors, reader.each_array(starts))]


def _tensor(array: Any) -> Any:
    if not isinstance(array, np.ndarray):
        return torch.from_dlpack(array)
    if array.dtype.name == "bfloat16":  # torch does not know NumPy's
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


class _Sent(Sequence):
    """A batch that a worker sends: as one block of shared memory, from which a sequence is made.

    PyTorch passes a file descriptor for each tensor, which takes longer than gathering them.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        size = 0

        def place(tensor: Any) -> tuple[Any, ...]:
            nonlocal size
            start, size = size, size + -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
            return tensor.dtype, tensor.shape, start, start + tensor.nbytes

        layout = map_tree(place, Sequence(*self))
        block = torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage(size).share_memory_())
        map_tree(lambda target, tensor: target.copy_(tensor), _received(block, layout), self)
        return _received, (block, layout)


def _received(block: Any, layout: Any) -> Sequence:
    """Return the tensors of a sequence in a block of memory."""

    def tensor(place: tuple[Any, ...]) -> Any:
        dtype, shape, start, stop = place
        return block[start:stop].view(dtype).view(shape)

    sequence: Sequence = map_tree(tensor, layout)
    return sequence


def _to_send(sequence: Sequence) -> Sequence:
    return _Sent(*sequence) if data.get_worker_info() else sequence


class _Gathered(tuple[Sequence]):
    """A batch that was gathered at once, in place of its windows."""

    __slots__ = ()


def _stack(batch: list[Sequence], **_: Any) -> Sequence:
    """Collate windows; None stays None."""
    return _to_send(map_tree(lambda *leaves: torch.stack(leaves), *batch))


def _take(batch: list[_Gathered], **_: Any) -> Sequence:
    return _to_send(batch[0][0])


# PyTorch's way to let its default `collate_fn` take further types.
data._utils.collate.default_collate_fn_map.update({Sequence: _stack, _Gathered: _take})


class TorchWindows(WindowItems, data.Dataset):
    """A map-style dataset: all windows by number, as tensors.

    `EpisodeSet.torch_windows` makes one. Pass it to a ``DataLoader`` as it is, with any number of
    workers, forked or spawned. The workers gather a batch at once; a ``collate_fn`` of your own
    gets a list of one batch, which is a tuple of one `offmarl.Sequence`.

    Examples
    --------
    >>> windows = offmarl.open("vaults/swarm/coverage-3.vlt/mappo-0-expert").torch_windows(20)
    >>> loader = torch.utils.data.DataLoader(windows, batch_size=256, shuffle=True, num_workers=2)
    """

    def __getitems__(self, numbers: list[int]) -> list[_Gathered]:
        """Return the windows of a batch, gathered at once; a ``DataLoader`` calls it."""
        return [_Gathered((self.gather(numbers),))]

    def _converted(self, sequence: Sequence) -> Sequence:
        tensors: Sequence = to_tensors(sequence)
        return tensors


class TorchBatches(data.IterableDataset):
    """An iterable dataset: the batches of `EpisodeSet.stream`, as tensors.

    `EpisodeSet.torch_batches` makes one. Each item is a batch, so a ``DataLoader`` takes
    ``batch_size=None``. Of W workers, worker w gathers batches w, w + W, w + 2W and so on, and the
    loader returns them in order: each batch comes once, and the same ones for any W.

    Windows of data on another machine are shuffled by blocks (`offmarl.replay.blocks`); mixtures
    and weights are refused there. Each worker fetches every shuffle buffer, so W workers fetch all
    data W times.

    Parameters
    ----------
    source
        A vault or a mixture.
    windows
        The windows to draw.
    seed, start
        The seed of the batches, and the number of the first.
    epochs, drop_last
        As for `EpisodeSet.stream`.
    episodes, weights
        As for `offmarl.replay.WindowReader`.

    Examples
    --------
    >>> batches = offmarl.open("vaults/swarm/coverage-3.vlt/mappo-0-expert").torch_batches(256, 20)
    >>> loader = torch.utils.data.DataLoader(batches, batch_size=None, num_workers=2)
    """

    def __init__(
        self,
        source: Source | Mixed,
        windows: Windows,
        seed: int = 0,
        start: int = 0,
        epochs: int | None = None,
        drop_last: bool = False,
        episodes: Chosen = None,
        weights: Weighting = None,
    ):
        self._arguments = source, windows, seed, start, epochs, drop_last, episodes, weights
        self.seed, self.start = seed, check_start(start)
        passes = seed, epochs, drop_last
        self._source, self._order = open_reader(source, windows, passes, episodes, weights)
        self._together = max(1, GATHERED_WINDOWS // windows.batch_size)
        self._source.prepare_fork()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._arguments

    def __iter__(self) -> Iterator[Sequence]:
        worker = data.get_worker_info()
        first, stride = (worker.id, worker.num_workers) if worker else (0, 1)
        steps = iter(self._order.steps(self.start + first, stride))
        while numbers := [*islice(steps, self._together)]:
            starts = [*map(self._order.slots, numbers)]
            yield from map(_to_send, each_tensor(self._source, starts))

    def __len__(self) -> int:
        """Return the number of batches; `TypeError` if there is no end."""
        return self._order.num_left(self.start)

    def close(self) -> None:
        """Stop reading, in this process; does nothing but for data on another machine."""
        self._source.close()

    def state(self, taken: int) -> dict[str, int]:
        """Return the arguments of `EpisodeSet.torch_batches` that continue from here; JSON.

        Parameters
        ----------
        taken
            Batches that the loop has taken from the loader. Workers are further ahead.
        """
        return {"seed": self.seed, "start": self.start + taken}
