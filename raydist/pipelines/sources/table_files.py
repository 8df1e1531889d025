"""Datasets of the rows of table files, read one file after the other."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from raydist.errors import FailedPreconditionError, InvalidArgumentError
from raydist.pipelines.elements.items import ElementError, Item, IteratorState
from raydist.pipelines.engine.op import IterContext
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.op_kinds import SourceOp
from raydist.pipelines.engine.producers import BorderIterator, ResumableProducer
from raydist.pipelines.formats.files import path_text
from raydist.pipelines.formats.opening import local_size, require_same_size
from raydist.pipelines.sources.file_format import TableFormat, TableReader

__all__ = ["TableFilesOp", "shown_paths", "table_paths"]


def table_paths(paths: Any, reader: str) -> tuple[str, ...]:
    """Return one path or several, as text. `reader` is the name of the caller, for messages."""
    several = not isinstance(paths, str | bytes | os.PathLike) and hasattr(paths, "__iter__")
    names = tuple(path_text(path) for path in (paths if several else [paths]))
    if not names:
        raise InvalidArgumentError(f"{reader} needs at least one path, got an empty list.")
    return names


def shown_paths(paths: Sequence[str]) -> str:
    """Describe files in few words; an empty text for a dataset that was saved without elements.

    >>> shown_paths(["a", "b", "c"])
    "'a' and 2 more"
    """
    more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
    return f"{paths[0]!r}{more}" if paths else ""


@dataclass(frozen=True, eq=False)
class TableFilesOp(SourceOp):
    """The rows of files."""

    paths: tuple[str, ...]  # the files, in order
    format: TableFormat  # format of the files
    num_rows: int  # number of rows in all files, or UNKNOWN_CARDINALITY
    gives_rows = True

    @property
    def name(self) -> str:
        return self.format.name

    @property
    def label(self) -> str:
        return f"{self.name}({', '.join(filter(None, (shown_paths(self.paths), self.format.label)))})"

    def cardinality(self) -> int:
        return self.num_rows

    def element_spec(self) -> Any:
        return self.format.spec

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return self.iterator()

    def iterator(self) -> OpIterator:
        """Return an iterator over the rows."""
        return BorderIterator(_TableRows(self))


class _TableRows(ResumableProducer):
    """The rows of one file after the other. Position: the number of the file, the reader's position, the size."""

    def __init__(self, op: TableFilesOp) -> None:
        self._op = op
        self._number = 0
        self._start: Sequence[int] = ()
        self._size = 0  # of the current file
        self._reader: TableReader | None = None

    def make(self, limit: int) -> Sequence[Item]:
        if self._number == len(self._op.paths):
            raise StopIteration
        return self._read(limit)

    def _read(self, limit: int) -> list[Item]:
        if self._reader is None:
            path = self._op.paths[self._number]
            try:
                self._reader = self._op.format.open(path, self._start)
            except Exception as error:  # such as a missing file or a directory
                self._next_file()
                return [ElementError(error)]
        items = self._reader.read(limit)
        if self._reader.ended:
            self._next_file()
        return items

    def _next_file(self) -> None:
        self.close()
        self._reader = None
        self._number += 1
        self._start = ()
        self._size = 0

    def border(self) -> IteratorState:
        at = list(self._start if self._reader is None else self._reader.position())
        if not self._size and self._number < len(self._op.paths):
            self._size = local_size(self._op.paths[self._number])
        return {"file": self._number, "at": at, "size": self._size}

    def restore(self, border: IteratorState) -> None:
        self._number, self._start = int(border["file"]), [int(number) for number in border["at"]]
        self._size = int(border["size"])
        if self._number > len(self._op.paths):
            raise FailedPreconditionError(
                f"A state must be loaded into the pipeline that it was saved from, but it is of file {self._number}, "
                f"and {self._op.name} has {len(self._op.paths)} files."
            )
        if self._number < len(self._op.paths):
            require_same_size(self._op.paths[self._number], self._size)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
