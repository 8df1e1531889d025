"""Parquet files: footers, and row groups as record batches. Page checksums are always verified where there are any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, final

import pyarrow as pa

from raydist.errors import RaydistError
from raydist.pipelines.elements.arrow_types import read_names
from raydist.pipelines.formats.files import as_arrow_file, data_loss, file_errors, open_file

__all__ = ["ParquetFile"]

_BATCH_BYTES = 1 << 22
_MAX_BATCH_ROWS = 1 << 16
_BUFFER_BYTES = 1 << 20


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
        options = arrow_dataset.ParquetFragmentScanOptions(
            page_checksum_verification=True, use_buffered_stream=True, buffer_size=_BUFFER_BYTES, pre_buffer=False
        )
        try:
            with parquet_errors(path, opened.size):
                kind = arrow_dataset.ParquetFileFormat(default_fragment_scan_options=options)
                self._fragment = kind.make_fragment(as_arrow_file(opened.file))
                self.schema: pa.Schema = self._fragment.physical_schema
                read_names(self.schema)
                self.num_rows: int = self._fragment.metadata.num_rows
                self.num_row_groups: int = self._fragment.metadata.num_row_groups
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
        """Rows of a row group, and about how many bytes some of its columns have in memory, as the footer says.

        A column of equal values takes next to nothing in the file: each value counts for 8 bytes at least.
        """
        group = self._fragment.metadata.row_group(row_group)
        chunks = [group.column(number) for number in range(group.num_columns)]
        wanted = [chunk for chunk in chunks if chunk.path_in_schema.partition(".")[0] in columns]
        return group.num_rows, sum(max(chunk.total_uncompressed_size, 8 * chunk.num_values) for chunk in wanted)

    def columns_without_nulls(self) -> set[str]:
        """The columns that have no null at any depth, as far as the statistics in the footer tell."""
        metadata = self._fragment.metadata
        groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
        chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
        unsure = {chunk.path_in_schema.partition(".")[0] for chunk in chunks if _may_have_nulls(chunk)}
        return set(self.schema.names) - unsure

    def _batch_rows(self, row_group: int) -> int:
        group = self._fragment.metadata.row_group(row_group)
        row_bytes: int = max(1, group.total_byte_size // max(1, group.num_rows))
        return max(1, min(_MAX_BATCH_ROWS, _BATCH_BYTES // row_bytes))

    def close(self) -> None:
        """Close the file. May be called twice."""
        self._file.close()


def _may_have_nulls(chunk: Any) -> bool:
    statistics = chunk.statistics
    return statistics is None or not statistics.has_null_count or statistics.null_count > 0


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
