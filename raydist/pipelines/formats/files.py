"""Opening files by path or URI, with errors that name the file and the way out.

A path is local, or a URI that fsspec or, where fsspec lacks the package for it, pyarrow.fs can open.
"""

from __future__ import annotations

import io
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, Protocol, final

from raydist.errors import (
    DataLossError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    RaydistError,
    SpecError,
)
from raydist.pipelines.formats.remote_file import (
    RemoteFile,
    http_status,
    is_network_error,
    open_system,
    with_retries,
)

__all__ = [
    "OpenFile",
    "ReadableFile",
    "as_arrow_file",
    "create_file",
    "data_loss",
    "file_errors",
    "local_file",
    "local_path",
    "open_file",
    "open_within",
    "path_text",
    "secrets_in",
    "shown_uri",
]

_FILE = "file://"
_DENIED = (401, 403)  # HTTP: unauthorized, forbidden


class ReadableFile(Protocol):
    """What a reader needs of a file."""

    def read(self, size: int, /) -> bytes | None: ...

    def seek(self, offset: int, /) -> int: ...

    def close(self) -> None: ...


def as_arrow_file(file: ReadableFile) -> Any:
    """The file as pyarrow's readers take it."""
    import pyarrow  # only its readers need it

    return file if isinstance(file, pyarrow.NativeFile) else pyarrow.PythonFile(file, mode="r")


@final
@dataclass(frozen=True, slots=True)
class OpenFile:
    """A file opened for reading.

    Attributes:
        file: Unbuffered where it is local.
        size: Bytes in it when it was opened, or None where the server does not say.
    """

    file: ReadableFile
    size: int | None


@final
class _LocalFile(io.FileIO):
    """Closed without a ResourceWarning when it is dropped: an iterator that was not read to its end is no mistake."""

    def __del__(self) -> None:
        self.close()


def path_text(path: Any) -> str:
    """`path` as text.

    >>> path_text(b"data/a.tfrecord")
    'data/a.tfrecord'

    Raises:
        SpecError: It is neither text, bytes nor a path object.
    """
    if not isinstance(path, str | bytes | os.PathLike):
        raise SpecError(f"A file name must be a str, bytes or os.PathLike, got {path!r} ({type(path).__name__}).")
    return os.fsdecode(path)


