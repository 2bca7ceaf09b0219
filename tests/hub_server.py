"""A hub in a thread: as much of the Hugging Face hub's HTTP API as huggingface_hub and onebox use, and its failures.

    with HubServer() as hub:
        hub.add("Qwen/Small-FP8", directory)
        hub.fail(Fault.CUT, path="safetensors", after_bytes=70_000, times=2)

Weights are stored as the hub stores them: `resolve` answers with a redirect to a signed address on another origin,
which refuses a token. Every other file is answered in place, compressed for who accepts it. A repository keeps all its
commits; `add` makes a new one and moves `main`.
"""

import contextlib
import gzip
import hashlib
import json
import re
import socket
import ssl
import threading
import time
from dataclasses import dataclass, field
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple, Self
from urllib.parse import parse_qs, quote, unquote, urlsplit

LFS_SUFFIXES = (".safetensors", ".bin", ".gguf")
_CHUNK_BYTES = 16 << 10


class Fault(Enum):
    """What an answer does instead of arriving: ends early, stops halfway, or is an error."""

    CUT = "cut"
    STALL = "stall"
    STATUS = "status"


@dataclass
class PlannedFault:
    """A fault of the next `times` answers to paths that match `path`; `after_bytes` of the body are sent before it."""

    fault: Fault
    path: str
    times: int
    after_bytes: int = 0
    status: int = 503
    headers: dict[str, str] = field(default_factory=dict)


class Served(NamedTuple):
    """One answered request; `sent` counts bytes of the body."""

    method: str
    path: str
    range: str | None
    status: int
    sent: int


@dataclass(frozen=True)
class StoredFile:
    content: bytes
    is_lfs: bool

    @property
    def blob_id(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.content) + self.content, usedforsecurity=False).hexdigest()

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content).hexdigest()

    @property
    def etag(self) -> str:
        return self.sha256 if self.is_lfs else self.blob_id


@dataclass
class StoredRepository:
    """Files by commit and commits by revision."""

    commits: dict[str, dict[str, StoredFile]] = field(default_factory=dict)
    revisions: dict[str, str] = field(default_factory=dict)
    token: str | None = None

    def commit_of(self, revision: str) -> str | None:
        return revision if revision in self.commits else self.revisions.get(revision)


