"""Population based training: the seeds of a recorder replace one another while they train.

At each evaluation but the last, the fifth of the members with the lowest mean returns goes on with
what members of the best fifth have learned, and with their hyperparameters, each multiplied by 0.8
or 1.2 (truncation selection, Jaderberg et al. 2017, arXiv 1711.09846). What is drawn follows from
the member's seed and the number of updates. Hyperparameters are data, so nothing compiles again.
The lineage is logged with the evaluations, and a resumed run reads it there.
"""

from collections.abc import Mapping, Sequence
from typing import Any, get_type_hints

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from offmarl.config import Fraction, converted
from offmarl.errors import OptionError, unknown_name
from offmarl.programs.program import Hyperparameters, OnlineArgs, hyperparameters
from offmarl.programs.runs.continuing import learned
from offmarl.teams import teams_of
from offmarl.tracking import PARENT
from offmarl.types import ArrayTree, EnvSpec

FACTORS = (0.8, 1.2)
"""What a hyperparameter of a replaced member is multiplied by, each at even odds."""

_SHARE = 5
"""One of so many members is replaced at an evaluation, but at least one."""

_FEWEST = 4


def require_population(args: OnlineArgs, spec: EnvSpec, state: ArrayTree) -> None:
    """Raise `OptionError` if seeds cannot replace one another; ``state`` has a seed's shapes."""
    if args.seeds < _FEWEST:
        raise OptionError(
            f"--pbt trains a population: give at least --seeds {_FEWEST}, not {args.seeds}."
        )
    if len(teams_of(spec)) > 1:
        raise OptionError(
            "--pbt compares members by one return, and each of the teams that learn has its own: "
            "give --side."
        )
    if "params" not in learned(state):
        raise OptionError(
            "--pbt copies what the fields params, target, moments and optimiser of a program's "
            "state hold, and the state of this program has no params."
        )


class Population:
    """The hyperparameters of the members, which are the seeds of a run."""

    def __init__(self, args: OnlineArgs):
        self._shared, self._seeds = hyperparameters(args), args.seed + np.arange(args.seeds)
        hints = get_type_hints(type(args), include_extras=True)
        self._values = _starts(args, hints)
        self._fractions = {name for name in self._values if hints[name] == Fraction}
        self.members: list[Hyperparameters] = []
        """Those of each member, which `replace` and `resume` change in place."""
        self._fill()

    def _fill(self) -> None:
        """Set the hyperparameters of all members to the values."""
        each = range(len(self._seeds))
        own = ({name: x[member] for name, x in self._values.items()} for member in each)
        self.members[:] = [self._shared.replace(**values) for values in own]

    def resume(self, evaluation: Mapping[str, Any]) -> None:
        """Set the values to those with which the members went on after an evaluation."""
        after = {name: evaluation.get(_after(name), x) for name, x in self._values.items()}
        self._values = {name: np.asarray(x, np.float32) for name, x in after.items()}
        self._fill()

    def replace(
        self, done: int, returns: Float[np.ndarray, "members episodes"], last: bool
    ) -> tuple[dict[int, int], dict[str, NDArray[Any]]]:
        """Choose whom each replaced member copies, and perturb its hyperparameters.

        Returns the places of the winners by those of the losers, and what is logged: the seed that
        each member goes on from, and its hyperparameters before and after. After the ``last``
        update nobody is replaced.
        """
        if not self._values:
            return {}, {}
        before, copies = self._values, dict[int, int]()
        self._values = {name: x.copy() for name, x in before.items()}
        fitness = returns.mean(1)
        order = np.argsort(fitness, kind="stable")
        few = max(len(order) // _SHARE, 1)
        for loser in [] if last else order[:few].tolist():
            draw = np.random.default_rng([self._seeds[loser], done])
            winner = int(draw.choice(order[-few:]))
            if fitness[winner] > fitness[loser]:
                copies[loser] = winner
                for name, values in self._values.items():
                    values[loser] = self._perturbed(name, before[name][winner], draw)
        self._fill()
        parents = [copies.get(member, member) for member in range(len(order))]
        log: dict[str, NDArray[Any]] = {PARENT: self._seeds[parents]}
        for name, values in self._values.items():
            log |= {f"pbt_{name}": before[name], _after(name): values}
        return copies, log

    def _perturbed(self, name: str, value: np.float32, draw: np.random.Generator) -> float:
        """Multiply a value by one of `FACTORS`; of a fraction above one half, what 1 exceeds it by.

        So discounts stay below 1, and a discount near 1 changes the horizon by the factor.
        """
        factor = float(draw.choice(FACTORS))
        if name in self._fractions and value > 0.5:
            return 1 - factor * (1 - float(value))
        return factor * float(value)


def _after(name: str) -> str:
    return f"pbt_{name}_next"


def _starts(args: OnlineArgs, hints: Mapping[str, Any]) -> dict[str, NDArray[np.float32]]:
    """Return the value that each member starts with, by hyperparameter; or raise `OptionError`."""
    known, found = hyperparameters(args).names, dict[str, NDArray[np.float32]]()
    for text in args.pbt:
        option, _, given = text.partition("=")
        name = option.replace("-", "_")
        if hasattr(args, name) and name not in known:
            raise OptionError(
                f"--pbt {text}: {option} is no number that may change while a program trains: "
                f"choose among {', '.join(known)}."
            )
        if name not in known:
            raise unknown_name("hyperparameter", option, known)
        values = _numbers(text, given)
        for value in values:
            converted(name, hints[name], value)
            if value == 0 or (value == 1 and hints[name] == Fraction):
                raise OptionError(
                    f"--pbt {text}: {value:g} stays what it is, whatever it is multiplied by: "
                    "start from another number."
                )
        if name in found or len(values) > args.seeds:
            what = "is given twice" if name in found else f"has values for {len(values)} members"
            raise OptionError(f"--pbt {text}: {option} {what}, and there are {args.seeds} --seeds.")
        found[name] = np.resize(np.array(values, np.float32), args.seeds)
    return found


def _numbers(text: str, given: str) -> Sequence[float]:
    try:
        return [float(one) for one in given.split(",")]
    except ValueError:
        raise OptionError(f"--pbt {text}: give numbers, as in learning_rate=1e-4,1e-3.") from None
