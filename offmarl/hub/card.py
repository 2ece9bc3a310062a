"""Dataset cards: the catalogue, their TOML files, and the pages made of them for the hub.

The catalogue has a card for each dataset that is published or can be recorded again. A card that is
published with a dataset lists its files and digests, too.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Any

import msgspec
import tomli_w
from msgspec import Meta

from offmarl import records
from offmarl.errors import CardError, unknown_name
from offmarl.hub.licences import Licence
from offmarl.records import Agents, Count
from offmarl.statistics import Reference
from offmarl.types import flatten_tree
from offmarl.vault.format.layout import DATA, MANIFEST, METADATA

SUFFIX = ".toml"
CARD = "offmarl.toml"
"""The card in a repository that `offmarl.hub.push` filled."""

_PART = r"\w[\w .+=-]*"
_PLAIN = re.compile(_PART)
_IN_VAULT = re.compile(rf"{re.escape(METADATA)}|{re.escape(MANIFEST)}|{DATA}/[\w-]+")
"""Paths of the files that a vault consists of."""


@dataclass(frozen=True)
class File:
    """A file in a repository."""

    path: Annotated[str, Meta(max_length=1024, pattern=rf"^{_PART}(/{_PART}){{0,15}}\Z")]
    size: Count
    """Bytes."""
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]


@dataclass(frozen=True)
class TeamReturns:
    """Returns of one team's complete episodes, each the mean over the team's agents."""

    return_mean: float
    return_std: float
    return_min: float
    return_max: float


@dataclass(frozen=True)
class Uid:
    """One vault of a dataset, as its source or its recording describes it."""

    steps: Count | None = None
    episodes: Count | None = None
    return_mean: float | None = None
    """Mean over complete episodes (and agents) of the return."""
    return_std: float | None = None
    return_min: float | None = None
    return_max: float | None = None
    joint_saco: float | None = None
    """Distinct joint state-action pairs per step, in [0, 1]."""
    digest: str | None = None
    """Digest of its logical content; see `offmarl.vault.check.digest`."""
    spread: float | None = None
    """How far methods are apart on it, if that was measured; see `offmarl.benchmark.spread`."""
    origin: str | None = None
    """Where its data comes from, in a sentence or two."""
    files: tuple[File, ...] = ()
    """Its files on the hub, and its index; empty if one archive holds all uids."""
    incomplete: Count | None = None
    """Number of episodes that the environment did not end; None for none."""
    teams: Mapping[str, TeamReturns] = field(default_factory=dict)
    """Returns by team, instead of the above, where agents are in several teams."""


@dataclass(frozen=True)
class Hub:
    """Where a dataset is published."""

    repository: str
    """Such as "InstaDeepAI/og-marl"."""
    path: str | None = None
    """Path of the zip archive of all uids in the repository."""
    revision: str = "main"
    """The revision that size and sha256 describe."""
    size: Count | None = None
    sha256: str | None = None


@dataclass(frozen=True)
class CardRecipe:
    """How one of offmarl's own datasets is recorded again."""

    command: str
    seed: Count
    versions: Mapping[str, str]
    """Versions of the packages it was recorded with."""
    random: float
    """Mean return of uniform legal actions."""
    expert: float
    """Mean return of the best checkpoint."""
    env: str | None = None
    """The environment, if its name is not the end of the dataset's name."""


@dataclass(frozen=True)
class Card:
    """What is known of a dataset before it is downloaded.

    ``name`` is ``source/environment/scenario``; ``action`` is ``{"discrete": 9}`` or
    ``{"continuous": 3}``; ``leaves`` are the arrays of observations, states and extras, as in
    ``{"observations.image": "uint8 (2, 84, 84, 3)"}``, if they are not all vectors; ``time_limit``
    is the number of steps after which the environment truncated episodes, if known.
    """

    name: str
    summary: str
    num_agents: Agents
    citation: str
    licence: Licence
    uids: Mapping[str, Uid] = field(default_factory=dict)
    action: Mapping[str, Count] | None = None
    observation_size: Count | None = None
    state_size: Count | None = None
    leaves: Mapping[str, str] | None = None
    time_limit: Annotated[int, Meta(ge=1, le=2**53)] | None = None
    quirks: tuple[str, ...] = ()
    hub: Hub | None = None
    recipe: CardRecipe | None = None

    @property
    def source(self) -> str:
        """The project that made it, such as "og_marl"."""
        return self.name.split("/")[0]

    @property
    def environment(self) -> str:
        """The suite it was recorded in, such as "smac_v1"."""
        return self.name.split("/")[-2]

    @property
    def scenario(self) -> str:
        """The scenario in the suite, such as "3m"."""
        return self.name.split("/")[-1]

    def place_of(self, uid: str) -> str:
        """Return the directory of a published vault in its repository."""
        return f"{self.scenario}.vlt/{uid}"

    def files_of(self, uid: str) -> tuple[dict[str, File], File]:
        """Return the files of a published vault by their paths in its directory, and its index."""
        files = {file.path: file for file in self.uids[uid].files}
        index = files.pop(index_of(uid), None)
        root = f"{self.place_of(uid)}/"
        inside = {path.removeprefix(root): file for path, file in files.items()}
        wrong = [
            path
            for path in files
            if not (path.startswith(root) and _IN_VAULT.fullmatch(path.removeprefix(root)))
        ]
        if wrong or index is None or not {METADATA, MANIFEST} <= inside.keys():
            raise CardError(
                f"the card of {self.name} does not list the files of {uid} as `offmarl push` "
                f"publishes a vault{f' ({wrong[0]!r:.80})' if wrong else ''}: push it again."
            )
        return inside, index


