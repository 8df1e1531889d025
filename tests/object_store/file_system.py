"""How fsspec reaches the object store of the tests: `loopback://host:port/bucket/key`.

It tries nothing twice, caches no listings, and its errors are those that file systems of clouds raise.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import http.client
import json
from typing import Any, final
from urllib.parse import quote, urlsplit

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

__all__ = ["LoopbackError", "LoopbackFileSystem", "register"]

_SILENCE_S = 20.0


@final
class LoopbackError(OSError):
    """An answer that is no success.

    Attributes:
        status: Of HTTP.
    """

    def __init__(self, status: int, key: str) -> None:
        super().__init__(errno.ENOSPC if status == 507 else errno.EIO, f"status {status}", key)
        self.status = status


@final
class LoopbackFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec is not annotated
    """Objects of one server.

    Args:
        address: host:port.
        login: `user:password`, or nothing.
    """

    protocol = "loopback"
    cachable = False  # instances of one address may meet different servers, one after the other

    def __init__(self, address: str = "", login: str = "", **options: Any) -> None:
        super().__init__(address=address, login=login, **options)
        self._address = address
        self._login = login

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        path = path.removeprefix("file://")
        return (urlsplit(path).path if path.startswith("loopback://") else path).strip("/")

    @staticmethod
    def _get_kwargs_from_urls(path: str) -> dict[str, str]:
        login, _, address = urlsplit(path).netloc.rpartition("@")
        return {"address": address, "login": login} if login else {"address": address}

    def _ask(self, method: str, path: str, *, query: str = "", body: bytes = b"", **headers: str) -> bytes:
        """One request.

        Raises:
            FileNotFoundError: Status 404.
            FileExistsError: Status 412.
            PermissionError: Status 403.
            LoopbackError: Another status that is no success.
            ConnectionError: The connection broke.
        """
        key = self._strip_protocol(path)
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if self._login:
            sent["Authorization"] = f"Basic {base64.b64encode(self._login.encode()).decode()}"
        connection = http.client.HTTPConnection(self._address, timeout=_SILENCE_S)
        with contextlib.closing(connection):
            try:
                connection.request(method, f"/{quote(key)}{query}", body, sent)
                response = connection.getresponse()
                content = response.read()
            except http.client.HTTPException as error:
                raise ConnectionResetError(errno.ECONNRESET, f"{type(error).__name__}: {error}", key) from error
        _require_success(response.status, key)
        return b"%d" % int(response.headers["Content-Length"]) if method == "HEAD" else content

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        """What lies directly under a path."""
        key = self._strip_protocol(path)
        under = f"{key}/" if key else ""
        sizes: dict[str, int] = json.loads(self._ask("GET", "", query=f"?prefix={quote(key)}"))
        found = {key: _entry(key, sizes[key])} if key in sizes else {}
        for name, size in sizes.items():
            if name.startswith(under):
                first, _, rest = name.removeprefix(under).partition("/")
                found[under + first] = _entry(under + first, None if rest else size)
        if not found:
            raise FileNotFoundError(errno.ENOENT, "no such object", path)
        return list(found.values()) if detail else sorted(found)

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        """Of an object, or of what lies under a path."""
        key = self._strip_protocol(path)
        with contextlib.suppress(FileNotFoundError):
            return _entry(key, int(self._ask("HEAD", key)))
        if key and not any(each["name"] != key for each in self.ls(key)):
            raise FileNotFoundError(errno.ENOENT, "no such object", path)
        return _entry(key, None)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Does nothing: there are no directories."""

    def mkdir(self, path: str, create_parents: bool = True, **options: Any) -> None:
        """Does nothing: there are no directories."""

    def rm_file(self, path: str) -> None:
        """Remove an object. Whether there was one is not told."""
        self._ask("DELETE", path)

    def _rm(self, path: str) -> None:
        self.rm_file(path)

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        """Copy an object inside the store. A directory is no object."""
        if not self.isdir(path1):
            self._ask("PUT", path2, query=f"?source={quote(self._strip_protocol(path1))}")

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        """Bytes of an object."""
        if start is None and end is None:
            return self._ask("GET", path)
        size = self.info(path)["size"]
        first = _place(start or 0, size)
        last = size if end is None else min(_place(end, size), size)
        return self._ask("GET", path, Range=f"bytes={first}-{last - 1}") if last > first else b""

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        """Write an object; mode "create": a new one."""
        only_new = {"If_None_Match": "*"} if mode == "create" else {}
        self._ask("PUT", path, body=value, **only_new)

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **options: Any) -> _LoopbackFile:
        return _LoopbackFile(self, path, mode, block_size or "default", cache_type="none", **options)


@final
class _LoopbackFile(AbstractBufferedFile):  # type: ignore[misc]  # fsspec is not annotated
    """An object that appears when it is closed, as one that was uploaded in parts does."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        content: bytes = self.fs.cat_file(self.path, start, end)
        return content

    def _initiate_upload(self) -> None:
        """Nothing is sent before the end."""

    def _upload_chunk(self, final: bool = False) -> bool:
        if final:
            self.fs.pipe_file(self.path, self.buffer.getvalue(), "create" if "x" in self.mode else "overwrite")
        return final


def _require_success(status: int, key: str) -> None:
    if status == 404:
        raise FileNotFoundError(errno.ENOENT, "no such object", key)
    if status == 412:
        raise FileExistsError(errno.EEXIST, "the object exists", key)
    if status == 403:
        raise PermissionError(errno.EACCES, "not allowed", key)
    if status >= 300:
        raise LoopbackError(status, key)


def _entry(key: str, size: int | None) -> dict[str, Any]:
    return {"name": key, "size": size or 0, "type": "directory" if size is None else "file"}


def _place(at: int, size: int) -> int:
    return max(0, size + at) if at < 0 else at


def register() -> None:
    """Let fsspec know the scheme, in this process."""
    fsspec.register_implementation("loopback", LoopbackFileSystem, clobber=True)