def local_path(path: str) -> str | None:
    """The path on this machine, or None for a URI of another file system.

    >>> local_path("file:///tmp/x"), local_path("file://localhost/tmp/x"), local_path("s3://bucket/x")
    ('/tmp/x', '/tmp/x', None)

    Raises:
        InvalidArgumentError: It is a file of another machine.
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
    """The path on this machine of something that is written there alone.

    Args:
        path: As a user gave it.
        what: It is, for messages.

    Raises:
        InvalidArgumentError: It is a URI of another file system.
        SpecError: It is no path.

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
    """What of a URI is for nobody's eyes: user and password, and its query, which may carry a signature.

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
    """A path or URI as messages may show it.

    >>> shown_uri("s3://key:secret@host/a?sig=abc"), shown_uri("/tmp/a")
    ('s3://***@host/a?***', '/tmp/a')
    """
    for secret in secrets_in(uri):
        uri = uri.replace(secret, "***")
    return uri


def open_file(path: str) -> OpenFile:
    """Open a file for reading. What a remote system fails to do is tried again a few times: see `remote_file.py`.

    Raises:
        NotFoundError: There is no such file.
        InvalidArgumentError: It is a directory, a FIFO, a device or a socket, or the URI's scheme is unknown.
        FailedPreconditionError: It may not be read, or the package for the URI's scheme is not installed.
    """
    with file_errors(path):
        local = local_path(path)
        return _open_uri(path) if local is None else _open_local(local)


def open_within(folder: str, path: str) -> OpenFile:
    """Open a file of a folder that others may have filled. Errors as those of :func:`open_file`.

    Raises:
        InvalidArgumentError: It is a link that leads out of the folder.
    """
    local, inner = local_path(folder), local_path(path)
    if local is not None and inner is not None:
        found = os.path.realpath(inner)
        if os.path.commonpath([found, os.path.realpath(local)]) != os.path.realpath(local):
            raise InvalidArgumentError(
                f"A file of {folder!r} must lie in it, but {path!r} is a link to {found!r}. Copy it there."
            )
    return open_file(path)


def create_file(path: str) -> BinaryIO:
    """Open a file for writing, empty. Errors as those of :func:`open_file`."""
    with file_errors(path):
        local = local_path(path)
        if local is not None:
            _require_plain(local, os.stat(local).st_mode if os.path.lexists(local) else stat.S_IFREG)
            return open(local, "wb")
        import fsspec  # only URIs need it

        file: BinaryIO = fsspec.open(path, "wb").open()
        return file


@contextmanager
def file_errors(path: str, offset: int | None = None) -> Iterator[None]:
    """Turn what systems say about `path` into our errors; others get a note with the place."""
    try:
        yield
    except RaydistError:
        raise
    except FileNotFoundError as error:
        raise NotFoundError(
            f"The file must exist, got {path!r}. Check the path, and that this node sees it."
        ) from error
    except IsADirectoryError as error:
        raise _not_plain(path, "a directory") from error
    except Exception as error:
        if isinstance(error, PermissionError) or http_status(error) in _DENIED:
            raise FailedPreconditionError(
                f"The file must be accessible, but permission is denied for {path!r} (user {_user()}). "
                "Change its mode or owner, or run as another user."
            ) from error
        if is_network_error(error):
            raise _of_server(path, error) from error
        error.add_note(f"while accessing {path!r}" + ("" if offset is None else f" at byte {offset}"))
        raise


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


def _open_local(path: str) -> OpenFile:
    # O_NONBLOCK: opening a FIFO would wait for its writer, without limit. It has no effect on plain files.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    file = _LocalFile(descriptor, "rb")
    try:
        status = os.fstat(descriptor)
        _require_plain(path, status.st_mode)
    except BaseException:
        file.close()
        raise
    return OpenFile(file, status.st_size)


def _open_uri(path: str) -> OpenFile:
    try:
        system, inner = open_system(path)
    except (ImportError, ValueError) as error:
        return _open_with_arrow(path, error)
    if with_retries(lambda: system.isdir(inner)):
        raise _not_plain(path, "a directory")
    file = RemoteFile(lambda: system.open(inner, "rb"))
    return OpenFile(file, file.size_bytes)


def _open_with_arrow(path: str, fsspec_error: Exception) -> OpenFile:
    import pyarrow  # only URIs that fsspec cannot open need it
    from pyarrow import fs

    try:
        system, inner = fs.FileSystem.from_uri(path)
    except pyarrow.ArrowInvalid:
        message = f"The URI's scheme must be one that fsspec or pyarrow.fs knows, got {path!r}: {fsspec_error}."
        kind = FailedPreconditionError if isinstance(fsspec_error, ImportError) else InvalidArgumentError
        raise kind(message) from fsspec_error
    file = system.open_input_file(inner)
    return OpenFile(file, file.size())


def _require_plain(path: str, mode: int) -> None:
    for is_kind, kind in _SPECIAL_KINDS:
        if is_kind(mode):
            raise _not_plain(path, kind)


def _not_plain(path: str, kind: str) -> InvalidArgumentError:
    hint = " Give the files in it." if kind == "a directory" else " Copy its data into a file first."
    return InvalidArgumentError(f"A file name must name a plain file, but {path!r} is {kind}.{hint}")


_SPECIAL_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)


def _user() -> str:
    return str(os.geteuid())


def data_loss(path: str, offset: int, problem: str) -> DataLossError:
    """The error of a damaged file: what is wrong, and where."""
    return DataLossError(f"{problem} (file {path!r}, byte {offset}).", path=path, offset=offset)
