"""Small files: bounded, kept under names of our own, and there again without a network."""

import pytest
from huggingface_hub import constants

from offmarl import hub as library
from offmarl.errors import CardError, HubError, HubUnreachableError
from offmarl.hub import cache, client, fetch, small
from offmarl.hub.pull import CARD
from offmarl.hub.small import small_file

REPOSITORY = "org/cards"
TEXT = 'name = "org/env/ä"\n'


@pytest.fixture
def commit(hub):
    return hub.commit(REPOSITORY, {CARD: TEXT.encode()})


def files_in(path):
    return {file for file in path.rglob("*") if file.is_file()}


HOSTILE = [
    "../../../../escaped",
    "/tmp/offmarl-escaped",
    "..",
    "a\\..\\b",
    "",
    "x" * 300,
    "\x1b[2J",
]


@pytest.mark.parametrize("etag", HOSTILE)
def test_nothing_that_a_server_sends_names_a_file(hub, commit, etag, tmp_path):
    hub.faults.etag = etag
    cards = cache.root().parent / "cards"
    before = files_in(tmp_path)
    assert small_file(REPOSITORY, CARD, "main") == (commit, TEXT, True)
    (written,) = files_in(tmp_path) - before
    assert written == small._place(REPOSITORY, CARD, commit) and written.parent == cards


def test_the_size_is_bounded_before_and_while_it_arrives(hub, monkeypatch):
    monkeypatch.setattr(small, "LARGEST", 100)
    hub.commit(REPOSITORY, {CARD: b"#" * 101})
    with pytest.raises(HubError, match="has 101 bytes, and at most 100 are read"):
        small_file(REPOSITORY, CARD, "main")
    hub.commit(REPOSITORY, {CARD: b"#" * 20_000})  # large enough to lie on the content network
    with pytest.raises(HubError, match="has 20,000 bytes"):
        small_file(REPOSITORY, CARD, "main")
    hub.commit(REPOSITORY, {CARD: b"ab"})
    hub.faults.extra = 10_000_000
    assert small_file(REPOSITORY, CARD, "main").text == "ab"


def test_busy_servers_are_asked_again_and_what_is_here_is_not(hub, commit, monkeypatch):
    monkeypatch.setattr(fetch, "_ATTEMPTS", 3)
    hub.faults.unavailable = 3
    assert small_file(REPOSITORY, CARD, "main").text == TEXT
    gets = [path for method, path, _ in hub.requests if method == "GET"]
    assert small_file(REPOSITORY, CARD, "main").text == TEXT
    assert [path for method, path, _ in hub.requests if method == "GET"] == gets


@pytest.mark.parametrize("offline", [True, False])
def test_what_was_fetched_is_there_without_a_hub(hub, commit, monkeypatch, offline):
    found = small_file(REPOSITORY, CARD, "main")
    cache.remember(REPOSITORY, "main", commit)
    if offline:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    else:
        monkeypatch.setattr(client, "problems", lambda: {hub.url: "no answer"})
    kept = found._replace(asked=False)
    assert small_file(REPOSITORY, CARD, "main") == kept == small_file(REPOSITORY, CARD, commit)
    for repository, revision in ((REPOSITORY, "other"), ("org/else", "main")):
        with pytest.raises(HubUnreachableError):
            small_file(repository, CARD, revision)
    small._place(REPOSITORY, CARD, commit).write_text('{"text": "forged"}')
    with pytest.raises(HubUnreachableError):
        small_file(REPOSITORY, CARD, "main")


def test_the_token_goes_to_the_hub_alone(hub, commit, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    small_file(REPOSITORY, CARD, "main")
    shown = [path for _, path, headers in hub.requests if "hf_secret" in str(headers)]
    assert shown and all(path.startswith("/datasets/") for path in shown)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv(client.MIRRORS, hub.url)
    hub.requests.clear()
    hub.commit(REPOSITORY, {CARD: b"another"})
    assert small_file(REPOSITORY, CARD, "main").text == "another"
    assert hub.requests and not any("hf_secret" in str(headers) for *_, headers in hub.requests)


def test_what_is_not_text_or_nested_too_deep_is_refused(hub):
    hub.commit(REPOSITORY, {CARD: b"\xff\xfe"})
    with pytest.raises(HubError, match="is not text in UTF-8"):
        small_file(REPOSITORY, CARD, "main")
    hub.commit(REPOSITORY, {CARD: b"x = " + b"[" * 5000})
    with pytest.raises(CardError, match="nested too deep"):
        library.pull(REPOSITORY)
