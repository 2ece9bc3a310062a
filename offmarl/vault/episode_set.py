"""Some or all episodes of a vault: to read one by one, to divide, and to learn from."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from offmarl.types import Episode, Sequence
from offmarl.vault import bounds, tables
from offmarl.vault.weights import WeightsLike, resolve

if TYPE_CHECKING:  # replay imports JAX, which reading does without
    from offmarl.replay import Replay, StepProbabilities, Stream
    from offmarl.vault.dataset import Dataset
    from offmarl.vault.mixture import Mixture

Chosen = NDArray[np.int64] | None
"""Numbers of episodes; None for all."""


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

    @abstractmethod
    def _located(self, episodes: Chosen) -> "tuple[Dataset | Mixture, Chosen]":
        """Return the dataset, and the numbers there of some of these episodes."""

    def __len__(self) -> int:
        return len(self.episodes.row)

    def __iter__(self) -> Iterator[Episode]:
        """Read all episodes, one after the other, by row and start."""
        return map(self.episode, range(len(self)))

    def subset(self, episodes: Iterable[int]) -> "Subset":
        """Return some episodes as a view, which copies nothing.

        Parameters
        ----------
        episodes
            Their numbers, as `episodes` counts them, each at most once, in any order.

        Raises
        ------
        OptionError
            There are no such episodes, or one is named twice.

        Examples
        --------
        >>> best = dataset.subset(np.flatnonzero(dataset.episodes.episode_returns > 10))
        >>> replay = best.replay(256, 20)
        """
        chosen = np.array([*episodes], np.int64)
        bounds.check_chosen(chosen, len(self), self._located(None)[0].path)
        dataset, numbers = self._located(np.sort(chosen))
        assert numbers is not None
        return Subset(dataset, numbers)

    def split(
        self,
        *,
        fractions: Iterable[float] | None = None,
        validation: float | None = None,
        seed: int = 0,
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

        Returns
        -------
        dict
            The views by their names: train, validation and, for three fractions, test.

        Raises
        ------
        OptionError
            The fractions do not sum to 1, or leave a part empty.

        Examples
        --------
        >>> parts = dataset.split(validation=0.1, seed=0)
        >>> train = parts["train"].stream(256, 20)
        >>> validation = parts["validation"].stream(256, 20, epochs=1)
        """
        shares = tables.shares(fractions, validation)
        path = self._located(None)[0].path
        parts = tables.split(len(self), shares, seed, path)
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
            Numbers of the episodes to draw from, as `episodes` counts them; all by default.
        burn_in
            Steps added before each window's to fill a recurrent memory; their mask is false.
        return_to_go
            Discount of the returns-to-go that batches carry: 1 for plain sums. None leaves them
            out.
        weights
            What steps weigh: "return", the name of another column, a function, an array, or
            `offmarl.vault.Weights` of one of these. Windows are drawn by the weights of their
            steps, and ``Sequence.weight`` makes each step count exactly as it weighs.

        Raises
        ------
        ShapeError
            The dataset holds no step, or a size is not positive.
        OptionError
            An episode does not exist or is named twice, the discount is not in [0, 1], or a weight
            is negative or not finite.

        Examples
        --------
        >>> replay = offmarl.open("vaults/swarm/coverage-3.vlt/expert").replay(256, 20)
        >>> batch = jax.jit(lambda replay, key: replay.sample(key))(replay, jax.random.key(0))
        """
        from offmarl.replay import Windows, load

        dataset, numbers = self._located(episodes)
        shape = Windows(batch, length, burn_in, return_to_go)
        return load(dataset, shape, numbers, resolve(dataset, weights))

    def stream(
        self,
        batch: int = 32,
        length: int = 20,
        *,
        seed: int = 0,
        start: int = 0,
        memory: int = 2**30,
        episodes: NDArray[np.int64] | None = None,
        burn_in: int = 0,
        return_to_go: float | None = None,
        weights: WeightsLike = None,
    ) -> "Stream":
        """Return an endless iterator over batches of data that is too large for the device.

        The batches equal those of `replay`, and are gathered from the files ahead of time.

        Parameters
        ----------
        batch, length, episodes, burn_in, return_to_go, weights
            As for `replay`. Returns-to-go need all rewards to be read at the start, and four bytes
            of memory for each step and agent.
        seed, start
            What the batches follow from, and the number of the first: `Stream.state` returns both.
        memory
            Bytes that batches may take at a time, on the host and on the device each; the table of
            episodes comes on top.

        Raises
        ------
        ShapeError
            As for `replay`.
        OptionError
            As for `replay`, or the memory is too small for a few batches.

        Examples
        --------
        >>> with offmarl.open("vaults/swarm/coverage-3.vlt/expert").stream(256, 20) as stream:
        ...     for batch in stream:
        ...         state = update(state, batch)
        """
        from offmarl.replay import Stream, Windows

        dataset, numbers = self._located(episodes)
        shape = Windows(batch, length, burn_in, return_to_go)
        steps = resolve(dataset, weights)
        return Stream(dataset, shape, seed, start, memory, numbers, steps)

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
        from offmarl.replay import Circles, Windows

        dataset, numbers = self._located(episodes)
        circles = Circles(dataset, Windows(1, length, burn_in), numbers, resolve(dataset, weights))
        return circles.step_probabilities()

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

        dataset, numbers = self._located(episodes)
        assert numbers is not None
        return whole_episodes(dataset, numbers)


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

    def __init__(self, dataset: "Dataset | Mixture", numbers: NDArray[np.int64]):
        self.dataset, self.numbers = dataset, numbers

    @property
    def episodes(self) -> tables.Episodes:
        """The table of these episodes, by row and start."""
        return tables.Episodes(*(column[self.numbers] for column in self.dataset.episodes))

    def episode(self, number: int) -> Episode:
        """Read one of these episodes; see `Dataset.episode`."""
        bounds.check_episode(number, len(self), self.dataset.path)
        return self.dataset.episode(int(self.numbers[number]))

    def __getitem__(self, number: int) -> Episode:
        """Read one of these episodes; negative numbers count from the end."""
        return self.episode(number)

    def __len__(self) -> int:
        return len(self.numbers)

    def __repr__(self) -> str:
        """Describe the view without reading any data."""
        return f"<Subset: {len(self):,} of {len(self.dataset):,} episodes of {self.dataset!r}>"

    def _located(self, episodes: Chosen) -> "tuple[Dataset | Mixture, Chosen]":
        if episodes is None:
            return self.dataset, self.numbers
        chosen = np.asarray(episodes, np.int64)
        bounds.check_chosen(chosen, len(self), self.dataset.path)
        return self.dataset, self.numbers[chosen]
