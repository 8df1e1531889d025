"""Rows of embedding tables as a checkpoint has them: read when they are taken, some at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch

from raydist.checkpoints.entries import unpack_state
from raydist.checkpoints.read_tensors import read_rows, read_slices
from raydist.checkpoints.saved_checkpoint import SavedCheckpoint
from raydist.checkpoints.tensor_file import TensorFile
from raydist.parameter_servers.rows.saved_rows import parts_by_table
from raydist.pipelines.stored.directory_files import DirectoryFiles

__all__ = ["StoredColumn", "StoredRows"]


@final
@dataclass(frozen=True, slots=True)
class StoredColumn:
    """Something of every row that one server had (a `RowColumn`).

    Attributes:
        directory: Of the checkpoint.
        file: The one that has it.
        key: What it is called there.
        between: Called between two reads: raises where nobody wants any more of them.
    """

    directory: DirectoryFiles
    file: TensorFile
    key: str
    between: Callable[[], None]

    @property
    def shape(self) -> tuple[int, ...]:
        """Of all of it."""
        return self.file.tensors[self.key].slice_shape

    def pieces(self) -> Iterator[torch.Tensor]:
        """Some rows at a time. DataLossError where they are not as they were saved."""
        for rows in read_rows(self.directory, self.file, self.key):
            self.between()
            yield rows


@final
class StoredRows:
    """The saved rows of the tables of one module.

    Args:
        checkpoint: The one that has them.
        saved: Under which name.
        between: See `StoredColumn`.
    """

    def __init__(self, checkpoint: SavedCheckpoint, saved: str, between: Callable[[], None] = lambda: None) -> None:
        self._checkpoint = checkpoint
        self._saved = saved
        self._between = between
        self._scalars: dict[str, torch.Tensor] = {}

    def open(self) -> None:
        """Read the headers of all files, and what is no row: small. DataLossError where one is damaged or missing."""
        for file in self._checkpoint.files(self._saved):
            small = [key for key, place in file.tensors.items() if not place.shape]
            self._scalars |= read_slices(self._checkpoint.directory, file, small)

    def states(self, path: str) -> Sequence[Any]:
        """What was saved of the table of this path by each server, for `RowTable.load`. After `open`."""
        stored: dict[str, Any] = {
            key: StoredColumn(self._checkpoint.directory, file, key, self._between)
            for file in self._checkpoint.files(self._saved)
            for key in file.tensors
        }
        entries = parts_by_table(self._checkpoint.saved(self._saved).values, [path]).get(path, [])
        return [unpack_state(entry, stored | self._scalars) for entry in entries]
