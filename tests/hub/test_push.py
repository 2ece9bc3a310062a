"""Publishing vaults, and pulling them again."""

import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
from unittest.mock import Mock

import numpy as np
import pytest
import tensorstore as ts

import offmarl
from offmarl import hub as library
from offmarl import vault
from offmarl.errors import (
    CardError,
    ChecksumError,
    HubError,
    HubUnreachableError,
    OptionError,
    VaultError,
    VaultFormatError,
    VaultNotFoundError,
)
from offmarl.hub import cache, pushing
from offmarl.hub import card as catalogue
from offmarl.vault.format.layout import METADATA
from offmarl.vault.storage.store import store_of
from tests.runs import write_run
from tests.vault.experience import SPEC, make
from tests.vault.test_stock import open_stock

from .conftest import card_of, record


def files_of(hub, under=""):
    files = hub.files("org/made-up", "main")[1]
    return {name: data for name, data in files.items() if name.startswith(under)}


def test_push_then_pull_gives_the_same_files(hub, vaults):
    pushed = library.push(vaults, "org/made-up", "CC-BY-4.0", citation="@misc{us}")
    assert pushed.card.name == "org/test/made-up"
    pulled = library.pull("org/made-up")
    assert pulled.commit == pushed.commit and list(pulled.paths) == ["good", "poor"]
    for path in vaults:
        place = pulled.paths[path.name]
        published = files_of(hub, under=f"made-up.vlt/{path.name}/")
        assert {"metadata.json", "manifest.ocdbt"} < {name.split("/")[2] for name in published}
        for name, data in published.items():
            inside = name.split("/", 2)[2]
            assert data == (path / inside).read_bytes() == (place / inside).read_bytes()
        assert f"index/{path.name}.json.gz" in files_of(hub)
        digest = vault.open_vault(path).digest()
        assert vault.open_vault(place).digest() == pushed.card.uids[path.name].digest == digest
    assert "digest of its content, from the card" in pulled.checks["good"]
    dataset = library.load_dataset("org/made-up/good")
    assert dataset.path == pulled.paths["good"]


def test_a_file_that_is_not_what_was_pushed(hub, pushed):
    hub.faults.flip = True
    with pytest.raises(HubError, match=r"vlt/good/d/\w+ arrived with SHA-256"):
        library.pull("org/made-up")
    hub.faults.flip = False
    assert list(library.pull("org/made-up/poor").paths) == ["poor"]


@pytest.mark.parametrize(
    "change",
    [
        {"path": "made-up.vlt/good/../../../x"},
        {"path": "made-up.vlt/good/d/x/y"},
        {"path": "made-up.vlt/poor/d/x"},
        {"path": "made-up.vlt/good/writer.lock"},
        {"path": "/etc/passwd"},
        {"sha256": "../" * 20 + "tmp/x"},
        {"size": -1},
    ],
    ids=str,
)
@pytest.mark.parametrize("use", [library.pull, lambda name: offmarl.open(f"hf://{name}")])
def test_a_card_whose_files_lead_elsewhere(hub, pushed, change, use):
    card = card_of(hub)
    text = catalogue.to_toml(card)
    file = next(f for f in card.uids["good"].files if "/d/" in f.path)
    for name, value in change.items():
        text = text.replace(f"{getattr(file, name)}", f"{value}", 1)
    hub.commit("org/made-up", {"offmarl.toml": text.encode()})
    with pytest.raises(CardError):
        use("org/made-up/good")


@pytest.mark.parametrize(
    ("old", "new", "error", "message"),
    [
        (
            "digest = ",
            'digest = "other"\n#',
            ChecksumError,
            "not have the digest that its card",
        ),
        ("[uids.good]", '[uids."../good"]', CardError, "'../good' cannot be the name of"),
        ("num_agents = 2\n", "", CardError, "of org/made-up is not valid: .* num_agents"),
    ],
)
def test_a_card_that_is_wrong(hub, pushed, old, new, error, message):
    card = hub.files("org/made-up", "main")[1]["offmarl.toml"].decode()
    hub.commit("org/made-up", {"offmarl.toml": card.replace(old, new).encode()})
    with pytest.raises(error, match=message):
        library.pull("org/made-up")
    assert not any(entry.uids for entry in cache.entries())


