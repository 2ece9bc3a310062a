"""A web server on this machine that serves byte ranges and counts requests."""

import base64
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple


class Server(NamedTuple):
    url: str
    sent: list[tuple[str, int]]
    """Path and number of bytes of each answer."""
    users: list[str]
    """The user name and password of each question, "" without."""


@contextmanager
def serve(directory: Path) -> Iterator[Server]:
    sent: list[tuple[str, int]] = []
    users: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *args):
            pass

        def do_GET(self):
            _, _, user = self.headers.get("Authorization", "").partition("Basic ")
            users.append(base64.b64decode(user).decode())
            path = directory / self.path.removeprefix("/")
            if not path.is_file():
                self.answer(404, b"")
                return
            data = path.read_bytes()
            first, last = self.interval(len(data))
            self.answer(206, data[first:last], f"bytes {first}-{last - 1}/{len(data)}")

        def interval(self, size):
            first, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")
            if not first:
                return max(0, size - int(last)), size
            return int(first), min(size, int(last) + 1) if last else size

        def answer(self, status, data, interval=None):
            sent.append((self.path, len(data)))
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", '"1"')
            if interval:
                self.send_header("Content-Range", interval)
            self.end_headers()
            self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield Server(f"http://127.0.0.1:{server.server_port}", sent, users)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
