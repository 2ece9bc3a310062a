"""A loopback hub with a small published dataset, and a catalogue that lists it."""

import io
import zipfile
from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants

from offmarl import vault
from offmarl.hub import card as catalogue
from offmarl.hub import client
from offmarl.types import EnvSpec
from tests.cli.conftest import offmarl  # noqa: F401  (a fixture)
from tests.vault.experience import SPEC, make

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


def write_card(
    directory: Path,
    sha256: str | None = None,
    name: str = NAME,
    path: str = PATH,
    uids: tuple[str, ...] = UIDS,
):
    listed = "\n".join(f"[uids.{uid}]" for uid in uids)
    line = f'sha256 = "{sha256}"' if sha256 else ""
    file = directory / f"{name}.toml"
    file.parent.mkdir(parents=True, exist_ok=True)
    text = CARD.format(name=name, repository=REPOSITORY, path=path, sha256=line, uids=listed)
    file.write_text(text)
    catalogue.names.cache_clear()


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """The hub, and nothing pulled from it yet."""
    hub = Hub()
    hub.archive = make_archive()
    hub.commit(REPOSITORY, {PATH: hub.archive})
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, hub.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_ASSETS_CACHE", str(tmp_path / "home" / "assets"))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(client, "_PAUSE", 0.0001)
    hub.cards = tmp_path / "cards"
    monkeypatch.setattr(catalogue, "directory", lambda: hub.cards)
    write_card(hub.cards)
    (hub.cards / "lab" / "suite" / "bridge.toml").write_text(RECORDED)
    yield hub
    hub.close()
    catalogue.names.cache_clear()


def record(path: Path, seed: int = 0, spec: EnvSpec = SPEC) -> Path:
    """A vault of offmarl's, of two rows."""
    with vault.create(path, spec, rows=2, chunk_steps=64) as writer:
        writer.append(*make(spec, rows=2, steps=128, seed=seed))
    return path


@pytest.fixture
def vaults(tmp_path):
    return [record(tmp_path / "made-up.vlt" / uid, i) for i, uid in enumerate(("good", "poor"))]
