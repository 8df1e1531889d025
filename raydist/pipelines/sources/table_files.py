"""Datasets of the rows of files of tables, read one file after the other."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, final

from raydist.errors import FailedPreconditionError, InvalidArgumentError
from raydist.pipelines.elements.blocks import Block
from raydist.pipelines.elements.items import ElementError, Item, State
from raydist.pipelines.engine.op import IterContext, SourceOp
from raydist.pipelines.engine.op_iterator import OpIterator
from raydist.pipelines.engine.resume import Outbox
from raydist.pipelines.formats.files import path_text

__all__ = ["TableFilesOp", "TableFormat", "TableReader", "table_paths"]


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


class TableFormat(ABC):
    """How rows are read from files. Picklable."""

    name: ClassVar[str]
    """The method that makes the dataset."""

    @property
    @abstractmethod
    def label(self) -> str:
        """The arguments worth showing."""

    @property
    @abstractmethod
    def spec(self) -> Any:
        """Nest of TensorSpec of one row."""

    @abstractmethod
    def open(self, path: str, position: Sequence[int]) -> TableReader:
        """A reader that goes on at `position`; from the beginning where that is empty."""


def table_paths(paths: Any, reader: str) -> tuple[str, ...]:
    """One path or several, as text. `reader` is who asks, for messages."""
    several = not isinstance(paths, str | bytes | os.PathLike) and hasattr(paths, "__iter__")
    names = tuple(path_text(path) for path in (paths if several else [paths]))
    if not names:
        raise InvalidArgumentError(f"{reader} needs at least one path, got an empty list.")
    return names


@final
@dataclass(frozen=True, eq=False)
class TableFilesOp(SourceOp):
    """The rows of files.

    Attributes:
        paths: The files, in order.
        format: How they are read.
        num_rows: In all files, or UNKNOWN_CARDINALITY.
    """

    paths: tuple[str, ...]
    format: TableFormat
    num_rows: int

    @property
    def name(self) -> str:
        return self.format.name

    @property
    def label(self) -> str:
        more = f" and {len(self.paths) - 1} more" if len(self.paths) > 1 else ""
        first = repr(self.paths[0]) if self.paths else ""  # a dataset that was saved without elements
        return f"{self.name}({first}{more}{self.format.label})"

    def cardinality(self) -> int:
        return self.num_rows

    def element_spec(self) -> Any:
        return self.format.spec

    def make_iterator(self, ctx: IterContext) -> OpIterator:
        return TableFilesIterator(self)


@final
class TableFilesIterator(OpIterator):
    """Reads one file after the other. The state is the number of the file and the reader's position."""

    def __init__(self, op: TableFilesOp) -> None:
        self._op = op
        self._number = 0
        self._start: Sequence[int] = ()
        self._reader: TableReader | None = None
        self._outbox = Outbox(self._position())

    def next_block(self, limit: int) -> Block:
        while not self._outbox:
            if self._number == len(self._op.paths):
                raise StopIteration
            self._outbox.put(self._read(limit), self._position())
        return self._outbox.take(limit)

    def _read(self, limit: int) -> list[Item]:
        if self._reader is None:
            try:
                self._reader = self._op.format.open(self._op.paths[self._number], self._start)
            except Exception as error:  # a missing file, a directory, ...
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

    def _position(self) -> State:
        return {"file": self._number, "at": list(self._start if self._reader is None else self._reader.position())}

    def state_dict(self) -> State:
        return self._outbox.state_dict()

    def load_state_dict(self, state: State) -> None:
        position = self._outbox.load_state_dict(state)
        self._number, self._start = int(position["file"]), [int(number) for number in position["at"]]
        if self._number > len(self._op.paths):
            raise FailedPreconditionError(
                f"A state must be loaded into the pipeline that it was saved from, but it is of file {self._number}, "
                f"and {self._op.name} has {len(self._op.paths)} files."
            )

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
