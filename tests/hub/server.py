"""A loopback hub with the protocol of huggingface.co, and faults as networks have.

Metadata and small files come from one port, large files from another, as from a content network:
the first answers with a redirect to a signed address.
"""

import base64
import hashlib
import json
import random
import re
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

from tests.web import Handler, WebServer

LARGE = 10_000
"""Bytes from which a file is kept by hash (LFS)."""


@dataclass
class Faults:
    """What goes wrong, and how often; of answers that carry large files."""

    cut: float = 0.0
    """Share of answers that end at a random point."""
    unavailable: int = 0
    """Answers of 503, with Retry-After, that come first."""
    flip: bool = False
    """One bit of every answer is another."""
    delay: float = 0.0
    """Seconds between blocks of 64 kB."""
    latency: float = 0.0
    """Seconds before every answer."""
    etag: str | None = None
    """What to claim that every file's hash is."""
    extra: int = 0
    """Bytes that small files are longer than the server says."""
    ranges: bool = True
    uploads: int = 1000
    """Uploads that are taken; the others are refused."""
    lost: str = ""
    """Pattern of paths that a commit leaves out without a word."""
    spoiled: str = ""
    """Pattern of paths that a commit keeps with another last byte, and one more for small files."""
    dice: random.Random = field(default_factory=lambda: random.Random(0))


_METADATA = {
    "dataset": {"license": str, "task_categories": list, "tags": list},
    "model": {"license": str, "pipeline_tag": str, "library_name": str, "tags": list},
}


