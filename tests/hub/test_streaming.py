"""Published data that is read without a download."""

import dataclasses
import gzip
import hashlib
import json
import os
import threading
import time
from operator import itemgetter

import chex
import jax
import numpy as np
import pytest

import offmarl
from offmarl import hub as library
from offmarl import programs, tracking, vault
from offmarl._ahead import in_thread
from offmarl.cli import hub as commands
from offmarl.errors import (
    HubChecksumError,
    HubError,
    OptionError,
    VaultError,
    VaultNotFoundError,
)
from offmarl.hub import card as catalogue
from offmarl.hub import client, pages
from offmarl.paths import STREAM_CACHE
from offmarl.replay import host
from offmarl.vault.check.digest import digest
from tests.vault.experience import assert_each_step_equally_often

from . import server
from .conftest import card_of, record

ADDRESS = "hf://org/made-up/good"


def forget():
    """Forget the pages in memory, as another process would."""
    pages.page_cache().forget()


def test_it_is_the_vault_that_was_pushed(hub, pushed, tmp_path):
    remote, local = offmarl.open(ADDRESS), vault.open_vault(pushed[0])
    assert (remote.spec, remote.length, remote.uid) == (local.spec, local.length, "good")
    assert digest(remote) == local.digest() == remote.digest()
    assert len(remote.episodes.row) == len(local.episodes.row)
    assert remote.statistics()["reward"].mean == pytest.approx(local.statistics()["reward"].mean)
    assert not vault.verify(ADDRESS, deep=True).faults
    copies = [vault.cat([x], tmp_path / f"{i}.vlt") for i, x in enumerate((remote, local))]
    assert copies[0].digest() == copies[1].digest()
    with pytest.raises(VaultError, match="cannot be written to"):
        vault.resume(ADDRESS)


@pytest.mark.parametrize(
    "address",
    ["hf://org/made-up@main/good", "hf://datasets/org/made-up/good", "hf:/org/made-up/good"],
)
def test_how_addresses_are_written(hub, pushed, address):
    assert offmarl.open(address).length == 128


def test_addresses_that_name_nothing(hub, pushed):
    with pytest.raises(VaultError, match="holds several vaults: add one of good, poor"):
        offmarl.open("hf://org/made-up")
    with pytest.raises(VaultNotFoundError, match="no uid named 'god': did you mean good"):
        offmarl.open("hf://org/made-up/god")
    with pytest.raises(VaultError, match="not the address of a dataset"):
        offmarl.open("hf://org")
    with pytest.raises(HubError, match="no repository org/other exists"):
        offmarl.open("hf://org/other/good")


def read_tables(dataset):
    """Read all that a stream needs besides chunks, of which those that were read stay in memory."""
    _ = dataset.episodes, dataset.finals, dataset.chunk_shape


def batches(dataset, **options):
    with dataset.stream(8, 5, to="numpy", **options) as stream:
        return [*stream]


def test_each_step_is_drawn_equally_often(hub, pushed):
    local = vault.open_vault(pushed[0])
    assert_each_step_equally_often(offmarl.open(ADDRESS), local, epochs=2, seed=3)


def windows_in(dataset):
    """Yield the windows of one pass that are in one episode, by its number and their time."""
    for batch in batches(dataset, epochs=1):
        for i, (first, last) in enumerate(batch.episode[:, [0, -1]].tolist()):
            if first == last:
                yield (first, int(batch.time[i, 0])), jax.tree.map(lambda leaf, i=i: leaf[i], batch)


def test_windows_are_those_of_the_local_data(hub, pushed):
    """Each window equals the one that local data has from the same episode and time."""
    remote, local = offmarl.open(ADDRESS), vault.open_vault(pushed[0])
    expected, result = (sorted(windows_in(x), key=itemgetter(0)) for x in (local, remote))
    chex.assert_trees_all_equal(result, expected)
    assert len(result) > 50


