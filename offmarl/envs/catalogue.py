"""The built-in environments: names, properties and classes. Imports no JAX."""

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any, Literal

Option = bool | int | float | str

Trait = Literal["partial", "adversarial", "heterogeneous", "communication", "mask"]


@dataclass(frozen=True)
class EnvInfo:
    """Properties of an environment, known without creating it.

    Parameters
    ----------
    summary
        One line.
    agents
        Number of agents: a number, a capital letter of the name, "any" if an option sets it, or
        what it depends on. Empty if unknown.
    traits
        "partial": agents observe less than the state. "adversarial": some rewards oppose others,
        or scripted opponents act. "heterogeneous": agents differ in observations, actions or
        abilities. "communication": agents have a channel to each other. "mask": some actions are
        illegal at times.
    observation
        "vector"; "grid" for an image of integers or booleans, channels last; or "tree" for a
        dictionary of arrays. None if unknown.
    action
        "discrete", "continuous", or "both" if an option chooses; None if unknown.
    state
        "native": the environment has its own global state. "concatenated": the state is all
        observations. None if unknown.
    extra
        Optional dependency that it needs: ``pip install 'offmarl[EXTRA]'``.
    choices
        Values for the word in capitals in the name.
    """

    summary: str
    agents: str = ""
    traits: tuple[Trait, ...] = ()
    observation: Literal["vector", "grid", "tree"] | None = None
    action: Literal["discrete", "continuous", "both"] | None = None
    state: Literal["native", "concatenated"] | None = None
    extra: str = ""
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Family:
    """Environments with one factory; in the name, a capital letter after a dash is a number."""

    name: str
    factory: str | EntryPoint | Callable[..., Any]
    """A callable that returns the environment, or ``module:attribute`` to import it from."""
    about: EnvInfo
    sizes: tuple[str, ...] | None = None
    """Arguments set by the numbers or the word in the name, in order; None for the factory's
    arguments without a default."""
    source: str = "offmarl"
    """Where it is defined: offmarl, a package with its version, or a file or module."""
    fixed: Mapping[str, Option] = field(default_factory=dict)
    """Arguments that users cannot change."""

    @property
    def stem(self) -> str:
        """The name up to its last slash."""
        return self.name.rpartition("/")[0]

    def match(self, name: str) -> tuple[Option, ...] | None:
        """Return the numbers or the word in a name of this family; None for any other name."""
        if self.about.choices:
            stem, _, choice = name.rpartition("/")
            return (choice,) if stem == self.stem and choice in self.about.choices else None
        pattern = re.sub(r"\\-[A-Z]\b", lambda _: r"-(\d{1,18})", re.escape(self.name))
        numbers = re.fullmatch(pattern, name, re.ASCII)
        return numbers and tuple(map(int, numbers.groups()))


_BUILT_IN = EnvInfo("", "2", observation="vector", action="discrete", state="native")
"""Properties of built-in environments, unless ``catalogue.toml`` says otherwise."""


_CATALOGUE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))

LEFT_OUT: Mapping[str, str] = _CATALOGUE["left_out"]
"""Names that a user may expect, and why there are no such environments."""


def _read() -> Iterator[Family]:
    """Read the built-in environments from ``catalogue.toml``."""
    for group in _CATALOGUE["group"]:
        prefix, environments = group.pop("prefix"), group.pop("environments")
        for name, entry in environments.items():
            values = group | entry
            about = {x.name: values.pop(x.name) for x in fields(EnvInfo) if x.name in values}
            about |= {key: tuple(about[key]) for key in ("traits", "choices") if key in about}
            factory = f"offmarl.envs.{values.pop('factory')}"
            sizes, info = tuple(values.pop("sizes", ())), replace(_BUILT_IN, **about)
            yield Family(f"{prefix}{name}", factory, info, sizes, fixed=values)


BUILT_IN = (*_read(),)
