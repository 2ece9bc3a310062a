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
"""On a CPU, XLA compiles programs that play a policy in two thirds of the time; with `_IN_ORDER`
they are as fast."""

_IN_ORDER = {"xla_cpu_enable_concurrency_optimized_scheduler": False}
"""On a CPU, XLA orders operations such that several can run at once. Those of an update, or of a
step, are small, and the order that keeps data in the caches is faster. The results do not change.
"""


def quickly() -> Any:
    """Return the compiler options for a program that runs once; none but on a CPU."""
    return QUICKLY if jax.default_backend() == "cpu" else None


@cache
def in_order() -> dict[str, Any] | None:
    """Return the compiler options for loops of small operations; none but on a CPU."""
    if jax.default_backend() != "cpu":
        return None
    try:
        jax.jit(lambda: 0, compiler_options=_IN_ORDER)()
    except jax.errors.JaxRuntimeError:  # this version of XLA has no such option
        return None
    return _IN_ORDER


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
def without_guards() -> Iterator[None]:
    """Leave out JAX's guards of users' code: NaN in data is no fault, for example."""
    types, moves = jax.numpy_dtype_promotion("standard"), jax.transfer_guard("allow")
    with jax.debug_nans(False), jax.numpy_rank_promotion("allow"), types, moves:
        yield


def jit_rarely_run(**options: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that compiles as `jax.jit` with options, on a CPU with `_HALF`.

    It is for programs that learn and record nothing.
    """
    return _jit_with(
        lambda: _HALF | (in_order() or {}) if jax.default_backend() == "cpu" else None, options
    )


def jit_in_order(**options: Any) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that compiles as `jax.jit` with options, and with those of `in_order`.

    It is for recordings, whose steps have the same bits when they are played again.
    """
    return _jit_with(in_order, options)


def _jit_with(
    of_compiler: Callable[[], Any], options: dict[str, Any]
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Choose the compiler's options at the first call: importing a module must not start JAX."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @cache
        def compiled() -> Callable[P, R]:
            program: Callable[P, R] = jax.jit(function, compiler_options=of_compiler(), **options)
            return program

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return compiled()(*args, **kwargs)

        call.lower = lambda *args, **kwargs: compiled().lower(*args, **kwargs)  # type: ignore[attr-defined]
        return call

    return decorate
