"""Interfaces of file formats, and the formats of records. A new format implements one of three interfaces:

- :class:`TableFormat`, for rows that are read from the first to the last: `name`, `label`, `spec`, and `open`, which
returns a :class:`TableReader`. `TableFilesOp` makes a dataset of it. If `starts_anywhere`, input workers read pieces of
several files at a time.
- :class:`RecordFormat`, if the rows are records (bytes): `name`, `compression_type` and `reader`.
`RecordFilesOp.of(...)` makes a dataset of it, with names from a dataset and files read in turn.
- :class:`SplitFormat`, if a file has an index of its parts (such as a footer): `name`, `label`, `spec` and
`read_split`. `SplitFilesOp` makes a dataset of it that reads several pieces at a time, wherever stages run.

All of them are picklable descriptions: readers hold open files. Where a file is damaged, an error takes the place of
the data that cannot be read (see `data_loss` in `formats/files.py`), and reading continues after the damage.
`tests/contracts/file_format.py` tests this for every format; without an entry there its tests fail.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

from raydist.core.errors import InvalidArgumentError
from raydist.core.nest import LEAF
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.columns import object_column
from raydist.pipelines.elements.items import ElementError, Item
from raydist.pipelines.elements.spec import BYTES, TensorSpec
from raydist.pipelines.formats.byte_streams import ByteStream, open_stream
from raydist.pipelines.formats.files import require_limit
from raydist.pipelines.formats.records import FixedRecordReader, LineReader, RecordReader
from raydist.pipelines.formats.tar_samples import TarSampleReader
from raydist.pipelines.formats.tfrecord import TFRecordReader

_RECORD = TensorSpec((), BYTES)


class FileFormat(ABC):
    """Picklable description of a file format."""

    name: ClassVar[str]
    """The public function that makes the dataset."""

    @property
    @abstractmethod
    def label(self) -> str:
        """The main arguments apart from the files; may be empty."""

    @property
    @abstractmethod
    def spec(self) -> Any:
        """Nest of TensorSpec of one element."""


class TableReader(ABC):
    """A reader of the rows of one file, in order."""

    ended: bool
    """True if nothing more can be read."""

    @abstractmethod
    def position(self) -> list[int]:
        """Return the position of the next `read`: a few numbers from which a new reader can start."""

    @abstractmethod
    def read(self, limit: int) -> list[Item]:
        """Return the next rows, with errors in place of rows: about `limit`, or more where that saves work.

        Never raises. May return an empty list, at the end or elsewhere.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the file."""


class TableFormat(FileFormat):
    """A file format of rows that are read from the first to the last."""

    @abstractmethod
    def open(self, path: str, position: Sequence[int]) -> TableReader:
        """Return a reader that starts at `position`; from the beginning if `position` is empty."""

    def starts_anywhere(self, path: str) -> bool:
        """Return True if `open` at a position does not read what lies before it, so that workers may read pieces."""
        return False


class RecordFormat(TableFormat):
    """A file format of records: each row is bytes."""

    compression_type: str | None
    """Compression of the whole file: None, "GZIP" or "ZLIB"."""

    @property
    @final
    def label(self) -> str:
        return f"compression_type={self.compression_type!r}"

    @property
    @final
    def spec(self) -> TensorSpec:
        return _RECORD

    def compression_of(self, path: str) -> str | None:
        return self.compression_type

    @abstractmethod
    def reader(self, stream: ByteStream, offset: int, index: int) -> RecordReader:
        """Return a reader of `stream` that begins at `offset`, the start of record `index`."""

    @final
    def starts_anywhere(self, path: str) -> bool:
        return self.compression_of(path) is None

    @final
    def open(self, path: str, position: Sequence[int]) -> TableReader:
        return _RecordRows(self.open_records(path, *(position or (0, 0))))

    @final
    def open_records(self, path: str, offset: int, index: int) -> RecordReader:
        """Return a reader of the file at `path`; see :meth:`reader`."""
        stream = open_stream(path, self.compression_of(path))
        try:
            return self.reader(stream, offset, index)
        except BaseException:
            stream.close()
            raise


class _RecordRows(TableReader):
    """The records of a file as rows."""

    def __init__(self, reader: RecordReader) -> None:
        self.ended = False
        self._reader = reader

    def position(self) -> list[int]:
        return [self._reader.offset, self._reader.index]

    def read(self, limit: int) -> list[Item]:
        records, error = self._reader.read(limit)
        self.ended = self._reader.ended or (not records and error is None)
        items: list[Item] = [Block(LEAF, (_RECORD,), (object_column(records),), len(records))] if records else []
        return items if error is None else [*items, ElementError(error)]

    def close(self) -> None:
        self._reader.close()


@dataclass(frozen=True, slots=True)
class FileSplit:
    """A piece of a file."""

    path: str
    first: int  # number of the first part (row group)
    end: int  # number of the last part, plus one
    num_rows: int


class SplitFormat(FileFormat):
    """A file format whose pieces can be read in any order."""

    @abstractmethod
    def read_split(self, split: FileSplit) -> list[Item]:
        """Return the rows of a piece, with errors in place of rows."""


@dataclass(frozen=True)
class TFRecordFormat(RecordFormat):
    """Records with a length and checksums."""

    name: ClassVar[str] = "TFRecordDataset"
    compression_type: str | None
    max_record_bytes: int  # a record with a larger length counts as damaged
    # True if the user set the limit. Otherwise the size of a compressed file bounds its records.
    limit_given: bool = field(default=True, metadata={"fingerprint": False})

    def __post_init__(self) -> None:
        if self.max_record_bytes < 1:
            raise InvalidArgumentError(f"max_record_bytes must be >= 1, got {self.max_record_bytes!r}.")

    def reader(self, stream: ByteStream, offset: int, index: int) -> TFRecordReader:
        limit = self.max_record_bytes if self.limit_given else None
        return TFRecordReader(stream, offset=offset, index=index, max_record_bytes=limit)


@dataclass(frozen=True)
class TextLineFormat(RecordFormat):
    """Lines of text."""

    name: ClassVar[str] = "TextLineDataset"
    compression_type: str | None
    # A longer line counts as damaged; None: see :meth:`ByteStream.piece_limit`.
    max_line_bytes: int | None = field(default=None, metadata={"fingerprint": False})

    def __post_init__(self) -> None:
        require_limit("max_line_bytes", self.max_line_bytes)

    def reader(self, stream: ByteStream, offset: int, index: int) -> LineReader:
        return LineReader(stream, offset=offset, index=index, max_line_bytes=self.max_line_bytes)


@dataclass(frozen=True)
class FixedLengthFormat(RecordFormat):
    """Records of one size, between a header and a footer. Sizes count decompressed bytes."""

    name: ClassVar[str] = "FixedLengthRecordDataset"
    compression_type: str | None
    record_bytes: int
    header_bytes: int = 0
    footer_bytes: int = 0

    def __post_init__(self) -> None:
        if self.record_bytes < 1:
            raise InvalidArgumentError(f"record_bytes must be >= 1, got {self.record_bytes!r}.")
        if min(self.header_bytes, self.footer_bytes) < 0:
            raise InvalidArgumentError(
                f"header_bytes and footer_bytes must be >= 0, got {self.header_bytes!r} and {self.footer_bytes!r}."
            )

    def reader(self, stream: ByteStream, offset: int, index: int) -> FixedRecordReader:
        sizes = (self.record_bytes, self.header_bytes, self.footer_bytes)
        return FixedRecordReader(stream, *sizes, offset=offset, index=index)


@dataclass(frozen=True)
class TarFormat(RecordFormat):
    """Samples of tar files, in the layout of `tar_samples.py`."""

    name: ClassVar[str] = "from_tar"
    compression_type: str | None = field(default=None, init=False)  # depends on each file's name
    # A larger sample counts as damaged; None: see :meth:`ByteStream.piece_limit`.
    max_sample_bytes: int | None = field(default=None, metadata={"fingerprint": False})

    def __post_init__(self) -> None:
        require_limit("max_sample_bytes", self.max_sample_bytes)

    def compression_of(self, path: str) -> str | None:
        return "GZIP" if path.lower().endswith((".gz", ".tgz")) else None

    def reader(self, stream: ByteStream, offset: int, index: int) -> TarSampleReader:
        return TarSampleReader(stream, offset=offset, index=index, max_sample_bytes=self.max_sample_bytes)
