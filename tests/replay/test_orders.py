"""Which windows make which batch: draws, and passes over all windows; random numbers of NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from offmarl.errors import OptionError
from offmarl.replay import threefry
from offmarl.replay.orders import Draws, Epochs, make_order, shuffle
from offmarl.replay.starts import Uniform, segments


def test_draws_are_those_of_a_replay() -> None:
    order = make_order(Uniform(1000), 33, seed=5, epochs=None, drop_last=False)
    assert isinstance(order, Draws) and order.num_batches is None
    for step in (0, 3, 63, 64, 200):
        key = jax.random.fold_in(jax.random.key(5), step)
        np.testing.assert_array_equal(order.slots(step), jax.random.randint(key, (33,), 0, 1000))


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16, 17, 1000, 2**16 + 1])
def test_a_shuffle_has_every_number_once(count: int) -> None:
    first, second = (shuffle(np.arange(count), count, 0, epoch) for epoch in (0, 1))
    np.testing.assert_array_equal(np.sort(first), np.arange(count))
    np.testing.assert_array_equal(np.sort(second), np.arange(count))
    if count > 5:
        assert (first != second).any() and (first != shuffle(np.arange(count), count, 1, 0)).any()
    part = np.arange(count)[count // 3 :: 7]
    np.testing.assert_array_equal(shuffle(part, count, 0, 0), first[part])


@pytest.mark.parametrize("count", [3, 5, 8, 10])
def test_all_orders_are_equally_likely(count: int) -> None:
    """A chi-squared test of the number at each place, and of neighbours."""
    trials = 1500
    orders = np.stack([shuffle(np.arange(count), count, 7, epoch) for epoch in range(trials)])
    counts = np.stack([np.bincount(column, minlength=count) for column in orders.T])
    chi = ((counts - trials / count) ** 2 / (trials / count)).sum()
    freedom = (count - 1) ** 2
    assert abs(chi - freedom) < 4.5 * np.sqrt(2 * freedom)
    pairs = orders[:, 0] * count + orders[:, 1]
    ordered = np.bincount(pairs, minlength=count**2)[~np.eye(count, dtype=bool).ravel()]
    expected, freedom = trials / ordered.size, ordered.size - 1
    chi = ((ordered - expected) ** 2 / expected).sum()
    assert abs(chi - freedom) < 4.5 * np.sqrt(2 * freedom)
    follows = ((np.diff(orders) % count) == 1).sum() / (trials * (count - 1))
    assert abs(follows - 1 / (count - 1)) < 0.2 / (count - 1)


def test_a_shuffle_of_more_than_fits_in_memory() -> None:
    numbers = shuffle(np.arange(10**12, 10**12 + 1000), 3 * 10**12, 0, 0)
    assert len(np.unique(numbers)) == 1000 and numbers.max() < 3 * 10**12
    np.testing.assert_allclose(numbers.mean(), 1.5e12, rtol=0.1)


@pytest.mark.parametrize("drop_last", [False, True])
def test_epochs(drop_last: bool) -> None:
    order = make_order(Uniform(50), 8, seed=1, epochs=3, drop_last=drop_last)
    assert isinstance(order, Epochs)
    each = 6 if drop_last else 7
    assert order.num_batches == 3 * each
    assert (order.num_left(5), order.num_left(10**6)) == (3 * each - 5, 0)
    assert [*order.steps(4, 6)] == [*range(4, 3 * each, 6)] and not [*order.steps(10**6)]
    batches = [order.slots(step) for step in range(order.num_batches)]
    assert {len(slots) for slots in batches} == ({8} if drop_last else {8, 2})
    for epoch in range(3):
        numbers = np.concatenate(batches[epoch * each : (epoch + 1) * each])
        assert len(np.unique(numbers)) == len(numbers) == (48 if drop_last else 50)


def test_the_order_of_epochs_stays() -> None:
    """A stream continues from its seed and the number of a batch, in later releases too."""
    order = make_order(Uniform(50), 4, seed=1, epochs=3, drop_last=False)
    expected = [[16, 25, 49, 1], [32, 17], [32, 7, 42, 24], [21, 5, 41, 40]]
    assert [order.slots(step).tolist() for step in (0, 12, 13, 26)] == expected
    order = make_order(Uniform(1000), 3, seed=1, epochs=3, drop_last=True)
    assert [order.slots(step).tolist() for step in (64, 400)] == [[145, 793, 354], [45, 361, 132]]


def test_orders_that_cannot_be() -> None:
    share = segments(np.array([0, 5]), np.array([5, 5]), np.array([0.9, 0.1]), 10)
    for starts, epochs, drop_last, message in (
        (Uniform(10), None, True, "drop_last is for epochs"),
        (Uniform(10), 0, False, "0 epochs of 10 windows hold no batch of 16"),
        (Uniform(10), 1, True, "1 epochs of 10 windows hold no batch of 16"),
        (share, 1, False, "cannot follow weights or the shares of a mixture"),
    ):
        with pytest.raises(OptionError, match=message):
            make_order(starts, 16, 0, epochs, drop_last)


# ---------------------------------------------------------------------------------- bits of JAX

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
