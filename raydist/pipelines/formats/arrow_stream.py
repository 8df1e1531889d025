"""Files in the stream format of Arrow IPC, mapped into memory: how Hugging Face `datasets` keeps tables.

Nothing is read but the headers of messages. The format has no checksums: :class:`MappedStream` compares what can be
compared, and whoever reads a record batch validates it first.
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

_ENDS = (b"\xff\xff\xff\xff\0\0\0\0", b"\0\0\0\0")  # of a stream; the second one until Arrow 0.15


@final
@dataclass(frozen=True)
class MappedStream:
    """One file.

    Attributes:
        path: As it was given.
        size: Bytes of it when it was mapped.
        table: Its record batches.
    """

    path: str
    size: int
    table: pa.Table

    def batch(self, number: int) -> pa.RecordBatch:
        """Check a record batch in full, and that the file is as long as it was. DataLossError where not."""
        found = os.stat(self.path).st_size
        if found < self.size:
            raise data_loss(self.path, found, f"The file must keep its size of {self.size} bytes while it is mapped")
        batch = self.table.to_batches()[number]
        with arrow_errors(self.path, None, f"record batch {number}"):
            batch.validate(full=True)  # what was read from a file may have any offsets
        return batch


def map_stream(path: str) -> MappedStream:
    """Map a file.

    Raises:
        InvalidArgumentError: It is on another file system, or its record batches are compressed.
        NotFoundError: There is no such file.
        DataLossError: It is damaged or truncated.
    """
    local = local_path(path)
    if local is None:
        raise InvalidArgumentError(f"Files are mapped into memory and need a local path, got {path!r}. Copy the files.")
    opened = open_file(local)  # for the errors of what is no plain file
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
