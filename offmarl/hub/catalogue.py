"""The catalogue: one TOML card for each dataset that is published or can be recorded again."""

import dataclasses
import json
import math
import re
import reprlib
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from offmarl.errors import CardError, unknown_name
from offmarl.statistics import Reference

SUFFIX = ".toml"

_MOST_DOTS = 200
"""Dots in a key, or in a line of text: the parser takes quadratic time for those of a key."""

_PLAIN = re.compile(r"\w[\w .+=-]*")


@dataclass(frozen=True)
class File:
    """A file in a repository."""

    path: str
    size: int
    """Bytes."""
    sha256: str


@dataclass(frozen=True)
class Uid:
    """One vault of a dataset; what its data card or its recording says of it."""

    steps: int | None = None
    episodes: int | None = None
    return_mean: float | None = None
    """Mean over complete episodes (and agents) of the return."""
    return_std: float | None = None
    return_min: float | None = None
    return_max: float | None = None
    joint_saco: float | None = None
    """Distinct joint state-action pairs per step, in [0, 1]."""
    digest: str | None = None
    """Of its logical content; see `offmarl.vault.digest`."""
    origin: str | None = None
    """Where its data comes from, in a sentence or two."""
    files: tuple[File, ...] = ()
    """Its own archive on the hub, cut into shards; none where one archive holds all uids."""
    incomplete: int | None = None
    """Episodes that the recording cut off, or that run on at the end of the data; None: none."""


@dataclass(frozen=True)
class Hub:
    """Where a dataset is published."""

    repository: str
    """Such as "InstaDeepAI/og-marl"."""
    path: str | None = None
    """The zip archive of all uids, in the repository."""
    revision: str = "main"
    """The revision that size and sha256 are of."""
    size: int | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class Recipe:
    """How a dataset of ours is recorded again."""

    command: str
    seed: int
    versions: Mapping[str, str]
    """Of the packages it was recorded with."""
    random: float
    """Mean return of uniform legal actions."""
    expert: float
    """Mean return of the best checkpoint."""


@dataclass(frozen=True)
class Licence:
    """What may be done with a dataset, as SPDX identifiers."""

    data: str
    """Or "unknown" where the source states none, or "other"."""
    code: str | None = None
    link: str | None = None
    """The text of one that is "other"."""
    note: str | None = None
    """Who states it, where that is not the source."""


@dataclass(frozen=True)
class Card:
    """What is known of a dataset before it is here.

    ``name`` is ``source/environment/scenario``; ``action`` is ``{"discrete": 9}`` or
    ``{"continuous": 3}``; ``time_limit`` is the number of steps after which the environment cut
    episodes off, where that is known.
    """

    name: str
    summary: str
    num_agents: int
    citation: str
    licence: Licence
    uids: Mapping[str, Uid] = field(default_factory=dict)
    action: Mapping[str, int] | None = None
    observation_size: int | None = None
    state_size: int | None = None
    time_limit: int | None = None
    quirks: tuple[str, ...] = ()
    hub: Hub | None = None
    recipe: Recipe | None = None

    @property
    def source(self) -> str:
        """Who made it."""
        return self.name.split("/")[0]

    @property
    def environment(self) -> str:
        """The suite it was recorded in, such as "smac_v1"."""
        return self.name.split("/")[-2]

    @property
    def scenario(self) -> str:
        """Such as "3m"."""
        return self.name.split("/")[-1]


# ---------------------------------------------------------------------------------- finding