def test_the_croissant_file_is_valid(hub, pushed, recwarn):
    mlcroissant = pytest.importorskip("mlcroissant")
    _, files = hub.files("org/made-up", "main")
    described = json.loads(files["croissant.json"])
    dataset = mlcroissant.Dataset(jsonld=described)
    assert dataset.metadata.issues.errors == dataset.metadata.issues.warnings == set()
    hashes = {entry["name"]: entry["sha256"] for entry in described["distribution"]}
    assert hashes == {
        file.path: file.sha256 for uid in card_of(hub).uids.values() for file in uid.files
    }


def test_the_hub_validates_the_card(hub, vaults, monkeypatch):
    library.push(vaults, "org/made-up", "CC-BY-4.0")
    page = hub.files("org/made-up", "main")[1]["README.md"].decode()
    assert "license: cc-by-4.0" in page and "- reinforcement-learning" in page
    assert any(path == "/api/validate-yaml" for _, path, _ in hub.requests)
    monkeypatch.setattr("offmarl.hub.readme._TAGS", "no list")
    monkeypatch.setattr("offmarl.hub.readme.list", lambda tags: tags, raising=False)
    with pytest.raises(CardError, match="the hub does not accept the card of org/other"):
        library.push(vaults, "org/other", "CC-BY-4.0")
    assert not hub.repositories["org/other"]
    assert not any("org/other/preupload" in path for _, path, _ in hub.requests)


def test_an_interrupted_push_sends_what_is_missing(hub, vaults):
    hub.faults.uploads = 1
    with pytest.raises(HubError, match=r"failed .* Repeat the command"):
        library.push(vaults, "org/made-up", "CC-BY-4.0")
    assert len(hub.uploaded) == 1 and not hub.repositories["org/made-up"]
    hub.faults.uploads = 1000
    library.push(vaults, "org/made-up", "CC-BY-4.0")
    assert len(hub.uploaded) == 2
    library.push(vaults, "org/made-up", "CC-BY-4.0")
    assert hub.faults.uploads == 999, "the same vault gives the same files"


def test_a_vault_with_much_unused_space_is_compacted(hub, vaults, monkeypatch):
    monkeypatch.setattr(pushing, "_LEAST_UNUSED", 1000)
    digest = vault.open_vault(vaults[0]).digest()
    for seed in range(3):
        with vault.resume(vaults[0]) as writer:
            for _ in range(5):
                writer.append(*make(SPEC, rows=2, steps=3, seed=seed))
                writer.flush()
    with vault.resume(vaults[0]) as writer:  # in use: it is published as it is
        wasteful = library.push(vaults[:1], "org/used", "CC-BY-4.0")
    pushed = library.push(vaults[:1], "org/made-up", "CC-BY-4.0")
    assert pushed.sent < wasteful.sent
    (path,) = library.pull("org/made-up").paths.values()
    assert vault.open_vault(path).digest() == vault.open_vault(vaults[0]).digest() != digest


def test_a_vault_that_is_written_to_meanwhile(hub, vaults, monkeypatch):
    def late(contents, name):
        with vault.resume(vaults[0]) as writer:
            writer.append(*make(SPEC, rows=2, steps=70, seed=9))
        return build(contents, name)

    build = pushing.build_index
    monkeypatch.setattr(pushing, "build_index", late)
    with pytest.raises(VaultError, match="was written to while it was read"):
        library.push(vaults[:1], "org/made-up", "CC-BY-4.0")
    assert not hub.repositories["org/made-up"]


def test_concurrent_change_is_refused(hub, vaults, monkeypatch):
    library.push(vaults, "org/made-up", "CC-BY-4.0")
    create = pushing.HfApi.create_commit

    def late(self, *args, **kwargs):
        hub.commit("org/made-up", {"README.md": b"theirs"})
        return create(self, *args, **kwargs)

    monkeypatch.setattr(pushing.HfApi, "create_commit", late)
    with pytest.raises(HubError, match="someone else pushed to org/made-up meanwhile"):
        library.push(vaults[:1], "org/made-up", "CC-BY-4.0")
    assert hub.files("org/made-up", "main")[1]["README.md"] == b"theirs"


