"""Zip archives of vaults: read in place, unpacked, and refused if unsafe."""

import io
import pickle
import shutil
import struct
import zipfile
from pathlib import Path

import pytest

from offmarl import vault
from offmarl.errors import (
    VaultError,
    VaultExistsError,
    VaultFormatError,
    VaultFullError,
    VaultNotFoundError,
)
from offmarl.vault.storage import archive
from offmarl.vault.storage.store import store_of

from .experience import SPEC, assert_same, make, steps, written
from .loopback import FileServer

STEPS = 12000
FILES = ("metadata.json", "manifest.ocdbt")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A directory with a vault of two uids, and archives of it."""
    directory = tmp_path_factory.mktemp("zips")
    for seed, uid in enumerate(["Good", "Poor"]):
        written(directory / "3m.vlt" / uid, make(steps=STEPS, seed=seed), chunk_steps=256)
    for name, method in (("stored", zipfile.ZIP_STORED), ("deflated", zipfile.ZIP_DEFLATED)):
        with zipfile.ZipFile(directory / f"{name}.zip", "w", method) as archive:
            for file in sorted((directory / "3m.vlt").rglob("*")):
                archive.write(file, file.relative_to(directory))
            archive.writestr("__MACOSX/3m.vlt/Good/._metadata.json", b"")
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("name", ["stored.zip", "deflated.zip"])
def test_a_vault_in_an_archive_is_read_in_place(folder, name):
    dataset = vault.open_vault(folder / name / "3m.vlt" / "Good")
    assert_same(dataset[100:300], steps(make(steps=STEPS)[0], 100, 300))
    assert (dataset.name, dataset.uid) == ("3m", "Good")
    assert dataset.digest() == vault.open_vault(folder / "3m.vlt" / "Good").digest()
    summaries = dict(vault.list_vaults(folder / name))
    assert [str(path.relative_to(folder)) for path in summaries] == [
        f"{name}/3m.vlt/Good",
        f"{name}/3m.vlt/Poor",
    ]
    assert {summary.steps for summary in summaries.values()} == {2 * STEPS}


def test_what_is_not_in_the_archive(folder):
    with pytest.raises(VaultError, match=r"several vaults: add one of 3m.vlt/Good, 3m.vlt/Poor"):
        vault.open_vault(folder / "stored.zip")
    with pytest.raises(VaultNotFoundError, match="Nearby: Good, Poor"):
        vault.open_vault(folder / "stored.zip" / "3m.vlt" / "Goof")
    with pytest.raises(VaultError, match="cannot be written to: unpack"):
        vault.resume(folder / "stored.zip" / "3m.vlt" / "Good")
    with pytest.raises(VaultError, match="cannot be written to"):
        vault.create(folder / "stored.zip" / "3m.vlt" / "New", SPEC, rows=1)
    store = store_of(folder / "stored.zip" / "3m.vlt" / "Good")
    for change in (store.clear, lambda: store.write("metadata.json", b"{}")):
        with pytest.raises(VaultError, match="Good cannot be written to"):
            change()


@pytest.mark.slow
def test_few_ranges_of_an_archive_on_a_web_server(folder):
    with FileServer(folder) as server:
        dataset = vault.open_vault(f"{server.url}/stored.zip/3m.vlt/Good")
        assert_same(dataset[:100], steps(make(steps=STEPS)[0], 0, 100))
        size = (folder / "stored.zip").stat().st_size
        assert len(server.sent) <= 48
        assert sum(count for _, count in server.sent) < size / 10
        assert str(dataset.path) == f"{server.url}/stored.zip/3m.vlt/Good"
        with pytest.raises(VaultError, match="there is no archive"):
            vault.open_vault(f"{server.url}/other.zip/3m.vlt/Good")
        assert vault.open_vault(f"{server.url}/3m.vlt/Good").length == STEPS


@pytest.mark.parametrize("place", ["a.zip/a.vlt/Good", "a.vlt/Good"])
@pytest.mark.slow
def test_credentials_are_sent_and_never_shown(tmp_path, place):
    written(tmp_path / "a.vlt" / "Good", make())
    shutil.make_archive(str(tmp_path / "a"), "zip", tmp_path, "a.vlt")
    with FileServer(tmp_path) as server:
        url = f"{server.url.replace('//', '//me:secret@')}/{place}"
        dataset = vault.open_vault(url)
        again = pickle.loads(pickle.dumps(dataset))
        assert_same(again[:], make()[0])
        assert set(server.users) == {"me:secret"}
        texts = [str(dataset.path), repr(dataset)]
        with pytest.raises(VaultNotFoundError) as missing:
            vault.open_vault(url.replace("Good", "Godo"))
        texts.append(str(missing.value))
    assert "secret" not in "".join(texts) and "://***@" in texts[0]


@pytest.mark.parametrize("path", ["3m.vlt", "3m.vlt/Goof", ""])
def test_a_web_server_lists_nothing(folder, path):
    with FileServer(folder) as server:
        for function in (vault.open_vault, vault.verify, lambda url: list(vault.list_vaults(url))):
            with pytest.raises(VaultNotFoundError, match="web servers do not list"):
                function(f"{server.url}/{path}")


@pytest.mark.parametrize("name", ["stored.zip", "deflated.zip"])
@pytest.mark.parametrize("members", [None, "3m.vlt/Poor"])
def test_unpack(tmp_path, folder, name, members):
    leftover = tmp_path / f".{name}.part" / "3m.vlt" / "Good"
    leftover.mkdir(parents=True)  # as a killed process leaves
    paths = vault.unpack(folder / name, tmp_path, members)
    uids = ["Poor"] if members else ["Good", "Poor"]
    assert paths == [tmp_path / "3m.vlt" / uid for uid in uids]
    for path in paths:
        assert (
            vault.open_vault(path).digest()
            == vault.open_vault(folder / "3m.vlt" / path.name).digest()
        )
    assert [path.name for path in tmp_path.iterdir()] == ["3m.vlt"]
    with pytest.raises(VaultExistsError):
        vault.unpack(folder / name, tmp_path)
    with pytest.raises(VaultFormatError, match=r"there is no vault in .*3m\.vlt/Goo\."):
        vault.unpack(folder / name, tmp_path, "3m.vlt/Goo")


def member(name, content=b"x", **attributes):
    info = zipfile.ZipInfo(name)
    for attribute, value in attributes.items():
        setattr(info, attribute, value)
    return info, content


def archive_of(*members):
    """Return an archive with a vault's files and others."""
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name in ("metadata.json", "manifest.ocdbt"):
            archive.writestr(f"a.vlt/b/{name}", b"{}")
        for info, content in members:
            archive.writestr(info, content)
    return data.getvalue()


