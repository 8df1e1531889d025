"""An object store in this process, which can be told to be slow, to fail, to be full and to list late.

Objects appear and are replaced whole, as in S3; there are no directories and no renaming.
"""

from __future__ import annotations

import errno
import itertools
import random
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, final

__all__ = ["STORES", "Failure", "Faults", "LoopbackError", "ObjectStore", "serve_objects"]

Failure = Literal["drop", "cut", "lost"] | int
"""Close the connection; close it half-way; do it, but lose the answer; or answer with a status of HTTP."""

STORES: dict[str, ObjectStore] = {}
"""By address."""

_numbers = itertools.count()


@final
class LoopbackError(OSError):
    """An answer that is no success, with its status of HTTP."""

    def __init__(self, status: int, key: str) -> None:
        super().__init__(errno.ENOSPC if status == 507 else errno.EIO, f"status {status}", key)
        self.status = status


@final
@dataclass
class Faults:
    """How badly the store behaves. All may be changed at any time."""

    latency_s: float = 0.0
    failure_rate: float = 0.0
    kinds: tuple[Failure, ...] = ("drop", "cut", "lost", 503)
    next: deque[Failure | None] = field(default_factory=deque)  # of the next requests; None goes well
    listing_delay_s: float = 0.0  # for so long listings show what was there before
    capacity: int | None = None  # bytes of all objects
    read_only: bool = False
    down: bool = False


@final
class ObjectStore:
    """Objects by key (`bucket/folder/file`); requests must bring `login` (`user:password`) unless it is empty."""

    def __init__(self, login: str) -> None:
        self.faults = Faults()
        self.address = f"store-{next(_numbers)}"
        self.login = login
        self._random = random.Random(0)
        self._lock = threading.RLock()
        self._versions: dict[str, list[tuple[float, bytes | None]]] = {}  # what a key held from some time on

    def uri(self, key: str) -> str:
        """Where fsspec finds a key, once `tests.object_store.file_system` is registered."""
        login = f"{self.login}@" if self.login else ""
        return f"loopback://{login}{self.address}/{key}"

    def get(self, key: str) -> bytes | None:
        with self._lock:
            versions = self._versions.get(key)
            return versions[-1][1] if versions else None

    def put(self, key: str, content: bytes | None) -> None:
        with self._lock:
            self._versions.setdefault(key, []).append((time.monotonic(), content))

    def keys(self, prefix: str = "") -> list[str]:
        with self._lock:
            return sorted(key for key in self._versions if key.startswith(prefix) and self.get(key) is not None)

    def listed(self, prefix: str) -> dict[str, int]:
        """Sizes by key, as of `listing_delay_s` ago."""
        then = time.monotonic() - self.faults.listing_delay_s
        found = {}
        with self._lock:
            for key, versions in self._versions.items():
                content = next((content for since, content in reversed(versions) if since <= then), None)
                if key.startswith(prefix) and content is not None:
                    found[key] = len(content)
        return found

    def ask(
        self,
        method: str,
        key: str,
        login: str,
        content: bytes | None = None,
        *,
        source: str = "",
        only_new: bool = False,
    ) -> Any:
        """Carry out a request: GET, LIST (the key is a prefix), PUT (the content, or a copy of `source`), DELETE."""
        failure = self._failure()
        time.sleep(self.faults.latency_s)
        if failure == "drop" or (failure == "cut" and method in ("PUT", "DELETE")):
            raise ConnectionResetError(errno.ECONNRESET, "the connection broke", key)
        if isinstance(failure, int):
            raise LoopbackError(failure, key)
        with self._lock:
            answer = self._carry_out(method, key, login, self.get(source) if source else content, only_new=only_new)
        if failure is not None:
            raise ConnectionResetError(errno.ECONNRESET, "the answer broke off", key)
        return answer

    def _failure(self) -> Failure | None:
        with self._lock:
            if self.faults.down:
                return "drop"
            if self.faults.next:
                return self.faults.next.popleft()
            fails = self._random.random() < self.faults.failure_rate
            return self._random.choice(self.faults.kinds) if fails else None

    def _carry_out(self, method: str, key: str, login: str, content: bytes | None, *, only_new: bool) -> Any:
        writes = method in ("PUT", "DELETE")
        if self.login != login or (writes and self.faults.read_only):
            raise PermissionError(errno.EACCES, "not allowed", key)
        if method == "LIST":
            return self.listed(key)
        if (method == "GET" and self.get(key) is None) or (method == "PUT" and content is None):
            raise FileNotFoundError(errno.ENOENT, "no such object", key)
        if not writes:
            return self.get(key)
        if only_new and self.get(key) is not None:
            raise FileExistsError(errno.EEXIST, "the object exists", key)
        others = sum(len(self.get(other) or b"") for other in self.keys() if other != key)
        if content and self.faults.capacity is not None and others + len(content) > self.faults.capacity:
            raise LoopbackError(507, key)
        self.put(key, content)
        return b""


@contextmanager
def serve_objects(*, login: str = "") -> Iterator[ObjectStore]:
    """A store of this process, until the end of the block."""
    store = ObjectStore(login)
    STORES[store.address] = store
    try:
        yield store
    finally:
        del STORES[store.address]
