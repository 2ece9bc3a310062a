"""Arguments of programs, whose types say which values are valid.

A program's arguments are a dataclass that derives from `Validated`. A field of one of the types
below, or a `Literal`, is checked when the dataclass is made::

    @dataclass(frozen=True)
    class Args(Validated):
        updates: PositiveInt = 1000
        gamma: Fraction = 0.99
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Flag, auto
from pathlib import Path
from types import NoneType, UnionType
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec

from offmarl.errors import OptionError, UnknownNameError, unknown_name

T = TypeVar("T")


class Rule(NamedTuple):
    """A condition on a value."""

    words: str
    holds: Callable[[Any], bool]


PositiveInt = Annotated[int, Rule("at least 1", lambda x: x >= 1)]
NonNegativeInt = Annotated[int, Rule("at least 0", lambda x: x >= 0)]
Updates = Annotated[PositiveInt, Rule("at most 2,147,483,647", lambda x: x < 2**31)]
"""A number that programs count in 32 bits."""
SeedCount = Annotated[PositiveInt, Rule("at most 10,000", lambda x: x <= 10_000)]
_WINDOW = Rule("at most 65,536", lambda x: x <= 65_536)
WindowLength = Annotated[PositiveInt, _WINDOW]
"""Steps of a window, which some policies remember: a forged record could ask for all memory."""
BurnIn = Annotated[NonNegativeInt, _WINDOW]
Layers = Annotated[PositiveInt, Rule("at most 128", lambda x: x <= 128)]
"""Hidden layers of a network: a thousand, as of a forged record, take a minute to build."""
Seed = Annotated[int, Rule("from 0 to 2,147,483,647", lambda x: 0 <= x < 2**31)]

Fraction = Annotated[float, Rule("from 0 to 1", lambda x: 0 <= x <= 1)]
Share = Annotated[Fraction, Rule("above 0", lambda x: x > 0)]
Positive = Annotated[float, Rule("above 0 and finite", lambda x: 0 < x < math.inf)]
NonNegative = Annotated[float, Rule("at least 0 and finite", lambda x: 0 <= x < math.inf)]


def check_seed(seed: int, name: str = "seed") -> int:
    """Return a seed of 32 bits; `OptionError` for others, of which JAX would use the last 32 bits.

    Programs count up from theirs, which is a `Seed`.
    """
    if not 0 <= seed < 2**32:
        raise OptionError(f"{name} must be from 0 to 4,294,967,295, not {seed}.")
    return seed


REPEATED = "repeated"
"""Marks the type of an option that is given once for each value: ``--track A --track B``."""


class Role(Flag):
    """What an argument is for, said where its field is: ``updates: int = option(9, Role.SHAPES)``.

    A field that replaces one of a base class keeps the base's roles.
    """

    SHAPES = auto()
    """``make`` may use it, although all programs share it: it shapes the program."""
    LEARNS = auto()
    """It changes what is learned, and not the program: a file that a search writes holds it."""
    SEARCHED = auto()
    """A search draws its values, as it does of the program's own arguments."""
    UNTUNED = auto()
    """A search has no such option."""
    CASE = auto()
    """It says what a program runs on, and not how: files of settings cannot set it."""
    FREE = auto()
    """It does not change the result: it is not recorded, and may differ when a run is resumed."""
    TRACED = auto()
    """It is recorded and may differ when a run is resumed: digests identify what it names, or it
    says what a recorder records after the training."""
    LOCAL = auto()
    """Each process of a run on several machines may have its own."""
    RARE = auto()
    """Few need it: ``--help-all`` lists it."""


def option(default: Any, roles: Role) -> Any:
    """Return a field of a dataclass with a default and roles."""
    return field(default=default, metadata={"roles": roles})


def with_role(kind: Any, role: Role) -> frozenset[str]:
    """Return the names of a dataclass's fields that have a role, or one of several."""
    bases = filter(is_dataclass, getattr(kind, "__mro__", ()))
    entries = (entry for base in bases for entry in fields(base))
    return frozenset(x.name for x in entries if x.metadata.get("roles", Role(0)) & role)


Vaults = str | Path | Mapping[str, float] | tuple[str, ...]
"""A vault by its path or name; or several, as a mapping to their shares or as texts PATH=SHARE."""


class Validated:
    """Base of arguments: raises `OptionError` for the first invalid value."""

    __dataclass_fields__: ClassVar[dict[str, Any]]  # of the dataclasses that derive from it

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self), include_extras=True)
        for entry in fields(self):
            check_rules(entry.name, hints[entry.name], getattr(self, entry.name))