def encrypted():
    data = bytearray(archive_of())
    data[data.rfind(b"PK\1\2") + 8] |= 1
    return bytes(data)


def lying(size):
    """A file that inflates to more than its declared size."""
    data = bytearray(archive_of(member("a.vlt/b/d/0", bytes(10**6), compress_type=8)))
    for mark, offset in ((b"PK\1\2", 24), (b"PK\3\4", 22)):
        place = data.rfind(mark) + offset
        data[place : place + 4] = struct.pack("<I", size)
    return bytes(data)


def overlapping():
    """Two files that begin at the same place."""
    data = bytearray(archive_of())
    place = data.rfind(b"PK\1\2") + 42
    data[place : place + 4] = bytes(4)
    return bytes(data)


HOSTILE = [
    ("lies inside another", overlapping),
    ("leads out", lambda: archive_of(member("a.vlt/b/../../../evil"))),
    ("leads out", lambda: archive_of(member("/tmp/evil"))),
    ("leads out", lambda: archive_of(member("a.vlt/b/d\\..\\evil"))),
    ("has a name with backslashes", lambda: archive_of(member("a.vlt\\b\\d\\0"))),
    ("a link", lambda: archive_of(member("a.vlt/b/d", b"/etc", external_attr=0o120777 << 16))),
    ("there twice", lambda: archive_of(member("a.vlt//b/d/0"), member("a.vlt/b/d/0"))),
    ("encrypted", encrypted),
    (
        "compression other",
        lambda: archive_of(member("a.vlt/b/d/0", compress_type=zipfile.ZIP_LZMA)),
    ),
    ("would inflate to 1153", lambda: lying(1100 * 2**20)),
    ("more than in any", lambda: archive_of(member("c.vlt/b/metadata.json", bytes(2**26 + 1)))),
    ("damaged", lambda: lying(10**5)),
    ("damaged", lambda: archive_of()[:-30]),
    ("damaged", lambda: b"no zip"),
]