class HubServer:
    """The server and its origin for weights. `url` is the endpoint."""

    def __init__(self, certificate: Path | None = None) -> None:
        self.repositories: dict[str, StoredRepository] = {}
        self.renamed: dict[str, str] = {}
        self.requests: list[Served] = []
        self.bytes_per_second = 0.0
        """How fast a body is sent; 0 is without limit."""
        self.signatures_left: int | None = None
        """How many more requests a signed address answers before it expires; None: any number."""
        self.num_bytes_sent = 0
        """Bytes of all bodies so far; `requests` counts those of an answer when it has ended."""
        self.sends_etag = True
        self.ignores_ranges = False
        self.damages: str | None = None
        """Pattern of the paths whose content is changed on the way, though its size and hash are told as they are."""
        self.closing = threading.Event()
        self._faults: list[PlannedFault] = []
        self._lock = threading.Lock()
        self._ended = threading.Condition()
        self._num_answering = 0
        self._signed: dict[str, list[int | None]] = {}
        self._servers = [_start(self, handler, certificate) for handler in (_HubHandler, _StorageHandler)]
        scheme = "http" if certificate is None else "https"
        self.url, self.storage_url = (f"{scheme}://127.0.0.1:{server.server_port}" for server in self._servers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.closing.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def add(self, repository: str, directory: Path, revision: str = "main") -> str:
        """Stores every file below `directory` as a new commit of `revision` and returns the commit."""
        files = {
            path.relative_to(directory).as_posix(): StoredFile(path.read_bytes(), path.suffix in LFS_SUFFIXES)
            for path in sorted(directory.rglob("*"))
            if path.is_file()
        }
        assert files, f"{directory} holds no file"
        stored = self.repositories.setdefault(repository, StoredRepository())
        text = json.dumps([len(stored.commits), {name: file.etag for name, file in files.items()}])
        commit = hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()
        stored.commits[commit] = files
        stored.revisions[revision] = commit
        return commit

    def gate(self, repository: str, token: str) -> None:
        """From now on only who sends `token` may read `repository`."""
        self.repositories[repository].token = token

    def fail(
        self, fault: Fault, *, path: str = "", times: int = 1, after_bytes: int = 0, status: int = 503, **headers: str
    ) -> None:
        """Plans a fault; header names are given with underscores."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        with self._lock:
            self._faults.append(PlannedFault(fault, path, times, after_bytes, status, named))

    def heal(self) -> None:
        """Forgets all planned faults."""
        with self._lock:
            self._faults.clear()

    def bytes_sent(self, path: str = "") -> int:
        """Bytes of bodies that were sent for paths in which the pattern `path` is found."""
        with self._lock:
            return sum(served.sent for served in self.requests if re.search(path, served.path))

    def environment(self, home: Path) -> dict[str, str]:
        """The variables with which a process uses this hub, and `home` for its cache."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(home),
            "HF_HUB_CACHE": str(home / "hub"),
            "HF_HUB_OFFLINE": "0",
            "HF_TOKEN_PATH": str(home / "token"),
            "NO_PROXY": "127.0.0.1",
        }

    def use(self, monkeypatch, home: Path) -> None:
        """Makes this process, and the processes it starts, use this hub and a cache of their own."""
        from huggingface_hub import constants
        from huggingface_hub.utils import close_session

        close_session()
        monkeypatch.delenv("HF_TOKEN", raising=False)
        for name, value in self.environment(home).items():
            monkeypatch.setenv(name, value)
        monkeypatch.setattr(constants, "ENDPOINT", self.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", self.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(home / "hub"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def take_fault(self, path: str, *, has_body: bool) -> PlannedFault | None:
        """The fault of this answer; one without a body can only be replaced by an error."""
        with self._lock:
            for planned in self._faults:
                can_break = has_body or planned.fault is Fault.STATUS
                if planned.times and can_break and re.search(planned.path, path):
                    planned.times -= 1
                    return planned
        return None

    def record(self, served: Served) -> None:
        with self._lock:
            self.requests.append(served)

    @contextlib.contextmanager
    def answering(self):
        with self._ended:
            self._num_answering += 1
        try:
            yield
        finally:
            with self._ended:
                self._num_answering -= 1
                self._ended.notify_all()

    def settle(self) -> None:
        """Waits until no answer is being sent: those to a client that was killed end, and count, a little later."""
        with self._ended:
            assert self._ended.wait_for(lambda: not self._num_answering, 30)

    def sign(self, path: str) -> str:
        """A signed address of a path of this hub, on the storage's origin."""
        with self._lock:
            signature = f"{len(self._signed):06}"
            self._signed[signature] = [self.signatures_left]
        return f"{self.storage_url}{quote(path)}?signature={signature}"

    def check_signature(self, signature: str) -> bool:
        with self._lock:
            [left] = self._signed.get(signature, [0])
            if left is not None:
                self._signed[signature] = [left - 1]
            return left is None or left > 0


def _start(hub: HubServer, handler: type["_Handler"], certificate: Path | None) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type(handler.__name__, (handler,), {"hub": hub}))
    server.daemon_threads = True
    server.block_on_close = False
    if certificate:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server


class _Handler(BaseHTTPRequestHandler):
    """Answers with a file or a range of it, with the faults that are planned."""

    hub: HubServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # of a client that was killed
            super().handle()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        with self.hub.answering():
            try:
                self.answer(unquote(urlsplit(self.path).path))
            except OSError:
                self.close_connection = True

    def answer(self, path: str) -> None:
        raise NotImplementedError

    def send_error_code(self, status: int, code: str, message: str) -> None:
        self.send(status, json.dumps({"error": message}).encode(), {"X-Error-Code": code, "X-Error-Message": message})

    def send_file(self, file: StoredFile, headers: dict[str, str]) -> None:
        """The file, or the one range that is asked for."""
        etag = {"ETag": f'"{file.etag}"'} if self.hub.sends_etag else {}
        headers = {"Accept-Ranges": "bytes", **etag, **headers}
        if self.hub.damages and re.search(self.hub.damages, unquote(self.path)):
            file = StoredFile(file.content[:-1] + bytes([file.content[-1] ^ 1]), file.is_lfs)
        size, wanted = len(file.content), re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if not wanted or self.hub.ignores_ranges:
            self.send(200, file.content, headers)
            return
        begin, end = int(wanted[1]), min(int(wanted[2] or size - 1), size - 1)
        if begin >= size or end < begin:
            self.send(416, b"", {"Content-Range": f"bytes */{size}"})
            return
        self.send(206, file.content[begin : end + 1], {**headers, "Content-Range": f"bytes {begin}-{end}/{size}"})

    def send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        """Sends an answer, or what a planned fault makes of it."""
        path = unquote(urlsplit(self.path).path)
        planned = self.hub.take_fault(path, has_body=bool(body)) if self.command == "GET" else None
        if planned and planned.fault is Fault.STATUS:
            status, body, headers, planned = planned.status, b"planned", planned.headers, None
        if status == 200 and "gzip" in self.headers.get("Accept-Encoding", "") and path.endswith(".json"):
            body, headers = gzip.compress(body), {**(headers or {}), "Content-Encoding": "gzip"}
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        self._sent = 0
        try:
            if self.command != "HEAD":
                self._send_body(body if planned is None else body[: planned.after_bytes])
        finally:
            self.hub.record(Served(self.command, path, self.headers.get("Range"), status, self._sent))
        if planned:
            self._break(planned.fault)

    def _send_body(self, body: bytes) -> None:
        began = time.monotonic()
        while self._sent < len(body):
            count = self.connection.send(body[self._sent : self._sent + _CHUNK_BYTES])
            self._sent += count
            self.hub.num_bytes_sent += count
            speed = self.hub.bytes_per_second
            if speed and self.hub.closing.wait(max(0.0, self._sent / speed - (time.monotonic() - began))):
                raise ConnectionAbortedError

    def _break(self, fault: Fault) -> None:
        self.wfile.flush()
        if fault is Fault.STALL:
            self.hub.closing.wait(60)
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)