class Hub:
    """Repositories, their commits, and the two servers.

    With a directory, large files are kept there instead of in memory.
    """

    def __init__(self, directory: Path | None = None):
        self.repositories: dict[str, list[tuple[str, dict[str, bytes | Path]]]] = {}
        self.uploaded: dict[str, bytes | Path] = {}
        self.directory = directory
        self.faults = Faults()
        self.tokens: dict[str, set[str]] = {}
        """Tokens that may read and write a private repository; all others are public."""
        self.sent = 0
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.lock = threading.Lock()
        self.front, self.content = WebServer(_Front, self), WebServer(_Content, self)

    @property
    def url(self) -> str:
        return self.front.url

    def close(self) -> None:
        for server in (self.front, self.content):
            server.server_close()

    def commit(self, repository: str, files: dict[str, bytes], removed: Iterable[str] = ()) -> str:
        """Add files, remove others, and return the commit."""
        history = self.repositories.setdefault(repository, [])
        merged = (history[-1][1] if history else {}) | files
        for path in removed:
            del merged[path]
        name = hashlib.sha1(f"{repository}{len(history)}".encode()).hexdigest()
        history.append((name, merged))
        return name

    def files(self, repository: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        history = self.repositories[repository]
        if revision == "main":
            return history[-1] if history else ("0" * 40, {})
        return next((commit for commit in history if commit[0] == revision), None)


def size_of(data: bytes | Path) -> int:
    return data.stat().st_size if isinstance(data, Path) else len(data)


def oid_of(data: bytes | Path) -> str:
    return data.name if isinstance(data, Path) else hashlib.sha256(data).hexdigest()


def metadata_of(data: bytes | Path) -> dict:
    size = size_of(data)
    about = {"size": size, "sha256": oid_of(data), "pointerSize": 100}
    return {"size": size, "blobId": "0" * 40} | ({"lfs": about} if size >= LARGE else {})


def is_ignored(path: str, lines: bytes) -> bool:
    """Whether a .gitignore leaves out a path, for patterns of directories, names and suffixes."""
    parts = path.split("/")
    return any(
        fnmatch(part, line.strip("/")) and (not line.endswith("/") or part != parts[-1])
        for line in lines.decode().split()
        for part in parts
    )


def slice_of(data: bytes | Path, start: int, stop: int) -> bytes:
    if not isinstance(data, Path):
        return data[start:stop]
    with data.open("rb") as file:
        file.seek(start)
        return file.read(stop - start)


class _Handler(Handler):
    @property
    def hub(self) -> Hub:
        return self.server.of

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def note(self):
        time.sleep(self.hub.faults.latency)
        with self.hub.lock:
            self.hub.requests.append((self.command, self.path, dict(self.headers)))

    def is_unavailable(self) -> bool:
        """Whether this is one of the answers of 503 that come first."""
        faults = self.hub.faults
        with self.hub.lock:
            left, faults.unavailable = faults.unavailable, max(0, faults.unavailable - 1)
        return left > 0

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(self, status, data=b"", **headers):
        data = data if isinstance(data, bytes) else json.dumps(data).encode()
        super().answer(status, data, **headers)

    def fail(self, status, code, message=""):
        self.answer(status, {"error": message or code}, X_Error_Code=code, X_Error_Message=code)


class _Front(_Handler):
    """Metadata, small files, commits."""

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        self.note()
        path = unquote(urlsplit(self.path).path)
        if match := re.fullmatch(r"(?:/datasets)?/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            return self.resolve(*match.groups())
        if match := re.fullmatch(
            r"/api/(?:datasets|models)/([^/]+/[^/]+)(?:/revision/(.+))?", path
        ):
            return self.info(match[1], match[2] or "main")
        if match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)/tree/([^/]+)", path):
            return self.tree(*match.groups())
        return self.answer(200 if path == "/" else 404, {})

    def may_use(self, repository):
        allowed = self.hub.tokens.get(repository)
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        return allowed is None or token in allowed

    def known(self, repository, revision):
        if not self.may_use(repository):
            return self.fail(401, "RepoNotFound")
        if repository not in self.hub.repositories:
            return self.fail(404, "RepoNotFound")
        snapshot = self.hub.files(repository, revision)
        return snapshot or self.fail(404, "RevisionNotFound")

    def resolve(self, repository, revision, path):
        if not (snapshot := self.known(repository, revision)):
            return None
        commit, files = snapshot
        if path not in files:
            return self.fail(404, "EntryNotFound")
        data, claimed = files[path], self.hub.faults.etag
        if size_of(data) < LARGE:
            tag = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
            tag = f'"{tag if claimed is None else claimed}"'
            return self.small(data, X_Repo_Commit=commit, ETag=tag)
        oid = oid_of(data)
        self.hub.uploaded[oid] = data
        tag = f'"{oid if claimed is None else claimed}"'
        about = {"X_Linked_ETag": tag, "X_Linked_Size": size_of(data)}
        location = f"{self.hub.content.url}/{oid}?signature=s"
        return self.answer(302, X_Repo_Commit=commit, Location=location, **about)

    def small(self, data, **headers):
        extra = self.hub.faults.extra
        if self.command == "GET" and self.is_unavailable():
            return self.answer(503, Retry_After=0)
        if extra and self.command == "GET":
            self.close_connection = True  # the body ends where the connection does
            return self.answer(200, data + b"#" * extra, Content_Length=None, **headers)
        return self.answer(200, data, **headers)

    def info(self, repository, revision):
        if snapshot := self.known(repository, revision):
            detailed = "blobs" in parse_qs(urlsplit(self.path).query)
            siblings = [
                {"rfilename": name, **(metadata_of(data) if detailed else {})}
                for name, data in snapshot[1].items()
            ]
            self.answer(200, {"id": repository, "sha": snapshot[0], "siblings": siblings})

    def tree(self, repository, revision):
        if snapshot := self.known(repository, revision):
            files = {name: metadata_of(data) for name, data in snapshot[1].items()}
            for name, entry in files.items():
                entry |= {"type": "file", "path": name, "oid": entry["blobId"]}
                if "lfs" in entry:
                    entry["lfs"]["oid"] = entry["lfs"]["sha256"]
            self.answer(200, [*files.values()])

    def do_POST(self):
        self.note()
        path = unquote(urlsplit(self.path).path)
        body = self.body()
        if path == "/api/repos/create":
            return self.create(json.loads(body))
        if path == "/api/validate-yaml":
            return self.validate(**json.loads(body))
        if match := re.fullmatch(r"/api/(?:datasets|models)/([^/]+/[^/]+)/preupload/(.+)", path):
            request = json.loads(body)
            history = self.hub.repositories[match[1]]
            ignore = history[-1][1].get(".gitignore", b"") if history else b""
            ignore = request["gitIgnore"].encode() if "gitIgnore" in request else ignore
            modes = [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["size"] >= LARGE else "regular",
                    "shouldIgnore": is_ignored(file["path"], ignore),
                }
                for file in request["files"]
            ]
            return self.answer(200, {"files": modes})
        if match := re.fullmatch(r"(?:/datasets)?/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            return self.batch(json.loads(body)["objects"])
        if match := re.fullmatch(r"/api/(?:datasets|models)/([^/]+/[^/]+)/commit/(.+)", path):
            return self.add(match[1], [json.loads(line) for line in body.splitlines()])
        return self.answer(404, {})

    def create(self, request):
        name = "/".join(filter(None, (request.get("organization"), request["name"])))
        if not self.may_use(name):
            return self.answer(401, {"error": "Invalid username or password."})
        status = 409 if name in self.hub.repositories else 200
        self.hub.repositories.setdefault(name, [])
        return self.answer(status, {"url": f"{self.hub.url}/datasets/{name}"})

    def validate(self, content, repoType):
        """Check what the hub checks of the metadata of a card."""
        try:
            data = yaml.safe_load(content.split("---")[1])
            problems = [
                key
                for key, kind in _METADATA[repoType].items()
                if not isinstance(data.get(key), kind)
            ]
        except (yaml.YAMLError, IndexError) as error:
            problems = [str(error)]
        if problems:
            return self.answer(400, {"errors": [{"message": problem} for problem in problems]})
        return self.answer(200, {"errors": [], "warnings": []})

    def batch(self, objects):
        answers = []
        for item in objects:
            answer = {"oid": item["oid"], "size": item["size"]}
            if item["oid"] not in self.hub.uploaded:
                href = f"{self.hub.content.url}/{item['oid']}"
                answer["actions"] = {"upload": {"href": href}}
            answers.append(answer)
        content = {"transfer": "basic", "objects": answers}
        return self.answer(200, content, Content_Type="application/vnd.git-lfs+json")

    def add(self, repository, lines):
        history = self.hub.repositories[repository]
        parent = lines[0]["value"].get("parentCommit")
        if parent and parent != (history[-1][0] if history else "0" * 40):
            return self.fail(412, "PreconditionFailed", "a commit has happened since")
        files, removed = {}, set()
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.uploaded[value["oid"]]
            elif line["key"] == "deletedFile":
                removed.add(value["path"])
        faults = self.hub.faults
        files = {name: x for name, x in files.items() if not fnmatch(name, faults.lost)}
        for name in files:
            if fnmatch(name, faults.spoiled):
                files[name] = files[name][:-1] + (b"#" if len(files[name]) >= LARGE else b"##")
        commit = self.hub.commit(repository, files, removed)
        url = f"{self.hub.url}/datasets/{repository}/commit/{commit}"
        return self.answer(200, {"commitUrl": url, "commitOid": commit, "hookOutput": ""})


class _Content(_Handler):
    """Large files, by hash; here is where connections fail."""

    def do_PUT(self):
        self.note()
        data = self.body() if self.hub.directory is None else self.to_file(self.hub.directory)
        with self.hub.lock:
            self.hub.faults.uploads -= 1
            taken = self.hub.faults.uploads >= 0
        if taken:
            self.hub.uploaded[urlsplit(self.path).path[1:]] = data
        self.answer(200 if taken else 400)

    def to_file(self, directory: Path) -> Path:
        path, size = directory / urlsplit(self.path).path[1:], int(self.headers["Content-Length"])
        with path.open("wb") as file:
            while size:
                block = self.rfile.read(min(size, 2**20))
                file.write(block)
                size -= len(block)
        return path

    def do_GET(self):
        self.note()
        faults = self.hub.faults
        address = urlsplit(self.path)
        data = self.hub.uploaded[address.path[1:]]
        if self.is_unavailable():
            return self.answer(503, Retry_After=0)
        with self.hub.lock:
            cut = faults.dice.random() if faults.dice.random() < faults.cut else None
        if parse_qs(address.query).get("signature") != ["s"]:
            return self.answer(403)
        size = size_of(data)
        start, stop, status = 0, size, 200
        match = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if match and faults.ranges:
            start, status = int(match[1]), 206
            stop = min(int(match[2]) + 1, size) if match[2] else size
        part = bytearray(slice_of(data, start, stop))
        if faults.flip and part:
            part[len(part) // 2] ^= 1
        self.send_response(status)
        self.send_header("Content-Length", str(len(part)))
        if status == 206:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.end_headers()
        self.send(part if cut is None else part[: int(cut * len(part))])
        self.close_connection = self.close_connection or cut is not None
        return None

    def send(self, part):
        for begin in range(0, len(part), 2**16):
            block = part[begin : begin + 2**16]
            self.wfile.write(block)
            with self.hub.lock:
                self.hub.sent += len(block)
            time.sleep(self.hub.faults.delay)
