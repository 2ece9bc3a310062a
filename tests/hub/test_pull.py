"""Pulls from a working hub, and from a failing one."""

import hashlib
import io
import json
import threading
import time
import zipfile

import pytest
from huggingface_hub import constants

from offmarl import hub as library
from offmarl.errors import (
    CardError,
    ChecksumError,
    HubError,
    HubUnreachableError,
    UnknownNameError,
    VaultFormatError,
)
from offmarl.hub import cache, client, install
from offmarl.hub.card import CARD

from .conftest import NAME, PATH, REPOSITORY, UIDS, make_archive, write_card
from .server import Faults


def content_of(archive: bytes, uid: str) -> dict[str, bytes]:
    with zipfile.ZipFile(io.BytesIO(archive)) as zip_file:
        prefix = f"small.vlt/{uid}/"
        names = [name for name in zip_file.namelist() if name.startswith(prefix)]
        return {name.removeprefix(prefix): zip_file.read(name) for name in names}


def assert_whole(archive, paths):
    for uid, path in paths.items():
        for name, data in content_of(archive, uid).items():
            assert (path / name).read_bytes() == data


def nothing_placed():
    return not any(entry.uids for entry in cache.entries())


def test_all_uids_then_again(hub):
    pulled = library.pull(NAME)
    assert tuple(pulled.paths) == UIDS
    assert_whole(hub.archive, pulled.paths)
    assert set(pulled.checks.values()) == {
        "SHA-256 of the archive, from the hub, as the card has none"
    }
    assert pulled.fetched <= len(hub.archive) + 2**16
    assert library.pull(NAME)[2:5] == (pulled.paths, pulled.checks, 0)
    (entry,) = cache.entries()
    assert entry.path == cache.root() / NAME / pulled.commit / "small.vlt"
    assert cache.verify(entry) == 20


def test_one_uid_moves_less_than_30_percent(hub):
    hub.archive = make_archive(300_000)
    hub.commit(REPOSITORY, {PATH: hub.archive})
    pulled = library.pull(f"{NAME}/Good")
    assert list(pulled.paths) == ["Good"]
    assert_whole(hub.archive, pulled.paths)
    assert pulled.checks == {"Good": "CRC-32 of every file"}
    assert hub.sent == pulled.fetched < 0.3 * len(hub.archive)
    before = pulled.paths["Good"].stat()
    everything = library.pull(NAME)
    assert tuple(everything.paths) == UIDS
    assert pulled.paths["Good"].stat().st_ino == before.st_ino, "what is in use stays"


def test_cut_connections_503s_and_slow_bodies(hub):
    hub.faults = Faults(cut=0.5, unavailable=3, delay=0.001)
    write_card(hub.cards, hashlib.sha256(hub.archive).hexdigest())
    pulled = library.pull(NAME)
    assert_whole(hub.archive, pulled.paths)
    assert set(pulled.checks.values()) == {"SHA-256 of the archive, from the dataset's card"}


def test_a_flipped_bit_is_caught_and_the_next_pull_is_right(hub):
    library.plan(NAME)  # the archive's directory is here
    hub.faults.flip = True
    with pytest.raises(ChecksumError, match="arrived with SHA-256"):
        library.pull(NAME)
    with pytest.raises(VaultFormatError, match="CRC"):
        library.pull(f"{NAME}/Good")
    assert nothing_placed()
    hub.faults.flip = False
    assert_whole(hub.archive, library.pull(NAME).paths)


def test_the_card_outranks_the_hub(hub):
    write_card(hub.cards, "0" * 64)
    with pytest.raises(ChecksumError, match=r"replaced, or the hub at .* To pull it nevertheless"):
        library.pull(NAME)
    commit = hub.repositories[REPOSITORY][0][0]
    assert library.pull(f"{NAME}@{commit}").commit == commit


def test_the_hub_does_not_lie_about_its_hash(hub):
    hub.faults.etag = "1" * 64
    with pytest.raises(ChecksumError, match=r"1{64} was published"):
        library.pull(NAME)
    assert nothing_placed()


@pytest.mark.parametrize(
    "etag", ["../../etc/passwd", "/tmp/escaped", "..", "", "z" * 64, "a\\b", "x" * 300, "\x1b[2J"]
)
def test_hostile_etags_are_no_hashes_and_name_no_files(hub, etag, tmp_path):
    hub.faults.etag = etag
    pulled = library.pull(NAME)
    assert set(pulled.checks.values()) == {"CRC-32 of every file (no hash is published)"}
    (entry,) = cache.entries()
    places = entry.path, cache.root() / NAME / "refs", hub.cards
    files = (path for path in tmp_path.rglob("*") if path.is_file())
    assert not [path for path in files if not {*places} & {*path.parents}]


class Killed(KeyboardInterrupt):
    """A process that ends at once."""


def count_down(calls):
    """Return a function that is killed at a call."""
    ticks = iter(range(calls - 1))

    def tick():
        if next(ticks, None) is None:
            raise Killed

    return tick


