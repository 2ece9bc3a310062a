"""Random numbers without JAX: the same bits as JAX's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl.replay import threefry

SPANS = (1, 2, 3, 1000, 2**16 - 1, 2**16, 2**16 + 1, 10**6, 2**31 - 1)


def of(key: jax.Array) -> np.ndarray:
    return np.asarray(jax.random.key_data(key))


@pytest.mark.parametrize("seed", [0, 7, 2**31 - 1, 2**32 - 1])
def test_keys(seed: int) -> None:
    theirs, ours = jax.random.key(seed), threefry.key(seed)
    np.testing.assert_array_equal(ours, of(theirs))
    for number in (0, 5, 2**31 - 1):
        folded = jax.random.fold_in(theirs, number)
        np.testing.assert_array_equal(threefry.fold_in(ours, number), of(folded))
    np.testing.assert_array_equal(threefry.split(ours, 3), of(jax.random.split(theirs, 3)))


def test_numbers_of_many_keys_at_once() -> None:
    steps = np.arange(5, 9)
    theirs = jax.vmap(lambda step: jax.random.fold_in(jax.random.key(1), step))(steps)
    ours = threefry.fold_in(threefry.key(1), steps)
    words = jax.jit(jax.vmap(lambda key: jax.random.bits(key, (300, 2))))(theirs)
    np.testing.assert_array_equal(threefry.bits(ours, 600).reshape(4, 300, 2), words)

    draw = jax.jit(jax.vmap(lambda key, span: jax.random.randint(key, (33,), 0, span), (0, None)))
    for span in SPANS:
        np.testing.assert_array_equal(
            threefry.randint(ours, 33, span), draw(theirs, jnp.int32(span))
        )
