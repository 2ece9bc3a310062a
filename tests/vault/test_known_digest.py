"""Cached digests are those of the data, whatever happens to the vault."""

import shutil
from contextlib import suppress

import pytest

from offmarl import mix, vault
from offmarl.errors import VaultError
from offmarl.vault.check import digest as module

from .experience import make, written
from .test_forking import in_fork
from .test_stock import append_with_stock, open_stock


@pytest.fixture(autouse=True)
def kept(monkeypatch, tmp_path):
    monkeypatch.delenv("OFFMARL_DIGEST_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "offmarl" / module.DIGESTS_DIRECTORY


@pytest.fixture
def computed(monkeypatch):
    """The vaults whose digests were computed, in order."""
    names, compute = [], module.digest

    def counting(dataset, *arguments):
        names.append(dataset.path.name)
        return compute(dataset, *arguments)

    monkeypatch.setattr(module, "digest", counting)
    return names


def write(path, steps=40, seed=0, **options):
    written(path, make(steps=steps, seed=seed), chunk_steps=8, **options)
    return path


def test_a_commit_is_read_once(tmp_path, computed, kept):
    path = write(tmp_path / "a.vlt")
    first = vault.open_vault(path).known_digest()
    assert vault.open_vault(path).known_digest() == first == vault.open_vault(path).digest()
    assert len(computed) == 2  # the last of them by ``digest``, which always reads
    assert len(list(kept.iterdir())) == 1

    moved = path.rename(tmp_path / "b.vlt")
    assert vault.open_vault(moved).known_digest() == first
    assert len(computed) == 2


@pytest.mark.filterwarnings("ignore:.*fork")  # of threads, which the child never uses
@pytest.mark.parametrize("is_forked", [False, True])
def test_a_vault_opened_before_a_commit_keeps_nothing_for_the_next(tmp_path, kept, is_forked):
    path = write(tmp_path / "a.vlt")
    before = vault.open_vault(path)
    if is_forked:
        before.prepare_fork()
    with vault.resume(path) as writer:
        writer.append(*make(steps=24, seed=1))
    known = in_fork(before.known_digest) if is_forked else before.known_digest()
    assert known == before.digest()
    assert not kept.exists()
    after = vault.open_vault(path)
    assert after.known_digest() == after.digest() != before.digest()


def test_steps_of_another_program_are_always_read(tmp_path, computed, kept):
    path = write(tmp_path / "a.vlt" / "main")
    before = vault.open_vault(path)
    append_with_stock(open_stock(path), make(steps=16, seed=1)[0])
    for _ in range(2):
        dataset = vault.open_vault(path)
        assert dataset.length == 56
        assert dataset.known_digest() == dataset.digest()
    assert before.known_digest() == before.digest() != dataset.digest()
    assert len(computed) == 7
    assert not kept.exists()


@pytest.mark.parametrize("reason", ["unchecked reads", "turned off", "no home directory"])
def test_where_nothing_is_kept(tmp_path, monkeypatch, kept, reason):
    if reason == "turned off":
        monkeypatch.setenv("OFFMARL_DIGEST_CACHE", "off")
    if reason == "no home directory":
        monkeypatch.setattr(module, "cache_directory", lambda _: None)
    path = write(tmp_path / "a.vlt")
    dataset = vault.open_vault(path, checked=reason != "unchecked reads")
    assert dataset.known_digest() == dataset.digest()
    assert not kept.exists()


def test_other_data_of_the_same_shape(tmp_path):
    paths = [write(tmp_path / f"{seed}.vlt", seed=seed) for seed in range(3)]
    digests = [vault.open_vault(path).known_digest() for path in paths * 2]
    assert len(set(digests)) == 3
    assert digests[:3] == digests[3:]
    both = mix([vault.open_vault(path) for path in paths[:2]])
    assert both.known_digest() == both.digest()


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@pytest.mark.parametrize("is_copy", [True, False])
def test_a_copy_and_files_that_were_replaced_are_read(tmp_path, codec, is_copy):
    """Whoever sends a copy of a known vault may have changed the data, and its checksums."""
    path = write(tmp_path / "a.vlt", steps=400, codec=codec)
    vault.open_vault(path).known_digest()
    path = shutil.copytree(path, tmp_path / "b.vlt") if is_copy else path
    file = max(
        (path / "d").iterdir() if (path / "d").is_dir() else path.glob("*/d/*"),
        key=lambda path: path.stat().st_size,
    )
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    damaged = vault.open_vault(path)
    for read in (damaged.known_digest, damaged.transitions):
        with pytest.raises(VaultError):
            read()


def test_what_is_kept_may_be_damaged_or_impossible_to_write(tmp_path, computed, kept):
    path = write(tmp_path / "a.vlt")
    first = vault.open_vault(path).known_digest()
    (file,) = kept.iterdir()
    file.write_text(first[:30])
    assert vault.open_vault(path).known_digest() == first
    assert file.read_text() == first
    shutil.rmtree(kept)
    kept.write_text("a file in place of the directory")
    assert vault.open_vault(path).known_digest() == first
    assert len(computed) == 3


def test_an_archive_that_is_replaced_is_always_read(tmp_path, kept):
    path, archive = write(tmp_path / "a.vlt" / "main"), tmp_path / "a.zip"

    def pack():
        shutil.make_archive(str(tmp_path / "next"), "zip", tmp_path, "a.vlt")
        (tmp_path / "next.zip").replace(archive)
        return vault.open_vault(archive / "a.vlt" / "main")

    before = pack()
    with vault.resume(path) as writer:
        writer.append(*make(steps=24, seed=1))
    after = pack()
    with suppress(VaultError):
        before.known_digest()
    assert after.known_digest() == after.digest() == vault.open_vault(path).known_digest()
