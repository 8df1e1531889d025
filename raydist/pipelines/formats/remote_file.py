"""Files of remote systems, whose servers may fail temporarily.

Temporary failures (a lost connection, a time-out, a busy server) are retried after a wait that doubles each time, a
limited number of times; then the error is raised. Reading continues at the same byte.
"""

from __future__ import annotations

import errno
import io
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

ATTEMPTS = 6
"""Number of attempts. The waits between them sum up to between 3 s and 6 s."""

_CONNECT_S = 10.0  # seconds for an HTTP server to accept
_SILENCE_S = 30.0  # seconds between two parts of its answer
_FIRST_WAIT_S = 0.1
_SKIPPED_BYTES = 1 << 20
_ERRNOS = frozenset({errno.EIO, errno.EAGAIN, errno.EBUSY, errno.ETIMEDOUT, errno.ENETDOWN, errno.ENETUNREACH})
_STATUSES = frozenset({408, 425, 429})  # of HTTP: time-out, too early, too many requests; and 500 and more
_LASTING = frozenset({501, 505, 507})  # of 500 and more: not supported, no space left
_NETWORK_PACKAGES = ("aiohttp", "botocore", "google", "requests", "urllib3")

_Result = TypeVar("_Result")


def open_system(path: str) -> tuple[Any, str]:
    """Return the file system of a URI that fsspec knows, and the path in it. Silent HTTP servers raise an error.

    Limits that a user sets in `fsspec.config.conf["http"]["client_kwargs"]` have priority.
    """
    import fsspec.core  # needed only for URIs
    from fsspec.config import conf

    scheme = path.partition("://")[0]
    if scheme not in ("http", "https") or "client_kwargs" in conf.get(scheme, {}):
        system, inner = fsspec.core.url_to_fs(path)
        return system, str(inner)
    import aiohttp  # fsspec requires it for HTTP

    limits = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_SILENCE_S)
    system, inner = fsspec.core.url_to_fs(path, client_kwargs={"timeout": limits})
    return system, str(inner)


def open_remote(system: Any, path: str) -> Any:
    """Open a file of an fsspec system for reading, with a position of its own.

    fsspec's system in memory returns the same object to all callers, so that two readers would move each other's
    position.
    """
    from fsspec.implementations.memory import MemoryFile  # needed only for URIs

    file = system.open(path, "rb")
    return MemoryFile(None, path, file.getvalue()) if isinstance(file, MemoryFile) else file


def is_network_error(error: BaseException) -> bool:
    """Return True for an error of a server, not of a local file.

    >>> is_network_error(TimeoutError("read")), is_network_error(FileNotFoundError(2, "gone"))
    (True, False)
    """
    named = any(kind.__module__.partition(".")[0] in _NETWORK_PACKAGES for kind in type(error).__mro__)
    return named or http_status(error) is not None or isinstance(error, TimeoutError | ConnectionError)


def is_transient(error: BaseException) -> bool:
    """Return True if the same request may succeed a moment later.

    >>> is_transient(ConnectionResetError()), is_transient(FileNotFoundError(2, "gone"))
    (True, False)
    """
    if isinstance(error, TimeoutError | ConnectionError):
        return True
    status = http_status(error)
    if status is not None:
        return status in _STATUSES or (status >= 500 and status not in _LASTING)
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _ERRNOS
    return any(kind.__module__.partition(".")[0] in _NETWORK_PACKAGES for kind in type(error).__mro__)


def http_status(error: BaseException) -> int | None:
    """Return the status of an HTTP response, from the attribute that each client library uses."""
    for holder, name in ((error, "status"), (getattr(error, "response", None), "status_code"), (error, "code")):
        status = getattr(holder, name, None)
        if isinstance(status, int):
            return status
    return None


def with_retries(action: Callable[[], _Result], *, sleep: Callable[[float], None] = time.sleep) -> _Result:
    """Call `action` and return its result; retry transient errors. The last error gets a note on the retries."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return action()
        except Exception as error:
            if not is_transient(error):
                raise
            if attempt == ATTEMPTS:
                error.add_note(f"The server failed {ATTEMPTS} times in a row.")
                raise
            # Many readers that failed together must not retry at the same time.
            sleep(_FIRST_WAIT_S * 2 ** (attempt - 1) * random.uniform(1, 2))  # noqa: S311 - no secret
    raise AssertionError(f"raydist bug: the last of {ATTEMPTS} attempts neither returned nor raised.")


class RemoteFile:
    """A file that is reopened, at the same byte, when reading fails.

    Attributes:
        size_bytes: Bytes of the file when it was opened; None if the server does not tell.
        closed: True after `close`.
    """

    def __init__(self, open_file: Callable[[], Any]) -> None:
        self._open_file = open_file
        self._file: Any = with_retries(open_file)
        self._file_at = 0  # position of `_file`
        self._position = 0
        self.closed = False
        self.size_bytes: int | None = getattr(self._file, "size", None)

    def read(self, size: int = -1, /) -> bytes:
        """Return the next bytes, as many as the file returns at once; no bytes at its end."""
        data = with_retries(lambda: self._read(size))
        self._position += len(data)
        return data

    def _read(self, size: int) -> bytes:
        try:
            self._move()
            data: bytes = self._file.read(size) or b""
        except BaseException:
            self._drop()
            raise
        self._file_at += len(data)
        return data

    def _move(self) -> None:
        """Open the file if it is not, and move it to the position."""
        if self._file is None:
            self._reopen()
        if self._file_at == self._position:
            return
        try:
            self._file.seek(self._position)
        except (ValueError, io.UnsupportedOperation):  # a stream: read it up to the position
            if self._file_at > self._position:
                self._drop()
                self._reopen()
            while self._file_at < self._position:
                passed = len(self._file.read(min(self._position - self._file_at, _SKIPPED_BYTES)) or b"")
                if not passed:
                    break
                self._file_at += passed
        self._file_at = self._position

    def _reopen(self) -> None:
        self._file, self._file_at = self._open_file(), 0
        size = getattr(self._file, "size", None)
        if size != self.size_bytes:
            raise OSError(errno.ESTALE, f"The file changed while it was read: from {self.size_bytes} to {size} bytes")

    def _drop(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move to a byte, counted from the beginning, from the current position (1) or from the end (2)."""
        if whence == io.SEEK_END and self.size_bytes is None:
            raise io.UnsupportedOperation(
                f"The server does not tell the size of the file, so that byte {offset} from its end is unknown. Copy "
                "it to a file system that knows sizes."
            )
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self.size_bytes or 0}[whence]
        self._position = origin + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        """Return True. A seek in a stream reads from the beginning again."""
        return True

    def close(self) -> None:
        """Close the file. May be called twice."""
        self.closed = True
        self._drop()