def directory() -> Path:
    """Return where the cards stand: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).parents[1]
    places = (package / "datasets", package.parent / "datasets")
    return next((place for place in places if place.is_dir()), places[0])


@cache
def names() -> tuple[str, ...]:
    """Return the names of all datasets of the catalogue, sorted."""
    root = directory()
    found = (path.relative_to(root).with_suffix("") for path in root.rglob(f"*{SUFFIX}"))
    return tuple(sorted(path.as_posix() for path in found))


def cards() -> Iterator[Card]:
    """Load all cards, by name."""
    return map(load, names())


def load(name: str) -> Card:
    """Load a card of the catalogue.

    Raises
    ------
    UnknownNameError
        There is none of that name.
    CardError
        It is not as a card must be.
    """
    if name not in names():
        raise unknown_name("dataset", name, names(), see="offmarl ls --remote")
    path = directory() / f"{name}{SUFFIX}"
    return parse(path.read_text(), str(path))


def references() -> dict[str, Reference]:
    """Return the mean returns of random and of expert play, by environment.

    The recipes of the datasets that can be recorded again hold them: this is the one place where
    scores get what they are normalised by.
    """
    return {
        f"{card.environment}/{card.scenario}": Reference(card.recipe.random, card.recipe.expert)
        for card in cards()
        if card.recipe
    }


# ---------------------------------------------------------------------------------- reading


def parse(text: str, where: str) -> Card:
    """Read a card.

    Parameters
    ----------
    text
        TOML.
    where
        What to call it in an error.

    Raises
    ------
    CardError
        It is no TOML; a field is missing, unknown, or of another type than it must be.
    """
    if any(part.count(".") > _MOST_DOTS for part in re.split(r"[=\n]", text)):
        raise CardError(f"{where} is nested too deep: no card is.")
    try:
        data = tomllib.loads(text)
    except ValueError as error:  # that of TOML, and that of a number with too many digits
        raise CardError(f"{where} is not TOML: {error}.") from error
    except RecursionError as error:
        raise CardError(f"{where} is nested too deep: no card is.") from error
    return check(_build(Card, data, where, ""), where)


def check(card: Card, where: str) -> Card:
    """Return a card whose names can be those of directories; `CardError` otherwise."""
    if card.name.count("/") != 2:
        raise CardError(f"{where}: name must be source/environment/scenario, not {card.name!r}.")
    for name in (*card.name.split("/"), *card.uids):
        if not _PLAIN.fullmatch(name):
            raise CardError(f"{where}: {name!r} cannot be the name of a dataset or a uid.")
    if card.time_limit is not None and card.time_limit < 1:
        raise CardError(f"{where}: time_limit must be positive, not {card.time_limit}.")
    return card


def to_toml(card: Card) -> str:
    """Write a card, so that `parse` reads it back."""
    return "\n".join(_table(dataclasses.asdict(card), ""))


def _table(data: Mapping[str, Any], prefix: str) -> Iterator[str]:
    """Yield the lines of a table: its values, then the tables in it."""
    given = {key: value for key, value in data.items() if value not in (None, (), {})}
    tables = {key: value for key, value in given.items() if isinstance(value, dict)}
    yield from (f"{_key(k)} = {_value(v)}" for k, v in given.items() if k not in tables)
    for key, value in tables.items():
        name = f"{prefix}{_key(key)}"
        yield from ("", f"[{name}]", *_table(value, f"{name}."))


def _value(value: Any) -> str:
    match value:
        case list() | tuple():
            return f"[{', '.join(map(_value, value))}]"
        case dict():
            return f"{{ {', '.join(f'{_key(k)} = {_value(v)}' for k, v in value.items())} }}"
        case float() if not math.isfinite(value):
            return {math.inf: "inf", -math.inf: "-inf"}.get(value, "nan")
        case _:
            return json.dumps(value).replace("\x7f", "\\u007f")


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else json.dumps(name)


def _build(cls: Any, data: Any, where: str, prefix: str) -> Any:
    """Make a dataclass of a table, checking every field."""
    if not isinstance(data, dict):
        raise CardError(f"{where}: {prefix.rstrip('.')} must be a table, not {_brief(data)}.")
    hints = typing.get_type_hints(cls)
    needed = [
        one.name
        for one in dataclasses.fields(cls)
        if one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING
    ]
    missing = [name for name in needed if name not in data]
    unknown = [name for name in data if name not in hints]
    for problem, found in (("lacks", missing), ("has unknown", unknown)):
        if found:
            fields = ", ".join(f"{prefix}{name:.80}" for name in found[:10])
            raise CardError(f"{where} {problem} {fields}: datasets/README.md lists the fields.")
    return cls(**{k: _convert(hints[k], v, where, f"{prefix}{k}") for k, v in data.items()})


def _convert(hint: Any, value: Any, where: str, name: str) -> Any:
    """Return a value as its annotation wants it; `CardError` where it cannot be."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:  # all of ours are optional fields
        return _convert(inner[0], value, where, name)
    if dataclasses.is_dataclass(hint):
        return _build(hint, value, where, f"{name}.")
    if origin is tuple and isinstance(value, list):
        return tuple(_convert(inner[0], one, where, f"{name}[{i}]") for i, one in enumerate(value))
    if origin is Mapping and isinstance(value, dict):
        return {k: _convert(inner[1], one, where, f"{name}.{k}") for k, one in value.items()}
    if hint is float and type(value) is int:
        return float(value)
    if origin is None and type(value) is hint and _is_sane(value):
        return value
    wanted = getattr(origin or hint, "__name__", str(hint))
    raise CardError(f"{where}: {name} must be of type {wanted.lower()}, not {_brief(value)}.")


def _is_sane(value: Any) -> bool:
    """Whether a number is one that is counted in 64 bits; true of all else."""
    return type(value) is not int or -(2**63) <= value < 2**63


def _brief(value: Any) -> str:
    """Return a value of any size and depth in a few words."""
    return reprlib.repr(value) if _is_sane(value) else "a number beyond 64 bits"
