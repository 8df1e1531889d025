"""An object store over HTTP on this machine, which can be told to be slow, to fail, to cut off and to list late.

Objects appear and are replaced whole, as in S3; there are no directories and no renaming.
"""

from __future__ import annotations

import base64
import json
import random
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, final
from urllib.parse import parse_qs, unquote, urlsplit

from tests.web_server import QuietHandler, WebServer, running

__all__ = ["Faults", "ObjectStore", "serve_objects"]

Failure = Literal["drop", "cut", "lost"] | int
"""Close the connection; let half of the body pass and close; do it, but lose the answer; or answer with a status."""


@final
@dataclass
class Faults:
    """How badly the store behaves. All may be changed at any time.

    Attributes:
        latency_s: Before each answer.
        bytes_per_s: Of a body, in both directions; None is no limit.
        failure_rate: Which share of requests fail, in one of the ways of `kinds`.
        kinds: Ways.
        next: What becomes of the next requests, first to last; None goes well.
        listing_delay_s: For how long listings show what was there before.
        capacity: Bytes of all objects; writing more is refused with status 507.
        read_only: Writing and deleting are refused with status 403.
        down: Every connection is closed at once.
    """

    latency_s: float = 0.0
    bytes_per_s: float | None = None
    failure_rate: float = 0.0
    kinds: tuple[Failure, ...] = ("drop", "cut", "lost", 503)
    next: deque[Failure | None] = field(default_factory=deque)
    listing_delay_s: float = 0.0
    capacity: int | None = None
    read_only: bool = False
    down: bool = False


@final
@dataclass(frozen=True)
class _Version:
    """What a key held from some time on; None: nothing."""

    since: float
    content: bytes | None


@final
class ObjectStore:
    """Objects by key (`bucket/folder/file`), and what was asked of them.

    Attributes:
        faults: See :class:`Faults`.
        requests: Method and key of each request so far, those that failed included.
        address: host:port.
        login: `user:password` that requests must bring; empty: none.
    """

    def __init__(self, *, login: str = "", seed: int = 0) -> None:
        self.faults = Faults()
        self.requests: list[tuple[str, str]] = []
        self.address = ""
        self.login = login
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._versions: dict[str, list[_Version]] = {}

    def uri(self, key: str) -> str:
        """Where fsspec finds a key, once `tests.object_store.file_system` is registered."""
        login = f"{self.login}@" if self.login else ""
        return f"loopback://{login}{self.address}/{key}"

    def get(self, key: str) -> bytes | None:
        """What a key holds."""
        with self._lock:
            versions = self._versions.get(key)
            return versions[-1].content if versions else None

    def put(self, key: str, content: bytes | None) -> None:
        """Replace or remove (None) an object."""
        with self._lock:
            self._versions.setdefault(key, []).append(_Version(time.monotonic(), content))

    def keys(self, prefix: str = "") -> list[str]:
        """All that there are, whatever listings show."""
        with self._lock:
            held = [key for key, versions in self._versions.items() if versions[-1].content is not None]
        return sorted(key for key in held if key.startswith(prefix))

    def listed(self, prefix: str) -> dict[str, int]:
        """Sizes by key, as of `listing_delay_s` ago."""
        then = time.monotonic() - self.faults.listing_delay_s
        found = {}
        with self._lock:
            for key, versions in self._versions.items():
                content = next((each.content for each in reversed(versions) if each.since <= then), None)
                if key.startswith(prefix) and content is not None:
                    found[key] = len(content)
        return found

    def refusal(self, key: str, content: bytes | None, *, only_new: bool) -> int | None:
        """The status that says why an object must not be written or (None) removed."""
        if self.faults.read_only:
            return 403
        if only_new and self.get(key) is not None:
            return 412
        others = sum(len(self.get(other) or b"") for other in self.keys() if other != key)
        capacity = self.faults.capacity
        return 507 if content and capacity is not None and others + len(content) > capacity else None

    def failure(self, method: str, key: str) -> Failure | None:
        """Note a request; how it fails."""
        with self._lock:
            self.requests.append((method, key))
            if self.faults.down:
                return "drop"
            if self.faults.next:
                return self.faults.next.popleft()
            fails = self._random.random() < self.faults.failure_rate
            return self._random.choice(self.faults.kinds) if fails else None