def die_in_stream(patch, blocks):
    """Kill the process after some blocks that arrive."""
    stream, received = client.stream, count_down(blocks)

    def dying_stream(*args):
        for block in stream(*args):
            yield block
            received()

    patch.setattr(client, "stream", dying_stream)


@pytest.mark.parametrize("uid", ["", "/Good"])
@pytest.mark.parametrize(("blocks", "files"), [(3, 99), (5, 99), (99, 1), (99, 2)])
def test_what_a_killed_process_left_is_used(hub, monkeypatch, uid, blocks, files):
    extract, unpacked = install.extract, count_down(files)

    def dying_extract(*args):
        extract(*args)
        unpacked()

    with monkeypatch.context() as patch:
        die_in_stream(patch, blocks)
        patch.setattr(install, "extract", dying_extract)
        with pytest.raises(Killed):
            library.pull(NAME + uid)
    assert nothing_placed()
    (entry,) = cache.entries()
    parts = entry.arriving.glob("Good/d/*" if uid else "[0-9a-f]*.part")
    size = sum(path.stat().st_size for path in parts)
    pulled = library.pull(NAME + uid)
    assert_whole(hub.archive, pulled.paths)
    total = 121_000 if uid else len(hub.archive)
    assert pulled.fetched <= total - size + 2**16  # the directory of the archive is read again
    assert [path.name for path in entry.arriving.iterdir()] == [".lock"]


