"""Parquet files: footers, and row groups as record batches. Page checksums are always verified where there are any.

What a footer says of columns and their statistics is read from :class:`ParquetFooter`: Arrow's own way to it ends the
process where a footer contradicts itself.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import pyarrow as pa

from raydist.errors import RaydistError
from raydist.pipelines.elements.arrow_types import read_names
from raydist.pipelines.formats.arrow_input import as_arrow_file
from raydist.pipelines.formats.files import OpenFile, data_loss, file_errors
from raydist.pipelines.formats.opening import open_file
from raydist.pipelines.formats.parquet_footer import ParquetFooter, parse_footer

__all__ = ["ParquetFile", "parquet_errors", "read_footer"]

_BATCH_BYTES = 1 << 22
_MAX_BATCH_ROWS = 1 << 16
_BUFFER_BYTES = 1 << 20
_MAGIC = b"PAR1"
_END = struct.Struct("<I4s")  # length of the footer, magic
_TAIL_BYTES = 1 << 16  # read at once: Arrow reads as much, so that a remote file's cache serves it


@final
class ParquetFile:
    """One open file.

    Attributes:
        path: As it was given.
        schema: Of all columns.
        num_rows: As its footer says.
        num_row_groups: As its footer says.
    """

    def __init__(self, path: str) -> None:
        """Open the file and read its footer. Errors as those of `open_file`, and DataLossError."""
        import pyarrow.dataset as arrow_dataset  # 80 ms, and only Parquet files need it

        self.path = path
        opened = open_file(path)
        self._file = opened.file
        self._arrow: Any = None
        self._fragment: Any = None
        options = arrow_dataset.ParquetFragmentScanOptions(
            page_checksum_verification=True, use_buffered_stream=True, buffer_size=_BUFFER_BYTES, pre_buffer=False
        )
        try:
            with parquet_errors(path, opened.size):
                self._arrow = as_arrow_file(opened.file)
                self._footer = read_footer(opened)
                kind = arrow_dataset.ParquetFileFormat(default_fragment_scan_options=options)
                self._fragment = kind.make_fragment(self._arrow)
                self.schema: pa.Schema = self._fragment.physical_schema
                read_names(self.schema)
                self.num_rows = sum(group.num_rows for group in self._footer.row_groups)
                self.num_row_groups: int = self._fragment.metadata.num_row_groups
                if self.num_row_groups != len(self._footer.row_groups):
                    raise ValueError(f"Arrow finds {self.num_row_groups} row groups in it")
        except BaseException:
            self.close()
            raise

    def check(self, columns: list[str], row_filter: Any) -> None:
        """Raise Arrow's error if the filter does not fit the columns. Reads nothing."""
        self._fragment.scanner(columns=columns, filter=row_filter, schema=self.schema)

    def batches(self, row_group: int, columns: list[str], row_filter: Any) -> Iterator[pa.RecordBatch]:
        """The rows of one row group that pass the filter; without reading it where its statistics rule it out.

        The cuts between batches depend on the file alone. Nothing is read ahead.
        """
        part = self._fragment.subset(row_group_ids=[row_group])
        if row_filter is not None and not part.split_by_row_group(row_filter, schema=self.schema):
            return iter(())
        scanner = part.scanner(
            schema=self.schema,
            columns=columns,
            filter=row_filter,
            batch_size=self._batch_rows(row_group),
            batch_readahead=1,
            use_threads=False,  # elements come in order, and threads are raydist's to give
        )
        batches: Iterator[pa.RecordBatch] = scanner.to_batches()
        return batches

    def row_group_size(self, row_group: int, columns: list[str]) -> tuple[int, int]:
        """Rows of a row group, and about how many bytes some of its columns have in memory, as the footer says."""
        group = self._footer.row_groups[row_group]
        return group.num_rows, sum(group.sizes.get(name, 0) for name in columns)

    def _batch_rows(self, row_group: int) -> int:
        group = self._fragment.metadata.row_group(row_group)
        row_bytes: int = max(1, group.total_byte_size // max(1, group.num_rows))
        return max(1, min(_MAX_BATCH_ROWS, _BATCH_BYTES // row_bytes))

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._arrow is not None:
            self._arrow.close()
        self._arrow = self._fragment = None
        self._file.close()


def read_footer(opened: OpenFile) -> ParquetFooter:
    """The footer of a file; ValueError where it is damaged, or would end Arrow's process."""
    size: int = as_arrow_file(opened.file).size() if opened.size is None else opened.size
    tail = _read_range(opened, max(0, size - _TAIL_BYTES), size)
    if len(tail) < _END.size:
        raise ValueError(f"it has only {len(tail)} bytes")
    length, magic = _END.unpack_from(tail, len(tail) - _END.size)
    if magic != _MAGIC:
        raise ValueError(f"it must end with {_MAGIC!r}, got {magic!r}")
    if length + _END.size > size:
        raise ValueError(f"its footer must have {length} bytes, but it has {size} in all")
    if length + _END.size > len(tail):
        tail = _read_range(opened, size - _END.size - length, size)
    return parse_footer(tail[-_END.size - length : -_END.size])


def _read_range(opened: OpenFile, start: int, end: int) -> bytes:
    opened.file.seek(start)
    parts = []
    while start < end and (part := opened.file.read(end - start)):
        parts.append(part)
        start += len(part)
    return b"".join(parts)


@contextmanager
def parquet_errors(path: str, offset: int | None) -> Iterator[None]:
    """Turn what Arrow raises about damage at `offset` into a DataLossError."""
    try:
        with file_errors(path):
            yield
    except RaydistError:
        raise
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        loss = data_loss(path, offset or 0, f"The file must be an intact Parquet file, but reading it fails: {error}")
        raise loss from error
