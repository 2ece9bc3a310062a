"""Downloads in parts: which answers are accepted, and which data is kept from earlier attempts."""

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from offmarl.errors import HubChecksumError, HubError
from offmarl.hub import client, install
from offmarl.hub.client import Remote

DATA = np.random.default_rng(0).bytes(200)
COMMIT = "a" * 40


class Server:
    """Answers with what the test says, and notes which intervals are asked for."""

    def __init__(self):
        self.asked = []
        self.connections = 0
        self.answers = []
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self):
                super().setup()
                server.connections += 1

            def log_message(self, *_):
                """Say nothing."""

            def do_GET(self):
                asked = self.headers["Range"]
                server.asked.append(asked)
                start, stop = map(int, asked.removeprefix("bytes=").split("-"))
                status, headers, body = server.answer(start, stop + 1)
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.close_connection |= headers.get("Content-Length") != str(len(body))
                self.end_headers()
                self.wfile.write(body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        self.url = f"http://127.0.0.1:{self._server.server_port}/file"

    def answer(self, start, stop):
        """Return status, headers and body; right unless an answer is prepared."""
        if self.answers:
            return self.answers.pop(0)
        return part(start, stop)

    def close(self):
        self._server.shutdown()
        self._server.server_close()


def part(start, stop, size=200, named=None):
    named = f"bytes {start}-{stop - 1}/{size}" if named is None else named
    headers = {"Content-Range": named} if named else {}
    return 206, {**headers, "Content-Length": str(stop - start)}, DATA[start:stop]


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(client, "_PAUSE", 0.001)
    monkeypatch.setattr(install, "PART", 50)
    server = Server()
    yield server
    server.close()


def remote(server, commit=COMMIT, size=200, sha256=None):
    return Remote((server.url,), commit, size, sha256)


@pytest.fixture
def wire(server):
    wire = client.Connection(remote(server))
    yield wire
    wire.close()


# ------------------------------------------------------------------ answers


def test_an_interval_is_asked_for_once_and_read_in_pieces(server, wire):
    heard = []
    wire.received = heard.append
    assert wire.read(10, 30, 100) == DATA[10:30]
    assert wire.read(30, 100, 100) == DATA[30:100]
    assert wire.read(150, 151, 200) == DATA[150:151]
    assert wire.read(20, 21, 30) == DATA[20:21]
    assert server.asked == ["bytes=10-99", "bytes=150-199", "bytes=20-29"]
    assert sum(heard) == wire.total == 20 + 70 + 1 + 1


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
def test_answers_that_are_not_the_interval_are_refused(server, wire, answer):
    server.answers = [answer]
    with pytest.raises(HubError, match=rf"answered {answer[0]} .*bytes from 10 of 200"):
        wire.read(10, 60, 60)
    assert len(server.asked) == 1
    assert wire.total == 0


def test_the_whole_file_is_taken_for_an_interval_from_its_beginning(server, wire):
    server.answers = [(200, {"Content-Length": "200"}, DATA)]
    assert wire.read(0, 60, 60) == DATA[:60]
    server.answers = [(200, {}, DATA)]  # of a length that is not told
    wire.close()
    assert wire.read(0, 200, 200) == DATA
    server.answers = [(200, {"Content-Length": "199"}, DATA[:199])]
    wire.close()
    with pytest.raises(HubError, match="answered 200"):
        wire.read(0, 60, 60)


@pytest.mark.parametrize("status", [403, 408, 425, 429, 500, 502, 503, 504])
def test_some_answers_are_tried_again(server, wire, status):
    server.answers = [(status, {"Content-Length": "0", "Retry-After": "soon"}, b"")] * 2
    assert wire.read(10, 60, 60) == DATA[10:60]
    assert len(server.asked) == 3


def test_a_connection_that_breaks_goes_on_where_it_was(server, wire):
    broken = part(10, 60)
    server.answers = [(*broken[:2], broken[2][:20])]
    assert wire.read(10, 60, 60) == DATA[10:60]
    assert server.asked == ["bytes=10-59", "bytes=30-59"]
    assert wire.total == 50


def test_attempts_in_a_row_come_to_an_end_and_bytes_begin_the_count_again(server, wire):
    failed = (500, {"Content-Length": "0"}, b"")
    server.answers = [failed] * 8
    assert wire.read(0, 10, 200) == DATA[:10]
    wire.close()
    server.answers = [failed] * 8
    assert wire.read(10, 20, 200) == DATA[10:20]
    wire.close()
    server.asked.clear()
    server.answers = [failed] * 20
    with pytest.raises(HubError, match="failed 9 times in a row: the server answered 500"):
        wire.read(20, 30, 200)
    assert len(server.asked) == 9


def test_pauses_double_up_to_a_minute_and_heed_the_server(monkeypatch, server, wire):
    pauses = []
    monkeypatch.setattr(client, "_PAUSE", 0.5)
    monkeypatch.setattr(client.time, "sleep", pauses.append)
    monkeypatch.setattr(client.random, "uniform", lambda low, high: low + high)
    server.answers = [(503, {"Content-Length": "0"}, b"")] * 7
    wire.read(0, 10, 10)
    assert pauses == [1.5 * pause for pause in (0.5, 1, 2, 4, 8, 16, 32)]
    pauses.clear()
    later = [(503, {"Content-Length": "0", "Retry-After": after}, b"") for after in ("7.5", "999")]
    server.answers = later
    wire.close()
    wire.read(0, 10, 10)
    assert pauses == [7.5, 120]


def test_a_connection_is_used_for_the_next_request(server):
    """Those of other objects, too: setting one up takes several round trips."""
    for start in range(0, 100, 10):
        wire = client.Connection(remote(server))
        assert wire.read(start, start + 10, start + 10) == DATA[start : start + 10]
        wire.close()
    assert (len(server.asked), server.connections) == (10, 1)


def test_mirrors_take_turns(server):
    other = Server()
    try:
        wire = client.Connection(Remote((server.url, other.url), COMMIT, len(DATA), None))
        server.answers = [(503, {"Content-Length": "0"}, b"")]
        assert wire.read(0, 10, 10) == DATA[:10]
        assert (len(server.asked), len(other.asked)) == (1, 1)
        wire.close()
        server.answers = [(503, {"Content-Length": "0"}, b"")]
        other.answers = [(404, {"Content-Length": "0"}, b"")]  # a mirror that lacks the file
        assert wire.read(0, 10, 10) == DATA[:10]
        assert (len(server.asked), len(other.asked)) == (3, 2)
        wire.close()
    finally:
        other.close()


# ------------------------------------------------------------------ what is kept


def ignore(_):
    """No-op callback."""


def test_a_download_goes_on_where_it_was(server, tmp_path):
    path, heard = tmp_path / "file", []
    path.write_bytes(DATA[:70])
    fetched, sha256 = install.fetch(remote(server), path, heard.append)
    assert (fetched, sha256) == (130, hashlib.sha256(DATA).hexdigest())
    assert path.read_bytes() == DATA and sum(heard) == 200
    assert server.asked == ["bytes=70-199"]
    assert install.fetch(remote(server), path, ignore) == (0, sha256)
    path.write_bytes(DATA + b"more than there is")
    assert install.fetch(remote(server), path, ignore) == (200, sha256)
    assert path.read_bytes() == DATA


def test_what_was_damaged_on_the_disk_is_removed(server, tmp_path):
    path, sha256 = tmp_path / "file", hashlib.sha256(DATA).hexdigest()
    path.write_bytes(b"#" + DATA[1:70])
    with pytest.raises(HubChecksumError, match="the file arrived with SHA-256"):
        install.fetch_checked(remote(server), path, "the file", sha256, ignore)
    assert install.fetch_checked(remote(server), path, "the file", sha256, ignore) == 200


def test_parts_are_on_the_disk_as_they_arrive(server, tmp_path):
    path, seen = tmp_path / "file", []
    install.fetch(remote(server), path, lambda _: seen.append(path.stat().st_size))
    assert seen[0] == 0 and {50, 100, 150} <= {*seen}
