"""The functions that `offmarl.vault.map` applies: Python functions and formulas."""

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from multiprocessing import get_context
from pickle import PicklingError
from typing import Any, NamedTuple

import numpy as np

from offmarl import records
from offmarl._ahead import ahead
from offmarl._imports import summarize
from offmarl.config import check_seed
from offmarl.errors import OffmarlError, OptionError
from offmarl.vault.layout import Leaf, NumpyArray
from offmarl.vault.reader import Reader
from offmarl.vault.transform import conditions, expression
from offmarl.vault.transform.columns import Part, Result, Steps, check
from offmarl.vault.transform.expression import Columns, Expression

MapFunction = Callable[..., Mapping[str, Any]] | str
"""``function(steps) -> columns``, or its place: "module:function" or "path/to/file.py:function". A
second parameter named ``rng`` or ``key`` gets random numbers."""

_RANDOM = ("rng", "key")


class Function(NamedTuple):
    """A function of steps, with the seed of its random numbers."""

    call: Callable[..., Mapping[str, Any]]
    name: str
    """``module:qualified name``, or the formula."""
    sha256: str | None
    """Checksum of its source code, if that is known."""
    random: str | None
    """Name of the parameter for random numbers; None if it takes none."""
    seed: int
    place: str | None = None
    """Where it was imported from, if it was given by its place."""

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process cannot find the module of a file by its name, so it imports the file.
        if self.place is not None:
            return load, (self.place, self.seed)
        return Function, tuple(self)

    def __call__(self, steps: Steps, part: Part) -> Any:
        """Return the function's result for a part."""
        options = {self.random: self._randomness(part.number)} if self.random else {}
        try:
            return self.call(steps, **options)
        except OffmarlError:
            raise
        except Exception as error:
            first, last = int(steps.episode[0]), int(steps.episode[-1])
            episodes = f"episode {first}" if first == last else f"episodes {first} to {last}"
            hint = ". The steps cannot be changed in place: copy an array first." * (
                isinstance(error, ValueError) and "read-only" in str(error)
            )
            raise OptionError(
                f"{self.name} failed for {episodes}: {summarize(error)}{hint}"
            ) from error

    def _randomness(self, number: int) -> Any:
        if self.random == "rng":
            return np.random.default_rng((self.seed, number))
        import jax  # only functions that ask for a key need it

        return jax.random.fold_in(jax.random.key(self.seed), number)

    @property
    def described(self) -> dict[str, Any]:
        """The facts for the lineage."""
        facts = {"function": self.name, "sha256": self.sha256}
        return facts | ({"seed": self.seed} if self.random else {})


def load(function: MapFunction, seed: int) -> Function:
    """Import a function if it is given by name, and inspect it."""
    call = function
    if isinstance(function, str):
        call, _ = records.import_code(function, "--with")
    if not callable(call):
        raise OptionError(f"{function!r} is not a function of steps: give one, or its place.")
    name = f"{getattr(call, '__module__', '?')}:{getattr(call, '__qualname__', repr(call))}"
    place = function if isinstance(function, str) else None
    return Function(
        call, place or name, _checksum(call), _random_parameter(call), check_seed(seed), place
    )


def _random_parameter(call: Callable[..., Any]) -> str | None:
    try:
        _, *others = inspect.signature(call).parameters
    except ValueError:  # functions in C have no signature, or no parameters
        return None
    return next((name for name in others if name in _RANDOM), None)


def _checksum(call: Any) -> str | None:
    try:
        return hashlib.sha256(inspect.getsource(call).encode()).hexdigest()
    except (OSError, TypeError):
        return None


# ---------------------------------------------------------------------------------- formulas


class RewardFormula(NamedTuple):
    """A formula of the new rewards, such as ``reward / 10``."""

    text: str
    columns: Columns
    """Values of each episode, by name."""

    def __call__(self, steps: Steps) -> dict[str, NumpyArray]:
        """Return the rewards of all agents."""
        parsed = parse_reward(self.text)
        here = {name: self.columns[name][steps.episode][:, None] for name in self._used(parsed)}
        here |= {"reward": steps["reward"].astype(float), "step": steps.time[:, None]}
        for name in conditions.check_extras(steps.vault, parsed.names):
            here[name] = steps[name].reshape(len(steps.time), -1).astype(float)
        value = parsed.value(here, steps["reward"].shape)
        return {"reward": value.astype(np.float32)}

    def _used(self, parsed: Expression) -> Iterator[str]:
        names = parsed.names | ({expression.POLICY_NAME} if "policy" in parsed.names else set())
        yield from names & self.columns.keys()


@cache
def parse_reward(text: str) -> Expression:
    """Parse a formula of rewards; `ExpressionError` if it is not one."""
    return expression.parse_number(text, conditions.OF_STEPS)


def reward_formula(text: str, columns: Columns) -> Function:
    """Return the function that computes rewards by a formula."""
    formula: Any = RewardFormula(text, columns)
    return Function(formula, f"reward = {text}", None, None, 0)


# ---------------------------------------------------------------------------------- applying


class Apply(NamedTuple):
    """Applies a function to parts of a vault."""

    vault: Reader
    function: Function

    def __call__(self, part: Part) -> tuple[Any, Steps]:
        """Return what the function returns for a part, and its input."""
        steps = Steps(self.vault, part)
        return self.function(steps, part), steps

    def checked(self, part: Part, leaves: Mapping[str, Leaf]) -> Result:
        """Return the checked result for a part of a vault with these arrays."""
        returned, steps = self(part)
        return check(returned, steps, part, leaves)


def results(
    apply: Apply, parts: Iterable[Part], leaves: Mapping[str, Leaf], processes: int
) -> Iterator[tuple[Part, Result]]:
    """Yield each part with its result, in order."""
    if processes == 1:
        for part in parts:
            yield part, apply.checked(part, leaves)
        return
    start = (apply, dict(leaves))
    _check_pickles(apply)
    with ProcessPoolExecutor(processes, get_context("spawn"), _begin, start) as pool:

        def submit(part: Part) -> Future[Result]:
            return pool.submit(_work, part)

        try:
            for part, future in ahead(parts, submit, 2 * processes):
                yield part, future.result()
        except BrokenProcessPool as error:
            raise OptionError(
                f"a process that called {apply.function.name} ended early. If a script calls map, "
                'guard the call with `if __name__ == "__main__":`, and define the function in a '
                "module. If the memory is too small, use fewer processes."
            ) from error


def _check_pickles(apply: Apply) -> None:
    from pickle import dumps

    try:
        dumps(apply)
    except (PicklingError, AttributeError, TypeError) as error:
        raise OptionError(
            f"{apply.function.name} cannot be sent to other processes ({error}): define it in a "
            "module, or leave processes out."
        ) from error


_state: list[tuple[Apply, Mapping[str, Leaf]]] = []


def _begin(apply: Apply, leaves: Mapping[str, Leaf]) -> None:
    _state[:] = [(apply, leaves)]


def _work(part: Part) -> Result:
    ((apply, leaves),) = _state
    return apply.checked(part, leaves)
