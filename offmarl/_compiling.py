"""XLA's options for programs that run too rarely to need all of its optimisations."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from importlib import import_module
from typing import Any, ParamSpec, TypeVar

import jax

P = ParamSpec("P")
R = TypeVar("R")

QUICKLY = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
"""On a CPU, XLA compiles programs several times as fast, and they are about four times slower."""

_HALF = {"xla_backend_optimization_level": 1}
"""On a CPU, XLA compiles evaluations of policies up to twice as fast, and they are at most a fifth
slower; see ``benchmarks/RESULTS.md``."""


def quickly() -> Any:
    """Return the compiler options for a program that runs once; none but on a CPU."""
    return QUICKLY if jax.default_backend() == "cpu" else None


@contextmanager
def pinned() -> Iterator[None]:
    """Compute in 32 bits and with JAX's default random numbers, whatever the user has set.

    For a block, or as a decorator of a function. The user's settings are as before after it.
    """
    home: Any = jax if hasattr(jax, "enable_x64") else import_module("jax.experimental")
    with (
        home.enable_x64(False),
        jax.default_prng_impl("threefry2x32"),
        jax.threefry_partitionable(True),
    ):
        yield


@contextmanager
def unguarded() -> Iterator[None]:
    """Leave out JAX's guards of users' code: NaN in data is no fault, for example."""
    types, moves = jax.numpy_dtype_promotion("standard"), jax.transfer_guard("allow")
    with jax.debug_nans(False), jax.numpy_rank_promotion("allow"), types, moves:
        yield


def jit_rarely_run(**options: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that compiles as `jax.jit` with options, on a CPU with `_HALF`.

    It is for programs that run a few dozen times. The backend is chosen at the first call, since
    JAX must not start when a module is imported.
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @cache
        def compiled() -> Callable[P, R]:
            chosen: Any = _HALF if jax.default_backend() == "cpu" else None
            found: Callable[P, R] = jax.jit(function, compiler_options=chosen, **options)
            return found

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return compiled()(*args, **kwargs)

        return call

    return decorate
