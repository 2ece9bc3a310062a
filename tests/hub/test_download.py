"""Downloads in parts: which answers are accepted, and which data is kept from earlier attempts."""

import threading
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from offmarl.errors import HubError
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


def collected(server, path, **described):
    """The bytes that are missing to a download that is begun anew."""
    download = install.Download(path, remote(server, **described))
    missing = download.missing(0, download.size)
    download.close()
    return missing


def test_parts_survive_and_are_not_fetched_again(server, tmp_path):
    download = install.Download(tmp_path / "file", remote(server))
    assert download.missing(0, 200) == 200
    download.ensure(60, 130)
    assert (download.missing(0, 200), download.missing(60, 130), download.fetched) == (130, 0, 70)
    assert [download.missing(*span) for span in ((50, 70), (120, 140), (0, 60))] == [10, 10, 60]
    download.close()
    assert collected(server, tmp_path / "file") == 130
    server.asked.clear()
    again = install.Download(tmp_path / "file", remote(server))
    assert b"".join(again.parts(0, 200)) == DATA
    assert again.fetched == 130
    assert server.asked == ["bytes=0-59", "bytes=130-199"]
    again.close()
    assert (tmp_path / "file").read_bytes() == DATA


@pytest.mark.parametrize(
    "other", [{"commit": "b" * 40}, {"size": 180}, {"sha256": "0" * 64}], ids=str
)
def test_parts_of_another_file_are_not_used(server, tmp_path, other):
    """Another commit may have other content, even of the same size."""
    path = tmp_path / "file"
    download = install.Download(path, remote(server))
    download.ensure(0, 100)
    download.close()
    assert collected(server, path) == 100
    assert collected(server, path, **other) == other.get("size", 200)
    assert path.read_bytes() == bytes(other.get("size", 200))
    assert collected(server, path) == 200  # and the first is forgotten


def test_a_damaged_part_is_fetched_again(server, tmp_path):
    path = tmp_path / "file"
    download = install.Download(path, remote(server))
    download.ensure(0, 200)
    download.close()
    data = bytearray(DATA)
    data[60] ^= 1
    path.write_bytes(data)
    assert collected(server, path) == 50
    journal = path.with_name("file" + install.JOURNAL)
    lines = journal.read_text().splitlines()
    assert len(lines) == 4  # who it is, and the parts that are as they were noted
    journal.write_text("\n".join([*lines[:-1], lines[-1][:10]]))
    assert collected(server, path) == 100


def test_a_part_is_noted_when_it_is_durable(server, tmp_path, monkeypatch):
    path, events = tmp_path / "file", []
    download = install.Download(path, remote(server))
    fsync, note = install.os.fsync, install.Download._note
    monkeypatch.setattr(install.os, "fsync", lambda fd: events.append("sync") or fsync(fd))
    monkeypatch.setattr(
        install.Download, "_note", lambda self, record: events.append(record) or note(self, record)
    )
    download.ensure(0, 50)
    crc = zlib.crc32(DATA[:50])
    assert events == ["sync", {"start": 0, "stop": 50, "crc32": crc}]
    download.discard()
    assert list(tmp_path.iterdir()) == []


def test_the_hash_of_the_whole(server, tmp_path):
    import hashlib

    download = install.Download(tmp_path / "file", remote(server))
    heard = []
    download.report_to(heard.append)
    download.ensure(120, 130)
    assert download.sha256() == hashlib.sha256(DATA).hexdigest()
    assert sum(heard) == download.fetched == 200
    download.close()


def test_a_download_as_a_file(server, tmp_path):
    download = install.Download(tmp_path / "file", remote(server))
    view = install.RemoteFile(download)
    assert view.readable() and view.seekable()
    assert view.seek(-10, 2) == view.tell() == 190
    assert view.read(20) == DATA[190:]
    assert view.read(5) == b""
    assert view.seek(60) == 60
    assert view.seek(-10, 1) == 50
    assert view.read(3) == DATA[50:53]
    assert view.tell() == 53
    assert view.seek(500) == 500
    assert view.read(5) == b""
    assert view.seek(-500, 1) == 0
    assert download.fetched == 13
    assert view.read() == DATA
    download.close()


@pytest.mark.parametrize(
    ("intervals", "merged"),
    [
        ([], []),
        ([(5, 9)], [(5, 9)]),
        ([(5, 9), (0, 5)], [(0, 9)]),
        ([(0, 4), (5, 9)], [(0, 4), (5, 9)]),
        ([(0, 9), (2, 4), (12, 13)], [(0, 9), (12, 13)]),
        ([(0, 4), (2, 6), (6, 7)], [(0, 7)]),
    ],
)
def test_intervals_are_joined(intervals, merged):
    assert install._merge(intervals) == merged