def test_a_pull_that_goes_on_needs_room_for_the_rest_alone(hub, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(Killed):
        die_in_stream(patch, 5)
        library.pull(NAME)
    (part,) = cache.entries()[0].arriving.glob("*.part")
    with zipfile.ZipFile(io.BytesIO(hub.archive)) as archive:
        size = len(hub.archive) + sum(member.file_size for member in archive.infolist())
    usage = type("Usage", (), {"free": size - part.stat().st_size})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    assert_whole(hub.archive, library.pull(NAME).paths)


def test_pinned_revisions(hub):
    first = hub.repositories[REPOSITORY][0][0]
    other = make_archive(1000)
    second = hub.commit(REPOSITORY, {PATH: other})
    assert library.pull(NAME).commit == second
    old = library.pull(f"{NAME}/Good@{first}")
    assert old.commit == first
    assert_whole(hub.archive, old.paths)
    assert len(cache.entries()) == 2


def test_the_directory_of_an_archive_is_fetched_once(hub):
    with zipfile.ZipFile(io.BytesIO(hub.archive)) as archive:
        files = [x for x in archive.infolist() if f"/{UIDS[-1]}/" in x.filename]
        size = archive.start_dir - min(file.header_offset for file in files)
    assert library.pull(f"{NAME}/{UIDS[-1]}").fetched == 2**16 + size == hub.sent


def test_two_at_once_share_the_work(hub):
    hub.faults.delay = 0.005
    results = []
    threads = [
        threading.Thread(target=lambda: results.append(library.pull(NAME))) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(result.fetched > 0 for result in results) == [False, True]
    assert results[0].paths == results[1].paths


def test_another_place(hub, tmp_path):
    pulled = library.pull(f"{NAME}/Good", tmp_path / "vaults")
    assert pulled.paths == {"Good": tmp_path / "vaults" / "small.vlt" / "Good"}
    assert cache.entries() == []
    hub.commit(REPOSITORY, {PATH: make_archive(1000)})
    with pytest.raises(HubError, match="give another --out"):
        library.pull(f"{NAME}/Poor", tmp_path / "vaults")


def test_the_token_is_shown_to_the_hub_alone(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    library.pull(f"{NAME}/Good")
    to_hub = {path.startswith("/datasets") for _, path, h in hub.requests if "hf_secret" in str(h)}
    assert to_hub == {True}
    assert any(not path.startswith("/datasets") for _, path, _ in hub.requests)


def test_plan_fetches_the_directory_alone(hub):
    plan = library.plan(NAME)
    assert tuple(plan.sizes) == UIDS
    assert all(size.unpacked == 120_200 for size in plan.sizes.values())
    assert hub.sent <= 2**16 and plan.free > 0
    assert cache.entries() == []


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("lab/suite/smal", UnknownNameError, "did you mean lab/suite/small"),
        ("nonsense", UnknownNameError, "known: lab/suite/bridge, lab/suite/small"),
        (
            "lab/suite/bridge",
            HubError,
            "lab/suite/bridge is in the catalogue, but not published: record it with `offmarl rec",
        ),
        (f"{NAME}/Goood", UnknownNameError, "no uid named 'Goood': did you mean Good"),
        (f"{NAME}@v9", HubError, "org/published has no revision 'v9'"),
        ("org/nowhere", UnknownNameError, "neither in the catalogue"),
        ("org/published", UnknownNameError, "has no file offmarl.toml"),
        ("a b/c$", UnknownNameError, "cannot be the name of a repository"),
    ],
)
def test_what_does_not_exist(hub, name, error, message):
    with pytest.raises(error, match="(?s)" + message.replace("(", r"\(")):
        library.pull(name)
    assert cache.entries() == []


def hostile(name: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for file in ("a.vlt/x/metadata.json", "a.vlt/x/manifest.ocdbt", name):
            archive.writestr(file, b"0" * 10_000)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("archive", "message"),
    [
        (b"<html>" * 10_000, f"{NAME} is not a zip archive .*nothing was unpacked"),
        (make_archive()[:-100], f"{NAME} is not a zip archive"),
        (hostile("../outside"), "leads out of it"),
        (hostile("/etc/passwd"), "leads out of it"),
        (make_archive(uids=()) + b"", "is not a zip archive|no vault"),
    ],
)
def test_what_is_no_archive_of_vaults(hub, archive, message):
    hub.commit(REPOSITORY, {PATH: archive.ljust(0)})
    with pytest.raises((HubError, VaultFormatError), match=message):
        library.pull(NAME)
    assert nothing_placed()


def test_no_room(hub, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(HubError, match=r"needs .* GB, and .* GB are free"):
        library.pull(NAME)
    assert nothing_placed()


def test_a_disk_that_fills_up(hub, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.truncate", full)
        with pytest.raises(HubError, match=r"the disk of .* is full"):
            library.pull(NAME)
    assert nothing_placed()
    assert_whole(hub.archive, library.pull(NAME).paths)


def test_a_server_that_knows_no_ranges(hub):
    hub.faults.ranges = False
    with pytest.raises(HubError, match="cannot serve parts of this file"):
        library.pull(f"{NAME}/Good")


def test_it_gives_up_and_goes_on(hub, monkeypatch):
    monkeypatch.setattr(client, "_ATTEMPTS", 2)
    hub.faults.unavailable = 100
    with pytest.raises(
        HubError, match=r"failed 3 times in a row: .*503\. The data received is kept"
    ):
        library.pull(NAME)
    hub.faults.unavailable = 0
    assert_whole(hub.archive, library.pull(NAME).paths)


def test_without_a_network_it_is_quick_and_says_what_is_here(hub, monkeypatch):
    library.pull(f"{NAME}/Good")

    def nobody_answers(*_):
        time.sleep(3)
        raise OSError

    monkeypatch.setattr("socket.create_connection", nobody_answers)
    monkeypatch.setattr(client, "_PATIENCE", 0.1)
    start = time.monotonic()
    with pytest.raises(HubUnreachableError, match="`offmarl cache ls`"):
        library.pull(NAME)
    assert time.monotonic() - start < 2.5
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubUnreachableError, match="HF_HUB_OFFLINE"):
        library.pull(NAME)


def test_cache_remove(hub):
    library.pull(f"{NAME}/Good")
    (entry,) = cache.entries()
    assert cache.remove(entry) > 120_000
    assert cache.entries() == [] and list(cache.root().iterdir()) == []


# ------------------------------------------------------------------ cards


def read_card():
    remote = client.find("org/cards", CARD, "main")
    return client.read_text_file(remote, CARD)


def test_the_size_of_a_card_is_bounded_before_and_while_it_arrives(hub, monkeypatch):
    monkeypatch.setattr(client, "LARGEST", 100)
    for size in (101, 20_000):  # so many bytes are on the content network
        hub.commit("org/cards", {CARD: b"#" * size})
        with pytest.raises(HubError, match=f"has {size:,} bytes; at most 100 are read"):
            read_card()
    hub.commit("org/cards", {CARD: b"ab"})
    hub.faults.extra = 10_000_000
    assert read_card() == "ab"


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        (b"\xff\xfe", UnknownNameError, "is not text in UTF-8"),
        (b"x = " + b"[" * 5000, CardError, "nested too deep"),
    ],
)
def test_a_card_that_is_not_text_or_nested_too_deep_is_refused(hub, content, error, message):
    hub.commit("org/cards", {CARD: content})
    with pytest.raises(error, match=message):
        library.pull("org/cards")


@pytest.mark.parametrize("in_cache", [True, False])
def test_a_card_is_kept_once_beside_its_dataset(hub, pushed, tmp_path, monkeypatch, in_cache):
    out = None if in_cache else tmp_path / "out"
    pulled = library.pull("org/made-up", out)
    files = (file for file in tmp_path.rglob("*.*") if file.is_file())
    (record,) = (file for file in files if b"observation_size = " in file.read_bytes())
    assert record == pulled.paths["good"].parent / "pulled.json"

    assert library.pull("org/made-up", out) == pulled._replace(fetched=0)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert library.pull("org/made-up", out) == pulled._replace(fetched=0, asked=False)
    record.write_text(json.dumps(json.loads(record.read_text()) | {"card": "forged"}))
    with pytest.raises(HubUnreachableError, match="`offmarl cache ls` lists the datasets"):
        library.pull("org/made-up", out)