@pytest.mark.parametrize(("fault", "hostile"), HOSTILE)
def test_hostile_archives(tmp_path, fault, hostile):
    inside = tmp_path / "here" / "inside"
    inside.mkdir(parents=True)
    archive = tmp_path / "evil.zip"
    archive.write_bytes(hostile())
    with pytest.raises(VaultFormatError, match=fault):
        vault.unpack(archive, inside)
    assert list(inside.iterdir()) == []
    assert {path.name for path in tmp_path.iterdir()} == {"here", "evil.zip"}
    with pytest.raises(VaultError):
        vault.open_vault(archive)[:10]


def test_a_flipped_bit_is_found_while_unpacking(tmp_path, folder):
    data = bytearray((folder / "stored.zip").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "flipped.zip").write_bytes(data)
    with pytest.raises(VaultFormatError, match="Bad CRC"):
        vault.unpack(tmp_path / "flipped.zip", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_room(tmp_path, folder, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(archive.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(VaultFullError):
        vault.unpack(folder / "stored.zip", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wide", [False, True])
def test_the_largest_directory_and_the_largest_number_of_files(wide):
    size, files = 2**24, 2**17 if wide else 2**16 - 1

    def end(size, files):
        if wide:
            return wide_end(size, files) + narrow_end(2**32 - 1, 2**16 - 1)
        return narrow_end(size, files)

    tail = b"something before" + end(size, files)
    assert archive.directory_bytes(Path("a.zip"), tail) == size + len(end(size, files))
    for more in ((size + 1, files), *([(size, files + 1)] * wide)):
        with pytest.raises(VaultFormatError, match="not safe to open"):
            archive.directory_bytes(Path("a.zip"), end(*more))


def narrow_end(size, count, comment=0):
    """Return the end record of an archive, without its comment."""
    return struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, size, 0, comment)


def wide_end(size, count):
    """Return the wide end record (ZIP64), and its locator."""
    record = struct.pack("<4sQ2H2L4Q", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, 0)
    return record + struct.pack("<4sLQL", b"PK\6\7", 0, size, 1)


@pytest.mark.parametrize("comment", [0, 2**16 - 1])
@pytest.mark.parametrize(
    ("count", "size", "message"),
    [
        (1, 100, "two end records contradict each other"),
        (2**16 - 1, 2**32 - 1, "has 131073 files"),
    ],
)
def test_an_end_record_that_lies(tmp_path, monkeypatch, comment, count, size, message):
    """Python uses the wide end record wherever there is one, and reads at its offsets."""
    monkeypatch.setattr(zipfile, "ZipFile", lambda *_: pytest.fail("the directory was read"))
    path, files = tmp_path / "a.zip", 2**17 + 1
    entry = struct.pack("<4s4B4HL2L5H2L", b"PK\1\2", 20, 3, 20, *[0] * 15)
    directory = entry.ljust(60) * files
    end = wide_end(len(directory), 1) + narrow_end(size, count, comment)
    path.write_bytes(directory + end + bytes(comment))
    with pytest.raises(VaultFormatError, match=message):
        vault.open_vault(path)


def test_an_error_names_some_of_many_vaults(tmp_path):
    path = tmp_path / "many.zip"
    with zipfile.ZipFile(path, "w") as zip_file:
        for name in (f"a.vlt/{n:03}/{file}" for n in range(100) for file in FILES):
            zip_file.writestr(name, b"{}")
    with pytest.raises(VaultError, match=r"a\.vlt/019, \.\.\. \(100 in all\)"):
        vault.open_vault(path)
