"""Opening of files by path or URI.

A path is local, or a URI that fsspec or, if fsspec lacks the package for it, pyarrow.fs can open.
"""

from __future__ import annotations

import contextlib
import io
import os
import stat
from typing import Any, BinaryIO

from raydist.core.errors import FailedPreconditionError, InvalidArgumentError
from raydist.pipelines.formats.files import OpenFile, file_errors, local_path, not_plain, path_text
from raydist.pipelines.formats.remote_file import RemoteFile, open_remote, open_system, with_retries

_SPECIAL_KINDS = (
    (stat.S_ISDIR, "a directory"),
    (stat.S_ISFIFO, "a FIFO"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a character device"),
    (stat.S_ISBLK, "a block device"),
)
_READ_BYTES = 1 << 20  # at a time, if the size is unknown


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
