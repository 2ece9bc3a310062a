"""Some or all episodes of a vault: to read one by one, to divide, and to learn from."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
from numpy.typing import NDArray

from offmarl.replay.sampling import numbers_of
from offmarl.types import Episode, Sequence
from offmarl.vault.format import tables
from offmarl.vault.read import bounds
from offmarl.vault.read.weights import WeightsLike, resolve

if TYPE_CHECKING:  # replay imports JAX, which reading does without
    from offmarl.replay import (
        Replay,
        StepProbabilities,
        Stream,
        TorchBatches,
        TorchWindows,
        WindowItems,
    )
    from offmarl.replay.stream import To


class EpisodeSet(ABC):
    """Episodes: `Dataset` has all of a vault, `Mixture` of several, and `Subset` some of these.

    ``len`` is their number, iteration reads one after the other, and an index reads one.
    """

    @property
    @abstractmethod
    def episodes(self) -> tables.Episodes:
        """The table of the episodes, by row and start."""

    @abstractmethod
    def episode(self, number: int) -> Episode:
        """Read one episode; see `Dataset.episode`."""

    def __getitem__(self, number: int) -> Episode:
        """Read one episode; negative numbers count from the end."""
        return self.episode(number)

    def _located(self, episodes: Any) -> tuple[Any, Any]:
        """Return the `Dataset` or `Mixture`, and the numbers there of some of these episodes."""
        if episodes is None:
            return self, None
        return self, numbers_of(episodes, len(self), self._located(None)[0].path)

    def __len__(self) -> int:
        return len(self.episodes.row)

    def __iter__(self) -> Iterator[Episode]:
        """Read all episodes, one after the other, by row and start."""
        return map(self.episode, range(len(self)))

    def subset(self, episodes: Iterable[SupportsIndex] | NDArray[np.bool_]) -> "Subset":
        """Return some episodes as a view, which copies nothing.

        Parameters
        ----------
        episodes
            Their numbers, as `episodes` counts them, each at most once, in any order; or a truth
            for each episode.

        Raises
        ------
        OptionError
            There are no such episodes, or one is named twice.

        Examples
        --------
        >>> best = dataset.subset(dataset.episodes.episode_returns > 10)
        >>> replay = best.replay(256, 20)
        """
        dataset, numbers = self._located(episodes)
        return Subset(dataset, np.sort(numbers))

    def split(
        self,
        *,
        fractions: Iterable[float] | None = None,
        validation: float | None = None,
        seed: int = 0,
        by: str | None = None,
    ) -> "dict[str, Subset]":
        """Split the episodes at random into views for training, validation and test.

        They are those that `offmarl.vault.split` writes for the same arguments, and nothing is
        copied.

        Parameters
        ----------
        fractions
            Shares of the episodes, such as .8 .1 .1, which sum to 1; by default .9 .1.
        validation
            The share for validation; the rest is for training.
        seed
            Random seed.
        by
            A column of policies, ``policy_AGENT`` or ``policy_TEAM``: its policies are divided, and
            not the episodes, so that none is in two parts.

        Returns
        -------
        dict
            The views by their names: train, validation and, for three fractions, test.

        Raises
        ------
        OptionError
            The fractions do not sum to 1, or leave a part empty; or there is no such column.

        Examples
        --------
        >>> parts = dataset.split(validation=0.1, seed=0)
        >>> train = parts["train"].stream(256, 20)
        >>> validation = parts["validation"].stream(256, 20, epochs=1)
        """
        shares = tables.shares(fractions, validation)
        source, table = self._located(None)[0], self.episodes
        policies = None if by is None else tables.policies_by(table, source.spec, by)
        parts = tables.split(len(table.row), shares, seed, source.path, policies)
        return {name: self.subset(part) for name, part in parts.items()}

    def replay(
        self,
        batch: int = 32,
        length: int = 20,
        episodes: NDArray[np.int64] | None = None,
        *,
        burn_in: int = 0,
        return_to_go: float | None = None,
        weights: WeightsLike = None,
        extras: tuple[str, ...] | None = None,
    ) -> "Replay":
        """Put the data on the device and return a replay to sample from under jit.

        Each step of the data is equally likely in a batch, unless weights say otherwise. Windows
        are cut from the episodes laid end to end, and may hold parts of several: see
        `offmarl.Sequence`.

        Parameters
        ----------
        batch
            Windows in a batch.
        length
            Steps in a window.
        episodes
            Numbers of the episodes to draw from, as `episodes` counts them, or a truth for each;
            all by default.
        burn_in
            Steps added before each window's to fill a recurrent memory; their mask is false.
        return_to_go
            Discount of the returns-to-go that batches carry: 1 for plain sums. None leaves them
            out.
        weights
            What steps weigh: "return", the name of another column, a function, an array, or
            `offmarl.vault.Weights` of one of these. Windows are drawn by the weights of their
            steps, and ``Sequence.weight`` makes each step count exactly as it weighs.
        extras
            Names of the extra columns that batches carry; all by default.

        Raises
        ------
        ShapeError
            The dataset holds no step, or a size is not positive.
        OptionError
            An episode or an extra column does not exist, an episode is named twice, the discount is
            not in [0, 1], a weight is negative or not finite, or the device has no room for the
            data.

        Examples
        --------
        >>> replay = offmarl.open("vaults/swarm/coverage-3.vlt/mappo-0-expert").replay(256, 20)
        >>> batch = jax.jit(lambda replay, key: replay.sample(key))(replay, jax.random.key(0))
        """
        from offmarl.replay import Windows, load

        dataset, numbers = self._located(episodes)
        shape = Windows(batch, length, burn_in, return_to_go, extras)
        return load(dataset, shape, numbers, resolve(dataset, weights, numbers))

    def stream(
        self,
        batch: int = 32,
        length: int = 20,
        *,
        to: "To" = "jax",
        seed: int = 0,
        start: int = 0,
        epochs: int | None = None,
        drop_last: bool = False,
        memory: int = 2**30,
        episodes: NDArray[np.int64] | None = None,
        burn_in: int = 0,
        return_to_go: float | None = None,
        weights: WeightsLike = None,
        extras: tuple[str, ...] | None = None,
        shuffle_buffer: int | None = None,
    ) -> "Stream":
        """Return an iterator over batches of data that is too large for the device.

        The batches equal those of `replay`, and are gathered from the files ahead of time.

        Parameters
        ----------
        batch, length, episodes, burn_in, return_to_go, weights, extras
            As for `replay`. Returns-to-go need all rewards to be read at the start, and four bytes
            of memory for each step and agent.
        to
            The arrays of batches: "jax", on the device; "numpy"; or "torch", tensors on the CPU.
            Their bits are the same. Only the first needs JAX.
        seed, start
            What the batches follow from, and the number of the first: `Stream.state` returns both.
        epochs
            Number of passes over all windows; each has every window once, in another random order.
            By default windows are drawn without an end, as `replay` draws them.
        drop_last
            Whether to leave out the last batch of an epoch if it has fewer windows.
        memory
            Bytes that batches may take at a time, on the host and on the device each; the table of
            episodes comes on top.
        shuffle_buffer
            Bytes of the buffer that windows are shuffled in, if they shall be shuffled by blocks;
            see `offmarl.replay.blocks`. Data on another machine always is, by default in 64 MB;
            up to three buffers are in memory. Data on this machine is drawn from everywhere by
            default.

        Raises
        ------
        ShapeError
            As for `replay`.
        OptionError
            As for `replay`; or the memory is too small for a few batches, epochs hold no batch, or
            weights or a mixture make windows unequally likely, which passes cannot.
        MissingExtraError
            PyTorch is not installed.

        Examples
        --------
        >>> dataset = offmarl.open("vaults/swarm/coverage-3.vlt/mappo-0-expert")
        >>> with dataset.stream(256, 20) as stream:
        ...     for batch in stream:
        ...         state = update(state, batch)
        """
        from offmarl.replay import Windows, open_stream

        dataset, numbers = self._located(episodes)
        return open_stream(
            dataset,
            Windows(batch, length, burn_in, return_to_go, extras),
            to,
            seed=seed,
            start=start,
            memory=memory,
            episodes=numbers,
            weights=resolve(dataset, weights, numbers),
            epochs=epochs,
            drop_last=drop_last,
            shuffle_buffer=shuffle_buffer,
        )

    def window_items(
        self,
        length: int = 20,
        episodes: NDArray[np.int64] | None = None,
        *,
        burn_in: int = 0,
        return_to_go: float | None = None,
    ) -> "WindowItems":
        """Return all windows by number, as NumPy arrays: a source for Grain and other loaders.

        It has a length and an index, which is all that such loaders need. It can be pickled to
        other processes, and needs no JAX.

        Parameters
        ----------
        length, episodes, burn_in, return_to_go
            As for `replay`.

        Raises
        ------
        ShapeError, OptionError
            As for `replay`; or it is a mixture.

        Examples
        --------
        >>> windows = dataset.window_items(20)
        >>> batches = grain.MapDataset.source(windows).shuffle(seed=0).repeat().batch(256)
        """
        from offmarl.replay import WindowItems, Windows

        dataset, numbers = self._located(episodes)
        return WindowItems(dataset, Windows(1, length, burn_in, return_to_go), numbers)

    def torch_windows(
        self,
        length: int = 20,
        episodes: NDArray[np.int64] | None = None,
        *,
        burn_in: int = 0,
        return_to_go: float | None = None,
    ) -> "TorchWindows":
        """Return all windows as a map-style dataset for PyTorch's ``DataLoader``.

        Parameters
        ----------
        length, episodes, burn_in, return_to_go
            As for `replay`.

        Raises
        ------
        ShapeError, OptionError
            As for `window_items`.
        MissingExtraError
            PyTorch is not installed.

        Examples
        --------
        >>> windows = dataset.torch_windows(20)
        >>> loader = DataLoader(windows, batch_size=256, shuffle=True, num_workers=2)
        """
        from offmarl.replay import TorchWindows, Windows

        dataset, numbers = self._located(episodes)
        return TorchWindows(dataset, Windows(1, length, burn_in, return_to_go), numbers)

    def torch_batches(
        self,
        batch: int = 32,
        length: int = 20,
        *,
        seed: int = 0,
        start: int = 0,
        epochs: int | None = None,
        drop_last: bool = False,
        episodes: NDArray[np.int64] | None = None,
        burn_in: int = 0,
        return_to_go: float | None = None,
        weights: WeightsLike = None,
    ) -> "TorchBatches":
        """Return the batches of `stream` as an iterable dataset for PyTorch's ``DataLoader``.

        The batches and their order are the same for any number of workers.

        Parameters
        ----------
        batch, length, seed, start, epochs, drop_last, episodes, burn_in, return_to_go, weights
            As for `stream`.

        Raises
        ------
        ShapeError, OptionError, MissingExtraError
            As for `stream`.

        Examples
        --------
        >>> batches = dataset.torch_batches(256, 20, seed=0, epochs=3)
        >>> loader = DataLoader(batches, batch_size=None, num_workers=2)
        """
        from offmarl.replay import TorchBatches, Windows

        dataset, numbers = self._located(episodes)
        return TorchBatches(
            dataset,
            Windows(batch, length, burn_in, return_to_go),
            seed=seed,
            start=start,
            epochs=epochs,
            drop_last=drop_last,
            episodes=numbers,
            weights=resolve(dataset, weights, numbers),
        )

    def step_probabilities(
        self,
        length: int = 20,
        episodes: NDArray[np.int64] | None = None,
        *,
        burn_in: int = 0,
        weights: WeightsLike = None,
    ) -> "StepProbabilities":
        """Return the exact share of each step in the batches of `replay` and `stream`.

        Nothing is drawn: the shares are computed from the table of episodes.

        Parameters
        ----------
        length, episodes, burn_in, weights
            As for `replay`.

        Examples
        --------
        >>> shares = dataset.step_probabilities(20, weights="return")
        >>> shares.drawn[shares.episode == 3].sum()  # of the steps in batches, those of episode 3
        """
        from offmarl.replay import SlotRings, Windows

        dataset, numbers = self._located(episodes)
        step_weights = resolve(dataset, weights, numbers)
        rings = SlotRings(dataset, Windows(1, length, burn_in), numbers, step_weights)
        return rings.step_probabilities()

    def hold_out(self, fraction: float) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Divide the episodes into those to learn from and those to evaluate with.

        At least one episode is held out. The same data and ``fraction``, in (0, 1), always give
        the same numbers, which are those that `offmarl.vault.split` selects.

        Raises
        ------
        OptionError
            The fraction is out of range, or leaves no episode to learn from.

        Examples
        --------
        >>> rest, held_out = dataset.hold_out(0.1)
        >>> replay, test = dataset.replay(256, 20, rest), dataset.whole_episodes(held_out)
        """
        return tables.hold_out(len(self), fraction, self._located(None)[0].path)

    def whole_episodes(self, episodes: NDArray[np.int64]) -> Sequence:
        """Put some episodes on the device, ``(M, T, ...)`` with T the length of the longest.

        Raises
        ------
        ShapeError
            The dataset holds no step.
        OptionError
            An episode does not exist.
        """
        from offmarl.replay import whole_episodes

        return whole_episodes(*self._located(episodes))


