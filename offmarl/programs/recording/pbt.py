"""Population based training: the seeds of a recorder replace one another while they train.

At each evaluation but the last, the fifth of the members with the lowest mean returns goes on with
what members of the best fifth have learned, and with their hyperparameters, each multiplied by 0.8
or 1.2 (truncation selection, Jaderberg et al. 2017, arXiv 1711.09846). What is drawn follows from
the member's seed and the number of updates. A resumed run reads the lineage in its evaluations.
"""

from collections.abc import Mapping
from typing import Any, get_type_hints

import numpy as np
from jaxtyping import Float, Float32
from numpy.typing import NDArray

from offmarl.config import Fraction, check_rules
from offmarl.errors import OptionError, unknown_name
from offmarl.programs.program import OnlineArgs, hyperparameter_names, hyperparameters
from offmarl.tracking import PARENT


class PopulationTraining:
    """The hyperparameters of the members, which are the seeds of a run."""

    def __init__(self, args: OnlineArgs):
        self._args, self._seeds = args, args.seed + np.arange(args.seeds)
        self._hints = get_type_hints(type(args), include_extras=True)
        self.members = [hyperparameters(args)] * args.seeds
        """Those of each member, which `replace` and `resume` change in place."""
        values = dict(map(self._start, args.pbt))
        if len(values) < len(args.pbt):
            raise OptionError("--pbt names a hyperparameter twice: give it once, with all values.")
        self._fill(values)

    def _start(self, text: str) -> tuple[str, Float32[np.ndarray, "members"]]:
        """Return a hyperparameter, and the value that each member starts with."""
        option, _, numbers = text.partition("=")
        name, names = option.replace("-", "_"), hyperparameter_names(self._args)
        if name not in names:
            raise unknown_name("numeric hyperparameter", option, names)
        if name in self._args.initial:
            raise OptionError(
                f"--pbt {text}: {name} counts at the start of the training alone: leave it out."
            )
        try:
            values = [float(number) for number in numbers.split(",")]
        except ValueError:
            raise OptionError(f"--pbt {text}: give numbers, as in {option}=0.1,0.2.") from None
        for value in values:
            check_rules(name, self._hints[name], value)
            if value == self._perturbed(name, value, 2.0):
                raise OptionError(f"--pbt {text}: no factor changes {value:g}; start from another.")
        if len(self._seeds) < (fewest := max(4, len(values))):
            raise OptionError(f"--pbt {text} needs a population: give --seeds {fewest} or more.")
        return name, np.resize(np.array(values, np.float32), len(self._seeds))

    def _fill(self, values: Mapping[str, Float32[np.ndarray, "members"]]) -> None:
        self._values = values
        for member in range(len(self._seeds)):
            changes = {name: x[member] for name, x in values.items()}
            self.members[member] = hyperparameters(self._args, changes)

    def resume(self, evaluation: Mapping[str, Any]) -> None:
        """Set the values to those with which the members went on after an evaluation."""
        after = {name: evaluation.get(f"pbt_{name}_next", x) for name, x in self._values.items()}
        self._fill({name: np.asarray(x, np.float32) for name, x in after.items()})

    def replace(
        self, done: int, returns: Float[np.ndarray, "members episodes"], last: bool
    ) -> tuple[dict[int, int], dict[str, NDArray[Any]]]:
        """Choose which member each replaced one copies, and perturb its hyperparameters.

        Returns the places of the winners by those of the losers, and what is logged: the seed that
        each member goes on from, and its hyperparameters before and after. After the ``last``
        update no member is replaced.
        """
        fitness, before = returns.mean(1), self._values
        after = {name: x.copy() for name, x in before.items()}
        order, parents = np.argsort(fitness, kind="stable"), np.arange(len(fitness))
        few = max(len(order) // 5, 1)
        for loser in [] if last else order[:few]:
            draw = np.random.default_rng([self._seeds[loser], done])
            winner = draw.choice(order[-few:])
            if fitness[winner] == fitness[loser]:
                continue
            parents[loser] = winner
            for name, value in before.items():
                factor = draw.choice([0.8, 1.2])
                after[name][loser] = self._perturbed(name, float(value[winner]), factor)
        self._fill(after)
        log = {PARENT: self._seeds[parents]} | {f"pbt_{name}": x for name, x in before.items()}
        log |= {f"pbt_{name}_next": x for name, x in after.items()}
        copies = {place: seat for place, seat in enumerate(parents.tolist()) if seat != place}
        return copies, log

    def _perturbed(self, name: str, value: float, factor: float) -> float:
        """Multiply a value; of a fraction above 1/2, such as a discount, the difference to 1."""
        if self._hints[name] == Fraction and value > 0.5:
            return 1 - factor * (1 - value)
        return factor * value
