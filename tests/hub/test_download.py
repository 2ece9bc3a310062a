"""Downloads in parts: which answers are accepted, and which data is kept from earlier attempts."""

import hashlib
from unittest.mock import Mock

import numpy as np
import pytest
from huggingface_hub.errors import GatedRepoError, HfHubHTTPError

from offmarl.errors import HubChecksumError, HubError, HubUnreachableError
from offmarl.hub import client, install
from offmarl.hub.client import Remote
from tests.web import Handler, WebServer

DATA = np.random.default_rng(0).bytes(200)
COMMIT = "a" * 40


class Server(WebServer):
    """Answers with what the test says, and notes which intervals are asked for."""

    def __init__(self):
        self.asked, self.answers, self.connections = [], [], 0
        super().__init__(Parts)
        self.url += "/file"

    def answer(self, start, stop):
        """Return status, headers and body; right unless an answer is prepared."""
        return self.answers.pop(0) if self.answers else part(start, stop)


class Parts(Handler):
    def setup(self):
        super().setup()
        self.server.connections += 1

    def do_GET(self):
        interval = self.headers["Range"]
        self.server.asked.append(interval)
        start, stop = map(int, interval.removeprefix("bytes=").split("-"))
        status, headers, body = self.server.answer(start, stop + 1)
        self.close_connection |= headers.get("Content-Length") != str(len(body))
        self.answer(status, body, **{"Content_Length": None} | headers)


def part(start, stop, size=200, named=None):
    named = f"bytes {start}-{stop - 1}/{size}" if named is None else named
    headers = {"Content-Range": named} if named else {}
    return 206, {**headers, "Content-Length": str(stop - start)}, DATA[start:stop]


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(client, "_PAUSE", 0.001)
    with Server() as server:
        yield server


def remote(server, commit=COMMIT, size=200, sha256=None):
    return Remote(server.url, commit, size, sha256)


@pytest.fixture
def read(server):
    """Return the bytes of an interval."""
    return lambda start, stop: b"".join(client.stream(remote(server), start, stop))


# ------------------------------------------------------------------ answers


def test_an_interval_is_asked_for_once(server, read):
    assert read(10, 100) == DATA[10:100] and read(20, 20) == b""
    assert server.asked == ["bytes=10-99"]


@pytest.mark.parametrize(
    "answer",
    [
        part(10, 60, named="bytes 0-49/200"),  # another interval
        part(10, 60, named="bytes 1-50/200"),
        part(10, 60, named="bytes 100-149/200"),
        part(10, 60, named="bytes 10-59/201"),  # another file
        part(10, 60, named="bytes 10-59/1200"),
        part(10, 60, named="bytes 10-59/*"),
        part(10, 60, named=""),
        (200, {"Content-Length": "200"}, DATA),  # no interval at all
        (200, {"Content-Length": "50", "Content-Range": "bytes 10-59/200"}, DATA[10:60]),
        (416, {"Content-Length": "0"}, b""),
        (204, {"Content-Range": "bytes 10-59/200"}, b""),
    ],
)
def test_answers_that_are_not_the_interval_are_refused(server, read, answer):
    server.answers = [answer]
    with pytest.raises(HubError, match=rf"answered {answer[0]} .*bytes from 10 of 200"):
        read(10, 60)
    assert len(server.asked) == 1


def test_the_whole_file_is_taken_for_an_interval_from_its_beginning(server, read):
    server.answers = [(200, {"Content-Length": "200"}, DATA)]
    assert read(0, 60) == DATA[:60]
    server.answers = [(200, {}, DATA)]  # of a length that is not told
    assert read(0, 200) == DATA
    server.answers = [(200, {"Content-Length": "199"}, DATA[:199])]
    with pytest.raises(HubError, match="answered 200"):
        read(0, 60)


@pytest.mark.parametrize("status", [403, 408, 425, 429, 500, 502, 503, 504])
def test_some_answers_are_tried_again(server, read, status):
    server.answers = [(status, {"Content-Length": "0", "Retry-After": "soon"}, b"")] * 2
    assert read(10, 60) == DATA[10:60]
    assert len(server.asked) == 3