@final
class _Server(WebServer):
    store: ObjectStore


@final
class _Handler(QuietHandler):
    timeout = 10.0
    server: _Server

    def handle_one_request(self) -> None:
        """One; a client that was killed is no error of the server's."""
        try:
            super().handle_one_request()
        except ConnectionError:
            self.close_connection = True

    def do_HEAD(self) -> None:
        self._answer("HEAD")

    def do_GET(self) -> None:
        self._answer("GET")

    def do_PUT(self) -> None:
        self._answer("PUT")

    def do_DELETE(self) -> None:
        self._answer("DELETE")

    def _answer(self, method: str) -> None:
        store, split = self.server.store, urlsplit(self.path)
        key = unquote(split.path).lstrip("/")
        failure = store.failure(method, key)
        time.sleep(store.faults.latency_s)
        size = int(self.headers.get("Content-Length") or 0)
        body = self._take(size // 2 if failure == "cut" else size)
        if failure == "drop" or (failure == "cut" and method in ("PUT", "DELETE")):
            self.close_connection = True
            return
        if isinstance(failure, int):
            self._send(failure, b"")
            return
        status, content = self._carry_out(method, key, parse_qs(split.query), body)
        if failure == "lost":
            self.close_connection = True
        else:
            self._send(status, content, send_body=method != "HEAD", cut=failure == "cut")

    def _carry_out(self, method: str, key: str, query: dict[str, list[str]], body: bytes) -> tuple[int, bytes]:
        store = self.server.store
        if store.login and self.headers.get("Authorization") != _basic(store.login):
            return 403, b""
        if method in ("PUT", "DELETE"):
            return self._write(key, self._content(query, body) if method == "PUT" else None)
        if "prefix" in query:
            return 200, json.dumps(store.listed(query["prefix"][0])).encode()
        content = store.get(key)
        return (404, b"") if content is None else self.part(content)[:2]

    def _content(self, query: dict[str, list[str]], body: bytes) -> bytes | None:
        """A body, or a copy of another object."""
        return self.server.store.get(query["source"][0]) if "source" in query else body

    def _write(self, key: str, content: bytes | None) -> tuple[int, bytes]:
        store = self.server.store
        if content is None and self.command == "PUT":
            return 404, b""
        refused = store.refusal(key, content, only_new=self.headers.get("If-None-Match") == "*")
        if refused is not None:
            return refused, b""
        store.put(key, content)
        return 200, b""

    def _take(self, size: int) -> bytes:
        self._wait_for(size)
        return self.rfile.read(size)

    def _wait_for(self, size: int) -> None:
        if self.server.store.faults.bytes_per_s is not None:
            time.sleep(size / self.server.store.faults.bytes_per_s)

    def _send(self, status: int, body: bytes, *, send_body: bool = True, cut: bool = False) -> None:
        self._wait_for(len(body) if send_body else 0)
        self.send_head(status, {"Content-Length": str(len(body))})
        if send_body:
            self.wfile.write(body[: len(body) // 2] if cut else body)


def _basic(login: str) -> str:
    return f"Basic {base64.b64encode(login.encode()).decode()}"


@contextmanager
def serve_objects(*, login: str = "", seed: int = 0) -> Iterator[ObjectStore]:
    """A store on a free port of this machine, until the end of the block."""
    server = _Server(("127.0.0.1", 0), _Handler)
    server.store = ObjectStore(login=login, seed=seed)
    server.store.address = server.address
    with running(server, "object-store"):
        yield server.store
