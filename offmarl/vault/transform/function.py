"""The functions that `offmarl.vault.map` applies: Python functions and formulas."""

import hashlib
import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import numpy as np

from offmarl import records
from offmarl._imports import summarize
from offmarl.config import check_seed
from offmarl.errors import OffmarlError, OptionError
from offmarl.vault.format.layout import NumpyArray
from offmarl.vault.transform import conditions, expression
from offmarl.vault.transform.columns import StepColumns, StepInterval, place_of
from offmarl.vault.transform.expression import Expression
from offmarl.vault.transform.lineage import LineageSource

MapFunction = Callable[..., Mapping[str, Any]] | str
"""``function(steps) -> columns``, or its place: "module:function" or "path/to/file.py:function". A
second parameter named ``rng`` gets a generator of random numbers."""


class Function(NamedTuple):
    """A function of steps, with the seed of its random numbers."""

    call: Callable[..., Mapping[str, Any]]
    name: str
    """``module:qualified name``, or the formula."""
    sha256: str | None
    """Checksum of its source code, if that is known."""
    is_random: bool
    """Whether it takes random numbers."""
    seed: int

    def __call__(self, steps: StepColumns, part: StepInterval) -> Any:
        """Return the function's result for a part."""
        rng = np.random.default_rng((self.seed, part.number))
        try:
            return self.call(steps, rng=rng) if self.is_random else self.call(steps)
        except OffmarlError:
            raise
        except Exception as error:
            raise OptionError(
                f"{self.name} failed for {place_of(steps)}: {summarize(error)}"
            ) from error


def load(function: MapFunction, seed: int) -> Function:
    """Import a function if it is given by name, and inspect it."""
    call = records.import_code(function, "--with")[0] if isinstance(function, str) else function
    if not callable(call):
        raise OptionError(f"{function!r} is not a function of steps: give one, or its place.")
    name = f"{getattr(call, '__module__', '?')}:{getattr(call, '__qualname__', repr(call))}"
    name = function if isinstance(function, str) else name
    return Function(call, name, _checksum(call), _takes_rng(call), check_seed(seed))


def _takes_rng(call: Callable[..., Any]) -> bool:
    try:
        return "rng" in [*inspect.signature(call).parameters][1:]
    except ValueError:  # functions in C have no signature
        return False


def _checksum(call: Any) -> str | None:
    try:
        return hashlib.sha256(inspect.getsource(call).encode()).hexdigest()
    except (OSError, TypeError):
        return None


# ---------------------------------------------------------------------------------- formulas


@cache
def parse_reward(text: str) -> Expression:
    """Parse a formula of rewards; `ExpressionError` if it is not one."""
    return expression.parse(text, conditions.OF_STEPS, percentiles=False, kind="number")


def reward_formula(text: str, source: LineageSource) -> Function:
    """Return the function that computes the rewards of a source by a formula."""
    parsed = parse_reward(text)
    columns = conditions.columns_of(source, names=parsed.names)
    conditions.check_known(source, parsed, columns)

    def reward(steps: StepColumns) -> dict[str, NumpyArray]:
        values = conditions.step_columns(source, source.named, columns, steps, parsed.names)
        return {"reward": parsed.value(values, steps["reward"].shape).astype(np.float32)}

    return Function(reward, f"reward = {text}", None, False, 0)
