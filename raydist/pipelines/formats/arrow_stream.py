"""Memory-mapped files in the stream format of Arrow IPC, in which Hugging Face `datasets` stores tables.

Only the headers of messages are read. The format has no checksums: :class:`MappedStream` checks sizes, and callers
validate a record batch before they read it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import final

import pyarrow as pa

from raydist.errors import InvalidArgumentError
from raydist.pipelines.elements.arrow_types import read_names
from raydist.pipelines.formats.arrow_file import arrow_errors
from raydist.pipelines.formats.arrow_sizes import is_compressed
from raydist.pipelines.formats.files import data_loss, file_errors, local_path
from raydist.pipelines.formats.opening import open_file

__all__ = ["MappedStream", "map_stream"]

_ENDS = (b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0")  # ends of a stream; the second one until Arrow 0.15


@final
@dataclass(frozen=True)
class MappedStream:
    """A mapped file.

    Attributes:
        path: Path as given.
        size: Bytes of the file when it was mapped.
        table: Table of all record batches.
    """

    path: str
    size: int
    table: pa.Table

    def batch(self, number: int) -> pa.RecordBatch:
        """Validate and return a record batch. Raises DataLossError if it is damaged, or the file is shorter."""
        found = os.stat(self.path).st_size
        if found < self.size:
            raise data_loss(self.path, found, f"The file must keep its size of {self.size} bytes while it is mapped")
        batch = self.table.to_batches()[number]
        with arrow_errors(self.path, None, f"record batch {number}"):
            batch.validate(full=True)  # a file may contain invalid offsets
        return batch


def map_stream(path: str) -> MappedStream:
    """Map a file into memory.

    Raises:
        InvalidArgumentError: The file is on another file system, or its record batches are compressed.
        NotFoundError: The file does not exist.
        DataLossError: The file is damaged or truncated.
    """
    local = local_path(path)
    if local is None:
        raise InvalidArgumentError(f"Files are mapped into memory and need a local path, got {path!r}. Copy the files.")
    opened = open_file(local)  # raises for anything but a plain file
    opened.file.close()
    with file_errors(local), arrow_errors(local, opened.size, "its messages"):
        if not opened.size:
            raise ValueError(f"it must have messages, got {opened.size} bytes")
        source = pa.memory_map(local)
        _check_messages(local, source)
        source.seek(max(0, opened.size - len(_ENDS[0])))
        if not source.read().endswith(_ENDS):
            raise ValueError(f"it must end with the end of a stream, and ends after {opened.size} bytes")
        source.seek(0)
        table = pa.ipc.open_stream(source).read_all()
        read_names(table.schema)
    return MappedStream(local, opened.size, table)


def _check_messages(path: str, source: pa.NativeFile) -> None:
    for message in pa.ipc.MessageReader.open_stream(source):
        if is_compressed(message.metadata.to_pybytes()):
            raise InvalidArgumentError(
                f"Files that are mapped into memory must not be compressed, but {path!r} is. Write it without "
                "compression, or read it with from_arrow."
            )