@pytest.mark.parametrize("pattern", ["d/", "*.parquet", "README.md"])
def test_a_gitignore_leaves_nothing_out(hub, vaults, pattern):
    library.push(vaults[:1], "org/made-up", "CC-BY-4.0", name="org/test/made-up")
    hub.commit("org/made-up", {".gitignore": f"*.tmp\n{pattern}\n".encode()})
    library.push(vaults, "org/made-up", "CC-BY-4.0")
    assert [*library.pull("org/made-up").paths] == ["good", "poor"]


@pytest.mark.parametrize("path", ["made-up.vlt/good/d/*", "offmarl.toml", "index/poor.json.gz"])
@pytest.mark.parametrize("fault", ["lost", "spoiled"])
def test_what_arrives_is_compared_with_what_was_sent(hub, vaults, path, fault):
    setattr(hub.faults, fault, path)
    pattern = path.replace("*", r"\w+")
    with pytest.raises(HubError, match=f"org/made-up does not hold {pattern} as it was sent"):
        library.push(vaults, "org/made-up", "CC-BY-4.0")
    setattr(hub.faults, fault, "")
    library.push(vaults, "org/made-up", "CC-BY-4.0")


def test_a_second_push_keeps_the_vaults_of_the_first(hub, vaults, tmp_path):
    """In the card, the page and the Croissant file; each is replaced by one of its own name."""
    third = record(tmp_path / "other.vlt" / "third", 2)
    library.push(vaults[:1], "org/made-up", "CC-BY-4.0", summary="One.", citation="@misc{a}")
    library.push(vaults[1:], "org/made-up", "CC-BY-4.0", citation="@misc{b}")
    pushed = library.push([third], "org/made-up", "CC-BY-4.0", citation="@misc{b}")
    assert [*pushed.card.uids] == ["good", "poor", "third"]
    assert pushed.card.citation == "@misc{a}\n\n@misc{b}" and "One." in pushed.card.summary
    pulled = library.pull("org/made-up").paths
    for path in (*vaults, third):
        assert vault.open_vault(pulled[path.name]).digest() == vault.open_vault(path).digest()
    files = hub.files("org/made-up", "main")[1]
    assert b"index/good.json.gz" in files["croissant.json"] and b"| good |" in files["README.md"]
    for uid in ("good", "poor", "third"):
        assert f"path: episodes/{uid}.parquet".encode() in files["README.md"]
    again, before = record(tmp_path / "again.vlt" / "good", 7), files_of(hub)
    library.push([again], "org/made-up", "CC-BY-4.0")
    removed = before.keys() - files_of(hub)
    assert removed and all(name.startswith("made-up.vlt/good/d/") for name in removed)
    pulled = library.pull("org/made-up")
    assert vault.open_vault(pulled.paths["good"]).digest() == vault.open_vault(again).digest()
    assert [*pulled.paths] == ["good", "poor", "third"]


@pytest.mark.parametrize(
    ("changes", "options", "differing"),
    [
        ({"num_agents": 3}, {}, "num_agents"),
        ({"time_limit": 99}, {}, "time_limit"),
        ({"name": "test/other"}, {}, "name"),
        ({}, {"licence": "MIT"}, r"licence \(CC-BY-4.0\)"),
        ({}, {"name": "org/test/renamed"}, "name"),
    ],
)
def test_a_second_push_of_another_kind_is_refused(
    hub, vaults, tmp_path, changes, options, differing
):
    library.push(vaults, "org/made-up", "CC-BY-4.0")
    before = hub.files("org/made-up", "main")
    other = record(tmp_path / "other.vlt" / "x", 0, dataclasses.replace(SPEC, **changes))
    with pytest.raises(
        CardError, match=f"holds good, poor with another {differing} .*another repo"
    ):
        library.push([other], "org/made-up", **{"licence": "CC-BY-4.0", **options})
    assert hub.files("org/made-up", "main") == before
    library.push(vaults, "org/made-up", **{"licence": "CC-BY-4.0", **options})