@pytest.mark.slow
def test_a_stream_goes_on_with_the_same_bits(hub, pushed):
    remote = offmarl.open(ADDRESS)
    with remote.stream(8, 5, to="numpy", seed=1) as stream:
        expected = [next(stream) for _ in range(90)]  # more than two passes
    with remote.stream(8, 5, to="numpy", seed=1) as stream:
        for _ in range(37):
            next(stream)
        state = json.loads(json.dumps(stream.state()))
    with remote.stream(8, 5, to="numpy", **state) as stream:
        for batch in expected[37:]:
            chex.assert_trees_all_equal(next(stream), batch)
    first = jax.tree.map(np.asarray, next(remote.stream(8, 5, seed=1)))
    chex.assert_trees_all_equal(first, expected[0])


def test_weights_need_the_data_here(hub, pushed):
    with pytest.raises(OptionError, match=r"equally likely: to draw .*, pull it first"):
        offmarl.open(ADDRESS).stream(8, 5, weights="return")
    with pytest.raises(OptionError, match=r"the longest episode .* give a larger buffer"):
        offmarl.open(ADDRESS).stream(8, 5, shuffle_buffer=100)


def test_cut_connections_and_damage_on_the_disk(hub, pushed, monkeypatch):
    hub.faults.cut = 0.5
    remote = offmarl.open(ADDRESS)
    expected = batches(vault.open_vault(pushed[0]), epochs=1, shuffle_buffer=2**26)
    chex.assert_trees_all_equal(batches(remote, epochs=1), expected)
    hub.faults.cut = 0.0
    forget()
    for page in pages.page_cache().root.glob("*/*.0"):
        data = bytearray(page.read_bytes())
        data[len(data) // 2] ^= 1
        page.write_bytes(data)
    result = batches(offmarl.open(ADDRESS), epochs=1)
    chex.assert_trees_all_equal(result, expected)


def test_damage_on_the_way_is_never_returned(hub, pushed):
    remote = offmarl.open(ADDRESS)
    pages.page_cache().clear()
    hub.faults.flip = True
    with pytest.raises(HubChecksumError, match="3 times with a wrong checksum"):
        remote[:]
    hub.faults.flip = False
    assert remote[:].reward.shape[1] == remote.length


@pytest.mark.parametrize("mine", [True, False])
def test_the_second_reader_needs_no_network(hub, pushed, monkeypatch, mine):
    first = digest(offmarl.open(ADDRESS))
    forget()
    if not mine:  # pages of another user, whose times cannot be changed
        monkeypatch.setattr(os, "utime", refuse)
    sent = hub.sent
    assert digest(offmarl.open(ADDRESS)) == first and hub.sent == sent


def test_the_cache_is_bounded(monkeypatch, tmp_path):
    monkeypatch.setenv(STREAM_CACHE, "1e-5")  # 10 kB
    cache = pages.PageCache(tmp_path / "pages")
    for number in range(50):
        cache.put(f"ab{number}", bytes(1000))
        assert cache.size <= 10_000
    cache.forget()
    assert cache.get("ab0") is None and cache.get("ab49") == bytes(1000)
    assert cache.clear() and cache.size == 0
    for wrong in ("little", "-1", "inf", "nan"):
        monkeypatch.setenv(STREAM_CACHE, wrong)
        with pytest.raises(OptionError, match=f"_CACHE_GB is a size in GB.* not '{wrong}'"):
            pages.limit_bytes()


def test_a_file_that_is_missing(hub, pushed):
    remote = offmarl.open(ADDRESS)
    read_tables(remote)
    pages.page_cache().clear()
    for name in data_files(hub):
        del hub.repositories["org/made-up"][-1][1][name]
    with pytest.raises(HubError, match=r"good/d/\w+ is missing on the hub \(404\)"):
        batches(remote, epochs=1)


def data_files(hub):
    files = hub.files("org/made-up", "main")[1]
    return {name: data for name, data in files.items() if name.startswith("made-up.vlt/good/d/")}


def test_a_token_without_rights(hub, pushed, monkeypatch):
    hub.tokens["org/made-up"] = {"good-token"}
    monkeypatch.setenv("HF_TOKEN", "good-token")
    remote = offmarl.open(ADDRESS)
    read_tables(remote)
    assert len(batches(offmarl.open(ADDRESS), epochs=1)) > 0
    forget()
    pages.page_cache().clear()
    monkeypatch.setenv("HF_TOKEN", "other")
    with pytest.raises(HubError, match="no repository org/made-up exists, or it is private"):
        offmarl.open(ADDRESS)
    with pytest.raises(HubError, match=r"refuses access to .* \(401\): log in"):
        batches(remote, epochs=1)


def test_a_hub_that_goes_away_names_what_is_kept(hub, pushed, monkeypatch):
    remote = offmarl.open(ADDRESS)
    read_tables(remote)
    pages.page_cache().clear()
    monkeypatch.setattr(client, "_ATTEMPTS", 2)
    hub.faults.cut = 1.0
    hub.faults.dice = type("Dice", (), {"random": lambda self: 0.0})()
    with pytest.raises(HubError, match=r"failed 3 times in a row.*data received is kept"):
        batches(remote, epochs=1)
    hub.faults.cut = 0.0
    assert len(batches(remote, epochs=1)) > 0


def test_the_command_line_measures_and_empties_the_cache(hub, pushed):
    digest(offmarl.open(ADDRESS))
    size = commands.cache("ls").data["streamed"]
    assert size > 40_000
    with pytest.raises(OptionError, match="--streamed is for `offmarl cache rm`"):
        commands.cache("ls", streamed=True)
    assert commands.cache("rm", streamed=True).data == {"freed": size}
    assert commands.cache("ls").data["streamed"] == 0


def test_a_repository_cannot_replace_the_pages_of_another(hub, pushed, tmp_path):
    """A card can claim the SHA-256 of another repository's files, which streams do not compute."""
    library.push([record(tmp_path / "other.vlt" / "good", seed=5)], "org/hostile", "CC-BY-4.0")
    card, theirs = card_of(hub, "org/hostile"), card_of(hub, "org/made-up").files_of("good")[0]
    data = [file.sha256 for path, file in theirs.items() if path.startswith("d/")]
    files = [
        dataclasses.replace(file, sha256=data.pop()) if "/d/" in file.path and data else file
        for file in card.uids["good"].files
    ]
    uid = dataclasses.replace(card.uids["good"], files=tuple(files))
    publish(hub, "org/hostile", dataclasses.replace(card, uids={"good": uid}))
    hostile = offmarl.open("hf://org/hostile/good")[:]
    forget()
    local = vault.open_vault(pushed[0])[:]
    assert (hostile.reward != local.reward).any()
    np.testing.assert_array_equal(offmarl.open(ADDRESS)[:].reward, local.reward)


def publish(hub, repository, card):
    """Replace the card of a repository."""
    hub.commit(repository, {"offmarl.toml": catalogue.to_toml(card).encode()})


@pytest.fixture
def index(hub, pushed):
    """The content of the index of a published vault."""
    return json.loads(gzip.decompress(hub.files("org/made-up", "main")[1][INDEX]))


def follow(index, distance):
    """Let a value begin so many bytes behind the beginning of the one before it in its file."""
    file, offset = index["file"], index["offset"]
    second = next(i for i in range(1, len(file)) if file[i] == file[i - 1])
    offset[second] = offset[second - 1] + distance


INDEX = "index/good.json.gz"
FORGED = {
    "another file": (lambda x: x["files"].__setitem__(0, "d/../../x"), "card does not list"),
    "no such file": (lambda x: x["file"].__setitem__(0, 7), "index of a vault"),
    "before the file": (lambda x: x["offset"].__setitem__(0, -1), "index of a vault"),
    "behind the file": (lambda x: x["offset"].__setitem__(0, 2**40), "outside of its file"),
    "very long": (lambda x: x["length"].__setitem__(0, 2**53), "outside of its file"),
    "no number": (lambda x: x["length"].__setitem__(0, 2**70), "index of a vault"),
    "a text": (lambda x: x["length"].__setitem__(0, "1"), "index of a vault"),
    "inside another": (lambda x: follow(x, 1), "inside another"),
    "the same place": (lambda x: follow(x, 0), "inside another"),
    "a file twice": (lambda x: x["files"].append(x["files"][0]), "a file is there twice"),
    "a key twice": (lambda x: x["keys"].__setitem__(0, x["keys"][1]), "a key is there twice"),
    "a short column": (lambda x: x["crc32c"].pop(), "different lengths"),
    "an unknown column": (lambda x: x.__setitem__("code", "x"), "index of a vault"),
}


@pytest.mark.parametrize("change", FORGED)
def test_an_index_that_is_forged(hub, index, change):
    """Its SHA-256 in the card is right, as the owner of a repository can make it."""
    forge, message = FORGED[change]
    forge(index)
    publish_index(hub, gzip.compress(json.dumps(index).encode()))
    with pytest.raises(HubError, match=message):
        offmarl.open(ADDRESS)


@pytest.mark.parametrize(
    "data",
    [b"{}", b"\x1f\x8b", gzip.compress(b"[1]"), gzip.compress(b"#")],
    ids=["not zipped", "cut", "a list", "no JSON"],
)
def test_what_is_no_index(hub, pushed, data):
    publish_index(hub, data)
    with pytest.raises(HubError, match="is not the index of a vault"):
        offmarl.open(ADDRESS)


def test_an_index_that_inflates_too_far(hub, index, monkeypatch):
    publish_index(hub, gzip.compress(json.dumps(index | {"crc32c": [0] * 10**6}).encode()))
    with pytest.raises(HubError, match="it has more than 1,048,576 bytes"):
        offmarl.open(ADDRESS)
    monkeypatch.setattr("offmarl.hub.index._MOST", 1000)
    with pytest.raises(HubError, match="more than 1,000 bytes"):
        offmarl.open(ADDRESS)


def test_values_that_are_not_those_of_the_index(hub, index):
    index["crc32c"] = [number ^ 1 for number in index["crc32c"]]
    publish_index(hub, gzip.compress(json.dumps(index).encode()))
    with pytest.raises(HubChecksumError, match="3 times with a wrong checksum"):
        offmarl.open(ADDRESS)[:]


def publish_index(hub, data):
    """Replace the index of a published vault, and its size and hash in the card."""
    card = card_of(hub, "org/made-up")
    file = catalogue.File(INDEX, len(data), hashlib.sha256(data).hexdigest())
    good = card.uids["good"]
    files = tuple(file if entry.path == INDEX else entry for entry in good.files)
    uids = {**card.uids, "good": dataclasses.replace(good, files=files)}
    hub.commit("org/made-up", {INDEX: data})
    publish(hub, "org/made-up", dataclasses.replace(card, uids=uids))


def test_an_index_of_another_push(hub, pushed):
    hub.commit("org/made-up", {INDEX: hub.files("org/made-up", "main")[1]["index/poor.json.gz"]})
    with pytest.raises(HubError, match=r"wrong checksum|cannot serve parts"):
        offmarl.open(ADDRESS)


@pytest.mark.slow
def test_large_reads_are_in_parts_each_fetched_once(hub, pushed, monkeypatch):
    """Also without a cache, and with memory for fewer pages than are read."""
    expected, length = vault.open_vault(pushed[0])[:], 0
    monkeypatch.setattr(pages, "PAGE", 1_000)
    monkeypatch.setattr(pages, "_MEMORY_PAGES", 32)
    monkeypatch.setattr(server, "LARGE", 1)  # small files are sent as a whole
    monkeypatch.setenv(STREAM_CACHE, "0")
    library.push(pushed[:1], "org/paged", "CC-BY-4.0")
    remote = offmarl.open("hf://org/paged/good")
    hub.sent = 0
    chex.assert_trees_all_equal(remote[:], expected)
    (uid,) = card_of(hub, "org/paged").uids.values()
    size = sum(file.size for file in uid.files)
    assert size / 2 < hub.sent < 1.5 * size
    chex.assert_trees_all_equal(remote[3:100], vault.open_vault(pushed[0])[3:100])
    assert remote.read(5, 5)["rewards"].shape[1] == length


def test_pages_in_flight_are_not_fetched_again(hub, monkeypatch):
    answer, asked = threading.Event(), []

    def stream(remote, start, stop):
        asked.append((start, stop))
        assert answer.wait(60)
        yield bytes(stop - start)

    monkeypatch.setattr(client, "stream", stream)
    size = 3 * pages.PAGE
    file = pages.Pages(client.Remote("https://hub/file", "a" * 40, size, "b" * 64), "org")
    futures = file.start([(0, pages.PAGE + 1)])
    assert file.start([(1, 2)]) == futures
    reads = [in_thread(lambda: file.read(0, 9), "read") for _ in range(2)]
    answer.set()
    assert [read.result() for read in reads] == [bytes(9)] * 2
    assert [*map(len, futures.pop().result().values())] == [pages.PAGE] * 2
    assert asked == [(0, 2 * pages.PAGE)]
    many = [*range(9), 10]  # of which one request has at most eight
    assert pages._runs(many) == [range(8), range(8, 9), range(10, 11)]


def test_a_signal_ends_a_stream_that_waits_for_the_network(hub, pushed, monkeypatch):
    """A second Ctrl-C does not wait until all requests were repeated."""
    remote = offmarl.open(ADDRESS)
    read_tables(remote)
    request, answer = threading.Event(), threading.Event()

    def wait(*_):
        request.set()
        answer.wait(60)
        raise HubError("too late")

    def interrupted(started):
        assert request.wait(60)
        raise KeyboardInterrupt

    forget()
    pages.page_cache().clear()
    monkeypatch.setattr(client, "stream", wait)
    monkeypatch.setattr(host, "_result", interrupted)
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt), remote.stream(8, 5, to="numpy") as stream:
        next(stream)
    assert time.monotonic() - start < 30
    answer.set()


