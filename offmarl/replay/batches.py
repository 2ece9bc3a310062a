"""The batches of a training loop: drawn on the device, or streamed to it."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import repeat
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Key, PRNGKeyArray

from offmarl._arrays import largest_divisor
from offmarl.replay import device
from offmarl.replay.circles import Circles, Mixed, Weighting
from offmarl.replay.device import Replay, load_circles
from offmarl.replay.host import IN_HAND, ahead, parts_ahead
from offmarl.replay.sampling import Chosen, Source, Windows
from offmarl.replay.stream import Batches, WindowSource, on_host

Kind = Literal["auto", "device", "stream"]

_MOST_AHEAD = 2


class BatchSource(NamedTuple):
    """Data for the updates of a loop, one piece after the other."""

    updates: int
    """Updates that each piece is for."""
    data: Iterator[Replay | Batches]
    """The same replay again and again, or batches ``(seeds, updates, ...)``."""


def split_key(key: PRNGKeyArray, step: Int[Array, ""] | int) -> tuple[PRNGKeyArray, PRNGKeyArray]:
    """Return the keys that one update's batch is drawn with, and that the update itself uses."""
    sample_key, update_key = jax.random.split(jax.random.fold_in(key, step))
    return sample_key, update_key


@contextmanager
def open_batches(
    source: Source | Mixed,
    kind: Kind,
    windows: Windows,
    keys: Key[Array, "seeds"],
    steps: range,
    memory: int,
    episodes: Chosen = None,
    weights: Weighting = None,
) -> Iterator[BatchSource]:
    """Open the batches of a loop over ``steps``, each of which stands for ``steps.step`` updates.

    Parameters
    ----------
    source
        What to learn from.
    kind
        Where batches come from. "auto": the device where the data fits into half of what is free,
        and has few enough steps for it.
    windows
        What to draw.
    keys
        One for each seed.
    steps
        The first update of each block. One that begins inside of a block begins in the middle of
        a piece: pieces start at multiples of their size.
    memory
        Bytes that streamed batches may take at a time.
    episodes
        Numbers of the episodes to draw windows from; all of them by default.
    weights
        What steps weigh; all the same by default.

    Raises
    ------
    ShapeError
        There is no step to draw.
    OptionError
        There is no room for a few batches, there are no such episodes, they weigh nothing, or there
        are too many steps for the device.
    """
    circles = Circles(source, windows, episodes, weights)
    if kind == "device" or (kind == "auto" and device.fits(circles)):
        yield BatchSource(steps.step, repeat(load_circles(circles)))
        return
    drawn, host_keys = WindowSource.of(circles), on_host(keys)
    part = len(keys) * drawn.batch_bytes
    most = parts_ahead(memory, part, "a batch for each seed", _MOST_AHEAD)
    updates = largest_divisor(steps.step, memory // (part * (most + IN_HAND)))

    def gather(first: int) -> Batches:
        return drawn.batches(_sample_keys(host_keys, first + jnp.arange(updates)))

    firsts = range(steps.start - steps.start % updates, steps.stop, updates)
    with closing(ahead(gather, firsts, most)) as data:
        yield BatchSource(updates, data)


@jax.jit
def _sample_keys(keys: Key[Array, "seeds"], steps: Int[Array, "n"]) -> Key[Array, "seeds n"]:
    def of_seed(key: PRNGKeyArray) -> Key[Array, "n"]:
        return jax.vmap(lambda step: split_key(key, step)[0])(steps)

    return jax.vmap(of_seed)(keys)