class _HubHandler(_Handler):
    """The hub itself: information about repositories, and `resolve`."""

    def answer(self, path: str) -> None:
        parts = path.strip("/").split("/")
        if parts[:2] == ["api", "models"] and len(parts) >= 4:
            repository, rest = "/".join(parts[2:4]), parts[4:]
        else:
            repository, rest = "/".join(parts[:2]), parts[2:]
        if repository in self.hub.renamed:
            target = self.path.replace(repository, self.hub.renamed[repository], 1)
            self.send(307, b"", {"Location": target})
            return
        stored = self._readable(repository)
        if stored is None:
            return
        commit = stored.commit_of(rest[1] if len(rest) > 1 else "main")
        if commit is None:
            self.send_error_code(404, "RevisionNotFound", f"Invalid rev id: {rest[1]}")
        elif rest[:1] == ["resolve"]:
            self._resolve(stored, commit, "/".join(rest[2:]), path)
        elif rest[:1] == ["tree"]:
            self._send_json([_tree_entry(name, file) for name, file in stored.commits[commit].items()])
        else:
            self._send_json(self._information(repository, stored, commit))

    def _readable(self, repository: str) -> StoredRepository | None:
        """The repository, if it exists and the request may read it; otherwise the refusal has been sent."""
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        stored = self.hub.repositories.get(repository)
        if stored is None:
            # As the hub does: a name that does not exist is told only to who is logged in.
            status = 404 if token else 401
            self.send_error_code(status, "RepoNotFound", "Repository not found")
            return None
        if stored.token and token != stored.token and "/resolve/" in self.path:
            message = f"Access to model {repository} is restricted."
            self.send_error_code(403 if token else 401, "GatedRepo", message)
            return None
        return stored

    def _resolve(self, stored: StoredRepository, commit: str, name: str, path: str) -> None:
        file = stored.commits[commit].get(name)
        if file is None:
            self.send_error_code(404, "EntryNotFound", f"Entry not found: {name}")
            return
        headers = {"X-Repo-Commit": commit}
        if not file.is_lfs:
            self.send_file(file, headers)
            return
        pinned = path.split("/resolve/")[0] + f"/resolve/{commit}/{name}"
        headers |= {
            "X-Linked-Etag": f'"{file.sha256}"',
            "X-Linked-Size": str(len(file.content)),
            "Location": self.hub.sign(pinned),
        }
        self.send(302, b"", headers)

    def _information(self, repository: str, stored: StoredRepository, commit: str) -> dict[str, object]:
        with_blobs = "blobs" in parse_qs(urlsplit(self.path).query)
        files = stored.commits[commit]
        siblings = [{"rfilename": name, **(_blob(file) if with_blobs else {})} for name, file in files.items()]
        gated = "manual" if stored.token else False
        return {"id": repository, "sha": commit, "gated": gated, "private": False, "siblings": siblings}

    def _send_json(self, value: object) -> None:
        self.send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})


class _StorageHandler(_Handler):
    """The origin that signed addresses point to."""

    def answer(self, path: str) -> None:
        if "Authorization" in self.headers:
            self.send(400, b"a token was sent to the storage")
            return
        [signature] = parse_qs(urlsplit(self.path).query).get("signature", [""])
        if not self.hub.check_signature(signature):
            self.send(403, b"expired")
            return
        repository, _, rest = path.strip("/").partition("/resolve/")
        commit, _, name = rest.partition("/")
        self.send_file(self.hub.repositories[repository].commits[commit][name], {})


def _blob(file: StoredFile) -> dict[str, object]:
    lfs = {"lfs": {"sha256": file.sha256, "size": len(file.content), "pointerSize": 130}} if file.is_lfs else {}
    return {"size": len(file.content), "blobId": file.blob_id, **lfs}


def _tree_entry(name: str, file: StoredFile) -> dict[str, object]:
    lfs = {"lfs": {"oid": file.sha256, "size": len(file.content), "pointerSize": 130}} if file.is_lfs else {}
    return {"type": "file", "path": name, "size": len(file.content), "oid": file.blob_id, **lfs}
