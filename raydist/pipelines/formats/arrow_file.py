"""Arrow IPC files (also known as Feather, version 2). Every record batch is validated before use.

The format has no checksums, so damaged values go unnoticed. Damaged offsets are found, and never lead outside the
buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import pyarrow as pa

from raydist.errors import RaydistError
from raydist.pipelines.elements.arrow_types import read_names
from raydist.pipelines.formats.arrow_input import as_arrow_file
from raydist.pipelines.formats.arrow_sizes import ArrowSizes
from raydist.pipelines.formats.files import data_loss, file_errors
from raydist.pipelines.formats.opening import open_file

__all__ = ["ArrowFile", "arrow_errors"]

_MAGIC = b"ARROW1"
_OLD_MAGIC = b"FEA1"
_USUAL_BATCH_BYTES = 1 << 26  # accepted size of a compressed record batch in memory, whatever its size in the file
_USUAL_RATIO = 64  # accepted ratio above that


@final
class ArrowFile:
    """An open file.

    Attributes:
        path: Path as given.
        size: Bytes of the file; None if the server does not tell.
        schema: Schema of all batches.
        num_batches: Number of record batches in the footer.
    """

    def __init__(self, path: str, max_batch_bytes: int | None = None) -> None:
        """Open the file and read its footer. Raises like `open_file`, and DataLossError.

        `max_batch_bytes` limits a compressed record batch in memory; None for 64 MiB, or 64 times the bytes in the
        file.
        """
        self.path = path
        self._max_batch_bytes = max_batch_bytes
        self._sizes: ArrowSizes | None = None
        opened = open_file(path)
        self.size = opened.size
        self._file = opened.file
        self._arrow: Any = None
        self._reader: Any = None
        try:
            with file_errors(path):
                self._require_magic(bytes(opened.file.read(len(_MAGIC)) or b""))
            with arrow_errors(path, opened.size):
                self._arrow = as_arrow_file(opened.file)
                self._reader = pa.ipc.open_file(self._arrow)
                self.schema: pa.Schema = self._reader.schema
                read_names(self.schema)
                self.num_batches: int = self._reader.num_record_batches
        except BaseException:
            self.close()
            raise

    def _require_magic(self, found: bytes) -> None:
        if found != _MAGIC:
            old = found.startswith(_OLD_MAGIC)
            hint = ": Feather version 1 is another format. Write it again" if old else ""
            raise data_loss(self.path, 0, f"An Arrow IPC file must begin with {_MAGIC!r}, got {found!r}{hint}")

    def batch(self, number: int) -> pa.RecordBatch:
        """Return a record batch after a full validation. Raises DataLossError if it is damaged."""
        with arrow_errors(self.path, None, f"record batch {number} of {self.num_batches}"):
            self._require_moderate(number)
            batch = self._reader.get_batch(number)
            batch.validate(full=True)  # a file may contain invalid offsets
            return batch

    def _require_moderate(self, number: int) -> None:
        """Raise DataLossError if Arrow would use up all memory. Takes 40 us."""
        first = self._sizes is None
        if self._sizes is None:
            size = self._arrow.size() if self.size is None else self.size
            self._sizes = ArrowSizes(self._file, size)
        for part in (*(self._sizes.dictionaries() if first else ()), self._sizes.batch(number)):
            usual = max(_USUAL_BATCH_BYTES, _USUAL_RATIO * part.stored)
            most = usual if self._max_batch_bytes is None else self._max_batch_bytes
            if part.raw > max(most, part.stored):
                raise data_loss(
                    self.path,
                    part.offset,
                    f"A record batch may have at most {most} bytes, but {part.stored} compressed ones are to become "
                    f"{part.raw}. Raise max_batch_bytes if the file is right",
                )

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._arrow is not None:
            self._arrow.close()
        self._arrow = self._reader = None
        self._file.close()


@contextmanager
def arrow_errors(path: str, offset: int | None, part: str = "its footer") -> Iterator[None]:
    """Turn Arrow's errors about damage at `offset` into a DataLossError."""
    try:
        with file_errors(path):
            yield
    except RaydistError:
        raise
    except (pa.ArrowException, OSError, ValueError, TypeError, OverflowError, MemoryError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        problem = f"The file must be an intact Arrow IPC file, but reading {part} fails: {error}"
        raise data_loss(path, offset or 0, problem) from error
