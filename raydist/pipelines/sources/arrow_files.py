"""Dataset.from_arrow of paths: the rows of Arrow IPC (Feather) files, record batch by record batch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import pyarrow as pa

from raydist.errors import DataLossError, SpecError
from raydist.pipelines.elements.arrow_fields import Conversion, null_error
from raydist.pipelines.elements.arrow_rows import RowSchema
from raydist.pipelines.elements.items import ElementError, Item
from raydist.pipelines.engine.op import DatasetOp
from raydist.pipelines.formats.arrow_file import ArrowFile
from raydist.pipelines.formats.files import data_loss, require_limit
from raydist.pipelines.sources.file_format import FileSplit, SplitFormat
from raydist.pipelines.sources.split_files import FileSplitsOp, SplitFilesOp
from raydist.pipelines.sources.table_files import shown_paths, table_paths
from raydist.values import UNKNOWN_CARDINALITY

__all__ = ["ArrowFormat", "arrow_files_op", "is_paths"]

_SPLIT_BYTES = 1 << 22
_UNKNOWN_ROWS = -1


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
    splits = FileSplitsOp(tuple(split for name in names for split in _splits(name, table_format)))
    return SplitFilesOp(splits, table_format, UNKNOWN_CARDINALITY, shown_paths(names), names)


def _splits(path: str, table_format: ArrowFormat) -> Iterator[FileSplit]:
    """Yield splits of at least 4 MiB, where the file is that large."""
    file = table_format.open_checked(path)
    file.close()
    mean_bytes = max(1, (file.size or _SPLIT_BYTES) // max(1, file.num_batches))
    step = max(1, _SPLIT_BYTES // mean_bytes)
    for first in range(0, file.num_batches, step):
        yield FileSplit(path, first, min(first + step, file.num_batches), _UNKNOWN_ROWS)


@dataclass(frozen=True, eq=False)
class ArrowFormat(SplitFormat):
    """Record batches of `schema`; see :class:`ArrowFile` for `max_batch_bytes`."""

    name: ClassVar[str] = "from_arrow"
    schema: pa.Schema
    conversion: Conversion = Conversion()
    max_batch_bytes: int | None = field(default=None, metadata={"fingerprint": False})
    label = ""

    @property
    def spec(self) -> Any:
        return self.rows.spec

    @cached_property
    def rows(self) -> RowSchema:
        """Converter of record batches to blocks."""
        return RowSchema(self.schema, self.conversion)

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


def _fields(schema: pa.Schema) -> str:
    return f"{', '.join(f'{field.name}: {field.type}' for field in schema):.500}"
