"""Reads what files record: checked values, and names that run no code.

The author of a file may be a stranger, and a copy does not prove its origin. So the fields of a
record have types and bounds, and all its texts are `RecordedName`. Code is imported only by
`import_code`, which refuses recorded names: the user names code on the command line, or in Python.
"""

import json
import math
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from offmarl._imports import attribute, import_file, import_module
from offmarl.errors import OffmarlError, OptionError, UnknownNameError
from offmarl.paths import local

MOST_STEP_BYTES = 2**30
"""Maximum bytes of one step of all arrays of an environment."""

MOST_ACTIONS = 2**20
"""Maximum number of discrete actions of a record, or entries of a continuous one."""

_MOST_OF_A_NAME, _MOST_PRODUCT = 2**20, 2**30
"""Maximum number of agents, steps and the like that a name in a record may ask for, and maximum
product of all its numbers: arrays have several of these sizes."""

_MOST_DOTS = 200
"""Maximum dots in a key or a line of a card: the parser takes quadratic time for dotted keys."""

POLICY_CARD = "offmarl-policy.toml"
PULLED = "pulled.json"
"""Files at the top of a pulled policy, and of a pulled dataset."""

Count = Annotated[int, Meta(ge=0, le=2**53)]
Size = Annotated[int, Meta(ge=0, le=2**28)]
Agents = Annotated[int, Meta(ge=1, le=2**16)]
Seed = Annotated[int, Meta(ge=0, lt=2**31)]
Text = Annotated[str, Meta(max_length=2**14)]
Tree = Annotated[dict[str, Any], Meta(max_length=256)]


class RecordedName(str):
    """A name that was read from a file, such as an environment's name in a vault's metadata.

    It equals the plain string. No code is imported for it, nor for its parts.
    """

    where: str
    """The file and the field that it was read from."""

    def __new__(cls, text: str, where: str = "the data") -> "RecordedName":
        """Mark a text."""
        instance = super().__new__(cls, text)
        instance.where = getattr(text, "where", where)
        return instance

    def partition(self, sep: str) -> tuple[str, str, str]:
        """Return the parts around the first ``sep``."""
        return self._parts(super().partition(sep))

    def rpartition(self, sep: str) -> tuple[str, str, str]:
        """Return the parts around the last ``sep``."""
        return self._parts(super().rpartition(sep))

    def _parts(self, parts: tuple[str, str, str]) -> tuple[str, str, str]:
        return RecordedName(parts[0], self.where), parts[1], RecordedName(parts[2], self.where)


