"""Running statistics of what networks see."""

import jax.numpy as jnp
import numpy as np

from offmarl.networks import Moments


def test_moments_of_two_batches_by_hand():
    """The values are 1, 5 and 9, whose variance is 32 / 3; the masked-out ones do not count."""
    moments = Moments.zero().update(jnp.array([1.0, 7.0]), jnp.array([True, False]))
    moments = moments.update(jnp.array([[5.0], [9.0]]), jnp.array([[True], [True]]))
    np.testing.assert_allclose(moments, [3.0, 5.0, 32.0], rtol=1e-6)
    np.testing.assert_allclose(moments.std, np.sqrt(32 / 3), rtol=1e-6)
    assert (Moments.zero().mean, Moments.zero().std) == (0, 1)


def test_the_deviation_of_values_that_hardly_differ_is_a_tenth():
    """One reward of 1 among zeros is then 10 deviations away, and not thousands."""
    moments = Moments.zero().update(jnp.zeros(4096).at[0].set(1.0), jnp.ones(4096, bool))
    assert moments.squares / moments.weight < 1e-3
    np.testing.assert_allclose(moments.std, 0.1, rtol=1e-6)
