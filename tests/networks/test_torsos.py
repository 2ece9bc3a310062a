"""Running statistics of what networks see."""

import jax.numpy as jnp
import numpy as np

from offmarl.networks import Moments


def test_moments_of_two_batches_by_hand():
    """The values are 1, 5 and 9, whose variance is 32 / 3; the masked-out ones do not count."""
    found = Moments.zero().update(jnp.array([1.0, 7.0]), jnp.array([True, False]))
    found = found.update(jnp.array([[5.0], [9.0]]), jnp.array([[True], [True]]))
    np.testing.assert_allclose(found, [3.0, 5.0, 32.0], rtol=1e-6)
    np.testing.assert_allclose(found.std, np.sqrt(32 / 3 + 1e-6), rtol=1e-6)
    assert Moments.zero().std == 1.0
