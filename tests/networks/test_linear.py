"""How the kernels of linear layers are initialised."""

from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest
from jax.extend.core import Jaxpr, JaxprEqn

from offmarl.networks.linear import orthogonal


@pytest.mark.parametrize("shape", [(3, 3), (5, 2), (2, 5), (3, 3, 2, 4)])
def test_orthogonal_kernels_are_those_of_flax(shape: tuple[int, ...]) -> None:
    key = jax.random.key(0)
    expected = jax.jit(lambda key: nn.initializers.orthogonal(2.0)(key, shape))(key)
    kernel = jax.jit(lambda key: orthogonal(2.0)(key, shape))(key)
    np.testing.assert_array_equal(kernel, expected)


def test_seeds_and_agents_do_not_batch_the_factorisation() -> None:
    """Two batched factorisations in one program can wait for each other for ever."""
    keys = jax.random.split(jax.random.key(0), (3, 2))
    seeds = jax.vmap(jax.vmap(lambda key: orthogonal()(key, (4, 4))))
    traced = jax.jit(seeds).trace(keys).jaxpr.jaxpr
    avals: list[Any] = [equation.invars[0].aval for equation in equations(traced, "geqrf", "qr")]
    ranks = [len(aval.shape) for aval in avals]
    assert ranks
    assert set(ranks) == {2}
    alone = jax.jit(lambda key: orthogonal()(key, (4, 4)))(keys[2, 1])
    np.testing.assert_array_equal(jax.jit(seeds)(keys)[2, 1], alone)


def equations(jaxpr: Jaxpr, *names: str) -> Iterator[JaxprEqn]:
    """Yield the equations of some primitives, also of inner programs."""
    for equation in jaxpr.eqns:
        if equation.primitive.name in names:
            yield equation
        parameters = jax.tree.leaves([*equation.params.values()])
        inner = (getattr(value, "jaxpr", value) for value in parameters)
        for program in (value for value in inner if isinstance(value, Jaxpr)):
            yield from equations(program, *names)
