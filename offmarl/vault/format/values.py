"""Finds invalid values, which no environment and no policy can produce.

A NaN in a reward makes the return NaN. A NaN in an observation makes the gradient NaN, even where
the loss is masked. Every value is therefore checked, including those of dead agents.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import numpy as np

from offmarl import gate
from offmarl.errors import InvalidValueError
from offmarl.types import ArraySpec, Continuous, EnvSpec, FinalObservations, flatten_tree
from offmarl.vault.format.compat import ILLEGAL_ACTIONS, MEANINGS, NOT_FINITE, find_illegal
from offmarl.vault.format.layout import OBSERVATIONS, POLICY_IDS, STATE, NumpyArray

OnInvalid = Literal["raise", "keep"]
"""How to treat invalid values: refuse them, or keep them with a warning and a quirk."""

_TOLERANCE = 1e-5
"""Amount by which an action or a log-probability may exceed its bound, for rounding."""

_FLOAT32 = np.dtype(np.float32)

_Wrong = NumpyArray | None
"""Mask of the invalid values; None if it is known that all are valid."""


class RecordPosition(NamedTuple):
    """Position of the first of some steps, for messages such as "row 0, step 5 of the vault"."""

    step: int = 0
    of: str = "of the record"
    row: int = 0


IN_RECORD = RecordPosition()
"""The first step of a record."""


class Invalid(NamedTuple):
    """Invalid values of one array."""

    quirk: str
    """One of `offmarl.vault.format.compat.MEANINGS`."""
    message: str
    """Names the first one: the value, its step, row and agent, and the valid values."""

    @property
    def is_refused(self) -> bool:
        """Whether `check` refuses them; batches leave out steps with illegal actions instead."""
        return self.quirk != ILLEGAL_ACTIONS


class _Rule(NamedTuple):
    name: str
    """Name of a value in messages."""
    must: str
    """Valid values, in words."""
    quirk: str
    wrong: Callable[[NumpyArray], _Wrong]
    """Returns the mask of the invalid values."""
    agents: tuple[int, ...] | None = ()
    """The agents of the third axis; empty for all of them, None if it is not an axis of agents."""


def check(
    arrays: Mapping[str, NumpyArray],
    spec: EnvSpec,
    finals: FinalObservations | None = None,
    place: RecordPosition = IN_RECORD,
) -> None:
    """Refuse invalid values."""
    refuse(find(arrays, spec, finals, place))


def refuse(problems: Iterable[Invalid], then: str = " Nothing of the record was appended.") -> None:
    """Raise `InvalidValueError` for the first of the values that are refused."""
    for problem in problems:
        if problem.is_refused:
            raise InvalidValueError(f"{problem.message}{then}")


def find(
    arrays: Mapping[str, NumpyArray],
    spec: EnvSpec,
    finals: FinalObservations | None = None,
    place: RecordPosition = IN_RECORD,
) -> Iterator[Invalid]:
    """Yield invalid values and illegal actions, at most once for each rule."""
    for name, rule in _rules(spec, arrays):
        wrong = rule.wrong(arrays[name]) if name in arrays else None
        if wrong is not None and wrong.any():
            yield Invalid(rule.quirk, _message(rule, arrays[name], wrong, spec, place))
    if finals is not None:
        yield from _find_in_finals(finals, spec, place)


def _find_in_finals(
    finals: FinalObservations, spec: EnvSpec, place: RecordPosition
) -> Iterator[Invalid]:
    steps = list(zip(np.ravel(finals.row).tolist(), np.ravel(finals.time).tolist(), strict=False))
    view = finals.view
    leaves = flatten_tree(view.observation, OBSERVATIONS) | flatten_tree(view.state, STATE)
    for name, rule in _finite_rules(spec).items():
        values = np.asarray(leaves.get(name, 0))
        fits = gate.is_number(values.dtype) and values.shape[:1] == (len(steps),)
        wrong = rule.wrong(values) if fits else None
        if wrong is not None and wrong.any():
            final = rule._replace(name=f"final {rule.name}")
            yield Invalid(rule.quirk, _message(final, values, wrong, spec, place, steps))


def warn(problems: Iterable[Invalid], known_quirks: Iterable[str]) -> list[str]:
    """Warn about invalid values that are kept, once for each new quirk; return the new quirks."""
    messages: dict[str, str] = {}
    for problem in problems:
        if problem.quirk not in known_quirks:
            messages.setdefault(problem.quirk, problem.message)
    for quirk, message in messages.items():
        warnings.warn(
            f"{message} It is kept, and the new vault records the quirk: {MEANINGS[quirk]}.",
            stacklevel=4,
        )
    return list(messages)


# ---------------------------------------------------------------------------------- rules


def _rules(spec: EnvSpec, arrays: Mapping[str, NumpyArray]) -> list[tuple[str, _Rule]]:
    """Return the rules for the arrays, by name on disk."""
    flag = "0 or 1", "flags other than 0 and 1", _not_flag
    log_prob = "impossible log-probabilities"
    rules = [
        *_finite_rules(spec).items(),
        ("rewards", _Rule("reward", "finite", NOT_FINITE, _not_finite)),
        ("terminals", _Rule("termination", *flag)),
        ("truncations", _Rule("truncation", *flag)),
        ("infos.legals", _Rule("mask of legal actions", *flag)),
        ("infos.alive", _Rule("alive mask", *flag)),
        (
            POLICY_IDS,
            _Rule("policy id", "-1 (unknown) or more", "negative policies", lambda x: x < -1),
        ),
    ]
    if isinstance(spec.action, Continuous):
        return [
            *rules,
            ("actions", _Rule("action", _SCALED, "impossible actions", _out_of_bounds)),
            (
                "infos.behaviour_log_probs",
                _Rule("log-probability", "finite, or NaN where it is unknown", log_prob, np.isinf),
            ),
        ]
    alive, legal = arrays.get("infos.alive"), arrays.get("infos.legals")
    among = partial(_not_among, spec=spec, alive=alive)
    may = "action", "legal by the recorded mask", ILLEGAL_ACTIONS
    forbidden = legal is not None and _Rule(*may, partial(find_illegal, legal=legal, alive=alive))
    below = "0 or below, or NaN where it is unknown"
    return [
        *rules,
        (
            "infos.legals",
            _Rule(
                "mask of legal actions",
                "1 for an action of an agent that is alive",
                "no legal action",
                partial(_nothing_legal, alive=alive),
            ),
        ),
        (
            "actions",
            _Rule("action", f"from 0 to {spec.num_actions - 1}", "impossible actions", among),
        ),
        *([("actions", forbidden)] if forbidden else []),
        ("infos.behaviour_log_probs", _Rule("log-probability", below, log_prob, _above_zero)),
    ]


@lru_cache(64)
def _finite_rules(spec: EnvSpec) -> dict[str, _Rule]:
    """Return the rules for the floating-point leaves of observations and the state."""
    rules = {}
    for path, leaf in flatten_tree(spec.observation_spec, "observation").items():
        rule = _Rule(path, *_FINITE, _finite_as(leaf), leaf.agents or ())
        rules[path.replace("observation", OBSERVATIONS, 1)] = rule
    for path, leaf in flatten_tree(spec.state_spec, "state").items():
        rules[path.replace("state", STATE, 1)] = _Rule(path, *_FINITE, _finite_as(leaf), None)
    return rules


_SCALED = "from -1 to 1 (`from_arrays` scales actions from their action_bounds)"
_FINITE = "finite", NOT_FINITE


def _finite_as(leaf: ArraySpec) -> Callable[[NumpyArray], _Wrong]:
    return partial(_not_finite, dtype=leaf.numpy_dtype)


def _not_finite(values: NumpyArray, dtype: np.dtype[Any] = _FLOAT32) -> _Wrong:
    """Find values that are not finite in the type that they are stored as."""
    if not gate.is_float(dtype):
        return None
    with np.errstate(all="ignore"):
        converted = values if np.can_cast(values.dtype, dtype, "safe") else values.astype(dtype)
    finite = np.isfinite(converted)
    return None if finite.all() else ~finite


def _not_flag(values: NumpyArray) -> _Wrong:
    return None if values.dtype == bool else (values != 0) & (values != 1)


def _out_of_bounds(values: NumpyArray) -> _Wrong:
    return ~(np.abs(values) <= 1 + _TOLERANCE)


def _not_among(values: NumpyArray, spec: EnvSpec, alive: NumpyArray | None) -> _Wrong:
    """Find discrete actions outside the action space.

    An agent with fewer actions than others may only use its own, but a dead agent may be recorded
    with any action of the joint space.
    """
    if values.min(initial=0) < 0 or values.max(initial=0) >= spec.num_actions:
        return (values < 0) | (values >= spec.num_actions)
    if spec.action_sizes is None:
        return None
    beyond = values >= np.array(spec.action_sizes)
    return beyond if alive is None else beyond & (alive != 0)


def _nothing_legal(values: NumpyArray, alive: NumpyArray | None) -> _Wrong:
    """Find the masks that allow an agent nothing although it is alive."""
    nothing = values[..., 0] == 0
    for action in range(1, values.shape[-1]):
        if not nothing.any():  # mostly after a few actions
            return None
        nothing &= values[..., action] == 0
    return nothing if alive is None else nothing & (alive != 0)


def _above_zero(values: NumpyArray) -> _Wrong:
    return (values > _TOLERANCE) | np.isneginf(values)


# ---------------------------------------------------------------------------------- messages


def _message(
    rule: _Rule,
    values: NumpyArray,
    wrong: NumpyArray,
    spec: EnvSpec,
    place: RecordPosition,
    finals: Sequence[tuple[int, int]] | None = None,
) -> str:
    """Describe the first invalid value; ``finals`` has the rows and steps of final views."""
    at = np.argwhere(wrong)[0].tolist()
    value = values[tuple(at)].tolist()
    (row, step), index = (finals[at[0]], at[1:]) if finals else (at[:2], at[2:])
    whose = ""
    if rule.agents is not None and index:
        agent = index.pop(0)
        number = rule.agents[agent] if rule.agents else agent
        whose = f" of agent {number}" + (f" ({spec.agents[number]})" if spec.agents else "")
    entry = f", entry {', '.join(map(str, index))}," if index else ""
    position = f"in row {place.row + row}, step {place.step + step} {place.of}"
    count = int(np.count_nonzero(wrong))
    more = f" (and {count - 1:,} more are wrong)" if count > 1 else ""
    return f"the {rule.name}{whose}{entry} {position} is {value!r}{more}: it must be {rule.must}."


def cast(
    arrays: Mapping[str, NumpyArray],
    types: Mapping[str, Any],
    place: RecordPosition = IN_RECORD,
    on_invalid: OnInvalid = "raise",
) -> dict[str, NumpyArray]:
    """Cast arrays to narrower types of their kind; return the others unchanged."""
    for name, array in arrays.items():
        dtype = types[name].dtype
        if array.dtype == dtype:
            continue
        keeps = on_invalid == "keep" and gate.is_float(dtype)
        if not keeps and (wrong := gate.misfits(array, dtype)) is not None:
            row, step, *_ = at = np.argwhere(wrong)[0].tolist()
            raise InvalidValueError(
                f"{name} has the value {array[tuple(at)]!s} in row {place.row + row}, step "
                f"{place.step + step} {place.of}, which does not fit into the vault's {dtype}: "
                "nothing of the record was appended."
            )
        gate.warn_of_lost_digits(name, array, dtype)
    with np.errstate(all="ignore"):
        return {name: x.astype(types[name].dtype, copy=False) for name, x in arrays.items()}