_PULLS = """
import sys
from huggingface_hub import constants
from offmarl import hub
from offmarl.cli import exit_codes

with exit_codes():
    for name in ("org/made-up", "org/made-up/good", "org/made-up@main"):
        pulled = hub.pull(name)
        assert pulled.fetched == 0 and pulled.paths["good"].is_dir()
        assert hub.plan(name).free > 0
    assert hub.pull_policy("org/policy").fetched == 0
    assert hub.plan("org/other").sizes.keys() == {"poor"}
    assert hub.load_dataset("org/made-up/poor").num_steps == 256
    pulled = hub.pull("org/other", sys.argv[1])
    assert pulled.fetched > 0
    constants.HF_HUB_OFFLINE = True
    assert hub.pull("org/made-up").fetched == 0
    constants.HF_HUB_OFFLINE = False
    hub.pull("org/other")
"""


@pytest.mark.slow
def test_a_cache_that_cannot_be_written(hub, vaults, tmp_path):
    """What is complete there is pulled and planned; anything else is one line or goes elsewhere."""
    library.push(vaults, "org/made-up", "CC-BY-4.0")
    library.push(vaults[1:], "org/other", "CC-BY-4.0")
    library.pull("org/made-up")
    run = write_run(tmp_path / "run", "x", "data", [[1.0]])
    (run / "checkpoints" / "1").mkdir(parents=True)
    (run / "checkpoints" / "1" / "array").write_text("numbers")
    library.push_policy(run, "org/policy", "MIT")
    library.pull_policy("org/policy")
    (home := tmp_path / "home").mkdir(exist_ok=True)
    places = [home, *(path for path in home.rglob("*") if not path.is_symlink())]
    for path in places:
        path.chmod(path.stat().st_mode & ~0o222)
    # Permissions hold for root only without this capability.
    drop = ["setpriv", "--bounding-set=-dac_override", "--inh-caps=-all"]
    prefix = [] if os.geteuid() else drop
    if prefix and not shutil.which("setpriv"):
        pytest.skip("needs setpriv, for root")
    done = subprocess.run(
        [*prefix, sys.executable, "-c", _PULLS, tmp_path / "out"],
        env={**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"},
        check=False,
        capture_output=True,
        text=True,
    )
    for path in places:
        path.chmod(path.stat().st_mode | 0o700)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "cannot be written (Permission denied): give another --out" in done.stderr


def test_what_cannot_be_pushed(hub, vaults, tmp_path, monkeypatch):
    other = record(tmp_path / "other.vlt" / "x", 0, dataclasses.replace(SPEC, num_agents=3))
    with pytest.raises(CardError, match=r"differ in num_agents \(3, not 2\)"):
        library.push([*vaults, other], "org/made-up", "CC-BY-4.0")
    with pytest.raises(CardError, match="the same uid"):
        library.push([vaults[0], vaults[0].parent], "org/made-up", "CC-BY-4.0")
    with pytest.raises(VaultNotFoundError):
        library.push([tmp_path / "none.vlt"], "org/made-up", "CC-BY-4.0")
    with pytest.raises(CardError, match="name must be source/environment/scenario"):
        library.push(vaults, "org/made-up", "CC-BY-4.0", name="short")
    with monkeypatch.context() as patch:
        lost = FileNotFoundError(2, "No such file or directory", "d/1234")
        patch.setattr(pushing, "episode_tables", Mock(side_effect=lost))
        with pytest.raises(HubError, match="d/1234") as caught:
            library.push(vaults, "org/made-up", "CC-BY-4.0")
        assert not isinstance(caught.value, HubUnreachableError)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubUnreachableError):
        library.push(vaults, "org/made-up", "CC-BY-4.0")


def test_a_push_without_the_right_to_write(hub, vaults):
    hub.tokens["org/made-up"] = {"a token"}
    with pytest.raises(HubError, match=r"refuses access to org/made-up \(401\): log in with"):
        library.push(vaults, "org/made-up", "CC-BY-4.0")


@pytest.mark.parametrize("spelled", ["got.vlt", "got.vlt/expert"])
def test_a_link_below_a_dataset_is_not_pushed(hub, vaults, tmp_path, spelled):
    private = record(tmp_path / "private.vlt" / "secret", 0)
    record(tmp_path / "got.vlt" / "own", 1)
    (tmp_path / "got.vlt" / "expert").symlink_to(private)
    with pytest.raises(VaultFormatError, match="expert is a symbolic link to"):
        library.push([tmp_path / spelled], "org/made-up", "CC-BY-4.0")