class Subset(EpisodeSet):
    """Some episodes of a dataset, as a view; `EpisodeSet.subset` and `split` return one.

    Its `episodes` count from 0. The ``episode`` of its batches counts as the dataset does.

    Attributes
    ----------
    dataset
        The whole dataset.
    numbers
        ``(K,)`` the episodes' numbers in ``dataset.episodes``, in order.
    """

    def __init__(self, dataset: Any, numbers: NDArray[np.int64]):
        self.dataset, self.numbers = dataset, numbers

    @property
    def episodes(self) -> tables.Episodes:
        """The table of these episodes, by row and start."""
        return self.dataset.episodes.take(self.numbers)

    def episode(self, number: int) -> Episode:
        """Read one of these episodes; see `Dataset.episode`."""
        bounds.check_episode(number, len(self), self.dataset.path)
        return self.dataset.episode(int(self.numbers[number]))

    def __len__(self) -> int:
        return len(self.numbers)

    def __repr__(self) -> str:
        """Describe the view without reading any data."""
        return f"<Subset: {len(self):,} of {len(self.dataset):,} episodes of {self.dataset!r}>"

    def _located(self, episodes: Any) -> tuple[Any, Any]:
        _, selection = super()._located(episodes)
        return self.dataset, self.numbers if selection is None else self.numbers[selection]