@dataclass(frozen=True, kw_only=True)
class DeviceArgs(Validated):
    """Arguments on devices and processes that programs share."""

    devices: PositiveInt | None = option(None, Role.FREE | Role.RARE)
    """Number of devices to use, of all processes together."""
    coordinator: str | None = option(None, Role.FREE | Role.LOCAL | Role.RARE)
    """Address HOST:PORT of process 0, to run on several machines: give the same command to each
    process, with its own --process. "auto": JAX finds the address, the number of processes and the
    own number where a cluster tells them (SLURM, Open MPI, TPU, Kubernetes, or
    JAX_COORDINATOR_ADDRESS)."""
    processes: PositiveInt | None = option(None, Role.FREE | Role.RARE)
    """With --coordinator: number of processes; by default the one that the cluster tells."""
    process: NonNegativeInt | None = option(None, Role.FREE | Role.LOCAL | Role.RARE)
    """With --coordinator: number of this process, from 0; by default the one that the cluster
    tells. Process 0 reads and writes the files of the run."""


@dataclass(frozen=True, kw_only=True)
class RecordingArgs(DeviceArgs):
    """Arguments of recordings of policies that do not learn."""

    out: Path = option(Path("vaults"), Role.LOCAL)
    """Directory for the vault."""
    name: str | None = None
    """Name of the vault in <out>/<env>.vlt/; by default made of the policies and the seed, which is
    that of the training of a run's policy."""
    num_envs: PositiveInt = 64
    """Number of environments that run side by side."""
    env_states: bool = option(False, Role.RARE)
    """Also record the environments' states, as extras, so that `offmarl.replay_episode` can play
    any episode again."""
    seed: Seed = 0
    """Random seed of the recording."""


def changed(args: T, **values: Any) -> T:
    """Return a copy of arguments with new values; it keeps the recorded origins of the others."""
    clone = copy(args)
    for name, value in values.items():
        object.__setattr__(clone, name, value)
    return clone


def check_rules(name: str, hint: Any, value: Any) -> None:
    """Raise `OptionError` if the value of a field breaks one of the rules in its type."""
    for rule in _rules(hint):
        if value is not None and not rule.holds(value):
            actual = "" if value in ((), [], "") else f", not {value}"
            raise OptionError(f"{name} must be {rule.words}{actual}.")


def _rules(hint: Any) -> Iterator[Rule]:
    """Yield the rules anywhere in a type, such as in ``PositiveInt | None``, and its choices.

    The parts of a union of several types have none.
    """
    origin, parts = get_origin(hint), [part for part in get_args(hint) if part is not NoneType]
    if origin is Literal:
        yield Rule(f"one of {', '.join(parts)}", lambda x: x in parts)
    elif origin is Annotated or (origin in (Union, UnionType) and len(parts) == 1):
        for part in parts:
            yield from [part] if isinstance(part, Rule) else _rules(part)


def float_fields(kind: type) -> list[str]:
    """Return the names of a dataclass's fields that are numbers with a fraction, in order."""
    hints = get_type_hints(kind)
    return [entry.name for entry in fields(kind) if hints[entry.name] is float]


def from_json(kind: type[T], values: Mapping[str, Any]) -> T:
    """Return a dataclass of arguments from a JSON object; `OptionError` for what is not valid.

    Fields that the object lacks get their defaults, as do those of null, by which JSON replaces
    infinity; it ignores entries that are no fields.
    """
    hints = get_type_hints(kind, include_extras=True)
    names = [entry.name for entry in fields(kind) if entry.name in values]  # type: ignore[arg-type]
    arguments = {
        name: converted(name, hints[name], values[name])
        for name in names
        if values[name] is not None or NoneType in get_args(hints[name])
    }
    try:
        return kind(**arguments)
    except TypeError as error:
        raise OptionError(f"{error}.") from None


def read_values(
    kind: type, values: Mapping[str, Any], where: str, refused: Collection[str] = ()
) -> dict[str, Any]:
    """Return values of a file as a dataclass of arguments holds them.

    `OptionError`, which says where, if a name is unknown or among those refused, or for a value.
    """
    hints = get_type_hints(kind, include_extras=True)
    try:
        check_names(kind, values, refused)
        return {name: converted(name, hints[name], value) for name, value in values.items()}
    except (OptionError, UnknownNameError) as error:
        raise OptionError(f"{where}: {error}") from None


def check_names(kind: type, names: Iterable[str], refused: Collection[str] = ()) -> None:
    """Raise an error for the first name that is no argument of a dataclass, or is refused."""
    arguments = [entry.name for entry in fields(kind) if entry.name not in refused]
    for name in names:
        if name in refused:
            raise OptionError(f"{name} cannot be set in a file: give it with the command.")
        if name not in arguments:
            raise unknown_name("argument", name, arguments)


def converted(name: str, hint: Any, value: Any) -> Any:
    """Return a value of a file as a field of this type holds it; `OptionError` if it cannot.

    Whole numbers become floats, strings paths and lists tuples where the type asks for them.
    """

    def path(kind: Any, text: Any) -> Any:
        return Path(text) if kind is Path and isinstance(text, str) else text

    try:
        result = msgspec.convert(value, hint, dec_hook=path, str_keys=True)
    except msgspec.ValidationError as error:
        conditions = "".join(f"; it must be {rule.words}" for rule in _rules(hint))
        raise OptionError(f"{name} cannot be {value!r:.80}: {error}{conditions}.") from None
    except TypeError:  # msgspec reads no such type
        result = tuple(value) if isinstance(value, list) else value
    check_rules(name, hint, result)
    return result
