"""Reading of a whole file at once."""

from __future__ import annotations

from typing import Any

from raydist.pipelines.formats.files import file_errors, path_text
from raydist.pipelines.formats.opening import open_file

__all__ = ["read_file"]

_READ_BYTES = 1 << 20  # at a time, if the size is unknown


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
    try:
        with file_errors(name):
            while part := opened.file.read(opened.size or _READ_BYTES):
                parts.append(part)
    finally:
        opened.file.close()
    return parts[0] if len(parts) == 1 else b"".join(parts)
