"""What a file format has to say for itself. A new one implements one of three interfaces:

- :class:`RecordFormat`, if a file is a sequence of records (bytes) that only reading finds: `name`, `compression_type`
  and `reader`. `RecordFilesOp.of(...)` makes a dataset of it, with names from a dataset and files read in turn.
- :class:`SplitFormat`, if a file says where its parts lie (a footer, an index): `name`, `label`, `spec` and
  `read_split`. `SplitFilesOp` makes a dataset of it whose pieces are read several at a time, wherever stages run.
- :class:`TableFormat`, for all other rows: `name`, `label`, `spec`, and `open`, which gives a :class:`TableReader`.
  `TableFilesOp` makes a dataset of it that reads one file after the other.

All of them are picklable descriptions: what is open belongs to readers. Where a file does not hold what it must, the
error stands at the place of what it spoils (see `data_loss` in `formats/files.py`), and what can be read behind it is
read. `tests/contracts/file_format.py` tests all that of every format; without an entry there its tests fail.
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
    """How elements are read from files. Picklable."""

    name: ClassVar[str]
    """The public function that makes the dataset."""

    @property
    @abstractmethod
    def label(self) -> str:
        """The arguments worth showing, behind the files; may be empty."""

    @property
    @abstractmethod
    def spec(self) -> Any:
        """Nest of TensorSpec of one element."""


class RecordReader(Protocol):
    """Reads the records of one file in order.

    Attributes:
        offset: Where the next record starts, in decompressed bytes: a place to go on from.
        index: Number of the next record.
        ended: Nothing more can be read.
    """

    offset: int
    index: int
    ended: bool

    def read(self, limit: int, /) -> tuple[list[bytes], Exception | None]:
        """Up to `limit` next records, and the error that stands at the place after them. Neither of both: the end."""

    def close(self) -> None:
        """Close the file."""


class RecordFormat(FileFormat):
    """How a file is cut into records."""

    compression_type: str | None
    """Of the whole file: None, "GZIP" or "ZLIB"."""

    @property
    @final
    def label(self) -> str:
        return f"compression_type={self.compression_type!r}"

    @property
    @final
    def spec(self) -> TensorSpec:
        return _RECORD

    def compression_of(self, path: str) -> str | None:
        """That of one file."""
        return self.compression_type

    @abstractmethod
    def reader(self, stream: ByteStream, offset: int, index: int) -> RecordReader:
        """A reader of `stream` that begins at `offset`, the start of record `index`."""

    @final
    def open(self, path: str, offset: int, index: int) -> RecordReader:
        """A reader of the file at `path`; see :meth:`reader`."""
        stream = open_stream(path, self.compression_of(path))
        try:
            return self.reader(stream, offset, index)
        except BaseException:
            stream.close()
            raise


class TableReader(ABC):
    """Reads the rows of one file in order."""

    ended: bool
    """Nothing more can be read."""

    @abstractmethod
    def position(self) -> list[int]:
        """Where the next call of `read` goes on: a few numbers that a fresh reader can start from."""

    @abstractmethod
    def read(self, limit: int) -> list[Item]:
        """The next rows, and the errors that stand in the place of rows. About `limit` where that saves work.

        Never raises. May be empty, at the end or elsewhere.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the file."""


class TableFormat(FileFormat):
    """How rows are read from files, from the first to the last."""

    @abstractmethod
    def open(self, path: str, position: Sequence[int]) -> TableReader:
        """A reader that goes on at `position`; from the beginning where that is empty."""


@final
@dataclass(frozen=True, slots=True)
class FileSplit:
    """A piece of a file.

    Attributes:
        path: The file.
        first: First of its parts (row groups).
        end: The part behind the last.
        num_rows: Rows in these parts.
    """

    path: str
    first: int
    end: int
    num_rows: int


class SplitFormat(FileFormat):
    """How pieces of files are read, in any order."""

    @abstractmethod
    def read_split(self, split: FileSplit) -> list[Item]:
        """The rows of a piece, and the errors that stand in the place of rows."""