def index_of(uid: str) -> str:
    """Return the path of a published vault's index in its repository."""
    return f"index/{uid}.json.gz"


# ---------------------------------------------------------------------------------- catalogue


def directory() -> Path:
    """Return the directory of the cards: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).parents[1]
    places = (package / "datasets", package.parent / "datasets")
    return next((place for place in places if place.is_dir()), places[0])


@cache
def names() -> tuple[str, ...]:
    """Return the names of all datasets in the catalogue, sorted."""
    root = directory()
    paths = (path.relative_to(root).with_suffix("") for path in root.rglob(f"*{SUFFIX}"))
    return tuple(sorted(path.as_posix() for path in paths))


def cards(start: str = "", env: str | None = None, agents: int | None = None) -> Iterator[Card]:
    """Load the cards of the catalogue, sorted by name: all, or of names that begin with ``start``.

    ``env`` names a suite, or a scenario in it.
    """
    for card in map(load, (name for name in names() if name.startswith(start))):
        scenario = f"{card.environment}/{card.scenario}"
        if env in (None, card.environment, scenario) and agents in (None, card.num_agents):
            yield card


def load(name: str) -> Card:
    """Load a card of the catalogue."""
    if name not in names():
        raise unknown_name("dataset", name, names(), see="offmarl ls --remote")
    path = directory() / f"{name}{SUFFIX}"
    return parse(path.read_text(encoding="utf-8"), str(path))


def references() -> dict[str, Reference]:
    """Return the mean returns of random and of expert play, by environment.

    They come from the recipes of datasets that can be recorded again. Scores are normalised by
    these values only.
    """
    return {
        card.recipe.env or f"{card.environment}/{card.scenario}": Reference(
            card.recipe.random, card.recipe.expert
        )
        for card in cards()
        if card.recipe
    }


# ---------------------------------------------------------------------------------- reading


def parse(text: str, where: str) -> Card:
    """Parse and check a card."""
    data = records.parse_toml(text, where, CardError)
    card: Card = records.as_type(data, Card, where, CardError)
    fields = flatten_tree(msgspec.to_builtins(card))
    if unknown := ", ".join(flatten_tree(data).keys() - fields.keys()):
        raise CardError(f"{where} has unknown {unknown:.80}: datasets/README.md lists the fields.")
    return check(card, where)


def check(card: Card, where: str) -> Card:
    """Return a card if its names and files are safe to use in paths; `CardError` otherwise."""
    if card.name.count("/") != 2:
        raise CardError(f"{where}: name must be source/environment/scenario, not {card.name!r}.")
    for name in (*card.name.split("/"), *card.uids):
        if not _PLAIN.fullmatch(name):
            raise CardError(f"{where}: {name!r} cannot be the name of a dataset or a uid.")
    for uid, vault in card.uids.items():
        check_files(vault.files, where)
        if vault.files:
            card.files_of(uid)
    return card


def check_files(files: Sequence[File], where: str) -> None:
    """Raise `CardError` unless the paths of files can be in one directory."""
    paths = [PurePosixPath(file.path) for file in files]
    if len({*paths}) < len(paths) or {*paths} & {x for path in paths for x in path.parents}:
        raise CardError(f"{where}: a file is there twice, or is a directory of another.")


def to_toml(card: Card) -> str:
    """Return a card as TOML, which `parse` reads."""
    return tomli_w.dumps(_filled(dataclasses.asdict(card)))


def _filled(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a card that have a value, values before tables."""
    values = {key: value for key, value in data.items() if value not in (None, (), {})}
    return {k: _filled(value) if isinstance(value, dict) else value for k, value in values.items()}
