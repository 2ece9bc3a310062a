"""A web server on this machine that serves byte ranges and counts requests."""

import base64
from pathlib import Path

from tests.web import Handler, WebServer


class FileServer(WebServer):
    """Serves the files of a directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.sent: list[tuple[str, int]] = []
        """Path and number of bytes of each answer."""
        self.users: list[str] = []
        """The user name and password of each question, "" without."""
        super().__init__(_Files)


class _Files(Handler):
    server: FileServer

    def do_GET(self) -> None:
        _, _, user = self.headers.get("Authorization", "").partition("Basic ")
        self.server.users.append(base64.b64decode(user).decode())
        path = self.server.directory / self.path.removeprefix("/")
        if not path.is_file():
            return self.answer(404)
        data = path.read_bytes()
        first, last = self.interval(len(data))
        self.server.sent.append((self.path, last - first))
        interval = f"bytes {first}-{last - 1}/{len(data)}"
        return self.answer(206, data[first:last], ETag='"1"', Content_Range=interval)

    def interval(self, size: int) -> tuple[int, int]:
        first, last = self.headers.get("Range", "bytes=0-").removeprefix("bytes=").split("-")
        if not first:
            return max(0, size - int(last)), size
        return int(first), min(size, int(last) + 1) if last else size
