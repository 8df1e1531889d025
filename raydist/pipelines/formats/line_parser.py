"""What turns lines of text into rows of a table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import pyarrow as pa

__all__ = ["LineParser"]


class LineParser(ABC):
    """Parses lines that each hold one row. Picklable."""

    what: ClassVar[str]
    """What a line must be, for messages."""

    schema: pa.Schema
    """Of the batches."""

    has_header: bool
    """Whether the first line of a file is no row."""

    @abstractmethod
    def parse(self, lines: Sequence[bytes]) -> pa.RecordBatch:
        """The rows of at least one line, none of them blank. ArrowException or ValueError where one is wrong."""

    @abstractmethod
    def check_header(self, line: bytes) -> str | None:
        """What is wrong with the first line of a file, if anything."""
