"""Dataset.from_parquet, and Dataset.from_arrow of paths: the rows of Parquet and Arrow IPC (Feather) files.

Files are read part by part: row groups or record batches.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import pyarrow as pa

from raydist.core.errors import DataLossError, InvalidArgumentError, SpecError
from raydist.core.values import UNKNOWN_CARDINALITY
from raydist.pipelines.elements.arrow_fields import Conversion, null_error
from raydist.pipelines.elements.arrow_rows import RowSchema
from raydist.pipelines.elements.items import ElementError, Item
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.formats.arrow_file import ArrowFile
from raydist.pipelines.formats.files import data_loss, require_limit
from raydist.pipelines.formats.parquet_file import ParquetFile, parquet_errors
from raydist.pipelines.sources.file_format import FileSplit, SplitFormat, TableFormat, TableReader
from raydist.pipelines.sources.table_files import FileSplitsOp, SplitFilesOp, TableFilesOp, shown_paths, table_paths

_SPLIT_BYTES = 1 << 22
_MAX_SPLIT_BYTES = 1 << 26  # of selected columns: a larger row group is read in batches, not as a whole
_WHOLE = 1 << 62
_UNKNOWN_ROWS = -1


def parquet_op(paths: Any, columns: Sequence[str] | None, filters: Any, conversion: Conversion) -> DatasetOp:
    """Return the operation for the arguments of `from_parquet`. Reads the footers of all files.

    Pieces of files (row groups) are read several at a time; files with huge row groups one after the other, in batches.
    """
    names = table_paths(paths, "from_parquet")
    row_filter = _expression(filters)
    with closing(ParquetFile(names[0])) as first:
        table_format = ParquetFormat(_selected(first, columns), row_filter, conversion=conversion)
        _check_filter(first, table_format)
    groups = {name: _row_groups(name, table_format) for name in names}
    num_rows = sum(rows for name in names for rows, _ in groups[name]) if row_filter is None else UNKNOWN_CARDINALITY
    if any(size > _MAX_SPLIT_BYTES for found in groups.values() for _, size in found):
        return TableFilesOp(names, table_format, num_rows)
    splits = FileSplitsOp(tuple(split for name in names for split in _splits(name, groups[name])))
    return SplitFilesOp(splits, table_format, num_rows, shown_paths(names), names)


def _row_groups(path: str, table_format: ParquetFormat) -> list[tuple[int, int]]:
    """Return the rows of each row group of a file, and the bytes of the selected columns."""
    with closing(open_checked(path, table_format)) as file:
        return [file.row_group_size(number, table_format.schema.names) for number in range(file.num_row_groups)]


def _splits(path: str, groups: Sequence[tuple[int, int]]) -> Iterator[FileSplit]:
    """Yield splits of at least 4 MiB, where the file is that large: each costs about a millisecond."""
    first = num_rows = num_bytes = 0
    for number, (rows, size) in enumerate(groups, start=1):
        num_rows += rows
        num_bytes += size
        if num_bytes >= _SPLIT_BYTES or number == len(groups):
            yield FileSplit(path, first, number, num_rows)
            first, num_rows, num_bytes = number, 0, 0


class _BatchFormat(SplitFormat):
    """A format of record batches with the columns of `schema`."""

    schema: pa.Schema
    conversion: Conversion

    @property
    def spec(self) -> Any:
        return self.rows.spec

    @cached_property
    def rows(self) -> RowSchema:
        """Converter of record batches to blocks."""
        return RowSchema(self.schema, self.conversion)


@dataclass(frozen=True, eq=False)
class ParquetFormat(TableFormat, _BatchFormat):
    """The columns of `schema`, in the rows for which `row_filter` (an Arrow expression, or None) is true."""

    name: ClassVar[str] = "from_parquet"
    schema: pa.Schema
    row_filter: Any = None
    conversion: Conversion = Conversion()

    @property
    def label(self) -> str:
        return "" if self.row_filter is None else f"filters={self.row_filter}"

    def open(self, path: str, position: Sequence[int]) -> TableReader:
        return ParquetReader(self, open_checked(path, self), *position)

    def read_split(self, split: FileSplit) -> list[Item]:
        with closing(open_checked(split.path, self)) as file:
            _require_same(file, split, self.schema.names)
            reader = ParquetReader(self, file, split.first)
            items: list[Item] = []
            while not reader.ended and reader.position()[0] < split.end:
                items += reader.read(_WHOLE)
            return items


def _require_same(file: ParquetFile, split: FileSplit, names: list[str]) -> None:
    """Raise DataLossError unless the file still has the row groups of a split."""
    groups = range(split.first, min(split.end, file.num_row_groups))
    num_rows = sum(file.row_group_size(number, names)[0] for number in groups)
    if num_rows != split.num_rows or len(groups) < split.end - split.first:
        raise data_loss(
            split.path,
            0,
            f"A file must not change while a dataset reads it, but row groups {split.first} .. {split.end - 1} had "
            f"{split.num_rows} rows, and now {num_rows}",
        )


def open_checked(path: str, table_format: ParquetFormat) -> ParquetFile:
    """Open a file and check that it has the columns of the format."""
    file = ParquetFile(path)
    found = [field for field in file.schema if field.name in table_format.schema.names]
    if sorted(found, key=str) == sorted(table_format.schema, key=str):
        return file
    file.close()
    raise SpecError(
        f"All files must have the columns {_fields(table_format.schema)}, but {path!r} has {_fields(file.schema)}."
        " Give columns= that all have alike, or a dataset to each kind of file: map what differs, and concatenate them."
    )


class ParquetReader(TableReader):
    """A reader of one row group after the other. After damage it continues with the next row group."""

    def __init__(
        self, table_format: ParquetFormat, file: ParquetFile, row_group: int = 0, num_batches: int = 0
    ) -> None:
        self.ended = row_group >= file.num_row_groups
        self._format = table_format
        self._file = file
        self._row_group = row_group
        self._to_pass = num_batches  # batches of the row group to skip when resuming
        self._num_batches = num_batches
        self._batches: Iterator[pa.RecordBatch] | None = None
        self._first_row = self._rows_read = 0  # in the row group: first row of the last batch, and the row after it

    def position(self) -> list[int]:
        return [self._row_group, self._num_batches]

    def read(self, limit: int) -> list[Item]:
        if self.ended:
            return []
        try:
            with parquet_errors(self._file.path, None):
                batch = self._next_batch()
        except DataLossError as loss:
            loss.add_note(f"In row group {self._row_group} of {self._file.num_row_groups}; reading goes on behind it.")
            self._next_row_group()
            return [ElementError(loss)]
        except Exception as error:  # I/O errors also take the place of the data
            self.ended = True
            return [ElementError(error)]
        if batch is None:
            self._next_row_group()
            return []
        return self._format.rows.items(batch, self._null_error)

    def _next_batch(self) -> pa.RecordBatch | None:
        if self._batches is None:
            self._batches = self._file.batches(self._row_group, self._format.schema.names, self._format.row_filter)
            self._rows_read = sum(passed.num_rows for passed in itertools.islice(self._batches, self._to_pass))
        batch = next(self._batches, None)
        if batch is not None:
            batch.validate(full=True)  # 13.7 ms per 65 MB; a file may contain invalid offsets
            self._num_batches += 1
            self._first_row, self._rows_read = self._rows_read, self._rows_read + batch.num_rows
        return batch

    def _next_row_group(self) -> None:
        self._row_group += 1
        self._num_batches = self._to_pass = 0
        self._batches = None
        self.ended = self._row_group >= self._file.num_row_groups

    def _null_error(self, row: int, column: str) -> SpecError:
        place = f"row {self._first_row + row} of row group {self._row_group} of file {self._file.path!r}"
        if self._format.row_filter is not None:
            place += " (counting the rows that pass the filters)"
        return null_error(column, place, "leave the rows out with filters= or ignore_errors()")

    def close(self) -> None:
        self._batches = None
        self._file.close()


def _expression(filters: Any) -> Any:
    if filters is None:
        return None
    import pyarrow.compute as pc
    import pyarrow.parquet as pq  # 80 ms, needed only for filters

    if isinstance(filters, pc.Expression):
        return filters
    try:
        return pq.filters_to_expression(filters)
    except (ValueError, TypeError, IndexError) as error:
        raise InvalidArgumentError(
            "filters must be a pyarrow.compute.Expression, or conditions such as [('label', '>=', 3)] "
            f"(a list of lists is an OR of ANDs), got {filters!r:.200}: {error}."
        ) from error


def _selected(file: ParquetFile, columns: Sequence[str] | None) -> pa.Schema:
    names = file.schema.names if columns is None else list(columns)
    missing = [name for name in names if name not in file.schema.names]
    if missing or isinstance(columns, str) or not names:
        raise InvalidArgumentError(
            f"columns must be names of columns of {file.path!r} ({', '.join(file.schema.names):.500}), got {columns!r}."
        )
    schema = pa.schema([file.schema.field(index) for index in map(file.schema.get_field_index, names) if index >= 0])
    return schema if len(schema) == len(names) else file.schema  # RowSchema raises for two columns of one name


def _check_filter(file: ParquetFile, table_format: ParquetFormat) -> None:
    table_format.conversion.check(table_format.schema)
    try:
        file.check(table_format.schema.names, table_format.row_filter)
    except (pa.ArrowException, ValueError) as error:
        raise InvalidArgumentError(
            f"filters must be conditions on columns of {file.path!r} ({_fields(file.schema)}), got "
            f"{table_format.row_filter}: {error}"
        ) from error


def _fields(schema: pa.Schema) -> str:
    return f"{', '.join(f'{field.name}: {field.type}' for field in schema):.500}"


def is_paths(source: Any) -> bool:
    """Return True if `source` is a path or a list of paths, not a table."""
    several = source if isinstance(source, list | tuple) else [source]
    return all(isinstance(one, str | bytes | os.PathLike) for one in several)


def arrow_files_op(paths: Any, conversion: Conversion, max_batch_bytes: int | None = None) -> DatasetOp:
    """Return the operation that reads the files at `paths`. Reads the footers of all files."""
    require_limit("max_batch_bytes", max_batch_bytes)
    names = table_paths(paths, "from_arrow")
    first = ArrowFile(names[0])
    first.close()
    table_format = ArrowFormat(first.schema, conversion, max_batch_bytes)
    conversion.check(first.schema)
    splits = FileSplitsOp(tuple(split for name in names for split in _arrow_splits(name, table_format)))
    return SplitFilesOp(splits, table_format, UNKNOWN_CARDINALITY, shown_paths(names), names)


def _arrow_splits(path: str, table_format: ArrowFormat) -> Iterator[FileSplit]:
    """Yield splits of at least 4 MiB, where the file is that large."""
    file = table_format.open_checked(path)
    file.close()
    mean_bytes = max(1, (file.size or _SPLIT_BYTES) // max(1, file.num_batches))
    step = max(1, _SPLIT_BYTES // mean_bytes)
    for first in range(0, file.num_batches, step):
        yield FileSplit(path, first, min(first + step, file.num_batches), _UNKNOWN_ROWS)


@dataclass(frozen=True, eq=False)
class ArrowFormat(_BatchFormat):
    """Record batches of `schema`; see :class:`ArrowFile` for `max_batch_bytes`."""

    name: ClassVar[str] = "from_arrow"
    schema: pa.Schema
    conversion: Conversion = Conversion()
    max_batch_bytes: int | None = field(default=None, metadata={"fingerprint": False})
    label = ""

    def open_checked(self, path: str) -> ArrowFile:
        """Open a file and check that it has the columns of the format."""
        file = ArrowFile(path, self.max_batch_bytes)
        if file.schema.equals(self.schema):
            return file
        file.close()
        raise SpecError(
            f"All files must have the columns {_fields(self.schema)}, but {path!r} has {_fields(file.schema)}."
            " Give each kind of file a dataset: map what differs, and concatenate them."
        )

    def read_split(self, split: FileSplit) -> list[Item]:
        with closing(self.open_checked(split.path)) as file:
            if file.num_batches < split.end:
                raise data_loss(
                    split.path,
                    0,
                    f"A file must not change while a dataset reads it, but it had {split.end} record batches or more, "
                    f"and now {file.num_batches}",
                )
            return [item for number in range(split.first, split.end) for item in self._items(file, number)]

    def _items(self, file: ArrowFile, number: int) -> Sequence[Item]:
        """Return the rows of one batch. A damaged batch is one error in place of all its rows."""
        try:
            batch = file.batch(number)
        except DataLossError as loss:
            return [ElementError(loss)]

        place = f"of record batch {number} of file {file.path!r}"
        return self.rows.items(batch, lambda row, name: null_error(name, f"row {row} {place}", "use ignore_errors()"))