def test_a_connection_that_breaks_goes_on_where_it_was(server, read):
    broken = part(10, 60)
    server.answers = [(*broken[:2], broken[2][:20])]
    assert read(10, 60) == DATA[10:60]
    assert server.asked == ["bytes=10-59", "bytes=30-59"]


def test_attempts_in_a_row_come_to_an_end_and_bytes_begin_the_count_again(server, read):
    failed = (500, {"Content-Length": "0"}, b"")
    status, headers, body = part(0, 20)
    server.answers = [*[failed] * 8, (status, headers, body[:10]), *[failed] * 7]
    assert read(0, 20) == DATA[:20]
    server.asked.clear()
    server.answers = [failed] * 20
    with pytest.raises(HubError, match="failed 9 times in a row: the server answered 500"):
        read(20, 30)
    assert len(server.asked) == 9


def test_pauses_double_up_to_a_minute_and_heed_the_server(monkeypatch, server, read):
    pauses = []
    monkeypatch.setattr(client, "_PAUSE", 0.5)
    monkeypatch.setattr(client.time, "sleep", pauses.append)
    monkeypatch.setattr(client.random, "uniform", lambda low, high: low + high)
    server.answers = [(503, {"Content-Length": "0"}, b"")] * 7
    read(0, 10)
    assert pauses == [1.5 * pause for pause in (0.5, 1, 2, 4, 8, 16, 32)]
    pauses.clear()
    later = [(503, {"Content-Length": "0", "Retry-After": after}, b"") for after in ("7.5", "999")]
    server.answers = later
    read(0, 10)
    assert pauses == [7.5, 120]


def test_a_connection_is_used_for_the_next_request(server, read):
    """Setting one up takes several round trips."""
    for start in range(0, 100, 10):
        assert read(start, start + 10) == DATA[start : start + 10]
    assert (len(server.asked), server.connections) == (10, 1)


def refusal(kind, status):
    return kind("no\nmore", response=Mock(status_code=status, headers={}))


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (refusal(GatedRepoError, 403), HubError, "org/x is gated: request access"),
        (refusal(HfHubHTTPError, 401), HubError, r"refuses access to org/x \(401\): log in"),
        (refusal(HfHubHTTPError, 403), HubError, r"refuses access to org/x \(403\): log in"),
        (refusal(HfHubHTTPError, 499), HubError, "refused a request about org/x: no$"),
        (refusal(HfHubHTTPError, 500), HubUnreachableError, "not answer about org/x: no$"),
        (client.TransportError("no"), HubUnreachableError, "not answer about org/x: no$"),
        (ConnectionError("no"), HubUnreachableError, "not answer about org/x: no$"),
        (FileNotFoundError(2, "gone", "a"), HubError, r"^org/x: \[Errno 2\] gone: 'a'$"),
    ],
)
def test_errors_of_the_client_are_told_apart(error, kind, message):
    with pytest.raises(HubError, match=message) as caught, client.errors_of("org/x"):
        raise error
    assert type(caught.value) is kind


# ------------------------------------------------------------------ what is kept


SHA256 = hashlib.sha256(DATA).hexdigest()


@pytest.fixture
def download(server, tmp_path):
    """Download to ``file`` and return the bytes received."""
    path = tmp_path / "file"
    return lambda advance=str: install.download(remote(server), path, "the file", SHA256, advance)


def test_a_download_goes_on_where_it_was(server, download, tmp_path):
    path, heard = tmp_path / "file", []
    path.write_bytes(DATA[:70])
    assert download(heard.append) == 130
    assert path.read_bytes() == DATA and sum(heard) == 200
    assert server.asked == ["bytes=70-199"]
    assert download() == 0
    path.write_bytes(DATA + b"more than there is")
    assert download() == 200 and path.read_bytes() == DATA


def test_what_was_damaged_on_the_disk_is_removed(download, tmp_path):
    (tmp_path / "file").write_bytes(b"#" + DATA[1:70])
    with pytest.raises(HubChecksumError, match="the file arrived with SHA-256"):
        download()
    assert download() == 200


def test_blocks_are_on_the_disk_as_they_arrive(server, download, tmp_path):
    path, sizes = tmp_path / "file", []
    server.answers = [(*part(0, 200)[:2], DATA[:90])]
    download(lambda _: sizes.append(path.stat().st_size))
    assert sizes == [0, 90, 200]
