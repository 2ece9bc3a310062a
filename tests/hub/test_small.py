"""Text files of a repository are limited and checked; a card is stored once, with the data."""

import json

import pytest
from huggingface_hub import constants

from offmarl import hub as library
from offmarl import vault
from offmarl.errors import CardError, HubError, HubUnreachableError
from offmarl.hub import cache, client
from offmarl.hub.card import CARD
from tests.vault.experience import SPEC, make

REPOSITORY = "org/cards"
TEXT = 'name = "org/env/ä"\n'


def read(hub_file=CARD):
    return client.read_text_file(client.find(REPOSITORY, hub_file, "main"), hub_file)


@pytest.fixture
def commit(hub):
    return hub.commit(REPOSITORY, {CARD: TEXT.encode()})


def files_in(path):
    return {file for file in path.rglob("*") if file.is_file()}


def test_the_size_is_bounded_before_and_while_it_arrives(hub, monkeypatch):
    monkeypatch.setattr(client, "LARGEST", 100)
    hub.commit(REPOSITORY, {CARD: b"#" * 101})
    with pytest.raises(HubError, match="has 101 bytes; at most 100 are read"):
        read()
    hub.commit(REPOSITORY, {CARD: b"#" * 20_000})  # large enough to lie on the content network
    with pytest.raises(HubError, match="has 20,000 bytes"):
        read()
    hub.commit(REPOSITORY, {CARD: b"ab"})
    hub.faults.extra = 10_000_000
    assert read() == "ab"


def test_what_is_not_text_or_nested_too_deep_is_refused(hub):
    hub.commit(REPOSITORY, {CARD: b"\xff\xfe"})
    with pytest.raises(HubError, match="is not text in UTF-8"):
        read()
    hub.commit(REPOSITORY, {CARD: b"x = " + b"[" * 5000})
    with pytest.raises(CardError, match="nested too deep"):
        library.pull(REPOSITORY)


@pytest.mark.parametrize("in_cache", [True, False])
def test_a_card_is_kept_once_beside_its_dataset(hub, tmp_path, monkeypatch, in_cache):
    with vault.create(tmp_path / "v.vlt" / "a", SPEC, rows=2) as writer:
        writer.append(*make(steps=40))
    library.push([tmp_path / "v.vlt" / "a"], REPOSITORY, "CC0-1.0")
    out = None if in_cache else tmp_path / "out"
    before = files_in(tmp_path)
    pulled = library.pull(REPOSITORY, out)
    texts = {file for file in files_in(tmp_path) - before if pulled.card.citation in read_all(file)}
    (record,) = {file for file in texts if "num_agents = " in read_all(file)}
    assert record == pulled.paths["a"].parent / "pulled.json"

    hub.requests.clear()
    again = library.pull(REPOSITORY, out)
    assert again == pulled._replace(fetched=0)
    assert not [path for method, path, _ in hub.requests if method == "GET" and CARD in path]

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert library.pull(REPOSITORY, out) == pulled._replace(fetched=0, asked=False)
    content = json.loads(record.read_text())
    record.write_text(json.dumps(content | {"card": "forged"}))
    with pytest.raises(HubUnreachableError, match="Pulled before" if in_cache else "Nothing"):
        library.pull(REPOSITORY, out)
    assert cache.kept_card(cache.parse(REPOSITORY), pulled.commit, out) is None


def read_all(file):
    return file.read_bytes().decode(errors="replace")
