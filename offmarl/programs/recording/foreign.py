"""Policies of other programs, as `offmarl.types.Policy`: a function, or a network with parameters.

>>> policy = function_policy(env.spec, lambda observation, legal_actions: legal_actions.argmax(-1))
>>> record_policy(env, policy, (), "vaults/first.vlt", steps=1000)
"""

import hashlib
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from offmarl.distributions import Distribution, categorical
from offmarl.errors import InvalidValueError, ShapeError
from offmarl.types import ArrayTree, Continuous, EnvSpec, Policy


def function_policy(
    spec: EnvSpec, function: Callable[[ArrayTree, Bool[np.ndarray, "N A"]], np.ndarray]
) -> Policy:
    """Return a policy that calls a Python function for its actions.

    The function runs on the host, once for each step of each environment, so it may use NumPy or
    another library; a function of JAX arrays is faster as `Policy.act`. Its actions are recorded
    as certain, with log-probability 0.

    Parameters
    ----------
    spec
        The environment's spec.
    function
        ``function(observation, legal_actions)`` returns the actions of all agents of one
        environment: whole numbers ``(N,)``, or ``(N, A)`` in [-1, 1]. It must depend on nothing
        else: a recording that is resumed calls it again. The vault keeps a checksum of its code
        and of the numbers, texts and arrays that it closes over; with another one, the recording is
        not resumed.

    Raises
    ------
    ShapeError, InvalidValueError
        While recording: the actions have another shape, or the environment has no such actions.
    """
    continuous = isinstance(spec.action, Continuous)
    shape = (spec.num_agents, spec.action_size) if continuous else (spec.num_agents,)
    result = jax.ShapeDtypeStruct(shape, np.float32 if continuous else np.int32)  # type: ignore[no-untyped-call]

    def checked(observation: ArrayTree, legal_actions: Array) -> np.ndarray:
        views = jax.tree.map(np.asarray, observation)
        actions = np.asarray(function(views, np.asarray(legal_actions)))
        if actions.shape != shape:
            raise ShapeError(
                f"the function returned actions of shape {actions.shape}: return {shape}, the "
                "actions of all agents of one environment."
            )
        is_one = np.isin(actions, np.arange(spec.action_size))
        if not continuous and not is_one.all():
            raise InvalidValueError(
                f"the function returned the action {actions[~is_one][0]}: return whole numbers "
                f"from 0 to {spec.action_size - 1}, one for each agent."
            )
        return actions.astype(result.dtype)

    def call(observation: ArrayTree, legal_actions: Array) -> np.ndarray:
        try:
            return checked(observation, legal_actions)
        except Exception as error:
            number = next(_numbers)
            name = _name(number)
            _errors[name] = error
            _errors.pop(_name(number - _KEPT), None)
            raise RuntimeError(f"{name}: {error!r}") from error

    def act(
        _params: ArrayTree,
        carry: ArrayTree,
        observation: ArrayTree,
        legal_actions: Bool[Array, "N A"],
        _key: PRNGKeyArray,
    ) -> tuple[Array, Float[Array, "N"], ArrayTree]:
        action = jax.pure_callback(
            call, result, observation, legal_actions, vmap_method="sequential"
        )
        return action, jnp.zeros(spec.num_agents), carry

    return Policy(tuple, act, draws=lambda _params: False, code=code_checksum(function))


_KEPT = 16
_numbers = count()
_errors: dict[str, Exception] = {}
"""The last errors of policies' functions, which JAX calls in its threads, by names in its error."""


def _name(number: int) -> str:
    return f"error {number} of a function"


@contextmanager
def errors_of_functions() -> Iterator[None]:
    """Raise the error of a policy's function in place of the one that JAX makes of it."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if (name := re.search(r"error \d+ of a function", str(error))) is None:
            raise
        raise _errors.pop(name[0], error) from None


def code_checksum(function: Callable[..., Any]) -> str:
    """Return a SHA-256 of a function's code, its defaults and the plain values in its closure.

    Of an object with a method ``__call__`` it is that of the method. Functions that it calls, and
    objects other than numbers, texts and arrays, do not count.
    """
    digest = hashlib.sha256()
    _add_code(digest, function)
    return digest.hexdigest()


def _add_code(digest: Any, value: Any) -> None:
    if isinstance(value, partial):
        _add_code(digest, value.func)
        if value.args or value.keywords:
            _add_code(digest, (value.args, sorted(value.keywords.items())))
    elif isinstance(value, CodeType):
        digest.update(value.co_code)
        _add_code(digest, (value.co_consts, value.co_names))
    elif isinstance(value, dict):
        _add_code(digest, sorted(value.items(), key=repr))
    elif isinstance(value, tuple | list | set | frozenset):
        digest.update(f"{len(value)}:".encode())  # where a part within a part ends
        for part in sorted(value, key=repr) if isinstance(value, set | frozenset) else value:
            _add_code(digest, part)
    elif isinstance(value, np.ndarray | jax.Array | np.generic):
        digest.update(f"{value.dtype}{value.shape}".encode() + np.asarray(value).tobytes())
    elif isinstance(value, str | bytes | int | float | complex | None):
        digest.update(f"{type(value).__name__} {value!r}".encode())
    elif isinstance(value, FunctionType):
        cells = [x.cell_contents for x in value.__closure__ or () if x != CellType()]  # not empty
        plain = [content for content in cells if not callable(content)]
        defaults = sorted((value.__kwdefaults__ or {}).items())
        _add_code(digest, (value.__code__, value.__defaults__, defaults, plain))
    elif isinstance(value, MethodType):
        _add_code(digest, value.__func__)
    elif isinstance(call := vars(type(value)).get("__call__"), FunctionType):
        _add_code(digest, call)


def network_policy(
    apply: Callable[[ArrayTree, ArrayTree], Array],
    head: Callable[[Array, Bool[Array, "N A"]], Distribution] = categorical,
) -> Policy:
    """Return a policy that samples its actions from the outputs of a network.

    Parameters
    ----------
    apply
        ``apply(params, observation)``: the network's outputs for the agents of one environment,
        such as ``module.apply`` of a flax module. By default they are logits ``(N, A)``; illegal
        actions get probability 0.
    head
        ``head(outputs, legal_actions)``: the distribution of the actions.
    """

    def act(
        params: ArrayTree,
        carry: ArrayTree,
        observation: ArrayTree,
        legal_actions: Bool[Array, "N A"],
        key: PRNGKeyArray,
    ) -> tuple[Array, Float[Array, "N"], ArrayTree]:
        distribution = head(apply(params, observation), legal_actions)
        action, log_prob = distribution.sample_and_log_prob(key)
        return action, log_prob, carry

    return Policy(tuple, act)