def test_a_card_that_no_pull_would_read_is_not_published(hub, vaults):
    with pytest.raises(CardError, match=r"the card of org/long is not valid: .*path"):
        library.push(vaults, "org/long", "CC-BY-4.0", name=f"org/swarm/{'s' * 1020}")
    assert catalogue.CARD not in hub.files("org/long", "main")[1]


def test_a_push_says_how_far_it_is_in_lines_and_wants_a_whole_name(hub, vaults, capfd, monkeypatch):
    monkeypatch.delenv("OFFMARL_QUIET", raising=False)
    for name in ("made-up", "a/b/c", "org/made up"):
        with pytest.raises(OptionError, match=f"named org/name: got '{name}'"):
            library.push(vaults, name, "CC-BY-4.0")
    library.push(vaults, "org/told", "CC-BY-4.0")
    output = capfd.readouterr().err
    assert "index good: " in output and "\r" not in output


def test_a_pulled_vault_is_like_any_other(hub, vaults):
    library.push(vaults, "org/made-up", "CC-BY-4.0")
    (path,) = library.pull("org/made-up/good").paths.values()
    local = vault.open_vault(vaults[0])
    assert not vault.verify(path, deep=True).faults
    (entry,) = cache.entries()
    assert cache.verify(entry, "good") > 3
    with vault.resume(path) as writer:
        writer.append(*make(SPEC, rows=2, steps=70, seed=9))
    with pytest.raises(ChecksumError, match="differ from what was published"):
        cache.verify(entry, "good")
    with vault.resume(vaults[0]) as writer:
        writer.append(*make(SPEC, rows=2, steps=70, seed=9))
    local = vault.open_vault(vaults[0])
    assert vault.open_vault(path).digest() == local.digest()
    vault.compact(path)
    assert vault.open_vault(path).digest() == local.digest()
    experience = open_stock(path).read().experience
    np.testing.assert_array_equal(experience["rewards"], local.read(leaves=["rewards"])["rewards"])


def test_an_interrupted_pull_goes_on_after_the_last_whole_file(hub, pushed):
    files = hub.repositories["org/made-up"][-1][1]
    names = sorted(files_of(hub, under="made-up.vlt/good/"), key=lambda name: len(files[name]))
    missing = files.pop(names[0])
    with pytest.raises(HubError, match=rf"{names[0]} is missing on the hub \(404\)"):
        library.pull("org/made-up/good")
    files[names[0]] = missing
    pulled = library.pull("org/made-up/good")
    assert pulled.fetched < sum(len(files[name]) for name in names)
    assert vault.open_vault(pulled.paths["good"]).digest() == vault.open_vault(pushed[0]).digest()


def test_the_episodes_are_a_parquet_table(hub, pushed):
    parquet = pytest.importorskip("pyarrow.parquet")
    files = hub.files("org/made-up", "main")[1]
    table = parquet.read_table(io.BytesIO(files["episodes/good.parquet"]))
    local = vault.open_vault(pushed[0]).episodes
    np.testing.assert_array_equal(table["length"], local.length)
    np.testing.assert_array_equal(table["episode_return"], local.episode_returns)
    page = files["README.md"].decode()
    assert "path: episodes/good.parquet" in page and "split: good" in page


def test_vaults_of_other_programs_are_published_too(hub, tmp_path):
    path = record(tmp_path / "other.vlt" / "uid", 0)
    store_of(path)._kv.delete_range(ts.KvStore.KeyRange("offmarl/", "offmarl0")).result()
    metadata = json.loads((path / METADATA).read_text())
    (path / METADATA).write_text(json.dumps({**metadata, "offmarl": "no more"}))
    library.push([path], "org/other", "CC-BY-4.0")
    local = vault.open_vault(path)
    remote = offmarl.open("hf://org/other/uid")
    pulled = vault.open_vault(library.pull("org/other").paths["uid"])
    for data in (remote, pulled):
        assert data.length == local.length and not data.native
        for name, values in local.read().items():
            np.testing.assert_array_equal(data.read(leaves=[name])[name], values)
