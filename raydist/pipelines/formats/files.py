"""Paths of files, and errors that name the file and a remedy.

A path is local, or a URI of another file system.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from raydist.core.errors import (
    DataLossError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    RaydistError,
    SpecError,
)
from raydist.pipelines.formats.remote_file import (
    http_status,
    is_network_error,
)

_FILE = "file://"
_DENIED = (401, 403)  # HTTP: unauthorized, forbidden


class ReadableFile(Protocol):
    """The methods of a file that readers use."""

    def read(self, size: int, /) -> bytes | None: ...

    def seek(self, offset: int, /) -> int: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file opened for reading."""

    file: ReadableFile  # the file; unbuffered if local
    size: int | None  # bytes of the file when it was opened, None if the server does not tell


def read_range(file: ReadableFile, start: int, size: int) -> bytes:
    """Return `size` bytes from `start` on; fewer at the end of the file."""
    file.seek(start)
    parts: list[bytes] = []
    while size and (part := file.read(size)):
        parts.append(part)
        size -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def require_limit(name: str, value: int | None) -> None:
    """Raise InvalidArgumentError unless the limit `name` of a user is None or >= 1."""
    if value is not None and value < 1:
        raise InvalidArgumentError(f"{name} must be >= 1 or None, got {value!r}.")


def path_text(path: Any) -> str:
    """Return `path` as text.

    >>> path_text(b"data/a.tfrecord")
    'data/a.tfrecord'

    Raises:
        SpecError: `path` is neither text, bytes nor a path object.
    """
    if not isinstance(path, str | bytes | os.PathLike):
        raise SpecError(f"A file name must be a str, bytes or os.PathLike, got {path!r} ({type(path).__name__}).")
    return os.fsdecode(path)


def local_path(path: str) -> str | None:
    """Return the path on this machine, or None for a URI of another file system.

    >>> local_path("file:///tmp/x"), local_path("file://localhost/tmp/x"), local_path("s3://bucket/x")
    ('/tmp/x', '/tmp/x', None)

    Raises:
        InvalidArgumentError: The file is on another machine.
    """
    if path.startswith(_FILE):
        host, slash, inner = path.removeprefix(_FILE).partition("/")
        if host not in ("", "localhost") and slash:
            raise InvalidArgumentError(
                f"A file: URI must be of this machine (file:///path), but {path!r} names the host {host!r}. Mount its "
                "files here, or give the URI of a file system that reaches them."
            )
        return slash + inner if slash else host
    return None if "://" in path else path


def local_file(path: Any, what: str) -> str:
    """Return the path on this machine of a file that can only be written locally.

    Args:
        path: Path from the user.
        what: Kind of the file, for messages.

    Raises:
        InvalidArgumentError: `path` is a URI of another file system.
        SpecError: `path` is no path.

    >>> local_file("file:///tmp/x", "A log")
    '/tmp/x'
    """
    text = path_text(path)
    local = local_path(text)
    if local is None:
        raise InvalidArgumentError(
            f"{what} must be on a disk of this machine, got {shown_uri(text)!r}. Give a path, and copy it from there."
        )
    return local


def secrets_in(uri: str) -> tuple[str, ...]:
    """Return the secret parts of a URI: user and password, and the query, which may contain a signature.

    >>> secrets_in("s3://key:secret@host/a?sig=abc"), secrets_in("/tmp/a@b?c")
    (('key:secret', 'sig=abc'), ())
    """
    scheme, found, rest = uri.partition("://")
    if not found or scheme == "file":
        return ()
    place, _, query = rest.partition("?")
    user, at, _ = place.partition("/")[0].rpartition("@")
    return tuple(part for part in (user if at else "", query) if part)


def shown_uri(uri: str) -> str:
    """Return a path or URI without secrets, for messages.

    >>> shown_uri("s3://key:secret@host/a?sig=abc"), shown_uri("/tmp/a")
    ('s3://***@host/a?***', '/tmp/a')
    """
    for secret in secrets_in(uri):
        uri = uri.replace(secret, "***")
    return uri


@contextmanager
def file_errors(path: str, offset: int | None = None) -> Iterator[None]:
    """Turn system errors about `path` into raydist's errors; add a note with the place to all others."""
    try:
        yield
    except RaydistError:
        raise
    except FileNotFoundError as error:
        raise NotFoundError(
            f"The file must exist, got {path!r}. Check the path, and that this node sees it."
        ) from error
    except IsADirectoryError as error:
        raise not_plain(path, "a directory") from error
    except Exception as error:
        if isinstance(error, PermissionError) or http_status(error) in _DENIED:
            raise _denied(path) from error
        if is_network_error(error):
            raise _of_server(path, error) from error
        error.add_note(f"while accessing {path!r}" + ("" if offset is None else f" at byte {offset}"))
        raise


def _denied(path: str) -> FailedPreconditionError:
    scheme, is_remote, _ = path.partition("://")
    if is_remote and scheme != "file":
        return FailedPreconditionError(
            f"The file must be accessible, but permission is denied for {path!r}. Give this node credentials, where "
            f'the fsspec package of {scheme!r} looks for them or as fsspec.config.conf["{scheme}"].'
        )
    return FailedPreconditionError(
        f"The file must be accessible, but permission is denied for {path!r} (user {os.geteuid()}). Change its mode or "
        "owner, or run as another user."
    )


def _of_server(path: str, error: Exception) -> FailedPreconditionError:
    status = http_status(error)
    said = "did not answer" if status is None else f"answered with HTTP status {status}"
    found = FailedPreconditionError(
        f"The server must hand out {path!r}, but it {said} ({type(error).__name__}: {error!s:.300}). Try again when it "
        "does."
    )
    for note in getattr(error, "__notes__", ()):
        found.add_note(note)
    found.add_note(f"while accessing {path!r}")
    return found


def not_plain(path: str, kind: str) -> InvalidArgumentError:
    """Return the error for a name that is not a plain file, but, for example, "a directory"."""
    hint = " Give the files in it." if kind == "a directory" else " Copy its data into a file first."
    return InvalidArgumentError(f"A file name must name a plain file, but {path!r} is {kind}.{hint}")


def data_loss(path: str, offset: int, problem: str) -> DataLossError:
    """Return the error of a damaged file, with the problem and its place."""
    return DataLossError(f"{problem} (file {path!r}, byte {offset}).", path=path, offset=offset)
