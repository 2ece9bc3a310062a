"""JAX's default random numbers in NumPy: the same bits, without JAX.

Worker processes and host threads draw with it what ``jax.random`` draws on the device. A key is two
words; functions are vectorised over the leading axes of keys. The bits are those of JAX's default
settings: the generator ``threefry2x32``, partitionable.

Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from typing import Any

import numpy as np
from jaxtyping import UInt32

from offmarl.config import check_seed

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)

Keys = UInt32[np.ndarray, "*k 2"]


def key(seed: int) -> UInt32[np.ndarray, "2"]:
    """Return the key of a seed, as ``jax.random.key``; `OptionError` unless it has 32 bits."""
    return np.array([0, check_seed(seed)], np.uint32)


def fold_in(keys: Keys, data: Any) -> UInt32[np.ndarray, "*n 2"]:
    """Return a key for each number, as ``jax.random.fold_in``; both broadcast."""
    numbers = np.asarray(data).astype(np.uint32)
    return np.stack(_hash(keys, np.zeros_like(numbers), numbers), -1)


def split(keys: Keys, num: int = 2) -> UInt32[np.ndarray, "*k num 2"]:
    """Return ``num`` keys for each key, as ``jax.random.split``."""
    return np.stack(_hash(keys[..., None, :], *_counts(num)), -1)


def bits(keys: Keys, num: int) -> UInt32[np.ndarray, "*k num"]:
    """Return ``num`` random words for each key, as ``jax.random.bits``."""
    high, low = _hash(keys[..., None, :], *_counts(num))
    return high ^ low


def randint(keys: Keys, num: int, stop: int) -> UInt32[np.ndarray, "*k num"]:
    """Return ``num`` integers from 0 to below ``stop``, as ``jax.random.randint`` for an int32."""
    span, pair = np.uint32(stop), split(keys)
    return below(bits(pair[..., 0, :], num), bits(pair[..., 1, :], num), span)


@np.errstate(over="ignore")  # as below
def below(high: Any, low: Any, stop: Any) -> Any:
    """Return integers from 0 to below ``stop`` of two random words each, as ``jax.random.randint``.

    Arrays of NumPy or of JAX; all are uint32, whose products wrap around.
    """
    half = 2**16 % stop
    return (high % stop * (half * half % stop) + low % stop) % stop


def _counts(num: int) -> tuple[UInt32[np.ndarray, "num"], UInt32[np.ndarray, "num"]]:
    """Return the counters 0 to ``num`` - 1, in two words each."""
    return np.zeros(num, np.uint32), np.arange(num, dtype=np.uint32)


@np.errstate(over="ignore")  # words wrap around; NumPy warns where an array is a single number
def _hash(keys: Keys, high: Any, low: Any) -> tuple[Any, Any]:
    """Encrypt counters of two words with keys: 20 rounds of Threefry-2x32."""
    first, second = keys[..., 0], keys[..., 1]
    schedule = first, second, first ^ second ^ _PARITY
    high, low = high + first, low + second
    for block in range(5):
        for rotation in _ROTATIONS[block % 2]:
            high = high + low
            low = (low << np.uint32(rotation)) | (low >> np.uint32(32 - rotation))
            low ^= high
        high = high + schedule[(block + 1) % 3]
        low = low + (schedule[(block + 2) % 3] + np.uint32(block + 1))
    return high, low