def test_a_cache_that_cannot_be_written_is_not_used(hub, pushed, monkeypatch):
    monkeypatch.setattr(pages.PageCache, "_make_room", refuse)
    assert len(batches(offmarl.open(ADDRESS), epochs=1)) > 0
    assert pages.page_cache().size == 0


def refuse(*_):
    raise PermissionError(13, "Permission denied")


@pytest.mark.nightly
def test_training_from_the_hub(hub, pushed, tmp_path):
    make = programs.registry.load("baseline", "bc")
    options = {"env": "none", "batch_size": 4, "length": 5, "seeds": 2, "updates": 6}
    args = make.Args(vault=ADDRESS, eval_every=3, out=tmp_path / "whole", **options)
    programs.train(make.make, args)
    record = json.loads((tmp_path / "whole" / "run.json").read_text())
    assert record["shuffle_buffer"] == 2**26 and record["complete"]
    assert record["vault_digest"] == vault.open_vault(pushed[0]).digest()
    again = dataclasses.replace(args, out=tmp_path / "again")
    programs.train(make.make, again)
    rows = [
        [{k: v for k, v in row.items() if k not in tracking.TIMES} for row in tracking.read(path)]
        for path in (tmp_path / "whole/metrics.jsonl", tmp_path / "again/metrics.jsonl")
    ]
    assert len(rows[0]) > 4
    assert rows[0] == rows[1]