class Spec(Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON of an `offmarl.types.EnvSpec`, which checks the trees."""

    name: Text
    num_agents: Agents
    observation_size: Size
    state_size: Size
    action: Annotated[
        dict[Literal["discrete", "continuous"], Annotated[int, Meta(ge=0, le=MOST_ACTIONS)]],
        Meta(min_length=1, max_length=1),
    ]
    time_limit: Count | None = None
    reward: Literal["team", "individual"] = "team"
    state: Literal["native", "concatenated"] = "native"
    agents: tuple[Text, ...] | None = None
    observation_sizes: tuple[Size, ...] | None = None
    action_sizes: tuple[Size, ...] | None = None
    teams: tuple[Count, ...] | None = None
    kinds: tuple[Text, ...] | None = None
    observation: Tree | None = None
    global_state: Tree | None = None
    extras: Tree = {}
    team_names: tuple[Text, ...] | None = None
    package: Annotated[str, Meta(pattern=r"^([\w.-]{1,100} [\w.+!-]{1,100})?$")] = ""

    def __post_init__(self) -> None:
        for name in ("agents", "observation_sizes", "action_sizes", "teams", "kinds"):
            if len(getattr(self, name) or range(self.num_agents)) != self.num_agents:
                raise ValueError(f"{name} has not one entry for each of {self.num_agents} agents")


class RecordedArgs(Struct, frozen=True):
    """The arguments that all programs share and that are used without the program."""

    env: Text | None = None
    side: Text = ""
    opponents: tuple[Text, ...] = ()
    normalise: tuple[Text, ...] = ()
    held_out: float | None = None
    num_envs: Annotated[int, Meta(ge=1, le=2**24)] = 1


class Opponents(Struct, frozen=True):
    """What identifies a policy that acts for a side, or the members of a population."""

    policy: Text = ""
    run: Text = ""
    seed: Seed | None = None
    step: Text = ""
    parameters: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")] | None = None
    members: tuple["Opponents", ...] = ()
    weights: tuple[float, ...] = ()


class RunRecord(Struct, frozen=True):
    """``run.json``: what programs and reports rely on; other entries are only shown or compared."""

    kind: Literal["recorder", "baseline"]
    program: Text
    args: RecordedArgs
    spec: Spec
    seeds: Annotated[tuple[Seed, ...], Meta(min_length=1, max_length=10_000)]
    file: Text | None
    sha256: Text | None
    offmarl: Text = ""
    greedy: bool = True
    vault: Text | None = None
    vault_digest: Text | None = None
    validation_digest: Text | None = None
    complete: bool = False
    settings: dict[str, Text] = {}
    given: tuple[Text, ...] = ()
    resolved: tuple[Text, ...] = ()
    opponents: dict[str, Opponents] = {}
    environment_source: dict[str, Text] = {}
    label: Text | None = None


class PolicyCard(Struct, frozen=True):
    """What is shown of a published policy; `offmarl.hub.policies` adds its files."""

    name: Text
    summary: Text
    program: Text
    licence: Text


def as_type(data: Any, kind: Any, where: str, error: type[OffmarlError]) -> Any:
    """Return data of a file as a type; ``error`` names the file ``where``, and the field."""
    try:
        return msgspec.convert(data, kind)
    except (ValueError, RecursionError) as wrong:
        reason, _, field = str(wrong).replace("`", "").replace("$.", "").partition(" - at ")
        raise error(f"{where} is not valid: {field and f'{field}: '}{reason}.") from None


def parse(text: bytes, where: str, error: type[OffmarlError]) -> dict[str, Any]:
    """Return the JSON object in a file."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as wrong:
        raise error(f"{where} is damaged ({wrong}).") from None
    if not isinstance(data, dict):
        raise error(f"{where} holds no JSON object: it is another program's file.")
    return data


def parse_toml(text: str, where: str, error: type[OffmarlError]) -> dict[str, Any]:
    """Return the content of a card, or of a file of settings."""
    try:
        if any(part.count(".") > _MOST_DOTS for part in re.split(r"[=\n]", text)):
            raise RecursionError
        return tomllib.loads(text)
    except ValueError as wrong:  # invalid TOML, or a number with too many digits
        raise error(f"{where} is not valid TOML: {wrong}.") from None
    except RecursionError:
        raise error(f"{where} is nested too deeply.") from None


def mark_names(data: Any, where: str, field: str = "") -> Any:
    """Return data in which all texts are `RecordedName`, with the file and the field."""
    if isinstance(data, str):
        return RecordedName(data, f"{where} ({field})")
    if isinstance(data, Mapping):
        return {x: mark_names(y, where, f"{field}.{x}" if field else x) for x, y in data.items()}
    return [mark_names(entry, where, field) for entry in data] if isinstance(data, list) else data


def user_toml(path: Path, shown: str, missing: str) -> dict[str, Any]:
    """Return a TOML file that the user names: his own text, unless it is in pulled data."""
    places = path.resolve().parents
    if any((place / name).exists() for place in places for name in (POLICY_CARD, PULLED)):
        raise OptionError(
            f"{shown} is in a directory that was pulled, and may name code of its author: read it, "
            "and copy it elsewhere if you trust it."
        )
    try:
        return parse_toml(path.read_bytes().decode(), shown, OptionError)
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise OptionError(missing) from None
    except UnicodeDecodeError as error:
        raise OptionError(f"{shown} is not valid TOML: {error}.") from None


def import_code(name: str, option: str) -> tuple[Any, str | None]:
    """Return what ``path/to/file.py:NAME`` or ``package.module:NAME`` stands for, and its file."""
    refuse_recorded(name, f"with {option} path/to/file.py:NAME or {option} package.module:NAME")
    home, _, function = name.rpartition(":")
    if not home or not function:
        raise OptionError(
            f"{name!r} names no function: write module:function or path/to/file.py:function."
        )
    module = import_file(local(home)) if home.endswith(".py") else import_module(home)
    return attribute(module, function, home), getattr(module, "__file__", None)


def refuse_recorded(name: str, how: str) -> None:
    """Raise `UnknownNameError` if a name of code is from a record; the user names it ``how``."""
    if isinstance(name, RecordedName):
        raise UnknownNameError(
            f"{name.where} names {str(name)!r:.200}, which is code and not an installed name. "
            f"offmarl does not run code that data names: if you trust it, name it yourself, {how}."
        )


def refuse_large(name: str, numbers: Iterable[object]) -> None:
    """Raise `OptionError` if a name from a record has numbers that ask for too much memory."""
    sizes = [max(1, abs(x)) for x in numbers if isinstance(x, int | float)]
    large = max(sizes, default=1) > _MOST_OF_A_NAME or math.prod(map(float, sizes)) > _MOST_PRODUCT
    if large and isinstance(name, RecordedName):
        raise OptionError(
            f"{name.where} names {str(name)!r:.200}, with a number over {_MOST_OF_A_NAME:,} or a "
            f"product of numbers over {_MOST_PRODUCT:,}, which could ask for all memory: if you "
            "trust it, give it with --env."
        )
