"""Files by path or URI: opening them, and errors that name the file and a remedy.

A path is local, or a URI that fsspec or, if fsspec lacks the package for it, pyarrow.fs can open.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

from raydist.core.errors import (
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
    open_remote,
    open_system,
    with_retries,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

_SPECIAL_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)
_READ_BYTES = 1 << 20  # at a time, if the size is unknown
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


def open_file(path: str) -> OpenFile:
    """Open a file for reading. Retries failures of remote systems a few times: see `remote_file.py`.

    Raises:
        NotFoundError: The file does not exist.
        InvalidArgumentError: The file is a directory, a FIFO, a device or a socket, or the URI's scheme is unknown.
        FailedPreconditionError: The file is not readable, or the package for the URI's scheme is not installed.
    """
    with file_errors(path):
        local = local_path(path)
        return _open_uri(path) if local is None else _open_local(local)


def open_within(folder: str, path: str) -> OpenFile:
    """Open a file of a folder that others may have written. Raises like :func:`open_file`.

    Raises:
        InvalidArgumentError: The file is a link that leads out of the folder.
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
    """Open an empty file for writing. Raises like :func:`open_file`."""
    with file_errors(path):
        local = local_path(path)
        if local is not None:
            _require_plain(local, os.stat(local).st_mode if os.path.lexists(local) else stat.S_IFREG)
            return open(local, "wb")
        import fsspec  # needed only for URIs

        file: BinaryIO = fsspec.open(path, "wb").open()
        return file


class _LocalFile(io.FileIO):
    """A file that closes without a ResourceWarning: it is no mistake to leave an iterator before its end."""

    def __del__(self) -> None:
        self.close()


def _open_local(path: str) -> OpenFile:
    # O_NONBLOCK: opening a FIFO would wait for a writer without limit. It has no effect on plain files.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        _require_plain(path, status.st_mode)
        return OpenFile(_LocalFile(descriptor, "rb"), status.st_size)
    except BaseException:  # if no file object can be made of the descriptor, nothing else closes it
        os.close(descriptor)
        raise


def _open_uri(path: str) -> OpenFile:
    try:
        system, inner = open_system(path)
    except (ImportError, ValueError) as error:
        return _open_with_arrow(path, error)
    if with_retries(lambda: system.isdir(inner)):
        raise not_plain(path, "a directory")
    file = RemoteFile(lambda: open_remote(system, inner))
    return OpenFile(file, file.size_bytes)


def _open_with_arrow(path: str, fsspec_error: Exception) -> OpenFile:
    import pyarrow  # needed only for URIs that fsspec cannot open
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
            raise not_plain(path, kind)


def read_file(path: Any) -> bytes:
    """Everything in a file, given by a path or a URI. Waits for the disk or the server.

    Args:
        path: Of the file: text, bytes, a `pathlib.Path`, or a URI that fsspec or pyarrow knows.

    Returns:
        Its bytes as they lie there: nothing is decompressed.

    Raises:
        NotFoundError: There is no such file.
        InvalidArgumentError: It is no plain file, or the URI's scheme is unknown.
        FailedPreconditionError: It may not be read.

    Source: tf.io.read_file.

    >>> read_file(__file__)[:1]
    b'"'
    """
    name = path_text(path)
    opened = open_file(name)
    parts = []
    with contextlib.closing(opened.file), file_errors(name):
        while part := opened.file.read(opened.size or _READ_BYTES):
            parts.append(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def local_size(path: str) -> int:
    """Return the bytes of a file of this machine; 0 for remote and missing files.

    >>> local_size("s3://bucket/a")
    0
    """
    with contextlib.suppress(OSError, ValueError):  # opening the file raises the error
        local = local_path(path)
        return 0 if local is None else os.path.getsize(local)
    return 0


def require_same_size(path: str, saved: int) -> None:
    """Raise FailedPreconditionError if the size of a file has changed. A size of 0 is unknown and fits every file."""
    found = local_size(path)
    if saved and found and found != saved:
        raise FailedPreconditionError(
            f"A file must be as it was when the state was saved that a dataset goes on from, but {path!r} had {saved} "
            f"bytes then and has {found} now. Restore the file, or begin a new epoch."
        )
