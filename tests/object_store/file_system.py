"""How fsspec reaches the object store of the tests: `loopback://address/bucket/key`.

It tries nothing twice, caches no listings, and its errors are those that file systems of clouds raise.
"""

from __future__ import annotations

import contextlib
import errno
from typing import Any, final
from urllib.parse import urlsplit

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from tests.object_store.server import STORES

__all__ = ["LoopbackFileSystem", "register"]


@final
class LoopbackFileSystem(AbstractFileSystem):  # type: ignore[misc]  # fsspec is not annotated
    """Objects of the store at an address, with its login or without one."""

    protocol = "loopback"
    cachable = False  # instances of one address may meet different stores, one after the other

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

    def _ask(self, method: str, path: str, content: bytes | None = None, **options: Any) -> Any:
        return STORES[self._address].ask(method, self._strip_protocol(path), self._login, content, **options)

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        key = self._strip_protocol(path)
        under = f"{key}/" if key else ""
        sizes: dict[str, int] = self._ask("LIST", key)
        found = {key: _entry(key, sizes[key])} if key in sizes else {}
        for name, size in sizes.items():
            if name.startswith(under):
                first, _, rest = name.removeprefix(under).partition("/")
                found[under + first] = _entry(under + first, None if rest else size)
        if not found:
            raise FileNotFoundError(errno.ENOENT, "no such object", path)
        return list(found.values()) if detail else sorted(found)

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        key = self._strip_protocol(path)
        with contextlib.suppress(FileNotFoundError):
            return _entry(key, len(self._ask("GET", key)))
        if key and not any(each["name"] != key for each in self.ls(key)):
            raise FileNotFoundError(errno.ENOENT, "no such object", path)
        return _entry(key, None)

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Does nothing: there are no directories."""

    def mkdir(self, path: str, create_parents: bool = True, **options: Any) -> None:
        """Does nothing: there are no directories."""

    def rm_file(self, path: str) -> None:
        self._ask("DELETE", path)

    _rm = rm_file

    def cp_file(self, path1: str, path2: str, **options: Any) -> None:
        """Copy an object inside the store. A directory is no object."""
        if not self.isdir(path1):
            self._ask("PUT", path2, source=self._strip_protocol(path1))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: Any) -> bytes:
        content: bytes = self._ask("GET", path)
        return content[slice(start, end)]

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **options: Any) -> None:
        self._ask("PUT", path, bytes(value), only_new=mode == "create")

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


def _entry(key: str, size: int | None) -> dict[str, Any]:
    return {"name": key, "size": size or 0, "type": "directory" if size is None else "file"}


def register() -> None:
    fsspec.register_implementation("loopback", LoopbackFileSystem, clobber=True)
