"""A loopback hub with a small published dataset, and a catalogue that lists it."""

import io
import shutil
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants

from offmarl import hub as library
from offmarl.hub import card as catalogue
from offmarl.hub import client
from offmarl.types import EnvSpec
from tests.cli.conftest import offmarl  # noqa: F401  (a fixture)
from tests.vault.experience import SPEC, recorded

from .server import Hub

REPOSITORY = "org/published"
PATH = "core/suite/small.zip"
NAME = "lab/suite/small"
UIDS = ("Expert", "Good", "Medium", "Poor", "Random")

CARD = """
name = "{name}"
summary = "Made up."
num_agents = 2
citation = "nobody"
quirks = ["Made of nothing."]
[licence]
data = "CC0-1.0"
[hub]
repository = "{repository}"
path = "{path}"
{sha256}
{uids}
"""

RECORDED = """
name = "lab/suite/bridge"
summary = "To be recorded."
num_agents = 2
citation = "nobody"
licence = { data = "MIT" }
[recipe]
command = "offmarl record mappo"
seed = 0
versions = {}
random = 0
expert = 1
"""


def make_archive(size: int = 60_000, uids: tuple[str, ...] = UIDS) -> bytes:
    """A zip of what looks like vaults from outside, of random bytes."""
    rng = np.random.default_rng(0)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for uid in uids:
            for name in ("metadata.json", "manifest.ocdbt", "d/0", "d/1"):
                data = rng.bytes(size if name.startswith("d/") else 100)
                archive.writestr(f"small.vlt/{uid}/{name}", data)
    return buffer.getvalue()


def zipped(directory: Path) -> bytes:
    """Return a zip of the files below a directory."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted(path for path in directory.rglob("*") if path.is_file()):
            archive.write(file, file.relative_to(directory))
    return buffer.getvalue()


def write_card(
    directory: Path, sha256: str | None = None, name: str = NAME, uids: tuple[str, ...] = UIDS
):
    sections = "\n".join(f"[uids.{uid}]" for uid in uids)
    line = f'sha256 = "{sha256}"' if sha256 else ""
    file = directory / f"{name}.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    text = CARD.format(name=name, repository=REPOSITORY, path=PATH, sha256=line, uids=sections)
    file.write_text(text)
    catalogue.names.cache_clear()


@contextmanager
def serving(directory: Path) -> Iterator[Hub]:
    """A hub for the block, and nothing pulled from it yet."""
    hub = Hub()
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HF_ASSETS_CACHE", str(directory / "home" / "assets"))
        patch.setattr(constants, "HF_HUB_CACHE", str(directory / "home" / "hub"))
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(client, "_PAUSE", 0.0001)
        yield hub
    hub.close()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The hub with an archive, and a catalogue that lists it."""
    with serving(tmp_path) as hub:
        hub.archive = make_archive()
        hub.commit(REPOSITORY, {PATH: hub.archive})
        hub.cards = tmp_path / "cards"
        monkeypatch.setattr(catalogue, "directory", lambda: hub.cards)
        write_card(hub.cards)
        (hub.cards / "lab" / "suite" / "bridge.toml").write_text(RECORDED)
        yield hub
    catalogue.names.cache_clear()


def record(path: Path, seed: int = 0, spec: EnvSpec = SPEC) -> Path:
    """A vault of offmarl's, of two rows."""
    return recorded(path, spec, steps=128, seed=seed, chunk_steps=64).path


@pytest.fixture(scope="session")
def pushed_once(tmp_path_factory):
    """Two vaults that no test changes, and the commits of their repository."""
    directory = tmp_path_factory.mktemp("pushed")
    paths = [record(directory / "made-up.vlt" / uid, i) for i, uid in enumerate(("good", "poor"))]
    with serving(directory) as hub:
        library.push(paths, "org/made-up", "CC-BY-4.0")
        return paths, hub.repositories["org/made-up"]


@pytest.fixture
def vaults(pushed_once, tmp_path):
    """Copies of these vaults, which the test may change."""
    copies = shutil.copytree(pushed_once[0][0].parent, tmp_path / "made-up.vlt")
    return [copies / uid for uid in ("good", "poor")]


@pytest.fixture
def pushed(hub, pushed_once):
    """The same two vaults on the hub, as org/made-up."""
    paths, commits = pushed_once
    hub.repositories["org/made-up"] = [(name, {**files}) for name, files in commits]
    return paths


def card_of(hub, repository="org/made-up"):
    """The card in a repository."""
    text = hub.files(repository, "main")[1]["offmarl.toml"].decode()
    return catalogue.parse(text, "the card")
