"""Interfaces of file formats. A new format implements one of three interfaces:

- :class:`RecordFormat`, if a file is a sequence of records (bytes) without an index: `name`, `compression_type` and
`reader`. `RecordFilesOp.of(...)` makes a dataset of it, with names from a dataset and files read in turn.
- :class:`SplitFormat`, if a file has an index of its parts (such as a footer): `name`, `label`, `spec` and
`read_split`. `SplitFilesOp` makes a dataset of it that reads several pieces at a time, wherever stages run.
- :class:`TableFormat`, for all other rows: `name`, `label`, `spec`, and `open`, which returns a :class:`TableReader`.
`TableFilesOp` makes a dataset of it that reads one file after the other.

All of them are picklable descriptions: readers hold open files. Where a file is damaged, an error takes the place of
the data that cannot be read (see `data_loss` in `formats/files.py`), and reading continues after the damage.
`tests/contracts/file_format.py` tests this for every format; without an entry there its tests fail.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, final

from raydist.pipelines.elements.items import Item
from raydist.pipelines.elements.spec import BYTES, TensorSpec
from raydist.pipelines.formats.byte_streams import ByteStream, open_stream

__all__ = ["FileFormat", "FileSplit", "RecordFormat", "RecordReader", "SplitFormat", "TableFormat", "TableReader"]

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


class RecordReader(Protocol):
    """A reader of the records of one file, in order.

    Attributes:
        offset: Start of the next record, in decompressed bytes: a position from which to resume.
        index: Number of the next record.
        ended: True if nothing more can be read.
    """

    offset: int
    index: int
    ended: bool

    def read(self, limit: int, /) -> tuple[list[bytes], Exception | None]:
        """Return up to `limit` records and the error that follows them. At the end, return no record and no error."""

    def close(self) -> None:
        """Close the file."""


class RecordFormat(FileFormat):
    """A file format of records."""

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
        """Return the compression of one file."""
        return self.compression_type

    @abstractmethod
    def reader(self, stream: ByteStream, offset: int, index: int) -> RecordReader:
        """Return a reader of `stream` that begins at `offset`, the start of record `index`."""

    @final
    def open(self, path: str, offset: int, index: int) -> RecordReader:
        """Return a reader of the file at `path`; see :meth:`reader`."""
        stream = open_stream(path, self.compression_of(path))
        try:
            return self.reader(stream, offset, index)
        except BaseException:
            stream.close()
            raise


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


@final
@dataclass(frozen=True, slots=True)
class FileSplit:
    """A piece of a file.

    Attributes:
        path: Path of the file.
        first: Number of the first part (row group).
        end: Number of the last part, plus one.
        num_rows: Number of rows in these parts.
    """

    path: str
    first: int
    end: int
    num_rows: int


class SplitFormat(FileFormat):
    """A file format whose pieces can be read in any order."""

    @abstractmethod
    def read_split(self, split: FileSplit) -> list[Item]:
        """Return the rows of a piece, with errors in place of rows."""
